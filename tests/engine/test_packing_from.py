"""A run packed like another run has the same bits; a run that cannot be packed so is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_task, read_journal
from typer.testing import CliRunner

import alto
from alto.cli import app
from alto.errors import RunError, RunNotFoundError
from alto.executor.profiling import planning, using_threads

SPACE = {"lr": [1e-3, 1e-2, 3e-3]}


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache without the measurements of other test files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALTO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def task(model: Path, tmp_path_factory: pytest.TempPathFactory) -> alto.Task:
    folder = tmp_path_factory.mktemp("rows")
    return make_task(folder, model=str(model), search_space=SPACE, r=4, num_train_epochs=1, report_to="none")


@pytest.fixture(scope="module")
def first(task: alto.Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(alto.Engine(output_dir=tmp_path_factory.mktemp("first")).tune(task).run_dir)


@pytest.fixture
def packed_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use limits that a measurement on a busy machine might give."""
    limits = {"max_slots": 2, "max_tokens_per_step": 64, "max_tokens_per_pass": 64, "gradient_checkpointing": False}
    monkeypatch.setattr(planning, "_with_usual_limits", lambda task: task.replace(**limits))


def losses(run: str | Path) -> list[tuple[Any, ...]]:
    """Return every loss of a run, in the order of jobs and steps."""
    events = [event for event in read_journal(Path(run)) if event["event"] in ("train", "eval")]
    return sorted(
        (event["event"], json.dumps({k: v for k, v in event.items() if k not in IGNORED})) for event in events
    )


IGNORED = ("seq", "time", "time_s", "duration_s", "event", "tokens_per_s")


def packing(run: str | Path) -> dict[str, Any]:
    return dict(read_journal(Path(run))[0]["packing"])


def test_the_journal_has_the_packing(first: Path) -> None:
    assert packing(first) == {
        "max_slots": 16,
        "max_tokens_per_step": None,
        "max_tokens_per_pass": 4096,
        "gradient_checkpointing": False,
        "device": "cpu",
        "threads": torch.get_num_threads(),
    }


@pytest.mark.usefixtures("packed_otherwise")
def test_a_run_packed_as_another_is_equal_to_the_last_bit(task: alto.Task, first: Path, tmp_path: Path) -> None:
    engine = alto.Engine(output_dir=tmp_path)
    other = engine.tune(task).run_dir
    assert packing(other) != packing(first)
    assert losses(other) != losses(first), "another packing gives the same bits, so the test proves nothing"
    again = engine.tune(task, packing_from=first).run_dir
    assert losses(again) == losses(first)
    weights = [Path(run) / "best" / "adapter_model.safetensors" for run in (first, again)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    from_again = engine.tune(task, packing_from=again).run_dir
    assert losses(from_again) == losses(first)


def test_the_number_of_threads_is_that_of_the_other_run(task: alto.Task, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with using_threads(3):
            first = alto.Engine(output_dir=tmp_path).tune(task).run_dir
        again = alto.Engine(output_dir=tmp_path).tune(task, packing_from=first).run_dir
        assert packing(first)["threads"] == packing(again)["threads"] == 3
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("packed_otherwise")
def test_the_command_line_takes_it(task: alto.Task, first: Path, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(task.to_yaml(), encoding="utf-8")
    arguments: Sequence[str] = (
        "tune",
        str(file),
        "--packing-from",
        str(first),
        "--output-dir",
        str(tmp_path),
        "--json",
    )
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    assert losses(json.loads(done.stdout)["run_dir"]) == losses(first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "alto-tiny"}, r"packing_from: expected a run with model 'alto-tiny'.* found .* with '.*tiny'"),
        ({"adapter_dtype": "bfloat16"}, r"packing_from: expected a run with adapter_dtype 'bfloat16'"),
        ({"optim_state_dtype": "bfloat16"}, r"packing_from: expected a run with optim_state_dtype 'bfloat16'"),
        ({"num_gpus": 2}, r"packing_from: expected a run with num_gpus 2"),
        ({"max_length": 16}, r"packing_from: expected a run with max_length 16"),
        ({"load_in_8bit": True}, r"packing_from: expected a run with load_in_8bit True"),
        ({"r": 8}, r"packing_from: expected a run with the jobs of this task, found .* with a different job-000"),
        ({"search_space": {"lr": [1e-3, 1e-2]}}, r"with the jobs of this task, found .* with a different job-002"),
    ],
)
def test_a_run_of_another_task_is_refused(
    task: alto.Task, first: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError, match=message):
        alto.Engine(output_dir=tmp_path / "runs").tune(task.replace(**changes), packing_from=first)
    assert not (tmp_path / "runs").exists()


def test_a_run_of_another_dataset_is_refused(task: alto.Task, first: Path, tmp_path: Path) -> None:
    other = make_task(tmp_path, model=task.model, search_space=SPACE, r=4)
    with pytest.raises(RunError, match=r"packing_from: expected a run with dataset '.*train\.jsonl'"):
        alto.Engine(output_dir=tmp_path / "runs").tune(other, packing_from=first)


def edited(first: Path, folder: Path, packing: dict[str, Any] | None, **changes: Any) -> Path:
    """Copy ``first`` with another packing, and other ``changes``, in the first line of its journal."""
    folder.mkdir()
    (folder / "task.yaml").write_bytes((first / "task.yaml").read_bytes())
    begin = dict(read_journal(first)[0])
    del begin["packing"]
    begin |= changes | ({} if packing is None else {"packing": packing})
    (folder / "journal.jsonl").write_text(json.dumps(begin) + "\n", encoding="utf-8")
    return folder


def test_a_run_on_another_device_is_refused(task: alto.Task, first: Path, tmp_path: Path) -> None:
    other = edited(first, tmp_path / "other", packing(first) | {"device": "NVIDIA H200"})
    with pytest.raises(RunError, match=r"packing_from: expected a run with device 'cpu'.* with 'NVIDIA H200'"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task, packing_from=other)


def test_a_run_by_another_number_of_processes_is_refused(task: alto.Task, first: Path, tmp_path: Path) -> None:
    other = edited(first, tmp_path / "other", packing(first), num_ranks=2)
    with pytest.raises(RunError, match=r"packing_from: expected a run with number of processes 1.* with 2"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task, packing_from=other)


@pytest.mark.parametrize(
    "changes", [{"max_slots": "many"}, {"max_slots": None}, {"max_tokens_per_pass": -1}, {"gradient_checkpointing": 3}]
)
def test_a_damaged_packing_is_refused(changes: dict[str, Any], task: alto.Task, first: Path, tmp_path: Path) -> None:
    other = edited(first, tmp_path / "other", packing(first) | changes)
    with pytest.raises(RunError, match=r"packing_from: expected the packing of .*other as ALTO writes it"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task, packing_from=other)
    other = edited(first, tmp_path / "another", {"device": "cpu"})
    with pytest.raises(RunError, match=r"packing_from: expected the packing of .*another as ALTO writes it"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task, packing_from=other)


def test_a_run_without_a_packing_is_refused(task: alto.Task, first: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"packing_from: expected a run whose journal has its packing"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task, packing_from=edited(first, tmp_path / "other", None))


def test_what_is_no_run_is_refused(task: alto.Task, tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError):
        alto.Engine(output_dir=tmp_path / "runs").tune(task, packing_from=tmp_path)
