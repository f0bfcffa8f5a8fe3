"""``alto refit``: train the winner of a finished run on all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alto.cli.options import AsJson, Quiet, Strategy, TrustRemoteCode
from alto.cli.paths import Run
from alto.cli.tune import train

__all__ = ["refit"]


def refit(
    run: Run,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            "-o",
            help="Folder in which the run directory is made; by default the one that contains RUN.",
        ),
    ] = None,
    strategy: Strategy = "adapter_parallel",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train the winner of the finished RUN again on all its rows, including the validation set, in a new run.

    The refit uses the winner's settings and seed, and trains up to the step of its best checkpoint. Nothing is
    validated.
    """
    train(
        lambda engine: engine.refit(run, to=output_dir, trust_remote_code=trust_remote_code),
        strategy=strategy,
        output_dir=run.parent,
        as_json=as_json,
        quiet=quiet,
    )
