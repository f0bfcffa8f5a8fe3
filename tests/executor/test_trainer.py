"""Steps and evaluations in which memory runs out at any tensor: the result is the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from resident_jobs import Bank, make_model, make_task
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alto.executor import trainer
from alto.lora import AdapterWeights, OptimizerState

State = list[tuple[AdapterWeights, OptimizerState]]

PLENTY = 10**6
SEVERAL_PASSES = 60

LOSS_TOLERANCE = 1e-6
CHANGE_TOLERANCE = 1e-5
"""Tolerance in norm, relative to the change by the steps; measured: up to 4e-7, since other passes round
differently."""


class ShortOfMemory(TorchDispatchMode):
    """Refuses the memory requests with these numbers, counted over all ops from 1."""

    def __init__(self, *refused: int) -> None:
        super().__init__()
        self.refused = refused
        self.num_requests = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(id(leaf.untyped_storage()) not in given for leaf in made):
            self.num_requests += 1
            if self.num_requests in self.refused:
                raise torch.OutOfMemoryError("no memory, as the test wants it")
        return result


class Jobs(Bank):
    """Resident jobs of different ranks on a small Llama, with dropout."""

    def __init__(self, optims: list[str], *, max_tokens: int = PLENTY) -> None:
        ranks = [64 if optim == "adamw_8bit" else 2 + index for index, optim in enumerate(optims)]
        configs: list[dict[str, object]] = [
            {"seed": index, "r": rank, "optim": optim, "batch_size": 4, "lora_dropout": 0.3, "lr": 1e-3}
            for index, (rank, optim) in enumerate(zip(ranks, optims, strict=True))
        ]
        super().__init__(make_model("llama"), make_task(configs, max_tokens_per_pass=max_tokens))

    def train(self, num_steps: int = 1) -> list[float]:
        losses = []
        for _ in range(num_steps):
            losses += self.trainer.step(self.jobs)
            for job in self.jobs:
                job.step += 1
        return losses

    def validation_losses(self) -> list[float]:
        return [worth.loss for worth in self.trainer.evaluate(self.jobs)]

    def state(self) -> State:
        slots = [job.slot for job in self.jobs]
        return [(self.trainer.bank.read(slot), self.trainer.optimizer.read(slot)) for slot in slots]

    def go_back(self, state: State) -> None:
        """Restore a saved state, with enough memory for everything."""
        self.trainer.passes.micro_batches.max_tokens = PLENTY
        self.memory_events.clear()
        for job, (weights, optimizer) in zip(self.jobs, state, strict=True):
            job.step = optimizer.step
            self.trainer.admit(job, job.slot, weights, optimizer)


def adamw(num_jobs: int) -> Jobs:
    return Jobs(["adamw_torch"] * num_jobs)


def numbers(state: State) -> dict[str, torch.Tensor]:
    found = {}
    for job, (weights, optimizer) in enumerate(state):
        pairs = itertools.chain.from_iterable(weights.values())
        found[f"{job} weights"] = torch.cat([tensor.flatten().double() for tensor in pairs])
        for part in ("exp_avg", "exp_avg_sq"):
            tensors = [tensor for name, tensor in optimizer.tensors.items() if name.endswith(f".{part}")]
            found[f"{job} {part}"] = torch.cat([tensor.flatten().double() for tensor in tensors])
    return found


def assert_same_change(found: State, expected: State, before: State) -> None:
    mine, others, old = numbers(found), numbers(expected), numbers(before)
    for name, wanted in others.items():
        change = (wanted - old[name]).norm()
        assert (mine[name] - wanted).norm() <= CHANGE_TOLERANCE * change, name


def places(count: int, num_trials: int) -> list[int]:
    """Return the first place, the last, and others between them at equal distances."""
    return [round(place) for place in torch.linspace(1, count, num_trials).tolist()]


@pytest.mark.parametrize("num_jobs", [1, 2, 4])
def test_a_step_that_runs_out_of_memory_anywhere_is_taken_once(num_jobs: int) -> None:
    bank = adamw(num_jobs)
    bank.train()
    before = bank.state()
    with ShortOfMemory() as enough:
        expected = bank.train()
    expected += bank.train()
    after = bank.state()
    phases = set()
    for place in places(enough.num_requests, 6):
        bank.go_back(before)
        with ShortOfMemory(place):
            found = bank.train()
        assert found + bank.train() == pytest.approx(expected, rel=LOSS_TOLERANCE)
        assert_same_change(bank.state(), after, before)
        (event,) = bank.memory_events
        phases.add(event.phase)
        assert event.slots == tuple(range(num_jobs))
        if event.phase == "update":
            assert event.max_tokens_per_pass == PLENTY
        else:
            assert event.num_tokens // 2 == event.max_tokens_per_pass == bank.trainer.passes.micro_batches.max_tokens
    assert phases == {"forward", "backward", "update"}


def test_a_step_may_run_out_of_memory_again_and_again() -> None:
    bank = adamw(3)
    bank.train()
    before = bank.state()
    with ShortOfMemory() as enough:
        expected = bank.train()
    after = bank.state()
    bank.go_back(before)
    with ShortOfMemory(*(round(share * enough.num_requests) for share in (0.3, 1.0, 1.4))):
        assert bank.train() == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert_same_change(bank.state(), after, before)
    limits = [event.max_tokens_per_pass for event in bank.memory_events]
    assert len(limits) == 3
    assert limits == sorted(limits, reverse=True)


@pytest.mark.parametrize(
    ("backend", "optims"),
    [
        ("torch", ["adamw_torch"] * 3),
        ("reference", ["adamw_torch"] * 3),
        ("torch", ["adamw_8bit", "adamw_torch", "adamw_8bit"]),
    ],
    ids=["together", "one by one", "some with an optimizer of their own"],
)
def test_an_update_that_runs_out_of_memory_anywhere_is_applied_once_to_everybody(
    backend: str, optims: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALTO_KERNELS", backend)
    bank = Jobs(optims)
    bank.train()
    before = bank.state()
    bank.trainer.backward(bank.jobs)
    grads_ZP = bank.trainer.bank.grads_ZP.clone()
    with ShortOfMemory() as enough:
        norms = bank.trainer.update(bank.jobs)
    after = bank.state()
    assert enough.num_requests > 5
    for place in places(enough.num_requests, 20):
        bank.go_back(before)
        bank.trainer.bank.grads_ZP.copy_(grads_ZP)
        with ShortOfMemory(place):
            assert torch.equal(bank.trainer.update(bank.jobs), norms)
        assert_equal(bank.state(), after)
        bank.trainer.bank.complete_gradients(range(len(bank.jobs)))
        assert not bank.trainer.bank.grads_ZP.any(), "a step forgets its gradients"
        assert [event.phase for event in bank.memory_events] == ["update"]


def assert_equal(found: State, expected: State) -> None:
    for (weights, optimizer), (wanted_weights, wanted_optimizer) in zip(found, expected, strict=True):
        assert optimizer.step == wanted_optimizer.step
        torch.testing.assert_close(dict(weights), dict(wanted_weights), rtol=0, atol=0)
        torch.testing.assert_close(dict(optimizer.tensors), dict(wanted_optimizer.tensors), rtol=0, atol=0)


@pytest.mark.parametrize("num_jobs", [1, 3])
def test_an_evaluation_that_runs_out_of_memory_anywhere_gives_the_same_losses(num_jobs: int) -> None:
    bank = adamw(num_jobs)
    bank.train()
    expected = bank.validation_losses()
    bank.trainer.passes.micro_batches.max_tokens = SEVERAL_PASSES
    with ShortOfMemory() as enough:
        bank.validation_losses()
    for place in places(enough.num_requests, 5):
        bank.trainer.passes.micro_batches.max_tokens = SEVERAL_PASSES
        bank.memory_events.clear()
        with ShortOfMemory(place):
            assert bank.validation_losses() == pytest.approx(expected, rel=LOSS_TOLERANCE)
        assert [event.phase for event in bank.memory_events] == ["evaluation"]
        assert bank.trainer.passes.micro_batches.max_tokens < SEVERAL_PASSES


@pytest.mark.parametrize("max_tokens", [SEVERAL_PASSES, 1])
def test_a_job_larger_than_a_pass_is_trained_in_several(max_tokens: int) -> None:
    """Dropout is on, and its masks must not change."""
    whole, parts = adamw(2), Jobs(["adamw_torch"] * 2, max_tokens=max_tokens)
    before = whole.state()
    assert parts.train(3) == pytest.approx(whole.train(3), rel=LOSS_TOLERANCE)
    assert_same_change(parts.state(), whole.state(), before)
    longest = 40
    assert parts.trainer.passes.micro_batches.largest <= max(max_tokens, longest)


def test_other_errors_are_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = adamw(1)

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(trainer, "job_losses", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bank.train()
    assert not bank.memory_events


def test_an_optimizer_of_their_own_that_fails_between_two_matrices_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = pytest.importorskip(
        "bitsandbytes.optim.adamw", reason="needs the bnb extra: pip install 'alto-lora[bnb]'"
    ).AdamW8bit
    bank = Jobs(["adamw_8bit"])
    bank.train()  # in the first step no A has a gradient, so a repeated step would not show
    before = bank.state()
    expected = bank.train()
    after = bank.state()
    bank.go_back(before)
    update_step = optimizer.update_step
    calls = itertools.count()

    def fails_once(self: Any, *args: Any) -> None:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("no memory, as the test wants it")
        update_step(self, *args)

    monkeypatch.setattr(optimizer, "update_step", fails_once)
    assert bank.train() == expected
    assert_equal(bank.state(), after)
