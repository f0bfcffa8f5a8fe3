"""The output head of a causal LM with an adapter per slot (``target_modules: [lm_head]``), or a head of its own
(``modules_to_save``).

In training and evaluation the loss head computes logits chunk by chunk, and only of tokens that are trained: here it
asks what the adapters add to a chunk. Where the model computes its logits itself, the head is a layer like others.

Shapes: ``S`` trained tokens, ``C`` tokens of a chunk, ``H`` hidden size, ``V`` vocabulary, ``Q`` ranks of a slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alto.errors import UnsupportedModelError
from alto.kernels import LoraOperands, TokenSchedule, dropped_inputs, grouped_lora_linear, upload
from alto.lora.adapted_weight import AdaptedWeight
from alto.lora.bank import AdapterBank
from alto.lora.injected import InjectedModule
from alto.lora.linear import ForwardContext, FrozenWeight
from alto.lora.whole_modules import whole_name

__all__ = ["MultiLoraHead"]


class _Tokens(Protocol):
    """The trained tokens of a forward pass, job after job; see :class:`alto.data.TokenBatch`."""

    @property
    def slots(self) -> Sequence[int]: ...

    @property
    def job_tokens(self) -> Sequence[int]: ...

    @property
    def job_targets(self) -> Sequence[int]: ...

    @property
    def loss_positions_S(self) -> Tensor: ...  # noqa: N802  # a shape


class MultiLoraHead(InjectedModule):
    """A frozen output head with one adapter per slot. Outside of a schedule it is only the base's head.

    Args:
        base: The head, a linear layer.
        name: Its full name in the model.
        bank: Adapters of all slots, and heads that jobs train whole.
        operands: Its adapters; None where no job has any.
        context: Gives the slots of the tokens.
        ops: The backend that holds the ops.
    """

    def __init__(
        self,
        base: nn.Linear,
        name: str,
        bank: AdapterBank,
        operands: LoraOperands | None,
        context: ForwardContext,
        ops: ModuleType,
    ) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._bank = bank
        self._operands = operands
        self._heads = bank.tensors(whole_name(name))  # those that jobs train whole; None where no job does
        self._context = context
        self._ops = ops

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for models that ask for its precision; under a schedule it can only be looked at."""
        weight: Tensor = self.base.weight
        return AdaptedWeight.of(weight, self._name) if self.is_in_forward else weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias."""
        bias: Tensor | None = self.base.bias
        return bias

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward pass with adapters is in progress."""
        return self._context.schedule is not None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # writes to the bank, which is outside of graphs
    def forward(self, x: Tensor) -> Tensor:
        schedule = self._context.schedule
        if schedule is None or not schedule.segments:
            result: Tensor = self.base(x)
            return result
        schedule = _of_kept(schedule, x)
        x_SH = x.reshape(-1, x.shape[-1])
        frozen = FrozenWeight(self.base)
        if self._operands is None:
            y_SV = frozen.forward(x_SH)
        else:
            (y_SV,) = grouped_lora_linear(x_SH, self._bank.anchor, [frozen], self._operands, schedule, self._ops)
        for slot, start, end in schedule.segments:
            if self._heads is not None and slot in self._heads:
                assert not torch.is_grad_enabled(), "heads are trained through the loss head"
                y_SV[start:end] = F.linear(x_SH[start:end], self._heads.of_slot(slot)[0].to(x_SH.dtype))
        return y_SV.view(*x.shape[:-1], -1)

    def runs(self, tokens: _Tokens) -> list[tuple[int, _HeadAdapters | _OwnHead | None]]:
        """The trained tokens of a forward pass in order, in runs of consecutive ones: how many, and their adapters,
        None where their jobs have none on the head."""
        schedule = self._context.schedule
        assert schedule is not None
        jobs = list(zip(tokens.slots, tokens.job_targets, _starts(tokens.job_tokens), strict=True))
        found: list[tuple[int, _HeadAdapters | _OwnHead | None]] = []
        first = 0
        for (is_adapted, own_slot), of_run in itertools.groupby(jobs, key=lambda job: self._kind(job[0])):
            slots, counts, starts = zip(*of_run, strict=True)
            end = first + sum(counts)
            adapters: _HeadAdapters | _OwnHead | None = None
            if own_slot is not None and self._heads is not None:
                adapters = _OwnHead(self._bank.anchor, *self._heads.of_slot(own_slot), self.base.weight.dtype)
            elif is_adapted and end > first and self._operands is not None:
                adapters = _HeadAdapters(
                    self._bank.anchor,
                    self._operands,
                    self._ops,
                    _selected(schedule, slots, counts),
                    tokens.loss_positions_S[first:end],
                    dict(zip(slots, starts, strict=True)),
                )
            found.append((end - first, adapters))
            first = end
        return found

    def _kind(self, slot: int) -> tuple[bool, int | None]:
        """Whether a slot has matrices on the head, and the slot itself where it has a head of its own."""
        has_own = self._heads is not None and slot in self._heads
        return self._operands is not None and slot in self._operands.slots, slot if has_own else None


class _HeadAdapters:
    """The adapters of some trained tokens on the head, as :class:`alto.backbone.loss_head.LogitAdapters`.

    Args:
        anchor: See there.
        operands: Adapters of all slots on the head.
        ops: The backend that holds the ops.
        schedule: The tokens of every slot.
        positions_S: Place of every token in the forward pass.
        starts: Place of the first token of every slot there.
    """

    def __init__(
        self,
        anchor: Tensor,
        operands: LoraOperands,
        ops: ModuleType,
        schedule: TokenSchedule,
        positions_S: Tensor,
        starts: dict[int, int],
    ) -> None:
        self.anchor = anchor
        self.weight: Tensor | None = None
        self._operands = operands
        self._ops = ops
        self._schedule = schedule
        self._positions_S = positions_S
        self._starts = starts
        self._parts: dict[tuple[int, int], TokenSchedule] = {}

    def inputs(self, hidden_SH: Tensor) -> Tensor:
        """The hidden states, with dropout where a job has it: a token's mask is that of its place among all tokens of
        its job's batch, trained or not, as in every other layer."""
        schedule = self._schedule
        slots = {slot for slot, key in zip(schedule.slots, schedule.dropout, strict=True) if key is not None}
        if not slots:
            return hidden_SH
        device = hidden_SH.device
        starts = upload([self._starts[slot] for slot in schedule.slots], torch.int64, device)
        starts_S = starts.repeat_interleave(schedule.lengths_of_segments(device), output_size=schedule.num_tokens)
        return dropped_inputs(hidden_SH, schedule, slots, self._operands.number, self._positions_S - starts_S)

    def shrink(self, x_SH: Tensor) -> Tensor:
        """Products with every slot's own ``A``, ``[S, Q]``; columns past a slot's own ranks are not meant to be
        read."""
        s_SQ: Tensor = self._ops.grouped_shrink(x_SH, self._operands, self._part(0, self._schedule.num_tokens))
        return s_SQ

    def expand(self, s_CQ: Tensor, part: slice, dtype: torch.dtype) -> Tensor:
        """The output of the adapters for the tokens ``part``, ``[C, V]``."""
        change_CV = s_CQ.new_empty(len(s_CQ), self._operands.out_features[0], dtype=dtype)
        self._ops.grouped_expand(s_CQ, self._operands, [change_CV], self._part(part.start, part.stop))
        return change_CV

    def backward(
        self, x_CH: Tensor, s_CQ: Tensor, dlogits_CV: Tensor, dloss_C: Tensor, part: slice, *, needs_input: bool
    ) -> Tensor | None:
        """The gradient towards ``x_CH``, or None where it is not needed; those of the adapters are added in the bank.

        The gradient towards a loss may be far below the range of 16 bits, and is multiplied in last."""
        schedule, operands = self._part(part.start, part.stop), self._operands
        dx_CH = torch.empty_like(x_CH) if needs_input else None
        ds_CQ = self._ops.grouped_backward_input([dlogits_CV], operands, dx_CH, schedule)
        dloss_C1 = dloss_C[:, None].to(ds_CQ.dtype)
        self._ops.grouped_backward_weight(x_CH, s_CQ * dloss_C1, [dlogits_CV], ds_CQ * dloss_C1, operands, schedule)
        return None if dx_CH is None else dx_CH.mul_(dloss_C[:, None].to(dx_CH.dtype))

    def _part(self, first: int, end: int) -> TokenSchedule:
        """The schedule of the tokens ``[first, end)`` alone, without dropout, which their inputs have already."""
        if (first, end) not in self._parts:
            counts = [max(0, min(segment.end, end) - max(segment.start, first)) for segment in self._schedule.segments]
            self._parts[first, end] = TokenSchedule.build(self._schedule.slots, counts, self._schedule.scales)
        return self._parts[first, end]


class _OwnHead:
    """A head that a job trains whole, as :class:`alto.backbone.loss_head.LogitAdapters` without matrices.

    Args:
        anchor: See there.
        weight_VH: The head in the bank.
        gradient_VH: Its gradient there.
        dtype: Of the base model, to which it is rounded where it is used.
    """

    def __init__(self, anchor: Tensor, weight_VH: Tensor, gradient_VH: Tensor, dtype: torch.dtype) -> None:
        self.anchor = anchor
        self.weight: Tensor | None = weight_VH.to(dtype)
        self._gradient_VH = gradient_VH

    def inputs(self, hidden_SH: Tensor) -> Tensor:
        """The hidden states."""
        return hidden_SH

    def shrink(self, x_SH: Tensor) -> Tensor:
        """No columns."""
        return x_SH[:, :0]

    def expand(self, s_CQ: Tensor, part: slice, dtype: torch.dtype) -> None:
        """Nothing."""

    def backward(
        self, x_CH: Tensor, s_CQ: Tensor, dlogits_CV: Tensor, dloss_C: Tensor, part: slice, *, needs_input: bool
    ) -> Tensor | None:
        """Zeros, as the loss head has the gradient towards the hidden states; the gradient of the head is added in the
        bank."""
        dtype = self._gradient_VH.dtype
        self._gradient_VH.addmm_((dlogits_CV * dloss_C[:, None]).to(dtype).T, x_CH.to(dtype))
        return torch.zeros_like(x_CH) if needs_input else None


def _selected(schedule: TokenSchedule, slots: Sequence[int], counts: Sequence[int]) -> TokenSchedule:
    """The schedule of ``counts`` tokens of each of ``slots``, with their scales and dropout in ``schedule``."""
    known = dict(zip(schedule.slots, zip(schedule.scales, schedule.dropout, strict=True), strict=True))
    scales, dropout = zip(*(known[slot] for slot in slots), strict=True)
    return TokenSchedule.build(slots, counts, scales, dropout)


def _of_kept(schedule: TokenSchedule, x: Tensor) -> TokenSchedule:
    """The schedule of the positions ``[rows, kept, H]`` that every row of a forward pass keeps for the head; of all
    positions it is ``schedule`` itself.

    Raises:
        UnsupportedModelError: It is not known whose positions are kept.
    """
    num_kept = x.shape[:-1].numel()
    if num_kept == schedule.num_tokens:
        return schedule
    length, rest = divmod(schedule.num_tokens, x.shape[0])
    if x.ndim != 3 or rest or any(count % length for count in schedule.lengths):
        raise UnsupportedModelError(
            f"target_modules: expected a model that runs its output head on all {schedule.num_tokens} tokens of a "
            f"forward pass, or on equally many of every row, found {num_kept}; leave the output head out"
        )
    counts = [count // length * x.shape[1] for count in schedule.lengths]
    return TokenSchedule.build(schedule.slots, counts, schedule.scales)


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(lengths, initial=0))[:-1]
