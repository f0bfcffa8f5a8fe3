"""Which linear modules of a model adapters may sit on, and where each lies in a row of the bank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from alto.errors import TargetModuleError

__all__ = ["BankLayout", "TargetModule", "find_targets", "linear_modules"]

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModule:
    """A linear module of the base model: full name, in-features ``K``, out-features ``N``."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BankLayout:
    """Where each module's ``A`` (``[K, R]``) and ``B`` (``[R, N]``) lie in a row of the bank.

    A row holds the modules end to end in the model's order, ``A`` before ``B``.

    Attributes:
        modules: Every module that at least one job targets.
        max_rank: ``R``, the largest rank a slot can hold.
    """

    modules: tuple[TargetModule, ...]
    max_rank: int

    @property
    def row_size(self) -> int:
        """``P``, parameters of a slot."""
        return sum(self.max_rank * (module.in_features + module.out_features) for module in self.modules)

    def offsets(self) -> list[tuple[int, int]]:
        """Start of ``A`` and of ``B`` of every module in a row."""
        result, start = [], 0
        for module in self.modules:
            b_start = start + module.in_features * self.max_rank
            result.append((start, b_start))
            start = b_start + self.max_rank * module.out_features
        return result


def linear_modules(model: PreTrainedModel) -> tuple[TargetModule, ...]:
    """All linear modules of a causal LM but its output head, in the model's order (PEFT's ``all-linear``)."""
    head = model.get_output_embeddings()
    return tuple(
        TargetModule(name=name, in_features=module.in_features, out_features=module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    )


def find_targets(
    modules: Sequence[TargetModule], target_modules: str | Sequence[str], rank: int
) -> tuple[TargetModule, ...]:
    """The modules that ``target_modules`` means.

    Args:
        modules: All candidates, from :func:`linear_modules`.
        target_modules: ``"all-linear"``, or module names: full, or an ending such as ``q_proj`` (PEFT's rule).
        rank: Rank the adapter is to have.

    Raises:
        TargetModuleError: The model has no linear modules, a name matches nothing, or the rank exceeds the smaller side
            of a matched module.
    """
    if not modules:
        raise TargetModuleError(
            "target_modules: expected a base model built of torch.nn.Linear modules, found none besides its output "
            "head; use another base model"
        )
    names = (target_modules,) if isinstance(target_modules, str) else tuple(target_modules)
    if names == (ALL_LINEAR,):
        found = tuple(modules)
    else:
        for name in names:
            if not any(_matches(module, name) for module in modules):
                leaves = sorted({module.name.rsplit(".", 1)[-1] for module in modules})
                raise TargetModuleError(
                    f"target_modules: expected names of linear modules of the model, found {name!r}; "
                    f"the model has {', '.join(leaves)} (or write {ALL_LINEAR!r})"
                )
        found = tuple(module for module in modules if any(_matches(module, name) for name in names))
    for module in found:
        limit = min(module.in_features, module.out_features)
        if rank > limit:
            raise TargetModuleError(
                f"r: expected at most {limit}, the smaller side of {module.name} "
                f"({module.in_features} × {module.out_features}), found {rank}; lower r or leave the module out"
            )
    return found


def _matches(module: TargetModule, name: str) -> bool:
    return module.name == name or module.name.endswith("." + name)
