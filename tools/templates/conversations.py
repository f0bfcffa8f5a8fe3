"""Conversations of several kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MESSAGES", "RAW", "TEXTS"]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _reply(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


_SYSTEM = {"role": "system", "content": "Answer in one sentence."}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_CALL = _reply("", tool_calls=[{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}])
_RESULT = {"role": "tool", "content": "4 degrees, rain"}

MESSAGES: Mapping[str, dict[str, Any]] = {
    "plain": {"messages": [_user("What is 2 plus 2?"), _reply("It is 4.")]},
    "one word": {"messages": [_user("Yes or no?"), _reply("Yes")]},
    "blanks": {"messages": [_user("  Blanks around?  "), _reply("  Yes, and a line break.\n")]},
    "unicode": {"messages": [_user("Grüße an 世界"), _reply("¡Hola, 🌍!")]},
    "system": {"messages": [_SYSTEM, _user("Where is Oslo?"), _reply("In Norway.")]},
    "several turns": {
        "messages": [
            _user("One?"),
            _reply("First."),
            _user("Two?"),
            _reply("Second."),
            _user("Three?"),
            _reply("Third."),
        ]
    },
    "system, several turns": {"messages": [_SYSTEM, _user("One?"), _reply("First."), _user("Two?"), _reply("Second.")]},
    "tools, unused": {"messages": [_user("Hello"), _reply("Hello!")], "tools": _TOOLS},
    "call": {"messages": [_user("Weather in Oslo?"), _CALL], "tools": _TOOLS},
    "call, result, reply": {
        "messages": [_user("Weather in Oslo?"), _CALL, _RESULT, _reply("It rains.")],
        "tools": _TOOLS,
    },
    "reasoning": {"messages": [_user("2 plus 2?"), _reply("4.", reasoning_content="Two and two make four.")]},
    "reasoning twice": {
        "messages": [
            _user("2 plus 2?"),
            _reply("4.", reasoning_content="Easy."),
            _user("And 3 plus 3?"),
            _reply("6.", reasoning_content="As easy."),
        ]
    },
}

RAW: Mapping[str, dict[str, Any]] = {
    "raw, blank at the end": {"prompt": "2 plus 2 is ", "completion": "4."},
    "raw, blank at the beginning": {"prompt": "2 plus 2 is", "completion": " 4."},
    "raw, in a word": {"prompt": "straw", "completion": "berries"},
    "raw, line breaks": {"prompt": "Question:\n\n", "completion": "\nAnswer\n"},
    "raw, unicode": {"prompt": "世", "completion": "界 🌍"},
}

TEXTS: Mapping[str, dict[str, Any]] = {
    "text": {"text": "Once upon a time there was a model."},
    "text, line break": {"text": "A line.\nAnother line.\n"},
}
