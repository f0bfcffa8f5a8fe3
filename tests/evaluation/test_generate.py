"""Greedy completions: the argmax of every step, the same in any batch, and an end where an end belongs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from alto.errors import DataError
from alto.evaluation.generate import check_prompts, complete

ModelFactory = Callable[..., PreTrainedModel]
TOKENIZER = SimpleNamespace(eos_token_id=1, pad_token_id=0)
# Lengths on purpose far apart, in no order.
PROMPTS = [list(range(2, 2 + length)) for length in (9, 2, 23, 5, 14, 3, 30)]


def completions(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, batch_size: int = 4, limit: int = 12
) -> list[list[int]]:
    done: list[int] = []
    found = complete(model, TOKENIZER, prompts, max_new_tokens=limit, batch_size=batch_size, on_done=done.append)
    assert sum(done) == len(prompts)
    assert all(count <= batch_size for count in done)
    return found


@torch.no_grad()
def argmax_by_hand(model: PreTrainedModel, prompt: Sequence[int], limit: int, ends: Sequence[int] = (1,)) -> list[int]:
    """No cache, no padding, no generate()."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        token = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token in ends:
            break
        ids.append(token)
    return ids[len(prompt) :]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "mistral"])
def test_batches_give_what_every_prompt_gives_alone(tiny_model: ModelFactory, architecture: str) -> None:
    model = tiny_model(architecture)
    expected = [argmax_by_hand(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(completion) for completion in expected}) > 3  # prompts matter to this model
    assert completions(model, PROMPTS, batch_size=4) == expected
    assert completions(model, PROMPTS, batch_size=1) == expected


def test_a_token_that_ends_a_text_ends_it(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")
    free = argmax_by_hand(model, PROMPTS[0], 12)
    end = free[3]
    assert end not in free[:3]
    model.generation_config = GenerationConfig(eos_token_id=[end, 1])
    found = completions(model, PROMPTS)
    assert found[0] == free[:3]
    assert found == [argmax_by_hand(model, prompt, 12, (end, 1)) for prompt in PROMPTS]


def test_the_models_own_sampling_settings_do_not_count(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")
    expected = completions(model, PROMPTS)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=5.0, repetition_penalty=9.0, num_beams=3, eos_token_id=1, pad_token_id=0
    )
    assert completions(model, PROMPTS) == expected


def test_a_prompt_near_the_last_position_leaves_its_neighbours_their_length(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")  # 64 positions
    prompts = [*PROMPTS, list(range(2, 62))]
    found = completions(model, prompts, batch_size=8)
    assert found[:-1] == completions(model, PROMPTS)
    assert found[-1] == argmax_by_hand(model, prompts[-1], 4)
    assert len(found[-1]) == 4


def test_a_prompt_without_a_position_to_write_to_is_an_error(tiny_model: ModelFactory) -> None:
    with pytest.raises(DataError, match="shorter than the model's 64 positions, found 64 tokens in row 2"):
        check_prompts(tiny_model("llama"), [[5], list(range(2, 66))])
    check_prompts(tiny_model("llama"), [[5], list(range(2, 65))])
