from __future__ import annotations

import json
import math

import pytest
from counting import num_calls
from journals import Journal, config, entries, entry

from alto.errors import RunError, RunNotFoundError
from alto.records import Rung
from alto.runs import (
    QueueHistory,
    RunDir,
    RunHistory,
    Stage,
    TaskStage,
    has_result,
    read_events,
    read_history,
    task_outcome,
)


def test_fold_tells_every_job(small_run):
    history = RunHistory.of(entries(small_run))
    a, b, c, d = (history.jobs[job] for job in "abcd")

    assert [job.outcome for job in (a, b, c, d)] == ["diverging", "underperforming", "overfitting", "completed"]
    assert (c.step, c.best_step, c.best_validation_loss, c.samples_trained, c.samples_saved) == (50, 10, 2.2, 500, 500)
    assert math.isinf(a.best_validation_loss)
    assert (d.stage, d.slot, d.progress, len(d.train_losses)) == (Stage.COMPLETED, None, 1.0, 100)
    assert [point.step for point in d.evaluations] == [10, 100]
    assert [job.job for job in history.ranked()] == ["d", "c", "b", "a"]


def test_fold_tells_what_was_measured_beside_the_loss(preference_run):
    history = RunHistory.of(entries(preference_run))
    b = history.jobs["b"]
    assert history.metric == "reward_accuracy"
    assert [metrics["reward_accuracy"] for metrics in b.metrics] == [0.75, 0.7]
    assert (b.best_step, b.best_validation_loss, b.best_metrics["reward_accuracy"]) == (10, 0.62, 0.75)
    assert math.isnan(history.jobs["c"].metrics[1]["reward_accuracy"])


@pytest.mark.parametrize("is_finished", [True, False])
def test_jobs_are_ranked_by_the_metric_of_their_task(preference_run, is_finished):
    history = RunHistory.of(entries(preference_run if is_finished else preference_run[:-1]))
    assert [job.job for job in history.ranked()] == ["c", "b", "a"]
    assert history.best is history.jobs["c"]


def test_without_a_metric_the_loss_ranks(preference_run):
    del preference_run[0]["metric"]
    history = RunHistory.of(
        entries(event for event in preference_run if event["event"] == "task_started" or "metrics" in event)
    )
    assert history.metric == "loss"
    assert [job.job for job in history.ranked()] == ["a", "c", "b"]
    assert history.jobs["b"].best_metrics["reward_accuracy"] == 0.7


def test_the_result_holds_what_was_measured_of_the_winner(preference_run, tmp_path):
    result = task_outcome(RunHistory.of(entries(preference_run)), RunDir(tmp_path))
    assert (result.best_job, result.metric, result.best_validation_loss) == ("c", "reward_accuracy", 0.6)
    assert result.best_metrics["reward_accuracy"] == 0.75
    assert {job.job: job.best_metrics["reward_accuracy"] for job in result.jobs} == {"a": 0.61, "b": 0.75, "c": 0.75}


def test_jobs_of_a_method_that_measures_nothing_else_have_no_metrics(small_run):
    assert all(not job.best_metrics for job in RunHistory.of(entries(small_run)).jobs.values())


def test_fold_tells_the_run(small_run):
    history = RunHistory.of(entries(small_run))
    assert (history.name, history.num_slots, history.duration_s) == ("maths", 2, 24.0)
    assert history.rung_settings == (Rung(progress=0.1, keep=0.5),)
    assert (history.rungs[0].kept, history.rungs[0].dropped) == (("d", "c"), ("b",))
    assert (history.samples_trained, history.samples_saved, history.samples_budgeted) == (1700, 2300, 4000)
    assert history.saved_share == pytest.approx(0.575)
    assert "jobs" not in history.settings()


def test_occupancy_has_a_closed_stay_per_admission(small_run):
    stays = RunHistory.of(entries(small_run)).occupancy
    assert [(stay.job, stay.slot) for stay in stays] == [("a", 0), ("b", 1), ("c", 0), ("d", 1)]
    assert all(stay.end is not None and stay.end > stay.start for stay in stays)
    by_job = {stay.job: stay for stay in stays}
    assert by_job["c"].start > by_job["a"].end
    assert by_job["d"].start > by_job["b"].end


def test_state_in_the_middle_of_a_run(small_run):
    until_parked = next(index for index, event in enumerate(small_run) if event["event"] == "job_parked")
    history = RunHistory.of(entries(small_run[: until_parked + 1]))
    assert [job.stage for job in history.jobs.values()] == [Stage.EXITED, Stage.PARKED, Stage.TRAINING, Stage.PENDING]
    assert history.jobs["b"].samples_trained == 100
    assert history.jobs["b"].samples_saved == 0
    assert history.best is history.jobs["b"]
    assert history.result is None


def test_best_ignores_losses_that_are_not_finite(small_run):
    until_exit = next(index for index, event in enumerate(small_run) if event["event"] == "job_exited")
    assert RunHistory.of(entries(small_run[: until_exit + 1])).best is None


def test_a_gap_in_the_losses_is_not_a_number(small_run):
    history = RunHistory.of(entries(small_run[:3]))
    history.apply(entry({"event": "train", "time": 1.0, "job": "a", "first_step": 1, "losses": [5.0, 4.0]}))
    history.apply(entry({"event": "train", "time": 3.0, "job": "a", "first_step": 4, "losses": [2.0]}))
    assert math.isnan(history.jobs["a"].train_losses[2])
    assert history.jobs["a"].train_losses[3] == 2.0


def test_a_resumed_run_ends_the_stays_that_were_cut_off(small_run):
    history = RunHistory.of(entries(small_run[:4]))
    last_seen, worked_s = history.last_seen_at, history.duration_s
    history.apply(entry({"event": "task_resumed", "time": last_seen + 3600}))
    assert [stay.end for stay in history.occupancy] == [last_seen, last_seen]
    assert [job.stage for job in history.jobs.values()][:2] == [Stage.PARKED, Stage.PENDING]
    assert len(history.jobs["a"].train_losses) == 10
    assert history.interruptions == [(last_seen, last_seen + 3600)]
    assert history.duration_s == worked_s


def test_a_reopened_job_is_open_again(small_run):
    history = RunHistory.of(entries(small_run[:6]))
    assert history.jobs["a"].has_ended
    history.apply(entry({"event": "job_reopened", "time": history.last_seen_at + 1, "job": "a", "step": 10}))
    assert not history.jobs["a"].has_ended
    assert history.jobs["a"].exit_reason is None
    assert history.jobs["a"].samples_saved == 0


def test_a_clone_counts_from_when_it_came(small_run):
    history = RunHistory.of(entries(small_run[:6]))
    budgeted = history.samples_budgeted
    clone = {"job": "e", "origin": "d", "config": {"r": 2}, "total_steps": 50, "samples_budgeted": 500}
    history.apply(entry({"event": "job_added", "time": history.last_seen_at + 1, **clone}))
    assert (history.jobs["e"].origin, history.jobs["e"].total_steps) == ("d", 50)
    assert history.samples_budgeted == budgeted + 500


def test_torn_last_line_is_dropped(small_run, write_run):
    run_dir = write_run(small_run)
    journal = run_dir / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"seq": 99, "event": "eva')
    assert [event["seq"] for event in read_events(journal)] == [event["seq"] for event in small_run]
    assert read_history(run_dir).result is not None


def test_not_finite_numbers_survive_the_file(small_run, write_run):
    a = read_history(write_run(small_run)).jobs["a"]
    assert math.isnan(a.evaluations[0].validation_loss)
    assert math.isinf(a.evaluations[0].train_ema)


def test_damage_before_the_last_line_is_an_error(small_run, write_run):
    journal = write_run(small_run) / "journal.jsonl"
    lines = journal.read_text().splitlines()
    lines[2] = lines[2][:10]
    journal.write_text("\n".join(lines))
    with pytest.raises(RunError, match=f"line 3 of {len(lines)}"):
        read_events(journal)


@pytest.mark.parametrize("line", ["[1, 2]", "7", '"text"'])
def test_a_line_must_be_an_object(tmp_path, line):
    journal = tmp_path / "journal.jsonl"
    journal.write_text(line + "\n" + json.dumps({"event": "x"}) + "\n")
    with pytest.raises(RunError):
        read_events(journal)


def test_missing_journal_says_what_to_give(tmp_path):
    with pytest.raises(RunNotFoundError, match="Give the folder of a run"):
        read_events(tmp_path / "journal.jsonl")
    with pytest.raises(FileNotFoundError):
        read_history(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "event",
    [
        {"event": "train", "losses": [1.0], "first_step": 1},
        {"event": "train", "job": "a", "losses": "x", "first_step": 1},
        {"event": "job_admitted", "job": "a", "slot": "x"},
        {"event": "task_started", "jobs": "x"},
    ],
)
def test_an_event_that_no_alto_writes_is_named(write_run, small_run, event):
    folder = write_run([*small_run[:3], {"seq": 3, "time": 1.0, **event}])
    with pytest.raises(RunError, match="Expected a journal as ALTO writes it"):
        read_history(folder)


def test_slots_are_listed_by_rank_and_a_spread_job_has_one_on_each(ranked_run):
    history = RunHistory.of(entries(ranked_run))
    stays = [(stay.job, stay.slot, stay.rank, stay.local_slot) for stay in history.occupancy]
    assert stays == [
        ("a", 0, 0, 0), ("b", 1, 0, 1), ("c", 2, 1, 0), ("b", 3, 1, 1), ("c", 0, 0, 0), ("c", 2, 1, 0),
    ]  # fmt: skip
    assert all(stay.end is not None for stay in history.occupancy)
    assert (history.num_ranks, history.num_slots) == (2, 4)


def test_a_job_that_is_spread_is_trained_by_all_ranks(ranked_run):
    spread = RunHistory.of(entries(ranked_run[:-2])).jobs
    assert (spread["c"].slot, spread["c"].ranks) == (0, (0, 1))
    assert (spread["a"].slot, spread["a"].ranks) == (None, ())
    assert RunHistory.of(entries(ranked_run[:4])).jobs["c"].ranks == (1,)


def test_a_run_that_continues_with_other_ranks_counts_its_slots_again(ranked_run):
    cut = ranked_run[:4]
    time = cut[-1]["time"]
    resumed = {"seq": 4, "time": time + 1, "event": "task_resumed", "notes": [], "max_slots": 3, "num_ranks": 1}
    resident = {"seq": 5, "time": time + 2, "event": "job_resumed", "job": "c", "slot": 2, "step": 10}
    history = RunHistory.of(entries([*cut, resumed, resident]))
    assert (history.num_ranks, history.num_slots) == (1, 3)
    assert [(stay.rank, stay.local_slot) for stay in history.occupancy if stay.job == "c"] == [(1, 0), (0, 2)]


@pytest.mark.parametrize(("done", "state"), [(["t"], TaskStage.FINISHED), ([], TaskStage.WAITING)])
def test_a_task_whose_submission_is_journaled_twice_keeps_its_result(done, state):
    """A loss of power took the line, and it comes again after the line that says what is done."""
    lines = [
        {"event": "queue_started", "nodes": [], "tasks": []},
        {"event": "queue_resumed", "done": done},
        {"event": "task_submitted", "task": "t", "num_gpus": 1, "duration_s": 1.0},
    ]
    assert QueueHistory.of(entries(lines)).tasks["t"].state is state


@pytest.mark.parametrize("line", [{"event": "task_started", "task": 7}, {"event": 7}])
def test_a_run_whose_journal_is_damaged_is_not_known_to_have_a_result(tmp_path, line):
    (tmp_path / "best").mkdir()
    (tmp_path / "journal.jsonl").write_text(json.dumps({"seq": 0, "time": 0.0, **line}) + "\n")
    assert not has_result(RunDir(tmp_path))


def sweep(num_jobs: int) -> list[dict]:
    """Return a run whose jobs take one step each, all alike."""
    journal = Journal()
    journal.start({f"job-{number:04d}": config(1e-4, 8) for number in range(num_jobs)})
    for number in range(num_jobs):
        journal.train_to(f"job-{number:04d}", 1, since=0, validation=2.0)
    return journal.events


def test_folding_takes_as_much_work_per_event_however_many_jobs_there_are():
    few, many = (entries(sweep(num_jobs)) for num_jobs in (50, 500))
    calls_of_few, _ = num_calls(RunHistory.of, few)
    _, history = num_calls(lambda: RunHistory.of(many), at_most=12 * calls_of_few)
    assert history.samples_trained == 500 * 10


def test_the_pace_counts_the_samples_of_all_jobs_after_every_event(small_run, preference_run, interrupted_run):
    for run in (small_run, preference_run, interrupted_run):
        history = RunHistory()
        for one in entries(run):
            history.apply(one)
            if one.name == "train":
                assert history.pace._points[-1] == (one.time, history.samples_trained)


def test_a_rung_has_the_samples_of_all_jobs_until_then(small_run):
    (rung,) = RunHistory.of(entries(small_run)).rungs
    assert rung.samples_trained == 400
