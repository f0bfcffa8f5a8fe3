"""The frozen base model, seen as two steps: token ids to hidden states, hidden states to token losses."""

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

    Building it compares that pass with the model's own on a few rows (:mod:`alto.backbone.probe`), so that a model with
    an unusual forward (logit scaling, other masks) is refused instead of trained wrongly.

    Attributes:
        model: The model; its parameters never require grad. Modules may be wrapped in place (LoRA injection).
        tokenizer: Its tokenizer.
        path: What ``from_pretrained`` takes for it.
        max_length: Tokens up to which a sequence leaves all others of its pass alone; None where it always does.

    Raises:
        UnsupportedModelError: The padding-free pass differs from the model's own, or the model does not let its
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
        """What its parameters and buffers take of this device; of a sharded one this rank's parts."""
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
            position_ids_T: Positions, starting at 0 for every sequence, or behind its prefix.
            sequence_lengths: Tokens of each sequence, summing to ``T``.
            sequence_prefixes: Tokens of the sequence before it that each goes on behind; None where none does.

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
        """A forward pass of one token, module by module, for those who watch what happens in it."""
        token = torch.zeros(1, dtype=torch.long, device=self.device)
        with torch.compiler.set_stance("force_eager"):
            self.hidden_states(token, token, (1,))

    def checkpoint_layers(self) -> None:
        """Recompute every layer's activations in the backward pass from now on, instead of keeping them.

        The layers are set one by one: the model's own switch has another name from version to version, and would also
        ask for the gradient of the embeddings. They recompute in training mode only: the mode is set on the layer
        alone, and is off again while the layer computes, so that no dropout of the base wakes up inside it.

        Raises:
            UnsupportedModelError: The model is not built of layers that have this switch.
        """
        for layer in _layers(self.model, "gradient_checkpointing"):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(_recomputed, weakref.ref(layer))
            layer.training = True

    @contextlib.contextmanager
    def own_attention(self) -> Iterator[None]:
        """The model with the attention it came with, nothing recomputed and nothing compiled: as keys and values can be
        kept from token to token."""
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
        """Make sure that a sequence of ``num_tokens`` leaves all others of its pass alone.

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
    """Tokens up to which a sequence leaves the rotary frequencies of the pass alone; None where it always does."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    limits = []
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if settings.get("rope_type") == "longrope":
            limits.append(int(settings["original_max_position_embeddings"]))
        elif settings.get("rope_type") == "dynamic":
            limits.append(int(config.get_text_config().max_position_embeddings))
    return min(limits, default=None)


def _compile_layers(model: PreTrainedModel) -> None:
    """Compile what a layer does around its linear modules and its attention, which stay as they are.

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
    """The repeated layers of ``model``; ``key`` is what asks for them."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UnsupportedModelError(
            f"{key}: expected a model built of transformers' checkpointing layers, found {type(model).__name__} "
            "without any; remove the key"
        )
    return layers
