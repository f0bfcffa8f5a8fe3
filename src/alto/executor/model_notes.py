"""What a user should know about the base model before training, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from alto.backbone import config_notes
from alto.lora import untrained_notes
from alto.spec import JobConfig

__all__ = ["model_notes"]


def model_notes(model: PreTrainedModel, configs: Sequence[JobConfig]) -> tuple[str, ...]:
    """On what of the base the jobs of ``configs`` do not train, and on what of its training they leave out.

    Args:
        model: With or without weights, with or without injected adapters.
    """
    return (*untrained_notes(model, configs), *config_notes(model.config))
