"""Law 1 on modules that jobs train whole (``modules_to_save``): beside jobs that do not, against PEFT alone."""

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

from alto.backbone import output_head
from alto.errors import UnsupportedError
from alto.executor import BankSize

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from .trl.experimental."),
]

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
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
SLOTS = [3, 1, 0, 2, 4, 6]


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
    bank = Bank(MODELS[name](), make_task(WHOLE), slots=SLOTS)
    compare(MODELS[name], bank)
    trained = [set(bank.trainer.bank.read(job.slot).extras) for job in bank.jobs]
    assert trained == [{HEAD}, set(), {HEAD, TABLE}, {TABLE}, set(), {TABLE}]


def test_chunks_of_the_loss_that_split_jobs_equal_peft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_head, "_chunk_tokens", lambda *_: 7)
    compare(llama, Bank(llama(), make_task(WHOLE), slots=SLOTS), num_steps=2)


def test_checkpointed_layers_equal_peft_alone() -> None:
    bank = Bank(llama(), make_task(WHOLE), slots=SLOTS)
    bank.backbone.checkpoint_layers()
    compare(llama, bank, num_steps=2)


@pytest.mark.parametrize(
    "optim", [pytest.param("adamw_8bit", marks=needs_bitsandbytes), "sgd", "rmsprop", "adagrad", "adafactor"]
)
def test_another_optimizer_equals_peft_alone(optim: str) -> None:
    configs = [{**config, "optim": optim} for config in WHOLE[: 2 if optim == "adamw_8bit" else 4]]
    compare(llama, Bank(llama(), make_task(configs)), num_steps=2)


def test_8_bit_states_of_embeddings_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"expected an optimizer of 32 bits for model\.embed_tokens, found adamw_8"
    ):
        Bank(llama(), make_task([{**WHOLE[3], "optim": "adamw_8bit"}]))


def test_an_evaluation_equals_pefts() -> None:
    bank = Bank(gemma3(), make_task(WHOLE), slots=SLOTS)
    for _ in range(3):
        bank.step()
    batch = padded_batch(DATA.validation, range(len(DATA.validation)))
    for job, found in zip(bank.jobs, bank.trainer.evaluate(bank.jobs), strict=True):
        solo = SoloJob(gemma3(), DATA.train, job.config)
        solo.load(bank.trainer.bank.read(job.slot))
        with torch.no_grad():
            assert found.loss == pytest.approx(float(solo._loss(batch)), rel=LOSS_TOLERANCE)


def test_preferences_equal_trl_alone(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    trl = make_cpo_trainer(tmp_path)
    forms = [{"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.5}, {"loss_type": "sigmoid", "beta": 0.1}]
    configs = [{**WHOLE[0], **forms[0]}, {**WHOLE[2], **forms[1]}, {**WHOLE[1], **forms[1]}]
    bank = Bank(llama(), make_task(configs, method="cpo"), slots=[2, 0, 1], data=PAIRS)
    for _ in range(2):
        states = [(bank.trainer.bank.read(job.slot), bank.trainer.optimizer.read(job.slot)) for job in bank.jobs]
        found = bank.step()
        for job, state in zip(bank.jobs, states, strict=True):
            solo = SoloCpo(llama(), PAIRS.train, job.config, trl=trl)
            solo.load(*state)
            assert_same_step(found[job.id], solo.train_step())


def test_a_batch_split_over_micro_batches_is_the_same_step() -> None:
    configs = [{**config, "batch_size": 6} for config in WHOLE]
    whole, split = (Bank(llama(), make_task(configs, max_tokens_per_pass=tokens)) for tokens in (10_000, 60))
    expected, found = whole.step(), split.step()
    for job in whole.jobs:
        assert_same_step(found[job.id], expected[job.id])


def test_they_start_with_the_frozen_weights() -> None:
    bank, base = Bank(llama(), make_task(WHOLE), slots=SLOTS), llama().state_dict()
    for job in bank.jobs:
        for name, tensor in bank.trainer.bank.read(job.slot).extras.items():
            assert torch.equal(tensor, base[name])


def test_a_job_that_goes_nan_changes_no_other_job_by_one_bit() -> None:
    assert_nan_stays_alone(lambda: Bank(llama(), make_task(WHOLE), slots=list(SLOTS)), victim=0)


def test_a_job_that_was_parked_on_disk_continues_to_the_last_bit(tmp_path: Path) -> None:
    assert_continues_to_the_last_bit(llama, WHOLE, tmp_path)


def test_the_memory_model_counts_them_and_their_optimizer_state() -> None:
    plain, whole = ({"r": 4, "modules_to_save": names} for names in (None, ["lm_head", "embed_tokens"]))
    banks = [Bank(llama(), make_task([settings])) for settings in (plain, whole)]
    sizes = [
        BankSize.of([job.planned for job in bank.jobs], bank.backbone, num_slots=1).bytes_per_slot for bank in banks
    ]
    assert sizes[1] - sizes[0] == pytest.approx(
        2 * VOCABULARY * COMMON["hidden_size"] * 4 * 4, abs=4 * 4 * 16
    )  # weights, gradients, two moments


@pytest.mark.parametrize("fault", ["weight_decay", "modules_to_save"])
def test_a_setting_of_another_job_shows(fault: str) -> None:
    bank = Bank(llama(), make_task(WHOLE[:1]))
    bank.step()
    job = bank.jobs[0]
    wrong = {"weight_decay": 0.2, "modules_to_save": ["embed_tokens", "lm_head"]}[fault]
    solo = SoloJob(llama(), DATA.train, job.config.replace(**{fault: wrong}))
    weights = bank.trainer.bank.read(job.slot)
    if fault == "modules_to_save":
        weights.extras[TABLE] = llama().state_dict()[TABLE]
    solo.load(weights, None if fault == "modules_to_save" else bank.trainer.optimizer.read(job.slot))
    found = bank.step()[job.id]
    with pytest.raises(AssertionError):
        assert_same_step(found, solo.train_step())
