"""Log-probabilities of the frozen base: computed once, cached on disk, and computed again whenever they may differ."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from optional import needs_bitsandbytes
from preference_pairs import make_pairs
from resident_jobs import PAIRS, Bank, make_model, make_task, with_references

from alto.backbone import Backbone, load_network
from alto.data import TaskData, TokenBatch
from alto.errors import DeviceMemoryError, ModelError, RunError, TaskInterruptedError
from alto.executor import Hooks, RunInputs, TaskContext, TaskSession, recover, run_alone, stages
from alto.executor.micro_batches import MemoryEvent, MicroBatches
from alto.executor.stages import with_references as find_references
from alto.runs import Event, Journal, RunDir, read_events
from alto.spec import BaseModelSpec, Task

TASK = make_task(
    [{"loss_type": "sigmoid", "beta": 0.1, "lr": 1e-3, "r": 4, "batch_size": 4, "seed": seed} for seed in (1, 2)],
    method="dpo",
    num_train_epochs=1,
    early_exit={"enabled": False},
)
ask = stages.reference_sums


class Base:
    """Counts the passes of the base, and can refuse them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_passes = 0
        self.max_tokens = 10**6
        self.on_ask: Callable[[], None] = lambda: None
        monkeypatch.setattr(stages, "reference_sums", self._asked)

    def _asked(self, backbone: Backbone, batch: TokenBatch) -> torch.Tensor:
        self.num_passes += 1
        self.on_ask()
        if batch.input_ids_T.numel() > self.max_tokens:
            raise torch.OutOfMemoryError("no memory, as the test wants it")
        return ask(backbone, batch)

    def runs_base_in(self, work: Callable[[], Any]) -> bool:
        before = self.num_passes
        work()
        return self.num_passes > before


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Base:
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    return Base(monkeypatch)


def find(
    task: Task = TASK,
    data: TaskData = PAIRS,
    *,
    path: str = "a-model",
    dtype: torch.dtype = torch.float32,
    micro_batches: MicroBatches | None = None,
    on_turn: Callable[[], None] = lambda: None,
) -> TaskContext:
    backbone = Backbone(make_model("llama").to(dtype), None, path)
    context = TaskContext.of(task, backbone, data)
    return find_references(context, micro_batches or MicroBatches(100, lambda event: None), on_turn)


def is_cached(found: TaskContext) -> bool:
    assert found.references is not None
    return found.references.is_cached


def test_the_base_is_asked_once_and_never_again(base: Base) -> None:
    first = find()
    assert base.num_passes > 2
    num_passes, second = base.num_passes, find()
    assert base.num_passes == num_passes
    assert (is_cached(first), is_cached(second)) == (False, True)
    expected = with_references(Backbone(make_model("llama"), None, "unused"), PAIRS)
    for split in ("train", "validation"):
        found, cached, wanted = (getattr(data, split).references for data in (first.data, second.data, expected))
        assert torch.equal(found, cached)
        assert found.numpy() == pytest.approx(wanted.numpy(), rel=1e-6)


def test_what_another_tenant_has_trained_does_not_show(base: Base) -> None:
    for tenant in ("a", "b"):
        assert not is_cached(find(TASK.replace(tenant=tenant)))
    assert is_cached(find(TASK.replace(tenant="b")))


def test_it_is_computed_again_if_it_may_differ(base: Base, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    local = TASK.replace(model=str(tmp_path))
    first, *others = PAIRS.train.spans
    other_spans = replace(PAIRS.train, spans=(tuple(replace(span, prefix=0) for span in first), *others))
    changes: list[dict[str, Any]] = [
        {},
        {"path": "another-model"},
        {"dtype": torch.bfloat16},
        {"task": TASK.replace(load_in_4bit=True)},
        {"task": TASK.replace(load_in_8bit=True)},
        {"task": TASK.replace(trust_remote_code=True)},
        {"task": TASK.replace(use_safetensors=False)},
        {"task": local},
        {"data": TaskData(train=make_pairs(28, seed=9), validation=make_pairs(6, seed=8))},
        {"data": TaskData(train=other_spans, validation=make_pairs(5, seed=2))},
    ]
    for change in changes:
        assert base.runs_base_in(lambda change=change: find(**change)), change
    for change in changes:
        assert not base.runs_base_in(lambda change=change: find(**change)), change
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert base.runs_base_in(lambda: find(local))


def test_settings_of_jobs_cause_no_new_computation(base: Base) -> None:
    find()
    other = make_task([{"loss_type": "ipo", "beta": 0.5, "lr": 1e-4, "r": 8, "seed": 7}], method="dpo")
    assert not base.runs_base_in(lambda: find(other))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"measured": [[1.0, 2.0',
        b'{"measured": null}',
        b'{"measured": [[1.0, 2.0]]}',
        b'{"measured": [1.0, [2.0]]}',
        b'{"measured": {"a": 1}}',
        b'{"measured": [%s]}' % b", ".join([b"[NaN, 1.0]"] * 28),
        b"[]",
        b"\xff\xfe",
    ],
)
def test_a_broken_file_is_as_good_as_none(base: Base, tmp_path: Path, content: bytes) -> None:
    whole = find().data.train.references
    for file in (tmp_path / "cache" / "references").iterdir():
        file.write_bytes(content)
    with pytest.warns(UserWarning, match=r"references/\w+\.json is damaged .* discarded, and measured again"):
        again = find()
    assert not is_cached(again)
    assert torch.equal(again.data.train.references, whole)
    assert is_cached(find())


def test_where_memory_runs_out_passes_are_halved(base: Base) -> None:
    events: list[MemoryEvent] = []
    micro_batches = MicroBatches(400, events.append)
    base.max_tokens = 150
    found = find(micro_batches=micro_batches).data.train.references
    assert [event.phase for event in events] == ["evaluation"] * len(events)
    assert events
    assert micro_batches.max_tokens <= 200
    expected = with_references(Backbone(make_model("llama"), None, "unused"), PAIRS).train.references
    assert found.numpy() == pytest.approx(expected.numpy(), rel=1e-6)


def test_a_pair_that_does_not_fit_is_reported_as_too_large(base: Base) -> None:
    base.max_tokens = longest = max(ids.numel() for ids in PAIRS.train.input_ids) - 1
    with pytest.raises(
        DeviceMemoryError, match=rf"not enough memory on cpu .* row of {longest + 1} tokens; lower max_length"
    ):
        find()


def test_a_base_that_gives_no_number_is_refused(base: Base) -> None:
    backbone = Backbone(make_model("llama"), None, "broken")
    with torch.no_grad():
        backbone.model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="found infinite or NaN ones in 28 of 28 pairs"):
        find_references(TaskContext.of(TASK, backbone, PAIRS), MicroBatches(100, lambda event: None))


def finish(run_dir: RunDir, data: TaskData = PAIRS, is_interrupted: Callable[[], bool] = lambda: False) -> list[Event]:
    resume_state, backbone = recover(run_dir), Backbone(make_model("llama"), None, "a-model")
    with Journal(run_dir.journal_file, past=resume_state.entries) as journal:
        context, hooks = TaskContext.of(TASK, backbone, data), Hooks(is_interrupted=is_interrupted)
        run_alone(TaskSession(context, journal, RunInputs(run_dir=run_dir, resume_state=resume_state), hooks))
    return list(read_events(run_dir.journal_file))


def worths(events: list[Event]) -> list[tuple[Any, ...]]:
    return [
        (event["job"], event["step"], event["validation_loss"], event["metrics"])
        for event in events
        if event["event"] == "eval"
    ]


def test_a_run_that_is_killed_while_the_base_is_asked_ends_as_if_it_had_not_been(base: Base, tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "killed", TASK)
    child = os.fork()
    if not child:
        base.on_ask = lambda: base.num_passes > 3 and os.kill(os.getpid(), signal.SIGKILL)
        finish(run_dir)
        os._exit(0)  # not reached
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert run_dir.journal_file.read_bytes() == b""
    events, undisturbed = finish(run_dir), finish(RunDir.create(tmp_path / "undisturbed", TASK))
    assert events[0]["event"] == "task_started"
    assert events[-1]["event"] == "task_completed"
    assert worths(events) == worths(undisturbed)
    assert undisturbed[0]["references"]["is_cached"]


def test_a_task_goes_on_with_the_passes_that_the_base_fitted_into(base: Base, tmp_path: Path) -> None:
    base.max_tokens = 150
    started, refused, *_ = finish(RunDir.create(tmp_path, TASK))
    assert started["references"]["is_cached"] is False
    assert (refused["event"], refused["phase"], refused["residents"]) == ("oom", "evaluation", [])
    assert refused["max_tokens_per_pass"] <= 150


@needs_bitsandbytes
def test_a_quantised_base_is_its_own_reference() -> None:
    task = TASK.replace(model="alto-tiny", load_in_4bit=True)
    quantised = Bank(load_network(task.base_model), task, data=PAIRS)
    plain = Bank(load_network(BaseModelSpec(id="alto-tiny")), TASK, data=PAIRS)
    apart = (quantised.data.train.references - plain.data.train.references).abs().mean()
    assert apart > 0.1
    for worth in quantised.trainer.evaluate(quantised.jobs):
        assert worth.loss == pytest.approx(math.log(2), rel=1e-5)
        assert worth.metrics["kl"] == pytest.approx(0.0, abs=1e-4)


def test_it_is_asked_in_parts_each_of_which_is_kept(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = find().data.train.references
    monkeypatch.setattr(stages, "PART_ROWS", 5)
    asked_at: list[int] = []

    def stop() -> None:
        asked_at.append(base.num_passes)
        if len(asked_at) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find(on_turn=stop)
    before = base.num_passes
    rest = find()
    in_vain = base.num_passes - before
    assert not is_cached(rest)
    assert rest.data.train.references.numpy() == pytest.approx(whole.numpy(), rel=1e-6)
    monkeypatch.setenv("ALTO_CACHE", os.environ["ALTO_CACHE"] + "-2")
    before = base.num_passes
    find()
    assert in_vain < base.num_passes - before, "cached replies were computed again"


def test_a_run_that_is_stopped_while_the_base_is_asked_can_be_gone_on_with(base: Base, tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, TASK)
    with pytest.raises(
        TaskInterruptedError, match=f"reference log-probs were precomputed; .* alto resume {run_dir.root}"
    ):
        finish(run_dir, is_interrupted=lambda: base.num_passes > 2)
    assert run_dir.journal_file.read_bytes() == b""
    assert finish(run_dir)[-1]["event"] == "task_completed"


def test_other_data_are_refused_before_the_base_is_asked_about_them(base: Base, tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, TASK)
    with pytest.raises(TaskInterruptedError):
        finish(run_dir, is_interrupted=lambda: run_dir.journal_file.stat().st_size > 0)
    before = base.num_passes
    others = TaskData(train=make_pairs(28, seed=9), validation=PAIRS.validation)
    with pytest.raises(RunError, match="expected the data that the run began with"):
        finish(run_dir, data=others)
    assert base.num_passes == before
