"""A job's adapter and optimizer state on disk.

An adapter folder is PEFT's own format; ``last/`` adds ``optimizer.safetensors`` (AdamW moments, named as the adapter's
matrices) and ``state.json``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from alto.lora import AdapterWeights, OptimizerState, read_adapter

__all__ = ["read_state", "replace_folder", "write_state"]

_OPTIMIZER_FILE = "optimizer.safetensors"
_STATE_FILE = "state.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a new folder beside ``folder``, then put it in its place, so that no half-written folder is ever seen."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    fill(fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def write_state(folder: Path, optimizer: OptimizerState) -> None:
    """Add the optimizer state to an adapter folder."""
    tensors = {
        f"{moment}.{name}.{matrix}": tensor.contiguous()
        for moment in _MOMENTS
        for name, pair in getattr(optimizer, moment).items()
        for matrix, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / _OPTIMIZER_FILE)
    (folder / _STATE_FILE).write_text(json.dumps({"step": optimizer.step}) + "\n", encoding="utf-8")


def read_state(folder: Path) -> tuple[AdapterWeights, OptimizerState]:
    """What was written into a ``last/`` folder."""
    weights = read_adapter(folder)
    tensors = load_file(folder / _OPTIMIZER_FILE)
    moments = {
        moment: {name: (tensors[f"{moment}.{name}.A"], tensors[f"{moment}.{name}.B"]) for name in weights}
        for moment in _MOMENTS
    }
    step = json.loads((folder / _STATE_FILE).read_text(encoding="utf-8"))["step"]
    return weights, OptimizerState(step=step, exp_avg=moments["exp_avg"], exp_avg_sq=moments["exp_avg_sq"])
