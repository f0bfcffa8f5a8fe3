"""The job settings that train an adapter like the one in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alto.errors import RunNotFoundError
from alto.lora.peft_format import CONFIG_FILE
from alto.lora.saved import HEAD_NAMES, check_config, read_config
from alto.spec.job_config import SHAPE_FIELDS
from alto.spec.module_names import PEFT_DEFAULT

__all__ = ["saved_settings"]

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
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise RunNotFoundError(
            f"expected an adapter in PEFT's format in {folder}, found no {CONFIG_FILE}; give a run directory, or the "
            "folder of an adapter"
        )
    config = read_config(path)
    check_config(config, path)
    settings = {key: config[key] for key in SHAPE_FIELDS if config.get(key)}
    if config.get("task_type") == "SEQ_CLS":
        saved = [name for name in settings.pop("modules_to_save", []) if name not in HEAD_NAMES]
        settings |= {"modules_to_save": saved} if saved else {}
    parameters = list(settings.pop("target_parameters", []))
    dense = [name.removesuffix(_OF_WEIGHT) for name in parameters if _is_dense(name)]
    parameters = [name for name in parameters if not _is_dense(name)]
    modules = settings.get("target_modules", PEFT_DEFAULT if _names_nothing(config) else [])
    if dense and not isinstance(modules, str):
        modules = [*modules, *dense]
    settings["target_modules"] = modules
    return settings | ({"target_parameters": parameters} if parameters else {})


def _names_nothing(config: Mapping[str, Any]) -> bool:
    """Return whether PEFT would choose the modules. If ``target_parameters`` is set, PEFT has already written its
    choice."""
    return config.get("target_modules") is None and not config.get("target_parameters")


def _is_dense(parameter: str) -> bool:
    """Return whether a parameter in ``target_parameters`` is the weight of a linear layer."""
    return parameter.endswith(_OF_WEIGHT) and parameter.removesuffix(_OF_WEIGHT).rpartition(".")[2] in _DENSE_LEAVES
