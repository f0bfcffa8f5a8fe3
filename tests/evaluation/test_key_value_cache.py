"""The cache of generated texts: it holds what transformers' cache holds, and rows join and leave."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig

from alto.evaluation.key_value_cache import RoomyLayer, cache_argument, roomy_cache

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
        if step in (3, 4, 30):  # rows leave before and after it has grown
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


def filled(values: torch.Tensor) -> RoomyLayer:
    layer = RoomyLayer()
    layer.update(values, -values)
    return layer


def test_rows_join_at_the_end_of_shorter_and_longer_ones() -> None:
    longer, shorter = torch.randn(3, 2, 9, 4), torch.randn(2, 2, 5, 4)
    for mine, its in ((longer, shorter), (shorter, longer)):
        layer, places = filled(mine), torch.tensor([4, 0, 2, 3, 1])
        layer.join(filled(its), places, 7)
        expected = torch.zeros(5, 2, 7, 4)
        for place, row in zip(places.tolist(), [*mine, *its], strict=True):
            kept = row[:, -7:]
            expected[place, :, 7 - kept.shape[1] :] = kept
        assert torch.equal(layer.keys, expected)
        assert torch.equal(layer.values, -expected)
        added = torch.ones(5, 2, 1, 4)
        layer.update(added, added)
        assert torch.equal(layer.keys, torch.cat([expected, added], 2))


def test_rows_leave_with_the_padding_of_all_others() -> None:
    values = torch.randn(4, 2, 9, 4)
    layer = filled(values)
    layer.keep(torch.tensor([3, 1]), 6)
    assert torch.equal(layer.keys, values[[3, 1], :, 3:])
    added = torch.ones(2, 2, 1, 4)
    assert torch.equal(layer.update(added, added)[1], torch.cat([-values[[3, 1], :, 3:], added], 2))
