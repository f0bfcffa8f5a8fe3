"""Jobs that begin with a saved adapter: a step equals that of PEFT's trainable adapter, and of TRL's trainers.

They do so on two ranks and in a population (``search: pbt``), too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from isolation import assert_step_is_that_of, evaluations_beside
from moe_models import build_mixture, random_adapter
from oracle import SoloJob, SoloPairs, flat, padded_batch, quiet_settings, reference_model, relative_distance
from oracle_classification import ONE_LABEL, data_of
from oracle_kto import LABELLED, SoloKto
from peft import PeftModel
from peft_adapters import edit_config, save_with_peft
from preference_pairs import make_pairs
from rank_jobs import (
    an_adapter_on_embeddings_is_refused,
    first_steps_from_a_saved_adapter_are_those_of_peft_alone,
    steps_on_labelled_replies_are_those_of_one_process,
    steps_on_pairs_are_those_of_one_process,
    train,
)
from ranks import failures_on_ranks
from resident_jobs import DATA, LOSS_TOLERANCE, PAIRS, Bank, assert_same_step, make_model, make_task, state_of
from tiny import load_tokenizer
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.data import EncodedDataset
from alto.early_exit import audit
from alto.errors import TargetModuleError
from alto.executor import InitAdapter, MicroBatches, TaskContext, with_references
from alto.executor.planned_job import resolve_rungs
from alto.lora import adapter_shape, read_adapter, saved_settings
from alto.runs import RunDir, read_entries, read_events, read_history
from alto.spec import JobConfig, Task

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("empty_cache")]

SEVERAL: list[dict[str, object]] = [
    {"lr": 1e-3, "batch_size": 2, "seed": 1},
    {"lr": 5e-4, "batch_size": 5, "weight_decay": 0.1, "seed": 2},
    {"lr": 1.0, "batch_size": 4, "max_grad_norm": None, "optim": "sgd", "seed": 3},
]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "up_proj"]},
    "dora": {"r": 4, "use_dora": True, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 2, "up_proj": 6}, "alpha_pattern": {"v_proj": 5}},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
}


def task_from(folder: Path, configs: list[dict[str, object]], **settings: object) -> Task:
    """Return a task of jobs that train adapters of the kind in ``folder``."""
    return make_task([saved_settings(folder) | config for config in configs], **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_steps_equal_those_of_pefts_trainable_adapter(kind: str, tmp_path: Path) -> None:
    folder = save_with_peft(make_model("llama"), tmp_path / "saved", **KINDS[kind])
    base = make_model("llama")
    bank = Bank(make_model("llama"), task_from(folder, SEVERAL), [2, 0, 1], saved=folder)
    solos = [SoloJob(base, DATA.train, job.config, saved=folder) for job in bank.jobs]
    found = bank.step()
    for job, solo in zip(bank.jobs, solos, strict=True):
        assert_same_step(found[job.id], solo.train_step())
    assert_step_is_that_of(solos, bank)


def test_the_comparison_fails_for_another_adapter(tmp_path: Path) -> None:
    folders = [save_with_peft(make_model("llama"), tmp_path / f"{seed}", seed=seed, r=8) for seed in (1, 2)]
    bank = Bank(make_model("llama"), task_from(folders[0], SEVERAL[:1]), saved=folders[0])
    solo = SoloJob(make_model("llama"), DATA.train, bank.jobs[0].config, saved=folders[1])
    with pytest.raises(AssertionError):
        assert_same_step(bank.step()["job-000"], solo.train_step())


def test_adapters_on_experts_and_routers_go_on_as_in_peft(tmp_path: Path) -> None:
    folder = random_adapter(build_mixture("mixtral"), tmp_path / "saved")
    task = task_from(folder, [{"lr": 1e-3, "batch_size": 4, "seed": 1}], router_aux_loss_coef=0.0)
    bank = Bank(build_mixture("mixtral"), task, saved=folder, data=_small(DATA.train, 64))
    model = PeftModel.from_pretrained(build_mixture("mixtral"), folder, is_trainable=True)
    loss = model(**padded_batch(bank.data.train, bank.jobs[0].order.rows_of_step(0))).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    found = bank.step()["job-000"]
    assert found.loss == pytest.approx(float(loss.detach()), rel=LOSS_TOLERANCE)
    assert found.grad_norm == pytest.approx(float(norm), rel=1e-4)


def _small(train: EncodedDataset, vocabulary: int) -> Any:
    """Return the rows with the tokens of a smaller vocabulary."""
    ids = tuple(row % vocabulary for row in train.input_ids)
    targets = tuple(torch.where(row >= 0, row % vocabulary, row) for row in train.targets)
    rows = replace(train, input_ids=ids, targets=targets)
    return replace(DATA, train=rows, validation=rows)


def test_a_head_goes_on_too(tmp_path: Path) -> None:
    first = make_task([{"lr": 1e-2, "r": 4, "batch_size": 4, "seed": 1}], method="classification")
    trained = Bank(make_model("llama"), first.with_labels(ONE_LABEL), data=data_of(ONE_LABEL))
    for _ in range(2):
        trained.step()
    folder = _written(trained, tmp_path / "saved")
    task = task_from(folder, [{"lr": 1e-2, "batch_size": 4, "seed": 1}], method="classification")
    bank = Bank(make_model("llama"), task.with_labels(ONE_LABEL), data=data_of(ONE_LABEL), saved=folder)
    [job], [before] = bank.jobs, trained.jobs
    weights, expected = state_of(bank, job)[0], state_of(trained, before)[0]
    assert "score.weight" in weights.extras
    for name, tensor in expected.extras.items():
        assert torch.equal(weights.extras[name], tensor)
    with pytest.raises(TargetModuleError, match=r"found score\.weight only in the adapter"):
        Bank(make_model("llama"), task_from(folder, SEVERAL[:1]), saved=folder)


def _written(bank: Bank, folder: Path) -> Path:
    from alto.lora import ModuleNames, write_adapter

    [job] = bank.jobs
    write_adapter(folder, bank.trainer.bank.read(job.slot), job.config, "unused", ModuleNames.of(bank.backbone.model))
    return folder


class SoloDpo(SoloPairs):
    """One job of TRL's ``DPOTrainer`` on a model with a saved adapter, from which the trainer itself makes the
    reference."""

    def __init__(self, base: PreTrainedModel, config: JobConfig, saved: Path, folder: Path) -> None:
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        SoloJob.__init__(self, base, PAIRS.train, config, saved=saved)
        rows = Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}])
        settings = DPOConfig(**quiet_settings(folder))
        self._trl = DPOTrainer(self.model, args=settings, train_dataset=rows, processing_class=load_tokenizer())
        self._trl.model.eval()  # its metrics are computed in evaluation mode
        assert "ref" in self.model.peft_config
        self._reference: Any = None


DPO_JOBS: list[dict[str, object]] = [
    {"loss_type": "sigmoid", "beta": 0.5, "lr": 1e-3, "batch_size": 4, "seed": 1},
    {"loss_type": "ipo", "beta": 0.2, "lr": 5e-4, "batch_size": 3, "seed": 2},
]


def test_the_reference_of_dpo_is_the_adapter_as_trl_has_it(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    folder = save_with_peft(make_model("llama"), tmp_path / "saved", **KINDS["plain"])
    bank = Bank(make_model("llama"), task_from(folder, DPO_JOBS, method="dpo"), data=PAIRS, saved=folder)
    solos = [SoloDpo(make_model("llama"), job.config, folder, tmp_path / job.id) for job in bank.jobs]
    first = bank.trainer.evaluate(bank.jobs)
    assert first[0].loss == pytest.approx(0.693147, abs=1e-5), "an adapter does not differ from itself"
    for _ in range(2):
        bank.step()
    assert_step_is_that_of(solos, bank)
    bank.trainer.bank.params_ZP.mul_(1.5)
    for _, metrics, expected in evaluations_beside(solos, bank, PAIRS.validation):
        assert metrics["reward_margin"] == pytest.approx(expected["rewards/margins"], rel=1e-3, abs=1e-5)


def test_the_base_as_reference_is_another_step(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    folder = save_with_peft(make_model("llama"), tmp_path / "saved", **KINDS["plain"])
    bank = Bank(make_model("llama"), task_from(folder, DPO_JOBS[:1], method="dpo"), data=PAIRS, saved=folder)
    solo = SoloDpo(make_model("llama"), bank.jobs[0].config, folder, tmp_path / "trl")
    solo._reference = reference_model(make_model("llama"))
    with pytest.raises(AssertionError):
        assert_same_step(bank.step()["job-000"], solo.train_step())


class SoloLabelled(SoloKto):
    """One job of TRL's ``KTOTrainer`` on a model with a saved adapter."""

    def __init__(self, base: PreTrainedModel, config: JobConfig, saved: Path, folder: Path) -> None:
        from datasets import Dataset
        from trl import KTOConfig, KTOTrainer

        SoloJob.__init__(self, base, LABELLED.train, config, saved=saved)
        rows = Dataset.from_list([{"prompt": "1", "completion": str(n), "label": n > 2} for n in (2, 3)])
        settings = KTOConfig(**quiet_settings(folder))
        self._trl = KTOTrainer(self.model, args=settings, train_dataset=rows, processing_class=load_tokenizer())
        self._trl.model.eval()
        assert "ref" in self.model.peft_config
        self._reference, self._shift = None, 1


KTO_JOBS: list[dict[str, object]] = [
    {"loss_type": "kto", "beta": 0.5, "lr": 1e-3, "batch_size": 5, "seed": 1},
    {"loss_type": "apo_zero_unpaired", "beta": 0.3, "lr": 5e-4, "batch_size": 4, "seed": 2},
    {"loss_type": "kto", "beta": 0.2, "lr": 5e-4, "batch_size": 6, "seed": 3},
]


@pytest.fixture
def saved_for_kto(tmp_path: Path) -> Path:
    return save_with_peft(make_model("llama"), tmp_path / "saved", **KINDS["plain"])


def test_the_divergence_of_kto_is_that_from_the_adapter_as_trl_has_it(saved_for_kto: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    task = task_from(saved_for_kto, KTO_JOBS, method="kto")
    bank = Bank(make_model("llama"), task, [2, 0, 3], data=LABELLED, saved=saved_for_kto)
    solos = [SoloLabelled(make_model("llama"), job.config, saved_for_kto, tmp_path / job.id) for job in bank.jobs]
    before = bank.trainer.bank.params_ZP.clone()
    at_start = bank.trainer.evaluate(bank.jobs)
    assert torch.equal(bank.trainer.bank.params_ZP, before), "the estimate changed an adapter"
    assert at_start[0].metrics["kl"] == pytest.approx(0.0, abs=1e-5)
    for _ in range(2):
        for _ in range(4):
            bank.step()
    bank.trainer.bank.params_ZP.mul_(0.5)  # replies to other prompts are more probable than at the start
    for solo in solos:
        solo._trl._metrics["eval"].clear()
    assert_step_is_that_of(solos, bank)
    for job, metrics, expected in evaluations_beside(solos, bank, LABELLED.validation):
        if job.config.objective.needs_kl:
            assert metrics["kl"] == pytest.approx(expected["kl"], rel=1e-4, abs=1e-5)
            assert metrics["kl"] > 1e-3, "no divergence was compared"


def test_jobs_with_and_without_a_start_have_the_divergences_that_they_have_alone(saved_for_kto: Path) -> None:
    """Two tasks share a bank: one is compared with the base, the other with its initial adapter."""
    settings = saved_settings(saved_for_kto)
    task = task_from(saved_for_kto, KTO_JOBS[:1], method="kto")
    with_start = Bank(make_model("llama"), task, [1], data=LABELLED, saved=saved_for_kto)
    without = Bank(make_model("llama"), make_task([settings | KTO_JOBS[2] | {"lr": 1e-2}], method="kto"), data=LABELLED)
    for bank, factor in ((with_start, 0.5), (without, 2.0)):
        for _ in range(4):
            bank.step()
        bank.trainer.bank.params_ZP.mul_(factor)
    [own], [other] = with_start.jobs, without.jobs
    alone = [with_start.trainer.evaluate([own])[0], without.trainer.evaluate([other])[0]]
    weights, optimizer = state_of(without, other)
    other.slot = 0
    with_start.trainer.admit(other, 0, weights, optimizer)
    together = with_start.trainer.evaluate([other, own])
    for found, expected in zip(together, reversed(alone), strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=LOSS_TOLERANCE)
        assert found.metrics["kl"] == pytest.approx(expected.metrics["kl"], rel=1e-4, abs=1e-6)
    assert min(one.metrics["kl"] for one in alone) > 1e-3


def test_references_are_kept_by_adapter(tmp_path: Path) -> None:
    folders = [save_with_peft(make_model("llama"), tmp_path / f"{seed}", seed=seed, r=4) for seed in (1, 2)]
    data = replace(PAIRS, train=make_pairs(6, seed=4), validation=make_pairs(4, seed=5))

    def found(folder: Path | None) -> TaskContext:
        backbone = Backbone(make_model("llama"), None, "unused")
        start = None if folder is None else InitAdapter.read(folder, backbone, model="unused")
        task = task_from(folders[0], DPO_JOBS[:1], method="dpo")
        return with_references(TaskContext.of(task, backbone, data, start=start), MicroBatches(100, lambda event: None))

    contexts = [found(folder) for folder in (None, *folders, folders[0])]
    assert [context.references.is_cached for context in contexts if context.references] == [False, False, False, True]
    first, second, third, again = (context.data.train.references for context in contexts)
    assert torch.equal(second, again)
    assert float((first - second).abs().min()) > 0
    assert float((second - third).abs().min()) > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"r": 16}, r"found rank 16 on model\.layers\.0\.mlp\.up_proj, but 8 in the adapter"),
        ({"lora_alpha": 8}, r"found a scale of 1 on .*, but 1\.5 in the adapter"),
        ({"use_rslora": True}, r"found a scale of 4\.24264 on "),
        ({"target_modules": ["q_proj", "v_proj"]}, r"up_proj only in the adapter"),
        ({"target_modules": "all-linear"}, r"which the adapter does not have.* and \d+ more; remove r"),
        ({"use_dora": True}, r"lora_magnitude_vector, which the adapter does not have"),
    ],
    ids=str,
)
def test_a_job_of_another_kind_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = save_with_peft(make_model("llama"), tmp_path / "saved", **KINDS["plain"])
    with pytest.raises(TargetModuleError, match=reason):
        Bank(make_model("llama"), task_from(folder, [SEVERAL[0] | changes]), saved=folder)


def test_a_job_that_the_search_may_add_is_refused_beforehand(tmp_path: Path) -> None:
    folder = save_with_peft(make_model("llama"), tmp_path / "saved", **KINDS["plain"])
    backbone = Backbone(make_model("llama"), None, "unused")
    start = InitAdapter.read(folder, backbone, model="unused")
    settings = {key: value for key, value in saved_settings(folder).items() if key != "r"}
    space = {"r": [8, 4, 2], "learning_rate": {"min": 1e-4, "max": 1e-3, "log": True}}
    task = Task(
        model="unused",
        dataset="rows.jsonl",
        search={"algorithm": "tpe", "budget": {"jobs": 6}},
        search_space=space,
        **settings,
    )
    with pytest.raises(TargetModuleError, match=r"a job that the search may add|job-00"):
        TaskContext.of(task, backbone, DATA, start=start)


def test_an_adapter_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    folder = save_with_peft(make_model("qwen3"), tmp_path / "saved", target_modules=["q_proj"])
    model = make_model("llama")
    other = build_mixture("mixtral")
    with pytest.raises(TargetModuleError, match=r"name the model it was trained on in 'model'$"):
        InitAdapter.read(folder, Backbone(other, None, "unused"), model="other")
    assert InitAdapter.read(folder, Backbone(model, None, "unused"), model="same sizes").notes == ()


def test_the_settings_of_a_saved_adapter_make_the_same_adapter(tmp_path: Path) -> None:
    for index, kind in enumerate(KINDS.values()):
        folder = save_with_peft(make_model("llama"), tmp_path / str(index), **kind)
        backbone = Backbone(make_model("llama"), None, "unused")
        start = InitAdapter.read(folder, backbone, model="unused")
        config = JobConfig(**saved_settings(folder))
        start.check_job("job", config, adapter_shape(backbone.model, config))


def test_a_fingerprint_is_of_the_content_alone(tmp_path: Path) -> None:
    backbone = Backbone(make_model("llama"), None, "unused")
    folder = save_with_peft(make_model("llama"), tmp_path / "saved")
    first = InitAdapter.read(folder, backbone, model="unused").fact
    moved = folder.rename(tmp_path / "moved")
    second = InitAdapter.read(moved, backbone, model="unused").fact
    assert (first.fingerprint, str(moved)) == (second.fingerprint, second.path)
    edit_config(moved, lora_alpha=13)
    assert InitAdapter.read(moved, backbone, model="unused").fact.fingerprint != first.fingerprint


RANKED = ("plain", "dora", "patterns")
_LLAMA = partial(make_model, "llama")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter of each kind, as PEFT writes it."""
    folder = tmp_path_factory.mktemp("saved")
    return {kind: save_with_peft(make_model("llama"), folder / kind, **KINDS[kind]) for kind in RANKED}


def test_steps_on_two_ranks_are_those_of_peft_alone(saved: dict[str, Path], tmp_path: Path) -> None:
    first = first_steps_from_a_saved_adapter_are_those_of_peft_alone
    plain = str(saved["plain"])
    checks: list[Any] = [
        *((f"steps of {kind}", first, (str(folder),)) for kind, folder in saved.items()),
        ("pairs", steps_on_pairs_are_those_of_one_process, (str(tmp_path / "pairs"), plain)),
        ("labelled", steps_on_labelled_replies_are_those_of_one_process, (str(tmp_path / "labelled"), plain)),
        ("embeddings", an_adapter_on_embeddings_is_refused, (str(tmp_path / "embeddings"),)),
    ]
    keys = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    save_with_peft(make_model("llama"), tmp_path / "embeddings", **keys)
    failures = failures_on_ranks(2, checks, tmp_path)
    assert not failures, "\n".join(f"{name}: {reason}" for name, reason in failures.items())


def several(folder: Path) -> Task:
    """Return a task whose jobs end one after the other, until there are fewer jobs than ranks."""
    configs = [
        {"lr": 1e-3, "batch_size": 4, "seed": 1, "num_train_epochs": 2},
        {"lr": 5e-4, "batch_size": 5, "seed": 2, "num_train_epochs": 2},
        {"lr": 1e-3, "batch_size": 7, "seed": 3, "num_train_epochs": 6},
    ]
    alone = {"rungs": [[0.3, 1.0]], "detect_divergence": False, "detect_overfitting": False}
    filled = [config | saved_settings(folder) for config in configs]
    return make_task(filled, name="several", init_adapter=str(folder), eval_steps=0.5, early_exit=alone)


def population(folder: Path) -> Task:
    return Task(
        model="unused",
        dataset="unused.jsonl",
        name="pbt",
        init_adapter=str(folder),
        max_slots=4,
        max_tokens_per_pass=300,
        num_train_epochs=2,
        eval_steps=0.25,
        keep="all",
        search={"algorithm": "pbt", "num_initial_jobs": 4, "interval": 0.3, "exchanged": 0.25},
        search_space={"lr": {"min": 1e-5, "max": 2e-3, "log": True}, "batch_size": [4, 7]},
        **saved_settings(folder),
    )


TASKS = {"several": several, "pbt": population}
Runs = dict[tuple[str, int], Path]


@pytest.fixture(scope="module")
def runs(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of each task in one process and on two ranks, where it is stopped once and resumed."""
    found: Runs = {}
    for num_ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"ranks-{num_ranks}")
        checks: list[Any] = []
        for name, make in TASKS.items():
            task = resolve_rungs(make(saved["plain"]), len(DATA.train))
            root = str(RunDir.create(folder, task).root)
            found[name, num_ranks] = Path(root)
            begun = partial(train, model=_LLAMA)
            checks += [(f"{name} begun", begun, (root, 7))] if num_ranks > 1 else []
            checks.append((name, begun, (root,)))
        assert failures_on_ranks(num_ranks, checks, folder) == {}
    return found


@pytest.mark.parametrize("name", TASKS)
def test_every_job_is_what_it_is_in_one_process(name: str, runs: Runs) -> None:
    one, two = (read_history(runs[name, num_ranks]) for num_ranks in (1, 2))
    assert one.jobs.keys() == two.jobs.keys()
    for job, expected in one.jobs.items():
        found = two.jobs[job]
        assert found.train_losses == pytest.approx(expected.train_losses, rel=1e-4, nan_ok=True)
        losses = [[point.validation_loss for point in of_one.evaluations] for of_one in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        starts = [of_one.start for of_one in (found, expected) if of_one.start is not None]
        assert len(starts) == (0 if expected.forked_at else 2)
        assert len({round(start.validation_loss, 4) for start in starts}) <= 1
        adapters = [flat(read_adapter(RunDir(runs[name, num]).job(job, "last"))) for num in (2, 1)]
        assert relative_distance(*adapters) <= 1e-4
    assert one.result is not None
    assert two.result is not None
    assert two.result.best_job == one.result.best_job


def test_the_last_jobs_train_on_all_ranks(runs: Runs) -> None:
    events = read_events(runs["several", 2] / "journal.jsonl")
    admitted = [event for event in events if event["event"] in ("job_admitted", "job_resumed")]
    assert {len(event["ranks"]) for event in admitted} == {1, 2}


def test_copies_of_a_population_are_those_of_one_process(runs: Runs) -> None:
    def added(num_ranks: int) -> list[tuple[Any, ...]]:
        keys = ("job", "origin", "replaces", "forked_at", "config")
        events = read_events(runs["pbt", num_ranks] / "journal.jsonl")
        return [tuple(event.get(key) for key in keys) for event in events if event["event"] == "job_added"]

    assert len(added(1)) >= 2
    assert added(2) == added(1)
    assert audit(read_entries(runs["pbt", 2] / "journal.jsonl")) == ()
