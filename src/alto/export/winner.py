"""The winner's configuration and the commands to use it, for users to copy from the report."""

from __future__ import annotations

import shlex
from pathlib import Path

from alto.runs import JobHistory, RunHistory
from alto.spec.strict_yaml import write_yaml

__all__ = ["winner_commands", "winner_yaml"]

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
        history: A finished run.
        winner: The best job of the run.
        run_dir: Folder of the run.
        has_labels: Whether the adapter has a classification head, so that it cannot generate text.
    """
    run = shlex.quote(str(run_dir))
    alone = (
        "Train its configuration alone, after you put the keys below and your rows into a task file",
        "alto tune winner.yaml",
    )
    if has_labels:
        return [alone]
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
