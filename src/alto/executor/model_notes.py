"""Notices for the user about the base model, before training."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from alto.backbone import config_notes
from alto.lora import bias_notes, rank_notes, tying_notes, untrained_notes
from alto.spec import JobConfig

__all__ = ["model_notes"]


def model_notes(model: PreTrainedModel, configs: Sequence[JobConfig]) -> tuple[str, ...]:
    """Notices about parts of the base model that the jobs of ``configs`` do not train, about ranks larger than a
    module's smaller side, about an output head that is tied to the embeddings, about biases that are asked for and
    absent, and about losses of the base model's own training that they leave out.

    Args:
        model: With or without weights, with or without injected adapters.
    """
    return (
        *untrained_notes(model, configs),
        *rank_notes(model, configs),
        *tying_notes(model, configs),
        *bias_notes(model, configs),
        *config_notes(model.config),
    )
