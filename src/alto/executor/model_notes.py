"""Notes for the user about the base model, before training."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from alto.backbone import config_notes, router_notes
from alto.lora import bias_notes, rank_notes, tying_notes, untrained_notes
from alto.spec import JobConfig

__all__ = ["model_notes"]


def model_notes(model: PreTrainedModel, configs: Sequence[JobConfig], method: str) -> tuple[str, ...]:
    """Return notes about the base model: parts that the jobs do not train, ranks larger than a module's smaller side,
    an output head tied to the embeddings, requested biases that do not exist, dropout of the base model, and the
    load-balancing loss of its routers.

    Args:
        model: The base model, with or without weights, with or without injected adapters.
        configs: Configurations of all jobs.
        method: The task's method.
    """
    return (
        *untrained_notes(model, configs),
        *rank_notes(model, configs),
        *tying_notes(model, configs),
        *bias_notes(model, configs),
        *config_notes(model.config),
        *router_notes(model, [config.router_aux_loss_coef for config in configs], method),
    )
