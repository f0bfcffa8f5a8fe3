"""Isolation (law 1) where settings meet: biases, magnitudes, heads, noise and every optimizer in one bank, on padded
rows, with recomputed layers, on quantised bases and in half precision, on pairs, and beside tasks of other methods.

The oracle is PEFT with the optimizer of transformers' ``Trainer`` on the unmodified model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build_tiny
from biased_models import bloom, llama, mamba, starcoder2
from job_kinds import KINDS, ON_BLOOM, Config, compare, kinds_on, same_but_rounding
from moe_models import build_mixture
from noise import same_noise
from optional import needs_bitsandbytes
from oracle import SoloJob, StepFacts, relative_distance
from oracle_classification import ONE_LABEL, ONE_NUMBER, SoloClassifier, data_of
from oracle_kto import LABELLED
from resident_jobs import DATA, PAIRS, VOCABULARY, Bank, assert_same_step, make_task, state_of
from shared_executor import SETTINGS, SharedExecutor, assert_as_alone, curves_alone
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from alto.backbone import load_network
from alto.backbone.quantised import QuantisedLinear
from alto.data import TaskData
from alto.errors import UnsupportedError
from alto.lora import adapter_shape
from alto.records import LabelSet
from alto.spec import BaseModelSpec, JobConfig, Task

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

MODELS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Config]]] = {
    "llama": (llama, KINDS),
    "starcoder2": (starcoder2, KINDS),
    "bloom": (bloom, ON_BLOOM),
}


def bank_of(model: PreTrainedModel, kinds: dict[str, Config], *, data: TaskData = DATA, **settings: Any) -> Bank:
    """Return a bank with a job of every kind, the first in the last slot, and one free slot."""
    task = settings.pop("task", None) or make_task(list(kinds.values()), **settings)
    return Bank(model, task, slots=list(range(len(kinds), 0, -1)), data=data)


def classification(kinds: dict[str, Config], labels: LabelSet = ONE_LABEL, **settings: Any) -> Task:
    method = "regression" if labels.problem_type == "regression" else "classification"
    return make_task(list(kinds.values()), method=method, **settings).with_labels(labels)


def without(kinds: dict[str, Config], **settings: Any) -> dict[str, Config]:
    return {name: {**config, **settings} for name, config in kinds.items()}


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", MODELS)
def test_all_kinds_of_jobs_beside_each_other_equal_peft_alone(name: str, *, is_recomputed: bool) -> None:
    model, kinds = MODELS[name]
    bank = bank_of(model(), kinds)
    assert bank.backbone.is_padded == (name == "bloom")
    if is_recomputed:
        bank.backbone.checkpoint_layers()
    compare(model, bank, num_steps=2)


def test_a_recurrence_trains_all_kinds_that_it_allows() -> None:
    kinds = without(kinds_on("in_proj", "x_proj"), bias="none", target_modules=["in_proj", "x_proj"])
    bank = bank_of(mamba(), kinds)
    assert bank.backbone.is_padded
    compare(mamba, bank, num_steps=2)
    reason = r"^bias: expected .* found backbone\.layers\.0\.mixer\.conv1d\.bias of a Conv1d; set bias: lora_only"
    with pytest.raises(UnsupportedError, match=reason):
        adapter_shape(mamba(), JobConfig(bias="all", target_modules=["in_proj"]))


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_heads_of_all_kinds_of_jobs_equal_peft_alone(name: str, *, is_recomputed: bool) -> None:
    model, kinds = MODELS[name]
    bank = bank_of(model(), kinds, task=classification(kinds), data=data_of(ONE_LABEL))
    if is_recomputed:
        bank.backbone.checkpoint_layers()
    compare(model, bank, num_steps=2, data=data_of(ONE_LABEL), solo=SoloClassifier)


class PlainPairs(SoloJob):
    """One job on preference pairs, with DPO's loss reimplemented."""

    def __init__(self, base: PreTrainedModel, *args: Any, **settings: Any) -> None:
        super().__init__(base, *args, **settings)
        self._reference = base.requires_grad_(False)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")[:, 1:]

        def log_probs(model: Any) -> Tensor:
            of_tokens = model(**batch).logits[:, :-1].double().log_softmax(-1)
            of_labels = of_tokens.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            return (of_labels * (labels >= 0)).sum(1)

        with torch.no_grad():
            expected = log_probs(self._reference)
        chosen, rejected = (log_probs(self.model) - expected).chunk(2)
        return -torch.nn.functional.logsigmoid(self.config.objective.beta * (chosen - rejected)).mean()


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_all_kinds_of_jobs_on_pairs_equal_peft_alone(name: str) -> None:
    """Both replies share their prompt's tokens; if rows are padded, these are in two rows."""
    model, kinds = MODELS[name]
    task = make_task(list(without(kinds, neftune_noise_alpha=None).values()), method="dpo", beta=0.3)
    bank = bank_of(model(), kinds, task=task, data=PAIRS)
    bank.step()
    compare(model, bank, num_steps=1, data=PAIRS, solo=PlainPairs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    llama().save_pretrained(folder)
    return folder


BITS = [pytest.param(4, marks=needs_bitsandbytes), pytest.param(8, marks=needs_bitsandbytes)]
WITHOUT_DORA = without(KINDS, use_dora=False)


def quantised(folder: Path, bits: int) -> tuple[PreTrainedModel, Callable[[], PreTrainedModel]]:
    """Return the model in so many bits, and a function that makes one with equal, unpacked weights."""
    network = load_network(BaseModelSpec(id=str(folder), quantisation=f"{bits}bit"))
    weights = {
        name: module.weight.clone() for name, module in network.named_modules() if isinstance(module, QuantisedLinear)
    }
    assert weights

    def unpacked() -> PreTrainedModel:
        model = llama()
        for name, weight in weights.items():
            model.get_submodule(name).weight.data.copy_(weight)
        return model

    return network, unpacked


@pytest.mark.parametrize("has_head", [False, True], ids=["sft", "classification"])
@pytest.mark.parametrize("bits", BITS)
def test_all_kinds_of_jobs_on_a_quantised_base_equal_peft_alone(bits: int, *, has_head: bool, saved: Path) -> None:
    network, unpacked = quantised(saved, bits)
    if has_head:
        task, data = classification(WITHOUT_DORA), data_of(ONE_LABEL)
        bank = bank_of(network, WITHOUT_DORA, task=task, data=data)
        compare(unpacked, bank, num_steps=2, data=data, solo=SoloClassifier)
    else:
        compare(unpacked, bank_of(network, WITHOUT_DORA), num_steps=2)


@needs_bitsandbytes
def test_magnitudes_on_a_quantised_base_are_refused_with_the_reason(saved: Path) -> None:
    network, _ = quantised(saved, 8)
    with pytest.raises(UnsupportedError, match=r"use_dora: expected .* that model\.layers\.0.* is quantised"):
        bank_of(network, KINDS)


@pytest.fixture(scope="module")
def in_half(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], PreTrainedModel]:
    """Loads a model in bfloat16 with weights of the usual size; larger ones amplify rounding."""
    folder = tmp_path_factory.mktemp("half")
    build_tiny("llama-bias", vocab_size=VOCABULARY, initializer_range=0.05).save_pretrained(folder)

    def load() -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return model.eval()

    return load


def with_noise(bank: Bank) -> Bank:
    """Add noise to a bank's adapters, so that no matrix is zero and no bias or magnitude equals the base's."""
    generator = torch.Generator().manual_seed(5)
    for job in bank.jobs:
        row = bank.trainer.bank.params_ZP[job.slot, : bank.trainer.bank.places(job.slot).end]
        row += 0.02 * torch.randn(row.shape, generator=generator).to(row.dtype)
    return bank


HALF_TOLERANCE = 2e-2
"""Tolerance of gradients in norm: two to three times the measured error, which PEFT has too in this precision."""


def assert_close(found: StepFacts, expected: StepFacts) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=5e-3)
    gradients = {name: tensor.float() for name, tensor in found.gradients.items()}
    assert relative_distance(gradients, expected.gradients) <= HALF_TOLERANCE


@pytest.mark.parametrize("has_head", [False, True], ids=["sft", "classification"])
@pytest.mark.parametrize("adapter_dtype", ["float32", "bfloat16"])
def test_all_kinds_of_jobs_in_half_precision_are_near_peft_without_rounding(
    adapter_dtype: str, in_half: Callable[[], PreTrainedModel], *, has_head: bool
) -> None:
    task = classification(KINDS, adapter_dtype=adapter_dtype) if has_head else None
    data, solo = (data_of(ONE_LABEL), SoloClassifier) if has_head else (DATA, SoloJob)
    bank = with_noise(bank_of(in_half(), KINDS, task=task, data=data, adapter_dtype=adapter_dtype))
    assert bank.trainer.bank.params_ZP.dtype == getattr(torch, adapter_dtype)
    compare(lambda: in_half().float(), bank, num_steps=1, data=data, solo=solo, same=assert_close)
    for _ in range(2):  # optimizers step in that precision too
        facts = bank.step()
    assert all(torch.isfinite(torch.tensor(of_job.loss)) for of_job in facts.values())
    assert all(any(bool(update.any()) for update in of_job.updates.values()) for of_job in facts.values())


@pytest.mark.parametrize("wrong", [{"use_rslora": False}, {"lora_alpha": 17.0}], ids=str)
def test_the_comparison_in_half_precision_bites(wrong: dict[str, Any], in_half: Callable[[], PreTrainedModel]) -> None:
    bank = with_noise(Bank(in_half(), make_task([{**KINDS["everything-adamw"], "neftune_noise_alpha": None}])))
    (job,) = bank.jobs
    alone = SoloJob(in_half().float(), DATA.train, job.config, tamper=wrong)
    alone.load(bank.trainer.bank.read(job.slot))
    with pytest.raises(AssertionError):
        assert_close(bank.step()[job.id], alone.train_step())


def tasks() -> dict[str, tuple[Task, TaskData]]:
    """Return five methods on one base, with classification heads of two sizes."""
    plain = {"lr": 2e-4, "r": 4, "batch_size": 4, "weight_decay": 0.1}
    dora = {"lr": 1e-3, "r": 8, "batch_size": 3, "use_dora": True, "optim": "rmsprop"}
    kinds = {"plain": {**plain, "seed": 1}, "dora": {**dora, "seed": 2}}
    two = list(kinds.values())
    settings = {**SETTINGS, "max_steps": 4, "eval_steps": 1.0}
    found = {
        "ash": (make_task(two, neftune_noise_alpha=5.0, **settings), DATA),
        "birch": (classification(kinds, ONE_LABEL, **settings), data_of(ONE_LABEL)),
        "cedar": (classification(kinds, ONE_NUMBER, **settings), data_of(ONE_NUMBER)),
        "dogwood": (make_task(two, method="kto", beta=0.5, **settings), LABELLED),
        "elm": (make_task(two, method="dpo", beta=0.3, **settings), PAIRS),
    }
    return {name: (task.replace(name=name), data) for name, (task, data) in found.items()}


def test_tasks_of_five_methods_train_together_as_each_alone(tmp_path: Path) -> None:
    alone = curves_alone(tmp_path / "alone", tasks())
    with SharedExecutor(tmp_path / "together") as shared:
        for name, (task, data) in tasks().items():
            shared.attach(name, task, data)
            shared.turn(2)
        shared.finish()
    assert shared.ended == dict.fromkeys(tasks())
    assert_as_alone(tmp_path / "together", list(tasks()), alone)


def test_the_oracle_of_pairs_bites() -> None:
    bank = bank_of(
        llama(), {"one": KINDS["plain"]}, task=make_task([KINDS["plain"]], method="dpo", beta=0.3), data=PAIRS
    )
    (job,) = bank.jobs
    weights = bank.trainer.bank.read(job.slot)
    found = bank.step()[job.id]
    alone = PlainPairs(llama(), PAIRS.train, job.config.replace(beta=0.31))
    alone.load(weights)
    with pytest.raises(AssertionError):
        assert_same_step(found, alone.train_step())


def mixtral() -> PreTrainedModel:
    return build_mixture("mixtral", vocab_size=VOCABULARY)


def test_jobs_of_all_kinds_beside_one_on_experts_equal_peft_alone_and_so_does_that_one() -> None:
    """The attention's layers are shared; the experts' job is compared with itself alone, since other tests compare it
    with PEFT."""
    usual = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "gradient_accumulation_steps": 1}
    usual["router_aux_loss_coef"] = 0.0  # PEFT alone has no such loss
    kinds = {name: {**usual, **config, "bias": "none"} for name, config in KINDS.items()}
    experts = {
        "lr": 1e-3,
        "r": 4,
        "batch_size": 3,
        "target_parameters": ["experts.down_proj", "gate.weight"],
        "seed": 9,
    }
    experts |= {"target_modules": ["q_proj"], "neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 2}
    alone = Bank(mixtral(), make_task([experts]))
    bank = Bank(mixtral(), make_task([*kinds.values(), experts]), slots=list(range(len(kinds) + 1, 0, -1)))
    for _ in range(2):
        states = [state_of(bank, job) for job in bank.jobs]
        found, expected = bank.step(), alone.step()["job-000"]
        for job, state in zip(bank.jobs[:-1], states, strict=False):
            solo = SoloJob(mixtral(), DATA.train, job.config)
            solo.load(*state)
            with same_noise(solo):
                same_but_rounding(found[job.id], solo.train_step())
        assert any("experts" in name for name in expected.updates)
        assert_same_step(found[bank.jobs[-1].id], expected)
