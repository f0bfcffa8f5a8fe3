"""The ``lorafusion`` baseline: its kernels (in Triton's interpreter without a GPU) and their replacement on a CPU,
against the same products in float64."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

pytest.importorskip("peft", reason="the baselines need the bench extra: pip install -e '.[bench]'")
pytest.importorskip("triton", reason="triton is not installed")

import torch
import triton
from gpu_stack import ROOT
from torch import Tensor

from alto.errors import UnsupportedError
from alto.kernels import choose_backend
from alto.kernels.triton_config import KernelConfig
from benchmarks.baselines import lorafusion, lorafusion_torch, lorafusion_triton
from benchmarks.baselines.lorafusion_pass import Segment, TokenBlocks
from benchmarks.baselines.stacked import BaseLayer, JobTokens, Stack
from benchmarks.kernels.gate import gate_failures, relative_distance
from benchmarks.kernels.lengths import RowLength
from benchmarks.kernels.shapes import SHAPES, random_model
from benchmarks.kernels.variants import build
from benchmarks.kernels.workload import Workload, random_rows


def _runs_here() -> list[pytest.MarkDecorator]:
    """Return no marks where Triton runs kernels, on a GPU or in a working interpreter; otherwise a skip."""
    try:
        choose_backend("triton")
    except UnsupportedError as error:
        return [pytest.mark.skip(reason=str(error))]
    return [pytest.mark.gpu] if torch.cuda.is_available() else []


CPU = torch.device("cpu")
KERNELS_RUN_ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = pytest.mark.parametrize(
    "ops",
    [pytest.param(lorafusion_torch, id="torch"), pytest.param(lorafusion_triton, id="triton", marks=_runs_here())],
)
RANKS = (7, 3, 16, 20, 1)
TOKENS = JobTokens(jobs=(1, 2, 3, 4), lengths=(37, 0, 64, 1), scales=(2.0, 0.5, 1.25, 3.0))
"""Tokens of jobs that fill blocks partly, fully, with one token, and with none; the first job is not in the pass."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set tiles so small that every loop and every group of blocks has several turns, the last of them partial."""
    tiles = {"BLOCK_T": 16, "BLOCK_N": 16, "GROUP": 3}
    for name, more in (("LINEAR_CONFIGS", {"BLOCK_C": 16}), ("NARROW_CONFIGS", {"TILES": 2})):
        config = KernelConfig(constants=tiles | more, num_warps=4, num_stages=2)
        monkeypatch.setattr(lorafusion_triton, name, (config,))


def use(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Let the baseline compute with ``ops``; return the device that its tensors must be on."""
    monkeypatch.setattr(lorafusion, "fused_ops", lambda device: ops)
    device = KERNELS_RUN_ON if ops is lorafusion_triton else CPU
    if not lorafusion.is_supported(device, torch.float32):
        pytest.skip(f"PyTorch's grouped GEMM does not multiply float32 on {device} here")
    return device


def products(ops: ModuleType, monkeypatch: pytest.MonkeyPatch, *, has_bias: bool) -> dict[str, Tensor]:
    """Return a layer's forward and backward results in float32."""
    device = use(ops, monkeypatch)
    x_TK, dy_TN, base, stack = layer(device, torch.float32, has_bias=has_bias)
    part = lorafusion.prepare(TOKENS, stack)
    y_TN, s_TR = lorafusion.forward(x_TK, base, stack, part)
    dx_TK = lorafusion.backward(dy_TN, x_TK, s_TR, base, stack, part, needs_dx=True)
    assert dx_TK is not None
    found = {"y": y_TN, "dx": dx_TK, "da": stack.da_QK, "db": stack.db_QN}
    return {name: tensor.cpu() for name, tensor in found.items()}


def expected_products(*, has_bias: bool) -> dict[str, Tensor]:
    """Return the same in float64, job by job, from the formula."""
    x_TK, dy_TN, base, stack = layer(CPU, torch.float64, has_bias=has_bias)
    y_TN, dx_TK = x_TK @ base.weight_NK.T, dy_TN @ base.weight_NK
    if base.bias_N is not None:
        y_TN += base.bias_N
    start = 0
    for job, length, scale in zip(TOKENS.jobs, TOKENS.lengths, TOKENS.scales, strict=True):
        tokens, rows = slice(start, start + length), stack.rows[job]
        x, dy, a, b = x_TK[tokens], dy_TN[tokens], stack.a_QK[rows], stack.b_QN[rows]
        y_TN[tokens] += scale * x @ a.T @ b
        dx_TK[tokens] += scale * dy @ b.T @ a
        stack.da_QK[rows] += scale * (dy @ b.T).T @ x
        stack.db_QN[rows] += scale * (x @ a.T).T @ dy
        start += length
    return {"y": y_TN, "dx": dx_TK, "da": stack.da_QK, "db": stack.db_QN}


def layer(device: torch.device, dtype: torch.dtype, *, has_bias: bool) -> tuple[Tensor, Tensor, BaseLayer, Stack]:
    """Return input, output gradient, a frozen layer of 36 in-features and 44 out-features, and its adapters, whose
    gradients are ones. The numbers are the same in every dtype."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    num_tokens, weight_NK, bias_N = sum(TOKENS.lengths), draw(44, 36), draw(44)
    stack = Stack(weight_NK, RANKS, lorafusion.rows_per_job(RANKS))
    stack.a_QK, stack.b_QN = draw(*stack.a_QK.shape), draw(*stack.b_QN.shape)
    stack.da_QK, stack.db_QN = torch.ones_like(stack.a_QK), torch.ones_like(stack.b_QN)
    base = BaseLayer(weight_NK, bias_N if has_bias else None)
    return draw(num_tokens, 36), draw(num_tokens, 44), base, stack


def distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_distance([found[name]], [tensor]) for name, tensor in expected.items()}


@OPS
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_products_are_those_of_float64(monkeypatch: pytest.MonkeyPatch, ops: ModuleType, has_bias: bool) -> None:
    found = distances(products(ops, monkeypatch, has_bias=has_bias), expected_products(has_bias=has_bias))
    assert max(found.values()) < 1e-6, found


@OPS
@pytest.mark.usefixtures("small_tiles")
def test_a_job_without_tokens_or_outside_of_the_pass_keeps_its_gradients(
    monkeypatch: pytest.MonkeyPatch, ops: ModuleType
) -> None:
    found = products(ops, monkeypatch, has_bias=False)
    (first, empty) = (slice(0, 7), slice(10, 26))
    assert all(bool((found[name][rows] == 1.0).all()) for name in ("da", "db") for rows in (first, empty))


@OPS
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("function", "argument", "wrong"),
    [
        ("fused_linear", 3, {"y", "dx"}),  # not the narrow tensor: the adapters' part alone is one percent off
        ("fused_linear", 4, {"y", "dx"}),
        ("fused_narrow", 1, {"db"}),
        ("fused_narrow", 2, {"da", "dx"}),
    ],
)
def test_the_comparison_finds_an_adapter_that_is_a_hundredth_off(
    monkeypatch: pytest.MonkeyPatch, ops: ModuleType, function: str, argument: int, wrong: set[str]
) -> None:
    right: Callable[..., object] = getattr(ops, function)

    def off(*arguments: object, **settings: object) -> object:
        changed = [value * 1.01 if i == argument else value for i, value in enumerate(arguments)]  # type: ignore[operator]
        return right(*changed, **settings)

    monkeypatch.setattr(ops, function, off)
    found = distances(products(ops, monkeypatch, has_bias=False), expected_products(has_bias=False))
    assert {name for name, distance in found.items() if distance > 1e-4} == wrong


@pytest.mark.slow("benchmarks")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@OPS
def test_the_gate_is_green_with_the_kernels(monkeypatch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    """Losses and each job's gradients for a whole model, in two passes that each lack a job."""
    device = use(ops, monkeypatch)
    rows = [RowLength(prompt=2, total=total) for total in (23, 5, 31, 17, 9, 12)]
    workload = Workload(ranks=(4, 16, 3), data=random_rows(rows, SHAPES["smoke"]["vocab_size"]), max_tokens_per_pass=48)
    assert len({batch.slots for batch in workload.batches(1, CPU)}) > 1
    base = random_model(SHAPES["smoke"], device=device, dtype=torch.float32)
    variant = build("lorafusion", base, workload)
    assert gate_failures({"lorafusion": variant}, base, workload, 1) == []
    right = ops.fused_narrow
    monkeypatch.setattr(ops, "fused_narrow", lambda dy, s, *rest: right(dy, s * 1.01, *rest))
    failures = gate_failures({"lorafusion": variant}, base, workload, 1)
    assert len(failures) == 3
    assert all("gradient of B: 1.0e-02 from" in failure for failure in failures)


def test_blocks_end_where_the_tokens_of_a_job_end() -> None:
    segments = [
        Segment(first=0, length=33, row=0, rank=4, scale=2.0),
        Segment(first=33, length=0, row=4, rank=8, scale=3.0),
        Segment(first=33, length=16, row=12, rank=2, scale=0.5),
    ]
    blocks_B4, scales_B = TokenBlocks(segments, num_ranks=16, device=CPU).table(16)
    assert blocks_B4.tolist() == [[0, 16, 0, 4], [16, 16, 0, 4], [32, 1, 0, 4], [33, 16, 12, 2]]
    assert scales_B.tolist() == [2.0, 2.0, 2.0, 0.5]


class TestTiles:
    """Tiles are chosen by measurement, once per shape."""

    def test_the_fastest_that_fits_is_taken(self) -> None:
        def measure(candidate: int) -> float:
            if candidate == 3:
                raise triton.OutOfResources(245760, 232448, "shared memory")
            return float((candidate - 4) ** 2)

        assert lorafusion_triton.fastest([1, 2, 3, 5], measure) == 5
        with pytest.raises(triton.OutOfResources):
            lorafusion_triton.fastest([3], measure)

    def test_each_shape_is_measured_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lorafusion_triton, "_chosen", {})
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
        monkeypatch.setattr(triton.testing, "do_bench", lambda run, **_: run() or float(len(tried)))
        tried: list[KernelConfig] = []
        configs = lorafusion_triton.LINEAR_CONFIGS
        for shape, lengths in ((64, (40, 50)), (64, (44, 47)), (32, (40, 50)), (64, (300, 500))):
            segments = [Segment(first=0, length=length, row=0, rank=4, scale=1.0) for length in lengths]
            blocks = TokenBlocks(segments, num_ranks=16, device=CPU)
            assert lorafusion_triton._tuned(configs, (shape,), blocks, tried.append) is configs[0]
        assert len(tried) == 3 * len(configs)


@pytest.mark.slow("minutes")
def test_kernels_compile_for_an_h100_without_spills() -> None:
    program = ROOT / "tests" / "support" / "compiled_lorafusion.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = {"y": lorafusion_triton.LINEAR_CONFIGS, "dx": lorafusion_triton.LINEAR_CONFIGS}
    for name, configs in (names | {"ds, db": lorafusion_triton.NARROW_CONFIGS}).items():
        rows = [row for row in found if row["kernel"] == name]
        assert len(rows) == len(configs)
        assert [row for row in rows if row["spilled"]] == []
        # The widest tiles in four stages are for adapters of up to rank 32; they do not fit at rank 64.
        assert [row for row in rows if row["shared"] > 227 * 1024] == [
            row
            for row in rows
            if (row.get("BLOCK_C"), row["BLOCK_N"], row["BLOCK_T"], row["stages"]) == (64, 256, 128, 4)
        ]
