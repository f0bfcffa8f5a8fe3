"""States on disk: they are read back unchanged, and any failure leaves the committed state complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alto.errors import RunWriteError
from alto.executor.checkpoint import StateStore, read_state, write_state
from alto.lora import AdapterWeights, ModuleNames, OptimizerState, TargetModule, write_adapter
from alto.runs import RunDir
from alto.spec import JobConfig

MODULES = (
    TargetModule(name="model.layers.0.self_attn.q_proj", in_features=6, out_features=4),
    TargetModule(name="model.layers.0.mlp.up_proj", in_features=6, out_features=5),
)
NAMES = ModuleNames(modules=frozenset(module.name for module in MODULES), model_type="llama")


def adapter(seed: int) -> AdapterWeights:
    generator = torch.Generator().manual_seed(seed)
    return AdapterWeights(
        {
            module.name: (
                torch.randn(module.in_features, 3, generator=generator),
                torch.randn(3, module.out_features, generator=generator),
            )
            for module in MODULES
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(RunDir(tmp_path))


def text(content: str) -> Callable[[Path], None]:
    """Return a function that fills a folder with one file."""

    def fill(folder: Path) -> None:
        (folder / "weights.txt").write_text(content)

    return fill


def content_of(store: StateStore, job: str = "a") -> str:
    return (store.folder(job, "last") / "weights.txt").read_text()


def store_run(store: StateStore) -> RunDir:
    return RunDir(store.folder("a", "last").parents[2])


def test_state_comes_back_bit_for_bit(store: StateStore) -> None:
    weights = adapter(1)
    tensors = {
        f"{name}.{which}.{part}": matrix
        for part, moments in (("exp_avg", adapter(2)), ("exp_avg_sq", adapter(3)))
        for name, pair in moments.items()
        for which, matrix in zip("AB", pair, strict=True)
    }
    quantised = {"up_proj.A.state1": torch.arange(18, dtype=torch.uint8).view(3, 6)}
    state = OptimizerState(step=17, tensors=tensors | quantised)

    def fill(folder: Path) -> None:
        write_adapter(folder, weights, JobConfig(r=3), "base", NAMES)
        write_state(folder, state)

    store.save("a", "last", 17, fill)
    found_weights, found = read_state(store.folder("a", "last"))
    assert found.step == 17
    assert found_weights.keys() == weights.keys()
    for name, pair in weights.items():
        assert all(torch.equal(matrix, other) for matrix, other in zip(pair, found_weights[name], strict=True))
    assert found.tensors.keys() == state.tensors.keys()
    for name, tensor in state.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_what_was_not_committed_is_undone(store: StateStore) -> None:
    store.save("a", "last", 1, text("one"))
    store.seal()
    store.commit()
    for step in (2, 3):
        store.save("a", "last", step, text(f"step {step}"))
    store.save("b", "last", 3, text("new"))
    assert content_of(store) == "step 3"
    assert store.restore({("a", "last"): 1})
    assert content_of(store) == "one"
    assert not store.folder("b", "last").exists()


def test_a_predecessor_is_kept_until_its_successor_is_durable(store: StateStore) -> None:
    folder = store.folder("a", "last")
    for step, beside in ((1, {"last"}), (2, {"last", "last.previous"})):
        store.save("a", "last", step, text(f"step {step}"))
        assert {path.name for path in folder.parent.iterdir()} == beside
        store.seal()
        store.remove_predecessors()
        store.commit()
        assert [path.name for path in folder.parent.iterdir()] == ["last"]
    assert store.restore({("a", "last"): 2})
    assert content_of(store) == "step 2"


def test_a_predecessor_of_a_state_that_was_not_saved_again_stays(store: StateStore) -> None:
    """The checkpoint does not mention this state."""
    for step in (1, 2):
        store.save("a", "last", step, text(f"step {step}"))
        if step == 1:
            store.seal()
            store.commit()
    other = StateStore(store_run(store))
    other.save("b", "last", 1, text("b"))
    other.remove_predecessors()
    assert store.restore({("a", "last"): 1})
    assert content_of(store) == "step 1"


def test_a_state_is_durable_only_from_the_checkpoint_on(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for step in (1, 2):
        store.save("a", "last", step, text(f"step {step}"))
    store.save("b", "last", 2, text("ended"))
    assert not synced
    assert not StateStore(store_run(store)).restore({("a", "last"): 2}), "nothing is known about its files"
    store.save("a", "last", 3, text("step 3"))
    store.save("b", "last", 3, text("ended"))
    store.seal(unneeded=[("b", "last")])
    assert len(synced) == 4, "two files and two folders of the last state of the job that goes on"
    store.seal()
    assert len(synced) == 4
    assert StateStore(store_run(store)).restore({("a", "last"): 3})


def test_a_state_that_another_rank_saved_later_is_sealed_there(store: StateStore) -> None:
    other = StateStore(store_run(store))
    store.save("a", "last", 1, text("here"))
    store.saved_elsewhere("a", "last")
    other.save("a", "last", 2, text("there"))
    other.seal()
    store.seal()  # does not write the step of its own state
    assert store.restore({("a", "last"): 2})
    assert content_of(store) == "there"


def test_a_restored_checkpoint_leaves_nothing_beside_it(store: StateStore) -> None:
    """A process may have died before it removed the previous state."""
    for step in (1, 2):
        store.save("a", "last", step, text(f"step {step}"))
        store.seal()
        store.commit()
    assert store.restore({("a", "last"): 2})
    assert [path.name for path in store.folder("a", "last").parent.iterdir()] == ["last"]


def test_a_job_that_did_not_change_belongs_to_both_checkpoints(store: StateStore) -> None:
    store.save("a", "last", 5, text("parked"))
    for step in (1, 2):
        store.save("b", "last", step, text(f"step {step}"))
        store.seal()
        store.remove_predecessors()
        store.commit()
    assert store.restore({("a", "last"): 5, ("b", "last"): 2})
    assert (content_of(store, "a"), content_of(store, "b")) == ("parked", "step 2")


@pytest.mark.parametrize(
    "damage", ["truncated", "flipped", "missing", "no state.json", "torn state.json", "other step"]
)
def test_a_damaged_state_is_recognised(store: StateStore, damage: str) -> None:
    store.save("a", "last", 1, text("weights"))
    store.seal()
    store.commit()
    folder = store.folder("a", "last")
    match damage:
        case "truncated":
            (folder / "weights.txt").write_text("weig")
        case "flipped":
            (folder / "weights.txt").write_text("weighty")
        case "missing":
            (folder / "weights.txt").unlink()
        case "no state.json":
            (folder / "state.json").unlink()
        case "torn state.json":
            (folder / "state.json").write_text('{"step": 1')
        case "other step":
            assert not store.restore({("a", "last"): 2})
            return
    assert not store.restore({("a", "last"): 1})


def test_a_process_that_died_between_two_renames_lost_nothing(store: StateStore) -> None:
    store.save("a", "last", 1, text("one"))
    store.seal()
    store.commit()
    folder = store.folder("a", "last")
    folder.rename(folder.with_name("last.previous"))
    shutil.copytree(folder.with_name("last.previous"), folder.with_name("last.new"))
    assert store.restore({("a", "last"): 1})
    assert content_of(store) == "one"
    assert [path.name for path in folder.parent.iterdir()] == ["last"]


def test_going_back_twice_is_going_back_once(store: StateStore) -> None:
    store.save("a", "last", 1, text("one"))
    store.seal()
    store.commit()
    store.save("a", "last", 2, text("two"))
    assert store.restore({("a", "last"): 1})
    assert store.restore({("a", "last"): 1})
    assert content_of(store) == "one"


def test_a_failure_while_writing_keeps_the_state_and_says_how_to_go_on(store: StateStore, tmp_path: Path) -> None:
    store.save("a", "last", 1, text("whole"))

    def fail(folder: Path) -> None:
        (folder / "weights.txt").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunWriteError, match=rf"No space left on device; .* alto resume {tmp_path}"):
        store.save("a", "last", 2, fail)
    assert content_of(store) == "whole"
    assert [path.name for path in store.folder("a", "last").parent.iterdir()] == ["last"]
    store.save("a", "last", 2, text("again"))
    assert content_of(store) == "again"
