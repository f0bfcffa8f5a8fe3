"""A task from a trainer's configurations trains like the trainer: TRL's ``SFTTrainer`` with the same objects and the
same initial adapter is the oracle."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

import torch
from datasets import Dataset
from oracle import PREFIX, relative_distance
from peft import LoraConfig
from resident_jobs import Bank
from tiny import load_tokenizer, random_llama
from torch import Tensor
from trl import SFTConfig, SFTTrainer

from alto.data import read_task_rows
from alto.lora import AdapterWeights
from alto.spec import Task

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

NUM_ROWS, NUM_STEPS = 8, 3
ROWS = [{"prompt": f"{n} plus {n % 7}?", "completion": f" It is {n + n % 7}." + " Yes." * (n % 3)} for n in range(12)]

LORA: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 12,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    # Every row is in every step, so that the order of rows does not matter.
    "per_device_train_batch_size": NUM_ROWS // 2,
    "gradient_accumulation_steps": 2,
    "max_steps": NUM_STEPS,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "max_grad_norm": 0.05,
    "adam_beta2": 0.98,
    "max_length": 24,
}


def halves(model: Any) -> dict[str, Tensor]:
    """Return PEFT's matrices by module and half, transposed as in ALTO."""
    return {
        name.removeprefix(PREFIX).replace(".lora_A.default.weight", ".A").replace(".lora_B.default.weight", ".B"): (
            parameter.detach().T.clone()
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def trained_by_trl(folder: Path, lora: LoraConfig, arguments: SFTConfig) -> tuple[dict[str, Tensor], ...]:
    """Return the initial adapter, the final one, and the losses of all steps."""
    tokenizer = load_tokenizer()
    trainer = SFTTrainer(
        model=random_llama(len(tokenizer)),
        args=arguments,
        train_dataset=Dataset.from_list(ROWS[:NUM_ROWS]),
        processing_class=tokenizer,
        peft_config=copy.deepcopy(lora),
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if ".lora_B." in name:  # zeros would hide the gradient of the other half
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    first = halves(trainer.model)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return first, halves(trainer.model), {"losses": torch.tensor(logged)}


def trained_by_alto(lora: LoraConfig, arguments: SFTConfig, first: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """Return the final adapter, and the losses of all steps."""
    task = Task(
        model="unused",
        dataset=ROWS[:NUM_ROWS],
        validation_dataset=ROWS[NUM_ROWS:],
        dataset_format="raw_prompt_completion",
        max_tokens_per_pass=4096,
        config=[lora, arguments],
    )
    tokenizer = load_tokenizer()
    bank = Bank(random_llama(len(tokenizer)), task, data=read_task_rows(task).encode(tokenizer))
    (job,) = bank.jobs
    names = {name.removesuffix(".A") for name in first if name.endswith(".A")}
    weights = AdapterWeights({name: (first[f"{name}.A"], first[f"{name}.B"]) for name in sorted(names)})
    assert weights.keys() == bank.trainer.bank.read(job.slot).keys()
    bank.trainer.bank.write(job.slot, weights)
    assert job.total_steps == NUM_STEPS
    losses = [bank.step()[job.id].loss for _ in range(NUM_STEPS)]
    last = bank.trainer.bank.read(job.slot)
    return {f"{name}.{half}": matrix for name, pair in last.items() for half, matrix in zip("AB", pair, strict=True)}, (
        losses
    )


def test_every_step_is_that_of_the_trainer(tmp_path: Path) -> None:
    lora, arguments = LoraConfig(**LORA), SFTConfig(output_dir=str(tmp_path), **ARGUMENTS)
    first, expected, logged = trained_by_trl(tmp_path, lora, arguments)
    found, losses = trained_by_alto(lora, arguments, first)
    assert losses == pytest.approx(logged["losses"].tolist(), rel=1e-5)
    moved = {name: found[name] - first[name] for name in first}
    assert relative_distance(moved, {name: expected[name] - first[name] for name in first}) <= 1e-4


@pytest.mark.parametrize(
    ("key", "value"),
    [("weight_decay", 0.0), ("lr_scheduler_type", "linear"), ("max_grad_norm", 1.0), ("adam_beta2", 0.999)],
)
def test_another_setting_is_seen(tmp_path: Path, key: str, value: object) -> None:
    """The comparison can fail: one changed setting changes the steps."""
    lora, arguments = LoraConfig(**LORA), SFTConfig(output_dir=str(tmp_path), **ARGUMENTS)
    first, expected, _ = trained_by_trl(tmp_path, lora, arguments)
    found, _ = trained_by_alto(lora, SFTConfig(output_dir=str(tmp_path), **ARGUMENTS | {key: value}), first)
    moved = {name: found[name] - first[name] for name in first}
    assert relative_distance(moved, {name: expected[name] - first[name] for name in first}) > 1e-3
