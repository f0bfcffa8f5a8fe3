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
    """Apply ``change`` to the output of the embedding layer in forward passes inside the context.

    If the model processes this output further, for example by a factor, it does so after the change, as with the hook
    of transformers' NEFTune.

    Args:
        backbone: The base model.
        change: Takes and returns ``[T, H]``, with the tokens in the order of the batch.
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
