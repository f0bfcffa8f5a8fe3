"""A training step makes the host wait for the device once: when the losses are read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from biased_models import llama
from job_kinds import KINDS
from oracle_classification import ONE_LABEL, ONE_NUMBER, data_of
from oracle_kto import LABELLED
from resident_jobs import DATA, PAIRS, Bank, make_model, make_task
from synchronisations import CountsWaiting

from alto.lora.row_optimizers import EightBitAdamW

JOBS = [
    {"lr": 1e-3, "r": 4, "batch_size": 1, "seed": 1, "lora_dropout": 0.1},
    {"lr": 5e-4, "r": 8, "batch_size": 3, "seed": 2, "lora_dropout": 0.0, "max_grad_norm": None},
    {"lr": 2e-4, "r": 2, "batch_size": 4, "seed": 3, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]},
]
SETTINGS = {
    "sft": {},
    "dpo": {"method": "dpo"},
    "several passes": {"max_tokens_per_pass": 60},
    "recomputed layers": {"gradient_checkpointing": True},
}


def make_bank(
    settings: dict[str, object],
    *,
    architecture: str = "llama",
    device: str = "cpu",
    optims: tuple[str, ...] = ("adamw_torch",) * 3,
) -> Bank:
    task = make_task([job | {"optim": optim} for job, optim in zip(JOBS, optims, strict=True)], **settings)
    bank = Bank(make_model(architecture).to(device), task, data=PAIRS if task.method == "dpo" else DATA)
    if task.gradient_checkpointing:
        bank.backbone.checkpoint_layers()
    return bank


@pytest.fixture
def eight_bit_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step without the copy of the optimizer's state, which a CPU keeps in case memory runs out."""
    monkeypatch.setattr(EightBitAdamW, "_step_whole", lambda optimizer: optimizer._optimizer.step())


def take_step(bank: Bank) -> None:
    bank.trainer.step(bank.jobs)
    for job in bank.jobs:
        job.step += 1


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_step_waits_for_the_device_once(settings: dict[str, object], architecture: str) -> None:
    assert_one_wait(make_bank(settings, architecture=architecture))


def test_recomputed_layers_save_no_state_of_random_number_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each would be a copy to the host; masks and noise of jobs are functions of their keys."""
    bank = make_bank(SETTINGS["recomputed layers"])
    monkeypatch.setattr(torch, "get_rng_state", lambda *_: pytest.fail("a state of a generator is asked for"))
    take_step(bank)


@pytest.mark.usefixtures("eight_bit_as_on_a_gpu")
@pytest.mark.parametrize(
    "optims", [("adamw_torch", "adamw_8bit", "adamw_torch"), ("sgd", "rmsprop", "adagrad"), ("adafactor",) * 3], ids=str
)
def test_so_does_one_with_optimizers_of_other_kinds(optims: tuple[str, ...]) -> None:
    assert_one_wait(make_bank({}, optims=optims))


@pytest.mark.usefixtures("eight_bit_as_on_a_gpu")
@pytest.mark.parametrize("method", ["sft", "classification", "regression", "kto"])
def test_so_does_one_of_jobs_with_biases_magnitudes_noise_and_heads(method: str) -> None:
    configs = list(KINDS.values())
    if method == "sft":
        assert_one_wait(Bank(llama(), make_task(configs)))
    elif method == "kto":
        several = [{**config, "batch_size": 3, "neftune_noise_alpha": None} for config in configs]
        assert_one_wait(Bank(llama(), make_task(several, method=method), data=LABELLED))
    else:
        labels = ONE_LABEL if method == "classification" else ONE_NUMBER
        task = make_task(configs, method=method).with_labels(labels)
        assert_one_wait(Bank(llama(), task, data=data_of(labels)))


def assert_one_wait(bank: Bank) -> None:
    take_step(bank)
    tensors = [*bank.backbone.model.parameters(), *bank.backbone.model.buffers()]
    lora, optimizer = bank.trainer.bank, bank.trainer.optimizer
    tensors += [lora.params_ZP, lora.grads_ZP, lora.anchor, optimizer.exp_avg_ZP, optimizer.exp_avg_sq_ZP]
    with CountsWaiting(tensors) as counter:
        take_step(bank)
    assert len(counter.waits) == 1, "\n".join(counter.waits)
    assert "trainer.py" in counter.waits[0]
    assert "losses.tolist()" in counter.waits[0]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.numpy(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: float(x[0]),
        lambda x: x[[0, 1]],
        lambda x: x.index_select(0, torch.tensor([0, 1], device=x.device)),
        lambda x: x + torch.ones(3).to(x.device),
    ],
)
def test_the_count_has_eyes(read: Callable[[torch.Tensor], object]) -> None:
    host = torch.ones(3)
    with CountsWaiting([]) as counter:
        sent = host.to(host.device, non_blocking=True)
        product = torch.empty(3)
        torch.mul(sent, 2, out=product)
        read(product)
    assert len(counter.waits) == 1


def test_numbers_of_the_host_are_read_without_waiting() -> None:
    with CountsWaiting([torch.ones(1)]) as counter:
        host = torch.ones(3)
        assert host[host > 0].sum().item() == len(host.tolist()) == 3
    assert counter.waits == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_step_on_a_gpu_waits_for_it_once(settings: dict[str, object]) -> None:
    bank = make_bank(settings, device="cuda")
    take_step(bank)  # compiles the kernels
    trainer = bank.trainer
    try:
        torch.cuda.set_sync_debug_mode("error")
        losses = trainer.backward(bank.jobs)
        trainer.update(bank.jobs)
        with pytest.raises(RuntimeError, match="synchroniz"):
            trainer.read(losses)
    finally:
        torch.cuda.set_sync_debug_mode("default")
