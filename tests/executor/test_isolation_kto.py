"""Isolation on labelled replies: a job beside jobs of other losses, weights, ranks and batch sizes equals the job
alone.

The oracle is TRL's ``KTOTrainer`` with PEFT and torch's AdamW on the unmodified model
(``tests/support/oracle_kto.py``).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from isolation import (
    assert_micro_batches_change_nothing,
    assert_nan_stays_alone,
    assert_step_is_that_of,
    evaluations_beside,
)
from oracle import reference_model
from oracle_kto import LABELLED, SoloKto, make_kto_trainer
from resident_jobs import Bank, assert_same_step, make_model, make_task, state_of
from tiny import read_journal, run_task

from alto.runs import RunDir
from alto.spec import Task

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

JOBS: list[dict[str, object]] = [
    {"beta": 0.1, "lr": 1e-3, "r": 4, "batch_size": 2, "seed": 1},
    {"beta": 0.5, "lr": 5e-4, "r": 8, "batch_size": 5, "desirable_weight": 1.3, "weight_decay": 0.1, "seed": 2},
    {"beta": 2.0, "lr": 2e-4, "r": 32, "batch_size": 8, "undesirable_weight": 0.5, "seed": 3},
    {"beta": 0.2, "lr": 5e-4, "r": 8, "batch_size": 6, "desirable_weight": 0.0, "seed": 4},
    {"loss_type": "apo_zero_unpaired", "beta": 0.3, "lr": 5e-4, "r": 8, "batch_size": 4, "seed": 5},
    {"loss_type": "apo_zero_unpaired", "beta": 1.0, "lr": 5e-4, "r": 16, "batch_size": 1, "seed": 6},
]
DEFAULTS = {"loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0}
SLOTS = [5, 2, 6, 0, 4, 1]


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_kto_trainer(tmp_path_factory.mktemp("trl"))


def bank_of(
    configs: list[dict[str, object]], slots: list[int] | None = None, name: str = "llama", **settings: Any
) -> Bank:
    data = settings.pop("data", LABELLED)
    task = make_task([DEFAULTS | config for config in configs], method="kto", **settings)
    return Bank(make_model(name), task, slots=slots, data=data)


def far_from_the_base(bank: Bank) -> None:
    """Make replies to other prompts more probable, so that the divergence is not clamped at 0."""
    bank.trainer.bank.params_ZP.mul_(3)


def test_from_equal_state_one_step_and_one_evaluation_beside_other_jobs_equal_trl_alone(trl: Any) -> None:
    base, bank = make_model("qwen3"), bank_of(JOBS, SLOTS, "qwen3")
    solos = [SoloKto(base, LABELLED.train, job.config, trl=trl, reference=reference_model(base)) for job in bank.jobs]
    for _ in range(3):
        bank.step()
    far_from_the_base(bank)
    trl._metrics["eval"].clear()
    assert_step_is_that_of(solos, bank)
    assert sum(kl > 1e-3 for kl in trl._metrics["eval"]["kl"]) >= 2, "no divergence was compared"
    for _, metrics, expected in evaluations_beside(solos, bank, LABELLED.validation):
        for metric, name_in_trl in {
            "chosen_reward": "rewards/chosen",
            "rejected_reward": "rewards/rejected",
            "reward_margin": "rewards/margins",
            "kl": "kl",
        }.items():
            assert metrics[metric] == pytest.approx(expected[name_in_trl], rel=1e-4, abs=1e-5), metric


@pytest.mark.parametrize("change", [{"shift": 2}, {"shift": 0}, {"beta": 0.51}, {"labels": True}])
def test_the_comparison_fails_for(change: dict[str, Any], trl: Any) -> None:
    bank, base = bank_of(JOBS[1:2]), make_model("llama")
    for _ in range(2):
        bank.step()
    far_from_the_base(bank)
    (job,), data = bank.jobs, LABELLED.train
    if "labels" in change:
        data = replace(data, labels=tuple(not label for label in data.labels or ()))
    config = job.config.replace(beta=change.get("beta", 0.5))
    reference = reference_model(base)
    solo = SoloKto(base, data, config, trl=trl, reference=reference, shift=change.get("shift", 1))
    solo.load(*state_of(bank, job))
    found, expected = bank.step()[job.id], solo.train_step()
    with pytest.raises(AssertionError):
        assert_same_step(found, expected)


def test_a_step_in_micro_batches_that_split_a_batch_is_the_same_step() -> None:
    whole, split = (bank_of(JOBS[:5], max_tokens_per_pass=tokens) for tokens in (10_000, 60))
    for bank in (whole, split):
        far_from_the_base(bank)
    assert_micro_batches_change_nothing(whole, split)


def test_the_frozen_base_does_not_diverge_from_itself() -> None:
    bank = bank_of(JOBS[:2])
    context = bank.jobs[0].context
    for worth in bank.trainer.evaluate_base(context, [job.config for job in bank.jobs]):
        assert worth.metrics["kl"] == 0
        assert worth.metrics["reward_margin"] == pytest.approx(0, abs=1e-4)


def test_a_job_that_goes_nan_changes_no_other_job_by_one_bit() -> None:
    assert_nan_stays_alone(lambda: bank_of(JOBS[:5]))


def test_a_task_on_pairs_trains_to_its_end_and_chooses_by_the_margin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": f"{n} plus 1?", "chosen": f" Yes: {n + 1}.", "rejected": f" No, {n}"} for n in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = Task(
        model="alto-tiny",
        dataset=str(tmp_path / "pairs.jsonl"),
        validation_split=0.25,
        method="kto",
        metric="reward_margin",
        learning_rate=1e-2,
        batch_size=6,
        num_train_epochs=3,
        eval_steps=0.5,
        search_space={"desirable_weight": [0.5, 1.5], "loss_type": ["kto", "apo_zero_unpaired"]},
        early_exit={"enabled": False},
    )
    result = run_task(task, RunDir.create(tmp_path / "runs", task))
    assert result.best_job is not None
    events = read_journal(next((tmp_path / "runs").iterdir()))
    assert events[-1]["event"] == "task_completed"
    ends = {event["job"]: event["metrics"] for event in events if event["event"] == "eval"}
    assert len(ends) == 4
    assert all(set(metrics) == {"reward_margin", "chosen_reward", "rejected_reward", "kl"} for metrics in ends.values())
    assert all(metrics["reward_margin"] > 0.01 for metrics in ends.values())


@pytest.mark.parametrize("label", [True, False], ids=["desirable", "undesirable"])
def test_a_batch_whose_rows_have_one_label_is_that_of_trl(label: bool, trl: Any) -> None:
    """The divergence and the loss are the batch's; the other rows of the data have the other label."""
    base, bank = make_model("llama"), bank_of(JOBS)
    first = {row for job in bank.jobs for row in job.order.rows_of_step(1)}
    labels = tuple(label if row in first else not label for row in range(len(LABELLED.train)))
    assert len(set(labels)) == 2
    data = replace(LABELLED.train, labels=labels)
    bank = bank_of(JOBS, data=replace(LABELLED, train=data))
    bank.step()
    far_from_the_base(bank)
    solos = [SoloKto(base, data, job.config, trl=trl, reference=reference_model(base)) for job in bank.jobs]
    assert_step_is_that_of(solos, bank)
