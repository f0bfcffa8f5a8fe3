"""Jobs that train more than low-rank matrices, beside jobs that do not, against PEFT alone (:mod:`test_isolation`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from biased_models import gpt2, llama, starcoder2
from isolation import assert_continues_to_the_last_bit, assert_nan_stays_alone
from job_kinds import compare
from optional import needs_bitsandbytes
from oracle import SoloJob, relative_distance
from resident_jobs import DATA, Bank, assert_same_step, make_task

from alto.kernels import DropoutKey
from alto.kernels.dropout import dropout_factor
from alto.lora import linear_modules

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


BIASES = [
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
SLOTS = [3, 1, 0, 2, 4]

OTHER_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "rmsprop": {"optim": "rmsprop"},
    "adagrad": {"optim": "adagrad"},
    "adafactor": {"optim": "adafactor"},
}

MODELS = {"llama": llama, "starcoder2": starcoder2}


@pytest.mark.parametrize("name", MODELS)
def test_biases_are_trained_as_peft_trains_them_alone(name: str) -> None:
    bank = Bank(MODELS[name](), make_task(BIASES), slots=SLOTS)
    compare(MODELS[name], bank)
    norms = [extra.name for extra in bank.jobs[0].shape.extras if "norm" in extra.name]
    assert len(norms) == (5 if name == "starcoder2" else 0)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_biases_behind_transposed_weights_have_pefts_gradients() -> None:
    configs = [{**config, "target_modules": ["c_attn", "c_proj"]} for config in BIASES]
    bank = Bank(gpt2(), make_task(configs), slots=SLOTS)
    solos = []
    for job in bank.jobs:
        solo = SoloJob(gpt2(), DATA.train, job.config)
        solo.load(bank.trainer.bank.read(job.slot))
        solos.append(solo)
    found = bank.step()
    for job, solo in zip(bank.jobs, solos, strict=True):
        expected = solo.train_step()
        assert found[job.id].loss == pytest.approx(expected.loss, rel=1e-5)
        assert relative_distance(found[job.id].gradients, expected.gradients) <= 1e-4


@needs_bitsandbytes
def test_biases_under_an_8_bit_optimizer_equal_peft_alone() -> None:
    configs = [
        {**config, "optim": optim} for config, optim in zip(BIASES, ["adamw_8bit", "adamw_torch"] * 3, strict=False)
    ]
    compare(llama, Bank(llama(), make_task(configs), slots=SLOTS))


@pytest.mark.parametrize("optim", OTHER_OPTIMIZERS)
def test_biases_under_another_optimizer_equal_peft_alone(optim: str) -> None:
    configs = [{**config, **OTHER_OPTIMIZERS[optim]} for config in BIASES[:3]]
    compare(starcoder2, Bank(starcoder2(), make_task(configs)))


def test_biases_of_checkpointed_layers_equal_peft_alone() -> None:
    bank = Bank(starcoder2(), make_task(BIASES), slots=SLOTS)
    bank.backbone.checkpoint_layers()
    compare(starcoder2, bank, num_steps=2)


def test_a_job_that_goes_nan_changes_no_other_job_by_one_bit() -> None:
    assert_nan_stays_alone(lambda: Bank(starcoder2(), make_task(BIASES), slots=SLOTS), victim=0)


def test_a_job_that_was_parked_on_disk_continues_to_the_last_bit(tmp_path: Path) -> None:
    assert_continues_to_the_last_bit(starcoder2, BIASES, tmp_path)


class TestTheOracleBites:
    @pytest.mark.parametrize("fault", ["bias", "weight_decay", "loraplus_lr_ratio"])
    def test_a_setting_of_another_job(self, fault: str) -> None:
        bank = Bank(llama(), make_task([{**BIASES[2], "max_grad_norm": 1.0}]))
        bank.step()
        job = bank.jobs[0]
        wrong = {"bias": "none", "weight_decay": 0.2, "loraplus_lr_ratio": 4.1}[fault]
        solo = SoloJob(llama(), DATA.train, job.config.replace(**{fault: wrong}))
        solo.load(bank.trainer.bank.read(job.slot), bank.trainer.optimizer.read(job.slot))
        with pytest.raises(AssertionError):
            assert_same_step(bank.step()[job.id], solo.train_step())


DORA = [
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


class TestDora:
    @pytest.mark.parametrize("name", MODELS)
    def test_magnitudes_are_trained_as_peft_trains_them_alone(self, name: str) -> None:
        compare(MODELS[name], Bank(MODELS[name](), make_task(DORA), slots=SLOTS))

    @pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
    def test_they_are_behind_transposed_weights_too(self) -> None:
        configs = [{**config, "target_modules": ["c_attn", "c_proj"], "bias": "none"} for config in DORA[:4]]
        compare(gpt2, Bank(gpt2(), make_task(configs)), num_steps=2)

    @needs_bitsandbytes
    def test_they_are_under_an_8_bit_optimizer_too(self) -> None:
        configs = [{**config, "optim": "adamw_8bit"} for config in DORA[:3]]
        compare(llama, Bank(llama(), make_task(configs)), num_steps=2)

    @pytest.mark.parametrize("optim", OTHER_OPTIMIZERS)
    def test_they_are_under_another_optimizer_too(self, optim: str) -> None:
        configs = [{**config, **OTHER_OPTIMIZERS[optim]} for config in DORA[:3]]
        compare(llama, Bank(llama(), make_task(configs)))

    def test_they_are_in_checkpointed_layers_too(self) -> None:
        bank = Bank(llama(), make_task(DORA), slots=SLOTS)
        bank.backbone.checkpoint_layers()
        compare(llama, bank, num_steps=2)

    def test_they_start_as_in_peft(self) -> None:
        bank = Bank(llama(), make_task(DORA))
        for job in bank.jobs:
            solo = SoloJob(llama(), DATA.train, job.config)
            expected = {name: vector for name, vector in solo.weights().items() if name.endswith("magnitude_vector")}
            found = bank.trainer.bank.read(job.slot).extras
            assert bool(expected) == job.config.use_dora
            for name, vector in expected.items():
                torch.testing.assert_close(found[name], vector, rtol=1e-6, atol=0.0)

    def test_dropout_equals_peft_with_the_same_mask(self) -> None:
        # One row a step: PEFT's batch has no padding then, and a token has the place that its mask is keyed by.
        configs = [{**config, "lora_dropout": 0.3, "batch_size": 1} for config in (*DORA[:2], DORA[4])]
        configs += [{**DORA[0], "seed": 16}, {**configs[0], "target_modules": ["k_proj"], "seed": 17}]
        bank = Bank(llama(), make_task(configs), slots=SLOTS)
        numbers = {module.name: number for number, module in enumerate(linear_modules(bank.backbone.model))}
        for names in bank.trainer.bank.layout.shared_inputs:
            numbers |= dict.fromkeys(names, numbers[names[0]])

        class SameMask(torch.nn.Module):
            def __init__(self, job: Any, module: str) -> None:
                super().__init__()
                self._job, self._number, self._step = job, numbers[module], 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                key = DropoutKey(self._job.config.lora_dropout, self._job.config.seed, self._step)
                self._step += 1
                return x * dropout_factor(key, self._number, x.shape[1], x.shape[2], x.device)

        solos = []
        for job in bank.jobs:
            chosen = (lambda module, _, job=job: SameMask(job, module)) if job.config.lora_dropout else None
            solo = SoloJob(llama(), DATA.train, job.config, dropout=chosen)
            solo.load(bank.trainer.bank.read(job.slot))
            solos.append(solo)
        for _ in range(2):
            found = bank.step()
            for job, solo in zip(bank.jobs, solos, strict=True):
                assert_same_step(found[job.id], solo.train_step())

    def test_a_job_that_goes_nan_changes_no_other_job_by_one_bit(self) -> None:
        assert_nan_stays_alone(lambda: Bank(llama(), make_task(DORA), slots=SLOTS), victim=0)

    def test_a_job_that_was_parked_on_disk_continues_to_the_last_bit(self, tmp_path: Path) -> None:
        assert_continues_to_the_last_bit(llama, DORA, tmp_path)

    @pytest.mark.parametrize("fault", ["use_dora", "weight_decay", "lora_alpha"])
    def test_a_setting_of_another_job_shows(self, fault: str) -> None:
        bank = Bank(llama(), make_task(DORA[:1]))
        bank.step()
        job = bank.jobs[0]
        wrong = {"use_dora": False, "weight_decay": 0.2, "lora_alpha": job.config.lora_alpha * 1.01}[fault]
        solo = SoloJob(llama(), DATA.train, job.config.replace(**{fault: wrong}))
        solo.load(bank.trainer.bank.read(job.slot), bank.trainer.optimizer.read(job.slot))
        with pytest.raises(AssertionError):
            assert_same_step(bank.step()[job.id], solo.train_step())
