"""The frozen base model in two steps: token ids to hidden states, hidden states to token losses."""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from alto.backbone import attention
from alto.backbone.fused_layers import FusedLayers, Fusion
from alto.backbone.output_head import OutputHead
from alto.backbone.probe import check_losses, probe, refusing
from alto.backbone.sequences import PaddedRows, Sequences
from alto.backbone.sharding import forget_micro_batch, held_bytes
from alto.errors import UnsupportedError, UnsupportedModelError
from alto.kernels import HeadTokens, layer_functions_on
from alto.records import ModelLimits


class LengthLimit(NamedTuple):
    """The length of the longest sequence whose result does not depend on the rest of the forward pass, in tokens, and
    the reason why longer sequences do."""

    num_tokens: int
    why: str


def length_limit(config: PreTrainedConfig) -> LengthLimit | None:
    """Return the limit of the model that ``config`` describes; None if it has no limit."""
    text = config.get_text_config()
    limits = []
    rope = getattr(text, "rope_parameters", None) or {}
    rescales = "rescales the positions of a whole pass by its longest sequence"
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if settings.get("rope_type") == "longrope":
            limits.append(LengthLimit(int(settings["original_max_position_embeddings"]), rescales))
        elif settings.get("rope_type") == "dynamic":
            limits.append(LengthLimit(int(text.max_position_embeddings), rescales))
    if num_selected := getattr(text, "index_topk", None):
        why = "attends to index_topk tokens, and its choice among equal scores depends on the padding of the pass"
        limits.append(LengthLimit(int(num_selected), why))
    return min(limits, default=None)


def limits_of(config: PreTrainedConfig) -> ModelLimits:
    """Return the limits of the model that ``config`` describes.

    The number of positions is ``max_position_embeddings`` (transformers maps other names, such as ``n_positions``, to
    it). OPT's table has two more rows, which are not positions. A model with rotary positions also runs on longer rows,
    but was not trained on them, so the configured limit holds there too. YaRN multiplies the limit by its factor. The
    number is None if the configuration has no limit: ALiBi, state space models.
    """
    text: Any = config.get_text_config()
    declared = getattr(text, "max_position_embeddings", None)
    positions = declared if isinstance(declared, int) and declared > 0 else None
    if positions is not None:
        positions = max(positions, _stretched(text))
    padding = getattr(text, "pad_token_id", None)
    return ModelLimits(
        max_positions=positions,
        vocab_size=getattr(text, "vocab_size", None),
        pad_token_id=padding if isinstance(padding, int) else None,
    )


def _stretched(config: Any) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    if not isinstance(rope, dict) or rope.get("rope_type") != "yarn":
        return 0
    return int((rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 0))


_COMPILED = "torch_compile fuses the parts of a layer itself"
_NO_TRITON = "the backend of the kernels is not Triton"


class Backbone:
    """A frozen Hugging Face causal LM with a forward pass over sequences of many jobs.

    Sequences are packed: concatenated without padding. A model whose layers cannot take the boundaries of sequences
    (recurrences, custom attention) computes one padded row per sequence.

    The constructor compares the forward pass with the model's own on a few rows (:mod:`alto.backbone.probe`), so that a
    model with an unusual forward pass is refused instead of trained wrongly.

    Attributes:
        model: The model; its parameters never require grad. Modules may be wrapped in place (LoRA injection).
        path: The argument of ``from_pretrained`` for the model.
        max_length: Length of the longest sequence whose result does not depend on the rest of the forward pass, in
            tokens; None without such a limit.
        is_padded: Whether the model computes one padded row per sequence, because its packed forward pass failed the
            comparison.
        why_padded: The reason why sequences are padded; empty if they are packed.
        is_checkpointed: Whether each layer's activations are recomputed in the backward pass.

    Raises:
        UnsupportedModelError: The forward pass differs from the model's own, both packed and padded; or the model does
            not support recomputing its layers; or it has an unusual output head.
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
        self.is_checkpointed, self.is_compiled = False, torch_compile
        self._head = OutputHead(model)
        self._limit = length_limit(model.config)
        self._own_attention = model.config._attn_implementation
        self._fused = FusedLayers()
        with refusing(model):
            self._head.observe()
        self.is_padded, self.why_padded = False, ""
        try:
            self._replace_attention()
            probe(self, self._head)
        except UnsupportedModelError as refusal:
            self.is_padded, self.why_padded = True, str(refusal)
            self._replace_attention()
            probe(self, self._head)
        self._has_chunks = attention.has_chunks(model)
        self._fuse(is_compiled=torch_compile)
        if gradient_checkpointing:
            self.checkpoint_layers()
        if torch_compile:
            _compile_layers(model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def scales_logits(self) -> bool:
        """Whether logits are proportional to the hidden states that enter the head: it has neither cap nor bias."""
        return self._head.softcap is None and self._head.linear.bias is None

    @property
    def shares_beginnings(self) -> bool:
        """Whether a forward pass can compute the common beginning of several sequences once. False for padded rows and
        for models that attend in chunks."""
        return not self.is_padded and not self._has_chunks

    @property
    def max_length(self) -> int | None:
        return None if self._limit is None else self._limit.num_tokens

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters and buffers on this device; for a sharded model, the bytes of this rank's parts."""
        return held_bytes(self.model)

    @property
    def fusion(self) -> Fusion:
        """The parts that run as fused kernels, and why others do not."""
        return self._fused.fusion

    def hidden_states(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        sequence_lengths: Sequence[int],
        sequence_prefixes: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the hidden states ``[T, H]`` of concatenated sequences, as they enter the output head.

        Args:
            position_ids_T: Positions; they start at 0 in every sequence, or after its prefix.
            sequence_lengths: Number of tokens of each sequence; they sum to ``T``.
            sequence_prefixes: Number of tokens that each sequence takes as its prefix from the beginning of the latest
                sequence without a prefix; None without prefixes.

        Raises:
            UnsupportedModelError: See :meth:`check_length`.
        """
        sequences = Sequences(sequence_lengths, sequence_prefixes)
        self.check_length(sequences.longest_key)
        with attention.attending(sequences):
            if self.is_padded:
                hidden = self._padded_hidden_states(input_ids_T, sequences)
            else:
                hidden = self._head.hidden_states(input_ids=input_ids_T[None], position_ids=position_ids_T[None])[0]
        if not torch.is_grad_enabled():
            forget_micro_batch(self.model)
        return hidden

    @property
    def rows_in_pass(self) -> Callable[[], PaddedRows | None] | None:
        """A function that returns the padded rows of the forward pass in progress, or None outside of a forward pass.
        The property is None if sequences are packed.

        Modules of the model keep this function. It holds no reference to the backbone, so that the backbone can be
        freed.
        """
        return partial(_rows_in_pass, self.device) if self.is_padded else None

    def current_rows(self) -> PaddedRows | None:
        """Return the padded rows of the forward pass in progress; None outside of one or if sequences are packed."""
        rows = self.rows_in_pass
        return None if rows is None else rows()

    def _padded_hidden_states(self, input_ids_T: Tensor, sequences: Sequences) -> Tensor:
        """Return hidden states ``[T, H]``; the model itself assigns positions to the rows, which are padded on the
        right."""
        rows = sequences.padded(self.device)
        padding = getattr(self.model.config.get_text_config(), "pad_token_id", None)
        hidden_SLH = self._head.hidden_states(
            input_ids=rows.spread_ids(input_ids_T, padding or 0), attention_mask=rows.mask_SL
        )
        return rows.collect(hidden_SLH.flatten(0, 1))

    def _replace_attention(self) -> None:
        """Set the attention implementation that packed or padded sequences need.

        Raises:
            UnsupportedModelError: Sequences are packed, and the model's attention cannot be replaced.
        """
        if self.is_padded:
            self.model.set_attn_implementation(self._own_attention)
            return
        attention.register()
        self.model.set_attn_implementation(attention.NAME)
        if self.model.config._attn_implementation != attention.NAME:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: expected a model whose attention can be replaced (transformers' "
                "AttentionInterface), found one with its own attention code; use another base model"
            )

    def _fuse(self, *, is_compiled: bool) -> None:
        """Use fused kernels; drop all of them if they fail or change the model's losses."""
        functions = layer_functions_on(self.device)
        if functions is None:
            self._fused.drop(_NO_TRITON)
            return
        try:
            with refusing(self.model):
                self._use_fused(functions, is_compiled=is_compiled)
        except UnsupportedModelError as refusal:
            self._fused.drop(str(refusal))

    def _use_fused(self, functions: ModuleType, *, is_compiled: bool) -> None:
        if is_compiled:
            self._fused.keep_layers(_COMPILED)
        else:
            self._fused.use_in_layers(self.model, functions)
            self._run(num_tokens=2)
            self._fused.drop_unused()
        self._fused.use_in_head(self._head, functions)
        check_losses(self, self._head)

    def sample_kernels(self) -> None:
        """Launch every fused kernel of a training step once, on a few tokens."""
        self._fused.sample(self.dtype, self.device)

    def run_once(self) -> None:
        """Run a forward pass over one token, so that hooks on modules are called."""
        self._run(num_tokens=1)

    @torch.no_grad()
    def _run(self, *, num_tokens: int) -> None:
        positions_T = torch.arange(num_tokens, device=self.device)
        with torch.compiler.set_stance("force_eager"):
            self.hidden_states(torch.zeros_like(positions_T), positions_T, (num_tokens,))

    def checkpoint_layers(self) -> None:
        """Enable gradient checkpointing: recompute every layer's activations in the backward pass.

        The layers are set one by one, because the name of the model's switch differs between versions, and that switch
        would need a gradient of the embeddings as well. Layers recompute only in training mode, so this mode is set
        on each layer itself. It is off while the layer computes, so that no dropout of the base model is active.

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
        """Use the model's original attention inside the context, without fused kernels, gradient checkpointing and
        compilation. Generation with a cache of keys and values needs this."""
        recomputed = [layer for layer in self.model.modules() if layer.training]
        try:
            self.model.eval().set_attn_implementation(self._own_attention)
            with torch.compiler.set_stance("force_eager"), self._fused.unused():
                yield
        finally:
            self._replace_attention()
            for layer in recomputed:
                layer.training = True

    def check_length(self, num_tokens: int) -> None:
        """Check that the result of a sequence of ``num_tokens`` does not depend on the rest of the forward pass.

        Raises:
            UnsupportedModelError: The sequence is longer than :attr:`max_length`.
        """
        if self._limit is not None and num_tokens > self._limit.num_tokens:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} {self._limit.why}: expected at most {self._limit.num_tokens} tokens, "
                f"found {num_tokens}; lower max_length"
            )

    @torch.no_grad()
    def own_router_loss(self, input_ids_1L: Tensor) -> Any:
        """Return the load-balancing loss of the model's own forward pass over one row; None if it returns none."""
        output, _ = self._head.own_output(input_ids=input_ids_1L, output_router_logits=True)
        forget_micro_batch(self.model)
        return getattr(output, "aux_loss", None)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Return the logits ``[S, V]`` of hidden states that enter the output head. In a forward pass with adapters on
        the head, ``hidden_SH`` must hold all tokens of the pass."""
        return self._head.logits(hidden_SH)

    def token_losses(self, hidden_SH: Tensor, targets_S: Tensor, tokens: HeadTokens | None = None) -> Tensor:
        """Return the cross-entropy ``[S]`` of predicting ``targets_S`` from ``hidden_SH``, in nats.

        Args:
            hidden_SH: Hidden states that enter the output head.
            tokens: The jobs of the tokens, which determine the adapters on the head; None only if the head has no
                adapters.
        """
        return self._head.token_losses(hidden_SH, targets_S, tokens)


def _rows_in_pass(device: torch.device) -> PaddedRows | None:
    sequences = attention.current_sequences()
    return None if sequences is None else sequences.padded(device)


def _compile_layers(model: PreTrainedModel) -> None:
    """Compile the parts of each layer before and after its attention; the attention is not compiled.

    This saves launches: norms, rotations, activations and sums become one kernel each. Linear layers with adapters are
    calls inside the compiled code, unless jobs train their biases or magnitudes. All layers and any number of tokens
    share the compiled code.
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
    """Run ``function``, the forward pass of ``layer``, in evaluation mode; recompute it in the backward pass."""

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
    """Return the repeated layers of ``model``; ``key`` is the setting that needs them, for the error message."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UnsupportedModelError(
            f"{key}: {type(model).__name__} has no layers of transformers' class GradientCheckpointingLayer, which "
            "this key needs; remove the key"
        )
    return layers


@contextmanager
def changed_embeddings(backbone: Backbone, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Apply ``change`` to the output of the embedding layer in forward passes inside the context.

    If the model processes this output again, for example by a factor, it does so after the change. This matches the
    hook of transformers' NEFTune.

    Args:
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
