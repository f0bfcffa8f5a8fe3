"""A task on several ranks that are killed, stopped or interrupted ends as an undisturbed one."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from deaths import TRAIN, Death, plan_deaths
from journals import entries
from tiny import curves_of, make_task, read_journal, save_model

import alto
from alto.cluster import AttemptEnded, Cluster, ClusterEvent, Outcome
from alto.cluster.local import LocalCluster
from alto.early_exit import audit
from alto.errors import TaskInterruptedError
from alto.runs import JournalEntry
from alto.runs.events import JobEvaluated, TaskResumed

HEARTBEAT_S = 8.0
DEATHS: tuple[Death, ...] = (
    (1, "forward", signal.SIGKILL, 4),
    (0, "backward", signal.SIGKILL, 3),
    (1, "saved", signal.SIGKILL, 5),
    (0, "saved", signal.SIGSTOP, 5),
    (1, "backward", signal.SIGSTOP, 3),
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> alto.Task:
    """Four jobs, one per rank; a rung keeps two, and the next one, which trains on all ranks."""
    folder = tmp_path_factory.mktemp("task")
    return make_task(
        folder,
        model=str(save_model(folder / "model")),
        search_space={"lr": [1e-3, 1e-2], "batch_size": [4, 8]},
        num_gpus=2,
        r=4,
        early_exit=alto.EarlyExit(rungs=((0.3, 0.5), (0.6, 0.5)), overfitting_patience=50),
        checkpoint_interval_s=0,
        report_to="none",
    )


@pytest.fixture(scope="module")
def undisturbed(
    task: alto.Task, tmp_path_factory: pytest.TempPathFactory
) -> tuple[alto.TaskResult, list[Mapping[str, Any]]]:
    """The result on two ranks, and the events that observers received."""
    seen: list[JournalEntry] = []
    engine = alto.Engine(output_dir=tmp_path_factory.mktemp("undisturbed"), observers=[seen.append])
    return engine.tune(task), [entry.to_dict() for entry in seen]


@pytest.fixture(scope="module")
def alone(task: alto.Task, tmp_path_factory: pytest.TempPathFactory) -> alto.TaskResult:
    return alto.Engine(output_dir=tmp_path_factory.mktemp("alone")).tune(task.replace(num_gpus=1))


def facts(run_dir: str | Path) -> object:
    """Return curves, exits and winner, and check the journal."""
    events = read_journal(run_dir)
    assert audit(entries(events)) == ()
    curves = {job: (curve.train, curve.validation) for job, curve in curves_of(events).items()}
    exits = [(event["job"], event["reason"], event["step"]) for event in events if event["event"] == "job_exited"]
    return curves, exits, events[-1]["best_job"], events[-1]["samples_trained"]


def losses(result: alto.TaskResult) -> dict[str, float]:
    return {job.job: job.best_validation_loss for job in result.job_results}


def test_ranks_give_the_result_of_one_process(
    undisturbed: tuple[alto.TaskResult, list[Mapping[str, Any]]], alone: alto.TaskResult
) -> None:
    result, _ = undisturbed
    assert result.best_job == alone.best_job
    assert losses(result) == pytest.approx(losses(alone), rel=1e-4)
    assert [job.exit_reason for job in result.job_results] == [job.exit_reason for job in alone.job_results]
    ranks_of_events = [event["ranks"] for event in read_journal(result.run_dir) if "ranks" in event]
    assert sorted(ranks_of_events[:4]) == [[0], [0], [1], [1]]
    assert ranks_of_events[-1] == [0, 1]


def test_observers_see_the_journal(undisturbed: tuple[alto.TaskResult, list[Mapping[str, Any]]]) -> None:
    result, seen = undisturbed
    assert seen == read_journal(result.run_dir)


@pytest.mark.slow("campaigns")
def test_ranks_that_die_cost_nothing_but_time(
    task: alto.Task,
    undisturbed: tuple[alto.TaskResult, list[Mapping[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan_deaths(tmp_path, {task.name: DEATHS})
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setattr("alto.engine.launched.TRAIN", TRAIN)
    ends = record_ends(monkeypatch)
    result = alto.Engine(output_dir=tmp_path).tune(task)
    assert [end.outcome for end in ends] == [Outcome.LOST] * len(DEATHS) + [Outcome.FINISHED]
    for end, (rank, _, number, _) in zip(ends, DEATHS, strict=False):
        killed = f"rank {rank} was killed by SIGKILL" if rank else "its process was killed by SIGKILL"
        assert (killed if number is signal.SIGKILL else "hung: no heartbeat") in end.reason
    assert facts(result.run_dir) == facts(undisturbed[0].run_dir)
    assert "task_resumed" in [event["event"] for event in read_journal(result.run_dir)]
    best = Path("best", "adapter_model.safetensors")
    assert Path(result.run_dir, best).read_bytes() == Path(undisturbed[0].run_dir, best).read_bytes()


def record_ends(monkeypatch: pytest.MonkeyPatch) -> list[AttemptEnded]:
    """Record how executors end, with a short timeout for hanging ones."""
    ends: list[AttemptEnded] = []

    class Watched(LocalCluster):
        def poll(self, timeout_s: float) -> list[ClusterEvent]:
            events = super().poll(timeout_s)
            ends.extend(event for event in events if isinstance(event, AttemptEnded))
            return events

    def opened(name: str, *, total_gpus: int | None) -> Cluster:
        assert name == "local"
        return Watched(total_gpus=total_gpus, heartbeat_timeout_s=HEARTBEAT_S)

    monkeypatch.setattr("alto.engine.launched.open_cluster", opened)
    return ends


class StopsAfter:
    """An observer that asks to stop at the n-th evaluation that is not replayed."""

    def __init__(self, num_evals: int) -> None:
        self.seen: list[JournalEntry] = []
        self._num_evals = num_evals

    def observe(self, entry: JournalEntry) -> None:
        self.seen.append(entry)

    def is_interrupted(self) -> bool:
        new = (entry for entry in self.seen if isinstance(entry.event, JobEvaluated) and not entry.is_replayed)
        return len(list(new)) >= self._num_evals


def test_a_run_goes_on_with_fewer_gpus(task: alto.Task, alone: alto.TaskResult, tmp_path: Path) -> None:
    stops = StopsAfter(1)
    engine = alto.Engine(output_dir=tmp_path, observers=[stops.observe], is_interrupted=stops.is_interrupted)
    with pytest.raises(TaskInterruptedError, match="alto resume"):
        engine.tune(task.replace(num_gpus=4))
    (root,) = tmp_path.iterdir()
    past = read_journal(root)
    assert past[-1]["event"] == "task_interrupted"

    stops = StopsAfter(1)
    engine = alto.Engine(output_dir=tmp_path, observers=[stops.observe], is_interrupted=stops.is_interrupted)
    with pytest.raises(TaskInterruptedError):
        engine.resume(root, num_gpus=2)
    replayed = [entry for entry in stops.seen if entry.is_replayed]
    assert [entry.name for entry in replayed] == [event["event"] for event in past[: len(replayed)]]
    resumed = stops.seen[len(replayed)].event
    assert isinstance(resumed, TaskResumed)
    assert resumed.num_ranks == 2

    result = alto.Engine(output_dir=tmp_path).resume(root, num_gpus=1)
    assert audit(entries(read_journal(root))) == ()
    assert losses(result) == pytest.approx(losses(alone), rel=1e-4)
