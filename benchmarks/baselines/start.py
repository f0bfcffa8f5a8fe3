"""The adapter with which ALTO begins a job."""

from __future__ import annotations

from alto.backbone import Backbone
from alto.lora import (
    AdapterBank,
    AdapterShape,
    AdapterWeights,
    BankLayout,
    find_shared_inputs,
    find_targets,
    linear_modules,
)
from alto.spec import JobConfig

__all__ = ["first_adapter"]


def first_adapter(backbone: Backbone, config: JobConfig) -> AdapterWeights:
    """Return the adapter that ALTO draws for a job of ``config`` on ``backbone``, into which nothing has been
    injected."""
    layout = BankLayout(
        modules=linear_modules(backbone.model),
        max_rank=config.r,
        shared_inputs=find_shared_inputs(backbone.model, backbone.run_once),
    )
    targets = find_targets(backbone.model, config.target_modules)
    bank = AdapterBank(layout, 1)
    bank.occupy(0, AdapterShape(rank=config.r, targets=targets))
    bank.initialise(0, config.seed, config.init_lora_weights)
    return bank.read(0)
