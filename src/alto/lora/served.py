"""Finished adapters that share a model, for forward passes with tokens of several adapters and without training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from transformers import PreTrainedModel

from alto.kernels import TokenSchedule
from alto.lora.bank import AdapterBank
from alto.lora.fit import initial_values
from alto.lora.heads import HEAD
from alto.lora.injection import eject, inject
from alto.lora.layout import AdapterShape, AdapterWeights, BankLayout, ExtraTensor
from alto.lora.linear import ForwardContext, PositionMap
from alto.lora.targets import adaptable, find_shared_inputs


class ServedAdapters:
    """The adapters that :func:`serving` has put on a model, one per slot."""

    def __init__(self, context: ForwardContext, scales: Sequence[float]) -> None:
        self._context = context
        self._scales = tuple(scales)

    def __len__(self) -> int:
        return len(self._scales)

    def schedule(self, num_tokens: Sequence[int]) -> TokenSchedule:
        """Return the schedule of forward passes with ``num_tokens`` tokens per slot, slot after slot."""
        return TokenSchedule.build(range(len(self)), num_tokens, self._scales)

    def use(self, schedule: TokenSchedule) -> AbstractContextManager[None]:
        """Run the enclosed forward pass under ``schedule``."""
        return self._context.use(schedule)


@contextmanager
def serving(
    model: PreTrainedModel,
    adapters: Sequence[tuple[AdapterWeights, Mapping[str, float]] | None],
    forward: Callable[[], object],
    places: Callable[[], PositionMap | None] | None = None,
) -> Iterator[ServedAdapters]:
    """Put ``adapters`` on ``model`` while the context lasts.

    Adapters of any other bank are removed first, and the model has no adapters afterwards.

    Args:
        adapters: Weights of each adapter and the scale of each of its modules; they must fit the model, but ranks and
            modules may differ. None means the base model without an adapter.
        forward: Runs a forward pass of ``model``.
        places: See :class:`alto.lora.linear.ForwardContext`.
    """
    eject(model)
    layout = BankLayout(
        modules=tuple(
            module for module in adaptable(model) if any(adapter and module.name in adapter[0] for adapter in adapters)
        ),
        max_rank=max((_rank(adapter[0]) for adapter in adapters if adapter is not None), default=0),
        shared_inputs=find_shared_inputs(model, forward),
        extras=tuple({extra: None for adapter in adapters if adapter for extra in _extras(adapter[0])}),
    )
    bank = AdapterBank(
        layout,
        len(adapters),
        device=model.device,
        has_grads=False,
        initial=initial_values(model, layout.extras),
    )
    for slot, adapter in enumerate(adapters):
        if adapter is not None:
            weights, scales = adapter
            targets = tuple(module for module in layout.modules if module.name in weights)
            shape = AdapterShape(
                rank=_rank(weights),
                targets=targets,
                own_ranks=tuple(weights[module.name][0].shape[-1] for module in targets),
                scale_ratios=tuple(scales[module.name] / _scale(scales) for module in targets),
                extras=_extras(weights),
            )
            bank.occupy(slot, shape)
            bank.write(slot, weights)
    try:
        yield ServedAdapters(
            inject(model, bank, places), [1.0 if adapter is None else _scale(adapter[1]) for adapter in adapters]
        )
    finally:
        eject(model)


def _rank(weights: AdapterWeights) -> int:
    return max(a_KR.shape[-1] for a_KR, _ in weights.values())


def _extras(weights: AdapterWeights) -> tuple[ExtraTensor, ...]:
    """Return the extra tensors that layers of the model use; a classification head is not among them."""
    return tuple(
        ExtraTensor(name=name, shape=tuple(tensor.shape)) for name, tensor in weights.extras.items() if name != HEAD
    )


def _scale(scales: Mapping[str, float]) -> float:
    """Return the most common scale, so that few modules, usually none, need a ratio."""
    return Counter(scales.values()).most_common(1)[0][0]
