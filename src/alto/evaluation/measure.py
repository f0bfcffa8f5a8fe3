"""Adapters of one base on one set of held-out rows: the base is loaded once, and all are measured at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from alto.backbone import Backbone, is_out_of_memory, limits_of, load_backbone, load_tokenizer
from alto.data import Conversation, EncodedDataset, HeldoutRows, LabelledText, Pair, encode_rows
from alto.errors import DataError, DeviceMemoryError, SpecError
from alto.evaluation.adapter import loaded_adapters
from alto.evaluation.answers import has_final_answers
from alto.evaluation.exact_match import Question, judge_texts, make_questions, open_questions
from alto.evaluation.generate import check_prompts, complete, max_positions
from alto.evaluation.loss import heldout_losses, reply_log_probs
from alto.evaluation.settings import EvaluationSettings
from alto.evaluation.target import BASE
from alto.evaluation.vllm import complete_with_vllm
from alto.lora import SavedAdapter, ServedAdapters
from alto.objectives.pairs import preference_metrics
from alto.records import AdapterEvaluation, Evaluation, EvaluationResult, Metric
from alto.spec import BaseModelSpec
from alto.spec.base_model import LOAD_IN_4BIT, quantisation_keys

__all__ = ["OnProgress", "measure"]

OnProgress = Callable[[str, int, int], None]
"""Called with the name of the measurement, its finished rows and all its rows; a row counts once per adapter."""


def measure(
    adapters: Mapping[str, SavedAdapter],
    rows: HeldoutRows,
    settings: EvaluationSettings,
    *,
    base: BaseModelSpec,
    device: torch.device | str = "cpu",
    max_tokens_per_pass: int,
    max_length: int | None = None,
    on_progress: OnProgress | None = None,
) -> EvaluationResult:
    """Measure ``adapters`` on ``base``; writes nothing.

    Args:
        adapters: By the name each is reported under.
        rows: Held-out rows, of which ``settings.limit`` may take the first ones only.
        settings: Metrics, limits and backend.
        base: The base model that the adapters are put on.
        device: Where it is loaded.
        max_tokens_per_pass: Tokens of one forward pass of the loss.
        max_length: Tokens at which a row is cut for the loss; None cuts at the model's last position.
        on_progress: Called with the name of the measurement, its finished rows and all its rows.

    Raises:
        DataError: There are no rows, or they do not carry what the metric needs.
        SpecError: The settings ask for a metric that such rows do not have.
        ModelError: The base model cannot be used, or an adapter does not fit it.
        NoResultError: A loss is not finite.
        DeviceMemoryError: There is not enough memory.
        UnsupportedError: ``backend`` is vLLM, and vLLM cannot serve the model or an adapter.
    """
    chosen = rows.rows[: settings.limit]
    conversations = [row for row in chosen if not isinstance(row, Pair | LabelledText)]
    if not chosen:
        raise DataError(f"dataset: expected at least one row to measure on, found none in {rows.name}; name other rows")
    metrics = _metrics(conversations, rows.name, settings)
    tokenizer = load_tokenizer(base)
    questions = _questions(chosen, conversations, metrics, settings, tokenizer)  # before the model is loaded
    bench = _Bench(adapters, base, device, settings, on_progress)
    if settings.backend == "vllm":
        found = _Found(texts=bench.texts_of_vllm(questions, tokenizer))
    else:
        try:
            found = bench.measure(replace(rows, rows=chosen), metrics, questions, max_tokens_per_pass, max_length)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceMemoryError(
                f"expected memory for the base model {base.id} and {len(adapters)} adapters on {device}, found "
                f"less; name fewer adapters at a time, or load the base with {LOAD_IN_4BIT} in the run's task.yaml"
            ) from error

    judged = {
        name: judge_texts(questions, texts, tokenizer, weights=name)
        for name, texts in zip(bench.names_of_texts, found.texts, strict=bool(found.texts))
    }
    is_judged = "exact_match" in metrics
    evaluations = {}
    for slot, name in enumerate(bench.names):
        num_correct = sum(prediction.correct is True for prediction in judged[name]) if is_judged else None
        accuracy, margin = found.preferences[slot] if found.preferences else (None, None)
        evaluations[name] = Evaluation(
            dataset=rows.name,
            num_rows=found.num_pairs or len(chosen),
            loss=found.losses[slot] if found.losses else None,
            exact_match=None if num_correct is None else num_correct / len(questions),
            num_correct=num_correct,
            reward_accuracy=accuracy,
            reward_margin=margin,
            settings={
                "weights": BASE if slot == len(adapters) else "adapter",
                "base_model": base.id,
                "dtype": found.dtype or base.dtype,
                "limit": settings.limit,
                "max_length": found.max_length,
                "max_new_tokens": settings.max_new_tokens if is_judged else None,
                # The default backend is left out, as earlier versions do.
                **({"backend": settings.backend} if is_judged and settings.backend != "alto" else {}),
                **{key: True for key, is_asked in quantisation_keys(base.quantisation).items() if is_asked},
            },
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    return EvaluationResult(
        adapters=tuple(
            AdapterEvaluation(name=name, adapter_dir=str(adapter.folder), evaluation=evaluations[name])
            for name, adapter in adapters.items()
        ),
        baseline=evaluations.get(BASE) if settings.baseline else None,
        predictions=tuple(prediction for of_one in judged.values() for prediction in of_one),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The measurements of every slot; one that was not made is empty, or None.

    Attributes:
        texts: Token ids of the answer to every question.
        preferences: Reward accuracy and margin.
        num_pairs: How many they are means of.
    """

    losses: Sequence[float] = ()
    texts: Sequence[Sequence[Sequence[int]]] = ()
    preferences: Sequence[tuple[float, float]] = ()
    num_pairs: int | None = None
    max_length: int | None = None
    dtype: str | None = None


class _Bench:
    """What to measure, on which rows, and how progress is reported.

    Attributes:
        names: Weights that are measured.
        names_of_texts: Weights that generate texts: where predictions are asked for, the base model too.
    """

    def __init__(
        self,
        adapters: Mapping[str, SavedAdapter],
        base: BaseModelSpec,
        device: torch.device | str,
        settings: EvaluationSettings,
        on_progress: OnProgress | None,
    ) -> None:
        self.names = [*adapters, *([BASE] if settings.baseline else [])]
        self.names_of_texts = [*adapters, *([BASE] if settings.baseline or settings.predictions else [])]
        self._adapters = adapters
        self._base = base
        self._device = device
        self._settings = settings
        self._on_progress = on_progress

    def _slots(self, names: Sequence[str]) -> list[SavedAdapter | None]:
        return [self._adapters.get(name) for name in names]

    def measure(
        self,
        rows: HeldoutRows,
        metrics: Sequence[Metric],
        questions: Sequence[Question],
        max_tokens_per_pass: int,
        max_length: int | None,
    ) -> _Found:
        """``metrics`` of all adapters, and their answers to ``questions``, by ALTO itself."""
        backbone = load_backbone(self._base, device=self._device)
        limit = max_positions(backbone)
        try:
            check_prompts([question.prompt_ids for question in questions], limit)
        except DataError as error:
            what = "exact_match" if "exact_match" in metrics else "predictions"
            raise DataError(f"{what}: {error}") from error
        limits = limits_of(backbone.model.config)
        max_length = min(max_length or limit or sys.maxsize, limits.max_positions or sys.maxsize)
        dataset = None
        if "loss" in metrics or "preference" in metrics:
            dataset = encode_rows(
                rows.rows, backbone.tokenizer, max_length, "held-out", limits=limits, train_on=rows.train_on
            )
        losses: Sequence[float] = ()
        preferences: Sequence[tuple[float, float]] = ()
        if dataset is not None and "loss" in metrics:
            with loaded_adapters(backbone, self._slots(self.names), self._base.id) as served:
                losses = heldout_losses(
                    backbone,
                    served,
                    dataset,
                    names=self.names,
                    max_tokens_per_pass=max_tokens_per_pass,
                    on_done=self._counter("loss", len(dataset) * len(served)),
                )
        if dataset is not None and "preference" in metrics:
            # Rewards are log-ratios to the base model, which has the slot after the adapters.
            with loaded_adapters(backbone, self._slots([*self.names, BASE]), self._base.id) as served:
                preferences = self._preferences(backbone, served, dataset, max_tokens_per_pass)
        return _Found(
            losses=losses,
            texts=self._texts(backbone, questions) if questions else (),
            preferences=preferences,
            num_pairs=len(dataset) if dataset is not None and preferences else None,
            max_length=max_length if dataset is not None and max_length < sys.maxsize else None,
            dtype=str(backbone.dtype).removeprefix("torch."),
        )

    def _texts(self, backbone: Backbone, questions: Sequence[Question]) -> list[list[list[int]]]:
        """Of all that generate, the answer to every question."""
        with loaded_adapters(backbone, self._slots(self.names_of_texts), self._base.id) as served:
            return complete(
                backbone,
                served,
                [question.prompt_ids for question in questions],
                max_new_tokens=self._settings.max_new_tokens,
                batch_size=self._settings.batch_size,
                on_done=self._counter("answers", len(questions) * len(served)),
            )

    def texts_of_vllm(self, questions: Sequence[Question], tokenizer: Any) -> list[list[list[int]]]:
        """The same by vLLM."""
        ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return complete_with_vllm(
            self._base,
            self._slots(self.names_of_texts),
            [question.prompt_ids for question in questions],
            ends=ends,
            max_new_tokens=self._settings.max_new_tokens,
        )

    def _preferences(
        self, backbone: Backbone, served: ServedAdapters, dataset: EncodedDataset, max_tokens_per_pass: int
    ) -> list[tuple[float, float]]:
        *of_adapters, of_base_Q2 = reply_log_probs(
            backbone,
            served,
            dataset,
            names=[*self.names, BASE],
            max_tokens_per_pass=max_tokens_per_pass,
            on_done=self._counter("preference", len(dataset) * len(served)),
        )
        found = [preference_metrics(log_probs_Q2 - of_base_Q2) for log_probs_Q2 in of_adapters]
        return [(float(one["reward_accuracy"].mean()), float(one["reward_margin"].mean())) for one in found]

    def _counter(self, what: str, total: int) -> Callable[[int], None]:
        done = 0

        def count(num_rows: int) -> None:
            nonlocal done
            done += num_rows
            if self._on_progress is not None:
                self._on_progress(what, done, total)

        count(0)
        return count


def _questions(
    chosen: Sequence[Conversation | Pair | LabelledText],
    conversations: Sequence[Conversation],
    metrics: Sequence[Metric],
    settings: EvaluationSettings,
    tokenizer: Any,
) -> list[Question]:
    """What is generated for: the rows whose final answers are compared, or all where predictions are asked for."""
    if "exact_match" in metrics:
        try:
            return make_questions(conversations, tokenizer)
        except DataError as error:
            raise DataError(f"exact_match: {error}; or measure the loss with --metric loss") from error
    if not settings.predictions:
        return []
    try:
        return open_questions(chosen, tokenizer)
    except DataError as error:
        raise DataError(f"predictions: {error}; or save no predictions") from error


def _metrics(conversations: Sequence[Conversation], name: str, settings: EvaluationSettings) -> tuple[Metric, ...]:
    """The metrics to measure; ``conversations`` are the rows that are not pairs: none or all."""
    wanted = settings.metric
    if not conversations:
        if wanted not in ("auto", "preference") or settings.backend == "vllm":
            raise DataError(
                f"dataset: expected rows with one reply to measure {'answers' if wanted == 'auto' else wanted} on, "
                f"found preference pairs in {name}; measure the preference, or name other rows with --dataset"
            )
        if settings.baseline:
            raise SpecError(
                "baseline: expected none with the metric preference, which measures against the base model as it is; "
                "leave it out"
            )
        return ("preference",)
    if wanted == "preference":
        raise DataError(
            f"dataset: expected preference pairs (columns prompt, chosen and rejected), found rows with one reply in "
            f"{name}; measure the loss, or name other rows with --dataset"
        )
    if wanted != "auto":
        return (wanted,)
    if settings.backend == "vllm":
        return ("exact_match",)
    return ("loss", "exact_match") if has_final_answers(conversations) else ("loss",)
