"""Commands that serve exported models."""

from __future__ import annotations

import shlex
from pathlib import Path

from alto.exporting.winner import Winner
from alto.lora import vllm_obstacle, vllm_rank
from alto.spec.chat_template import TEMPLATE_NAME, TOOLS_TEMPLATE, chat_template_text

__all__ = ["adapter_command", "gguf_command", "model_command"]


def adapter_command(winner: Winner, folder: Path, *, is_stacked: bool) -> tuple[str, tuple[str, ...]]:
    """Return the command that serves an adapter on its base model with vLLM.

    Args:
        folder: The export folder.
        is_stacked: Whether the adapter has stacked experts that vLLM can read only as separate matrices.

    Returns:
        The command, and notices as sentences. If vLLM cannot serve the adapter, the command is empty and a notice has
        the reason.
    """
    obstacle = vllm_obstacle(winner.adapter)
    if obstacle is not None:
        expected, found = obstacle
        return "", (
            f"vLLM cannot serve the adapter: expected {expected}, found {found}; --merged writes a model that vLLM "
            "serves.",
        )
    if is_stacked:
        return "", (
            "vLLM cannot serve the adapter in this form: for this base model, it reads every expert separately; "
            "--per-expert writes the adapter in that form.",
        )
    notes = []
    if winner.base.quantisation != "none":
        notes.append(
            f"The adapter was trained on the base model in {winner.base.quantisation.removesuffix('bit')} bits; the "
            "command serves it on the base model as stored on disk."
        )
    options = ["--enable-lora", "--max-lora-rank", str(vllm_rank(winner.adapter.rank))]
    if winner.base.chat_template is not None:
        options += ["--chat-template", str(folder / TEMPLATE_NAME)]
    options += [*_calls(winner), *_trust(winner)]
    command = ["vllm", "serve", winner.base_model, *options, "--lora-modules", f"{winner.name}={folder}"]
    return shlex.join(command), tuple(notes)


def model_command(winner: Winner, folder: Path) -> str:
    """Return the command that serves the merged model in ``folder`` with vLLM."""
    return shlex.join(["vllm", "serve", str(folder), *_calls(winner), *_trust(winner)])


def gguf_command(file: Path) -> str:
    """Return the command that serves a GGUF file with llama.cpp."""
    return shlex.join(["llama-server", "--jinja", "-m", str(file)])


def _calls(winner: Winner) -> list[str]:
    """Return vLLM's options for tool calls if the chat template is ALTO's own; other templates may use any form."""
    if winner.base.chat_template != chat_template_text(TOOLS_TEMPLATE):
        return []
    return ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def _trust(winner: Winner) -> list[str]:
    return ["--trust-remote-code"] if winner.base.trust_remote_code else []
