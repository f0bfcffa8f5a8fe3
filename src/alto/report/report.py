"""``report.html``: one page that shows a run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from alto.base import read_json
from alto.errors import RunError
from alto.records import ShownAnswer
from alto.report.importance import MIN_JOBS, importance_of_settings
from alto.report.pages import render_page, timestamp, write_page
from alto.report.run_drawings import run_figures
from alto.runs import METRICS_NAME, JobHistory, RunHistory, Stage, read_history
from alto.runs.lead import lead_of_winner
from alto.runs.progress import device_hours, exit_totals, price_of_hour, rung_costs, time_saved_s
from alto.spec import LABELS_NAME, write_yaml
from alto.views import wording
from alto.views.choice import choice_notes, describe_runner_up
from alto.views.metrics import describe_best_metrics, describe_test, loss_unit
from alto.views.tables import job_table, run_notes

_LEAST_VLLM_RANK = 8


def winner_yaml(history: RunHistory, winner: JobHistory) -> str:
    """Return the winner's configuration as keys of a task file, without the rows to train on."""
    keys = {"method": history.method, **winner.config}
    if history.started is not None and history.started.model:
        keys = {"model": history.started.model, **keys}
    return write_yaml(keys)


def winner_commands(
    history: RunHistory, winner: JobHistory, run_dir: Path, *, has_labels: bool
) -> list[tuple[str, str]]:
    """Return what each command does, and the command.

    Args:
        has_labels: Whether the adapter has a classification head, so that it cannot generate text.
    """
    run = shlex.quote(str(run_dir))
    alone = (
        "Train its configuration alone, after you put the keys below and your rows into a task file",
        "alto tune winner.yaml",
    )
    if has_labels:
        save = f"alto eval {run} --save-predictions predictions.jsonl"
        return [("Write the label that it predicts for every held-out row to a file", save), alone]
    return [
        ("Compare it with the base model", f"alto eval {run} --baseline"),
        (
            "Write its answers and the base model's answers to a file",
            f"alto eval {run} --save-predictions answers.jsonl",
        ),
        ("Serve it with vLLM", _vllm_command(history, winner, run_dir)),
        alone,
    ]


def _vllm_command(history: RunHistory, winner: JobHistory, run_dir: Path) -> str:
    base = "BASE" if history.started is None else history.started.base_model or history.started.model or "BASE"
    rank = winner.config.get("r")
    # vLLM allocates memory for certain ranks from 8 on, among them powers of two.
    needed = max(_LEAST_VLLM_RANK, rank if isinstance(rank, int) else _LEAST_VLLM_RANK)
    adapter = shlex.quote(f"{history.name}={run_dir / 'best'}")
    return (
        f"vllm serve {shlex.quote(base)} --enable-lora --max-lora-rank {1 << (needed - 1).bit_length()} "
        f"--lora-modules {adapter}"
    )


REPORT_NAME = "report.html"
UNSHOWN = frozenset(
    (
        *("early_exit.rungs", "fused.kept", "validation_weights", "evaluation_order"),
        *(f"base.{key}" for key in ("files", "weights", "config", "code")),
        *(f"data.{key}fingerprint" for key in ("", "validation_", "train_validation_")),
        "data.of_messages",
    )
)
"""Settings that are not listed: hashes, lists that only a program reads, and the rungs, which are shown in words."""
_CODE = re.compile(r'```python\n((?:(?!```).)*folder = )"path/to/this/folder"((?:(?!```).)*)```', re.DOTALL)
"""The Python code in the model card of an adapter."""

_OF_LABELS = {"accuracy": "Accuracy", "macro_f1": "Macro F1", "mse": "MSE", "spearman": "Spearman's rho"}
"""Titles of the metrics of classifiers and regressors."""


def write_report(run_dir: str | Path, *, price: float | None = None) -> Path:
    """Write ``report.html`` into ``run_dir`` from its journal and return its path; the run may be unfinished.

    Args:
        price: Price of an hour of one GPU; None takes :func:`alto.runs.progress.price_of_hour`.

    Raises:
        RunNotFoundError: ``run_dir`` holds no journal.
        RunError: The journal is damaged before its last line, or the metrics of an adapter are damaged.
        SpecError: The price in the environment is not a valid price.
        RunWriteError: The disk is full or cannot be written.
    """
    run_dir = Path(run_dir)
    return write_page(run_dir / REPORT_NAME, report_page(run_dir, read_history(run_dir), price=price))


def report_page(run_dir: Path, history: RunHistory, *, price: float | None = None, shown_as: Path | None = None) -> str:
    """Return the report of a run as HTML.

    Args:
        price: See :func:`write_report`.
        shown_as: Path of the folder that the page shows; None shows ``run_dir``.
    """
    evaluations = _evaluations(run_dir)
    numbers = ("loss", "score", "exact_match", "reward", "reward_accuracy", "reward_margin", *_OF_LABELS)
    measured = [name for name in numbers if any(found.get(name) is not None for found in evaluations)]
    of_task = None if history.started is None else history.started.gpu_hour_price
    hours = device_hours(history, price_of_hour(price, of_task))
    best, shown_dir = run_dir / "best", shown_as or run_dir
    context = _context(history, shown_dir, has_labels=(best / LABELS_NAME).is_file())
    titles = {name: title for name, title in _OF_LABELS.items() if name in measured}
    return render_page(
        "report.html.jinja",
        **context,
        evaluations=evaluations,
        measured=measured,
        of_labels=titles,
        classified=[found for found in evaluations if found.get("label_f1")],
        hours=hours,
        snippet=_python_code(best, shown_dir / "best"),
    )


def _python_code(best: Path, shown_as: Path) -> str:
    """Return the Python code in the model card of the best adapter, for its folder; empty if there is no such code.

    Args:
        shown_as: Path of the folder that the code loads.
    """
    try:
        found = _CODE.search((best / "README.md").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return "" if found is None else f"{found[1]}{json.dumps(str(shown_as), ensure_ascii=False)}{found[2]}"


def _context(history: RunHistory, run_dir: Path, *, has_labels: bool) -> dict[str, Any]:
    table = job_table(history)
    best = history.best
    winner = best if history.result is not None else None
    lead = lead_of_winner(history)
    return {
        "history": history,
        "table": table,
        "best": next((row for row in table.rows if row.is_best), None),
        "finalists": wording.describe_scoring(history.finalists, history.scorer, history.scorer_failure),
        "is_finished": history.result is not None,
        "refit": "" if history.refit is None else wording.describe_refit(history.refit),
        "num_open": sum(not job.has_ended for job in history.jobs.values()),
        "num_exited": sum(job.stage is Stage.EXITED for job in history.jobs.values()),
        "num_completed": sum(job.stage is Stage.COMPLETED for job in history.jobs.values()),
        "subtitle": wording.describe_task(history.started),
        "notes": [*run_notes(history), *map(wording.clean, choice_notes(history))],
        "totals": exit_totals(history),
        "time_saved_s": time_saved_s(history),
        "time_spent": [sentence.removeprefix("time: ") for sentence in wording.describe_time(history)],
        "rung_costs": rung_costs(history),
        "importance": importance_of_settings(history),
        "min_jobs": MIN_JOBS,
        "settings": _settings(history),
        "shared": _shared_settings(history),
        "adapter_dir": str(run_dir / "best"),
        "winner_yaml": "" if winner is None else winner_yaml(history, winner),
        "commands": [] if winner is None else winner_commands(history, winner, run_dir, has_labels=has_labels),
        "jobs_dir": str(run_dir / "jobs"),
        "written_at": timestamp(history.last_seen_at),
        "loss_unit": loss_unit(history.method),
        "best_metrics": describe_best_metrics(history, best) if best is not None else "",
        "tested": describe_test(history, best) if best is not None else "",
        "test_rows": wording.describe_test_rows(history.num_known_test),
        "lead": lead,
        "runner_up": "" if lead is None else describe_runner_up(history, lead),
        "figures": run_figures(history, table),
        "progress": [] if best is None else answers_over_time(best),
    }


def answers_over_time(job: JobHistory) -> list[tuple[str, tuple[ShownAnswer, ...]]]:
    """Return the answers of a job before training, halfway to its best adapter, and by its best adapter, each with the
    moment in words; empty for a job that does not learn from rewards."""
    middle = min((step for step in job.answers if step), key=lambda step: abs(step - job.best_step / 2), default=0)
    steps = dict.fromkeys(step for step in (0, middle, job.best_step) if step in job.answers)
    return [(f"step {step}" if step else "before training", job.answers[step]) for step in steps]


def _evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the evaluations of the best adapter, of every job's adapter, and of the base model.

    If an adapter has several evaluations with the same dataset and settings, only the newest is returned. Evaluations
    of the base model are stored with each adapter.
    """
    folders = {"best": run_dir / "best"} | {path.parent.name: path for path in sorted(run_dir.glob("jobs/*/best"))}
    found: dict[str, dict[str, Any]] = {}
    for name, folder in folders.items():
        for entry in _read_evaluations(folder / METRICS_NAME):
            settings = entry.get("settings")
            settings = settings if isinstance(settings, dict) else {}
            # The report shows the adapter in its own column, and needs no base model.
            shown = {k: v for k, v in settings.items() if v is not None and k not in ("weights", "base_model")}
            line = {**entry, "settings": shown, "adapter": "base" if settings.get("weights") == "base" else name}
            key = json.dumps([line["adapter"], entry.get("dataset"), settings], sort_keys=True)
            if key not in found or str(found[key].get("date")) < str(entry.get("date")):
                found[key] = line
    return list(found.values())


def _read_evaluations(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        return [dict(entry) for entry in read_json(path).get("evaluations") or ()]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RunError(
            f"{path}: expected a JSON object of metrics, found invalid content ({error}). Remove the file and evaluate "
            "the run again to have its evaluations in the report."
        ) from None


def _settings(history: RunHistory) -> list[tuple[str, Any]]:
    """Return name and value of every setting of the task in the journal that says something: it is set, and no count of
    0. Names of nested settings are dotted."""
    flat: list[tuple[str, Any]] = []
    for key, value in history.settings().items():
        found = {f"{key}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value}
        flat += [(name, item) for name, item in found.items() if name not in UNSHOWN and _is_set(item)]
        if key == "early_exit" and (rungs := wording.describe_rungs(history)):
            flat.append(("early_exit.rungs", rungs))
    return [(name, value) for name, value in flat if value != 0 or not name.startswith("data.")]


def _is_set(value: Any) -> bool:
    return value is not None and value not in ({}, [], ())


def _shared_settings(history: RunHistory) -> list[tuple[str, Any]]:
    """Return the settings that all jobs have in common, without those that are not set."""
    configs = [wording.tidy_config(job.config) for job in history.jobs.values()]
    varying = set(wording.varying_keys(configs))
    return (
        [(key, value) for key, value in configs[0].items() if key not in varying and _is_set(value)] if configs else []
    )
