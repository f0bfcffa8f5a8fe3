"""Several tasks in one executor: each trains, exits and ends as if it were alone, whatever happens to the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resident_jobs import DATA, make_task
from shared_executor import SETTINGS, Curves, SharedExecutor, assert_as_alone, curves, curves_alone, events_of, tasks

from alto.errors import RunWriteError, TaskInterruptedError
from alto.evaluation.target import loaded_adapters
from alto.executor import Hooks, JobState, Trainer
from alto.lora import eject, read_saved_adapter
from alto.objectives import Terms
from alto.records import AdapterCheck, Samples


def exits(folder: Path) -> list[tuple[str, str | None]]:
    return sorted(
        (event["job"], event.get("reason"))
        for event in events_of(folder)
        if event["event"] in ("job_exited", "job_completed")
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    return curves_alone(tmp_path_factory.mktemp("alone"), tasks())


ARRIVALS = ("ash", "cedar", "birch", "dogwood", "elm")


def test_tasks_that_come_at_any_time_train_as_each_alone(tmp_path: Path, alone: Curves) -> None:
    with SharedExecutor(tmp_path) as shared:
        for name in ARRIVALS:
            shared.attach(name, *tasks()[name])
            shared.turn(3)
        assert len(shared.executor.sessions) > 2
        shared.finish()
    assert shared.ended == dict.fromkeys(ARRIVALS)
    assert_as_alone(tmp_path, ARRIVALS, alone)
    for name in ARRIVALS:
        text = "".join(path.read_text("utf-8", "replace") for path in (tmp_path / name).rglob("*.json*"))
        assert f'"{name}"' in text
        assert not any(other in text for other in ARRIVALS if other != name)


def test_the_same_arrivals_give_the_same_bits(tmp_path: Path) -> None:
    def journals(folder: Path) -> list[str]:
        with SharedExecutor(folder) as shared:
            for name in ARRIVALS[:3]:
                shared.attach(name, *tasks()[name])
                shared.turn(2)
            shared.finish()
        return [json.dumps(curves(folder / name)) for name in ARRIVALS[:3]]

    assert journals(tmp_path / "first") == journals(tmp_path / "second")


def test_a_task_whose_loss_is_not_finite_changes_no_bit_of_the_others(tmp_path: Path) -> None:
    def losses(rate: float, folder: Path) -> list[dict[str, list[float]]]:
        broken = make_task([{"lr": rate, "r": 4, "batch_size": 4, "seed": 1}], max_grad_norm=None, **SETTINGS)
        with SharedExecutor(folder) as shared:
            shared.attach("broken", broken, DATA)
            shared.attach("cedar", *tasks()["cedar"])
            shared.attach("birch", *tasks()["birch"])
            shared.turn(2)
            return [bits(shared, name) for name in ("cedar", "birch")]

    for sane, broken in zip(losses(1e-4, tmp_path / "sane"), losses(1e38, tmp_path / "broken"), strict=True):
        assert all(torch.equal(sane[key], broken[key]) for key in sane)


def bits(shared: SharedExecutor, name: str) -> dict[str, torch.Tensor]:
    bank = shared.executor.bank.trainer.bank
    jobs = shared.executor.sessions[name].state.jobs.values()
    return {job.id: bank.params_ZP[job.slot].clone() for job in jobs if job.slot is not None}


class Raises:
    def __init__(self, implementation: Any, is_due: Callable[[], bool]) -> None:
        self._implementation, self._is_due = implementation, is_due

    def check(self, *args: Any) -> None:
        self._implementation.check(*args)

    def terms(self, *args: Any) -> Terms:
        if self._is_due():
            raise ZeroDivisionError("as the test wants it")
        return self._implementation.terms(*args)


def raise_in(shared: SharedExecutor, name: str) -> None:
    """Let the objective of a task raise from now on."""
    context = shared.executor.sessions[name].state.context
    objective = replace(context.objective, implementation=Raises(context.objective.implementation, lambda: True))
    for job in shared.executor.sessions[name].state.jobs.values():
        job.context = replace(context, objective=objective)


def test_an_objective_that_raises_ends_its_task_and_changes_no_bit_of_the_others(tmp_path: Path, alone: Curves) -> None:
    names = ("ash", "dogwood")

    def rest(folder: Path, leave: Callable[[SharedExecutor], None]) -> list[dict[str, list[float]]]:
        with SharedExecutor(folder) as shared:
            shared.attach("ash", *tasks()["ash"])
            shared.attach("cedar", *tasks()["cedar"], hooks=Hooks(is_interrupted=lambda: bool(stop_requests)))
            shared.attach("dogwood", *tasks()["dogwood"])
            shared.turn(3)
            leave(shared)
            shared.finish()
            assert shared.ended["cedar"] is not None
        assert "task_completed" not in [event["event"] for event in events_of(folder / "cedar")]
        return [curves(folder / name) for name in names]

    stop_requests: list[bool] = []
    raised = rest(tmp_path / "raised", lambda shared: raise_in(shared, "cedar"))
    assert rest(tmp_path / "stopped", lambda _: stop_requests.append(True)) == raised
    assert_as_alone(tmp_path / "raised", names, alone)


def test_a_task_that_is_cancelled_in_the_middle_of_a_step_changes_no_bit_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cancelled between the gradients and the update, and compared with a task cancelled after the step."""
    names, update = ("ash", "dogwood"), Trainer.update

    def rest(folder: Path, *, is_in_step: bool) -> list[Any]:
        stop_requests: list[bool] = []

        def interrupted(self: Trainer, jobs: Sequence[JobState]) -> torch.Tensor:
            stop_requests.append(is_in_step)
            return update(self, jobs)

        with SharedExecutor(folder) as shared:
            shared.attach("ash", *tasks()["ash"])
            shared.attach("cedar", *tasks()["cedar"], hooks=Hooks(is_interrupted=lambda: any(stop_requests)))
            shared.attach("dogwood", *tasks()["dogwood"])
            shared.turn(3)
            with monkeypatch.context() as patch:
                patch.setattr(Trainer, "update", interrupted)
                shared.turn()
            assert not shared.ended
            stop_requests.append(True)
            shared.turn()
            assert isinstance(shared.ended["cedar"], TaskInterruptedError)
            shared.finish()
        saved = [event["jobs"] for event in events_of(folder / "cedar") if event["event"] == "checkpoint"]
        return [saved[-1], *(curves(folder / name) for name in names)]

    assert rest(tmp_path / "in", is_in_step=True) == rest(tmp_path / "after", is_in_step=False)


def test_an_objective_that_raises_in_a_step_of_its_own_ends_its_task_alone(
    tmp_path: Path, alone: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SharedExecutor(tmp_path) as shared:
        for name in ("ash", "cedar"):
            shared.attach(name, *tasks()[name])
        shared.turn(2)
        raise_in(shared, "cedar")
        with monkeypatch.context() as patch:
            patch.setattr("alto.scheduler.TokenShares.choose", lambda *_: ("cedar",))
            shared.turn()
        assert list(shared.ended) == ["cedar"]
        shared.finish()
    assert_as_alone(tmp_path, ("ash",), alone)


def test_a_folder_that_cannot_be_written_ends_its_task_alone(
    tmp_path: Path, alone: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RunWriteError("the disk is full, as the test wants it")

    with SharedExecutor(tmp_path) as shared:
        for name in ("ash", "cedar", "birch"):
            shared.attach(name, *tasks()[name])
        shared.turn(2)
        monkeypatch.setattr(shared.executor.sessions["birch"]._recorder, "losses", full)
        shared.finish()
    assert isinstance(shared.ended["birch"], RunWriteError)
    assert_as_alone(tmp_path, ("ash", "cedar"), alone)


def test_a_task_that_is_stopped_saves_and_is_resumed_beside_others(tmp_path: Path, alone: Curves) -> None:
    stop_requests: list[bool] = []
    with SharedExecutor(tmp_path) as shared:
        shared.attach("ash", *tasks()["ash"], hooks=Hooks(is_interrupted=lambda: bool(stop_requests)))
        shared.attach("cedar", *tasks()["cedar"])
        shared.turn(4)
        stop_requests.append(True)
        shared.turn(2)
        assert isinstance(shared.ended["ash"], TaskInterruptedError)
        stop_requests.clear()
        shared.attach("ash", *tasks()["ash"])
        shared.attach("birch", *tasks()["birch"])
        shared.finish()
    assert_as_alone(tmp_path, ("ash", "cedar", "birch"), alone)


def test_slots_are_shared_by_weight_and_come_back(tmp_path: Path) -> None:
    many = [{"lr": 1e-4, "r": 4, "batch_size": 4, "seed": seed} for seed in range(6)]
    with SharedExecutor(tmp_path) as shared:
        for name, weight in (("heavy", 2.0), ("light", 1.0)):
            shared.attach(name, make_task(many, max_slots=3, **SETTINGS), DATA, weight=weight)
        shared.turn()
        assert shared.executor.bank.num_slots == 6
        sessions = shared.executor.sessions
        assert [len(session.state.slots()) for session in sessions.values()] == [4, 2]
        slots = [slot for session in sessions.values() for slot in session.state.slots()]
        assert len(set(slots)) == 6
        shared.attach("third", make_task(many[:1], max_slots=1, **SETTINGS), DATA, weight=3.0)
        shared.turn()
        assert sum(len(session.state.slots()) for session in sessions.values()) == 7
        shared.finish()
    assert shared.ended == dict.fromkeys(("heavy", "light", "third"))
    parked = [event["reason"] for event in events_of(tmp_path / "heavy") if event["event"] == "job_parked"]
    assert set(parked) <= {"over_share"}
    assert all(len(exits(tmp_path / name)) == 6 for name in ("heavy", "light"))


def test_new_weights_divide_the_slots_at_the_next_turn(tmp_path: Path) -> None:
    many = [{"lr": 1e-4, "r": 4, "batch_size": 4, "seed": seed} for seed in range(6)]
    with SharedExecutor(tmp_path) as shared:
        for name in ("first", "second"):
            shared.attach(name, make_task(many, max_slots=3, **SETTINGS), DATA)
        for weights, slots in (((1.0, 1.0), [3, 3]), ((2.0, 1.0), [4, 2]), ((1.0, 5.0), [1, 5])):
            shared.executor.weigh(dict(zip(("first", "second"), weights, strict=True)))
            shared.turn()
            assert [len(session.state.slots()) for session in shared.executor.sessions.values()] == slots


def test_the_share_in_the_journal_is_of_the_tokens_that_were_trained(tmp_path: Path) -> None:
    """This holds if a step fails, and if a task leaves and comes back."""
    stop_requests: list[bool] = []
    trained: dict[str, int] = dict.fromkeys(("ash", "cedar", "birch"), 0)
    received: dict[str, list[int]] = {name: [] for name in trained}

    def tokens_of(name: str, steps: Mapping[str, int]) -> int:
        """Return the number of tokens in the rows of all steps that jobs have taken."""
        state = shared.executor.sessions[name].state
        train = state.context.data.train.input_ids
        orders = [job.order.rows_of_step(step) for job in state.jobs.values() for step in range(steps[job.id])]
        return sum(len(train[row]) for rows in orders for row in rows)

    def steps_of(name: str) -> dict[str, int]:
        return {job.id: job.step for job in shared.executor.sessions[name].state.jobs.values()}

    with SharedExecutor(tmp_path) as shared:
        shared.attach("ash", *tasks()["ash"], hooks=Hooks(is_interrupted=lambda: bool(stop_requests)))
        shared.attach("cedar", *tasks()["cedar"])
        shared.attach("birch", *tasks()["birch"])
        for turn in range(1000):
            if not shared.executor.sessions:
                break
            before = {name: steps_of(name) for name in shared.executor.sessions}
            training = [name for name, session in shared.executor.sessions.items() if session.state.selection.training]
            if turn == 3:
                raise_in(shared, "birch")
            stop_requests[:] = [True] * (turn == 5)
            shared.turn()
            for name in before.keys() - shared.executor.sessions.keys():
                received[name].append(trained.pop(name))
            for name in shared.executor.sessions if len(training) - (turn == 5) > 1 else ():
                trained[name] += tokens_of(name, steps_of(name)) - tokens_of(name, before[name])
            if turn == 5:
                stop_requests.clear()
                trained["ash"] = 0
                shared.attach("ash", *tasks()["ash"])
    for name in ("ash", "cedar"):
        events = [event for event in events_of(tmp_path / name) if event["event"] == "share_received"]
        assert [event["num_tokens"] for event in events] == received[name]
        assert all(received[name])


@pytest.mark.parametrize("hook", ["check", "generate"])
def test_what_is_done_at_the_end_of_a_task_takes_no_adapter_from_the_others(
    tmp_path: Path, alone: Curves, hook: str
) -> None:
    """Finished adapters are served, or checked, on the same base."""
    served: list[Sequence[str]] = []

    def check(folder: Path) -> AdapterCheck:
        eject(shared.backbone.model)
        served.append([])
        return AdapterCheck(status="equal")

    def generate(adapters: Mapping[str, Path], on_turn: Callable[[], None]) -> Samples:
        with loaded_adapters(shared.backbone, [None, *map(read_saved_adapter, adapters.values())], "unused"):
            served.append(list(adapters))
        return Samples()

    with SharedExecutor(tmp_path) as shared:
        shared.attach(
            "birch", *tasks()["birch"], hooks=Hooks(check=check) if hook == "check" else Hooks(generate=generate)
        )
        shared.attach("cedar", *tasks()["cedar"])
        shared.turn(1)
        shared.finish()
    assert list(shared.ended) == ["birch", "cedar"]
    assert served == [[] if hook == "check" else ["job-000"]]
    assert_as_alone(tmp_path, ("birch", "cedar"), alone)


def test_memory_that_runs_out_is_in_the_journals_of_those_it_ran_out_for(tmp_path: Path) -> None:
    with SharedExecutor(tmp_path) as shared:
        for name in ("ash", "cedar"):
            shared.attach(name, *tasks()[name])
        shared.turn()
        (job,) = shared.executor.sessions["cedar"].state.jobs.values()
        shared.executor.bank.trainer.passes.micro_batches.report("forward", [job.slot], num_tokens=50)
    events = {
        name: [event for event in events_of(tmp_path / name) if event["event"] == "oom"] for name in ("ash", "cedar")
    }
    assert [event["residents"] for event in events["cedar"]] == [["job-000"]]
    assert events["ash"] == []


def slots_of(shared: SharedExecutor) -> dict[str, frozenset[int]]:
    return {name: session.state.slots() for name, session in shared.executor.sessions.items()}


def test_a_task_that_is_resumed_takes_no_slot_of_the_others(tmp_path: Path, alone: Curves) -> None:
    stop_requests: list[bool] = []
    with SharedExecutor(tmp_path) as shared:
        shared.attach("ash", *tasks()["ash"], hooks=Hooks(is_interrupted=lambda: bool(stop_requests)))
        shared.turn(3)
        left = slots_of(shared)["ash"]
        stop_requests.append(True)
        shared.turn()
        shared.attach("dogwood", *tasks()["dogwood"])
        shared.turn(2)
        assert slots_of(shared)["dogwood"] == left
        stop_requests.clear()
        shared.attach("ash", *tasks()["ash"])
        while shared.executor.sessions:
            shared.turn()
            taken = [slot for slots in slots_of(shared).values() for slot in slots]
            assert len(taken) == len(set(taken))
    assert_as_alone(tmp_path, ("ash", "dogwood"), alone)


@pytest.mark.parametrize("failing", ["save", "admit"])
def test_a_task_that_cannot_leave_a_bank_that_grows_ends_alone(
    failing: str, tmp_path: Path, alone: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RunWriteError("the disk is full, as the test wants it")

    with SharedExecutor(tmp_path) as shared:
        for name in ("ash", "elm"):
            shared.attach(name, *tasks()[name])
        shared.turn(2)
        slot_manager = shared.executor.sessions["elm"].state.slot_manager
        with monkeypatch.context() as patch:
            patch.setattr(slot_manager, failing, full)
            shared.attach("birch", *tasks()["birch"])  # more slots, and a larger rank
        shared.turn()
        assert isinstance(shared.ended["elm"], RunWriteError)
        shared.finish()
    assert_as_alone(tmp_path, ("ash", "birch"), alone)


def test_a_limit_of_tokens_leaves_with_its_task(tmp_path: Path) -> None:
    ash, data = tasks()["ash"]
    with SharedExecutor(tmp_path) as shared:
        shared.attach("ash", ash.replace(max_tokens_per_pass=4096, num_train_epochs=4), data)
        elm, data = tasks()["elm"]
        shared.attach("elm", elm.replace(max_tokens_per_pass=50), data)
        micro_batches = shared.executor.bank.trainer.passes.micro_batches
        assert micro_batches.max_tokens == 50
        while "elm" in shared.executor.sessions:
            shared.turn()
        assert shared.executor.bank.trainer.passes.micro_batches.max_tokens == 4096
        shared.finish()
