"""Tasks whose jobs are evaluated on some of the validation rows, and finally measured on more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from resident_jobs import DATA, make_dataset, make_model
from searches import Run, make
from shared_executor import built

from alto.backbone import Backbone
from alto.data import EncodedDataset
from alto.early_exit import audit, evaluation_order, mean_loss, policy_from
from alto.errors import SpecError
from alto.executor import resolve_early_exit
from alto.executor.context import TaskContext
from alto.executor.planned_job import USUAL_FORWARD_SHARE
from alto.runs import read_entries, read_history
from alto.runs.progress import training_all_s
from alto.spec import Task

ROWS = replace(DATA, validation=make_dataset(40, seed=2), test=make_dataset(5, seed=3))
SPACE: dict[str, object] = {"lr": [1e-4, 3e-4, 1e-3, 3e-3], "r": [2, 4], "batch_size": [4]}


def settings_of(**changes: object) -> dict[str, object]:
    settings = {"search": {"algorithm": "grid"}, "search_space": SPACE, "num_train_epochs": 16, "eval_steps": 0.05}
    return {**settings, **changes}


def task_of(**changes: object) -> Task:
    task = make(**settings_of(**changes))
    return resolve_early_exit(task, ROWS, begins=True)


def planned(**changes: object) -> TaskContext:
    """Return a context of its own for the task, whose evaluations may still be adapted to the machine."""
    task, backbone = task_of(**changes), Backbone(make_model("llama"), None, "unused")
    return TaskContext.of(task, backbone, ROWS, requested_early_exit=make(**settings_of(**changes)).early_exit)


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
    """A separate session evaluates it again, on all rows in their original order."""
    from alto.lora import read_adapter

    measured = {event["job"]: event["validation_loss"] for event in run.events("best_measured")}
    task = task_of()
    with built(run.folder.parent / "again", task, ROWS, Backbone(make_model("llama"), None, "unused")) as session:
        for name, loss in measured.items():
            job = session.state.jobs[name]
            job.slot = 0
            session.state.trainer.admit(job, 0, read_adapter(run.root / "jobs" / name / "best"))
            [found] = session.state.trainer.evaluate([job])
            session.state.slot_manager._free(job)
            assert found.loss == pytest.approx(loss, rel=1e-5)


def test_a_note_says_where_the_winner_is_not_measured_on_all_rows() -> None:
    assert not planned().evaluation_notes
    (note,) = planned(num_train_epochs=1, early_exit={"evaluation_share": 0.01}).evaluation_notes
    assert note.startswith("The validation loss of the winner will be measured on 12 of the 40 rows")


def test_evaluations_that_cost_less_than_usual_are_on_more_rows_and_a_resumed_run_keeps_its_own() -> None:
    usual = planned()

    def rows(context: TaskContext) -> float:
        return sum(job.evaluations_after(0, 40) for job in context.jobs)

    cheap, dear = usual.at_forward_share(0.05), usual.at_forward_share(5.0)
    assert rows(cheap) > rows(usual) > rows(dear)
    assert cheap.policy == policy_from(cheap.task.early_exit)
    assert usual.at_forward_share(USUAL_FORWARD_SHARE) is usual
    resumed = replace(usual, requested_early_exit=None)
    assert resumed.at_forward_share(5.0) is resumed


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


def test_a_job_is_evaluated_beside_others_as_alone(run: Run, tmp_path: Path) -> None:
    losses = {(event["job"], event["step"]): event["validation_loss"] for event in run.events("eval")}
    slots = Run(tmp_path / "run", task_of(max_slots=1), data=ROWS).train()
    alone = {(event["job"], event["step"]): event["validation_loss"] for event in slots.events("eval")}
    assert alone.keys() == losses.keys()
    for key, loss in alone.items():
        assert losses[key] == pytest.approx(loss, rel=1e-4), key


def begin_with(begun: torch.Tensor, rows: EncodedDataset) -> EncodedDataset:
    """Return ``rows`` with these untrained tokens before each."""
    return EncodedDataset(
        input_ids=tuple(torch.cat([begun, ids]) for ids in rows.input_ids),
        targets=tuple(torch.cat([torch.full_like(begun, -100), target]) for target in rows.targets),
    )


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_rows_that_begin_alike_have_the_losses_and_gradients_that_they_have_by_themselves(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = torch.arange(2, 13)
    data = replace(
        ROWS, train=begin_with(begun, ROWS.train), validation=begin_with(begun, make_dataset(12, 4)), test=None
    )
    num_tokens: list[int] = []
    hidden_states = Backbone.hidden_states

    def counted(self: Backbone, input_ids_T: torch.Tensor, *given: object) -> torch.Tensor:
        num_tokens.append(len(input_ids_T))
        return hidden_states(self, input_ids_T, *given)

    monkeypatch.setattr(Backbone, "hidden_states", counted)
    backbone = Backbone(make_model(family), None, "unused")
    with built(tmp_path / "run", task_of(max_slots=2, max_tokens_per_pass=4096), data, backbone) as session:
        jobs = list(session.state.jobs.values())[:2]
        for slot, job in enumerate(jobs):
            job.slot = slot
            session.state.trainer.admit(job, slot)
        for _ in range(3):
            session.state.trainer.step(jobs)
        for evaluate in (
            lambda: session.state.trainer.evaluate(jobs),
            lambda: session.state.trainer.evaluate_base(session.state.context, [jobs[0].config]),
        ):
            num_tokens.clear()
            shared, num_shared = evaluate(), sum(num_tokens)
            with monkeypatch.context() as patched:
                patched.setattr(Backbone, "shares_beginnings", False)
                num_tokens.clear()
                alone = evaluate()
            assert sum(num_tokens) - num_shared == 11 * len(begun) * len(alone)
            for one, other in zip(shared, alone, strict=True):
                assert one.rows["loss"] == pytest.approx(other.rows["loss"], rel=1e-5)
                assert one.loss == pytest.approx(other.loss, rel=1e-6)

        def gradients() -> tuple[torch.Tensor, torch.Tensor, int]:
            num_tokens.clear()
            losses = session.state.trainer.backward(jobs)
            found = session.state.trainer.bank.grads_ZP.clone()
            session.state.trainer.forget()
            return losses, found, sum(num_tokens)

        losses, grads, num_shared = gradients()
        assert torch.equal(grads, gradients()[1]), "the same bits in every run"
        with monkeypatch.context() as patched:
            patched.setattr(Backbone, "shares_beginnings", False)
            losses_alone, grads_alone, num_alone = gradients()
            assert num_alone - num_shared == 3 * len(begun) * len(jobs)
        assert losses.tolist() == pytest.approx(losses_alone.tolist(), rel=1e-6)
        assert (grads - grads_alone).norm() < 1e-5 * grads_alone.norm()
        jobs[0].planned = replace(
            jobs[0].planned, job=replace(jobs[0].planned.job, config=jobs[0].config.replace(lora_dropout=0.5))
        )
        assert num_alone - gradients()[2] == 3 * len(begun), "draws per token cover all tokens"
        for job in jobs:
            session.state.slot_manager._free(job)


@pytest.mark.parametrize(
    "changes",
    [{"early_exit": False}, {"early_exit": {"policy": "paper"}}, {"early_exit": {"evaluation_share": "all"}}],
    ids=["off", "paper", "all"],
)
def test_elsewhere_all_rows_are_evaluated_at_every_interval(changes: dict[str, object]) -> None:
    task = task_of(**changes)
    assert task.early_exit.evaluations is None


@pytest.mark.parametrize("changes", [{"method": "kto"}, {"metric": "reward_accuracy", "method": "dpo"}])
@pytest.mark.parametrize("num_jobs", [2, 8, 24])
def test_where_rows_cannot_be_compared_all_are_evaluated_but_not_where_no_job_can_end(
    changes: dict[str, object], num_jobs: int
) -> None:
    space = {"lr": [1e-4 * (index + 1) for index in range(num_jobs)], "r": [4], "batch_size": [4]}
    context = planned(**changes, search_space=space)
    early_exit, policy = context.task.early_exit, context.policy
    assert {rows for _, rows in early_exit.evaluations or ()} == {40}
    assert policy.rungs, "a job ends"
    assert policy.ending_rungs(num_jobs) == policy.rungs
    assert context.evaluation_order == ()
    assert not context.has_final_evaluations, "all evaluations were on all rows"
    most = len(planned(**changes, search_space=space, early_exit={"evaluation_share": 1e-6}).jobs[0].evaluation_steps)
    assert most <= len(context.jobs[0].evaluation_steps) < 20


@pytest.mark.parametrize("changes", [{"method": "kto"}, {"metric": "reward_accuracy", "method": "dpo"}])
def test_evaluations_on_some_rows_are_refused_where_they_cannot_be_compared(changes: dict[str, object]) -> None:
    early_exit = {"evaluations": [[1.0, 12]], "final_evaluations": [2, 12]}
    task = make(**settings_of(**changes, early_exit=early_exit))
    with pytest.raises(SpecError, match=r"early_exit\.evaluations: expected metric loss and one of the methods sft"):
        resolve_early_exit(task, ROWS, begins=True)


def test_the_time_of_a_run_is_recorded_by_what_it_was_spent_on(run: Run, tmp_path: Path) -> None:
    (completed,) = run.events("task_completed")
    history = read_history(run.root)
    assert history.time_s == completed["time_s"]
    assert set(history.time_s) == {"training", "evaluation", "saving"}
    assert all(seconds > 0 for seconds in history.time_s.values())
    assert sum(history.time_s.values()) <= history.duration_s + 0.1
    sample_s = history.time_s["training"] / history.samples_trained
    left_s = sample_s * (history.samples_budgeted - history.samples_trained)
    assert training_all_s(history) == pytest.approx(history.duration_s + left_s)
    stopped = Run(tmp_path / "run", task_of(), data=ROWS).train(turns=9)
    before = read_history(stopped.root).time_s["training"]
    stopped.train()
    assert stopped.events("checkpoint")[0]["time_s"]["training"] == pytest.approx(before)
    assert read_history(stopped.root).time_s["training"] > before
