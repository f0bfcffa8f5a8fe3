"""A slot with one of torch's optimizers, or with an 8-bit AdamW, equals that optimizer on PEFT's parameters alone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from optional import needs_bitsandbytes
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from alto.errors import UnsupportedError
from alto.executor.checkpoint import write_state
from alto.lora import (
    AdapterBank,
    AdapterShape,
    BankLayout,
    BankOptimizer,
    OptimizerState,
    SlotUpdate,
    TargetModule,
    check_optimizer,
)
from alto.lora import optimizer as optimizer_module
from alto.lora import row_optimizers as eight_bit_module
from alto.spec import JobConfig
from alto.spec.lr_schedules import OptimizerName
from alto.version import install_command


class World:
    """Adapters in a bank in which q and k share their input; adapter ``i`` is in slot ``slots[i]``."""

    modules: Sequence[TargetModule]
    num_slots: int
    spreads = False

    def __init__(
        self, configs: Sequence[JobConfig], slots: Sequence[int], dtype: torch.dtype, optimizers: Sequence[str]
    ) -> None:
        max_rank = max(config.r for config in configs)
        layout = BankLayout(modules=tuple(self.modules), max_rank=max_rank, shared_inputs=(("q", "k"),))
        self.bank = AdapterBank(layout, self.num_slots, dtype=dtype)
        self.optimizer = BankOptimizer(self.bank, optimizers)
        self.slots = slots
        self.admit(configs)

    def admit(self, configs: Sequence[JobConfig]) -> None:
        self.configs = configs
        for index, (slot, config) in enumerate(zip(self.slots, configs, strict=True)):
            self.bank.occupy(slot, AdapterShape(rank=config.r, targets=tuple(self.modules)))
            self.bank.initialise(slot, index)
            self.optimizer.reset(slot, config.optim)

    def matrices(self, index: int, rows_ZP: torch.Tensor) -> list[torch.Tensor]:
        """Return views of adapter ``index``: every ``A`` and ``B`` as in PEFT."""
        return [matrix.T for _, *pair in self.bank.matrices(rows_ZP, self.slots[index]) for matrix in pair]

    def weights(self, index: int) -> list[torch.Tensor]:
        return [matrix.clone() for matrix in self.matrices(index, self.bank.params_ZP)]

    def state(self, index: int) -> OptimizerState:
        return self.optimizer.read(self.slots[index])

    def rate(self, index: int, number: int) -> float:
        return self.configs[index].learning_rate / (1 + number)

    def give_gradients(self, number: int) -> None:
        """Set gradients that depend on the number only, and are large enough to be clipped where there is a limit."""
        generator = torch.Generator().manual_seed(number)
        for index in range(len(self.configs)):
            for gradient in self.matrices(index, self.bank.grads_ZP):
                # Sizes of matrices differ much, so that each block of an 8-bit state has its own scale.
                scale = 10.0 ** torch.randint(-4, 1, (), generator=generator) if self.spreads else 1.0
                gradient.copy_(torch.randn(gradient.shape, generator=generator) * scale)

    def step(self, number: int, indices: Sequence[int] | None = None) -> torch.Tensor:
        self.give_gradients(number)
        return self.apply_gradients(number, indices)

    def apply_gradients(self, number: int, indices: Sequence[int] | None = None) -> torch.Tensor:
        updates = [
            SlotUpdate(slot=self.slots[index], config=self.configs[index], learning_rate=self.rate(index, number))
            for index in (range(len(self.configs)) if indices is None else indices)
        ]
        norms = self.optimizer.gradient_norms([update.slot for update in updates])
        self.optimizer.step(updates, norms)
        return norms


class Alone:
    """One adapter as PEFT's parameters, under the optimizer that ``make`` creates for their two groups."""

    def __init__(self, world: World, index: int, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        self._world, self._index, self._config = world, index, world.configs[index]
        self.parameters = [
            torch.nn.Parameter(matrix.clone(memory_format=torch.contiguous_format))
            for matrix in world.matrices(index, world.bank.params_ZP)
        ]
        self._optimizer = make([{"params": self.parameters[0::2]}, {"params": self.parameters[1::2]}])

    def step(self, number: int) -> torch.Tensor:
        """Take step ``number`` on the adapter's gradients in its world; return their norm."""
        gradients = self._world.matrices(self._index, self._world.bank.grads_ZP)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self._config.max_grad_norm or float("inf"))
        for group, factor in zip(self._optimizer.param_groups, (1.0, self._config.loraplus_lr_ratio), strict=True):
            group["lr"] = self._world.rate(self._index, number) * factor
        self._optimizer.step()
        return norm


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def same_state(found: OptimizerState, expected: OptimizerState) -> bool:
    assert found.tensors.keys() == expected.tensors.keys()
    return found.step == expected.step and all(
        torch.equal(found.tensors[part], tensor) for part, tensor in expected.tensors.items()
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


class TorchWorld(World):
    """A job with each of the settings, each in a slot of one bank."""

    modules = (
        TargetModule(name="q", in_features=24, out_features=40),
        TargetModule(name="k", in_features=24, out_features=12),
        TargetModule(name="down", in_features=56, out_features=24),
    )
    num_slots = len(CONFIGS)

    def __init__(
        self, shift: int = 0, dtype: torch.dtype = torch.float32, configs: Sequence[JobConfig] = CONFIGS
    ) -> None:
        slots = [(index + shift) % len(CONFIGS) for index in range(len(CONFIGS))]
        super().__init__(configs, slots, dtype, sorted({config.optim for config in configs}))


def alone_as_trained(world: World, index: int, folder: Path) -> Alone:
    """Return the job's parameters under the optimizer that transformers' Trainer creates from its arguments."""
    given = SETTINGS[NAMES[index]]
    text = given.get("optim_args")
    if isinstance(text, dict):
        text = ",".join(f"{key}={value}" for key, value in text.items())
    arguments = TrainingArguments(
        output_dir=str(folder), optim=given["optim"], optim_args=text, learning_rate=0.01, use_cpu=True
    )
    make, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    decay = {"weight_decay": world.configs[index].weight_decay}  # the Trainer passes it to the group
    return Alone(world, index, lambda groups: make([group | decay for group in groups], **settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_clipped", [True, False], ids=["clipped", "unclipped"])
def test_every_slot_equals_the_trainers_optimizer_alone(is_clipped: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Without clipping all bits are equal; with it, one norm is summed over the row and the other over matrices."""
    configs = CONFIGS if is_clipped else [config.replace(max_grad_norm=None) for config in CONFIGS]
    world = TorchWorld(dtype=dtype, configs=configs)
    alone = {index: alone_as_trained(world, index, tmp_path) for index in OWN}
    rounding = {torch.float32: (1e-5, 1e-7), torch.bfloat16: (1e-2, 1e-3)}[dtype] if is_clipped else (0.0, 0.0)
    for number in range(NUM_STEPS):
        world.give_gradients(number)
        for job in alone.values():
            job.step(number)
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

    stays, goes_on = TorchWorld(), TorchWorld(shift=3)
    for number in range(2):
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
            world.step(number)
    for index in range(len(CONFIGS)):
        assert all(map(torch.equal, goes_on.weights(index), stays.weights(index))), NAMES[index]
        assert same_state(goes_on.state(index), stays.state(index))
        assert stays.state(index).step == 4


def test_a_step_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world, index = TorchWorld(), NAMES.index("sgd-momentum")
    world.step(0)
    weights, state = world.weights(index), world.state(index)
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


EIGHT_BIT_CONFIGS = (
    JobConfig(r=16, optim="adamw_8bit", max_grad_norm=0.5, weight_decay=0.1, learning_rate=0.02),
    JobConfig(r=48, max_grad_norm=1.0, learning_rate=0.02),
    JobConfig(
        r=48,
        optim="adamw_8bit",
        max_grad_norm=None,
        learning_rate=0.01,
        loraplus_lr_ratio=4.0,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_epsilon=1e-6,
    ),
)
CLIPPED, IN_32_BITS, UNCLIPPED = range(3)
EIGHT_BIT = (CLIPPED, UNCLIPPED)


class EightBitWorld(World):
    modules = (
        TargetModule(name="q", in_features=96, out_features=128),
        TargetModule(name="k", in_features=96, out_features=40),
        TargetModule(name="down", in_features=520, out_features=96),
    )
    num_slots = 4
    spreads = True

    def __init__(self, configs: Sequence[JobConfig] = EIGHT_BIT_CONFIGS, slots: Sequence[int] = (2, 0, 1)) -> None:
        super().__init__(configs, slots, torch.float32, get_args(OptimizerName))


def alone_in_bitsandbytes(world: World, index: int) -> Alone:
    from bitsandbytes.optim import AdamW8bit

    config = world.configs[index]
    return Alone(
        world,
        index,
        lambda groups: AdamW8bit(
            groups,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
        ),
    )


@needs_bitsandbytes
def test_a_slot_equals_bitsandbytes_alone() -> None:
    world = EightBitWorld()
    alone = {index: alone_in_bitsandbytes(world, index) for index in EIGHT_BIT}
    for number in range(12):
        indices = [(0, 1, 2), (2, 0), (1, 2)][number % 3]
        world.give_gradients(number)
        expected = {index: alone[index].step(number) for index in indices if index in EIGHT_BIT}
        norms = dict(zip(indices, world.step(number, indices), strict=True))
        for index, norm in expected.items():
            torch.testing.assert_close(norms[index], norm, rtol=1e-5, atol=0.0)
        assert same(world.weights(UNCLIPPED), alone[UNCLIPPED].parameters)
        for found, wanted in zip(world.weights(CLIPPED), alone[CLIPPED].parameters, strict=True):
            # One norm is summed over the row and the other over matrices, which changes the last bit of the gradients.
            torch.testing.assert_close(found, wanted.data, rtol=1e-6, atol=1e-7)
    parts = world.state(CLIPPED).tensors
    assert parts["q.B.state1"].dtype == torch.float32, "2048 numbers: below bitsandbytes' threshold"
    assert parts["down.A.state1"].dtype == torch.uint8


@needs_bitsandbytes
def test_a_row_that_is_not_named_keeps_every_bit() -> None:
    world = EightBitWorld()
    world.step(0)
    weights, state = world.weights(UNCLIPPED), world.state(UNCLIPPED)
    world.step(1, (CLIPPED, IN_32_BITS))
    assert same(world.weights(UNCLIPPED), weights)
    assert same_state(world.state(UNCLIPPED), state)
    assert world.bank.grads_ZP[world.slots[UNCLIPPED]].any()
    world.bank.complete_gradients([world.slots[CLIPPED], world.slots[IN_32_BITS]])
    assert not world.bank.grads_ZP[[world.slots[CLIPPED], world.slots[IN_32_BITS]]].any(), (
        "a step forgets its gradients"
    )


@pytest.mark.parametrize(
    ("make", "victim"),
    [
        (TorchWorld, NAMES.index("rmsprop")),
        pytest.param(EightBitWorld, CLIPPED, marks=needs_bitsandbytes),
        pytest.param(EightBitWorld, UNCLIPPED, marks=needs_bitsandbytes),
    ],
    ids=["torch", "8-bit-clipped", "8-bit-unclipped"],
)
def test_a_nan_gradient_touches_its_own_row_only(make: Callable[[], World], victim: int) -> None:
    clean, poisoned = make(), make()
    for number in range(3):
        clean.step(number)
        poisoned.give_gradients(number)
        if number == 1:
            poisoned.bank.grads_ZP[poisoned.slots[victim]] = float("nan")
        poisoned.apply_gradients(number)
    for index in set(range(len(clean.configs))) - {victim}:
        assert same(poisoned.weights(index), clean.weights(index))
    assert all(matrix.isnan().all() for matrix in poisoned.weights(victim))


@needs_bitsandbytes
def test_a_parked_job_goes_on_elsewhere_to_the_last_bit() -> None:
    stays, leaves = EightBitWorld(), EightBitWorld()
    for number in range(3):
        stays.step(number)
        leaves.step(number)
    back = EightBitWorld(slots=(3, 1, 0))
    for index, (before, after) in enumerate(zip(leaves.slots, back.slots, strict=True)):
        back.bank.write(after, leaves.bank.read(before))
        back.optimizer.write(after, EIGHT_BIT_CONFIGS[index].optim, leaves.state(index))
    for number in range(3, 6):
        stays.step(number)
        back.step(number)
    for index in range(3):
        assert same(back.weights(index), stays.weights(index))
        states = [world.state(index) for world in (back, stays)]
        assert same_state(*states)
        assert states[0].step == 6


@needs_bitsandbytes
def test_the_next_job_of_a_slot_starts_fresh_with_its_own_optimizer() -> None:
    """One of the next jobs follows another of its kind; the others change places."""
    nexts = (EIGHT_BIT_CONFIGS[IN_32_BITS], EIGHT_BIT_CONFIGS[CLIPPED], EIGHT_BIT_CONFIGS[UNCLIPPED])
    used, fresh = EightBitWorld(), EightBitWorld(nexts)
    used.step(0)
    used.admit(nexts)
    for world in (used, fresh):
        world.step(1)
    assert all(same(used.weights(index), fresh.weights(index)) for index in range(3))


@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
def test_paged_memory_is_taken_over_by_the_next_job_of_that_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes never frees it. On a CPU nothing is paged, and the steps are the same."""
    ranks_made = []

    class Counted(eight_bit_module.EightBitAdamW):
        def __init__(self, matrices: Mapping[str, torch.Tensor], **settings: Any) -> None:
            super().__init__(matrices, **settings)
            ranks_made.append(matrices["q.A"].shape[0])

    monkeypatch.setattr(optimizer_module, "EightBitAdamW", Counted)
    configs = [EIGHT_BIT_CONFIGS[index].replace(optim="paged_adamw_8bit") for index in EIGHT_BIT]
    world, expected = (
        EightBitWorld(configs, slots=(0, 1)),
        EightBitWorld([EIGHT_BIT_CONFIGS[index] for index in EIGHT_BIT], slots=(0, 1)),
    )
    world.step(0, (0, 1))
    world.optimizer.reset(1, "adamw_torch")
    world.optimizer.reset(0, "paged_adamw_8bit")
    world.optimizer.reset(1, "paged_adamw_8bit")
    assert ranks_made == [16, 48, 16, 48], "at most one per shape and World"
    for index in (0, 1):
        world.bank.initialise(index, index)
    for number in range(2):
        world.step(number, (0, 1))
        expected.step(number, (0, 1))
    assert all(same(world.weights(index), expected.weights(index)) for index in (0, 1))


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit"])
def test_without_bitsandbytes_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, optim: str) -> None:
    monkeypatch.setattr(eight_bit_module, "find_spec", lambda name: None)
    message = rf"optim: '{optim}' needs .* bitsandbytes, which is not installed. .* {re.escape(install_command('bnb'))}"
    with pytest.raises(UnsupportedError, match=message):
        check_optimizer(optim, torch.device("cuda"))
    check_optimizer("adamw_torch", torch.device("cpu"))


def test_nothing_is_paged_out_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bit_module, "find_spec", lambda name: object())
    with pytest.raises(UnsupportedError, match=r"needs a CUDA device, found 'cpu'. Set optim to adamw_8bit"):
        check_optimizer("paged_adamw_8bit", torch.device("cpu"))
    check_optimizer("paged_adamw_8bit", torch.device("cuda"))
    check_optimizer("adamw_8bit", torch.device("cpu"))
