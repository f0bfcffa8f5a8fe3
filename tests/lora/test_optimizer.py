"""``BankOptimizer`` on a row equals ``clip_grad_norm_`` and ``torch.optim.AdamW`` on that adapter alone.

``tests/executor/test_isolation.py`` compares LoRA+ rates with PEFT's own optimizer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alto.kernels import rounding_key, torch_backend
from alto.lora import AdapterBank, AdapterShape, BankLayout, BankOptimizer, SlotUpdate, TargetModule
from alto.spec import JobConfig

MODULES = (
    TargetModule(name="q", in_features=6, out_features=8),
    TargetModule(name="up", in_features=6, out_features=5),
)
CONFIGS = (
    JobConfig(r=3, max_grad_norm=0.5, weight_decay=0.1, learning_rate=0.02),
    JobConfig(r=4, max_grad_norm=None, learning_rate=0.1, adam_beta1=0.7, adam_beta2=0.9, adam_epsilon=1e-3),
    JobConfig(r=1, max_grad_norm=1e6, learning_rate=0.01, weight_decay=0.2, loraplus_lr_ratio=8.0),
)


class Adapters:
    """Three adapters in a bank, and each of them alone as torch parameters."""

    def __init__(self) -> None:
        self.bank = AdapterBank(BankLayout(modules=MODULES, max_rank=5), 4, dtype=torch.float64)
        self.optimizer = BankOptimizer(self.bank, ["adamw_torch"])
        self.generator = torch.Generator().manual_seed(0)
        self.alone, self.alone_optimizers = [], []
        for slot, config in enumerate(CONFIGS):
            self.bank.occupy(slot, AdapterShape(rank=config.r, targets=MODULES))
            self.bank.initialise(slot, slot)
            views = [matrix for _, *pair in self.bank.matrices(self.bank.params_ZP, slot) for matrix in pair]
            parameters = [torch.nn.Parameter(view.clone()) for view in views]
            self.alone.append(parameters)
            self.alone_optimizers.append(
                torch.optim.AdamW(
                    [{"params": parameters[0::2]}, {"params": parameters[1::2]}],  # all A, all B
                    betas=(config.adam_beta1, config.adam_beta2),
                    eps=config.adam_epsilon,
                    weight_decay=config.weight_decay,
                )
            )

    def train(self, slots: list[int], rate: float = 1.0) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Step ``slots`` on the same random gradients in the bank and alone; return the gradient norms of both."""
        expected = []
        for slot in slots:
            config = CONFIGS[slot]
            gradients = [matrix for _, *pair in self.bank.matrices(self.bank.grads_ZP, slot) for matrix in pair]
            for gradient, parameter in zip(gradients, self.alone[slot], strict=True):
                gradient.copy_(torch.randn(gradient.shape, generator=self.generator, dtype=torch.float64))
                parameter.grad = gradient.clone()
            limit = config.max_grad_norm or float("inf")
            expected.append(torch.nn.utils.clip_grad_norm_(self.alone[slot], limit))
            group_of_a, group_of_b = self.alone_optimizers[slot].param_groups
            group_of_a["lr"] = config.learning_rate * rate
            group_of_b["lr"] = config.learning_rate * rate * config.loraplus_lr_ratio
            self.alone_optimizers[slot].step()
        norms = self.optimizer.gradient_norms(slots)
        updates = [
            SlotUpdate(slot=slot, config=CONFIGS[slot], learning_rate=CONFIGS[slot].learning_rate * rate)
            for slot in slots
        ]
        self.optimizer.step(updates, norms)
        self.bank.complete_gradients(slots)
        assert not self.bank.grads_ZP[slots].any(), "a step forgets its gradients"
        return norms, expected

    def assert_equal(self) -> None:
        for slot, parameters in enumerate(self.alone):
            matrices = [matrix for _, *pair in self.bank.matrices(self.bank.params_ZP, slot) for matrix in pair]
            for found, expected in zip(matrices, parameters, strict=True):
                torch.testing.assert_close(found, expected.data, rtol=1e-11, atol=1e-12)


@pytest.fixture
def adapters() -> Adapters:
    return Adapters()


def test_many_steps_beside_changing_jobs(adapters: Adapters) -> None:
    for step in range(20):
        slots = [[0, 1, 2], [2, 0], [1], [1, 2]][step % 4]
        norms, expected = adapters.train(slots, rate=1.0 - step / 40)
        torch.testing.assert_close(norms, torch.stack(expected), rtol=1e-12, atol=0.0)
        adapters.assert_equal()
    assert adapters.optimizer.steps == [10, 15, 15, 0]


def test_clipping_bites(adapters: Adapters) -> None:
    """With a large epsilon the gradient's size matters, so without clipping the adapters would differ."""
    norms, _ = adapters.train([0])
    assert float(norms[0]) > CONFIGS[0].max_grad_norm
    adapters.assert_equal()
    assert float(adapters.optimizer.exp_avg_ZP[0].norm()) == pytest.approx(0.1 * CONFIGS[0].max_grad_norm, rel=1e-5)


def test_a_row_that_is_not_named_keeps_every_bit(adapters: Adapters) -> None:
    adapters.train([0, 1, 2])
    tensors = (adapters.bank.params_ZP, adapters.optimizer.exp_avg_ZP, adapters.optimizer.exp_avg_sq_ZP)
    adapters.bank.grads_ZP[1] = 3.0
    before = [tensor[[1, 3]].clone() for tensor in tensors]
    adapters.train([0, 2])
    assert all(torch.equal(tensor[[1, 3]], old) for tensor, old in zip(tensors, before, strict=True))
    assert (adapters.bank.grads_ZP[1] == 3.0).all()


@pytest.mark.parametrize("slot", [0, 1], ids=["clipped", "unclipped"])
def test_a_nan_gradient_touches_its_own_row_only(adapters: Adapters, slot: int) -> None:
    clean = Adapters()
    for world in (clean, adapters):
        world.bank.grads_ZP[:3] = torch.randn(3, world.bank.layout.row_size, generator=world.generator).double()
    adapters.bank.grads_ZP[slot] = float("nan")
    updates = [SlotUpdate(slot=index, config=CONFIGS[index], learning_rate=0.1) for index in range(3)]
    clean.optimizer.step(updates, clean.optimizer.gradient_norms([0, 1, 2]))
    norms = adapters.optimizer.gradient_norms([0, 1, 2])
    adapters.optimizer.step(updates, norms)
    others = [index for index in range(4) if index != slot]
    assert torch.equal(clean.bank.params_ZP[others], adapters.bank.params_ZP[others])
    assert adapters.bank.params_ZP[slot].isnan().any()
    assert norms.isnan().tolist() == [index == slot for index in range(3)]


def test_state_moves_to_another_slot_of_another_bank(adapters: Adapters) -> None:
    adapters.train([0])
    adapters.train([0])
    weights, state = adapters.bank.read(0), adapters.optimizer.read(0)
    other = Adapters()
    other.bank = AdapterBank(BankLayout(modules=MODULES, max_rank=9), 2, dtype=torch.float64)
    other.bank.occupy(1, AdapterShape(rank=3, targets=MODULES))
    other.optimizer = BankOptimizer(other.bank, ["adamw_torch"])
    other.optimizer.exp_avg_ZP[1] = 9.0
    other.bank.write(1, weights)
    other.optimizer.write(1, "adamw_torch", state)
    assert other.optimizer.steps == [0, 2]
    update = {"config": CONFIGS[0], "learning_rate": 0.05}
    for world, slot in ((adapters, 0), (other, 1)):
        for index, (_, a, b) in enumerate(world.bank.matrices(world.bank.grads_ZP, slot)):
            a.fill_(0.1 + index)
            b.fill_(0.2 + index)
        world.optimizer.step([SlotUpdate(slot=slot, **update)], world.optimizer.gradient_norms([slot]))
    for name, pair in adapters.bank.read(0).items():
        for expected, found in zip(pair, other.bank.read(1)[name], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


class Rounded:
    """Equal adapters with bfloat16 moments, whose jobs have the given seeds by slot. They get the same gradients in the
    same steps of their own."""

    def __init__(
        self,
        slots: dict[int, int],
        *,
        num_slots: int = 4,
        max_rank: int = 5,
        modules: tuple[TargetModule, ...] = MODULES,
    ) -> None:
        layout = BankLayout(modules=modules, max_rank=max_rank, shared_inputs=(("before", "up"),))
        self.bank = AdapterBank(layout, num_slots)
        self.optimizer = BankOptimizer(self.bank, ["adamw_torch"], torch.bfloat16)
        self.slots: dict[int, int] = {}
        for slot, seed in slots.items():
            self.admit(slot, seed)

    def admit(self, slot: int, seed: int) -> None:
        self.slots[slot] = seed
        self.bank.occupy(slot, AdapterShape(rank=3, targets=MODULES))
        self.bank.initialise(slot, seed=0)
        self.optimizer.reset(slot, "adamw_torch")

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            updates = []
            for slot, seed in self.slots.items():
                generator = torch.Generator().manual_seed(self.optimizer.steps[slot])
                for _, *pair in self.bank.matrices(self.bank.grads_ZP, slot):
                    for matrix in pair:
                        matrix.copy_(torch.randn(matrix.shape, generator=generator))
                updates.append(SlotUpdate(slot=slot, config=JobConfig(r=3, seed=seed), learning_rate=0.02))
            self.optimizer.step(updates, self.optimizer.gradient_norms(list(self.slots)))

    def bits(self, slot: int) -> dict[str, list[float]]:
        found = {f"{name}.{which}": pair[which] for name, pair in self.bank.read(slot).items() for which in (0, 1)}
        return {name: tensor.tolist() for name, tensor in (found | dict(self.optimizer.read(slot).tensors)).items()}


BEFORE = TargetModule(name="before", in_features=6, out_features=4)


def test_bfloat16_moments_of_an_adapter_follow_from_its_own_seed_and_steps() -> None:
    """This holds in another slot, beside later jobs, in a larger bank whose layout has more modules."""
    alone, beside = Rounded({0: 7}), Rounded({3: 7}, num_slots=5, max_rank=9, modules=(BEFORE, *MODULES))
    alone.train(6)
    beside.train(2)
    for slot in (1, 4):
        beside.admit(slot, seed=slot)
    beside.train(4)
    assert beside.bits(3) == alone.bits(0)
    states = alone.optimizer.read(0).tensors
    assert {part.dtype for part in states.values()} == {torch.bfloat16}
    assert all((part >= 0).all() for name, part in states.items() if name.endswith("exp_avg_sq"))
    assert beside.bits(4) != beside.bits(1), "the seed has no effect"


def test_every_step_of_a_job_rounds_by_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch_backend, name)

        def bank_adamw(self, *banks: Any) -> None:
            *_, rows, _ = banks
            seen.append([row.rounding_key for row in rows])

    monkeypatch.setattr("alto.lora.bank.choose_backend", lambda **_: Recording())
    adapters = Rounded({2: 7})
    adapters.train(2)
    adapters.admit(0, 9)
    adapters.train(1)
    assert seen == [[rounding_key(7, 1)], [rounding_key(7, 2)], [rounding_key(7, 3), rounding_key(9, 1)]]


def test_bfloat16_moments_go_to_another_bank_to_the_bit_and_on_from_there() -> None:
    stays, moves, other = Rounded({0: 7}), Rounded({0: 7}), Rounded({1: 7, 2: 5})
    stays.train(5)
    moves.train(3)
    other.train(1)
    other.bank.write(1, moves.bank.read(0))
    other.optimizer.write(1, "adamw_torch", moves.optimizer.read(0))
    assert other.bits(1) == moves.bits(0)
    other.train(2)
    assert other.bits(1) == stays.bits(0)


def test_reset_forgets_one_slot(adapters: Adapters) -> None:
    adapters.train([0, 1])
    kept = adapters.optimizer.exp_avg_ZP[1].clone()
    adapters.optimizer.reset(0, "adamw_torch")
    assert adapters.optimizer.steps[:2] == [0, 1]
    assert not adapters.optimizer.exp_avg_ZP[0].any()
    assert not adapters.optimizer.exp_avg_sq_ZP[0].any()
    assert torch.equal(adapters.optimizer.exp_avg_ZP[1], kept)
