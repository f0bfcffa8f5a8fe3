"""The computed step of the kernels: counts by hand, and a gate that notices a model of other kernels."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def roofline():
    from tools.kernel_model import roofline

    return roofline


def make_model(roofline, version="now", **changes):
    fields = {
        "chip": roofline.H200,
        "shape": SHAPE,
        "ranks": (16, 64),
        "passes": ((70, 20),),
        "trained": (50,),
        "sequences": ((70, 20),),
        "version": roofline.VERSIONS[version],
    }
    return roofline.StepModel(**(fields | changes))


def test_parameters_and_floor_by_hand(roofline) -> None:
    model = make_model(roofline)
    sides = (256 + 256) + 2 * (256 + 128) + (256 + 256) + 2 * (256 + 512) + (512 + 256)
    assert model.num_params == 3 * (16 + 64) * sides
    assert model.floor_s - model.frozen_s == pytest.approx(36 * model.num_params / 4.3e12)


def test_bytes_flops_and_programs_of_a_kernel_by_hand(roofline) -> None:
    kernels = {(kernel.group, kernel.kernel): kernel for kernel in make_model(roofline).kernels((70, 20))}
    shrink = kernels["q k v", "shrink"]
    columns = 3 * (16 * 70 + 64 * 20)
    assert shrink.num_flops == 2 * columns * 256
    assert shrink.num_bytes == 2 * 90 * 256 + 2 * 3 * (16 + 64) * 256 + 2 * columns
    assert (shrink.num_programs, shrink.grid) == (3, (3, 1, 1))  # blocks of 64 and 6 tokens, and of 20
    expand = kernels["q k v", "expand"]
    assert (expand.num_programs, expand.grid) == (2 * 4, (4, 2, 1))  # 256, 128 and 128 columns in tiles of 128
    assert kernels["down", "da"].grid == (4, 2, 1)
    dy, columns = kernels["gate up", "dy"], 16 * 70 + 64 * 20
    assert dy.num_flops == 2 * 2 * columns * 2 * 512
    assert dy.num_bytes == 2 * 90 * 2 * 512 + (2 + 4) * (16 + 64) * 2 * 512 + 2 * 2 * 2 * columns
    assert (dy.num_programs, dy.grid) == (2 * (2 + 2 * 4), (2 + 2 * 16, 2, 1))  # blocks, and tiles of 128 columns


def test_upstream_gradients_too_large_for_the_cache_are_read_twice(roofline) -> None:
    """This is for a slot whose tokens times 2,048 columns take more than an eighth of the cache."""
    lengths, shape = (1500, 1600), SHAPE | {"intermediate_size": 5000}
    now, twice = (
        {(kernel.group, kernel.kernel): kernel.num_bytes for kernel in model.kernels(lengths)}
        for model in (
            make_model(roofline, shape=shape),
            make_model(roofline, shape=shape, version="adapters read once for 256 tokens"),
        )
    )
    saved = twice["gate up", "ds"] + twice["gate up", "db"] - now["gate up", "dy"]
    assert saved == pytest.approx(2 * 1500 * 2 * 5000)
    assert twice["o", "ds"] + twice["o", "db"] - now["o", "dy"] == pytest.approx(2 * (1500 + 1600) * 256)


def test_parts_of_long_sums_by_hand(roofline) -> None:
    model = make_model(roofline, shape=SHAPE | {"intermediate_size": 5000})
    kernels = {(kernel.group, kernel.kernel): kernel for kernel in model.kernels((70, 20))}
    shrink, dy = kernels["down", "shrink"], kernels["gate up", "dy"]
    columns = 16 * 70 + 64 * 20
    assert shrink.num_bytes == 2 * 90 * 5000 + 2 * (16 + 64) * 5000 + 2 * columns + 3 * 4 * columns
    assert (shrink.num_programs, shrink.grid) == (3 * 3, (3, 1, 3))
    assert (dy.num_programs, dy.grid) == (2 * 2 * 3 + 2 * 2 * 40, (2 + 2 * 16, 2, 3))
    assert kernels["gate up", "shrink"].grid == (3, 1, 1)


def test_a_later_pass_of_a_step_adds_to_the_gradients_of_jobs_that_had_tokens(roofline) -> None:
    model = make_model(roofline)
    first, second = (
        {(kernel.group, kernel.kernel): kernel for kernel in model.kernels((70, 20), trained)}
        for trained in (None, [False, True])
    )
    assert second["o", "da"].num_bytes - first["o", "da"].num_bytes == 4 * 64 * 256
    assert second["o", "shrink"] == first["o", "shrink"]
    twice = make_model(roofline, passes=((70, 20), (0, 20)), trained=(50, 10), sequences=((70, 20), (20,)))
    once, again = model.kernels((70, 20)), model.kernels((0, 20), [True, True])
    adapters_s = 3 * sum(kernel.seconds for kernel in [*once, *again])
    # A sum of squares for each tile of 128 features; q, k and v have up to 192 columns side by side, and tiles of 64.
    num_sums = (4 + 2 + 1 + 1) + (2 + 2) + (2 + 4 + 4) + (4 + 2)
    optimizer_s = (30 * twice.num_params + 8 * 3 * 2 * num_sums) / 4.3e12 + 2 * 1.5e-6
    assert twice.step_s == pytest.approx(twice._frozen(accumulates=True) + adapters_s + optimizer_s)


def test_a_kernel_takes_its_longest_time(roofline) -> None:
    """A program alone gets its bytes through one multiprocessor."""
    chip = dataclasses.replace(roofline.H200, launch_s=0.0)
    model = make_model(roofline, chip=chip, ranks=(16,), passes=((5,),), sequences=((5,),))
    shrink = next(kernel for kernel in model.kernels((5,)) if (kernel.group, kernel.kernel) == ("o", "shrink"))
    assert shrink.limit == "busiest SM"
    moved_s = (2 * 5 * 256 + 16 * (2 * 256 + 2 * 5)) / chip.sm_bytes_per_s
    multiplied_s = 2 * 64 * 256 * 32 / (chip.flops_per_s / 132)  # a block of 64 tokens, 32 columns
    assert shrink.seconds == pytest.approx(max(moved_s, multiplied_s))


def test_each_version_is_faster_than_the_one_before(roofline) -> None:
    """It holds at the size of a real model; in a small one the frozen GEMMs may take longer to read the adapters'
    output."""
    from benchmarks.kernels.shapes import SHAPES

    large = {"shape": SHAPES["8b"], "ranks": (16, 64) * 8, "passes": ((140,) * 16,), "sequences": ((140,) * 16,)}
    steps = [make_model(roofline, version, **large).step_s for version in roofline.VERSIONS]
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) == len(steps) > 2


def test_the_gate_passes_and_notices_other_kernels(
    roofline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools.kernel_model import __main__ as kernels_model

    assert kernels_model.main(["--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "kernels-model.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    assert set(kernels_model.GOALS) <= set(found["figures"])
    assert all(found["figures"][name] < found["figures"][f"{name}_before"] for name in kernels_model.GOALS)
    monkeypatch.setattr(kernels_model, "BATCH_SIZES", {"1b": (1,), "8b": ()})  # one step is enough to notice
    monkeypatch.setitem(roofline.VERSIONS, "now", dataclasses.replace(roofline.VERSIONS["now"], output_tile=64))
    assert kernels_model.main(["--out", str(tmp_path)]) == 1
    assert "expected the launches" in capsys.readouterr().out
