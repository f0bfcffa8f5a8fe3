"""Reading of adapters in PEFT's format; adapters that are more than plain LoRA are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from alto.base import read_json
from alto.errors import RunError, RunNotFoundError, UnsupportedError
from alto.lora.biases import is_bias
from alto.lora.heads import HEAD, is_whole, whole_name
from alto.lora.layout import AdapterWeights
from alto.lora.magnitudes import is_magnitude, module_of_magnitude
from alto.lora.peft_format import (
    CONFIG_FILE,
    EMBEDDING_ENDINGS,
    ENDINGS,
    PREFIX,
    WEIGHTS_FILE,
    lora_scale,
    read_adapter,
)
from alto.spec import PEFT_DEFAULT, SHAPE_FIELDS, VLLM_RANKS, of_module, per_module

_HARMLESS_KEYS = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "inference_mode"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules"),
    *("bias", "use_dora"),  # their trained tensors are in the weights file
    *("layers_to_transform", "layers_pattern", "ensure_weight_tying", "rank_pattern", "alpha_pattern"),
    "fan_in_fan_out",  # changes only how PEFT adds the product to the weight, not the matrices
    "target_parameters",  # checked against the tensors
    *("megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
"""Keys that do not change the effect of an adapter's tensors: supported here, or used only at the start of training."""

_BASE_WEIGHT = ".base_layer.weight"
"""Ending of PEFT's name for the frozen weight of an adapted module. PEFT saves it for embeddings and the output
head."""

HEAD_NAMES = {"score", "classifier"}
"""Names that PEFT puts in ``modules_to_save`` when a classification head is trained."""

_HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "revision": ("main",),
    # All other values start from a changed base model, which is not in the folder.
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """An adapter read from a folder.

    Attributes:
        base_model: The base model that its ``adapter_config.json`` names.
        scales: Scale of every module by name: ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` with ``use_rslora``, from
            the module's own rank and alpha (``rank_pattern`` and ``alpha_pattern``).
        rank: The largest rank of its modules.
        weights: ``A`` as ``[K, r]`` and ``B`` as ``[r, N]`` by module name, in float32 (as PEFT loads them), and the
            extra tensors.
        target_parameters: Full names of weights that PEFT looks up by name (see :mod:`alto.lora.peft_targets`).
        base_weights: Weights of the base model by full name, which PEFT saves with an adapter on the embeddings or the
            output head.
    """

    folder: Path
    base_model: str
    scales: Mapping[str, float]
    rank: int
    weights: AdapterWeights
    target_parameters: tuple[str, ...] = ()
    base_weights: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def has_patterns(self) -> bool:
        """Whether modules differ in rank or scale."""
        return len({(self.scales[name], a_KR.shape[-1]) for name, (a_KR, _) in self.weights.items()}) > 1

    @property
    def has_experts(self) -> bool:
        """Whether any module is a parameter of stacked experts."""
        return bool(self.weights.experts)

    @property
    def has_head(self) -> bool:
        """Whether it has a classification head, which a causal LM does not have."""
        return HEAD in self.weights.extras

    @property
    def extra_kinds(self) -> str:
        """A text that lists the kinds of tensors that are not low-rank matrices; empty if there are none."""
        return " and ".join(dict.fromkeys(map(_kind, self.weights.extras)))

    @property
    def config_file(self) -> Path:
        """Path of its ``adapter_config.json``."""
        return self.folder / CONFIG_FILE


def read_saved_adapter(folder: Path) -> SavedAdapter:
    """Read an adapter that ALTO or PEFT wrote.

    Raises:
        RunNotFoundError: The folder holds no adapter.
        RunError: A file cannot be read.
        UnsupportedError: The adapter is more than plain LoRA on linear layers.
    """
    config = _plain_lora_config(folder, needed=(CONFIG_FILE, WEIGHTS_FILE))
    _check_tensors(folder / WEIGHTS_FILE, config)
    read = read_adapter(folder)
    base_weights = {name: tensor for name, tensor in read.extras.items() if name.removesuffix(".weight") in read}
    weights = AdapterWeights(
        {name: (a_KR.float(), b_RN.float()) for name, (a_KR, b_RN) in read.items()},
        {name: tensor.float() for name, tensor in read.extras.items() if name not in base_weights},
    )
    _check_parameters(config, weights, folder / CONFIG_FILE)
    _check_magnitudes(weights, folder, use_dora=bool(config.get("use_dora")))
    ranks, alphas = (_numbers(config, key, folder / CONFIG_FILE) for key in ("rank_pattern", "alpha_pattern"))
    scales = {}
    for name, (a_KR, _) in weights.items():
        rank, alpha = of_module(name, ranks, config["r"]), of_module(name, alphas, config["lora_alpha"])
        if a_KR.shape[-1] != rank:
            raise RunError(
                f"{folder}: expected matrices of rank {rank}, as its {CONFIG_FILE} says, found rank "
                f"{a_KR.shape[-1]} on {name}; copy the adapter again"
            )
        scales[name] = lora_scale(rank, alpha, use_rslora=bool(config.get("use_rslora")))
    return SavedAdapter(
        folder=folder,
        base_model=config.get("base_model_name_or_path") or "",
        scales=scales,
        rank=max(a_KR.shape[-1] for a_KR, _ in weights.values()),
        weights=weights,
        target_parameters=tuple(config.get("target_parameters") or ()),
        base_weights=base_weights,
    )


def _plain_lora_config(folder: Path, *, needed: Sequence[str]) -> dict[str, Any]:
    """Return the checked ``adapter_config.json`` in ``folder``, which must have the ``needed`` files."""
    for name in needed:
        if not (folder / name).is_file():
            raise RunNotFoundError(
                f"expected an adapter in PEFT's format in {folder}, found no {name}; give a run directory, or the "
                "folder of an adapter"
            )
    config = read_config(folder / CONFIG_FILE)
    check_config(config, folder / CONFIG_FILE)
    return config


def is_adapter(folder: Path) -> bool:
    """Return whether ``folder`` contains an adapter in PEFT's format; no file is read."""
    return (folder / CONFIG_FILE).is_file()


def adapter_base_model(folder: Path) -> str:
    """Return the base model that the adapter in ``folder`` names; empty if it names none.

    Raises:
        RunError: Its ``adapter_config.json`` cannot be read.
    """
    return read_config(folder / CONFIG_FILE).get("base_model_name_or_path") or ""


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in the ``adapter_config.json`` at ``path``.

    Raises:
        RunError: The file cannot be read, or holds something else.
    """
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: expected a JSON object, found something else ({error}); copy it again") from error
    if not isinstance(config, dict):
        raise RunError(f"{path}: expected a JSON object, found {type(config).__name__}; copy it again")
    return config


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """Check that ``config``, read from ``path``, describes plain LoRA.

    Raises:
        UnsupportedError: It describes something else.
        RunError: A value has the wrong type.
    """
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(
            f"{path}: expected peft_type LORA, found {config.get('peft_type')!r}; evaluate it with PEFT itself"
        )
    for key, value in config.items():
        if key == "modules_to_save":  # checked against the tensors
            continue
        if key not in _HARMLESS_KEYS and value and value not in _HARMLESS_VALUES.get(key, ()):
            raise UnsupportedError(
                f"{path}: expected plain LoRA, found {key}: {value!r:.60}, which this version cannot "
                "apply; evaluate it with PEFT itself, or merge it into its base model"
            )
    base_model = config.get("base_model_name_or_path")
    if base_model is not None and not isinstance(base_model, str):
        raise RunError(
            f"{path}: expected base_model_name_or_path to be text, found {base_model!r:.60}; copy the file again, or "
            "correct it"
        )
    for key, kinds in (("r", int), ("lora_alpha", int | float)):
        value = config.get(key)
        if not isinstance(value, kinds) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
            raise RunError(f"{path}: expected {key} to be a number above 0, found {value!r}; copy the file again")


def _numbers(config: Mapping[str, Any], key: str, path: Path) -> list[tuple[str, Any]]:
    """Return the pairs of a pattern (``rank_pattern`` or ``alpha_pattern``)."""
    pattern = config.get(key) or {}
    try:
        per_module(pattern, "a number above 0", lambda number: math.isfinite(number) and number > 0)
    except ValueError as error:
        raise RunError(f"{path}: {key} {error} Or copy the file again.") from error
    return list(pattern.items())


def _check_magnitudes(weights: AdapterWeights, folder: Path, *, use_dora: bool) -> None:
    found = {module_of_magnitude(name) for name in weights.extras if is_magnitude(name)}
    wanted = set(weights) if use_dora else set()
    if found != wanted:
        first = min(found ^ wanted)
        raise RunError(
            f"{folder}: expected a magnitude vector for every module if its {CONFIG_FILE} has use_dora: true, and none "
            f"otherwise, found use_dora {str(use_dora).lower()} and {'one' if first in found else 'none'} for {first}; "
            "copy the adapter again"
        )


def _check_parameters(config: Mapping[str, Any], weights: AdapterWeights, path: Path) -> None:
    """Check that every ``target_parameters`` entry is supported.

    It must name a parameter of adapted experts, or the weight of a module with an adapter, which is LoRA on that module
    (see :mod:`alto.lora.peft_targets`).
    """
    for parameter in config.get("target_parameters") or ():
        is_of_experts = any(f".{name}".endswith(f".{parameter}") for name in weights.experts)
        if not is_of_experts and str(parameter).removesuffix(".weight") not in weights:
            raise UnsupportedError(
                f"{path}: expected plain LoRA on linear layers, found target_parameters: {parameter!r:.60}, which this "
                "version cannot apply; evaluate it with PEFT itself, or merge it into its base model"
            )


def _check_tensors(path: Path, config: Mapping[str, Any]) -> None:
    """Check the tensor names in the file's header.

    Every tensor must be half of a module's matrix pair, its magnitude, its frozen weight, a bias of the base model, a
    weight of ``modules_to_save``, or a classification head.
    """
    try:
        with safe_open(path, framework="pt") as file:
            keys = set(file.keys())
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: expected a safetensors file, found something else ({error}); copy it again") from error
    saved = set(config.get("modules_to_save") or ()) - (HEAD_NAMES if config.get("task_type") == "SEQ_CLS" else set())
    whole = {key for key in keys if any(f".{key}".endswith(f".{whole_name(name)}") for name in saved)}
    absent = sorted(name for name in saved if not any(f".{key}".endswith(f".{whole_name(name)}") for key in whole))
    if absent:
        raise UnsupportedError(
            f"{path}: expected the weight of every module in modules_to_save, found none for {absent[0]}; evaluate it "
            "with PEFT itself, or copy it again"
        )
    keys -= {f"{PREFIX}{HEAD}", *whole}
    pairs = (ENDINGS, EMBEDDING_ENDINGS)
    halves = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
    for key in sorted(keys):
        if is_magnitude(key) or (is_bias(key) and ".lora_" not in key):
            continue
        if key.endswith(_BASE_WEIGHT) and any(key.removesuffix(_BASE_WEIGHT) + of_a in keys for of_a, _ in pairs):
            continue
        half = next((end for end in halves if key.endswith(end)), None)
        if half is None:
            raise UnsupportedError(
                f"{path}: expected the matrices lora_A and lora_B of linear layers and embeddings, their "
                f"magnitudes, biases, and nothing else, found {key}; evaluate it with PEFT itself, or merge it into "
                "its base model"
            )
        other = key.removesuffix(half) + halves[half]
        if other not in keys:
            raise RunError(f"{path}: expected {other} beside {key}, found that it is missing; copy the file again")
    if not any(key.endswith(of_a) for key in keys for of_a, _ in pairs):
        raise RunError(f"{path}: expected the matrices of an adapter, found none; copy the file again")


_DENSE_LEAVES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Last parts of the names of linear layers whose weights adapters name in ``target_parameters``; see
:mod:`alto.lora.peft_targets`. Other weights named there belong to routers."""

_OF_WEIGHT = ".weight"


def saved_settings(folder: Path) -> dict[str, Any]:
    """Return the job fields in :data:`alto.spec.job_config.SHAPE_FIELDS` that the adapter in ``folder`` sets, as plain
    values.

    Fields with a false or empty value are left out. The adapter's tensors are not read.

    Raises:
        RunNotFoundError: The folder holds no adapter.
        RunError: Its ``adapter_config.json`` cannot be read.
        UnsupportedError: The adapter is more than plain LoRA.
    """
    config = _plain_lora_config(folder, needed=(CONFIG_FILE,))
    settings = {key: config[key] for key in SHAPE_FIELDS if config.get(key)}
    if config.get("task_type") == "SEQ_CLS":
        saved = [name for name in settings.pop("modules_to_save", []) if name not in HEAD_NAMES]
        settings |= {"modules_to_save": saved} if saved else {}
    parameters = list(settings.pop("target_parameters", []))
    dense = [name.removesuffix(_OF_WEIGHT) for name in parameters if _is_dense(name)]
    parameters = [name for name in parameters if not _is_dense(name)]
    modules = settings.get("target_modules", PEFT_DEFAULT if _peft_chooses_modules(config) else [])
    if dense and not isinstance(modules, str):
        modules = [*modules, *dense]
    settings["target_modules"] = modules
    return settings | ({"target_parameters": parameters} if parameters else {})


def _peft_chooses_modules(config: Mapping[str, Any]) -> bool:
    """Return whether PEFT would choose the modules. If ``target_parameters`` is set, PEFT has already written its
    choice."""
    return config.get("target_modules") is None and not config.get("target_parameters")


def _is_dense(parameter: str) -> bool:
    """Return whether a parameter in ``target_parameters`` is the weight of a linear layer."""
    return parameter.endswith(_OF_WEIGHT) and parameter.removesuffix(_OF_WEIGHT).rpartition(".")[2] in _DENSE_LEAVES


_VOCABULARY_MODULES = {"embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings"}
"""Names of the embeddings and the output head."""

_VLLM_VOCABULARY = {"llama", "mixtral", "qwen3", "qwen3_moe", "granite", "granitemoe"}
"""Model types whose classes in vLLM 0.32 take adapters on the embeddings and the output head. Source: code of vLLM's
``model_executor/models`` (``embedding_modules``); ``llama`` was tried, and ``gemma3_text`` was seen to refuse them."""

_VLLM_NO_CLASSIFIERS = {"gemma3_text"}
"""Model types whose classifiers vLLM 0.32 was seen not to load."""


def vllm_classifier_obstacle(model_type: str) -> tuple[str, str] | None:
    """Return two parts of an error message if vLLM cannot serve a classifier with merged weights; None if it can, as
    far as is known."""
    if model_type not in _VLLM_NO_CLASSIFIERS:
        return None
    return "a classifier on a base model whose classifiers vLLM loads", f"one on {model_type}"


def vllm_obstacle(adapter: SavedAdapter, model_type: str) -> tuple[str, str] | None:
    """Return two parts of an error message if vLLM cannot serve ``adapter``: what vLLM expects, and what was found.
    Return None if vLLM can serve it. ``make test-servers`` compares this with vLLM.

    Args:
        model_type: ``model_type`` in the configuration of the base model.
    """
    if adapter.weights.extras:
        return (
            "an adapter of low-rank matrices alone, which is what vLLM reads",
            f"{adapter.extra_kinds} in {adapter.folder}",
        )
    if adapter.rank > VLLM_RANKS[-1]:
        return f"adapters of rank {VLLM_RANKS[-1]} at most, which vLLM takes", f"rank {adapter.rank}"
    ends = sorted({name.rpartition(".")[2] for name in adapter.weights} & _VOCABULARY_MODULES)
    if ends and model_type not in _VLLM_VOCABULARY:
        return (
            "an adapter of linear layers, which is what vLLM reads for most base models",
            f"one that also has {' and '.join(ends)} of a {model_type}",
        )
    return None


def _kind(name: str) -> str:
    if name == HEAD:
        return "a classification head"
    if is_magnitude(name):
        return "magnitudes (use_dora)"
    return "whole modules (modules_to_save)" if is_whole(name) else "biases (bias)"


def vllm_rank(rank: int) -> int:
    """Return the smallest value of ``--max-lora-rank`` for adapters of ``rank``, which must not exceed vLLM's largest
    rank."""
    return min(allowed for allowed in VLLM_RANKS if allowed >= rank)
