"""Launches that cache Triton's compiled kernels: Triton is asked again for anything that changes a binary, and nothing
else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from alto.kernels import triton_config
from alto.kernels.triton_config import KernelConfig, ceil_div, collected_launches, compiled_launches, launch

CONFIG = KernelConfig(constants={"BLOCK": 64}, num_warps=4, num_stages=2)


class Kernel:
    """A Triton kernel that records its launches, directly and as a compiled kernel."""

    arg_names = ("x_T", "y_T", "size", "FLAG", "BLOCK")
    do_not_specialize: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> dict[tuple[int, ...], Any]:
            self.runs.append((grid, arguments, options))
            return Compiled(self.launched)

        return run

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> dict[tuple[int, ...], Any]:
        return self[grid](*arguments, **options)


class Compiled(dict):  # type: ignore[type-arg]
    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.launched = launched

    def __missing__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launched.append((grid, arguments))


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the interpreter, the launches of other tests and the device, which may be changed."""
    device = SimpleNamespace(index=0)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: device.index))
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    monkeypatch.setattr(triton_config, "triton", SimpleNamespace(knobs=knobs, runtime=SimpleNamespace(driver=driver)))
    monkeypatch.setattr(triton_config, "_compiled", {})
    device.knobs = knobs
    return device


def tensors(dtype: torch.dtype = torch.float32, *, first: int = 0) -> tuple[Tensor, Tensor]:
    return torch.zeros(64), torch.zeros(64, dtype=dtype)[first:]


def test_triton_is_asked_once_and_the_compiled_kernel_has_the_same_arguments() -> None:
    kernel, (x_T, y_T), (others_T, again_T) = Kernel(), tensors(), tensors()
    launch(kernel, (7, 2, 1), (x_T, y_T), (5,), CONFIG, FLAG=True)
    assert kernel.runs == [((7, 2, 1), (x_T, y_T, 5), {"FLAG": True, **CONFIG.arguments})]
    assert kernel.launched == []
    launch(kernel, (3, 1, 1), (others_T, again_T), (5,), CONFIG, FLAG=True)
    assert len(kernel.runs) == 1
    [(grid, arguments)] = kernel.launched
    assert grid == (3, 1, 1)
    assert arguments[0] is others_T
    assert arguments[1] is again_T
    assert arguments[2:] == (5, True, 64)


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": tensors(torch.bfloat16)},
        {"tensors": tensors(first=1)},
        {"sizes": (16,)},
        {"FLAG": False},
        {"config": KernelConfig(constants={"BLOCK": 128}, num_warps=4, num_stages=2)},
        {"device": 1},
    ],
    ids=["dtype", "alignment", "number", "constant", "config", "device"],
)
def test_what_changes_a_binary_is_asked_for(changes: dict[str, Any], compiled_kernels: SimpleNamespace) -> None:
    kernel = Kernel()
    launch(kernel, (1, 1, 1), tensors(), (5,), CONFIG, FLAG=True)
    compiled_kernels.index = changes.pop("device", 0)
    given: dict[str, Any] = {"tensors": tensors(), "sizes": (5,), "config": CONFIG, "FLAG": True} | changes
    flag, config = given.pop("FLAG"), given["config"]
    for _ in range(2):
        launch(kernel, (1, 1, 1), **given, FLAG=flag)
    assert len(kernel.runs) == 2
    assert kernel.launched[0][1][2:] == (*given["sizes"], flag, config.constants["BLOCK"])


def test_another_kernel_has_a_binary_of_its_own() -> None:
    one, other = Kernel(), Kernel()
    for kernel in (one, other, one, other):
        launch(kernel, (1, 1, 1), tensors(), (5,), CONFIG, FLAG=True)
    assert [len(kernel.runs) for kernel in (one, other)] == [1, 1]


def test_the_interpreter_is_always_asked(compiled_kernels: SimpleNamespace) -> None:
    compiled_kernels.knobs.runtime.interpret = True
    kernel = Kernel()
    for _ in range(2):
        launch(kernel, (1, 1, 1), tensors(), (5,), CONFIG, FLAG=True)
    assert len(kernel.runs) == 2


@pytest.mark.parametrize(("dividend", "quotient"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2)])
def test_quotients_are_rounded_up(dividend: int, quotient: int) -> None:
    assert ceil_div(dividend, 64) == quotient


def test_collected_launches_are_not_made_and_find_their_kernel_compiled_later() -> None:
    kernel, given = Kernel(), tensors()

    def run() -> None:
        for size in (5, 6, 16, 5):
            launch(kernel, (7, 1, 1), given, (size,), CONFIG, FLAG=True)

    collected = collected_launches(run)
    assert len(collected) == 4
    assert (kernel.runs, kernel.launched) == ([], [])
    assert list(compiled_launches(collected)) == [(0, 2), (1, 2), (2, 2)], "5 and 6 are compiled alike, 16 otherwise"
    runs = len(kernel.runs)
    run()
    assert len(kernel.runs) == runs
    assert [arguments[2:] for _, arguments in kernel.launched] == [(size, True, 64) for size in (5, 6, 16, 5)]
    assert list(compiled_launches(collected_launches(run))) == []


def test_numbers_that_triton_does_not_compile_in_make_no_other_kernel() -> None:
    kernel = Kernel()
    kernel.do_not_specialize = ("size",)

    def run() -> None:
        for size in (1, 5, 16):
            launch(kernel, (7, 1, 1), tensors(), (size,), CONFIG, FLAG=True)

    assert list(compiled_launches(collected_launches(run)))[-1] == (1, 1)


def test_after_an_error_launches_are_made_again(compiled_kernels: SimpleNamespace) -> None:
    kernel = Kernel()

    def fail() -> None:
        raise RuntimeError("as the test wants it")

    with pytest.raises(RuntimeError, match="as the test wants it"):
        collected_launches(fail)
    launch(kernel, (1, 1, 1), tensors(), (5,), CONFIG, FLAG=True)
    assert len(kernel.runs) == 1


def test_the_interpreter_compiles_nothing(compiled_kernels: SimpleNamespace) -> None:
    compiled_kernels.knobs.runtime.interpret = True
    assert collected_launches(lambda: pytest.fail("there is nothing to collect")) == []
