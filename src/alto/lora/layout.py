"""The layout of an adapter in a row of the bank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from alto.kernels import VECTOR_SIZE, RowParts

ROW_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModule:
    """A linear module of the base model, or a parameter that stacks the matrices of several experts.

    Attributes:
        is_router: Whether it is the weight of a router that is not a linear layer.
        is_head: Whether it is the model's output head. The head reads only positions that predict a trained token.
        is_embedding: Whether it is the token embeddings, whose ``A`` has one row per token.
        num_experts: ``E``, number of matrices in a parameter of experts, each with a separate ``A`` and ``B``; None
            for a linear module.
    """

    name: str
    in_features: int
    out_features: int
    is_router: bool = False
    is_head: bool = False
    is_embedding: bool = False
    num_experts: int | None = None

    @property
    def is_in_body(self) -> bool:
        """Whether it is neither the output head nor the embeddings."""
        return not (self.is_head or self.is_embedding)

    @property
    def num_matrices(self) -> int:
        """``E`` for stacked experts, 1 for all other modules."""
        return self.num_experts or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraTensor:
    """A trained tensor of an adapter in addition to its low-rank matrices, such as a bias.

    It is contiguous in the row of the bank, after all matrices. The clipping norm includes it, and AdamW treats it as
    Hugging Face's trainers and PEFT do: with LoRA+, a vector uses the learning rate of ``B``, and a tensor with more
    dimensions uses the learning rate of ``A`` (PEFT 0.21, ``create_loraplus_optimizer``).

    Attributes:
        name: Full name of the base model's parameter that it replaces, such as ``<module>.bias``; or of a parameter
            that PEFT adds to a module, ``<module>.lora_magnitude_vector``.
        has_decay: Whether weight decay applies; it does not for biases and norms (transformers 5.23,
            ``Trainer.get_decay_parameter_names``). Only vectors may be without weight decay.
    """

    name: str
    shape: tuple[int, ...]
    has_decay: bool = True

    def __post_init__(self) -> None:
        assert self.has_decay or self.is_vector, f"{self.name}: only vectors may be without weight decay"

    @property
    def is_vector(self) -> bool:
        return len(self.shape) == 1

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """Ranks, targets and extra tensors of one adapter.

    Attributes:
        rank: The largest rank of its modules.
        targets: Its modules, in the model's order.
        own_ranks: Rank of every target; empty if all have ``rank``.
        scale_ratios: Scale of every target's output divided by the job's scale, which the token schedule contains;
            empty if all are 1.
        extras: Its extra tensors, in the model's order.
    """

    rank: int
    targets: tuple[TargetModule, ...]
    own_ranks: tuple[int, ...] = ()
    scale_ratios: tuple[float, ...] = ()
    extras: tuple[ExtraTensor, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of every target."""
        return self.own_ranks or (self.rank,) * len(self.targets)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Scale of every target divided by the scale of the job."""
        return self.scale_ratios or (1.0,) * len(self.targets)

    @property
    def num_parameters(self) -> int:
        matrices = sum(
            rank * (module.in_features + module.out_features) * module.num_matrices
            for module, rank in zip(self.targets, self.ranks, strict=True)
        )
        return matrices + sum(extra.num_parameters for extra in self.extras)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """The offsets of the parameters for one group of modules in an adapter's row of the bank.

    Attributes:
        ranks: Rank of every member; 0 if it is not targeted.
        ratios: Scale of every member divided by the scale of the job.
        a_start: Offset of the members' ``A`` side by side, ``[K, Q]``; for experts, of all their ``A``, ``[E, K, r]``.
        b_starts: Offset of every member's ``B``, ``[r, N]``; for experts, ``[E, r, N]``.
    """

    ranks: tuple[int, ...]
    ratios: tuple[float, ...]
    a_start: int
    b_starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlaces:
    """Offsets of an adapter in its row: first every ``A``, then every ``B``, then the extra tensors.

    Attributes:
        groups: Offsets of the adapter's part in every group of the layout.
        parts: Ends of the parts that the optimizer treats differently.
        extras: Extra tensors with their offsets: vectors with weight decay, vectors without, then all others.
    """

    groups: tuple[GroupPlace, ...]
    parts: RowParts
    extras: tuple[tuple[ExtraTensor, int], ...]

    @property
    def end(self) -> int:
        """Number of parameters of the adapter."""
        return self.parts.end


@dataclass(frozen=True, kw_only=True)
class BankLayout:
    """The layout of a bank's rows. The offsets of an adapter in its row depend only on that adapter.

    Attributes:
        modules: Every module that at least one job targets, in the model's order.
        max_rank: ``R``, the largest rank that fits into a slot.
        rank_step: A common divisor of all ranks that slots may contain; see
            :attr:`alto.kernels.LoraOperands.alignment`. It does not change the offsets of an adapter.
        shared_inputs: Names of the model's modules that read the same input; ``modules`` may include only some of them.
            See :func:`alto.lora.targets.find_shared_inputs`.
    """

    modules: tuple[TargetModule, ...]
    max_rank: int
    rank_step: int = VECTOR_SIZE
    shared_inputs: tuple[tuple[str, ...], ...] = ()
    extras: tuple[ExtraTensor, ...] = ()

    @property
    def row_size(self) -> int:
        """``P``, parameters of the largest adapter, rounded up so that every row starts at an aligned offset."""
        largest = AdapterShape(rank=self.max_rank, targets=self.modules, extras=self.extras).num_parameters
        return -(-largest // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @cached_property
    def groups(self) -> tuple[tuple[TargetModule, ...], ...]:
        """The modules grouped by input, in the order of each group's first member."""
        leaders = {name: names[0] for names in self.shared_inputs for name in names}
        groups: dict[str, list[TargetModule]] = {}
        for module in self.modules:
            groups.setdefault(leaders.get(module.name, module.name), []).append(module)
        return tuple(map(tuple, groups.values()))

    @staticmethod
    def extras_of(shapes: Iterable[AdapterShape]) -> tuple[ExtraTensor, ...]:
        """Return the extra tensors of all ``shapes`` without duplicates, sorted by name. Classification heads of
        different sizes share one name."""
        extras = {extra for shape in shapes for extra in shape.extras}
        return tuple(sorted(extras, key=lambda extra: (extra.name, extra.shape)))

    def places(self, shape: AdapterShape) -> RowPlaces:
        """Return the offsets of an adapter of ``shape`` in its row."""
        rank_of = dict(zip(shape.targets, shape.ranks, strict=True))
        ratio_of = dict(zip(shape.targets, shape.ratios, strict=True))
        assert max(shape.ranks, default=0) <= self.max_rank
        assert rank_of.keys() <= set(self.modules)
        assert set(shape.extras) <= set(self.extras)
        ranks = [tuple(rank_of.get(module, 0) for module in group) for group in self.groups]
        ratios = [tuple(ratio_of.get(module, 1.0) for module in group) for group in self.groups]
        # Sort groups by the first member that this adapter targets; earlier members may be targets of other adapters.
        numbers = {module: number for number, module in enumerate(self.modules) if rank_of.get(module)}
        firsts = [min(numbers.get(module, len(self.modules)) for module in group) for group in self.groups]
        order = sorted(range(len(firsts)), key=firsts.__getitem__)
        a_starts, start = [0] * len(order), 0
        b_starts: list[tuple[int, ...]] = [()] * len(order)
        for index in order:
            a_starts[index] = start
            start += self.groups[index][0].num_matrices * self.groups[index][0].in_features * sum(ranks[index])
        a_end = start
        for index in order:
            starts = []
            for module, rank in zip(self.groups[index], ranks[index], strict=True):
                starts.append(start)
                start += module.num_matrices * rank * module.out_features
            b_starts[index] = tuple(starts)
        places = tuple(
            GroupPlace(ranks=of_group, ratios=scaled, a_start=a_start, b_starts=starts)
            for of_group, scaled, a_start, starts in zip(ranks, ratios, a_starts, b_starts, strict=True)
        )
        return _with_extras(places, shape.extras, a_end=a_end, b_end=start)


def _with_extras(
    groups: tuple[GroupPlace, ...], extras: tuple[ExtraTensor, ...], *, a_end: int, b_end: int
) -> RowPlaces:
    """Return the offsets of the matrices, then of the extra tensors in the order that :class:`RowPlaces` defines."""
    kinds = (
        [extra for extra in extras if extra.is_vector and extra.has_decay],
        [extra for extra in extras if not extra.has_decay],
        [extra for extra in extras if not extra.is_vector],
    )
    placed, ends, start = [], [], b_end
    for kind in kinds:
        for extra in kind:
            placed.append((extra, start))
            start += extra.num_parameters
        ends.append(start)
    return RowPlaces(groups=groups, parts=RowParts(a_end, *ends), extras=tuple(placed))


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights(Mapping[str, tuple[Tensor, Tensor]]):
    """One adapter, on the CPU. As a mapping, it gives the low-rank matrices by module name.

    Attributes:
        matrices: ``A`` as ``[K, r]`` and ``B`` as ``[r, N]`` by module name; for ``E`` experts in one parameter
            ``[E, K, r]`` and ``[E, r, N]``.
        extras: Its extra tensors by name; see :class:`alto.lora.layout.ExtraTensor`.
    """

    matrices: Mapping[str, tuple[Tensor, Tensor]]
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def experts(self) -> list[str]:
        """Names of the parameters of stacked experts."""
        return [name for name, (a, _) in self.matrices.items() if a.ndim == 3]

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        return self.matrices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.matrices)

    def __len__(self) -> int:
        return len(self.matrices)
