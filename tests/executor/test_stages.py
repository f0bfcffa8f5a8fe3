"""The stages of a task, each alone: the base, the context, reference log-probs, the bank; and jobs of two tasks in one
bank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle import flat
from resident_jobs import DATA, PAIRS, make_dataset, make_model, make_task, make_trainer
from resident_jobs import with_references as referenced

from alto.backbone import Backbone
from alto.data import TaskData
from alto.errors import DeviceMemoryError, ModelNotFoundError, RunChangedError
from alto.executor import (
    BankSize,
    MicroBatches,
    Ranks,
    ResumeState,
    TaskContext,
    build_trainer,
    initial_states,
    load_base,
    stages,
    with_references,
)
from alto.executor.stages import build_state, check_resumable, max_tokens_per_pass
from alto.runs import RunDir
from alto.spec import BaseModelSpec, Task

CPU = torch.device("cpu")
JOBS: list[dict[str, object]] = [
    {"lr": 1e-3, "r": 4, "batch_size": 4, "seed": 1},
    {"lr": 5e-4, "r": 8, "batch_size": 2, "seed": 2, "target_modules": ["q_proj", "v_proj"]},
]
OTHERS: list[dict[str, object]] = [{"lr": 2e-3, "r": 2, "batch_size": 3, "seed": 7, "lora_dropout": 0.2}]


def nobody(event: object) -> None:
    raise AssertionError(f"memory ran out: {event}")


def context_of(task: Task, data: TaskData = DATA, backbone: Backbone | None = None) -> TaskContext:
    return TaskContext.of(task, backbone or Backbone(make_model("llama"), None, "unused"), data)


class TestLoadingTheBase:
    @pytest.mark.usefixtures("computes_in_half")
    def test_gives_the_base_that_is_named(self) -> None:
        backbone = load_base(BaseModelSpec(id="alto-tiny", dtype="bfloat16"), CPU, Ranks())
        assert (backbone.dtype, backbone.device) == (torch.bfloat16, CPU)

    def test_says_what_would_fit_where_memory_runs_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object, **__: object) -> Backbone:
            raise torch.OutOfMemoryError("no memory, as the test wants it")

        monkeypatch.setattr(stages, "load_backbone", full)
        with pytest.raises(
            DeviceMemoryError, match=r"not enough memory on cpu .* \(the whole model\)\. .* or set load_in_4bit: true$"
        ):
            load_base(BaseModelSpec(id="alto-tiny"), CPU, Ranks())

    def test_lets_other_errors_through(self) -> None:
        with pytest.raises(ModelNotFoundError):
            load_base(BaseModelSpec(id="./no/such/folder"), CPU, Ranks())


def test_a_context_plans_the_jobs_of_its_task_in_order() -> None:
    task = make_task(JOBS)
    context = context_of(task)
    assert [job.job for job in context.jobs] == list(task.jobs)
    assert [job.shape.rank for job in context.jobs] == [4, 8]
    assert [len(job.shape.targets) for job in context.jobs] == [14, 4]
    assert context.base == task.base_model
    assert context.row_metric is None
    states = initial_states(context)
    assert [(job.step, job.slot, job.context) for job in states] == [(0, None, context)] * 2
    assert states[0].step_tokens == -(-4 * DATA.train.num_tokens // len(DATA.train))


class TestReferences:
    def test_are_left_out_where_the_objective_needs_none(self) -> None:
        context = context_of(make_task(JOBS))
        assert with_references(context, MicroBatches(100, nobody)) is context

    def test_are_added_to_the_data_of_a_new_context(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ALTO_CACHE", str(tmp_path))
        context = context_of(make_task(OTHERS, method="dpo"), PAIRS)
        found = with_references(context, MicroBatches(100, nobody))
        assert context.data.train.references is None
        assert context.references is None
        assert found.data.train.references.shape == (len(PAIRS.train), 2)
        assert found.data.validation.references.shape == (len(PAIRS.validation), 2)
        assert found.references is not None
        assert not found.references.is_cached
        assert found.jobs is context.jobs
        again = with_references(context, MicroBatches(100, nobody)).references
        assert again is not None
        assert again.is_cached


class TestTheBank:
    def test_holds_no_jobs_yet(self, tmp_path: Path) -> None:
        context = context_of(make_task(JOBS, max_slots=1))
        state = build_state(
            context,
            ResumeState(),
            RunDir.create(tmp_path, context.task),
            max_tokens_per_pass=max_tokens_per_pass(context, ResumeState()),
            on_memory_event=nobody,
        )
        assert list(state.jobs) == list(state.selection.training) == ["job-000", "job-001"]
        assert state.slot_manager.num_slots == 1
        assert state.active() == []
        assert state.trainer.passes.micro_batches.largest == 0
        job = state.jobs["job-001"]
        state.slot_manager.admit(job, 0)
        assert state.active() == [job] == [state.in_slot(0)]
        (loss,) = state.trainer.step([job])
        assert loss > 0
        assert 0 < state.trainer.passes.micro_batches.largest <= 300

    def test_begins_with_what_was_left_after_memory_ran_out(self) -> None:
        context = context_of(make_task(JOBS, max_tokens_per_pass=300))
        assert max_tokens_per_pass(context, ResumeState()) == 300
        assert max_tokens_per_pass(context, ResumeState(oom_record={"max_tokens_per_pass": 64})) == 64


def test_a_run_of_other_data_is_refused_before_anything_is_built() -> None:
    context = context_of(make_task(JOBS))
    settings = context.task.early_exit.resolved().model_dump(mode="json")
    line = {"seq": 0, "time": 0.0, "event": "task_started", "jobs": [], "early_exit": settings}
    check_resumable(context, ResumeState())
    with pytest.raises(RunChangedError, match="expected the data that the run began with"):
        check_resumable(context, ResumeState(lines=[line]))


def tasks_on_one_base() -> list[tuple[Task, TaskData]]:
    """Return tasks of three methods, each with its own rows and settings."""
    others = TaskData(train=make_dataset(17, seed=11), validation=make_dataset(5, seed=12))
    return [
        (make_task(JOBS), DATA),
        (make_task(OTHERS, num_train_epochs=1), others),
        (make_task(OTHERS, method="dpo", beta=0.3), PAIRS),
        (make_task(JOBS[:1], method="orpo"), PAIRS),
    ]


@pytest.mark.parametrize("max_tokens", [300, 70])
def test_jobs_of_several_tasks_on_one_base_train_as_each_alone(max_tokens: int) -> None:
    """All in one step, SFT beside DPO and ORPO, whole and in micro-batches with jobs of two tasks."""
    backbone = Backbone(make_model("llama"), None, "unused")
    contexts = [ready(task, data, backbone) for task, data in tasks_on_one_base()]
    planned = [job for context in contexts for job in context.jobs]
    size = BankSize.of(planned, backbone, num_slots=len(planned))
    trainer = build_trainer(backbone, size, MicroBatches(max_tokens, nobody))
    jobs = [job for context in contexts for job in initial_states(context)]
    for slot, job in enumerate(jobs):
        job.slot = slot
        trainer.admit(job, slot)
    losses = []
    for _ in range(2):
        losses.append(trainer.step(jobs))
        for job in jobs:
            job.step += 1
    found = trainer.evaluate(jobs)

    by_job = dict(zip(map(id, jobs), zip(*losses, found, strict=True), strict=True))
    for task, data in tasks_on_one_base():
        context = ready(task, data, Backbone(make_model("llama"), None, "unused"))
        alone = make_trainer(context, 1)
        for job in initial_states(context):
            job.slot = 0
            alone.admit(job, 0)
            expected = []
            for _ in range(2):
                expected += alone.step([job])
                job.step += 1
            (value,) = alone.evaluate([job])
            together = next(other for other in jobs if (other.config, other.context.task) == (job.config, task))
            *losses_found, value_found = by_job[id(together)]
            assert losses_found == pytest.approx(expected, rel=1e-5)
            assert value_found.loss == pytest.approx(value.loss, rel=1e-5)
            assert value_found.metrics == pytest.approx(value.metrics, rel=1e-4, abs=1e-6)
            weights = flat(alone.bank.read(0))
            for name, matrix in flat(trainer.bank.read(together.slot)).items():
                torch.testing.assert_close(matrix, weights[name], rtol=1e-4, atol=1e-6)
            alone.bank.release(0)


def ready(task: Task, data: TaskData, backbone: Backbone) -> TaskContext:
    """Return a context with everything that its objective needs."""
    context = context_of(task, data, backbone)
    return replace(context, data=referenced(backbone, data)) if context.objective.needs_reference else context
