"""Budgets of searches, through the executor."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from company import built
from resident_jobs import DATA, make_model
from searches import PBT, TPE, Run, make

from alto.backbone import Backbone
from alto.executor import Ranks
from alto.runs import RunDir, read_history, task_outcome
from alto.search import TimeSpent
from alto.views.wording import describe_savings

pytest.importorskip("optuna", reason="needs the search extra: pip install -e '.[search]'")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def turns() -> Callable[[], float]:
    """A clock that is looked at once a turn, and then a second further."""
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
    def test_of_time_trains_the_winner_to_its_end(self, tmp_path: Path, search: dict[str, Any], selects: bool) -> None:
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

    def test_of_samples_trains_the_winner_to_its_end(self, tmp_path: Path) -> None:
        task = make({"budget": {"samples": 100}}, search_space={"lr": [1e-4, 1e-3]}, early_exit=False)
        assert 3 * len(DATA.train) < 100 < 2 * 3 * len(DATA.train)
        run = Run(tmp_path / "run", task).train()
        history = read_history(run.root)
        assert history.best is not None
        assert history.best.step == history.best.total_steps
        assert [job.exit_reason for job in history.jobs.values() if job is not history.best] == ["budget"]
        assert history.samples_trained <= 100
        assert history.samples_saved == 0, "a budget saves nothing"
        assert history.samples_cut_off == history.samples_budgeted - history.samples_trained > 0
        shares = "0 % saved, 50 % cut off by the budget"
        assert describe_savings(history) == shares
        outcome = task_outcome(history, RunDir(run.root))
        assert outcome.samples_saved == pytest.approx(0)
        assert outcome.samples_cut_off == pytest.approx(history.samples_cut_off / history.samples_budgeted)
        run.assert_decided_as_journalled()

    def test_that_is_too_small_for_one_ends_it_with_the_best_so_far(self, tmp_path: Path) -> None:
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
                beside_others.append(exploration.spent_share(TimeSpent()))
            return add(exploration)

        monkeypatch.setattr(Exploration, "_add_suggestion", noted)
        search = {"algorithm": "tpe", "num_initial_jobs": 3, "budget": {"samples": 900}}
        settings = {"early_exit": {"rungs": [[0.25, 0.5], [0.5, 0.5]]}, "max_slots": 3}
        run = Run(tmp_path / "run", make(search, **settings)).train()
        run.assert_decided_as_journalled()
        assert len(beside_others) > 2
        assert max(beside_others) < 0.4
        beside_others.clear()
        monkeypatch.setattr(session, "EXPLORING_SHARE", 1.0)
        Run(tmp_path / "further", make(search, **settings)).train()
        assert max(beside_others) > 0.5

    def test_once_all_have_ended_another_is_tried(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from alto.executor import session

        monkeypatch.setattr(session, "EXPLORING_SHARE", 0.0)
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
        assert not run.events("job_exited"), "none begins that cannot be finished"
        assert 900 - 2 * 3 * len(DATA.train) < read_history(run.root).samples_trained <= 900

    def test_of_nothing_yet_is_an_error(self, tmp_path: Path) -> None:
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
    assert expected("grid", search_space=grid) == 100, "all of a grid begin with the task"
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
            assert session._exploration.spent_share(TimeSpent()) < 1
            second.step = 1
            assert session._exploration.spent_share(TimeSpent()) >= 1, "3 * 4 + 4 rows are exactly the budget"
            session.state.selection.end(ExitDecision(job=first.id, step=3, reason=ExitReason.STOPPED))
            assert session._exploration.spent_share(TimeSpent()) >= 1

    def test_money_is_spent_on_every_gpu(self, tmp_path: Path) -> None:
        budget = {"cost": 1, "gpu_hour_price": 1}
        task = make({"budget": budget}, search_space={"lr": [1e-4, 1e-3]})
        with built(tmp_path / "run", task, DATA, Backbone(make_model("llama"), None, "unused")) as session:
            exploration, spent = session._exploration, TimeSpent(spent_s=1900)
            assert exploration.spent_share(spent) < 1
            session.state.context.ranks.size = 2
            assert exploration.spent_share(spent) >= 1
            session.state.context.ranks.size = 1
