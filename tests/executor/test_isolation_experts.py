"""Stacked experts: a job beside others trains as in TRL alone, with the routers' load-balancing loss too.

The oracle is the losses of TRL's trainers on transformers' own models with PEFT's adapters and torch's AdamW
(``tests/support/oracle_mixture.py``).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

import torch
from oracle import StepFacts, relative_distance
from oracle_mixture import (
    EXPERTS,
    OWN_COEFFICIENT,
    ROUTER,
    TrlDpo,
    TrlSft,
    facts_in_peft,
    make_mixture,
    make_sft_trainer,
    make_trl_dpo,
    step_alone,
    trained_bank,
)
from resident_jobs import DATA, PAIRS, Bank, assert_same_step, make_model, make_task
from transformers.modeling_layers import GradientCheckpointingLayer

from alto.backbone import Backbone
from alto.data import TaskData
from alto.errors import UnsupportedModelError
from alto.executor import JobState, RunInputs, TaskContext, TaskSession, run_alone
from alto.runs import Journal, RunDir, read_events
from alto.spec import Task

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_EXPERTS = {"mixtral": "num_local_experts", "gpt-oss": "num_local_experts", "olmoe": "num_experts"}
SLOTS = [3, 0, 4, 1]
JOBS: list[dict[str, object]] = [
    {"r": 1, "batch_size": 1, "weight_decay": 0.1, "seed": 1},
    {"r": 6, "batch_size": 2, "gradient_accumulation_steps": 3, "max_grad_norm": None, "seed": 2},
    {"r": 3, "batch_size": 4, "lora_alpha": 24, "max_grad_norm": 0.05, "seed": 3},
    {"r": 8, "batch_size": 3, "target_parameters": EXPERTS[1:], "seed": 4},
]
"""Jobs with different ranks, scales, batch sizes and trained parameters."""


def task_of(jobs: list[dict[str, object]], **settings: Any) -> Task:
    common = {
        "lr": 1e-3,
        "target_modules": ["q_proj"],
        "target_parameters": EXPERTS,
        "gradient_accumulation_steps": 1,
        "weight_decay": 0.0,
        "router_aux_loss_coef": 0.0,
    }
    return make_task([common | job for job in jobs], **settings)


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> TrlSft:
    return make_sft_trainer(tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> TrlDpo:
    return make_trl_dpo(tmp_path_factory.mktemp("dpo"))


def assert_steps_are_trls(
    bank: Bank, name: str, trl: TrlSft | TrlDpo, folder: Path, data: TaskData, **changes: Any
) -> dict[str, StepFacts]:
    """Compare one step of all jobs with TRL from equal state; return ALTO's facts."""
    base = make_mixture(name, **changes)
    weights = {job.id: bank.trainer.bank.read(job.slot) for job in bank.jobs}
    found = bank.step()
    for job in bank.jobs:
        rows, config = job.order.rows_of_step(0), job.config

        def loss_of(model: Any, rows: Any = rows, config: Any = config) -> torch.Tensor:
            if isinstance(trl, TrlSft):
                return trl.loss(model, data.train, rows, config.per_device_train_batch_size, 0.0)
            return trl.loss(model, base, data.train, rows, config.objective.beta, 0.0)

        expected = step_alone(base, config, weights[job.id], folder / job.id, loss_of)
        assert_same_step(facts_in_peft(found[job.id]), expected)
    return found


def untouched_experts(facts: StepFacts) -> list[list[int]]:
    """Return for every layer the experts whose matrices have no gradient."""
    return [
        [expert for expert, of_expert in enumerate(gradient) if not of_expert.any()]
        for name, gradient in sorted(facts.gradients.items())
        if name.endswith("experts.down_proj.A")
    ]


@pytest.mark.parametrize("name", NUM_EXPERTS)
def test_experts_that_get_no_token_of_a_job(name: str, sft: TrlSft, tmp_path: Path) -> None:
    """Other jobs send tokens to them, and this job's matrices have no gradient."""
    many = {NUM_EXPERTS[name]: 24}
    bank = trained_bank(name, task_of(JOBS), SLOTS, **many)
    found = assert_steps_are_trls(bank, name, sft, tmp_path, DATA, **many)
    untouched = [untouched_experts(facts) for facts in found.values()]
    fewest = [min(len(of_layer) for of_layer in layers) for layers in untouched]
    assert fewest[0] > 0, "the smallest job sends tokens to all experts, so the test proves nothing"
    for layer in range(2):
        sets = [set(layers[layer]) for layers in untouched]
        assert sets[0] - set.intersection(*sets), "no other job sends tokens to those experts"
    first = next(iter(found.values()))
    for name_of_matrix, update in first.updates.items():
        if name_of_matrix.endswith("experts.down_proj.B"):
            layer = int(name_of_matrix.split(".")[2])
            decay = 1e-3 * 0.1 * 0.2
            assert float(update[untouched[0][layer]].abs().max()) < decay, "only weight decay moves them"


@pytest.mark.parametrize("name", NUM_EXPERTS)
def test_tokens_of_all_jobs_go_to_the_same_experts(name: str, sft: TrlSft, tmp_path: Path) -> None:
    every = {"num_experts_per_tok": 4}
    bank = trained_bank(name, task_of(JOBS), SLOTS, **every)
    found = assert_steps_are_trls(bank, name, sft, tmp_path, DATA, **every)
    assert all(untouched_experts(facts) == [[], []] for facts in found.values())


@pytest.mark.parametrize("name", NUM_EXPERTS)
def test_pairs(name: str, dpo: TrlDpo, tmp_path: Path) -> None:
    jobs = [
        {**job, "gradient_accumulation_steps": 1, "loss_type": "sigmoid", "beta": 0.2 * number}
        for number, job in enumerate(JOBS, start=1)
    ]
    bank = trained_bank(name, task_of(jobs, method="dpo"), SLOTS, data=PAIRS)
    assert_steps_are_trls(bank, name, dpo, tmp_path, PAIRS)


@pytest.mark.parametrize(("method", "data"), [("sft", DATA), ("dpo", PAIRS)])
def test_a_step_in_micro_batches_that_split_a_batch_is_the_same_step(method: str, data: TaskData) -> None:
    jobs = JOBS
    if method == "dpo":
        jobs = [{**job, "gradient_accumulation_steps": 1, "beta": 0.3} for job in JOBS]
    whole, split = (
        trained_bank("mixtral", task_of(jobs, method=method, max_tokens_per_pass=tokens), SLOTS, data=data)
        for tokens in (10_000, 45)
    )
    assert max(job.next_step_tokens for job in whole.jobs) > 45
    expected, found = whole.step(), split.step()
    for job in whole.jobs:
        assert_same_step(found[job.id], expected[job.id])


@pytest.mark.parametrize("fault", ["matrices of another expert", "another scale"])
def test_the_comparison_of_experts_fails_for(fault: str, sft: TrlSft, tmp_path: Path) -> None:
    bank = trained_bank("mixtral", task_of(JOBS), SLOTS)
    job = bank.jobs[1]
    config, weights, rows = job.config, bank.trainer.bank.read(job.slot), job.order.rows_of_step(0)
    if fault == "matrices of another expert":
        for target, _, b_ERN in bank.trainer.bank.matrices(bank.trainer.bank.params_ZP, job.slot):
            if target.num_experts:
                b_ERN.copy_(b_ERN.roll(1, 0))
    else:
        config = config.replace(lora_alpha=config.lora_alpha * 1.01)
    found = facts_in_peft(bank.step()[job.id])
    expected = step_alone(
        make_mixture("mixtral"),
        config,
        weights,
        tmp_path,
        lambda model: sft.loss(model, DATA.train, rows, config.per_device_train_batch_size, 0.0),
    )
    with pytest.raises(AssertionError):
        assert_same_step(found, expected)


ATTENTION = ["q_proj", "v_proj"]


def jobs_of(name: str) -> list[dict[str, object]]:
    """Return jobs with the model's own factor, other factors, and none; with trained or frozen routers and experts; in
    one micro-step or several."""
    router = ROUTER.get(name, "gate.weight")
    return [
        {"r": 4, "batch_size": 3, "target_parameters": None, "router_aux_loss_coef": None, "seed": 1},
        {"r": 2, "batch_size": 2, "target_parameters": [router], "router_aux_loss_coef": 2.0, "seed": 2},
        {
            "r": 3,
            "batch_size": 2,
            "gradient_accumulation_steps": 3,
            "target_parameters": [router, *EXPERTS],
            "router_aux_loss_coef": 0.7,
            "seed": 3,
        },
        {"r": 8, "batch_size": 4, "target_parameters": EXPERTS, "router_aux_loss_coef": 0.0, "seed": 4},
    ]


def sft_task(jobs: Sequence[dict[str, object]], **settings: Any) -> Task:
    common = {"lr": 1e-3, "target_modules": ATTENTION, "gradient_accumulation_steps": 1}
    return make_task([common | job for job in jobs], **settings)


def weight_of(job: JobState) -> float:
    given = job.config.router_aux_loss_coef
    return OWN_COEFFICIENT if given is None else given


def trl_alone(
    sft: TrlSft, name: str, bank: Bank, job: JobState, weights: Any, folder: Path, *, weight: float | None = None
) -> StepFacts:
    """Return the first step of ``job`` in TRL; its loss excludes the load-balancing loss."""
    weight = weight_of(job) if weight is None else weight
    rows = job.order.rows_of_step(0)
    batch_size = job.config.per_device_train_batch_size
    facts = step_alone(
        make_mixture(name),
        job.config,
        weights,
        folder / job.id,
        lambda model: sft.loss(model, bank.data.train, rows, batch_size, weight),
    )
    return replace(facts, loss=facts.loss - weight * sft.mean_balance())


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe-shared", "qwen3-moe-dense", "olmoe", "gpt-oss"])
def test_from_equal_state_one_step_beside_other_jobs_equals_trl_alone(name: str, sft: TrlSft, tmp_path: Path) -> None:
    bank = trained_bank(name, sft_task(jobs_of(name)), SLOTS)
    weights = {job.id: bank.trainer.bank.read(job.slot) for job in bank.jobs}
    found = bank.step()
    for job in bank.jobs:
        expected = trl_alone(sft, name, bank, job, weights[job.id], tmp_path)
        assert_same_step(facts_in_peft(found[job.id]), expected)


@pytest.mark.parametrize("change", [{"weight": 0.73}, {"weight": 0.0}, {"batch_size": 6}])
def test_the_comparison_fails_for(change: dict[str, Any], sft: TrlSft, tmp_path: Path) -> None:
    """The change is another factor, no factor, or one loss over all rows of a step instead of one per micro-step."""
    bank = trained_bank("mixtral", sft_task(jobs_of("mixtral")[2:3]))
    (job,), weights = bank.jobs, bank.trainer.bank.read(0)
    found = facts_in_peft(bank.step()[job.id])
    rows, weight = job.order.rows_of_step(0), change.get("weight", weight_of(job))
    expected = step_alone(
        make_mixture("mixtral"),
        job.config,
        weights,
        tmp_path,
        lambda model: sft.loss(model, DATA.train, rows, change.get("batch_size", 2), weight),
    )
    assert relative_distance(found.gradients, expected.gradients) > 1e-3


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_on_pairs_one_step_beside_other_jobs_equals_trl_alone(name: str, dpo: TrlDpo, tmp_path: Path) -> None:
    """The prompt of a pair is computed once, and counts twice."""
    common = {"lr": 1e-3, "target_modules": ATTENTION, "gradient_accumulation_steps": 1, "loss_type": "sigmoid"}
    jobs = [
        common | job | {"gradient_accumulation_steps": 1, "beta": 0.2 * index}
        for index, job in enumerate(jobs_of(name), start=1)
    ]
    bank = trained_bank(name, make_task(jobs, method="dpo"), SLOTS, data=PAIRS)
    weights = {job.id: bank.trainer.bank.read(job.slot) for job in bank.jobs}
    found, base = bank.step(), make_mixture(name)
    for job in bank.jobs:
        rows, beta, weight = job.order.rows_of_step(0), job.config.objective.beta, weight_of(job)
        expected = step_alone(
            base,
            job.config,
            weights[job.id],
            tmp_path / job.id,
            lambda model, rows=rows, beta=beta, weight=weight: dpo.loss(model, base, PAIRS.train, rows, beta, weight),
        )
        expected = replace(expected, loss=expected.loss - weight * dpo.mean_balance())
        assert_same_step(facts_in_peft(found[job.id]), expected)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_balanced_step_in_micro_batches_that_split_a_batch_is_the_same_step(method: str) -> None:
    """The choices of experts are counted first: their mean is over rows of all micro-batches."""
    jobs, data = [dict(job) for job in jobs_of("mixtral")], DATA
    if method == "dpo":
        jobs, data = [job | {"gradient_accumulation_steps": 1, "beta": 0.3} for job in jobs], PAIRS
    whole, split = (
        trained_bank("mixtral", sft_task(jobs, method=method, max_tokens_per_pass=tokens), SLOTS, data=data)
        for tokens in (10_000, 30)
    )
    split_jobs = [job for job in whole.jobs if job.next_step_tokens > 30 and weight_of(job)]
    assert len(split_jobs) >= 2
    expected, found = whole.step(), split.step()
    for job in whole.jobs:
        assert_same_step(found[job.id], expected[job.id])


def test_memory_that_runs_out_in_a_step_changes_it_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of one micro-batch are then in several, whose choices must be counted."""
    plenty = trained_bank("mixtral", sft_task(jobs_of("mixtral"), max_tokens_per_pass=10_000))
    expected = plenty.step()
    bank = trained_bank("mixtral", sft_task(jobs_of("mixtral"), max_tokens_per_pass=10_000))
    own, refused = bank.backbone.token_losses, []
    num_tokens = min(job.next_step_tokens for job in bank.jobs)

    def token_losses(hidden_SH: torch.Tensor, targets_S: torch.Tensor, *tokens: Any) -> torch.Tensor:
        if len(targets_S) > 20:
            refused.append(len(targets_S))
            raise torch.OutOfMemoryError("no memory, as the test wants it")
        return own(hidden_SH, targets_S, *tokens)

    monkeypatch.setattr(bank.backbone, "token_losses", token_losses)
    found = bank.step()
    assert len(refused) > 1
    assert num_tokens > bank.trainer.passes.micro_batches.max_tokens
    found_values, expected_values = (
        [metrics.get("router_loss") for metrics in one.trainer.step_metrics(one.jobs)] for one in (bank, plenty)
    )
    assert found_values[:3] == pytest.approx(expected_values[:3], rel=1e-5)
    assert found_values[3:] == expected_values[3:] == [None]
    for job in bank.jobs:
        assert_same_step(found[job.id], expected[job.id])


def test_memory_that_runs_out_after_a_micro_batch_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    plenty, bank = (trained_bank("mixtral", sft_task(jobs_of("mixtral"), max_tokens_per_pass=90)) for _ in range(2))
    expected = plenty.step()
    own, calls = bank.backbone.token_losses, []

    def token_losses(hidden_SH: torch.Tensor, targets_S: torch.Tensor, *tokens: Any) -> torch.Tensor:
        calls.append(len(targets_S))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory, as the test wants it")
        return own(hidden_SH, targets_S, *tokens)

    monkeypatch.setattr(bank.backbone, "token_losses", token_losses)
    found = bank.step()
    assert len(bank.memory_events) == 1
    for job in bank.jobs:
        assert_same_step(found[job.id], expected[job.id])
    found_values, expected_values = (
        [metrics.get("router_loss") for metrics in one.trainer.step_metrics(one.jobs)] for one in (bank, plenty)
    )
    assert found_values[:3] == pytest.approx(expected_values[:3], rel=1e-5)


@pytest.mark.parametrize("other", ["other weights", "nan"])
def test_another_job_changes_no_bit(other: str) -> None:
    banks = [trained_bank("mixtral", sft_task(jobs_of("mixtral")), SLOTS) for _ in range(2)]
    changed = banks[1].jobs[1]
    row = banks[1].trainer.bank.params_ZP[changed.slot]
    row.mul_(3.0) if other == "other weights" else row.fill_(float("nan"))
    first, second = (bank.step() for bank in banks)
    assert first[changed.id].loss != second[changed.id].loss
    for job in banks[0].jobs:
        if job.id != changed.id:
            assert first[job.id].loss == second[job.id].loss
            for kind in ("gradients", "updates"):
                for key, matrix in getattr(first[job.id], kind).items():
                    assert torch.equal(matrix, getattr(second[job.id], kind)[key]), key


def test_a_job_is_alone_with_its_factor() -> None:
    """A job without the loss is the same beside jobs with it and alone."""
    jobs = jobs_of("mixtral")
    together = trained_bank("mixtral", sft_task(jobs), SLOTS).step()
    for index, job in enumerate(jobs):
        (alone,) = trained_bank("mixtral", sft_task([job])).step().values()
        assert_same_step(list(together.values())[index], alone)


@pytest.mark.slow("models")
@pytest.mark.skipif(not shutil.which("g++"), reason="PyTorch's compiler needs a C++ compiler")
def test_compiled_layers_give_the_same_step() -> None:
    jobs = jobs_of("mixtral")[:2]
    plain, compiled = (trained_bank("mixtral", sft_task(jobs)) for _ in range(2))
    for layer in compiled.backbone.model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True)
    try:
        expected, found = plain.step(), compiled.step()
    finally:
        torch.compiler.reset()
    for job in plain.jobs:
        assert_same_step(found[job.id], expected[job.id])


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_recomputed_layers_give_the_same_step(name: str) -> None:
    plain, recomputed = (trained_bank(name, sft_task(jobs_of(name)), SLOTS) for _ in range(2))
    recomputed.backbone.checkpoint_layers()
    expected, found = plain.step(), recomputed.step()
    for job in plain.jobs:
        assert_same_step(found[job.id], expected[job.id])


def test_the_recorded_loss_and_that_of_an_evaluation_are_without_it() -> None:
    jobs = jobs_of("mixtral")[:1]
    with_it, without = (
        trained_bank("mixtral", sft_task([jobs[0] | {"router_aux_loss_coef": weight}])) for weight in (2.0, 0.0)
    )
    assert with_it.trainer.evaluate(with_it.jobs)[0].loss == without.trainer.evaluate(without.jobs)[0].loss
    (found,), (other,) = with_it.step().values(), without.step().values()
    assert found.loss == other.loss
    assert relative_distance(found.gradients, other.gradients) > 1e-2


class TestRefusals:
    def context(self, model: Any, **settings: Any) -> TaskContext:
        job: dict[str, object] = {"lr": 1e-3, "target_modules": ATTENTION, "batch_size": 2}
        return TaskContext.of(make_task([job | settings]), Backbone(model, None, "unused"), DATA)

    def test_a_model_without_experts(self) -> None:
        with pytest.raises(
            UnsupportedModelError, match=r"router_aux_loss_coef: expected a mixture .* LlamaForCausalLM; remove the key"
        ):
            self.context(make_model("llama"), router_aux_loss_coef=0.1)
        assert not self.context(make_model("llama")).jobs[0].router_aux_loss_coef

    def test_a_model_with_another_loss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.mixtral import modeling_mixtral

        own = modeling_mixtral.load_balancing_loss_func
        monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *args: own(*args) * 1.01)
        with pytest.raises(UnsupportedModelError, match=r"computes it for Mixtral, found .* to 0, or use another"):
            self.context(make_mixture("mixtral"))
        assert self.context(make_mixture("mixtral"), router_aux_loss_coef=0.0).jobs


class TestTheJournal:
    """``router_losses`` of ``train`` events: the routers' own loss, next to the loss of the objective."""

    def recorded(self, tmp_path: Path, **settings: Any) -> dict[str, list[dict[str, Any]]]:
        jobs = [job | {"batch_size": 2} for job in jobs_of("mixtral")]
        task = sft_task(jobs, max_steps=3, early_exit=False, max_slots=4, **settings)
        run_dir = RunDir.create(tmp_path, task)
        backbone = Backbone(make_mixture("mixtral"), None, "unused")
        with Journal(run_dir.journal_file) as journal:
            run_alone(TaskSession(TaskContext.of(task, backbone, DATA), journal, RunInputs(run_dir=run_dir)))
        found: dict[str, list[dict[str, Any]]] = {}
        for event in read_events(run_dir.journal_file):
            if event["event"] == "train":
                found.setdefault(event["job"], []).append(event)
        return found

    def test_has_those_of_trl(self, sft: TrlSft, tmp_path: Path) -> None:
        found = self.recorded(tmp_path)
        bank = Bank(make_mixture("mixtral"), sft_task([job | {"batch_size": 2} for job in jobs_of("mixtral")]))
        for job in bank.jobs:
            losses = [loss for event in found[job.id] for loss in event.get("router_losses", ())]
            assert sum(len(event["losses"]) for event in found[job.id]) == 3
            if not weight_of(job):
                assert losses == []
                continue
            # B is 0 before the first step, so the routers are the base's.
            expected = step_alone(
                make_mixture("mixtral"),
                job.config,
                bank.trainer.bank.read(job.slot),
                tmp_path / job.id,
                lambda model, job=job: sft.loss(model, DATA.train, job.order.rows_of_step(0), 2, weight_of(job)),
            )
            assert losses[0] == pytest.approx(sft.mean_balance(), rel=1e-5)
            assert found[job.id][0]["losses"][0] == pytest.approx(
                expected.loss - weight_of(job) * sft.mean_balance(), rel=1e-5
            )
            assert len(losses) == 3

    def test_has_the_same_where_batches_are_split(self, tmp_path: Path) -> None:
        whole, split = (self.recorded(tmp_path / str(tokens), max_tokens_per_pass=tokens) for tokens in (10_000, 30))
        for job, events in whole.items():
            expected = [loss for event in events for loss in event.get("router_losses", ())]
            found = [loss for event in split[job] for loss in event.get("router_losses", ())]
            assert found == pytest.approx(expected, rel=1e-4)
