"""``alto export``: the best adapter for other programs."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from alto.cli.options import AsJson, TrustRemoteCode, complete_run, reachable
from alto.cli.output import output_console, print_json
from alto.records import ExportResult, ForeignTool, GgufType

_HOLDS = {
    "adapter": "adapter",
    "per_expert": "adapter",
    "merged": "model",
    "gguf": "model",
    "config": "configuration",
}


def export(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|ADAPTER",
            help="Run directory, or folder of a LoRA adapter.",
            callback=reachable,
            autocompletion=complete_run,
        ),
    ],
    to: Annotated[
        Path,
        typer.Option("--to", metavar="DIR", help="Folder to write; it must be absent or empty.", callback=reachable),
    ],
    merged: Annotated[
        bool, typer.Option("--merged", help="Write the base model with the adapter merged, in safetensors.")
    ] = False,
    gguf: Annotated[
        GgufType | None,
        typer.Option(
            "--gguf",
            help="Write one GGUF file and a Modelfile: the merged model with matrices in f16 or q8_0, or the adapter.",
        ),
    ] = None,
    per_expert: Annotated[
        bool,
        typer.Option(
            "--per-expert", help="Write an adapter on experts with separate matrices for every expert, for vLLM."
        ),
    ] = False,
    config: Annotated[
        ForeignTool | None,
        typer.Option(
            "--config", help="Write a configuration that trains the same job with trl, axolotl or llamafactory."
        ),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            "--push-to-hub", metavar="REPO", help="Upload the folder to this repository; a new repository is private."
        ),
    ] = None,
    job: Annotated[str | None, typer.Option("--job", help="Export this job of the run instead of its best.")] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            help="Base model, if it is not the one that the adapter names; the written files then name this one.",
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Write the best adapter for other programs: as it is, merged, as GGUF, or its settings for another trainer."""
    from alto.engine import Engine

    result = Engine().export(
        target,
        to,
        merged=merged,
        gguf=gguf,
        per_expert=per_expert,
        config=config,
        push_to_hub=push_to_hub,
        job=job,
        base=base,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        _show(result)


def _show(result: ExportResult) -> None:
    """Print the folder, how far a merged model differs, and the commands to use it; unwrapped, to be copied."""
    compared = ""
    if result.difference is not None:
        compared = f" (logits differ from the adapter's by {result.difference:.1e}, relative)"
    # A merged model has a difference; the form "gguf" may also be the adapter alone.
    what = "adapter" if result.form == "gguf" and result.difference is None else _HOLDS[result.form]
    lines = [f"{what}: {result.folder}{compared}"]
    if result.url:
        lines.append(f"hub: {result.url}")
    lines += [f"note: {note}" for note in result.notes]
    if result.command:
        lines.append(f"{'train' if result.form == 'config' else 'serve'} with: {result.command}")
    if result.form == "merged" and result.request:
        serve = shlex.join(["transformers", "serve", result.folder, "--port", "8000"])
        lines.append(f"or, without vLLM and without a GPU: {serve} (pip install 'transformers[serving]')")
    if result.request:
        lines.append(f"then ask it: {result.request}")
    for line in lines:
        output_console().print(Text(line), soft_wrap=True)
