"""A job's state on disk: what comes back is what went in, and no half-written folder is ever in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from alto.executor.checkpoint import read_state, replace_folder, write_state
from alto.lora import AdapterWeights, OptimizerState, TargetModule, write_adapter
from alto.spec import JobConfig

MODULES = (
    TargetModule(name="model.layers.0.self_attn.q_proj", in_features=6, out_features=4),
    TargetModule(name="model.layers.0.mlp.up_proj", in_features=6, out_features=5),
)


def adapter(seed: int) -> AdapterWeights:
    generator = torch.Generator().manual_seed(seed)
    return {
        module.name: (
            torch.randn(module.in_features, 3, generator=generator),
            torch.randn(3, module.out_features, generator=generator),
        )
        for module in MODULES
    }


def test_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    weights = adapter(1)
    state = OptimizerState(step=17, exp_avg=adapter(2), exp_avg_sq=adapter(3))

    def fill(folder: Path) -> None:
        write_adapter(folder, weights, JobConfig(r=3), "base", MODULES)
        write_state(folder, state)

    replace_folder(tmp_path / "last", fill)
    found_weights, found = read_state(tmp_path / "last")
    assert found.step == 17
    for expected_pairs, pairs in (
        (weights, found_weights),
        (state.exp_avg, found.exp_avg),
        (state.exp_avg_sq, found.exp_avg_sq),
    ):
        assert pairs.keys() == expected_pairs.keys()
        for name, pair in expected_pairs.items():
            assert all(torch.equal(matrix, other) for matrix, other in zip(pair, pairs[name], strict=True))


def test_replacing_leaves_nothing_of_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "job-000" / "best"
    replace_folder(folder, lambda new: (new / "old.txt").write_text("old"))
    replace_folder(folder, lambda new: (new / "new.txt").write_text("new"))
    assert [path.name for path in folder.iterdir()] == ["new.txt"]
    assert [path.name for path in folder.parent.iterdir()] == ["best"]


def test_a_failure_while_writing_keeps_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "best"
    replace_folder(folder, lambda new: (new / "file.txt").write_text("whole"))

    def fail(new: Path) -> None:
        (new / "file.txt").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_folder(folder, fail)
    assert (folder / "file.txt").read_text() == "whole"
    replace_folder(folder, lambda new: (new / "file.txt").write_text("again"))
    assert (folder / "file.txt").read_text() == "again"
