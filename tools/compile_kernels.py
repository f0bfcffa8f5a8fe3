"""Compile every Triton kernel in every configuration it can be launched with, on a machine that needs no GPU, and
write what each takes of one to ``docs/kernels-compiled.md``.

    python tools/compile_kernels.py
    python tools/compile_kernels.py --check --arch 90 --rank 16 64 --dtypes bfloat16-float32

With ``--check`` nothing is written: the configurations named are compiled and compared with the page. Figures depend on
the compiler, so they are compared under the Triton version of the page only; a spill or too much shared memory fails
under any.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when the kernels are imported: an interpreted kernel cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from alto.kernels.triton_config import (
    KernelConfig,
    adamw_config,
    backward_weight_config,
    expand_config,
    shrink_config,
)
from alto.kernels.triton_kernels.adamw import adamw_kernel
from alto.kernels.triton_kernels.backward_weight import backward_weight_kernel
from alto.kernels.triton_kernels.expand import expand_kernel
from alto.kernels.triton_kernels.shrink import shrink_kernel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kernels-compiled.md"

ARCHES = (80, 90, 100)
RANKS = (16, 32, 64, 128)
"""Largest ranks of a bank; one in between is compiled as the next, a larger one as the last."""
DTYPES = {
    f"{wide}-{bank}": (getattr(torch, wide), getattr(torch, bank))
    for wide, bank in [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
    ]
}
"""Dtypes of base and bank."""
SHARED_LIMIT = 99 * 1024
"""Bytes of shared memory that a program may have on the smallest GPUs from sm_80 on."""

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, kw_only=True)
class Build:
    """One kernel as it is launched for one op.

    Attributes:
        wide: Dtype of the base's tensors; None for the optimizer, which sees none.
        unit_strides: Arguments that are 1, which Triton compiles in.
    """

    op: str
    kernel: Any
    config: KernelConfig
    wide: torch.dtype | None
    bank: torch.dtype
    unit_strides: tuple[str, ...]
    arch: int

    @property
    def name(self) -> str:
        """The first cells of its line."""
        constants = self.config.constants
        names = ("RANK_TILE", "BLOCK_T", "BLOCK_W") if self.wide else ("BLOCK",)
        tiles = "×".join(str(constants[name]) for name in names)
        dtypes = " / ".join(str(dtype).removeprefix("torch.") for dtype in (self.wide, self.bank) if dtype)
        return f"| {self.op} | {dtypes} | {tiles} | {self.config.num_warps} | {self.config.num_stages} | {self.arch} |"

    def source(self) -> ASTSource:
        signature, constants, attributes = {}, {}, {}
        for index, name in enumerate(self.kernel.arg_names):
            if name in self.config.constants or name in self.unit_strides:
                signature[name] = "constexpr"
                constants[(index,)] = self.config.constants.get(name, 1)
            else:
                signature[name] = self._type_of(name)
                attributes[(index,)] = ALIGNED
        return ASTSource(self.kernel, signature, constants, attributes)

    def _type_of(self, name: str) -> str:
        if name.startswith(("stride_", "num_")):
            return "i32"
        if name == "wide_TW":
            assert self.wide is not None
            return POINTERS[self.wide]
        if name.startswith(("blocks_", "segments_", "ranks_", "rows_")):
            return "*i32"
        if name.startswith("spans_"):
            return "*i64"
        if name.startswith(("scales_", "grad_scales_", "settings_")):
            return "*fp32"
        return POINTERS[self.bank]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one program takes: registers of a thread, bytes a thread spills, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def builds(arches: Iterable[int], ranks: Iterable[int], dtypes: Iterable[str]) -> Iterator[Build]:
    """Every build of the named architectures, ranks and dtypes, once each."""
    seen = set()
    for arch in arches:
        for build in _builds_of(arch, list(ranks), list(dtypes)):
            if build.name not in seen:
                seen.add(build.name)
                yield build


def _builds_of(arch: int, ranks: list[int], dtypes: list[str]) -> Iterator[Build]:
    for wide, bank in (DTYPES[name] for name in dtypes):
        for rank in ranks:
            # `A` has its ranks next to each other in memory, `B` its wide columns.
            for op, kernel, config, scaled, unit_stride in [
                ("shrink", shrink_kernel, shrink_config, False, "stride_weight_r"),
                ("expand", expand_kernel, expand_config, True, "stride_weight_w"),
                ("ds", shrink_kernel, shrink_config, True, "stride_weight_w"),
                ("dx", expand_kernel, expand_config, False, "stride_weight_r"),
                ("da", backward_weight_kernel, backward_weight_config, False, "stride_gradient_r"),
                ("db", backward_weight_kernel, backward_weight_config, True, "stride_gradient_w"),
            ]:
                yield Build(
                    op=op,
                    kernel=kernel,
                    config=config(rank, wide, bank, scaled=scaled),
                    wide=wide,
                    bank=bank,
                    unit_strides=("stride_wide_w", unit_stride),
                    arch=arch,
                )
    for bank in dict.fromkeys(DTYPES[name][1] for name in dtypes):
        config = adamw_config(bank, 16)
        yield Build(op="adamw", kernel=adamw_kernel, config=config, wide=None, bank=bank, unit_strides=(), arch=arch)


def compile_build(build: Build) -> Usage:
    """Compile, and ask the program's own binary what it takes."""
    target = GPUTarget("cuda", build.arch, 32)
    compiled = triton.compile(build.source(), target=target, options=build.config.options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", told)
    assert found, f"cuobjdump says it in other words now: {told}"
    registers, stack, local = map(int, found.groups())
    # These kernels have no arrays of their own: whatever lies on the stack was spilled.
    return Usage(registers=registers, spilled=max(stack, local), shared=compiled.metadata.shared)


def line(build: Build, usage: Usage) -> str:
    return f"{build.name} {usage.registers} | {usage.spilled} | {usage.shared / 1024:.1f} |"


def page(lines: Iterable[str]) -> str:
    """The whole page."""
    return "\n".join(
        [
            "# What the kernels take of a GPU",
            "",
            f"Generated by `tools/compile_kernels.py` with Triton {triton.__version__}, without a GPU; do not edit.",
            "Every configuration of every kernel, on sm_80 (A100), sm_90 (H100, H200) and sm_100 (B200). These are",
            "resources, not speeds.",
            "",
            "Tiles are ranks × tokens × wide columns; larger ranks launch, or loop over, more tiles. `ds` and `dx` are",
            "the two launches of `grouped_backward_input`, `da` and `db` those of `grouped_backward_weight`.",
            "",
            "| op | base / bank | tiles | warps | stages | sm | registers | spilled bytes | shared KiB |",
            "|---|---|---|---:|---:|---:|---:|---:|---:|",
            *lines,
            "",
        ]
    )


def faults(build: Build, usage: Usage) -> list[str]:
    """Why a build must not be shipped."""
    found = []
    if usage.spilled:
        found.append(f"spills {usage.spilled} bytes: {build.name}")
    if usage.shared > SHARED_LIMIT:
        found.append(f"takes {usage.shared} bytes of shared memory, above {SHARED_LIMIT}: {build.name}")
    return found


def differences(build: Build, usage: Usage, written: str) -> list[str]:
    """What the page says otherwise."""
    known = next((known for known in written.splitlines() if known.startswith(build.name)), None)
    if known is None:
        return [f"not in the page: {build.name}"]
    same_compiler = f"with Triton {triton.__version__}," in written
    return [f"page: {known}\nnow:  {line(build, usage)}"] if same_compiler and known != line(build, usage) else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHES, choices=ARCHES)
    parser.add_argument("--rank", type=int, nargs="+", default=RANKS, choices=RANKS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="of base and bank")
    asked = parser.parse_args()
    done = [(build, compile_build(build)) for build in builds(asked.arch, asked.rank, asked.dtypes)]
    problems = [fault for build, usage in done for fault in faults(build, usage)]
    if asked.check:
        written = asked.page.read_text(encoding="utf-8")
        problems += [difference for build, usage in done for difference in differences(build, usage, written)]
    else:
        asked.page.write_text(page(line(build, usage) for build, usage in done), encoding="utf-8")
    print(f"{len(done)} builds, {len(problems)} problems", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
