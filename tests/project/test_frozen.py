"""Runs of every kind give what they gave when they were recorded: journals, files, adapters, reports, answers.

A change of the code that users must not notice changes none of this. After an intended change the recordings are
written again: see ``tests/support/frozen.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="the extra dev is not installed")

import httpx2
from frozen import check_frozen, frozen_json, frozen_run
from services import ROWS, local_plane, served, wait_for
from shared_runs import shared_tasks, write_pairs
from tiny import make_task, save_model

from alto import Engine, Task
from alto.errors import TaskInterruptedError
from alto.records import Gpu, Placement, Schedule
from alto.service.store.jobs import ENDED

pytestmark = [pytest.mark.slow("campaigns"), pytest.mark.usefixtures("empty_cache")]

PACKING = {
    "max_slots": 2,
    "max_tokens_per_step": 4096,
    "max_tokens_per_pass": 4096,
    "gradient_checkpointing": False,
    "report_to": "none",
    "checkpoint_interval_s": 86400,  # no checkpoint because the machine is slow
}
"""Fixed limits, so that nothing is measured."""

SPACE = {"lr": [1e-4, 3e-3], "batch_size": [4, 8]}

LABELLED = {
    "kto": lambda n: {"prompt": f"{n} plus {n % 7}?", "completion": f" It is {n + n % 7}.", "label": n % 3 > 0},
    "classification": lambda n: {"text": f"Number {n} is a good one." if n % 2 else f"{n}: bad.", "label": n % 2},
    "regression": lambda n: {"text": f"Number {n}.", "label": n / 24},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny-llama")


def task_of(method: str, model: Path, folder: Path, **changes: Any) -> Task:
    """Return a task of four configurations of a method."""
    data: dict[str, Any] = {}
    if method in ("dpo", "orpo", "cpo"):
        data = {key: str(write_pairs(folder / f"{key}.jsonl")) for key in ("dataset", "validation_dataset")}
    elif method in LABELLED:
        rows = [LABELLED[method](n) for n in range(24)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        data = {"dataset": str(folder / "rows.jsonl"), "validation_dataset": None, "validation_split": 0.25}
    return make_task(
        folder, **{"model": str(model), "method": method, "search_space": SPACE, **PACKING, **data, **changes}
    )


@pytest.mark.parametrize("method", ["sft", "dpo", "orpo", "cpo", "kto", "classification", "regression"])
def test_a_run_of_every_method(method: str, model: Path, tmp_path: Path) -> None:
    result = Engine(output_dir=tmp_path / "runs").tune(task_of(method, model, tmp_path))
    check_frozen(method, frozen_run(Path(result.run_dir)))


def test_a_search(model: Path, tmp_path: Path) -> None:
    space = {"lr": {"min": 1e-4, "max": 1e-2, "log": True}, "r": [4, 8]}
    task = task_of("sft", model, tmp_path, search_space=space, search={"algorithm": "tpe", "budget": {"jobs": 6}})
    result = Engine(output_dir=tmp_path / "runs").tune(task)
    check_frozen("search", frozen_run(Path(result.run_dir)))


def test_a_run_that_was_stopped_and_resumed(model: Path, tmp_path: Path) -> None:
    calls = iter(range(10**6))
    engine = Engine(output_dir=tmp_path / "runs", is_interrupted=lambda: next(calls) > 12)
    with pytest.raises(TaskInterruptedError):
        engine.tune(task_of("sft", model, tmp_path))
    (root,) = (tmp_path / "runs").iterdir()
    Engine(output_dir=tmp_path / "runs").resume(root)
    check_frozen("resumed", frozen_run(root))


def test_a_run_on_two_ranks(model: Path, tmp_path: Path) -> None:
    result = Engine(output_dir=tmp_path / "runs").tune(task_of("sft", model, tmp_path, num_gpus=2))
    check_frozen("two-ranks", frozen_run(Path(result.run_dir)))


def test_a_queue_whose_tasks_share_an_executor(model: Path, tmp_path: Path) -> None:
    tasks = list(shared_tasks(model, tmp_path, **PACKING).values())
    placements = [
        Placement(task=task.name, gpus=(Gpu("local", 0),), start_s=0.0, duration_s=60.0, executor="all")
        for task in tasks
    ]
    schedule = Schedule(method="lpt", status="heuristic", bound_s=0.0, placements=tuple(placements))
    engine = Engine(strategy="single", total_gpus=1, output_dir=tmp_path / "runs")
    results = engine.batched_execution(tasks, schedule)
    check_frozen("queue", {result.task: frozen_run(Path(result.run_dir)) for result in results})


def test_a_job_of_the_service(tmp_path: Path) -> None:
    with served(tmp_path, open_plane=local_plane(tmp_path)) as site, httpx2.Client(base_url=site.url) as client:
        file = client.post("/v1/files", files={"file": ("rows.jsonl", ROWS)}, data={"purpose": "fine-tune"}).json()
        settings = {"n_epochs": 1, "learning_rate": [1e-3, 3e-3], "batch_size": 8}
        body = {
            "model": "alto-tiny",
            "training_file": file["id"],
            "method": {"type": "supervised", "supervised": {"hyperparameters": settings}},
        }
        job = client.post("/v1/fine_tuning/jobs", json=body).json()
        url = f"/v1/fine_tuning/jobs/{job['id']}"
        wait_for(lambda: client.get(url).json()["status"] in ENDED, timeout_s=400)
        found = {
            "file": file,
            "created": job,
            "ended": client.get(url).json(),
            # Two threads write the run's messages and its status.
            "events": sorted(event["message"] for event in client.get(f"{url}/events?limit=100").json()["data"]),
            "checkpoints": client.get(f"{url}/checkpoints?limit=100").json(),
        }
        check_frozen("service", frozen_json(found, tmp_path))
        document = client.get("/openapi.json").json()
    check_frozen("openapi", without_descriptions(document))


def without_descriptions(value: Any) -> Any:
    """Return ``value`` without descriptions, whose wording is free, and without the version."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if key not in ("description", "version")}
        return {key: without_descriptions(inner) for key, inner in kept.items()}
    return [without_descriptions(inner) for inner in value] if isinstance(value, list) else value
