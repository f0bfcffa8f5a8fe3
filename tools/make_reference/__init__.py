"""``docs/reference.md`` from the code: keys of ``alto.spec``, forms of ``alto.data``, commands of ``alto.cli``."""
