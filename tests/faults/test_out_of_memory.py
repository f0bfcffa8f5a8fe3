"""Out of memory at any point of a task: everybody ends as if it had not been."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import load_tiny, make_task, read_journal
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alto.data import TokenBatch
from alto.early_exit import audit
from alto.early_exit.journal import curves_of
from alto.errors import DeviceMemoryError, NoResultError
from alto.executor import Executor, JobRun, Trainer, executor, plan_jobs, recover, trainer
from alto.lora import AdapterBank, linear_modules
from alto.lora.eight_bit import EightBitAdamW
from alto.records import ExitReason
from alto.runs import Journal, RunDir
from alto.spec import load_task


@pytest.fixture(scope="module", autouse=True)
def leave_the_libraries_alone() -> Iterator[None]:
    """What is imported by now is not looked through whenever memory is released."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class ShortOfMemory(TorchDispatchMode):
    """Refuses the requests for memory that are named by their number, counted over all ops from 1."""

    def __init__(self, *refused: int) -> None:
        super().__init__()
        self.refused = refused
        self.num_asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(id(leaf.untyped_storage()) not in given for leaf in made):
            self.num_asked += 1
            if self.num_asked in self.refused:
                raise torch.OutOfMemoryError("no memory, as the test wants it")
        return result


class World:
    """Seated jobs on the random Llama, with dropout."""

    def __init__(
        self, folder: Path, num_jobs: int, *, max_tokens: int = 10**6, optims: list[str] | None = None
    ) -> None:
        folder.mkdir(exist_ok=True)
        optims = optims or ["adamw_torch"] * num_jobs
        space = {"seed": list(range(num_jobs)), "r": [2 + index for index in range(num_jobs)], "optim": optims}
        task = make_task(folder, search_space={"paired": [space]}, batch_size=4, lora_dropout=0.3, lr=1e-3)
        backbone, data = load_tiny(task)
        self.events: list[Any] = []
        self.runs: list[JobRun] = plan_jobs(task, backbone, data)
        self.trainer = Trainer(
            backbone,
            data,
            modules=linear_modules(backbone.model),
            max_rank=9,
            num_slots=num_jobs,
            max_tokens_per_pass=max_tokens,
            on_memory_event=self.events.append,
        )
        for slot, run in enumerate(self.runs):
            run.slot = slot
            self.trainer.seat_fresh(run, slot)

    def train(self, num_steps: int = 1) -> list[float]:
        losses = []
        for _ in range(num_steps):
            losses += self.trainer.step(self.runs)
            for run in self.runs:
                run.step += 1
        return losses

    def state(self) -> list[Any]:
        """Weights and optimizer state of every job, as of its last save."""
        seats = range(len(self.runs))
        return [(self.trainer.bank.read(slot), self.trainer.optimizer.read(slot)) for slot in seats]

    def go_back(self, state: list[Any]) -> None:
        """To the state after the first step, memory enough for everything."""
        self.trainer.passes.max_tokens = 10**6
        self.events.clear()
        for run, (weights, optimizer) in zip(self.runs, state, strict=True):
            run.step = optimizer.step
            self.trainer.seat_again(run, run.slot, weights, optimizer)


def flat(state: list[Any]) -> torch.Tensor:
    pairs = [*itertools.chain.from_iterable(weights.values() for weights, _ in state)]
    moments = [part for _, optimizer in state for part in optimizer.tensors.values()]
    return torch.cat([tensor.flatten().double() for tensor in [*itertools.chain(*pairs), *moments]])


def places(count: int, num_trials: int) -> range:
    return range(1, count + 1, max(1, count // num_trials))


@pytest.mark.parametrize("num_jobs", [1, 2, 4])
def test_a_step_that_runs_out_of_memory_anywhere_is_taken_once(num_jobs: int, tmp_path: Path) -> None:
    world = World(tmp_path, num_jobs)
    world.train()
    before = world.state()
    with ShortOfMemory() as enough:
        expected = world.train()
    expected += world.train()
    after = world.state()
    phases = set()
    for first in places(enough.num_asked, 7):
        world.go_back(before)
        with ShortOfMemory(first):
            found = world.train()
        assert found + world.train() == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(flat(world.state()), flat(after), rtol=2e-3, atol=2e-6)
        (event,) = world.events
        phases.add(event.phase)
        if event.phase == "update":
            continue
        assert event.num_tokens // 2 == event.max_tokens_per_pass == world.trainer.passes.max_tokens
        assert event.slots == tuple(range(num_jobs))
    assert phases >= {"forward", "backward"}


def test_a_step_may_run_out_of_memory_again_and_again(tmp_path: Path) -> None:
    world = World(tmp_path, 3)
    world.train()
    before = world.state()
    expected = world.train() + world.train()
    world.go_back(before)
    with ShortOfMemory(300, 500, 900):
        found = world.train()
    found += world.train()
    assert found == pytest.approx(expected, rel=1e-5)
    limits = [event.max_tokens_per_pass for event in world.events]
    assert limits == sorted(limits, reverse=True)
    assert len(limits) > 2


@pytest.mark.parametrize(
    "optims",
    [["adamw_torch"] * 3, ["adamw_8bit", "adamw_torch", "adamw_8bit"]],
    ids=["one launch", "some of their own"],
)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_an_update_that_runs_out_of_memory_anywhere_is_applied_once_to_everybody(
    optims: list[str], backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALTO_KERNELS", backend)
    world = World(tmp_path, 3, optims=optims)
    world.train()
    before = world.state()
    world.trainer.backward(world.runs)
    with ShortOfMemory() as enough:
        norms = world.trainer.update(world.runs)
    after = flat(world.state())
    assert enough.num_asked > 5
    assert world.trainer.optimizer.steps == [2, 2, 2]
    for first in places(enough.num_asked, 25):
        world.go_back(before)
        world.trainer.backward(world.runs)
        with ShortOfMemory(first):
            assert torch.equal(world.trainer.update(world.runs), norms)
        assert torch.equal(flat(world.state()), after), f"allocation {first} of {enough.num_asked}"
        assert world.trainer.optimizer.steps == [2, 2, 2]
        assert not world.trainer.bank.grads_ZP.any()
        assert [event.phase for event in world.events] == ["update"]


def test_an_evaluation_that_runs_out_of_memory_anywhere_gives_the_same_losses(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    world.train()
    before = world.state()
    with ShortOfMemory() as enough:
        expected = world.trainer.evaluate(world.runs)
    for first in places(enough.num_asked, 5):
        world.go_back(before)
        with ShortOfMemory(first):
            assert world.trainer.evaluate(world.runs) == pytest.approx(expected, rel=1e-6)
        assert [event.phase for event in world.events] == ["evaluation"]


@pytest.mark.parametrize("max_tokens", [60, 25, 1])
def test_a_job_larger_than_a_pass_is_trained_in_several(max_tokens: int, tmp_path: Path) -> None:
    """With dropout, whose masks must not notice."""
    whole, parts = World(tmp_path / "whole", 2), World(tmp_path / "parts", 2, max_tokens=max_tokens)
    assert parts.train(3) == pytest.approx(whole.train(3), rel=1e-5)
    torch.testing.assert_close(flat(parts.state()), flat(whole.state()), rtol=2e-3, atol=2e-6)
    assert parts.trainer.passes.largest <= max(max_tokens, 25)


def test_other_errors_are_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, 1)

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(trainer, "sft_losses", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        world.train()
    assert not world.events


SPACE = {"lr": [1e-4, 2e-4, 3e-4], "lora_dropout": [0.1]}


def run_in(folder: Path, **changes: Any) -> RunDir:
    task = make_task(folder, **({"search_space": SPACE, "batch_size": 4, "early_exit": {"enabled": False}} | changes))
    return RunDir.create(folder / "runs", task)


def finish(run: RunDir) -> list[dict[str, Any]]:
    """Begin or go on with a run; its events."""
    task, past = load_task(run.task_file), recover(run)
    backbone, data = load_tiny(task)
    with Journal(run.journal_file, past=past.events) as journal:
        Executor(task, plan_jobs(task, backbone, data), backbone, data, run_dir=run, journal=journal, past=past).run()
    return read_journal(run.root)


def assert_same_curves(found: list[dict[str, Any]], expected: list[dict[str, Any]], jobs: list[str]) -> None:
    assert audit(found) == ()
    curves, wanted = curves_of(found), curves_of(expected)
    for job in jobs:
        for mine, others in ((curves[job].train, wanted[job].train), (curves[job].validation, wanted[job].validation)):
            assert list(mine) == list(others)
            assert list(mine.values()) == pytest.approx(list(others.values()), rel=1e-5)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return finish(run_in(tmp_path_factory.mktemp("undisturbed")))


JOBS = ["job-000", "job-001", "job-002"]


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def small_device(monkeypatch: pytest.MonkeyPatch, fits: Callable[[TokenBatch], bool]) -> None:
    """Nothing else of a pass fits into memory."""
    for name in ("sft_losses", "sft_sums"):
        op = getattr(trainer, name)

        def limited(backbone: Any, batch: TokenBatch, op: Any = op) -> torch.Tensor:
            if not fits(batch):
                raise torch.OutOfMemoryError("no memory, as the test wants it")
            return op(backbone, batch)

        monkeypatch.setattr(trainer, name, limited)


def test_a_task_on_a_small_device_ends_as_on_a_large_one(
    undisturbed: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_device(monkeypatch, lambda batch: sum(batch.job_tokens) <= 50)
    events = finish(run_in(tmp_path))
    assert_same_curves(events, undisturbed, JOBS)
    told = of(events, "oom")
    assert {event["phase"] for event in told} == {"forward"}
    assert told[0]["residents"] == JOBS
    assert len(told) < 6, "the lowered limit stays"
    assert 10 < told[-1]["max_tokens_per_pass"] <= 50


def test_the_limit_survives_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_device(monkeypatch, lambda batch: sum(batch.job_tokens) <= 50)
    run = run_in(tmp_path, checkpoint_interval_s=0)
    monkeypatch.setattr(executor, "MAX_SAVING_SHARE", 1e9)
    update = Trainer.update

    def dies(self: Trainer, runs: Any) -> torch.Tensor:
        if runs[0].step == 4:
            raise KeyboardInterrupt
        return update(self, runs)

    monkeypatch.setattr(Trainer, "update", dies)
    with pytest.raises(KeyboardInterrupt):
        finish(run)
    before = len(of(read_journal(run.root), "oom"))
    assert before
    monkeypatch.setattr(Trainer, "update", update)
    assert len(of(finish(run), "oom")) == before


def test_a_job_whose_row_never_fits_fails_and_its_siblings_go_on(
    undisturbed: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_device(monkeypatch, lambda batch: 1 not in batch.slots)
    events = finish(run_in(tmp_path))
    assert_same_curves(events, undisturbed, ["job-000", "job-002"])
    (exit,) = of(events, "job_exited")
    assert (exit["job"], exit["reason"], exit["step"]) == ("job-001", ExitReason.FAILED, 0)
    assert exit["evidence"]["row_tokens"] > 0
    assert all(event["job"] != "job-001" for event in of(events, "train"))


def test_a_validation_row_that_never_fits_fails_the_job_too(
    undisturbed: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_device(monkeypatch, lambda batch: torch.is_grad_enabled() or 1 not in batch.slots)
    events = finish(run_in(tmp_path))
    assert_same_curves(events, undisturbed, ["job-000", "job-002"])
    assert [event["job"] for event in of(events, "job_exited")] == ["job-001"]


def test_if_nobody_fits_the_error_says_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_device(monkeypatch, lambda batch: sum(batch.job_tokens) <= 13)
    with pytest.raises(
        NoResultError, match=r"3 of 3 have a row .* tokens \(the largest .* has \d+\); lower max_length"
    ):
        finish(run_in(tmp_path))


def test_without_memory_for_the_update_everything_is_saved_and_can_be_resumed(
    undisturbed: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    whole = finish(run_in(tmp_path / "whole", optim="adamw_8bit"))
    run = run_in(tmp_path, optim="adamw_8bit")
    step = EightBitAdamW.step
    calls = itertools.count()

    def fails_for_the_second(self: EightBitAdamW, *args: Any, **kwargs: Any) -> None:
        if next(calls) >= 10:  # the second slot of the fourth step
            raise torch.OutOfMemoryError("no memory, as the test wants it")
        step(self, *args, **kwargs)

    monkeypatch.setattr(EightBitAdamW, "step", fails_for_the_second)
    with pytest.raises(DeviceMemoryError, match=r"optimizer's step of 2 jobs, .* alto resume "):
        finish(run)
    monkeypatch.setattr(EightBitAdamW, "step", step)
    assert [event["phase"] for event in of(read_journal(run.root), "oom")] == ["update"] * 3
    assert_same_curves(finish(run), whole, JOBS)


def limit_slots(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    class Bank(AdapterBank):
        def __init__(self, layout: Any, num_slots: int, **settings: Any) -> None:
            if num_slots > most:
                raise torch.OutOfMemoryError("no memory, as the test wants it")
            super().__init__(layout, num_slots, **settings)

    monkeypatch.setattr(trainer, "AdapterBank", Bank)


def test_a_bank_that_does_not_fit_has_fewer_slots(
    undisturbed: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_slots(monkeypatch, 1)
    events = finish(run_in(tmp_path))
    assert_same_curves(events, undisturbed, JOBS)
    assert events[0]["max_slots"] == 1
    (told,) = of(events, "oom")
    assert (told["phase"], told["num_slots"], told["residents"]) == ("bank", 1, [])


def test_if_no_slot_fits_the_error_says_how_much_one_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_slots(monkeypatch, 0)
    with pytest.raises(DeviceMemoryError, match=r"one adapter of rank 16 on \d+ modules .* \d+\.\d MiB, .* lower r"):
        finish(run_in(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="caps the memory of a process as Linux does")
def test_under_a_real_limit_a_task_ends_as_without(tmp_path: Path) -> None:
    """8 MiB do not hold a pass of one job."""
    journals = []
    for cap in (0, 8):
        (folder := tmp_path / str(cap)).mkdir()
        path = os.pathsep.join(map(str, (Path(__file__).parents[1], *sys.path)))
        script = Path(__file__).with_name("capped_task.py")
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, script, folder, str(cap)], env=environment, check=True, timeout=120)
        journals.append(read_journal(next((folder / "runs").iterdir())))
    uncapped, capped = journals
    assert_same_curves(capped, uncapped, [*JOBS, "job-003"])
    assert of(capped, "oom")
    assert not of(uncapped, "oom")
    assert not of(capped, "job_exited")
