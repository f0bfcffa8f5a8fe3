"""Isolation on several ranks: a job beside others, on any rank and any number of ranks, equals the job alone.

Each rank checks itself (``tests/support/rank_jobs.py``); whole curves are compared here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import SoloJob, flat, relative_distance
from rank_jobs import (
    a_job_that_goes_nan_changes_no_other_by_one_bit,
    lose_the_lock,
    steps_are_those_of_peft_alone,
    steps_of_a_mixture_are_those_of_one_process,
    steps_on_labelled_replies_are_those_of_one_process,
    steps_on_pairs_are_those_of_one_process,
    train,
)
from rank_kinds import steps_of_all_kinds_are_those_of_peft_alone
from ranks import failures_on_ranks
from resident_jobs import DATA, STABLE, Bank, make_model, make_task

from alto.lora import read_adapter
from alto.runs import RunDir, read_events, read_history
from alto.spec import Task

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

LONGER = {"lr": 5e-4, "r": 8, "batch_size": 4, "seed": 50, "num_train_epochs": 13}
EVEN_LONGER = {"lr": 5e-4, "r": 8, "batch_size": 6, "seed": 51, "num_train_epochs": 14}


@pytest.fixture(scope="module")
def task() -> Task:
    """A task whose jobs end one after the other, until there are fewer jobs than ranks."""
    configs = [{"num_train_epochs": 2} | config for config in [*STABLE, LONGER, EVEN_LONGER]]
    return make_task(
        configs,
        eval_steps=0.5,
        early_exit={"rungs": [[0.3, 1.0]], "detect_divergence": False, "detect_overfitting": False},
    )


Failures = dict[str, str]


@pytest.fixture(scope="module")
def whole(task: Task, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Failures]:
    """A run trained by two ranks, and all failures of their checks."""
    folder = tmp_path_factory.mktemp("two")
    run_dir = RunDir.create(folder, task)
    checks = [
        *((f"steps of {name}", steps_are_those_of_peft_alone, (name,)) for name in ("llama", "gemma")),
        ("nan", a_job_that_goes_nan_changes_no_other_by_one_bit, ()),
        ("pairs", steps_on_pairs_are_those_of_one_process, (str(folder / "cache"),)),
        ("labelled", steps_on_labelled_replies_are_those_of_one_process, (str(folder / "cache-of-labelled"),)),
        ("mixture", steps_of_a_mixture_are_those_of_one_process, ()),
        ("all kinds", steps_of_all_kinds_are_those_of_peft_alone, ("starcoder2",)),
        ("train", train, (str(run_dir.root),)),
    ]
    return run_dir, failures_on_ranks(2, checks, folder)


@pytest.fixture(scope="module")
def resumed(task: Task, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Failures]:
    """A run begun by four ranks and finished by two, and all failures of their checks."""
    begun, ended = tmp_path_factory.mktemp("four"), tmp_path_factory.mktemp("after-four")
    run_dir = RunDir.create(begun, task)
    checks = [
        ("steps of qwen3", steps_are_those_of_peft_alone, ("qwen3",)),
        ("train", train, (str(run_dir.root), 62)),
    ]
    failures = failures_on_ranks(4, checks, begun)
    return run_dir, failures or failures_on_ranks(2, [("resume", train, (str(run_dir.root),))], ended)


@pytest.mark.parametrize("which", ["whole", "resumed"])
def test_what_every_rank_checks_of_its_own_jobs(which: str, request: pytest.FixtureRequest) -> None:
    """Every step from equal state is PEFT's, with jobs spread or not, and on pairs equals one process; a job that goes
    NaN affects no other; all ranks end without an error."""
    _, failures = request.getfixturevalue(which)
    assert not failures, "\n".join(f"{name}: {reason}" for name, reason in failures.items())


@pytest.mark.parametrize("which", ["whole", "resumed"])
def test_whole_curves_equal_peft_alone(which: str, task: Task, request: pytest.FixtureRequest) -> None:
    run_dir, _ = request.getfixturevalue(which)
    history = read_history(run_dir.root)
    base, fresh = make_model("qwen3"), Bank(make_model("qwen3"), task)
    for job in fresh.jobs:
        assert job.slot is not None
        solo = SoloJob(base, DATA.train, job.config)
        solo.load(fresh.trainer.bank.read(job.slot))
        expected = torch.tensor(solo.train())
        found = torch.tensor(list(history.jobs[job.id].train_losses))
        assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-4, job.config
        final = flat(read_adapter(run_dir.job(job.id, "last")))
        assert relative_distance(final, solo.weights()) <= 1e-4, job.config


def test_the_base_is_evaluated_by_all_ranks_together(whole: tuple[RunDir, Failures]) -> None:
    model, total, num_tokens = make_model("qwen3"), 0.0, 0
    for input_ids, targets in zip(DATA.validation.input_ids, DATA.validation.targets, strict=True):
        losses = torch.nn.functional.cross_entropy(
            model(input_ids=input_ids[None]).logits[0].float(), targets, reduction="sum", ignore_index=-100
        )
        total, num_tokens = total + float(losses.detach()), num_tokens + int((targets >= 0).sum())
    (found,) = [event for event in read_events(whole[0].journal_file) if event["event"] == "base_evaluated"]
    assert [value["validation_loss"] for value in found["values"]] == [pytest.approx(total / num_tokens, rel=1e-5)]


def test_jobs_move_when_others_have_ended_and_the_last_train_on_all_ranks(
    whole: tuple[RunDir, Failures], resumed: tuple[RunDir, Failures]
) -> None:
    for run_dir, _ in (whole, resumed):
        events = read_events(run_dir.journal_file)
        admitted = [event for event in events if event["event"] in ("job_admitted", "job_resumed")]
        assert {event["reason"] for event in admitted} >= {"balances", "data_parallel"}
        assert {len(event["ranks"]) for event in admitted} >= {1, 2}
    started, resumed_at = (
        next(event for event in read_events(resumed[0].journal_file) if event["event"] == name)
        for name in ("task_started", "task_resumed")
    )
    assert (started["num_ranks"], resumed_at["num_ranks"]) == (4, 2)


def test_every_step_is_reported_once(resumed: tuple[RunDir, Failures]) -> None:
    steps: dict[str, list[int]] = {}
    for event in read_events(resumed[0].journal_file):
        if event["event"] == "train":
            first = event["first_step"]
            steps.setdefault(event["job"], []).extend(range(first, first + len(event["losses"])))
    assert all(found == list(range(1, len(found) + 1)) for found in steps.values())


def test_no_rank_writes_a_state_after_the_lock_was_lost(task: Task, tmp_path: Path) -> None:
    """Only the first rank holds the lock; when it loses it, the second one must stop writing too."""
    run_dir = RunDir.create(tmp_path / "runs", task)
    failures = failures_on_ranks(2, [("train", lose_the_lock, (str(run_dir.root),))], tmp_path)
    assert "found it removed or replaced" in failures["train"]
    assert "checkpoint" not in {event["event"] for event in read_events(run_dir.journal_file)}
    assert not list(run_dir.root.glob("jobs/*/*"))
