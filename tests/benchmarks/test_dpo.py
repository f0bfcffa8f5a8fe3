"""The benchmark of preference tuning at its smallest scale: three systems, the gate that compares them, the result
file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOTrainer

import alto
from alto.backbone import load_backbone, resolve_model
from alto.data import read_task_rows
from alto.spec import BaseModelSpec, JobConfig
from alto.spec.objective_settings import DpoSettings
from benchmarks.baselines.pairs import PreparedPairs, prepare_pairs, tokenize_pairs
from benchmarks.baselines.start import first_adapter
from benchmarks.baselines.trl_pairs import train_on_pairs
from benchmarks.common import PREFERENCE_PAIRS, ROOT
from benchmarks.dpo import program as dpo
from benchmarks.dpo.gate import TOLERANCE, gate_failures
from benchmarks.dpo.judge import Worth
from benchmarks.dpo.measured import Measured, Tuned
from benchmarks.dpo.summary import best_accuracy, figures

PAIRS = ROOT.parent / "shared" / "data" / "pref_mix" / "pairs.jsonl.gz"
ROWS = [
    {"prompt": f"What is {a} plus {b}?", "chosen": f"It is {a + b}, thank you.", "rejected": f"{a + b}, obviously."}
    for a in range(1, 4)
    for b in range(1, 5)
]

# The three libraries warn about each other.
pytestmark = [pytest.mark.slow("benchmarks"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[dict, Measured]:
    """The result file of the smallest scale, and the measurements in it."""
    if not PAIRS.exists():
        pytest.skip(f"needs preference pairs at {PAIRS}")
    folder, kept = tmp_path_factory.mktemp("smoke"), []

    def measure(size: dpo.Size, model: str, data: Path, _: Path) -> Measured:
        kept.append(unpatched(size, model, data, folder))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        unpatched = dpo.measure
        patch.setattr(dpo, "measure", measure)  # its runs outlive main
        assert dpo.main(["--scale", "smoke", "--out", str(folder), "--threads", "1"]) == 0
    return json.loads((folder / "dpo-smoke.json").read_text(encoding="utf-8")), kept[0]


def test_the_smallest_scale_passes_its_gate(smoke):
    result, measured = smoke
    assert result["gate"] == "passed"
    assert set(dpo.GOALS) <= set(result["figures"])
    # The systems begin with the same adapters, and a stable job has the same curves.
    theirs = [item.loss for item in measured.sequential["job-000"].evaluations]
    ours = [loss for _, loss in measured.recording.jobs[0].evaluations]
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert all(0 <= value <= 1 for value in measured.recording.jobs[0].metrics["reward_accuracy"])
    tuned = measured.batched[measured.first_seed]
    assert tuned.reported_accuracy == pytest.approx(best_accuracy(measured.sequential[tuned.result.best_job]))
    assert [row["exit"] for row in result["rows"] if "saved" in row] == ["overfitting", "diverging", "underperforming"]
    assert len([row for row in result["rows"] if "heldout_accuracy" in row]) == 4


def of_first_seed(measured: Measured, change: Callable[[Tuned], Tuned]) -> Measured:
    seed = measured.first_seed
    return dataclasses.replace(measured, batched={**measured.batched, seed: change(measured.batched[seed])})


def with_job(measured: Measured, **changes: object) -> Measured:
    job = dataclasses.replace(measured.sequential["job-000"], **changes)
    return dataclasses.replace(measured, sequential={**measured.sequential, "job-000": job})


def cut_short(tuned: Tuned) -> Tuned:
    first, *others = tuned.result.job_results
    shorter = dataclasses.replace(first, steps=first.steps - 1)
    outcome = dataclasses.replace(tuned.result.outcome, jobs=(shorter, *others))
    return dataclasses.replace(tuned, result=alto.TaskResult(outcome))


def judged(**changes: float) -> Callable[[Tuned], Tuned]:
    return lambda tuned: dataclasses.replace(tuned, validation=dataclasses.replace(tuned.validation, **changes))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda found: with_job(found, train_losses=(0.6931472, 0.5, 0.5, 0.5, 0.5, 0.5)), "first steps of job-000"),
        (lambda found: with_job(found, samples=23), "the 23 pairs that TRL trained"),
        (lambda found: of_first_seed(found, cut_short), "seed 1: expected 6 steps of job-000, found 5"),
        (lambda found: of_first_seed(found, judged(loss=0.1)), "best adapter of batched, seed 1: expected [0.1]"),
        (lambda found: of_first_seed(found, judged(accuracy=0.0)), "expected an accuracy of 0.0"),
    ],
)
def test_the_gate_bites(smoke, tamper, message):
    assert gate_failures(smoke[1]) == []
    assert any(message in failure for failure in gate_failures(tamper(smoke[1])))


def test_accuracies_are_compared_on_held_out_pairs_over_all_seeds(smoke):
    def with_accuracies(runs: dict[int, Tuned], *accuracies: float) -> dict[int, Tuned]:
        return {
            seed: dataclasses.replace(tuned, heldout=Worth(loss=0.5, accuracy=accuracy))
            for (seed, tuned), accuracy in zip(runs.items(), accuracies, strict=True)
        }

    _, measured = smoke
    changed = dataclasses.replace(
        measured,
        batched=with_accuracies(measured.batched, 0.7, 0.8),
        early_exit=with_accuracies(measured.early_exit, 0.72, 0.75),
    )
    found = figures(changed)
    assert found["accuracy_delta_points"] == pytest.approx(1.5)
    assert found["accuracy_delta_worst_points"] == pytest.approx(5)
    assert (found["batched_accuracy"], found["early_exit_accuracy"]) == pytest.approx((0.75, 0.735))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> PreparedPairs:
    folder = tmp_path_factory.mktemp("pairs")
    return prepare_pairs(resolve_model("alto-tiny"), ROWS[:8], ROWS[8:], folder, max_length=64)


CONFIG = JobConfig(
    learning_rate=1e-3,
    batch_size=4,
    r=4,
    seed=3,
    num_train_epochs=2,
    objective=DpoSettings(),
)


def losses(prepared: PreparedPairs, config: JobConfig) -> tuple[float, ...]:
    """Return TRL's losses for a job of ``config`` that begins with the adapter of ``CONFIG``."""
    start = first_adapter(load_backbone(BaseModelSpec(id="alto-tiny")), CONFIG)
    return train_on_pairs(prepared, config.model_dump(), start=start, eval_at_steps=[]).train_losses


@pytest.fixture(scope="module")
def expected(prepared) -> tuple[float, ...]:
    return losses(prepared, CONFIG)


@pytest.mark.parametrize("change", [{"beta": 0.11}, {"learning_rate": 1.1e-3}, {"seed": 4}], ids=str)
def test_every_setting_of_a_job_reaches_trl(prepared, expected, change):
    found = losses(prepared, CONFIG.replace(**change))
    assert found[0] == pytest.approx(expected[0], rel=1e-5)  # log 2: no adapter has learned anything yet
    assert found != pytest.approx(expected, rel=TOLERANCE)


def test_the_systems_see_the_same_tokens(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("alto-tiny"))
    ours = tokenize_pairs(tokenizer, ROWS, max_length=64)

    def turn(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    conversations = [
        {
            "prompt": turn("user", row["prompt"]),
            "chosen": turn("assistant", row["chosen"]),
            "rejected": turn("assistant", row["rejected"]),
        }
        for row in ROWS
    ]
    trainer, arguments = (
        SimpleNamespace(_tokenizer=tokenizer),
        SimpleNamespace(dataset_num_proc=None, max_length=64, truncation_mode="keep_start"),
    )
    theirs = DPOTrainer._prepare_dataset(trainer, Dataset.from_list(conversations), tokenizer, arguments, "train")
    assert ours == theirs.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"]).to_list()

    size = dataclasses.replace(dpo.SIZES["smoke"], max_length=64)
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    encoded = read_task_rows(dpo.make_task(size, "alto-tiny", tmp_path, seed=1)).encode(tokenizer).train
    assert len(encoded) == len(ours)
    for ids, (chosen, rejected), pair in zip(encoded.input_ids, encoded.spans, ours, strict=True):
        row = ids.tolist()
        assert row[: chosen.length] == pair["prompt_ids"] + pair["chosen_ids"]
        assert row[: rejected.prefix] + row[chosen.length :] == pair["prompt_ids"] + pair["rejected_ids"]


def test_a_pair_that_would_be_cut_is_refused():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("alto-tiny"))
    with pytest.raises(ValueError, match="at most 8 tokens"):
        tokenize_pairs(tokenizer, ROWS, max_length=8)


def test_every_source_of_own_pairs_counts(tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "source": "mine"}
    alike = pair | {"prompt": "d", "chosen": "c "}
    file = tmp_path / "pairs.jsonl"
    file.write_text(f"{json.dumps(pair)}\n{json.dumps(alike)}\n", encoding="utf-8")
    assert dpo.read_pairs(file) == [{"prompt": "a", "chosen": "b", "rejected": "c"}]


def test_one_source_of_our_mixture_counts_however_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if not PREFERENCE_PAIRS.exists():
        pytest.skip(f"needs pairs at {PREFERENCE_PAIRS}")
    monkeypatch.chdir(PREFERENCE_PAIRS.parent)
    assert dpo.read_pairs(Path(PREFERENCE_PAIRS.name)) == dpo.read_pairs(PREFERENCE_PAIRS)
