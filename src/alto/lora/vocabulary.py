"""Adapters of the input embeddings and of the language model head."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alto.errors import UnsupportedModelError
from alto.kernels import (
    HeadTokens,
    LoraOperands,
    TokenSchedule,
    dropped_inputs,
    grouped_lora_linear,
    slot_embedding_change,
    slot_embeddings,
    upload,
)
from alto.lora.bank import AdapterBank
from alto.lora.heads import whole_name
from alto.lora.linear import AdaptedWeight, ForwardContext, FrozenWeight, InjectedModule, SettingsModule


class _VocabularyModule(InjectedModule):
    """A frozen module of the vocabulary with one adapter per slot; a job may also train its weight in full.

    Args:
        bank: Adapters of all slots, and the weights that jobs train in full.
    """

    def __init__(
        self, base: nn.Module, name: str, bank: AdapterBank, context: ForwardContext, operands: LoraOperands | None
    ) -> None:
        super().__init__(base, name, bank, context)
        self._operands = operands
        self._whole = bank.tensors(whole_name(name))  # weights trained in full; None if no job trains one
        # Some models, such as Gemma 3, scale embeddings in their own class.
        self._factor = float(getattr(base, "embed_scale", 1.0))

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for models that read its dtype. Under a schedule it cannot be used in computations."""
        weight: Tensor = self.base.weight
        return AdaptedWeight.of(weight, self._name) if self.is_in_forward else weight

    def _has_matrices(self, slot: int) -> bool:
        return self._operands is not None and slot in self._operands.slots

    def _has_whole(self, slot: int) -> bool:
        return self._whole is not None and slot in self._whole


class MultiLoraEmbedding(_VocabularyModule, SettingsModule):
    """Frozen token embeddings with one adapter per slot (``target_modules: [embed_tokens]``), or with a separate table
    per job (``modules_to_save``). Without a token schedule, they act as the frozen embeddings alone."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # writes to the bank, which is outside of graphs
    def forward(self, input_ids: Tensor) -> Tensor:
        y: Tensor = self.base(input_ids)
        schedule = self._context.schedule
        if schedule is None or not any(self._has_matrices(slot) or self._has_whole(slot) for slot in schedule.slots):
            return y
        places, ids_T1 = self._context.places(), input_ids.reshape(-1, 1)
        num_positions = places.num_positions if places is not None else schedule.num_tokens
        if len(ids_T1) != num_positions:
            raise UnsupportedModelError(
                f"target_modules, modules_to_save: expected a model that looks up all {num_positions} tokens of a "
                f"forward pass in one call, found {len(ids_T1)} in {self._name}; leave the embeddings out"
            )
        if places is not None:
            ids_T1 = places.collect(ids_T1)
        ids_T, settings = ids_T1[:, 0], {"factor": self._factor, "padding_idx": self.base.padding_idx}
        if self._whole is not None and self._whole.is_in(schedule):
            y_PH = y.reshape(-1, y.shape[-1])
            y_TH = y_PH if places is None else places.collect(y_PH)
            own_TH = slot_embeddings(self._bank.anchor, y_TH, ids_T, self._whole, schedule, **settings)
            if places is None:
                y = own_TH.view(y.shape)
            else:  # padding keeps the base embeddings
                is_token_P1 = places.spread(torch.ones_like(y_TH[:, :1])) > 0
                y = torch.where(is_token_P1, places.spread(own_TH), y_PH).view(y.shape)
        if self._operands is None:
            return y
        change = slot_embedding_change(self._bank.anchor, ids_T, self._operands, schedule, self._bank.ops, **settings)
        if places is not None:
            change = places.spread(change)
        return (y + change.view(y.shape)).to(y.dtype)


# The output head of a causal LM with an adapter per slot (``target_modules: [lm_head]``), or with a separate head per
# job (``modules_to_save``).
#
# In training and evaluation, the loss head computes logits chunk by chunk, only for tokens with a loss, and asks this
# module for the adapters' contribution to each chunk. If the model computes its logits itself, the head works like any
# other layer.
#
# Shapes: ``S`` trained tokens, ``C`` tokens of a chunk, ``H`` hidden size, ``V`` vocabulary, ``Q`` ranks of a slot.


class MultiLoraHead(_VocabularyModule):
    """A frozen output head with one adapter per slot; without a token schedule it computes the base head's output."""

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias."""
        bias: Tensor | None = self.base.bias
        return bias

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # writes to the bank, which is outside of graphs
    def forward(self, x: Tensor) -> Tensor:
        schedule = self._context.schedule
        if schedule is None or not schedule.segments:
            result: Tensor = self.base(x)
            return result
        schedule = _schedule_of_kept(schedule, x)
        x_SH = x.reshape(-1, x.shape[-1])
        frozen = FrozenWeight(self.base)
        if self._operands is None:
            y_SV = frozen.forward(x_SH)
        else:
            (y_SV,) = grouped_lora_linear(x_SH, self._bank.anchor, [frozen], self._operands, schedule, self._bank.ops)
        for slot, start, end in schedule.segments:
            if self._whole is not None and slot in self._whole:
                assert not torch.is_grad_enabled(), "heads are trained through the loss head"
                y_SV[start:end] = F.linear(x_SH[start:end], self._whole.of_slot(slot)[0].to(x_SH.dtype))
        return y_SV.view(*x.shape[:-1], -1)

    def runs(self, tokens: HeadTokens) -> list[tuple[int, _HeadAdapters | _OwnHead | None]]:
        """Return the trained tokens of a forward pass as runs of consecutive tokens: length and adapters of each run,
        in order.

        The adapters are None if the jobs of a run have none on the head.
        """
        schedule = self._context.schedule
        assert schedule is not None
        *all_starts, _ = itertools.accumulate(tokens.job_tokens, initial=0)
        jobs = list(zip(tokens.slots, tokens.job_targets, all_starts, strict=True))
        found: list[tuple[int, _HeadAdapters | _OwnHead | None]] = []
        first = 0
        for (is_adapted, own_slot), of_run in itertools.groupby(jobs, key=lambda job: self._kind(job[0])):
            slots, counts, starts = zip(*of_run, strict=True)
            end = first + sum(counts)
            adapters: _HeadAdapters | _OwnHead | None = None
            if own_slot is not None and self._whole is not None:
                adapters = _OwnHead(self._bank.anchor, *self._whole.of_slot(own_slot), self.base.weight.dtype)
            elif is_adapted and end > first and self._operands is not None:
                adapters = _HeadAdapters(
                    anchor=self._bank.anchor,
                    operands=self._operands,
                    ops=self._bank.ops,
                    schedule=_selected(schedule, slots, counts),
                    positions_S=tokens.loss_positions_S[first:end],
                    starts=dict(zip(slots, starts, strict=True)),
                )
            found.append((end - first, adapters))
            first = end
        return found

    def _kind(self, slot: int) -> tuple[bool, int | None]:
        """Return whether ``slot`` has low-rank matrices on the head, and the slot itself if it has its own head, else
        None."""
        return self._has_matrices(slot), slot if self._has_whole(slot) else None


@dataclass(slots=True, kw_only=True)
class _HeadAdapters:
    """The adapters on the output head for some trained tokens; implements
    :class:`alto.backbone.output_head.LogitAdapters`.

    Attributes:
        starts: Position of every slot's first token in the forward pass.
    """

    anchor: Tensor
    weight: Tensor | None = None
    operands: LoraOperands
    ops: ModuleType
    schedule: TokenSchedule
    positions_S: Tensor
    starts: dict[int, int]
    _parts: dict[tuple[int, int], TokenSchedule] = field(default_factory=dict, init=False)

    def inputs(self, hidden_SH: Tensor) -> Tensor:
        """Return the hidden states, with dropout for the jobs that use it.

        A token's mask depends on its position among all tokens of its job's batch, trained or not. This matches every
        other layer.
        """
        schedule = self.schedule
        slots = {slot for slot, key in zip(schedule.slots, schedule.dropout, strict=True) if key is not None}
        if not slots:
            return hidden_SH
        device = hidden_SH.device
        starts = upload([self.starts[slot] for slot in schedule.slots], torch.int64, device)
        starts_S = starts.repeat_interleave(schedule.lengths_of_segments(device), output_size=schedule.num_tokens)
        return dropped_inputs(hidden_SH, schedule, slots, self.operands.number, self.positions_S - starts_S)

    def shrink(self, x_SH: Tensor) -> Tensor:
        """Return the products with the ``A`` of every slot, ``[S, Q]``; columns past the ranks of a slot are
        undefined."""
        s_SQ: Tensor = self.ops.grouped_shrink(x_SH, self.operands, self._part(0, self.schedule.num_tokens))
        return s_SQ

    def expand(self, s_CQ: Tensor, part: slice, dtype: torch.dtype) -> Tensor:
        """Return the output of the adapters for the tokens ``part``, ``[C, V]``."""
        change_CV = s_CQ.new_empty(len(s_CQ), self.operands.out_features[0], dtype=dtype)
        self.ops.grouped_expand(s_CQ, self.operands, [change_CV], self._part(part.start, part.stop))
        return change_CV

    def backward(
        self, x_CH: Tensor, s_CQ: Tensor, dlogits_CV: Tensor, dloss_C: Tensor, part: slice, *, needs_input: bool
    ) -> Tensor | None:
        """Return the gradient with respect to ``x_CH``, or None if not needed; add the gradients of the adapters to the
        bank.

        The gradient with respect to a token's loss may be far below the range of 16-bit types, so it is multiplied in
        last.
        """
        schedule, operands = self._part(part.start, part.stop), self.operands
        dx_CH = torch.empty_like(x_CH) if needs_input else None
        ds_CQ = self.ops.grouped_backward_input([dlogits_CV], operands, dx_CH, schedule)
        dloss_C1 = dloss_C[:, None].to(ds_CQ.dtype)
        self.ops.grouped_backward_weight(x_CH, s_CQ * dloss_C1, [dlogits_CV], ds_CQ * dloss_C1, operands, schedule)
        return None if dx_CH is None else dx_CH.mul_(dloss_C[:, None].to(dx_CH.dtype))

    def _part(self, first: int, end: int) -> TokenSchedule:
        """Return the schedule of the tokens ``[first, end)`` only, without dropout, which is already applied to the
        inputs."""
        if (first, end) not in self._parts:
            counts = [max(0, min(segment.end, end) - max(segment.start, first)) for segment in self.schedule.segments]
            self._parts[first, end] = TokenSchedule.build(self.schedule.slots, counts, self.schedule.scales)
        return self._parts[first, end]


class _OwnHead:
    """A head that a job trains in full: :class:`alto.backbone.output_head.LogitAdapters` without matrices.

    Args:
        dtype: Dtype of the base model; the weight is rounded to it when used.
    """

    def __init__(self, anchor: Tensor, weight_VH: Tensor, gradient_VH: Tensor, dtype: torch.dtype) -> None:
        self.anchor = anchor
        self.weight: Tensor | None = weight_VH.to(dtype)
        self._gradient_VH = gradient_VH

    def inputs(self, hidden_SH: Tensor) -> Tensor:
        """Return the hidden states unchanged."""
        return hidden_SH

    def shrink(self, x_SH: Tensor) -> Tensor:
        """Return an empty tensor ``[S, 0]``."""
        return x_SH[:, :0]

    def expand(self, s_CQ: Tensor, part: slice, dtype: torch.dtype) -> None:
        """Do nothing, since there are no low-rank matrices."""

    def backward(
        self, x_CH: Tensor, s_CQ: Tensor, dlogits_CV: Tensor, dloss_C: Tensor, part: slice, *, needs_input: bool
    ) -> Tensor | None:
        """Add the gradient of the head to the bank, and return zeros if ``needs_input``.

        The loss head computes the gradient with respect to the hidden states.
        """
        dtype = self._gradient_VH.dtype
        self._gradient_VH.addmm_((dlogits_CV * dloss_C[:, None]).to(dtype).T, x_CH.to(dtype))
        return torch.zeros_like(x_CH) if needs_input else None


def _selected(schedule: TokenSchedule, slots: Sequence[int], counts: Sequence[int]) -> TokenSchedule:
    """Return the schedule of ``counts`` tokens of each of ``slots``, with their scales and dropout from
    ``schedule``."""
    known = dict(zip(schedule.slots, zip(schedule.scales, schedule.dropout, strict=True), strict=True))
    scales, dropout = zip(*(known[slot] for slot in slots), strict=True)
    return TokenSchedule.build(slots, counts, scales, dropout)


def _schedule_of_kept(schedule: TokenSchedule, x: Tensor) -> TokenSchedule:
    """Return the schedule of the positions ``[rows, kept, H]`` that each row of a forward pass passes to the head.

    Returns ``schedule`` itself if all positions are kept.

    Raises:
        UnsupportedModelError: The slots of the kept positions are unknown.
    """
    num_kept = x.shape[:-1].numel()
    if num_kept == schedule.num_tokens:
        return schedule
    length, rest = divmod(schedule.num_tokens, x.shape[0])
    if x.ndim != 3 or rest or any(count % length for count in schedule.lengths):
        raise UnsupportedModelError(
            f"target_modules: expected a model that runs its output head on all {schedule.num_tokens} tokens of a "
            f"forward pass, or on the same number of tokens of every row, found {num_kept} tokens; leave the output "
            "head out"
        )
    counts = [count // length * x.shape[1] for count in schedule.lengths]
    return TokenSchedule.build(schedule.slots, counts, schedule.scales)
