"""Fused kernels in a base model: which modules use them, that they compute what transformers' classes compute, and the
reasons given for other modules. Without a GPU the kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, SIZES, build_tiny
from layer_kernels import functions
from tiny import load_tokenizer
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from alto.backbone import Backbone, borrowed
from alto.backbone.fused_modules import (
    FusedForward,
    FusedRotary,
    fused_norm,
    fused_rotation,
    linear_names,
    norm_signature,
    rotating_function,
    why_unfused,
)
from alto.kernels import layer_triton
from alto.spec.base_model import BaseObjects

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = (9, 1, 14)
NUM_NORMS = {"qwen3": 9, "gemma2": 9, "gemma2-plain-attention": 9, "gemma3": 13, "phi": 0}
"""Norms per model; models not listed have five: two in every layer, and the last one."""

SLOW, USUAL = pytest.mark.slow("models"), ("qwen3", "gemma2", "phi3")
NO_SWIGLU = ("gemma", "gemma2", "gemma2-plain-attention", "gemma3", "phi")
"""Models with another activation, or without a gate."""


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    functions()  # skips where the kernels cannot run
    monkeypatch.setenv("ALTO_KERNELS", "triton")


def make_backbone(name: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Backbone:
    return Backbone(build_tiny(name).to(DEVICE, dtype), None, "tiny", **settings)  # type: ignore[arg-type]


def losses_and_gradient(backbone: Backbone) -> tuple[Tensor, Tensor]:
    """Return token losses of three sequences, and the gradient of their sum for the embeddings."""
    ids_T = torch.randint(0, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS]).to(DEVICE)
    leaves: list[Tensor] = []
    hook = backbone.model.get_input_embeddings().register_forward_hook(
        lambda _, __, output: leaves.append(output.detach().requires_grad_()) or leaves[0]
    )
    try:
        losses_T = backbone.token_losses(backbone.hidden_states(ids_T, positions_T, LENGTHS), ids_T.roll(1))
    finally:
        hook.remove()
    losses_T.sum().backward()
    gradient = leaves[0].grad
    assert gradient is not None
    return losses_T.detach(), gradient


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name not in USUAL else ()) for name in ARCHITECTURES]
)
def test_losses_and_gradients_are_those_of_the_model_s_own_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = make_backbone(name)
    expected = {"rms_norm": NUM_NORMS.get(name, 5), "swiglu": 0 if name in NO_SWIGLU else 2, "rotary": 2}
    expected["cross_entropy"] = 0 if name.startswith("gemma2") else 1
    assert fused.fusion.counts == {op: number for op, number in expected.items() if number}
    kept = ["its activation is not silu(gate) · up"] * name.startswith("gemma")
    assert list(fused.fusion.kept.values()) == kept + ["its logits are capped"] * name.startswith("gemma2")
    monkeypatch.setenv("ALTO_KERNELS", "torch")
    own = make_backbone(name)
    for found, expected in zip(losses_and_gradient(fused), losses_and_gradient(own), strict=True):
        assert apart(found, expected) < 1e-5


def test_in_16_bits_they_are_so_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = make_backbone(dtype=torch.bfloat16)
    monkeypatch.setenv("ALTO_KERNELS", "torch")
    own, exact = make_backbone(dtype=torch.bfloat16), make_backbone()
    exact.model.load_state_dict(own.model.state_dict())
    results = [losses_and_gradient(backbone) for backbone in (fused, own, exact)]
    for found, rounded, right in zip(*results, strict=True):
        # Triton's interpreter truncates where its compiler rounds.
        assert apart(found, right) < 2.5 * apart(rounded, right)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_with_other_backends_nothing_is_replaced(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_KERNELS", backend)
    backbone = make_backbone()
    assert not any("forward" in vars(module) for module in backbone.model.modules())
    assert backbone.fusion.described() == {"kept": {"all": "the backend of the kernels is not Triton"}}


def test_a_compiled_base_is_not_fused_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alto.backbone.backbone._compile_layers", lambda model: None)
    backbone = make_backbone(torch_compile=True)
    assert not fused_modules(backbone)
    assert backbone.fusion.described() == {
        "cross_entropy": 1,
        "kept": {"layers": "torch_compile fuses the parts of a layer itself"},
    }


def fused_modules(backbone: Backbone) -> list[nn.Module]:
    return [module for module in backbone.model.modules() if isinstance(vars(module).get("forward"), FusedForward)]


def test_generation_computes_with_the_model_s_own_classes() -> None:
    backbone = make_backbone()
    num_fused = len(fused_modules(backbone))
    assert num_fused
    with backbone.own_attention():
        assert not fused_modules(backbone)
    assert len(fused_modules(backbone)) == num_fused


def test_a_model_that_was_given_is_afterwards_as_it_was() -> None:
    tokenizer = load_tokenizer()
    model = build_tiny("llama", vocab_size=len(tokenizer)).to(DEVICE)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with borrowed(BaseObjects(model=model, tokenizer=tokenizer, name="given"), DEVICE):
        assert fused_modules(Backbone(model, tokenizer, "given"))
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


class TestNorms:
    """Norms that are replaced by a kernel, and norms that are not."""

    def test_one_whose_weight_is_trained_is_left_alone(self) -> None:
        backbone = make_backbone()
        norm: Any = backbone.model.model.norm
        norm.weight.requires_grad_(True)
        norm(torch.randn(2, 32, device=DEVICE)).sum().backward()
        assert norm.weight.grad is not None
        assert norm.forward.trial.why_not == "its weight is trained"

    @pytest.mark.parametrize(
        "change",
        [
            lambda self, x, y: y * 1.01,
            lambda self, x, y: self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.01 * 1e-6)),
            lambda self, x, y: self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)),
            lambda self, x, y: y + 0.001 * self.weight,
        ],
        ids=["factor", "epsilon", "epsilon outside", "bias"],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_class_of_the_same_name_that_computes_something_else_is_left_alone(
        self, change: Callable[..., Tensor], dtype: torch.dtype
    ) -> None:
        class Other(LlamaRMSNorm):
            def forward(self, hidden_states: Tensor) -> Tensor:
                return change(self, hidden_states, super().forward(hidden_states))

        Other.__name__ = "LlamaRMSNorm"
        norm = Other(64).to(DEVICE, dtype)
        assert norm_signature(norm) is not None
        assert fused_norm(norm, functions(), DEVICE) == "its numbers match no known kind of RMS norm"

    @pytest.mark.parametrize("mistake", [{"epsilon": 2e-6}, {"kind": 2}, {"factor": -1.0}])
    def test_a_kernel_with_other_numbers_is_not_taken(self, mistake: dict[str, Any]) -> None:
        right = functions()

        def rms_norm(x: Tensor, weight_H: Tensor, epsilon: float, kind: Any) -> Tensor:
            y = right.rms_norm(x, weight_H, mistake.get("epsilon", epsilon), mistake.get("kind", kind))
            return mistake.get("factor", 1.0) * y

        wrong: Any = SimpleNamespace(rms_norm=rms_norm, MAX_NORM_WIDTH=right.MAX_NORM_WIDTH)
        norm = LlamaRMSNorm(64).to(DEVICE)
        assert isinstance(fused_norm(norm, right, DEVICE), tuple)
        assert fused_norm(norm, wrong, DEVICE) == "the kernel's numbers differ from its own"

    def test_what_has_another_structure_is_no_norm(self) -> None:
        others = (nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(4, 4), nn.LayerNorm(4, bias=False), nn.ReLU())
        assert [norm_signature(module) for module in others] == [None] * len(others)


class TestMlps:
    """Gated products that are replaced by a kernel, and those that are not."""

    def found(self, module: nn.Module, ops: Any = None, dtype: torch.dtype = torch.float32) -> str:
        names = linear_names(module)
        assert names is not None
        return why_unfused(module, names, ops or functions(), dtype, DEVICE)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("name", ["llama", "phi3"])
    def test_gate_and_up_apart_or_in_one_layer(self, name: str, dtype: torch.dtype) -> None:
        assert self.found(build_tiny(name).model.layers[0].mlp.to(DEVICE), dtype=dtype) == ""

    @pytest.mark.parametrize(
        "change",
        [
            lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)),
            lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2,
            lambda self, x: self.down_proj(self.act_fn(self.gate_proj(2 * x)) * self.up_proj(x)),
            lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x)),
            lambda self, x: (self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)),),
        ],
        ids=["gate and up exchanged", "factor behind", "factor before", "sum", "tuple"],
    )
    def test_a_class_of_the_same_name_that_computes_something_else_is_left_alone(
        self, change: Callable[..., Any]
    ) -> None:
        other = type("LlamaMLP", (LlamaMLP,), {"forward": change})
        assert self.found(other(build_tiny("llama").config).to(DEVICE)) != ""

    def test_another_activation_is_left_alone(self) -> None:
        config = build_tiny("llama", hidden_act="gelu").config
        assert self.found(LlamaMLP(config)) == "its activation is not silu(gate) · up"

    def test_a_kernel_with_other_numbers_is_not_taken(self) -> None:
        mlp, right = LlamaMLP(build_tiny("llama").config), functions().swiglu
        for wrong in (lambda gate, up: right(up, gate), lambda gate, up: right(gate, up).detach() * 1.0 + 0.0 * up):
            try:
                found = self.found(mlp, SimpleNamespace(swiglu=wrong))
            except RuntimeError as error:  # a gradient that does not exist
                found = str(error)
            assert found != ""

    def test_what_has_another_structure_is_no_gated_mlp(self) -> None:
        others = (build_tiny("phi").model.layers[0].mlp, nn.Linear(2, 2), build_tiny("llama").model.layers[0])
        assert [linear_names(module) for module in others] == [None] * len(others)


class TestRotations:
    """Rotations that are replaced by a kernel, and those that are not."""

    def found(self, kind: type[nn.Module], ops: Any = None, dtype: torch.dtype = torch.float32) -> Any:
        function = rotating_function(kind)
        assert function is not None
        return fused_rotation(kind, function, ops or functions(), dtype, DEVICE)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("kind", [LlamaAttention, Olmo2Attention, Qwen3NextAttention])
    def test_rotations_of_halves_are_replaced(self, kind: type[nn.Module], dtype: torch.dtype) -> None:
        assert not isinstance(self.found(kind, dtype=dtype), str)

    @pytest.mark.parametrize("kind", [CohereAttention, GlmAttention])
    def test_rotations_of_neighbours_are_left_alone(self, kind: type[nn.Module]) -> None:
        assert self.found(kind) == "its rotation is different"

    def test_a_kernel_with_other_numbers_is_not_taken(self) -> None:
        right = functions().rotary
        wrong = SimpleNamespace(rotary=lambda q, k, cos, sin: right(q, k, cos, -sin))
        assert self.found(LlamaAttention, wrong) == "its rotation is different"

    def test_a_rotation_of_a_part_of_every_head_is_left_to_the_model(self) -> None:
        """Only a forward pass shows that the rotation is partial."""
        config = Qwen3NextConfig(
            **SIZES | {"layer_types": ["full_attention"] * 2, "head_dim": 16, "partial_rotary_factor": 0.5},
            num_experts=0,
        )
        torch.manual_seed(0)
        backbone = Backbone(Qwen3NextForCausalLM(config).to(DEVICE), None, "tiny")  # type: ignore[arg-type]
        assert backbone.fusion.kept == {"Qwen3NextAttention": "heads of 16 numbers have 8 cosines"}
        assert "rotary" not in backbone.fusion.counts
        assert not any(isinstance(vars(m).get("forward"), FusedRotary) for m in backbone.model.modules())

    def test_the_module_of_transformers_is_not_changed(self) -> None:
        before = dict(vars(modeling_llama))
        make_backbone()
        assert dict(vars(modeling_llama)) == before


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=SLOW), "phi", "phi3"])
def test_what_is_compiled_before_the_first_step_is_what_it_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = make_backbone(name)
    launched: list[set[Any]] = [set()]

    def record(kernel: Any, _: Any, tensors: Any, sizes: Any, config: Any, __: Any = (), **constants: Any) -> None:
        dtypes = tuple(tensor.dtype for tensor in tensors)
        launched[-1].add((kernel.fn.__name__, dtypes, tuple(sizes), config, *constants.items()))

    monkeypatch.setattr(layer_triton, "launch", record)
    losses_and_gradient(backbone)
    with torch.no_grad():  # as in evaluation
        backbone.token_losses(torch.zeros(3, 32, device=DEVICE), torch.zeros(3, dtype=torch.long, device=DEVICE))
    launched.append(set())
    backbone.sample_kernels()
    assert launched[-1] == launched[-2] != set()


def test_where_rounding_leads_to_another_expert_float32_decides() -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).to(DEVICE, torch.bfloat16)
    backbone = Backbone(model, None, "tiny")  # type: ignore[arg-type]
    assert backbone.fusion.described() == {"rms_norm": 5, "rotary": 2, "cross_entropy": 1, "kept": {}}


def test_where_the_whole_model_differs_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = functions()
    # Only norms of rows as wide as the hidden states: the probe of a class uses other numbers of rows.
    monkeypatch.setattr(
        "alto.backbone.backbone.layer_functions_on",
        lambda device: SimpleNamespace(
            MAX_NORM_WIDTH=right.MAX_NORM_WIDTH,
            rms_norm=lambda x, *rest: right.rms_norm(x, *rest) * (1.0 if x.dim() == 2 else 1.01),
            swiglu=right.swiglu,
            rotary=right.rotary,
            cross_entropy=right.cross_entropy,
        ),
    )
    backbone = make_backbone()
    assert not fused_modules(backbone)
    assert list(backbone.fusion.kept) == ["all"]
    assert "expected the packed pass to give the model's own losses" in backbone.fusion.kept["all"]


def test_a_kernel_that_cannot_run_is_not_used_and_the_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        raise RuntimeError("no kernel image is available")

    right = functions()
    monkeypatch.setattr(
        "alto.backbone.backbone.layer_functions_on", lambda device: SimpleNamespace(**vars(right) | {"swiglu": swiglu})
    )
    backbone = make_backbone()
    assert not fused_modules(backbone)
    assert backbone.fusion.counts == {}
    assert "no kernel image is available" in backbone.fusion.kept["all"]
