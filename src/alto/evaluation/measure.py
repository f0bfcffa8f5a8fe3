"""Measurement of adapters of one base model on held-out rows; the base model is loaded once for all adapters."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from alto.backbone import Backbone, check_classifier, is_out_of_memory, limits_of, load_backbone, load_tokenizer
from alto.data import (
    ChatTemplate,
    Conversation,
    EncodedDataset,
    Encoding,
    HeldoutRows,
    LabelledText,
    Pair,
    Row,
    tokenize,
)
from alto.errors import DataError, DeviceMemoryError, NoResultError, SpecError
from alto.evaluation.generate import Prompt, Text, answers_of, check_prompts, complete, max_positions, prompts_of
from alto.evaluation.loss import Choices, HeldoutPass, label_metrics, options_of, predicted_labels
from alto.evaluation.matching import Matching, matching_of
from alto.evaluation.rewards import Completion, Rewards
from alto.evaluation.scorers import Answer, OnTurn, ScorerFailedError
from alto.evaluation.scoring import check_key_names, check_references, needed_of, scorable, scorer_of
from alto.evaluation.settings import EvaluationSettings
from alto.evaluation.target import BASE, loaded_adapters
from alto.evaluation.vllm import complete_with_vllm
from alto.lora import HEAD, SavedAdapter
from alto.objectives.pairs import preference_metrics
from alto.records import (
    GRADED_SCORERS,
    AdapterEvaluation,
    Evaluation,
    EvaluationResult,
    LabelPrediction,
    LabelSet,
    Prediction,
)
from alto.spec import LOAD_IN_4BIT, BaseModelSpec, Scoring, quantisation_keys

_Scorer = Callable[[Sequence[Answer], OnTurn], Sequence[float | None]]
"""A scorer, or rewards as a scorer; None means that an answer cannot be scored."""


def predictions_of(
    prompts: Sequence[Prompt], texts: Sequence[Text], tokenizer: Any, *, weights: str, scorer: _Scorer | None
) -> list[Prediction]:
    """Return a prediction for every prompt.

    Args:
        texts: The text generated for each prompt.
        weights: Name of the adapter that generated the texts, or of the base model.
        scorer: Scores the texts; None leaves them without scores.

    Raises:
        ScorerFailedError: The scorer returns no scores.
    """
    answers = answers_of(prompts, texts, tokenizer)
    scores: Sequence[float | None] = [None] * len(answers) if scorer is None else scorer(answers, lambda: None)
    return [
        Prediction(
            weights=weights,
            row=row,
            prompt=one.prompt,
            reference=one.reference,
            generated=one.answer,
            extracted=scorer.extracted(one.answer) if isinstance(scorer, Matching) else None,
            correct=score == 1 if isinstance(scorer, Matching) else None,
            score=None if score is None else float(score),
        )
        for row, (one, score) in enumerate(zip(answers, scores, strict=True), start=1)
    ]


def label_predictions_of(
    rows: Sequence[Row], logits_QK: Tensor, labels: LabelSet, tokenizer: Any, weights: str
) -> list[LabelPrediction]:
    """Return the predicted label of every row.

    Args:
        rows: Texts, with or without their labels.
        weights: Name of the adapter that the logits are from.
    """
    found = []
    for number, (row, (predicted, probability)) in enumerate(
        zip(rows, predicted_labels(logits_QK, labels), strict=True), start=1
    ):
        assert isinstance(row, LabelledText)
        if isinstance(row.text, str):
            text = row.text if row.text_pair is None else f"{row.text}\n{row.text_pair}"
        else:
            text = ChatTemplate(tokenizer).text(row.text, open_turn=False)
        found.append(
            LabelPrediction(
                weights=weights,
                row=number,
                text=text,
                label=None if row.label is None else labels.value_of(row.label),
                predicted=labels.value_of(predicted),
                probability=probability,
            )
        )
    return found


class _RewardScorer:
    """The rewards of the answers in ``texts``, as a scorer.

    Args:
        rows: The row of each text.
    """

    def __init__(self, rewards: Rewards, texts: Sequence[Text], rows: Sequence[Conversation]) -> None:
        self._rewards, self._texts, self._rows = rewards, texts, rows

    def __call__(self, answers: Sequence[Answer], on_turn: OnTurn) -> list[float | None]:
        completions = [
            Completion(answer=answer, ids=text.ids, columns=json.loads(row.columns or "{}"))
            for answer, text, row in zip(answers, self._texts, self._rows, strict=True)
        ]
        return [None if math.isnan(reward) else reward for reward in self._rewards(completions, on_turn)]


_DECIDING = ("scorer", "keys", "pattern", "tolerance", "tags", "measure", "ignore_case", "function")
"""Settings of a scorer that affect its scores."""

_NOT_OF_HEADS = {
    "metric": "their predictions are always measured",
    "baseline": "the base model alone has no head",
    "backend": "they generate no answers",
    "batch_size": "they generate no answers",
    "max_new_tokens": "they generate no answers",
}
"""Settings that do not apply to adapters with a classification head, and why."""

OnProgress = Callable[[str, int, int], None]
"""A callback with the measurement's name, number of finished rows and total number of rows; a row counts once per
adapter."""


def measure(
    adapters: Mapping[str, SavedAdapter],
    rows: HeldoutRows,
    settings: EvaluationSettings,
    *,
    base: BaseModelSpec,
    device: torch.device | str = "cpu",
    max_tokens_per_pass: int,
    max_length: int | None = None,
    scoring: Scoring | None = None,
    rewards: Rewards | None = None,
    on_progress: OnProgress | None = None,
) -> EvaluationResult:
    """Measure ``adapters`` on ``base``. Nothing is written to disk.

    Args:
        adapters: Adapters by the name under which each is reported.
        rows: Held-out rows; ``settings.limit`` may restrict them to the first ones.
        max_tokens_per_pass: Maximum number of tokens in a forward pass that computes losses.
        max_length: Number of tokens to which rows are truncated for the loss; None truncates to the model's positions.
        scoring: The preferred scorer if the metric is ``auto``; it is used if it can score all rows.
        rewards: If given, the mean reward of the answers is measured, for any metric.

    Raises:
        DataError: There are no rows, or the rows do not contain the data that the metric needs.
        SpecError: The settings do not apply to such rows, or to adapters with a classification head.
        ModelError: The base model cannot be used, or an adapter does not fit it.
        NoResultError: A loss is not finite, or the scorer returns no scores.
        DeviceMemoryError: There is not enough memory.
        UnsupportedError: ``backend`` is vLLM, and vLLM cannot serve the model or an adapter.
    """
    chosen = rows.rows[: settings.limit]
    conversations = [row for row in chosen if not isinstance(row, Pair | LabelledText)]
    if not chosen:
        raise DataError(f"dataset: expected at least one row to measure on, found none in {rows.name}; name other rows")
    measured: tuple[str, ...]
    if rewards is not None:
        measured, scoring = (), None
    elif rows.labels is None:
        measured, scoring = _choose_metrics(conversations, rows.name, settings, scoring)
    else:
        _check_of_heads(settings)
        measured, scoring = ("labels",), None
    tokenizer = load_tokenizer(base)
    is_generated = rewards is not None or (scoring is not None and scoring.scorer != "multiple_choice")
    if scoring is not None:
        _check_scorable(conversations, scoring, tokenizer)
    scorer = scorer_of(scoring) if scoring is not None and is_generated else None
    generates = rows.labels is None and (is_generated or settings.predictions)
    prompts = _prompts(chosen, is_generated, tokenizer) if generates else []  # before the model is loaded
    bench = _Bench(adapters, base, device, settings, on_progress)
    if settings.backend == "vllm":
        results = _Results(texts=bench.texts_of_vllm(prompts, tokenizer))
    else:
        try:
            results = bench.measure(
                replace(rows, rows=chosen),
                measured,
                prompts,
                None if is_generated else scoring,
                max_tokens_per_pass,
                max_length,
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceMemoryError(
                f"expected enough memory for the base model {base.id} and {len(adapters)} adapters on {device}, found "
                f"less; evaluate fewer adapters at a time, or set {LOAD_IN_4BIT} in the run's task.yaml"
            ) from error

    try:
        judged = {
            name: predictions_of(
                prompts,
                texts,
                tokenizer,
                weights=name,
                scorer=scorer if rewards is None else _RewardScorer(rewards, texts, conversations),
            )
            for name, texts in zip(bench.names_of_texts, results.texts, strict=bool(results.texts))
        }
    except ScorerFailedError as error:
        raise NoResultError(f"metric: expected scores of all answers, found none: {error}") from error
    evaluations = {}
    for slot, name in enumerate(bench.names):
        scores: Sequence[float] = ()
        of_texts = [one.score for one in judged.get(name, ()) if one.score is not None]
        if rewards is not None and not of_texts:
            raise NoResultError(f"reward_funcs: expected a reward of at least one answer of {name}, found none")
        if scoring is not None:
            scores = of_texts if is_generated else results.choices[slot]
        score = fmean(scores) if scores else None
        accuracy, margin = results.preferences[slot] if results.preferences else (None, None)
        evaluations[name] = Evaluation(
            dataset=rows.name,
            num_rows=results.num_pairs or len(chosen),
            **(
                results.of_labels[slot]
                if results.of_labels
                else {"loss": results.losses[slot] if results.losses else None}
            ),
            exact_match=score if scoring is not None and scoring.scorer == "exact_match" else None,
            num_correct=None if scoring is None or scoring.scorer in GRADED_SCORERS else round(sum(scores)),
            scorer=None if scoring is None else scoring.scorer,
            score=score,
            reward_accuracy=accuracy,
            reward_margin=margin,
            reward=fmean(of_texts) if rewards is not None else None,
            settings={
                "weights": BASE if slot == len(adapters) else "adapter",
                "base_model": base.id,
                "dtype": results.dtype or base.dtype,
                "limit": settings.limit,
                "max_length": results.max_length,
                "max_new_tokens": settings.num_new_tokens if is_generated else None,
                # Entries are compared by their settings, and earlier versions leave out the default backend and scorer.
                **({"backend": settings.backend} if is_generated and settings.backend != "alto" else {}),
                **_shown(scoring),
                **({} if rewards is None else {"rewards": _shown_rewards(rewards)}),
                **{key: True for key, is_set in quantisation_keys(base.quantisation).items() if is_set},
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
        label_predictions=results.label_predictions,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Results:
    """The measurements of every slot; a measurement that was not made is empty or None.

    Attributes:
        texts: The answer to every prompt.
        choices: Multiple-choice score of every row.
        preferences: Reward accuracy and reward margin, averaged over pairs.
        num_pairs: Number of pairs in these averages.
        of_labels: Metrics of classification heads; see :func:`label_metrics`.
        label_predictions: Predictions of classification heads.
    """

    losses: Sequence[float] = ()
    texts: Sequence[Sequence[Text]] = ()
    choices: Sequence[Sequence[float]] = ()
    preferences: Sequence[tuple[float, float]] = ()
    num_pairs: int | None = None
    of_labels: Sequence[Mapping[str, Any]] = ()
    label_predictions: tuple[LabelPrediction, ...] = ()
    max_length: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class _Bench:
    """The models to be measured, their settings, and progress reports."""

    adapters: Mapping[str, SavedAdapter]
    base: BaseModelSpec
    device: torch.device | str
    settings: EvaluationSettings
    on_progress: OnProgress | None

    @property
    def names(self) -> list[str]:
        """Names of the adapters to be measured, and of the base model if a baseline is requested."""
        return [*self.adapters, *([BASE] if self.settings.baseline else [])]

    @property
    def names_of_texts(self) -> list[str]:
        """Names of the adapters that generate texts, and of the base model if a baseline or predictions are
        requested."""
        return [*self.adapters, *([BASE] if self.settings.baseline or self.settings.predictions else [])]

    def _slots(self, names: Sequence[str]) -> list[SavedAdapter | None]:
        return [self.adapters.get(name) for name in names]

    def measure(
        self,
        rows: HeldoutRows,
        measured: Sequence[str],
        prompts: Sequence[Prompt],
        choosing: Scoring | None,
        max_tokens_per_pass: int,
        max_length: int | None,
    ) -> _Results:
        """Measure all adapters with ALTO's own engine: the metrics in ``measured``, answers to ``prompts``, and
        multiple choice."""
        backbone = load_backbone(self.base, device=self.device)
        limit = max_positions(backbone)
        try:
            check_prompts([prompt.ids for prompt in prompts], limit)
        except DataError as error:
            raise DataError(f"answers: {error}") from error
        limits = limits_of(backbone.model.config)
        max_length = min(max_length or limit or sys.maxsize, limits.max_positions or sys.maxsize)
        dataset = None
        if measured:
            encoding = Encoding(
                tokenizer=backbone.tokenizer,
                max_length=max_length,
                limits=limits,
                train_on=rows.train_on,
                labels=rows.labels,
            )
            dataset = tokenize(rows.rows, encoding, "held-out")
        losses: Sequence[float] = ()
        preferences: Sequence[tuple[float, float]] = ()
        of_labels: Sequence[Mapping[str, Any]] = ()
        predicted: list[LabelPrediction] = []
        if dataset is not None and "loss" in measured:
            with self._pass("loss", self.names, backbone, dataset, max_tokens_per_pass) as heldout:
                losses = heldout.losses()
        if dataset is not None and "preference" in measured:
            # Rewards are log-ratios to the base model, which occupies the last slot.
            with self._pass("preference", [*self.names, BASE], backbone, dataset, max_tokens_per_pass) as heldout:
                preferences = _preferences([log_probs_S.view(-1, 2) for log_probs_S in heldout.log_probs()])
        if dataset is not None and rows.labels is not None:
            check_classifier(backbone, rows.labels)
            heads = [adapter.weights.extras[HEAD] for adapter in self.adapters.values()]
            with self._pass("labels", self.names, backbone, dataset, max_tokens_per_pass) as heldout:
                logits = heldout.logits(heads)
            of_labels = [label_metrics(logits_QK, dataset) for logits_QK in logits if dataset.classes is not None]
            if self.settings.predictions:
                for name, logits_QK in zip(self.names, logits, strict=True):
                    predicted += label_predictions_of(rows.rows, logits_QK, rows.labels, backbone.tokenizer, name)
        return _Results(
            of_labels=of_labels,
            label_predictions=tuple(predicted),
            losses=losses,
            texts=self._texts(backbone, prompts) if prompts else (),
            choices=() if choosing is None else self._choices(backbone, rows.rows),
            preferences=preferences,
            num_pairs=len(dataset) if dataset is not None and preferences else None,
            max_length=max_length if dataset is not None and max_length < sys.maxsize else None,
            dtype=str(backbone.dtype).removeprefix("torch."),
        )

    def _choices(self, backbone: Backbone, rows: Sequence[Row]) -> list[Sequence[float]]:
        """Return each measured model's multiple-choice scores of all rows."""
        conversations = [row for row in rows if not isinstance(row, Pair | LabelledText)]
        choices = Choices(conversations, options_of(conversations), backbone)
        with loaded_adapters(backbone, self._slots(self.names), self.base.id) as served:
            return list(choices.scores(served, self.names, lambda: None))

    def _texts(self, backbone: Backbone, prompts: Sequence[Prompt]) -> list[list[Text]]:
        """Return each generating model's answers to all prompts."""
        with loaded_adapters(backbone, self._slots(self.names_of_texts), self.base.id) as served:
            return complete(
                backbone,
                served,
                [prompt.ids for prompt in prompts],
                max_new_tokens=self.settings.num_new_tokens,
                batch_size=self.settings.batch_size,
                on_done=self._counter("answers", len(prompts) * len(served)),
            )

    def texts_of_vllm(self, prompts: Sequence[Prompt], tokenizer: Any) -> list[list[Text]]:
        """Return the same as :meth:`_texts`, generated by vLLM, but without end tokens."""
        ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        found = complete_with_vllm(
            self.base,
            self._slots(self.names_of_texts),
            [prompt.ids for prompt in prompts],
            ends=ends,
            max_new_tokens=self.settings.num_new_tokens,
        )
        return [
            [Text(slot, prompt.ids, len(tokens), tokens=tokens) for prompt, tokens in zip(prompts, texts, strict=True)]
            for slot, texts in enumerate(found)
        ]

    @contextmanager
    def _pass(
        self, what: str, names: Sequence[str], backbone: Backbone, dataset: EncodedDataset, max_tokens_per_pass: int
    ) -> Iterator[HeldoutPass]:
        """Load the models called ``names`` for a pass over ``dataset``, whose progress is reported as ``what``."""
        with loaded_adapters(backbone, self._slots(names), self.base.id) as served:
            yield HeldoutPass(
                backbone=backbone,
                served=served,
                dataset=dataset,
                names=names,
                max_tokens_per_pass=max_tokens_per_pass,
                on_done=self._counter(what, len(dataset) * len(names)),
            )

    def _counter(self, what: str, total: int) -> Callable[[int], None]:
        done = 0

        def count(num_rows: int) -> None:
            nonlocal done
            done += num_rows
            if self.on_progress is not None:
                self.on_progress(what, done, total)

        count(0)
        return count


def _preferences(log_probs: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Return (reward accuracy, reward margin) for each adapter.

    Args:
        log_probs: One tensor ``[pairs, 2]`` (chosen, rejected) per adapter, and last the tensor of the base model.
    """
    *of_adapters, of_base_Q2 = log_probs
    metrics = [preference_metrics(log_probs_Q2 - of_base_Q2) for log_probs_Q2 in of_adapters]
    return [(float(one["reward_accuracy"].mean()), float(one["reward_margin"].mean())) for one in metrics]


def _check_of_heads(settings: EvaluationSettings) -> None:
    """Check that every setting that is set applies to adapters with a classification head.

    Raises:
        SpecError: A setting does not apply.
    """
    defaults = EvaluationSettings()
    for name, why in _NOT_OF_HEADS.items():
        if getattr(settings, name) != getattr(defaults, name):
            raise SpecError(f"{name}: does not apply to adapters with a classification head ({why}); leave it out")


def _check_scorable(conversations: Sequence[Conversation], scoring: Scoring, tokenizer: Any) -> None:
    """Check that every row can be scored.

    Raises:
        DataError: A row cannot be scored.
    """
    try:
        check_key_names(conversations, scoring)
    except DataError as error:
        raise DataError(f"{scoring.scorer}: {error}") from error
    for number, row in enumerate(conversations, start=1):
        if not scorable([row], scoring):
            raise DataError(
                f"{scoring.scorer}: expected rows whose replies {needed_of(scoring)}, found no such reply in row "
                f"{number} of {len(conversations)}; name other rows with --dataset, or measure the loss with --metric "
                "loss"
            )
    try:
        check_references(conversations, scoring, tokenizer)
    except DataError as error:
        raise DataError(f"{scoring.scorer}: {error}") from error


def _prompts(chosen: Sequence[Row], is_scored: bool, tokenizer: Any) -> list[Prompt]:
    """Return the prompts of all rows, for answers that are scored or only saved."""
    try:
        return prompts_of(chosen, tokenizer)
    except DataError as error:
        otherwise = "measure the loss with --metric loss" if is_scored else "save no predictions"
        raise DataError(f"{'answers' if is_scored else 'predictions'}: {error}; or {otherwise}") from error


def _shown(scoring: Scoring | None) -> dict[str, Any]:
    """Return the scorer's entry in an evaluation's settings."""
    if scoring is None or scoring == Scoring(scorer="exact_match"):
        return {}
    return {"scoring": _deciding(scoring)}


def _shown_rewards(rewards: Rewards) -> list[dict[str, Any]]:
    return [
        {**_deciding(scoring), "weight": weight}
        for scoring, weight in zip(rewards.reward_funcs, rewards.weights, strict=True)
    ]


def _deciding(scoring: Scoring) -> dict[str, Any]:
    """Return the settings that affect the scores, without secrets that the URL may contain."""
    facts = {key: value for key, value in scoring.to_dict().items() if key in _DECIDING}
    return {**facts, **({"url": scoring.address} if scoring.url else {})}


def _choose_metrics(
    conversations: Sequence[Conversation], name: str, settings: EvaluationSettings, preferred: Scoring | None
) -> tuple[tuple[str, ...], Scoring | None]:
    """Return the metrics that need no generation, and the scorer of answers.

    Args:
        conversations: The rows that are not pairs: all rows, or none.
    """
    wanted = settings.metric if settings.scoring is None else settings.scoring.scorer
    if not conversations:
        if wanted not in ("auto", "preference") or settings.backend == "vllm":
            raise DataError(
                f"dataset: expected rows with one reply to measure {'answers' if wanted == 'auto' else wanted} on, "
                f"found preference pairs in {name}; measure the preference, or name other rows with --dataset"
            )
        if settings.baseline:
            raise SpecError(
                "baseline: does not apply to the metric preference, which already compares with the base model; leave "
                "it out"
            )
        return ("preference",), None
    if wanted == "preference":
        raise DataError(
            f"dataset: expected preference pairs (columns prompt, chosen and rejected), found rows with one reply in "
            f"{name}; measure the loss, or name other rows with --dataset"
        )
    if settings.scoring is not None:
        return (), settings.scoring
    if wanted == "loss":
        return ("loss",), None
    exact_match = Scoring(scorer="exact_match")
    scoring = exact_match if preferred is None or matching_of(preferred) is None else preferred
    if settings.backend == "vllm":
        return (), scoring
    return ("loss",), scoring if len(scorable(conversations, scoring)) == len(conversations) else None
