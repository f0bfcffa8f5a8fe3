from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journals import entries

from alto.early_exit import RecordedJob, Recording
from alto.errors import RunError, RunNotFoundError

NAN, INF = math.nan, math.inf


def job(name="a", *, train=(3.0, 2.0), evaluations=((1, 3.5), (2, 2.5)), total_steps=2, rows_per_step=4) -> RecordedJob:
    return RecordedJob(
        job=name,
        config={"learning_rate": 1e-4, "per_device_train_batch_size": rows_per_step},
        total_steps=total_steps,
        rows_per_step=rows_per_step,
        train_losses=tuple(train),
        evaluations=tuple(evaluations),
    )


@pytest.fixture
def recording() -> Recording:
    jobs = (job("a"), job("b", train=(1 / 3, NAN), evaluations=((1, INF),)), job("c", evaluations=((2, -INF),)))
    return Recording(task={"name": "sweep", "note": "é"}, num_train=8, jobs=jobs)


@pytest.mark.parametrize("name", ["r.json", "r.json.gz"])
def test_what_is_written_is_read(recording, tmp_path, name) -> None:
    recording.write(tmp_path / name)
    read = Recording.read(tmp_path / name)
    assert (read.task, read.num_train) == (recording.task, recording.num_train)
    assert read.jobs[0] == recording.jobs[0]
    assert read.jobs[1].train_losses[0] == 0.333333
    assert math.isnan(read.jobs[1].train_losses[1])
    assert read.jobs[1].evaluations == ((1, INF),)
    assert read.jobs[2].evaluations == ((2, -INF),)


def test_metrics_are_written_and_read_and_may_be_absent(recording, tmp_path) -> None:
    metrics = {"reward_accuracy": (0.5, 0.625), "kl": (NAN, 1 / 3)}
    both = replace(recording, jobs=(replace(job("a"), metrics=metrics), job("b")))
    both.write(tmp_path / "r.json")
    with_metrics, without = Recording.read(tmp_path / "r.json").jobs
    assert with_metrics.metrics["reward_accuracy"] == (0.5, 0.625)
    assert math.isnan(with_metrics.metrics["kl"][0])
    assert with_metrics.metrics["kl"][1] == 1 / 3
    assert without.metrics == {}
    assert "metrics" not in json.loads((tmp_path / "r.json").read_text())["jobs"][1], "as before the recording"


def test_equal_content_gives_equal_bytes(recording, tmp_path) -> None:
    recording.write(tmp_path / "one.json.gz")
    Recording.read(tmp_path / "one.json.gz").write(tmp_path / "two.json.gz")
    one, two = (tmp_path / "one.json.gz").read_bytes(), (tmp_path / "two.json.gz").read_bytes()
    assert one == two
    assert one[4:8] == b"\0\0\0\0"  # the time in the gzip header


def test_the_document_is_strict_json(recording, tmp_path) -> None:
    recording.write(tmp_path / "r.json")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    document = json.loads((tmp_path / "r.json").read_text(), parse_constant=refuse)
    assert document["jobs"][1]["train_losses"] == [0.333333, "nan"]


def test_samples_after_counts_the_short_last_step_of_an_epoch() -> None:
    recording = Recording(task={}, num_train=10, jobs=())
    by_four = job(rows_per_step=4)
    assert [recording.samples_after(by_four, step) for step in range(8)] == [0, 4, 8, 10, 14, 18, 20, 24]
    assert recording.samples_after(job(rows_per_step=16), 3) == 30


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 4))
def test_samples_after_agrees_with_drawing_the_batches(num_train: int, batch_size: int, epochs: int) -> None:
    recording, seen = Recording(task={}, num_train=num_train, jobs=()), 0
    batches = [min(batch_size, num_train - start) for _ in range(epochs) for start in range(0, num_train, batch_size)]
    for step, size in enumerate(batches, start=1):
        seen += size
        assert recording.samples_after(job(rows_per_step=batch_size), step) == seen
    assert seen == epochs * num_train


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("stopped early", {"train": [1.0], "evaluations": [(1, 1.0)]}, "expected every step up to 2"),
        ("no last evaluation", {"evaluations": [(1, 1.0)]}, "the last evaluation at 1"),
        ("no evaluation", {"evaluations": []}, "the last evaluation at 0"),
        ("evaluations out of order", {"evaluations": [(2, 1.0), (1, 1.0)]}, "evaluations at rising steps"),
        ("evaluated before training", {"evaluations": [(0, 1.0), (2, 1.0)]}, "evaluations at rising steps"),
        ("evaluated past its losses", {"train": [NAN], "evaluations": [(2, 1.0)]}, "evaluations at rising steps"),
    ],
)
def test_a_job_must_be_whole(case, fields, message) -> None:
    with pytest.raises(RunError, match=message):
        job(**fields)


def test_a_metric_is_of_every_evaluation() -> None:
    with pytest.raises(RunError, match=r"expected reward_accuracy for each of 2 evaluations, found 1 values"):
        replace(job(), metrics={"reward_accuracy": (0.5,), "kl": (0.1, 0.2)})


def test_a_job_may_end_early_by_a_loss_that_is_not_finite() -> None:
    assert job(train=[NAN], evaluations=[]).total_steps == 2
    assert job(train=[1.0], evaluations=[(1, INF)]).total_steps == 2


def test_files_that_are_no_recordings(tmp_path) -> None:
    with pytest.raises(RunNotFoundError, match="found no file"):
        Recording.read(tmp_path / "none.json.gz")
    for name, data, message in [
        ("text.json", b"hello", "expected a recording"),
        ("plain.json.gz", b"{}", "expected a recording"),
        ("cut.json.gz", gzip.compress(b'{"format": "alto-recording"}')[:-9], "expected a recording"),
        ("list.json", b"[]", "expected a document of format"),
        ("other.json", b'{"format": "x"}', "expected a document of format"),
        ("newer.json", b'{"format": "alto-recording", "version": 2}', "of version 1, found 2"),
        ("empty.json", b'{"format": "alto-recording", "version": 1}', "lacks or misspells 'task'"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RunError, match=message):
            Recording.read(tmp_path / name)


def journal(**changes):
    entry = {
        "job": "a",
        "config": {"per_device_train_batch_size": 4},
        "total_steps": 3,
        "samples_budgeted": 10,
        **changes,
    }
    return [
        {"event": "task_started", "task": "t", "num_train": 10, "num_validation": 2, "early_exit": {}, "jobs": [entry]},
        {"event": "job_admitted", "job": "a", "slot": 0, "step": 0},
        {"event": "train", "job": "a", "first_step": 1, "losses": [3.0, 2.5]},
        {"event": "eval", "job": "a", "step": 2, "total_steps": 3, "train_ema": 2.9, "validation_loss": 2.75},
        {"event": "job_resumed", "job": "a", "slot": 1, "step": 1},
        {"event": "train", "job": "a", "first_step": 2, "losses": [2.0, None]},
        {"event": "eval", "job": "a", "step": 3, "total_steps": 3, "train_ema": 2.0, "validation_loss": "inf"},
        {"event": "job_completed", "job": "a", "step": 3, "best_step": 2, "best_validation_loss": 2.75},
    ]


def test_a_journal_becomes_a_recording() -> None:
    recording = Recording.from_journal(entries(iter(journal())))
    (recorded,) = recording.jobs
    assert (recording.num_train, recording.task) == (10, {"name": "t", "num_validation": 2})
    assert recorded.train_losses[:2] == (3.0, 2.0)
    assert math.isnan(recorded.train_losses[2])
    assert recorded.evaluations == ((2, 2.75), (3, INF))
    assert recorded.rows_per_step == 4


def test_metrics_of_a_journal_are_those_that_all_evaluations_have() -> None:
    events = journal()
    assert Recording.from_journal(entries(events)).jobs[0].metrics == {}
    events[3]["metrics"] = {"reward_accuracy": 0.75}
    assert Recording.from_journal(entries(events)).jobs[0].metrics == {}
    events[6]["metrics"] = {"kl": 0.5, "reward_accuracy": 0.5}
    assert Recording.from_journal(entries(events)).jobs[0].metrics == {"reward_accuracy": (0.75, 0.5)}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (journal()[1:], "begins with task_started"),
        (journal()[:5], "expected every step up to 3"),
        ([journal()[0], *journal()[5:]], "found gaps"),
        (journal(samples_budgeted=12), "expected a budget of 12 rows, found 10"),
        ([{**journal()[0], "evaluation_order": [1, 0]}, *journal()[1:]], "evaluation_share: all"),
    ],
)
def test_journals_that_are_not_whole(events, message) -> None:
    with pytest.raises(RunError, match=message):
        Recording.from_journal(entries(events))
