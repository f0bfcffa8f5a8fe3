"""Notices for the user about the base model, before training."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from alto.backbone import config_notes
from alto.lora import untrained_notes
from alto.spec import JobConfig

__all__ = ["model_notes"]


def model_notes(model: PreTrainedModel, configs: Sequence[JobConfig]) -> tuple[str, ...]:
    """Notices about parts of the base model that the jobs of ``configs`` do not train, and about losses of its own
    training that they leave out.

    Args:
        model: With or without weights, with or without injected adapters.
    """
    return (*untrained_notes(model, configs), *config_notes(model.config))
