"""Numbers of hashes in the Triton kernels: one per element and kernel, for all modules that share the input. Narrow
columns beyond a program's tile are read, and hashed, once more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_groups import Group

from alto.errors import UnsupportedError
from alto.kernels import DropoutKey, TokenSchedule, choose_backend

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

KEYS = [DropoutKey(0.3, seed, step=4) for seed in (11, 12)]
NUM_TOKENS = (70, 64)
"""Tokens of the slots; blocks have 64."""
IN_FEATURES, OUT_FEATURES = 128, (40, 24, 24)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Numbers of hashed elements, padding included, by the kernel's module."""
    try:
        choose_backend("triton")
    except UnsupportedError as error:
        pytest.skip(str(error))
    if torch.cuda.is_available():
        pytest.skip("nothing is interpreted where there is a GPU")
    from alto.kernels.triton_kernels import backward_weight, expand, shrink

    counts: Counter[str] = Counter()
    for module in (shrink, expand, backward_weight):

        def counting(keys: Any, features: Any, threshold: Any, *, of: Any = module, ask: Any = module.is_kept) -> Any:
            found = ask(keys, features, threshold)
            counts[of.__name__.rpartition(".")[2]] += found.handle.data.size
            return found

        monkeypatch.setattr(module, "is_kept", counting)
    return counts


def step(ranks_ZM: list[list[int]], out_features: tuple[int, ...]) -> None:
    """Run forward and backward of one group."""
    ops = choose_backend("triton")
    group = Group(ranks_ZM, in_features=IN_FEATURES, out_features=out_features)
    schedule = TokenSchedule.build([0, 1], NUM_TOKENS, [1.5, 1.0], KEYS)
    x_TK = torch.randn(sum(NUM_TOKENS), IN_FEATURES, dtype=torch.float64)
    dys = [torch.randn(sum(NUM_TOKENS), width, dtype=torch.float64) for width in out_features]
    s_TQ = ops.grouped_shrink(x_TK, group.operands, schedule)
    ds_TQ = ops.grouped_backward_input(dys, group.operands, torch.empty_like(x_TK), schedule)
    ops.grouped_backward_weight(x_TK, s_TQ, dys, ds_TQ, group.operands, schedule)


def padded_elements() -> int:
    """Return the tokens in whole blocks, times features."""
    return sum(-(-count // 64) * 64 for count in NUM_TOKENS) * IN_FEATURES


@pytest.mark.parametrize(
    ("ranks_ZM", "out_features"),
    [
        ([[16], [8]], OUT_FEATURES[:1]),
        ([[16, 8, 16], [8, 8, 8]], OUT_FEATURES),
        ([[24, 0, 40], [8, 8, 8]], OUT_FEATURES),
    ],
    ids=["one module", "three modules", "64 columns"],
)
def test_each_kernel_hashes_an_element_once_for_all_modules_of_a_group(
    hashed: Counter[str], ranks_ZM: list[list[int]], out_features: tuple[int, ...]
) -> None:
    step(ranks_ZM, out_features)
    assert set(hashed) == {"shrink", "expand", "backward_weight"}
    assert hashed["shrink"] == hashed["expand"] == padded_elements()
    # Its blocks of tokens may be shorter.
    tokens = hashed["backward_weight"] / IN_FEATURES
    assert sum(NUM_TOKENS) <= tokens <= padded_elements() / IN_FEATURES


def test_more_columns_than_a_program_takes_are_hashed_once_more(hashed: Counter[str]) -> None:
    step([[64, 64], [8, 8]], OUT_FEATURES[:2])
    first, second = (-(-count // 64) * 64 * IN_FEATURES for count in NUM_TOKENS)
    assert hashed["shrink"] == 2 * first + second, "in float64 a program takes 64 columns"
    assert hashed["expand"] == first + second, "dx adds over all columns first"


COUNT_MULTIPLICATIONS = """
import sys
import triton
from tools import compile_kernels
from triton.backends.compiler import GPUTarget
for build in compile_kernels.builds([90], [64], ["bfloat16-float32"]):
    if build.dropout and not build.split:
        target = GPUTarget("cuda", build.arch, 32)
        ptx = triton.compile(build.source(), target=target, options=build.config.options).asm["ptx"]
        tile = build.config.constants["BLOCK_T"] * build.config.constants["BLOCK_W"]
        threads = 32 * build.config.num_warps
        print(build.op, ptx.count(str(0x7FEB352D)), tile // threads)
"""


@pytest.mark.slow("kernels")
def test_compiled_no_thread_hashes_what_another_one_does(tmp_path: Path) -> None:
    """Tiles of 64 narrow columns are compiled for two ranks, and those of dx once more for ranks above 64; each has the
    hashes of its own elements, and a few hashes of tokens."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT_MULTIPLICATIONS],
        cwd=Path(__file__).parents[2],
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"^(\w+) (\d+) (\d+)$", done.stdout, re.MULTILINE)
    num_variants = {"shrink": 2, "dx": 3, "da": 2}
    assert [op for op, _, _ in found] == list(num_variants)
    for op, multiplications, of_thread in found:
        own_elements = num_variants[op] * int(of_thread)
        assert own_elements < int(multiplications) <= 1.2 * own_elements, op
