"""Completions that jobs sample from their own adapters, their rewards, and the rows that a step trains on.

Everything that a job samples depends only on its own seed, step, prompts and adapter, so a resumed run samples the same
completions, and other jobs change none.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from alto.backbone import Backbone
from alto.data import IGNORED, Advantage, EncodedDataset, EvaluationSplit
from alto.evaluation import (
    Adapters,
    Answer,
    Completion,
    Sampling,
    ScorerFailedError,
    Text,
    budget_of,
    max_positions,
    uniform_numbers,
    write,
)
from alto.executor.context import JobState, TaskContext
from alto.executor.forward_plan import Passes
from alto.executor.init_adapter import Within
from alto.executor.micro_batches import JobFailedError
from alto.executor.tally import Evaluated
from alto.kernels import TokenSchedule
from alto.lora import adapter_scale
from alto.records import ShownAnswer
from alto.spec import LOSS, GrpoSettings, JobConfig

_TOKENS_PER_TRAINED = 16
"""Tokens of a batch in generation, relative to the largest micro-batch in training. Generation keeps only keys and
values in memory."""

_SHOWN_ANSWERS, _SHOWN_CHARACTERS = 3, 500
"""Answers of an evaluation that are kept for the user, and characters of each text."""

_EPSILON = 1e-4
"""Added to the standard deviation of rewards, as in TRL."""


_Found = TypeVar("_Found")


class RewardFailedError(JobFailedError):
    """Internal signal: a reward failed for the completions of the job in ``slot``."""

    def __init__(self, slot: int, reason: str) -> None:
        super().__init__(slot, reward=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The completions of a job in one step.

    Attributes:
        dataset: The completions that have a gradient; may be empty.
        metrics: ``reward``, ``completion_tokens`` (with the end token), ``truncated`` (share of completions that did
            not end) and ``entropy`` (of the tokens' distribution, nats per token) are means over the completions of the
            first prompts. ``equal_groups`` is the share of the final prompts whose completions all have the same
            reward.
    """

    dataset: EncodedDataset
    metrics: Mapping[str, float]


class Rollouts:
    """Samples and scores completions for the jobs in a bank, on a single rank."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._known: dict[JobState, tuple[int, Rollout | str]] = {}  # or why a reward failed
        self._evaluated: dict[JobState, tuple[object, Evaluated | str]] = {}
        self._fitting_tokens: int | None = None  # of a batch, once memory has run out

    def of_step(self, jobs: Sequence[JobState]) -> Mapping[JobState, Rollout]:
        """Return the completions of the next step of each of ``jobs``, all sampled in shared batches; a second call for
        the same step returns the same objects.

        Raises:
            RewardFailedError: A reward failed for a job; for the others, the next call does not sample again.
            DeviceMemoryError: Memory is too small for a single completion.
        """
        self._known = {job: self._known[job] for job in jobs if job in self._known}
        missing = [job for job in jobs if job not in self._known or self._known[job][0] != job.step]
        drawn = self.sample(missing)
        failures: dict[JobState, str] = {}
        rewards = {job: scores for job in missing if (scores := self._scores(job, drawn[job], failures))}
        metrics = {job: drawn[job].metrics(rewards[job]) for job in rewards}
        self._draw_others(drawn, rewards, failures)
        for job in missing:
            found = drawn[job].rollout(rewards[job], job, metrics[job]) if job in rewards else failures[job]
            self._known[job] = (job.step, found)
        return self._unless_failed(jobs, {job: self._known[job][1] for job in jobs})

    def _draw_others(
        self, drawn: Mapping[JobState, Sampled], rewards: dict[JobState, list[float]], failures: dict[JobState, str]
    ) -> None:
        """Replace prompts whose completions all have the same reward, as often as a job's ``dynamic_sampling``
        allows. Jobs for which a reward fails move from ``rewards`` to ``failures``."""
        for attempt in itertools.count(1):
            others = {
                (job, group): other
                for job, of_job in rewards.items()
                for group, other in drawn[job].other_prompts(of_job, job, attempt, self._passes.backbone).items()
            }
            if not others:
                return
            self._write([text for other in others.values() for text in other.texts], list(drawn))
            for (job, group), other in others.items():
                if job in rewards and (scores := self._scores(job, other, failures)):
                    drawn[job].replace(group, other, rewards[job], scores)
                else:
                    rewards.pop(job, None)

    def metrics(self, job: JobState) -> Mapping[str, float]:
        """Return the metrics of the step that was sampled last; empty for a job without rewards."""
        found = self._known[job][1] if job in self._known else None
        return found.metrics if isinstance(found, Rollout) else {}

    def sample(self, jobs: Sequence[JobState]) -> Mapping[JobState, Sampled]:
        """Sample the completions of the next step of each of ``jobs``.

        Raises:
            DeviceMemoryError: Memory is too small for a single completion.
        """
        sampled = {job: Sampled.for_step(job, self._slot(job), self._passes.backbone) for job in jobs}
        self._write([text for of_job in sampled.values() for text in of_job.texts], jobs)
        return sampled

    def sample_rows(self, jobs: Sequence[JobState], max_tokens: int) -> int:
        """See :meth:`alto.executor.evaluator.Evaluator.sample_rows`."""
        texts: list[Text] = []
        num_tokens = 0
        for job in jobs:
            rows = job.order.rows_of_step(job.step)
            size, backbone = _settings(job.config).num_generations, self._passes.backbone
            for start in range(0, len(rows), size):
                of_group = Sampled.of_rows(job, self._slot(job), rows[start : start + 1], backbone)
                texts += of_group.texts[: len(rows) - start]
                num_tokens += len(of_group.texts[0].prompt)
        for text in texts:
            text.budget = min(text.budget, max_tokens)
        self._write(texts, jobs)
        return num_tokens + sum(len(text.ids) for text in texts)

    def evaluate(
        self, jobs: Sequence[JobState], split: EvaluationSplit, rows: Sequence[Sequence[int]] | None
    ) -> list[Evaluated]:
        """Generate the most likely completion of each row with every resident job in ``jobs``, and score them.

        Args:
            rows: See :meth:`alto.executor.evaluator.Evaluator.evaluate`.

        Raises:
            RewardFailedError, DeviceMemoryError: See :meth:`of_step`.
        """
        dataset = jobs[0].context.data.held_out(split)
        of_jobs = [range(len(dataset))] * len(jobs) if rows is None else rows
        keys = {job: (job.step, split, tuple(of_job)) for job, of_job in zip(jobs, of_jobs, strict=True)}
        known = {job: self._evaluated[job] for job in jobs if self._evaluated.get(job, (None,))[0] == keys[job]}
        sampled = {
            job: Sampled.greedy(self._slot(job), dataset, keys[job][2], _settings(job.config), self._passes.backbone)
            for job in jobs
            if job not in known
        }
        self._write([text for of_job in sampled.values() for text in of_job.texts], list(sampled))
        failures: dict[JobState, str] = {}
        for job, of_job in sampled.items():
            scores, tokenizer = self._scores(job, of_job, failures), self._passes.backbone.tokenizer
            known[job] = (keys[job], of_job.evaluated(scores, tokenizer) if scores else failures[job])
        self._evaluated = known
        found = self._unless_failed(jobs, {job: known[job][1] for job in jobs})
        self._evaluated = {}
        return list(found.values())

    def evaluate_base(
        self,
        context: TaskContext,
        config: JobConfig,
        dataset: EncodedDataset,
        rows: Sequence[int],
        within: Within,
    ) -> Evaluated:
        """Evaluate the jobs' starting point as :meth:`evaluate` does.

        Args:
            within: Context in which a forward pass over a number of tokens computes the starting point.
        """
        sampled = Sampled.greedy(0, dataset, rows, _settings(config), self._passes.backbone)
        self._write_with(_Start(within), sampled.texts)
        return sampled.evaluated(self._scored(context, sampled, 0), self._passes.backbone.tokenizer)

    def _slot(self, job: JobState) -> int:
        slot = self._passes.local_slot(job)
        assert slot is not None, "there is a single rank"
        return slot

    def _write(self, texts: Sequence[Text], jobs: Sequence[JobState]) -> None:
        if texts:
            self._write_with(_JobAdapters(self._passes, jobs), texts)

    def _write_with(self, adapters: Adapters[Any], texts: Sequence[Text]) -> None:
        """Generate ``texts`` in batches as large as memory allows. Later batches begin with the size that fitted."""
        longest = max(len(text.prompt) + text.budget for text in texts)
        most_tokens = self._fitting_tokens or _TOKENS_PER_TRAINED * self._passes.micro_batches.max_tokens
        batch_size = max(1, most_tokens // longest)
        fitting = write(self._passes.backbone, adapters, texts, batch_size=batch_size)
        if fitting < batch_size:
            self._fitting_tokens = fitting * longest

    def _scores(self, job: JobState, sampled: Sampled, failures: dict[JobState, str]) -> list[float]:
        """Return the rewards of the completions of a job; if one fails, add the reason to ``failures``, and return an
        empty list."""
        try:
            return self._scored(job.context, sampled, self._slot(job))
        except RewardFailedError as error:
            failures[job] = str(error.evidence["reward"])
            return []

    def _unless_failed(
        self, jobs: Sequence[JobState], found: Mapping[JobState, _Found | str]
    ) -> dict[JobState, _Found]:
        """Return what was found for ``jobs``.

        Raises:
            RewardFailedError: A reward failed for one of them; ``found`` has the reason.
        """
        for job in jobs:
            if isinstance(reason := found[job], str):
                raise RewardFailedError(self._slot(job), reason)
        return {job: value for job, value in found.items() if not isinstance(value, str)}

    def _scored(self, context: TaskContext, sampled: Sampled, slot: int) -> list[float]:
        assert context.rewards is not None, "the task has rewards"
        try:
            return context.rewards(sampled.completions(self._passes.backbone.tokenizer), lambda: None)
        except ScorerFailedError as error:
            raise RewardFailedError(slot, str(error)) from error


class _JobAdapters:
    """The adapters of jobs in a bank, for generation: one for each local slot."""

    def __init__(self, passes: Passes, jobs: Sequence[JobState]) -> None:
        self._passes = passes
        self._scales = {slot: adapter_scale(job.config) for slot, job in passes.local_jobs(jobs).items()}

    def __len__(self) -> int:
        return self._passes.bank.num_slots

    def schedule(self, num_tokens: Sequence[int]) -> TokenSchedule:
        slots = [slot for slot, count in enumerate(num_tokens) if count]
        return TokenSchedule.build(slots, [num_tokens[slot] for slot in slots], [self._scales[slot] for slot in slots])

    def use(self, schedule: TokenSchedule) -> AbstractContextManager[None]:
        return self._passes.forward_context.use(schedule)


class _Start:
    """The starting point of the jobs of a task, for generation."""

    def __init__(self, within: Within) -> None:
        self._within = within

    def __len__(self) -> int:
        return 1

    def schedule(self, num_tokens: Sequence[int]) -> int:
        return sum(num_tokens)

    def use(self, schedule: int) -> AbstractContextManager[None]:
        return self._within(schedule)


class Reference(NamedTuple):
    """The tokens of a row's reply, and the row's other columns, with which rewards compare a completion."""

    ids: Sequence[int]
    columns: Mapping[str, Any]


class Sampled:
    """Completions of prompts by one job. The completions of a prompt follow each other.

    Args:
        texts: The completions; their tokens may not be generated yet.
        references: Tokens of the reply of each text's row, and the row's other columns.
    """

    def __init__(self, texts: list[Text], references: list[Reference], settings: GrpoSettings) -> None:
        self.texts = texts
        self._references = references
        self._settings = settings

    @classmethod
    def for_step(cls, job: JobState, slot: int, backbone: Backbone) -> Self:
        """Return the completions for a job's next step, before the adapter in ``slot`` generates them."""
        return cls.of_rows(job, slot, job.order.rows_of_step(job.step), backbone)

    @classmethod
    def of_rows(cls, job: JobState, slot: int, rows: Iterable[int], backbone: Backbone, *seeds: int) -> Self:
        """Return completions of ``rows`` for a job's next step, before they are generated. Their random numbers also
        depend on ``seeds``."""
        settings, limit = _settings(job.config), max_positions(backbone)
        sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
        texts, references = [], []
        for row in rows:
            prompt, reply = prompt_and_reply(job.context.data.train, row)
            reference = Reference(reply, job.context.data.train.other_columns(row))
            budget = budget_of(prompt, settings.max_completion_length, limit)
            for number in range(settings.num_generations):
                numbers = uniform_numbers(budget, job.config.seed, job.step, row, number, *seeds)
                texts.append(Text(slot, prompt, budget, sampling, numbers))
                references.append(reference)
        return cls(texts, references, settings)

    def other_prompts(
        self, rewards: Sequence[float], job: JobState, attempt: int, backbone: Backbone
    ) -> dict[int, Sampled]:
        """Return completions of another random prompt for each group with equal rewards, before they are generated.
        Empty if ``attempt`` is above the job's ``dynamic_sampling``."""
        if attempt > self._settings.dynamic_sampling:
            return {}
        found = {}
        for group, of_group in enumerate(groups_of(rewards, self._settings)):
            if are_equal(of_group):
                (number,) = uniform_numbers(1, job.config.seed, job.step, attempt, group)
                row = int(number * len(job.context.data.train))
                found[group] = self.of_rows(job, self.texts[0].slot, [row], backbone, attempt, group)
        return found

    def replace(self, group: int, other: Sampled, rewards: list[float], other_rewards: Sequence[float]) -> None:
        """Replace the completions of a group, and their ``rewards``, by those of another prompt."""
        size = self._settings.num_generations
        of_group = slice(group * size, (group + 1) * size)
        self.texts[of_group], self._references[of_group] = other.texts, other._references
        rewards[of_group] = other_rewards

    @classmethod
    def greedy(
        cls, slot: int, dataset: EncodedDataset, rows: Sequence[int], settings: GrpoSettings, backbone: Backbone
    ) -> Self:
        """Return the most likely completion of each of ``rows``, before the adapter in ``slot`` generates it."""
        limit, rows_read = max_positions(backbone), [prompt_and_reply(dataset, row) for row in rows]
        most_likely = Sampling(settings.temperature, top_k=1)
        texts = [
            Text(slot, prompt, budget_of(prompt, settings.max_completion_length, limit), most_likely)
            for prompt, _ in rows_read
        ]
        columns = map(dataset.other_columns, rows)
        references = [Reference(reply, of_row) for (_, reply), of_row in zip(rows_read, columns, strict=True)]
        return cls(texts, references, settings)

    def completions(self, tokenizer: Any, count: int | None = None) -> list[Completion]:
        """Return the first ``count`` completions, or all, to be scored."""
        return [
            Completion(
                answer=Answer(
                    prompt=tokenizer.decode(text.prompt),
                    reference=tokenizer.decode(reference.ids, skip_special_tokens=True),
                    answer=tokenizer.decode(text.tokens, skip_special_tokens=True),
                ),
                ids=text.ids,
                columns=reference.columns,
            )
            for text, reference in list(zip(self.texts, self._references, strict=True))[:count]
        ]

    def metrics(self, rewards: Sequence[float]) -> dict[str, float]:
        """Return the mean reward, the mean number of tokens, the share of completions that did not end, and the mean
        entropy of a token.

        Completions that no reward can score do not count in the mean reward. It is NaN if the adapter's logits are not
        finite.
        """
        num_tokens = sum(len(text.ids) for text in self.texts)
        scored = [reward for reward in rewards if not math.isnan(reward)]
        mean = statistics.fmean(scored) if scored else 0.0
        return {
            "reward": math.nan if self._is_broken else mean,
            "completion_tokens": num_tokens / len(self.texts),
            "truncated": statistics.fmean(text.end is None for text in self.texts),
            "entropy": sum(text.entropy for text in self.texts) / max(1, num_tokens),
        }

    def evaluated(self, rewards: Sequence[float], tokenizer: Any) -> Evaluated:
        """Return the evaluation: the loss of a row is its negative reward. A row that no reward can score counts as the
        mean of the others."""
        metrics = self.metrics(rewards)
        mean = metrics["reward"]
        rows = tuple(mean if self._is_broken or math.isnan(reward) else reward for reward in rewards)
        return Evaluated(
            loss=0.0 - metrics["reward"],
            metrics=metrics,
            rows={LOSS: tuple(0.0 - reward for reward in rows), "reward": rows},
            answers=tuple(
                ShownAnswer(
                    prompt=completion.answer.prompt[:_SHOWN_CHARACTERS],
                    answer=completion.answer.answer[:_SHOWN_CHARACTERS],
                    reward=None if math.isnan(reward) else reward,
                )
                for completion, reward in zip(self.completions(tokenizer, _SHOWN_ANSWERS), rewards, strict=False)
            ),
        )

    @property
    def _is_broken(self) -> bool:
        return any(text.is_broken for text in self.texts)

    def rollout(self, rewards: Sequence[float], job: JobState, metrics: Mapping[str, float]) -> Rollout:
        """Return the completions to train. These are all completions if the loss has a KL term or a router loss;
        otherwise only completions with an advantage, because the others have no gradient.

        Args:
            metrics: Means over the completions of the first prompts, before other prompts replaced some of them.
        """
        settings, has_all = self._settings, bool(self._settings.beta or job.planned.router_aux_loss_coef)
        advantages = group_advantages(rewards, settings)
        is_left_out = [settings.mask_truncated_completions and text.end is None for text in self.texts]
        counts = [0 if out else len(text.ids) for text, out in zip(self.texts, is_left_out, strict=True)]
        factors = loss_factors(counts, job.config)
        used = [number for number, count in enumerate(counts) if count and (has_all or advantages[number] != 0.0)]
        rows = [encoded(self.texts[number]) for number in used]
        dataset = EncodedDataset(
            input_ids=tuple(input_ids for input_ids, _ in rows),
            targets=tuple(targets for _, targets in rows),
            # The loss is divided by the number of its rows.
            advantages=tuple(Advantage(advantages[number], factors[number] * len(used)) for number in used),
        )
        equal_groups = statistics.fmean(are_equal(group) for group in groups_of(rewards, settings))
        return Rollout(dataset=dataset, metrics={**metrics, "equal_groups": equal_groups})


def prompt_and_reply(dataset: EncodedDataset, row: int) -> tuple[tuple[int, ...], list[int]]:
    """Return the tokens of a row before its last reply, and those of the reply."""
    targets = dataset.targets[row].tolist()
    last = max(position for position, target in enumerate(targets) if target != IGNORED)
    first = last
    while first and targets[first - 1] != IGNORED:
        first -= 1
    return tuple(dataset.input_ids[row][: first + 1].tolist()), targets[first : last + 1]


def group_advantages(rewards: Sequence[float], settings: GrpoSettings) -> list[float]:
    """Return each reward minus the mean of its group, divided by the standard deviation if rewards are scaled; 0 for
    rewards that are NaN. Standard deviations divide by the number of rewards minus one, as in TRL."""
    of_batch = _deviation(rewards)
    found = []
    for group in groups_of(rewards, settings):
        known = [reward for reward in group if not math.isnan(reward)]
        mean = statistics.fmean(known) if known else 0.0
        scale = {"group": _deviation(group) + _EPSILON, "batch": of_batch + _EPSILON, "none": 1.0}[
            settings.scale_rewards
        ]
        found += [0.0 if math.isnan(reward) else (reward - mean) / scale for reward in group]
    return found


def groups_of(rewards: Sequence[float], settings: GrpoSettings) -> list[Sequence[float]]:
    """Return the rewards of each prompt's completions."""
    size = settings.num_generations
    return [rewards[start : start + size] for start in range(0, len(rewards), size)]


def are_equal(group: Sequence[float]) -> bool:
    """Return whether all known rewards of a prompt's completions are equal, so that they have no advantage."""
    return len({reward for reward in group if not math.isnan(reward)}) < 2


def _deviation(rewards: Sequence[float]) -> float:
    known = [reward for reward in rewards if not math.isnan(reward)]
    return statistics.stdev(known) if len(known) > 1 else 0.0


def loss_factors(counts: Sequence[int], config: JobConfig) -> list[float]:
    """Return the factor on the sum over each completion's tokens in the loss of a step.

    Args:
        counts: Number of tokens of every completion in the loss; 0 for completions that are left out.
    """
    settings = _settings(config)
    if settings.loss_type == "dapo":
        return [1.0 / max(1, sum(counts))] * len(counts)
    if settings.loss_type == "bnpo":
        size = config.per_device_train_batch_size
        micro_steps = [counts[start : start + size] for start in range(0, len(counts), size)]
        return [1.0 / (len(micro_steps) * max(1, sum(of_one))) for of_one in micro_steps for _ in of_one]
    of_rows = [factor / len(counts) for factor in config.row_factors(len(counts))]
    if settings.loss_type == "dr_grpo":
        return [factor / settings.max_completion_length for factor in of_rows]
    return [factor / max(1, count) for factor, count in zip(of_rows, counts, strict=True)]


def _settings(config: JobConfig) -> GrpoSettings:
    assert isinstance(config.objective, GrpoSettings)
    return config.objective


def encoded(text: Text) -> tuple[Tensor, Tensor]:
    """Return token ids and targets of a prompt and its completion."""
    prompt, reply = list(text.prompt), text.ids
    # The last token predicts nothing, but it is part of the row, as in other datasets.
    targets = [IGNORED] * (len(prompt) - 1) + reply + [IGNORED]
    return torch.tensor(prompt + reply), torch.tensor(targets)
