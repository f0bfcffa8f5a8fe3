"""The end-to-end benchmark at its smallest scale: the sweep, the systems it is compared with, recommended settings,
gates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
pytest.importorskip("ray", reason="needs the peers: pip install -r benchmarks/peers.txt")

from benchmarks.common import GSM8K
from benchmarks.end_to_end import gate, program, quality, systems
from benchmarks.end_to_end.plans import SIZES, questions_of
from benchmarks.end_to_end.systems import Outcome, Sweep

pytestmark = [
    pytest.mark.slow("benchmarks"),
    pytest.mark.filterwarnings("ignore"),  # raised by five libraries
    pytest.mark.skipif(not GSM8K.exists(), reason=f"needs GSM8K at {GSM8K}"),
]

SYSTEMS = {"sequential", "loop", "batched", "early_exit", "ray_asha", "optuna_hyperband", "optuna_median"}

Found = tuple[dict[str, Any], Sweep, Mapping[str, Outcome], Path]


@pytest.fixture(scope="module", name="found")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The result file, and the arguments of its gate."""
    folder = tmp_path_factory.mktemp("end-to-end")
    calls = list[tuple[Sweep, Mapping[str, Outcome]]]()
    unpatched = gate.outcome_failures

    def outcome_failures(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> list[str]:
        calls.append((sweep, outcomes))
        return unpatched(sweep, outcomes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "outcome_failures", outcome_failures)
        # The results of the systems outlive main, for the tests of the gate.
        measure = program.measure
        patch.setattr(program, "measure", lambda *given: measure(*given[:4], folder / "work"))
        arguments = ["--scale", "smoke", "--out", str(folder), "--threads", "1"]
        assert program.main(arguments) == 0
    result = json.loads((folder / "end_to_end-smoke.json").read_text(encoding="utf-8"))
    return result, *calls[0], folder


def test_every_system_sweeps_and_is_judged(found: Found) -> None:
    result, _, outcomes, _ = found
    assert result["gate"] == "passed"
    rows = {row["system"]: row for row in result["rows"]}
    assert set(rows) == set(outcomes) == SYSTEMS
    assert set(program.GOALS) <= set(result["figures"])
    for system, row in rows.items():
        assert row["duration_s"] > 0
        assert 2 < row["validation_loss"] < 6
        assert (row["test_loss"] is None) == (system == "loop")
    whole = 2 * SIZES["smoke"].train  # two jobs of one epoch
    assert {rows[system]["samples"] for system in ("sequential", "loop", "batched")} == {whole}
    assert all(rows[system]["samples"] <= whole for system in SYSTEMS)


def test_mlora_s_way_has_the_curves_of_alto(found: Found) -> None:
    """Both begin with the same adapters; two orders of addition in float32 agree this well."""
    recording = found[2]["batched"].recording
    assert recording is not None
    for job in recording.jobs:
        other = found[2]["loop"].jobs[job.job]
        assert other.train_losses == pytest.approx(job.train_losses, rel=1e-4)
        assert [(item.step, item.loss) for item in other.evaluations] == [
            (step, pytest.approx(loss, rel=1e-4)) for step, loss in job.evaluations
        ]


def _other_rows(outcome: Outcome) -> Outcome:
    jobs = {name: replace(job, train_losses=(1.0, *job.train_losses[1:])) for name, job in outcome.jobs.items()}
    return replace(outcome, jobs=jobs)


@pytest.mark.parametrize(
    ("system", "change", "message"),
    [
        ("loop", _other_rows, "loop, first step of job-000"),
        ("loop", lambda found: replace(found, loss=found.loss * 1.02), "loop, best loss"),
        ("ray_asha", lambda found: replace(found, loss=found.loss * 1.01), "ray_asha, best adapter"),
        ("optuna_median", lambda found: replace(found, loss=found.loss * 0.99), "optuna_median, best adapter"),
        ("batched", lambda found: replace(found, samples=found.samples - 1), "batched: expected 36 rows"),
    ],
)
def test_the_gate_bites(found: Found, system: str, change: Callable[[Outcome], Outcome], message: str) -> None:
    _, sweep, outcomes, _ = found
    assert gate.outcome_failures(sweep, outcomes) == []
    failures = gate.outcome_failures(sweep, {**outcomes, system: change(outcomes[system])})
    assert failures
    assert all(failure.startswith(message) for failure in failures[:1])


def test_results_are_not_reused_as_measurements(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = found[3]
    assert not list((folder / ".paper").iterdir())
    monkeypatch.setattr(program, "measure", lambda *_: pytest.fail("measured again"))
    with pytest.raises(pytest.fail.Exception):
        program.main(["--scale", "smoke", "--out", str(folder), "--threads", "1"])


def test_recommended_settings_are_trained_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--scale", "smoke", "--out", str(tmp_path), "--threads", "1"]
    assert quality.main(arguments) == 0
    result = json.loads((tmp_path / "quality-smoke.json").read_text(encoding="utf-8"))
    assert result["gate"] == "passed"
    rows = {row["way"]: row for row in result["rows"]}
    assert set(rows) == {"found", "unsloth", "unsloth_scaled", "lora_without_regret"}
    assert rows["unsloth"]["learning_rate"] == 2e-4
    # 10 * 5e-5 * (2000 / 128) ** 0.781, for a Llama with 128 hidden features
    assert rows["lora_without_regret"]["learning_rate"] == pytest.approx(4.278e-3, rel=1e-3)
    ratio = rows["found"]["test_loss"] / min(row["test_loss"] for way, row in rows.items() if way != "found")
    assert result["figures"]["found_over_recommended_worst"] == pytest.approx(ratio)

    monkeypatch.setattr(quality, "adapter_loss", lambda *_: math.pi)
    assert quality.main([*arguments[:3], str(tmp_path / "other"), *arguments[4:]]) == 1
    result = json.loads((tmp_path / "other" / "quality-smoke.json").read_text(encoding="utf-8"))
    assert (result["gate"], result["figures"]) == ("failed", {})


def test_rows_of_several_forms_are_questions_and_answers(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"instruction": "a", "output": "b", "input": ""}\n\n{"prompt": "c", "completion": "d"}\n')
    assert questions_of(file) == [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}]
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"expected rows with one of question/answer.*found text"):
        questions_of(file)


def test_a_diverged_job_has_no_best_loss() -> None:
    job = systems.BaselineJob(duration_s=1, train_s=1, eval_s=0, train_losses=(), evaluations=(), samples=0)
    assert systems.best_loss(job) == math.inf
