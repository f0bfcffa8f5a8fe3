"""The cache with room: what transformers' own holds, without copying what it holds for every token."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig

from alto.evaluation.generate import cache_argument, roomy_cache

CONFIG = LlamaConfig(num_hidden_layers=1)


def test_it_holds_what_transformers_cache_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = roomy_cache(CONFIG), DynamicCache(config=CONFIG)
    rows = 4
    for step in range(40):
        keys, values = torch.randn(2, rows, 2, 9 if step == 0 else 1, 8, generator=generator)
        found, expected = ours.update(keys, values, 0), theirs.update(keys, values, 0)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert ours.get_seq_length() == theirs.get_seq_length()
        if step in (3, 4, 30):  # rows leave, before and after it has grown
            keep = torch.tensor([row for row in range(rows) if row != step % rows])
            ours.batch_select_indices(keep)
            theirs.batch_select_indices(keep)
            rows -= 1


def test_a_token_is_written_into_room_that_is_there() -> None:
    cache = roomy_cache(CONFIG)
    first, _ = cache.update(torch.zeros(1, 1, 9, 8), torch.zeros(1, 1, 9, 8), 0)
    second, _ = cache.update(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8), 0)
    assert first.data_ptr() == second.data_ptr()
    assert second[0, 0, :, 0].tolist() == [0.0] * 9 + [1.0]


def test_sliding_windows_stay_transformers_own() -> None:
    config = MistralConfig(num_hidden_layers=2, sliding_window=4)
    assert [type(layer) for layer in roomy_cache(config).layers] == [
        type(layer) for layer in DynamicCache(config=config).layers
    ]


def test_the_argument_is_the_one_the_model_has() -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    )
    model = LlamaForCausalLM(config)
    assert cache_argument(model) in inspect.signature(LlamaForCausalLM.forward).parameters

    class OwnCode(nn.Module):
        def forward(self, input_ids: object, past_key_values: object = None) -> None: ...

    class NewerOwnCode(nn.Module):
        def forward(self, input_ids: object, cache: object = None) -> None: ...

    assert cache_argument(OwnCode()) == "past_key_values"
    assert cache_argument(NewerOwnCode()) == "cache"
