"""Chooses the slots and the micro-batch size of a task from the measured memory and throughput models. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from alto.errors import DeviceMemoryError
from alto.records import MemoryProfile, Throughput
from alto.scheduler.fit import max_tokens, saturation
from alto.spec import LOAD_IN_4BIT


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRequest:
    """The jobs, rows and limits of a task on one device or several equal ones; a limit that the task leaves open is
    None.

    Attributes:
        step_tokens: Expected tokens of one step of every job.
        most_step_tokens: Tokens of one step of every job with its longest rows: an upper limit for micro-batches.
        longest_row: Tokens of the longest row: the smallest possible micro-batch size.
        usual_tokens_per_pass: Tokens above which larger micro-batches are not faster on this device.
        num_ranks: Equal devices that share the jobs. Bytes and micro-batches are per device; slots and tokens of a step
            are totals of all devices.
        smallest_pass: Tokens of the smallest forward pass in a step of any job, if a step has passes of different
            sizes: one token for each completion that a job generates. None if a step is one pass.
    """

    step_tokens: Sequence[int]
    most_step_tokens: Sequence[int]
    longest_row: int
    slot_bytes: int
    usual_tokens_per_pass: int
    num_ranks: int = 1
    max_slots: int | None = None
    max_tokens_per_step: int | None = None
    max_tokens_per_pass: int | None = None
    smallest_pass: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The limits within which a task runs, and the resulting peak memory.

    Attributes:
        max_slots: Slots of all ranks.
        max_tokens_per_step: Tokens of a step of all ranks.
        max_tokens_per_pass: Tokens of a micro-batch of one rank.
        peak_bytes: Expected peak memory of one rank.
        why_one_slot: Why there is only one slot, as a phrase; empty if there are more.
    """

    max_slots: int
    max_tokens_per_step: int
    max_tokens_per_pass: int
    peak_bytes: int
    why_one_slot: str = ""


def choose_packing(request: PackingRequest, memory: MemoryProfile, throughput: Throughput) -> Packing:
    """Choose as many slots as fit, up to the number with which the smallest jobs reach the device's best token rate.

    More slots would only delay the first results. If the slots leave too little memory for such a step, there are fewer
    slots and larger micro-batches. Each of several ranks gets at least one slot, and a step limit at which it can train
    the largest job. The task's own limits are kept; if they do not fit, the error names limits that do.

    Raises:
        DeviceMemoryError: One slot and a micro-batch of the longest row, or the task's own limits, do not fit.
    """
    saturated = saturation(throughput.points)
    smallest = request.smallest_pass or min(request.step_tokens)
    saturating = max(math.ceil(saturated / smallest), request.num_ranks)
    wanted = request.max_slots or min(len(request.step_tokens), saturating)
    least_micro_batch = max(request.longest_row, request.max_tokens_per_pass or 0)
    of_rank = saturated / request.num_ranks
    for num_slots in range(math.ceil(wanted / request.num_ranks), 0, -1):
        fitting = _fitting_tokens(memory, num_slots * request.slot_bytes)
        if fitting >= max(least_micro_batch, min(of_rank, num_slots * smallest)) or (
            num_slots == 1 and fitting >= least_micro_batch
        ):
            break
        if request.max_slots is not None and fitting < least_micro_batch:
            raise DeviceMemoryError(_does_not_fit(request, memory, least_micro_batch))
        if request.max_slots is not None:
            break
    else:
        raise DeviceMemoryError(_does_not_fit(request, memory, least_micro_batch))
    largest_step = max(request.longest_row, sum(sorted(request.most_step_tokens, reverse=True)[:num_slots]))
    usual = max(min(request.usual_tokens_per_pass, largest_step), request.longest_row)
    tokens_per_pass = request.max_tokens_per_pass or min(usual, fitting)
    # Every rank can train any job.
    one_each = max(request.step_tokens) * request.num_ranks if request.num_ranks > 1 else 0
    together = 0 if request.smallest_pass is None else sum(sorted(request.step_tokens, reverse=True)[:num_slots])
    step = request.max_tokens_per_step or max(saturated, tokens_per_pass * request.num_ranks, one_each, together)
    largest_pass = min(max(tokens_per_pass, request.longest_row), max(step, *request.step_tokens), largest_step)
    max_slots = min(wanted, num_slots * request.num_ranks)
    return Packing(
        max_slots=max_slots,
        max_tokens_per_step=step,
        max_tokens_per_pass=tokens_per_pass,
        peak_bytes=memory.peak_bytes(largest_pass, num_slots * request.slot_bytes),
        why_one_slot=_why_one_slot(request, memory, saturated) if max_slots == 1 else "",
    )


def _why_one_slot(request: PackingRequest, memory: MemoryProfile, saturated: int) -> str:
    """Explain why there is no second slot: the task's own limit, the speed of the device, or its memory."""
    smallest = min(request.step_tokens)
    if request.max_slots == 1:
        return "max_slots is 1 in the task"
    if len(request.step_tokens) == 1:
        return "there is one job"
    if smallest >= saturated:
        return (
            f"the smallest job alone has {smallest:,} tokens per step, and no measured step is more than 5 % faster "
            f"per token than that of {saturated:,}; a second slot would only delay the first results"
        )
    fitting = _fitting_tokens(memory, 2 * request.slot_bytes)
    needed = max(request.longest_row, request.max_tokens_per_pass or 0, min(saturated, 2 * smallest))
    return (
        f"with two slots of {request.slot_bytes / 2**20:,.1f} MiB, memory is left for micro-batches of {fitting:,} "
        f"tokens, but {needed:,} tokens are needed"
    )


def _fitting_tokens(memory: MemoryProfile, bank_bytes: int) -> int:
    """Return the tokens of the largest micro-batch that fits in addition to the bank."""
    fitting = max_tokens(memory, capacity_bytes=memory.capacity_bytes, margin=memory.margin, bank_bytes=bank_bytes)
    return 2**24 if fitting is None else min(fitting, 2**24)


def _does_not_fit(request: PackingRequest, memory: MemoryProfile, least_micro_batch: int) -> str:
    num_ranks = request.num_ranks
    num_slots = math.ceil((request.max_slots or 1) / num_ranks)
    need = memory.peak_bytes(least_micro_batch, num_slots * request.slot_bytes)
    planned = memory.margin * memory.capacity_bytes
    fitting = _fitting_tokens(memory, request.slot_bytes)
    if fitting < request.longest_row:
        fits = f"with one slot, rows of at most {fitting:,} tokens fit: set max_length: {fitting}" if fitting else ""
        remedy = "; ".join(
            filter(
                None, (fits, f"or gradient_checkpointing: true, {LOAD_IN_4BIT}, more GPUs (num_gpus) or a smaller r")
            )
        )
    else:
        fitting = num_slots
        while fitting > 1 and _fitting_tokens(memory, fitting * request.slot_bytes) < request.longest_row:
            fitting -= 1
        tokens = _fitting_tokens(memory, fitting * request.slot_bytes)
        of_rank = f" per rank ({fitting * num_ranks} in total)" if num_ranks > 1 else ""
        fitted = f"{fitting} slots{of_rank} and micro-batches of {tokens:,} tokens fit"
        remedy = f"{fitted}: lower max_slots or max_tokens_per_pass"
    where = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    return (
        f"memory: expected at most {planned / 2**30:,.2f} GiB ({memory.margin:.0%} of all), found that {num_slots} "
        f"slots of {request.slot_bytes / 2**20:,.1f} MiB and a micro-batch of {least_micro_batch:,} tokens take "
        f"{need / 2**30:,.2f} GiB{where}; {remedy}"
    )
