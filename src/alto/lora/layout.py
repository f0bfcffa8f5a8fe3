"""The layout of an adapter in a row of the bank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from alto.kernels import VECTOR_SIZE

__all__ = ["AdapterShape", "BankLayout", "GroupPlace", "RowPlaces", "TargetModule"]

_ROW_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModule:
    """A linear module of the base model, or a parameter that holds a matrix for each of several experts.

    Attributes:
        name: Full name in the model.
        in_features: ``K``.
        out_features: ``N``.
        is_router: Whether it is the weight of a router, which no linear module holds.
        num_experts: ``E``, matrices of a parameter of experts, each of which has an ``A`` and a ``B`` of its own; None
            of a linear module.
    """

    name: str
    in_features: int
    out_features: int
    is_router: bool = False
    num_experts: int | None = None

    @property
    def num_matrices(self) -> int:
        """``E``, or 1."""
        return self.num_experts or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """Ranks and targets of one adapter.

    Attributes:
        rank: The largest rank of its modules.
        targets: Its modules, in the model's order.
        own_ranks: Rank of every target; empty where all have ``rank``.
        scale_ratios: Scale of every target's output over the scale of the job, which a token schedule holds; empty
            where all are 1.
    """

    rank: int
    targets: tuple[TargetModule, ...]
    own_ranks: tuple[int, ...] = ()
    scale_ratios: tuple[float, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of every target."""
        return self.own_ranks or (self.rank,) * len(self.targets)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Scale of every target over that of the job."""
        return self.scale_ratios or (1.0,) * len(self.targets)

    @property
    def num_parameters(self) -> int:
        return sum(
            rank * (module.in_features + module.out_features) * module.num_matrices
            for module, rank in zip(self.targets, self.ranks, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Offsets of one group's part of an adapter in its row.

    Attributes:
        ranks: Rank of every member; 0 where it is not targeted.
        ratios: Scale of every member over that of the job.
        a_start: Offset of the members' ``A`` side by side, ``[K, Q]``; of experts, those of all, ``[E, K, r]``.
        b_starts: Offset of every member's ``B``, ``[r, N]``; of experts, ``[E, r, N]``.
    """

    ranks: tuple[int, ...]
    ratios: tuple[float, ...]
    a_start: int
    b_starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlaces:
    """Offsets of an adapter in its row: all its ``A`` from the start, then all its ``B``.

    Attributes:
        groups: Its part in every group of the layout.
        a_end: Offset where its ``A`` end and its ``B`` begin.
        end: Its number of parameters.
    """

    groups: tuple[GroupPlace, ...]
    a_end: int
    end: int


@dataclass(frozen=True, kw_only=True)
class BankLayout:
    """The layout of a bank's rows. The offsets of an adapter in its row depend only on that adapter.

    Attributes:
        modules: Every module that at least one job targets, in the model's order.
        max_rank: ``R``, the largest rank a slot can hold.
        rank_step: A common divisor of all ranks that slots may hold; see
            :attr:`alto.kernels.LoraOperands.alignment`. Does not change the offsets of an adapter.
        shared_inputs: Names of modules of the model that read the same input, of which ``modules`` may hold a part;
            see :func:`alto.lora.shared_inputs.find_shared_inputs`.
    """

    modules: tuple[TargetModule, ...]
    max_rank: int
    rank_step: int = VECTOR_SIZE
    shared_inputs: tuple[tuple[str, ...], ...] = ()

    @property
    def row_size(self) -> int:
        """``P``, parameters of the largest adapter, rounded up so that every row begins where vectors may."""
        largest = AdapterShape(rank=self.max_rank, targets=self.modules).num_parameters
        return -(-largest // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    @cached_property
    def groups(self) -> tuple[tuple[TargetModule, ...], ...]:
        """The modules by input, in the order of their first members."""
        leaders = {name: names[0] for names in self.shared_inputs for name in names}
        groups: dict[str, list[TargetModule]] = {}
        for module in self.modules:
            groups.setdefault(leaders.get(module.name, module.name), []).append(module)
        return tuple(map(tuple, groups.values()))

    def places(self, shape: AdapterShape) -> RowPlaces:
        """Offsets of an adapter of ``shape`` in its row."""
        rank_of = dict(zip(shape.targets, shape.ranks, strict=True))
        ratio_of = dict(zip(shape.targets, shape.ratios, strict=True))
        assert max(shape.ranks, default=0) <= self.max_rank
        assert rank_of.keys() <= set(self.modules)
        ranks = [tuple(rank_of.get(module, 0) for module in group) for group in self.groups]
        ratios = [tuple(ratio_of.get(module, 1.0) for module in group) for group in self.groups]
        a_starts, start = [], 0
        for group, of_group in zip(self.groups, ranks, strict=True):
            a_starts.append(start)
            start += group[0].num_matrices * group[0].in_features * sum(of_group)
        a_end, b_starts = start, []
        for group, of_group in zip(self.groups, ranks, strict=True):
            starts = []
            for module, rank in zip(group, of_group, strict=True):
                starts.append(start)
                start += module.num_matrices * rank * module.out_features
            b_starts.append(tuple(starts))
        places = tuple(
            GroupPlace(ranks=of_group, ratios=scaled, a_start=a_start, b_starts=starts)
            for of_group, scaled, a_start, starts in zip(ranks, ratios, a_starts, b_starts, strict=True)
        )
        return RowPlaces(groups=places, a_end=a_end, end=start)
