"""Supervised losses against the model's own loss with ``-100`` labels, each job alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.data import EncodedDataset, JobRows, TokenBatch, collate
from alto.kernels import TokenSchedule
from alto.lora import AdapterBank, AdapterShape, BankLayout, inject, linear_modules
from alto.objectives import Learners, find_objective, job_losses, micro_batch_terms

ModelFactory = Callable[..., PreTrainedModel]
SFT = find_objective("sft")


def make_dataset() -> EncodedDataset:
    """Return five rows of 4 to 12 tokens; some have untrained tokens between trained ones."""
    generator = torch.Generator().manual_seed(0)
    input_ids, targets = [], []
    for length in (7, 4, 12, 5, 9):
        ids = torch.randint(2, 97, (length,), generator=generator)
        target = torch.cat([ids[1:], torch.tensor([-100])])
        target[torch.rand(length, generator=generator) < 0.4] = -100
        target[length // 2] = ids[length // 2 + 1]
        input_ids.append(ids)
        targets.append(target)
    return EncodedDataset(input_ids=tuple(input_ids), targets=tuple(targets))


DATA = make_dataset()
JOBS = [JobRows(DATA, 2, (0, 3)), JobRows(DATA, 0, (1,)), JobRows(DATA, 1, (4, 2, 0))]


def sft_losses(backbone: Backbone, batch: TokenBatch) -> torch.Tensor:
    return job_losses(backbone, batch, [Learners(SFT, ())])


def sft_sums(backbone: Backbone, batch: TokenBatch) -> torch.Tensor:
    return micro_batch_terms(backbone, batch, [Learners(SFT, ())])[0].sums_J


def own_loss(model: PreTrainedModel, rows: tuple[int, ...]) -> float:
    """Return the model's own loss on a batch padded on the right; labels are at the tokens, since the model shifts
    them."""
    length = max(DATA.input_ids[row].numel() for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for index, row in enumerate(rows):
        count = DATA.input_ids[row].numel()
        ids[index, :count], mask[index, :count] = DATA.input_ids[row], 1
        labels[index, 1:count] = DATA.targets[row][:-1]
    return float(model(input_ids=ids, attention_mask=mask, labels=labels).loss)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma", "gemma2-plain-attention"])
def test_every_jobs_loss_is_the_models_own(tiny_model: ModelFactory, architecture: str) -> None:
    own = tiny_model(architecture)
    expected = [own_loss(own, job.rows) for job in JOBS]
    found = sft_losses(Backbone(tiny_model(architecture), None, "tiny"), collate(JOBS))
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert max(expected) - min(expected) > 1e-2, "the jobs' losses are too alike to tell them apart"


@torch.no_grad()
def test_a_mean_over_rows_instead_of_tokens_would_show(tiny_model: ModelFactory) -> None:
    own, job = tiny_model("llama"), JOBS[2]
    mean_of_rows = sum(own_loss(own, (row,)) for row in job.rows) / len(job.rows)
    assert mean_of_rows != pytest.approx(own_loss(own, job.rows), rel=1e-3)


@torch.no_grad()
def test_sums_are_means_times_trained_tokens(tiny_model: ModelFactory) -> None:
    backbone, batch = Backbone(tiny_model("llama"), None, "tiny"), collate(JOBS)
    counts = [sum(int((DATA.targets[row] >= 0).sum()) for row in job.rows) for job in JOBS]
    expected = [loss * count for loss, count in zip(sft_losses(backbone, batch).tolist(), counts, strict=True)]
    assert sft_sums(backbone, batch).tolist() == pytest.approx(expected, rel=1e-6)


class GivenLosses:
    """A backbone whose token losses are given."""

    def __init__(self, losses_S: torch.Tensor) -> None:
        self.losses_S = losses_S

    def hidden_states(self, input_ids_T: torch.Tensor, *_: object) -> torch.Tensor:
        return input_ids_T[:, None]

    def token_losses(self, hidden_SH: torch.Tensor, targets_S: torch.Tensor, *_: object) -> torch.Tensor:
        return self.losses_S


@pytest.mark.parametrize("reduce", [sft_losses, sft_sums])
def test_nan_and_other_jobs_change_no_bit_of_a_job(reduce: Callable[..., torch.Tensor]) -> None:
    batch = collate(JOBS)
    clean_S = torch.rand(sum(batch.job_targets), generator=torch.Generator().manual_seed(0)) * 9
    poisoned_S = clean_S.clone()
    poisoned_S[batch.job_targets[0]] = float("nan")
    (clean_J, clean), (poisoned_J, poisoned) = (reduced(reduce, losses_S, batch) for losses_S in (clean_S, poisoned_S))
    assert poisoned_J.isnan().tolist() == [False, True, False]
    assert torch.equal(poisoned_J[[0, 2]], clean_J[[0, 2]])
    assert torch.equal(poisoned, clean)
    for index, (job, losses_S) in enumerate(zip(JOBS, clean_S.split(batch.job_targets), strict=True)):
        (alone,), gradient = reduced(reduce, losses_S, collate([job]))
        assert torch.equal(alone, clean_J[index])
        assert torch.equal(gradient, clean.split(batch.job_targets)[index])
        assert float(alone) == pytest.approx(float(losses_S.double().sum()) * float(gradient[0]), rel=1e-6)


@torch.no_grad()
def test_a_long_mean_is_exact() -> None:
    batch = dataclasses.replace(collate(JOBS[1:2]), job_targets=(100_000,), job_weights=(100_000,))
    losses_S = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    assert float(sft_losses(GivenLosses(losses_S), batch)[0]) == pytest.approx(
        float(losses_S.double().mean()), rel=1e-7
    )


def reduced(
    reduce: Callable[..., torch.Tensor], losses_S: torch.Tensor, batch: TokenBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one number per job, and the gradient of their sum for the token losses."""
    losses_S = losses_S.detach().clone().requires_grad_()
    result_J = reduce(GivenLosses(losses_S), batch)
    (gradient_S,) = torch.autograd.grad(result_J.sum(), losses_S)
    return result_J.detach(), gradient_S


def test_a_jobs_loss_and_gradient_do_not_depend_on_other_jobs(tiny_model: ModelFactory) -> None:
    backbone, bank, run = adapted(tiny_model)
    together = run(collate(JOBS))
    gradients = bank.grads_ZP.clone()
    bank.grads_ZP.zero_()
    alone = [float(run(collate([job]))[0]) for job in JOBS]
    assert together.tolist() == pytest.approx(alone, rel=1e-5)
    for slot in range(3):
        assert float((gradients[slot] - bank.grads_ZP[slot]).norm() / gradients[slot].norm()) < 1e-4
    assert backbone.model.config.num_hidden_layers == 2


@torch.no_grad()
def test_adapters_of_zero_weight_change_nothing(tiny_model: ModelFactory) -> None:
    batch = collate(JOBS)
    expected = sft_losses(Backbone(tiny_model("llama"), None, "tiny"), batch)
    backbone = Backbone(tiny_model("llama"), None, "tiny")
    modules = linear_modules(backbone.model)
    bank = AdapterBank(BankLayout(modules=modules, max_rank=4), 3)
    context = inject(backbone.model, bank)
    for slot in range(3):
        bank.occupy(slot, AdapterShape(rank=4, targets=modules))
        bank.initialise(slot, slot)
    with context.use(TokenSchedule.build(batch.slots, batch.job_tokens, [2.0] * 3)):
        assert torch.equal(sft_losses(backbone, batch), expected)
        next(bank.matrices(bank.params_ZP, 1))[2].fill_(0.1)
        changed = sft_losses(backbone, batch)
    assert (changed != expected).tolist() == [slot == 1 for slot in batch.slots]


def adapted(tiny_model: ModelFactory) -> tuple[Backbone, AdapterBank, Callable[[TokenBatch], torch.Tensor]]:
    """Return a backbone with three random adapters, and a function that runs a forward and backward pass."""
    backbone = Backbone(tiny_model("llama"), None, "tiny")
    modules = linear_modules(backbone.model)
    bank = AdapterBank(BankLayout(modules=modules, max_rank=4), 3)
    context = inject(backbone.model, bank)
    for slot in range(3):
        bank.occupy(slot, AdapterShape(rank=4 - slot, targets=modules))
        bank.initialise(slot, slot)
        for _, _, b in bank.matrices(bank.params_ZP, slot):
            b.copy_(0.05 * torch.randn(b.shape, generator=torch.Generator().manual_seed(slot)))

    def run(batch: TokenBatch) -> torch.Tensor:
        with context.use(TokenSchedule.build(batch.slots, batch.job_tokens, [2.0] * len(batch.slots))):
            losses = sft_losses(backbone, batch)
            losses.sum().backward()
        return losses.detach()

    return backbone, bank, run
