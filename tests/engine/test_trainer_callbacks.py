"""Callbacks for transformers' trainer see each job as its own training, and unsupported ones are refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import make_task
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState

import alto
from alto.engine.trainer_callbacks import SUPPORTED, CallbackObserver
from alto.errors import UnsupportedError
from alto.runs import JournalEntry, read_history
from alto.runs.events import TaskRelayed, TaskResumed

SPACE = {"lr": [1e-3, 1e-2]}


class Recording(TrainerCallback):
    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[str, int, dict[str, float]]]] = {}
        self.states: dict[str, TrainerState] = {}
        self.rates: dict[str, float] = {}

    def _note(self, method: str, args: Any, state: TrainerState, facts: dict[str, float]) -> None:
        assert state.trial_name is not None
        self.calls.setdefault(state.trial_name, []).append((method, state.global_step, facts))
        self.states[state.trial_name] = state
        self.rates[state.trial_name] = args.learning_rate

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._note("on_train_begin", args, state, {})

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        self._note("on_log", args, state, dict(logs))

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        self._note("on_evaluate", args, state, dict(metrics))

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._note("on_save", args, state, {})

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._note("on_train_end", args, state, {})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, alto.TaskResult, list[JournalEntry]]:
    folder = tmp_path_factory.mktemp("callbacks")
    recording, entries = Recording(), []
    task = make_task(folder, search_space=SPACE, r=4, num_train_epochs=2, early_exit=False, report_to="none")
    result = alto.Engine(output_dir=folder / "runs", observers=[recording, entries.append]).tune(task)
    return recording, result, entries


def test_every_job_is_a_training(trained: tuple[Recording, alto.TaskResult, list[JournalEntry]]) -> None:
    recording, result, _ = trained
    assert recording.calls.keys() == {job.job for job in result.job_results}
    for job in result.job_results:
        methods = [method for method, *_ in recording.calls[job.job]]
        assert methods[0] == "on_train_begin"
        assert methods[-1] in ("on_train_end", "on_save")
        assert methods.count("on_train_begin") == methods.count("on_train_end") == 1
        assert set(methods) <= set(SUPPORTED)
        assert recording.rates[job.job] == job.config["learning_rate"]


def test_losses_and_evaluations_are_those_of_the_journal(
    trained: tuple[Recording, alto.TaskResult, list[JournalEntry]],
) -> None:
    recording, result, _ = trained
    history = read_history(result.run_dir)
    for job in result.job_results:
        calls, state = recording.calls[job.job], recording.states[job.job]
        logged = {step: facts["loss"] for method, step, facts in calls if method == "on_log" and "loss" in facts}
        assert sorted(logged) == list(range(1, job.total_steps + 1))
        assert list(logged.values()) == list(history.jobs[job.job].train_losses)
        evaluated = [facts["eval_loss"] for method, _, facts in calls if method == "on_evaluate"]
        assert min(evaluated) == job.best_validation_loss == state.best_metric
        assert state.best_global_step == job.best_step
        assert (state.global_step, state.max_steps) == (job.total_steps, job.total_steps)
        assert state.epoch == pytest.approx(2.0)
        assert state.log_history[-1]["step"] == job.total_steps
        assert len(state.log_history) == len([method for method, *_ in calls if method == "on_log"])


def test_with_many_tasks_a_job_has_the_name_of_its_task(
    trained: tuple[Recording, alto.TaskResult, list[JournalEntry]],
) -> None:
    recording, _, entries = trained
    relayed = Recording()
    observer = CallbackObserver(relayed)
    for entry in entries:
        for task in ("one", "two"):
            observer(replace(entry, event=TaskRelayed(task=task, entry=entry)))
    assert relayed.calls.keys() == {f"{task}/{job}" for task in ("one", "two") for job in recording.calls}
    assert relayed.calls["two/job-000"] == recording.calls["job-000"]


def test_a_resumed_run_knows_its_past_and_does_not_report_it_again(
    trained: tuple[Recording, alto.TaskResult, list[JournalEntry]],
) -> None:
    recording, _, entries = trained
    half = len(entries) // 2
    again = Recording()
    observer = CallbackObserver(again)
    resumed = JournalEntry(seq=half, time=0.0, event=TaskResumed(notes=(), versions={}, max_slots=None, num_ranks=None))
    for entry in [*(replace(entry, is_replayed=True) for entry in entries[:half]), resumed, *entries[half:]]:
        observer(entry)
    for job, calls in recording.calls.items():
        found = again.calls[job]
        assert found[0][0] == "on_train_begin"
        assert found[0][1] > 0, "it continues at the same step"
        assert found[1:] == calls[len(calls) - len(found) + 1 :]
        assert again.states[job].log_history == recording.states[job].log_history


def test_orders_of_a_callback_are_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stopping(TrainerCallback):
        def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
            control.should_training_stop = True
            return control

    task = make_task(tmp_path, r=4, num_train_epochs=1, report_to="none")
    with caplog.at_level(logging.WARNING):
        result = alto.Engine(output_dir=tmp_path / "runs", observers=[Stopping()]).tune(task)
    assert [job.steps for job in result.job_results] == [job.total_steps for job in result.job_results]
    assert "Stopping failed and gets no more events" in caplog.text
    assert "sets control.should_training_stop of job-000; end jobs by early_exit" in caplog.text


def test_methods_that_nothing_calls_are_refused_at_once() -> None:
    class Stepping(Recording):
        def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None: ...

    with pytest.raises(UnsupportedError, match=r"with only on_train_begin, .* found on_step_end of Stepping"):
        alto.Engine(observers=[Stepping()])
    alto.Engine(observers=[EarlyStoppingCallback()])  # a call that needs more is refused then


def test_one_engine_runs_several_tasks(tmp_path: Path) -> None:
    recording = Recording()
    engine = alto.Engine(output_dir=tmp_path / "runs", observers=[recording])
    for name in ("first", "second"):
        engine.tune(make_task(tmp_path, name=name, r=4, max_steps=2, report_to="none"))
    methods = [method for method, *_ in recording.calls["job-000"]]
    assert methods.count("on_train_begin") == methods.count("on_train_end") == 2
