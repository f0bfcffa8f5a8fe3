"""The output head of a causal LM: computes logits and token losses from the hidden states that enter it.

Logits are ``softcap(scale · (hidden @ weightᵀ + bias))``; the output of adapters on the head is added to ``bias``. If a
model has layers between its body and its head (the transform of BERT's family, the width scaling of MiniCPM3), the
hidden states are the output of these layers.

Shapes: ``S`` trained tokens, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from alto.backbone.sharding import find_body, is_sharded
from alto.errors import UnsupportedModelError
from alto.kernels import HeadTokens

# Computes the next-token loss chunk by chunk: the logits of all tokens are never in memory together, and the frozen
# head gets no gradient.
#
# Shapes: ``S`` trained tokens, ``C`` tokens of a chunk, ``H`` hidden size, ``V`` vocabulary, ``Q`` ranks of adapters.

CrossEntropy = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The signature of a loss kernel; see :func:`alto.kernels.layer_reference.cross_entropy`."""

_CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Number of logits in a chunk: 8 MiB of float32 stay in a CPU's cache; 256 MiB are enough to keep a GPU busy."""

_MIN_CHUNK_TOKENS = {"cpu": 128, "cuda": 256}
"""Smallest number of tokens in a chunk, which matters for large vocabularies: with fewer tokens, most of the time would
go into reading the head's weight twice."""


class LogitAdapters(Protocol):
    """The adapters of ``S`` tokens on the output head; their output is added to the head's before scale and cap.

    Attributes:
        anchor: A tensor that requires grad, so that autograd reaches the adapters even if the hidden states need no
            gradient.
        weight: Weight ``[V, H]`` of a trained head that replaces the frozen head; None for the frozen head.
    """

    @property
    def anchor(self) -> Tensor: ...

    @property
    def weight(self) -> Tensor | None: ...

    def inputs(self, hidden_SH: Tensor) -> Tensor:
        """Return the inputs of the adapters, ``[S, H]``: the hidden states, with dropout for jobs that use it."""
        ...

    def shrink(self, x_SH: Tensor) -> Tensor:
        """Return the products of each token's input with its job's ``A``, ``[S, Q]``."""
        ...

    def expand(self, s_CQ: Tensor, part: slice, dtype: torch.dtype) -> Tensor | None:
        """Return the output of the adapters for the tokens ``part``, ``[C, V]``, to which the caller adds the head's
        output; None if there is no such output."""
        ...

    def backward(
        self, x_CH: Tensor, s_CQ: Tensor, dlogits_CV: Tensor, dloss_C: Tensor, part: slice, *, needs_input: bool
    ) -> Tensor | None:
        """Return the gradient with respect to ``x_CH``, and add the gradients of the adapters to the bank.

        Args:
            x_CH: Inputs of the tokens ``part``.
            s_CQ: Result of :meth:`shrink` for the tokens ``part``.
            dlogits_CV: Gradient of every token's loss with respect to its logits before scale and cap.
            dloss_C: Gradient with respect to every token's loss.
            needs_input: Whether the gradient with respect to ``x_CH`` is needed; otherwise None is returned.
        """
        ...


class _ChunkedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_S: Tensor,
        scale: float | None,
        softcap: float | None,
        kernel: CrossEntropy | None,
    ) -> Tensor:
        losses_S = hidden_SH.new_empty(hidden_SH.shape[0], dtype=torch.float32)
        needs_gradient: bool = ctx.needs_input_grad[0]
        gradient_SH = torch.empty_like(hidden_SH) if needs_gradient else None
        for part in _chunks(hidden_SH, weight_VH):
            logits = F.linear(hidden_SH[part], weight_VH, bias_V)
            if kernel is not None:
                losses_S[part] = kernel(logits, targets_S[part], None if gradient_SH is None else logits)
                dlogits = logits  # the kernel has overwritten the logits with their gradient
            else:
                losses_S[part], dlogits = _losses(
                    logits, targets_S[part], scale, softcap, needs_gradient=needs_gradient
                )
            if gradient_SH is not None:
                torch.mm(dlogits.to(weight_VH.dtype), weight_VH, out=gradient_SH[part])
        if gradient_SH is not None:
            ctx.save_for_backward(gradient_SH)
        return losses_S

    @staticmethod
    def backward(ctx: Any, dloss_S: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_SH,) = ctx.saved_tensors
        return gradient_SH * dloss_S[:, None].to(gradient_SH.dtype), None, None, None, None, None, None


class _AdaptedTokenLoss(torch.autograd.Function):
    """The loss of a head with adapters.

    The gradient of an adapter is a sum over tokens, weighted by the gradients of their losses. These are known only in
    the backward pass, so the logits are computed again there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        x_SH: Tensor,
        anchor: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_S: Tensor,
        scale: float | None,
        softcap: float | None,
        adapters: LogitAdapters,
        kernel: CrossEntropy | None,
    ) -> Tensor:
        s_SQ = adapters.shrink(x_SH)
        losses_S = hidden_SH.new_empty(hidden_SH.shape[0], dtype=torch.float32)
        for part in _chunks(hidden_SH, weight_VH):
            logits = _adapted_logits(hidden_SH, weight_VH, bias_V, adapters, s_SQ, part)
            if kernel is not None:
                losses_S[part] = kernel(logits, targets_S[part], None)
            else:
                losses_S[part], _ = _losses(logits, targets_S[part], scale, softcap, needs_gradient=False)
        ctx.save_for_backward(hidden_SH, x_SH, s_SQ, targets_S, weight_VH, bias_V)
        ctx.scale, ctx.softcap, ctx.adapters, ctx.kernel = scale, softcap, adapters, kernel
        return losses_S

    @staticmethod
    def backward(ctx: Any, dloss_S: Tensor) -> tuple[Tensor | None, ...]:
        hidden_SH, x_SH, s_SQ, targets_S, weight_VH, bias_V = ctx.saved_tensors
        dhidden_SH = torch.empty_like(hidden_SH) if ctx.needs_input_grad[0] else None
        dx_SH = torch.empty_like(x_SH) if ctx.needs_input_grad[1] else None
        for part in _chunks(hidden_SH, weight_VH):
            logits = _adapted_logits(hidden_SH, weight_VH, bias_V, ctx.adapters, s_SQ, part)
            if ctx.kernel is not None:
                dlogits = torch.empty_like(logits, dtype=torch.float32)
                ctx.kernel(logits, targets_S[part], dlogits)
            else:
                _, dlogits = _losses(logits, targets_S[part], ctx.scale, ctx.softcap, needs_gradient=True)
            dloss_C = dloss_S[part]
            if dhidden_SH is not None:
                torch.mm(dlogits.to(weight_VH.dtype), weight_VH, out=dhidden_SH[part])
                dhidden_SH[part] *= dloss_C[:, None].to(dhidden_SH.dtype)
            dx_CH = ctx.adapters.backward(x_SH[part], s_SQ[part], dlogits, dloss_C, part, needs_input=dx_SH is not None)
            if dx_SH is not None:
                dx_SH[part] = dx_CH
        return dhidden_SH, dx_SH, None, None, None, None, None, None, None, None


def _adapted_logits(
    hidden_SH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, adapters: LogitAdapters, s_SQ: Tensor, part: slice
) -> Tensor:
    """Return the output of head and adapters for the tokens ``part``, ``[C, V]``."""
    change_CV = adapters.expand(s_SQ[part], part, hidden_SH.dtype)
    if change_CV is None:
        return F.linear(hidden_SH[part], weight_VH, bias_V)
    if bias_V is not None:
        change_CV += bias_V
    return change_CV.addmm_(hidden_SH[part], weight_VH.T)


def _chunks(hidden_SH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
    size = _chunk_tokens("cuda" if hidden_SH.is_cuda else "cpu", weight_VH.shape[0])
    for start in range(0, hidden_SH.shape[0], size):
        yield slice(start, min(start + size, hidden_SH.shape[0]))


def _chunk_tokens(device: str, vocabulary: int) -> int:
    return max(_MIN_CHUNK_TOKENS[device], _CHUNK_ELEMENTS[device] // vocabulary)


def _losses(
    logits: Tensor, targets_C: Tensor, scale: float | None, softcap: float | None, *, needs_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return losses ``[C]`` and their gradient with respect to the output of the head, ``[C, V]``, both float32.

    Args:
        logits: Output of the head, ``[C, V]``; overwritten.
        needs_gradient: Whether the gradient is needed; otherwise an arbitrary tensor is returned in its place.
    """
    logits = _capped(logits, scale, softcap)
    log_probabilities = F.log_softmax(logits, dim=1, dtype=torch.float32)
    index = targets_C[:, None]
    losses_C = log_probabilities.gather(1, index).squeeze(1).neg_()
    return losses_C, _dlogits(log_probabilities, logits, index, scale, softcap) if needs_gradient else logits


def _capped(logits: Tensor, scale: float | None, softcap: float | None) -> Tensor:
    """Scale and cap the output of the head, ``[C, V]``, in place if its dtype allows it."""
    if scale is not None:
        logits = logits.mul_(scale)
    if softcap is not None:
        logits = logits.float().div_(softcap).tanh_().mul_(softcap)
    return logits


def _dlogits(
    log_probabilities: Tensor, logits: Tensor, index: Tensor, scale: float | None, softcap: float | None
) -> Tensor:
    """Return the gradient of every token's loss with respect to the output of the head, ``[C, V]`` float32.

    Args:
        log_probabilities: Log probabilities of the scaled and capped logits; overwritten.
        logits: Scaled and capped logits; overwritten.
        index: Target of every token, ``[C, 1]``.
    """
    dlogits = log_probabilities.exp_()
    dlogits.scatter_add_(1, index, dlogits.new_full((1, 1), -1.0).expand_as(index))
    if softcap is not None:
        dlogits.mul_(logits.div_(softcap).square_().neg_().add_(1.0))  # the slope of the cap
    if scale is not None:
        dlogits.mul_(scale)
    return dlogits


def token_losses(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    targets_S: Tensor,
    *,
    bias_V: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    adapters: LogitAdapters | None = None,
    kernel: CrossEntropy | None = None,
) -> Tensor:
    """Return the cross-entropy of every token.

    This is ``logsumexp(z) - z[target]`` with ``z = softcap(scale · (hidden @ weightᵀ + bias))``. The gradient with
    respect to ``hidden_SH`` is computed chunk by chunk in the forward pass, while the logits are in memory; the
    backward pass only scales it. With adapters on the head, it is computed in the backward pass.

    Args:
        adapters: The adapters of these tokens on the head, whose output is added to ``hidden @ weightᵀ + bias``; None
            without adapters.
        kernel: Computes the losses of a chunk of logits and their gradient, without scale and cap; None for PyTorch's
            functions.

    Returns:
        ``[S]`` float32, in nats.
    """
    assert kernel is None or (scale is None and softcap is None)
    if hidden_SH.shape[0] == 0:
        return hidden_SH.new_zeros(0, dtype=torch.float32)
    if adapters is None:
        plain: Tensor = _ChunkedTokenLoss.apply(hidden_SH, weight_VH, bias_V, targets_S, scale, softcap, kernel)
        return plain
    adapted: Tensor = _AdaptedTokenLoss.apply(
        hidden_SH,
        adapters.inputs(hidden_SH),
        adapters.anchor,
        weight_VH if adapters.weight is None else adapters.weight,
        bias_V,
        targets_S,
        scale,
        softcap,
        adapters,
        kernel,
    )
    return adapted


_SCALE = re.compile(r"logits?_(scale|scaling|multiplier)|lm_head_multiplier|output_logits_scale")
"""Configuration keys of transformers for a factor, or a divisor, of the logits."""

_NUM_TOKENS = 7
"""Tokens in the observed forward pass; several, because the first ids of a vocabulary are often special, and some have
no embedding."""

_TOLERANCE = 1e-2
"""Largest relative error of a measured factor that can come from rounding, in any precision."""


@runtime_checkable
class _AdaptedHead(Protocol):
    """An output head with adapters, which has replaced the model's own."""

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward pass with adapters is in progress."""
        ...

    def runs(self, tokens: HeadTokens) -> Sequence[tuple[int, LogitAdapters | None]]:
        """Return all trained tokens in order, as runs of consecutive tokens: their number and their adapters, None if
        their jobs have no adapters on the head."""
        ...

    def __call__(self, hidden_SH: Tensor) -> Tensor: ...


class OutputHead:
    """The output head of ``model``; its weight is gathered from all ranks when it is needed.

    Attributes:
        linear: The linear module of the head; its weight may be tied to the embeddings, or only this rank's part.
        kernel: Computes losses of logits without scale and cap; None for PyTorch's functions.

    Raises:
        UnsupportedModelError: The head is not a linear module.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        linear = model.get_output_embeddings()
        if not isinstance(linear, nn.Linear):
            raise UnsupportedModelError(
                f"{type(model).__name__}: expected an output head that is a torch.nn.Linear, found "
                f"{type(linear).__name__}; use another base model"
            )
        self.linear = linear
        self._model = model
        embeddings = model.get_input_embeddings()
        is_tied = is_sharded(embeddings) and not is_sharded(linear)
        self._owner: Any = embeddings if is_tied else linear
        self.kernel: CrossEntropy | None = None
        self.scale: float | None = None
        self.softcap: float | None = _of_config(model, "final_logit_softcapping")
        self._body: Any = find_body(model)

    @torch.no_grad()
    def observe(self) -> None:
        """Run the model's own forward pass to find the operations between its body and its logits."""
        bodies: list[Tensor] = []
        hook = self._body.register_forward_hook(lambda _, __, output: bodies.append(output[0]))
        num_tokens = min(_NUM_TOKENS, int(_of_config(self._model, "vocab_size")))
        ids_1L = torch.arange(num_tokens, device=self._model.device)[None]
        try:
            with self.gathered() as weight_VH, self._caught(runs=True) as inputs:
                logits_LV = self._model(input_ids=ids_1L, use_cache=False).logits[0].float()
                plain_LV = F.linear(inputs[0][0], weight_VH, self.linear.bias).float()
        finally:
            hook.remove()
        if not bodies or not torch.equal(inputs[0], bodies[0]):
            self._body = self._model
        if self.softcap is not None:
            logits_LV = torch.atanh((logits_LV / self.softcap).clamp(-0.999, 0.999)) * self.softcap
        self.scale = _factor(self._model, ((logits_LV * plain_LV).sum() / plain_LV.square().sum()).item())

    def hidden_states(self, **inputs: Tensor) -> Tensor:
        """Return the input of the head in a forward pass of the model, ``[rows, L, H]``."""
        if self._body is not self._model:
            hidden: Tensor = self._body(**inputs, use_cache=False).last_hidden_state
            return hidden
        return self.own_output(**inputs)[1]

    def own_output(self, **inputs: Any) -> tuple[Any, Tensor]:
        """Return the output of a forward pass of the model, with one number per token instead of logits, and the input
        of the head."""
        with self._caught(runs=False) as caught:
            output = self._model(**inputs, use_cache=False)
        return output, caught[0]

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Return logits ``[S, V]``, float32."""
        adapted = self._adapted()
        with self.gathered() as weight_VH:
            linear_SV = F.linear(hidden_SH, weight_VH, self.linear.bias) if adapted is None else adapted(hidden_SH)
        logits_SV = linear_SV.float() * (self.scale or 1.0)
        return logits_SV if self.softcap is None else torch.tanh(logits_SV / self.softcap) * self.softcap

    def token_losses(self, hidden_SH: Tensor, targets_S: Tensor, tokens: HeadTokens | None = None) -> Tensor:
        """Return the cross-entropy ``[S]`` of predicting ``targets_S`` from ``hidden_SH``, in nats.

        Args:
            tokens: The job of each token; None only if the head has no adapters.
        """
        adapted = self._adapted()
        runs: Sequence[tuple[int, LogitAdapters | None]] = ()
        if adapted is not None:
            assert tokens is not None, "the head has adapters"
            runs = adapted.runs(tokens)
        if all(adapters is None for _, adapters in runs):
            runs = ((len(hidden_SH), None),)
        lengths = [num_tokens for num_tokens, _ in runs]
        parts = zip(hidden_SH.split(lengths), targets_S.split(lengths), runs, strict=True)
        with self.gathered() as weight_VH:
            losses = [
                token_losses(
                    hidden,
                    weight_VH,
                    targets,
                    bias_V=self.linear.bias,
                    scale=self.scale,
                    softcap=self.softcap,
                    adapters=adapters,
                    kernel=self.kernel,
                )
                for hidden, targets, (_, adapters) in parts
            ]
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    def _adapted(self) -> _AdaptedHead | None:
        """Return the output head with adapters if a forward pass with adapters is in progress; else None."""
        head = self._model.get_output_embeddings()
        return head if isinstance(head, _AdaptedHead) and head.is_in_forward else None

    @contextmanager
    def gathered(self) -> Iterator[Tensor]:
        """Yield the weight ``[V, H]``, gathered from all ranks inside the context."""
        if not is_sharded(self._owner):
            yield self.linear.weight
            return
        self._owner.set_reshard_after_forward(False)
        self._owner.unshard()
        self.linear._parameters["weight"] = self._owner.weight
        try:
            yield self.linear.weight
        finally:
            self._owner.set_reshard_after_forward(True)
            self._owner.reshard()
            self.linear._parameters["weight"] = self._owner.weight

    @contextmanager
    def _caught(self, *, runs: bool) -> Iterator[list[Tensor]]:
        """Yield a list that collects the inputs of the head in the enclosed forward passes.

        Args:
            runs: Whether the head computes; otherwise it returns one unused number per token.
        """
        inputs: list[Tensor] = []
        head: Any = self._model.get_output_embeddings()  # with adapters, not the same module as in the constructor

        def catch(hidden: Tensor) -> Tensor:
            inputs.append(hidden)
            return type(head).forward(head, hidden) if runs else hidden[..., :1]

        head.forward = catch
        try:
            yield inputs
        finally:
            del head.forward


def _of_config(model: PreTrainedModel, name: str) -> Any:
    own = getattr(model.config, name, None)
    return getattr(model.config.get_text_config(), name, None) if own is None else own


def _factor(model: PreTrainedModel, measured: float) -> float | None:
    """Return the factor in the configuration that equals ``measured`` up to rounding; None for 1. None also if no
    factor matches: the comparison of losses then refuses the model."""
    if abs(measured - 1) <= 1e-5:
        return None
    known = [
        float(value)
        for name, value in vars(model.config.get_text_config()).items()
        if _SCALE.fullmatch(name) and isinstance(value, int | float) and value
    ]
    near = [
        value for factor in known for value in (factor, 1 / factor) if abs(measured - value) <= _TOLERANCE * abs(value)
    ]
    return min(near, key=lambda value: abs(measured - value)) if near and near[0] != 1 else None
