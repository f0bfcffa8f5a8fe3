"""Population-based training through the executor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from biased_models import llama
from job_kinds import KINDS
from noise import same_noise
from oracle import SoloJob
from oracle_classification import ONE_LABEL, SoloClassifier, data_of
from peft_adapters import save_with_peft
from resident_jobs import DATA, assert_same_step, make_model, make_task
from searches import PBT, SPACE, Run, begun, make
from shared_executor import built
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.data import TaskData
from alto.executor.checkpoint import read_state
from alto.lora import saved_settings
from alto.runs import RunDir, read_history
from alto.spec import Task
from alto.views.tables import job_table

pytest.importorskip("optuna", reason="needs the search extra: pip install -e '.[search]'")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
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


MANY = {**PBT, "num_initial_jobs": 6, "exchanged": 0.5}


def plain(folder: Path) -> tuple[Task, TaskData]:
    return make(MANY, search_space={**SPACE, "lr": [1e-4, 3e-4, 1e-3, 5e-4]}), DATA


def from_saved(folder: Path) -> tuple[Task, TaskData]:
    """Return a task whose jobs begin with a saved adapter."""
    keys = {"r": 8, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "up_proj"]}
    saved = save_with_peft(make_model("llama"), folder / "saved", **keys)
    space = {"lr": [1e-4, 3e-4, 1e-3, 5e-4], "batch_size": [4, 7]}
    return make(MANY, search_space=space, init_adapter=str(saved), **saved_settings(saved)), DATA


SETTINGS: dict[str, Any] = {"search": MANY, "name": "searched", "max_steps": 8, "eval_steps": 0.5}


def kinds(folder: Path) -> tuple[Task, TaskData]:
    return make_task(list(KINDS.values()), **SETTINGS), DATA


def heads(folder: Path) -> tuple[Task, TaskData]:
    task = make_task(list(KINDS.values()), method="classification", **SETTINGS)
    return task.with_labels(ONE_LABEL), data_of(ONE_LABEL)


@pytest.mark.parametrize(
    ("make_task_and_data", "model", "oracle"),
    [
        (plain, partial(make_model, "llama"), SoloJob),
        (from_saved, partial(make_model, "llama"), SoloJob),
        pytest.param(kinds, llama, SoloJob, marks=pytest.mark.slow("campaigns")),
        pytest.param(heads, llama, SoloClassifier, marks=pytest.mark.slow("campaigns")),
    ],
    ids=["plain", "from a saved adapter", "all kinds", "heads of all kinds"],
)
def test_a_copied_row_is_its_source_bit_for_bit_and_trains_on_as_peft_would(
    make_task_and_data: Callable[[Path], tuple[Task, TaskData]],
    model: Callable[[], PreTrainedModel],
    oracle: type[SoloJob],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Isolation of copies: the state on disk, the row in the bank, and the next step."""
    from alto.executor import slot_manager
    from alto.executor.trainer import Trainer

    sources: dict[str, tuple[Any, Any]] = {}
    give_state = slot_manager.SlotManager.give_state

    def noted(manager: Any, fork: Any, origin: Any) -> None:
        give_state(manager, fork, origin)
        sources[fork.id] = read_state(manager._store.folder(origin.id, "last"))

    admit, compared = Trainer.admit, []

    def checked(trainer: Trainer, job: Any, local_slot: int, *state: Any) -> None:
        admit(trainer, job, local_slot, *state)
        if job.id in sources and job.step == job.forked_at:
            source_weights, source_optimizer = sources[job.id]
            row, moments = trainer.bank.read(local_slot), trainer.optimizer.read(local_slot)
            assert moments.step == source_optimizer.step == job.forked_at
            for name, pair in source_weights.items():
                assert all(torch.equal(a, b) for a, b in zip(row[name], pair, strict=True))
            assert row.extras.keys() == source_weights.extras.keys()
            for name, tensor in source_weights.extras.items():
                assert torch.equal(row.extras[name], tensor), name
            assert moments.tensors.keys() == source_optimizer.tensors.keys()
            for name, tensor in source_optimizer.tensors.items():
                assert torch.equal(moments.tensors[name], tensor), name
            compared.append(job.id)

    monkeypatch.setattr(slot_manager.SlotManager, "give_state", noted)
    monkeypatch.setattr(Trainer, "admit", checked)
    found: dict[str, tuple[Any, Any, Any, Any]] = {}
    backward, update = Trainer.backward, Trainer.update

    def before(trainer: Trainer, jobs: Any) -> Any:
        losses = backward(trainer, jobs)
        for job, loss in zip(jobs, losses.tolist(), strict=True):
            if job.id in sources and job.step == job.forked_at:
                bank = trainer.bank
                gradients = bank.read(job.slot, bank.grads_ZP)
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
    task, data = make_task_and_data(tmp_path)
    Run(tmp_path / "run", task, model=model, data=data).train()
    assert len(compared) >= 3
    num_without_dropout = 0
    for job, loss, gradients, weights, norm, later in found.values():
        if job.config.lora_dropout:
            continue  # its masks are ALTO's own; tests/executor/test_isolation.py compares them
        num_without_dropout += 1
        solo = oracle(model(), data.train, job.config)
        solo.load(*sources[job.id])
        with same_noise(solo):
            expected = solo.train_step()
        assert_same_step(step_facts(loss, norm, gradients, weights, later), expected)
    assert num_without_dropout >= 1


def step_facts(loss: float, norm: float, gradients: Any, before: Any, after: Any) -> Any:
    from oracle import StepFacts, flat

    first, second = flat(before), flat(after)
    updates = {name: second[name] - first[name] for name in first}
    return StepFacts(loss=loss, grad_norm=norm, gradients=flat(gradients), updates=updates)


def test_resuming_finds_states_of_copies(tmp_path: Path) -> None:
    """A copy that was never resident before the stop resumes from its copied state."""
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


def test_copies_are_drawn_as_the_seed_and_the_rung_say_inside_the_space_and_never_of_an_ended_job(
    tmp_path: Path,
) -> None:
    """A job that overfit keeps its place at a rung, but there is nothing to continue."""
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


def test_a_change_that_other_settings_do_not_allow_is_left_out(tmp_path: Path) -> None:
    """For instance, a learning rate at which a polynomial schedule would rise at the end."""
    from alto.records import ExitDecision, ExitReason, RungResult
    from alto.search import forks_of

    settings = {
        "lr_scheduler_type": "polynomial",
        "lr_scheduler_kwargs": {"lr_end": 1.99e-4},
        "weight_decay": 0.1,
        "search_space": {"lr": [2e-4], "r": [2, 4, 8, 16]},
        "early_exit": {"rungs": [[0.9, 1.0]]},
    }
    task = make(PBT, data_seed=2, **settings)
    with built(tmp_path / "run", task, DATA, Backbone(make_model("llama"), None, "unused")) as session:
        begun(session, 3)
        state = session.state
        end = ExitDecision(job="job-003", step=state.jobs["job-003"].step, reason=ExitReason.UNDERPERFORMING)
        state.selection.end(end)
        session._lifecycle.end(state.jobs["job-003"], end)
        kept = ("job-002", "job-001")
        session._exploration.exchange(5, RungResult(kept=kept, dropped=(end,)))
        (copy,) = (job for job in state.jobs.values() if job.forked_at)
    configs = {job: state.jobs[job].config.to_dict() for job in kept}
    (fork,) = forks_of(kept, ["job-003"], configs, {}, exchanged=0.25, seed=2, rung=5)
    assert fork.changes["learning_rate"] == pytest.approx(1.6e-4)
    assert copy.config.learning_rate == 2e-4
    assert copy.config.weight_decay == fork.changes["weight_decay"] != 0.1


def test_a_population_keeps_its_size_at_every_rung_of_its_interval() -> None:
    from alto.early_exit import policy_from
    from alto.executor.planned_job import resolve_rungs
    from alto.spec.early_exit import places_at

    def rungs(search: dict[str, Any], **early_exit: Any) -> Any:
        return policy_from(resolve_rungs(make(search, early_exit=early_exit), len(DATA.train)).early_exit).rungs

    of_eight = {"algorithm": "pbt", "num_initial_jobs": 8}
    for found in (rungs(of_eight), rungs(of_eight, finish_from=0.5)):
        assert [rung.progress for rung in found] == pytest.approx([n / 10 for n in range(1, 10)])
        assert [places_at(found, number, 8 + 2 * number) for number in range(9)] == [6] * 9
    own = rungs(of_eight, rungs=[[0.3, 0.5]])
    assert [rung.progress for rung in own] == [0.3], "a user's rungs are taken unchanged"
