"""The chat template of a task that replaces the tokenizer's own."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from alto.spec.quoting import quoted

__all__ = ["TEMPLATE_NAME", "TOOLS_TEMPLATE", "chat_template_text", "is_template_name", "is_template_text"]

TEMPLATE_NAME = "chat_template.jinja"
"""Name of its file in the folder of an exported adapter; transformers uses the same name beside a tokenizer."""

TOOLS_TEMPLATE = "chatml-tools"
"""Name of ALTO's own template: ChatML turns, with tools and tool calls in the format of Hermes and Qwen 2.5."""

_MAX_BYTES = 2**20


def is_template_text(value: str) -> bool:
    """Return whether ``value`` is the text of a template and not a path: it contains a Jinja tag."""
    return "{{" in value or "{%" in value


def is_template_name(value: str) -> bool:
    """Return whether ``value`` names a template that is shipped with ALTO."""
    return value == TOOLS_TEMPLATE


def chat_template_text(value: str) -> str:
    """Return the text of the template that ``value`` is, or that it names: a shipped template or a file.

    Raises:
        ValueError: The file does not exist, cannot be read, or holds no template.
    """
    if is_template_text(value):
        return value
    if is_template_name(value):
        file = resources.files("alto").joinpath("assets", "chat-templates", f"{value}.jinja")
        return file.read_text(encoding="utf-8")
    path = Path(value).expanduser()
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(
                f"should be a file of at most {_MAX_BYTES} bytes, found {quoted(value)}. Name a smaller file."
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"should be a Jinja text with {{{{ … }}}} or {{% … %}}, a file with such a text, or {TOOLS_TEMPLATE}, "
            f"found {quoted(value)}: {reason}. Correct the path, or write the template itself."
        ) from None
    if not is_template_text(text):
        raise ValueError(
            "should be a file with a Jinja text that contains {{ … }} or {% … %}, found neither in "
            f"{quoted(value)}. Name a different file."
        )
    return text
