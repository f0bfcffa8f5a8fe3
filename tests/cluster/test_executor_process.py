"""The environment of an executor."""

from __future__ import annotations

import os

import pytest

from alto.cluster.executor_process import _ALLOCATOR_VARIABLES, ProcessShape


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def allocator_of(devices: tuple[str, ...]) -> dict[str, str]:
    found = os.environ | ProcessShape(devices=devices, num_threads=2).environment()
    return {name: value for name, value in found.items() if name in _ALLOCATOR_VARIABLES}


def test_segments_of_memory_grow_on_a_gpu() -> None:
    assert allocator_of(("0",)) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_a_machine_without_a_gpu_is_left_alone() -> None:
    assert allocator_of(()) == {}


@pytest.mark.parametrize("name", _ALLOCATOR_VARIABLES)
def test_settings_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:256")
    assert allocator_of(("0", "1")) == {name: "max_split_size_mb:256"}
