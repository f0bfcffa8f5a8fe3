"""Strict YAML for task files: no duplicate keys, and limits on size and depth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from alto.base import quoted

MAX_VALUES = 50_000
"""Maximum number of keys and values in a task; values repeated by an alias count each time."""

_MAX_LEVELS = 32

_NO_SUCH_VALUE = (ValueError, LookupError, AttributeError, TypeError, ArithmeticError)
"""Errors that PyYAML does not translate when a text looks like an invalid date or number (2024-13-45), or contradicts
its tag."""


class NotYamlError(Exception):
    """A text is not YAML, or is larger than a task can be; the message states what was found."""


def read_yaml(text: str) -> Any:
    """Parse the YAML ``text``.

    ``1e-4``, ``1E3`` and ``.5e3`` are numbers as in YAML 1.2; in YAML 1.1, which PyYAML follows, they are text.

    Raises:
        NotYamlError: ``text`` is not YAML, gives a key twice, or has too many values or levels.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise NotYamlError(str(error)) from None


def write_yaml(value: object) -> str:
    """Return ``value`` as YAML that :func:`read_yaml` reads back: text that looks like a number is put in quotes."""
    text: str = yaml.dump(value, Dumper=_StrictDumper, sort_keys=False, allow_unicode=True)
    return text


def num_values(value: object) -> int:
    """Return the number of keys and values in ``value``, counted as for :data:`MAX_VALUES`."""
    if isinstance(value, Mapping):
        return 1 + len(value) + sum(map(num_values, value.values()))
    return 1 + (sum(map(num_values, value)) if isinstance(value, list | tuple) else 0)


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader for which a duplicate key is an error.

    Limits are checked while the text is read: deeply nested text would overflow the stack, and a few lines of nested
    aliases can expand to more values than fit into memory.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_values = self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._num_values += 1
        self._level += 1
        _check_bounds(self._num_values, self._level)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._level -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _measure(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # other nodes have no keys
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {quoted(key_node.value)} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _NO_SUCH_VALUE:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"the {kind} {quoted(node.value)} is not valid", node.start_mark
            ) from None


class _StrictDumper(yaml.SafeDumper):
    """A YAML dumper for :class:`_StrictLoader`."""


_EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
"""A number with an exponent; YAML 1.1 would require a point and a sign in it."""

for _kind in (_StrictLoader, _StrictDumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return the numbers of values and of levels in ``node``; aliases count as if they were expanded."""
    if id(node) in known:
        measured = known[id(node)]
        if measured is None:
            raise NotYamlError("an alias inside of the value that it repeats")
        return measured
    known[id(node)] = None
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    values, levels = 1, 1
    for part in parts:
        part_values, part_levels = _measure(part, known)
        values, levels = values + part_values, max(levels, 1 + part_levels)
    _check_bounds(values, levels)
    known[id(node)] = values, levels
    return values, levels


def _check_bounds(values: int, levels: int) -> None:
    if values > MAX_VALUES:
        raise NotYamlError(f"more than {MAX_VALUES} values (values by alias counted); sample them: {{min, max, num}}")
    if levels > _MAX_LEVELS:
        raise NotYamlError(f"more than {_MAX_LEVELS} levels of nested lists and mappings")
