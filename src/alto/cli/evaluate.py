"""``alto eval``: what an adapter is worth on held-out rows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from alto.cli.output import print_json
from alto.cli.paths import reachable
from alto.errors import RunWriteError
from alto.records import Evaluation, Metric, Prediction

__all__ = ["evaluate"]


def evaluate(
    target: Annotated[
        Path,
        typer.Argument(metavar="RUN|ADAPTER", help="Run directory, or folder of a LoRA adapter.", callback=reachable),
    ],
    job: Annotated[str | None, typer.Option("--job", help="Evaluate this job of the run instead of its best.")] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="File or name of the rows; of a run by default its held-out rows.")
    ] = None,
    metric: Annotated[
        Metric,
        typer.Option("--metric", help="Held-out loss, exact match of answers after ####, or what the rows allow."),
    ] = "auto",
    batch_size: Annotated[int, typer.Option("--batch-size", help="Answers written at a time.")] = 16,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens of the longest answer.")] = 512,
    limit: Annotated[int | None, typer.Option("--limit", help="Use this many rows, from the first.")] = None,
    base: Annotated[str | None, typer.Option("--base", help="Base model, if not the one the adapter names.")] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Measure the base model alone as well.")] = False,
    save_predictions: Annotated[
        Path | None,
        typer.Option(
            "--save-predictions", metavar="FILE", help="Write every answer there (JSON lines).", callback=reachable
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Measure an adapter on rows it was not trained on; the numbers go to its metrics.json."""
    if save_predictions is not None:
        _check_file(save_predictions, metric)
    from alto.engine import Engine

    console = Console()
    with _progress(console, silent=as_json) as on_progress:
        result = Engine().evaluate(
            target,
            job=job,
            dataset=dataset,
            base=base,
            metric=metric,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            limit=limit,
            baseline=baseline,
            on_progress=on_progress,
        )
    if save_predictions is not None:
        _write(save_predictions, result.predictions)
    if as_json:
        facts = dataclasses.asdict(result)
        del facts["predictions"]
        print_json(facts)
        return
    console.print(Text(f"{result.adapter.dataset}, {result.adapter.num_rows} rows"), soft_wrap=True)
    console.print(_table(result.evaluations))
    console.print(
        f"metrics: {Path(result.adapter_dir) / 'metrics.json'}", soft_wrap=True, highlight=False, markup=False
    )


def _check_file(path: Path, metric: str) -> None:
    """What would make the predictions unsaved is said before they are made."""
    if metric == "loss":
        raise typer.BadParameter("expected answers to save, found --metric loss, which makes none; leave one out")
    if not path.parent.is_dir() or path.is_dir():
        raise typer.BadParameter(
            f"expected a file in a folder that is there, found {str(path)!r}; make the folder first"
        )


@contextlib.contextmanager
def _progress(console: Console, *, silent: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar for each thing measured on a terminal, nothing elsewhere."""
    if silent or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        known = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what, total=total)
            bars.update(known[what], completed=done)

        yield show


def _write(path: Path, predictions: Sequence[Prediction]) -> None:
    lines = [json.dumps(dataclasses.asdict(prediction), ensure_ascii=False) + "\n" for prediction in predictions]
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise RunWriteError(
            f"save-predictions: expected a file that can be written, found that {path} cannot ({error.strerror}); "
            "choose another; the numbers are in metrics.json"
        ) from error


def _table(evaluations: Sequence[Evaluation]) -> Table:
    # Text, not markup: a file's name may hold brackets.
    table = Table()
    table.add_column("weights")
    table.add_column("loss", justify="right")
    table.add_column("exact match", justify="right")
    for evaluation in evaluations:
        loss = "–" if evaluation.loss is None else f"{evaluation.loss:.4f}"
        match = "–"
        if evaluation.exact_match is not None:
            match = f"{evaluation.exact_match:.1%} ({evaluation.num_correct} of {evaluation.num_rows})"
        table.add_row(str(evaluation.settings["weights"]), loss, match)
    return table
