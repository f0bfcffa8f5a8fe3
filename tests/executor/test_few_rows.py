"""Tasks whose jobs are evaluated on some of the validation rows, and measured on more in the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from company import built
from resident_jobs import DATA, make_dataset, make_model
from searches import Run, make

from alto.backbone import Backbone
from alto.early_exit import audit, evaluation_order, mean_loss
from alto.executor import budget_evaluations
from alto.executor.planned_job import resolve_rungs
from alto.runs import read_entries, read_history
from alto.spec import Task

ROWS = replace(DATA, validation=make_dataset(40, seed=2), test=make_dataset(5, seed=3))
SPACE = {"lr": [1e-4, 3e-4, 1e-3, 3e-3], "r": [2, 4], "batch_size": [4]}


def task_of(**changes: object) -> Task:
    settings = {"search": {"algorithm": "grid"}, "search_space": SPACE, "num_train_epochs": 8, "eval_steps": 0.05}
    task = make(**{**settings, **changes})
    return budget_evaluations(resolve_rungs(task, len(ROWS.train)), ROWS, has_preset=True)


def losses_of(run: Run) -> list[tuple[object, ...]]:
    keys = ("job", "step", "validation_loss", "loss_rows", "test_loss")
    return [tuple(map(repr, (event.get(key) for key in keys))) for event in run.events("eval", "best_measured")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("few") / "run", task_of(), data=ROWS).train()


def test_the_journal_has_the_order_and_the_losses_of_the_first_rows_of_it(run: Run) -> None:
    task = task_of()
    (started,) = run.events("task_started")
    order = evaluation_order(40, task.data_seed)
    assert tuple(started["evaluation_order"]) == order
    weights = [ROWS.validation.weights[row] for row in order]
    rows = {round(progress, 9): count for progress, count in task.early_exit.evaluations or ()}
    evaluations = run.events("eval")
    assert {len(event["loss_rows"]) for event in evaluations} <= set(rows.values())
    assert min(len(event["loss_rows"]) for event in evaluations) < 40
    for event in evaluations:
        assert event["validation_loss"] == pytest.approx(mean_loss(event["loss_rows"], weights), rel=1e-5)
        assert event.get("test_loss") is None


def test_the_winner_is_measured_on_more_rows_and_tested_once(run: Run) -> None:
    final = task_of().early_exit.final_evaluations
    assert final is not None
    measured = run.events("best_measured")
    assert len(measured) == final[0] > 1
    assert {len(event["loss_rows"]) for event in measured} == {final[1]} == {40}
    best = min(measured, key=lambda event: event["validation_loss"])
    (completed,) = run.events("task_completed")
    assert (completed["best_job"], completed["best_validation_loss"]) == (best["job"], best["validation_loss"])
    assert [event["job"] for event in measured if event.get("test_loss") is not None] == [best["job"]]
    history = read_history(run.root)
    assert history.best is not None
    assert history.best.best_validation_loss == best["validation_loss"]
    assert history.best.best_test_loss == best["test_loss"]


def test_the_measured_loss_is_that_of_the_adapter_that_is_kept(run: Run) -> None:
    """Evaluated again by a session of its own, on all rows in their own order."""
    from alto.lora import read_adapter

    measured = {event["job"]: event["validation_loss"] for event in run.events("best_measured")}
    task = task_of()
    with built(run.folder.parent / "again", task, ROWS, Backbone(make_model("llama"), None, "unused")) as session:
        for name, loss in measured.items():
            job = session.state.jobs[name]
            job.slot = 0
            session.state.trainer.admit_warm(job, 0, read_adapter(run.root / "jobs" / name / "best"))
            [found] = session.state.trainer.evaluate([job])
            session.state.slot_manager._free(job)
            assert found.loss == pytest.approx(loss, rel=1e-5)


def test_a_note_says_where_the_winner_is_not_measured_on_all_rows() -> None:
    assert not task_of().notes
    (note,) = task_of(num_train_epochs=1, early_exit={"evaluation_share": 0.01}).notes
    assert note.startswith("The validation loss of the winner will be of 12 of the 40 rows")


def test_its_decisions_follow_from_the_journal(run: Run) -> None:
    run.assert_decided_as_journalled()
    assert len(run.events("job_exited")) > 4


@pytest.mark.parametrize("turns", [2, 9, 30])
def test_a_run_that_was_killed_makes_the_same_choices(run: Run, tmp_path: Path, turns: int) -> None:
    killed = Run(tmp_path / "run", task_of(checkpoint_interval_s=0), data=ROWS)
    killed.train(turns=turns, is_killed=True)
    killed.train()
    assert audit(read_entries(killed.root / "journal.jsonl")) == ()
    assert losses_of(killed) == losses_of(run)


def test_a_job_is_evaluated_in_company_as_alone(run: Run, tmp_path: Path) -> None:
    losses = {(event["job"], event["step"]): event["validation_loss"] for event in run.events("eval")}
    slots = Run(tmp_path / "run", task_of(max_slots=1), data=ROWS).train()
    alone = {(event["job"], event["step"]): event["validation_loss"] for event in slots.events("eval")}
    assert alone.keys() == losses.keys()
    for key, loss in alone.items():
        assert losses[key] == pytest.approx(loss, rel=1e-4), key


@pytest.mark.parametrize(
    "changes",
    [{"early_exit": False}, {"early_exit": {"policy": "paper"}}, {"early_exit": {"evaluation_share": "all"}}],
    ids=["off", "paper", "all"],
)
def test_elsewhere_all_rows_are_evaluated_at_every_interval(changes: dict[str, object]) -> None:
    task = task_of(**changes)
    assert task.early_exit.evaluations is None


def test_the_time_of_a_run_is_recorded_by_what_it_was_spent_on(run: Run, tmp_path: Path) -> None:
    (completed,) = run.events("task_completed")
    history = read_history(run.root)
    assert history.time_s == completed["time_s"]
    assert set(history.time_s) == {"training", "evaluation", "saving"}
    assert all(seconds > 0 for seconds in history.time_s.values())
    assert sum(history.time_s.values()) <= history.duration_s + 0.1
    assert history.training_all_s == pytest.approx(
        history.time_s["training"] * history.samples_budgeted / history.samples_trained
    )
    stopped = Run(tmp_path / "run", task_of(), data=ROWS).train(turns=9)
    before = read_history(stopped.root).time_s["training"]
    stopped.train()
    assert stopped.events("checkpoint")[0]["time_s"]["training"] == pytest.approx(before)
    assert read_history(stopped.root).time_s["training"] > before
