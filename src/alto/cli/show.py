"""``alto show``: the state of a run, running or finished."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from alto.cli.options import AnyRun, Run, reachable, run_to_show
from alto.cli.output import output_console, print_interrupted, print_json
from alto.runs import QueueDir, QueueProgress, RunDir, RunHistory, RunStatus, TaskStage, gpus_to_json, read_history
from alto.runs.progress import fraction_done, outlook, training_all_s


def show(
    run: AnyRun = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the state as JSON and nothing else.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it until the run stops.")] = False,
    every_s: Annotated[
        float, typer.Option("--every", min=0.1, max=86400, help="Seconds between two updates with --watch.")
    ] = 1.0,
) -> None:
    """Show the jobs of RUN, or the tasks of a queue, and their progress; only reads the run's files."""
    from alto.views import watch_run

    console = output_console()
    root = run_to_show(run, "show")
    if QueueDir.exists(root):
        _show_queue(console, root, as_json=as_json, watch=watch, every_s=every_s)
        return
    run_dir = RunDir.open(root)
    if watch and not as_json and console.is_terminal:
        with contextlib.suppress(KeyboardInterrupt):
            watch_run(console, run_dir, every_s)
        _show_run(console, run_dir, as_json=False)
        return
    while _show_run(console, run_dir, as_json=as_json) and watch:
        time.sleep(every_s)


def _show_run(console: Console, run_dir: RunDir, *, as_json: bool) -> bool:
    """Show a run once; return whether a process works on it."""
    from alto.views import final_summary

    is_live, now = run_dir.is_locked(), time.time()
    history = read_history(run_dir.root)
    if as_json:
        print_json(_facts(run_dir, history, is_live=is_live, now=now))
        return is_live
    console.print(final_summary(history, run_dir.root, max_rows=None, is_live=is_live, now=now))
    if history.status(is_live=is_live) is RunStatus.INTERRUPTED:
        print_interrupted(console, run_dir.root)
    return is_live


def _show_queue(console: Console, queue: Path, *, as_json: bool, watch: bool, every_s: float) -> None:
    from alto.views import queue_summary

    while True:
        is_live, now = RunDir(queue).is_locked(), time.time()
        progress = QueueProgress.read(queue)
        if as_json:
            print_json(_queue_facts(queue, progress, is_live=is_live, now=now))
        else:
            console.print(queue_summary(progress, queue, is_live=is_live, now=now))
            if progress.queue.status(is_live=is_live) is RunStatus.INTERRUPTED:
                print_interrupted(console, queue)
        if not (watch and is_live):
            return
        time.sleep(every_s)


def _queue_facts(queue: Path, progress: QueueProgress, *, is_live: bool, now: float) -> dict[str, Any]:
    history = progress.queue
    return {
        "queue_dir": str(queue),
        "state": history.status(is_live=is_live).value,
        "duration_s": round(history.duration_s, 3),
        "plans": len(history.plans),
        "tasks": [
            {
                "task": task.task,
                "state": task.state.value,
                "num_gpus": task.demand.num_gpus,
                "expected_s": task.demand.duration_s,
                "done": progress.fraction_done(task),
                **_outlook(progress.runs.get(task.task), is_live=is_live and task.state is TaskStage.RUNNING, now=now),
                "best_validation_loss": progress.best_loss(task),
                "failure": task.failure or None,
                "unreadable": progress.unreadable.get(task.task),
                "attempts": [
                    {
                        "number": attempt.number,
                        "gpus": gpus_to_json(attempt.gpus),
                        "outcome": attempt.outcome,
                        "reason": attempt.reason or None,
                    }
                    for attempt in task.attempts
                ],
            }
            for task in history.tasks.values()
        ],
    }


def _outlook(history: RunHistory | None, *, is_live: bool, now: float) -> dict[str, float | None]:
    """Return remaining seconds and tokens per second of a run that a process works on; None for any other run."""
    if history is None or not is_live:
        return {"remaining_s": None, "tokens_per_s": None}
    found = outlook(history, now)
    return {"remaining_s": found.remaining_s, "tokens_per_s": found.tokens_per_s}


def _facts(run: RunDir, history: RunHistory, *, is_live: bool, now: float) -> dict[str, Any]:
    best = history.best
    return {
        "run_dir": str(run.root),
        "task": history.name,
        "state": history.status(is_live=is_live).value,
        "metric": history.metric,
        "best_job": best.job if best else None,
        "best_validation_loss": best.best_validation_loss if best else None,
        "best_metrics": dict(best.best_metrics) if best else {},
        "test_loss": best.best_test_loss if best else None,
        "test_metrics": dict(best.best_test_metrics) if best else {},
        "scorer": history.scorer or None,
        "scorer_failure": history.scorer_failure or None,
        "finalists": [score.summary() for score in history.finalists],
        "rung_scores": [
            {
                "progress": scored.progress,
                "scorer": scored.scorer,
                "failure": scored.failure or None,
                "scores": [score.summary() for score in scored.scores],
            }
            for scored in history.rung_scores
        ],
        "samples": [dataclasses.asdict(sample) for sample in history.samples],
        "sampling_failure": history.sampling_failure or None,
        "done": fraction_done(history),
        **_outlook(history, is_live=is_live and history.result is None, now=now),
        "time_s": {**history.time_s, "measuring": history.measuring_s},
        "training_all_s": training_all_s(history),
        "samples_trained": history.samples_trained,
        "samples_saved": history.samples_saved,
        "samples_cut_off": history.samples_cut_off,
        "samples_budgeted": history.samples_budgeted,
        "duration_s": round(history.duration_s, 3),
        "jobs": [
            {
                "job": job.job,
                "stage": job.stage.value,
                "exit_reason": job.exit_reason,
                "slot": job.slot,
                "ranks": list(job.ranks),
                "step": job.step,
                "total_steps": job.total_steps,
                "train_loss": job.train_loss,
                "validation_loss": job.validation_loss,
                "metrics": dict(job.metrics[-1]) if job.metrics else {},
                "best_step": job.best_step,
                "best_validation_loss": job.best_validation_loss,
                "best_metrics": dict(job.best_metrics),
                "test_loss": job.best_test_loss,
                "test_metrics": dict(job.best_test_metrics),
                "origin": job.origin,
                "config": dict(job.config),
            }
            for job in history.jobs.values()
        ],
    }


def compare(
    run: Run,
    other: Annotated[Path, typer.Argument(help="Run directory to compare it with.", callback=reachable)],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the comparison as a page too.", callback=reachable),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON and nothing else.")] = False,
) -> None:
    """Show what RUN and OTHER were trained on, how good their best adapters are, and which settings differ."""
    from alto.results import load_run

    compared = load_run(run).compare(other)
    path = None if html is None else compared.write_html(html)
    if as_json:
        print_json(dataclasses.asdict(compared))
        return
    console = output_console()
    console.print(compared)
    if path is not None:
        console.print(f"page: {path}", soft_wrap=True, highlight=False, markup=False)


def report(
    run: AnyRun = None,
    gpu_hour_price: Annotated[
        float | None,
        typer.Option(
            "--gpu-hour-price",
            metavar="PRICE",
            min=0,
            help="Price of an hour of the device, to show what the run cost and saved; by default "
            "$ALTO_GPU_HOUR_PRICE, or the price of the task's budget.",
        ),
    ] = None,
) -> None:
    """Show the jobs of RUN, or the tasks of a queue, and write its report.html again."""
    from alto.report import write_queue_report, write_report
    from alto.runs import QueueDir, QueueProgress, RunDir, read_history
    from alto.views import final_summary, queue_summary

    console = output_console()
    root = run_to_show(run, "report")
    is_live = RunDir(root).is_locked()
    if QueueDir.exists(root):
        path = write_queue_report(root, price=gpu_hour_price)
        progress = QueueProgress.read(root)
        console.print(queue_summary(progress, root, is_live=is_live))
        status, label = progress.queue.status(is_live=is_live), "report:   "
    else:
        history = read_history(root)
        path = write_report(root, price=gpu_hour_price)
        console.print(final_summary(history, root, max_rows=None, is_live=is_live))
        status, label = history.status(is_live=is_live), "report:  "
    if status is RunStatus.INTERRUPTED:
        print_interrupted(console, root)
    console.print(f"{label}{path}", soft_wrap=True, highlight=False, markup=False)
