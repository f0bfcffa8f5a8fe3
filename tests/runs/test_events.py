"""Events of journals: writing and reading round-trips, and damaged lines are named."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.errors import RunError
from alto.records import ExitReason, FinalistScore, Gpu, Placement, Rung
from alto.runs import Journal, JournalTail, RunHistory, read_entries, read_events, read_intact_events
from alto.runs.events import (
    FORMAT,
    WIRE_NAMES,
    AttemptStarted,
    CheckpointSaved,
    Event,
    FinalistsJudged,
    GpusOffered,
    JobEvaluated,
    JobExited,
    JobResumed,
    JournalEntry,
    MeasurementFailed,
    QueueStarted,
    RungScored,
    SavedJob,
    SchedulePlanned,
    TaskCompleted,
    TaskRelayed,
    TaskStarted,
    TrainSteps,
    UnknownEvent,
    decode,
    encode,
)
from alto.runs.events.facts import ALIASES, KEY_ALIASES, VALUE_ALIASES

PLAIN: Mapping[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    bool: st.booleans(),
    int: st.integers(-(2**60), 2**60),
    float: st.floats().map(lambda number: number + 0.0),  # -0.0 equals a default of 0.0, which is not written
    Gpu: st.builds(Gpu, st.text(max_size=4), st.integers(0, 64)),
    Any: st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    if hint in PLAIN:
        return PLAIN[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        *others, last = arguments
        (other,) = map(values, others)
        return other | (st.none() if last is NoneType else st.just("of a later version"))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(st.text(max_size=4), values(arguments[1]), max_size=3)
    if issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    return records(hint)


def records(kind: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    fields = {field.name: values(hints[field.name]) for field in dataclasses.fields(kind)}
    for field in dataclasses.fields(kind):
        if earlier := field.metadata.get(KEY_ALIASES):
            fields[field.name] = fields[field.name].filter(earlier.keys().isdisjoint)
        if earlier := field.metadata.get(VALUE_ALIASES):
            fields[field.name] = fields[field.name].filter(lambda text, earlier=earlier: text not in earlier)
    return st.builds(kind, **fields)


def lines(event: Event) -> JournalEntry:
    return JournalEntry(seq=3, time=1.5, event=event)


def reread(entry: JournalEntry) -> JournalEntry:
    """Return the entry as a strict JSON reader reads its line."""
    return decode(json.loads(json.dumps(encode(entry), allow_nan=False)))


@pytest.mark.parametrize("kind", WIRE_NAMES, ids=WIRE_NAMES.get)
def test_every_event_is_read_as_it_was_written(kind: type) -> None:
    @given(records(kind))
    def check(event: Event) -> None:
        entry = lines(event)
        assert encode(entry)["event"] == WIRE_NAMES[kind]
        assert repr(reread(entry)) == repr(entry)  # NaN is not equal to itself

    check()


@pytest.mark.parametrize("kind", WIRE_NAMES, ids=WIRE_NAMES.get)
def test_unknown_fields_are_kept_and_written_back(kind: type) -> None:
    known = {"seq", "time", "event", "replayed"}
    known |= {name for field in dataclasses.fields(kind) for name in (field.name, *field.metadata.get(ALIASES, ()))}
    names = st.text(max_size=4).filter(lambda name: name not in known) | st.sampled_from(["/", "/a", "a/b", "~1"])

    @given(records(kind), st.dictionaries(names, PLAIN[Any], min_size=1, max_size=3))
    def check(event: Event, more: dict[str, Any]) -> None:
        line = {**encode(lines(event)), **more}
        entry = decode(line)
        assert repr(entry.event) == repr(event)
        assert encode(entry) == line

    check()


def test_unknown_fields_inside_of_others_are_kept() -> None:
    line = {
        "seq": 0, "time": 1.0, "event": "checkpoint",
        "jobs": {
            "a/b": {"step": 1, "slot": None, "best_step": 0, "later": [1]},
            "c": {"step": 2, "slot": 0, "best_step": 1},
        },
    }  # fmt: skip
    entry = decode(line)
    assert entry.event == CheckpointSaved(
        jobs={"a/b": SavedJob(step=1, slot=None, best_step=0), "c": SavedJob(step=2, slot=0, best_step=1)}
    )
    assert entry.unknown == {"/jobs/a~1b/later": [1]}
    assert encode(entry) == line


def test_an_event_of_a_later_version_is_kept_whole() -> None:
    line = {"seq": 7, "time": 2.0, "event": "job_merged", "job": "a", "parts": [{"x": None}]}
    entry = decode(line)
    assert entry.event == UnknownEvent(name="job_merged", fields={"job": "a", "parts": [{"x": None}]})
    assert (entry.name, entry.seq, entry.time) == ("job_merged", 7, 2.0)
    assert encode(entry) == line


def test_an_event_of_a_later_version_survives_being_resumed(tmp_path) -> None:
    path = tmp_path / "journal.jsonl"
    line = '{"seq": 0, "time": 2.0, "event": "job_merged", "parts": [1.5]}\n'
    path.write_text(line)
    with Journal(path) as journal:
        journal.append(TrainSteps(job="a", first_step=1, losses=(1.0,)))
    assert path.read_text().startswith(line)
    assert [entry.name for entry in read_entries(path)] == ["job_merged", "train"]


def test_numbers_that_are_not_finite_have_one_encoding() -> None:
    entry = lines(TrainSteps(job="a", first_step=1, losses=(math.nan, math.inf, -math.inf, 1.0)))
    assert encode(entry)["losses"] == ["nan", "inf", "-inf", 1.0]
    exited = JobExited(
        job="a", reason=ExitReason.DIVERGING, evidence={"train_loss": math.nan}, slot=None, step=1, best_step=0,
        best_validation_loss=None, samples_trained=4,
    )  # fmt: skip
    assert encode(lines(exited))["evidence"] == {"train_loss": "nan"}
    assert encode(lines(exited))["best_validation_loss"] is None


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("NaN", math.nan),
        ("null", math.nan),
        ('"nan"', math.nan),
        ("Infinity", math.inf),
        ('"-inf"', -math.inf),
        ("2", 2.0),
    ],
)
def test_numbers_of_version_0_1_are_read(written: str, read: float) -> None:
    line = json.loads(
        f'{{"seq": 0, "time": 1.0, "event": "train", "job": "a", "first_step": 1, "losses": [{written}]}}'
    )
    event = decode(line).event
    assert isinstance(event, TrainSteps)
    assert repr(event.losses) == repr((read,))
    assert all(type(loss) is float for loss in event.losses)


def test_what_version_0_1_did_not_write_has_defaults() -> None:
    line = {
        "seq": 0, "time": 1.0, "event": "task_started", "task": "maths", "model": "alto-tiny", "base_model": "/m",
        "dataset": "rows.jsonl", "method": "sft", "num_train": 4, "num_validation": 2, "data": {"fingerprint": "x"},
        "notes": [], "max_slots": 2, "early_exit": {}, "device": "cpu", "versions": {"torch": "2.13.0", "peft": None},
        "jobs": [{"job": "a", "config": {"r": 2}, "total_steps": 4, "samples_budgeted": 8}],
    }  # fmt: skip
    event = decode(line).event
    assert isinstance(event, TaskStarted)
    assert (event.format, event.metric, event.num_ranks, event.eval_steps) == (1, "loss", 1, None)
    assert (event.base, event.packing, event.references, event.jobs[0].num_parameters) == (None, None, None, None)
    assert encode(decode(line))["format"] == 1


def test_a_new_journal_says_its_format() -> None:
    started = QueueStarted(method="lpt", devices="gpus", nodes=(), tasks=())
    assert encode(lines(started))["format"] == FORMAT == 2
    assert decode({**encode(lines(started)), "format": 9}).event == dataclasses.replace(started, format=9)


def test_words_of_version_0_1_are_read_as_those_of_today() -> None:
    offered = decode(
        {"seq": 0, "time": 1.0, "event": "gpus_offered", "num_gpus": 1, "duration_s": 2.0, "spread_duration_s": 3.0}
    )
    assert offered.event == GpusOffered(num_gpus=1, duration_s=2.0, data_parallel_duration_s=3.0)
    assert "spread_duration_s" not in encode(offered)
    completed = decode(
        {
            "seq": 0, "time": 1.0, "event": "task_completed", "best_job": "a", "best_validation_loss": 1.0,
            "samples_trained": 1, "samples_budgeted": 2,
            "within_noise": [{"job": "b", "gain": 0.5, "validation_loss": 1.1}],
        }
    )  # fmt: skip
    assert isinstance(completed.event, TaskCompleted)
    assert (completed.event.within_noise[0].job, completed.event.within_noise[0].score) == ("b", 0.5)
    resumed = decode({"seq": 0, "time": 1.0, "event": "job_resumed", "job": "a", "slot": 0, "reason": "spreads"})
    assert isinstance(resumed.event, JobResumed)
    assert resumed.event.reason == "data_parallel"
    exited = decode(
        {
            "seq": 0, "time": 1.0, "event": "job_exited", "job": "a", "reason": "underperforming",
            "evidence": {"rank": 2.0, "gain": 0.5, "cutoff_gain": "inf", "largest_pass": 7},
        }
    )  # fmt: skip
    assert isinstance(exited.event, JobExited)
    assert exited.event.reason is ExitReason.UNDERPERFORMING
    assert exited.event.evidence == {"rank": 2.0, "score": 0.5, "cutoff_score": math.inf, "largest_micro_batch": 7.0}


def test_a_reason_of_a_later_version_is_read_as_text() -> None:
    event = decode(
        {"seq": 0, "time": 1.0, "event": "job_exited", "job": "a", "reason": "bored", "evidence": {"x": "y"}}
    ).event
    assert isinstance(event, JobExited)
    assert (event.reason, event.evidence) == ("bored", {"x": "y"})


WRONG = [
    ({"event": "train", "job": "a", "first_step": "1", "losses": []}, "'1' for first_step, expected a whole number"),
    ({"event": "train", "job": "a", "first_step": True, "losses": []}, "True for first_step, expected a whole number"),
    ({"event": "train", "job": "a", "first_step": 1, "losses": [1.0, "x"]}, "'x' for /losses/1, expected a number"),
    ({"event": "train", "job": "a", "first_step": 1, "losses": [10**400]}, "for /losses/0, expected a number"),
    ({"event": "train", "first_step": 1, "losses": []}, "has no job. Restore the original file"),
    ({"event": "eval", "job": "a", "step": 1, "metrics": []}, "[] for metrics, expected an object"),
    ({"event": "executor_started", "task": "a", "attempt": 1, "gpus": [[1, 0]]}, "1 for /gpus/0/0, expected text"),
    ({"event": "checkpoint", "jobs": {"a": {"step": None}}}, "None for /jobs/a/step, expected a whole number"),
    ({"event": "adapter_checked", "status": "so so"}, "'so so' for status, expected equal or different or unchecked"),
    ({"event": "task_started", "jobs": [{"job": "a", "config": 3}]}, "3 for /jobs/0/config, expected an object"),
]


@pytest.mark.parametrize(("facts", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_type_is_an_error_that_names_file_event_and_field(
    tmp_path, facts: dict[str, Any], message: str
) -> None:
    path = tmp_path / "journal.jsonl"
    first = {"seq": 0, "time": 1.0, "event": "of_a_later_version"}
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, {"seq": 1, "time": 2.0, **facts})))
    with pytest.raises(RunError) as caught:
        read_entries(path)
    assert f"found an invalid event in {path}: event 1 ({facts['event']}) has " in str(caught.value)
    assert message in str(caught.value)


def test_a_damaged_base_is_ignored() -> None:
    line = {"seq": 0, "time": 1.0, "event": "task_started", "jobs": [], "base": {"weights": None}}
    event = decode(line).event
    assert isinstance(event, TaskStarted)
    assert event.base is None


@pytest.mark.parametrize("value", [object(), {1: "a"}, {"a": b"x"}, 1j, {1, 2}])
def test_what_json_cannot_hold_is_refused(tmp_path, value: Any) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal, pytest.raises(TypeError, match="expected"):
        journal.append(UnknownEvent(name="x", fields={"value": value}))
    assert (tmp_path / "journal.jsonl").read_bytes() == b""


def test_an_entry_that_is_shown_again_says_so() -> None:
    entry = dataclasses.replace(lines(TrainSteps(job="a", first_step=1, losses=())), is_replayed=True)
    assert entry.to_dict()["replayed"] is True
    assert "replayed" not in encode(entry)
    assert decode(entry.to_dict()) == entry


def test_an_event_that_a_queue_relays_holds_its_line() -> None:
    inner = dataclasses.replace(
        lines(JobEvaluated(job="a", step=1, total_steps=2, train_ema=1.0, validation_loss=2.0, is_best=True)),
        is_replayed=True,
    )
    entry = lines(TaskRelayed(task="maths", entry=inner))
    assert reread(entry) == entry
    assert encode(entry)["entry"]["validation_loss"] == 2.0


def test_a_placement_names_its_executor_only_where_it_is_shared() -> None:
    alone = Placement(task="a", gpus=(Gpu("n", 0),), start_s=0.0, duration_s=1.0)
    shared = dataclasses.replace(alone, task="b", executor="executor-1")
    event = SchedulePlanned(
        reason="b submitted",
        method="lpt",
        status="heuristic",
        makespan_s=1.0,
        bound_s=1.0,
        notice="",
        placements=(alone, shared),
    )
    line = encode(lines(event))
    assert [found.get("executor") for found in line["placements"]] == [None, "executor-1"]
    assert reread(lines(event)).event == event


def test_gpus_are_pairs_on_the_wire() -> None:
    entry = lines(AttemptStarted(task="a", attempt=1, gpus=(Gpu("n", 0), Gpu("n", 3))))
    assert encode(entry)["gpus"] == [["n", 0], ["n", 3]]
    assert reread(entry) == entry


def test_an_object_that_is_no_event_is_refused() -> None:
    with pytest.raises(TypeError, match="Rung"):
        encode(lines(UnknownEvent(name="x", fields={"value": Rung})))


@pytest.mark.parametrize("time", ["NaN", "1e18", "-1", "1e999", '"x"', "true", "null", "[]", "1" + "0" * 400])
def test_an_invalid_time_damages_its_line(tmp_path: Path, time: str) -> None:
    path = tmp_path / "journal.jsonl"
    lines = [json.dumps({"seq": seq, "time": 10.0 + seq, "event": "x"}) for seq in range(3)]
    lines[1] = f'{{"seq": 1, "time": {time}, "event": "x"}}'
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(RunError, match="line 2 of 3 is not one"):
        read_events(path)
    assert [event["seq"] for event in read_intact_events(path)] == [0]
    assert [entry.seq for entry in JournalTail(path).read()] == [0, 2]


OLD = {
    "seq": 7,
    "time": 5.0,
    "event": "finalists_judged",
    "scores": [{"job": "a", "num_correct": 1, "num_questions": 8}, {"job": "b", "num_correct": 5, "num_questions": 8}],
}
SCORE = FinalistScore(job="a", num_questions=3, mean=0.5, interval=(0.25, 0.75), rows=(0.25, 0.5, 0.75))


def test_a_line_of_version_0_1_is_read_and_written_back() -> None:
    entry = decode(OLD)
    assert isinstance(entry.event, FinalistsJudged)
    assert [score.score for score in entry.event.scores] == [0.125, 0.625]
    assert (entry.event.scorer, entry.event.failure, entry.unknown) == ("", "", {})
    assert encode(entry) == OLD
    history = RunHistory.of([entry])
    assert (history.scorer, history.scorer_failure, len(history.finalists)) == ("eval_accuracy", "", 2)


@pytest.mark.parametrize(
    "event",
    [
        FinalistsJudged(scores=(SCORE,), scorer="python"),
        FinalistsJudged(scores=(), scorer="http", failure="https://judge.example: status 500, 3 times"),
        RungScored(rung=1, progress=0.2, scores=(SCORE,), scorer="python"),
        RungScored(rung=0, progress=0.1, scores=(), scorer="python", failure="score: row 1: it raised KeyError"),
        MeasurementFailed(job="job-000", evidence={"reward": "f: it raised KeyError"}),
        MeasurementFailed(job="", evidence={"row_tokens": 4000}, split="test"),
    ],
)
def test_an_event_is_written_and_read_back(event: Any) -> None:
    entry = JournalEntry(seq=1, time=2.0, event=event)
    again = decode(encode(entry))
    assert again == entry
    history = RunHistory.of([again])
    if isinstance(event, RungScored):
        assert history.rung_scores == [event]
    elif isinstance(event, MeasurementFailed):
        assert history.measuring_failures == {(event.job, event.split): event.evidence}
    else:
        assert (history.finalists, history.scorer, history.scorer_failure) == (
            event.scores,
            event.scorer,
            event.failure,
        )
