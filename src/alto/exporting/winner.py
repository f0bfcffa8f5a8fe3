"""The adapter that is exported, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alto.backbone import SHIPPED_MODELS, resolve_model
from alto.exporting.hub import repository_fault
from alto.exporting.tool_data import Rows
from alto.lora import HEAD, SavedAdapter
from alto.records import LabelSet
from alto.spec import BaseModelSpec, JobConfig, Task

__all__ = ["Winner", "is_hub_id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """An adapter of a run, or of a folder.

    Attributes:
        name: Of the task, or of the folder: a safe file name.
        adapter: The adapter.
        base: Its base model, with the chat template that it was trained with.
        is_base_named: Whether the caller named the base model.
        named_labels: Labels of its classification head, where it has one and they are known.
        task: The task of its run; None of a folder.
        config: Configuration of its job; None of a folder.
        rows: How the rows of the task are laid out; None where that is not needed.
        data: Facts about its rows, as a run's journal has them: ``form`` and ``of_messages``; empty where unknown.
    """

    name: str
    adapter: SavedAdapter
    base: BaseModelSpec
    is_base_named: bool = False
    named_labels: LabelSet | None = None
    task: Task | None = None
    config: JobConfig | None = None
    rows: Rows | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base_model(self) -> str:
        """The base model that the exported files name: that of the adapter, or the one that the caller has named."""
        return resolve_model(self.base.id if self.is_base_named else self.adapter.base_model or self.base.id)

    @property
    def labels(self) -> LabelSet | None:
        """The labels of its classification head, with transformers' names where they are not known; None without a
        head."""
        if self.named_labels is not None or not self.adapter.has_head:
            return self.named_labels
        names = tuple(f"LABEL_{index}" for index in range(len(self.adapter.weights.extras[HEAD])))
        return LabelSet(problem_type="single_label_classification", names=names)


def is_hub_id(model: str) -> bool:
    """Whether ``model`` can be a model of the hub: neither one of ALTO's nor a path of this machine."""
    if model in SHIPPED_MODELS or Path(model).expanduser().exists():
        return False
    return not repository_fault(model)
