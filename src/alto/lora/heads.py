"""Classification heads: each job has its own, an extra tensor ``[K, H]`` of its adapter.

Shapes: ``Q`` rows, ``H`` hidden size, ``K`` labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from alto.errors import TargetModuleError, UnsupportedError
from alto.lora.bank import AdapterBank
from alto.lora.layout import ExtraTensor
from alto.lora.targets import base_modules, embedding_base, head_base
from alto.records import LabelSet
from alto.spec import JobConfig

HEAD = "score.weight"
"""Name of the head's weight in transformers' ``...ForSequenceClassification`` models."""


def head_tensor(model: PreTrainedModel, labels: LabelSet) -> ExtraTensor:
    """Return the head of a job that learns ``labels`` on ``model``."""
    return ExtraTensor(name=HEAD, shape=(labels.num_labels, model.config.get_text_config().hidden_size))


class BankHeads:
    """The classification heads of the jobs in a bank; a slot may have none."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank

    def initialise(self, slot: int, model: PreTrainedModel, seed: int) -> None:
        """Initialise the head of ``slot`` as transformers initialises the head of a model without one.

        The values depend only on the seed, the model and the number of labels.
        """
        weight_KH = self._of(self._bank.params_ZP, slot)
        linear = nn.Linear(weight_KH.shape[1], weight_KH.shape[0], bias=False)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model._init_weights(linear)
        weight_KH.copy_(linear.weight.detach())

    def logits(self, hidden_QH: Tensor, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the logits ``[Q, K]`` in the dtype of the bank; the backward pass adds the gradients of the heads to
        those in the bank.

        Every head is multiplied only with the rows of its own job, so results do not depend on other
        jobs.

        Args:
            slots: Slot of every job; all their heads have the same number of labels.
            counts: Number of rows of every job, in order.
        """
        bank = self._bank
        weights = [self._of(bank.params_ZP, slot) for slot in slots]
        gradients = [self._of(bank.grads_ZP, slot) for slot in slots]
        logits_QK: Tensor = _HeadProducts.apply(
            hidden_QH.to(bank.params_ZP.dtype), bank.anchor, weights, gradients, tuple(counts)
        )
        return logits_QK

    def _of(self, rows_ZP: Tensor, slot: int) -> Tensor:
        return next(tensor for extra, tensor in self._bank.extras(rows_ZP, slot) if extra.name == HEAD)


class _HeadProducts(torch.autograd.Function):
    """Products with several weights, whose gradients are added in place; autograd sees only activations."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_QH: Tensor,
        anchor: Tensor,
        weights: list[Tensor],
        gradients: list[Tensor],
        counts: tuple[int, ...],
    ) -> Tensor:
        ctx.save_for_backward(hidden_QH)
        ctx.weights, ctx.gradients, ctx.counts = weights, gradients, counts
        parts = zip(hidden_QH.split(counts), weights, strict=True)
        return torch.cat([F.linear(part_QH, weight_KH) for part_QH, weight_KH in parts])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (hidden_QH,) = ctx.saved_tensors
        parts = list(zip(gradients[0].split(ctx.counts), hidden_QH.split(ctx.counts), strict=True))
        for (d_logits_QK, part_QH), gradient_KH in zip(parts, ctx.gradients, strict=True):
            gradient_KH.addmm_(d_logits_QK.T, part_QH)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        d_hidden = [d_logits_QK @ weight_KH for (d_logits_QK, _), weight_KH in zip(parts, ctx.weights, strict=True)]
        return torch.cat(d_hidden), None, None, None, None


# Modules of the base model that jobs train in full (``modules_to_save``): the output head and the embeddings.
#
# Each job trains its own copy of the weight, an extra tensor of its adapter that starts as the frozen weight.

_ENDING = ".weight"


def whole_name(module: str) -> str:
    """Return the name of a module's weight."""
    return f"{module}{_ENDING}"


def is_whole(name: str) -> bool:
    """Return whether an extra tensor of an adapter is the full weight of a module of the base model."""
    return name.endswith(_ENDING) and name != HEAD


def module_of_whole(name: str) -> str:
    """Return the name of the module that has the weight ``name``."""
    return name.removesuffix(_ENDING)


def whole_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that jobs can train in full, by full name: the output head, if it has no bias,
    and the token embeddings."""
    head, embeddings = head_base(model), embedding_base(model)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in base_modules(model).items():
        is_head = module is head and isinstance(module, nn.Linear) and module.bias is None
        if is_head or (module is embeddings and isinstance(module, nn.Embedding)):
            weight: Any = module.weight
            shapes[whole_name(name)] = tuple(weight.shape)
    return shapes


def whole_tensors(
    model: PreTrainedModel, config: JobConfig, targets: Iterable[str], *, has_labels: bool
) -> tuple[ExtraTensor, ...]:
    """Return the weights that a job trains in full, in the model's order.

    Weight decay applies to them. With LoRA+ they use the learning rate of ``A``.

    Args:
        targets: Full names of the modules with low-rank matrices.
        has_labels: Whether the job trains a classification head instead of the output head.

    Raises:
        TargetModuleError: The model has no such module, or the module also has low-rank matrices.
        UnsupportedError: Training this module in full, or with the job's other settings, is not implemented.
    """
    if not config.modules_to_save:
        return ()
    head, modules, shapes = head_base(model), base_modules(model), whole_shapes(model)
    selected: set[str] = set()
    for text in config.modules_to_save:
        named = {name for name in modules if name == text or name.endswith(f".{text}")}
        if not named:
            raise TargetModuleError(
                f"modules_to_save: expected modules of the model, found none under {text!r}; use "
                f"{' or '.join(map(module_of_whole, shapes))}"
            )
        for name in sorted(named):
            if whole_name(name) not in shapes:
                raise UnsupportedError(
                    f"modules_to_save: expected {' or '.join(map(module_of_whole, shapes))}, found {text!r}, which is "
                    f"{name}, a {type(modules[name]).__name__}; ALTO cannot train this module in full: leave it out, "
                    "or name it in target_modules if it is linear"
                )
        selected |= named
    for name in sorted(selected):
        _check(name, modules[name], config, is_head=modules[name] is head, has_labels=has_labels)
        if name in targets:
            raise TargetModuleError(
                f"modules_to_save: expected modules without low-rank matrices, found {name}, which is also in "
                "target_modules; name it in only one of them"
            )
    return tuple(
        ExtraTensor(name=whole_name(name), shape=shapes[whole_name(name)]) for name in modules if name in selected
    )


def _check(name: str, module: Any, config: JobConfig, *, is_head: bool, has_labels: bool) -> None:
    if is_head and has_labels:
        expected, found = "modules of a classifier", "the output head, which a classification head replaces"
        remedy = "leave it out"
    elif isinstance(module.weight, DTensor):
        expected, found, remedy = "num_gpus: 1", "a base model that is sharded over GPUs", "set num_gpus: 1"
    elif not is_head and config.optim.endswith("8bit"):
        expected, found = "an optimizer of 32 bits", f"{config.optim}, whose states transformers keeps in 32 bits there"
        remedy = "set optim: adamw_torch"
    else:
        return
    raise UnsupportedError(f"modules_to_save: expected {expected} for {name}, found {found}; {remedy}")


def whole_weights(extras: Mapping[str, Any]) -> list[str]:
    """Return the modules that are trained in full, given an adapter's extra tensors."""
    return [module_of_whole(name) for name in extras if is_whole(name)]
