"""Searches that suggest jobs while others train, and their budgets, through the executor."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resident_jobs import DATA, PAIRS, make_model
from searches import PBT, SPACE, TPE, Run, make
from shared_executor import built

from alto.backbone import Backbone
from alto.errors import TargetModuleError
from alto.executor import Ranks, TaskSession, shared_bank
from alto.lora import AdapterBank
from alto.runs import JobAction, Mailbox, RunDir, read_history, task_outcome
from alto.runs.progress import rung_costs
from alto.search import TimeSpent, Trial
from alto.version import install_command
from alto.views.tables import job_table
from alto.views.wording import describe_savings

pytest.importorskip("optuna", reason="needs the search extra: pip install -e '.[search]'")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_suggestions_fill_slots_as_others_train(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", make(TPE)).train()
    added = run.added()
    assert [event["job"] for event in added] == [f"job-{number:03d}" for number in range(4, 12)]
    for event in added:
        assert "origin" not in event
        assert set(event["values"]) == {"learning_rate", "r", "per_device_train_batch_size"}
        assert event["config"]["learning_rate"] == event["values"]["learning_rate"]
    assert len({tuple(event["values"].values()) for event in added}) == 8
    run.assert_decided_as_journalled()
    first_waits = run.events("eval")[0]["seq"]
    assert run.events("job_added")[0]["seq"] > first_waits, "all four slots trained before"
    last_end = [event["seq"] for event in run.events("job_exited", "job_completed")][-1]
    assert run.events("job_added")[-1]["seq"] < last_end, "they joined while others trained"
    history = read_history(run.root)
    assert len(history.jobs) == 12
    assert history.result is not None
    costs = rung_costs(history)
    assert [(cost.num_kept, cost.num_dropped) for cost in costs] == [
        *((len(rung.kept), len(rung.dropped)) for rung in history.rungs),
        (None, None),
    ]
    assert [cost.until for cost in costs] == [rung.progress for rung in history.rungs] + [1.0]
    assert sum(cost.samples_trained for cost in costs) == history.samples_trained
    assert costs[0].samples_trained > 0
    assert all(cost.samples_trained >= 0 for cost in costs), "two rungs of few steps may be one step"
    assert sum(cost.share for cost in costs) == pytest.approx(1.0)
    ends = {job.exit_reason for job in history.jobs.values()}
    assert ends <= {None, "underperforming", "overfitting", "diverging"}
    origins = [row.origin for row in sorted(job_table(history).rows, key=lambda row: row.job)]
    assert origins == [""] * 4 + ["suggested by the search"] * 8


def test_a_search_that_is_interrupted_suggests_the_same(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", make(TPE)).train()
    parted = Run(tmp_path / "parted", make(TPE))
    for turns in (4, 6, 3):
        parted.train(turns)
    parted.train()
    assert parted.added() == whole.added()
    for history in (read_history(whole.root), read_history(parted.root)):
        assert history.result is not None
    assert read_history(parted.root).result.best_job == read_history(whole.root).result.best_job
    parted.assert_decided_as_journalled()


def test_random_configurations_all_begin_with_the_task(tmp_path: Path) -> None:
    task = make({"algorithm": "random", "budget": {"jobs": 5}})
    run = Run(tmp_path / "run", task).train()
    assert [job.id for job in task.jobs] == list(read_history(run.root).jobs)
    assert len(task.jobs) == 5
    assert run.added() == []


def test_a_missing_optuna_is_reported_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from alto.errors import UnsupportedError
    from alto.search import check_installed

    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UnsupportedError, match=re.escape(install_command("search"))):
        check_installed()


def test_jobs_that_all_end_at_once_do_not_end_the_search(tmp_path: Path) -> None:
    search = {"algorithm": "tpe", "num_initial_jobs": 3, "budget": {"jobs": 7}}
    task = make(search, search_space={"lr": SPACE["lr"]}, early_exit=False, num_train_epochs=2)
    whole = Run(tmp_path / "whole", task).train()
    assert len(whole.added()) == 4
    assert len(whole.events("job_completed")) == 7
    parted = Run(tmp_path / "parted", task)
    for turns in (4, 3):
        parted.train(turns)
    parted.train()
    assert parted.added() == whole.added()
    parted.assert_decided_as_journalled()


class TestASuggestionThatDoesNotFit:
    TASK = make(
        {"algorithm": "tpe", "num_initial_jobs": 3, "budget": {"jobs": 14}},
        search_space={"lr": SPACE["lr"], "r": [2, 4, 8, 64]},
        num_train_epochs=1,
        data_seed=42,
    )

    @pytest.fixture(autouse=True)
    def small_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Bank(AdapterBank):
            def __init__(self, layout: Any, num_slots: int, **settings: Any) -> None:
                if layout.max_rank > 8:
                    raise torch.OutOfMemoryError("no memory, as the test wants it")
                super().__init__(layout, num_slots, **settings)

        monkeypatch.setattr(shared_bank, "AdapterBank", Bank)

    def test_others_are_suggested_and_it_is_reported(self, tmp_path: Path) -> None:
        run = Run(tmp_path / "run", self.TASK).train()
        misfits = [event["job"] for event in run.added() if event["config"]["r"] == 64]
        assert len(run.added()) == 11
        assert 1 <= len(misfits) <= 3, "similar configurations are avoided"
        assert run.events("oom") == [], "the bank is as large as before"
        ends = [event for event in run.events("job_exited") if event["reason"] == "failed"]
        assert [event["job"] for event in ends] == misfits
        assert all(event["evidence"]["adapter_bytes"] > 0 and event["step"] == 0 for event in ends)
        run.assert_decided_as_journalled()
        row = next(row for row in job_table(read_history(run.root)).rows if row.job == misfits[0])
        assert row.outcome == "failed"
        assert "its adapter" in row.explanation
        assert "does not fit into memory" in row.explanation
        assert read_history(run.root).result is not None

    def test_a_run_that_is_interrupted_suggests_the_same(self, tmp_path: Path) -> None:
        whole, parted = Run(tmp_path / "whole", self.TASK).train(), Run(tmp_path / "parted", self.TASK)
        while not any(event["config"]["r"] == 64 for event in parted.train(2).added()):
            assert len(parted.added()) < 11
        parted.train()
        assert parted.added() == whole.added()

    def test_it_is_resumed_where_there_is_memory_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = Run(tmp_path / "run", self.TASK)
        misfits: list[str] = []
        while not misfits:
            misfits = [event["job"] for event in run.train(2).added() if event["config"]["r"] == 64]
        misfit = misfits[0]
        mailbox = Mailbox(RunDir(run.root))
        refused = mailbox.send(JobAction.RESUME, misfit)
        run.train(1)
        assert "for the base model and one adapter of rank 64" in mailbox.wait_for_answer(refused, 0).message
        monkeypatch.setattr(shared_bank, "AdapterBank", AdapterBank)
        mailbox.send(JobAction.RESUME, misfit)
        run.train()
        assert misfit in {event["job"] for event in run.events("eval")}
        run.assert_decided_as_journalled()


def test_the_search_gets_the_results_of_every_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the values at exactly half of the steps, the best value of finished jobs, and the jobs that did not fit
    into memory."""
    from alto.executor.micro_batches import RowTooLargeError
    from alto.executor.trainer import Trainer

    evaluate = Trainer.evaluate

    def little_memory(trainer: Trainer, jobs: Any, split: str = "validation", **options: Any) -> Any:
        wide = next((job for job in jobs if job.config.r == 8), None)
        if wide is not None:
            raise RowTooLargeError(wide.slot, 40, 0)
        return evaluate(trainer, jobs, split, **options)

    monkeypatch.setattr(Trainer, "evaluate", little_memory)
    early_exit = {"rungs": [[0.5, 0.5]], "detect_divergence": False, "detect_overfitting": False}
    run = Run(tmp_path / "run", make({**TPE, "budget": {"jobs": 6}}, early_exit=early_exit, weight_decay=0.07))
    found: dict[str, Trial] = {}
    finish = run.finish

    def noted(session: TaskSession) -> None:
        finish(session)
        exploration = session._exploration
        found.update(zip((job.id for job in exploration._chosen()), exploration._trials(), strict=True))

    monkeypatch.setattr(run, "finish", noted)
    run.train()
    history = read_history(run.root)
    assert len(found) == len(history.jobs) == 6
    assert {job.config["weight_decay"] for job in history.jobs.values()} == {0.07}
    for job_id, trial in found.items():
        job = history.jobs[job_id]
        assert trial.has_ended
        assert trial.is_infeasible == (job.exit_reason == "failed") == (trial.values["r"] == 8)
        assert len(trial.losses) == (0 if trial.is_infeasible else 1)
        assert trial.final == (job.best_validation_loss if job.exit_reason is None else None)
        if trial.values["per_device_train_batch_size"] == 7 and trial.losses:
            assert trial.losses == (next(point.validation_loss for point in job.evaluations if point.step == 6),)
    assert {job.exit_reason for job in history.jobs.values()} == {None, "failed", "underperforming"}
    evaluated = [job for job in found if not found[job].is_infeasible]
    starts = [history.jobs[job].start for job in evaluated]
    assert None not in starts, "suggested jobs are compared at equal shares too"
    assert len({start.validation_loss for start in starts if start}) == 1


def test_where_the_metric_decides_higher_is_better(tmp_path: Path) -> None:
    from alto.executor.planned_job import resolve_rungs

    search = {"algorithm": "tpe", "num_initial_jobs": 2, "budget": {"jobs": 3}}
    space = {"lr": {"min": 1e-5, "max": 1e-2, "log": True}, "batch_size": [4, 7]}
    task = make(search, method="dpo", beta=0.3, metric="reward_margin", search_space=space, early_exit=False)
    task = resolve_rungs(task, len(PAIRS.train))
    backbone = Backbone(make_model("llama"), None, "unused")
    with built(tmp_path / "run", task, PAIRS, backbone) as session:
        Run(tmp_path / "run", task).finish(session)
        trials = session._exploration._trials()
        jobs = session.state.jobs
        assert [trial.final for trial in trials] == [-session.state.selection.best(job).score for job in jobs]
        assert all(trial.final != 0 for trial in trials)


def test_two_spellings_of_one_configuration_are_trained_once(tmp_path: Path) -> None:
    space = {"r": [4, 8], "alpha": ["r", 8]}
    search = {"algorithm": "tpe", "num_initial_jobs": 2, "budget": {"jobs": 4}}
    run = Run(tmp_path / "run", make(search, search_space=space, num_train_epochs=1)).train()
    configs = [tuple(sorted(map(str, job.config.items()))) for job in read_history(run.root).jobs.values()]
    assert len(configs) == len(set(configs)) == 3


def test_targets_that_only_a_suggestion_would_have_are_checked_before_training(tmp_path: Path) -> None:
    space = {"target_modules": [["q_proj"], ["k_proj"], ["w_proj"]], "lr": {"min": 1e-4, "max": 1e-3}}
    task = make({"algorithm": "tpe", "num_initial_jobs": 2}, search_space=space, data_seed=3)
    assert all(job.config.target_modules != ("w_proj",) for job in task.jobs)
    backbone = Backbone(make_model("llama"), None, "unused")
    with pytest.raises(TargetModuleError, match="w_proj"), built(tmp_path / "run", task, DATA, backbone):
        pass


def test_clones_of_a_user_are_not_counted_by_the_search(tmp_path: Path) -> None:
    """They are neither counted as tried nor told to the estimator, because they have no place in the search space."""
    search = {"algorithm": "tpe", "num_initial_jobs": 2, "budget": {"jobs": 4}}
    run = Run(tmp_path / "run", make(search, num_train_epochs=1, early_exit=False)).train(turns=2)
    Mailbox(RunDir(run.root)).send(JobAction.CLONE, "job-000", changes={"weight_decay": 0.5})
    run.train()
    origins = [event.get("origin") for event in run.added()]
    assert sorted(map(str, origins)) == ["None", "None", "job-000"]
    run.assert_decided_as_journalled()


def test_only_slots_that_nobody_can_use_are_given_to_suggestions(tmp_path: Path) -> None:
    """A job that waits at a rung needs no slot, unless it continues in an idle one."""
    early_exit = {"rungs": [[0.05, 1.0]], "detect_overfitting": False, "detect_divergence": False}
    task = make({**TPE, "num_initial_jobs": 3}, max_slots=3, early_exit=early_exit)
    with built(tmp_path / "run", task, DATA, Backbone(make_model("llama"), None, "unused")) as session:
        exploration, state = session._exploration, session.state
        exploration.suggest(3)
        assert len(state.jobs) == 3
        job, step = "job-000", state.selection.rungs.next_stop("job-000")
        for number in range(1, step + 1):
            state.selection.observe_losses(job, number, [1.0])
        state.selection.observe(job, step, 1.0)
        assert state.selection.rungs.is_waiting(job)
        state.ahead = frozenset({job})
        exploration.suggest(3)
        assert len(state.jobs) == 3
        state.ahead = frozenset()
        exploration.suggest(3)
        assert len(state.jobs) == 4


@pytest.mark.parametrize("search", [TPE, PBT], ids=["tpe", "pbt"])
def test_jobs_that_the_search_adds_take_the_places_of_others(search: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tmp_path / "run", make(search, max_slots=16))
    sizes: list[int] = []
    finish = run.finish

    def noted(session: TaskSession) -> None:
        sizes.append(session.state.slot_manager.num_slots)
        finish(session)
        sizes.append(session.state.slot_manager.num_slots)

    run.finish = noted  # type: ignore[method-assign]
    run.train()
    assert len(run.added()) > 1
    assert sizes == [4, 4]


def turns() -> Callable[[], float]:
    """Return a clock that is read once per turn, and advances a second each time."""
    return map(float, itertools.count()).__next__


class TestABudget:
    @pytest.mark.parametrize(
        "search",
        [
            {},
            {"algorithm": "random", "budget": {"jobs": 6}},
            PBT,
            {"algorithm": "tpe", "num_initial_jobs": 4},
        ],
        ids=["grid", "random", "pbt", "tpe"],
    )
    @pytest.mark.parametrize("selects", [True, False])
    def test_with_a_budget_of_time_the_winner_trains_to_its_end(
        self, tmp_path: Path, search: dict[str, Any], selects: bool
    ) -> None:
        budget = {**search.get("budget", {}), "duration_s": 30}
        space = {"lr": [1e-5, 1e-4, 1e-3], "r": [2, 4], "batch_size": [4]}
        rules = {"select": selects or search == PBT, "detect_overfitting": False, "detect_divergence": False}
        task = make({**search, "budget": budget}, search_space=space, max_slots=2, early_exit=rules)
        clock = turns()
        run = Run(tmp_path / "run", task, clock=clock).train()
        assert clock() <= 30 + 2
        history = read_history(run.root)
        winner = history.best
        assert winner is not None
        assert winner.step == winner.total_steps
        assert selects or "budget" in {job.exit_reason for job in history.jobs.values()}
        run.assert_decided_as_journalled()

    def test_with_a_budget_of_samples_the_winner_trains_to_its_end(self, tmp_path: Path) -> None:
        task = make({"budget": {"samples": 100}}, search_space={"lr": [1e-4, 1e-3]}, early_exit=False)
        assert 3 * len(DATA.train) < 100 < 2 * 3 * len(DATA.train)
        run = Run(tmp_path / "run", task).train()
        history = read_history(run.root)
        assert history.best is not None
        assert history.best.step == history.best.total_steps
        assert [job.exit_reason for job in history.jobs.values() if job is not history.best] == ["budget"]
        assert history.samples_trained <= 100
        assert history.samples_saved == 0, "a budget does not count as saving"
        assert history.samples_cut_off == history.samples_budgeted - history.samples_trained > 0
        shares = "0 % saved, 50 % cut off by the budget"
        assert describe_savings(history) == shares
        outcome = task_outcome(history, RunDir(run.root))
        assert outcome.samples_saved == pytest.approx(0)
        assert outcome.samples_cut_off == pytest.approx(history.samples_cut_off / history.samples_budgeted)
        run.assert_decided_as_journalled()

    def test_a_budget_too_small_for_one_job_ends_it_with_the_best_so_far(self, tmp_path: Path) -> None:
        task = make({"budget": {"samples": 40}}, search_space={"lr": [1e-4, 1e-3]}, early_exit=False)
        run = Run(tmp_path / "run", task).train()
        history = read_history(run.root)
        assert {job.exit_reason for job in history.jobs.values()} == {"budget"}
        assert history.result is not None

    def test_time_before_an_interruption_counts(self, tmp_path: Path) -> None:
        task = make({"budget": {"duration_s": 3600}}, search_space={"lr": [1e-4, 1e-3]}, early_exit=False)
        run = Run(tmp_path / "run", task).train(turns=6)
        spent = read_history(run.root).duration_s
        assert spent > 0
        run.task = task.replace(search={"budget": {"duration_s": spent}})
        run.train()
        assert {event["reason"] for event in run.events("job_exited")} == {"budget"}

    def test_from_two_fifths_on_the_slots_are_for_the_jobs_that_train(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from alto.executor import session
        from alto.executor.exploration import Exploration

        beside_others: list[float] = []
        add = Exploration._add_suggestion

        def noted(exploration: Exploration) -> bool:
            if exploration._state.selection.training:
                beside_others.append(exploration.spent_fraction(TimeSpent()))
            return add(exploration)

        monkeypatch.setattr(Exploration, "_add_suggestion", noted)
        search = {"algorithm": "tpe", "num_initial_jobs": 3, "budget": {"samples": 900}}
        settings = {"early_exit": {"rungs": [[0.25, 0.5], [0.5, 0.5]]}, "max_slots": 3}
        run = Run(tmp_path / "run", make(search, **settings)).train()
        run.assert_decided_as_journalled()
        assert len(beside_others) > 2
        assert max(beside_others) < 0.4
        beside_others.clear()
        monkeypatch.setattr(session, "EXPLORING_FRACTION", 1.0)
        Run(tmp_path / "further", make(search, **settings)).train()
        assert max(beside_others) > 0.5

    def test_once_all_have_ended_another_is_tried(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from alto.executor import session

        monkeypatch.setattr(session, "EXPLORING_FRACTION", 0.0)
        search = {"algorithm": "tpe", "num_initial_jobs": 2, "budget": {"samples": 900}}
        run = Run(tmp_path / "run", make(search, max_slots=3, early_exit=False)).train()
        assert run.added()
        training = set(read_history(run.root).jobs) - {event["job"] for event in run.added()}
        for event in run.events("job_added", "job_completed", "job_exited"):
            if event["event"] == "job_added":
                assert not training
                training = {event["job"]}
            else:
                training.remove(event["job"])
        assert not run.events("job_exited"), "a job began that cannot finish"
        assert 900 - 2 * 3 * len(DATA.train) < read_history(run.root).samples_trained <= 900

    def test_a_budget_that_ends_before_the_first_evaluation_is_an_error(self, tmp_path: Path) -> None:
        from alto.errors import NoResultError

        task = make({"budget": {"samples": 1}}, search_space={"lr": [1e-4, 1e-3]}, early_exit=False, eval_steps=1.0)
        run = Run(tmp_path / "run", task)
        with pytest.raises(NoResultError, match="budget"):
            run.train()

    def test_money_is_time_on_gpus(self) -> None:
        budget = make({"algorithm": "tpe", "budget": {"cost": 10, "gpu_hour_price": 2.5}}).search.budget
        assert budget.max_duration_s(1) == pytest.approx(4 * 3600)
        assert budget.max_duration_s(8) == pytest.approx(1800)


def test_a_plan_counts_the_jobs_that_will_be_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from alto.executor import TaskContext
    from alto.executor.planned_job import resolve_rungs
    from alto.executor.profiling.planning import _with_search

    backbone = Backbone(make_model("llama"), None, "unused")

    def expected(search: Any, **changes: Any) -> float:
        task = resolve_rungs(make(search, **changes), len(DATA.train))
        return _with_search(100.0, TaskContext.of(task, backbone, DATA, Ranks(0, task.num_gpus)))

    assert expected(TPE) == pytest.approx(100 * 12 / 4)
    assert expected({**TPE, "budget": {"jobs": 12, "duration_s": 60}}) == 60
    samples = 3 * len(DATA.train) * 12
    assert expected({**TPE, "budget": {"jobs": 12, "samples": samples // 2}}) == pytest.approx(150)
    assert expected({**TPE, "budget": {"jobs": 12, "samples": 2 * samples}}) == pytest.approx(300)
    assert expected(PBT) == 100
    grid = {"lr": [1e-5, 1e-4, 1e-3], "r": [2, 4, 8]}
    assert expected("grid", search_space=grid) == 100, "all jobs of a grid start with the task"
    assert expected({"budget": {"duration_s": 60}}, search_space=grid) == 60
    budget = {"cost": 1, "gpu_hour_price": 60}
    assert [expected({"budget": budget}, search_space=grid, num_gpus=number) for number in (1, 2)] == [60, 30]
    assert expected({"algorithm": "random", "budget": {"jobs": 5}}) == 100


class TestWhatIsSpent:
    def test_rows_of_all_jobs_count_also_of_those_that_ended(self, tmp_path: Path) -> None:
        from alto.records import ExitDecision, ExitReason

        space = {"lr": [1e-4, 1e-3], "batch_size": [4]}
        task = make({"budget": {"samples": 16}}, search_space=space)
        with built(tmp_path / "run", task, DATA, Backbone(make_model("llama"), None, "unused")) as session:
            first, second = session.state.jobs.values()
            first.step, second.step = 3, 0
            assert session._exploration.spent_fraction(TimeSpent()) < 1
            second.step = 1
            assert session._exploration.spent_fraction(TimeSpent()) >= 1, "3 * 4 + 4 rows are exactly the budget"
            session.state.selection.end(ExitDecision(job=first.id, step=3, reason=ExitReason.STOPPED))
            assert session._exploration.spent_fraction(TimeSpent()) >= 1

    def test_money_is_spent_on_every_gpu(self, tmp_path: Path) -> None:
        budget = {"cost": 1, "gpu_hour_price": 1}
        task = make({"budget": budget}, search_space={"lr": [1e-4, 1e-3]})
        with built(tmp_path / "run", task, DATA, Backbone(make_model("llama"), None, "unused")) as session:
            exploration, spent = session._exploration, TimeSpent(spent_s=1900)
            assert exploration.spent_fraction(spent) < 1
            session.state.context.ranks.size = 2
            assert exploration.spent_fraction(spent) >= 1
            session.state.context.ranks.size = 1
