"""Compile every Triton kernel in every configuration in which it can be launched, and write the resources of each to
``docs/kernels-compiled.md``. This needs no GPU.

    python -m tools.compile_kernels
    python -m tools.compile_kernels --check --arch 90 --narrow 16 64 --dtypes bfloat16-float32

With ``--check`` nothing is written: the named configurations are compiled and compared with the page. The figures
depend on the compiler, so they are compared only under the Triton version of the page. A spill or too much shared
memory fails under any version.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# This is read when the kernels are imported; an interpreted kernel cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from alto.kernels.operands import VECTOR_SIZE
from alto.kernels.triton_config import (
    KernelConfig,
    adamw_config,
    backward_weight_config,
    dy_config,
    expand_config,
    narrow_dtype,
    shrink_config,
    square_sums_config,
    summed_norms_config,
    total_norms_config,
    working_dtype,
)
from alto.kernels.triton_kernels.backward_weight import da_kernel
from alto.kernels.triton_kernels.dy import dy_kernel
from alto.kernels.triton_kernels.expand import dx_kernel, expand_kernel
from alto.kernels.triton_kernels.optimizer import (
    adamw_kernel,
    square_sums_kernel,
    summed_norms_kernel,
    total_norms_kernel,
)
from alto.kernels.triton_kernels.shrink import shrink_kernel
from tools.layer_builds import LayerBuild, layer_builds
from tools.occupancy import resident_programs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kernels-compiled.md"

ARCHES = (80, 90, 100)
NARROWS = (64, 128, 256)
"""Largest numbers of narrow columns of a slot: ranks of one module, or of all modules that share an input. A number in
between is compiled as the next larger one, and a larger number as the last one."""
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
"""Bytes of shared memory that a program may use on the smallest GPUs from sm_80 on."""

PRODUCTS = {
    "shrink": (shrink_kernel, shrink_config),
    "expand": (expand_kernel, lambda _, wide, bank: expand_config(wide, bank)),
    "dy": (dy_kernel, dy_config),
    "dx": (dx_kernel, lambda _, wide, bank: expand_config(wide, bank)),
    "da": (da_kernel, backward_weight_config),
}
OF_ROWS = {
    "square sums": (square_sums_kernel, square_sums_config),
    "total norms": (total_norms_kernel, total_norms_config),
    "summed norms": (summed_norms_kernel, summed_norms_config),
    "adamw": (adamw_kernel, adamw_config),
}

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, kw_only=True)
class Build:
    """One kernel as it is launched for one op, on adapters that are aligned for vector loads.

    Attributes:
        op: Key of ``PRODUCTS`` or ``OF_ROWS``.
        rounds: Whether AdamW's moments are bfloat16, rounded at random; otherwise they have the dtype of the bank.
        wide: Dtype of the base's tensors; None for the optimizer, which reads none of them.
    """

    op: str
    config: KernelConfig
    dropout: bool
    split: bool
    rounds: bool = False
    wide: torch.dtype | None
    bank: torch.dtype
    arch: int

    @property
    def kernel(self) -> Any:
        return (PRODUCTS | OF_ROWS)[self.op][0]

    @property
    def name(self) -> str:
        """First cells of its line in the page."""
        constants = self.config.constants
        tiles = "×".join(str(constants[name]) for name in ("TILE", "BLOCK_T", "BLOCK_W", "BLOCK") if name in constants)
        dtypes = " / ".join(str(dtype).removeprefix("torch.") for dtype in (self.wide, self.bank) if dtype)
        variants = {"dropout": self.dropout, "parts": self.split, "bfloat16 moments": self.rounds}
        op = ", ".join([self.op, *(name for name, is_so in variants.items() if is_so)])
        return f"| {op} | {dtypes} | {tiles} | {self.config.num_warps} | {self.config.num_stages} | {self.arch} |"

    def source(self) -> ASTSource:
        has_working = working_dtype(self.wide or torch.bfloat16, self.bank) is not None
        known = self.config.constants | {
            "ALIGNMENT": VECTOR_SIZE,
            "DROPOUT": self.dropout,
            "IS_SPLIT": self.split,
            "HAS_WORKING": has_working,
            "ROUNDS_AT_RANDOM": self.rounds,
            "HAS_SUMS": True,
        }
        signature, constants, attributes = {}, {}, {}
        for index, name in enumerate(self.kernel.arg_names):
            # The features of a token are adjacent, which Triton compiles in.
            if name in known or (name.startswith("stride_") and name.endswith(("_k", "_n"))):
                signature[name] = "constexpr"
                constants[(index,)] = known.get(name, 1)
            else:
                signature[name] = self._type_of(name)
                if name not in self.kernel.do_not_specialize:
                    attributes[(index,)] = ALIGNED
        return ASTSource(self.kernel, signature, constants, attributes)

    def _type_of(self, name: str) -> str:
        if name.startswith(("stride_", "num_", "first_")) or name == "number":
            return "i32"
        if name.startswith(("x_", "y_", "dx_", "dy_")):
            assert self.wide is not None
            return POINTERS[self.wide]
        if name in ("s_TQ", "ds_TQ"):
            assert self.wide is not None
            return POINTERS[narrow_dtype(self.wide, self.bank)]
        if name.startswith("planes_"):
            # If there is one part, this is the narrow tensor itself.
            assert self.wide is not None
            return "*fp32" if self.split else POINTERS[narrow_dtype(self.wide, self.bank)]
        if name.startswith(("blocks_", "chunks_", "segments_", "items_", "adds_", "counters")):
            return "*i32"
        if name.startswith(("places_", "rows_")):
            return "*i64"
        if name == "factors_Z2":
            return "*fp64"
        if name.startswith(("grad_scales_", "settings_", "sums_", "norms_")):
            return "*fp32"
        if name.startswith("exp_avg_") and self.rounds:
            return "*bf16"
        if name == "working_ZP" or (name == "params_ZP" and self.wide is not None):
            # Copies for products, which the optimizer writes if the base is bfloat16.
            return POINTERS[working_dtype(self.wide or torch.bfloat16, self.bank) or self.bank]
        return POINTERS[self.bank]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Resources of one program: registers per thread, spilled bytes per thread, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def builds(arches: Iterable[int], narrows: Iterable[int], dtypes: Iterable[str]) -> Iterator[Build]:
    """Yield every build of the named architectures, narrow columns and dtypes, once each."""
    seen = set()
    for arch in arches:
        for build in _builds_of(arch, list(narrows), list(dtypes)):
            if build.name not in seen:
                seen.add(build.name)
                yield build


def _builds_of(arch: int, narrows: list[int], dtypes: list[str]) -> Iterator[Build]:
    for wide, bank in (DTYPES[name] for name in dtypes):
        for narrow in narrows:
            for op, (kernel, config_of) in PRODUCTS.items():
                config = config_of(narrow, wide, bank)
                for dropout in (False, True) if "DROPOUT" in kernel.arg_names else (False,):
                    for split in (False, True) if "IS_SPLIT" in kernel.arg_names else (False,):
                        yield Build(op=op, config=config, dropout=dropout, split=split, wide=wide, bank=bank, arch=arch)
    for bank in dict.fromkeys(DTYPES[name][1] for name in dtypes):
        for op, (kernel, config_of) in OF_ROWS.items():
            for rounds in (False, True) if "ROUNDS_AT_RANDOM" in kernel.arg_names else (False,):
                build = {"op": op, "config": config_of(bank), "rounds": rounds, "bank": bank, "arch": arch}
                yield Build(**build, dropout=False, split=False, wide=None)


def compile_build(build: Build | LayerBuild) -> Usage:
    """Compile a build, and read the resources from the binary of the program."""
    target = GPUTarget("cuda", build.arch, 32)
    compiled = triton.compile(build.source(), target=target, options=build.config.options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        output = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", output)
    assert found, f"cuobjdump has another output format now: {output}"
    registers, stack, local = map(int, found.groups())
    # These kernels have no arrays of their own, so everything on the stack was spilled.
    return Usage(registers=registers, spilled=max(stack, local), shared=compiled.metadata.shared)


def line(build: Build | LayerBuild, usage: Usage) -> str:
    programs = resident_programs(
        registers=usage.registers, shared=usage.shared, num_warps=build.config.num_warps, arch=build.arch
    )
    return f"{build.name} {usage.registers} | {usage.spilled} | {usage.shared / 1024:.1f} | {programs} |"


def page(lines: Iterable[str]) -> str:
    """Return the whole page."""
    return "\n".join(
        [
            "# Resources of the kernels on a GPU",
            "",
            f"Generated by `tools/compile_kernels.py` with Triton {triton.__version__}, without a GPU; do not edit.",
            "The table has every configuration of every kernel, on sm_80 (A100), sm_90 (H100, H200) and sm_100 (B200).",
            "It shows resources, not speeds.",
            "",
            "Tiles are narrow columns × tokens × wide columns. The narrow columns are the ranks of a slot; in",
            "`shrink`, `dx` and `da` they are the ranks of all modules that share an input. If there are more narrow",
            "columns than a tile has, the kernel launches more tiles or loops over them. `dy`, `dx` and `da` are the",
            "launches of `grouped_backward`; `dy` computes `ds` and `db`, and the table shows the tiles of `ds`.",
            "`square sums` and `total norms` are the launches of `row_norms`, and `summed norms` is the launch of",
            "`summed_norms`. `parts` means sums over more than 2,048 wide columns. `bfloat16 moments` means that",
            "AdamW rounds the moments at random (`optim_state_dtype: bfloat16`). Adapters are aligned for vector",
            "loads, as with ranks divisible by 8.",
            "",
            "`rms norm`, `swiglu`, `rotary` and `losses` are kernels of the base's layers and output head. Their dtype",
            "is the dtype of the base. Their tiles are rows × columns; for `rotary`, tokens × heads × pairs.",
            "",
            "| op | base / bank | tiles | warps | stages | sm | registers | spilled bytes | shared KiB | per SM |",
            "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
            *lines,
            "",
        ]
    )


def faults(build: Build | LayerBuild, usage: Usage) -> list[str]:
    """Return the reasons why a build must not be shipped."""
    found = []
    if usage.spilled:
        found.append(f"spills {usage.spilled} bytes: {build.name}")
    if usage.shared > SHARED_LIMIT:
        found.append(f"takes {usage.shared} bytes of shared memory, above {SHARED_LIMIT}: {build.name}")
    return found


def differences(build: Build | LayerBuild, usage: Usage, written: str) -> list[str]:
    """Return the differences from the page."""
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
    parser.add_argument("--narrow", type=int, nargs="+", default=NARROWS, choices=NARROWS, help="columns of a slot")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="of base and bank")
    options = parser.parse_args()
    bases = [DTYPES[name][0] for name in options.dtypes]
    wanted = [*builds(options.arch, options.narrow, options.dtypes), *layer_builds(options.arch, bases)]
    # Processes, because the compiler holds Python's lock.
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        done = list(zip(wanted, pool.imap(compile_build, wanted), strict=True))
    problems = [fault for build, usage in done for fault in faults(build, usage)]
    if options.check:
        written = options.page.read_text(encoding="utf-8")
        problems += [difference for build, usage in done for difference in differences(build, usage, written)]
    else:
        options.page.write_text(page(line(build, usage) for build, usage in done), encoding="utf-8")
    print(f"{len(done)} builds, {len(problems)} problems", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
