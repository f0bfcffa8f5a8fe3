"""Compiles, as a program without Triton's interpreter, the kernels of the ``lorafusion`` baseline for sm_90 in all
their configurations, and prints the resources of each as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when the kernels are imported

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from triton.compiler import ASTSource

from alto.kernels.triton_config import KernelConfig
from benchmarks.baselines.lorafusion_triton import LINEAR_CONFIGS, NARROW_CONFIGS, linear_kernel, narrow_kernel
from tools.compile_kernels import ALIGNED, compile_build

RANKS = 64
"""Largest width in the benchmark."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """A kernel as it is launched on bfloat16 tensors whose widths are divisible by 16."""

    name: str
    kernel: Any
    config: KernelConfig
    known: dict[str, Any]
    arch: int = 90

    def source(self) -> ASTSource:
        known = self.known | self.config.constants | {"RANKS": RANKS}
        signature, constants, attributes = {}, {}, {}
        for index, name in enumerate(self.kernel.arg_names):
            if name in known:
                signature[name], constants[(index,)] = "constexpr", known[name]
                continue
            signature[name] = _type_of(self.kernel, name)
            if name not in self.kernel.do_not_specialize:
                attributes[(index,)] = ALIGNED
        return ASTSource(self.kernel, signature, constants, attributes)


def _type_of(kernel: Any, name: str) -> str:
    if name.startswith(("num_", "stride_")):
        return "i32"
    if name in ("scales_B", "ds_TR", "db_PN"):
        return "*fp32"
    return "*i32" if name == "blocks_B4" else "*bf16"


def builds() -> Iterator[Build]:
    """Yield every configuration of the three kernels; the third is the first with transposed weights."""
    forward = {"stride_weight_c": 1, "HAS_BIAS": False, "IS_SCALED": True}
    backward = {"stride_weight_n": 1, "HAS_BIAS": False, "IS_SCALED": False}
    for config in LINEAR_CONFIGS:
        yield Build(name="y", kernel=linear_kernel, config=config, known=forward)
        yield Build(name="dx", kernel=linear_kernel, config=config, known=backward)
    for config in NARROW_CONFIGS:
        yield Build(name="ds, db", kernel=narrow_kernel, config=config, known={})


def main() -> None:
    found = []
    for build in builds():
        usage = compile_build(build)  # type: ignore[arg-type]
        tiles = {name: value for name, value in build.config.constants.items() if name != "GROUP"}
        row = {"kernel": build.name, **tiles, "warps": build.config.num_warps, "stages": build.config.num_stages}
        row |= {"registers": usage.registers, "spilled": usage.spilled, "shared": usage.shared}
        found.append(row)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
