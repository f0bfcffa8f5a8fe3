"""The choice of the backend: the caller's, then ALTO_KERNELS, then the best for the device."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from alto.errors import SpecError, UnsupportedError
from alto.kernels import backend, choose_backend, reference, torch_backend

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALTO_KERNELS", raising=False)


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)


def test_torch_is_the_default() -> None:
    assert choose_backend() is torch_backend


@NEEDS_TRITON
def test_triton_is_taken_on_cuda() -> None:
    assert choose_backend(device="cuda").__name__ == "alto.kernels.triton_backend"
    assert choose_backend(device=torch.device("cuda", 1)).__name__ == "alto.kernels.triton_backend"


def test_torch_is_taken_on_cuda_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    assert choose_backend(device="cuda") is torch_backend


@pytest.mark.parametrize("value", ["reference", "torch", ""])
def test_the_environment_overrides_the_default(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ALTO_KERNELS", value)
    assert choose_backend() is (reference if value == "reference" else torch_backend)


def test_the_caller_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_KERNELS", "torch")
    assert choose_backend("reference") is reference


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_KERNELS", "trition")
    with pytest.raises(SpecError, match=r"ALTO_KERNELS: expected one of reference, torch, triton, found 'trition'"):
        choose_backend()


def test_triton_by_name_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    with pytest.raises(UnsupportedError, match=r"expected Triton, found it not installed; pip install"):
        choose_backend("triton")


@NEEDS_TRITON
def test_triton_by_name_needs_a_device_to_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match=r"expected a CUDA device, found none; unset it"):
        choose_backend("triton")


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("versions", "works"),
    [
        ({"triton": "3.6.0", "numpy": "2.4.0"}, False),
        ({"triton": "3.6.0", "numpy": "2.3.5"}, True),
        ({"triton": "3.7.0", "numpy": "2.4.6"}, True),
    ],
)
def test_an_interpreter_that_numpy_refuses_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], works: bool
) -> None:
    monkeypatch.setattr("alto.kernels.backend.version", versions.__getitem__)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if works:
        assert choose_backend("triton").__name__ == "alto.kernels.triton_backend"
    else:
        with pytest.raises(UnsupportedError, match=r"NumPy below 2\.4.*Triton 3\.6\.0, found 2\.4\.0; pip install"):
            choose_backend("triton")


def test_kernels_import_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import alto.kernels, alto.lora"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("name", ["torch", pytest.param("triton", marks=NEEDS_TRITON)])
def test_backends_offer_the_same_ops(name: str) -> None:
    assert sorted(reference.__all__) == sorted(choose_backend(name).__all__)
