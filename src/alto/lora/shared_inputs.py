"""Detection of linear modules that read the same input, by observing a forward pass instead of relying on names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel

from alto.lora.targets import linear_bases

__all__ = ["find_shared_inputs"]


def find_shared_inputs(model: PreTrainedModel, forward: Callable[[], object]) -> tuple[tuple[str, ...], ...]:
    """Return groups of names of modules that received the same tensor object, each in the model's order.

    Modules that share their input with no other module are left out.

    Args:
        forward: Runs a forward pass of ``model``, outside of any training pass.
    """
    readers: dict[int, list[str]] = {}
    inputs: list[Tensor] = []  # kept alive, so that no two tensors get the same id

    def watch(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])
        names = readers.setdefault(id(args[0]), [])
        if name not in names:
            names.append(name)

    bases = linear_bases(model)
    hooks = [base.register_forward_pre_hook(partial(watch, name)) for name, base in bases.items()]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    order = {name: number for number, name in enumerate(bases)}
    shared = (tuple(sorted(names, key=order.__getitem__)) for names in readers.values() if len(names) > 1)
    return tuple(sorted(shared, key=lambda names: order[names[0]]))
