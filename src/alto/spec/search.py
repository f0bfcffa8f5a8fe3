"""The search of a task: how configurations are chosen, and the budget for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from alto.base import quoted
from alto.errors import SpecError
from alto.spec.keys import canonical_keys
from alto.spec.search_space import SearchSpace
from alto.spec.validation import SpecModel

_NUM_STARTUP = 10
_POPULATION = 12


class Budget(SpecModel):
    """Limits on what a search may spend; if several are given, all apply.

    Training the leading job to its end is reserved first. Once that needs all the remaining budget, the other jobs end
    with the reason ``budget``.

    Attributes:
        jobs: Number of configurations, including those that begin with the task.
        samples: Number of training rows of all jobs, counting repeats.
        duration_s: Seconds of training and evaluation, including those before an interruption.
        cost: Money, in the currency of ``gpu_hour_price``.
        gpu_hour_price: Price of an hour of one GPU; only together with ``cost``.

    Raises:
        SpecError: A value is out of bounds, or only one of ``cost`` and ``gpu_hour_price`` is given.
        UnknownKeyError: A key is not one of the above.
    """

    jobs: int | None = Field(default=None, ge=1, le=10_000, description="configurations")
    samples: int | None = Field(default=None, ge=1, le=10**12, description="number of training rows of all jobs")
    duration_s: float | None = Field(default=None, gt=0, le=10**8, description="seconds")
    cost: float | None = Field(default=None, gt=0, le=10**9, description="money")
    gpu_hour_price: float | None = Field(default=None, gt=0, le=10**6, description="price of an hour of one GPU")

    @model_validator(mode="after")
    def _check_cost(self) -> Budget:
        if (self.cost is None) != (self.gpu_hour_price is None):
            given = "cost" if self.gpu_hour_price is None else "gpu_hour_price"
            raise ValueError(
                f"cost: expected both cost and gpu_hour_price, found only {given}. Add the other, or set duration_s."
            )
        return self

    def max_duration_s(self, num_gpus: int) -> float | None:
        """Return the seconds that a task on ``num_gpus`` GPUs may take; None means no limit."""
        limits = [] if self.duration_s is None else [self.duration_s]
        if self.cost is not None and self.gpu_hour_price is not None:
            limits.append(3600 * self.cost / (self.gpu_hour_price * num_gpus))
        return min(limits, default=None)


class Search(SpecModel):
    """The settings that say how the configurations of a task are chosen.

    Attributes:
        algorithm: ``grid`` trains every configuration of the search space; ``random`` some of them, drawn with the
            task's ``data_seed``; ``tpe`` begins with random ones and fills each slot that becomes free with a
            configuration that Optuna's tree-structured Parzen estimator suggests from the losses so far; ``pbt`` trains
            a population: at every ``interval`` the worst jobs continue with the weights of better ones and changed
            settings.
        budget: Limits on what the search may spend; the default is no limit. Without ``budget.jobs``, ``random`` tries
            half as many configurations as the search space has; so does ``tpe`` if its budget has no other limit.
        num_initial_jobs: Number of jobs that begin with the task: for ``tpe``, those before it learns (default 10, and
            at most half of all); for ``pbt``, the population (default 12).
        usual_learning_rate: With ``tpe``, three out of four initial jobs have a learning rate near this value, if the
            search space has a logarithmic range that contains it. The default is the usual value for the base model; it
            is written into the run's task when the model is loaded.
        interval: Share of their steps between two exchanges of a population (``pbt``).
        exchanged: Share of the population that is exchanged each time (``pbt``).

    Raises:
        SpecError: A value is out of bounds, or does not belong to the algorithm.
        UnknownKeyError: A key is not one of the above.
    """

    algorithm: Literal["grid", "random", "tpe", "pbt"] = Field(
        default="grid", description="how configurations are chosen"
    )
    budget: Budget = Field(default=Budget(), description="what may be spent")
    num_initial_jobs: int | None = Field(
        default=None, ge=2, le=10_000, description="number of jobs that begin with the task"
    )
    usual_learning_rate: float | None = Field(
        default=None, gt=0, le=1, description="learning rate near which a search begins"
    )
    interval: float = Field(default=0.1, ge=0.01, le=0.5, description="share of the steps between two exchanges")
    exchanged: float = Field(default=0.25, gt=0, le=0.5, description="share of the population that is exchanged")

    @model_validator(mode="after")
    def _check_fits_algorithm(self) -> Search:
        if self.num_initial_jobs is not None and self.algorithm not in ("tpe", "pbt"):
            raise ValueError(
                f"num_initial_jobs: expected it with algorithm tpe or pbt, found {self.algorithm!r}, whose jobs all "
                "begin with the task. Remove it, or set budget.jobs."
            )
        if self.usual_learning_rate is not None and self.algorithm != "tpe":
            raise ValueError(
                f"usual_learning_rate: expected it with algorithm tpe, found {self.algorithm!r}, which draws from the "
                "whole range. Remove it, or set algorithm to tpe."
            )
        if self.budget.jobs is not None and self.algorithm == "grid":
            raise ValueError(
                "budget.jobs: expected it with an algorithm other than 'grid', which trains all configurations. Set "
                "algorithm to random or tpe, or limit samples or duration_s."
            )
        return self

    @classmethod
    def parse(cls, value: object) -> Search:
        """Parse ``search`` of a task: a mapping of settings, or the name of an algorithm.

        Raises:
            SpecError, UnknownKeyError: See the constructor.
        """
        if isinstance(value, Search):
            return value
        if isinstance(value, str):
            value = {"algorithm": value}
        settings = _mapping(value, "search", cls.model_fields, "{algorithm: tpe}")
        if "budget" in settings and not isinstance(settings["budget"], Budget):
            given = _mapping(settings["budget"], "search.budget", Budget.model_fields, "{duration_s: 3600}")
            settings["budget"] = _built(Budget, given, "search.budget")
        found: Search = _built(cls, settings, "search")
        return found

    @property
    def learns(self) -> bool:
        """Whether jobs are added while the task runs."""
        return self.algorithm in ("tpe", "pbt")

    def num_initial(self, space: SearchSpace) -> int:
        """Return the number of jobs that begin with the task."""
        if self.algorithm == "grid":
            return len(space)
        if self.algorithm == "pbt":
            return min(self.num_initial_jobs or _POPULATION, space.num_distinct)
        most = self.max_jobs(space)
        if self.algorithm == "random":
            return most
        return min(self.num_initial_jobs or min(_NUM_STARTUP, max(2, most // 2)), most)

    def max_jobs(self, space: SearchSpace) -> int:
        """Return the largest number of configurations tried; jobs of a population that continue others do not count."""
        if self.algorithm in ("grid", "pbt"):
            return self.num_initial(space)
        if self.budget.jobs is not None:
            return min(self.budget.jobs, space.num_distinct)
        is_limited = self.budget.samples is not None or self.budget.max_duration_s(1) is not None
        if self.algorithm == "tpe" and is_limited:
            return space.num_distinct
        return min(max(2, -(-len(space) // 2)), space.num_distinct)


def _mapping(value: object, where: str, fields: Mapping[str, Any], example: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise SpecError(f"{where} should be a mapping of settings, found {quoted(value)}. Write for example {example}.")
    return canonical_keys(value, fields=fields, aliases={}, where=where)


def _built(kind: type[Any], settings: Mapping[str, Any], where: str) -> Any:
    try:
        return kind(**settings)
    except SpecError as error:
        if type(error) is SpecError:
            raise SpecError(f"{where}.{error}") from None
        raise
