"""Messages between ranks: values of one type, only between ranks; and a rank without rows, which joins every pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import failures_on_ranks
from resident_jobs import DATA, PAIRS, STABLE, make_model, make_task, make_trainer, with_references
from torch import Tensor

from alto.backbone import Backbone
from alto.data import TaskData
from alto.errors import RankConnectionError
from alto.executor import Ranks, ResumeState, TaskContext, initial_states, trainer
from alto.executor.ranks import _codec, _decoded, _encoded, prove_connections
from alto.executor.session import ControlInputs
from alto.records import ExitReason, JobResult, TaskOutcome
from alto.runs import Command, JobAction

JOB = JobResult(
    job="job-000",
    config={"learning_rate": 0.1 + 0.2, "target_modules": ["q_proj"], "warmup": None},
    steps=3,
    total_steps=9,
    exit_reason=ExitReason.DIVERGING,
    exit_evidence={"slope": math.inf},
    best_step=0,
    best_validation_loss=math.inf,
    samples_trained=6,
    samples_budgeted=18,
)
RESULT = TaskOutcome(
    task="tiny",
    run_dir="/runs/tiny",
    adapter_dir="/runs/tiny/best",
    best_job="job-000",
    best_validation_loss=5e-324,
    jobs=(JOB,),
    duration_s=1 / 3,
    best_metrics={"reward_accuracy": 0.7},
)
COMMAND = Command(id="17-ab", action=JobAction.CLONE, job="job-000", changes={"lr": 1e-3, "targets": ["a"]}, warm=True)
PAST = ResumeState(
    lines=[{"seq": 0, "event": "train", "loss": 1 / 3, "nested": [{"x": math.inf}, None, "ü"]}],
    oom_record={"max_tokens_per_pass": 7},
)
VALUES: list[tuple[Any, Any]] = [
    (True, bool),
    (None, TaskOutcome | None),
    (RESULT, TaskOutcome | None),
    (PAST, ResumeState),
    (ControlInputs(commands=[COMMAND], is_interrupted=True), ControlInputs),
]


@pytest.mark.parametrize(("value", "kind"), VALUES)
def test_a_value_comes_out_as_it_went_in(value: Any, kind: Any) -> None:
    codec = _codec(kind)
    assert _decoded(codec, _encoded(codec, value), kind) == value


@pytest.mark.parametrize(
    "text", [b"", b"\x80\x04\x95\x00", b"\xff\xfe", b"{}", b'{"is_interrupted": "perhaps"}', b"[" * 100_000]
)
def test_what_is_no_value_of_the_type_is_refused(text: bytes) -> None:
    codec = _codec(TaskOutcome)
    with pytest.raises(RankConnectionError, match="from the first rank, found something else"):
        _decoded(codec, text, TaskOutcome)


def values_of_the_first_rank_reach_all() -> None:
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    for value, kind in VALUES:
        assert ranks.broadcast(value if ranks.is_first else None, kind) == value
    tensor = torch.tensor([[1 / 3, math.inf], [5e-324, -0.0]], dtype=torch.float64)
    found = ranks.broadcast_tensor(tensor if ranks.is_first else None, (2, 2), torch.float64)
    assert found is not None
    assert torch.equal(found, tensor)
    assert ranks.broadcast_tensor(None if ranks.is_first else tensor, (2, 2), torch.float64) is None


def connections_are_proven() -> None:
    prove_connections(dist.get_rank(), dist.get_world_size(), b"the secret")


def who_does_not_know_the_secret_is_refused() -> None:
    """Check that ranks with different secrets refuse each other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.raises(RankConnectionError, match=f"answers for rank {1 - rank} does not have their secret"):
        prove_connections(rank, size, b"the secret" if rank == 0 else b"another")


def who_proves_nothing_is_refused() -> None:
    if dist.get_rank() == 0:
        with pytest.raises(RankConnectionError, match="answers for rank 1"):
            prove_connections(0, 2, b"the secret", timedelta(seconds=1))
    # Rank 1 sends nothing.


def test_ranks_send_values_and_prove_who_they_are(tmp_path: Path) -> None:
    checks = [
        (check.__name__, check, ())
        for check in (
            values_of_the_first_rank_reach_all,
            connections_are_proven,
            who_does_not_know_the_secret_is_refused,
            connections_are_proven,
            who_proves_nothing_is_refused,
        )
    ]
    assert failures_on_ranks(2, checks, tmp_path) == {}


class DeafRank(Ranks):
    """One of two ranks that receives nothing from the other."""

    def __init__(self) -> None:
        super().__init__(rank=1, size=2)

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def all_reduce(self, tensor: Tensor) -> None:
        """Receive nothing from the other rank."""


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
    context = TaskContext.of(task, backbone, data, DeafRank())
    if context.objective.needs_reference:
        context = replace(context, data=with_references(backbone, data))
    busy, idle = initial_states(context)
    one = make_trainer(context, 1)
    busy.slot, idle.slot = 0, 1  # one of the two is resident here, and takes no part in the step
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
