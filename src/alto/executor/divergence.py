"""The divergence of adapters from their reference model, an estimate that KTO's loss needs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from alto.backbone import Backbone
from alto.data import JobRows, TokenBatch, mismatched_rows
from alto.executor.forward_plan import JobBatch, RankShare, schedule_of
from alto.executor.job_state import JobState
from alto.executor.micro_batches import MicroBatches, watching
from alto.executor.ranks import Ranks
from alto.executor.start_adapter import StartAdapter
from alto.kernels import upload
from alto.lora import AdapterBank, ForwardContext
from alto.objectives import run_sums, token_losses


class Divergences:
    """Estimates the divergence of jobs from their reference: the frozen base model, or the adapter that the jobs of a
    task begin with (TRL 1.16, ``KTOTrainer`` of a model with a trained adapter).

    Args:
        backbone: The base model, whose targeted modules are wrapped for ``bank``.
        bank: Bank of this rank.
        micro_batches: Splits the rows into micro-batches that fit into memory.
        ranks: This process among the ranks that train together.
        share: This rank's part of the work.
    """

    def __init__(
        self, backbone: Backbone, bank: AdapterBank, micro_batches: MicroBatches, ranks: Ranks, share: RankShare
    ) -> None:
        self._backbone = backbone
        self._bank = bank
        self._micro_batches = micro_batches
        self._ranks = ranks
        self._share = share
        self._start_rows: weakref.WeakKeyDictionary[StartAdapter, Tensor] = weakref.WeakKeyDictionary()

    @torch.no_grad()
    def estimate(self, batches: Sequence[JobBatch], forward_context: ForwardContext) -> Tensor | None:
        """Return the estimated divergence of each job's adapter over its whole batch, ``[len(batches)]`` float64 nats,
        at least 0.

        The estimate is the mean log-ratio of prompts with the replies of other rows. It is computed before the first
        micro-batch of a step, so that it does not depend on how the batch is split. It is 0 for jobs that do not need
        it; the result is None if no job does.

        Args:
            batches: Jobs, each with the rows of a batch.
            forward_context: Gives the wrapped modules the slots of a micro-batch's tokens.

        Raises:
            RowTooLargeError: A single row does not fit into memory.
            DeviceMemoryError: A micro-batch does not fit, and other ranks have already begun it.
        """
        asked = [(index, *batch) for index, batch in enumerate(batches) if batch[0].config.objective.needs_kl]
        if not asked:
            return None
        made = {(id(dataset), rows): mismatched_rows(dataset, rows) for _, _, dataset, rows in asked}
        of_asked: list[JobBatch] = [
            (job, made[id(dataset), rows], tuple(range(len(rows)))) for _, job, dataset, rows in asked
        ]
        here = self._share.here([job for job, _, _ in of_asked])
        index_of = {self._share.local_slot(job): index for index, job, _, _ in asked}
        work, num_micro_batches = self._share.work(of_asked, split_jobs=True)
        means = torch.zeros(len(batches), dtype=torch.float64, device=self._backbone.device)

        def estimate(parts: Sequence[JobRows]) -> None:
            with watching("evaluation"):
                batch = self._share.collate(parts)
                with forward_context.use(schedule_of(batch, here, training=False)):
                    losses_S = token_losses(self._backbone, batch)
                log_ratios_S = self._reference_losses(batch, here, forward_context).double() - losses_S.double()
                if parts:
                    sums_J = run_sums(log_ratios_S, batch.job_targets)
                    sums_J = sums_J / upload(list(batch.job_weights), torch.float64, means.device)
                    indices = [index_of[local_slot] for local_slot in batch.slots]
                    means.index_add_(0, upload(indices, torch.int64, means.device), sums_J)

        def forget() -> None:
            means.zero_()

        self._micro_batches.run(work, estimate, forget=forget, split_jobs=True, num_micro_batches=num_micro_batches)
        if not self._ranks.is_alone:
            means = torch.tensor(self._ranks.sum(means.tolist()), dtype=torch.float64, device=means.device)
        return means.clamp(min=0)

    def _reference_losses(
        self, batch: TokenBatch, here: Mapping[int, JobState], forward_context: ForwardContext
    ) -> Tensor:
        """Return the cross-entropy of every trained token under the reference of its job, ``[S]`` nats.

        With several ranks, all jobs belong to one task, so that all ranks run the same number of forward passes.
        """
        starts = {local_slot: job.context.start for local_slot, job in here.items()}
        begun = {local_slot: start for local_slot, start in starts.items() if start is not None}
        if not begun:
            return token_losses(self._backbone, batch)
        with self._at_start(begun), forward_context.use(schedule_of(batch, here, training=False)):
            of_start_S = token_losses(self._backbone, batch)
        if len(begun) == len(here):
            return of_start_S
        of_base_S = token_losses(self._backbone, batch)
        begins = torch.tensor([local_slot in begun for local_slot in batch.slots])
        is_begun_S = begins.repeat_interleave(torch.tensor(batch.job_targets)).to(of_base_S.device)
        return torch.where(is_begun_S, of_start_S, of_base_S)

    @contextlib.contextmanager
    def _at_start(self, begun: Mapping[int, StartAdapter]) -> Iterator[None]:
        """Put the adapters that the jobs began with into these local slots; restore the present adapters bit by bit on
        exit."""
        params_ZP = self._bank.params_ZP
        kept = {local_slot: params_ZP[local_slot].clone() for local_slot in begun}
        try:
            for local_slot, start in begun.items():
                if start not in self._start_rows:
                    self._bank.write(local_slot, start.weights)
                    self._start_rows[start] = params_ZP[local_slot].clone()
                params_ZP[local_slot].copy_(self._start_rows[start])
                self._bank.copy_weights(local_slot)
            yield
        finally:
            for local_slot, row_P in kept.items():
                params_ZP[local_slot].copy_(row_P)
                self._bank.copy_weights(local_slot)


# The load-balancing losses of the routers in one step, for each job over its own tokens.
#
# The loss is a product of two means over the tokens of a micro-step, as transformers' Trainer computes it for each
# forward pass over ``per_device_train_batch_size`` rows; over several micro-steps TRL takes the mean. If the rows of a
# job are in several micro-batches or on several ranks, the choices of each expert are therefore counted before the
# first of these micro-batches.
#
# Shapes: ``T`` tokens, ``J`` jobs of a micro-batch, ``U`` micro-steps of all jobs in it, ``E`` experts.
