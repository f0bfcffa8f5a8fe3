"""How the winner is chosen: by the validation loss, by a metric of the method, or by scores of the jobs' answers."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypeGuard, get_args
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from alto.base import quoted
from alto.errors import SpecError
from alto.records import Metric, ScorerName
from alto.spec.job_config import JOB_FIELDS, JobConfig
from alto.spec.method import OWN_METHODS, find_method
from alto.spec.validation import SpecModel, parsed, plain


def is_function(value: object) -> TypeGuard[Callable[..., Any]]:
    """Return whether ``value`` is a function, or an object that can be called like one; classes do not count."""
    return callable(value) and not isinstance(value, type)


def name_of(function: Callable[..., Any]) -> str:
    """Return the dotted name by which another process can import ``function``, such as ``package.module:score``.

    Raises:
        ValueError: ``function`` is defined in the main program or notebook, inside another function, or has no name in
            its module.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if found is function and module != "__main__":
        return f"{module}:{name}"
    where = "the program or the notebook itself" if module == "__main__" else str(module or "no module")
    raise ValueError(
        "should be a function that other processes can import by its name, found "
        f"{name or type(function).__name__} of {where}. Define it at the top of a module in the current folder, or in "
        "a package, and import it from there."
    )


REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "reference")
"""Arguments of every reward function; the others are columns of rows."""

_SOURCE_LOSS = "loss_on_"
LOSS = "loss"

LEAST_SCORE = -sys.float_info.max
"""The score of an evaluation whose metric is not finite; no other score is lower."""


def check_metric(metric: str, method: str, scores: tuple[str, ...]) -> None:
    """Check that a task of ``method``, which measures ``scores``, can select by ``metric``."""
    if metric in (LOSS, *scores):
        return
    having = [name for name in OWN_METHODS if metric in find_method(name).entry.scores]
    remedy = f"change the method to {' or '.join(having)}" if having else "correct it"
    raise SpecError(
        f"metric {quoted(metric)} is not available with method {quoted(method)} (available: "
        f"{', '.join((LOSS, *scores))}). Remove the key to select by validation loss, or {remedy}."
    )


def check_metric_name(value: object) -> object:
    """Return ``value`` unchanged unless it is a function."""
    if is_function(value):
        raise ValueError(
            f"should be the name of what is measured at every evaluation, found a function ({quoted(value)}). Give it "
            "as select_by: it is called with prompt, reference and answer of each validation row, and scores finalists."
        )
    return value


def metric_notes(metric: str, method: str, configs: Iterable[JobConfig]) -> tuple[str, ...]:
    """Return a notice if jobs are compared by losses, or by metrics, of different scales."""
    entry = find_method(method).entry
    settings = [config.objective for config in configs]
    keys = tuple(entry.settings.model_fields) if metric == LOSS else entry.scaled_by.get(metric, ())
    if entry.generates:
        return ()
    differing = [key for key in keys if len({getattr(given, key) for given in settings}) > 1]
    if not differing:
        return ()
    what = "losses" if metric == LOSS else metric.replace("_", " ")
    others = [score for score in entry.scores if not set(entry.scaled_by.get(score, ())) & set(differing)]
    remedy = f"; metric: {others[0]} does not depend on it" if others else ""
    return (
        f"Jobs differ in {' and '.join(differing)}, and therefore in the scale of the {what} by which they are "
        f"compared{remedy}.",
    )


_GENERATED = "num_generations"
"""A setting that only methods with rewards have. Their loss is a negative reward, with one scale for all settings."""


def loss_scale(settings: Mapping[str, Any]) -> str:
    """Return text that identifies the scale of a job's loss: its method's settings. Only equal scales are comparable.

    Args:
        settings: The configuration of a job as in journals: one flat mapping with canonical keys.
    """
    if _GENERATED in settings:
        return ""
    of_method = sorted(settings.keys() - {*JOB_FIELDS})
    return ",".join(f"{key}={settings[key]}" for key in of_method if settings[key] is not None)


def score_of(metric: str, metrics: Mapping[str, Any]) -> float:
    """Return the score of an evaluation with ``metrics`` in a task that selects by ``metric``: higher is better.

    The score is always 0 if the task selects by the loss, so that the loss decides. A value that is not finite cannot
    be ordered, so it counts as the smallest number (:data:`LEAST_SCORE`).

    Raises:
        KeyError: ``metric`` was not measured.
    """
    if metric == LOSS:
        return 0.0
    value = float(metrics[metric])
    return value if math.isfinite(value) else LEAST_SCORE


def source_metric(source: str) -> str:
    """Return the name under which the validation loss on the rows of one mixture source is recorded."""
    return f"{_SOURCE_LOSS}{source}"


def source_of(metric: str) -> str | None:
    """Return the source whose loss ``metric`` is; None for any other metric."""
    return metric.removeprefix(_SOURCE_LOSS) if metric.startswith(_SOURCE_LOSS) else None


_WORDS = ("metric", "eval_accuracy")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_ONLY_OF: Mapping[str, tuple[ScorerName, ...]] = {
    "keys": ("json",),
    "pattern": ("regex",),
    "tolerance": ("numeric",),
    "tags": ("format",),
    "measure": ("similarity",),
    "ignore_case": ("exact", "contains", "regex"),
    "function": ("python",),
    "url": ("http",),
    "headers_env": ("http",),
}
SimilarityMeasure: TypeAlias = Literal["fuzzy_match", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"]

_NEEDED = ("pattern", "function", "url")
_OF_EVALUATIONS = {
    "num_rows": "name limit instead",
    "max_new_tokens": "name it beside the metric",
    "at": "leave it out",
}


class Scoring(SpecModel):
    """Settings that say how and when the jobs' answers to the validation rows are scored.

    Attributes:
        scorer: The check that an answer must pass. ``exact``: the generated text equals the row's reply, except for
            white space. ``contains``: it contains the reply. ``regex``: it matches a pattern. ``json``: it has the same
            JSON value as the reply. ``tool_call``: it has the reply's tool calls, with their names and arguments.
            ``numeric``: its last number equals the last number of the reply. ``exact_match``: ``numeric`` in GSM8K's
            form, where the number is the final answer ``#### N``. ``format``: it consists of tags in a given order,
            each once, with any content; the reply is not compared. ``similarity``: the score is its similarity to the
            reply, from 0 to 1. ``multiple_choice``: among the distinct replies of the validation rows (at most 26), the
            row's own reply is the most likely; nothing is generated. ``python``: your function scores each generated
            text. ``http``: a server scores it, for example with a language model.
        keys: For ``json``: compare only these keys of an object; ``a.b`` is ``b`` in the object ``a``. None compares
            the whole value.
        pattern: For ``regex``: a Python regular expression that is searched for in the generated text. If it has a
            group, the text of its first group must be the same as in the row's reply.
        tolerance: For ``numeric``: largest difference of two numbers that count as equal.
        tags: For ``format``: names of the tags; the default is ``<think>…</think><answer>…</answer>``. Only white space
            may be before, between and after them.
        measure: For ``similarity``: twice the size of the common part of both texts, divided by the sum of their sizes.
            The common part is their longest common subsequence of characters (``fuzzy_match``) or of words
            (``rouge_l``), or their common word n-grams (``rouge_1`` to ``rouge_5``).
        ignore_case: For ``exact``, ``contains`` and ``regex``: ignore the case of letters.
        function: For ``python``: the function's dotted name, ``package.module:function`` or
            ``package.module.function``; in Python also the function itself, if it can be imported by that name. It is
            called with the keyword arguments ``prompt``, ``reference`` and ``answer``, all text, and returns a
            number from -1e100 to 1e100; higher is better. It runs in the training process, with all its rights.
        url: For ``http``: the address to which ``{"rows": [{"prompt", "reference", "answer"}, …]}`` is posted as JSON.
            The response is ``{"scores": […]}``, a finite number for each row; higher is better.
        headers_env: For ``http``: the name of an environment variable that holds further request headers as a JSON
            object, such as ``{"Authorization": "Bearer …"}``. Only the name is written to the run.
        rows_per_request: For ``http``: number of rows in one request.
        timeout_s: Maximum seconds for one request (``http``), or for the call for one row (``python``). A request that
            fails is retried twice.
        num_rows: Number of validation rows to score: the first ones that can be scored. None scores all.
        max_new_tokens: Maximum length of a generated text, in tokens.
        at: ``finalists``: the best ``num_finalists`` jobs are scored when training has ended. A list of shares, each a
            rung of ``early_exit``: the jobs that compete at these rungs are scored too, and these rungs rank by the
            scores.

    Raises:
        SpecError: A value is out of bounds, or does not belong to the scorer.
        UnknownKeyError: A key is not one of the above.
    """

    scorer: ScorerName = Field(description="what scores the answers")
    keys: tuple[str, ...] | None = Field(default=None, description="keys of JSON objects that are compared")
    pattern: str | None = Field(default=None, min_length=1, description="regular expression of a right answer")
    tolerance: float = Field(default=0.0, ge=0, description="largest difference of numbers that count as equal")
    tags: tuple[str, ...] = Field(default=("think", "answer"), description="tags of an answer, in order")
    measure: SimilarityMeasure = Field(default="fuzzy_match", description="what texts have in common")
    ignore_case: bool = Field(default=False, description="ignore the case of letters")
    function: str | None = Field(default=None, min_length=1, description="dotted name of a Python function")
    url: str | None = Field(default=None, min_length=1, description="address of an HTTP scorer")
    headers_env: str | None = Field(default=None, description="environment variable with further headers")
    rows_per_request: int = Field(default=16, ge=1, le=10_000, description="number of rows in one request")
    timeout_s: float = Field(default=30.0, gt=0, le=3600, description="maximum seconds for one request or call")
    num_rows: int | None = Field(default=None, ge=1, le=10**9, description="number of rows that are scored")
    max_new_tokens: int = Field(default=512, ge=1, le=2**17, description="maximum number of tokens in a generated text")
    at: Literal["finalists"] | tuple[float, ...] = Field(default="finalists", description="when jobs are scored")

    @field_validator("at", mode="before")
    @classmethod
    def _check_at(cls, at: object) -> object:
        rungs = plain(at)
        if rungs == "finalists":
            return rungs
        is_list = isinstance(rungs, tuple) and bool(rungs)
        if not is_list or not all(isinstance(rung, float) and 0 < rung < 1 for rung in rungs):
            raise ValueError(
                f"should be 'finalists', or a list of rungs (shares of the steps above 0 and below 1), found "
                f"{quoted(at)}. For example: [0.1, 0.25]."
            )
        if any(later <= earlier for earlier, later in itertools.pairwise(rungs)):
            raise ValueError(f"should be in increasing order, found {quoted(at)}. Sort the rungs and give each once.")
        return rungs

    @field_validator("keys", mode="before")
    @classmethod
    def _check_keys(cls, keys: object) -> object:
        found = plain(keys)
        is_list = isinstance(found, tuple) and bool(found) and all(isinstance(key, str) and key for key in found)
        if keys is not None and not is_list:
            raise ValueError(
                f"should be a list of keys of JSON objects, found {quoted(keys)}. For example: [total, buyer.name]."
            )
        return found

    @field_validator("tags", mode="before")
    @classmethod
    def _check_tags(cls, tags: object) -> object:
        found = plain(tags)
        is_list = isinstance(found, tuple) and bool(found) and all(isinstance(tag, str) for tag in found)
        if not is_list or len(set(found)) < len(found) or not all(map(_TAG.fullmatch, found)):
            raise ValueError(
                f"should be a list of different names of tags, found {quoted(tags)}. For example: [think, answer]."
            )
        return found

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"should be a regular expression of Python, found {quoted(pattern)} ({error}). Correct it."
            ) from None
        return pattern

    @field_validator("function", mode="before")
    @classmethod
    def _name_function(cls, function: object) -> object:
        return name_of(function) if is_function(function) else function

    @field_validator("function")
    @classmethod
    def _check_function(cls, name: str | None) -> str | None:
        if name is not None:
            module, separator, function = name.partition(":") if ":" in name else name.rpartition(".")
            parts = [*module.split("."), *function.split(".")]
            if not separator or not all(part.isidentifier() for part in parts):
                raise ValueError(
                    f"should be the dotted name of a function in a module, found {quoted(name)}. For example: "
                    "my_package.scoring:score."
                )
        return name

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
        except ValueError:
            is_address = False
        if not is_address or not url.isprintable() or " " in url:
            raise ValueError(
                "should be an address that begins with http:// or https://, found a different address. For "
                "example: https://judge.example/score."
            )
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                "should be an address without a user name and a password, found one with them, which would be written "
                "to the run. Put them into a header, and name its environment variable with headers_env."
            )
        return url

    @field_validator("headers_env")
    @classmethod
    def _check_headers_env(cls, name: str | None) -> str | None:
        if name is not None and _VARIABLE.fullmatch(name) is None:
            # The text may be the secret itself, so the message does not repeat it.
            raise ValueError(
                "should be the name of an environment variable, found other text. Put the headers into a variable as "
                "a JSON object, and give the variable's name here."
            )
        return name

    @model_validator(mode="after")
    def _check_fits_scorer(self) -> Scoring:
        for key, scorers in _ONLY_OF.items():
            if getattr(self, key) != type(self).model_fields[key].default and self.scorer not in scorers:
                expected = " or ".join(map(repr, scorers))
                raise ValueError(
                    f"{key}: expected it with scorer {expected} only, found {self.scorer!r}. Remove it, or change the "
                    "scorer."
                )
        for key in _NEEDED:
            if getattr(self, key) is None and self.scorer in _ONLY_OF[key]:
                raise ValueError(f"{key} is missing: expected it with scorer {self.scorer!r}. Add the key {key!r}.")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as values that YAML and JSON can hold."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def rungs(self) -> tuple[float, ...]:
        """The rungs at which jobs are scored, as shares of their steps."""
        return () if isinstance(self.at, str) else self.at

    def is_at(self, progress: float) -> bool:
        """Return whether jobs are scored at the rung at the share ``progress`` of their steps."""
        return any(math.isclose(rung, progress, rel_tol=1e-9) for rung in self.rungs)

    @property
    def address(self) -> str:
        """``url`` for messages, without its query and fragment, which may hold a secret."""
        return (self.url or "").partition("?")[0].partition("#")[0]

    @property
    def reaches_outside(self) -> bool:
        """Whether the scorer runs Python code, or sends rows to a server, that the task names."""
        return self.scorer in ("python", "http")


def parse_select_by(value: object) -> str | Scoring:
    """Parse ``select_by`` of a task: a word, a mapping of settings, or a function that becomes a Python scorer.

    Raises:
        SpecError, UnknownKeyError: ``value`` is none of these; or see :class:`Scoring`.
    """
    if isinstance(value, str) and value in _WORDS:
        return value
    return _parsed(value, "select_by", "'metric', 'eval_accuracy' or a mapping of settings")


def parse_metric(value: object) -> str | Scoring:
    """Parse the metric of an evaluation.

    Args:
        value: A word of :data:`alto.records.Metric`, a mapping of a scorer's settings, or a function that becomes a
            Python scorer.

    Raises:
        SpecError, UnknownKeyError: ``value`` is none of these, or has a setting that is an option of the evaluation
            itself; or see :class:`Scoring`.
    """
    if isinstance(value, str) and value in get_args(Metric):
        return parsed(Scoring, {"scorer": value}, "metric", example="") if value in get_args(ScorerName) else value
    found = _parsed(value, "metric", f"one of {', '.join(get_args(Metric))}, or a mapping of settings")
    for key, option in _OF_EVALUATIONS.items():
        if key in found.model_fields_set:
            raise SpecError(f"metric.{key}: expected only settings of the scorer, found {key}; {option}")
    return found


def parse_reward_funcs(value: object) -> tuple[Scoring, ...]:
    """Parse ``reward_funcs`` of a task: one reward or several, each the name of a scorer, a mapping of its settings,
    ``module:function``, or a function.

    Raises:
        SpecError, UnknownKeyError: ``value`` is none of these, or has a setting that has no meaning for a reward; or
            see :class:`Scoring`.
    """
    rewards = value if isinstance(value, list | tuple) else [value]
    return tuple(map(_reward, rewards))


def _reward(value: object) -> Scoring:
    if isinstance(value, str):
        value = {"scorer": value} if value in get_args(ScorerName) else {"scorer": "python", "function": value}
    found = _parsed(value, "reward_funcs", "scorers, mappings of their settings, or functions")
    if found.scorer == "multiple_choice":
        raise SpecError(
            "reward_funcs: expected scorers of generated text, found multiple_choice, which generates none. Use "
            "another scorer."
        )
    for key in _OF_EVALUATIONS:
        if key in found.model_fields_set:
            raise SpecError(f"reward_funcs.{key}: expected only settings of the scorer, found {key}. Remove it.")
    return found


def _parsed(value: object, key: str, expected: str) -> Scoring:
    if is_function(value):
        value = {"scorer": "python", "function": value}
    return (
        value
        if isinstance(value, Scoring)
        else parsed(Scoring, value, key, example="{scorer: exact}", expected=expected)
    )
