"""The adapter that a job's configuration defines on a base model: its modules, and the rank and scale of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from alto.errors import TargetModuleError, UnsupportedError
from alto.lora.biases import trained_biases
from alto.lora.heads import head_tensor, whole_tensors
from alto.lora.layout import AdapterShape, TargetModule
from alto.lora.magnitudes import magnitudes
from alto.lora.peft_format import adapter_scale, lora_scale
from alto.lora.targets import adaptable, embedding_base, find_targets, head_base, linear_modules
from alto.records import LabelSet
from alto.spec import SHAPE_FIELDS, JobConfig, module_matches, of_module


def adapter_shape(model: PreTrainedModel, config: JobConfig, labels: LabelSet | None = None) -> AdapterShape:
    """Return the shape of the adapter that a job trains.

    The shape includes DoRA magnitudes (``use_dora``), trained biases, modules trained in full (``modules_to_save``),
    and a classification head for ``labels`` if given.

    A module's rank is the value of the first key of ``rank_pattern`` that matches its name, otherwise ``r``. Its scale
    is ``lora_alpha / r`` (``lora_alpha / sqrt(r)`` with ``use_rslora``), computed from the module's own rank and alpha;
    ``alpha_pattern`` overrides ``lora_alpha`` as ``rank_pattern`` overrides ``r``. Source: PEFT 0.21,
    ``LoraModel._create_and_replace``.

    Raises:
        TargetModuleError: See :func:`alto.lora.find_targets`; or a key of a pattern matches no linear module.
        UnsupportedError: The output head or the embeddings are targeted together with a setting that is not
            implemented; or see :func:`alto.lora.biases.trained_biases`, :func:`alto.lora.magnitudes.magnitudes` and
            :func:`alto.lora.heads.whole_tensors`.
    """
    targets = _targets(model, config)
    for target in targets:
        if not target.is_in_body:
            _check_end(model, target, config, has_labels=labels is not None)
    for key, pattern in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        _check_pattern(key, [name for name, _ in pattern], _named(model))
    ranks = tuple(of_module(module.name, config.rank_pattern, config.r) for module in targets)
    alphas = tuple(of_module(module.name, config.alpha_pattern, config.lora_alpha) for module in targets)
    whole = adapter_scale(config)
    ratios = tuple(
        1.0
        if (rank, alpha) == (config.r, config.lora_alpha)
        else lora_scale(rank, alpha, use_rslora=config.use_rslora) / whole
        for rank, alpha in zip(ranks, alphas, strict=True)
    )
    return AdapterShape(
        rank=max(ranks),
        targets=targets,
        own_ranks=ranks if len(set(ranks)) > 1 else (),
        scale_ratios=ratios if any(ratio != 1.0 for ratio in ratios) else (),
        extras=(
            *(magnitudes(model, targets) if config.use_dora else ()),
            *trained_biases(model, config, targets),
            *whole_tensors(model, config, {target.name for target in targets}, has_labels=labels is not None),
            *(() if labels is None else (head_tensor(model, labels),)),
        ),
    )


def rank_notes(model: PreTrainedModel, configs: Iterable[JobConfig]) -> tuple[str, ...]:
    """Return a notice if a rank exceeds the smaller dimension of a module.

    The product ``A B`` cannot reach this rank; PEFT trains it without a warning.

    Args:
        model: The base model, with or without weights, with or without injected adapters.

    Raises:
        TargetModuleError: See :func:`adapter_shape`.
    """
    smallest = min((_smaller_side(module) for module in linear_modules(model)), default=0)
    wide = [config for config in configs if max(config.r, *(rank for _, rank in config.rank_pattern), 0) > smallest]
    # Compute each distinct shape only once; most jobs of a search share one.
    distinct = {tuple(getattr(config, key) for key in SHAPE_FIELDS): config for config in wide}
    largest: dict[TargetModule, int] = {}
    for config in distinct.values():
        shape = adapter_shape(model, config)
        for module, rank in zip(shape.targets, shape.ranks, strict=True):
            if rank > _smaller_side(module):
                largest[module] = max(rank, largest.get(module, 0))
    if not largest:
        return ()
    module, rank = next(iter(largest.items()))
    others = f" and of {len(largest) - 1:,} other modules" if len(largest) > 1 else ""
    return (
        f"Rank {rank} is larger than the smaller side of {module.name} ({module.in_features} × {module.out_features})"
        f"{others}. It is trained with this rank, as in PEFT; a rank as large as that side learns the same with "
        "fewer parameters. Lower r, or name the modules in rank_pattern.",
    )


def tying_notes(model: PreTrainedModel, configs: Iterable[JobConfig]) -> tuple[str, ...]:
    """Return a notice if jobs train the output head or the embeddings of a model that ties their weights.

    Takes the same arguments and raises the same errors as :func:`rank_notes`.
    """
    if getattr(head_base(model), "weight", None) is not embedding_base(model).weight:
        return ()
    distinct = {tuple(getattr(config, key) for key in SHAPE_FIELDS): config for config in configs}
    targets = [target for config in distinct.values() for target in _targets(model, config)]
    if any(not target.is_in_body for target in targets):
        merged = "Merging it with PEFT would change both; alto export --merged gives each its own weight."
    elif any(config.modules_to_save for config in distinct.values()):
        merged = "After a merge with PEFT, they are two weights."
    else:
        return ()
    return (
        "The output head and the embeddings of the base model are one weight: training one of them does not change "
        f"the other, as in PEFT. {merged}",
    )


def _targets(model: PreTrainedModel, config: JobConfig) -> tuple[TargetModule, ...]:
    return find_targets(
        model,
        config.target_modules,
        target_parameters=config.target_parameters or (),
        exclude_modules=config.exclude_modules,
        layers_to_transform=config.layers_to_transform,
        layers_pattern=config.layers_pattern,
    )


def _named(model: PreTrainedModel) -> tuple[TargetModule, ...]:
    """Return the modules that ``target_modules`` may contain."""
    return tuple(module for module in adaptable(model) if module.num_experts is None and not module.is_router)


def _check_end(model: PreTrainedModel, target: TargetModule, config: JobConfig, *, has_labels: bool) -> None:
    """Check that an adapter on the output head or the embeddings can be trained with ``config``.

    Raises:
        UnsupportedError: The adapter cannot be trained.
    """
    what, module = ("output head", head_base(model)) if target.is_head else ("embeddings", embedding_base(model))
    assert module is not None
    if target.is_head and has_labels:
        setting, found, remedy = "method classification or regression", "which a classification head replaces", "it out"
    elif isinstance(module.weight, DTensor):
        setting, found = "num_gpus above 1", "whose adapters are trained on one GPU only"
        remedy = "it out, or set num_gpus: 1"
    elif config.use_dora:
        setting, found, remedy = "use_dora", "for which DoRA is not implemented", "it or use_dora out"
    elif target.is_head and config.bias != "none" and module.bias is not None:
        setting, found, remedy = f"bias: {config.bias}", "whose bias is not trained", "it or bias out"
    elif target.is_embedding and config.loraplus_lr_ratio != 1.0:
        setting, found = "loraplus_lr_ratio", "for which PEFT then uses a fixed rate of 1e-6"
        remedy = "it or loraplus_lr_ratio out"
    else:
        return
    raise UnsupportedError(
        f"target_modules: expected modules of the base model's body with {setting}, found its {what}, {found}; "
        f"leave {remedy}"
    )


def _smaller_side(module: TargetModule) -> int:
    return min(module.in_features, module.out_features)


def _check_pattern(key: str, names: Sequence[str], modules: Sequence[TargetModule]) -> None:
    for name in names:
        if not any(module_matches(name, module.name) for module in modules):
            leaves = sorted({module.name.rsplit(".", 1)[-1] for module in modules})
            raise TargetModuleError(
                f"{key}: expected to find linear modules of the model, found none under {name!r}; the model has "
                f"{', '.join(leaves)}; correct the name, or remove it"
            )
