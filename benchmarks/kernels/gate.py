"""The correctness gate: every variant is compared with ALTO's reference ops on a float64 copy of the same weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.kernels import TokenSchedule
from alto.lora import AdapterBank, AdapterShape, AdapterWeights, BankLayout, adapter_scale, inject, linear_modules
from alto.objectives import Learners, find_objective, job_losses
from benchmarks.baselines.stacked import share
from benchmarks.kernels.variants import JobFacts, Variant
from benchmarks.kernels.workload import Workload

__all__ = [
    "Judge",
    "Tolerance",
    "distances",
    "gate_failures",
    "random_adapters",
    "reference_ops",
    "relative_distance",
    "tolerance_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest relative error of a loss, and of a job's gradients of ``A`` or ``B`` over all modules, in norm."""

    loss: float
    gradient: float


def tolerance_of(dtype: torch.dtype, hidden_size: int) -> Tolerance:
    """Return the rounding error that is allowed for one job of a random model of this hidden size, cut to two layers,
    with its base in ``dtype``.

    In bfloat16 most of the distance is the rounding of the base itself, which all variants share. One rounding changes
    a number by up to 2^-8 of it, and by 1.6e-3 of it in the root mean square. GEMMs add in float32, so the number of
    stores of a result matters, not the number of products in its sum. After the stores of two layers, a gradient is off
    by at most 3e-2 of its norm (measured on a CPU: 1.3e-2 at hidden size 128, 1.9e-2 at 2,048, 2.6e-2 at 4,096). Half
    of this variance comes from the forward pass, so activations are off by e = 3e-2 / sqrt(2) = 2.1e-2.

    Weights have a deviation of 0.02 and the head's input has a mean square of 1, so logits have a deviation of 0.02
    sqrt(H), which is 1.28 at H = 4,096, and errors of 1.28 e = 2.7e-2. The softmax passes these errors on to a token's
    loss unchanged. Their signs differ from token to token, so a job of n trained tokens is off by 2.7e-2 / sqrt(n). For
    the shortest row, n = 34, this is 4.7e-3 of a loss of ln(2,048) + 1.28² / 2 = 8.4, a relative deviation of 5.5e-4.
    The largest error of 32 jobs in seven ways, most of them with three times as many tokens, stays below 3.6 such
    deviations: 2e-3 (measured: 5.4e-4, the largest of six jobs in three ways). The dependence on H that remains is
    sqrt(H); small models keep 1e-3. Finer mistakes show in the gradients.
    """
    if dtype == torch.float32:
        return Tolerance(loss=1e-5, gradient=1e-4)
    assert dtype == torch.bfloat16, dtype
    return Tolerance(loss=max(1e-3, 2e-3 * (hidden_size / 4096) ** 0.5), gradient=3e-2)


def random_adapters(model: PreTrainedModel, ranks: Sequence[int], seed: int = 0) -> list[AdapterWeights]:
    """Return one adapter for each rank, with ``B`` not zero, rounded to the model's dtype so that all variants have the
    same."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, width: int) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator) * width**-0.5
        return drawn.to(model.dtype).float()

    return [
        AdapterWeights(
            {
                module.name: (
                    matrix(module.in_features, rank, module.in_features),
                    matrix(rank, module.out_features, 16 * rank),
                )
                for module in linear_modules(model)
            }
        )
        for rank in ranks
    ]


class Judge:
    """Compares variants with the reference on one step, one after the other."""

    def __init__(self, base: PreTrainedModel, workload: Workload, batch_size: int) -> None:
        self._workload, self._batch_size = workload, batch_size
        self._adapters = random_adapters(base, workload.ranks)
        self._exact = reference_facts(base, workload, batch_size, self._adapters)
        self._bare = reference_facts(base, workload, batch_size, None)
        self._tolerance = tolerance_of(base.dtype, base.config.hidden_size)

    def failures(self, name: str, variant: Variant) -> list[str]:
        """Return the faults of the variant, one sentence each; empty if it agrees with the reference."""
        found = variant.facts(self._batch_size, self._adapters)
        expected = self._bare if name == "frozen" else self._exact
        failures = []
        for job, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.gradients.keys() == other.gradients.keys(), f"{name} trains other modules"
            for what, distance in distances(one, other).items():
                limit = self._tolerance.loss if what == "loss" else self._tolerance.gradient
                if not distance <= limit:
                    failures.append(
                        f"{name}, job {job} (rank {self._workload.ranks[job]}), {what}: {distance:.1e} from the "
                        f"float64 reference, tolerance {limit:.0e}"
                    )
        return failures


def gate_failures(
    variants: Mapping[str, Variant], base: PreTrainedModel, workload: Workload, batch_size: int
) -> list[str]:
    """Return the faults of the variants on one step, one sentence each; empty if all agree with the reference."""
    judge = Judge(base, workload, batch_size)
    return [failure for name, variant in variants.items() for failure in judge.failures(name, variant)]


def reference_facts(
    base: PreTrainedModel, workload: Workload, batch_size: int, adapters: Sequence[AdapterWeights] | None
) -> list[JobFacts]:
    """Return losses and gradients by the reference ops in float64 (norms and losses in float32, as in the model's own
    code); without adapters if none are given."""
    with reference_ops():
        backbone = Backbone(copy.deepcopy(share(base)).double(), None, "random")
        modules = linear_modules(backbone.model)
        layout = BankLayout(modules=modules, max_rank=max(workload.ranks))
        bank = AdapterBank(layout, len(workload.ranks), device=base.device, dtype=torch.float64)
        context = inject(backbone.model, bank)
    scales = [adapter_scale(job.config) for job in workload.jobs(batch_size)]
    for slot, adapter in enumerate(adapters or []):
        bank.occupy(slot, AdapterShape(rank=workload.ranks[slot], targets=modules))
        bank.write(slot, adapter)
    losses = [0.0] * len(workload.ranks)  # a job may have rows in several passes
    for batch in workload.batches(batch_size, base.device):
        schedule = TokenSchedule.build(batch.slots, batch.job_tokens, [scales[slot] for slot in batch.slots])
        with context.use(schedule) if adapters is not None else nullcontext():
            losses_J = job_losses(backbone, batch, [Learners(find_objective("sft"), ())])
            if adapters is not None:
                losses_J.sum().backward()
        for slot, loss in zip(batch.slots, losses_J.tolist(), strict=True):
            losses[slot] += loss
    return [
        JobFacts(
            loss=loss,
            gradients=bank.read(slot, bank.grads_ZP) if adapters else AdapterWeights({}),
        )
        for slot, loss in enumerate(losses)
    ]


def relative_distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the norm of the difference divided by the norm of the expected values, with all tensors taken as one
    vector."""
    differences = [one.double() - other.double() for one, other in zip(found, expected, strict=True)]
    return float(_norm(differences) / _norm(expected))


def distances(found: JobFacts, expected: JobFacts) -> dict[str, float]:
    """Return the relative distances of the loss, and of the gradients of ``A`` and of ``B`` over the modules of
    ``found``."""
    of_parts = {"loss": abs(found.loss - expected.loss) / abs(expected.loss)}
    for side, letter in enumerate("AB"):
        pairs = [(both[side], expected.gradients[module][side]) for module, both in found.gradients.items()]
        if pairs:
            of_parts[f"gradient of {letter}"] = relative_distance(*zip(*pairs, strict=True))
    return of_parts


@contextmanager
def reference_ops() -> Iterator[None]:
    """Let ALTO choose its reference backend inside the context."""
    before = os.environ.get("ALTO_KERNELS")
    os.environ["ALTO_KERNELS"] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ["ALTO_KERNELS"]
        else:
            os.environ["ALTO_KERNELS"] = before


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.double().norm() for tensor in tensors]).norm()
