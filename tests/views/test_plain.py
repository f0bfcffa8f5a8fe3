from __future__ import annotations

import io

from journals import entry

from alto.views.plain import PlainView


def lines_of(events) -> list[str]:
    stream = io.StringIO()
    with PlainView(stream) as view:
        for event in events:
            view.observe(entry(event))
    return stream.getvalue().splitlines()


def test_one_line_per_noteworthy_event(small_run):
    assert [line[14:] for line in lines_of(small_run)] == [
        "task maths: 4 jobs (sft) on alto-tiny, dataset train.jsonl, 500 rows to train and 50 to validate",
        "early exit alto: at 10 % keep 2 of 4 jobs",
        "admitted a",
        "admitted b",
        "a (lr 0.01 · r 4) ended at 10 %, diverging: smoothed training loss became infinite",
        "admitted c",
        "best so far 3.0000: b (lr 1e-5 · r 4) at step 10 of 100",
        "admitted d",
        "best so far 2.2000: c (lr 2e-4 · r 4) at step 10 of 100",
        "10 % done: 300 of 4,000 samples trained, 22.5 % saved, about 1 min 16 s left",
        "best so far 2.1000: d (lr 2e-4 · r 8) at step 10 of 100",
        "rung at 10 %: 2 kept, 1 ended as underperforming",
        "30 % done: 800 of 4,000 samples trained, 45 % saved, about 32 s left",
        "c (lr 2e-4 · r 4) ended at 50 %, overfitting: validation 2.5000 was 25 % above train 2.0000 twice in a row "
        "(allowed: 10 %)",
        "best so far 1.9000: d (lr 2e-4 · r 8) at step 100 of 100",
        "d (lr 2e-4 · r 8) completed, best validation loss 1.9000",
        "done in 24 s: best 1.9000: d (lr 2e-4 · r 8); 1,700 of 4,000 samples trained, 57.5 % saved",
    ]


def test_the_last_measurement_of_the_winner_names_its_rows(small_run):
    measured = {"event": "best_measured", "job": "d", "step": 100, "validation_loss": 1.85, "loss_rows": [1.8, 1.9]}
    shown = [line[14:] for line in lines_of([*small_run[:-1], measured, small_run[-1]])]
    assert "d (lr 2e-4 · r 8) has loss 1.8500 on 2 validation rows" in shown
    assert shown[-1].startswith("done in 24 s: best 1.8500: d")


def test_the_metric_that_the_task_chooses_by_is_printed(preference_run):
    shown = [line[14:] for line in lines_of(preference_run)]
    assert [line for line in shown if line.startswith("best so far")] == [
        "best so far reward accuracy 60 %: a (lr 1e-4) at step 10 of 100",
        "best so far reward accuracy 75 %: b (lr 2e-4) at step 10 of 100",
    ]
    assert "b (lr 2e-4) completed, best reward accuracy 75 %" in shown
    assert shown[-1].startswith("done in ")
    assert ": best reward accuracy 75 %: c (lr 3e-4); 3,000 of 3,000 samples" in shown[-1]


def test_sixty_jobs_with_twenty_evaluations_do_not_flood(sweep):
    lines = lines_of(sweep)
    assert len(lines) < 150
    assert sum("completed" in line for line in lines) == 40
    assert sum("overfitting" in line for line in lines) == 20
    assert sum("best so far" in line for line in lines) >= 20


def test_dropped_jobs_make_one_line_for_their_rung(small_run):
    assert not any(" b (" in line and "ended" in line for line in lines_of(small_run))


def test_time_is_counted_from_the_start(small_run):
    lines = lines_of(small_run)
    assert lines[0].startswith("[        0 s] ")
    assert lines[-1].startswith(f"[{len(small_run) - 1:>9} s] ")


def test_answers_of_finalists_are_printed(judged_run):
    shown, done = lines_of(judged_run)[-2:]
    assert shown[14:] == "answers of the finalists: d 1 of 8 right, c 5 of 8 right"
    assert "best 2.2000: c (lr 2e-4 · r 4)" in done


def test_an_interruption_and_changes_of_the_user_are_printed(interrupted_run):
    assert [line[14:] for line in lines_of(interrupted_run)] == [
        "task maths: 2 jobs (sft) on alto-tiny, dataset train.jsonl, 500 rows to train and 50 to validate",
        "note: 3 of 500 rows were cut",
        "admitted a",
        "admitted b",
        "best so far 2.0000: a (lr 1e-4) at step 10 of 100",
        "10 % done: 200 of 2,000 samples trained, 0 % saved, about 54 s left",
        "a (lr 1e-4) ended at 10 %, stopped: stopped by the user",
        "interrupted with 18.2 % done",
        "resumed: 1 of 2 jobs have ended, 18.2 % done",
        "resumed b",
        "c (lr 3e-4) added: clone of b, with its weights",
        "admitted c",
        "a (lr 1e-4) reopened, resumes after step 10 of 100",
        "best so far 1.8000: b (lr 2e-4) at step 50 of 100",
        "20 % done: 600 of 3,000 samples trained, 0 % saved, about 36 s left",
    ]


def test_a_setting_that_only_a_clone_varies_is_printed(interrupted_run):
    for job in interrupted_run[0]["jobs"]:
        job["config"]["learning_rate"] = 1e-4
    lines = lines_of(interrupted_run)
    assert any(line.endswith("admitted b") for line in lines)
    assert any("c (lr 3e-4) added" in line for line in lines)


def test_user_text_is_cleaned_and_kept_on_its_line(small_run):
    small_run[0]["task"] = "evil\x1b[2J\nname"
    lines = lines_of(small_run)
    assert "task evil[2J name:" in lines[0]
    assert not any("\x1b" in line for line in lines)


def test_a_narrow_encoding_does_not_stop_the_run(small_run):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    view = PlainView(stream)
    for event in small_run:
        view.observe(entry(event))
    stream.flush()
    assert b"d (lr 2e-4 ? r 8) completed" in stream.buffer.getvalue()


def test_an_interrupted_run_prints_the_jobs_that_are_still_due(small_run):
    small_run[0]["max_slots"] = 8
    assert lines_of(small_run[:3])[-1].endswith("admitted a, b")


def test_ranks_and_moves_between_them_are_printed(ranked_run):
    assert [line[14:] for line in lines_of(ranked_run)][1:-1] == [
        "on 2 ranks, 4 slots in total",
        "early exit alto: at 10 % keep 2 of 3 jobs",
        "admitted a, b",
        "a (lr 1e-4) completed, best validation loss 2.0000",
        "admitted c",
        "b (lr 2e-4) completed, best validation loss 1.9000",
        "moved b to other ranks",
        "c (lr 3e-4) completed, best validation loss 1.8000",
        "moved c to all ranks",
    ]


def test_a_run_that_goes_on_says_on_how_many_ranks(ranked_run):
    resumed = {"seq": 1, "time": ranked_run[0]["time"] + 1, "event": "task_resumed", "notes": [], "num_ranks": 4}
    message = "resumed on 4 ranks: 0 of 3 jobs have ended, 0 % done"
    assert lines_of([ranked_run[0], resumed])[-1].endswith(message)
