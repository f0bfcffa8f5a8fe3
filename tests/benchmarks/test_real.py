"""Sweeps on a pretrained model at their smallest scale, here on a random one: every piece, its gate, and resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
pytest.importorskip("ray", reason="needs the peers: pip install -r benchmarks/peers.txt")

from alto import Engine
from alto.early_exit import Recording
from benchmarks.common import GSM8K, PREFERENCE_PAIRS
from benchmarks.pieces import Origin, Piece
from benchmarks.real import program
from benchmarks.real.child import CallTimes
from benchmarks.real.plans import SCALES, parse, systems_of
from benchmarks.real.settings import TOLERANCES, Answers

pytestmark = [
    pytest.mark.slow("benchmarks"),
    pytest.mark.filterwarnings("ignore"),  # raised by five libraries
    pytest.mark.skipif(not (GSM8K.exists() and PREFERENCE_PAIRS.exists()), reason=f"needs data in {GSM8K.parents[1]}"),
]


def run(folder: Path, *arguments: str) -> int:
    return program.main(["--scale", "smoke", "--out", str(folder), "--threads", "1", *arguments])


def result_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "real-smoke.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the results of a whole run."""
    found = tmp_path_factory.mktemp("real")
    assert run(found) == 0
    return found


def test_every_system_of_every_piece_is_measured(folder: Path) -> None:
    result = result_in(folder)
    assert result["gate"] == "passed"
    assert set(program.GOALS["cpu"]) <= set(result["figures"])
    rows = result["rows"]
    assert {(row["piece"], row["system"]) for row in rows} == {
        (name, system) for name, systems in systems_of("smoke").items() for system in systems
    }
    for row in rows:
        assert row["duration_s"] > 0
        if (row["piece"], row["system"]) not in (("rows5000", "alto"), ("dpo", "trl")):
            assert 0.5 < row["test_loss"] < 6
    alto = [row for row in rows if row["system"] == "alto"]
    assert len([row for row in alto if row["piece"] == "dpo"]) == SCALES["smoke"].repeats["dpo"]
    assert all(0 < row["evaluation_s"] + row["measuring_s"] < row["duration_s"] for row in alto)
    assert all(row["evaluation_s"] > 0 for row in alto)
    trained = [row for row in rows if (row["piece"], row["system"]) == ("sweep12", "trl")]
    assert [row["stands_for"] for row in trained] == [2, 2]  # one of two learning rates, of both batch sizes


def test_every_job_of_the_recordings_came_to_its_end(folder: Path) -> None:
    for name, size in SCALES["smoke"].sweeps.items():
        recording = Recording.read(folder / "real-smoke.pieces" / f"real-{name}.json.gz")
        ranks = SCALES["smoke"].all_ranks.get(name, size.ranks)
        assert {job.config["r"] for job in recording.jobs} == set(ranks)
        assert len(recording.jobs) == len(size.learning_rates) * len(ranks) * len(size.batch_sizes)
        assert all(len(job.train_losses) == job.total_steps for job in recording.jobs)
        assert recording.task["base"] == "alto-tiny"
    assert not list((folder / "real-smoke.pieces").glob("*-all-*")), "finished runs are not kept"


def test_a_run_that_was_killed_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--pieces", "sweep24", "--systems", "trl", "all")
    with monkeypatch.context() as patch:
        patch.setattr(program, "winner_failures", lambda *_: pytest.fail("killed here"))
        with pytest.raises(pytest.fail.Exception):
            run(tmp_path, *arguments)
    monkeypatch.setattr(Answers, "train_with_trl", lambda *_: pytest.fail("trained by TRL again"))
    monkeypatch.setattr(Engine, "tune", lambda *_: pytest.fail("trained by ALTO again"))
    assert run(tmp_path, *arguments) == 0
    result = result_in(tmp_path)
    assert {row["system"] for row in result["rows"]} == {"trl", "all"}
    assert "Not measured: sweep24 alto." in result["notes"]


def test_a_finished_study_keeps_no_parts(folder: Path) -> None:
    assert not list((folder / ".paper").iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test_loss": 1 + 2 * TOLERANCES["float32"]}, "expected a test loss of"),
        ({"peft_losses": 1 + 2 * TOLERANCES["float32"]}, "expected a validation loss of"),
        ({"peft_losses": float("nan")}, "expected finite losses"),
    ],
)
def test_the_gate_bites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, float], message: str
) -> None:
    test_loss, peft_losses = Answers.test_loss, Answers.peft_losses
    factor = change.get("test_loss", 1.0)
    monkeypatch.setattr(Answers, "test_loss", lambda *given: test_loss(*given) * factor)
    by = change.get("peft_losses", 1.0)
    monkeypatch.setattr(Answers, "peft_losses", lambda *given: tuple(by * loss for loss in peft_losses(*given)))
    assert run(tmp_path, "--pieces", "sweep24", "--systems", "alto") == 1
    result = result_in(tmp_path)
    assert (result["gate"], result["figures"], result["rows"]) == ("failed", {}, [])
    assert any(message in note for note in result["notes"])


def row(piece: str, system: str, duration_s: float, **more: float) -> dict[str, Any]:
    shares = {"evaluation_s": 0.0, "measuring_s": 0.0, "test_loss": 1.0}
    return {"piece": piece, "system": system, "duration_s": duration_s, **shares, **more}


def test_figures_are_ratios_of_medians() -> None:
    rows = [
        *(row("sweep12", "alto", time, evaluation_s=time / 4, measuring_s=1.0, test_loss=1.1) for time in (20, 10, 90)),
        row("sweep12", "all", 400.0),
        row("sweep12", "ray_asha", 50.0, test_loss=2.2),
        *(row("sweep12", "trl", time, prepare_s=4.0, stands_for=3) for time in (10.0, 20.0)),
    ]
    found = program.figures({"all": Piece(name="all", rows=rows)})
    assert found == pytest.approx(
        {
            "sweep12_over_trl": (4 + 3 * 10 + 3 * 20) / 20,
            "over_ray_asha": 2.5,
            "test_loss_over_ray_asha": 0.5,
            "best_loss_ratio": 1.1,
            "evaluation_share": 0.25,
            "measuring_share": 0.05,
            "sweep12_s": 20,
            "sweep12_s_spread": 4.0,
        }
    )


def test_times_of_two_sources_are_not_compared() -> None:
    origin = Origin(commit="a" * 40, source="s", machine={}, versions={})
    alto = Piece(name="alto", rows=[row("sweep12", "alto", 20.0, test_loss=1.1)], origin=origin)
    others = [row("sweep12", "all", 400.0), row("sweep12", "trl", 10.0, prepare_s=4.0, stands_for=3)]
    later = Piece(name="others", rows=others, origin=replace(origin, source="t"))
    found = program.figures({"alto": alto, "others": later})
    assert found["best_loss_ratio"] == pytest.approx(1.1)
    assert "sweep12_over_trl" not in found
    same = Piece(name="others", rows=others, origin=replace(origin, commit="b" * 40))
    assert "sweep12_over_trl" in program.figures({"alto": alto, "others": same})


def test_trl_trains_a_part_of_the_longest_jobs(folder: Path) -> None:
    rows = {row["piece"]: row for row in result_in(folder)["rows"] if row["system"] == "trl"}
    whole, part = rows["sweep12"], rows["sweep24"]
    assert (whole["share"], whole["samples"]) == (1.0, 16 * 2)
    assert whole["duration_s"] == pytest.approx(whole["measured_s"])
    assert (part["share"], part["samples"]) == (0.5, 16 / 2)
    assert part["duration_s"] > part["measured_s"]


def test_trl_trains_a_spread_of_every_batch_size(tmp_path: Path) -> None:
    for number, trained in (("1", [0]), ("2", [0, 5]), ("3", [0, 2, 5]), ("9", [0, 1, 2, 3, 4, 5])):
        options = parse(None, ["--scale", "cpu", "--model", "alto-tiny", "--trl-jobs", number])
        found = program.Measurement("sweep12", "trl", options).parts()
        assert list(found) == [f"real-cpu-sweep12-trl-{size}-{index}" for size in (2, 8) for index in trained]


def test_a_call_within_another_counts_once() -> None:
    times = CallTimes()
    inner = times.timed("inner", lambda: 1)
    outer = times.timed("outer", lambda: inner() + 1)
    assert outer() == 2
    assert list(times.total_s) == ["outer"]
    assert inner() == 1
    assert list(times.total_s) == ["outer", "inner"]


def test_pieces_of_another_model_are_not_mixed_in(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(_tiny(), target_is_directory=True)
    with pytest.raises(SystemExit, match="name another folder with --out"):
        run(folder, "--model", str(other), "--pieces", "sweep24", "--systems", "trl")


def _tiny() -> str:
    from alto.backbone import resolve_model

    return str(resolve_model("alto-tiny"))
