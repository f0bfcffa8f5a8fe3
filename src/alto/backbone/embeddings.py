"""Changes the token embeddings of forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from alto.backbone.backbone import Backbone

__all__ = ["changed_embeddings"]


@contextmanager
def changed_embeddings(backbone: Backbone, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While the context lasts, what the embedding layer gives for the tokens of a forward pass, ``[T, H]``, is replaced
    by ``change`` of it. What a model makes of it afterwards, such as a factor, comes after the change, as it does with
    the hook of transformers' NEFTune.

    Args:
        backbone: The base model.
        change: Takes and gives ``[T, H]``, tokens in the order of the batch.
    """

    def hook(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        rows, embedded_PH = backbone.current_rows(), output.flatten(0, -2)
        if rows is None:
            return change(embedded_PH).view_as(output)
        return rows.spread(change(rows.collect(embedded_PH))).view_as(output)

    handle = backbone.model.get_input_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
