"""A model's fields as a table: their values and meanings."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from alto.spec import Budget, EarlyExit, Search, SearchSpace
from alto.spec.job_config import MAPPING_FIELDS
from alto.spec.task_checks import Refit
from alto.spec.validation import SpecModel, _expected
from tools.make_reference.markdown import as_yaml, capitalised, code, markdown, sentence, table

__all__ = ["default_of", "keys_table", "kind_of"]

TYPES: Mapping[Any, str] = {
    EarlyExit: "true, false or a mapping",
    SearchSpace: "a mapping, or `auto`",
    Search: "the name of an algorithm, or a mapping",
    Refit: "a mapping",
    Budget: "a mapping",
    Mapping: "a mapping of text to text",
    tuple: "a list",
}
"""Words for values of types that ``alto.spec.validation`` has no word for."""

ONE_OR_MORE = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "report_to")
"""Fields that take one name or a list of them."""

OTHER_KINDS = {
    "min_kept": "a whole number ≥ 1, a list of them or null",
    "layers_to_transform": "a whole number ≥ 0 or a list of them",
    "rank_pattern": "a mapping of names to whole numbers",
    "alpha_pattern": "a mapping of names to numbers",
    "optim_args": "a mapping, or text such as `momentum=0.9,nesterov=true`",
    "lr_scheduler_kwargs": "a mapping",
    "warmup_steps": "a whole number ≥ 0, or a share below 1",
    "target_parameters": "a list of texts, or null",
    "id2label": "a list of texts, a mapping of whole numbers to texts, or null",
    "keys": "a list of texts, or null",
    "evaluation_share": "a finite number > 0 and ≤ 10, or `all`",
    "final_evaluations": "a list of two whole numbers, or null",
    "refit": "a mapping, or null",
}
"""Words for values of fields whose types do not describe them."""


def keys_table(model: type[SpecModel], aliases: Mapping[str, str]) -> str:
    """Return a table of a model's fields."""
    longer = _attributes(model)
    rows = []
    fields = {name: model.model_fields[name] for name in longer if name in model.model_fields} | model.model_fields
    for name, field in (fields if model is EarlyExit else model.model_fields).items():
        if name == "objective":
            continue  # the settings of a method have a table of their own
        others = sorted(alias for alias, canonical in aliases.items() if canonical == name)
        meaning = longer.get(name) or capitalised(field.description or "")
        rows.append([code(name), sentence(meaning, others), kind_of(name, field), default_of(name, field)])
    return table(("key", "meaning", "value", "default"), rows)


def _attributes(model: type) -> dict[str, str]:
    """Return the entries of a docstring under ``Attributes:``, by name; ``a, b: …`` counts for both."""
    _, found, rest = (inspect.getdoc(model) or "").partition("Attributes:\n")
    if not found:
        return {}
    base = model.__bases__[0]
    inherited = _attributes(base) if issubclass(base, SpecModel) and base is not SpecModel else {}
    block = textwrap.dedent(rest.split("\n\nRaises:")[0])
    entries = re.findall(r"^(\w[\w, ]*): (.*(?:\n .*)*)", block, flags=re.MULTILINE)
    texts = {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
    return inherited | {name: markdown(text) for name, text in texts.items()}


def kind_of(name: str, field: FieldInfo) -> str:
    if name in ONE_OR_MORE:
        return "text or a list of texts"
    if name == "dataset":
        return "text, or a list of [sources](data.md#mixtures)"
    if name == "mixture_weights":
        return "a mapping of names to numbers, or null"
    if name in OTHER_KINDS:
        return OTHER_KINDS[name]
    if name == "rules":
        return "a mapping of names to settings"
    if name == "at":
        return "`finalists` or a list of shares"
    if name == "select_by":
        return "`metric`, `eval_accuracy` or a [mapping](#scoring)"
    if name == "loss_weights":
        return "a list of numbers > 0, or null"
    plain = TYPES.get(get_origin(field.annotation) or field.annotation)
    literal = next((kind for kind in get_args(field.annotation) if get_origin(kind) is Literal), None)
    if name == "loss_type" and literal is not None:
        return f"{' or '.join(map(code, get_args(literal)))}, or a list of these"
    if plain is None and any(get_origin(kind) is tuple for kind in get_args(field.annotation)):
        plain = "a list of pairs, or null"
    return plain or re.sub(r"'(\w+)'", r"`\1`", _expected(field)).replace(">=", "≥").replace("<=", "≤")


def default_of(name: str, field: FieldInfo) -> str:
    if field.default_factory is not None:
        factor: Any = field.default_factory
        return f"`{factor({'r': 1}):g}*r`"
    if name == "name":
        return "from `dataset`"
    if field.is_required():
        return "**required**"
    if isinstance(field.default, EarlyExit):
        return "`true`"
    if isinstance(field.default, Search):
        return "`grid`"
    if isinstance(field.default, Budget):
        return "no limit"
    if isinstance(field.default, SearchSpace):
        return "none: one job"
    if name in MAPPING_FIELDS:
        return "`{}`"
    return "–" if field.default is None else f"`{as_yaml(field.default)}`"
