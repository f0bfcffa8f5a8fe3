"""Evaluation of a tuned adapter: its run's loss, an exact match that can succeed, and the base for comparison."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import scoring_functions
import torch
from peft import PeftModel
from tiny import load_tokenizer, make_task

import alto
from alto.backbone import load_network, resolve_model
from alto.data import Conversation, HeldoutRows, Message, Pair, encode_prompt, read_heldout_rows
from alto.data.encode import Encoder
from alto.errors import DataError, NoResultError, SpecError, TargetModuleError
from alto.evaluation import EvaluationSettings, measure
from alto.lora import AdapterWeights, SavedAdapter, read_saved_adapter
from alto.records import Evaluation, EvaluationResult
from alto.spec import BaseModelSpec, Scoring

# PEFT reads a transformers property by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

BASE = BaseModelSpec(id="alto-tiny")
NUM_ROWS = 8


def write_sums(path: Path) -> Path:
    """Write sums with worked answers, some above a thousand, of very different lengths."""
    rows = [
        {"prompt": f"What is {n} plus {n % 7}?", "completion": "Let me see.\n" * (n % 4) + f"#### {n + n % 7:,}"}
        for n in range(3, 200 * NUM_ROWS, 200)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[alto.Task, alto.TaskResult]:
    """alto-tiny trained until it knows its eight validation rows, which are its training rows too."""
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
def adapter(tuned: tuple[alto.Task, alto.TaskResult]) -> SavedAdapter:
    return read_saved_adapter(Path(tuned[1].adapter_dir))


@pytest.fixture(scope="module")
def rows(tuned: tuple[alto.Task, alto.TaskResult]) -> HeldoutRows:
    return dataclasses.replace(read_heldout_rows(tuned[0], None), name="sums")


def run(
    adapter: SavedAdapter | Mapping[str, SavedAdapter],
    rows: HeldoutRows,
    *,
    max_tokens_per_pass: int = 4096,
    max_length: int | None = None,
    **settings: Any,
) -> EvaluationResult:
    return measure(
        {"mine": adapter} if isinstance(adapter, SavedAdapter) else adapter,
        rows,
        EvaluationSettings(**({"max_new_tokens": 32} | settings)),
        base=BASE,
        max_tokens_per_pass=max_tokens_per_pass,
        max_length=max_length,
    )


def of_mine(found: EvaluationResult) -> Evaluation:
    (mine,) = found.adapters
    assert mine.name == "mine"
    return mine.evaluation


def test_the_loss_is_what_the_run_calls_validation_loss(
    tuned: tuple[alto.Task, alto.TaskResult], adapter: SavedAdapter, rows: HeldoutRows
) -> None:
    for max_tokens_per_pass in (4096, 40):
        found = run(adapter, rows, metric="loss", max_tokens_per_pass=max_tokens_per_pass)
        assert of_mine(found).loss == pytest.approx(tuned[1].best_validation_loss, rel=1e-4)
        assert (of_mine(found).exact_match, of_mine(found).num_correct, found.predictions) == (None, None, ())


def test_exact_match_finds_what_was_learned_and_the_base_does_not_know(
    adapter: SavedAdapter, rows: HeldoutRows
) -> None:
    found = run(adapter, rows, baseline=True)
    assert of_mine(found).num_rows == NUM_ROWS
    assert of_mine(found).exact_match is not None
    assert of_mine(found).exact_match > 0.9
    assert of_mine(found).num_correct == of_mine(found).exact_match * NUM_ROWS
    assert found.baseline is not None
    assert (found.baseline.exact_match, found.baseline.num_correct) == (0.0, 0)
    assert of_mine(found).loss is not None
    assert found.baseline.loss is not None
    assert found.baseline.loss > 10 * of_mine(found).loss
    assert (found.baseline.settings["weights"], of_mine(found).settings["weights"]) == ("base", "adapter")
    weights = [prediction.weights for prediction in found.predictions]
    assert weights == ["mine"] * NUM_ROWS + ["base"] * NUM_ROWS


def test_predictions_tell_what_was_asked_and_judged_in_the_order_of_the_rows(
    adapter: SavedAdapter, rows: HeldoutRows
) -> None:
    found = run(adapter, rows, metric="exact_match")
    assert of_mine(found).loss is None
    assert [prediction.reference for prediction in found.predictions] == [row[-1].content for row in rows.rows]
    last = found.predictions[-1]
    assert last.prompt == "<|user|>What is 1403 plus 3?<|end|><|assistant|>"
    assert (last.generated, last.extracted, last.correct) == (last.reference, "1406", True)


def test_batches_change_nothing(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    expected = run(adapter, rows, batch_size=1, max_new_tokens=12)
    found = run(adapter, rows, batch_size=NUM_ROWS, max_new_tokens=12)
    assert found.predictions == expected.predictions
    assert dataclasses.replace(of_mine(found), date="") == dataclasses.replace(of_mine(expected), date="")


def test_generating_after_the_loss_is_what_peft_generates(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    """The loss pass replaces the model's attention, which must be restored when the model generates."""
    found = run(adapter, rows, limit=4)
    tokenizer = load_tokenizer()
    model = PeftModel.from_pretrained(load_network(BaseModelSpec(id="alto-tiny")), adapter.folder).eval()
    for prediction in found.predictions:
        ids = tokenizer(prediction.prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        output = model.generate(input_ids=ids, do_sample=False, max_new_tokens=32)
        assert tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True) == prediction.generated


def test_settings_hold_all_that_decides_the_numbers(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    limited = run(adapter, rows, limit=3)
    assert of_mine(limited).num_rows == 3
    assert len(limited.predictions) == 3
    assert of_mine(limited).settings == {
        "weights": "adapter",
        "base_model": "alto-tiny",
        "dtype": "float32",
        "limit": 3,
        "max_length": 2048,
        "max_new_tokens": 32,
    }
    cut = run(adapter, rows, max_length=40, metric="loss")
    assert (of_mine(cut).settings["max_length"], of_mine(cut).settings["max_new_tokens"]) == (40, None)
    assert of_mine(cut).loss != of_mine(run(adapter, rows, metric="loss")).loss


def test_progress_counts_every_row_of_every_measurement(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    seen: list[tuple[str, int, int]] = []
    settings = EvaluationSettings(max_new_tokens=4, batch_size=3, baseline=True)
    measure(
        {"mine": adapter},
        rows,
        settings,
        base=BASE,
        max_tokens_per_pass=60,
        on_progress=lambda *step: seen.append(step),
    )
    whats = list(dict.fromkeys(what for what, _, _ in seen))
    assert whats == ["loss", "answers"]
    for what in whats:
        counts = [done for other, done, _ in seen if other == what]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, 2 * NUM_ROWS)


def test_rows_without_answers_have_a_loss_alone_unless_asked(adapter: SavedAdapter, tmp_path: Path) -> None:
    plain = dataclasses.replace(read_heldout_rows(make_task(tmp_path), None), name="plain")
    found = run(adapter, plain)
    assert of_mine(found).loss is not None
    assert of_mine(found).exact_match is None
    with pytest.raises(
        DataError, match="expected rows whose replies end in a line '#### N', found no such reply in row 1 of"
    ):
        run(adapter, plain, metric="exact_match")


@pytest.mark.parametrize(
    "metric",
    [
        "exact",
        "contains",
        "numeric",
        {"scorer": "numeric", "tolerance": 0.4},
        {"scorer": "regex", "pattern": r"#### ([\d,]+)$"},
        scoring_functions.is_right,
    ],
)
def test_every_scorer_finds_what_was_learned_and_the_base_does_not_know(
    metric: Any, adapter: SavedAdapter, rows: HeldoutRows
) -> None:
    found = run(adapter, rows, metric=metric, baseline=True)
    mine = of_mine(found)
    assert (mine.loss, mine.exact_match) == (None, None)
    assert mine.score is not None
    assert mine.score > 0.9
    assert found.baseline is not None
    assert found.baseline.score == 0
    scores = [one.score for one in found.predictions if one.weights == "mine"]
    assert sum(score or 0 for score in scores) == mine.score * NUM_ROWS
    if mine.scorer == "python":
        assert mine.num_correct is None
        assert mine.settings["scoring"] == {"scorer": "python", "function": "scoring_functions:is_right"}
    else:
        assert mine.num_correct == mine.score * NUM_ROWS
        assert mine.settings["scoring"]["scorer"] == mine.scorer


def test_a_scorer_of_the_run_is_measured_where_its_rows_can_be(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    settings = EvaluationSettings(max_new_tokens=32)
    measured = [
        of_mine(measure({"mine": adapter}, rows, settings, base=BASE, max_tokens_per_pass=4096, scoring=scoring))
        for scoring in (Scoring(scorer="contains"), Scoring(scorer="json"), Scoring(scorer="python", function="a.b"))
    ]
    assert [one.scorer for one in measured] == ["contains", None, "exact_match"]
    assert all(one.loss is not None for one in measured)


def test_a_function_that_fails_is_an_error(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    with pytest.raises(NoResultError, match=r"expected scores of all answers, found none: .*the judge is asleep"):
        run(adapter, rows, metric=scoring_functions.raising, limit=1, max_new_tokens=2)


def test_rows_are_the_replies_that_a_scorer_needs(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    with pytest.raises(
        DataError, match="json: expected rows whose replies have a JSON value, found no such reply in row 1"
    ):
        run(adapter, rows, metric="json")
    with pytest.raises(SpecError, match=r"metric.num_rows: expected only settings of the scorer.*; name limit instead"):
        EvaluationSettings(metric={"scorer": "exact", "num_rows": 3})
    with pytest.raises(SpecError, match=r"metric.pattern is missing"):
        EvaluationSettings(metric="regex")


def test_no_rows_are_an_error(adapter: SavedAdapter) -> None:
    with pytest.raises(DataError, match="expected at least one row to measure on, found none in nothing"):
        run(adapter, HeldoutRows(name="nothing", rows=(), max_length=1024))


def test_an_adapter_of_another_base_is_an_error(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    weights = AdapterWeights({f"{name}_elsewhere": pair for name, pair in adapter.weights.items()})
    with pytest.raises(TargetModuleError, match=r"base model alto-tiny .*q_proj_elsewhere|down_proj_elsewhere"):
        run(dataclasses.replace(adapter, weights=weights), rows)


def test_broken_weights_are_an_error(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    weights = AdapterWeights({name: (a_KR * torch.nan, b_RN) for name, (a_KR, b_RN) in adapter.weights.items()})
    with pytest.raises(
        NoResultError, match=r"expected a finite held-out loss, found nan for .*; the weights of these adapters"
    ):
        run(dataclasses.replace(adapter, weights=weights), rows, metric="loss")


@pytest.mark.parametrize(
    "settings", [{"batch_size": 0}, {"max_new_tokens": 0}, {"limit": 0}, {"metric": "accuracy"}, {"backend": "tgi"}]
)
def test_settings_out_of_their_domain_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(settings))}(: expected| should be)"):
        EvaluationSettings(**settings)


def test_several_adapters_are_measured_as_each_alone(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    halved = dataclasses.replace(adapter, scales={name: scale / 2 for name, scale in adapter.scales.items()})
    together = run({"whole": adapter, "half": halved}, rows, baseline=True, limit=4)
    alone = {"whole": run(adapter, rows, limit=4), "half": run(halved, rows, limit=4)}
    assert [found.name for found in together.adapters] == ["whole", "half"]
    for found in together.adapters:
        expected = of_mine(alone[found.name])
        assert found.evaluation.loss == pytest.approx(expected.loss, rel=1e-6)
        assert found.evaluation.num_correct == expected.num_correct
        texts = [prediction.generated for prediction in together.predictions if prediction.weights == found.name]
        assert texts == [prediction.generated for prediction in alone[found.name].predictions]
    losses = [found.evaluation.loss for found in together.adapters]
    assert losses[0] != losses[1]


@pytest.fixture(scope="module")
def pairs(rows: HeldoutRows) -> HeldoutRows:
    """Pairs of the learned answer and another answer."""
    conversations = [row for row in rows.rows if not isinstance(row, Pair)]
    rejected = [
        Conversation((*conversation[:-1], Message("assistant", "I do not know."))) for conversation in conversations
    ]
    pairs = [
        Pair(chosen=conversation, rejected=other) for conversation, other in zip(conversations, rejected, strict=True)
    ]
    return HeldoutRows(name="pairs", rows=pairs, max_length=1024)


def test_the_preference_is_what_replies_have_gained_on_the_base(
    adapter: SavedAdapter, pairs: HeldoutRows, tuned: tuple[alto.Task, alto.TaskResult]
) -> None:
    found = run(adapter, pairs, max_tokens_per_pass=60)
    assert (of_mine(found).loss, of_mine(found).exact_match, found.predictions) == (None, None, ())
    assert of_mine(found).reward_accuracy == 1.0
    network, tokenizer = load_network(BaseModelSpec(id="alto-tiny")), load_tokenizer()
    expected = []
    for model in (
        network,
        PeftModel.from_pretrained(load_network(BaseModelSpec(id="alto-tiny")), adapter.folder).eval(),
    ):
        expected.append(
            [
                [log_prob(model, tokenizer, conversation) for conversation in (row.chosen, row.rejected)]
                for row in pairs.rows
            ]
        )
    base_Q2, adapted_Q2 = torch.tensor(expected, dtype=torch.float64)
    margin = ((adapted_Q2 - base_Q2) @ torch.tensor([1.0, -1.0], dtype=torch.float64)).mean()
    assert of_mine(found).reward_margin == pytest.approx(float(margin), rel=1e-4)
    swapped = [Pair(chosen=row.rejected, rejected=row.chosen) for row in pairs.rows if isinstance(row, Pair)]
    other = run(adapter, dataclasses.replace(pairs, rows=swapped))
    assert of_mine(other).reward_accuracy == 0.0


@torch.no_grad()
def log_prob(model: Any, tokenizer: Any, conversation: Any) -> float:
    """Return the log-probability of the last reply and its end, by the model's own forward pass."""
    prompt = encode_prompt(conversation[:-1], tokenizer)
    (row,) = Encoder(tokenizer).rows(conversation)
    ids = torch.tensor([row.input_ids])
    losses = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
    return -float(losses[len(prompt) - 1 :].double().sum())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"metric": "loss"}, DataError, "expected rows with one reply to measure loss on, found preference pairs"),
        ({"backend": "vllm"}, DataError, "expected rows with one reply to measure answers on"),
        ({"baseline": True}, SpecError, "baseline: does not apply to the metric preference"),
    ],
)
def test_pairs_are_for_the_preference_alone(
    adapter: SavedAdapter, pairs: HeldoutRows, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(adapter, pairs, **settings)


def test_a_preference_needs_pairs(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    with pytest.raises(DataError, match=r"expected preference pairs .* found rows with one reply in sums"):
        run(adapter, rows, metric="preference")


def test_gsm8k_goes_through(adapter: SavedAdapter) -> None:
    path = Path(__file__).parents[2] / "../shared/data/gsm8k/test.jsonl"
    if not path.is_file():
        pytest.skip(f"the real data is not there: {path}")
    task = alto.Task(model=resolve_model("alto-tiny"), dataset=str(path))
    gsm8k = dataclasses.replace(read_heldout_rows(task, str(path)), name="gsm8k")
    assert len(gsm8k.rows) == 1319
    found = run(adapter, gsm8k, limit=4)
    assert (of_mine(found).num_rows, of_mine(found).num_correct) == (4, 0)


def test_predictions_are_generated_where_no_metric_needs_them(adapter: SavedAdapter, rows: HeldoutRows) -> None:
    others = [Conversation([row[0], Message("assistant", "Five.")]) for row in rows.rows[:2]]
    plain = dataclasses.replace(rows, rows=others)
    found = run(adapter, plain, predictions=True, max_new_tokens=12)
    exact = run(adapter, rows, limit=2, baseline=True, max_new_tokens=12)
    assert (of_mine(found).exact_match, of_mine(found).num_correct, found.baseline) == (None, None, None)
    assert of_mine(found).settings["max_new_tokens"] is None
    assert [(one.weights, one.row, one.generated) for one in found.predictions] == [
        (one.weights, one.row, one.generated) for one in exact.predictions
    ]
    assert [one.weights for one in found.predictions] == ["mine", "mine", "base", "base"]
    assert {(one.extracted, one.correct) for one in found.predictions} == {(None, None)}
    assert [one.reference for one in found.predictions] == ["Five."] * 4
    assert found.adapters[0].evaluation.loss == pytest.approx(of_mine(run(adapter, plain)).loss, rel=1e-6)
