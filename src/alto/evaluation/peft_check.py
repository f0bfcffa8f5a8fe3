"""A check that PEFT loads an adapter as it was trained: PEFT's and ALTO's results on one base model are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alto.backbone import LOGIT_TOLERANCES, Backbone, classifier_of, is_out_of_memory
from alto.base import first_line
from alto.evaluation.target import loaded_adapters
from alto.lora import (
    HEAD,
    NUM_COMPARED,
    PREFIX,
    SavedAdapter,
    as_in_peft,
    compared_logits,
    eject,
    extra_in_peft,
    is_bias,
    is_magnitude,
    is_whole,
    module_of,
    module_of_whole,
    read_saved_adapter,
    silent_peft,
)
from alto.records import AdapterCheck, LabelSet

_MAX_SHOWN = 2


class PeftCheck:
    """A check of finished adapters, which loads them with PEFT onto their base model after training.

    Args:
        backbone: The base model that the adapters were trained on. It has no adapters after a check.
        num_ranks: Number of ranks that the base model is sharded over; with more than one, nothing is checked.
    """

    def __init__(self, backbone: Backbone, *, num_ranks: int = 1) -> None:
        self._backbone = backbone
        self._num_ranks = num_ranks

    def __call__(self, folder: Path) -> AdapterCheck:
        """Compare the adapter in ``folder`` as loaded by PEFT and by ALTO: adapted modules, matrices, scales, and the
        logits of a few tokens."""
        if self._num_ranks > 1:
            return AdapterCheck(status="unchecked", why=f"the base model is sharded over {self._num_ranks} GPUs")
        try:
            with silent_peft():
                import peft
        except ImportError as error:
            why = "peft is not installed" if error.name == "peft" else f"peft cannot be imported ({first_line(error)})"
            return AdapterCheck(status="unchecked", why=why)
        version = str(peft.__version__)
        try:
            adapter = read_saved_adapter(folder)
            eject(self._backbone.model)
            if not self._holds_parameters(adapter):
                why = (
                    "the base model is quantised, and its layers are stored here in a different form than PEFT expects"
                )
                return AdapterCheck(status="unchecked", why=why, peft=version)
            model = self._model_for(adapter)
            ours_TV = self._own_logits(adapter, model)
            with silent_peft(), _restored(self._backbone.model, filter(is_bias, adapter.weights.extras)):
                faults, theirs_TV = self._peft_logits(peft.PeftModel.from_pretrained, adapter, model)
        except Exception as error:  # no error here may fail the task: its adapter is already saved
            if is_out_of_memory(error):
                return AdapterCheck(status="unchecked", why="there was not enough memory for the check", peft=version)
            why = f"loading the adapter fails with {type(error).__name__}: {first_line(error)}"
            return AdapterCheck(status="different", why=why, peft=version)
        difference = ((theirs_TV - ours_TV).norm() / ours_TV.norm()).item()
        # Rounding to 16 bits may hide the effect of an adapter, so its modules and numbers are compared exactly, too.
        if not difference <= LOGIT_TOLERANCES[self._backbone.dtype]:
            faults.append(f"logits differ by {difference:.1e} (relative)")
        return AdapterCheck(
            status="different" if faults else "equal", why="; ".join(faults), difference=difference, peft=version
        )

    def _holds_parameters(self, adapter: SavedAdapter) -> bool:
        """Return whether all ``target_parameters`` of the adapter are parameters of the model.

        The weights of ALTO's quantised layers are not: they are dequantised on use.
        """
        held = {name for name, _ in self._backbone.model.named_parameters()}
        return held.issuperset(adapter.target_parameters)

    def _model_for(self, adapter: SavedAdapter) -> PreTrainedModel:
        """Return the base model, with a new classification head if the adapter has one."""
        if not adapter.has_head:
            return self._backbone.model
        names = tuple(f"LABEL_{index}" for index in range(len(adapter.weights.extras[HEAD])))
        return classifier_of(self._backbone.model, LabelSet(problem_type="single_label_classification", names=names))

    @torch.no_grad()
    def _own_logits(self, adapter: SavedAdapter, model: Any) -> Tensor:
        backbone = self._backbone
        if adapter.has_head:
            model.score.weight.copy_(adapter.weights.extras[HEAD])
        with (
            loaded_adapters(backbone, [adapter], backbone.path) as served,
            backbone.own_attention(),
            served.use(served.schedule([NUM_COMPARED])),
        ):
            return self._logits(model)

    @torch.no_grad()
    def _peft_logits(
        self, load: Callable[..., Any], adapter: SavedAdapter, base: PreTrainedModel
    ) -> tuple[list[str], Tensor]:
        """Return the differences in PEFT's modules, as sentences, and PEFT's logits."""
        device = self._backbone.device
        # PEFT draws random numbers to initialise weights before it reads the adapter.
        with torch.random.fork_rng([device] if device.type == "cuda" else []), self._backbone.own_attention():
            model = load(base, str(adapter.folder), torch_device=str(device)).eval()
            layers = {module_of(name): layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
            return [*_faults(adapter, layers), *_faults_of_extras(adapter, model)], self._logits(model)

    def _logits(self, model: Callable[..., Any]) -> Tensor:
        vocabulary = self._backbone.model.config.get_text_config().vocab_size
        return compared_logits(model, vocabulary, self._backbone.device)


def _faults(adapter: SavedAdapter, layers: Mapping[str, Any]) -> list[str]:
    matrices = as_in_peft(adapter.weights)
    absent = [name for name in matrices if name not in layers]
    others = [name for name in layers if name not in matrices]
    scales = dict(zip(matrices, (adapter.scales[name] for name in adapter.weights), strict=True))
    changed = [name for name in matrices if name in layers and not _is_same(matrices[name], scales[name], layers[name])]
    kinds = (
        (absent, "without the adapter it was trained with"),
        (others, "with an adapter that was not trained"),
        (changed, "with different numbers or a different scale"),
    )
    return [f"{_named(names)} {fault}" for names, fault in kinds if names]


def _faults_of_extras(adapter: SavedAdapter, model: Any) -> list[str]:
    """Return the differences in the extra tensors.

    PEFT rounds biases to the dtype of the parameters that they replace.
    """
    changed = []
    for name, tensor in adapter.weights.extras.items():
        held = model.get_parameter(_parameter_of(name, adapter)).cpu()
        if not torch.equal(tensor.to(held.dtype), held):
            changed.append(name)
    return [f"{_named(changed)} with different numbers"] if changed else []


def _parameter_of(extra: str, adapter: SavedAdapter) -> str:
    """Return the full name of the parameter that holds the extra tensor ``extra`` in PEFT's model."""
    if extra == HEAD or is_whole(extra):
        return f"{PREFIX}{module_of_whole(extra)}.modules_to_save.default.weight"
    return extra_in_peft(extra, adapter.weights) + (".default.weight" if is_magnitude(extra) else "")


def _is_same(matrices: tuple[Tensor, Tensor], scale: float, layer: Any) -> bool:
    (active,) = layer.active_adapters
    pair = (layer.lora_A, layer.lora_B)
    if active not in layer.lora_A:
        pair = (layer.lora_embedding_A, layer.lora_embedding_B)  # parameters, not modules
    held = (getattr(part[active], "weight", part[active]).float().cpu() for part in pair)
    are_equal = all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(matrices, held, strict=True))
    return are_equal and math.isclose(layer.scaling[active], scale)


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_SHOWN])
    return shown + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")


@contextmanager
def _restored(model: PreTrainedModel, parameters: Iterable[str]) -> Iterator[None]:
    """Restore the modules of ``model``, and the values of ``parameters``, which PEFT overwrites, when the context ends,
    even after an error. No parameter requires gradients afterwards."""
    modules = dict(model.named_modules())
    values = {parameter: parameter.clone() for parameter in map(model.get_parameter, parameters)}
    try:
        yield
    finally:
        model.requires_grad_(False)
        for parameter, value in values.items():
            parameter.copy_(value)
        for name, module in modules.items():
            if name and model.get_submodule(name) is not module:
                model.set_submodule(name, module)
        if hasattr(model, "peft_config"):
            del model.peft_config
