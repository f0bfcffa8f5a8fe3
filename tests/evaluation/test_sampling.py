"""Sampled completions: drawn from the model's probabilities by numbers of their own, alone as among others; and groups
of a prompt, which is computed once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TopKLogitsWarper, TopPLogitsWarper

from alto.backbone import Backbone
from alto.evaluation import Sampling, Text, generate, uniform_numbers, write
from alto.evaluation.generate import NO_TOKEN
from alto.evaluation.key_value_cache import RoomyLayer
from alto.evaluation.target import loaded_adapters

TOKENIZER = SimpleNamespace(eos_token_id=1, pad_token_id=0)
PROMPTS = [list(range(2, 2 + length)) for length in (9, 2, 23, 5, 14, 3, 30)]
SETTINGS = [Sampling(), Sampling(temperature=0.6), Sampling(top_k=5), Sampling(1.5, top_p=0.8, top_k=30)]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, **sizes, **heads)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)  # so that some tokens are likely
    return model


def group(slot: int, prompt: Sequence[int], sampling: Sampling, size: int = 3, budget: int = 9) -> list[Text]:
    return [
        Text(slot, prompt, budget, sampling, uniform_numbers(budget, slot, len(prompt), number))
        for number in range(size)
    ]


def all_texts() -> list[Text]:
    return [
        text
        for slot, sampling in enumerate(SETTINGS)
        for prompt in PROMPTS[slot : slot + 3]
        for text in group(slot, prompt, sampling)
    ]


@torch.no_grad()
def written_by_hand(model: Any, text: Text) -> list[int]:
    """Draw without a cache, without padding, and without ALTO's sampling."""
    assert text.sampling is not None
    ids: list[int] = []
    while len(ids) < text.budget:
        scores = model(input_ids=torch.tensor([[*text.prompt, *ids]]), use_cache=False).logits[:, -1].double()
        scores = scores / text.sampling.temperature
        if text.sampling.top_k:
            scores = TopKLogitsWarper(text.sampling.top_k)(None, scores)
        if text.sampling.top_p < 1:
            scores = TopPLogitsWarper(text.sampling.top_p)(None, scores)
        sums = itertools.accumulate(scores.softmax(-1)[0].tolist())
        token = next(token for token, total in enumerate(sums) if total > text.numbers[len(ids)])
        if token == TOKENIZER.eos_token_id:
            break
        ids.append(token)
    return ids


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_texts_are_drawn_as_by_hand_for_any_size_of_batches(batch_size: int) -> None:
    model = make_model()
    model.generation_config.eos_token_id = None
    backbone, texts = Backbone(model, TOKENIZER, "tiny"), all_texts()
    with loaded_adapters(backbone, [None] * len(SETTINGS), "tiny") as served:
        write(backbone, served, texts, batch_size=batch_size)
    plain = make_model()
    assert [text.tokens for text in texts] == [written_by_hand(plain, text) for text in texts]
    assert any(text.end is not None for text in texts)
    assert any(text.end is None and len(text.tokens) == text.budget for text in texts)
    assert len({tuple(text.tokens) for text in texts[:3]}) == 3, "the texts of a group differ"


def test_the_prompt_of_a_group_is_computed_once() -> None:
    model, sizes = make_model(), []
    backbone = Backbone(model, TOKENIZER, "tiny")
    texts = [text for prompt in PROMPTS[:2] for text in group(0, prompt, Sampling(), size=8)]
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    with loaded_adapters(backbone, [None], "tiny") as served:
        write(backbone, served, texts, batch_size=100)
    hook.remove()
    shapes = [shape for shape in sizes if len(shape) == 2]
    longest = max(map(len, PROMPTS[:2]))
    assert shapes[-len(shapes) :].count(torch.Size([2, longest])) == 1
    assert max(shape[0] for shape in shapes if shape[1] == 1) == 16


def test_texts_join_when_others_have_ended() -> None:
    model, rows = make_model(), []
    model.generation_config.eos_token_id = None
    backbone = Backbone(model, TOKENIZER, "tiny")
    budgets = [2, 3, 25, 1, 4, 3, 25, 2, 5, 1, 2, 25, 3, 4, 2, 1]
    texts = [
        Text(slot := index % 3, PROMPTS[index % 7], budget, SETTINGS[slot], uniform_numbers(budget, index))
        for index, budget in enumerate(budgets)
    ]
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    with loaded_adapters(backbone, [None] * 3, "tiny") as served:
        rows.clear()
        write(backbone, served, texts, batch_size=4)
    hook.remove()
    plain = make_model()
    assert [text.tokens for text in texts] == [written_by_hand(plain, text) for text in texts]
    lengths = [len(text.ids) for text in texts]
    one_after_the_other = sum(max(lengths[start : start + 4]) for start in range(0, len(lengths), 4))
    num_passes = sum(num_tokens == 1 for _, num_tokens in rows)
    assert num_passes < 0.7 * one_after_the_other
    assert max(num_rows for num_rows, _ in rows) <= 4


def test_texts_wait_for_a_batch_whose_texts_end_at_about_the_same_time() -> None:
    model, rows = make_model(), []
    model.generation_config.eos_token_id = None
    backbone = Backbone(model, SimpleNamespace(eos_token_id=None, pad_token_id=0), "tiny")
    texts = [Text(0, list(PROMPTS[0]), 10 + index % 3, Sampling(), uniform_numbers(12, index)) for index in range(12)]
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    with loaded_adapters(backbone, [None], "tiny") as served:
        rows.clear()
        write(backbone, served, texts, batch_size=4)
    hook.remove()
    assert [num_rows for num_rows, num_tokens in rows if num_tokens > 1] == [4] * 3, "the prompts of a batch"


def test_texts_that_end_in_the_pass_in_which_memory_runs_out_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, done, sizes = make_model(), list[int](), list[int]()
    model.generation_config.eos_token_id = None
    backbone, texts = Backbone(model, TOKENIZER, "tiny"), all_texts()
    keep = RoomyLayer.keep

    def refusing(layer: RoomyLayer, rows: torch.Tensor, num_tokens: int) -> None:
        sizes.append(len(rows))
        if len(sizes) == 20:
            raise torch.OutOfMemoryError("no memory, as the test wants it")
        keep(layer, rows, num_tokens)

    whole = all_texts()
    with loaded_adapters(backbone, [None] * len(SETTINGS), "tiny") as served:
        write(backbone, served, whole, batch_size=8)
    monkeypatch.setattr(RoomyLayer, "keep", refusing)
    sizes.clear()
    with loaded_adapters(backbone, [None] * len(SETTINGS), "tiny") as served:
        assert write(backbone, served, texts, batch_size=8, on_done=done.append) <= 4
    plain = make_model()
    assert [text.tokens for text in texts] == [written_by_hand(plain, text) for text in texts]
    assert [text.entropy for text in texts] == pytest.approx([text.entropy for text in whole], rel=1e-4)
    assert sum(done) == len(texts)


def test_numbers_depend_on_their_seeds_alone() -> None:
    assert uniform_numbers(5, 1, 2, 3) == uniform_numbers(5, 1, 2, 3)
    assert uniform_numbers(3, 1, 2, 3) == uniform_numbers(5, 1, 2, 3)[:3]
    assert uniform_numbers(5, 1, 2, 3) != uniform_numbers(5, 1, 23)
    numbers = uniform_numbers(20_000, 4)
    assert 0 <= min(numbers) < 0.001
    assert 0.999 < max(numbers) < 1
    assert math.isclose(sum(numbers) / len(numbers), 0.5, abs_tol=0.01)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_share_of_numbers_that_give_a_token_is_its_probability(sampling: Sampling) -> None:
    logits_V = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 3
    count = 20_000
    numbers = [(index + 0.5) / count for index in range(count)]
    drawn, entropies = sampling.tokens(logits_V.expand(count, -1), numbers)
    of_model = torch.distributions.Categorical(logits=logits_V / sampling.temperature).entropy()
    assert entropies.tolist() == pytest.approx([float(of_model)] * count, rel=1e-4)
    shares_V = torch.bincount(drawn, minlength=50) / count
    expected_V = logits_V / sampling.temperature
    if sampling.top_k:
        expected_V[expected_V < expected_V.topk(sampling.top_k).values[-1]] = -math.inf
    if sampling.top_p < 1:
        ordered = expected_V.softmax(-1).sort(descending=True)
        is_kept = ordered.values.cumsum(-1) - ordered.values < sampling.top_p
        expected_V[ordered.indices[~is_kept]] = -math.inf
    assert torch.allclose(shares_V, expected_V.softmax(-1), atol=2 / count)


def test_the_smallest_number_draws_no_token_that_was_left_out() -> None:
    logits = torch.tensor([[-5.0, 3.0, 2.0]])
    assert Sampling(top_k=2).tokens(logits, [0.0])[0].tolist() == [1]


def test_a_text_whose_logits_are_not_finite_ends_broken_beside_others() -> None:
    logits = torch.tensor([[math.nan, 0.0], [0.0, 9.0]])
    assert Sampling().tokens(logits, [0.5, 0.5])[0].tolist() == [NO_TOKEN, 1]
    assert Sampling(top_k=1).tokens(logits, [])[0].tolist() == [NO_TOKEN, 1]
    assert generate._next_tokens(logits, [Text(0, (2,), 3), Text(1, (2,), 3)]).tolist() == [NO_TOKEN, 1], "greedy"
    model = make_model()
    backbone = Backbone(model, TOKENIZER, "tiny")

    def written(is_broken: bool) -> list[Text]:
        texts = [*group(0, PROMPTS[0], Sampling()), *group(1, PROMPTS[1], Sampling())]

        def spoil(module: Any, args: Any, output: Any) -> None:
            if is_broken:  # the last row is of the second slot, whether prompts or texts are computed
                output.logits[-1] = math.nan

        with loaded_adapters(backbone, [None, None], "tiny") as served:
            hook = model.register_forward_hook(spoil)
            write(backbone, served, texts, batch_size=100)
            hook.remove()
        return texts

    broken, whole = written(is_broken=True), written(is_broken=False)
    assert [text.is_broken for text in broken[3:]] == [True] * 3
    assert not any(text.is_broken for text in whole)
    assert [text.tokens for text in broken if not text.is_broken] == [
        other.tokens for text, other in zip(broken, whole, strict=True) if not text.is_broken
    ]
