"""``alto eval``: evaluates adapters on held-out rows."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from alto.cli.options import TrustRemoteCode, complete_run, reachable, run_to_evaluate
from alto.cli.output import output_console, print_json
from alto.errors import RunWriteError
from alto.records import AdapterEvaluation, Evaluation, EvaluationResult, GenerationBackend, Metric, Prediction

_MAX_LABELS = 12
"""Maximum number of labels for which the table shows a confusion matrix; with more, only the JSON has it."""


def _all_reachable(paths: list[Path] | None) -> list[Path] | None:
    for path in paths or ():
        reachable(path)
    return paths


def evaluate(
    targets: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN|ADAPTER...",
            help="Run directory, by default the latest in ./runs; or folders of LoRA adapters, measured together.",
            callback=_all_reachable,
            autocompletion=complete_run,
        ),
    ] = None,
    jobs: Annotated[
        list[str] | None,
        typer.Option("--job", help="Evaluate this job of the run instead of its best."),
    ] = None,
    all_jobs: Annotated[bool, typer.Option("--all-jobs", help="Evaluate all jobs of the run.")] = False,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", help="File or name of the dataset; for a run, by default its held-out rows."),
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            help="auto (the rewards of the run if it has some; else depends on the rows and the run), loss, "
            "preference, or a scorer of answers: exact, contains, numeric, exact_match, tool_call, format, similarity, "
            "multiple_choice, '{scorer: json, keys: [total]}', "
            "'{scorer: regex, pattern: …}'.",
        ),
    ] = "auto",
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Number of answers generated at a time, for all adapters together.")
    ] = 64,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            help="Maximum number of tokens in an answer; by default 512, or for rewards the run's "
            "max_completion_length.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Number of rows to use, starting with the first; by default all.")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Base model, if it is not the one that the adapters name.")
    ] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Measure the base model alone as well.")] = False,
    backend: Annotated[
        GenerationBackend, typer.Option("--backend", help="Backend that generates the answers.")
    ] = "alto",
    trust_remote_code: TrustRemoteCode = False,
    save_predictions: Annotated[
        Path | None,
        typer.Option(
            "--save-predictions",
            metavar="FILE",
            help="Generate an answer to every row, also with the base model, and write them to FILE: a table if it "
            "ends in .csv, else one JSON line per row. For classification and regression, write the predicted labels; "
            "the rows need no labels.",
            callback=reachable,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Measure adapters on rows they were not trained on; the scores are written to the metrics.json of each."""
    what = _metric(metric)
    if save_predictions is not None:
        _check_file(save_predictions)
    adapters = targets or [run_to_evaluate()]
    if not as_json:
        typer.echo("loading the base model and the rows", err=True)  # with the imports, this may take a minute
    from alto.engine import Engine

    console = output_console()
    with _progress(console, silent=as_json) as on_progress:
        result = Engine().evaluate(
            adapters,
            jobs=jobs or (),
            all_jobs=all_jobs,
            dataset=dataset,
            base=base,
            metric=what,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            limit=limit,
            baseline=baseline,
            predictions=save_predictions is not None,
            backend=backend,
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
    if save_predictions is not None:
        _write(save_predictions, result)
    for note in result.notes:
        typer.echo(note, err=True)
    if as_json:
        facts = dataclasses.asdict(result)
        del facts["predictions"], facts["label_predictions"]
        print_json(facts)
        return
    first = result.adapters[0]
    console.print(Text(f"{first.evaluation.dataset}, {first.evaluation.num_rows} rows"), soft_wrap=True)
    table = _table(result)
    if len(table.columns) == 1:  # nothing is measured, as a note says
        console.print(f"predictions: {save_predictions}", soft_wrap=True, highlight=False, markup=False)
        return
    console.print(table)
    for evaluated in result.adapters:
        _print_labels(console, evaluated, is_named=len(result.adapters) > 1)
    if len(result.adapters) == 1:
        where = str(Path(first.adapter_dir) / "metrics.json")
    else:
        where = f"in metrics.json beside each of the {len(result.adapters)} adapters"
    console.print(f"metrics: {where}", soft_wrap=True, highlight=False, markup=False)


def _metric(text: str) -> Any:
    """Return the name of a metric, or the settings of a scorer, which are written as a YAML mapping in braces."""
    if text in get_args(Metric):
        return text
    with contextlib.suppress(yaml.YAMLError):
        found = yaml.safe_load(text)
        if isinstance(found, dict):
            return found
    raise typer.BadParameter(
        f"expected {', '.join(get_args(Metric))}, or settings such as '{{scorer: json, keys: [total]}}', found "
        f"{text!r}; correct it",
        param_hint="--metric",
    )


def _check_file(path: Path) -> None:
    """Check, before predictions are generated, that they can be saved."""
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; give the path of a file", param_hint="--save-predictions")
    if not path.parent.is_dir():
        raise typer.BadParameter(
            f"folder {path.parent} does not exist; create it first", param_hint="--save-predictions"
        )


@contextlib.contextmanager
def _progress(console: Console, *, silent: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield a function that shows a progress bar for each measurement; None if that is not wanted or no terminal."""
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


def _write(path: Path, result: EvaluationResult) -> None:
    """Write the answers of all adapters and the base model, or the predicted labels: a table if ``path`` ends in
    ``.csv``, else one JSON line per row."""
    text = _csv_table(result) if path.suffix.lower() == ".csv" else _json_lines(result)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunWriteError(
            f"save-predictions: expected a writable file, found {path} ({error.strerror}); choose a different file. "
            "Measured scores are in metrics.json"
        ) from error


def _csv_table(result: EvaluationResult) -> str:
    """Return a line for every row; for every row and adapter, with its name, if there are several."""
    lines: list[dict[str, Any]] = [
        {"weights": one.weights, "text": one.text, "label": _cell(one.predicted), "probability": _cell(one.probability)}
        for one in result.label_predictions
    ] + [
        {"weights": one.weights, "prompt": one.prompt, "reference": one.reference, "text": one.generated, **_score(one)}
        for one in result.predictions
    ]
    is_named = len({line["weights"] for line in lines}) > 1
    written = io.StringIO()
    names = list(dict.fromkeys(name for line in lines for name in line))[not is_named :]
    table = csv.DictWriter(written, names, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    return written.getvalue()


def _cell(value: object) -> object:
    """Return the content of a cell: a list is written as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, tuple) else value


def _json_lines(result: EvaluationResult) -> str:
    rows: dict[int, dict[str, Any]] = {}
    for found in result.label_predictions:
        label = {} if found.label is None else {"label": found.label}
        line = rows.setdefault(found.row, {"row": found.row, "text": found.text, **label, "predictions": {}})
        chance = {} if found.probability is None else {"probability": found.probability}
        line["predictions"][found.weights] = {"label": found.predicted, **chance}
    for one in result.predictions:
        line = rows.setdefault(
            one.row, {"row": one.row, "prompt": one.prompt, "reference": one.reference, "predictions": {}}
        )
        line["predictions"][one.weights] = {"text": one.generated, **_score(one)}
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in rows.values())


def _score(prediction: Prediction) -> dict[str, Any]:
    """Return the scorer's result; empty if there is no scorer."""
    if prediction.score is None:
        return {}
    extracted = {} if prediction.correct is None else {"extracted": prediction.extracted}
    return {**extracted, "score": prediction.score}


def _table(result: EvaluationResult) -> Table:
    """Return a table with a row for each adapter, after the base model's, and a column for each measured number."""
    baseline = [] if result.baseline is None else [("base", result.baseline)]
    evaluations = [*baseline, *((found.name, found.evaluation) for found in result.adapters)]
    columns = [(title, show) for title, show in _COLUMNS if any(show(found) for _, found in evaluations)]
    table = Table()
    table.add_column("weights")
    scorer = (evaluations[0][1].scorer or "").replace("_", " ")
    for title, _ in columns:
        table.add_column(scorer if title == "score" else title, justify="right")
    for name, found in evaluations:
        # Text, not markup, because a file's name may have brackets.
        table.add_row(Text(name), *(show(found) or "–" for _, show in columns))
    return table


def _print_labels(console: Console, adapter: AdapterEvaluation, *, is_named: bool) -> None:
    """Print a classifier's F1 of each label, and how often it predicts which label for it."""
    found = adapter.evaluation
    if found.label_f1 is None:
        return
    names = list(found.label_f1)
    shown = [] if found.confusion is None or len(names) > _MAX_LABELS else names
    table = Table(title=Text(adapter.name) if is_named else None, title_justify="left")
    table.add_column("label" if not shown else "label \\ predicted")
    for name in shown:
        table.add_column(Text(name), justify="right")
    table.add_column("F1", justify="right")
    for name, score in found.label_f1.items():
        counts = (found.confusion or {}).get(name, {})
        table.add_row(Text(name), *(str(counts.get(other, 0)) for other in shown), _show(score) or "–")
    console.print(table)


def _show_score(found: Evaluation) -> str:
    if found.score is None:
        return ""
    if found.num_correct is None:
        return f"{found.score:.4g}"
    return f"{found.score:.1%} ({found.num_correct} of {found.num_rows})"


def _show(number: float | None, form: str = "") -> str:
    from alto.views import format_loss

    if number is None:
        return ""
    return format(number, form) if form else format_loss(number)


_COLUMNS: tuple[tuple[str, Callable[[Evaluation], str]], ...] = (
    ("loss", lambda found: _show(found.loss)),
    ("score", _show_score),
    ("reward", lambda found: _show(found.reward, ".4g")),
    ("reward accuracy", lambda found: _show(found.reward_accuracy, ".1%")),
    ("reward margin", lambda found: _show(found.reward_margin)),
    ("accuracy", lambda found: _show(found.accuracy, ".1%")),
    ("macro F1", lambda found: _show(found.macro_f1)),
    ("MSE", lambda found: _show(found.mse, ".6g")),
    ("Spearman's rho", lambda found: "" if found.mse is None else _show(found.spearman) or "–"),
)
