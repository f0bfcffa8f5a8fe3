"""Make the run folders of version 0.1 in this folder, with that version's code.

    git worktree add /tmp/alto-0.1 d09c0f5
    PYTHONPATH=/tmp/alto-0.1/src python tests/runs/journals_0_1/make.py

``finished`` is a run of DPO that chooses by reward accuracy, ``interrupted`` a run stopped at a checkpoint, ``queue`` a
queue of two tasks, one of them stopped. Their rows are in ``rows``. The files name the folder ``/alto-0.1`` instead of
the folder in which they were made.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import alto
from alto.errors import TaskInterruptedError
from alto.records import Gpu, Placement, Schedule

HERE = Path(__file__).resolve().parent
ELSEWHERE = "/alto-0.1"
LEFT_OUT = ("report.html", "run.lock", "logs", "README.md", "start")
SMALL = {
    "model": "alto-tiny",
    "r": 1,
    "target_modules": ["q_proj"],
    "max_slots": 2,
    "max_tokens_per_step": 4096,
    "max_tokens_per_pass": 4096,
    "report_to": "none",
    "eval_steps": 0.25,
}


def main() -> None:
    shutil.rmtree(HERE / "rows", ignore_errors=True)
    (HERE / "rows").mkdir()
    write_rows(HERE / "rows")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        shutil.copytree(HERE / "rows", made / "rows")
        keep(finished(made), "finished", made)
        keep(interrupted(made), "interrupted", made)
        keep(queue(made), "queue", made)
    for done in (HERE / "finished", HERE / "queue" / "tasks" / "first"):
        shutil.rmtree(done / "jobs")  # a finished run needs only its result


def write_rows(folder: Path) -> None:
    for name, first, count in (("train", 0, 16), ("validation", 100, 6)):
        numbers = range(first, first + count)
        sums = [{"prompt": f"{n} plus {n % 7}?", "completion": f" It is {n + n % 7}."} for n in numbers]
        pairs = [{"prompt": f"{n} plus 1?", "chosen": f" It is {n + 1}.", "rejected": f" It is {n}."} for n in numbers]
        for kind, rows in (("sums", sums), ("pairs", pairs)):
            (folder / f"{kind}-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_task(made: Path, kind: str, **changes: Any) -> alto.Task:
    rows = made / "rows"
    sets = {"dataset": str(rows / f"{kind}-train.jsonl"), "validation_dataset": str(rows / f"{kind}-validation.jsonl")}
    return alto.Task(**{**SMALL, **sets, **changes})


def finished(made: Path) -> Path:
    task = make_task(
        made,
        "pairs",
        name="pairs",
        method="dpo",
        metric="reward_accuracy",
        num_train_epochs=2,
        search_space={"learning_rate": [1e-5, 1e-3, 1e-2, 1e-1], "beta": [0.1]},
        early_exit={"rungs": [[0.25, 0.5]]},
    )
    return Path(alto.Engine(output_dir=made / "runs").tune(task).run_dir)


def stop_at(name: str, count: int, where: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> Any:
    """Return an observer, and a function that says whether it has seen the event ``count`` times."""
    seen: list[Any] = []

    def observe(event: Mapping[str, Any]) -> None:
        line = where(event)
        if line is not None and line.get("event") == name:
            seen.append(line)

    return observe, lambda: len(seen) >= count


def interrupted(made: Path) -> Path:
    task = make_task(
        made,
        "sums",
        name="sums",
        num_train_epochs=4,
        max_slots=1,
        search_space={"learning_rate": [1e-3, 1e-2]},
        early_exit={"rungs": [[0.25, 0.5]]},
        checkpoint_interval_s=0,
    )
    observe, is_interrupted = stop_at("eval", 3, lambda event: event)
    engine = alto.Engine(output_dir=made / "stopped", observers=[observe], is_interrupted=is_interrupted)
    with contextlib.suppress(TaskInterruptedError):
        engine.tune(task)
    (run,) = (made / "stopped").iterdir()
    return run


def queue(made: Path) -> Path:
    names = ("first", "second")
    tasks = [
        make_task(
            made, "sums", name=name, num_train_epochs=4, search_space={"learning_rate": [1e-3, 1e-2]}, early_exit=False
        )
        for name in names
    ]
    schedule = Schedule(
        method="lpt",
        status="heuristic",
        placements=tuple(
            Placement(task=name, gpus=(Gpu("local", 0),), start_s=10.0 * index, duration_s=10.0)
            for index, name in enumerate(names)
        ),
        bound_s=20.0,
    )
    observe, is_interrupted = stop_at(
        "eval", 1, lambda event: event["line"] if event["event"] == "told" and event["task"] == "second" else None
    )
    engine = alto.Engine(output_dir=made / "queues", observers=[observe], is_interrupted=is_interrupted)
    with contextlib.suppress(TaskInterruptedError):
        engine.batched_execution(tasks, schedule)
    (root,) = (made / "queues").iterdir()
    return root


def keep(folder: Path, name: str, made: Path) -> None:
    shutil.rmtree(HERE / name, ignore_errors=True)
    shutil.copytree(folder, HERE / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for path in (HERE / name).rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".yaml", ".md"):
            path.write_text(path.read_text("utf-8").replace(str(made), ELSEWHERE), encoding="utf-8")


if __name__ == "__main__":
    main()
