"""Searches that add jobs while others train, through the executor: suggestions, populations, budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from company import built
from oracle import SoloJob
from resident_jobs import DATA, PAIRS, assert_same_step, make_model

from alto.backbone import Backbone
from alto.early_exit import audit
from alto.errors import TaskInterruptedError
from alto.executor import Executor, Hooks, Ranks, TaskSession, assembly
from alto.executor.checkpoint import read_state
from alto.export.tables import job_table
from alto.lora import AdapterBank
from alto.runs import Action, Mailbox, RunDir, read_entries, read_events, read_history
from alto.runs.progress import rung_costs
from alto.search import Trial
from alto.spec import Task

pytest.importorskip("optuna", reason="needs the search extra: pip install -e '.[search]'")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SPACE = {"lr": {"min": 1e-5, "max": 1e-2, "log": True}, "r": [2, 4, 8], "batch_size": [4, 7]}
TPE = {"algorithm": "tpe", "num_initial_jobs": 4, "budget": {"jobs": 12}}
PBT = {"algorithm": "pbt", "num_initial_jobs": 4, "interval": 0.2, "exchanged": 0.25}


def make(search: dict[str, Any], **changes: Any) -> Task:
    settings = {
        "model": "unused",
        "dataset": "unused.jsonl",
        "name": "searched",
        "max_slots": 4,
        "max_tokens_per_pass": 400,
        "num_train_epochs": 3,
        "eval_steps": 0.25,
        "search": search,
        "search_space": SPACE,
    }
    return Task(**{**settings, **changes})


class Run:
    """One run of a task, in this process."""

    def __init__(self, folder: Path, task: Task) -> None:
        self.folder = folder
        self.task = task

    def train(self, turns: int | None = None) -> Run:
        """To its end, or so many turns, after which it is stopped and saved."""
        left = [turns]

        def is_interrupted() -> bool:
            if left[0] is None:
                return False
            left[0] -= 1
            return left[0] < 0

        from alto.executor.planned_job import resolve_rungs

        task = resolve_rungs(self.task, len(DATA.train))
        backbone = Backbone(make_model("llama"), None, "unused")
        with built(self.folder, task, DATA, backbone, hooks=Hooks(is_interrupted=is_interrupted)) as session:
            if turns is None:
                self.finish(session)
            else:
                with pytest.raises(TaskInterruptedError):
                    self.finish(session)
        return self

    def finish(self, session: TaskSession) -> None:
        executor = Executor(session.bank)
        executor.attach("run", session)
        ended: dict[str, Exception | None] = {}
        while not ended:
            ended = executor.turn()
        if ended["run"] is not None:
            raise ended["run"]

    @property
    def root(self) -> Path:
        (root,) = self.folder.iterdir()
        return root

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.root / "journal.jsonl") if not kinds or event["event"] in kinds]

    def added(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in event.items() if key not in ("seq", "time")}
            for event in self.events("job_added")
        ]

    def assert_decided_as_journalled(self) -> None:
        assert audit(read_entries(self.root / "journal.jsonl")) == ()


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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of a population, to its end."""
    return Run(tmp_path_factory.mktemp("population") / "run", make(PBT)).train()


class TestAPopulation:
    def test_it_stays_as_large_as_it_was(self, run: Run) -> None:
        forks = run.added()
        dropped = [event["job"] for event in run.events("job_exited") if event["reason"] == "underperforming"]
        assert [fork["replaces"] for fork in forks] == dropped
        assert len(run.events("warmup_ended")) == 4
        assert len(forks) == 4
        assert len(run.events("job_completed")) == 4
        run.assert_decided_as_journalled()

    def test_copies_have_changed_settings_and_count_only_what_they_train(self, run: Run) -> None:
        configs = {job["job"]: job["config"] for job in run.events("task_started")[0]["jobs"]}
        ends = {event["job"]: event for event in run.events("job_exited", "job_completed")}
        for fork in run.added():
            origin, config = configs[fork["origin"]], fork["config"]
            configs[fork["job"]] = config
            assert config["learning_rate"] / origin["learning_rate"] == pytest.approx(0.8) or config[
                "learning_rate"
            ] == pytest.approx(min(origin["learning_rate"] * 1.25, 1e-2))
            same = {"learning_rate", "weight_decay", "lora_dropout"} ^ set(origin)
            assert {key: config[key] for key in same} == {key: origin[key] for key in same}
            share = fork["samples_budgeted"] / (3 * len(DATA.train))
            assert share == pytest.approx(1 - fork["forked_at"] / fork["total_steps"], abs=0.1)
            assert ends[fork["job"]]["samples_trained"] <= fork["samples_budgeted"]

    def test_the_lineage_is_shown(self, run: Run) -> None:
        history = read_history(run.root)
        for fork in run.added():
            assert history.jobs[fork["job"]].origin == fork["origin"]
            (row,) = (row for row in job_table(history).rows if row.job == fork["job"])
            assert row.origin == f"continues {fork['origin']} from step {fork['forked_at']}"
        assert sum(job.samples_trained for job in history.jobs.values()) <= history.samples_budgeted

    def test_killed_or_not_the_lineage_is_the_same(self, run: Run, tmp_path: Path) -> None:
        parted = Run(tmp_path / "parted", make(PBT))
        for turns in (3, 5, 2, 4):
            parted.train(turns)
        parted.train()
        assert parted.added() == run.added()
        ends = [
            {event["job"]: event["samples_trained"] for event in of_one.events("job_exited", "job_completed")}
            for of_one in (parted, run)
        ]
        assert ends[0] == ends[1]
        assert read_history(parted.root).result.best_job == read_history(run.root).result.best_job


def test_a_copied_row_is_its_source_bit_for_bit_and_trains_on_as_peft_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 1 for copies: the state on disk, the row in the bank, and the step from there."""
    from alto.executor import slot_manager
    from alto.executor.trainer import Trainer

    sources: dict[str, tuple[Any, Any]] = {}
    give_state = slot_manager.SlotManager.give_state

    def noted(manager: Any, fork: Any, origin: Any) -> None:
        give_state(manager, fork, origin)
        sources[fork.id] = read_state(manager._store.folder(origin.id, "last"))

    readmit, compared = Trainer.readmit, []

    def checked(trainer: Trainer, job: Any, local_slot: int, weights: Any, optimizer: Any) -> None:
        readmit(trainer, job, local_slot, weights, optimizer)
        if job.id in sources and job.step == job.forked_at:
            source_weights, source_optimizer = sources[job.id]
            row, moments = trainer.bank.read(local_slot), trainer.optimizer.read(local_slot)
            assert moments.step == source_optimizer.step == job.forked_at
            for name, pair in source_weights.items():
                assert all(torch.equal(a, b) for a, b in zip(row[name], pair, strict=True))
            for name, tensor in source_optimizer.tensors.items():
                assert torch.equal(moments.tensors[name], tensor), name
            compared.append(job.id)

    monkeypatch.setattr(slot_manager.SlotManager, "give_state", noted)
    monkeypatch.setattr(Trainer, "readmit", checked)
    found: dict[str, tuple[Any, Any, Any, Any]] = {}
    backward, update = Trainer.backward, Trainer.update

    def before(trainer: Trainer, jobs: Any) -> Any:
        losses = backward(trainer, jobs)
        for job, loss in zip(jobs, losses.tolist(), strict=True):
            if job.id in sources and job.step == job.forked_at:
                bank = trainer.bank
                gradients = {m.name: (a.clone(), b.clone()) for m, a, b in bank.matrices(bank.grads_ZP, job.slot)}
                found[job.id] = (job, loss, gradients, bank.read(job.slot))
        return losses

    def after(trainer: Trainer, jobs: Any) -> Any:
        norms = update(trainer, jobs)
        for job, norm in zip(jobs, norms.tolist(), strict=True):
            if job.id in found and len(found[job.id]) == 4:
                found[job.id] = (*found[job.id], norm, trainer.bank.read(job.slot))
        return norms

    monkeypatch.setattr(Trainer, "backward", before)
    monkeypatch.setattr(Trainer, "update", after)
    many = {**PBT, "num_initial_jobs": 6, "exchanged": 0.5}
    Run(tmp_path / "run", make(many, search_space={**SPACE, "lr": [1e-4, 3e-4, 1e-3, 5e-4]})).train()
    assert len(compared) >= 3
    num_without_dropout = 0
    for job, loss, gradients, weights, norm, later in found.values():
        if job.config.lora_dropout:
            continue  # its masks are ALTO's own; tests/executor/test_isolation.py compares them
        num_without_dropout += 1
        solo = SoloJob(make_model("llama"), DATA.train, job.config)
        solo.load(*sources[job.id])
        assert_same_step(step_facts(loss, norm, gradients, weights, later), solo.train_step())
    assert num_without_dropout >= 1


def step_facts(loss: float, norm: float, gradients: Any, before: Any, after: Any) -> Any:
    from oracle import StepFacts, flat

    first, second = flat(before), flat(after)
    updates = {name: second[name] - first[name] for name in first}
    return StepFacts(loss=loss, grad_norm=norm, gradients=flat(gradients), updates=updates)


class TestABudget:
    def test_of_samples_ends_the_task_with_the_best_so_far(self, tmp_path: Path) -> None:
        task = make({"budget": {"samples": 100}}, search_space={"lr": [1e-4, 1e-3]}, early_exit=False)
        run = Run(tmp_path / "run", task).train()
        history = read_history(run.root)
        assert {job.exit_reason for job in history.jobs.values()} == {"budget"}
        assert 100 <= history.samples_trained < 100 + 2 * 8
        assert history.result is not None
        run.assert_decided_as_journalled()

    def test_of_time_ends_it_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from alto.executor import exploration

        clock = [0.0]

        def now() -> float:
            clock[0] += 1.0
            return clock[0]

        monkeypatch.setattr(exploration.time, "monotonic", now)
        search = {"algorithm": "tpe", "num_initial_jobs": 2, "budget": {"duration_s": 40}}
        run = Run(tmp_path / "run", make(search, early_exit=False)).train()
        assert "budget" in {event["reason"] for event in run.events("job_exited")}

    def test_time_before_an_interruption_counts(self, tmp_path: Path) -> None:
        task = make({"budget": {"duration_s": 3600}}, search_space={"lr": [1e-4, 1e-3]}, early_exit=False)
        run = Run(tmp_path / "run", task).train(turns=6)
        spent = read_history(run.root).duration_s
        assert spent > 0
        run.task = task.replace(search={"budget": {"duration_s": spent}})
        run.train()
        assert {event["reason"] for event in run.events("job_exited")} == {"budget"}

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


def test_what_optuna_lacks_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from alto.errors import UnsupportedError
    from alto.search import check_installed

    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'alto-lora\[search\]'"):
        check_installed()


def test_resuming_finds_states_of_copies(tmp_path: Path) -> None:
    """A copy that was never resident before the stop is resumed from its copied state."""
    run = Run(tmp_path / "run", make(PBT))
    turns = 0
    while not (tmp_path / "run").exists() or not run.added():
        turns += 2
        run.train(turns if turns > 2 else 2)
        if turns > 60:
            break
    fork = run.added()[0]
    _, optimizer = read_state(RunDir(run.root).job(fork["job"], "last"))
    assert optimizer.step >= fork["forked_at"]


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

        monkeypatch.setattr(assembly, "AdapterBank", Bank)

    def test_others_are_suggested_and_it_is_reported(self, tmp_path: Path) -> None:
        run = Run(tmp_path / "run", self.TASK).train()
        misfits = [event["job"] for event in run.added() if event["config"]["r"] == 64]
        assert len(run.added()) == 11
        assert 1 <= len(misfits) <= 3, "configurations like it are avoided"
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
        refused = mailbox.send(Action.RESUME, misfit)
        run.train(1)
        assert "expected memory for one adapter of rank 64" in mailbox.wait_for_answer(refused, 0).message
        monkeypatch.setattr(assembly, "AdapterBank", AdapterBank)
        mailbox.send(Action.RESUME, misfit)
        run.train()
        assert misfit in {event["job"] for event in run.events("eval")}
        run.assert_decided_as_journalled()


def test_the_search_is_told_what_every_job_has_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value at exactly half of the steps, the best of those that are done, and which did not fit into memory."""
    from alto.executor.memory_errors import RowTooLargeError
    from alto.executor.trainer import Trainer

    evaluate = Trainer.evaluate

    def little_memory(trainer: Trainer, jobs: Any, split: str = "validation") -> Any:
        wide = next((job for job in jobs if job.config.r == 8), None)
        if wide is not None:
            raise RowTooLargeError(wide.slot, 40)
        return evaluate(trainer, jobs, split)

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
    assert None not in starts, "one that is suggested is compared at equal shares too"
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


def test_clones_of_a_user_are_none_of_the_search_s_configurations(tmp_path: Path) -> None:
    """They neither count as tried nor are they told to the estimator: they have no place in the search space."""
    search = {"algorithm": "tpe", "num_initial_jobs": 2, "budget": {"jobs": 4}}
    run = Run(tmp_path / "run", make(search, num_train_epochs=1, early_exit=False)).train(turns=2)
    Mailbox(RunDir(run.root)).send(Action.CLONE, "job-000", changes={"weight_decay": 0.5})
    run.train()
    origins = [event.get("origin") for event in run.added()]
    assert sorted(map(str, origins)) == ["None", "None", "job-000"]
    run.assert_decided_as_journalled()


def begun(session: TaskSession, turns: int) -> None:
    executor = Executor(session.bank)
    executor.attach("run", session)
    for _ in range(turns):
        executor.turn()


def test_copies_are_drawn_as_the_seed_and_the_rung_say_inside_the_space_and_never_of_an_ended_job(
    tmp_path: Path,
) -> None:
    """One that overfit keeps its place at a rung, but there is nothing to continue."""
    from alto.records import ExitDecision, ExitReason, RungResult
    from alto.search import forks_of

    space = {"lr": {"min": 1e-3, "max": 1.1e-3}, "r": [2, 4, 8]}
    alone = {"rungs": [[0.9, 1.0]], "detect_overfitting": False, "detect_divergence": False}
    task = make({**PBT, "exchanged": 0.5}, search_space=space, early_exit=alone, data_seed=3, weight_decay=0.1)
    with built(tmp_path / "run", task, DATA, Backbone(make_model("llama"), None, "unused")) as session:
        begun(session, 3)
        state = session.state
        reasons = {"job-000": ExitReason.OVERFITTING, "job-003": ExitReason.UNDERPERFORMING}
        ends = {job: ExitDecision(job=job, step=state.jobs[job].step, reason=reason) for job, reason in reasons.items()}
        for job, decision in ends.items():
            state.selection.end(decision)
            session._lifecycle.end(state.jobs[job], decision)
        kept = ("job-000", "job-002", "job-001")
        session._exploration.exchange(5, RungResult(kept=kept, dropped=(ends["job-003"],)))
        (copy,) = (job for job in state.jobs.values() if job.forked_at)
        configs = {job: state.jobs[job].config.to_dict() for job in kept}
    (fork,) = forks_of(kept[1:], ["job-003"], configs, {"learning_rate": (1e-3, 1.1e-3)}, exchanged=0.5, seed=3, rung=5)
    (added,) = Run(tmp_path / "run", task).added()
    assert (added["origin"], added["replaces"]) == (fork.origin, "job-003")
    assert {key: copy.config.to_dict()[key] for key in fork.changes} == fork.changes
    assert copy.config.learning_rate in (1e-3, 1.1e-3)


def test_only_slots_that_nobody_can_use_are_given_to_suggestions(tmp_path: Path) -> None:
    """A job that waits at a rung needs none, unless it continues in an idle slot."""
    early_exit = {"rungs": [[0.05, 1.0]], "detect_overfitting": False, "detect_divergence": False}
    task = make({**TPE, "num_initial_jobs": 3}, max_slots=3, early_exit=early_exit)
    with built(tmp_path / "run", task, DATA, Backbone(make_model("llama"), None, "unused")) as session:
        exploration, state = session._exploration, session.state
        exploration.suggest(3)
        assert len(state.jobs) == 3
        job, step = "job-000", state.selection.next_stop("job-000")
        for number in range(1, step + 1):
            state.selection.observe_losses(job, number, [1.0])
        state.selection.observe(job, step, 1.0)
        assert state.selection.is_waiting(job)
        state.ahead = frozenset({job})
        exploration.suggest(3)
        assert len(state.jobs) == 3
        state.ahead = frozenset()
        exploration.suggest(3)
        assert len(state.jobs) == 4


def test_a_population_keeps_its_size_at_every_rung_of_its_interval() -> None:
    from alto.early_exit import policy_from
    from alto.executor.planned_job import resolve_rungs
    from alto.spec.rungs import places_at

    def rungs(search: dict[str, Any], **early_exit: Any) -> Any:
        return policy_from(resolve_rungs(make(search, early_exit=early_exit), len(DATA.train)).early_exit).rungs

    of_eight = {"algorithm": "pbt", "num_initial_jobs": 8}
    for found in (rungs(of_eight), rungs(of_eight, finish_from=0.5)):
        assert [rung.progress for rung in found] == pytest.approx([n / 10 for n in range(1, 10)])
        assert [places_at(found, number, 8 + 2 * number) for number in range(9)] == [6] * 9
    own = rungs(of_eight, rungs=[[0.3, 0.5]])
    assert [rung.progress for rung in own] == [0.3], "those of a user are taken as they are"


class TestWhatIsSpent:
    def test_rows_of_all_jobs_count_also_of_those_that_ended(self, tmp_path: Path) -> None:
        from alto.records import ExitDecision, ExitReason

        space = {"lr": [1e-4, 1e-3], "batch_size": [4]}
        task = make({"budget": {"samples": 16}}, search_space=space)
        with built(tmp_path / "run", task, DATA, Backbone(make_model("llama"), None, "unused")) as session:
            first, second = session.state.jobs.values()
            first.step, second.step = 3, 0
            assert not session._exploration.is_budget_spent()
            second.step = 1
            assert session._exploration.is_budget_spent(), "3 * 4 + 4 rows are exactly the budget"
            session.state.selection.end(ExitDecision(job=first.id, step=3, reason=ExitReason.STOPPED))
            assert session._exploration.is_budget_spent()

    def test_money_is_spent_on_every_gpu(self, tmp_path: Path) -> None:
        from alto.executor.exploration import Exploration

        budget = {"cost": 1, "gpu_hour_price": 1}
        task = make({"budget": budget}, search_space={"lr": [1e-4, 1e-3]})
        with built(tmp_path / "run", task, DATA, Backbone(make_model("llama"), None, "unused")) as session:
            exploration = Exploration(session.state, session._lifecycle, spent_before_s=1900)
            assert not exploration.is_budget_spent()
            session.state.context.ranks.size = 2
            assert exploration.is_budget_spent()
            session.state.context.ranks.size = 1


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
