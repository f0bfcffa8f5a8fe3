"""Expansion of a task's search space into jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alto.errors import SpecError, UnknownKeyError
from alto.spec.auto_space import near_usual_rate
from alto.spec.job_config import JobConfig
from alto.spec.method import Method
from alto.spec.mixture import MIXTURE_WEIGHTS, MixtureSource, ordered
from alto.spec.search import Search
from alto.spec.search_space import SearchSpace, written

__all__ = ["Expansion", "Job"]


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
