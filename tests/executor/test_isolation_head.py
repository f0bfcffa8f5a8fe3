"""Law 1 on the output head (``target_modules: [lm_head]``): beside jobs that leave it alone, against PEFT alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build_tiny
from isolation import assert_continues_to_the_last_bit, assert_nan_stays_alone
from job_kinds import compare
from optional import needs_bitsandbytes
from oracle import SoloCpo, SoloJob, make_cpo_trainer, padded_batch
from resident_jobs import DATA, LOSS_TOLERANCE, PAIRS, VOCABULARY, Bank, assert_same_step, make_model, make_task
from transformers import PreTrainedModel

from alto.backbone import output_head
from alto.kernels import DropoutKey
from alto.kernels.dropout import dropout_factor
from alto.lora import adaptable

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from .trl.experimental."),
]

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
SLOTS = [3, 1, 0, 2, 4]


def llama() -> PreTrainedModel:
    return make_model("llama")


def gemma() -> PreTrainedModel:
    """A head that is tied to the embeddings, and logits that are capped."""
    return build_tiny("gemma2-plain-attention", vocab_size=VOCABULARY)


def phi() -> PreTrainedModel:
    """A head with a bias."""
    return build_tiny("phi", vocab_size=VOCABULARY)


MODELS = {"llama": llama, "gemma": gemma}


@pytest.mark.parametrize("name", MODELS)
def test_every_step_in_company_equals_peft_alone(name: str) -> None:
    bank = Bank(MODELS[name](), make_task(HEADS), slots=SLOTS)
    compare(MODELS[name], bank)
    targeted = ["lm_head" in bank.trainer.bank.read(job.slot) for job in bank.jobs]
    assert targeted == [True, False, True, True, True]


def test_a_head_with_a_frozen_bias_equals_peft_alone() -> None:
    configs = [{**config, "target_modules": ["lm_head", "q_proj"]} for config in HEADS[:3]]
    compare(phi, Bank(phi(), make_task(configs), slots=SLOTS[:3]), num_steps=2)


def test_chunks_of_the_loss_that_split_jobs_equal_peft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_head, "_chunk_tokens", lambda *_: 7)
    compare(gemma, Bank(gemma(), make_task(HEADS), slots=SLOTS), num_steps=2)


def test_checkpointed_layers_equal_peft_alone() -> None:
    bank = Bank(llama(), make_task(HEADS), slots=SLOTS)
    bank.backbone.checkpoint_layers()
    compare(llama, bank, num_steps=2)


@pytest.mark.parametrize(
    "optim", [pytest.param("adamw_8bit", marks=needs_bitsandbytes), "sgd", "rmsprop", "adagrad", "adafactor"]
)
def test_another_optimizer_equals_peft_alone(optim: str) -> None:
    configs = [{**config, "optim": optim} for config in HEADS[:3]]
    compare(llama, Bank(llama(), make_task(configs)), num_steps=2)


def test_an_evaluation_equals_pefts() -> None:
    bank = Bank(gemma(), make_task(HEADS), slots=SLOTS)
    for _ in range(3):
        bank.step()
    batch = padded_batch(DATA.validation, range(len(DATA.validation)))
    for job, found in zip(bank.jobs, bank.trainer.evaluate(bank.jobs), strict=True):
        solo = SoloJob(gemma(), DATA.train, job.config)
        solo.load(bank.trainer.bank.read(job.slot))
        with torch.no_grad():
            assert found.loss == pytest.approx(float(solo._loss(batch)), rel=LOSS_TOLERANCE)


def test_preferences_equal_trl_alone(tmp_path: Path) -> None:
    """Every row has a gradient of its own towards its tokens' losses."""
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    trl = make_cpo_trainer(tmp_path)
    forms = [{"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.5}, {"loss_type": "sigmoid", "beta": 0.1}]
    configs = [{**HEADS[0], **forms[0]}, {**HEADS[2], **forms[1]}, {**HEADS[1], **forms[1]}]
    bank = Bank(llama(), make_task(configs, method="cpo"), slots=[2, 0, 1], data=PAIRS)
    for _ in range(2):
        states = [(bank.trainer.bank.read(job.slot), bank.trainer.optimizer.read(job.slot)) for job in bank.jobs]
        found = bank.step()
        for job, state in zip(bank.jobs, states, strict=True):
            solo = SoloCpo(llama(), PAIRS.train, job.config, trl=trl)
            solo.load(*state)
            assert_same_step(found[job.id], solo.train_step())


DROPPED = [{**config, "lora_dropout": 0.3, "batch_size": 1} for config in HEADS[:3]]


class SameMask(torch.nn.Module):
    """ALTO's dropout in PEFT's layer."""

    def __init__(self, job: Any, number: int) -> None:
        super().__init__()
        self._job, self._number, self._step = job, number, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = DropoutKey(self._job.config.lora_dropout, self._job.config.seed, self._step)
        self._step += 1
        return x * dropout_factor(key, self._number, x.shape[1], x.shape[2], x.device)


def test_dropout_equals_peft_with_the_same_mask() -> None:
    # One row a step: PEFT's batch has no padding then, and a token has the place that its mask is keyed by.
    bank = Bank(llama(), make_task(DROPPED), slots=[2, 0, 1])
    numbers = {module.name: number for number, module in enumerate(adaptable(bank.backbone.model))}
    for names in bank.trainer.bank.layout.shared_inputs:
        numbers |= dict.fromkeys(names, numbers[names[0]])
    solos = []
    for job in bank.jobs:
        solo = SoloJob(
            llama(), DATA.train, job.config, dropout=lambda module, _, job=job: SameMask(job, numbers[module])
        )
        solo.load(bank.trainer.bank.read(job.slot))
        solos.append(solo)
    for _ in range(2):
        found = bank.step()
        for job, solo in zip(bank.jobs, solos, strict=True):
            assert_same_step(found[job.id], solo.train_step())


def test_a_batch_split_over_micro_batches_has_the_same_masks() -> None:
    configs = [{**config, "lora_dropout": 0.3, "batch_size": 6} for config in HEADS]
    whole, split = (Bank(llama(), make_task(configs, max_tokens_per_pass=tokens)) for tokens in (10_000, 60))
    expected, found = whole.step(), split.step()
    for job in whole.jobs:
        assert_same_step(found[job.id], expected[job.id])


def test_a_job_that_goes_nan_changes_no_other_job_by_one_bit() -> None:
    assert_nan_stays_alone(lambda: Bank(llama(), make_task(HEADS), slots=list(SLOTS)), victim=0)


def test_a_job_that_was_parked_on_disk_continues_to_the_last_bit(tmp_path: Path) -> None:
    assert_continues_to_the_last_bit(llama, HEADS, tmp_path)


@pytest.mark.parametrize("fault", ["weight_decay", "lora_alpha"])
def test_a_setting_of_another_job_shows(fault: str) -> None:
    bank = Bank(llama(), make_task(HEADS[:1]))
    bank.step()
    job = bank.jobs[0]
    wrong = {"weight_decay": 0.2, "lora_alpha": job.config.lora_alpha * 1.01}[fault]
    solo = SoloJob(llama(), DATA.train, job.config.replace(**{fault: wrong}))
    solo.load(bank.trainer.bank.read(job.slot), bank.trainer.optimizer.read(job.slot))
    found = bank.step()[job.id]
    with pytest.raises(AssertionError):
        assert_same_step(found, solo.train_step())
