"""The load-balancing loss of routers equals transformers' own, and is on where TRL's trainers add it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

import torch
from architectures import SIZES
from datasets import Dataset
from moe_models import MODELS, build_mixture
from tiny import load_tokenizer
from torch import Tensor
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from trl import SFTConfig, SFTTrainer

from alto.backbone import (
    Backbone,
    check_router_loss,
    recorded_routers,
    router_coefficient,
    router_notes,
    router_sums,
)
from alto.errors import UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = [13, 7, 21]
WITH_LOSS = [name for name in MODELS if name != "deepseek-v3"]
QUIET: dict[str, Any] = {"report_to": "none", "use_cpu": True, "bf16": False}


def rows() -> Tensor:
    return torch.randint(2, SIZES["vocab_size"], (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def granite() -> Any:
    torch.manual_seed(0)
    return GraniteMoeForCausalLM(GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)).eval()


@pytest.mark.parametrize("name", [*WITH_LOSS, "granite"])
def test_every_row_has_the_loss_that_the_model_gives_it_alone(name: str) -> None:
    """Here one forward pass covers all rows, packed or padded."""
    own = granite() if name == "granite" else MODELS[name]()
    backbone = Backbone(copy.deepcopy(own), None, "tiny")
    check_router_loss(backbone)
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad(), recorded_routers(backbone) as routers:
        backbone.hidden_states(rows(), positions_T, LENGTHS)
        expected = [own(input_ids=row[None], output_router_logits=True).aux_loss for row in rows().split(LENGTHS)]
    assert {tuple(logits.shape) for logits in routers} == {(sum(LENGTHS), 4)}
    chosen_UE, probabilities_UE = router_sums(backbone, routers, LENGTHS)
    num_U = torch.tensor(LENGTHS) * len(routers)
    found = (chosen_UE * probabilities_UE).sum(1) * 4 / num_U**2
    torch.testing.assert_close(found.float(), torch.stack(expected), rtol=1e-5, atol=0)
    # If experts were evenly loaded, every row would have the same number.
    assert float(found.max() - found.min()) > 1e-2


def test_a_token_may_count_twice() -> None:
    """A weight of two equals having the row twice, in the gradient too."""
    backbone = Backbone(build_mixture("mixtral"), None, "tiny")
    logits = torch.randn(6, 4, requires_grad=True)
    weights_T = torch.tensor([1.0, 2.0, 1.0, 1.0, 3.0, 1.0], dtype=torch.float64)
    chosen_UE, probabilities_UE = router_sums(backbone, [logits], [3, 3], weights_T)
    repeated = logits.repeat_interleave(weights_T.long(), 0)
    other_chosen_UE, other_UE = router_sums(backbone, [repeated], [4, 5])
    assert torch.equal(chosen_UE, other_chosen_UE)
    assert not chosen_UE.requires_grad
    torch.testing.assert_close(probabilities_UE, other_UE)
    factors = torch.rand(2, 4, dtype=torch.float64)
    (found,) = torch.autograd.grad((probabilities_UE * factors).sum(), logits)
    (expected,) = torch.autograd.grad((other_UE * factors).sum(), logits)
    torch.testing.assert_close(found, expected)
    assert found.any()


def test_other_tokens_change_no_bit() -> None:
    backbone = Backbone(build_mixture("mixtral"), None, "tiny")
    logits = torch.randn(30, 4)
    other = torch.cat([logits[:11], torch.full((19, 4), float("nan"))])
    of_all, of_other = (router_sums(backbone, [given], [11, 19]) for given in (logits, other))
    for first, second in zip(of_all, of_other, strict=True):
        assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("given", [None, 0.0, 0.5])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("own", [0.0, 0.001])
def test_it_is_on_where_trls_trainer_adds_it(own: float, asks: bool, given: float | None, tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    changes = {"vocab_size": len(tokenizer), "router_aux_loss_coef": own, "output_router_logits": asks}
    model = build_mixture("mixtral", **changes)
    found = router_coefficient(model, given, "sft")
    notes = router_notes(model, [given], "sft")
    trainer = SFTTrainer(
        model=copy.deepcopy(model),
        args=SFTConfig(output_dir=str(tmp_path), router_aux_loss_coef=given, activation_checkpointing=False, **QUIET),
        train_dataset=Dataset.from_list([{"prompt": "1 plus 1?", "completion": " 2"}]),
        processing_class=tokenizer,
    )
    assert found == (trainer.router_aux_loss_coef if trainer.aux_loss_enabled else 0.0)
    assert bool(notes) == (given is None and own > 0)
    if notes:
        assert notes[0].startswith("router_aux_loss_coef 0.001 of the base model: the loss that balances")
        assert "is added to a job's loss in training" in notes[0]


@pytest.mark.parametrize("asks", [False, True])
def test_with_cpo_the_configuration_of_the_model_is_asked(asks: bool, tmp_path: Path) -> None:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    tokenizer = load_tokenizer()
    model = build_mixture("mixtral", vocab_size=len(tokenizer), output_router_logits=asks)
    pairs = Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}])
    settings = CPOConfig(output_dir=str(tmp_path), **QUIET)
    trainer = CPOTrainer(model, args=settings, train_dataset=pairs, processing_class=tokenizer)
    assert router_coefficient(model, None, "cpo") == (trainer.aux_loss_coef if trainer.aux_loss_enabled else 0.0)
    assert router_coefficient(model, None, "orpo") == router_coefficient(model, None, "cpo")
    (note,) = router_notes(model, [None], "cpo")
    assert ("is added to a job's loss" in note) == asks
    assert ("router_aux_loss_coef: 0.001 adds it" in note) == (not asks)


def test_a_classification_head_is_trained_without_it() -> None:
    model = build_mixture("mixtral")
    assert router_coefficient(model, None, "classification") == 0.0
    (note,) = router_notes(model, [None], "classification")
    assert note.endswith("is not added to a job's loss: as in transformers' Trainer.")


class TestWithoutSuchALoss:
    def test_a_dense_model(self) -> None:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        assert router_coefficient(model, None, "sft") == 0.0
        assert router_notes(model, [None], "sft") == ()
        with pytest.raises(UnsupportedModelError, match=r"found LlamaForCausalLM; remove the key"):
            router_coefficient(model, 0.1, "sft")

    def test_routers_without_logits_in_the_output(self) -> None:
        model = build_mixture("deepseek-v3")
        assert router_coefficient(model, None, "sft") == 0.0
        with pytest.raises(
            UnsupportedModelError, match=r"router_aux_loss_coef: expected a mixture of experts for which"
        ):
            router_coefficient(model, 0.1, "sft")

    @pytest.mark.parametrize("kind", ["qwen3-moe", "doge"])
    def test_a_configuration_without_a_layer_of_experts(self, kind: str) -> None:
        model: Any = DogeForCausalLM(DogeConfig(**SIZES))
        if kind == "qwen3-moe":
            model = build_mixture("qwen3-moe-dense", mlp_only_layers=[0, 1])
        assert model.config.router_aux_loss_coef == 0.001
        assert router_coefficient(model, None, "sft") == 0.0
        assert router_notes(model, [None], "sft") == ()
        with pytest.raises(
            UnsupportedModelError, match=r"router_aux_loss_coef: expected a mixture of experts for which"
        ):
            router_coefficient(model, 0.1, "sft")

    def test_a_model_whose_code_has_none(self) -> None:
        sizes = SIZES | {"intermediate_size_mlp": 48, "head_dim": 8, "num_local_experts": 4}
        model = Llama4ForCausalLM(Llama4TextConfig(**sizes))
        assert model.config.router_aux_loss_coef == 0.001
        assert router_coefficient(model, None, "sft") == 0.0
        (note,) = router_notes(model, [None], "sft")
        assert note.endswith("loss: transformers computes none for Llama4ForCausalLM.")


def test_a_model_that_returns_no_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Backbone(build_mixture("mixtral"), None, "tiny")
    monkeypatch.setattr(backbone, "own_router_loss", lambda ids: backbone.model.model(input_ids=ids) and None)
    with pytest.raises(UnsupportedModelError, match="no aux_loss in its output"):
        check_router_loss(backbone)
