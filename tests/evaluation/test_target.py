"""The path that a user gives: a run, a job of a run, an adapter, or none of these."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import make_task

from alto.errors import RunNotFoundError, SpecError
from alto.evaluation.target import EvaluationTarget, find_target


def find(
    *targets: Path,
    jobs: Sequence[str] = (),
    all_jobs: bool = False,
    base: str | None = None,
    dataset: str | None = None,
) -> EvaluationTarget:
    return find_target(targets, jobs=jobs, all_jobs=all_jobs, base=base, dataset=dataset)


def folders(target: EvaluationTarget) -> dict[str, Path]:
    return {name: adapter.folder for name, adapter in target.adapters.items()}


def write_adapter(folder: Path, base_model: str | None = "its/base") -> None:
    folder.mkdir(parents=True)
    halves = {"A": torch.zeros(1, 4), "B": torch.zeros(4, 1)}
    save_file(
        {f"base_model.model.x.lora_{h}.weight": half for h, half in halves.items()},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": base_model}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    for folder in ("best", "jobs/job-000/best", "jobs/job-001/best", "jobs/job-002/last"):
        write_adapter(root / folder)
    (root / "task.yaml").write_text(make_task(tmp_path).to_yaml())
    return root


def test_a_run_means_its_best_adapter(run: Path) -> None:
    target = find(run)
    assert (folders(target), target.run_dirs, target.base_model.id) == ({"best": run / "best"}, (run,), "its/base")
    assert target.task.name == "tiny"


def test_jobs_mean_their_best(run: Path) -> None:
    assert folders(find(run, jobs=["job-001"])) == {"job-001": run / "jobs" / "job-001" / "best"}
    both = {job: run / "jobs" / job / "best" for job in ("job-000", "job-001")}
    assert folders(find(run, jobs=["job-000", "job-001"])) == both
    assert folders(find(run, all_jobs=True)) == both


@pytest.mark.parametrize("job", ["job-002", "job-999", "../job-001", "."])
def test_a_job_without_a_best_adapter_is_refused(run: Path, job: str) -> None:
    with pytest.raises(RunNotFoundError, match="jobs with a best adapter: job-000, job-001"):
        find(run, jobs=["job-000", job])


def test_a_run_without_a_result_says_what_to_do(run: Path) -> None:
    (run / "best").rename(run / "worst")
    with pytest.raises(RunNotFoundError, match=r"not finished, or no job gave a result; .*--job .*job-000, job-001"):
        find(run)


def test_an_adapter_folder_means_itself(tmp_path: Path) -> None:
    write_adapter(tmp_path / "mine")
    target = find(tmp_path / "mine", dataset="test.jsonl")
    mine = {str(tmp_path / "mine"): tmp_path / "mine"}
    assert (folders(target), target.run_dirs, target.base_model.id) == (mine, (), "its/base")
    assert (target.task.model, target.task.dataset) == ("its/base", "test.jsonl")
    assert find(tmp_path / "mine", base="other", dataset="test.jsonl").base_model.id == "other"


def test_an_adapter_alone_knows_no_rows_and_no_jobs(tmp_path: Path) -> None:
    write_adapter(tmp_path / "mine")
    with pytest.raises(SpecError, match="name them with --dataset"):
        find(tmp_path / "mine")
    with pytest.raises(
        RunNotFoundError, match=r"job: expected one run directory to look for jobs in, found no task\.yaml"
    ):
        find(tmp_path / "mine", jobs=["job-000"])


def test_an_adapter_that_names_no_base_asks_for_it(tmp_path: Path) -> None:
    write_adapter(tmp_path / "mine", base_model=None)
    with pytest.raises(SpecError, match="name it with --base"):
        find(tmp_path / "mine", dataset="test.jsonl")
    assert find(tmp_path / "mine", base="other", dataset="test.jsonl").base_model.id == "other"


@pytest.mark.parametrize(("name", "found"), [(".", "found neither"), ("absent", "found no such folder")])
def test_anything_else_is_refused(tmp_path: Path, name: str, found: str) -> None:
    with pytest.raises(RunNotFoundError, match=found):
        find(tmp_path / name)


def test_several_adapters_are_of_one_base_and_know_their_rows(run: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "mine")
    write_adapter(tmp_path / "other", base_model="another/base")
    target = find(tmp_path / "mine", run, dataset="test.jsonl")
    assert folders(target) == {str(tmp_path / "mine"): tmp_path / "mine", str(run): run / "best"}
    assert (target.run_dirs, target.task.name) == ((run,), "tiny")
    with pytest.raises(SpecError, match="expected adapters of one base model, found its/base, another/base"):
        find(tmp_path / "mine", tmp_path / "other", dataset="test.jsonl")
    assert (
        find(tmp_path / "mine", tmp_path / "other", dataset="test.jsonl", base="its/base").base_model.id == "its/base"
    )
    with pytest.raises(SpecError, match="name them with --dataset"):
        find(tmp_path / "mine", run)
    with pytest.raises(RunNotFoundError, match="expected one run directory to look for jobs in, found 2 folders"):
        find(tmp_path / "mine", run, all_jobs=True, dataset="test.jsonl")
    with pytest.raises(SpecError, match="expected at least one run or adapter"):
        find(dataset="test.jsonl")


def test_some_jobs_and_all_are_a_contradiction(run: Path) -> None:
    with pytest.raises(SpecError, match=r"job: expected either names .*, found both \(job-001 and all\)"):
        find(run, jobs=["job-001"], all_jobs=True)


@pytest.mark.parametrize(("key", "value"), [("load_in_4bit", True), ("dtype", "bfloat16"), ("use_safetensors", False)])
def test_runs_whose_base_is_loaded_otherwise_are_not_mixed(key: str, value: Any, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for folder in ("best", "jobs/job-000/best"):
        write_adapter(other / folder)
    (other / "task.yaml").write_text(make_task(tmp_path, **{key: value}).to_yaml())
    with pytest.raises(SpecError, match=rf"in the same way, found .*run: dtype auto, .*; .*other: .*{key} {value}"):
        find(run, other, dataset="rows.jsonl")


def test_a_folder_that_is_called_base_is_not_the_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "base")
    write_adapter(tmp_path / "other")
    assert list(find(Path("base"), Path("other"), dataset="rows.jsonl").adapters) == ["./base", "other"]
