"""A tuned adapter measured: the loss of its run, an exact match that can succeed, and the base beside it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from tiny import load_tokenizer, make_task

import alto
from alto.backbone import load_network, resolve_model
from alto.data import HeldoutRows, read_heldout_rows
from alto.errors import DataError, NoResultError, SpecError, TargetModuleError
from alto.evaluation import BaseModel, EvaluationSettings, measure
from alto.evaluation.adapter import SavedAdapter, read_saved_adapter
from alto.records import EvaluationResult, TaskResult

# PEFT asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

BASE = BaseModel(model="alto-tiny")
NUM_ROWS = 8


def write_sums(path: Path) -> Path:
    """Sums with worked answers, some of them above a thousand, of very different lengths."""
    rows = [
        {"prompt": f"What is {n} plus {n % 7}?", "completion": "Let me see.\n" * (n % 4) + f"#### {n + n % 7:,}"}
        for n in range(3, 200 * NUM_ROWS, 200)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[alto.Task, TaskResult]:
    """alto-tiny has learned its eight validation rows by heart: they are its training rows too."""
    folder = tmp_path_factory.mktemp("tuned")
    sums = str(write_sums(folder / "sums.jsonl"))
    task = make_task(
        folder,
        **{"dataset": sums, "validation_dataset": sums, "lr": 1e-2, "batch_size": NUM_ROWS, "max_steps": 50},
        early_exit=False,
        eval_steps=0.5,
    )
    return task, alto.Engine(output_dir=folder / "runs").tune(task)


@pytest.fixture(scope="module")
def adapter(tuned: tuple[alto.Task, TaskResult]) -> SavedAdapter:
    return read_saved_adapter(Path(tuned[1].adapter_dir))


@pytest.fixture(scope="module")
def rows(tuned: tuple[alto.Task, TaskResult]) -> HeldoutRows:
    return dataclasses.replace(read_heldout_rows(tuned[0], None), name="sums")


def run(
    adapter: SavedAdapter,
    rows: HeldoutRows,
    *,
    max_tokens_per_pass: int = 4096,
    max_length: int | None = None,
    **settings: Any,
) -> EvaluationResult:
    return measure(
        adapter,
        rows,
        EvaluationSettings(**({"max_new_tokens": 32} | settings)),
        base=BASE,
        max_tokens_per_pass=max_tokens_per_pass,
        max_length=max_length,
    )


def test_the_loss_is_what_the_run_calls_validation_loss(
    tuned: tuple[alto.Task, TaskResult], adapter: SavedAdapter, rows: HeldoutRows
) -> None:
    for max_tokens_per_pass in (4096, 40):
        found = run(adapter, rows, metric="loss", max_tokens_per_pass=max_tokens_per_pass)
        assert found.adapter.loss == pytest.approx(tuned[1].best_validation_loss, rel=1e-4)
        assert (found.adapter.exact_match, found.adapter.num_correct, found.predictions) == (None, None, ())


def test_exact_match_finds_what_was_learned_and_the_base_does_not_know(
    adapter: SavedAdapter, rows: HeldoutRows
) -> None:
    found = run(adapter, rows, baseline=True)
    assert found.adapter.num_rows == NUM_ROWS
    assert found.adapter.exact_match is not None
    assert found.adapter.exact_match > 0.9
    assert found.adapter.num_correct == found.adapter.exact_match * NUM_ROWS
    assert found.baseline is not None
    assert (found.baseline.exact_match, found.baseline.num_correct) == (0.0, 0)
    assert found.adapter.loss is not None
    assert found.baseline.loss is not None
    assert found.baseline.loss > 10 * found.adapter.loss
    assert [evaluation.settings["weights"] for evaluation in found.evaluations] == ["base", "adapter"]
    weights = [prediction.weights for prediction in found.predictions]
    assert weights == ["adapter"] * NUM_ROWS + ["base"] * NUM_ROWS


def test_predictions_tell_what_was_asked_and_judged_in_the_order_of_the_rows(
    adapter: SavedAdapter, rows: HeldoutRows
) -> None:
    found = run(adapter, rows, metric="exact_match")
    assert found.adapter.loss is None
    assert [prediction.reference for prediction in found.predictions] == [row[-1].content for row in rows.conversations]
    last = found.predictions[-1]
    assert last.prompt == "<|user|>What is 1403 plus 3?<|end|><|assistant|>"
    assert (last.generated, last.extracted, last.correct) == (last.reference, "1406", True)


def test_batches_change_nothing(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    expected = run(adapter, rows, batch_size=1, max_new_tokens=12)
    found = run(adapter, rows, batch_size=NUM_ROWS, max_new_tokens=12)
    assert found.predictions == expected.predictions
    assert dataclasses.replace(found.adapter, date="") == dataclasses.replace(expected.adapter, date="")


def test_generating_after_the_loss_is_what_peft_generates(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    """The pass of the loss replaces the model's attention; none of that may be left when the model writes."""
    found = run(adapter, rows, limit=4)
    tokenizer = load_tokenizer()
    model = PeftModel.from_pretrained(load_network("alto-tiny"), adapter.folder).eval()
    for prediction in found.predictions:
        ids = tokenizer(prediction.prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        output = model.generate(input_ids=ids, do_sample=False, max_new_tokens=32)
        assert tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True) == prediction.generated


def test_settings_hold_all_that_decides_the_numbers(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    limited = run(adapter, rows, limit=3)
    assert limited.adapter.num_rows == 3
    assert len(limited.predictions) == 3
    assert limited.adapter.settings == {
        "weights": "adapter",
        "base_model": "alto-tiny",
        "dtype": "float32",
        "limit": 3,
        "max_length": 2048,
        "max_new_tokens": 32,
    }
    cut = run(adapter, rows, max_length=40, metric="loss")
    assert (cut.adapter.settings["max_length"], cut.adapter.settings["max_new_tokens"]) == (40, None)
    assert cut.adapter.loss != run(adapter, rows, metric="loss").adapter.loss


def test_progress_counts_every_row_of_every_measurement(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    seen: list[tuple[str, int, int]] = []
    settings = EvaluationSettings(max_new_tokens=4, batch_size=3, baseline=True)
    measure(adapter, rows, settings, base=BASE, max_tokens_per_pass=60, on_progress=lambda *step: seen.append(step))
    whats = list(dict.fromkeys(what for what, _, _ in seen))
    assert whats == ["loss of the adapter", "loss of the base", "answers of the adapter", "answers of the base"]
    for what in whats:
        counts = [done for other, done, _ in seen if other == what]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, NUM_ROWS)


def test_rows_without_answers_have_a_loss_alone_unless_asked(adapter: SavedAdapter, tmp_path: Path) -> None:
    plain = dataclasses.replace(read_heldout_rows(make_task(tmp_path), None), name="plain")
    found = run(adapter, plain)
    assert found.adapter.loss is not None
    assert found.adapter.exact_match is None
    with pytest.raises(DataError, match="expected every reference to end in a line '#### N', found none in row 1 of 6"):
        run(adapter, plain, metric="exact_match")


def test_no_rows_are_an_error(adapter: SavedAdapter) -> None:
    with pytest.raises(DataError, match="expected at least one row to measure on, found none in nothing"):
        run(adapter, HeldoutRows(name="nothing", conversations=(), max_length=1024))


def test_an_adapter_of_another_base_is_an_error(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    weights = {f"{name}_elsewhere": pair for name, pair in adapter.weights.items()}
    with pytest.raises(TargetModuleError, match=r"base model alto-tiny .*q_proj_elsewhere|down_proj_elsewhere"):
        run(dataclasses.replace(adapter, weights=weights), rows)


def test_broken_weights_are_an_error(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    with pytest.raises(NoResultError, match="expected a finite held-out loss, found nan"):
        run(dataclasses.replace(adapter, scale=float("nan")), rows, metric="loss")


@pytest.mark.parametrize("settings", [{"batch_size": 0}, {"max_new_tokens": 0}, {"limit": 0}, {"metric": "accuracy"}])
def test_settings_out_of_their_domain_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(settings))}: expected"):
        EvaluationSettings(**settings)


def test_gsm8k_goes_through(adapter: SavedAdapter) -> None:
    path = Path(__file__).parents[2] / "../shared/data/gsm8k/test.jsonl"
    if not path.is_file():
        pytest.skip(f"the real data is not there: {path}")
    task = alto.Task(model=resolve_model("alto-tiny"), dataset=str(path))
    gsm8k = dataclasses.replace(read_heldout_rows(task, str(path)), name="gsm8k")
    assert len(gsm8k.conversations) == 1319
    found = run(adapter, gsm8k, limit=4)
    assert (found.adapter.num_rows, found.adapter.num_correct) == (4, 0)
