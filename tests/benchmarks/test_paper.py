"""The paper's experiments on recorded sweeps, their plots and page, and resuming after a kill."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the pictures need the bench extra: pip install -e '.[bench]'")

from matplotlib.figure import Figure

from alto.early_exit import Recording
from benchmarks.common import RESULTS_DIR
from benchmarks.paper import __main__ as command
from benchmarks.paper import curves, running
from benchmarks.paper.experiments import EXPERIMENTS
from benchmarks.paper.recordings import by_batch_size, loss_at, quarter_kept, read_recordings, spearman, with_jobs
from benchmarks.paper.running import is_done, run_one

ROOT = Path(__file__).resolve().parents[2]
ON_RECORDINGS = [name for name, experiment in EXPERIMENTS.items() if experiment.recorded is not None]


@pytest.fixture(scope="module")
def recording() -> Recording:
    return read_recordings("cpu")["gsm8k-alto-tiny"]


@pytest.mark.parametrize("name", ON_RECORDINGS)
def test_the_smallest_scale_passes_its_gate_and_is_drawn(tmp_path: Path, name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert run_one(name, "smoke", tmp_path) == 0
    found = json.loads((tmp_path / f"{experiment.topic}-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    assert set(experiment.goals) <= set(found["figures"])
    assert is_done(name, "smoke", tmp_path)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_measures_and_draws_is_there(name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert (experiment.program is None) != (experiment.recorded is None)
    for function in (experiment.program, experiment.recorded, experiment.drawing):
        if function is not None:  # not imported: some programs configure the process that imports them
            module, _, wanted = function.partition(":")
            found = importlib.util.find_spec(module)
            assert found is not None
            assert f"\ndef {wanted}(" in Path(str(found.origin)).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(set(EXPERIMENTS) - set(ON_RECORDINGS)))
def test_a_test_reads_what_the_smallest_scale_gives(name: str) -> None:
    file = f"{EXPERIMENTS[name].topic}-smoke.json"
    tests = Path(__file__).parent.glob("test_*.py")
    assert any(file in test.read_text(encoding="utf-8") for test in tests), f"expected a test that reads {file}"


def test_a_recording_that_misses_its_best_job_fails_the_gate(recording: Recording) -> None:
    job = min(recording.jobs, key=lambda job: min(loss for _, loss in job.evaluations))
    early = tuple((step - 1, loss) for step, loss in job.evaluations)
    late = replace(job, evaluations=early, train_losses=(math.nan,) * job.total_steps)
    failures = curves.gate({"good": recording, "bad": with_jobs(recording, [late])})
    assert [failure.partition(":")[0] for failure in failures] == ["bad"]


def test_losses_are_those_of_the_recording(recording: Recording) -> None:
    job = recording.jobs[0]
    assert job.start is not None
    assert loss_at(job, 0.0) == job.start.validation_loss
    step, loss = job.evaluations[3]
    assert loss_at(job, step / job.total_steps) == pytest.approx(loss)
    (first, before), (second, after) = job.evaluations[3:5]
    assert loss_at(job, (first + second) / 2 / job.total_steps) == pytest.approx((before + after) / 2)
    assert loss_at(replace(job, evaluations=((1, 2.0), (3, math.nan))), 1.0) == math.inf


def made(recording: Recording, losses: Sequence[tuple[float, float]]) -> Recording:
    """Return the recording with these validation losses in the middle and at the end of its jobs."""
    steps = 10
    return with_jobs(
        recording,
        [
            replace(
                recording.jobs[0],
                job=f"job-{number}",
                total_steps=steps,
                train_losses=(1.0,) * steps,
                evaluations=((steps // 2, middle), (steps, end)),
                start=None,
            )
            for number, (middle, end) in enumerate(losses)
        ],
    )


def test_ranks_agree_or_are_turned_round(recording: Recording) -> None:
    alike = made(recording, [(5.0, 4.0), (6.0, 3.0), (7.0, 2.0), (8.0, 1.0)])
    assert spearman(alike, 0.5) == pytest.approx(-1.0)
    assert quarter_kept(alike, 0.5) == (0.0, False)
    for recorded in (alike, made(recording, [(5.0, 1.0), (6.0, 2.0), (7.0, 3.0), (8.0, 4.0)])):
        assert spearman(recorded, 1.0) == pytest.approx(1.0)
        assert quarter_kept(recorded, 1.0) == (1.0, True)
    half = made(
        recording, [(1.0, 0.5), (2.0, 0.1), (3.0, 0.2), (4.0, 0.3), (5.0, 0.9), (6.0, 0.8), (7.0, 0.7), (8.0, 0.6)]
    )
    assert quarter_kept(half, 0.5) == (0.5, True)


def test_the_spread_of_accuracies_is_that_of_the_recordings_that_have_them(recording: Recording) -> None:
    without = curves.sensitivity({"sft": recording})
    assert not any("accuracy" in name for name in without.figures)
    assert without.notes[-1] == "No recording has accuracies."
    accuracies = ((0.5, 0.9), (0.7, 0.6), (0.55, 0.5), (math.nan, 0.6))
    whole = made(recording, [(1.0, 0.5)] * len(accuracies))
    jobs = [
        replace(job, start=recording.jobs[0].start, metrics={"reward_accuracy": values})
        for job, values in zip(whole.jobs, accuracies, strict=True)
    ]
    found = curves.sensitivity({"sft": recording, "dpo": with_jobs(recording, jobs)})
    assert found.rows[1]["accuracies"] == pytest.approx([90, 70, 60, 55])
    assert {name: value for name, value in found.figures.items() if "improvement" not in name} == pytest.approx(
        {
            "recordings_with_accuracy": 1,
            "best_accuracy": 90,
            "median_accuracy": 65,
            "worst_accuracy": 55,
            "best_over_median_points": 25,
            "best_over_worst_points": 35,
        }
    )


@pytest.mark.parametrize("has_accuracies", [True, False])
def test_accuracies_are_drawn_where_there_are_some(recording: Recording, has_accuracies: bool) -> None:
    jobs = [replace(job, metrics={"reward_accuracy": (0.75,) * len(job.evaluations)}) for job in recording.jobs]
    found = curves.sensitivity({"dpo": with_jobs(recording, jobs) if has_accuracies else recording})
    axes = list(Figure().subplots(1, EXPERIMENTS["sensitivity"].panels))
    curves.draw_sensitivity(found, axes)
    assert axes[1].axison == has_accuracies
    assert [text.get_text() for text in axes[1].texts] == ([] if has_accuracies else ["no recording has accuracies"])


def test_batch_sizes_divide_a_sweep(recording: Recording) -> None:
    parts = by_batch_size(recording)
    assert list(parts) == [1, 2, 4, 8]
    assert sum(len(part.jobs) for part in parts.values()) == len(recording.jobs)


WRONG = [
    (["all", "--scale", "model"], "expected a scale of all, found model, which none of them has"),
    (["search", "--scale", "gpu"], "expected a scale of smoke, cpu for search, found gpu"),
    (["sensitivity", "--model", "x", "--out", "{folder}"], "no other options for sensitivity, found --model x"),
    (["all", "--threads", "1"], "expected options of one experiment after its name, found --threads 1 after several"),
    (["quality", "--out", "{folder}", "--data", "rows.jsonl"], "unrecognized arguments: --data rows.jsonl"),
    (["quality", "--dataset", "rows.jsonl"], "expected a folder beside --dataset, so that no documented result"),
    (["quality", "--out", "{folder}/rows.jsonl"], "a folder that can be written to, found {folder}/rows.jsonl"),
    (["quality", "--out", "{folder}", "--model", "{folder}"], "in '{folder}', found no such file; name a folder"),
    (["quality", "--out", "{folder}", "--dataset", "{folder}/none"], "expected a file of JSON lines at {folder}/none"),
    (["quality", "--out", "{folder}", "--dataset", "{folder}/rows.jsonl"], "rows.jsonl:2: expected a JSON object"),
    (["makespan", "--out", "{folder}", "--dataset", "{folder}/few.jsonl"], "expected at least 20 rows, found 2"),
    (["dpo", "--out", "{folder}", "--dataset", "{folder}/few.jsonl"], "texts prompt, chosen, rejected, found a, b"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_what_cannot_be_measured_is_reported_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": \n', encoding="utf-8")
    (tmp_path / "few.jsonl").write_text('{"a": "b", "b": "c"}\n' * 2, encoding="utf-8")
    before = sorted(RESULTS_DIR.iterdir())
    try:
        code = command.main([argument.format(folder=tmp_path) for argument in arguments])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert message.format(folder=tmp_path) in " ".join(capsys.readouterr().err.split())
    assert sorted(RESULTS_DIR.iterdir()) == before
    assert not list(tmp_path.glob("*.json"))


def test_two_commands_do_not_measure_into_one_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "PATIENCE_S", 0.0)
    arguments = ["batch-size", "--scale", "smoke", "--out", str(tmp_path)]
    with running.nothing_else_in(tmp_path):
        assert command.main(arguments) == 2
        assert f"measures into {tmp_path}, found process {os.getpid()}; wait" in capsys.readouterr().err
        assert command.main(["all", *arguments[1:]]) == 2
    assert command.main(arguments) == 0


@pytest.mark.slow("benchmarks")
def test_it_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    names = ["sensitivity", "batch-size", "patterns"]
    command = [sys.executable, "-m", "benchmarks.paper", *names, "--scale", "smoke", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    until = time.monotonic() + 300
    while not is_done("sensitivity", "smoke", tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    measured = (tmp_path / "sensitivity-smoke.json").read_bytes()
    assert not is_done("patterns", "smoke", tmp_path)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "sensitivity: measured before" in done.stdout
    assert (tmp_path / "sensitivity-smoke.json").read_bytes() == measured
    assert all(is_done(name, "smoke", tmp_path) for name in names)
