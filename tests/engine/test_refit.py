"""The winner of a finished run, trained again on all rows, equals PEFT's and TRL's training on these rows."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from journals import entries
from oracle import SoloJob, SoloPairs, flat, make_dpo_trainer, reference_model, relative_distance
from peft import PeftModel
from peft_adapters import save_with_peft
from tiny import curves_of, load_tokenizer, make_task, read_journal, write_rows
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import alto
from alto.backbone import Backbone
from alto.cli import app
from alto.data import EncodedDataset, read_task_rows
from alto.early_exit import audit
from alto.engine.existing_runs import refit_task
from alto.errors import DataError, NoResultError, RunChangedError, SpecError, TaskInterruptedError, UnsupportedError
from alto.executor import TaskContext, initial_states
from alto.lora import AdapterWeights, read_adapter
from alto.records import JobResult
from alto.runs import JobAction, Mailbox, RunDir, read_history
from alto.spec import JobConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

QUIET: dict[str, Any] = {"report_to": "none", "early_exit": False, "eval_steps": 0.2, "seed": 3}
SPACE: dict[str, Any] = {"lr": [1e-4, 3e-2], "batch_size": [8]}


@pytest.fixture(scope="module")
def tuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> alto.TaskResult:
    """A run with test rows whose winner is best before its last step."""
    folder = tmp_path_factory.mktemp("tuned")
    task = make_task(
        folder,
        model=str(model),
        validation_dataset=None,
        validation_split=0.25,
        test_dataset=str(write_rows(folder / "test.jsonl", 5, first=200)),
        num_train_epochs=8,
        search_space=SPACE,
        lr_scheduler_type="cosine",
        r=4,
        keep="all",
        **QUIET,
    )
    return alto.Engine(output_dir=folder / "runs").tune(task)


@pytest.fixture(scope="module")
def refit(tuned: alto.TaskResult, tmp_path_factory: pytest.TempPathFactory) -> alto.TaskResult:
    return alto.Engine().refit(tuned.run_dir, to=tmp_path_factory.mktemp("refit"))


def winner_of(result: alto.TaskResult) -> JobResult:
    return next(job for job in result.job_results if job.job == result.best_job)


def test_it_equals_pefts_training_on_all_rows(tuned: alto.TaskResult, refit: alto.TaskResult, model: Path) -> None:
    winner, [job] = winner_of(tuned), refit.job_results
    assert winner.best_step < winner.total_steps, "the schedule would equal that of a shorter job"
    task = alto.load_task(Path(tuned.run_dir) / "task.yaml")
    data = read_task_rows(task).encode(load_tokenizer()).with_all_rows()
    assert len(data.train) == 24, "18 rows to train and 6 to validate"
    config = alto.load_task(Path(refit.run_dir) / "task.yaml").jobs[0].config
    solo = SoloJob(AutoModelForCausalLM.from_pretrained(model), data.train, config)
    events = read_journal(refit.run_dir)
    solo.load(_initial(refit, model, config))
    losses = [solo.train_step().loss for _ in range(winner.best_step)]
    assert list(curves_of(events)["job-000"].train.values()) == pytest.approx(losses, rel=1e-4)
    found = flat(read_adapter(Path(refit.adapter_dir)))
    # Adam amplifies rounding over the steps; other rows, or another schedule, would differ far more.
    assert relative_distance(found, solo.weights()) <= 5e-4
    assert (job.steps, job.total_steps, config.max_steps) == (winner.best_step, winner.best_step, winner.total_steps)


def _initial(refit: alto.TaskResult, model: Path, config: Any) -> Any:
    """Return ALTO's initial weights, which the job's seed determines."""
    from alto.backbone import Backbone
    from alto.executor import BankSize, MicroBatches, TaskContext, build_trainer, initial_states

    task = alto.load_task(Path(refit.run_dir) / "task.yaml")
    backbone = Backbone(AutoModelForCausalLM.from_pretrained(model), load_tokenizer(), str(model))
    data = read_task_rows(task).encode(load_tokenizer()).with_all_rows()
    [state] = initial_states(TaskContext.of(task, backbone, data))
    size = BankSize.of([state.planned], backbone, num_slots=1)
    trainer = build_trainer(backbone, size, MicroBatches(10_000, lambda event: None))
    trainer.admit(state, 0)
    return trainer.bank.read(0)


def test_the_settings_are_the_winners(tuned: alto.TaskResult, refit: alto.TaskResult) -> None:
    winner, [job] = winner_of(tuned), refit.job_results
    assert {**job.config, "max_steps": None} == {**winner.config, "max_steps": None}
    task = alto.load_task(Path(refit.run_dir) / "task.yaml")
    assert task.refit is not None
    assert task.refit.to_dict() == {"run": tuned.run_dir, "job": tuned.best_job, "steps": winner.best_step}
    assert task.name == "tiny-refit"


def test_nothing_is_validated_and_nothing_is_called_the_best(tuned: alto.TaskResult, refit: alto.TaskResult) -> None:
    events = read_journal(refit.run_dir)
    names = {event["event"] for event in events}
    assert names.isdisjoint({"eval", "base_evaluated", "warmup_ended"})
    started, completed, ended = events[0], events[-1], next(e for e in events if e["event"] == "job_completed")
    assert (started["num_train"], started["num_validation"]) == (24, 0)
    assert started["refit"]["job"] == tuned.best_job
    assert started["notes"][0].endswith("There is no validation.")
    assert completed["best_validation_loss"] == "nan"
    assert ended["best_step"] == ended["step"] == winner_of(tuned).best_step
    assert ended["test_loss"] == pytest.approx(refit.test_loss)
    assert refit.refit_of == tuned.run_dir
    assert refit.best_validation_loss == math.inf
    assert refit.notes == ()
    metrics = json.loads((Path(refit.adapter_dir) / "metrics.json").read_text())
    assert "validation_loss" not in metrics
    assert metrics["refit_of"] == tuned.run_dir
    assert metrics["test_loss"] == pytest.approx(refit.test_loss)
    card = (Path(refit.adapter_dir) / "README.md").read_text()
    assert "the refit of" in card
    assert "without validation" in card
    assert "best of" not in card
    page = (Path(refit.run_dir) / "report.html").read_text()
    assert "(job-001), no validation." in page
    assert ">infinite<" not in page
    assert audit(entries(events)) == ()


def test_what_is_shown(refit: alto.TaskResult) -> None:
    from rich.console import Console

    console = Console(record=True, width=140)
    console.print(refit)
    text = console.export_text()
    assert "(job-001), no validation; test loss" in " ".join(text.split())
    assert "rows to train, no validation" in refit._repr_html_()
    assert "best:" not in text
    assert "infinite" not in text + refit._repr_html_()
    shown = CliRunner().invoke(app, ["show", refit.run_dir, "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["best_validation_loss"] is None
    listed = CliRunner().invoke(app, ["list", "--output-dir", str(Path(refit.run_dir).parent), "--json"])
    assert json.loads(listed.stdout)["runs"][0]["best_validation_loss"] is None
    assert refit.curves.empty
    assert len(refit.training_losses) == refit.job_results[0].steps


def test_an_interrupted_refit_has_the_same_result(
    tuned: alto.TaskResult, refit: alto.TaskResult, tmp_path: Path
) -> None:
    task = refit_task(RunDir(Path(tuned.run_dir)), trust_remote_code=False)
    calls = iter(range(4))
    engine = alto.Engine(output_dir=tmp_path, is_interrupted=lambda: next(calls, None) is None)
    with pytest.raises(TaskInterruptedError):
        engine.tune(task.replace(checkpoint_interval_s=0))
    [run] = tmp_path.iterdir()
    alto.Engine().resume(run)
    ours, theirs = (read_adapter(Path(folder)) for folder in (run / "best", refit.adapter_dir))
    assert all(ours[name][1].equal(theirs[name][1]) for name in theirs)


def test_it_is_not_resumed_for_other_steps(tuned: alto.TaskResult, tmp_path: Path) -> None:
    task = refit_task(RunDir(Path(tuned.run_dir)), trust_remote_code=False)
    calls = iter(range(4))
    with pytest.raises(TaskInterruptedError):
        alto.Engine(output_dir=tmp_path, is_interrupted=lambda: next(calls, None) is None).tune(task)
    [run] = tmp_path.iterdir()
    assert task.refit is not None
    file = run / "task.yaml"
    file.write_text(file.read_text().replace(f"steps: {task.refit.steps}", f"steps: {task.refit.steps + 1}"))
    with pytest.raises(RunChangedError, match="different settings of refit"):
        alto.Engine().resume(run)


def test_the_rows_of_each_source_of_a_mixture_stay_together(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / f"{name}.jsonl", 12, first=first) for name, first in (("one", 0), ("two", 50))]
    task = make_task(
        tmp_path,
        dataset=[{"path": str(path), "name": path.stem} for path in paths],
        validation_dataset=None,
        validation_split=0.25,
    )
    data = read_task_rows(task).encode(load_tokenizer())
    merged = data.with_all_rows()
    assert merged.train.sources == (("one", 12), ("two", 12))
    assert not merged.has_validation
    first_half = [tuple(ids.tolist()) for ids in merged.train.input_ids][:12]
    alone = make_task(tmp_path, dataset=str(paths[0]), validation_dataset=None, validation_split=0.25)
    expected = read_task_rows(alone).encode(load_tokenizer()).with_all_rows()
    assert sorted(first_half) == sorted(tuple(ids.tolist()) for ids in expected.train.input_ids)


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_rows_of_a_dataset_of_its_own_are_trained_too(cache: str, model: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path, model=str(model), num_train_epochs=2, token_cache=cache, lr=1e-2, **QUIET)
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    again = alto.Engine().refit(result.run_dir)
    assert Path(again.run_dir).parent == Path(result.run_dir).parent
    assert read_journal(again.run_dir)[0]["num_train"] == 24 + 6
    with pytest.raises(DataError, match="found a refit, which was also trained on the validation rows"):
        alto.Engine().evaluate(again.run_dir)


def test_repeated_configurations_are_refitted_with_the_best_seed(model: Path, tmp_path: Path) -> None:
    keys = {**QUIET, "seed": None}
    del keys["seed"]
    task = make_task(
        tmp_path, model=str(model), num_train_epochs=2, search_space={"lr": [1e-2], "seed": [1, 2, 3]}, **keys
    )
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    best = refit_task(RunDir(Path(result.run_dir)), trust_remote_code=False)
    assert best.jobs[0].config.seed == winner_of(result).config["seed"]


def test_preference_pairs(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} plus 1?", "chosen": f" It is {n + 1}.", "rejected": " No."} for n in range(12)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = make_task(
        tmp_path,
        model=str(model),
        dataset=str(pairs),
        validation_dataset=None,
        method="dpo",
        beta=0.3,
        num_train_epochs=2,
        metric="reward_accuracy",
        **QUIET,
    )
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    again = alto.Engine().refit(result.run_dir)
    assert read_journal(again.run_dir)[0]["num_train"] == 12
    assert again.job_results[0].config["beta"] == 0.3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_steps": None}, "max_steps: None"),
        ({"max_steps": 3}, "max_steps: 3"),
        ({"early_exit": True}, "early_exit: true"),
        ({"search_space": {"lr": [1e-3, 1e-2]}}, "found 2 configurations"),
    ],
    ids=str,
)
def test_a_refit_compares_nothing(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    keys = {"max_steps": 9, "early_exit": False, "refit": {"run": "r", "job": "job-000", "steps": 5}}
    with pytest.raises(SpecError, match=reason):
        make_task(tmp_path, **(keys | changes))


def test_a_mixture_with_validation_rows_of_another_dataset_is_refused(tmp_path: Path) -> None:
    keys = {"max_steps": 9, "early_exit": False, "refit": {"run": "r", "job": "job-000", "steps": 5}}
    sources = [{"path": str(write_rows(tmp_path / f"{name}.jsonl", 4)), "name": name} for name in ("one", "two")]
    with pytest.raises(UnsupportedError, match="its rows belong to no source"):
        make_task(tmp_path, dataset=sources, **keys)


def test_an_unfinished_run_and_a_refit_are_refused(
    tuned: alto.TaskResult, refit: alto.TaskResult, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="found a run that is itself a refit of"):
        alto.Engine().refit(refit.run_dir)
    calls = iter(range(3))
    task = alto.load_task(Path(tuned.run_dir) / "task.yaml")
    with pytest.raises(TaskInterruptedError):
        alto.Engine(output_dir=tmp_path, is_interrupted=lambda: next(calls, None) is None).tune(task)
    [run] = tmp_path.iterdir()
    with pytest.raises(NoResultError, match="continue with: alto resume"):
        alto.Engine().refit(run)


def test_a_winner_that_began_with_weights_of_another_is_refused(model: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path, model=str(model), num_train_epochs=2, lr=1e-3, keep="all", **QUIET)
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    Mailbox(RunDir(Path(result.run_dir))).send(JobAction.CLONE, "job-000", changes={"learning_rate": 1e-2}, warm=True)
    again = alto.Engine().resume(result.run_dir)
    assert again.best_job == "job-001"
    with pytest.raises(UnsupportedError, match="which began with the best weights of job-000"):
        alto.Engine().refit(result.run_dir)


def test_a_winner_of_a_population_that_changed_its_settings_is_refused(tuned: alto.TaskResult) -> None:
    from alto.engine import existing_runs as module

    history = read_history(tuned.run_dir)
    winner = history.jobs[tuned.best_job]
    winner.forked_at, winner.origin = 4, "job-000"
    with pytest.raises(UnsupportedError, match="which continued job-000 from step 4 with different settings"):
        module._check_refit(winner, refit_of="")


def test_a_clone_of_a_refit_is_refused(refit: alto.TaskResult, tmp_path: Path) -> None:
    run_dir = RunDir.open(shutil.copytree(refit.run_dir, tmp_path / "run"))
    mailbox = Mailbox(run_dir)
    command = mailbox.send(JobAction.CLONE, "job-000", changes={"learning_rate": 1e-2})
    alto.Engine().resume(run_dir.root)
    answer = mailbox.wait_for_answer(command, 0)
    assert answer is not None
    assert "found a refit, which has no validation" in answer.message


def test_the_command(tuned: alto.TaskResult, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["refit", tuned.run_dir, "--output-dir", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert Path(result["run_dir"]).parent == tmp_path / "out"
    assert result["refit_of"] == tuned.run_dir
    assert result["best_validation_loss"] is None


NUM_TRAIN, NUM_VALIDATION, BATCH_SIZE, NUM_EPOCHS = 20, 6, 8, 4
TOTAL_STEPS = 12
"""Steps of the winner: 4 epochs of 20 rows; the last step of each epoch has 4 rows."""

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
"""The cause for a best step before the last: the run's budget is spent, or the validation loss rises again."""


def rows_of(method: str, *, is_validation: bool) -> list[dict[str, str]]:
    """Return rows; the validation rows contradict the training rows."""
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
    """A finished run, its refit, and the oracle's inputs: all rows of both files in one, and the initial adapter."""

    method: str
    model: Path
    folder: Path
    start: Path | None
    winner: JobResult
    refit: alto.TaskResult

    @property
    def config(self) -> JobConfig:
        """Return the winner's settings and number of steps, for a training set of another size."""
        settings = dict(self.winner.config) | {"max_steps": TOTAL_STEPS}
        if self.start is not None:
            del settings["init_lora_weights"]
        return self.task(["train", "validation"]).job_config(settings)

    def task(self, files: list[str]) -> alto.Task:
        """Return a plain task on the rows of these files, one after the other."""
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
        """Return the initial adapter of a job with the winner's seed."""
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
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    return make_dpo_trainer(tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module")
def refitted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Refitted]:
    """A function that makes a run and its refit, once for each method and start."""
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
    """Return the oracle, which begins with the adapter as PEFT loads it, or as the winner's seed determines it."""
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
