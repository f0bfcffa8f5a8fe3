"""``alto export``: an adapter of experts as vLLM reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from alto.cli.options import TrustRemoteCode
from alto.cli.paths import reachable

__all__ = ["export"]


def export(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|ADAPTER", help="Run directory, or folder of a LoRA adapter on experts.", callback=reachable
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where it is written.", callback=reachable)],
    base: Annotated[str | None, typer.Option("--base", help="Base model, if not the one the adapter names.")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write an adapter on experts with the matrices of every expert by themselves, as vLLM reads it."""
    from alto.engine import Engine

    written = Engine().export_per_expert(target, folder, base=base, trust_remote_code=trust_remote_code)
    Console().print(f"adapter: {written}", soft_wrap=True, highlight=False, markup=False)
