"""A slot with an 8-bit AdamW equals bitsandbytes' own on the parameters that PEFT would have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import pytest
import torch
from optional import needs_bitsandbytes

from alto.errors import UnsupportedError
from alto.lora import (
    AdapterBank,
    AdapterShape,
    BankLayout,
    OptimizerState,
    SlotAdamW,
    SlotUpdate,
    TargetModule,
    check_optimizer,
)
from alto.lora import optimizer as optimizer_module
from alto.lora import row_optimizers as eight_bit_module
from alto.spec import JobConfig
from alto.spec.lr_schedules import OptimizerName

MODULES = (
    TargetModule(name="q", in_features=96, out_features=128),
    TargetModule(name="k", in_features=96, out_features=40),
    TargetModule(name="down", in_features=520, out_features=96),
)
CONFIGS = (
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


class World:
    """Adapters in a bank in which q and k share their input, adapter ``i`` in slot ``slots[i]``."""

    def __init__(self, configs: Sequence[JobConfig] = CONFIGS, slots: Sequence[int] = (2, 0, 1)) -> None:
        layout = BankLayout(modules=MODULES, max_rank=48, shared_inputs=(("q", "k"),))
        self.bank = AdapterBank(layout, 4)
        self.optimizer = SlotAdamW(self.bank, get_args(OptimizerName))
        self.configs, self.slots = configs, slots
        for index, (config, slot) in enumerate(zip(configs, slots, strict=True)):
            self.bank.occupy(slot, AdapterShape(rank=config.r, targets=MODULES))
            self.bank.initialise(slot, index)
            self.optimizer.reset(slot, config.optim)

    def matrices(self, index: int, rows_ZP: torch.Tensor) -> list[torch.Tensor]:
        """Views of adapter ``index``, every ``A`` and ``B`` as PEFT has them."""
        return [matrix.T for _, *pair in self.bank.matrices(rows_ZP, self.slots[index]) for matrix in pair]

    def give_gradients(self, step: int) -> None:
        """The same to every world; large enough to be clipped where there is a limit."""
        generator = torch.Generator().manual_seed(step)
        for index in range(len(self.configs)):
            for gradient in self.matrices(index, self.bank.grads_ZP):
                # Matrices of far apart sizes, so that each block of the state has a scale of its own.
                scale = 10.0 ** torch.randint(-4, 1, (), generator=generator)
                gradient.copy_(torch.randn(gradient.shape, generator=generator) * scale)

    def updates(self, number: int, indices: Sequence[int] = (0, 1, 2)) -> list[SlotUpdate]:
        """What step ``number`` asks for, at falling learning rates."""
        configs = [self.configs[index] for index in indices]
        rates = [config.learning_rate / (1 + number) for config in configs]
        slots = [self.slots[index] for index in indices]
        return [
            SlotUpdate(slot=slot, config=config, learning_rate=rate)
            for slot, config, rate in zip(slots, configs, rates, strict=True)
        ]

    def step(self, number: int, indices: Sequence[int] = (0, 1, 2)) -> torch.Tensor:
        self.give_gradients(number)
        return self.apply_gradients(number, indices)

    def apply_gradients(self, number: int, indices: Sequence[int] = (0, 1, 2)) -> torch.Tensor:
        norms = self.optimizer.gradient_norms([self.slots[index] for index in indices])
        self.optimizer.step(self.updates(number, indices), norms)
        return norms

    def weights(self, index: int) -> list[torch.Tensor]:
        return [matrix.clone() for matrix in self.matrices(index, self.bank.params_ZP)]


class Alone:
    """One adapter as PEFT's parameters under bitsandbytes' optimizer."""

    def __init__(self, world: World, index: int) -> None:
        from bitsandbytes.optim import AdamW8bit

        self.config = world.configs[index]
        self.parameters = [
            torch.nn.Parameter(matrix.clone(memory_format=torch.contiguous_format))
            for matrix in world.matrices(index, world.bank.params_ZP)
        ]
        self.optimizer = AdamW8bit(
            [{"params": self.parameters[0::2]}, {"params": self.parameters[1::2]}],
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            eps=self.config.adam_epsilon,
            weight_decay=self.config.weight_decay,
        )

    def step(self, number: int, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm or float("inf"))
        rate = self.config.learning_rate / (1 + number)
        for group, factor in zip(self.optimizer.param_groups, (1.0, self.config.loraplus_lr_ratio), strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        return norm


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def same_state(found: OptimizerState, expected: OptimizerState) -> bool:
    assert found.tensors.keys() == expected.tensors.keys()
    return found.step == expected.step and same(list(found.tensors.values()), list(expected.tensors.values()))


@needs_bitsandbytes
def test_a_slot_equals_bitsandbytes_alone() -> None:
    world = World()
    alone = {index: Alone(world, index) for index in EIGHT_BIT}
    for number in range(12):
        indices = [(0, 1, 2), (2, 0), (1, 2)][number % 3]
        world.give_gradients(number)
        expected = {
            index: alone[index].step(number, world.matrices(index, world.bank.grads_ZP))
            for index in indices
            if index in EIGHT_BIT
        }
        norms = dict(zip(indices, world.step(number, indices), strict=True))
        for index, norm in expected.items():
            torch.testing.assert_close(norms[index], norm, rtol=1e-5, atol=0.0)
        assert same(world.weights(UNCLIPPED), alone[UNCLIPPED].parameters)
        for found, wanted in zip(world.weights(CLIPPED), alone[CLIPPED].parameters, strict=True):
            # One norm is summed over the row and the other over matrices, which is the last bit of the gradients.
            torch.testing.assert_close(found, wanted.data, rtol=1e-6, atol=1e-7)
    parts = world.optimizer.read(world.slots[CLIPPED]).tensors
    assert parts["q.B.state1"].dtype == torch.float32, "2048 numbers: below bitsandbytes' threshold"
    assert parts["down.A.state1"].dtype == torch.uint8


@needs_bitsandbytes
def test_a_row_that_is_not_named_keeps_every_bit() -> None:
    world = World()
    world.step(0)
    weights, state = world.weights(UNCLIPPED), world.optimizer.read(world.slots[UNCLIPPED])
    world.step(1, (CLIPPED, IN_32_BITS))
    assert same(world.weights(UNCLIPPED), weights)
    assert same_state(world.optimizer.read(world.slots[UNCLIPPED]), state)
    assert world.bank.grads_ZP[world.slots[UNCLIPPED]].any()
    world.bank.complete_gradients([world.slots[CLIPPED], world.slots[IN_32_BITS]])
    assert not world.bank.grads_ZP[[world.slots[CLIPPED], world.slots[IN_32_BITS]]].any(), (
        "a step forgets its gradients"
    )


@needs_bitsandbytes
@pytest.mark.parametrize("victim", EIGHT_BIT, ids=["clipped", "unclipped"])
def test_a_nan_gradient_touches_its_own_row_only(victim: int) -> None:
    clean, poisoned = World(), World()
    for number in range(3):
        clean.step(number)
        if number == 1:
            poisoned.give_gradients(number)
            poisoned.bank.grads_ZP[poisoned.slots[victim]] = float("nan")
            poisoned.apply_gradients(number)
        else:
            poisoned.step(number)
    for index in {CLIPPED, IN_32_BITS, UNCLIPPED} - {victim}:
        assert same(poisoned.weights(index), clean.weights(index))
    assert all(matrix.isnan().all() for matrix in poisoned.weights(victim))


@needs_bitsandbytes
def test_a_parked_job_goes_on_elsewhere_to_the_last_bit() -> None:
    stays, leaves = World(), World()
    for number in range(3):
        stays.step(number)
        leaves.step(number)
    back = World(slots=(3, 1, 0))
    for index, (before, after) in enumerate(zip(leaves.slots, back.slots, strict=True)):
        back.bank.write(after, leaves.bank.read(before))
        back.optimizer.write(after, CONFIGS[index].optim, leaves.optimizer.read(before))
    for number in range(3, 6):
        stays.step(number)
        back.step(number)
    for index in range(3):
        assert same(back.weights(index), stays.weights(index))
        states = [world.optimizer.read(world.slots[index]) for world in (back, stays)]
        assert same_state(*states)
        assert states[0].step == 6


@needs_bitsandbytes
def test_the_next_job_of_a_slot_begins_anew_with_its_own_optimizer() -> None:
    """Of the next jobs one follows another of its kind; the others change places."""
    nexts = (CONFIGS[IN_32_BITS], CONFIGS[CLIPPED], CONFIGS[UNCLIPPED])
    used, fresh = World(), World(nexts)
    used.step(0)
    used.configs = nexts
    for index, (slot, config) in enumerate(zip(used.slots, nexts, strict=True)):
        used.bank.occupy(slot, AdapterShape(rank=config.r, targets=MODULES))
        used.bank.initialise(slot, index)
        used.optimizer.reset(slot, config.optim)
    for world in (used, fresh):
        world.step(1)
    assert all(same(used.weights(index), fresh.weights(index)) for index in range(3))


@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
def test_paged_memory_is_taken_over_by_the_next_job_of_that_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes never frees it. On a CPU it pages nothing, and takes the same steps."""
    ranks_made = []

    class Counted(eight_bit_module.EightBitAdamW):
        def __init__(self, matrices: Mapping[str, torch.Tensor], **settings: Any) -> None:
            super().__init__(matrices, **settings)
            ranks_made.append(matrices["q.A"].shape[0])

    monkeypatch.setattr(optimizer_module, "EightBitAdamW", Counted)
    configs = [CONFIGS[index].replace(optim="paged_adamw_8bit") for index in EIGHT_BIT]
    world, expected = World(configs, slots=(0, 1)), World([CONFIGS[index] for index in EIGHT_BIT], slots=(0, 1))
    world.step(0, (0, 1))
    world.optimizer.reset(1, "adamw_torch")
    world.optimizer.reset(0, "paged_adamw_8bit")
    world.optimizer.reset(1, "paged_adamw_8bit")
    assert ranks_made == [16, 48, 16, 48], "no more than one of either shape and World"
    for index in (0, 1):
        world.bank.initialise(index, index)
    for number in range(2):
        world.step(number, (0, 1))
        expected.step(number, (0, 1))
    assert all(same(world.weights(index), expected.weights(index)) for index in (0, 1))


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit"])
def test_without_bitsandbytes_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, optim: str) -> None:
    monkeypatch.setattr(eight_bit_module, "find_spec", lambda name: None)
    message = rf"optim: '{optim}' needs the package bitsandbytes, found none; .* pip install \"alto-lora\[bnb\]\""
    with pytest.raises(UnsupportedError, match=message):
        check_optimizer(optim, torch.device("cuda"))
    check_optimizer("adamw_torch", torch.device("cpu"))


def test_nothing_is_paged_out_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bit_module, "find_spec", lambda name: object())
    with pytest.raises(UnsupportedError, match=r"expected a CUDA device .* found 'cpu'; write adamw_8bit"):
        check_optimizer("paged_adamw_8bit", torch.device("cpu"))
    check_optimizer("paged_adamw_8bit", torch.device("cuda"))
    check_optimizer("adamw_8bit", torch.device("cpu"))
