"""Isolation on preference pairs: a job beside jobs of other losses, betas, ranks and batch sizes equals the job alone.

The oracle is TRL's ``DPOTrainer`` with PEFT and torch's AdamW on the unmodified model (``tests/support/oracle.py``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from biased_models import llama
from isolation import (
    assert_micro_batches_change_nothing,
    assert_nan_stays_alone,
    assert_step_is_that_of,
    evaluations_beside,
)
from oracle import (
    SoloCpo,
    SoloPairs,
    as_trl_has_it,
    flat,
    make_cpo_trainer,
    make_dpo_trainer,
    padded_batch,
    reference_model,
    relative_distance,
)
from preference_pairs import make_pairs
from resident_jobs import LOSS_TOLERANCE, PAIRS, Bank, assert_same_step, make_model, make_task, state_of
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.data import Span
from alto.executor import JobState, RunInputs, TaskContext, TaskSession, run_alone
from alto.lora import read_adapter
from alto.runs import Journal, RunDir, read_events, read_history
from alto.spec import Task

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

JOBS = [
    {"loss_type": "sigmoid", "beta": 0.1, "lr": 1e-3, "r": 4, "batch_size": 1, "seed": 1},
    {"loss_type": "sigmoid", "beta": 0.5, "lr": 5e-4, "r": 8, "batch_size": 4, "weight_decay": 0.1, "seed": 2},
    {
        "loss_type": "sigmoid",
        "beta": 2.0,
        "lr": 2e-4,
        "r": 32,
        "batch_size": 8,
        "lr_scheduler_type": "cosine",
        "seed": 3,
    },
    {"loss_type": "ipo", "beta": 0.05, "lr": 2e-4, "r": 16, "batch_size": 2, "seed": 4},
    {"loss_type": "ipo", "beta": 0.5, "lr": 5e-4, "r": 8, "batch_size": 5, "max_grad_norm": None, "seed": 5},
    {"loss_type": "ipo", "beta": 1.0, "lr": 5e-4, "r": 64, "batch_size": 3, "lora_alpha": 32, "seed": 6},
    {"loss_type": "hinge", "beta": 0.1, "lr": 5e-4, "r": 8, "batch_size": 2, "seed": 7},
    {"loss_type": "robust", "beta": 0.2, "label_smoothing": 0.1, "lr": 5e-4, "r": 16, "batch_size": 8, "seed": 8},
    {"loss_type": "apo_zero", "beta": 0.1, "lr": 5e-4, "r": 8, "batch_size": 3, "seed": 9},
    {"loss_type": "apo_down", "beta": 0.1, "lr": 5e-4, "r": 4, "batch_size": 4, "max_grad_norm": 0.05, "seed": 10},
    {"loss_type": "sigmoid_norm", "beta": 2.0, "lr": 1e-3, "r": 8, "batch_size": 2, "seed": 11},
    {"loss_type": "exo_pair", "beta": 0.2, "label_smoothing": 0.01, "lr": 5e-4, "r": 8, "batch_size": 4, "seed": 12},
    {"loss_type": "nca_pair", "beta": 0.1, "lr": 5e-4, "r": 8, "batch_size": 2, "seed": 13},
    {"loss_type": "sppo_hard", "beta": 0.5, "lr": 2e-4, "r": 4, "batch_size": 3, "seed": 14},
    {"loss_type": "discopop", "beta": 0.05, "discopop_tau": 0.2, "lr": 5e-4, "r": 8, "batch_size": 4, "seed": 15},
    {"loss_type": "sigmoid", "rpo_alpha": 0.7, "beta": 0.1, "lr": 5e-4, "r": 8, "batch_size": 5, "seed": 16},
    {
        "loss_type": ["sigmoid", "bco_pair", "sft"],
        "loss_weights": [0.8, 0.2, 1.0],
        "beta": 0.1,
        "lr": 5e-4,
        "r": 16,
        "batch_size": 4,
        "seed": 17,
    },
    {"loss_type": "sigmoid", "ld_alpha": 0.3, "beta": 0.5, "lr": 5e-4, "r": 8, "batch_size": 8, "seed": 18},
    {
        "loss_type": "ipo",
        "f_divergence_type": "forward_kl",
        "beta": 0.5,
        "lr": 2e-4,
        "r": 8,
        "batch_size": 2,
        "seed": 19,
    },
    {
        "loss_type": "sigmoid",
        "f_divergence_type": "js_divergence",
        "beta": 0.5,
        "lr": 5e-4,
        "r": 8,
        "batch_size": 3,
        "seed": 20,
    },
    {
        "loss_type": "sigmoid",
        "f_divergence_type": "alpha_divergence",
        "f_alpha_divergence_coef": 0.3,
        "beta": 0.2,
        "lr": 5e-4,
        "r": 8,
        "ld_alpha": 0.0,
        "batch_size": 4,
        "seed": 21,
    },
]
CPO_JOBS = [
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0, "lr": 1e-3, "r": 8, "batch_size": 4},
    {"loss_type": "simpo", "beta": 2.5, "cpo_alpha": 0.5, "label_smoothing": 0.1, "lr": 5e-4, "r": 4, "batch_size": 3},
    {"loss_type": "sigmoid", "beta": 0.1, "lr": 5e-4, "r": 16, "batch_size": 5},
    {"loss_type": "hinge", "beta": 0.2, "cpo_alpha": 2.0, "lr": 5e-4, "r": 8, "batch_size": 1},
    {"loss_type": "ipo", "beta": 0.3, "cpo_alpha": 1.0, "lr": 2e-4, "r": 8, "batch_size": 8},
]
FEW = [JOBS[index] for index in (1, 4, 7)]
SLOTS = [5, 2, 8, 0, 9, 4, 11, 7, 1, 10, 3, 20, 13, 12, 19, 14, 21, 16, 15, 18, 17]
METRICS = {
    "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins",
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
}


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_dpo_trainer(tmp_path_factory.mktemp("trl"))


def dpo_task(configs: list[dict[str, object]], **settings: object) -> Task:
    return make_task(configs, method="dpo", **settings)


def solo_of(job: JobState, base: PreTrainedModel, trl: Any) -> SoloPairs:
    return SoloPairs(base, PAIRS.train, job.config, trl=trl, reference=reference_model(base))


def test_from_equal_state_one_step_and_one_evaluation_beside_other_jobs_equal_trl_alone(trl: Any) -> None:
    base, bank = make_model("qwen3"), Bank(make_model("qwen3"), dpo_task(JOBS), slots=SLOTS, data=PAIRS)
    solos = [solo_of(job, base, trl) for job in bank.jobs]
    for _ in range(3):
        bank.step()
    assert_step_is_that_of(solos, bank)
    bank.trainer.bank.params_ZP.mul_(8)  # far from the base, so that rewards are more than rounding
    for job, metrics, expected in evaluations_beside(solos, bank, PAIRS.validation):
        for metric, name_in_trl in METRICS.items():
            assert metrics[metric] == pytest.approx(expected[name_in_trl], rel=1e-3, abs=1e-5), metric
        kl = (expected["rewards/chosen"] + expected["rewards/rejected"]) / 2 / job.config.objective.beta
        assert metrics["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-4)
        assert abs(metrics["kl"]) > 1e-2, "nothing has been learned, so the test proves nothing"


def test_without_a_reference_one_step_and_one_evaluation_beside_other_jobs_equal_trl_alone(tmp_path: Path) -> None:
    trl = make_cpo_trainer(tmp_path)
    task = make_task([{**config, "seed": seed} for seed, config in enumerate(CPO_JOBS)], method="cpo")
    base, bank = make_model("qwen3"), Bank(make_model("qwen3"), task, slots=[4, 2, 0, 5, 1], data=PAIRS)
    solos = [SoloCpo(base, PAIRS.train, job.config, trl=trl) for job in bank.jobs]
    for _ in range(3):
        bank.step()
    assert_step_is_that_of(solos, bank)
    for job, metrics, expected in evaluations_beside(solos, bank, PAIRS.validation):
        for metric, name_in_trl in METRICS.items():
            assert metrics[metric] == pytest.approx(expected[name_in_trl], rel=1e-3, abs=1e-5), metric
        if job.config.objective.cpo_alpha:
            assert metrics["chosen_loss"] == pytest.approx(expected["nll_loss"], rel=LOSS_TOLERANCE)


def test_what_the_base_gives_replies_is_what_trls_own_reference_model_gives(trl: Any) -> None:
    base = make_model("llama")
    found = Bank(make_model("llama"), dpo_task(JOBS[:1]), data=PAIRS).data.train.references
    batch = as_trl_has_it(padded_batch(PAIRS.train, range(len(PAIRS.train))))
    trl.ld_alpha = None  # another test may have set it
    expected = torch.stack(trl.compute_ref_log_probs(reference_model(base), batch), 1)
    assert found.numpy() == pytest.approx(expected.double().numpy(), rel=LOSS_TOLERANCE)


def test_whole_curves_equal_trl_alone(trl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor has fewer slots than jobs: jobs are parked, and come back to other slots."""
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    data = replace(PAIRS, train=make_pairs(16, seed=3))
    task = dpo_task(
        FEW,
        max_slots=2,
        eval_steps=0.5,
        early_exit={"rungs": [[0.3, 1.0], [0.6, 1.0]], "detect_divergence": False, "detect_overfitting": False},
    )
    run_dir = RunDir.create(tmp_path / "runs", task)
    backbone = Backbone(make_model("llama"), None, "unused")
    with Journal(run_dir.journal_file) as journal:
        run_alone(TaskSession(TaskContext.of(task, backbone, data), journal, RunInputs(run_dir=run_dir)))
    events = read_events(run_dir.journal_file)
    assert {"job_parked", "job_resumed"} <= {event["event"] for event in events}
    assert not events[0]["references"]["is_cached"]
    evaluations = {(event["job"], event["step"]): event for event in events if event["event"] == "eval"}

    base, fresh, history = make_model("llama"), Bank(make_model("llama"), task, data=data), read_history(run_dir.root)
    for job in fresh.jobs:
        solo = SoloPairs(base, data.train, job.config, trl=trl, reference=reference_model(base))
        solo.load(fresh.trainer.bank.read(job.slot))
        expected, found = torch.tensor(solo.train()), torch.tensor(list(history.jobs[job.id].train_losses))
        assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-4, job.config
        assert relative_distance(flat(read_adapter(run_dir.job(job.id, "last"))), solo.weights()) <= 1e-4, job.config
        last, worth = evaluations[job.id, job.total_steps], solo.evaluate(PAIRS.validation)
        assert last["validation_loss"] == pytest.approx(worth["loss"], rel=1e-4)
        assert last["metrics"]["reward_accuracy"] == pytest.approx(worth["rewards/accuracies"])


@pytest.mark.parametrize("poison", ["weights", "moments"])
def test_a_job_that_goes_nan_changes_no_other_job_by_one_bit(poison: str) -> None:
    assert_nan_stays_alone(lambda: Bank(make_model("llama"), dpo_task(FEW), data=PAIRS), poison=poison)


@pytest.mark.parametrize(
    ("configs", "settings"),
    [
        (FEW, {"method": "dpo"}),
        ([JOBS[15], JOBS[17], JOBS[7]], {"method": "dpo"}),
        ([CPO_JOBS[0], CPO_JOBS[1], CPO_JOBS[4]], {"method": "cpo"}),
    ],
)
def test_a_step_in_passes_that_part_the_pairs_of_a_job_is_the_same_step(configs: Any, settings: Any) -> None:
    whole, parted = (
        Bank(make_model("llama"), make_task(configs, **settings, max_tokens_per_pass=n), data=PAIRS)
        for n in (10_000, 60)
    )
    batch = whole.jobs[2].order.rows_of_step(0)
    assert sum(PAIRS.train.input_ids[row].numel() for row in batch) > 2 * 60
    assert_micro_batches_change_nothing(whole, parted)


def test_jobs_on_odds_ratios_do_not_depend_on_other_jobs() -> None:
    configs = [
        {"beta": 0.1, "lr": 1e-3, "r": 4, "batch_size": 1, "seed": 1},
        {"beta": 0.5, "lr": 5e-4, "r": 16, "batch_size": 4, "seed": 2},
        {"beta": 1.0, "lr": 5e-4, "r": 8, "batch_size": 8, "seed": 3},
    ]
    together = Bank(make_model("llama"), make_task(configs, method="orpo"), data=PAIRS).step()
    for index, config in enumerate(configs):
        bank = Bank(make_model("llama"), make_task([config], method="orpo"), data=PAIRS)
        (alone,) = bank.step().values()
        assert_same_step(list(together.values())[index], alone)


@pytest.fixture(scope="module")
def stepped() -> tuple[Bank, list[Any], dict[str, Any]]:
    """The states before the third step, and the results of that step."""
    bank = Bank(make_model("llama"), dpo_task(FEW), data=PAIRS)
    for _ in range(2):
        bank.step()
    states = [state_of(bank, job) for job in bank.jobs]
    return bank, states, bank.step()


class TestTheOracleBites:
    """The comparison of one step fails for each likely mistake in a preference loss."""

    def compare(self, stepped: Any, trl: Any, *, data: Any = PAIRS.train, **changes: Any) -> None:
        (bank, states, found), base = stepped, make_model("llama")
        job = bank.jobs[0]
        config = job.config.replace(**changes)
        solo = SoloPairs(base, data, config, trl=trl, reference=reference_model(base))
        solo.load(*states[0])
        assert_same_step(found[job.id], solo.train_step())

    def test_control(self, stepped: Any, trl: Any) -> None:
        self.compare(stepped, trl)

    @pytest.mark.parametrize(
        "changes",
        [
            {"beta": 0.505},
            {"loss_type": "hinge"},
            {"loss_type": "ipo"},
            {"rpo_alpha": 0.01},
            {"ld_alpha": 0.95},
            {"f_divergence_type": "js_divergence"},
        ],
    )
    def test_a_setting_of_another_job(self, stepped: Any, trl: Any, changes: dict[str, Any]) -> None:
        with pytest.raises(AssertionError):
            self.compare(stepped, trl, **changes)

    def test_a_rejected_reply_behind_another_prompt(self, stepped: Any, trl: Any) -> None:
        spans = tuple((first, Span(second.length, max(0, second.prefix - 1))) for first, second in PAIRS.train.spans)
        with pytest.raises(AssertionError):
            self.compare(stepped, trl, data=replace(PAIRS.train, spans=spans))


def test_magnitudes_and_biases_equal_trl_alone_whose_reference_has_none(trl: Any) -> None:
    configs = [
        {**JOBS[1], "use_dora": True, "bias": "all"},
        {**JOBS[6], "use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 4}, "optim": "rmsprop"},
        {**JOBS[4], "bias": "lora_only", "optim": "adafactor"},
        JOBS[7],
    ]
    base, bank = llama(), Bank(llama(), dpo_task(configs), slots=[2, 4, 0, 1], data=PAIRS)
    bank.step()
    solos = [solo_of(job, base, trl) for job in bank.jobs]
    assert_step_is_that_of(solos, bank)
    for _, metrics, expected in evaluations_beside(solos, bank, PAIRS.validation):
        for metric, name_in_trl in METRICS.items():
            assert metrics[metric] == pytest.approx(expected[name_in_trl], rel=1e-4, abs=1e-5), metric
