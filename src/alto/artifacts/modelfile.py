"""Ollama's Modelfile beside a GGUF file: the files it uses, the prompt's template, the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from transformers import GenerationConfig

from alto.artifacts.card import ModelUse
from alto.artifacts.winner import Winner
from alto.backbone import end_tokens

MODELFILE_NAME = "Modelfile"

_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "repetition_penalty": "repeat_penalty"}
"""Ollama's parameters by the names of transformers."""

_TEXTS = "Alto-system", "Alto-user", "Alto-assistant", "Alto-again"
"""Contents of messages that no template changes, by which the parts of a prompt are found."""

_QUOTES = '"""'

Messages = Sequence[Mapping[str, str]]


def modelfile(winner: Winner, tokenizer: Any, use: ModelUse, files: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the text of a Modelfile, and notices as sentences.

    Args:
        files: Its first lines, which name files, such as ``FROM ./model.gguf``.
    """
    lines, notes = list(files), tuple[str, ...]()
    template = "{{ .Prompt }}"
    if use.is_chat:
        prompt = ChatPrompt.of(tokenizer)
        template = "" if prompt is None else prompt.to_go()
        if prompt is not None and not prompt.keeps_spaces:
            notes = (
                "The chat template removes spaces and line breaks around the messages, which Ollama cannot; send "
                "messages without them.",
            )
    if template:
        lines.append(f"TEMPLATE {_QUOTES}{template}{_QUOTES}")
    else:
        notes = (
            f"The {MODELFILE_NAME} has no TEMPLATE, because Ollama cannot express the chat template; Ollama chooses "
            "one that it knows, or sends prompts without one.",
        )
    lines += [f"PARAMETER {key} {value}" for key, value in _parameters(winner, tokenizer)]
    return "\n".join([*lines, ""]), notes


def _parameters(winner: Winner, tokenizer: Any) -> list[tuple[str, str]]:
    """Return Ollama's parameters: the tokens that end an answer, and the sampling settings of the base model."""
    try:
        settings = GenerationConfig.from_pretrained(winner.base_model)
    except OSError:  # a base model without such settings
        settings = GenerationConfig()
    ends = sorted(end_tokens(settings, tokenizer))
    found = [("stop", f'"{tokenizer.convert_ids_to_tokens(index)}"') for index in ends]
    if not settings.do_sample:
        return [*found, ("temperature", "0")]
    values = {name: getattr(settings, key, None) for key, name in _SAMPLING.items()}
    return [*found, *((name, f"{value:g}") for name, value in values.items() if value is not None)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A chat template that puts a fixed text before and after every message.

    Attributes:
        before, after: Texts around the content of a message, by role.
        opening: Text before a first message that is not a system message, such as a default system prompt.
        reply: Text after the last message, before the answer.
        keeps_spaces: Whether the template keeps spaces at the ends of a message. Ollama's language always does.
    """

    before: Mapping[str, str]
    after: Mapping[str, str]
    opening: str
    reply: str
    keeps_spaces: bool = True

    @classmethod
    def of(cls, tokenizer: Any) -> Self | None:
        """Return the template of ``tokenizer``; None if it has another form."""

        def rendered(messages: Messages, *, asks: bool = False) -> str:
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
            return text.removeprefix(tokenizer.bos_token) if adds_bos else text

        marked = tokenizer("a")["input_ids"]
        adds_bos = tokenizer.bos_token_id is not None and marked[:1] == [tokenizer.bos_token_id]
        system, user, assistant, again = _TEXTS
        one = [{"role": "user", "content": user}]
        more = [*one, {"role": "assistant", "content": assistant}, {"role": "user", "content": again}]
        led = [{"role": "system", "content": system}, *one]
        try:
            alone, asked = rendered(one), rendered(one, asks=True)
            begin, end = alone.split(user)
            _, user_to_assistant, rest = _split(rendered(more), user, assistant)
            assistant_to_user, _ = rest.split(again)
            begin_system, system_to_user, _ = _split(rendered(led), system, user)
        except Exception:  # a text is missing or repeated, or the template refuses a message with an error of its own
            return None
        # A text that ends every message belongs to the message before it.
        before_user = _common_suffix(begin, assistant_to_user, system_to_user).removeprefix(end)
        found = cls(
            before={
                "system": begin_system,
                "user": before_user,
                "assistant": user_to_assistant.removeprefix(end),
            },
            after={
                "system": system_to_user.removesuffix(before_user),
                "user": end,
                "assistant": assistant_to_user.removesuffix(before_user),
            },
            opening=begin.removesuffix(before_user),
            reply=asked.removeprefix(alone),
        )
        texts = [*found.before.values(), *found.after.values(), found.opening, found.reply]
        if any("{{" in text or _QUOTES in text for text in texts):
            return None
        cases = (one, more, led, [led[0], *more])
        if any(found.render(case) != rendered(case, asks=True) for case in cases):
            return None
        spaced = [{**turn, "content": f"\n {turn['content']} \n"} for turn in cases[-1]]
        return replace(found, keeps_spaces=found.render(spaced) == rendered(spaced, asks=True))

    def render(self, messages: Messages) -> str:
        """Return the prompt that Ollama makes of ``messages``."""
        opening = "" if messages[0]["role"] == "system" else self.opening
        turns = (self.before[turn["role"]] + turn["content"] + self.after[turn["role"]] for turn in messages)
        return f"{opening}{''.join(turns)}{self.reply}"

    def to_go(self) -> str:
        """Return the template in the language of Go's text/template, with the variables of Ollama."""
        cases = "".join(
            f'{{{{ {"if" if number == 0 else "else if"} eq $turn.Role "{role}" }}}}{self.before[role]}'
            f"{{{{ $turn.Content }}}}{self.after[role]}"
            for number, role in enumerate(self.before)
        )
        opening = (
            f'{{{{ if ne (index .Messages 0).Role "system" }}}}{self.opening}{{{{ end }}}}' if self.opening else ""
        )
        return f"{opening}{{{{ range $number, $turn := .Messages }}}}{cases}{{{{ end }}}}{{{{ end }}}}{self.reply}"


def _split(text: str, first: str, second: str) -> tuple[str, str, str]:
    before, rest = text.split(first)
    between, after = rest.split(second)
    return before, between, after


def _common_suffix(*texts: str) -> str:
    shortest = min(texts, key=len)
    for start in range(len(shortest) + 1):
        if all(text.endswith(shortest[start:]) for text in texts):
            return shortest[start:]
    return ""
