"""The kernels compiled for absent GPUs: their variants, and the resources that they use."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from alto.kernels import DropoutKey, TokenSchedule
from alto.lora import AdapterBank, AdapterShape, BankLayout, BankOptimizer, SlotUpdate, TargetModule
from alto.spec import JobConfig
from tools.occupancy import resident_programs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kernels-compiled.md"

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder for Triton's compiled kernels: the first test compiles, the others find the results."""
    return tmp_path_factory.mktemp("triton-cache")


def compile_kernels(cache: Path, *options: str, arch: str = "90") -> subprocess.CompletedProcess[str]:
    # The tiles of usual ranks, and the default dtypes.
    chosen = ["--arch", arch, "--narrow", "64", "--dtypes", "bfloat16-float32"]
    return subprocess.run(
        [sys.executable, "-m", "tools.compile_kernels", *chosen, *options],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow("kernels")
def test_kernels_compile_to_what_the_page_says(compiled_here: Path) -> None:
    done = compile_kernels(compiled_here, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("32 builds, 0 problems")


@pytest.mark.slow("kernels")
def test_a_page_that_says_otherwise_is_noticed(compiled_here: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "page.md"
    assert compile_kernels(compiled_here, "--page", str(wrong)).returncode == 0
    lines = wrong.read_text(encoding="utf-8").splitlines()
    da, dx = (next(i for i, line in enumerate(lines) if line.startswith(f"| {op} |")) for op in ("da", "dx"))
    lines[da] = re.sub(r"\d+ \| 0 \|", "255 | 0 |", lines[da])
    del lines[dx]
    wrong.write_text("\n".join(lines), encoding="utf-8")
    done = compile_kernels(compiled_here, "--check", "--page", str(wrong))
    assert done.returncode == 1
    assert "32 builds, 2 problems" in done.stdout
    assert "255 | 0 |" in done.stdout
    assert "not in the page: | dx |" in done.stdout


def test_the_page_has_every_configuration_and_none_spills() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if re.search(r"\| (80|90|100) \|", line)
    ]
    one_each = ("square sums", "total norms", "summed norms", "adamw")
    of_rows = [row for row in rows if row[0].split(",")[0] in one_each]
    assert len(of_rows) == 5 * 2 * 3, "two dtypes of banks, and adamw with two dtypes of moments"
    of_layers = [row for row in rows if row[0].split(",")[0] in ("rms norm", "swiglu", "rotary", "losses")]
    # Three widths of norms and of heads, forward and backward; the product; losses with and without their gradient.
    assert len(of_layers) == (2 * 3 + 2 * 3 + 2 + 2) * 3 * 3, "three dtypes, on three GPUs"
    found = [(op, dtypes, tiles.split("×")[0], arch) for op, dtypes, tiles, _, _, arch, *_ in rows]
    of_32_bits = ("float16 / float32", "float32 / float32")
    looping = ("expand", "dx", "dx, dropout")
    reduced = ("shrink", "shrink, dropout", "shrink, parts", "shrink, dropout, parts", "dy", "dy, parts")
    weights = ("da", "da, dropout")
    dtypes = ("bfloat16 / float32", "float16 / float32", "bfloat16 / bfloat16", "float32 / float32")
    expected = [
        (op, name, str(tile), arch)
        for name in dtypes
        for ops, tiles in (
            (looping, [32 if name.startswith("float32") else 64]),
            (reduced, [64] if name == "float16 / float32" else [64, 128] if name in of_32_bits else [64, 128, 256]),
            (weights, [64] if name == "float16 / float32" else [64, 128] if name in of_32_bits else [64, 128, 256]),
        )
        for op in ops
        for tile in tiles
        for arch in ("80", "90", "100")
    ]
    assert sorted(row for row in found if row[0] in looping + reduced + weights) == sorted(expected)
    assert len(found) == len(expected) + len(of_rows) + len(of_layers)
    assert {row[7] for row in rows} == {"0"}, "spilled bytes"
    assert max(float(row[8]) for row in rows) <= 99
    assert min(int(row[9]) for row in rows) >= 1


@pytest.mark.parametrize(
    ("registers", "shared", "num_warps", "arch", "programs"),
    [
        (168, 48 * 1024, 4, 90, 3),  # 168 registers take 5,376 of a warp: 3 programs by registers, 4 by shared memory
        (32, 0, 4, 90, 16),  # 64 warps
        (128, 48 * 1024, 4, 80, 3),  # 164 KiB, of which each takes 49
        (255, 90 * 1024, 8, 90, 1),
    ],
)
def test_how_many_programs_a_multiprocessor_holds(
    registers: int, shared: int, num_warps: int, arch: int, programs: int
) -> None:
    assert resident_programs(registers=registers, shared=shared, num_warps=num_warps, arch=arch) == programs


RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 64)
MODULES = tuple(
    TargetModule(name=name, in_features=64, out_features=width)
    for name, width in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64))
)
SHARED = (("q_proj", "k_proj", "v_proj"),)
DROPOUT = DropoutKey(probability=0.1, seed=1, step=2)
KERNELS = {"shrink", "expand", "dy", "dx", "da", "square_sums", "total_norms", "summed_norms", "adamw"}


class Launches:
    """Replaces a kernel, and records for each launch the key that Triton would look up among its compiled kernels."""

    def __init__(self, kernel: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import JITFunction, create_function_from_signature

        # Without a GPU the kernel is interpreted, and keeps its arguments.
        known = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._key = create_function_from_signature(known.signature, known.params, backend)
        self.keys: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            _, specialisation, options = self._key(*args, **kwargs)
            self.keys.add(f"{specialisation} {sorted(options.items())}")

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Launches]:
    from alto.kernels import triton_backend

    found = {name: Launches(getattr(triton_backend, f"{name}_kernel")) for name in KERNELS}
    for name, kernel in found.items():
        monkeypatch.setattr(triton_backend, f"{name}_kernel", kernel)
    return found


class Slots:
    """A bank whose groups are computed by the Triton backend."""

    def __init__(self, ranks: Sequence[int], *, rank_step: int) -> None:
        from alto.kernels import triton_backend

        layout = BankLayout(modules=MODULES, max_rank=max(ranks), rank_step=rank_step, shared_inputs=SHARED)
        self.ops = triton_backend
        self.bank = AdapterBank(layout, 3)
        self.bank.keep_square_sums(triton_backend.gradient_tiles(torch.float32, torch.float32))
        self.groups = [self.bank.operands(index, index) for index in range(len(layout.groups))]
        self.bank.ops = triton_backend
        self.optimizer = BankOptimizer(self.bank, ["adamw_torch"])

    def admit(self, residents: Sequence[tuple[int, tuple[TargetModule, ...]]]) -> None:
        for slot in list(self.bank._places):
            self.bank.release(slot)
        for slot, (rank, targets) in enumerate(residents):
            self.bank.occupy(slot, AdapterShape(rank=rank, targets=targets))

    def step(self, num_tokens: Sequence[int]) -> None:
        slots = range(len(num_tokens))
        schedule = TokenSchedule.build(slots, num_tokens, [2.0] * len(num_tokens), [DROPOUT] * len(num_tokens))
        for operands in self.groups:
            x_TK = torch.zeros(sum(num_tokens), operands.in_features)
            ys = [torch.zeros(sum(num_tokens), width) for width in operands.out_features]
            s_TQ = self.ops.grouped_shrink(x_TK, operands, schedule)
            self.ops.grouped_expand(s_TQ, operands, ys, schedule)
            self.ops.grouped_backward(x_TK, s_TQ, ys, operands, torch.zeros_like(x_TK), schedule)
        self.optimizer.gradient_norms(slots)
        self.bank.complete_gradients(slots)
        norms = self.optimizer.gradient_norms(slots)
        self.optimizer.step([SlotUpdate(slot=slot, config=JobConfig(), learning_rate=1e-3) for slot in slots], norms)


def groups_of_ranks() -> Iterator[list[tuple[int, tuple[TargetModule, ...]]]]:
    """Yield one to three of the ranks at a time, on all modules and on some."""
    targets = itertools.cycle((MODULES, MODULES[:1], MODULES[1:], MODULES[::3]))
    for size in (1, 2, 3):
        for ranks in itertools.combinations(RANKS, size):
            yield [(rank, next(targets)) for rank in ranks]


def test_no_change_of_residents_compiles_anything_again(launches: dict[str, Launches]) -> None:
    slots = Slots(RANKS, rank_step=1)
    numbers = itertools.cycle((1, 2, 15, 16, 17, 64, 100, 128, 1000))
    compiled: dict[str, list[int]] = defaultdict(list)
    slots.admit([(8, MODULES)] * 3)
    slots.step([5, 16, 1])
    for name, kernel in launches.items():
        compiled[name].append(len(kernel.keys))
    for residents in groups_of_ranks():
        slots.admit(residents)
        slots.step([next(numbers) for _ in residents])
    for name, kernel in launches.items():
        compiled[name].append(len(kernel.keys))
    assert all(first == last > 0 for first, last in compiled.values()), dict(compiled)


def test_ranks_divisible_by_eight_move_whole_vectors(launches: dict[str, Launches]) -> None:
    slots = Slots([8, 16], rank_step=8)
    slots.admit([(8, MODULES), (16, MODULES[:2])])
    assert [operands.alignment for operands in slots.groups] == [8, 8]


def test_the_order_in_which_squares_are_summed_is_compiled_in_without_the_sizes_of_rows(
    launches: dict[str, Launches],
) -> None:
    """The number of adjacent numbers decides which thread adds which: if another job's row length changed it, it would
    change the last bits of this job's norm."""
    from alto.kernels import triton_backend

    rows_ZP = torch.zeros(2, 40_016)
    for sizes in ([40_000, 16], [40_001, 16], [40_002, 16], [40_003, 7], [40_004, 1]):
        triton_backend.row_norms(rows_ZP, [0, 1], sizes)
    assert len(launches["square_sums"].keys) == len(launches["total_norms"].keys) == 1
