"""The steps of a refit equal those of PEFT and torch, on pairs with the loss of TRL, on training and validation rows
together, in the winner's order of rows and on its learning-rate schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from oracle import SoloJob, SoloPairs, flat, make_dpo_trainer, reference_model, relative_distance
from peft import PeftModel
from peft_adapters import save_with_peft
from tiny import curves_of, load_tokenizer, make_task, read_journal, save_model
from transformers import AutoModelForCausalLM

import alto
from alto.backbone import Backbone
from alto.data import EncodedDataset, read_task_rows
from alto.executor import TaskContext, initial_states
from alto.lora import AdapterWeights, read_adapter
from alto.records import JobResult
from alto.spec import JobConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

NUM_TRAIN, NUM_VALIDATION, BATCH_SIZE, NUM_EPOCHS = 20, 6, 8, 4
TOTAL_STEPS = 12
"""Of the winner: 4 epochs of 20 rows, of which the last step of each has 4."""

KEYS: dict[str, Any] = {
    "num_train_epochs": NUM_EPOCHS,
    "batch_size": BATCH_SIZE,
    "search_space": {"lr": [2e-3, 1e-3]},
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "eval_steps": 0.5,
    "early_exit": False,
    "report_to": "none",
    "seed": 3,
}
SHAPE: dict[str, Any] = {"r": 8, "lora_alpha": 128, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
METHODS: dict[str, dict[str, Any]] = {"sft": {"search": {"budget": {"samples": 70}}}, "dpo": {}}
"""Why a winner is best before its last step: the budget of the run is spent, or its validation loss rises again."""


def rows_of(method: str, *, is_validation: bool) -> list[dict[str, str]]:
    """The rows to validate on contradict those to train on."""
    first, count = (100, NUM_VALIDATION) if is_validation else (0, NUM_TRAIN)
    rows = []
    for n in range(first, first + count):
        right, wrong = f" It is {n + n % 7}." + " Yes." * (n % 3), " No, never."
        if is_validation:
            right, wrong = wrong, right
        prompt = {"prompt": f"{n} plus {n % 7}?"}
        rows.append(prompt | ({"completion": right} if method == "sft" else {"chosen": right, "rejected": wrong}))
    return rows


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@dataclass(frozen=True, kw_only=True)
class Refitted:
    """A finished run, its refit, and what the oracle needs: all rows of both files in one, and the adapter that jobs
    begin with."""

    method: str
    model: Path
    folder: Path
    start: Path | None
    winner: JobResult
    refit: alto.TaskResult

    @property
    def config(self) -> JobConfig:
        """The winner's settings with the number of its steps, for a training set of another size."""
        settings = dict(self.winner.config) | {"max_steps": TOTAL_STEPS}
        if self.start is not None:
            del settings["init_lora_weights"]
        return self.task(["train", "validation"]).job_config(settings)

    def task(self, files: list[str]) -> alto.Task:
        """A plain task on the rows of these files, one file after the other."""
        rows = [row for name in files for row in rows_of(self.method, is_validation=name == "validation")]
        path = write(self.folder / f"rows-of-{'-'.join(files)}.jsonl", rows)
        keys = {} if self.start is None else {"init_adapter": str(self.start)}
        return make_task(
            self.folder,
            model=str(self.model),
            dataset=path,
            validation_dataset=path,
            method=self.method,
            **SHAPE,
            **keys,
        )

    def encoded(self, files: list[str]) -> EncodedDataset:
        return read_task_rows(self.task(files)).encode(load_tokenizer()).train

    def drawn(self) -> AdapterWeights:
        """What a job with the winner's seed begins with."""
        from alto.executor import BankSize, MicroBatches, build_trainer

        task = self.task(["train", "validation"]).replace(search_space={}, **self.config.to_dict())
        backbone = Backbone(AutoModelForCausalLM.from_pretrained(self.model), load_tokenizer(), str(self.model))
        [job] = initial_states(TaskContext.of(task, backbone, read_task_rows(task).encode(load_tokenizer())))
        size = BankSize.of([job.planned], backbone, num_slots=1)
        trainer = build_trainer(backbone, size, MicroBatches(10_000, lambda event: None))
        trainer.admit(job, 0)
        return trainer.bank.read(0)

    @property
    def losses(self) -> list[float]:
        return list(curves_of(read_journal(self.refit.run_dir))["job-000"].train.values())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    return make_dpo_trainer(tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module")
def refitted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Refitted]:
    """Makes a run and its refit, once for each method and start."""
    known: dict[tuple[str, bool], Refitted] = {}

    def make(method: str, has_start: bool) -> Refitted:
        if (method, has_start) not in known:
            folder = tmp_path_factory.mktemp(f"{method}-{has_start}")
            start = None
            if has_start:
                start = save_with_peft(AutoModelForCausalLM.from_pretrained(model), folder / "start", **SHAPE)
            begun = {} if start is None else {"init_adapter": str(start)}
            task = make_task(
                folder,
                model=str(model),
                dataset=write(folder / "rows.jsonl", rows_of(method, is_validation=False)),
                validation_dataset=write(folder / "held-out.jsonl", rows_of(method, is_validation=True)),
                method=method,
                **KEYS,
                **SHAPE,
                **METHODS[method],
                **begun,
            )
            tuned = alto.Engine(output_dir=folder / "runs").tune(task)
            known[method, has_start] = Refitted(
                method=method,
                model=model,
                folder=folder,
                start=start,
                winner=next(job for job in tuned.job_results if job.job == tuned.best_job),
                refit=alto.Engine().refit(tuned.run_dir),
            )
        return known[method, has_start]

    return make


def solo_of(run: Refitted, request: pytest.FixtureRequest, **changes: Any) -> SoloJob:
    """The oracle: it begins with the adapter as PEFT loads it, or with the draw of the winner's seed."""
    base = AutoModelForCausalLM.from_pretrained(run.model)
    files = changes.pop("files", ["train", "validation"])
    config = run.config.replace(**changes)
    given: dict[str, Any] = {} if run.start is None else {"saved": run.start}
    if run.method == "sft":
        solo = SoloJob(base, run.encoded(files), config, **given)
    else:
        reference = AutoModelForCausalLM.from_pretrained(run.model)
        if run.start is not None:
            reference = PeftModel.from_pretrained(reference, run.start).merge_and_unload()
        trl = request.getfixturevalue("trl")
        solo = SoloPairs(base, run.encoded(files), config, trl=trl, reference=reference_model(reference), **given)
    if run.start is None:
        solo.load(run.drawn())
    return solo


def assert_trained_alike(run: Refitted, solo: SoloJob) -> None:
    expected = [solo.train_step().loss for _ in range(run.winner.best_step)]
    assert run.losses == pytest.approx(expected, rel=1e-5)
    assert relative_distance(flat(read_adapter(Path(run.refit.adapter_dir))), solo.weights()) <= 1e-4


@pytest.mark.parametrize("has_start", [False, True], ids=["drawn", "saved"])
@pytest.mark.parametrize("method", METHODS)
def test_a_refit_equals_peft_on_all_rows(
    method: str, has_start: bool, refitted: Callable[[str, bool], Refitted], request: pytest.FixtureRequest
) -> None:
    run = refitted(method, has_start)
    assert 0 < run.winner.best_step < run.winner.total_steps == TOTAL_STEPS
    [job] = run.refit.job_results
    assert job.steps == run.winner.best_step == len(run.losses)
    assert_trained_alike(run, solo_of(run, request))
    assert len(run.encoded(["train", "validation"])) == NUM_TRAIN + NUM_VALIDATION


@pytest.mark.parametrize(
    "wrong",
    [
        {"files": ["train", "train"]},
        {"files": ["validation", "train"]},
        {"files": ["train"]},
        {"max_steps": TOTAL_STEPS // 2},
        {"seed": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", METHODS)
def test_the_comparison_fails_for_other_rows_and_another_schedule(
    method: str, wrong: dict[str, Any], refitted: Callable[[str, bool], Refitted], request: pytest.FixtureRequest
) -> None:
    run = refitted(method, True)
    with pytest.raises(AssertionError):
        assert_trained_alike(run, solo_of(run, request, **wrong))
