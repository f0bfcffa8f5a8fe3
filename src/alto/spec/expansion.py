"""Expansion of a task's search space into jobs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from alto.errors import SpecError, UnknownKeyError
from alto.spec.job_config import JobConfig
from alto.spec.method import Method
from alto.spec.mixture import MIXTURE_WEIGHTS, MixtureSource, ordered
from alto.spec.search import Search
from alto.spec.search_space import Axis, Sampled, SearchSpace, written

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
_SHARE_OF_PREFERENCES = 0.1
_FACTOR = 5.0
_RANKS = (8, 16, 32, 64)
_BATCH_SIZES = (2, 4, 8)
_LORA_ALPHA = 32
_NUM_RATES = 5
_SPREAD = 3.0
"""Factor that is one standard deviation of the first learning rates of a search, in the logarithm."""
_UNMOVED = 4
"""Every fourth of these rates stays uniform over the whole range, so that an unusual optimum is still found."""
_LEAST_SHARE = 1e-9


def usual_learning_rate(hidden_size: int, *, compares_replies: bool = False) -> float:
    """Return the learning rate that is usually good for a base model of ``hidden_size``, for any rank.

    Args:
        compares_replies: Whether the method learns which replies are better.
    """
    rate = max(_LEAST_RATE, _REFERENCE_RATE * math.pow(_REFERENCE_SIZE / hidden_size, _EXPONENT))
    return _SHARE_OF_PREFERENCES * rate if compares_replies else rate


def auto_space(
    hidden_size: int | None = None, fixed: Collection[str] = (), *, compares_replies: bool = False
) -> SearchSpace:
    """Return learning rates up to five times above and below the usual one, with ranks and batch sizes.

    Args:
        hidden_size: Hidden size of the base model. None means that it is not known yet; the ranges for 2,000 are used.
        fixed: Fields that the task sets for all jobs; they do not vary.
        compares_replies: Whether the method learns which replies are better.
    """
    usual = usual_learning_rate(hidden_size or _REFERENCE_SIZE, compares_replies=compares_replies)
    # Rounded, because it is written into files.
    least, most = (float(f"{rate:.3g}") for rate in (usual / _FACTOR, usual * _FACTOR))
    rates = Sampled(min=least, max=most, log=True, num=_NUM_RATES, is_integer=False)
    axes = (
        Axis(key="learning_rate", values=rates),
        Axis(key="r", values=_RANKS),
        Axis(key="per_device_train_batch_size", values=_BATCH_SIZES),
        Axis(key="lora_alpha", values=(_LORA_ALPHA,)),
    )
    groups = tuple((axis,) for axis in axes if axis.key not in fixed)
    return SearchSpace(groups=groups, is_auto=hidden_size is None)


def near_usual_rate(drawn: Sequence[dict[str, Any]], space: SearchSpace, rate: float) -> list[dict[str, Any]]:
    """Return the configurations ``drawn`` with the learning rate of three out of four moved near ``rate``.

    The uniform samples are mapped to a log-normal distribution around ``rate``, truncated to the range. All other
    values stay. Nothing changes unless the learning rate has a logarithmic range of its own that contains ``rate``.

    Args:
        drawn: Configurations drawn by :meth:`SearchSpace.sample`.
        space: The search space they were drawn from.
        rate: The usual learning rate for the base model.
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
        share = (math.log(configuration["learning_rate"]) - low) / (high - low)
        share = min(max(least + (most - least) * share, _LEAST_SHARE), 1 - _LEAST_SHARE)
        found = math.exp(near.inv_cdf(share))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """The parts of a task that decide its jobs.

    Attributes:
        search: How configurations are chosen in the search space.
        data_seed: Seed of the values sampled from the search space.
        fixed: Fields that are the same for every job, by canonical names.
        sources: Sources of a mixture; empty if there is only one dataset.
    """

    space: SearchSpace
    search: Search
    data_seed: int
    fixed: Mapping[str, Any] = field(compare=False)  # as written; equal tasks may be written differently
    sources: Sequence[MixtureSource]
    method: Method

    def jobs(self) -> tuple[Job, ...]:
        """Return the jobs that the task begins with.

        Raises:
            SpecError: A configuration is not valid, or two jobs have the same configuration.
        """
        num_jobs = self.search.num_initial(self.space)
        is_grid = self.search.algorithm == "grid"
        configurations = self.space.expand(self.data_seed) if is_grid else self.space.sample(num_jobs, self.data_seed)
        if self.search.usual_learning_rate is not None:
            configurations = near_usual_rate(list(configurations), self.space, self.search.usual_learning_rate)
        digits = max(3, len(str(num_jobs - 1)))
        first_with: dict[JobConfig, str] = {}
        jobs = []
        for index, varied in enumerate(configurations):
            job_id = f"job-{index:0{digits}d}"
            try:
                config = self.config({**self.fixed, **varied})
            except UnknownKeyError:
                raise  # the error is the same for every job
            except SpecError as error:
                place = f"{job_id} ({_shown(varied)})" if varied else job_id
                raise SpecError(f"In {place}: {error}") from None
            other = first_with.setdefault(config, job_id)
            if other != job_id:
                raise SpecError(
                    f"search_space should make every job different, found that {other} and {job_id} are equal "
                    f"({_shown(varied)}). Remove one of the equivalent values."
                )
            jobs.append(Job(id=job_id, config=config, values=varied))
        return tuple(jobs)

    def repetitions(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Map each job of a grid to the first of the jobs that differ from it only in their seed, both by id.

        Jobs whose configuration is not repeated are left out.
        """
        if self.search.algorithm != "grid" or "seed" not in self.space.varied:
            return {}
        first: dict[JobConfig, str] = {}
        found = {job.id: first.setdefault(job.config.replace(seed=0), job.id) for job in jobs}
        repeated = {name for job, name in found.items() if job != name}
        return {job: name for job, name in found.items() if name in repeated}

    def check_suggestions(self) -> None:
        """Check configurations that the search may choose later: those of listed values and of both ends of ranges.

        Raises:
            SpecError: A configuration is not valid.
        """
        if self.search.algorithm != "tpe":
            return
        for varied in self.space.extremes(self.data_seed):
            try:
                self.config({**self.fixed, **varied})
            except SpecError as error:
                raise SpecError(
                    "search_space should have only configurations that a job can have, because search "
                    f"{self.search.algorithm!r} may choose any of them, found {_shown(varied)}: {error}"
                ) from None

    def config(self, values: Mapping[str, Any]) -> JobConfig:
        """Return the configuration of a job from one flat mapping. In a mixture, the sources' weights are the default.

        Raises:
            SpecError: The configuration is not valid.
        """
        if self.sources and values.get(MIXTURE_WEIGHTS) is None:
            values = {**values, MIXTURE_WEIGHTS: {source.name: source.weight for source in self.sources}}
        config = JobConfig.of(self.method, values)
        if config.mixture_weights is None:
            return config
        weights = ordered(config.mixture_weights, self.sources)
        return config if weights == config.mixture_weights else config.replace(**{MIXTURE_WEIGHTS: dict(weights)})


def _shown(varied: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={written(key, value)}" for key, value in varied.items())
