"""The frozen base model in two steps: token ids to hidden states, hidden states to token losses."""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from alto.backbone import attention
from alto.backbone.loss_head import token_losses
from alto.backbone.probe import probe
from alto.backbone.sequences import Sequences
from alto.backbone.sharding import OutputHead, find_body, forget_micro_batch, held_bytes
from alto.errors import UnsupportedError, UnsupportedModelError

__all__ = ["Backbone"]


class Backbone:
    """A frozen Hugging Face causal LM with a padding-free forward pass.

    The constructor compares it with the model's own forward pass on a few rows (:mod:`alto.backbone.probe`), so that a
    model with an unusual forward (logit scaling, other masks) is refused instead of trained wrongly.

    Attributes:
        model: The model; its parameters never require grad. Modules may be wrapped in place (LoRA injection).
        tokenizer: Its tokenizer.
        path: What ``from_pretrained`` takes for it.
        max_length: Longest sequence that does not affect the others of its forward pass; None without such a limit.
        is_checkpointed: Whether each layer's activations are recomputed in the backward pass.

    Raises:
        UnsupportedModelError: The padding-free forward pass differs from the model's own, or the model does not let its
            attention be replaced or its layers be recomputed, or has an unusual output head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str,
        *,
        gradient_checkpointing: bool = False,
        torch_compile: bool = False,
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self.tokenizer = tokenizer
        self.path = path
        self.is_checkpointed = False
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UnsupportedModelError(
                f"{type(model).__name__}: expected an output head that is a torch.nn.Linear, found "
                f"{type(head).__name__}; use another base model"
            )
        self._head = OutputHead(model, head)
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self.max_length = _max_length(model.config)
        self._body = find_body(model)
        self._own_attention = model.config._attn_implementation
        attention.register()
        model.set_attn_implementation(attention.NAME)
        if model.config._attn_implementation != attention.NAME:
            raise UnsupportedModelError(
                f"{type(model).__name__}: expected a model whose attention can be replaced (transformers' "
                "AttentionInterface), found one with its own; use another base model"
            )
        probe(self, self._head)
        if gradient_checkpointing:
            self.checkpoint_layers()
        if torch_compile:
            _compile_layers(model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters and buffers on this device; of a sharded model, of this rank's parts."""
        return held_bytes(self.model)

    def hidden_states(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        sequence_lengths: Sequence[int],
        sequence_prefixes: Sequence[int] | None = None,
    ) -> Tensor:
        """Final hidden states ``[T, H]`` of sequences laid end to end.

        Args:
            input_ids_T: Token ids.
            position_ids_T: Positions, starting at 0 for every sequence, or behind its prefix.
            sequence_lengths: Tokens of each sequence, summing to ``T``.
            sequence_prefixes: Number of tokens of the previous sequence that are the prefix of each; None without
                prefixes.

        Raises:
            UnsupportedModelError: See :meth:`check_length`.
        """
        sequences = Sequences(sequence_lengths, sequence_prefixes)
        self.check_length(sequences.longest_key)
        with attention.attending(sequences):
            output = self._body(input_ids=input_ids_T[None], position_ids=position_ids_T[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        if not torch.is_grad_enabled():
            forget_micro_batch(self.model)
        return hidden

    @torch.no_grad()
    def run_once(self) -> None:
        """A forward pass of one token, for hooks on its modules."""
        token = torch.zeros(1, dtype=torch.long, device=self.device)
        with torch.compiler.set_stance("force_eager"):
            self.hidden_states(token, token, (1,))

    def checkpoint_layers(self) -> None:
        """Enable gradient checkpointing: recompute every layer's activations in the backward pass.

        The layers are set one by one: the name of the model's own switch differs between versions, and it would also
            need the gradient of the embeddings. They recompute only in training mode: the mode is set on the layer
            itself, and is off while the layer computes, so that no dropout of the base is active.

        Raises:
            UnsupportedModelError: The model is not built of layers that have this switch.
        """
        for layer in _layers(self.model, "gradient_checkpointing"):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(_recomputed, weakref.ref(layer))
            layer.training = True
        self.is_checkpointed = True

    @contextlib.contextmanager
    def own_attention(self) -> Iterator[None]:
        """The model with its original attention, without gradient checkpointing and compilation, as generation with a
        cache of keys and values needs it."""
        recomputed = [layer for layer in self.model.modules() if layer.training]
        try:
            self.model.eval().set_attn_implementation(self._own_attention)
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self.model.set_attn_implementation(attention.NAME)
            for layer in recomputed:
                layer.training = True

    def check_length(self, num_tokens: int) -> None:
        """Check that a sequence of ``num_tokens`` does not affect the others of its forward pass.

        Raises:
            UnsupportedModelError: It would change the positions of all others.
        """
        if self.max_length is not None and num_tokens > self.max_length:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} rescales the positions of a whole pass by its longest sequence: expected "
                f"at most {self.max_length} tokens, found {num_tokens}; lower max_length"
            )

    def token_losses(self, hidden_SH: Tensor, targets_S: Tensor) -> Tensor:
        """Cross-entropy ``[S]`` of predicting ``targets_S`` from ``hidden_SH``, nats."""
        with self._head.gathered() as weight_VH:
            return token_losses(hidden_SH, weight_VH, targets_S, bias_V=self._head.linear.bias, softcap=self._softcap)


def _max_length(config: PreTrainedConfig) -> int | None:
    """Longest sequence that does not change the rotary frequencies of the forward pass; None without such a limit."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    limits = []
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if settings.get("rope_type") == "longrope":
            limits.append(int(settings["original_max_position_embeddings"]))
        elif settings.get("rope_type") == "dynamic":
            limits.append(int(config.get_text_config().max_position_embeddings))
    return min(limits, default=None)


def _compile_layers(model: PreTrainedModel) -> None:
    """Compile the parts of a layer around its linear modules and its attention, which are not compiled.

    Fewer launches: norms, rotations, activations and sums become one kernel each. All layers share what is compiled,
    and any number of tokens.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++")), None)
    if compiler is None:
        raise UnsupportedError(
            "torch_compile: expected a C++ compiler, which PyTorch builds with, found neither g++ nor clang++; install "
            "one, or remove the key"
        )
    for layer in _layers(model, "torch_compile"):
        layer.compile(dynamic=True)


def _recomputed(layer: weakref.ref[nn.Module], function: Callable[..., Any], *args: Any) -> Any:
    """``function``, the forward pass of ``layer``, in evaluation mode; computed again in the backward pass."""

    def evaluated(*args: Any) -> Any:
        module = layer()
        assert module is not None
        module.training = False
        try:
            return function(*args)
        finally:
            module.training = True

    return attention.recompute(evaluated, *args)


def _layers(model: PreTrainedModel, key: str) -> list[Any]:
    """The repeated layers of ``model``; ``key`` is the setting that needs them, for the message."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UnsupportedModelError(
            f"{key}: expected a model built of transformers' checkpointing layers, found {type(model).__name__} "
            "without any; remove the key"
        )
    return layers
