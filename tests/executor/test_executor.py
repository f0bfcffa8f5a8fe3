"""One task from the first step to the result: waves, rungs, exits, checkpoints, journal, reproducibility."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from journals import entries
from tiny import curves_of, load_tiny, make_task, read_journal, run_task

from alto.data import DataOrder
from alto.early_exit import Recording, audit, policy_from, replay, selection_of
from alto.errors import NoResultError
from alto.executor import BankSize, MicroBatches, TaskContext, build_trainer, initial_states
from alto.lora import read_adapter
from alto.records import ExitReason, Rung, TaskOutcome
from alto.runs import RunDir
from alto.spec import EarlyExit, Task
from alto.spec.early_exit import rung_step

NUM_TRAIN = 24
NUM_JOBS = 8
SPACE = {"lr": [1e-3, 1e-2, 0.3, 1e30], "batch_size": [4, 8]}
RUNGS = ((0.2, 0.5), (0.5, 0.75))
# Calls a job overfit early, so that some job is.
SELECTING = EarlyExit(rungs=RUNGS, overfitting_patience=1, tau_noise=0.5)
OBSERVING = EarlyExit(
    rungs=tuple((progress, 1.0) for progress, _ in RUNGS), detect_divergence=False, detect_overfitting=False
)
OFF = EarlyExit(enabled=False)


@dataclass(frozen=True, kw_only=True)
class Run:
    task: Task
    result: TaskOutcome
    root: Path
    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def train_curve(self, job: str) -> list[float]:
        return list(curves_of(self.events)[job].train.values())

    def validation_curve(self, job: str) -> dict[int, float]:
        return curves_of(self.events)[job].validation


Build = Callable[..., Run]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """``run(name, early_exit=…, max_slots=…, …)`` runs each name once per module."""
    runs: dict[str, Run] = {}

    def build(name: str, **settings: Any) -> Run:
        if name not in runs:
            folder = tmp_path_factory.mktemp(name)
            task = make_task(folder, **({"search_space": SPACE, "max_grad_norm": 0, "keep": "all"} | settings))
            run_dir = RunDir.create(folder / "runs", task)
            result = run_task(task, run_dir)
            runs[name] = Run(task=task, result=result, root=run_dir.root, events=read_journal(run_dir.root))
        return runs[name]

    return build


@pytest.fixture
def narrow(run: Build) -> Run:
    """Eight jobs in two slots, with early exit."""
    return run("narrow", early_exit=SELECTING, max_slots=2)


@pytest.fixture
def wide(run: Build) -> Run:
    """The same task with a slot for every job."""
    return run("wide", early_exit=SELECTING, max_slots=16)


def assert_close(found: Mapping[Any, float], expected: Mapping[Any, float]) -> None:
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5, nan_ok=True)


def test_the_task_has_something_of_everything(narrow: Run) -> None:
    """The other tests of this file need all of these."""
    reasons = {job.exit_reason for job in narrow.result.jobs}
    assert reasons == {None, ExitReason.UNDERPERFORMING, ExitReason.DIVERGING, ExitReason.OVERFITTING}
    assert len(narrow.of("warmup_ended")) == 2
    assert narrow.of("job_parked")
    assert narrow.of("job_resumed")


def test_waves_reach_each_rung_before_it_is_held(narrow: Run) -> None:
    """Only jobs certain to be kept train past a rung before its selection, and at most to the next rung."""
    total_steps = {entry["job"]: entry["total_steps"] for entry in narrow.of("task_started")[0]["jobs"]}
    ended: set[str] = set()
    reached: dict[str, set[int]] = {job: set() for job in total_steps}
    ran_ahead: set[str] = set()
    held = 0
    for event in narrow.events:
        match event["event"]:
            case "eval":
                job, step = event["job"], event["step"]
                reached[job].add(step)
                selection = selection_of(entries(narrow.events[: event["seq"]]))
                if step > selection.rungs.next_stop(job):
                    assert job in selection.rungs.certain_to_be_kept(), "trained past a rung"
                    assert step <= selection.rungs.furthest_stop(job)
                    ran_ahead.add(job)
            case "job_exited" | "job_completed":
                ended.add(event["job"])
            case "warmup_ended":
                rung = Rung(progress=event["progress"], keep=1.0)
                assert event["progress"] == RUNGS[held][0]
                there = {job for job, steps in total_steps.items() if rung_step(rung, steps) in reached[job]}
                assert there >= total_steps.keys() - ended
                assert ran_ahead.isdisjoint(event["dropped"])
                held += 1
    assert held == 2
    assert ran_ahead


def test_every_change_of_seats_says_why(narrow: Run) -> None:
    reasons = {kind: {event["reason"] for event in narrow.of(kind)} for kind in ("job_admitted", "job_parked")}
    assert reasons == {"job_admitted": {"largest_first", "same_batch_size"}, "job_parked": {"slot_wanted"}}
    assert "runs_ahead" in {event["reason"] for event in narrow.of("job_resumed")}


def test_a_rung_keeps_its_share_best_first(narrow: Run) -> None:
    """A job counts with its value at the rung, however far it has run ahead, or else with its best value."""
    total_steps = {job.job: job.total_steps for job in narrow.result.jobs}
    ahead = 0
    for event, (progress, keep) in zip(narrow.of("warmup_ended"), RUNGS, strict=True):
        standing: dict[str, float] = {}
        for job, curve in curves_of(narrow.events[: event["seq"]]).items():
            evaluations = {step: loss for step, loss in curve.validation.items() if math.isfinite(loss)}
            at = rung_step(Rung(progress=progress, keep=keep), total_steps[job])
            if evaluations:
                standing[job] = evaluations.get(at, min(evaluations.values()))
                ahead += at in evaluations and max(evaluations) > at
        kept = [standing[job] for job in event["kept"]]
        assert kept == sorted(kept)
        competing = len(event["kept"]) + len(event["dropped"])
        assert len(event["kept"]) >= math.ceil(keep * competing)
        assert all(standing[job] >= kept[-1] for job in event["dropped"])
    assert ahead, "nobody ran ahead; the test could not tell the value at the rung from the latest"


def test_two_slots_and_sixteen_give_the_same_curves_and_exits(narrow: Run, wide: Run) -> None:
    for job in narrow.result.jobs:
        steps = dict(enumerate(narrow.train_curve(job.job), start=1))
        assert_close(steps, dict(enumerate(wide.train_curve(job.job), start=1)))
        assert_close(narrow.validation_curve(job.job), wide.validation_curve(job.job))
    outcome = [(job.job, job.exit_reason, job.steps, job.best_step) for job in narrow.result.jobs]
    assert outcome == [(job.job, job.exit_reason, job.steps, job.best_step) for job in wide.result.jobs]
    assert narrow.result.best_job == wide.result.best_job
    assert not wide.of("job_parked")


def test_early_exit_does_not_bend_the_curves_of_those_it_spares(narrow: Run, run: Build) -> None:
    free = run("off", early_exit=OFF)
    assert all(job.exit_reason in (None, ExitReason.DIVERGING) for job in free.result.jobs)
    assert sum(job.steps == job.total_steps for job in free.result.jobs) == 6
    for job in narrow.result.jobs:
        curve = narrow.train_curve(job.job)
        assert len(curve) == job.steps
        assert curve == pytest.approx(free.train_curve(job.job)[: job.steps], rel=1e-5, nan_ok=True)
        full = free.validation_curve(job.job)
        for step, loss in narrow.validation_curve(job.job).items():
            if step in full:
                assert loss == pytest.approx(full[step], rel=1e-5, nan_ok=True)


def test_journal_follows_the_schema(narrow: Run) -> None:
    required = {
        "task_started": {"task", "model", "dataset", "num_train", "num_validation", "max_slots", "early_exit", "jobs"},
        "base_evaluated": {"values"},
        "job_admitted": {"job", "slot", "step", "reason"},
        "job_resumed": {"job", "slot", "step", "reason"},
        "job_parked": {"job", "slot", "step", "reason"},
        "train": {"job", "first_step", "losses"},
        "eval": {"job", "step", "total_steps", "train_ema", "validation_loss", "is_best"},
        "job_exited": {"job", "slot", "step", "reason", "evidence", "best_step", "best_validation_loss"},
        "job_completed": {"job", "slot", "step", "best_step", "best_validation_loss", "samples_trained"},
        "warmup_ended": {"rung", "progress", "kept", "dropped"},
        "checkpoint": {"jobs"},
        "task_completed": {"best_job", "best_validation_loss", "samples_trained", "samples_budgeted"},
    }
    assert [event["seq"] for event in narrow.events] == list(range(len(narrow.events)))
    assert {event["event"] for event in narrow.events} <= required.keys()
    for event in narrow.events:
        assert event.keys() >= required[event["event"]] | {"seq", "time", "event"}
    assert narrow.events[0]["event"] == "task_started"
    assert narrow.events[-1]["event"] == "task_completed"


def test_journal_tells_a_life_that_can_be_lived(narrow: Run) -> None:
    """One job per slot, steps without gaps, nothing after the end; every job ends once."""
    slots: dict[int, str] = {}
    slot_of: dict[str, int] = {}
    steps = {job.job: 0 for job in narrow.result.jobs}
    ended: set[str] = set()
    for event in narrow.events:
        job = event.get("job")
        if job is not None:
            assert job not in ended
        match event["event"]:
            case "job_admitted" | "job_resumed":
                assert event["slot"] not in slots
                assert event["step"] == steps[job]
                assert (event["event"] == "job_admitted") == (steps[job] == 0)
                slots[event["slot"]], slot_of[job] = job, event["slot"]
                assert len(slots) <= 2
            case "train":
                assert event["first_step"] == steps[job] + 1
                assert job in slot_of
                steps[job] += len(event["losses"])
            case "eval":
                assert event["step"] == steps[job]
            case "job_parked":
                assert event["step"] == steps[job]
                del slots[slot_of.pop(job)]
            case "job_exited" | "job_completed":
                assert event["step"] == steps[job]
                assert event["slot"] == slot_of.get(job)
                if job in slot_of:
                    del slots[slot_of.pop(job)]
                ended.add(job)
    assert ended == steps.keys()
    assert slots == {}


def test_exits_carry_reason_and_numbers(narrow: Run) -> None:
    results = {job.job: job for job in narrow.result.jobs}
    for event in narrow.of("job_exited"):
        job = results[event["job"]]
        assert ExitReason(event["reason"]) is job.exit_reason
        assert event["step"] == job.steps < job.total_steps
        assert {key: float(value) for key, value in event["evidence"].items()} == pytest.approx(
            job.exit_evidence, nan_ok=True
        )
        assert event["evidence"]
    assert {event["job"] for event in narrow.of("job_exited")} == {j for j, r in results.items() if r.exit_reason}


def test_audit_of_the_journal_finds_nothing(narrow: Run, wide: Run) -> None:
    assert audit(entries(narrow.events)) == ()
    assert audit(entries(wide.events)) == ()


@pytest.mark.parametrize(
    ("name", "live", "observing", "space"),
    [
        ("rungs", SELECTING, OBSERVING, SPACE),
        (
            "default",
            EarlyExit(),
            EarlyExit(rungs=((0.025, 1.0), (0.05, 1.0)), detect_divergence=False, detect_overfitting=False),
            {"lr": [1e-3, 1e-2, 0.1], "batch_size": [2, 4]},
        ),
    ],
)
def test_live_exits_equal_a_replay_on_the_recording(
    run: Build, name: str, live: EarlyExit, observing: EarlyExit, space: dict[str, Any]
) -> None:
    recorded = run(f"observed-{name}", early_exit=observing, max_slots=2, search_space=space)
    assert {event["reason"] for event in recorded.of("job_exited")} <= {ExitReason.DIVERGING}
    lived = run(f"lived-{name}", early_exit=live, max_slots=2, search_space=space)
    replayed = replay(Recording.from_journal(entries(recorded.events)), policy_from(live), live.ema_alpha)
    assert {job.job: (job.exit_reason, job.steps) for job in lived.result.jobs if job.exit_reason} == replayed.exits
    assert replayed.exits
    assert lived.result.best_job == replayed.winner
    assert lived.result.samples_saved == pytest.approx(replayed.samples_saved)
    assert lived.result.best_validation_loss == pytest.approx(replayed.best_kept, rel=1e-5)


def test_best_is_on_disk_before_the_slot_is_reused(tmp_path: Path) -> None:
    task = make_task(tmp_path, search_space=SPACE, max_slots=2, early_exit=SELECTING)
    run_dir = RunDir.create(tmp_path / "runs", task)
    holders: dict[int, str] = {}
    best_step: dict[str, int] = {}
    checked = []

    def observe(event: Mapping[str, Any]) -> None:
        if event["event"] == "eval" and event["is_best"]:
            best_step[event["job"]] = event["step"]
        if event["event"] in ("job_admitted", "job_resumed"):
            before = holders.get(event["slot"])
            if before in best_step:
                assert (run_dir.job(before, "best") / "adapter_model.safetensors").is_file()
                assert (run_dir.job(before, "last") / "optimizer.safetensors").is_file()
                checked.append(before)
            holders[event["slot"]] = event["job"]

    run_task(task, run_dir, [lambda entry: observe(entry.to_dict())])
    assert len(checked) >= NUM_JOBS - 2


def evaluate(task: Task, job_id: str, folder: Path) -> float:
    """Return the validation loss of the adapter in ``folder``, in a new bank on a new base."""
    context = TaskContext.of(task, *load_tiny(task))
    job = next(job for job in initial_states(context) if job.id == job_id)
    size = BankSize.of([job.planned], context.backbone, num_slots=1)
    trainer = build_trainer(context.backbone, size, MicroBatches(64, lambda event: None))
    trainer.admit(job, 0, read_adapter(folder))
    job.slot = 0
    return trainer.evaluate([job])[0].loss


def test_best_and_last_are_the_adapters_of_their_steps(narrow: Run) -> None:
    run_dir = RunDir(narrow.root)
    differ = 0
    for result in narrow.result.jobs:
        curve = {step: loss for step, loss in narrow.validation_curve(result.job).items() if math.isfinite(loss)}
        if not curve:
            assert not run_dir.job(result.job, "best").exists()
            assert (result.best_step, result.best_validation_loss) == (0, math.inf)
            continue
        assert result.best_step == min(curve, key=lambda step: (curve[step], step))
        assert result.best_validation_loss == curve[result.best_step]
        best = evaluate(narrow.task, result.job, run_dir.job(result.job, "best"))
        assert best == pytest.approx(result.best_validation_loss, rel=1e-5)
        if result.steps in curve:
            last = evaluate(narrow.task, result.job, run_dir.job(result.job, "last"))
            assert last == pytest.approx(curve[result.steps], rel=1e-5)
            differ += result.steps != result.best_step
    assert differ, "every job ended at its best step; the test could not tell best from last"


def test_two_runs_are_the_same_to_the_last_bit(narrow: Run, run: Build) -> None:
    again = run("again", early_exit=SELECTING, max_slots=2)

    def facts(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in event.items() if key not in ("time", "time_s", "dataset")} for event in events
        ]

    assert facts(again.events) == facts(narrow.events)
    files = sorted(path.relative_to(narrow.root) for path in narrow.root.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(again.root) for path in again.root.rglob("*.safetensors"))
    assert len(files) == 2 * NUM_JOBS + sum(math.isfinite(job.best_validation_loss) for job in narrow.result.jobs)
    for file in files:
        assert (narrow.root / file).read_bytes() == (again.root / file).read_bytes(), file


def test_samples_are_the_rows_that_were_trained(narrow: Run) -> None:
    for job in narrow.result.jobs:
        order = DataOrder(NUM_TRAIN, job.config["per_device_train_batch_size"], job.config["seed"])
        assert job.samples_trained == sum(len(order.rows_of_step(step)) for step in range(job.steps))
        assert job.samples_budgeted == 5 * NUM_TRAIN
    end = narrow.events[-1]
    result = narrow.result
    assert (end["samples_trained"], end["samples_budgeted"]) == (result.samples_trained, NUM_JOBS * 5 * NUM_TRAIN)
    by_job = {
        event["job"]: event["samples_trained"] for event in [*narrow.of("job_exited"), *narrow.of("job_completed")]
    }
    assert by_job == {job.job: job.samples_trained for job in result.jobs}
    assert 0 < result.samples_saved < 1


def test_a_job_that_goes_nan_ends_and_its_sibling_does_not_notice(run: Build) -> None:
    broken = run("broken", search_space={"lr": [1e-3, 1e30]}, early_exit=OFF)
    whole = run("whole", search_space={"lr": [1e-3, 2e-3]}, early_exit=OFF)
    sibling, victim = broken.result.jobs
    assert victim.exit_reason is ExitReason.DIVERGING
    assert victim.exit_evidence
    assert not all(math.isfinite(number) for number in victim.exit_evidence.values())
    assert (sibling.exit_reason, sibling.steps) == (None, sibling.total_steps)
    assert broken.result.best_job == sibling.job
    # Until the exit both runs did the same work; afterwards the neighbours differ, and with them the rounding.
    found, expected = broken.train_curve(sibling.job), whole.train_curve(sibling.job)
    assert found[: victim.steps] == expected[: victim.steps]
    assert found == pytest.approx(expected, rel=1e-5)
    assert audit(entries(broken.events)) == ()


def test_if_all_diverge_the_error_names_the_remedy_and_the_run_stays(tmp_path: Path) -> None:
    task = make_task(tmp_path, search_space={"lr": [1e30, 1e31]}, keep="all")
    run_dir = RunDir.create(tmp_path / "runs", task)
    with pytest.raises(NoResultError, match=r"'tiny': .* found that all 2 jobs diverged before that; lower"):
        run_task(task, run_dir)
    events = read_journal(run_dir.root)
    assert [event["reason"] for event in events if event["event"] == "job_exited"] == ["diverging"] * 2
    assert events[-1]["event"] != "task_completed"
    assert (run_dir.job("job-000", "last") / "adapter_model.safetensors").is_file()
    assert not run_dir.best.exists()


def test_jobs_of_different_rank_and_targets_share_a_bank(run: Build) -> None:
    space = {"paired": [{"r": [2, 8], "target_modules": ["q_proj", ["up_proj", "q_proj"]]}]}
    mixed = run("mixed", search_space=space, early_exit=OFF)
    root = RunDir(mixed.root)
    names = [set(read_adapter(root.job(job.job, "best"))) for job in mixed.result.jobs]
    assert {name.rsplit(".", 1)[1] for name in names[0]} == {"q_proj"}
    assert {name.rsplit(".", 1)[1] for name in names[1]} == {"q_proj", "up_proj"}
    ranks = [
        {pair[0].shape[1] for pair in read_adapter(root.job(job.job, "best")).values()} for job in mixed.result.jobs
    ]
    assert ranks == [{2}, {8}]
