"""``alto demo``: the quickstart, from the installed package alone."""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alto.base import write_error
from alto.cli.options import Overrides
from alto.cli.tune import train
from alto.cli.word_problems import SIZES, write_splits
from alto.errors import RunExistsError
from alto.spec import load_task

if TYPE_CHECKING:
    from alto.engine import Engine
    from alto.results import TaskResult

_TASK = "quickstart.yaml"


def demo(
    folder: Annotated[Path, typer.Argument(help="Folder of the demo; made if it does not exist.")] = Path("alto-demo"),
    overrides: Overrides = None,
) -> None:
    """Tune 24 configurations of a tiny model that ships with ALTO on word problems, in FOLDER; about half a minute.

    Nothing is downloaded. A task file, the rows and the run are left in FOLDER.
    """
    task = load_task(_prepared(folder), overrides or ())
    results: list[TaskResult] = []

    def work(engine: Engine) -> TaskResult:
        results.append(engine.tune(task))
        return results[0]

    train(work, strategy="adapter_parallel", output_dir=folder / "runs", as_json=False, quiet=False)
    run, file = (shlex.quote(str(path)) for path in (results[0].run_dir, folder / _TASK))
    test_rows = shlex.quote(str(_rows(folder) / "test.jsonl"))
    typer.echo(
        "\nNext:\n"
        f"  open the report above in a browser: every job, and why it ended\n"
        f"  alto eval {run} --dataset {test_rows}\n"
        "      measures the adapter on new rows\n"
        f"  alto tune {file}\n"
        "      trains again, with what you change in that file\n"
        "  alto init YOUR-ROWS.jsonl --model YOUR-MODEL\n"
        "      writes such a file for your own rows and model"
    )


def _rows(folder: Path) -> Path:
    return folder / "data" / "word_problems"  # as the task names it


def _prepared(folder: Path) -> Path:
    """Write the task and its rows into ``folder``, and return the task's file.

    Raises:
        RunExistsError: The folder has files that are not a demo's.
        RunWriteError: It cannot be written.
    """
    file = folder / _TASK
    text = resources.files("alto").joinpath("assets", _TASK).read_text(encoding="utf-8")
    try:
        is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        is_own = is_new or (file.is_file() and file.read_text(encoding="utf-8", errors="replace") == text)
        if is_own:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")  # first, because it marks the folder of a demo
            write_splits(_rows(folder), SIZES, seed=0)
    except OSError as error:
        raise write_error(folder, error, "name a folder that can be written: alto demo FOLDER") from None
    if not is_own:
        raise RunExistsError(
            f"expected a new folder or the folder of an unchanged demo, found {folder}; name a different folder: "
            "alto demo FOLDER"
        )
    return file
