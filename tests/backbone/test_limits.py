"""Numbers of positions and embedding rows, as configurations of many kinds state them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    BloomConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from alto.backbone import limits_of, load_config
from alto.spec import BaseModelSpec


def yarn(**settings: Any) -> Qwen2Config:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64, **settings}
    return Qwen2Config(max_position_embeddings=64, rope_parameters=rope)


@pytest.mark.parametrize(
    ("config", "positions", "rows"),
    [
        (LlamaConfig(max_position_embeddings=128, vocab_size=50), 128, 50),
        (GPT2Config(n_positions=96, vocab_size=70), 96, 70),
        # OPT's table of positions has two more rows than positions.
        (OPTConfig(max_position_embeddings=64, vocab_size=50), 64, 50),
        (Gemma3Config(text_config={"max_position_embeddings": 256, "vocab_size": 60}), 256, 60),
        (yarn(), 256, Qwen2Config().vocab_size),
        (yarn(original_max_position_embeddings=8), 64, Qwen2Config().vocab_size),
        (MambaConfig(vocab_size=50), None, 50),
        (BloomConfig(vocab_size=50), None, 50),
    ],
)
def test_what_the_configuration_says_is_the_limit(config: PreTrainedConfig, positions: int | None, rows: int) -> None:
    found = limits_of(config)
    assert (found.max_positions, found.vocab_size) == (positions, rows)


def test_the_configuration_is_read_without_the_weights() -> None:
    assert limits_of(load_config(BaseModelSpec(id="alto-tiny"))).max_positions == 2048
