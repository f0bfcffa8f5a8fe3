"""Biases of the base model that adapters train: ``bias: lora_only`` and ``bias: all``.

A module of the base model adds its frozen bias as usual; this code adds the difference between a slot's own bias and
the frozen one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alto.errors import UnsupportedError, UnsupportedModelError
from alto.kernels import SlotTensors, slot_bias_change
from alto.lora.bank import AdapterBank
from alto.lora.layout import ExtraTensor, TargetModule
from alto.lora.linear import AdaptedWeight, ForwardContext, SettingsModule
from alto.lora.targets import base_modules, head_base, is_reached_by_text, linear_bases
from alto.spec import JobConfig

_ENDING = ".bias"


def is_bias(name: str) -> bool:
    """Return whether an extra tensor of an adapter is a bias of the base model."""
    return name.endswith(_ENDING)


def module_of_bias(name: str) -> str:
    """Return the name of the module that has the bias ``name``."""
    return name.removesuffix(_ENDING)


def trained_biases(
    model: PreTrainedModel, config: JobConfig, targets: Sequence[TargetModule]
) -> tuple[ExtraTensor, ...]:
    """Return the biases that a job trains, in the model's order: those of modules with adapters (``lora_only``), or
    those of all modules that text reaches (``all``).

    Weight decay does not apply to them. Source: PEFT 0.21, ``BaseTuner._mark_only_adapters_as_trainable``.

    Raises:
        UnsupportedError: With ``all``, the model has a bias that is not one of :func:`biases_of`.
    """
    if config.bias == "none":
        return ()
    biases = biases_of(model)
    if config.bias == "lora_only":
        adapted = {f"{target.name}{_ENDING}" for target in targets}
        biases = {name: shape for name, shape in biases.items() if name in adapted}
    else:
        _check_all(model, biases)
    return tuple(ExtraTensor(name=name, shape=shape, has_decay=False) for name, shape in biases.items())


def biases_of(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the biases that adapters can train, by full name in the model's order.

    These are the biases of linear layers and ``torch.nn.LayerNorm``, which add their bias last.
    """
    linear = linear_bases(model)
    return {
        f"{name}{_ENDING}": tuple(bias.shape)
        for name, module in base_modules(model).items()
        if (bias := module._parameters.get("bias")) is not None
        and (name in linear or (type(module) is nn.LayerNorm and is_reached_by_text(model, name)))
    }


def _check_all(model: PreTrainedModel, known: Collection[str]) -> None:
    for name, module in base_modules(model).items():
        is_trained = module._parameters.get("bias") is not None and is_reached_by_text(model, name)
        if is_trained and f"{name}{_ENDING}" not in known:
            what = "its output head" if module is head_base(model) else f"a {type(module).__name__}"
            raise UnsupportedError(
                f"bias: expected a base model that has biases only in linear layers and torch.nn.LayerNorm, found "
                f"{name}{_ENDING} of {what}; set bias: lora_only, which trains the biases of modules with adapters, "
                "or remove the key"
            )


def bias_notes(model: PreTrainedModel, configs: Iterable[JobConfig]) -> tuple[str, ...]:
    """Return a notice if jobs train biases but the base model has none.

    Args:
        model: The base model, with or without weights, with or without injected adapters.
    """
    requested = sorted({config.bias for config in configs} - {"none"})
    if not requested or any(module._parameters.get("bias") is not None for module in base_modules(model).values()):
        return ()
    return (f"No module of the base model has a bias: bias: {' and '.join(requested)} trains the same as bias: none.",)


class MultiBiasModule(SettingsModule):
    """A frozen module without an adapter, with its own output bias for each slot.

    Args:
        base: The module; it must add its bias last.
    """

    def __init__(
        self, base: nn.Module, name: str, bank: AdapterBank, context: ForwardContext, biases: SlotTensors
    ) -> None:
        super().__init__(base, name, bank, context)
        self._biases = biases

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias. Under a schedule it cannot be used in computations."""
        bias: Any = self.base.bias
        return AdaptedWeight.of(bias, self._name) if self.is_in_forward else bias

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # writes to the bank, which is outside of graphs
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        schedule = self._context.schedule
        if schedule is None or not self._biases.is_in(schedule):
            return y
        places = self._context.places()
        num_positions = places.num_positions if places is not None else schedule.num_tokens
        if y.shape[:-1].numel() != num_positions:
            raise UnsupportedModelError(
                f"bias: expected modules that the model runs once on all {num_positions} tokens of a forward pass, "
                f"found that {self._name} runs on {y.shape[:-1].numel()}; set bias: lora_only, or remove the key"
            )
        base: Any = self.base
        change_TN = slot_bias_change(self._bank.anchor, self._biases, base.bias, schedule, y.dtype)
        change = change_TN if places is None else places.spread(change_TN)
        return y + change.view(y.shape)
