"""Isolation on sampled completions: a job beside jobs of other losses, groups, ranks and batch sizes equals the job
alone.

The oracle is TRL's ``GRPOTrainer`` with PEFT and torch's AdamW on the unmodified model
(``tests/support/oracle_grpo.py``), given the same completions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from isolation import assert_nan_stays_alone
from oracle import flat, relative_distance
from oracle_grpo import GivenRewards, SoloGrpo, Spelling, make_grpo_trainer, write_all, written
from resident_jobs import DATA, LOSS_TOLERANCE, Bank, assert_same_step, make_model, make_task, state_of

from alto.executor import rollouts
from alto.executor import trainer as training
from alto.executor.rollouts import Sampled

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

JOBS: list[dict[str, object]] = [
    {"loss_type": "dapo", "batch_size": 8, "lr": 1e-3, "r": 4, "seed": 1},
    {"loss_type": "grpo", "batch_size": 16, "lr": 5e-4, "r": 8, "scale_rewards": "batch", "seed": 2},
    {
        "loss_type": "bnpo",
        "batch_size": 6,
        "gradient_accumulation_steps": 2,
        "num_generations": 3,
        "lr": 1e-3,
        "seed": 3,
    },
    {"loss_type": "dr_grpo", "batch_size": 8, "scale_rewards": "none", "max_completion_length": 5, "seed": 4},
    {"loss_type": "dapo", "batch_size": 8, "beta": 0.1, "temperature": 0.7, "r": 16, "seed": 5},
    {"loss_type": "grpo", "batch_size": 12, "beta": 0.5, "mask_truncated_completions": True, "seed": 6},
    {"loss_type": "bnpo", "batch_size": 8, "gradient_accumulation_steps": 2, "beta": 0.04, "seed": 7},
    {"loss_type": "dr_grpo", "batch_size": 4, "gradient_accumulation_steps": 3, "temperature": 2.0, "seed": 8},
    {"loss_type": "dapo", "batch_size": 4, "mask_truncated_completions": True, "r": 32, "seed": 9},
]
DEFAULTS: dict[str, object] = {
    "lr": 5e-4,
    "r": 8,
    "beta": 0.0,
    "num_generations": 4,
    "scale_rewards": "group",
    "temperature": 1.0,
    "max_completion_length": 7,
    "mask_truncated_completions": False,
    "gradient_accumulation_steps": 1,
}
SLOTS = [5, 2, 6, 0, 4, 1, 8, 3, 7]

PARITY_WORST = "parity_worst"
"""Largest relative difference from TRL's loss, and from the weights after its step; the benchmark of GRPO shows it."""


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_grpo_trainer(tmp_path_factory.mktemp("trl"))


@pytest.fixture
def _given_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "write", write_all)


def bank_of(configs: list[dict[str, object]], slots: list[int] | None = None, name: str = "llama") -> Bank:
    task = make_task(
        [DEFAULTS | config for config in configs], method="grpo", reward_funcs=["exact"], max_tokens_per_pass=10_000
    )
    bank = Bank(make_model(name), task, slots=slots, rewards=GivenRewards())
    bank.backbone.tokenizer = Spelling()
    return bank


def far_from_the_base(bank: Bank) -> None:
    """Take two steps and enlarge the adapters, so that there is a divergence."""
    for _ in range(2):
        bank.step()
    bank.trainer.bank.params_ZP.mul_(4)


def texts_of(bank: Bank, job: Any) -> Any:
    """Return the completions of the next step of a job."""
    texts = Sampled.for_step(job, job.slot, bank.backbone).texts
    for text in texts:
        written(text)
    return texts


@pytest.mark.usefixtures("_given_completions")
def test_five_steps_beside_other_jobs_each_from_equal_state_equal_trl_alone(
    trl: Any, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    losses: dict[int, float] = {}

    def kept(backbone: Any, batch: Any, learners: Any) -> Any:
        found = job_losses(backbone, batch, learners)
        losses.update(zip(batch.slots, found.tolist(), strict=True))
        return found

    job_losses = training.job_losses
    monkeypatch.setattr(training, "job_losses", kept)
    base, bank = make_model("qwen3"), bank_of(JOBS, SLOTS, "qwen3")
    far_from_the_base(bank)
    solos = [SoloGrpo(base, DATA.train, job.config, trl=trl) for job in bank.jobs]
    worst = 0.0
    for _ in range(5):
        states = [(state_of(bank, job), texts_of(bank, job)) for job in bank.jobs]
        found = bank.step()
        for job, solo, (state, texts) in zip(bank.jobs, solos, states, strict=True):
            solo.load(*state)
            assert_same_step(found[job.id], solo.train_step(texts))
            assert losses[job.slot] == pytest.approx(solo.loss, rel=LOSS_TOLERANCE, abs=1e-7), job.config.objective
            weights = relative_distance(flat(bank.trainer.bank.read(job.slot)), solo.weights())
            worst = max(worst, weights, abs(losses[job.slot] - solo.loss) / max(1.0, abs(solo.loss)))
    assert worst <= LOSS_TOLERANCE
    record_property(PARITY_WORST, worst)


@pytest.mark.usefixtures("_given_completions")
@pytest.mark.parametrize("change", ["beta", "loss_type", "temperature", "ids"])
def test_the_comparison_fails_for_another(change: str, trl: Any) -> None:
    bank, base = bank_of(JOBS[4:5]), make_model("llama")
    far_from_the_base(bank)
    (job,) = bank.jobs
    other = {"beta": {"beta": 0.11}, "loss_type": {"loss_type": "grpo"}, "temperature": {"temperature": 0.71}}
    config = job.config.replace(**other.get(change, {}))
    tampered: Any = {"tamper_ids": lambda ids: [3, *ids[1:]]} if change == "ids" else {}
    solo = SoloGrpo(base, DATA.train, config, trl=trl, **tampered)
    solo.load(*state_of(bank, job))
    texts = texts_of(bank, job)
    found, expected = bank.step()[job.id], solo.train_step(texts)
    with pytest.raises(AssertionError):
        assert_same_step(found, expected)


def test_a_job_that_goes_nan_changes_no_other_job_by_one_bit() -> None:
    assert_nan_stays_alone(lambda: bank_of(JOBS[:5]))
