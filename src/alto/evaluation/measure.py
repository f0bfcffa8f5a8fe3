"""One adapter on one set of held-out rows: load the base once, measure with the adapter, and without it if asked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from alto.backbone import load_network, load_tokenizer
from alto.data import EncodedDataset, HeldoutRows, Pair, encode_dataset
from alto.errors import DataError
from alto.evaluation.adapter import SavedAdapter, in_effect
from alto.evaluation.answers import has_final_answers
from alto.evaluation.exact_match import Question, answer_questions, make_questions
from alto.evaluation.generate import check_prompts, max_positions
from alto.evaluation.loss import heldout_loss, padding_free
from alto.evaluation.settings import EvaluationSettings
from alto.records import Evaluation, EvaluationResult, Prediction

__all__ = ["BaseModel", "OnProgress", "measure"]

OnProgress = Callable[[str, int, int], None]
"""Is told what is measured, how many rows of it are done, and of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """The base model and how it is loaded; see :func:`alto.backbone.load_backbone`."""

    model: str
    dtype: str = "auto"
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    device: torch.device | str = "cpu"
    trust_remote_code: bool = False
    use_safetensors: bool = True


def measure(
    adapter: SavedAdapter,
    rows: HeldoutRows,
    settings: EvaluationSettings,
    *,
    base: BaseModel,
    max_tokens_per_pass: int,
    max_length: int | None = None,
    on_progress: OnProgress | None = None,
) -> EvaluationResult:
    """Measure ``adapter`` on ``base``; writes nothing.

    Args:
        max_tokens_per_pass: Tokens of one forward pass of the loss.
        max_length: Tokens at which a row is cut for the loss; None cuts at the model's last position.

    Raises:
        DataError: There are no rows, or they do not carry what the metric needs.
        ModelError: The base model cannot be used, or the adapter does not fit it.
        NoResultError: The loss is not finite.
    """
    conversations = [row for row in rows.rows[: settings.limit] if not isinstance(row, Pair)]
    if not conversations:
        raise DataError(f"dataset: expected at least one row to measure on, found none in {rows.name}; name other rows")
    wants_loss = settings.metric != "exact_match"
    wants_match = settings.metric == "exact_match" or (settings.metric == "auto" and has_final_answers(conversations))
    tokenizer = load_tokenizer(base.model, trust_remote_code=base.trust_remote_code)
    questions = make_questions(conversations, tokenizer) if wants_match else []  # before a model is loaded in vain
    bench = _Bench(adapter, base, tokenizer, on_progress)
    check_prompts(bench.network, [question.prompt_ids for question in questions])
    max_length = max_length or max_positions(bench.network)
    dataset = encode_dataset(conversations, tokenizer, max_length or sys.maxsize, "held-out") if wants_loss else None

    names = ("adapter", "base") if settings.baseline else ("adapter",)
    losses = bench.losses(names, dataset, max_tokens_per_pass) if dataset is not None else {}
    predictions = bench.predictions(names, questions, settings) if wants_match else {}

    found = {}
    for name in names:
        num_correct = sum(prediction.correct for prediction in predictions[name]) if wants_match else None
        found[name] = Evaluation(
            dataset=rows.name,
            num_rows=len(conversations),
            loss=losses.get(name),
            exact_match=num_correct / len(conversations) if num_correct is not None else None,
            num_correct=num_correct,
            settings={
                "weights": name,
                "base_model": base.model,
                "dtype": str(bench.network.dtype).removeprefix("torch."),
                "limit": settings.limit,
                "max_length": max_length if wants_loss else None,
                "max_new_tokens": settings.max_new_tokens if wants_match else None,
            },
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    return EvaluationResult(
        adapter_dir=str(adapter.folder),
        adapter=found["adapter"],
        baseline=found.get("base"),
        predictions=tuple(prediction for name in names for prediction in predictions.get(name, ())),
    )


class _Bench:
    """The base model, on which the weights called ``adapter`` or ``base`` (no adapter) are measured."""

    def __init__(self, adapter: SavedAdapter, base: BaseModel, tokenizer: Any, on_progress: OnProgress | None) -> None:
        self.network = load_network(
            base.model,
            dtype=base.dtype,
            load_in_4bit=base.load_in_4bit,
            load_in_8bit=base.load_in_8bit,
            device=base.device,
            trust_remote_code=base.trust_remote_code,
            use_safetensors=base.use_safetensors,
        )
        self._tokenizer = tokenizer
        self._adapter = adapter
        self._base = base.model
        self._on_progress = on_progress

    def losses(self, names: Sequence[str], dataset: EncodedDataset, max_tokens_per_pass: int) -> dict[str, float]:
        losses = {}
        with padding_free(self.network, self._tokenizer, self._base) as backbone:
            for name in names:
                with self._weights(name):
                    count = self._counter(f"loss of the {name}", len(dataset))
                    losses[name] = heldout_loss(
                        backbone, dataset, max_tokens_per_pass=max_tokens_per_pass, on_done=count
                    )
        return losses

    def predictions(
        self, names: Sequence[str], questions: Sequence[Question], settings: EvaluationSettings
    ) -> dict[str, list[Prediction]]:
        predictions = {}
        for name in names:
            with self._weights(name):
                predictions[name] = answer_questions(
                    self.network,
                    self._tokenizer,
                    questions,
                    weights=name,
                    max_new_tokens=settings.max_new_tokens,
                    batch_size=settings.batch_size,
                    on_done=self._counter(f"answers of the {name}", len(questions)),
                )
        return predictions

    @contextlib.contextmanager
    def _weights(self, name: str) -> Iterator[None]:
        with in_effect(self.network, self._adapter if name == "adapter" else None, self._base):
            yield

    def _counter(self, what: str, total: int) -> Callable[[int], None]:
        done = 0

        def count(num_rows: int) -> None:
            nonlocal done
            done += num_rows
            if self._on_progress is not None:
                self._on_progress(what, done, total)

        count(0)
        return count
