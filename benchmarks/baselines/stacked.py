"""Common parts of the batched baselines: adapters of many jobs on one frozen base, stacked module by module.

``loop``, ``lorafusion`` and ``grouped_mm`` differ in how they multiply (``Products``). All other parts favour them
equally: ALTO's padding-free backbone and loss head, one autograd function per layer that keeps no copies and writes
gradients in place, adapters and optimizer state in the model's own dtype, and one fused AdamW.

Shapes: ``T`` tokens, ``K`` in-features, ``N`` out-features, ``Q`` rows of a stack: job after job, its ``A`` as ``[r,
K]`` and its ``B`` as ``[r, N]``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from alto.lora import AdapterWeights

__all__ = ["AddedProducts", "AfterBase", "BaseLayer", "JobTokens", "Products", "Stack", "StackedAdapters", "share"]

MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTokens:
    """The tokens of the jobs in a pass, job after job in ascending order; ``scales`` is ``lora_alpha / r`` of each
    job."""

    jobs: tuple[int, ...]
    lengths: tuple[int, ...]
    scales: tuple[float, ...]


class Stack:
    """The adapters of one linear module, and their gradients.

    Attributes:
        a_QK, b_QN, da_QK, db_QN: Weights and gradients of all jobs.
        rows: Each job's own rows.
        num_jobs: Number of jobs.
    """

    def __init__(self, weight_NK: Tensor, ranks: Sequence[int], rows_per_job: Sequence[int]) -> None:
        starts = [0, *itertools.accumulate(rows_per_job)]
        self.a_QK = weight_NK.new_zeros(starts[-1], weight_NK.shape[1])
        self.b_QN = weight_NK.new_zeros(starts[-1], weight_NK.shape[0])
        self.da_QK, self.db_QN = torch.zeros_like(self.a_QK), torch.zeros_like(self.b_QN)
        self.rows = tuple(slice(start, start + rank) for start, rank in zip(starts, ranks, strict=False))
        self.num_jobs = len(ranks)


def share(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model's modules on the same weights."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


class BaseLayer(NamedTuple):
    """The frozen weights of a linear module, ``[N, K]`` and ``[N]``."""

    weight_NK: Tensor
    bias_N: Tensor | None


class Products(Protocol):
    """One way to multiply a layer and its adapters: a module with these functions, or an ``AfterBase`` around one."""

    def rows_per_job(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return the rows of the stack for each job, at least its rank."""

    def prepare(self, tokens: JobTokens, stack: Stack) -> Any:
        """Return the values that every layer of a pass reads; ``stack`` is any of the stacks."""

    def forward(self, x_TK: Tensor, base: BaseLayer, stack: Stack, prepared: Any) -> tuple[Tensor, Any]:
        """Return ``y[i] = x[i] Wᵀ + bias + scale_i · x[i] A_iᵀ B_i``, and the tensors that ``backward`` needs besides
        its arguments."""

    def backward(
        self, dy_TN: Tensor, x_TK: Tensor, saved: Any, base: BaseLayer, stack: Stack, prepared: Any, *, needs_dx: bool
    ) -> Tensor | None:
        """Return ``dx`` if it is needed; add to the gradients of ``stack`` in place."""


class AddedProducts(Protocol):
    """One way to add the adapters to the output of the frozen GEMM: a module with these functions."""

    def rows_per_job(self, ranks: Sequence[int]) -> Sequence[int]:
        """See :meth:`Products.rows_per_job`."""

    def prepare(self, tokens: JobTokens, stack: Stack) -> Any:
        """See :meth:`Products.prepare`."""

    def add(self, x_TK: Tensor, y_TN: Tensor, stack: Stack, prepared: Any) -> Any:
        """Add ``y[i] += scale_i · x[i] A_iᵀ B_i`` in place, and return the tensors that ``add_backward`` needs."""

    def add_backward(
        self, x_TK: Tensor, saved: Any, dy_TN: Tensor, dx_TK: Tensor | None, stack: Stack, prepared: Any
    ) -> None:
        """Add to ``dx_TK`` (if it is given) and to the gradients of ``stack``, in place."""


class AfterBase:
    """``Products`` in which PyTorch does the frozen GEMMs, and ``added`` does everything after them."""

    def __init__(self, added: AddedProducts) -> None:
        self._added = added
        self.rows_per_job, self.prepare = added.rows_per_job, added.prepare

    def forward(self, x_TK: Tensor, base: BaseLayer, stack: Stack, prepared: Any) -> tuple[Tensor, Any]:
        y_TN = F.linear(x_TK, base.weight_NK, base.bias_N)
        return y_TN, self._added.add(x_TK, y_TN, stack, prepared)

    def backward(
        self, dy_TN: Tensor, x_TK: Tensor, saved: Any, base: BaseLayer, stack: Stack, prepared: Any, *, needs_dx: bool
    ) -> Tensor | None:
        dx_TK = dy_TN @ base.weight_NK if needs_dx else None
        self._added.add_backward(x_TK, saved, dy_TN, dx_TK, stack, prepared)
        return dx_TK


class StackedAdapters:
    """Adapters of many jobs on the linear modules ``names`` of ``model``.

    Args:
        names: The modules to wrap: all linear modules except the head.
        learning_rates: Learning rate of every job.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        ranks: Sequence[int],
        learning_rates: Sequence[float],
        products: Products,
    ) -> None:
        self._products = products
        self._prepared: Any = None
        self.anchor = torch.zeros((), device=next(model.parameters()).device, requires_grad=True)
        self.stacks: dict[str, Stack] = {}
        for name in names:
            base = model.get_submodule(name)
            assert isinstance(base, nn.Linear)
            stack = self.stacks[name] = Stack(base.weight, ranks, products.rows_per_job(ranks))
            model.set_submodule(name, _StackedLinear(base, stack, self))
        self._parameters = [self._job_parameters(job) for job in range(len(ranks))]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": parameters, "lr": rate}
                for parameters, rate in zip(self._parameters, learning_rates, strict=True)
            ],
            weight_decay=0.0,
            fused=True,
        )

    @contextmanager
    def use(self, tokens: JobTokens) -> Iterator[None]:
        """Run the enclosed forward and backward pass on ``tokens``."""
        self._prepared = self._products.prepare(tokens, next(iter(self.stacks.values())))
        try:
            yield
        finally:
            self._prepared = None

    def update(self) -> None:
        """Clip every job's gradients, take a step, and drop the gradients."""
        for parameters in self._parameters:
            torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        self.zero_grads()

    def zero_grads(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def load(self, job: int, adapter: AdapterWeights) -> None:
        """Put weights into the stacks."""
        for name, (a_KR, b_RN) in adapter.items():
            stack = self.stacks[name]
            stack.a_QK[stack.rows[job]] = a_KR.T.to(stack.a_QK)
            stack.b_QN[stack.rows[job]] = b_RN.to(stack.b_QN)

    def __call__(self, x_TK: Tensor, base: BaseLayer, stack: Stack) -> Tensor:
        result: Tensor = _StackedLora.apply(x_TK, self.anchor, base, stack, self._products, self._prepared)
        return result

    def _job_parameters(self, job: int) -> list[Tensor]:
        parameters = []
        for stack in self.stacks.values():
            rows = stack.rows[job]
            for weights, gradients in ((stack.a_QK, stack.da_QK), (stack.b_QN, stack.db_QN)):
                parameter = weights[rows]
                parameter.grad = gradients[rows]
                parameters.append(parameter)
        return parameters


class _StackedLinear(nn.Module):
    def __init__(self, base: nn.Linear, stack: Stack, adapters: StackedAdapters) -> None:
        super().__init__()
        self._base, self._stack, self._adapters = base, stack, adapters

    def forward(self, x: Tensor) -> Tensor:
        base = BaseLayer(self._base.weight, self._base.bias)
        y_TN = self._adapters(x.reshape(-1, x.shape[-1]), base, self._stack)
        return y_TN.view(*x.shape[:-1], y_TN.shape[-1])


class _StackedLora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, anchor: Tensor, base: BaseLayer, stack: Stack, products: Products, prepared: Any
    ) -> Tensor:
        y_TN, ctx.saved = products.forward(x_TK, base, stack, prepared)
        ctx.save_for_backward(x_TK)
        ctx.base, ctx.stack, ctx.products, ctx.prepared = base, stack, products, prepared
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        (x_TK,) = ctx.saved_tensors
        # After a sum, gradients are views with a stride of zero, which not every GEMM accepts.
        dx_TK = ctx.products.backward(
            dy_TN.contiguous(), x_TK, ctx.saved, ctx.base, ctx.stack, ctx.prepared, needs_dx=ctx.needs_input_grad[0]
        )
        return dx_TK, None, None, None, None, None
