"""The weight of a wrapped module, for models that read the weight instead of calling the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.errors import UnsupportedModelError

__all__ = ["AdaptedWeight", "Product"]

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function of tokens ``[…, K]``, a weight ``[N, K]`` and a bias ``[N]`` or None that returns ``[…, N]``."""

_CASTS = {Tensor.to, Tensor.type, Tensor.float, Tensor.detach, Tensor.contiguous}


class AdaptedWeight(Tensor):
    """A weight ``[N, K]`` or bias ``[N]`` that can be cast and whose shape and dtype can be read.

    Attributes:
        product: Computes ``torch.nn.functional.linear`` with the weight, adapters included; None if only the module
            itself applies the adapters.
        owner: Name of its module, for error messages.
    """

    product: Product | None
    owner: str

    @classmethod
    def of(cls, weight_NK: Tensor, owner: str, product: Product | None = None) -> AdaptedWeight:
        """Return a view of ``weight_NK``."""
        adapted = weight_NK.detach().as_subclass(cls)
        adapted.owner, adapted.product = owner, product
        return adapted

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, with the adapters if it is a linear product.

        Raises:
            UnsupportedModelError: The result would leave out the adapters.
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
