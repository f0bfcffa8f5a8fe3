"""Loads a finished adapter onto its base model with PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from alto.backbone import classifier_of, load_network
from alto.errors import UnsupportedError
from alto.spec import Task

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["load_adapter"]


def load_adapter(folder: Path, task: Task, model: PreTrainedModel | None, *, device: str | None) -> PeftModel:
    """Load the adapter in ``folder`` onto its base model, in evaluation mode; see :meth:`alto.TaskResult.load_best`."""
    try:
        from peft import PeftModel
    except ImportError:
        raise UnsupportedError(
            "load_best: expected peft, found that it is not installed; pip install peft, or serve the adapter in "
            f"{folder} with another program that reads PEFT's format"
        ) from None
    if model is None:
        place = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
        model = load_network(task.base_model, device=place)
        labels = task.label_set
        model = model if labels is None else classifier_of(model, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads attributes that transformers has renamed
        return PeftModel.from_pretrained(model, str(folder)).eval()
