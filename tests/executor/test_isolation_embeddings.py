"""Law 1 on token embeddings (``target_modules: [embed_tokens]``): beside jobs that leave them alone, against PEFT."""

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
from resident_jobs import COMMON, DATA, LOSS_TOLERANCE, PAIRS, VOCABULARY, Bank, assert_same_step, make_task
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from .trl.experimental."),
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
SLOTS = [3, 1, 0, 2, 4]


def llama() -> PreTrainedModel:
    """Token 40, which rows have, is its padding, so that its row of embeddings has no gradient."""
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**(COMMON | {"pad_token_id": 40}))).eval()


def gemma3() -> PreTrainedModel:
    """Embeddings of a class of its own, which multiplies them, and a head that is tied to them."""
    return build_tiny("gemma3", vocab_size=VOCABULARY)


MODELS = {"llama": llama, "gemma3": gemma3}


@pytest.mark.parametrize("name", MODELS)
def test_every_step_in_company_equals_peft_alone(name: str) -> None:
    bank = Bank(MODELS[name](), make_task(EMBEDDINGS), slots=SLOTS)
    compare(MODELS[name], bank, num_steps=4)
    targeted = ["model.embed_tokens" in bank.trainer.bank.read(job.slot) for job in bank.jobs]
    assert targeted == [True, False, True, True, True]


def test_checkpointed_layers_equal_peft_alone() -> None:
    bank = Bank(llama(), make_task(EMBEDDINGS), slots=SLOTS)
    bank.backbone.checkpoint_layers()
    compare(llama, bank, num_steps=3)


@pytest.mark.parametrize(
    "optim", [pytest.param("adamw_8bit", marks=needs_bitsandbytes), "sgd", "rmsprop", "adagrad", "adafactor"]
)
def test_another_optimizer_equals_peft_alone(optim: str) -> None:
    configs = [{**config, "optim": optim} for config in EMBEDDINGS[:3]]
    compare(llama, Bank(llama(), make_task(configs)), num_steps=3)


def test_they_start_as_in_peft_and_depend_on_the_seed_alone() -> None:
    banks = [Bank(llama(), make_task(EMBEDDINGS), slots=slots) for slots in (SLOTS, [0, 2, 5, 1, 3])]
    for number in (0, 2, 3, 4):
        pairs = [bank.trainer.bank.read(bank.jobs[number].slot)["model.embed_tokens"] for bank in banks]
        (a_VR, b_RH), (other_a_VR, other_b_RH) = pairs
        assert not a_VR.any()
        assert abs(float(b_RH.mean())) < 0.2
        assert float(b_RH.std()) == pytest.approx(1.0, rel=0.2)
        assert torch.equal(a_VR, other_a_VR)
        assert torch.equal(b_RH, other_b_RH)


def test_an_evaluation_equals_pefts() -> None:
    bank = Bank(gemma3(), make_task(EMBEDDINGS), slots=SLOTS)
    for _ in range(4):
        bank.step()
    batch = padded_batch(DATA.validation, range(len(DATA.validation)))
    for job, found in zip(bank.jobs, bank.trainer.evaluate(bank.jobs), strict=True):
        solo = SoloJob(gemma3(), DATA.train, job.config)
        solo.load(bank.trainer.bank.read(job.slot))
        with torch.no_grad():
            assert found.loss == pytest.approx(float(solo._loss(batch)), rel=LOSS_TOLERANCE)


def test_preferences_whose_replies_share_a_prompt_equal_trl_alone(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    trl = make_cpo_trainer(tmp_path)
    forms = [{"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.5}, {"loss_type": "sigmoid", "beta": 0.1}]
    configs = [{**EMBEDDINGS[0], **forms[0]}, {**EMBEDDINGS[2], **forms[1]}, {**EMBEDDINGS[1], **forms[1]}]
    bank = Bank(llama(), make_task(configs, method="cpo"), slots=[2, 0, 1], data=PAIRS)
    for _ in range(3):
        states = [(bank.trainer.bank.read(job.slot), bank.trainer.optimizer.read(job.slot)) for job in bank.jobs]
        found = bank.step()
        for job, state in zip(bank.jobs, states, strict=True):
            solo = SoloCpo(llama(), PAIRS.train, job.config, trl=trl)
            solo.load(*state)
            assert_same_step(found[job.id], solo.train_step())


def test_a_batch_split_over_micro_batches_is_the_same_step() -> None:
    configs = [{**config, "batch_size": 6} for config in EMBEDDINGS]
    whole, split = (Bank(llama(), make_task(configs, max_tokens_per_pass=tokens)) for tokens in (10_000, 60))
    for _ in range(2):
        expected, found = whole.step(), split.step()
        for job in whole.jobs:
            assert_same_step(found[job.id], expected[job.id])
        for one, other in zip(whole.jobs, split.jobs, strict=True):  # from equal state
            split.trainer.bank.write(other.slot, whole.trainer.bank.read(one.slot))


def test_a_job_that_goes_nan_changes_no_other_job_by_one_bit() -> None:
    assert_nan_stays_alone(lambda: Bank(llama(), make_task(EMBEDDINGS), slots=list(SLOTS)), victim=0)


def test_a_job_that_was_parked_on_disk_continues_to_the_last_bit(tmp_path: Path) -> None:
    assert_continues_to_the_last_bit(llama, EMBEDDINGS, tmp_path)


@pytest.mark.parametrize("fault", ["weight_decay", "lora_alpha"])
def test_a_setting_of_another_job_shows(fault: str) -> None:
    bank = Bank(llama(), make_task(EMBEDDINGS[:1]))
    for _ in range(2):
        bank.step()
    job = bank.jobs[0]
    wrong = {"weight_decay": 0.2, "lora_alpha": job.config.lora_alpha * 1.01}[fault]
    solo = SoloJob(llama(), DATA.train, job.config.replace(**{fault: wrong}))
    solo.load(bank.trainer.bank.read(job.slot), bank.trainer.optimizer.read(job.slot))
    found = bank.step()[job.id]
    with pytest.raises(AssertionError):
        assert_same_step(found, solo.train_step())
