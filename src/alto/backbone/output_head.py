"""The output head of a causal LM: computes logits and token losses from the hidden states that enter it.

Logits are ``softcap(scale · (hidden @ weightᵀ + bias))``; the output of adapters on the head is added to ``bias``. If a
model has layers between its body and its head (the transform of BERT's family, the width scaling of MiniCPM3), the
hidden states are the output of these layers.

Shapes: ``S`` trained tokens, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from alto.backbone.loss_head import CrossEntropy, LogitAdapters, token_losses
from alto.backbone.sharding import find_body, is_sharded
from alto.errors import UnsupportedModelError

__all__ = ["HeadTokens", "OutputHead"]

_SCALE = re.compile(r"logits?_(scale|scaling|multiplier)|lm_head_multiplier|output_logits_scale")
"""Configuration keys of transformers for a factor, or a divisor, of the logits."""

_NUM_TOKENS = 7
"""Tokens in the observed forward pass; several, because the first ids of a vocabulary are often special, and some have
no embedding."""

_SAME = 1e-2
"""Relative difference of a measured factor that rounding explains in any precision."""


class HeadTokens(Protocol):
    """The trained tokens of a forward pass, job after job; see :class:`alto.data.TokenBatch`."""

    @property
    def slots(self) -> Sequence[int]: ...

    @property
    def job_tokens(self) -> Sequence[int]: ...

    @property
    def job_targets(self) -> Sequence[int]: ...

    @property
    def loss_positions_S(self) -> Tensor: ...  # noqa: N802  # a shape


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
        scale: Factor of the logits; None without one.
        softcap: Cap of the logits; None without one.
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
        """Return the output of a forward pass of the model, with one number per token in place of logits, and the input
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
            hidden_SH: Hidden states.
            targets_S: Target token ids.
            tokens: The jobs of the tokens; None only if the head has no adapters.
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
    near = [value for said in known for value in (said, 1 / said) if abs(measured - value) <= _SAME * abs(value)]
    return min(near, key=lambda value: abs(measured - value)) if near and near[0] != 1 else None
