"""The kernels as compiled for GPUs that are not here: what they take is what ``docs/kernels-compiled.md`` says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.occupancy import resident_programs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kernels-compiled.md"

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder for Triton to keep what it compiles in: the first test compiles, the others find it there."""
    return tmp_path_factory.mktemp("triton-cache")


def compile_kernels(cache: Path, *options: str, arch: str = "90") -> subprocess.CompletedProcess[str]:
    # The tiles of usual ranks; the dtypes are the default's.
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
    assert len(of_rows) == 5 * 2 * 3, "of two sorts of bank, and adamw with moments of two sorts"
    of_layers = [row for row in rows if row[0].split(",")[0] in ("rms norm", "swiglu", "rotary", "losses")]
    # Three widths of norms and of heads, forward and backward; the product; losses with their gradient and without.
    assert len(of_layers) == (2 * 3 + 2 * 3 + 2 + 2) * 3 * 3, "of three dtypes, on three GPUs"
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
