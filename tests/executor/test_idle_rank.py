"""A rank without rows goes through the base as often as the others, and touches no adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from resident_jobs import DATA, PAIRS, STABLE, make_model, make_task, make_trainer, with_references
from torch import Tensor

from alto.backbone import Backbone
from alto.data import TaskData
from alto.executor import TaskContext, initial_states, trainer
from alto.executor.ranks import Ranks


class Unheard(Ranks):
    """A rank of two that hears nothing from the other."""

    def __init__(self) -> None:
        super().__init__(rank=1, size=2)

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def all_reduce(self, tensor: Tensor) -> None:
        """Nothing comes from the other."""


PREFERENCES = {"method": "dpo", "loss_type": "sigmoid", "beta": 0.1}


@pytest.mark.parametrize(
    ("kernels", "data", "settings"),
    [*((kernels, DATA, {}) for kernels in ("reference", "torch", "triton")), ("torch", PAIRS, PREFERENCES)],
    ids=["reference", "torch", "triton", "pairs"],
)
def test_an_idle_rank_makes_the_passes_of_the_others_and_touches_no_adapter(
    kernels: str, data: TaskData, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALTO_KERNELS", kernels)
    losses_seen: list[Tensor] = []

    def watched(*args: Any) -> Tensor:
        losses_seen.append(job_losses(*args))
        return losses_seen[-1]

    job_losses = trainer.job_losses
    monkeypatch.setattr(trainer, "job_losses", watched)
    task, model = make_task(STABLE[2:4], max_tokens_per_pass=60, **settings), make_model("llama")
    backbone = Backbone(model, None, "unused")
    context = TaskContext.of(task, backbone, data, Unheard())
    if context.objective.needs_reference:
        context = replace(context, data=with_references(backbone, data))
    busy, idle = initial_states(context)
    one = make_trainer(context, 1)
    busy.slot, idle.slot = 0, 1  # of the two, one is resident here, and takes no part in the step
    one.admit(idle, 0)
    before = one.bank.params_ZP.clone()

    losses = one.step([busy])

    rows = busy.order.rows_of_step(0)
    assert sum(data.train.input_ids[row].numel() for row in rows) > 60
    assert len(losses_seen) > 1
    assert all(torch.isfinite(loss).all() and loss.requires_grad for loss in losses_seen)
    assert losses == [0.0]
    assert not one.bank.grads_ZP.any()
    assert torch.equal(one.bank.params_ZP, before)
    (worth,) = one.evaluate([busy])
    assert {worth.loss, *worth.metrics.values()} == {0.0}
