"""The search of a task: how configurations are chosen, the budget for them, and the jobs of a search space."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal

from pydantic import Field, model_validator

from alto.spec.job_config import JobConfig
from alto.spec.search_space import Axis, Sampled, SearchSpace
from alto.spec.validation import SpecModel, parsed

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
        algorithm: ``grid`` trains every configuration of the search space. ``random`` trains some of them, drawn with
            the task's ``data_seed``. ``tpe`` begins with random configurations; then Optuna's tree-structured Parzen
            estimator suggests one for each free slot, from the losses so far. ``pbt`` trains a population: at every
            ``interval``, copies of the best jobs with changed settings replace the worst jobs.
        budget: Limits on what the search may spend; the default is no limit. Without ``budget.jobs``, ``random`` tries
            half as many configurations as the search space has; so does ``tpe`` if its budget has no other limit.
        num_initial_jobs: Number of jobs that begin with the task: for ``tpe``, those before it learns (default 10, and
            at most half of all); for ``pbt``, the population (default 12).
        usual_learning_rate: With ``tpe``, three out of four initial jobs have a learning rate near this value, if the
            search space has a logarithmic range that contains it. The default is the usual value for the base model; it
            is written into the run's task when the model is loaded.
        interval: Share of the steps between two exchanges of a population (``pbt``).
        exchanged: Share of the population that is replaced at each exchange (``pbt``).

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
                f"num_initial_jobs: expected algorithm tpe or pbt with this key, found {self.algorithm!r}, which "
                "creates all jobs at the start of the task. Remove the key, or set budget.jobs."
            )
        if self.usual_learning_rate is not None and self.algorithm != "tpe":
            raise ValueError(
                f"usual_learning_rate: expected algorithm tpe with this key, found {self.algorithm!r}, which draws "
                "from the whole range. Remove the key, or set algorithm to tpe."
            )
        if self.budget.jobs is not None and self.algorithm == "grid":
            raise ValueError(
                "budget.jobs: expected an algorithm other than grid with this key, because grid trains all "
                "configurations. Set algorithm to random or tpe, or limit samples or duration_s."
            )
        return self

    @classmethod
    def parse(cls, value: object) -> Search:
        """Parse ``search`` of a task: a mapping of settings, or the name of an algorithm."""
        if isinstance(value, Search):
            return value
        if isinstance(value, str):
            value = {"algorithm": value}
        if isinstance(value, Mapping) and not isinstance(value.get("budget", Budget()), Budget):
            value = {**value, "budget": parsed(Budget, value["budget"], "search.budget", example="{duration_s: 3600}")}
        return parsed(cls, value, "search", example="{algorithm: tpe}")

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


# Usual learning rates: published good values, the search space ``auto`` around them, and samples near them.
#
# Sources: J. Schulman and Thinking Machines Lab, "LoRA Without Regret" (2025), and the recipe of their Tinker cookbook:
# with adapters on all layers and ``lora_alpha`` 32, the best learning rate is about ten times that of full fine-tuning,
# hardly depends on the rank, and falls with the hidden size as ``5e-4 * (2000 / hidden_size) ** 0.781``, fitted on
# Llama models. In the cookbook's later sweeps, the best rate of all 34 models, with hidden sizes of 2,048 to more than
# 8,192, is between 3e-4 and 1e-3. It hardly falls further with size, so the usual rate is never below 3e-4.
# arXiv:2602.06204 derives why the rank hardly matters: with ``lora_alpha`` fixed, the scale falls as ``1 / r`` and the
# best rate does not change with the rank; with ``lora_alpha`` proportional to the rank, the best rate falls as ``1 /
# r``. Methods that learn which replies are better use a tenth of the rate: TRL's examples of DPO with LoRA train at
# 5e-6 to 5e-5.

AUTO = "auto"

_REFERENCE_RATE, _REFERENCE_SIZE, _EXPONENT = 5e-4, 2000, 0.781
_LEAST_RATE = 3e-4
_PREFERENCE_FACTOR = 0.1
_FACTOR = 5.0
_RANKS = (8, 16, 32, 64)
_BATCH_SIZES = (2, 4, 8)
_LORA_ALPHA = 32
_NUM_RATES = 5
_SPREAD = 3.0
"""Factor that is one standard deviation of the first learning rates of a search, in the logarithm."""
_UNMOVED = 4
"""Every fourth of these rates stays uniform over the whole range, so that an unusual optimum is still found."""
_LEAST_QUANTILE = 1e-9


def usual_learning_rate(hidden_size: int, *, compares_replies: bool = False) -> float:
    """Return the learning rate that is usually good for a base model of ``hidden_size``, for any rank."""
    rate = max(_LEAST_RATE, _REFERENCE_RATE * math.pow(_REFERENCE_SIZE / hidden_size, _EXPONENT))
    return _PREFERENCE_FACTOR * rate if compares_replies else rate


def auto_space(
    hidden_size: int | None = None,
    fixed: Collection[str] = (),
    *,
    compares_replies: bool = False,
    completions_per_row: int = 1,
) -> SearchSpace:
    """Return learning rates up to five times above and below the usual one, with ranks and batch sizes.

    Args:
        hidden_size: Hidden size of the base model. None means that it is not known yet; the ranges for 2,000 are used.
        fixed: Fields that the task sets for all jobs; they do not vary.
        completions_per_row: Completions that jobs generate for a row; batch sizes are multiples of it.
    """
    usual = usual_learning_rate(hidden_size or _REFERENCE_SIZE, compares_replies=compares_replies)
    # Rounded, because it is written into files.
    least, most = (float(f"{rate:.3g}") for rate in (usual / _FACTOR, usual * _FACTOR))
    rates = Sampled(min=least, max=most, log=True, num=_NUM_RATES, is_integer=False)
    axes = (
        Axis(key="learning_rate", values=rates),
        Axis(key="r", values=_RANKS),
        Axis(key="per_device_train_batch_size", values=tuple(size * completions_per_row for size in _BATCH_SIZES)),
        Axis(key="lora_alpha", values=(_LORA_ALPHA,)),
    )
    groups = tuple((axis,) for axis in axes if axis.key not in fixed)
    return SearchSpace(groups=groups, is_auto=hidden_size is None)


def near_usual_rate(drawn: Sequence[dict[str, Any]], space: SearchSpace, rate: float) -> list[dict[str, Any]]:
    """Return the configurations ``drawn`` with the learning rate of three out of four moved near ``rate``.

    The uniform samples are mapped to a log-normal distribution around ``rate``, truncated to the range. All other
    values stay. Nothing changes unless the learning rate has a logarithmic range of its own that contains ``rate``.
    """
    given = next((group[0].values for group in space.groups if [axis.key for axis in group] == ["learning_rate"]), None)
    if not isinstance(given, Sampled) or not given.log or not given.min <= rate <= given.max:
        return list(drawn)
    least_rate, most_rate = given.min, given.max
    if most_rate < _SPREAD * least_rate:
        return list(drawn)  # every rate in the range is near
    low, high = math.log(least_rate), math.log(most_rate)
    near = NormalDist(math.log(rate), math.log(_SPREAD))
    least, most = near.cdf(low), near.cdf(high)

    def moved(configuration: Mapping[str, Any]) -> dict[str, Any]:
        quantile = (math.log(configuration["learning_rate"]) - low) / (high - low)
        quantile = min(max(least + (most - least) * quantile, _LEAST_QUANTILE), 1 - _LEAST_QUANTILE)
        found = math.exp(near.inv_cdf(quantile))
        return {**configuration, "learning_rate": min(max(found, least_rate), most_rate)}

    return [one if number % _UNMOVED == 0 else moved(one) for number, one in enumerate(drawn, start=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One configuration of a task's search space: one adapter to be trained.

    Attributes:
        values: The fields that the search space sets: canonical names to values as written there. Empty for a job that
            does not come from the search space.
    """

    id: str
    config: JobConfig
    values: Mapping[str, Any] = field(default_factory=dict, compare=False)


def first_configurations(search: Search, space: SearchSpace, seed: int) -> list[dict[str, Any]]:
    """Return the configurations that the jobs of a task begin with, in the form of :meth:`SearchSpace.expand`."""
    is_grid = search.algorithm == "grid"
    found = list(space.expand(seed)) if is_grid else space.sample(search.num_initial(space), seed)
    rate = search.usual_learning_rate
    return found if rate is None else near_usual_rate(found, space, rate)


def repetitions(jobs: Sequence[Job]) -> dict[str, str]:
    """Map each of ``jobs`` to the first of those that differ from it only in their seed, both by id.

    Jobs whose configuration is not repeated are left out.
    """
    first: dict[JobConfig, str] = {}
    found = {job.id: first.setdefault(job.config.replace(seed=0), job.id) for job in jobs}
    repeated = {name for job, name in found.items() if job != name}
    return {job: name for job, name in found.items() if name in repeated}
