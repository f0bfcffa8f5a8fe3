"""A slot with one of torch's optimizers equals the one that transformers' Trainer makes for the parameters of PEFT."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from alto.errors import UnsupportedError
from alto.executor.checkpoint import write_state
from alto.lora import AdapterBank, AdapterShape, BankLayout, OptimizerState, SlotAdamW, SlotUpdate, TargetModule
from alto.spec import JobConfig
from alto.spec.lr_schedules import OptimizerName

MODULES = (
    TargetModule(name="q", in_features=24, out_features=40),
    TargetModule(name="k", in_features=24, out_features=12),
    TargetModule(name="down", in_features=56, out_features=24),
)

SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"optim": "sgd", "max_grad_norm": 0.5},
    "sgd-momentum": {"optim": "sgd", "optim_args": "momentum=0.9, dampening=0.1", "weight_decay": 0.1},
    "sgd-nesterov": {"optim": "sgd", "optim_args": {"momentum": 0.8, "nesterov": True}, "loraplus_lr_ratio": 4.0},
    "rmsprop": {"optim": "rmsprop", "weight_decay": 0.1},
    "rmsprop-centered": {"optim": "rmsprop", "optim_args": "alpha=0.9,eps=1e-6,momentum=0.5,centered=true"},
    "adagrad": {"optim": "adagrad", "optim_args": "lr_decay=0.05,eps=1e-7", "weight_decay": 0.01},
    "adafactor": {"optim": "adafactor", "weight_decay": 0.1, "max_grad_norm": None, "loraplus_lr_ratio": 2.0},
    "adamw": {"optim": "adamw_torch", "weight_decay": 0.1},
}
NAMES = tuple(SETTINGS)
CONFIGS = tuple(JobConfig(r=2 + 2 * (n % 3), learning_rate=0.01, **given) for n, given in enumerate(SETTINGS.values()))
OWN = tuple(index for index, config in enumerate(CONFIGS) if config.optim != "adamw_torch")
NUM_STEPS = 5


class World:
    """A job with each of the settings, each in a slot of one bank."""

    def __init__(
        self, shift: int = 0, dtype: torch.dtype = torch.float32, configs: Sequence[JobConfig] = CONFIGS
    ) -> None:
        self.configs = configs
        layout = BankLayout(modules=MODULES, max_rank=6, shared_inputs=(("q", "k"),))
        self.bank = AdapterBank(layout, len(CONFIGS), dtype=dtype)
        self.optimizer = SlotAdamW(self.bank, {config.optim for config in CONFIGS})
        self.slots = [(index + shift) % len(CONFIGS) for index in range(len(CONFIGS))]
        for index, (slot, config) in enumerate(zip(self.slots, CONFIGS, strict=True)):
            self.bank.occupy(slot, AdapterShape(rank=config.r, targets=MODULES))
            self.bank.initialise(slot, index)
            self.optimizer.reset(slot, config.optim)

    def matrices(self, index: int, rows_ZP: torch.Tensor) -> list[torch.Tensor]:
        """Views of a job's matrices, every ``A`` and ``B`` as PEFT has them."""
        return [matrix.T for _, *pair in self.bank.matrices(rows_ZP, self.slots[index]) for matrix in pair]

    def weights(self, index: int) -> list[torch.Tensor]:
        return [matrix.clone() for matrix in self.matrices(index, self.bank.params_ZP)]

    def give_gradients(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for index in range(len(CONFIGS)):
            for gradient in self.matrices(index, self.bank.grads_ZP):
                gradient.copy_(torch.randn(gradient.shape, generator=generator))

    def step(self, number: int, indices: Sequence[int] = range(len(CONFIGS))) -> None:
        updates = [
            SlotUpdate(slot=self.slots[index], config=self.configs[index], learning_rate=rate_of(index, number))
            for index in indices
        ]
        self.optimizer.step(updates, self.optimizer.gradient_norms([update.slot for update in updates]))

    def state(self, index: int) -> OptimizerState:
        return self.optimizer.read(self.slots[index])


def rate_of(index: int, number: int) -> float:
    return CONFIGS[index].learning_rate / (1 + number)


class Alone:
    """The job's parameters under the optimizer that the Trainer makes of its arguments."""

    def __init__(self, world: World, index: int, folder: Path) -> None:
        self.config, self.index = world.configs[index], index
        given = SETTINGS[NAMES[index]]
        text = given.get("optim_args")
        if isinstance(text, dict):
            text = ",".join(f"{key}={value}" for key, value in text.items())
        arguments = TrainingArguments(
            output_dir=str(folder), optim=given["optim"], optim_args=text, learning_rate=0.01, use_cpu=True
        )
        make, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
        self.parameters = [
            torch.nn.Parameter(matrix.clone(memory_format=torch.contiguous_format))
            for matrix in world.matrices(index, world.bank.params_ZP)
        ]
        decay = {"weight_decay": self.config.weight_decay}  # the Trainer gives it to the group
        groups = [{"params": self.parameters[0::2], **decay}, {"params": self.parameters[1::2], **decay}]
        self.optimizer = make(groups, **settings)

    def step(self, number: int, gradients: Sequence[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm or float("inf"))
        for group, factor in zip(self.optimizer.param_groups, (1.0, self.config.loraplus_lr_ratio), strict=True):
            group["lr"] = rate_of(self.index, number) * factor
        self.optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_clipped", [True, False], ids=["clipped", "unclipped"])
def test_every_slot_equals_the_trainers_optimizer_alone(is_clipped: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """To the last bit where nothing is clipped: one norm is summed over the row and the other over matrices."""
    configs = CONFIGS if is_clipped else [config.replace(max_grad_norm=None) for config in CONFIGS]
    world = World(dtype=dtype, configs=configs)
    alone = {index: Alone(world, index, tmp_path) for index in OWN}
    rounding = {torch.float32: (1e-5, 1e-7), torch.bfloat16: (1e-2, 1e-3)}[dtype] if is_clipped else (0.0, 0.0)
    for number in range(NUM_STEPS):
        world.give_gradients(number)
        for index, job in alone.items():
            job.step(number, world.matrices(index, world.bank.grads_ZP))
        before = {index: world.weights(index) for index in OWN}
        world.step(number)
        for index, job in alone.items():
            assert not any(map(torch.equal, world.weights(index), before[index])), NAMES[index]
            for found, expected in zip(world.weights(index), job.parameters, strict=True):
                torch.testing.assert_close(found, expected.data, rtol=rounding[0], atol=rounding[1])
        world.bank.complete_gradients(world.slots)
        assert not world.bank.grads_ZP.any()


def test_a_job_goes_on_in_another_slot_from_its_saved_state(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    stays, goes_on = World(), World(shift=3)
    for number in range(2):
        stays.give_gradients(number)
        stays.step(number)
    for index, config in enumerate(CONFIGS):
        state = stays.state(index)
        folder = tmp_path / NAMES[index]
        folder.mkdir()
        write_state(folder, state)
        restored = OptimizerState(step=state.step, tensors=load_file(folder / "optimizer.safetensors"))
        for matrix, saved in zip(goes_on.matrices(index, goes_on.bank.params_ZP), stays.weights(index), strict=True):
            matrix.copy_(saved)
        goes_on.optimizer.write(goes_on.slots[index], config.optim, restored)
    for number in range(2, 4):
        for world in (stays, goes_on):
            world.give_gradients(number)
            world.step(number)
    for index in range(len(CONFIGS)):
        assert all(map(torch.equal, goes_on.weights(index), stays.weights(index))), NAMES[index]
        found, expected = goes_on.state(index), stays.state(index)
        assert found.step == expected.step == 4
        assert found.tensors.keys() == expected.tensors.keys()
        assert all(torch.equal(found.tensors[part], expected.tensors[part]) for part in expected.tensors)


def test_a_job_with_nan_touches_no_other() -> None:
    clean, poisoned = World(), World()
    victim = NAMES.index("rmsprop")
    for number in range(2):
        for world in (clean, poisoned):
            world.give_gradients(number)
        poisoned.bank.grads_ZP[poisoned.slots[victim]] = float("nan")
        for world in (clean, poisoned):
            world.step(number)
    for index in set(range(len(CONFIGS))) - {victim}:
        assert all(map(torch.equal, poisoned.weights(index), clean.weights(index))), NAMES[index]
    assert all(matrix.isnan().all() for matrix in poisoned.weights(victim))


def test_a_step_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world, index = World(), NAMES.index("sgd-momentum")
    world.give_gradients(0)
    world.step(0)
    weights, state = world.weights(index), world.state(index)
    world.give_gradients(1)
    original = torch.optim.SGD.step

    def fails(self: torch.optim.SGD) -> None:
        original(self)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.optim.SGD, "step", fails)
    with pytest.raises(torch.OutOfMemoryError):
        world.step(1, [index])
    assert all(map(torch.equal, world.weights(index), weights))
    assert all(torch.equal(world.state(index).tensors[name], part) for name, part in state.tensors.items())
    assert all(gradient.any() for gradient in world.matrices(index, world.bank.grads_ZP))


@pytest.mark.parametrize("name", [name.value for name in OptimizerNames])
def test_every_optimizer_of_transformers_is_trained_or_refused_with_a_reason(name: str) -> None:
    with contextlib.suppress(UnsupportedError):
        assert JobConfig(optim=name).optim in get_args(OptimizerName)
