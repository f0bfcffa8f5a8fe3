"""Computes the bytes on the wire of one step of all adapters, for each way, from the shape of the base alone. Pure.

The totals are over all ranks, with bandwidth-optimal collectives: to gather ``S`` bytes on ``n`` ranks, or to reduce
and scatter them, moves ``S (n - 1)`` bytes, and an all-reduce moves twice as many. The benchmark's gate compares these
laws with bytes that are counted where PyTorch starts the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["VOLUMES", "Step", "Volume"]

_FLOAT32_BYTES = 4
_FLOAT64_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of all adapters on a Llama.

    Attributes:
        num_jobs: Number of adapters, each with ``batch_size`` rows of ``length`` tokens.
        adapter_rank: Rank of each adapter, on all linear layers except the output head.
        number_bytes: Bytes of a number of the base, an adapter or an activation.
    """

    num_ranks: int
    num_jobs: int
    batch_size: int
    length: int
    adapter_rank: int
    number_bytes: int
    hidden: int
    intermediate: int
    layers: int
    key_values: int
    vocabulary: int

    @classmethod
    def of(cls, shape: Mapping[str, Any], **others: int) -> Step:
        """Return the step on a base with these keys of a ``LlamaConfig``."""
        head = shape["hidden_size"] // shape["num_attention_heads"]
        return cls(
            hidden=shape["hidden_size"],
            intermediate=shape["intermediate_size"],
            layers=shape["num_hidden_layers"],
            key_values=head * shape["num_key_value_heads"],
            vocabulary=shape["vocab_size"],
            **others,
        )

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """In- and out-features of q, k, v, o, gate, up and down."""
        h, i, kv = self.hidden, self.intermediate, self.key_values
        return ((h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h))

    @property
    def layer_numbers(self) -> int:
        """Numbers of the base in a layer: linear layers and two norms."""
        return sum(k * n for k, n in self.linears) + 2 * self.hidden

    @property
    def adapter_numbers(self) -> int:
        """Numbers of an adapter in a layer."""
        return sum(self.adapter_rank * (k + n) for k, n in self.linears)

    @property
    def sharded_adapter_numbers(self) -> int:
        """The same as FSDP shards them by rows: it pads ``A`` until all ranks have equally many rows."""
        rows = -(-self.adapter_rank // self.num_ranks) * self.num_ranks
        return sum(rows * k + self.adapter_rank * n for k, n in self.linears)

    @property
    def job_tokens(self) -> int:
        return self.batch_size * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Bytes that all ranks together send in a step.

    Attributes:
        base: Parameters of the base.
        adapters: Parameters and gradients of adapters.
        activations: Hidden states, their gradients, and other tensors with one entry per token.
        scalars: Norms and losses.
    """

    base: int = 0
    adapters: int = 0
    activations: int = 0
    scalars: int = 0

    @property
    def total(self) -> int:
        return self.base + self.adapters + self.activations + self.scalars


def fsdp(step: Step) -> Volume:
    """Return the bytes of ``fsdp``, for every adapter: all layers are gathered for the forward pass, and all but the
    last one again for the backward pass, with the adapter's parameters in them; embeddings, last norm and head are
    gathered once; the adapter's gradients are scattered."""
    per_job = (step.num_ranks - 1) * step.num_jobs
    ends = 2 * step.vocabulary * step.hidden + step.hidden
    gathers = 2 * step.layers - 1
    return Volume(
        base=per_job * (gathers * step.layer_numbers + ends) * step.number_bytes,
        adapters=per_job * (gathers + step.layers) * step.sharded_adapter_numbers * step.number_bytes,
        scalars=_norms(step),
    )


def tp(step: Step) -> Volume:
    """Return the bytes of ``tp``, for every adapter: all-reduces of hidden states, two per layer in the forward pass
    and two in the backward pass, except for the inputs of the first layer, and one before the head; of the inner states
    of the adapters of o and down; of the gradients of whole ``A``; and the split loss."""
    per_job = 2 * (step.num_ranks - 1) * step.num_jobs
    hidden_states = 4 * step.layers
    inner = 2 * step.layers * step.adapter_rank
    loss = 3 * step.job_tokens * _FLOAT32_BYTES
    whole_a = step.layers * 5 * step.adapter_rank * step.hidden
    return Volume(
        adapters=per_job * whole_a * step.number_bytes,
        activations=per_job * (step.job_tokens * (hidden_states * step.hidden + inner) * step.number_bytes + loss),
        scalars=_norms(step),
    )


def pp(step: Step) -> Volume:
    """Return the bytes of ``pp``, for every row: hidden states go to the next stage, and their gradients come back."""
    crossings = 2 * (step.num_ranks - 1) * step.num_jobs
    return Volume(
        activations=crossings * step.job_tokens * step.hidden * step.number_bytes,
        scalars=_norms(step),
    )


def ap(step: Step) -> Volume:
    """Return the bytes of ``ap``, once for all adapters: every layer is gathered for the forward and for the backward
    pass; embeddings, last norm and head are gathered once."""
    ends = 2 * step.vocabulary * step.hidden + step.hidden
    return Volume(
        base=(step.num_ranks - 1) * (2 * step.layers * step.layer_numbers + ends) * step.number_bytes,
        scalars=2 * (step.num_ranks - 1) * step.num_jobs * _FLOAT64_BYTES,
    )


VOLUMES: Mapping[str, Callable[[Step], Volume]] = {"fsdp": fsdp, "tp": tp, "pp": pp, "ap": ap}


def _norms(step: Step) -> int:
    """Return the bytes for the norm of every adapter's gradients, whose parts are on all ranks."""
    return 2 * (step.num_ranks - 1) * step.num_jobs * _FLOAT32_BYTES
