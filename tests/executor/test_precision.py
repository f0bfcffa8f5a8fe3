"""A base in 4 or 8 bits, or in half precision, trains every job as PEFT does on the same base.

Oracle: transformers loads and quantises, PEFT adapts, torch's AdamW steps (``tests/support/oracle.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from optional import needs_bitsandbytes
from oracle import SoloJob, StepFacts, flat, relative_distance
from peft import PeftModel
from resident_jobs import DATA, STABLE, Bank, assert_same_step, make_model, make_task
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from alto.backbone import load_network
from alto.lora import ModuleNames, write_adapter
from alto.spec import BaseModelSpec

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

BITS = [pytest.param(4, marks=needs_bitsandbytes), pytest.param(8, marks=needs_bitsandbytes)]
JOBS = [STABLE[1], STABLE[2], STABLE[6]]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    make_model("llama").save_pretrained(folder)
    return folder


def load_for_peft(folder: Path, bits: int | None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    settings: dict[str, Any] = {"dtype": dtype}
    if bits is not None:
        settings["device_map"] = {"": "cpu"}
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=bits == 4,
            load_in_8bit=bits == 8,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **settings)
    return model


def load_for_alto(folder: Path, bits: int | None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    name = str(dtype).removeprefix("torch.")
    return load_network(BaseModelSpec(id=str(folder), dtype=name, quantisation=f"{bits}bit" if bits else "none"))


def two_steps(bank: Bank, solo_base: PreTrainedModel, **solo: Any) -> list[tuple[StepFacts, StepFacts]]:
    """Return pairs of the first two steps here, and of each job alone from equal state."""
    pairs = []
    for _ in range(2):
        states = {
            job.id: (bank.trainer.bank.read(job.slot), bank.trainer.optimizer.read(job.slot)) for job in bank.jobs
        }
        for job_id, found in bank.step().items():
            config = next(job.config for job in bank.jobs if job.id == job_id)
            alone = SoloJob(solo_base, DATA.train, config, **solo)
            alone.load(*states[job_id])
            pairs.append((found, alone.train_step()))
    return pairs


@pytest.mark.parametrize("bits", BITS)
def test_a_step_on_a_quantised_base_is_pefts(bits: int, base: Path) -> None:
    bank = Bank(load_for_alto(base, bits), make_task(JOBS), slots=[2, 0, 3])
    for found, expected in two_steps(bank, load_for_peft(base, bits)):
        assert_same_step(found, expected)


@pytest.mark.parametrize(
    ("dtype", "adapter_dtype", "tolerance"),
    [
        pytest.param(torch.bfloat16, "float32", 2e-2, id="bfloat16"),
        pytest.param(torch.float16, "float32", 3e-3, id="float16"),
        pytest.param(torch.bfloat16, "bfloat16", 2e-2, id="bfloat16-adapters-too"),
    ],
)
def test_a_step_in_half_precision_is_pefts(
    dtype: torch.dtype, adapter_dtype: str, tolerance: float, base: Path
) -> None:
    """The tolerance is three times the measured error; a ``lora_alpha`` that is off by a tenth gives 1e-1."""
    bank = Bank(load_for_alto(base, None, dtype), make_task(JOBS, adapter_dtype=adapter_dtype))
    bank_dtype = getattr(torch, adapter_dtype)
    optimizer = bank.trainer.optimizer
    rows = (bank.trainer.bank.params_ZP, bank.trainer.bank.grads_ZP, optimizer.exp_avg_ZP, optimizer.exp_avg_sq_ZP)
    assert {row.dtype for row in rows} == {bank_dtype}
    initial, config = bank.trainer.bank.read(0), bank.jobs[0].config
    pairs = two_steps(bank, load_for_peft(base, None, dtype), autocast_adapter_dtype=adapter_dtype == "float32")
    for found, expected in pairs:
        assert found.loss == pytest.approx(expected.loss, rel=1e-3)
        assert relative_distance(found.gradients, expected.gradients) <= tolerance
    wrong = {"lora_alpha": 1.1 * config.lora_alpha}
    alone = SoloJob(load_for_peft(base, None, dtype), DATA.train, config, tamper=wrong)
    alone.load(initial)
    assert relative_distance(pairs[0][0].gradients, alone.train_step().gradients) > tolerance, (
        "a wrong scale would pass"
    )


@pytest.mark.parametrize("bits", BITS)
def test_a_neighbour_that_is_nan_changes_nothing(bits: int, base: Path) -> None:
    """Only q and v have adapters: the tokens of all jobs meet in every other layer of the quantised base too."""
    jobs = [STABLE[6], STABLE[6] | {"seed": 99}]
    weights = []
    for poison in (False, True):
        bank = Bank(load_for_alto(base, bits), make_task(jobs))
        if poison:
            bank.trainer.bank.params_ZP[1].fill_(float("nan"))
        bank.step()
        weights.append(flat(bank.trainer.bank.read(0)))
        assert torch.isnan(bank.trainer.bank.params_ZP[1]).any() == poison
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("bits", BITS)
def test_an_adapter_loads_into_peft_on_the_same_base(bits: int, base: Path, tmp_path: Path) -> None:
    network = load_for_alto(base, bits)
    bank = Bank(network, make_task(JOBS))
    bank.step()
    job = bank.jobs[0]
    write_adapter(
        tmp_path / "adapter", bank.trainer.bank.read(job.slot), job.config, str(base), ModuleNames.of(network)
    )
    validation = bank.trainer.evaluate([job])[0].loss
    # In training mode bitsandbytes multiplies by the dequantised weights too; in evaluation it rounds activations.
    peft = PeftModel.from_pretrained(load_for_peft(base, bits), tmp_path / "adapter").train()
    total = 0.0
    for ids, targets in zip(DATA.validation.input_ids, DATA.validation.targets, strict=True):
        logits = peft(input_ids=ids[None]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").detach())
    assert validation == pytest.approx(total / DATA.validation.num_trained_tokens, rel=1e-5)
