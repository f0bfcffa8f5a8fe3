"""Checks by every rank of a base model that is sharded over them; ``backbone/test_sharding.py`` starts the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import VOCABULARY
from live_memory import peak_bytes
from resident_jobs import make_dataset, make_task, make_trainer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from alto.backbone import load_backbone, load_network
from alto.backbone.quantised import QuantisedLinear
from alto.backbone.sharding import held_bytes
from alto.data import EncodedDataset, TaskData, collate
from alto.executor import JobState, TaskContext, Trainer, initial_states
from alto.executor.ranks import Ranks
from alto.kernels import TokenSchedule
from alto.lora import AdapterBank, AdapterShape, BankLayout, bank_bytes, find_shared_inputs, inject, linear_modules
from alto.objectives import job_losses
from alto.spec import BaseModelSpec
from benchmarks.adapter_parallel.wire import WireCounter

Settings = dict[str, Any]


def weights_equal_those_of_the_whole_model(folder: str, num_ranks: int, settings: Settings) -> None:
    with on_ranks(num_ranks) as mesh:
        if mesh is None:
            return
        sharded, whole = (
            load_network(BaseModelSpec(id=folder, **settings), mesh=mesh),
            load_network(BaseModelSpec(id=folder, **settings)),
        )
        assert_equal_tensors(sharded, whole)
        if not any(isinstance(module, QuantisedLinear) for module in whole.modules()):
            assert sharded.config.to_dict() == whole.config.to_dict()
        rows = sum(math.ceil(len(p) / num_ranks) * p[0].nbytes for p in whole.parameters() if p.is_floating_point())
        most = rows + sum(b.nbytes for b in whole.buffers())
        assert "quantisation" in settings or held_bytes(sharded) <= most


def packed_weights_equal_those_of_the_whole_model(folder: str, num_ranks: int, settings: Settings) -> None:
    weights_equal_those_of_the_whole_model(folder, num_ranks, settings)
    with on_ranks(num_ranks) as mesh:
        if mesh is None:
            return
        sharded, whole = (
            load_network(BaseModelSpec(id=folder, **settings), mesh=mesh),
            load_network(BaseModelSpec(id=folder, **settings)),
        )
        layers = [m for m in sharded.modules() if isinstance(m, QuantisedLinear)]
        assert layers
        held, packed = 0, 0
        for mine, expected in zip(layers, (m for m in whole.modules() if isinstance(m, QuantisedLinear)), strict=True):
            held, packed = held + mine.packed.to_local().nbytes, packed + expected.packed.nbytes
            mine.packed = torch.nn.Parameter(full(mine.packed), requires_grad=False)
            assert torch.equal(mine.weight, expected.weight)
        assert held <= packed / num_ranks + len(layers) * 64


def refused(folder: str, settings: Settings, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        load_backbone(BaseModelSpec(id=folder, **settings), mesh=world())


def losses_and_gradients_equal_those_of_the_whole_model(folder: str, settings: Settings) -> None:
    mesh = world()
    sharded, whole = Adapted(folder, settings, mesh=mesh), Adapted(folder, settings)
    for number in range(3):
        is_idle = number == mesh.get_local_rank()
        (losses, gradients), (expected_losses, expected) = (
            adapted.idle() if is_idle else adapted.train((5 + mesh.get_local_rank(), 9 + number))
            for adapted in (sharded, whole)
        )
        torch.testing.assert_close(losses, expected_losses, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(gradients, expected, rtol=2e-5, atol=2e-6)
        assert is_idle == (not gradients.any())
    torch.testing.assert_close(sharded.evaluate((7, 3)), whole.evaluate((7, 3)), rtol=2e-6, atol=1e-6)


def evaluations_leave_nothing_behind(folder: str) -> None:
    adapted = Adapted(folder, {}, mesh=world())
    body: Any = adapted.backbone.model.base_model
    adapted.train((5, 4))
    expected = adapted.evaluate((7, 3))
    for _ in range(10):
        assert torch.equal(adapted.evaluate((7, 3)), expected)
        assert body._get_fsdp_state()._comm_ctx.post_forward_order == []
    assert held_bytes(adapted.backbone.model) < 0.6 * held_bytes(load_network(BaseModelSpec(id=folder)))


def a_step_gathers_the_base_and_nothing_else(folder: str, checkpointing: bool) -> None:
    """Check that a step gathers layers twice, and embeddings, output head and modules outside of layers once, but no
    byte of adapters."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    trainer, jobs = trainer_of(folder, ranks, gradient_checkpointing=checkpointing)
    trainer.step(jobs)
    with WireCounter() as wire:
        losses = trainer.step(jobs)
    assert all(map(math.isfinite, losses))
    whole = load_network(BaseModelSpec(id=folder))
    layers = sum(gathered_bytes(layer, ranks.size) for layer in layers_of(whole))
    rest = gathered_bytes(whole, ranks.size) - layers
    is_tied = whole.get_input_embeddings().weight is whole.get_output_embeddings().weight
    head = gathered_bytes(whole.get_output_embeddings(), ranks.size)
    control = 2 * 8 * len(jobs) * (ranks.size - 1) // ranks.size
    expected = {"gather": 2 * layers + rest + is_tied * head, "all_reduce": control}
    assert wire.sent_bytes == pytest.approx(expected, rel=1e-12)
    assert wire.calls["all_reduce"] == 1


def no_more_than_two_layers_lie_there_whole(folder: str) -> None:
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    (alone, of_alone), (trainer, jobs) = trainer_of(folder, Ranks()), trainer_of(folder, ranks)
    mine = next(job for job in jobs if trainer.passes.local_slot(job) is not None)
    same = next(job for job in of_alone if job.id == mine.id)
    activations = peak_after_a_step(alone, [same]) - bytes_of_base_and_bank(alone, len(of_alone))
    two = 2 * max(map(own_bytes, parts_of(load_network(BaseModelSpec(id=folder)))))
    held = bytes_of_base_and_bank(trainer, 1)
    found = peak_after_a_step(trainer, jobs)
    # A third layer would add a fifth.
    assert held + 0.8 * two <= found <= 1.15 * (held + two + activations), (found, held, two, activations)


def loading_holds_a_share_and_a_weight(folder: str, settings: Settings) -> None:
    whole = load_network(BaseModelSpec(id=folder))
    loaded: list[PreTrainedModel] = []
    mesh = world()

    def load() -> None:
        loaded[:] = [load_network(BaseModelSpec(id=folder, **settings), mesh=mesh)]

    # Threads read weights ahead of those that are placed; on a busy machine more than necessary.
    peak = min(peak_bytes(load) for _ in range(3))
    largest = max(parameter.nbytes for parameter in whole.parameters())
    share = held_bytes(loaded[0])
    two = 2 * max(map(own_bytes, parts_of(whole)))  # gathered by the first pass
    assert share < 0.6 * held_bytes(whole)
    assert share <= peak <= 1.1 * (share + max(largest * (4 if settings else 1), two)), (share, peak, largest, two)


def peak_after_a_step(trainer: Trainer, jobs: list[JobState]) -> int:
    """Return the peak of a step that is not the first: the first makes lasting tensors and shows them to the
    watcher."""
    return peak_bytes(lambda: [trainer.step(jobs) for _ in range(2)])


def bytes_of_base_and_bank(trainer: Trainer, num_slots: int) -> int:
    return trainer.passes.backbone.num_bytes + bank_bytes(trainer.bank.layout, num_slots, {"adamw_torch"})


class Adapted:
    """A base from ``folder`` with two adapters that have an effect."""

    def __init__(self, folder: str, settings: Settings, mesh: DeviceMesh | None = None) -> None:
        of_base = {key: value for key, value in settings.items() if key != "gradient_checkpointing"}
        self.backbone = load_backbone(
            BaseModelSpec(id=folder, **of_base),
            mesh=mesh,
            gradient_checkpointing=settings.get("gradient_checkpointing", False),
        )
        model = self.backbone.model
        modules = linear_modules(model)
        shared = find_shared_inputs(model, self.backbone.run_once)
        self.bank = AdapterBank(BankLayout(modules=modules, max_rank=3, shared_inputs=shared), 2)
        self.context = inject(model, self.bank)
        for slot in range(2):
            self.bank.occupy(slot, AdapterShape(rank=3, targets=modules))
            self.bank.initialise(slot, slot)
            for _, _, b in self.bank.matrices(self.bank.params_ZP, slot):
                b.fill_(0.01)

    def train(self, lengths: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return token losses and adapter gradients of two sequences, one for each adapter."""
        self.bank.grads_ZP.zero_()
        with self.context.use(TokenSchedule.build([0, 1], lengths, [2.0, 1.0])):
            losses = self._losses(lengths)
            losses.sum().backward()
        return losses.detach(), self.bank.grads_ZP.clone()

    def idle(self) -> tuple[Tensor, Tensor]:
        """Return the same for a pass without rows."""
        self.bank.grads_ZP.zero_()
        with self.context.use(TokenSchedule.build([], [], [])):
            losses = job_losses(self.backbone, collate([]), [])
            losses.sum().backward()
        return losses.detach(), self.bank.grads_ZP.clone()

    @torch.no_grad()
    def evaluate(self, lengths: tuple[int, int]) -> Tensor:
        with self.context.use(TokenSchedule.build([0, 1], lengths, [2.0, 1.0])):
            return self._losses(lengths)

    def _losses(self, lengths: tuple[int, int]) -> Tensor:
        ids = torch.arange(sum(lengths)) % (VOCABULARY - 2) + 2
        positions = torch.cat([torch.arange(length) for length in lengths])
        return self.backbone.token_losses(self.backbone.hidden_states(ids, positions, lengths), ids.roll(-1))


def trainer_of(folder: str, ranks: Ranks, *, gradient_checkpointing: bool = False) -> tuple[Trainer, list[JobState]]:
    """Return a trainer with one job per rank, each with another rank and batch size."""
    mesh = None if ranks.is_alone else world()
    backbone = load_backbone(BaseModelSpec(id=folder), mesh=mesh, gradient_checkpointing=gradient_checkpointing)
    data = TaskData(train=inside_vocabulary(make_dataset(12, seed=1)), validation=make_dataset(2, seed=2))
    count = dist.get_world_size()
    task = make_task([{"lr": 1e-3, "r": 2 + job, "batch_size": 1 + job, "seed": job} for job in range(count)])
    context = TaskContext.of(task, backbone, data, ranks)
    trainer, jobs = make_trainer(context, count if ranks.is_alone else 1), initial_states(context)
    for slot, job in enumerate(jobs):
        job.slot = slot
        local_slot = trainer.passes.local_slot(job)
        if local_slot is not None:
            trainer.admit(job, local_slot)
    return trainer, jobs


def inside_vocabulary(dataset: EncodedDataset) -> EncodedDataset:
    return EncodedDataset(
        input_ids=tuple(ids % VOCABULARY for ids in dataset.input_ids),
        targets=tuple(torch.where(ids >= 0, ids % VOCABULARY, ids) for ids in dataset.targets),
    )


def world() -> DeviceMesh:
    return DeviceMesh("cpu", list(range(dist.get_world_size())))


@contextmanager
def on_ranks(count: int) -> Iterator[DeviceMesh | None]:
    """Return the first ``count`` ranks; None on the others, which wait."""
    mesh = DeviceMesh("cpu", list(range(count)))
    yield mesh if dist.get_rank() < count else None
    dist.barrier()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal_tensors(sharded: PreTrainedModel, whole: PreTrainedModel) -> None:
    """Check that every parameter, gathered, and every buffer is equal, including buffers that are not saved."""
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(whole, kind)())
        found = dict(getattr(sharded, kind)())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(full(found[name]), tensor), name


def gathered_bytes(module: torch.nn.Module, num_ranks: int) -> int:
    """Return the bytes that a rank receives when ``module`` is gathered: the others' rows, padded to equal numbers."""
    return sum(
        (num_ranks - 1) * math.ceil(len(parameter) / num_ranks) * parameter[0].nbytes
        for parameter in module.parameters()
    )


def own_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def parts_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [*layers_of(model), model.get_input_embeddings(), model.get_output_embeddings()]
