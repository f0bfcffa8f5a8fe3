"""The load-balancing loss of the routers in a mixture of experts: ``E · Σ_e f_e · P_e`` over some tokens.

``f_e`` is how often a token chooses expert ``e``, ``P_e`` the expert's mean probability, both over the tokens of all
layers with a router. Only ``P`` has a gradient. Source: ``load_balancing_loss_func`` of transformers 5, after Switch
Transformers (https://huggingface.co/papers/2101.03961), equations 4 to 6.

Shapes: ``T`` tokens, ``U`` runs of them, ``E`` experts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from alto.backbone.backbone import Backbone
from alto.backbone.probe import refusing
from alto.backbone.sharding import find_body
from alto.errors import UnsupportedModelError
from alto.kernels import upload
from alto.spec import find_method

_KEY = "router_aux_loss_coef"
_NUM_TOKENS = 23
_TOLERANCE = 1e-4
"""Largest relative difference of two equal losses whose terms were added in different orders."""


def router_coefficient(model: PreTrainedModel, given: float | None, method: str) -> float:
    """Return the factor of the load-balancing loss in the loss of a job; 0 if the loss is not added.

    Args:
        given: The job's ``router_aux_loss_coef``. None behaves as TRL 1.16: the model's own factor with methods that
            learn from the losses of tokens (for some, such as ``orpo``, only if its ``output_router_logits`` is true).

    Raises:
        UnsupportedModelError: ``given`` is not 0, but the model is not a mixture of experts with such a loss.
    """
    has_loss = _has_loss(model)
    if given and not has_loss:
        raise UnsupportedModelError(
            "router_aux_loss_coef: expected a mixture of experts for which transformers computes the loss that "
            f"balances the load of experts, found {type(model).__name__}; remove the key"
        )
    entry = find_method(method).entry
    if given is not None or not has_loss or entry.problem_types:
        return given or 0.0
    text = model.config.get_text_config()
    return _own_coefficient(text) if text.output_router_logits or not entry.follows_output_router_logits else 0.0


def router_notes(model: PreTrainedModel, given: Sequence[float | None], method: str) -> tuple[str, ...]:
    """Return a notice if the model has a factor for this loss and some jobs do not set their own; it says whether these
    jobs train with the loss.

    Args:
        given: ``router_aux_loss_coef`` of every job.
    """
    own = _own_coefficient(model.config.get_text_config())
    if not own or None not in given or not _has_routers(model):
        return ()
    if router_coefficient(model, None, method):
        return (
            f"{_KEY} {own:g} of the base model: the loss that balances the load of its experts is added to a job's "
            f"loss in training with this factor, as TRL's trainers do; {_KEY}: 0 leaves it out.",
        )
    why = (
        f"transformers computes none for {type(model).__name__}"
        if not _has_loss(model)
        else f"as in TRL's trainer of this method without output_router_logits; {_KEY}: {own:g} adds it"
        if find_method(method).entry.follows_output_router_logits
        else "as in transformers' Trainer"
    )
    return (
        f"{_KEY} {own:g} of the base model: the loss that balances the load of its experts is not added to a job's "
        f"loss: {why}.",
    )


@contextmanager
def recorded_routers(backbone: Backbone) -> Iterator[list[Tensor]]:
    """Yield a list that holds the router logits of the last forward pass inside the context: ``[T, E]`` for every layer
    with a router, with the tokens in the order of the batch.

    The model itself returns these logits with ``output_router_logits``.

    Raises:
        UnsupportedModelError: A forward pass returns no router logits.
    """
    found: list[Tensor] = []

    def request(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "output_router_logits": True}

    def record(_module: Any, _args: Any, output: Any) -> None:
        given = getattr(output, "router_logits", None)
        if not given:
            raise _refusal(backbone.model, "no router_logits in its output")
        rows = backbone.current_rows()
        flat = [logits.flatten(0, -2) for logits in given]
        found[:] = flat if rows is None else [rows.collect(logits_PE) for logits_PE in flat]

    body = find_body(backbone.model)
    handles = [body.register_forward_pre_hook(request, with_kwargs=True), body.register_forward_hook(record)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def router_sums(
    backbone: Backbone, routers: Sequence[Tensor], lengths: Sequence[int], weights_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return how often each expert is chosen in every run of tokens, and the sum of its probabilities, over all layers.

    Each run is summed separately, in an order that depends only on its length, so its bits depend on no other run.

    Args:
        routers: Logits ``[T, E]`` of every layer, from :func:`recorded_routers`.
        lengths: Number of tokens of every run, in order; they sum to ``T``.
        weights_T: Weight of each token, float64; None for 1.

    Returns:
        Two tensors ``[U, E]``, float64; only the second has a gradient.
    """
    device, num_chosen = routers[0].device, _num_chosen(backbone.model)
    lengths_U = upload(lengths, torch.int64, device)
    run_T = torch.arange(len(lengths), device=device).repeat_interleave(lengths_U, output_size=sum(lengths))
    shape = (len(lengths), routers[0].shape[-1])
    chosen_UE, probabilities_UE = (torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(2))
    for logits_TE in routers:
        probabilities_TE = logits_TE.softmax(-1)
        chosen_TE = torch.zeros_like(probabilities_TE).scatter_(-1, probabilities_TE.topk(num_chosen).indices, 1.0)
        chosen_UE = chosen_UE + _run_sums(chosen_TE, lengths_U, weights_T)
        probabilities_UE = probabilities_UE + _RunSums.apply(probabilities_TE, lengths_U, weights_T, run_T)
    return chosen_UE, probabilities_UE


@torch.no_grad()
def check_router_loss(backbone: Backbone) -> None:
    """Check on a few tokens that ALTO's router loss equals the model's own.

    Raises:
        UnsupportedModelError: The model's own loss differs, or the model returns none.
    """
    model = backbone.model
    num_tokens = min(_NUM_TOKENS, int(model.config.get_text_config().vocab_size), backbone.max_length or _NUM_TOKENS)
    ids_1L = torch.arange(num_tokens, device=backbone.device)[None]
    with refusing(model):
        with backbone.own_attention(), recorded_routers(backbone) as routers:
            expected = backbone.own_router_loss(ids_1L)
        if not isinstance(expected, Tensor):
            raise _refusal(model, "no aux_loss in its output")
        chosen_1E, probabilities_1E = router_sums(backbone, routers, [num_tokens])
        num_summed = num_tokens * len(routers)
        found = (chosen_1E * probabilities_1E).sum() * routers[0].shape[-1] / num_summed**2
        if not (found - expected).abs() <= _TOLERANCE * expected.abs():
            raise _refusal(model, f"{float(expected):g} on a few tokens, where that is {float(found):g}")


class _RunSums(torch.autograd.Function):
    """Sums ``[U, E]`` over runs of tokens; the backward pass needs only the run and the weight of each token."""

    @staticmethod
    def forward(ctx: Any, values_TE: Tensor, lengths_U: Tensor, weights_T: Tensor | None, run_T: Tensor) -> Tensor:
        ctx.weights_T, ctx.run_T, ctx.dtype = weights_T, run_T, values_TE.dtype
        return _run_sums(values_TE, lengths_U, weights_T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient_TE = gradients[0].index_select(0, ctx.run_T)
        if ctx.weights_T is not None:
            gradient_TE = gradient_TE * ctx.weights_T[:, None]
        return gradient_TE.to(ctx.dtype), None, None, None


def _run_sums(values_TE: Tensor, lengths_U: Tensor, weights_T: Tensor | None) -> Tensor:
    values_TE = values_TE.double() if weights_T is None else values_TE.double() * weights_T[:, None]
    # unsafe: the lengths are valid; checking them would synchronise host and device.
    return torch.segment_reduce(values_TE, "sum", lengths=lengths_U, axis=0, unsafe=True)


def _has_loss(model: PreTrainedModel) -> bool:
    """Return whether the model has routers, can return their logits, and has code that computes their loss."""
    is_switched = hasattr(model.config.get_text_config(), "output_router_logits")
    has_function = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    return is_switched and has_function and _has_routers(model)


def _has_routers(model: PreTrainedModel) -> bool:
    """Return whether the model has a layer whose router logits transformers records; some configurations have none."""
    recorders: list[Any] = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            found = (module._can_record_outputs or {}).get("router_logits", [])
            recorders += found if isinstance(found, list) else [found]
    kinds = tuple(
        kind for recorder in recorders if isinstance(kind := getattr(recorder, "target_class", recorder), type)
    )
    return any(isinstance(module, kinds) for module in model.modules())


def _own_coefficient(text: PreTrainedConfig) -> float:
    return float(getattr(text, _KEY, None) or 0.0)


def _num_chosen(model: PreTrainedModel) -> int:
    """Return the number of experts that a token chooses."""
    own = getattr(model, "num_experts_per_tok", None)
    return int(model.config.get_text_config().num_experts_per_tok if own is None else own)


def _refusal(model: PreTrainedModel, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__}: expected the loss that balances the load of experts as transformers computes it for "
        f"Mixtral, found {found}; set {_KEY} to 0, or use another base model"
    )
