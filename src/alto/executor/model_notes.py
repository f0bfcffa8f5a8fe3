"""Notices for the user about the base model, before training."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from alto.backbone import config_notes, router_notes
from alto.lora import bias_notes, rank_notes, tying_notes, untrained_notes
from alto.spec import JobConfig

__all__ = ["model_notes"]


def model_notes(model: PreTrainedModel, configs: Sequence[JobConfig], method: str) -> tuple[str, ...]:
    """Notices about parts of the base model that the jobs of ``configs`` do not train, about ranks larger than a
    module's smaller side, about an output head that is tied to the embeddings, about biases that are asked for and
    absent, about dropout of the base model, and about the load-balancing loss of its routers.

    Args:
        model: With or without weights, with or without injected adapters.
        configs: Of every job.
        method: The task's.
    """
    return (
        *untrained_notes(model, configs),
        *rank_notes(model, configs),
        *tying_notes(model, configs),
        *bias_notes(model, configs),
        *config_notes(model.config),
        *router_notes(model, [config.router_aux_loss_coef for config in configs], method),
    )
