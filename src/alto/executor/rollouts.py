"""Completions that jobs sample from their own adapters, their rewards, and the rows that a step trains on.

Everything that a job samples depends only on its own seed, step, prompts and adapter, so a resumed run samples the same
completions, and other jobs change none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from alto.backbone import Backbone
from alto.data import IGNORED, Advantage, EncodedDataset
from alto.evaluation import (
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
from alto.spec import LOSS, GrpoSettings, JobConfig

_TOKENS_PER_TRAINED = 16
"""Tokens of a generated batch for each token of the largest micro-batch: generation keeps only keys and values."""

_EPSILON = 1e-4
"""Added to the standard deviation of rewards, as in TRL."""


class RewardFailedError(JobFailedError):
    """Internal signal: a reward failed for the completions of the job in ``slot``."""

    def __init__(self, slot: int, reason: str) -> None:
        super().__init__(slot, reward=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The completions of a job in one step.

    Attributes:
        dataset: The completions that have a gradient; may be empty.
        metrics: Means over all completions: ``reward``, number of tokens with the end token (``completion_tokens``),
            and whether it did not end (``truncated``).
    """

    dataset: EncodedDataset
    metrics: Mapping[str, float]


class Rollouts:
    """Samples and scores completions for the jobs in a bank, on a single rank."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._known: dict[JobState, tuple[int, Rollout]] = {}

    def of_step(self, jobs: Sequence[JobState]) -> Mapping[JobState, Rollout]:
        """Return the completions of the next step of each of ``jobs``, all sampled in shared batches; a second call for
        the same step returns the same objects.

        Raises:
            RewardFailedError: A reward failed; the completions of jobs before it are kept for the next call.
            DeviceMemoryError: Memory is too small for a single completion.
        """
        self._known = {job: self._known[job] for job in jobs if job in self._known}
        missing = [job for job in jobs if job not in self._known or self._known[job][0] != job.step]
        for job, of_job in self.sample(missing).items():
            rewards = self._scored(job.context, of_job, self._slot(job))
            self._known[job] = (job.step, of_job.rollout(rewards, job))
        return {job: self._known[job][1] for job in jobs}

    def sample(self, jobs: Sequence[JobState]) -> Mapping[JobState, Sampled]:
        """Sample the completions of the next step of each of ``jobs``.

        Raises:
            DeviceMemoryError: Memory is too small for a single completion.
        """
        sampled = {job: Sampled.for_step(job, self._slot(job), self._passes.backbone) for job in jobs}
        self._write([text for of_job in sampled.values() for text in of_job.texts], jobs)
        return sampled

    def evaluate(
        self, jobs: Sequence[JobState], dataset: EncodedDataset, rows: Sequence[Sequence[int]]
    ) -> list[Evaluated]:
        """Generate the most likely completion of each row with every resident job in ``jobs``, and score them.

        Args:
            rows: Rows of ``dataset`` for each job, in the order in which values are kept.

        Raises:
            RewardFailedError, DeviceMemoryError: See :meth:`of_step`.
        """
        sampled = [
            Sampled.greedy(self._slot(job), dataset, of_job, _settings(job.config), self._passes.backbone)
            for job, of_job in zip(jobs, rows, strict=True)
        ]
        self._write([text for of_job in sampled for text in of_job.texts], jobs)
        return [
            of_job.evaluated(self._scored(job.context, of_job, self._slot(job)))
            for job, of_job in zip(jobs, sampled, strict=True)
        ]

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
        write(self._passes.backbone, _Start(within), sampled.texts, batch_size=self._batch_size(sampled.texts))
        return sampled.evaluated(self._scored(context, sampled, 0))

    def _slot(self, job: JobState) -> int:
        slot = self._passes.local_slot(job)
        assert slot is not None, "there is a single rank"
        return slot

    def _write(self, texts: Sequence[Text], jobs: Sequence[JobState]) -> None:
        if texts:
            adapters = _JobAdapters(self._passes, jobs)
            write(self._passes.backbone, adapters, texts, batch_size=self._batch_size(texts))

    def _batch_size(self, texts: Sequence[Text]) -> int:
        longest = max(len(text.prompt) + text.budget for text in texts)
        return max(1, _TOKENS_PER_TRAINED * self._passes.micro_batches.max_tokens // longest)

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
        self._scales = {slot: adapter_scale(job.config) for slot, job in passes.here(jobs).items()}

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


class Sampled:
    """Completions of prompts by one job; those of a prompt follow each other.

    Args:
        texts: The completions, written or to be written.
        references: Tokens of the reply of each text's row.
    """

    def __init__(self, texts: Sequence[Text], references: Sequence[Sequence[int]], settings: GrpoSettings) -> None:
        self.texts = texts
        self._references = references
        self._settings = settings

    @classmethod
    def for_step(cls, job: JobState, slot: int, backbone: Backbone) -> Self:
        """Return the completions that a job trains on in its next step, to be written by the adapter in ``slot``."""
        settings, limit = _settings(job.config), max_positions(backbone)
        sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
        texts, references = [], []
        for row in job.order.rows_of_step(job.step):
            prompt, reference = prompt_and_reply(job.context.data.train, row)
            budget = budget_of(prompt, settings.max_completion_length, limit)
            for number in range(settings.num_generations):
                numbers = uniform_numbers(budget, job.config.seed, job.step, row, number)
                texts.append(Text(slot, prompt, budget, sampling, numbers))
                references.append(reference)
        return cls(texts, references, settings)

    @classmethod
    def greedy(
        cls, slot: int, dataset: EncodedDataset, rows: Sequence[int], settings: GrpoSettings, backbone: Backbone
    ) -> Self:
        """Return the most likely completion of each of ``rows``, to be written by the adapter in ``slot``."""
        limit, rows_read = max_positions(backbone), [prompt_and_reply(dataset, row) for row in rows]
        texts = [
            Text(slot, prompt, budget_of(prompt, settings.max_completion_length, limit)) for prompt, _ in rows_read
        ]
        return cls(texts, [reference for _, reference in rows_read], settings)

    def completions(self, tokenizer: Any) -> list[Completion]:
        """Return the completions, to be scored."""
        return [
            Completion(
                answer=Answer(
                    prompt=tokenizer.decode(text.prompt),
                    reference=tokenizer.decode(reference, skip_special_tokens=True),
                    answer=tokenizer.decode(text.tokens, skip_special_tokens=True),
                ),
                ids=_ids(text),
            )
            for text, reference in zip(self.texts, self._references, strict=True)
        ]

    def metrics(self, rewards: Sequence[float]) -> dict[str, float]:
        """Return the mean reward, the mean number of tokens, and the share of completions that did not end.

        Completions that no reward can score do not count in the mean reward. It is NaN if the adapter's logits are not
        finite.
        """
        scored = [reward for reward in rewards if not math.isnan(reward)]
        mean = statistics.fmean(scored) if scored else 0.0
        return {
            "reward": math.nan if self._is_broken else mean,
            "completion_tokens": statistics.fmean(len(_ids(text)) for text in self.texts),
            "truncated": statistics.fmean(text.end is None for text in self.texts),
        }

    def evaluated(self, rewards: Sequence[float]) -> Evaluated:
        """Return the evaluation: the loss of a row is its negative reward. A row that no reward can score counts as the
        mean of the others."""
        metrics = self.metrics(rewards)
        mean = metrics["reward"]
        rows = tuple(mean if self._is_broken or math.isnan(reward) else reward for reward in rewards)
        return Evaluated(
            loss=0.0 - metrics["reward"],
            metrics=metrics,
            rows={LOSS: tuple(0.0 - reward for reward in rows), "reward": rows},
        )

    @property
    def _is_broken(self) -> bool:
        return any(text.is_broken for text in self.texts)

    def rollout(self, rewards: Sequence[float], job: JobState) -> Rollout:
        """Return the completions that have a gradient: all if the loss has a divergence or a balance of routers, else
        those with an advantage."""
        settings, has_all = self._settings, bool(self._settings.beta or job.planned.router_aux_loss_coef)
        advantages = group_advantages(rewards, settings)
        is_left_out = [settings.mask_truncated_completions and text.end is None for text in self.texts]
        counts = [0 if out else len(_ids(text)) for text, out in zip(self.texts, is_left_out, strict=True)]
        factors = loss_factors(counts, job.config)
        used = [number for number, count in enumerate(counts) if count and (has_all or advantages[number] != 0.0)]
        rows = [encoded(self.texts[number]) for number in used]
        dataset = EncodedDataset(
            input_ids=tuple(input_ids for input_ids, _ in rows),
            targets=tuple(targets for _, targets in rows),
            # The loss is divided by the number of its rows.
            advantages=tuple(Advantage(advantages[number], factors[number] * len(used)) for number in used),
        )
        return Rollout(dataset=dataset, metrics=self.metrics(rewards))


def prompt_and_reply(dataset: EncodedDataset, row: int) -> tuple[tuple[int, ...], list[int]]:
    """Return the tokens of a row before its last reply, and those of the reply."""
    targets = dataset.targets[row].tolist()
    last = max(position for position, target in enumerate(targets) if target != IGNORED)
    first = last
    while first and targets[first - 1] != IGNORED:
        first -= 1
    return tuple(dataset.input_ids[row][: first + 1].tolist()), targets[first : last + 1]


def group_advantages(rewards: Sequence[float], settings: GrpoSettings) -> list[float]:
    """Return how much better each reward is than the mean of its group, in standard deviations if rewards are scaled;
    0 for rewards that are NaN. Standard deviations divide by the number of rewards less one, as in TRL."""
    size = settings.num_generations
    groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
    of_batch = _deviation(rewards)
    found = []
    for group in groups:
        known = [reward for reward in group if not math.isnan(reward)]
        mean = statistics.fmean(known) if known else 0.0
        scale = {"group": _deviation(group) + _EPSILON, "batch": of_batch + _EPSILON, "none": 1.0}[
            settings.scale_rewards
        ]
        found += [0.0 if math.isnan(reward) else (reward - mean) / scale for reward in group]
    return found


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


def _ids(text: Text) -> list[int]:
    """Return the generated tokens with the end token, if there is one."""
    return text.tokens if text.end is None else [*text.tokens, text.end]


def encoded(text: Text) -> tuple[Tensor, Tensor]:
    """Return token ids and targets of a prompt and its completion."""
    prompt, reply = list(text.prompt), _ids(text)
    # The last token predicts nothing, but it is part of the row, as in other datasets.
    targets = [IGNORED] * (len(prompt) - 1) + reply + [IGNORED]
    return torch.tensor(prompt + reply), torch.tensor(targets)
