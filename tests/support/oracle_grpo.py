"""The oracle of law 1 on sampled completions: one job alone, whose advantages and loss TRL's ``GRPOTrainer`` computes.

Both train on the same completions, which :func:`written` makes from the random numbers of a text.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from architectures import build_tiny
from oracle import SoloJob, StepFacts, quiet_settings
from resident_jobs import VOCABULARY
from tiny import load_tokenizer
from transformers import PreTrainedModel

from alto.data import EncodedDataset
from alto.evaluation import Completion, Text
from alto.spec import JobConfig
from alto.spec.objective_settings import GrpoSettings

END = 1


class Spelling:
    """A tokenizer for models without one: it writes token ids as numbers."""

    eos_token_id = END

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(int(token)) for token in ids)


def written(text: Text) -> None:
    """Write a text whose tokens depend on its random numbers alone; one in three is cut at its budget."""
    generator = torch.Generator().manual_seed(int(text.numbers[0] * 2**40) if text.numbers else len(text.prompt))
    length = int(torch.randint(1, text.budget + 1, (), generator=generator))
    is_cut = bool(torch.rand((), generator=generator) < 1 / 3)
    count = text.budget if is_cut else min(length, text.budget - 1)
    text.tokens[:] = torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()
    text.end, text.is_finished = None if is_cut else END, True


def write_all(backbone: object, adapters: object, texts: Sequence[Text], *, batch_size: int) -> int:
    for text in texts:
        written(text)
    return batch_size


def reward_of(ids: Sequence[int]) -> float:
    """Return the reward of a completion; NaN for one in eleven, which no reward can score."""
    return math.nan if sum(ids) % 11 == 0 else (sum(ids) % 5) / 4


class GivenRewards:
    """The rewards of a task, computed by :func:`reward_of`."""

    def __call__(self, completions: Sequence[Completion], on_turn: Callable[[], None]) -> list[float]:
        return [reward_of(one.ids) for one in completions]


class SoloGrpo(SoloJob):
    """One job, whose advantages and loss TRL computes for every micro-step.

    Args:
        trl: Trainer from :func:`make_grpo_trainer`; several jobs may share it.
        tamper_ids: Changes the completions, for tests that must fail.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        dataset: EncodedDataset,
        config: JobConfig,
        *,
        trl: Any,
        tamper_ids: Callable[[list[int]], list[int]] = lambda ids: ids,
    ) -> None:
        from trl.trainer.utils import add_fused_lm_head

        super().__init__(base, dataset, config)
        self._trl, self._reference, self._tamper_ids = trl, copy.deepcopy(base), tamper_ids
        assert isinstance(config.objective, GrpoSettings)
        for model in (self.model.get_base_model(), self._reference):
            add_fused_lm_head(model, outputs=("log_probs", "entropy"), temperature=config.objective.temperature)
        self.loss = math.nan

    def train_step(self, texts: Sequence[Text]) -> StepFacts:
        """Take one step.

        Args:
            texts: The completions of the step, written; the facts' loss is their negative mean reward, and
                :attr:`loss` is TRL's loss.
        """
        trl, settings = self._trl, self.config.objective
        assert isinstance(settings, GrpoSettings)
        num_micro_steps = self.config.gradient_accumulation_steps
        for name in ("beta", "loss_type", "scale_rewards", "num_generations", "max_completion_length"):
            setattr(trl, name, getattr(settings, name))
        trl.mask_truncated_completions = settings.mask_truncated_completions
        trl.ref_model = self._reference
        trl.model = trl.model_wrapped = self.model
        trl.args.steps_per_generation = trl.args.gradient_accumulation_steps = num_micro_steps
        trl.current_gradient_accumulation_steps = num_micro_steps
        completions = [self._tamper_ids([*text.tokens, *([] if text.end is None else [text.end])]) for text in texts]
        prompts = [list(text.prompt) for text in texts]
        trl._generate = lambda prompts_: (prompts, completions, None, [""] * len(texts), None, {}, None, None)
        trl.reward_funcs = [lambda completion_ids, **_: [_without_nan(ids) for ids in completion_ids]]
        self.model.train()
        generated = trl._generate_and_score_completions([{"prompt": "1"} for _ in texts])
        size = self.config.per_device_train_batch_size
        self._optimizer.zero_grad()
        self.loss = 0.0
        for start in range(0, len(texts), size):
            part = {
                name: value[start : start + size] if value.ndim else value
                for name, value in generated.items()
                if isinstance(value, torch.Tensor)
            }
            loss = trl._compute_loss(self.model, part)
            loss.backward()
            self.loss += float(loss.detach())
        return self._update(-trl._metrics["train"]["reward"][-1])


def _without_nan(ids: Sequence[int]) -> float | None:
    """Return TRL's form of a reward."""
    reward = reward_of(ids)
    return None if math.isnan(reward) else reward


def make_grpo_trainer(folder: Path) -> Any:
    """Return TRL's trainer, of which only advantages and loss are used, not its model and data."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = build_tiny("llama"), load_tokenizer()
    settings = GRPOConfig(**quiet_settings(folder), per_device_train_batch_size=8, num_generations=8)
    trainer = GRPOTrainer(
        model=copy.deepcopy(model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(8)]),
        processing_class=tokenizer,
    )
    trainer.eos_token_ids = [END]
    return trainer
