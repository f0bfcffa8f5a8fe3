"""The pass without padding against the model's own forward pass over each sequence, for several architectures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTForCausalLM,
    PreTrainedModel,
    SeedOssForCausalLM,
)

from alto.backbone import Backbone
from alto.errors import UnsupportedModelError
from alto.kernels import TokenSchedule
from alto.lora import AdapterBank, AdapterShape, BankLayout, inject, linear_modules

ModelFactory = Callable[..., PreTrainedModel]
LENGTHS = [9, 1, 17, 4]
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def packed(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> SimpleNamespace:
    """Lay random tokens end to end, with random targets."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 97, (sum(lengths),), generator=generator)
    targets = torch.randint(2, 97, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return SimpleNamespace(ids=ids, targets=targets, positions=positions, lengths=list(lengths))


class Inputs:
    """Records a model's input embeddings, so that their gradients can be compared."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.caught: list[Tensor] = []
        model.get_input_embeddings().register_forward_hook(self._catch)

    def _catch(self, _module: object, _arguments: object, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        self.caught.append(leaf)
        return leaf


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().double().norm() / expected.detach().double().norm())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_equals_the_models_own_forward(tiny_model: ModelFactory, architecture: str) -> None:
    batch = packed()
    own = tiny_model(architecture).requires_grad_(False)
    own_inputs = Inputs(own)
    hidden, losses = [], []
    for ids, targets in zip(batch.ids.split(LENGTHS), batch.targets.split(LENGTHS), strict=True):
        output = own(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        hidden.append(output.hidden_states[-1][0])
        losses.append(F.cross_entropy(output.logits[0].float(), targets, reduction="none"))
    weights = torch.linspace(0.5, 2.0, len(batch.ids))
    (torch.cat(losses) * weights).sum().backward()

    backbone = Backbone(tiny_model(architecture), None, "tiny")
    inputs = Inputs(backbone.model)
    found_hidden = backbone.hidden_states(batch.ids, batch.positions, batch.lengths)
    found_losses = backbone.token_losses(found_hidden, batch.targets)
    (found_losses * weights).sum().backward()

    assert relative(found_hidden, torch.cat(hidden)) < 1e-5
    assert relative(found_losses, torch.cat(losses)) < 1e-5
    expected_gradient = torch.cat([leaf.grad[0] for leaf in own_inputs.caught])
    assert relative(inputs.caught[0].grad[0], expected_gradient) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi", "smollm3"])
def test_heads_tied_and_untied(tiny_model: ModelFactory, architecture: str, tied: bool) -> None:
    own = tiny_model(architecture, tie_word_embeddings=tied)
    assert (own.get_output_embeddings().weight is own.get_input_embeddings().weight) == tied
    batch = packed([9])
    expected = F.cross_entropy(own(input_ids=batch.ids[None]).logits[0], batch.targets, reduction="none")
    backbone = Backbone(own, None, "tiny")
    found = backbone.token_losses(backbone.hidden_states(batch.ids, batch.positions, [9]), batch.targets)
    assert relative(found, expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("mistake", ["one long sequence", "positions run on", "window off by one"])
def test_the_comparison_bites(tiny_model: ModelFactory, architecture: str, mistake: str) -> None:
    if mistake == "window off by one" and architecture != "mistral":
        pytest.skip("llama has no window")
    batch = packed()
    own = tiny_model(architecture)
    expected = torch.cat([own.model(input_ids=ids[None]).last_hidden_state[0] for ids in batch.ids.split(LENGTHS)])
    other = tiny_model(architecture, sliding_window=6) if mistake == "window off by one" else tiny_model(architecture)
    backbone = Backbone(other, None, "tiny")
    lengths = [len(batch.ids)] if mistake == "one long sequence" else batch.lengths
    # Rotary attention depends on differences of positions only: shifting a sequence is harmless, stretching is not.
    positions = 2 * batch.positions if mistake == "positions run on" else batch.positions
    assert relative(backbone.hidden_states(batch.ids, positions, lengths), expected) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_no_sequence_sees_another(tiny_model: ModelFactory, architecture: str, changed: int) -> None:
    backbone = Backbone(tiny_model(architecture), None, "tiny")
    batch, other = packed(), packed()
    start = sum(LENGTHS[:changed])
    other.ids[start : start + LENGTHS[changed]] = packed(seed=1).ids[start : start + LENGTHS[changed]]
    before = backbone.hidden_states(batch.ids, batch.positions, batch.lengths).split(LENGTHS)
    after = backbone.hidden_states(other.ids, other.positions, other.lengths).split(LENGTHS)
    same = [torch.equal(left, right) for left, right in zip(before, after, strict=True)]
    assert same == [index != changed for index in range(len(LENGTHS))]


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_no_token_sees_the_next(tiny_model: ModelFactory, architecture: str) -> None:
    backbone = Backbone(tiny_model(architecture), None, "tiny")
    batch, other = packed([9, 17]), packed([9, 17])
    other.ids[16:26] = packed([9, 17], seed=1).ids[16:26]
    before = backbone.hidden_states(batch.ids, batch.positions, batch.lengths)
    after = backbone.hidden_states(other.ids, other.positions, other.lengths)
    assert torch.equal(before[:16], after[:16])
    assert not torch.equal(before[16:], after[16:])


@pytest.mark.parametrize("build", [OPTForCausalLM, SeedOssForCausalLM])
def test_dropout_that_a_layer_applies_itself_stays_off_when_it_is_recomputed(build: Any) -> None:
    """OPT's layers apply dropout by their own mode, which also turns on recomputation."""
    of_opt, of_seed = {"ffn_dim": 48, "word_embed_proj_dim": 32}, {"head_dim": 8, "num_key_value_heads": 2}
    sizes = of_opt if build is OPTForCausalLM else of_seed
    torch.manual_seed(0)
    backbone = Backbone(build(build.config_class(**SMALL, **sizes)), None, "tiny")
    batch = packed()
    plain = backbone.hidden_states(batch.ids, batch.positions, batch.lengths)
    backbone.checkpoint_layers()
    inputs = Inputs(backbone.model)
    recomputed = backbone.hidden_states(batch.ids, batch.positions, batch.lengths)
    assert torch.equal(recomputed, plain)
    recomputed.sum().backward()
    assert inputs.caught
    assert sum(module.training for module in backbone.model.modules()) == SMALL["num_hidden_layers"]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "phi3", "gemma2", "gemma3"])
def test_checkpointing_gives_the_same_losses_and_adapter_gradients(
    tiny_model: ModelFactory, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, results, micro_batches = packed(), [], []
    for checkpointing in (False, True):
        # A dropout inside the base model, which must stay off; Phi-3 has one as a module of each layer.
        dropout: dict[str, Any] = {"resid_pdrop": 0.5} if architecture == "phi3" else {"attention_dropout": 0.5}
        model = tiny_model(architecture, **dropout)
        modules = linear_modules(model)
        backbone = Backbone(model, None, "tiny", gradient_checkpointing=checkpointing)
        bank = AdapterBank(BankLayout(modules=modules, max_rank=3), 2)
        context = inject(model, bank)
        for slot in range(2):
            bank.occupy(slot, AdapterShape(rank=3, targets=modules))
            bank.initialise(slot, slot)
            for _, _, b in bank.matrices(bank.params_ZP, slot):
                b.fill_(0.01)
        runs = 0

        def count(*_: object) -> None:
            nonlocal runs
            runs += 1

        model.model.layers[0].self_attn.register_forward_hook(count)
        with context.use(TokenSchedule.build([0, 1], [10, 21], [2.0, 1.0])):
            losses = backbone.token_losses(
                backbone.hidden_states(batch.ids, batch.positions, batch.lengths), batch.targets
            )
            losses.sum().backward()
        micro_batches.append(runs)
        results.append((losses.detach(), bank.grads_ZP.clone()))
    assert micro_batches == [1, 2], "the layer was not recomputed, so the test proves nothing"
    assert results[0][1].any(1).all()
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*results, strict=True))


def test_the_base_is_frozen_and_in_evaluation_mode(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama").train()
    backbone = Backbone(model, None, "tiny")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    assert (backbone.dtype, backbone.device) == (torch.float32, torch.device("cpu"))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_pass_the_probe(tiny_model: ModelFactory, dtype: torch.dtype) -> None:
    batch = packed()
    backbone = Backbone(tiny_model("llama").to(dtype), None, "tiny")
    assert backbone.hidden_states(batch.ids, batch.positions, batch.lengths).dtype == dtype


class ScaledLlama(LlamaForCausalLM):
    """A Llama that divides its logits by two after the output head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 2
        return output


class LeakyLlama(LlamaForCausalLM):
    """A Llama whose first layer mixes neighbouring tokens across sequence borders, as a convolution does."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers[0].register_forward_hook(lambda _module, _inputs, hidden: hidden + 0.5 * hidden.roll(1, 1))


class TestTheProbe:
    """A model whose own forward pass does more than ours is refused, not trained wrongly."""

    @pytest.mark.parametrize(
        "build",
        [
            lambda: ScaledLlama(LlamaConfig(**SMALL)),
            lambda: LeakyLlama(LlamaConfig(**SMALL)),
        ],
        ids=["scaled logits", "mixing across sequences"],
    )
    def test_another_forward_is_refused(self, build: Callable[[], PreTrainedModel]) -> None:
        model = build()
        with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__}: expected .* model's own losses"):
            Backbone(model, None, "tiny")

    def test_nan_losses_are_refused(self, tiny_model: ModelFactory) -> None:
        model = tiny_model("llama")
        with torch.no_grad():
            model.model.norm.weight[0] = float("nan")
        with pytest.raises(UnsupportedModelError):
            Backbone(model, None, "tiny")

    def test_a_model_without_a_linear_head_is_refused_by_name(self, tiny_model: ModelFactory) -> None:
        model = tiny_model("llama")
        model.lm_head = torch.nn.Sequential(model.lm_head)
        with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM: expected .* head .* found Sequential"):
            Backbone(model, None, "tiny")

    def test_layers_that_cannot_be_recomputed_are_refused_by_name(self, tiny_model: ModelFactory) -> None:
        class Layer(torch.nn.Module):
            def __init__(self, inner: torch.nn.Module) -> None:
                super().__init__()
                self.__dict__["inner"] = inner  # hidden from modules()

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return self.inner(*args, **kwargs)

        def build() -> PreTrainedModel:
            model = tiny_model("llama")
            model.model.layers = torch.nn.ModuleList(Layer(layer) for layer in model.model.layers)
            return model

        Backbone(build(), None, "tiny")
        with pytest.raises(
            UnsupportedModelError, match=r"gradient_checkpointing: LlamaForCausalLM has no layers .* remove the key"
        ):
            Backbone(build(), None, "tiny", gradient_checkpointing=True)

    def test_the_refusal_of_packed_rows_is_the_cause_of_that_of_padded_ones(self) -> None:
        with pytest.raises(UnsupportedModelError, match="the padded pass") as refusal:
            Backbone(LeakyLlama(LlamaConfig(**SMALL)), None, "tiny")
        assert "the packed pass" in str(refusal.value.__context__)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    },
}


@torch.no_grad()
@pytest.mark.parametrize("rope", ROPES)
def test_a_sequence_that_would_rescale_all_positions_is_refused(tiny_model: ModelFactory, rope: str) -> None:
    """Such models choose a pass's frequencies by its longest sequence, which may belong to another job."""
    architecture = "phi3" if rope == "longrope" else "llama"
    sizes = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    sizes = sizes if rope == "longrope" else {"max_position_embeddings": 16}
    backbone = Backbone(tiny_model(architecture, rope_parameters=ROPES[rope], **sizes), None, "tiny")
    batch = packed([16, 9])
    assert backbone.hidden_states(batch.ids, batch.positions, batch.lengths).isfinite().all()
    batch = packed([9, 17])
    with pytest.raises(UnsupportedModelError, match="at most 16 tokens, found 17; lower max_length"):
        backbone.hidden_states(batch.ids, batch.positions, batch.lengths)
