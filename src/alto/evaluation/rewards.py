"""Rewards of sampled completions: the scorers and functions that a task names, weighted and summed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alto.base import FunctionFailedError, FunctionProcess, FunctionRaisedError, is_number, quoted
from alto.errors import SpecError
from alto.evaluation.scorers import Answer, OnTurn, ScorerFailedError
from alto.evaluation.scoring import NO_FUNCTION, scorer_of
from alto.spec import REWARD_ARGUMENTS, Scoring

_MAX_REWARD = 1e100
_SEARCH_S = 10.0
"""Maximum seconds to search for the completion for which a function raises an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A completion to be scored: its text, its token ids, with the end token if it ended, and other columns of its
    row."""

    answer: Answer
    ids: Sequence[int]
    columns: Mapping[str, Any] = field(default_factory=dict)


Reward = Callable[[Sequence[Completion], OnTurn], Sequence[float | None]]
"""A reward: returns a number for every completion, or None for one that it cannot score."""


class Rewards:
    """The rewards of a task. Functions run in processes of their own, which end with :meth:`close`.

    Args:
        reward_funcs: Scorers of completions; at least one.
        weights: Weight of each; None if all are 1.

    Raises:
        SpecError: A function does not exist, or the headers of a request are not set.
    """

    def __init__(self, reward_funcs: Sequence[Scoring], weights: Sequence[float] | None = None) -> None:
        self.reward_funcs = tuple(reward_funcs)
        self.weights = tuple(weights or (1.0,) * len(reward_funcs))
        self._functions: list[RewardFunction] = []
        self._rewards = [self._reward(scoring) for scoring in reward_funcs]

    def __call__(self, completions: Sequence[Completion], on_turn: OnTurn) -> list[float]:
        """Return the weighted sum of the rewards of each completion; NaN if no reward can score it.

        Args:
            on_turn: Called regularly; its exceptions are raised from here.

        Raises:
            ScorerFailedError: A reward returns no such numbers; the message names it.
        """
        found = [reward(completions, on_turn) for reward in self._rewards]
        return [self._sum(of_one) for of_one in zip(*found, strict=True)]

    def close(self) -> None:
        """End the processes of functions."""
        for function in self._functions:
            function.close()

    def _sum(self, rewards: Sequence[float | None]) -> float:
        known = [weight * value for weight, value in zip(self.weights, rewards, strict=True) if value is not None]
        return sum(known) if known else math.nan

    def _reward(self, scoring: Scoring) -> Reward:
        if scoring.scorer == "python":
            assert scoring.function is not None
            function = RewardFunction(scoring.function, scoring.timeout_s)
            self._functions.append(function)
            return function
        scorer = scorer_of(scoring)
        return lambda completions, on_turn: scorer([one.answer for one in completions], on_turn)


class RewardFunction:
    """A user's function with TRL's signature, in a process of its own.

    Args:
        name: ``module:function``.
        timeout_s: Maximum seconds of a call, for all completions of a job in a step.

    Raises:
        SpecError: The function does not exist.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._process = FunctionProcess(name, timeout_s)
        try:
            self._process.start()
        except FunctionFailedError as error:
            raise SpecError(f"reward_funcs: {error}; {NO_FUNCTION}") from error

    def __call__(self, completions: Sequence[Completion], on_turn: OnTurn) -> list[float | None]:
        try:
            found = self._called(completions, on_turn)
        except FunctionFailedError as error:
            raise ScorerFailedError(
                f"{self._name}: {error}{self._place(completions, error, on_turn)}; correct the function"
                + ("" if isinstance(error, FunctionRaisedError) else ", or raise timeout_s")
            ) from error
        if not isinstance(found, list) or len(found) != len(completions):
            shown = f"{len(found)} entries" if isinstance(found, list) else quoted(found)
            raise ScorerFailedError(
                f"{self._name}: expected a list of {len(completions)} numbers, one for each completion, found {shown}; "
                "correct the function"
            )
        for number, (value, completion) in enumerate(zip(found, completions, strict=True), start=1):
            if (
                value is not None
                and not isinstance(value, bool)
                and not is_number(value, least=-_MAX_REWARD, most=_MAX_REWARD)
            ):
                raise ScorerFailedError(
                    f"{self._name}: expected a finite number or None, found {quoted(value)} for completion {number} "
                    f"{_shown(completion)}; correct the function"
                )
        return [None if value is None else float(value) for value in found]

    def close(self) -> None:
        self._process.close()

    def _called(self, completions: Sequence[Completion], on_turn: OnTurn) -> Any:
        names = dict.fromkeys(name for one in completions for name in one.columns)
        own = {
            "prompts": [one.answer.prompt for one in completions],
            "completions": [one.answer.answer for one in completions],
            "completion_ids": [list(one.ids) for one in completions],
            "reference": [one.answer.reference for one in completions],
        }
        assert own.keys() == set(REWARD_ARGUMENTS), "names that no column may have"
        columns = {name: [one.columns.get(name) for one in completions] for name in names}
        return self._process.call({**columns, **own}, on_turn)

    def _place(self, completions: Sequence[Completion], error: FunctionFailedError, on_turn: OnTurn) -> str:
        """Return the completion for which the function raises an error when it is called for it alone; empty if there
        is none."""
        if not isinstance(error, FunctionRaisedError):
            return ""
        deadline = time.monotonic() + _SEARCH_S
        for number, one in enumerate(completions, start=1):
            if time.monotonic() > deadline:
                break
            try:
                self._called([one], on_turn)
            except FunctionFailedError:
                return f" for completion {number} {_shown(one)}"
        return ""


def _shown(completion: Completion) -> str:
    return f"({quoted(completion.answer.answer)}) of the prompt {quoted(completion.answer.prompt)}"
