"""The commands that serve what was exported."""

from __future__ import annotations

import shlex
from pathlib import Path

from alto.exporting.winner import Winner
from alto.lora import vllm_obstacle, vllm_rank
from alto.spec.chat_template import TEMPLATE_NAME, TOOLS_TEMPLATE, chat_template_text

__all__ = ["adapter_command", "gguf_command", "model_command"]


def adapter_command(winner: Winner, folder: Path, *, is_stacked: bool) -> tuple[str, tuple[str, ...]]:
    """The command by which vLLM serves an adapter on its base; empty where it cannot, with the reason.

    Args:
        winner: The adapter.
        folder: Where it was exported to.
        is_stacked: Whether it has stacked experts that vLLM reads one by one only.

    Returns:
        The command, and notices as sentences.
    """
    obstacle = vllm_obstacle(winner.adapter)
    if obstacle is not None:
        expected, found = obstacle
        return "", (
            f"vLLM cannot serve it: expected {expected}, found {found}; --merged makes a model that it serves.",
        )
    if is_stacked:
        return "", (
            "vLLM cannot serve it in this form: it reads every expert by itself on this base model; --per-expert "
            "writes it so.",
        )
    notes = []
    if winner.base.quantisation != "none":
        notes.append(
            f"It was trained on the base model in {winner.base.quantisation.removesuffix('bit')} bits; the command "
            "serves it on the base model as it lies on disk."
        )
    options = ["--enable-lora", "--max-lora-rank", str(vllm_rank(winner.adapter.rank))]
    if winner.base.chat_template is not None:
        options += ["--chat-template", str(folder / TEMPLATE_NAME)]
    options += [*_calls(winner), *_trust(winner)]
    command = ["vllm", "serve", winner.base_model, *options, "--lora-modules", f"{winner.name}={folder}"]
    return shlex.join(command), tuple(notes)


def model_command(winner: Winner, folder: Path) -> str:
    """The command by which vLLM serves a merged model in ``folder``."""
    return shlex.join(["vllm", "serve", str(folder), *_calls(winner), *_trust(winner)])


def gguf_command(file: Path) -> str:
    """The command by which llama.cpp serves a GGUF file."""
    return shlex.join(["llama-server", "--jinja", "-m", str(file)])


def _calls(winner: Winner) -> list[str]:
    """Name the parser of calls where the template is ALTO's own; of any other their form is unknown."""
    if winner.base.chat_template != chat_template_text(TOOLS_TEMPLATE):
        return []
    return ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def _trust(winner: Winner) -> list[str]:
    return ["--trust-remote-code"] if winner.base.trust_remote_code else []
