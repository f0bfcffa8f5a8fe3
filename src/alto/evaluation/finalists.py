"""Scoring of a task's jobs by their answers to validation rows: the job with the lowest loss may not answer best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from alto.backbone import Backbone, is_out_of_memory, release_memory
from alto.data import Conversation, Row
from alto.errors import DataError, DeviceMemoryError
from alto.evaluation.generate import answers_of, check_prompts, complete, max_positions, prompts_of
from alto.evaluation.loss import Choices, options_of
from alto.evaluation.scorers import OnTurn, Scorer, ScorerFailedError, attempted
from alto.evaluation.scoring import check_key_names, check_references, needed_of, scorable, scorer_of
from alto.evaluation.settings import EvaluationSettings
from alto.evaluation.target import loaded_adapters
from alto.lora import ServedAdapters, read_saved_adapter
from alto.records import Judgement
from alto.spec import Scoring


class WrittenAnswers:
    """A scorer that lets each adapter generate one greedy answer to each row, and scores the texts.

    Args:
        rows: Rows with a reply, which is the reference.
        scorer: Scores the texts of one adapter.

    Raises:
        DataError: A row has no prompt, or its prompt leaves no position for an answer.
    """

    def __init__(
        self, rows: Sequence[Conversation], backbone: Backbone, scorer: Scorer, *, max_new_tokens: int
    ) -> None:
        self.prompts = prompts_of(rows, backbone.tokenizer)
        check_prompts([prompt.ids for prompt in self.prompts], max_positions(backbone))
        self._backbone = backbone
        self._scorer = scorer
        self._max_new_tokens = max_new_tokens

    def scores(self, served: ServedAdapters, names: Sequence[str], on_turn: OnTurn) -> list[Sequence[float]]:
        """Return each adapter's scores of all rows.

        Args:
            names: Not used; part of the interface that :class:`~alto.evaluation.loss.Choices` shares.
            on_turn: Called after every token, and regularly while the scorer runs.

        Raises:
            DeviceMemoryError: Memory is too small for a single text.
            ScorerFailedError: The scorer returns no scores.
        """
        texts = complete(
            self._backbone,
            served,
            [prompt.ids for prompt in self.prompts],
            max_new_tokens=self._max_new_tokens,
            batch_size=EvaluationSettings().batch_size,
            on_done=lambda _: on_turn(),
        )
        answers = (answers_of(self.prompts, of_adapter, self._backbone.tokenizer) for of_adapter in texts)
        return [self._scorer(of_adapter, on_turn) for of_adapter in answers]


EVAL_ACCURACY = "eval_accuracy"
"""The value of ``select_by`` that selects the job with the most exact matches."""

_MAX_ADAPTERS = 16
"""Number of adapters loaded onto the base model at a time; halved whenever memory runs out."""

_MAX_SCORE = 1e100
"""Largest absolute score of a row: means and confidence intervals of larger scores may not be finite."""


class FinalistJudge:
    """A judge that scores the answers of several adapters of one base model to the same rows.

    Args:
        rows: Validation rows; rows that the scorer cannot use are ignored.
        backbone: The base model; no job may train on it while adapters are scored.
        model: Name of the base model in error messages.
        select_by: ``select_by`` of the task: settings, or ``eval_accuracy``.

    Raises:
        DataError: No row can be scored, or a row has no prompt.
        SpecError: The Python function does not exist, or the request headers are not set.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        backbone: Backbone,
        model: str,
        select_by: str | Scoring = EVAL_ACCURACY,
    ) -> None:
        scoring, self._name = _named(select_by)
        used = usable_rows(rows, select_by)[: scoring.num_rows]
        try:
            self._answers = _answers(used, scoring, backbone)
        except DataError as error:
            raise DataError(
                f"select_by {self._name}: among the validation rows whose replies {needed_of(scoring)}: {error}; or "
                "remove select_by"
            ) from error
        self._num_rows = len(used)
        self._backbone = backbone
        self._model = model

    def __call__(self, finalists: Mapping[str, Path], on_turn: Callable[[], None]) -> Judgement:
        """Score ``finalists``. If the scorer fails, return a judgement with the reason instead of raising an error.

        Args:
            finalists: Adapter folders by job.
            on_turn: Called regularly; its exceptions are raised from here.
        """
        rows, failure = attempted(lambda turn: self._rows(finalists, turn), on_turn)
        return Judgement(scorer=self._name, rows=rows or {}, failure=failure)

    def _rows(self, finalists: Mapping[str, Path], on_turn: OnTurn) -> dict[str, tuple[float, ...]]:
        """Return the scores of all rows by job. Adapters that fit into memory together are scored together."""
        names, most = list(finalists), _MAX_ADAPTERS
        rows: dict[str, tuple[float, ...]] = {}
        while len(rows) < len(names):
            batch = names[len(rows) : len(rows) + most]
            try:
                found = self._rows_of({name: finalists[name] for name in batch}, on_turn)
            except Exception as error:
                if len(batch) == 1 or not (is_out_of_memory(error) or isinstance(error, DeviceMemoryError)):
                    raise
                most = len(batch) // 2
            else:
                rows.update(zip(batch, found, strict=True))
                continue
            release_memory()
        return rows

    def _rows_of(self, finalists: Mapping[str, Path], on_turn: OnTurn) -> list[tuple[float, ...]]:
        adapters = [read_saved_adapter(folder) for folder in finalists.values()]
        with loaded_adapters(self._backbone, adapters, self._model) as served:
            scores = self._answers.scores(served, list(finalists), on_turn)
        assert all(len(of_job) == self._num_rows for of_job in scores)
        for of_job in scores:
            if abs(largest := max(of_job, key=abs)) > _MAX_SCORE:
                raise ScorerFailedError(f"expected scores from {-_MAX_SCORE:g} to {_MAX_SCORE:g}, found {largest:g}")
        return [tuple(float(f"{score:.6g}") for score in of_job) for of_job in scores]


def usable_rows(rows: Sequence[Row], select_by: str | Scoring) -> list[Conversation]:
    """Return the validation rows that the scorer of ``select_by`` can use.

    Raises:
        DataError: There is no such row, or no row has a key that is to be compared.
    """
    scoring, name = _named(select_by)
    try:
        check_key_names(rows, scoring)
    except DataError as error:
        raise DataError(f"select_by {name}: {error}, or remove select_by") from error
    used = scorable(rows, scoring)
    if not used:
        raise DataError(
            f"select_by {name}: expected validation rows whose replies {needed_of(scoring)}, found none of "
            f"{len(rows)}; add such rows, or remove select_by"
        )
    return used


def _named(select_by: str | Scoring) -> tuple[Scoring, str]:
    """Return the scorer settings of ``select_by``, and the scorer's name in error messages."""
    if isinstance(select_by, Scoring):
        return select_by, select_by.scorer
    return Scoring(scorer="exact_match"), EVAL_ACCURACY


def _answers(rows: Sequence[Conversation], scoring: Scoring, backbone: Backbone) -> WrittenAnswers | Choices:
    if scoring.scorer == "multiple_choice":
        return Choices(rows, options_of(rows), backbone)
    check_references(rows, scoring, backbone.tokenizer)
    return WrittenAnswers(rows, backbone, scorer_of(scoring), max_new_tokens=scoring.max_new_tokens)
