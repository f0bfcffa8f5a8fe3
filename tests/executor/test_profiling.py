"""Measurements of a task before it trains, and their use."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import MEASURED, MIB, measured_at_once
from tiny import load_tiny, make_task, read_journal

from alto.engine import Engine
from alto.errors import DeviceMemoryError, ProfileError, SpecError
from alto.executor import TaskContext, cache, resolve_early_exit
from alto.executor.profiling import measure, meter, pack, plan, planning, profile
from alto.executor.profiling.budget import MeasuringBudget, StepShape, step_shapes
from alto.executor.profiling.measure import Measured
from alto.executor.profiling.sketch import RowLength, SpanLength, lengths_of, synthetic_rows
from alto.objectives import job_losses
from alto.records import Throughput
from alto.spec import Task

pytestmark = pytest.mark.usefixtures("empty_cache")

CPU = torch.device("cpu")


@pytest.fixture
def context(tmp_path: Path) -> TaskContext:
    return context_of(make_task(tmp_path, search_space={"r": [2, 8], "per_device_train_batch_size": [1, 4]}))


def context_of(task: Task) -> TaskContext:
    backbone, data = load_tiny(task)
    return TaskContext.of(task, backbone, data)


@pytest.mark.parametrize("is_paired", [False, True], ids=["talk", "pairs"])
def test_a_sketch_has_about_the_mean_of_all_rows_and_rows_made_of_it_have_its_lengths(is_paired: bool):
    lengths = [
        RowLength((SpanLength(n, n // 3), *([SpanLength(n // 2, n // 4, n // 5)] if is_paired else [])))
        for n in range(20, 420)
    ]
    rows = synthetic_rows(lengths, 50, len(lengths)).train
    assert rows.is_paired == is_paired
    assert sorted(ids.numel() for ids in rows.input_ids) == [length.num_tokens for length in lengths]
    trained = sorted(int((targets >= 0).sum()) for targets in rows.targets)
    assert trained == [sum(span.num_trained for span in length.spans) for length in lengths]
    sketched = lengths_of(rows)
    assert len(sketched) == 64
    assert set(sketched) <= set(lengths)
    mean = sum(length.num_tokens for length in sketched) / 64
    assert mean == pytest.approx(rows.num_tokens / len(rows), rel=0.02)


def test_pairs_are_measured_as_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = [{"prompt": f"{n} plus 1?", "chosen": f"It is {n + 1}.", "rejected": "No."} for n in range(12)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(answer) + "\n" for answer in answers), encoding="utf-8")
    context = context_of(make_task(tmp_path, dataset=str(file), validation_dataset=str(file), method="dpo"))
    seen = []

    def watched(backbone: Any, batch: Any, learners: Any) -> Any:
        seen.extend((group.objective.name, max(batch.sequence_prefixes)) for group in learners)
        return job_losses(backbone, batch, learners)

    monkeypatch.setattr("alto.executor.trainer.job_losses", watched)
    found = take_measures(context)
    assert {name for name, _ in seen} == {"Dpo"}
    assert all(prefix > 0 for _, prefix in seen)
    longest = max(ids.numel() for ids in context.data.train.input_ids)
    assert found.memory[-1].num_tokens <= longest * context.task.jobs[0].config.per_device_train_batch_size


def test_packings_double_their_rows_by_turns_of_few_jobs_and_of_many():
    assert step_shapes(3, 2) == (
        StepShape(num_jobs=1, batch_size=1),
        StepShape(num_jobs=2, batch_size=1),
        StepShape(num_jobs=2, batch_size=2),
        StepShape(num_jobs=3, batch_size=2),
    )
    shapes = [(packing.num_jobs, packing.batch_size) for packing in step_shapes(16, 8)]
    assert shapes == [(1, 1), (2, 1), (1, 4), (8, 1), (2, 8), (16, 2), (8, 8), (16, 8)]


def take_measures(
    context: TaskContext,
    max_tokens: int = 10**6,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Measured:
    return measure.measure(
        context.task,
        context.backbone,
        lengths_of(context.data.train),
        num_rows=len(context.data.train),
        max_tokens=max_tokens,
        clock=clock,
        on_progress=on_progress,
    )


def test_steps_are_measured_in_rising_sizes_up_to_the_tokens_asked_for_and_the_model_is_left_as_it_was(
    context: TaskContext,
):
    before = [name for name, _ in context.backbone.model.named_modules()]
    found = take_measures(context, max_tokens=120)
    tokens = [point.num_tokens for point in found.memory]
    assert len(tokens) >= 3
    assert max(tokens) <= 120
    assert [point.num_tokens for point in found.durations] == tokens
    assert all(point.duration_s > 0 for point in found.durations)
    assert all(0 < point.peak_bytes < found.capacity_bytes for point in found.memory)
    assert [name for name, _ in context.backbone.model.named_modules()] == before
    assert Measured.from_dict(json.loads(json.dumps(found.to_dict()))) == found


class SlowClock:
    """A clock of a machine so busy that an hour passes with every reading."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 3600.0
        return self._now


def test_on_a_slow_machine_two_sizes_are_measured_and_no_more(context: TaskContext):
    found = take_measures(context, clock=SlowClock())
    assert len({point.num_tokens for point in found.memory}) == len(found.memory) == 2
    assert found.duration_s > 3600.0
    assert found.durations[0].duration_s == 3600.0


def test_the_time_of_sampling_is_part_of_the_time_of_a_token(tmp_path: Path):
    settings: dict[str, Any] = {"num_generations": 2, "batch_size": 4, "max_completion_length": 4}
    context = context_of(make_task(tmp_path, method="grpo", reward_funcs=["exact"], **settings))
    lengths = lengths_of(context.data.train, num_generated=context.longest_completion)
    found = measure.measure(context.task, context.backbone, lengths, num_rows=len(context.data.train), max_tokens=10**6)
    assert found.sample_token_s > 0
    assert Measured.from_dict(found.to_dict()) == found
    without = profile._profile(replace(found, sample_token_s=0.0), "", is_cached=False).throughput
    expected = profile._profile(found, "", is_cached=False).throughput
    assert expected.token_s == pytest.approx(without.token_s + found.sample_token_s)
    assert expected.eval_token_s == found.sample_token_s
    assert max(point.num_tokens for point in found.durations) >= 4 * min(length.num_tokens for length in lengths)


def test_a_row_longer_than_the_tokens_asked_for_does_not_hide_the_second_size(context: TaskContext):
    assert len(take_measures(context, max_tokens=1).memory) == 2


def test_one_job_of_one_row_a_step_is_measured_at_two_sizes(tmp_path: Path):
    task = make_task(tmp_path, search_space={"r": [2], "per_device_train_batch_size": [1]})
    assert len({point.num_tokens for point in take_measures(context_of(task)).memory}) == 2


def test_where_only_the_smallest_step_fits_the_error_is_about_memory(
    context: TaskContext, monkeypatch: pytest.MonkeyPatch
):
    def refuse_larger(backbone: Any, batch: Any, learners: Any) -> Any:
        if len(batch.sequence_prefixes) > 1:
            raise torch.OutOfMemoryError
        return job_losses(backbone, batch, learners)

    monkeypatch.setattr("alto.executor.trainer.job_losses", refuse_larger)
    with pytest.raises(DeviceMemoryError, match=r"tokens fit on cpu and \d+ do not; lower max_length"):
        take_measures(context)


def test_a_process_that_measures_for_too_long_is_an_error_about_time(
    context: TaskContext, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profile, "CHILD_TIMEOUT_S", 0.001)
    with pytest.raises(ProfileError, match=r"found that they take longer; set max_slots") as found:
        plan(context)
    assert "memory" not in str(found.value)


def test_a_step_that_is_not_expected_to_fit_is_not_taken(context: TaskContext, monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    monkeypatch.setattr(measure, "capacity_bytes", lambda device, num_ranks: 1000 * MIB)
    monkeypatch.setattr(measure, "peak_bytes", lambda device: 640 * MIB * len(taken) ** 3)
    steps = measure._step_s
    monkeypatch.setattr(measure, "_step_s", lambda *given, **more: taken.append(1) or steps(*given, **more))
    found = take_measures(context)
    all_of_them = len(step_shapes(4, 4))
    assert 2 <= len(found.memory) < all_of_them


def test_a_row_that_does_not_fit_is_an_error_that_says_what_to_do(
    context: TaskContext, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*arguments: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("alto.executor.trainer.job_losses", refuse)
    with pytest.raises(DeviceMemoryError, match="lower max_length"):
        take_measures(context)


def test_a_profile_is_measured_once_and_again_when_asked_or_when_the_task_is_another(
    context: TaskContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tasks = measured_at_once(monkeypatch)
    announced: list[int] = []
    assert not plan(context, on_measuring=lambda _: announced.append(len(tasks))).is_cached
    assert announced == [0]  # before it is measured
    assert plan(context, on_measuring=lambda _: announced.append(len(tasks))).is_cached
    assert announced == [0]
    assert len(tasks) == 1
    assert not plan(context, refresh=True).is_cached
    changed = make_task(tmp_path, search_space={"r": [2, 16], "per_device_train_batch_size": [1, 4]})
    assert not plan(context_of(changed)).is_cached
    assert not plan(context_of(context.task.replace(tenant="another"))).is_cached
    assert cache.load("profiles", json.loads("{}")) is None


def test_adapters_on_experts_are_measured_for_themselves(tmp_path: Path):
    from alto.executor.profiling.profile import _key

    tasks = make_task(tmp_path), make_task(tmp_path, target_parameters=["experts.down_proj"])
    lengths = [RowLength((SpanLength(100, 50),))]
    plain, on_experts = (_key(task, lengths, torch.device("cpu"), 1)["jobs"] for task in tasks)
    assert plain != on_experts


def test_tasks_with_about_the_same_lengths_share_a_measurement_and_others_do_not(tmp_path: Path):
    from alto.executor.profiling.profile import _key

    task = make_task(tmp_path)

    def key(*tokens: int, trained: float = 0.5, replies: int = 1) -> object:
        spans = [tuple(SpanLength(count, int(trained * count)) for _ in range(replies)) for count in tokens]
        return _key(task, [RowLength(of_row) for of_row in spans], torch.device("cpu"), 1)

    usual = key(100, 200, 300)
    assert key(101, 199, 302) == usual
    assert key(50, 60, 300) != usual, "shorter on average"
    assert key(100, 130, 370) != usual, "the longest is longer"
    assert key(100, 200, 300, trained=0.9) != usual
    assert key(50, 100, 150, replies=2) != usual, "pairs"


def _point(**changes: object) -> dict[str, object]:
    return {"num_jobs": 1, "num_tokens": 10, "peak_bytes": 10, **changes}


@pytest.mark.parametrize(
    "poison",
    [
        {},
        {"memory": []},
        {"memory": [_point(peak_bytes="x"), _point(num_tokens=20)]},
        {"memory": [_point(), _point()]},
        {"memory": [{"num_jobs": 1}]},
        {"memory": 7},
        {"durations": [{"num_jobs": 1, "num_tokens": 10, "duration_s": -1.0}]},
        {"durations": []},
        {"capacity_bytes": 1e300},
        {"eval_token_s": None},
        [],
    ],
    ids=repr,
)
def test_a_poisoned_profile_is_named_and_measured_again(
    context: TaskContext, monkeypatch: pytest.MonkeyPatch, poison: dict[str, object] | list[object]
):
    tasks = measured_at_once(monkeypatch)
    whole = plan(context)
    (file,) = (Path(os.environ["ALTO_CACHE"]) / "profiles").iterdir()
    entry = json.loads(file.read_text("utf-8"))
    entry["measured"] = {**entry["measured"], **poison} if poison and isinstance(poison, dict) else poison
    file.write_text(json.dumps(entry), encoding="utf-8")
    with pytest.warns(UserWarning, match=rf"{file.name} is damaged .* discarded, and measured again"):
        again = plan(context)
    assert not again.is_cached
    assert len(tasks) == 2
    assert again.max_slots == whole.max_slots
    assert plan(context).is_cached


def test_a_step_of_several_passes_pays_their_fixed_time() -> None:
    one_pass = Throughput(step_s=1.0, job_s=0.1, token_s=0.01, eval_token_s=0.0, points=())
    assert one_pass.duration_s(2, 1000) == pytest.approx(1.0 + 0.2 + 10.0)
    passes = replace(one_pass, pass_tokens=400)
    assert passes.duration_s(2, 400) == one_pass.duration_s(2, 400)
    assert passes.duration_s(2, 1000) == pytest.approx(3 * 1.0 + (2 + 2) * 0.1 + 10.0)


def test_a_plan_says_what_the_task_will_take(context: TaskContext, monkeypatch: pytest.MonkeyPatch):
    measured_at_once(monkeypatch)
    found = plan(context)
    assert found.num_jobs == 4
    assert found.num_parameters[0] < found.num_parameters[1]
    assert found.memory.bytes_per_token == pytest.approx(0.1 * MIB)
    assert found.peak_bytes <= found.memory.margin * found.memory.capacity_bytes
    assert 0 < found.expected_duration_s < found.duration_s
    assert found.throughput.pass_tokens == found.max_tokens_per_pass
    assert any(packing.num_slots == found.max_slots for packing in found.packings)
    assert found.cost(3600.0) == pytest.approx((found.duration_s, found.expected_duration_s))


def test_a_plan_has_no_larger_micro_batches_than_the_rows_and_the_speed_of_the_device_ask_for(
    context: TaskContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measured_at_once(monkeypatch)
    rows = context.data.train.num_row_tokens
    found = plan(context)
    most = sum(sum(sorted(rows, reverse=True)[:count]) for count in (4, 4, 1, 1))
    assert max(rows) <= found.max_tokens_per_pass <= most
    assert found.peak_bytes == found.memory.peak_bytes(found.max_tokens_per_pass, found.max_slots * found.slot_bytes)
    early = tuple(replace(point, duration_s=point.num_tokens / 1000) for point in MEASURED.durations)
    monkeypatch.setattr(profile, "_measured_in_child", lambda *_, **__: replace(MEASURED, durations=early))
    assert plan(context, refresh=True).max_tokens_per_pass == max(100, *rows)  # 100 tokens are as fast as 1,000


def test_checkpointing_is_left_off_where_the_task_fits_without_and_switched_on_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    context = context_of(make_task(tmp_path, gradient_checkpointing="auto"))
    tasks = measured_at_once(monkeypatch)
    assert plan(context).gradient_checkpointing is False

    def tight(task: Task, lengths: object, **ignored: object) -> Measured:
        tasks.append(task)
        if not task.gradient_checkpointing:
            raise DeviceMemoryError("too large")
        return MEASURED

    monkeypatch.setattr(profile, "_measured_in_child", tight)
    assert plan(context, refresh=True).gradient_checkpointing is True
    assert [task.gradient_checkpointing for task in tasks] == [False, False, True]


def test_where_memory_is_plenty_a_cpu_task_is_not_profiled_and_where_it_is_tight_it_is(
    context: TaskContext, monkeypatch: pytest.MonkeyPatch
):
    tasks = measured_at_once(monkeypatch)
    packed, forecast = pack(context)
    assert forecast is None
    assert (packed.task.max_slots, packed.task.max_tokens_per_pass) == (16, 4096)
    assert tasks == []
    monkeypatch.setattr(planning, "capacity_bytes", lambda device, num_ranks: 50 * MIB)
    packed, forecast = pack(context)
    assert forecast is not None
    assert packed.task.max_slots == forecast.max_slots
    assert len(tasks) == 1


def test_limits_that_the_task_sets_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tasks = measured_at_once(monkeypatch)
    task = make_task(tmp_path, max_slots=2, max_tokens_per_step=100, max_tokens_per_pass=50)
    context = context_of(task)
    assert pack(context) == (context, None)
    assert tasks == []


def test_a_task_is_planned_in_a_process_of_its_own_and_trained_as_planned(tmp_path: Path):
    task = make_task(tmp_path, search_space={"r": [2, 4]}, num_train_epochs=1)
    found = Engine().plan(task)
    assert not found.is_cached
    assert len(found.memory.points) >= 2
    assert not list(tmp_path.glob("runs*"))  # it trains nothing
    run_dir = Engine(output_dir=tmp_path / "runs").tune(task).run_dir
    (event,) = (event for event in read_journal(run_dir) if event["event"] == "profile")
    assert event["is_cached"] is True
    assert event["max_slots"] == found.max_slots
    started = read_journal(run_dir)[0]
    assert started["max_slots"] == found.max_slots


def test_a_process_that_dies_while_measuring_is_an_error_and_nothing_is_remembered(
    context: TaskContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profile.sys, "executable", "/bin/false")
    with pytest.raises(ProfileError, match="code 1"):
        plan(context)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_the_peak_of_a_process_is_that_of_what_it_held_since_the_reset():
    meter.reset_peak(CPU)
    before = meter.peak_bytes(CPU)
    held = torch.ones(64 * MIB // 4)
    assert meter.peak_bytes(CPU) - before >= 60 * MIB
    del held
    assert meter.capacity_bytes(CPU) > before
    assert meter.capacity_bytes(CPU, 4) == pytest.approx(meter.capacity_bytes(CPU) / 4, abs=4)


@pytest.mark.parametrize(
    ("budget", "remedy"),
    [
        ({"duration_s": 1e-3}, "found duration_s 0.001. Raise duration_s to "),
        ({"cost": 0.001, "gpu_hour_price": 10**6}, "which pays for 3.6e-06 s. Raise cost to "),
    ],
)
@pytest.mark.parametrize("limits", [{}, {"max_slots": 2, "max_tokens_per_step": 512, "max_tokens_per_pass": 512}])
def test_a_budget_that_finishes_no_job_is_refused_before_the_start(
    budget: dict[str, float], remedy: str, limits: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measured_at_once(monkeypatch)
    task = make_task(tmp_path, search={"budget": budget}, gradient_checkpointing=False, **limits)
    for ask in (plan, pack):
        with pytest.raises(SpecError, match="expected enough to train one configuration to its end") as caught:
            ask(context_of(task))
        assert remedy in str(caught.value)


def test_a_budget_that_finishes_one_job_is_measured_and_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured_at_once(monkeypatch)
    assert pack(context_of(make_task(tmp_path)))[1] is None
    task = make_task(tmp_path, search={"budget": {"duration_s": 10**6}})
    assert pack(context_of(task))[1] is not None


def test_rungs_of_a_preset_keep_fewer_jobs_where_a_budget_of_time_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    measured_at_once(monkeypatch)
    rates = [10**-exponent for exponent in range(2, 18)]
    given = {"finish_from": 0.5, "evaluation_share": "all"}
    task = make_task(tmp_path, search_space={"lr": rates}, num_train_epochs=30, early_exit=given)
    asked = task.early_exit
    task = resolve_early_exit(task, context_of(task).data, begins=True)
    free = plan(context_of(task))
    limited = task.replace(search={"budget": {"duration_s": 0.7 * free.expected_duration_s}})
    for fits_rungs in (True, False):
        packed, found = pack(replace(context_of(limited), requested_early_exit=asked if fits_rungs else None))
        assert found is not None
        assert packed.policy.rungs == packed.task.early_exit.selection_rungs
        kept = [rung.min_kept for rung in packed.policy.rungs]
        usual = [rung.min_kept for rung in task.early_exit.selection_rungs]
        assert (kept != usual) == fits_rungs
        assert all(places <= most for places, most in zip(kept, usual, strict=True))
        assert any(note.startswith("To fit search.budget, the rungs at ") for note in packed.task.notes) == fits_rungs
        assert found.expected_duration_s <= 0.7 * free.expected_duration_s


def test_the_time_that_measuring_takes_is_expected_from_sizes_and_then_from_measured_steps(context: TaskContext):
    remaining: list[float] = []
    ticks = iter(range(10**6))
    take_measures(context, clock=lambda: float(next(ticks)), on_progress=remaining.append)  # a step takes a second
    sizes = len(remaining)
    assert sizes >= 2
    assert remaining[-1] < remaining[0]
    budget = MeasuringBudget.of(
        context.task,
        lengths_of(context.data.train),
        num_rows=len(context.data.train),
        max_tokens=8192,
        num_ranks=context.ranks.size,
        num_jobs=len(context.jobs),
        device=CPU,
    )
    slow, fast = (budget.remaining_s(0, token_s=token_s, spent_s=0.0) for token_s in (0.1, 0.001))
    assert slow > fast > 0.0
    first, second = budget.sizes[:2]
    # At a second per token only two sizes are within the budget. Where kernels are compiled, all first steps are
    # repeated; on a CPU only that of the first size.
    evaluation = budget.eval_tokens / 3
    assert budget.remaining_s(0, token_s=1.0, spent_s=0.0) == pytest.approx(2 * first + second + evaluation)
    assert budget.remaining_s(len(budget.sizes), token_s=1.0, spent_s=0.0) == pytest.approx(evaluation)
    on_gpu = replace(budget, warms_up=True)
    assert on_gpu.remaining_s(0, token_s=1.0, spent_s=0.0) == pytest.approx(2 * (first + second + evaluation))
    assert not budget.allows(100, token_s=0.1, spent_s=0.0), "10 seconds are more than a CPU's minimum"
    assert replace(budget, least_s=60.0).allows(100, token_s=0.1, spent_s=0.0)


def test_the_process_that_measures_says_how_long_it_still_takes(context: TaskContext):
    remaining: list[float] = []
    assert not plan(context, on_measuring=remaining.append, refresh=True).is_cached
    assert len(remaining) >= 3  # before the first size, and after each
    assert all(remaining_s > 0.0 for remaining_s in remaining)
