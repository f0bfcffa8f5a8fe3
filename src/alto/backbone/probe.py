"""Checks on a few rows, when a model is loaded, that its padding-free forward pass equals its own forward pass.

There are three checks, on rows longer than every window (windows are made small during the checks):

- The tokens that each attention module attends to are read from the model's own masks.
- The losses must equal the model's own losses, up to rounding. To measure the rounding, the model's own forward pass is
  run a second time, with every module's output rounded again. The tolerance is twice the difference between these two
  runs. A half-precision model is checked in float32 too.
- Every row must be independent: the tokens of another row must not change it by a bit. If the order of sums depends on
  all tokens, as in a mixture of experts, a change by rounding is allowed, but the gradient with respect to the other
  row must be exactly zero.

Shapes: ``T`` tokens of all rows, ``C`` targets whose losses are compared for each token.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from alto.backbone.attention import Pattern, set_pattern
from alto.backbone.memory import is_out_of_memory
from alto.backbone.output_head import OutputHead
from alto.backbone.sequences import PaddedRows
from alto.backbone.sharding import is_sharded
from alto.errors import AltoError, UnsupportedModelError

_HALF = (torch.bfloat16, torch.float16)


def can_widen(model: nn.Module) -> bool:
    """Return whether ``model`` is in half precision, and neither quantised nor sharded."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    is_half = bool(dtypes.intersection(_HALF)) and all(dtype.is_floating_point for dtype in dtypes)
    return is_half and not any(is_sharded(module) for module in model.modules())


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Convert each module's own parameters to float32 while it runs, so that its outputs are float32."""
    running: dict[nn.Module, ExitStack] = {}

    def enter(module: nn.Module, _: Any) -> None:
        if module not in running:
            running[module] = ExitStack()
            running[module].enter_context(widened(module))

    def leave(module: nn.Module, *_: Any) -> None:
        running.pop(module).close()

    owners = [m for m in model.modules() if any(_is_half(value) for value in _own_tensors(m))]
    hooks = [module.register_forward_pre_hook(enter) for module in owners]
    hooks += [module.register_forward_hook(leave) for module in owners]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for stack in running.values():  # not empty if an error has ended a forward pass
            stack.close()


@contextmanager
def widened(module: nn.Module) -> Iterator[None]:
    """Convert the module's own parameters and buffers to float32 inside the context, and restore them after it."""
    kept = [(value, value.data) for value in _own_tensors(module) if _is_half(value)]
    try:
        for value, data in kept:
            value.data = data.float()
        yield
    finally:
        for value, data in kept:
            value.data = data


def _own_tensors(module: nn.Module) -> list[Tensor]:
    own = (*module._parameters.values(), *module._buffers.values())
    return [value for value in own if value is not None]


def _is_half(value: Tensor) -> bool:
    return value.dtype in _HALF


# Finds which tokens each attention module of a model attends to, from the masks that transformers builds for it.
#
# Many models define this only in their mask, which padding-free attention never builds. So the mask is read once, on a
# short row. Windows are made small meanwhile, because a short row would not show large ones.
#
# Shapes: ``L`` tokens of a row.

LARGEST_SMALL_WINDOW = 12
"""Windows up to this size are left as they are."""

_TRACE = "alto_trace"
_FIRST_SMALL = 5
_WINDOWS = re.compile(r".*window(?!.*layer).*|.*attention_chunk_size|floor_scale")
"""Names in configurations and modules of transformers for a number of tokens that attention depends on."""

_SEEN: ContextVar[dict[nn.Module, list[tuple[Tensor | None, int | None]]]] = ContextVar("masks of a traced pass")


@contextmanager
def small_windows(model: PreTrainedModel) -> Iterator[Mapping[int, int]]:
    """Reduce every window of ``model`` to at most :data:`LARGEST_SMALL_WINDOW`; different windows stay different.

    Yields:
        The real size of each small size that is used instead.
    """
    owners = [vars(part) for part in _parts(model)]
    places = [
        (owner, name, value)
        for owner in owners
        for name, value in owner.items()
        if isinstance(name, str) and isinstance(value, int) and not isinstance(value, bool) and _WINDOWS.fullmatch(name)
    ]
    left_alone = {value for _, _, value in places if value <= LARGEST_SMALL_WINDOW}
    free = (size for size in range(_FIRST_SMALL, LARGEST_SMALL_WINDOW + 1) if size not in left_alone)
    real: dict[int, int] = {}
    for _, _, value in places:
        if value > LARGEST_SMALL_WINDOW and value not in real.values():
            size = next(free, None)
            if size is None:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: expected only a few different attention windows, found "
                    f"{len({value for _, _, value in places})}; use another base model"
                )
            real[size] = value
    small = {value: size for size, value in real.items()}
    try:
        for owner, name, value in places:
            owner[name] = small.get(value, value)
        yield real
    finally:
        for owner, name, value in places:
            owner[name] = value


def find_patterns(model: PreTrainedModel, input_ids_L: Tensor) -> dict[nn.Module, Pattern]:
    """Return the pattern of every attention module of ``model``; the model's attention stays replaced afterwards.

    Raises:
        UnsupportedModelError: A mask cannot be expressed as a :class:`Pattern`.
    """
    AttentionInterface.register(_TRACE, _trace)
    AttentionMaskInterface.register(_TRACE, _whole_mask)
    model.set_attn_implementation(_TRACE)
    token = _SEEN.set({})
    try:
        model(input_ids=input_ids_L[None], use_cache=False)
        traced = _SEEN.get()
    finally:
        _SEEN.reset(token)
    names = {module: name for name, module in model.named_modules()}
    patterns = {}
    for module, masks in traced.items():
        found = {_pattern(mask, window, len(input_ids_L)) for mask, window in masks}
        pattern = found.pop()
        if pattern is None or found:
            raise UnsupportedModelError(
                f"{type(model).__name__}: expected attention to a token itself and to earlier tokens (all, a window or "
                f"a chunk), found a different mask in {names.get(module, 'the model')}; use another base model"
            )
        patterns[module] = pattern
    return patterns


def real_patterns(patterns: Mapping[nn.Module, Pattern], real: Mapping[int, int]) -> dict[nn.Module, Pattern]:
    """Replace the small window sizes in ``patterns`` by the real ones, which :func:`small_windows` has yielded."""
    return {
        module: replace(
            pattern,
            window=None if pattern.window is None else real.get(pattern.window, pattern.window),
            chunk=None if pattern.chunk is None else real.get(pattern.chunk, pattern.chunk),
        )
        for module, pattern in patterns.items()
    }


def _parts(model: PreTrainedModel) -> list[Any]:
    """Return the modules of ``model`` and all configurations that they keep, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        found[id(module)] = module
        configs = [module.config] if "config" in vars(module) else []
        while configs:
            config = configs.pop(0)
            if id(config) not in found:
                found[id(config)] = config
                inner = (vars(config).get(name) for name in getattr(config, "sub_configs", ()))
                configs += [one for one in inner if one is not None]
    return [part for part in found.values() if hasattr(part, "__dict__")]


def _trace(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *_: Any,
    sliding_window: int | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Record the mask; the return value does not matter."""
    _SEEN.get().setdefault(module, []).append((attention_mask, sliding_window))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _whole_mask(*arguments: Any, **settings: Any) -> Tensor | None:
    return sdpa_mask(*arguments, **settings | {"allow_is_causal_skip": False})


def _pattern(mask: Tensor | None, window: int | None, length: int) -> Pattern | None:
    """Return the pattern of ``mask``, ``[1, 1 or heads, L, L]``; None if :class:`Pattern` cannot express it."""
    if mask is None:
        return Pattern(window=window)
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-2:] != (length, length):
        return None
    if mask.dtype == torch.bool:
        visible = mask
    else:
        visible = mask == 0
        if not (visible | (mask <= torch.finfo(mask.dtype).min / 2)).all():
            return None
    first = int(visible[..., 0].sum(-1).max())  # tokens that see the first one
    position = torch.arange(length, device=mask.device)
    distance = position[:, None] - position[None, :]
    is_causal = distance >= 0
    for pattern, expected in (
        (Pattern(), is_causal),
        (Pattern(window=first), is_causal & (distance < first)),
        (Pattern(chunk=first), is_causal & (position[:, None] // max(first, 1) == position[None, :] // max(first, 1))),
    ):
        if bool((visible == expected).all()):
            return pattern
    return None


_LENGTHS = (23, 1, 37, 12)
_CHANGED = 2
"""Index of the row whose tokens are changed; it has rows before and after it."""

_NUM_TARGETS = 8
_MAX_REASON_CHARS = 200
_MAX_RATIO = 2.0
"""Tolerance of a loss, as a multiple of the largest change by the model's own rounding."""


class PaddingFree(Protocol):
    """The part of :class:`alto.backbone.Backbone` that is checked; see there."""

    model: PreTrainedModel
    is_padded: bool

    @property
    def max_length(self) -> int | None: ...

    @property
    def device(self) -> torch.device: ...

    def hidden_states(self, input_ids_T: Tensor, position_ids_T: Tensor, sequence_lengths: Sequence[int]) -> Tensor: ...

    def token_losses(self, hidden_SH: Tensor, targets_S: Tensor) -> Tensor: ...

    def own_attention(self) -> AbstractContextManager[None]: ...


def probe(backbone: PaddingFree, head: OutputHead) -> None:
    """Compare both forward passes, and set the pattern of each attention module.

    Raises:
        UnsupportedModelError: The padding-free forward pass differs from the model's own, or a row depends on another.
    """
    model = backbone.model
    with refusing(model):
        rows = _Rows(backbone)
        with small_windows(model) as real:
            with torch.no_grad(), head.gathered(), backbone.own_attention():
                rows.check_objective()
                expected_TC, noise_TC = rows.own_losses()
                patterns = {} if backbone.is_padded else find_patterns(model, max(rows.rows, key=len))
            _set_patterns(patterns)
            hidden_TH = rows.compare(expected_TC, noise_TC)
            rows.check_isolation(hidden_TH, noise_TC)
            rows.check_causality(hidden_TH, noise_TC)
            if can_widen(model):
                _compare_in_float32(rows, backbone)
        _set_patterns(real_patterns(patterns, real))


def check_losses(backbone: PaddingFree, head: OutputHead) -> None:
    """Compare only the losses, on rows that are shorter than most windows.

    If they differ in half precision, float32 decides: a different rounding may send a token to a different expert.

    Raises:
        UnsupportedModelError: The forward pass differs from the model's own.
    """
    model = backbone.model
    with refusing(model):
        rows = _Rows(backbone)

        def compare() -> None:
            with torch.no_grad(), head.gathered(), backbone.own_attention():
                expected_TC, noise_TC = rows.own_losses()
            rows.compare(expected_TC, noise_TC)

        try:
            compare()
        except UnsupportedModelError:
            if not can_widen(model):
                raise
            with in_float32(model):
                compare()


def _compare_in_float32(rows: _Rows, backbone: PaddingFree) -> None:
    """Check a half-precision model again in float32, where rounding cannot hide an error.

    If the model does not run in float32, or memory is short, it is checked only in its own precision.
    """
    with in_float32(backbone.model):
        try:
            with torch.no_grad(), backbone.own_attention():
                expected_TC, noise_TC = rows.own_losses()
        except (RuntimeError, ValueError, TypeError):
            return
        hidden_TH = rows.compare(expected_TC, noise_TC)
        rows.check_isolation(hidden_TH, noise_TC, by_gradient=False)


class _Rows:
    """A few rows of random tokens."""

    def __init__(self, backbone: PaddingFree) -> None:
        self._backbone = backbone
        config = backbone.model.config.get_text_config()
        limits = (backbone.max_length, getattr(config, "max_position_embeddings", None))
        longest = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=max(_LENGTHS))
        self._lengths = [min(length, longest) for length in _LENGTHS]
        generator = torch.Generator().manual_seed(0)
        vocabulary = int(config.vocab_size)
        num_tokens = sum(self._lengths)

        def draw(*shape: int) -> Tensor:
            return torch.randint(0, vocabulary, shape, generator=generator).to(backbone.device)

        self._ids_T, self._other_ids_T = draw(num_tokens), draw(num_tokens)
        self._targets_TC = draw(num_tokens, _NUM_TARGETS)
        self._positions_T = torch.cat([torch.arange(length) for length in self._lengths]).to(backbone.device)
        self.rows = self._ids_T.split(self._lengths)

    def own_losses(self) -> tuple[Tensor, Tensor]:
        """Return the losses ``[T, C]`` of the model's own forward pass, one row at a time, and how much they change
        when every module's output is rounded again."""
        losses_TC = self._own_losses()
        with _perturbed_outputs(self._backbone.model):
            return losses_TC, self._own_losses() - losses_TC

    def _own_losses(self) -> Tensor:
        logits = [self._backbone.model(input_ids=row[None], use_cache=False).logits[0] for row in self.rows]
        return -F.log_softmax(torch.cat(logits).float(), -1).gather(-1, self._targets_TC)

    def check_objective(self) -> None:
        """Check that the model's own loss predicts the next token. Decoders of some encoder-decoder models do not shift
        labels, because they expect shifted labels."""
        row = max(self.rows, key=len)[None]
        if row.shape[1] < 2:
            return
        output = self._backbone.model(input_ids=row, labels=row, use_cache=False)
        logits = output.logits[0].float()
        of_next, of_same = F.cross_entropy(logits[:-1], row[0, 1:]), F.cross_entropy(logits, row[0])
        tolerance = max(1e-3, 2 * torch.finfo(output.loss.dtype).eps)
        is_of_same = (output.loss - of_same).abs() <= tolerance * of_same.abs()
        if is_of_same and (output.loss - of_same).abs() < (output.loss - of_next).abs():
            raise UnsupportedModelError(
                f"{_name(self._backbone)}: expected a model whose own loss predicts the next token, found a loss that "
                "predicts the same token, as in the decoder of an encoder-decoder model; use another base model"
            )

    @torch.no_grad()
    def compare(self, expected_TC: Tensor, noise_TC: Tensor) -> Tensor:
        """Check that the losses of the padding-free forward pass equal ``expected_TC``; return its hidden states
        ``[T, H]``."""
        hidden_TH = self._hidden(self._ids_T)
        found_TC = self._losses(hidden_TH)
        difference_TC = found_TC - expected_TC
        if not self._largest_ratio(difference_TC, noise_TC, expected_TC) <= _MAX_RATIO:
            apart = (difference_TC.norm() / expected_TC.norm()).item()
            own = (noise_TC.norm() / expected_TC.norm()).item()
            layout = "padded" if self._backbone.is_padded else "packed"
            raise UnsupportedModelError(
                f"{_name(self._backbone)}: expected the {layout} pass to give the model's own losses, found a relative "
                f"difference of {apart:.1e} (rounding alone: {own:.1e}); ALTO does not support this architecture yet"
            )
        return hidden_TH

    def check_isolation(self, before_TH: Tensor, noise_TC: Tensor, *, by_gradient: bool = True) -> None:
        """Check that the tokens of another row do not change the rows of ``before_TH``. If these change by rounding,
        ``by_gradient`` checks the gradient too."""
        ends = list(itertools.accumulate(self._lengths, initial=0))
        changed = slice(ends[_CHANGED], ends[_CHANGED + 1])
        is_kept_T = torch.ones(len(self._ids_T), dtype=torch.bool, device=self._ids_T.device)
        is_kept_T[changed] = False
        other_T = torch.where(is_kept_T, self._ids_T, self._other_ids_T)
        with torch.no_grad():
            after_TH = self._hidden(other_T)
            if torch.equal(before_TH[is_kept_T], after_TH[is_kept_T]):
                return
            losses_TC = self._losses(before_TH)
            difference_TC = (self._losses(after_TH) - losses_TC)[is_kept_T]
        is_alone = self._largest_ratio(difference_TC, noise_TC, losses_TC) <= _MAX_RATIO
        if not is_alone or (by_gradient and self._gradient(is_kept_T)[changed].any()):
            raise UnsupportedModelError(
                f"{_name(self._backbone)}: expected rows that do not depend on other rows, found one that changes with "
                "the tokens of another row of the same pass; use another base model"
            )

    @torch.no_grad()
    def check_causality(self, before_TH: Tensor, noise_TC: Tensor) -> None:
        """Check that the second half of the longest row does not change its first half."""
        first = sum(self._lengths[: self._lengths.index(max(self._lengths))])
        last = first + max(self._lengths)
        middle = (first + last) // 2
        other_T = torch.cat([self._ids_T[:middle], self._other_ids_T[middle:last], self._ids_T[last:]])
        losses_TC = self._losses(before_TH)
        difference_TC = (self._losses(self._hidden(other_T)) - losses_TC)[first:middle]
        if not self._largest_ratio(difference_TC, noise_TC, losses_TC) <= _MAX_RATIO:
            has_switch = getattr(self._backbone.model.config, "is_decoder", None) is False
            remedy = "set is_decoder to true in its config.json, or " if has_switch else ""
            raise UnsupportedModelError(
                f"{_name(self._backbone)}: expected a model whose tokens depend only on earlier tokens, found one that "
                f"sees later tokens; {remedy}use another base model"
            )

    def _gradient(self, is_kept_T: Tensor) -> Tensor:
        """Return the gradient of the kept rows with respect to every token's embedding."""
        leaves: list[Tensor] = []

        def catch(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]

        hook = self._backbone.model.get_input_embeddings().register_forward_hook(catch)
        try:
            with torch.enable_grad():
                hidden_TH = self._hidden(self._ids_T)[is_kept_T]
                weights_H = torch.linspace(0.5, 1.5, hidden_TH.shape[-1], device=hidden_TH.device)
                (hidden_TH.float() @ weights_H).sum().backward()
        finally:
            hook.remove()
        gradient = leaves[0].grad
        assert gradient is not None
        gradient_PE = gradient.flatten(0, 1)
        if not self._backbone.is_padded:
            return gradient_PE
        return PaddedRows(self._lengths, [0] * len(self._lengths), gradient.device).collect(gradient_PE)

    def _hidden(self, ids_T: Tensor) -> Tensor:
        return self._backbone.hidden_states(ids_T, self._positions_T, self._lengths)

    def _losses(self, hidden_TH: Tensor) -> Tensor:
        """Return losses ``[T, C]``, computed as in training."""
        num_targets = self._targets_TC.shape[1]
        is_wide = hidden_TH.dtype == torch.float32
        with widened(self._backbone.model.get_output_embeddings()) if is_wide else nullcontext():
            losses = self._backbone.token_losses(
                hidden_TH.repeat_interleave(num_targets, 0), self._targets_TC.flatten()
            )
        return losses.reshape(-1, num_targets)

    def _largest_ratio(self, difference_TC: Tensor, noise_TC: Tensor, losses_TC: Tensor) -> float:
        """Return the largest difference of a token's losses, divided by the largest difference that rounding causes;
        losses are float32."""
        noise = _rms(noise_TC).max() + torch.finfo(torch.float32).eps * _rms(losses_TC).max()
        worst: float = (_rms(difference_TC).max() / noise).item()
        return worst


def _rms(values_TC: Tensor) -> Tensor:
    return values_TC.square().mean(-1).sqrt()


def _name(backbone: PaddingFree) -> str:
    return type(backbone.model).__name__


def _set_patterns(patterns: Any) -> None:
    for module, pattern in patterns.items():
        set_pattern(module, pattern)


@contextmanager
def _perturbed_outputs(model: nn.Module) -> Iterator[None]:
    """Change the output of every module without submodules by up to one rounding, at random."""
    generators: dict[torch.device, torch.Generator] = {}

    def move(_: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(0)
        unit = torch.empty(output.shape, device=output.device).uniform_(-1, 1, generator=generators[output.device])
        # Models of any dtype compute norms and rotations in float32.
        rounding = max(torch.finfo(output.dtype).eps, torch.finfo(torch.float32).eps) / 2
        exact = output.to(torch.promote_types(output.dtype, torch.float64))
        return (exact * (1 + rounding * unit)).to(output.dtype)

    hooks = [module.register_forward_hook(move) for module in model.modules() if not any(module.children())]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def refusing(model: nn.Module) -> Iterator[None]:
    """Translate any error of an unknown model into :class:`UnsupportedModelError`."""
    try:
        yield
    except AltoError:
        raise
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, torch.distributed.DistError):
            raise
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise UnsupportedModelError(
            f"{type(model).__name__}: expected a model that runs on a few rows, found that it fails "
            f"({type(error).__name__}: {reason}); use another base model"
        ) from error
