"""Checks of a model when it is loaded: the tokens that attention sees, its own losses, the independence of rows; in
float32 and in bfloat16."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from architectures import SIZES, build_tiny
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    WhisperConfig,
    WhisperForCausalLM,
)

import alto.backbone.probe as probe
from alto.backbone import Backbone
from alto.backbone.probe import LARGEST_SMALL_WINDOW, can_widen, find_patterns, in_float32, small_windows
from alto.errors import UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LENGTHS = [41, 1, 30, 7]
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def build(model_class: Any, config_class: Any, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config_class(**(SIZES | changes))).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2 and parameter.std() < 0.1:  # a class that ignores initializer_range
            nn.init.normal_(parameter, std=0.2)
    return model


def qwen2_moe(window: int) -> PreTrainedModel:
    """Build a model of two layers, one with a window; only the mask contains the window."""
    sizes = EXPERTS | {"shared_expert_intermediate_size": 16, "max_window_layers": 1}
    return build(Qwen2MoeForCausalLM, Qwen2MoeConfig, use_sliding_window=True, sliding_window=window, **sizes)


def phimoe(window: int | None) -> PreTrainedModel:
    return build(PhimoeForCausalLM, PhimoeConfig, sliding_window=window, rope_parameters=ROPE, **EXPERTS)


def llama4(chunk: int = 7, **changes: Any) -> PreTrainedModel:
    sizes = {"intermediate_size_mlp": 48, "head_dim": 8, "attention_chunk_size": chunk, "num_local_experts": 2}
    layers = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
    return build(Llama4ForCausalLM, Llama4TextConfig, **(sizes | layers | {"rope_parameters": ROPE} | changes))


def recurrent_gemma() -> PreTrainedModel:
    blocks = {"block_types": ["recurrent", "attention"], "lru_width": 32, "head_dim": 8, "attention_window_size": 6}
    return build(RecurrentGemmaForCausalLM, RecurrentGemmaConfig, **blocks)


def qwen3_next() -> PreTrainedModel:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    layers = {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 8, "head_dim": 8}
    sizes = EXPERTS | {"shared_expert_intermediate_size": 16, "mlp_only_layers": []}
    return build(Qwen3NextForCausalLM, Qwen3NextConfig, **(linear | layers | sizes))


def bart() -> PreTrainedModel:
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "dropout": 0.0}
    return build(BartForCausalLM, BartConfig, **sizes)


EXACT: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2-moe": lambda: qwen2_moe(5),
    "qwen2-moe, a window that is made small": lambda: qwen2_moe(20),
    "phimoe": lambda: phimoe(5),
    "phimoe, a window that is made small": lambda: phimoe(20),
    "llama4": lambda: llama4(attn_temperature_tuning=False),
    "llama4, a chunk that is made small": lambda: llama4(20, attn_temperature_tuning=False),
    "stablelm": lambda: build(StableLmForCausalLM, StableLmConfig),
    "nemotron": lambda: build(NemotronForCausalLM, NemotronConfig),
    "mixtral": lambda: build(MixtralForCausalLM, MixtralConfig, sliding_window=5, **EXPERTS),
    "bert, with layers before its head": lambda: build(BertLMHeadModel, BertConfig, is_decoder=True),
}


def draw(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw token ids and positions of rows of ``LENGTHS``."""
    ids = torch.randint(2, SIZES["vocab_size"], (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", EXACT)
def test_a_pattern_only_in_the_mask_is_followed(name: str) -> None:
    ids, positions = draw()
    own = EXACT[name]().requires_grad_(False)
    logits = torch.cat([own(input_ids=row[None], use_cache=False).logits[0] for row in ids.split(LENGTHS)])
    backbone = Backbone(EXACT[name](), None, "tiny")
    assert not backbone.is_padded
    hidden = backbone.hidden_states(ids, positions, LENGTHS)
    assert relative(backbone.model.get_output_embeddings()(hidden), logits) < 1e-5
    losses = backbone.token_losses(hidden, ids.roll(1))
    assert relative(losses, F.cross_entropy(logits, ids.roll(1), reduction="none")) < 1e-5


@pytest.mark.parametrize("name", ["qwen2-moe", "phimoe", "llama4", "mixtral"])
def test_without_the_pattern_it_is_another_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the models above do depend on the pattern."""
    monkeypatch.setattr(probe, "set_pattern", lambda module, pattern: None)
    monkeypatch.setattr("alto.backbone.attention._PATTERN", "none")
    if name == "mixtral":  # it passes its window to attention as well
        assert Backbone(EXACT[name](), None, "tiny")
        return
    backbone = Backbone(EXACT[name](), None, "tiny")
    assert backbone.is_padded
    assert "the packed pass to give the model's own losses" in backbone.why_padded


@pytest.mark.parametrize("name", EXACT)
def test_half_precision_is_let_through(name: str) -> None:
    model = EXACT[name]().to(torch.bfloat16)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    backbone = Backbone(model, None, "tiny")
    assert backbone.dtype == torch.bfloat16
    assert not backbone.is_padded
    after = backbone.model.state_dict()
    assert all(torch.equal(after[key], value) and after[key].dtype == value.dtype for key, value in before.items())


DSA = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 2048} | LATENT
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "recurrent-gemma": (recurrent_gemma, "model's own losses|another row"),
    "bart": (bart, "predicts the same token"),
    "whisper": (
        lambda: build(
            WhisperForCausalLM,
            WhisperConfig,
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            decoder_start_token_id=2,
        ),
        "predicts the same token",
    ),
    "bert, which sees later tokens": (
        lambda: build(BertLMHeadModel, BertConfig, is_decoder=False),
        "depend only on earlier tokens.*set is_decoder to true",
    ),
}
PADDED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "doge": (
        lambda: build(DogeForCausalLM, DogeConfig, sliding_window=5),
        "found a different mask in model.layers.0.self_attn",
    ),
    "doge, windows that are made small": (
        lambda: build(DogeForCausalLM, DogeConfig, sliding_window=2048, keep_window_size=2048),
        "found a different mask in model.layers.0.self_attn",
    ),
    "llama4, temperatures by place in the pass": (llama4, "model's own losses"),
    "deepseek-v3.2": (lambda: build(DeepseekV32ForCausalLM, DeepseekV32Config, **DSA), "runs on a few rows"),
    "glm-moe-dsa": (lambda: build(GlmMoeDsaForCausalLM, GlmMoeDsaConfig, **DSA), "runs on a few rows"),
    "bloom": (
        lambda: build(BloomForCausalLM, BloomConfig, n_layer=2, n_head=4),
        "BloomForCausalLM: expected .* attention can be replaced",
    ),
    "gpt-oss": (
        lambda: build(GptOssForCausalLM, GptOssConfig, head_dim=8, rope_parameters=ROPE, sliding_window=5, **EXPERTS),
        "attention asks for s_aux",
    ),
    "mamba": (lambda: build(MambaForCausalLM, MambaConfig, state_size=8), "model's own losses"),
    "qwen3-next": (qwen3_next, "model's own losses"),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PADDED)
def test_a_model_that_cannot_be_packed_computes_padded_rows(name: str, dtype: torch.dtype) -> None:
    make, why = PADDED[name]
    ids, positions = draw()
    own = make().to(dtype)
    logits = torch.cat([own(input_ids=row[None], use_cache=False).logits[0] for row in ids.split(LENGTHS)])
    backbone = Backbone(make().to(dtype), None, "tiny")
    assert backbone.is_padded
    assert re.search(why, backbone.why_padded)
    found = backbone.logits(backbone.hidden_states(ids, positions, LENGTHS))
    assert relative(found, logits.float()) < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("name", ["cohere", "granite", "minicpm3"])
def test_a_factor_of_the_logits_is_found(name: str) -> None:
    make: Mapping[str, Callable[[], PreTrainedModel]] = {
        "cohere": lambda: build(CohereForCausalLM, CohereConfig, logit_scale=0.0625),
        "granite": lambda: build(GraniteForCausalLM, GraniteConfig, logits_scaling=8.0),
        "minicpm3": lambda: build(MiniCPM3ForCausalLM, MiniCPM3Config, dim_model_base=16, **LATENT),
    }
    ids, positions = draw()
    own = make[name]().requires_grad_(False)
    logits = torch.cat([own(input_ids=row[None], use_cache=False).logits[0] for row in ids.split(LENGTHS)])
    backbone = Backbone(make[name](), None, "tiny")
    assert not backbone.is_padded
    hidden = backbone.hidden_states(ids, positions, LENGTHS).detach().requires_grad_()
    assert relative(backbone.logits(hidden).detach(), logits) < 1e-5
    losses = backbone.token_losses(hidden, ids.roll(1))
    assert relative(losses.detach(), F.cross_entropy(logits, ids.roll(1), reduction="none")) < 1e-5
    losses.sum().backward()
    same = hidden.detach().clone().requires_grad_()
    F.cross_entropy(backbone.logits(same), ids.roll(1), reduction="sum").backward()
    assert relative(hidden.grad, same.grad) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_trained_rightly_is_refused(name: str, dtype: torch.dtype) -> None:
    make, message = REFUSED[name]
    model = make().to(dtype)
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__}: expected .*({message})"):
        Backbone(model, None, "tiny")


class TestIsolation:
    """Models whose rows mix by less than bfloat16 rounds."""

    @staticmethod
    def mixing(amount: float) -> PreTrainedModel:
        model = build_tiny("llama")

        def mix(_module: object, _inputs: object, hidden: Tensor) -> Tensor:
            return hidden + amount * hidden.mean(1, keepdim=True)

        model.model.layers[0].register_forward_hook(mix)
        return model

    @staticmethod
    def refusal_of_packed_rows(model: PreTrainedModel) -> str:
        """Return why rows are padded, or the refusal: separate, padded rows agree up to the tolerance of the test."""
        try:
            return Backbone(model, None, "tiny").why_padded
        except UnsupportedModelError as refusal:
            return str(refusal.__context__)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_little_mixing_is_refused(self, dtype: torch.dtype) -> None:
        with pytest.raises(UnsupportedModelError, match="expected"):
            Backbone(self.mixing(1e-3).to(dtype), None, "tiny")
        assert Backbone(self.mixing(0.0).to(dtype), None, "tiny").dtype == dtype

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_mixing_is_seen_where_losses_agree(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "_compare_in_float32", lambda *_: None)
        monkeypatch.setattr(probe._Rows, "compare", lambda rows, *_: rows._hidden(rows._ids_T))
        refusal = self.refusal_of_packed_rows(self.mixing(1e-3).to(dtype))
        assert "one that changes with the tokens of another row" in refusal

    @pytest.mark.parametrize("amount", [0.0, 1e-3])
    def test_within_rounding_the_gradient_decides(self, amount: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "_MAX_RATIO", float("inf"))
        monkeypatch.setattr(probe, "can_widen", lambda model: False)
        monkeypatch.setattr(torch, "equal", lambda *_: False)  # a mixture of experts may round its sums so
        if amount:
            refusal = self.refusal_of_packed_rows(self.mixing(amount))
            assert "one that changes with the tokens of another row" in refusal
        else:
            assert not Backbone(self.mixing(amount), None, "tiny").is_padded


class TestWindows:
    def test_are_small_inside_and_as_they_were_behind(self) -> None:
        model = build_tiny("gemma3", sliding_window=300)
        places = [model.config, *(layer.self_attn for layer in model.model.layers)]
        before = [place.sliding_window for place in places]
        assert 300 in before
        with small_windows(model) as real:
            inside = [place.sliding_window for place in places]
            assert all(size is None or size <= LARGEST_SMALL_WINDOW for size in inside)
            assert [real.get(size, size) for size in inside] == before
        assert [place.sliding_window for place in places] == before

    def test_different_ones_stay_different(self) -> None:
        model = build_tiny("gemma3", sliding_window=300)
        model.model.layers[0].self_attn.sliding_window = 200
        model.model.layers[1].self_attn.other_window = 5
        with small_windows(model) as real:
            assert sorted(real.values()) == [200, 300]
            assert 5 not in real
            assert real[model.model.layers[0].self_attn.sliding_window] == 200

    def test_come_back_where_the_probe_fails(self) -> None:
        model = build(DogeForCausalLM, DogeConfig, sliding_window=2048, keep_window_size=2048)
        assert Backbone(model, None, "tiny").is_padded
        assert model.config.sliding_window == 2048
        assert model.model.layers[0].self_attn.keep_window_size == 2048

    def test_are_read_off_the_masks(self) -> None:
        model = qwen2_moe(9)
        layers = [layer.self_attn for layer in model.model.layers]
        with torch.no_grad():
            patterns = find_patterns(model, draw()[0][:30])
        assert [patterns[layer].window for layer in layers] == [9, None]


def test_float32_is_a_module_at_a_time() -> None:
    model = build_tiny("llama").to(torch.bfloat16)
    ids = draw()[0][None, :30]
    with torch.no_grad():
        expected = build_tiny("llama").to(torch.bfloat16).float()(input_ids=ids).logits
        assert can_widen(model)
        with in_float32(model):
            assert model.lm_head.weight.dtype == torch.bfloat16
            found = model(input_ids=ids).logits
        assert relative(found, expected) < 1e-6
        assert relative(model(input_ids=ids).logits.float(), expected) > 1e-3
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not can_widen(build_tiny("llama"))


def test_layers_are_recomputed_over_their_own_sequences() -> None:
    """This also holds when another pass begins before the backward pass."""

    @contextmanager
    def leaf(backbone: Backbone) -> Iterator[list[Tensor]]:
        caught: list[Tensor] = []

        def catch(_module: object, _inputs: object, output: Tensor) -> Tensor:
            caught.append(output.detach().requires_grad_())
            return caught[-1]

        hook = backbone.model.get_input_embeddings().register_forward_hook(catch)
        yield caught
        hook.remove()

    ids, positions = draw()
    gradients = []
    for checkpointing in (False, True):
        backbone = Backbone(build_tiny("llama"), None, "tiny", gradient_checkpointing=checkpointing)
        with leaf(backbone) as caught:
            hidden = backbone.hidden_states(ids, positions, LENGTHS)
            backbone.hidden_states(ids, torch.arange(len(ids)), [len(ids)])
            hidden.square().sum().backward()
        gradients.append(caught[0].grad)
    assert torch.equal(*gradients)
