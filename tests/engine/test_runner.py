"""One task on this process's device: what it trains, keeps and repeats, and its errors where it cannot begin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import load_tokenizer, make_task, random_llama, read_journal, save_model
from typer.testing import CliRunner

import alto
from alto.cli import app
from alto.data import read_task_rows
from alto.engine import Engine
from alto.engine.runner import TaskRunner, portable
from alto.engine.start import with_usual_rate
from alto.errors import (
    DeviceMemoryError,
    JobCommandError,
    RunBusyError,
    RunChangedError,
    RunNotFoundError,
    SpecError,
    TargetModuleError,
    TaskInterruptedError,
)
from alto.executor import stages
from alto.executor.recovery import check_data, data_fingerprint, data_fingerprints
from alto.lora import read_adapter
from alto.runs import JobAction, JournalEntry, Mailbox, RunDir, read_events, read_history
from alto.runs.events import JobEvaluated, TaskStarted, decode
from alto.spec import Task, read_run_task


def test_a_base_that_does_not_fit_says_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.00 GiB.")

    monkeypatch.setattr(stages, "load_backbone", out_of_memory)
    with pytest.raises(DeviceMemoryError, match=r"'alto-tiny' \(the whole model\)\. Set num_gpus above 1 "):
        TaskRunner().begin(make_task(tmp_path), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_whose_lock_file_is_removed_ends_before_it_writes_on(tmp_path: Path) -> None:
    def remove_lock(entry: JournalEntry) -> None:
        if isinstance(entry.event, JobEvaluated):
            next(tmp_path.glob("runs/*/run.lock")).unlink(missing_ok=True)

    with pytest.raises(RunBusyError, match="found it removed or replaced"):
        TaskRunner(observers=[remove_lock]).begin(make_task(tmp_path), tmp_path / "runs")
    (run,) = (tmp_path / "runs").iterdir()
    events = read_events(run / "journal.jsonl")
    assert events[-1]["event"] == "eval"
    assert not (run / "report.html").exists()
    assert TaskRunner().resume(RunDir.open(run), trust_remote_code=False).best_job


def test_no_turn_begins_after_the_lock_was_lost(tmp_path: Path) -> None:
    """Other ranks write states within a turn, and only the first one knows about the lock."""
    num_calls: list[int] = [0]

    def remove_lock() -> bool:
        num_calls[0] += 1
        if num_calls[0] == 5:
            next(tmp_path.glob("runs/*/run.lock")).unlink()
        return False

    task = make_task(tmp_path, eval_steps=1.0, search_space={"lr": [1e-3]})
    with pytest.raises(RunBusyError, match="found it removed or replaced"):
        TaskRunner(is_interrupted=remove_lock).begin(task, tmp_path / "runs")
    assert num_calls == [5]


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>({{ m.content }})<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_the_template_is_kept_with_the_adapter_and_in_the_run(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    task = make_task(tmp_path, chat_template=str(file), max_steps=2, max_slots=1, report_to="none")
    engine = Engine(output_dir=tmp_path / "runs")
    result = engine.tune(task)
    file.write_text("{{ 'changed since' }}", encoding="utf-8")
    adapter = Path(result.adapter_dir)
    assert (adapter / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATE
    assert "chat_template.jinja" in (adapter / "README.md").read_text(encoding="utf-8")
    of_run = engine.evaluate(result.run_dir, metric="loss")
    of_folder = engine.evaluate(adapter, dataset=task.validation_dataset, metric="loss")
    losses = [found.adapters[0].evaluation.loss for found in (of_run, of_folder)]
    assert losses[1] == pytest.approx(result.best_validation_loss, rel=1e-4)
    assert losses[0] == pytest.approx(result.best_validation_loss, rel=1e-4)

    started = decode(json.loads((Path(result.run_dir) / "journal.jsonl").read_text(encoding="utf-8").split("\n")[0]))
    assert isinstance(started.event, TaskStarted)
    own = read_task_rows(task).encode(load_tokenizer())
    with pytest.raises(RunChangedError, match="expected the data that the run began with"):
        check_data(started.event, own, None)


def test_an_adapter_without_a_template_was_trained_with_that_of_its_base(tmp_path: Path) -> None:
    """Adapters of version 0.2 had no tokenizer beside them."""
    task = make_task(tmp_path, max_steps=2, max_slots=1, report_to="none")
    engine = Engine(output_dir=tmp_path / "runs")
    new, rows = Path(engine.tune(task).adapter_dir), task.validation_dataset
    old = shutil.copytree(new, tmp_path / "old")
    (old / "chat_template.jinja").unlink()
    found = engine.evaluate([new, old], dataset=rows, metric="loss").adapters
    assert found[0].evaluation.loss == found[1].evaluation.loss
    (new / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with pytest.raises(SpecError, match=r"found different ones \(chat_template.jinja in .*, none in 1 others\)"):
        engine.evaluate([new, old], dataset=rows, metric="loss")


def test_the_template_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    data = read_task_rows(make_task(tmp_path)).encode(load_tokenizer())
    assert len({data_fingerprint(data), data_fingerprint(data, TEMPLATE), data_fingerprint(data, TEMPLATE + " ")}) == 3


def test_runs_are_compared_by_their_training_and_validation_rows(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    with_test = task.replace(test_dataset=task.validation_dataset)
    other_rows = task.replace(dataset=task.validation_dataset)
    found, tested, templated, other = (
        data_fingerprints(read_task_rows(each).encode(load_tokenizer()), template)
        for each, template in ((task, None), (with_test, None), (task, TEMPLATE), (other_rows, None))
    )
    assert found["fingerprint"] == found["train_validation_fingerprint"]
    for each in (tested, templated):
        assert each["fingerprint"] != found["fingerprint"]
        assert each["train_validation_fingerprint"] == found["train_validation_fingerprint"]
        assert each["validation_fingerprint"] == found["validation_fingerprint"]
    assert other["train_validation_fingerprint"] != found["train_validation_fingerprint"]
    assert other["validation_fingerprint"] == found["validation_fingerprint"]


Q_AND_V = ("q_proj", "v_proj")
NOTE = "target_modules: peft-default is q_proj, v_proj, PEFT's choice for models of the type llama."


def modules_of(task: Task) -> list[Any]:
    return [job.config.target_modules for job in task.jobs]


def test_a_run_trains_them_and_says_which_they_are(tmp_path: Path) -> None:
    task = make_task(tmp_path, target_modules="peft-default", max_steps=1, num_train_epochs=1, report_to="none")
    assert NOTE in alto.Engine(progress=False).preview(task).notes
    result = alto.Engine(output_dir=tmp_path / "runs", progress=False).tune(task)
    started = read_journal(result.run_dir)[0]
    assert NOTE in started["notes"]
    assert tuple(started["jobs"][0]["config"]["target_modules"]) == Q_AND_V
    saved = json.loads((Path(result.run_dir) / "best" / "adapter_config.json").read_text(encoding="utf-8"))
    assert sorted(saved["target_modules"]) == list(Q_AND_V)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ({"target_modules": ["all-linear", "peft-default"]}, ["all-linear", Q_AND_V]),
        ({"target_modules": [["peft-default"], ["k_proj"]]}, [Q_AND_V, ("k_proj",)]),
        ({"paired": {"r": [2, 4], "target_modules": ["peft-default", "o_proj"]}}, [Q_AND_V, ("o_proj",)]),
    ],
)
def test_they_may_be_searched(tmp_path: Path, space: dict[str, Any], expected: list[Any]) -> None:
    found = portable(make_task(tmp_path, search_space=space))
    assert modules_of(found) == expected
    assert found.notes == (NOTE,)
    assert portable(found) == found, "a written task is resolved"


def test_they_keep_to_layers(tmp_path: Path) -> None:
    found = portable(make_task(tmp_path, target_modules=["peft-default"], layers_to_transform=[0]))
    assert modules_of(found) == [Q_AND_V]


def test_a_type_without_a_default_is_refused_before_training(tmp_path: Path, tiny_model: Any) -> None:
    tokenizer = load_tokenizer()
    tiny_model("phi3", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    task = make_task(tmp_path, model=str(tmp_path / "base"), target_modules="peft-default")
    engine = alto.Engine(output_dir=tmp_path / "runs", progress=False)
    for use in (engine.tune, engine.preview):
        with pytest.raises(TargetModuleError, match="found 'phi3', which has none; name the modules"):
            use(task)
    assert not (tmp_path / "runs").exists()


def test_an_adapter_whose_description_names_no_modules_has_the_default_ones(tmp_path: Path) -> None:
    model = save_model(tmp_path / "base")
    keys: dict[str, Any] = {"model": str(model), "max_steps": 1, "num_train_epochs": 1, "report_to": "none"}
    engine = alto.Engine(output_dir=tmp_path / "runs", progress=False)
    first = engine.tune(make_task(tmp_path, target_modules=list(Q_AND_V), r=4, **keys))
    path = Path(first.run_dir) / "best" / "adapter_config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(saved | {"target_modules": None}), encoding="utf-8")
    task = make_task(tmp_path, init_adapter=str(path.parent), **keys)
    assert modules_of(portable(task)) == [Q_AND_V]
    engine.tune(task)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = save_model(tmp_path_factory.mktemp("keep") / "base")
    return folder


def tuned(base: Path, folder: Path, **settings: Any) -> RunDir:
    """Finish a run of four jobs: one diverges, two rungs drop one each, one does all its steps."""
    folder.mkdir(exist_ok=True)
    keys = {
        "model": str(base),
        "search_space": {"lr": [1e-4, 1e-3, 1e-2, 1e30], "batch_size": [8]},
        "early_exit": alto.EarlyExit(rungs=((0.2, 0.5), (0.6, 0.5))),
        "report_to": "none",
        "num_train_epochs": 3,
        "eval_steps": 0.2,
    }
    task = make_task(folder, **(keys | settings))
    return RunDir.open(alto.Engine(output_dir=folder / "runs").tune(task).run_dir)


def states(run: RunDir) -> dict[str, list[str]]:
    return {path.name: sorted(part.name for part in path.iterdir()) for path in sorted((run.root / "jobs").iterdir())}


def ends(run: RunDir) -> dict[str, str]:
    return {job.job: str(job.outcome) for job in read_history(run.root).jobs.values()}


def test_by_default_finalists_keep_their_best_adapters(base: Path, tmp_path: Path) -> None:
    run = tuned(base, tmp_path)
    assert ends(run) == {
        "job-000": "underperforming", "job-001": "underperforming", "job-002": "completed", "job-003": "diverging",
    }  # fmt: skip
    assert states(run) == {job: ["best"] for job in ("job-001", "job-002")}
    best = read_history(run.root).best
    assert best is not None
    kept, exported = read_adapter(run.job(best.job, "best")), read_adapter(run.best)
    assert all(kept[name][0].equal(a) and kept[name][1].equal(b) for name, (a, b) in exported.items())


def test_the_winner_alone_or_everything_can_be_kept(base: Path, tmp_path: Path) -> None:
    least, most = tuned(base, tmp_path / "a", keep="winner"), tuned(base, tmp_path / "b", keep="all")
    winner = read_journal(least.root)[-1]["best_job"]
    assert states(least) == {winner: ["best"]}
    whole = ["best", "last"]
    assert states(most) == {"job-000": whole, "job-001": whole, "job-002": whole, "job-003": ["last"]}


def test_a_removal_that_was_killed_is_completed_by_the_next_process(base: Path, tmp_path: Path) -> None:
    run = tuned(base, tmp_path)
    before, journal = states(run), run.journal_file.read_bytes()
    shutil.copytree(run.job("job-001", "best"), run.job("job-003", "best"))
    alto.Engine().resume(run.root)
    assert states(run) == before
    assert run.journal_file.read_bytes() == journal


def test_a_finished_run_from_before_there_was_such_a_key_keeps_what_it_has(base: Path, tmp_path: Path) -> None:
    run = tuned(base, tmp_path, keep="all")
    before = states(run)
    run.task_file.write_text(run.task_file.read_text().replace("keep: all\n", ""))
    alto.Engine().resume(run.root)
    assert states(run) == before


@pytest.mark.parametrize("action", [JobAction.RESUME, JobAction.CLONE])
def test_a_finished_run_that_has_not_kept_all_takes_no_further_jobs(
    action: JobAction, base: Path, tmp_path: Path
) -> None:
    run = tuned(base, tmp_path)
    with pytest.raises(JobCommandError, match="Jobs can be added only to a run with keep: all"):
        Mailbox(run).send(action, "job-000", warm=action is JobAction.CLONE)
    result = CliRunner().invoke(app, ["job", action.value, str(run.root), "job-000"])
    assert isinstance(result.exception, JobCommandError)
    assert "keep: all" in str(result.exception)
    assert not run.control.exists()
    before = run.journal_file.read_bytes()
    alto.Engine().resume(run.root)
    assert run.journal_file.read_bytes() == before


def test_all_jobs_are_evaluated_only_where_all_were_kept(base: Path, tmp_path: Path) -> None:
    run = tuned(base, tmp_path, keep="winner")
    engine = alto.Engine()
    needs = r"expected the best adapters of job-000.* were removed .*; a new run keeps them with keep: all"
    with pytest.raises(RunNotFoundError, match=needs):
        engine.evaluate(run.root, all_jobs=True)
    with pytest.raises(RunNotFoundError, match=needs):
        engine.evaluate(run.root, jobs=["job-000"])
    winner = read_journal(run.root)[-1]["best_job"]
    assert [found.name for found in engine.evaluate(run.root, jobs=[winner]).adapters] == [winner]


def test_the_journal_says_which_states_a_checkpoint_has(base: Path, tmp_path: Path) -> None:
    run = tuned(base, tmp_path)
    last = [json.loads(line) for line in run.journal_file.read_text().splitlines() if '"checkpoint"' in line][-1]
    assert {job: saved["is_resumable"] for job, saved in last["jobs"].items()} == dict.fromkeys(ends(run), False)


SPACE = {"lr": {"min": 1e-6, "max": 0.5, "log": True}, "r": [2, 4]}
TPE = {"algorithm": "tpe", "num_initial_jobs": 4, "budget": {"jobs": 6}}
USUAL = 0.0126
"""The usual learning rate for a hidden size of 32."""


def make(folder: Path, **changes: Any) -> Task:
    keys = {"search_space": SPACE, "search": TPE, "num_train_epochs": 3, "report_to": "none"}
    return make_task(folder, **(keys | changes))


def configs(run_dir: str | Path) -> list[Any]:
    return [job["config"] for job in read_journal(run_dir)[0]["jobs"]]


def test_a_resumed_run_has_the_jobs_that_were_drawn_near_it(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the search extra: pip install -e '.[search]'")
    task = make(tmp_path, model=str(save_model(tmp_path / "model")), checkpoint_interval_s=0)
    calls = iter(range(3))
    with pytest.raises(TaskInterruptedError):
        alto.Engine(output_dir=tmp_path / "runs", is_interrupted=lambda: next(calls, None) is None).tune(task)
    [run] = (tmp_path / "runs").iterdir()
    written = read_run_task(run / "task.yaml")
    assert written.search.usual_learning_rate == pytest.approx(USUAL, rel=0.01)
    assert [job.config.to_dict() for job in written.jobs] == configs(run)
    assert written.jobs[0].config != task.jobs[0].config
    assert written.jobs[3].config == task.jobs[3].config, "drawn from the whole range"
    before = (run / "task.yaml").read_text(encoding="utf-8")
    alto.Engine().resume(run)
    assert (run / "task.yaml").read_text(encoding="utf-8") == before
    assert len(read_journal(run)[0]["jobs"]) == 4


def test_only_a_search_that_begins_and_names_none_takes_it(tmp_path: Path) -> None:
    config = random_llama(len(load_tokenizer())).config
    for task, begins in (
        (make(tmp_path), False),
        (make(tmp_path, search={**TPE, "usual_learning_rate": 1e-3}), True),
        (make(tmp_path, search={"algorithm": "random"}), True),
        (make(tmp_path, search={"algorithm": "pbt"}), True),
    ):
        assert with_usual_rate(task, config, begins=begins) is task
    found = with_usual_rate(make(tmp_path, search_space="auto"), config, begins=True)
    assert found.search.usual_learning_rate == pytest.approx(USUAL, rel=0.01)
    assert found.search_space.to_dict()["learning_rate"]["max"] == pytest.approx(5 * USUAL, rel=0.01)
