"""Greedy completions of many prompts, in batches that leave each as it would be alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from alto.errors import DataError

__all__ = ["check_prompts", "complete", "max_positions"]


def max_positions(network: PreTrainedModel) -> int | None:
    """Tokens the model has positions for; None where its configuration names no limit."""
    limit: int | None = getattr(network.config.get_text_config(), "max_position_embeddings", None)
    return limit


def check_prompts(network: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
    """Make sure that every prompt leaves a position to write to.

    Raises:
        DataError: One does not.
    """
    limit = max_positions(network)
    for number, prompt in enumerate(prompts, start=1):
        if limit is not None and len(prompt) >= limit:
            raise DataError(
                f"exact_match: expected prompts shorter than the model's {limit} positions, found {len(prompt)} tokens "
                f"in row {number}; leave the row out, or use a base model with more positions"
            )


@torch.no_grad()
def complete(
    network: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    on_done: Callable[[int], None],
) -> list[list[int]]:
    """The most likely next token again and again, until a token that ends a text, ``max_new_tokens`` or the model's
    last position.

    Args:
        prompts: Token ids of each prompt, checked by :func:`check_prompts`.
        batch_size: Prompts completed at a time.
        on_done: Called after every batch with the number of its prompts.

    Returns:
        The new tokens of every prompt, without the one that ended them.
    """
    limit = max_positions(network)
    budgets = [max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt)) for prompt in prompts]
    ends = _end_tokens(network, tokenizer)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    # The model's own file may ask for sampling or a repetition penalty, which generate() would merge in.
    network.generation_config = GenerationConfig(do_sample=False, eos_token_id=sorted(ends), pad_token_id=padding)
    completions: list[list[int]] = [[] for _ in prompts]
    for rows in _batches(prompts, budgets, max_new_tokens, batch_size):
        batch = [prompts[row] for row in rows]
        for row, new in zip(rows, _generate(network, batch, budgets[rows[0]], padding), strict=True):
            end = next((position for position, token in enumerate(new) if token in ends), len(new))
            completions[row] = new[:end]
        on_done(len(rows))
    return completions


def _batches(
    prompts: Sequence[Sequence[int]], budgets: Sequence[int], max_new_tokens: int, batch_size: int
) -> Iterator[list[int]]:
    """Row numbers, longest prompt first. A prompt near the model's last position goes alone: its budget is its own."""
    by_length = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    roomy = [row for row in by_length if budgets[row] == max_new_tokens]
    yield from ([row] for row in by_length if budgets[row] < max_new_tokens)
    for start in range(0, len(roomy), batch_size):
        yield roomy[start : start + batch_size]


def _generate(
    network: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, padding: int
) -> list[list[int]]:
    width = max(map(len, prompts))
    ids_BT = torch.tensor([[padding] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generate: Any = network.generate
    output_BT = generate(
        input_ids=ids_BT.to(network.device), attention_mask=mask_BT.to(network.device), max_new_tokens=max_new_tokens
    )
    new: list[list[int]] = output_BT[:, width:].tolist()
    return new


def _end_tokens(network: PreTrainedModel, tokenizer: Any) -> set[int]:
    """Tokens that end a text: the tokenizer's EOS, which ends every trained row, and those the model names itself."""
    own = network.generation_config.eos_token_id if network.generation_config is not None else None
    named = own if isinstance(own, list) else [own]
    return {token for token in (*named, tokenizer.eos_token_id) if token is not None}
