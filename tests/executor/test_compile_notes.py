"""A run says which adapters are inside of compiled layers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from alto.executor.beginning import compile_notes


def _state(*, is_compiled: bool = True, is_padded: bool = False, groups: tuple[int, int] = (8, 8)) -> Any:
    backbone = SimpleNamespace(is_compiled=is_compiled, is_padded=is_padded)
    passes = SimpleNamespace(forward_context=SimpleNamespace(graph_groups=groups))
    return SimpleNamespace(context=SimpleNamespace(backbone=backbone), trainer=SimpleNamespace(passes=passes))


def test_without_torch_compile_nothing_is_said() -> None:
    assert compile_notes(_state(is_compiled=False)) == ()


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, r"for 8 of 8 inputs of linear modules\.$"),
        (
            {"groups": (6, 8)},
            r"for 6 of 8 inputs .* outside the .* as .* biases \(bias\) or magnitudes \(use_dora\)\.$",
        ),
        ({"groups": (0, 8), "is_padded": True}, r"for 0 of 8 inputs .* outside the compiled .* as rows are padded\.$"),
    ],
)
def test_what_is_inside_and_why_others_are_not(state: dict[str, Any], expected: str) -> None:
    [note] = compile_notes(_state(**state))
    assert re.search(expected, note), note
