"""Which backend is taken: what the caller says, then ALTO_KERNELS, then torch."""

from __future__ import annotations

import pytest

from alto.errors import SpecError
from alto.kernels import choose_backend, reference, torch_backend


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALTO_KERNELS", raising=False)


def test_torch_is_the_default() -> None:
    assert choose_backend() is torch_backend


@pytest.mark.parametrize("value", ["reference", "torch", ""])
def test_the_environment_overrides_the_default(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ALTO_KERNELS", value)
    assert choose_backend() is (reference if value == "reference" else torch_backend)


def test_the_caller_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_KERNELS", "torch")
    assert choose_backend("reference") is reference


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_KERNELS", "trition")
    with pytest.raises(SpecError, match=r"ALTO_KERNELS.*\['reference', 'torch'\].*'trition'"):
        choose_backend()


def test_backends_offer_the_same_ops() -> None:
    assert sorted(reference.__all__) == sorted(torch_backend.__all__)
