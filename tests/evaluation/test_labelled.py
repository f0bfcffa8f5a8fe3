"""Evaluation of classifiers and regressors against predictions of PEFT and transformers, counted by hand."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle_classification import ONE_LABEL, SEVERAL_LABELS, TWO_NUMBERS, labelled
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny import load_tokenizer, read_journal
from transformers import AutoModelForSequenceClassification

import alto
from alto.backbone import resolve_model
from alto.errors import AltoError, BadRowsError, DataError, RunError, SpecError
from alto.evaluation.loss import label_metrics
from alto.records import Evaluation
from alto.runs import read_history

# PEFT reads a transformers property by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

NAMES = ("bad", "fair", "good")
WORDS = {"bad": ["dull", "a mess"], "fair": ["long", "fine"], "good": ["warm", "a joy"]}
KINDS = ("one label", "several labels", "number")
Row = dict[str, Any]


def rows_of(kind: str, count: int, seed: int) -> list[Row]:
    """Draw texts whose words mostly, but not always, reveal their labels."""
    drawn = random.Random(seed)
    rows: list[Row] = []
    for n in range(count):
        name = drawn.choice(NAMES)
        text = (
            f"The film {n} is {'very ' * drawn.randrange(9)}{drawn.choice(WORDS[drawn.choice([name, name, *NAMES])])}."
        )
        label: Any = name
        if kind == "several labels":
            label = [name, *(["short"] if len(text) < 45 else [])]
        elif kind == "number":
            label = float(NAMES.index(name) + round(len(text) / 40))
        rows.append({"text": text, "label": label})
    return rows


def write(path: Path, rows: Sequence[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def train(kind: str, folder: Path) -> Path:
    """Train a run of two jobs with micro-batches of a few rows."""
    task = alto.Task(
        model="alto-tiny",
        dataset=write(folder / "train.jsonl", rows_of(kind, 48, 0)),
        validation_split=0.25,
        method="regression" if kind == "number" else "classification",
        batch_size=6,
        max_steps=12,
        eval_steps=0.5,
        max_tokens_per_pass=300,
        search_space={"learning_rate": [5e-3, 1e-2], "r": [4]},
        early_exit={"enabled": False},
        keep="all",
    )
    return Path(alto.Engine(output_dir=folder / "runs").tune(task).run_dir)


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, train(request.param, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a classifier's best adapter, in its run."""
    return train("one label", tmp_path_factory.mktemp("classifier")) / "best"


def evaluate(target: Path, **settings: Any) -> dict[str, Evaluation]:
    result = alto.Engine().evaluate(target, **settings)
    assert (result.predictions, result.label_predictions) == ((), ())
    return {found.name: found.evaluation for found in result.adapters}


def peft_logits(folder: Path, kind: str, texts: Sequence[str]) -> np.ndarray[Any, Any]:
    """Return the logits of each text alone, ``[Q, K]``, by PEFT on transformers' model."""
    names = {"one label": NAMES, "several labels": (*NAMES, "short"), "number": ("LABEL_0",)}[kind]
    base = AutoModelForSequenceClassification.from_pretrained(resolve_model("alto-tiny"), num_labels=len(names))
    model, tokenizer = PeftModel.from_pretrained(base, folder).eval(), load_tokenizer()
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits for text in texts]
    found: np.ndarray[Any, Any] = torch.cat(logits).double().numpy()
    return found


def f1(pairs: Sequence[tuple[bool, bool]]) -> float:
    """Return the harmonic mean of precision and recall, from pairs of truth and prediction."""
    hits = sum(actual and predicted for actual, predicted in pairs)
    if not hits:
        return 0.0
    precision = hits / sum(predicted for _, predicted in pairs)
    recall = hits / sum(actual for actual, _ in pairs)
    return 2 * precision * recall / (precision + recall)


def ranks(numbers: np.ndarray[Any, Any]) -> list[float]:
    return [float((numbers < one).sum() + ((numbers == one).sum() + 1) / 2) for one in numbers]


def spearman(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def check(found: Evaluation, logits: np.ndarray[Any, Any], kind: str, rows: Sequence[Row]) -> None:
    """Compare an evaluation with numbers computed from ``logits`` row by row."""
    labels = [row["label"] for row in rows]
    assert found.num_rows == len(rows)
    if kind == "number":
        predicted, actual = logits[:, 0], np.array(labels)
        expected = spearman(predicted, actual)
        assert 0.1 < abs(expected) < 0.99, "another order would show"
        assert len(set(labels)) < len(labels), "some numbers are equal"
        assert found.mse == pytest.approx(((predicted - actual) ** 2).mean(), rel=1e-4)
        assert found.spearman == pytest.approx(expected, abs=1e-9)
        assert (found.loss, found.accuracy, found.macro_f1, found.label_f1, found.confusion) == (None,) * 5
        return
    assert (found.mse, found.spearman) == (None, None)
    assert found.label_f1 is not None
    if kind == "several labels":
        names = [*NAMES, "short"]
        given = [{name for name, logit in zip(names, row, strict=True) if logit > 0} for row in logits]
        true = [set(label) for label in labels]
        chances = 1 / (1 + np.exp(-logits))
        is_true = np.array([[name in label for name in names] for label in true])
        assert found.loss == pytest.approx(-np.log(np.where(is_true, chances, 1 - chances)).mean(), rel=1e-4)
        assert found.confusion is None
    else:
        names = list(NAMES)
        given = [{NAMES[row.argmax()]} for row in logits]
        true = [{label} for label in labels]
        of_true = [
            row[NAMES.index(label)] - np.log(np.exp(row).sum()) for row, label in zip(logits, labels, strict=True)
        ]
        assert found.loss == pytest.approx(-np.mean(of_true), rel=1e-4)
        assert found.confusion is not None
        counts = {
            (one, other): sum(({one}, {other}) == pair for pair in zip(true, given, strict=True))
            for one in NAMES
            for other in NAMES
        }
        assert sum(count > 0 for count in counts.values()) > 3, "it predicts several labels, and some are wrong"
        table = {(one, other): n for one, row in found.confusion.items() for other, n in row.items()}
        assert table == {pair: count for pair, count in counts.items() if count}
    hits = [one == other for one, other in zip(true, given, strict=True)]
    assert 0 < sum(hits) < len(hits)
    assert found.accuracy == pytest.approx(sum(hits) / len(hits))
    scores = {
        name: f1([(name in one, name in other) for one, other in zip(true, given, strict=True)]) for name in names
    }
    assert len(set(scores.values())) > 1
    assert dict(found.label_f1) == pytest.approx(scores)
    assert found.macro_f1 == pytest.approx(sum(scores.values()) / len(scores))


def test_jobs_measured_together_predict_what_peft_predicts_with_each(trained: tuple[str, Path], tmp_path: Path) -> None:
    kind, run = trained
    rows = rows_of(kind, 40, 1)
    found = evaluate(run, all_jobs=True, dataset=write(tmp_path / "test.jsonl", rows))
    logits = {name: peft_logits(run / "jobs" / name / "best", kind, [row["text"] for row in rows]) for name in found}
    assert list(logits) == ["job-000", "job-001"]
    assert np.abs(logits["job-000"] - logits["job-001"]).max() > 0.1, "swapped heads would show"
    for name, evaluation in found.items():
        check(evaluation, logits[name], kind, rows)


def test_a_folder_without_its_run_is_measured_by_the_labels_beside_it(
    trained: tuple[str, Path], tmp_path: Path
) -> None:
    kind, run = trained
    rows = rows_of(kind, 40, 2)
    alone = Path(shutil.copytree(run / "best", tmp_path / "alone"))
    (found,) = evaluate(alone, dataset=write(tmp_path / "test.jsonl", rows), limit=32).values()
    check(found, peft_logits(alone, kind, [row["text"] for row in rows[:32]]), kind, rows[:32])
    (noted,) = json.loads((alone / "metrics.json").read_text(encoding="utf-8"))["evaluations"]
    assert (noted["macro_f1"], noted["confusion"], noted["mse"]) == (found.macro_f1, found.confusion, found.mse)


def test_the_rows_that_a_run_validates_on_have_the_numbers_of_its_journal(trained: tuple[str, Path]) -> None:
    kind, run = trained
    (found,) = evaluate(run).values()
    best = read_history(run).result
    assert best is not None
    seen = [event for event in read_journal(run) if event["event"] == "eval" and event["job"] == best.best_job]
    last = next(event for event in reversed(seen) if event["is_best"])
    assert (found.mse if kind == "number" else found.loss) == pytest.approx(last["validation_loss"], rel=1e-4)
    for name in ("mse",) if kind == "number" else ("accuracy", "macro_f1"):
        assert getattr(found, name) == pytest.approx(last["metrics"][name])


def test_predictions_are_the_label_of_every_row_and_its_probability(trained: tuple[str, Path], tmp_path: Path) -> None:
    kind, run = trained
    rows = rows_of(kind, 20, 3)
    file = write(tmp_path / "test.jsonl", rows)
    found = alto.Engine().evaluate(run, all_jobs=True, dataset=file, predictions=True, limit=16).label_predictions
    rows = rows[:16]
    for name in ("job-000", "job-001"):
        own = [one for one in found if one.weights == name]
        assert [(one.row, one.text) for one in own] == [(n, row["text"]) for n, row in enumerate(rows, start=1)]
        logits = peft_logits(run / "jobs" / name / "best", kind, [row["text"] for row in rows])
        if kind == "number":
            assert [one.label for one in own] == [row["label"] for row in rows]
            assert [one.predicted for one in own] == pytest.approx(logits[:, 0].tolist(), rel=1e-3)
            assert {one.probability for one in own} == {None}
        elif kind == "one label":
            chances = torch.tensor(logits).softmax(1).numpy()
            assert [one.label for one in own] == [row["label"] for row in rows]
            assert [one.predicted for one in own] == [NAMES[row.argmax()] for row in logits]
            assert [one.probability for one in own] == pytest.approx(chances.max(1).tolist(), rel=1e-3)
        else:
            names = (*NAMES, "short")
            for one, row, logit in zip(own, rows, logits, strict=True):
                assert one.label == tuple(name for name in names if name in row["label"])
                assert one.predicted == tuple(name for name, value in zip(names, logit, strict=True) if value > 0)
                assert one.probability == pytest.approx(tuple(1 / (1 + np.exp(-logit[logit > 0]))), rel=1e-3)


@pytest.mark.parametrize("is_in_run", [True, False])
@pytest.mark.parametrize("column", ["absent", "empty"])
def test_texts_without_labels_have_the_same_predictions_and_no_scores(
    column: str, is_in_run: bool, trained: tuple[str, Path], tmp_path: Path
) -> None:
    kind, run = trained
    target = run if is_in_run else Path(shutil.copytree(run / "best", tmp_path / "alone"))
    folder = run / "best" if is_in_run else target
    rows = rows_of(kind, 12, 4)
    expected = alto.Engine().evaluate(target, dataset=write(tmp_path / "test.jsonl", rows), predictions=True)
    before = (folder / "metrics.json").read_bytes()
    texts: list[Row] = [{"text": row["text"], **({"label": None} if column == "empty" else {})} for row in rows]
    file = write(tmp_path / "texts.jsonl", texts)
    found = alto.Engine().evaluate(target, dataset=file, predictions=True)
    assert found.label_predictions == tuple(replace(one, label=None) for one in expected.label_predictions)
    assert len(found.label_predictions) == len(rows)
    (evaluation,) = (one.evaluation for one in found.adapters)
    assert evaluation.num_rows == len(rows)
    for name in ("loss", "accuracy", "macro_f1", "label_f1", "confusion", "mse", "spearman"):
        assert getattr(evaluation, name) is None
    assert found.notes == (f"{file}: the rows have no labels, so labels are predicted and nothing is measured.",)
    assert (folder / "metrics.json").read_bytes() == before
    with pytest.raises(DataError, match=r"found no label in .*texts\.jsonl; .* with --save-predictions FILE"):
        evaluate(target, dataset=file)
    some = write(tmp_path / "some.jsonl", [rows[0], {"text": "A film.", "label": None}])
    with pytest.raises(BadRowsError, match=r"some\.jsonl:2: expected label to be a label"):
        alto.Engine().evaluate(target, dataset=some, predictions=True)


def test_texts_without_labels_need_the_column_of_the_text(classifier: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "texts.jsonl", [{"body": "A film."}])
    message = r"expected the columns of a form: text_classification \(text\) .* such as \{text: <its column>\}"
    with pytest.raises(DataError, match=message):
        alto.Engine().evaluate(classifier.parent, dataset=file, predictions=True)


def test_a_label_that_no_row_has_counts_as_in_training() -> None:
    rows = replace(labelled(6, 1, ONE_LABEL), classes=(0, 0, 1, 1, 1, 0))
    predicted_QK = torch.eye(3, dtype=torch.float64)[[0, 0, 1, 1, 0, 0]]
    found = label_metrics(predicted_QK, rows)
    assert found["label_f1"] == {"negative": pytest.approx(6 / 7), "neutral": pytest.approx(0.8), "positive": None}
    assert found["macro_f1"] == pytest.approx((6 / 7 + 0.8) / 2)
    assert found["confusion"] == {"negative": {"negative": 3}, "neutral": {"negative": 1, "neutral": 2}}
    none_QK = -torch.ones(6, 4, dtype=torch.float64)
    several = label_metrics(none_QK, replace(labelled(6, 1, SEVERAL_LABELS), classes=((1.0, 0.0, 0.0, 0.0),) * 6))
    assert (set(several["label_f1"].values()), several["macro_f1"], several["accuracy"]) == ({0.0}, 0.0, 0.0)


def test_several_numbers_have_the_mean_of_their_rank_correlations() -> None:
    rows = labelled(20, 1, TWO_NUMBERS)
    predicted_QK = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actual, predicted = np.array(rows.classes), predicted_QK.numpy()
    found = label_metrics(predicted_QK, rows)
    rhos = [spearman(predicted[:, k], actual[:, k]) for k in range(2)]
    assert abs(rhos[0] - rhos[1]) > 0.01
    assert found["spearman"] == pytest.approx(sum(rhos) / 2)
    assert found["mse"] == pytest.approx(((predicted - actual) ** 2).mean())
    assert label_metrics(torch.ones_like(predicted_QK), rows)["spearman"] is None, "all predictions are equal"


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"metric": "loss"}, "their predictions are always measured"),
        ({"metric": "preference"}, "their predictions are always measured"),
        ({"metric": {"scorer": "exact"}}, "their predictions are always measured"),
        ({"baseline": True}, "the base model alone has no head"),
        ({"backend": "vllm"}, "they generate no answers"),
        ({"batch_size": 8}, "they generate no answers"),
        ({"max_new_tokens": 8}, "they generate no answers"),
    ],
)
def test_settings_without_a_use_for_a_head_are_refused(setting: Row, why: str, classifier: Path) -> None:
    (name,) = setting
    with pytest.raises(SpecError, match=rf"{name}: does not apply to adapters .* \({why}\); leave it out"):
        evaluate(classifier.parent, **setting)


def described(folder: Path, **changes: Any) -> None:
    """Write other labels beside an adapter."""
    file = folder / "labels.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            lambda folder: (folder / "labels.json").unlink(),
            SpecError,
            "names for all 3 outputs .*, found none; put",
        ),
        (
            lambda folder: described(folder, id2label={"0": "bad", "1": "good"}),
            SpecError,
            "3 outputs .*, found 2 names",
        ),
        (
            lambda folder: described(folder, id2label={"0": "bad", "2": "good"}),
            RunError,
            "labels.json: expected problem_type and id2label",
        ),
        (lambda folder: described(folder, problem_type="ranking"), RunError, "found: .*ranking"),
    ],
)
def test_a_head_whose_labels_are_not_known_is_refused(
    damage: Callable[[Path], None], error: type[AltoError], message: str, classifier: Path, tmp_path: Path
) -> None:
    alone = Path(shutil.copytree(classifier, tmp_path / "alone"))
    damage(alone)
    with pytest.raises(error, match=message):
        evaluate(alone, dataset=write(tmp_path / "test.jsonl", rows_of("one label", 4, 1)))


@pytest.mark.parametrize("is_in_run", [True, False])
def test_rows_with_a_label_that_the_head_does_not_have_are_refused(
    is_in_run: bool, classifier: Path, tmp_path: Path
) -> None:
    rows = write(tmp_path / "test.jsonl", [{"text": "A film.", "label": "good"}, {"text": "A film.", "label": "odd"}])
    with pytest.raises(BadRowsError, match=r"test\.jsonl:2: expected label to be one of bad, fair, good, found 'odd'"):
        evaluate(classifier.parent if is_in_run else classifier, dataset=rows)


def test_adapters_with_a_head_are_not_measured_beside_those_without(classifier: Path, tmp_path: Path) -> None:
    without = Path(shutil.copytree(classifier, tmp_path / "without"))
    weights = load_file(without / "adapter_model.safetensors")
    save_file(
        {name: one for name, one in weights.items() if "score" not in name}, without / "adapter_model.safetensors"
    )
    config = json.loads((without / "adapter_config.json").read_text(encoding="utf-8"))
    config |= {"task_type": "CAUSAL_LM", "modules_to_save": None}
    (without / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = write(tmp_path / "test.jsonl", rows_of("one label", 4, 1))
    for targets in ([classifier, without], [without, classifier.parent]):
        with pytest.raises(
            SpecError, match=r"all have a classification head or all have none, found .*best with a head and "
        ):
            alto.Engine().evaluate(targets, dataset=rows)


def test_heads_of_different_labels_are_not_measured_together(classifier: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(classifier, tmp_path / "other"))
    described(other, id2label={"0": "bad", "1": "good", "2": "fair"})
    rows = write(tmp_path / "test.jsonl", rows_of("one label", 4, 1))
    with pytest.raises(SpecError, match=r"heads have the same labels, found .*, bad, fair, good; .*, bad, good, fair;"):
        alto.Engine().evaluate([classifier, other], dataset=rows)
