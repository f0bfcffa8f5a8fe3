"""Isolation of everything that a job may train besides low-rank matrices of linear layers, beside jobs that do not,
against PEFT alone (:mod:`test_isolation`): output head, token embeddings, whole modules, biases and magnitudes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import biased_models
import pytest
import torch
from architectures import build_tiny
from isolation import (
    assert_continues_to_the_last_bit,
    assert_micro_batches_change_nothing,
    assert_nan_stays_alone,
    compare_dropped,
)
from job_kinds import compare
from optional import needs_bitsandbytes
from oracle import SoloCpo, SoloJob, StepFacts, make_cpo_trainer, padded_batch, relative_distance
from resident_jobs import (
    COMMON,
    DATA,
    LOSS_TOLERANCE,
    PAIRS,
    VOCABULARY,
    Bank,
    assert_same_step,
    make_model,
    make_task,
    state_of,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from alto.backbone import output_head
from alto.errors import UnsupportedError
from alto.executor import BankSize

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from .trl.experimental."),
]


def llama() -> PreTrainedModel:
    return make_model("llama")


def padding_llama() -> PreTrainedModel:
    """Build a Llama with token 40, which rows have, as padding, so that its embedding has no gradient."""
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**(COMMON | {"pad_token_id": 40}))).eval()


def gemma2() -> PreTrainedModel:
    """Build a model with a tied head and capped logits."""
    return build_tiny("gemma2-plain-attention", vocab_size=VOCABULARY)


def gemma3() -> PreTrainedModel:
    """Build a model with a tied head and embeddings of its own class, which scales them."""
    return build_tiny("gemma3", vocab_size=VOCABULARY)


def phi() -> PreTrainedModel:
    return build_tiny("phi", vocab_size=VOCABULARY)


HEADS: list[dict[str, Any]] = [
    {"lr": 1e-3, "r": 8, "batch_size": 2, "target_modules": ["lm_head"], "weight_decay": 0.1, "seed": 1},
    {"lr": 1e-3, "r": 4, "batch_size": 3, "seed": 2},
    {
        "lr": 5e-4,
        "r": 16,
        "batch_size": 2,
        "target_modules": ["q_proj", "down_proj", "lm_head"],
        "loraplus_lr_ratio": 4.0,
        "max_grad_norm": 0.05,
        "seed": 3,
    },
    {
        "lr": 5e-4,
        "r": 8,
        "batch_size": 1,
        "target_modules": r".*(v_proj|lm_head)",
        "rank_pattern": {"lm_head": 3},
        "alpha_pattern": {"lm_head": 5.0},
        "use_rslora": True,
        "seed": 4,
    },
    {
        "lr": 5e-4,
        "r": 4,
        "batch_size": 4,
        "target_modules": ["lm_head"],
        "init_lora_weights": "orthogonal",
        "seed": 5,
    },
]
EMBEDDINGS: list[dict[str, Any]] = [
    {"lr": 1e-3, "r": 8, "batch_size": 2, "target_modules": ["embed_tokens"], "weight_decay": 0.1, "seed": 1},
    {"lr": 1e-3, "r": 4, "batch_size": 3, "seed": 2},
    {
        "lr": 5e-4,
        "r": 16,
        "batch_size": 2,
        "target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"],
        "max_grad_norm": 0.05,
        "seed": 3,
    },
    {
        "lr": 5e-4,
        "r": 8,
        "batch_size": 1,
        "target_modules": r".*(v_proj|embed_tokens)",
        "rank_pattern": {"embed_tokens": 3},
        "alpha_pattern": {"embed_tokens": 5.0},
        "use_rslora": True,
        "seed": 4,
    },
    {"lr": 5e-4, "r": 4, "batch_size": 4, "target_modules": ["embed_tokens", "lm_head"], "seed": 5},
]
WHOLE: list[dict[str, Any]] = [
    {"lr": 1e-3, "r": 8, "batch_size": 2, "modules_to_save": ["lm_head"], "weight_decay": 0.1, "seed": 1},
    {"lr": 1e-3, "r": 4, "batch_size": 3, "seed": 2},
    {
        "lr": 5e-4,
        "r": 8,
        "batch_size": 2,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
        "loraplus_lr_ratio": 4.0,
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,
        "seed": 3,
    },
    {"lr": 5e-4, "r": 8, "batch_size": 1, "modules_to_save": ["model.embed_tokens"], "lora_alpha": 4, "seed": 4},
    {"lr": 5e-4, "r": 4, "batch_size": 4, "target_modules": ["lm_head", "embed_tokens"], "seed": 5},
    {
        "lr": 5e-4,
        "r": 4,
        "batch_size": 2,
        "target_modules": ["lm_head", "k_proj"],
        "modules_to_save": ["embed_tokens"],
        "seed": 6,
    },
]
BIASES: list[dict[str, Any]] = [
    {"lr": 1e-3, "r": 8, "batch_size": 2, "bias": "all", "weight_decay": 0.1, "seed": 1},
    {"lr": 1e-3, "r": 4, "batch_size": 3, "seed": 2},
    {
        "lr": 5e-4,
        "r": 8,
        "batch_size": 2,
        "bias": "lora_only",
        "loraplus_lr_ratio": 4.0,
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,
        "seed": 3,
    },
    {"lr": 5e-4, "r": 8, "batch_size": 1, "bias": "all", "target_modules": ["q_proj"], "seed": 4},
    {"lr": 5e-4, "r": 4, "batch_size": 4, "bias": "lora_only", "target_modules": ["v_proj"], "seed": 5},
]
DORA: list[dict[str, Any]] = [
    {"lr": 1e-3, "r": 8, "batch_size": 2, "use_dora": True, "weight_decay": 0.1, "seed": 11},
    {"lr": 1e-3, "r": 4, "batch_size": 3, "seed": 12},
    {
        "lr": 5e-4,
        "r": 8,
        "batch_size": 2,
        "use_dora": True,
        "bias": "all",
        "use_rslora": True,
        "loraplus_lr_ratio": 4.0,
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,
        "seed": 13,
    },
    {"lr": 5e-4, "r": 8, "batch_size": 1, "use_dora": True, "init_lora_weights": "orthogonal", "seed": 14},
    {
        "lr": 5e-4,
        "r": 4,
        "batch_size": 2,
        "use_dora": True,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"q_proj": 6},
        "alpha_pattern": {"v_proj": 3.0},
        "seed": 15,
    },
]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Jobs some of which train modules of one kind.

    Attributes:
        models: The models they train on, the usual one first.
        ends: The head and the embeddings that each job trains: names of targets, and of weights that it trains whole.
        faults: Settings that PEFT must not have, where it trains ``first`` alone.
    """

    jobs: list[dict[str, Any]]
    models: tuple[Callable[[], PreTrainedModel], ...]
    faults: dict[str, Any]
    first: dict[str, Any]
    ends: list[set[str]] = field(default_factory=lambda: [set()] * 5)
    num_steps: int = 3
    num_optimized: int = 3
    sgd: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Callable[[], PreTrainedModel]:
        return self.models[0]

    def bank(self, model: Callable[[], PreTrainedModel] | None = None) -> Bank:
        return Bank((model or self.model)(), make_task(self.jobs), slots=[3, 1, 0, 2, 4, 6][: len(self.jobs)])


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
BOTH = {"lm_head", "model.embed_tokens"}
KINDS = {
    "head": Kind(
        jobs=HEADS,
        models=(llama, gemma2),
        ends=[{"lm_head"}, set(), *[{"lm_head"}] * 3],
        faults={"weight_decay": 0.2, "lora_alpha": 16.16},
        first=HEADS[0],
    ),
    "embeddings": Kind(
        jobs=EMBEDDINGS,
        models=(padding_llama, gemma3),
        ends=[{"model.embed_tokens"}, set(), BOTH, {"model.embed_tokens"}, BOTH],
        num_steps=4,
        faults={"weight_decay": 0.2, "lora_alpha": 16.16},
        first=EMBEDDINGS[0],
    ),
    "whole": Kind(
        jobs=WHOLE,
        models=(padding_llama, gemma3),
        ends=[{HEAD}, set(), {HEAD, TABLE}, {TABLE}, BOTH, {"lm_head", TABLE}],
        num_optimized=4,
        faults={"weight_decay": 0.2, "modules_to_save": ["embed_tokens", "lm_head"]},
        first=WHOLE[0],
    ),
    "biases": Kind(
        jobs=BIASES,
        models=(biased_models.starcoder2, biased_models.llama),
        sgd={"optim_args": "momentum=0.9"},
        faults={"bias": "none", "weight_decay": 0.2, "loraplus_lr_ratio": 4.1},
        first={**BIASES[2], "max_grad_norm": 1.0},
    ),
    "dora": Kind(
        jobs=DORA,
        models=(biased_models.llama, biased_models.starcoder2),
        sgd={"optim_args": "momentum=0.9"},
        faults={"use_dora": False, "weight_decay": 0.2, "lora_alpha": 16.16},
        first=DORA[0],
    ),
}
ENDS = ["head", "embeddings", "whole"]
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_end = pytest.mark.parametrize("kind", [KINDS[name] for name in ENDS], ids=ENDS)


@pytest.mark.parametrize(
    ("kind", "model"),
    [pytest.param(kind, model, id=f"{name}-{model.__name__}") for name, kind in KINDS.items() for model in kind.models],
)
def test_every_step_beside_other_jobs_equals_peft_alone(kind: Kind, model: Callable[[], PreTrainedModel]) -> None:
    bank = kind.bank(model)
    compare(model, bank, kind.num_steps)
    ends = {"lm_head", "model.embed_tokens", HEAD, TABLE}
    weights = [bank.trainer.bank.read(job.slot) for job in bank.jobs]
    assert [{*of_job, *of_job.extras} & ends for of_job in weights] == kind.ends


def test_layer_norms_have_biases_that_are_trained() -> None:
    for model, num_norms in {biased_models.starcoder2: 5, biased_models.llama: 0}.items():
        extras = KINDS["biases"].bank(model).jobs[0].shape.extras
        assert sum("norm" in extra.name for extra in extras) == num_norms


def test_a_head_with_a_frozen_bias_equals_peft_alone() -> None:
    configs = [{**config, "target_modules": ["lm_head", "q_proj"]} for config in HEADS[:3]]
    compare(phi, Bank(phi(), make_task(configs), slots=[3, 1, 0]), num_steps=2)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_biases_behind_transposed_weights_have_pefts_gradients() -> None:
    def same(found: StepFacts, expected: StepFacts) -> None:
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert relative_distance(found.gradients, expected.gradients) <= 1e-4

    configs = [{**config, "target_modules": ["c_attn", "c_proj"]} for config in BIASES]
    gpt2 = biased_models.gpt2
    compare(gpt2, Bank(gpt2(), make_task(configs), slots=[3, 1, 0, 2, 4]), num_steps=1, same=same)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_magnitudes_of_transposed_weights_equal_peft_alone() -> None:
    configs = [{**config, "target_modules": ["c_attn", "c_proj"], "bias": "none"} for config in DORA[:4]]
    compare(biased_models.gpt2, Bank(biased_models.gpt2(), make_task(configs)), num_steps=2)


@pytest.mark.parametrize(("name", "model"), [("head", gemma2), ("whole", padding_llama)])
def test_chunks_of_the_loss_that_split_jobs_equal_peft_alone(
    name: str, model: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_head, "_chunk_tokens", lambda *_: 7)
    compare(model, KINDS[name].bank(model), num_steps=2)


@every_kind
def test_checkpointed_layers_equal_peft_alone(kind: Kind) -> None:
    bank = kind.bank()
    bank.backbone.checkpoint_layers()
    compare(kind.model, bank, kind.num_steps - 1)


@pytest.mark.parametrize(
    "optim", [pytest.param("adamw_8bit", marks=needs_bitsandbytes), "sgd", "rmsprop", "adagrad", "adafactor"]
)
@every_kind
def test_another_optimizer_equals_peft_alone(kind: Kind, optim: str) -> None:
    configs = [{**config, "optim": optim} for config in kind.jobs[: kind.num_optimized]]
    if optim == "adamw_8bit" and kind is KINDS["whole"]:
        configs = configs[:2]  # the others train embeddings, whose states are refused
    elif optim == "adamw_8bit" and kind is KINDS["biases"]:
        configs = [
            {**config, "optim": "adamw_torch"} if number % 2 else {**config, "optim": optim}
            for number, config in enumerate(kind.jobs)
        ]
    elif optim == "sgd":
        configs = [config | kind.sgd for config in configs]
    compare(kind.model, Bank(kind.model(), make_task(configs)), kind.num_steps - 1)


def test_8_bit_states_of_embeddings_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"expected an optimizer of 32 bits for model\.embed_tokens, found adamw_8"
    ):
        Bank(padding_llama(), make_task([{**WHOLE[3], "optim": "adamw_8bit"}]))


@every_end
def test_an_evaluation_equals_pefts(kind: Kind) -> None:
    model = kind.models[-1]
    bank = kind.bank(model)
    for _ in range(kind.num_steps):
        bank.step()
    batch = padded_batch(DATA.validation, range(len(DATA.validation)))
    for job, found in zip(bank.jobs, bank.trainer.evaluate(bank.jobs), strict=True):
        solo = SoloJob(model(), DATA.train, job.config)
        solo.load(bank.trainer.bank.read(job.slot))
        with torch.no_grad():
            assert found.loss == pytest.approx(float(solo._loss(batch)), rel=LOSS_TOLERANCE)


@every_end
def test_preferences_whose_replies_share_a_prompt_equal_trl_alone(kind: Kind, tmp_path: Path) -> None:
    """Each row's token losses have their own gradient."""
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    simpo, sigmoid = {"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.5}, {"loss_type": "sigmoid", "beta": 0.1}
    configs = [kind.jobs[0] | simpo, kind.jobs[2] | sigmoid, kind.jobs[1] | sigmoid]
    bank = Bank(kind.model(), make_task(configs, method="cpo"), slots=[2, 0, 1], data=PAIRS)
    trl = make_cpo_trainer(tmp_path)
    compare(kind.model, bank, kind.num_steps - 1, data=PAIRS, solo=SoloCpo, same=assert_same_step, trl=trl)


def test_dropout_of_the_head_equals_peft_with_the_same_mask() -> None:
    configs = [{**config, "lora_dropout": 0.3, "batch_size": 1} for config in HEADS[:3]]
    compare_dropped(llama, Bank(llama(), make_task(configs), slots=[2, 0, 1]))


def test_dropout_beside_magnitudes_equals_peft_with_the_same_mask() -> None:
    configs = [{**config, "lora_dropout": 0.3, "batch_size": 1} for config in (*DORA[:2], DORA[4])]
    configs += [{**DORA[0], "seed": 16}, {**configs[0], "target_modules": ["k_proj"], "seed": 17}]
    model = biased_models.llama
    compare_dropped(model, Bank(model(), make_task(configs), slots=[3, 1, 0, 2, 4]))


@every_end
def test_a_batch_split_over_micro_batches_is_the_same_step(kind: Kind) -> None:
    """The dropout masks are the same."""
    changes = {"batch_size": 6} | ({"lora_dropout": 0.3} if kind is KINDS["head"] else {})
    configs = [config | changes for config in kind.jobs]
    assert_micro_batches_change_nothing(
        *(Bank(kind.model(), make_task(configs, max_tokens_per_pass=tokens)) for tokens in (10_000, 60))
    )


def test_embeddings_start_as_in_peft_and_depend_on_the_seed_alone() -> None:
    banks = [Bank(padding_llama(), make_task(EMBEDDINGS), slots=slots) for slots in ([3, 1, 0, 2, 4], [0, 2, 5, 1, 3])]
    for number in (0, 2, 3, 4):
        pairs = [bank.trainer.bank.read(bank.jobs[number].slot)["model.embed_tokens"] for bank in banks]
        (a_VR, b_RH), (other_a_VR, other_b_RH) = pairs
        assert not a_VR.any()
        assert abs(float(b_RH.mean())) < 0.2
        assert float(b_RH.std()) == pytest.approx(1.0, rel=0.2)
        assert torch.equal(a_VR, other_a_VR)
        assert torch.equal(b_RH, other_b_RH)


def test_whole_modules_start_with_the_frozen_weights() -> None:
    bank, base = KINDS["whole"].bank(), padding_llama().state_dict()
    for job in bank.jobs:
        for name, tensor in bank.trainer.bank.read(job.slot).extras.items():
            assert torch.equal(tensor, base[name])


def test_magnitudes_start_as_in_peft() -> None:
    bank = Bank(biased_models.llama(), make_task(DORA))
    for job in bank.jobs:
        solo = SoloJob(biased_models.llama(), DATA.train, job.config)
        expected = {name: vector for name, vector in solo.weights().items() if name.endswith("magnitude_vector")}
        found = bank.trainer.bank.read(job.slot).extras
        assert bool(expected) == job.config.use_dora
        for name, vector in expected.items():
            torch.testing.assert_close(found[name], vector, rtol=1e-6, atol=0.0)


@every_kind
def test_a_job_that_goes_nan_changes_no_other_job_by_one_bit(kind: Kind) -> None:
    assert_nan_stays_alone(kind.bank, victim=0)


@every_kind
def test_a_job_that_was_parked_on_disk_continues_to_the_last_bit(kind: Kind, tmp_path: Path) -> None:
    assert_continues_to_the_last_bit(kind.model, kind.jobs, tmp_path)


def test_the_memory_model_counts_whole_modules_and_their_optimizer_state() -> None:
    plain, whole = ({"r": 4, "modules_to_save": names} for names in (None, ["lm_head", "embed_tokens"]))
    banks = [Bank(padding_llama(), make_task([settings])) for settings in (plain, whole)]
    sizes = [
        BankSize.of([job.planned for job in bank.jobs], bank.backbone, num_slots=1).bytes_per_slot for bank in banks
    ]
    assert sizes[1] - sizes[0] == pytest.approx(
        2 * VOCABULARY * COMMON["hidden_size"] * 4 * 4, abs=4 * 4 * 16
    )  # weights, gradients, two moments


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, kind in KINDS.items() for fault in kind.faults])
def test_a_setting_of_another_job_shows(name: str, fault: str) -> None:
    kind = KINDS[name]
    bank = Bank(kind.model(), make_task([kind.first]))
    for _ in range(2):
        bank.step()
    (job,) = bank.jobs
    weights, optimizer = state_of(bank, job)
    solo = SoloJob(kind.model(), DATA.train, job.config.replace(**{fault: kind.faults[fault]}))
    if fault == "modules_to_save":
        weights.extras[TABLE] = kind.model().state_dict()[TABLE]
        solo.load(weights)
    else:
        solo.load(weights, optimizer)
    found = bank.step()[job.id]
    with pytest.raises(AssertionError):
        assert_same_step(found, solo.train_step())
