"""The stronger baseline: one job at a time in a plain PyTorch loop around a PEFT model, without a trainer.

It pads each batch to its longest row, computes logits only in columns in which some row has a trained token, steps a
fused AdamW, and logs nothing. A careful engineer would write such a loop by hand. It also checks that TRL's loss means
the same.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import get_scheduler, set_seed

from benchmarks.baselines.job import (
    IGNORED,
    BaselineJob,
    Evaluation,
    JobSettings,
    Order,
    Prepared,
    check_eval_steps,
    epoch_order,
)
from benchmarks.baselines.stacked import share

__all__ = ["bare_peft_one", "evaluate", "loss_sum"]

Example = Mapping[str, list[int]]


def bare_peft_one(
    prepared: Prepared,
    config: Mapping[str, Any],
    *,
    eval_at_steps: Sequence[int],
    eval_batch_size: int = 8,
    order: Order | None = None,
    on_evaluation: Callable[[PeftModel, Evaluation], bool] | None = None,
) -> BaselineJob:
    """Train one job to its end; arguments and result are those of ``trl_sequential.train_one``.

    Args:
        on_evaluation: Called after every evaluation; the job ends where it returns true.
    """
    start = time.perf_counter()
    settings = JobSettings.of(config)
    order = order or epoch_order(len(prepared.train), settings.seed)
    total_steps = settings.total_steps(len(prepared.train))
    steps = check_eval_steps(eval_at_steps, total_steps)
    model = _adapted_model(prepared, settings)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    scheduler = get_scheduler(
        settings.scheduler,
        optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=total_steps,
    )
    pad_id = prepared.tokenizer.pad_token_id
    losses: list[Tensor] = []
    evaluations: list[Evaluation] = []
    samples = 0
    eval_s = 0.0
    train_start = time.perf_counter()
    model.train()
    batches = _batches(prepared.train, order, settings.per_device_train_batch_size)
    for step, examples in enumerate(itertools.islice(batches, total_steps), start=1):
        total, num_tokens = loss_sum(model, examples, pad_id)
        loss = total / num_tokens
        loss.backward()
        if settings.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        samples += len(examples)
        if step in steps:
            eval_start = time.perf_counter()
            evaluations.append(Evaluation(step, evaluate(model, prepared.validation, eval_batch_size, pad_id)))
            eval_s += time.perf_counter() - eval_start
            if on_evaluation is not None and on_evaluation(model, evaluations[-1]):
                break
    end = time.perf_counter()
    return BaselineJob(
        duration_s=end - start,
        train_s=end - train_start - eval_s,
        eval_s=eval_s,
        train_losses=tuple(torch.stack(losses).tolist()),
        evaluations=tuple(evaluations),
        samples=samples,
    )


def _adapted_model(prepared: Prepared, settings: JobSettings) -> PeftModel:
    base = share(prepared.model)
    # TRL seeds right before it adds the adapter. Doing the same gives the same initial weights.
    set_seed(settings.seed)
    return get_peft_model(base, settings.lora())


def _batches(rows: Sequence[Example], order: Order, batch_size: int) -> Iterator[list[Example]]:
    for epoch in itertools.count():
        indices = order(epoch)
        for first in range(0, len(indices), batch_size):
            yield [rows[index] for index in indices[first : first + batch_size]]


def loss_sum(model: PeftModel, examples: Sequence[Example], pad_id: int) -> tuple[Tensor, int]:
    """Return the summed loss over the trained tokens of a padded batch, and their number; on the model's device."""
    lengths = [len(example["input_ids"]) for example in examples]
    longest = max(lengths)
    input_ids = torch.full((len(examples), longest), pad_id)
    labels = torch.full((len(examples), longest), IGNORED)
    attention_mask = torch.zeros((len(examples), longest), dtype=torch.long)
    for row, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        input_ids[row, :length] = torch.tensor(example["input_ids"])
        labels[row, :length] = torch.tensor(example["labels"])
        attention_mask[row, :length] = 1
    targets = labels[:, 1:]
    columns = (targets != IGNORED).any(dim=0).nonzero().squeeze(1)
    targets = targets[:, columns]
    is_trained = targets != IGNORED
    outputs = model(
        input_ids=input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        use_cache=False,
        logits_to_keep=columns.to(model.device),
    )
    loss = torch.nn.functional.cross_entropy(
        outputs.logits[is_trained].float(), targets[is_trained].to(model.device), reduction="sum"
    )
    return loss, int(is_trained.sum())


@torch.no_grad()
def evaluate(model: PeftModel, rows: Sequence[Example], batch_size: int, pad_id: int) -> float:
    """Return the mean loss over the trained tokens of ``rows``."""
    model.eval()
    total, num_tokens = 0.0, 0
    for first in range(0, len(rows), batch_size):
        batch_total, count = loss_sum(model, rows[first : first + batch_size], pad_id)
        total += batch_total.item()
        num_tokens += count
    model.train()
    return total / num_tokens
