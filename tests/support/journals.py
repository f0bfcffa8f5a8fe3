"""Journals written by hand: a small run with every kind of exit, an interrupted one, and a sweep."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from alto.runs.events import Event as TypedEvent
from alto.runs.events import JournalEntry, decode

Event = dict[str, Any]
START = 1_763_635_000.0
SAMPLES = 1000
PROFILE = {
    "is_cached": True,
    "profile_s": 1.0,
    "memory": {
        "fixed_bytes": 1.0, "bytes_per_token": 1.0, "capacity_bytes": 1, "margin": 0.9, "error_median": 0.0,
        "error_worst": 0.0, "points": [],
    },
    "throughput": {"step_s": 0.1, "job_s": 0.1, "token_s": 0.1, "eval_token_s": 0.1, "points": []},
    "slot_bytes": 1,
    "max_slots": 2,
    "max_tokens_per_step": 64,
    "max_tokens_per_pass": 64,
    "gradient_checkpointing": False,
    "peak_bytes": 1,
    "duration_s": 900.0,
    "expected_duration_s": 100.0,
}  # fmt: skip
"""Facts of the event ``profile``: 100 seconds are expected."""


def entry(event: Event) -> JournalEntry:
    """Return the entry of a line; a line of a fixture may lack its number and its time."""
    return decode({"seq": 0, "time": 0.0, **event})


def event(name: str, **facts: Any) -> TypedEvent:
    """Return the event of that name; it may lack fields that version 0.1 did not write."""
    return entry({"event": name, **facts}).event


def entries(events: Iterable[Event]) -> list[JournalEntry]:
    return [entry(event) for event in events]


class Journal:
    """Builds events as the executor writes them; one second passes between two of them."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, event: str, *, pause_s: float = 0.0, **fields: Any) -> None:
        """Add an event ``pause_s`` seconds later than that; a clock that is set back has a negative pause."""
        time = self.events[-1]["time"] + 1 + pause_s if self.events else START
        self.events.append({"seq": len(self.events), "time": time, "event": event, **fields})

    def start(self, configs: dict[str, dict[str, Any]], **fields: Any) -> None:
        jobs = [
            {"job": job, "config": config, "total_steps": 100, "samples_budgeted": SAMPLES}
            for job, config in configs.items()
        ]
        defaults = {
            "task": "maths",
            "model": "alto-tiny",
            "dataset": "train.jsonl",
            "method": "sft",
            "num_train": 500,
            "num_validation": 50,
            "data": {"num_rows": 550},
            "max_slots": 2,
            "early_exit": {"policy": "alto", "rungs": [[0.1, 0.5]]},
            "versions": {"torch": "2.13.0"},
            "device": "cpu",
        }
        self.add("task_started", **{**defaults, **fields}, jobs=jobs)

    def train_to(
        self, job: str, step: int, *, since: int, validation: float, train: float = 2.0, **fields: Any
    ) -> None:
        self.add("train", job=job, first_step=since + 1, losses=[train] * (step - since))
        self.add(
            "eval", job=job, step=step, total_steps=100, train_ema=train, validation_loss=validation,
            **fields,
        )  # fmt: skip

    def end(
        self, event: str, job: str, step: int, *, best: tuple[int, float], slot: int | None = 0, **fields: Any
    ) -> None:
        best_step, best_loss = best
        self.add(
            event,
            job=job,
            slot=slot,
            step=step,
            best_step=best_step,
            best_validation_loss=best_loss,
            samples_trained=step * SAMPLES // 100,
            **fields,
        )


def config(learning_rate: float, rank: int) -> dict[str, Any]:
    return {"learning_rate": learning_rate, "r": rank, "lora_alpha": 2 * rank, "seed": 1, "target_modules": ["q", "v"]}


@pytest.fixture
def small_run() -> list[Event]:
    """Return a run of four jobs in two slots: one diverges to NaN, one is dropped at the rung, one overfits, and ``d``
    is the best."""
    journal = Journal()
    journal.start({"a": config(1e-2, 4), "b": config(1e-5, 4), "c": config(2e-4, 4), "d": config(2e-4, 8)})
    journal.add("job_admitted", job="a", slot=0, step=0)
    journal.add("job_admitted", job="b", slot=1, step=0)
    journal.train_to("a", 10, since=0, validation=math.nan, train=math.inf)
    journal.end(
        "job_exited", "a", 10, best=(0, math.inf), reason="diverging",
        evidence={"validation_loss": math.nan, "train_ema": math.inf},
    )  # fmt: skip
    journal.add("job_admitted", job="c", slot=0, step=0)
    journal.train_to("b", 10, since=0, validation=3.0)
    journal.add("job_parked", job="b", slot=1, step=10)
    journal.add("job_admitted", job="d", slot=1, step=0)
    journal.train_to("c", 10, since=0, validation=2.2)
    journal.train_to("d", 10, since=0, validation=2.1)
    journal.end(
        "job_exited", "b", 10, slot=None, best=(10, 3.0), reason="underperforming",
        evidence={"rank": 3.0, "num_competing": 3.0, "num_kept": 2.0, "validation_loss": 3.0, "cutoff_loss": 2.2},
    )  # fmt: skip
    journal.add("warmup_ended", rung=0, progress=0.1, kept=["d", "c"], dropped=["b"])
    journal.train_to("c", 50, since=10, validation=2.5)
    journal.end(
        "job_exited", "c", 50, best=(10, 2.2), reason="overfitting",
        evidence={"gap": 0.25, "tau_gap": 0.1, "validation_loss": 2.5, "train_ema": 2.0, "in_a_row": 2},
    )  # fmt: skip
    journal.train_to("d", 100, since=10, validation=1.9)
    journal.end("job_completed", "d", 100, slot=1, best=(100, 1.9))
    journal.add("something_new", job="d", detail="of a later version")
    journal.add(
        "task_completed", best_job="d", best_validation_loss=1.9, samples_trained=1700, samples_budgeted=4000,
        duration_s=61.5,
    )  # fmt: skip
    return journal.events


@pytest.fixture
def judged_run(small_run: list[Event]) -> list[Event]:
    """Return the same four jobs, of which answers have chosen ``c``."""
    *earlier, completed = small_run
    scores = [{"job": job, "num_correct": right, "num_questions": 8} for job, right in (("d", 1), ("c", 5))]
    judged = {"event": "finalists_judged", "time": completed["time"], "scores": scores}
    return [*earlier, judged, {**completed, "best_job": "c", "best_validation_loss": 2.2}]


@pytest.fixture
def interrupted_run() -> list[Event]:
    """Return a run of two jobs in two slots, with an hour without work after step 10; then a clone of ``b`` joins and
    ``a`` is reopened."""
    journal = Journal()
    journal.start(
        {"a": config(1e-4, 8), "b": config(2e-4, 8)}, notes=["3 of 500 rows were cut"], early_exit={"policy": "alto"}
    )
    for slot, job in enumerate("ab"):
        journal.add("job_admitted", job=job, slot=slot, step=0)
    for job in "ab":
        journal.train_to(job, 10, since=0, validation=2.0)
    journal.end("job_exited", "a", 10, best=(10, 2.0), reason="stopped", evidence={})
    journal.add("task_interrupted")
    journal.add("task_resumed", pause_s=3599)
    journal.add("job_resumed", job="b", slot=1, step=10)
    journal.add(
        "job_added", job="c", config=config(3e-4, 8), total_steps=100, samples_budgeted=SAMPLES, origin="b", warm=True
    )
    journal.add("job_admitted", job="c", slot=0, step=0)
    journal.add("job_reopened", job="a")
    journal.train_to("b", 50, since=10, validation=1.8)
    return journal.events


@pytest.fixture
def preference_run() -> list[Event]:
    """Return a run of three jobs of DPO that are compared by reward accuracy: ``c`` is right as often as ``b`` with a
    lower loss, and ``a`` has the lowest loss of all. ``b`` and ``c`` are best after ten steps."""
    journal = Journal()
    journal.start(
        {job: config(rate, 8) | {"beta": 0.1} for job, rate in (("a", 1e-4), ("b", 2e-4), ("c", 3e-4))},
        method="dpo", metric="reward_accuracy", max_slots=3, early_exit={"policy": "alto"},
    )  # fmt: skip
    for slot, job in enumerate("abc"):
        journal.add("job_admitted", job=job, slot=slot, step=0)
    found = {
        "a": ((0.5, 0.6), (0.4, 0.61)),
        "b": ((0.62, 0.75), (0.55, 0.7)),
        "c": ((0.6, 0.75), (0.45, math.nan)),
    }
    for index, step in enumerate((10, 100)):
        for job, evaluations in found.items():
            loss, accuracy = evaluations[index]
            metrics = {
                "reward_accuracy": accuracy, "reward_margin": 1 - loss, "chosen_reward": 0.1, "rejected_reward": loss,
                "kl": 0.02,
            }  # fmt: skip
            journal.train_to(job, step, since=10 * index, validation=loss, train=0.65, metrics=metrics)
    for job, best in (("a", (100, 0.4)), ("b", (10, 0.62)), ("c", (10, 0.6))):
        journal.end("job_completed", job, 100, best=best)
    journal.add("task_completed", best_job="c", best_validation_loss=0.6, samples_trained=3000, samples_budgeted=3000)
    return journal.events


@pytest.fixture
def reward_run() -> list[Event]:
    """Return a run of two jobs that learn from rewards: ``a`` collapses, ``b`` is the best. Answers were shown while
    they learned, and samples at the end."""
    journal = Journal()
    journal.start(
        {"a": config(1e-3, 8), "b": config(1e-4, 8)}, method="grpo", metric="reward", early_exit={"policy": "alto"}
    )
    for slot, job in enumerate("ab"):
        journal.add("job_admitted", job=job, slot=slot, step=0)
    for since, step, rewards in ((0, 10, {"a": 0.1, "b": 0.2}), (10, 100, {"b": 0.7})):
        for job, reward in rewards.items():
            answers = [{"prompt": "What is 3 + 4?", "answer": f"It is {step}.", "reward": reward}]
            journal.train_to(job, step, since=since, validation=1 - reward, metrics={"reward": reward}, answers=answers)
    journal.end("job_exited", "a", 10, best=(10, 0.9), reason="collapsed", evidence={})
    journal.end("job_completed", "b", 100, slot=1, best=(100, 0.3))
    sample = {"prompt": "What is 3 + 4?", "reference": "7", "base": "", "adapters": {"b": "It is 7.", "a": "No."}}
    journal.add("samples_generated", samples=[sample], failure="")
    journal.add("task_completed", best_job="b", best_validation_loss=0.3, samples_trained=1100, samples_budgeted=2000)
    return journal.events


@pytest.fixture
def failed_run() -> list[Event]:
    """Return a run in which no job got a finite loss, and which therefore has no result."""
    journal = Journal()
    journal.start({"a": config(1.0, 4), "b": config(2.0, 4)}, notes=["3 of 500 rows were cut"])
    for slot, job in enumerate("ab"):
        journal.add("job_admitted", job=job, slot=slot, step=0)
        journal.train_to(job, 10, since=0, validation=math.nan, train=math.inf)
    journal.end("job_exited", "a", 10, best=(0, math.inf), reason="diverging", evidence={"validation_loss": math.nan})
    journal.end("job_exited", "b", 10, best=(0, math.inf), reason="failed", evidence={})
    return journal.events


@pytest.fixture
def begun_run() -> list[Event]:
    """Return a run of which only the start is in the journal."""
    journal = Journal()
    journal.start({"a": config(1e-4, 4), "b": config(2e-4, 4)})
    return journal.events


@pytest.fixture
def sweep() -> list[Event]:
    """Return a run of sixty jobs, each evaluated twenty times and a little better every time, which is the most that a
    run can report."""
    journal = Journal()
    jobs = [f"job-{index:02d}" for index in range(60)]
    journal.start({job: config(1e-4 * (index + 1), 8) for index, job in enumerate(jobs)}, max_slots=1)
    for index, job in enumerate(jobs):
        journal.add("job_admitted", job=job, slot=0, step=0)
        for point in range(1, 21):
            loss = 10.0 * 0.995 ** (20 * index + point)
            journal.train_to(job, 5 * point, since=5 * (point - 1), validation=loss)
        if index % 3:
            journal.end("job_completed", job, 100, best=(100, loss))
        else:
            journal.end("job_exited", job, 100, best=(100, loss), reason="overfitting", evidence={})
    journal.add("task_completed", best_job=jobs[-1], best_validation_loss=loss, samples_trained=60000,
                samples_budgeted=60000, duration_s=60.0)  # fmt: skip
    return journal.events


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[[list[Event]], Path]:
    """Write events as the journal of a run, and return its folder."""

    def write(events: list[Event]) -> Path:
        (tmp_path / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return tmp_path

    return write


@pytest.fixture
def ranked_run() -> list[Event]:
    """Return a run of three jobs on two ranks with two slots each: ``b`` moves, and ``c`` trains data parallel when it
    is alone."""
    journal = Journal()
    journal.start({"a": config(1e-4, 8), "b": config(2e-4, 8), "c": config(3e-4, 8)}, max_slots=4, num_ranks=2)
    for job, slot in (("a", 0), ("b", 1), ("c", 2)):
        journal.add("job_admitted", job=job, slot=slot, step=0, reason="largest_first", ranks=[slot // 2])
    journal.end("job_completed", "a", 100, slot=0, best=(100, 2.0))
    journal.add("job_parked", job="b", slot=1, step=10, reason="rebalanced")
    journal.add("job_resumed", job="b", slot=3, step=10, reason="balances", ranks=[1])
    journal.end("job_completed", "b", 100, slot=3, best=(100, 1.9))
    journal.add("job_parked", job="c", slot=2, step=50, reason="rebalanced")
    journal.add("job_resumed", job="c", slot=0, step=50, reason="spreads", ranks=[0, 1])
    journal.end("job_completed", "c", 100, slot=0, best=(100, 1.8))
    journal.add("task_completed", best_job="c", best_validation_loss=1.8, samples_trained=3000, samples_budgeted=3000)
    return journal.events
