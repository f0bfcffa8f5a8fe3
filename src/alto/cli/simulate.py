"""``alto simulate``: how a cluster would run a set of tasks, and how large it must be."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from alto.cli.options import complete_simulation_key
from alto.cli.output import output_console, print_json
from alto.errors import SpecError
from alto.records import SimulationOutcome
from alto.spec import Simulation, load_simulation
from alto.version import install_command

_LEGEND = (
    "makespan: hours until all tasks have ended; mean, p99: hours from a task's\n"
    "arrival to its end; starts: executors started\n"
    "B: first come first served; S: with a scheduler; EE: with early exit"
)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def simulate(
    file: Annotated[Path, typer.Argument(help="Simulation file (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key of the file.", autocompletion=complete_simulation_key
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", help="Method of scheduling: cp-sat, milp, lpt, sjf, fifo; by default several."),
    ] = None,
    finish_within: Annotated[
        str | None,
        typer.Option(
            "--finish-within",
            help="Find the smallest number of nodes on which all tasks end in this time, such as 24h.",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a Gantt picture of the best outcome.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON and nothing else.")] = False,
) -> None:
    """Simulate how long the tasks that FILE describes take on a cluster, with each scheduling method."""
    simulation = load_simulation(file, overrides or ())
    from alto.scheduler.simulate import nodes_of, smallest_cluster
    from alto.scheduler.simulate import simulate as run

    chosen = methods or list(simulation.methods) or _usual_methods(simulation)
    if finish_within is not None:
        within_s, early_exit = _seconds(finish_within), bool(simulation.early_exit_shares)
        with _progress(silent=as_json) as show:
            smallest = smallest_cluster(
                simulation,
                within_s=within_s,
                method=chosen[-1],
                early_exit=early_exit,
                on_progress=lambda nodes, done, total: show(
                    f"{nodes} {'nodes' if nodes > 1 else 'node'}: simulations", done, total
                ),
            )
        if as_json:
            print_json({"method": chosen[-1], "early_exit": early_exit, **dataclasses.asdict(smallest)})
        else:
            num_nodes = f"{smallest.nodes} {'nodes' if smallest.nodes > 1 else 'node'} of {simulation.gpus_per_node}"
            typer.echo(
                f"{smallest.num_gpus} GPUs ({num_nodes}) are enough: all tasks end within "
                f"{smallest.makespan_s / 3600:.2f} h\n95th percentile of {smallest.num_simulations} simulations; "
                f"{chosen[-1]}, {'with' if early_exit else 'without'} early exit"
            )
        return
    exits = (False, True) if simulation.early_exit_shares else (False,)
    outcomes = []
    with _progress(silent=as_json) as show:
        for early_exit in exits:
            for method in chosen:
                what = f"{method}, {'with' if early_exit else 'without'} early exit: tasks"
                outcomes.append(
                    run(
                        simulation,
                        method=method,
                        early_exit=early_exit,
                        on_progress=lambda done, total, what=what: show(what, done, total),  # type: ignore[misc]
                    )
                )
    if as_json:
        print_json({"outcomes": [_facts(outcome) for outcome in outcomes]})
    else:
        output_console().print(_table(outcomes))
        typer.echo(_LEGEND)
        for note in _notes(outcomes):
            typer.echo(note)
    if html is not None:
        from alto.report.gantt import write_gantt

        best = min(outcomes, key=lambda outcome: outcome.makespan_s)
        write_gantt(html, best.planned, best.actual, nodes_of(simulation), title=f"{best.method}, {best.label}")


@contextlib.contextmanager
def _progress(*, silent: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows the progress of the simulations on stderr; it does nothing if that is no terminal."""
    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield lambda what, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            bars.update(bar, description=what, completed=done, total=total)

        yield show


def _usual_methods(simulation: Simulation) -> list[str]:
    """Return the methods if the user names none; if ``cp-sat`` is left out without OR-tools, say so on stderr."""
    from alto.scheduler.simulate import MAX_SOLVED

    num_tasks = simulation.num_tasks if simulation.trace is None else len(simulation.trace)
    methods = ["fifo", "sjf", "lpt"]
    if num_tasks > MAX_SOLVED:
        return methods
    if find_spec("ortools") is None:
        typer.echo(f"note: cp-sat is left out because it needs ortools: {install_command('scheduler')}", err=True)
        return methods
    return [*methods, "cp-sat"]


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None or float(match[1]) == 0:
        raise SpecError(f"--finish-within: expected a time such as 90m, 24h or 2d, found {text!r}; correct it")
    return float(match[1]) * _UNITS[match[2]]


def _facts(outcome: SimulationOutcome) -> dict[str, object]:
    facts = dataclasses.asdict(dataclasses.replace(outcome, planned=(), actual=()))
    return {key: value for key, value in facts.items() if key not in ("planned", "actual")}


def _table(outcomes: list[SimulationOutcome]) -> Table:
    """Return a table of the outcomes that fits a terminal of 80 columns; times in hours."""
    from alto.views.wording import format_percent

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("method", "", "makespan h", "mean h", "p99 h", "GPUs used", "starts", "failed"):
        table.add_column(heading, justify="left" if heading in ("method", "") else "right", no_wrap=True)
    for found in outcomes:
        times = (found.makespan_s, found.mean_completion_s, found.p99_completion_s)
        table.add_row(
            found.method,
            found.label,
            *(f"{time / 3600:,.2f}" for time in times),
            format_percent(found.utilisation),
            *(f"{count:,}" for count in (found.num_attempts, found.num_failed)),
        )
    return table


def _notes(outcomes: list[SimulationOutcome]) -> list[str]:
    """Return notes on the methods whose plans were partly made by another method."""
    helped = {found.method: found.planner for found in outcomes if found.planner != found.method}
    return [f"{method}: planned by {planner} if many tasks wait or run" for method, planner in helped.items()]
