"""Notes with numbers on the parts of a mixture of experts that an adapter does not reach; PEFT has the same numbers."""

from __future__ import annotations

import pytest
from architectures import build_tiny
from moe_models import MIXTURES, build_mixture
from peft import LoraConfig, get_peft_model

from alto.lora import find_targets, untrained_notes
from alto.lora.peft_targets import peft_all_linear
from alto.spec import JobConfig

# PEFT reads a transformers property by its deprecated name, and does not look for patterns among parameters.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

EXPERTS = "weights (mlp.experts.down_proj, mlp.experts.gate_up_proj), stacked in parameters"


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_parameter_count_is_that_of_peft(name: str, rank: int) -> None:
    peft = get_peft_model(build_mixture(name), LoraConfig(r=rank, target_modules="all-linear"))
    trained = sum(parameter.numel() for parameter in peft.parameters() if parameter.requires_grad)
    assert peft_all_linear(build_mixture(name), rank) == trained


def test_experts_and_routers_are_counted_and_peft_is_compared() -> None:
    model = build_mixture("qwen3-moe-dense")
    ours = sum(4 * (module.in_features + module.out_features) for module in find_targets(model, "all-linear"))
    (note,) = untrained_notes(model, [JobConfig(r=2), JobConfig(r=4)])
    # One layer of 4 experts: gate and up 32 → 16 each, down 16 → 32; its router 32 → 4.
    assert note == (
        f"The experts of the base model are not trained: {4 * 3 * 16 * 32:,} {EXPERTS}; its routers are not "
        f"trained either: {32 * 4} weights (mlp.gate.weight). Name them in target_parameters to train them. "
        f"At r 4, all-linear is {ours:,} parameters here and "
        f"{peft_all_linear(model, 4):,} in PEFT, which adapts experts and routers and leaves out 3 other linear "
        "modules that are trained here."
    )


def test_a_note_says_where_peft_leaves_experts_out_too() -> None:
    (note,) = untrained_notes(build_mixture("qwen2-moe-shared"), [JobConfig(r=1)])
    assert note.endswith("PEFT's all-linear leaves them out, too.")


@pytest.mark.parametrize(
    ("target_modules", "is_noted"),
    [
        (["q_proj", "v_proj"], False),
        (["q_proj", "gate_proj"], True),
        (r".*\.(up|down)_proj", False),
        (r".*\.up_proj", True),
    ],
)
def test_targets_that_cannot_mean_experts_need_no_note(target_modules: str | list[str], is_noted: bool) -> None:
    notes = untrained_notes(build_mixture("deepseek-v3"), [JobConfig(target_modules=target_modules)])
    assert bool(notes) == is_noted


def test_a_dense_model_needs_none() -> None:
    assert untrained_notes(build_tiny("llama"), [JobConfig()]) == ()
