"""The weight of a wrapped module, for a model that reads it instead of calling the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.errors import UnsupportedModelError

__all__ = ["AdaptedWeight", "Product"]

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Of tokens ``[…, K]``, a weight ``[N, K]`` and a bias ``[N]`` or None: ``[…, N]``."""

_CASTS = {Tensor.to, Tensor.type, Tensor.float, Tensor.detach, Tensor.contiguous}


class AdaptedWeight(Tensor):
    """A weight ``[N, K]``, or a bias ``[N]``, whose size and precision can be read, and which can be cast.

    Attributes:
        product: Computes ``torch.nn.functional.linear`` with it, adapters included; None where only the module itself
            applies them.
        owner: Name of its module, for messages.
    """

    product: Product | None
    owner: str

    @classmethod
    def of(cls, weight_NK: Tensor, owner: str, product: Product | None = None) -> AdaptedWeight:
        """A view of ``weight_NK``."""
        adapted = weight_NK.detach().as_subclass(cls)
        adapted.owner, adapted.product = owner, product
        return adapted

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises:
        UnsupportedModelError: It is computed with in a way that would leave the adapters out.
        """
        kwargs = kwargs or {}
        adapted = next(value for value in (*args, *kwargs.values()) if isinstance(value, cls))
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and adapted.product is not None:
                x, weight, bias = (*args, *kwargs.values(), None)[:3]
                return adapted.product(x, weight.as_subclass(Tensor), bias)
            if func in _CASTS:
                return cls.of(func(*args, **kwargs), adapted.owner, adapted.product)
            result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            raise UnsupportedModelError(
                f"expected a model that uses the weight of {adapted.owner} only to multiply tokens with it, in its "
                "module, found one that reads it elsewhere, where no adapter would apply; leave the module out of "
                "target_modules and target_parameters"
            )
        return result
