"""Write ``docs/chat-templates.md``: the tokens that ALTO and TRL train under well-known chat templates.

    python -m tools.make_template_docs

Templates are read from the installed ``trl``; the tokenizer is alto-tiny's with each template's special tokens added.
The script fails if a difference has no reason in :data:`REASONS`. The last section shows the result file of ``python -m
tools.templates``.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import trl
from transformers import AddedToken, AutoTokenizer
from trl.chat_template_utils import get_training_chat_template
from trl.data_utils import _tokenize, common_prefix_length

from alto.backbone import resolve_model
from alto.data.convert import to_conversation
from alto.data.encode import EncodedRow, Encoder
from alto.data.formats import find_layout
from alto.data.rows import RawRow
from alto.errors import DataError
from benchmarks.common import provenance

ROOT = Path(__file__).resolve().parent.parent

RESULT = ROOT / "tools" / "results" / "templates-cpu.json"
PAGE = ROOT / "docs" / "chat-templates.md"

TEMPLATES: dict[str, tuple[str, str, str]] = {
    "Qwen2.5": ("qwen2_5", "<|endoftext|>", "<|im_end|>"),
    "Qwen3": ("qwen3", "<|endoftext|>", "<|im_end|>"),
    "Llama 3": ("llama3", "<|begin_of_text|>", "<|eot_id|>"),
    "Gemma 3": ("gemma3", "<bos>", "<end_of_turn>"),
    "GLM-4.5": ("glm4moe", "[gMASK]", "<|endoftext|>"),
    "DeepSeek-V3": ("deepseekv3", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "R1-Distill": ("deepseek_r1_distill", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gpt-oss": ("gptoss", "<|startoftext|>", "<|return|>"),
    "Phi-3": ("phi3", "<s>", "<|endoftext|>"),
    "Cohere2": ("cohere2", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
}
"""For each model: the template's file in ``trl``, and its BOS and EOS tokens."""

_SPECIAL = re.compile(r"<[|｜][^<>\s'\"]+?[|｜]>|</?think>|</?tool_call>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _reply(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def _call(*cities: str) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": city}}} for city in cities]
    return {"role": "assistant", "tool_calls": calls}


def _result(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "content": text}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]

CASES: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [_user("What is two and two?"), _reply("It is four.")]},
    "one word": {"messages": [_user("Is it so?"), _reply("Yes")]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, _user("Two and two?"), _reply("Four.")]},
    "two turns": {"messages": [_user("One?"), _reply("First."), _user("Two?"), _reply("Second.")]},
    "call": {"messages": [_user("Rain in Oslo?"), _call("Oslo")], "tools": TOOLS},
    "call, result, reply": {
        "messages": [_user("Rain in Oslo?"), _call("Oslo"), _result("rain"), _reply("It rains.")],
        "tools": TOOLS,
    },
    "two calls": {
        "messages": [_user("Rain?"), _call("Oslo", "Rome"), _result("rain"), _result("sun"), _reply("In Oslo.")],
        "tools": TOOLS,
    },
    "reasoning": {"messages": [_user("Two and two?"), _reply("Four.", reasoning_content="Add them.")]},
    "reasoning twice": {
        "messages": [
            _user("One?"),
            _reply("First.", reasoning_content="Easy."),
            _user("Two?"),
            _reply("Second.", reasoning_content="As easy."),
        ]
    },
    "thoughts in the text": {"messages": [_user("Two and two?"), _reply("<think>\nAdd.\n</think>\n\nFour.")]},
}

REASONS = {
    "=": "The tokens and the trained tokens are the same.",
    "E": "The template does not end the row with the tokenizer's EOS token, at which inference engines stop. ALTO adds "
    "it.",
    "N": "GLM's template writes no end of a turn. The first token of the next turn ends it, and is trained. TRL's "
    "template writes such a token after the last turn too; ALTO ends the row with the EOS token.",
    "O": "TRL's marks include the opening of a reply. The model gets the opening as input and never writes it, so ALTO "
    "trains only the reply.",
    "R": "The template changes an earlier reply when another turn follows: it removes thoughts, or ends the reply with "
    "another token. ALTO trains one row for every reply, as the model writes it; TRL trains one row in all.",
    "T": "TRL uses a training template that writes another text than the model's own. ALTO keeps the model's own "
    "template, and reports how many replies it shortens.",
    "F": "The template fails on messages in the form in which TRL passes them. ALTO passes them in a form that the "
    "template accepts (arguments as JSON text, an empty content).",
    "C": "The template does not show calls. ALTO refuses a reply that consists of calls, because only its end would "
    "be trained. TRL trains this end, or fails too.",
    "B": "The template refuses the turns, so both fail.",
}
"""Meaning of each letter in the tables."""


@dataclass(frozen=True, kw_only=True)
class Masked:
    """A row: token ids, and whether each is trained."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the warnings of transformers about rows and templates inside the context."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def make_tokenizer(model: str) -> Any:
    """Return alto-tiny's tokenizer with the template and the special tokens of ``model``."""
    file, bos, eos = TEMPLATES[model]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("alto-tiny"))
    template = resources.files("trl").joinpath("chat_templates", f"{file}.jinja").read_text(encoding="utf-8")
    special = sorted({*_SPECIAL.findall(template), bos, eos, "<|user|>", "<|observation|>"})
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.bos_token, tokenizer.eos_token = bos, eos
    tokenizer.chat_template = template
    return tokenizer


def of_alto(case: dict[str, Any], tokenizer: Any) -> list[Masked] | str:
    """Return ALTO's rows, or why it refuses them."""
    row = RawRow("row 1", case)
    try:
        rows: list[EncodedRow] = Encoder(tokenizer).rows(to_conversation(row, find_layout([row], "auto", {})))
    except DataError as error:
        return str(error)
    return [Masked(ids=one.input_ids, mask=one.is_trained) for one in rows]


def of_trl(case: dict[str, Any], tokenizer: Any, template: str | None) -> Masked | str:
    """Return the row that ``SFTTrainer`` makes with ``assistant_only_loss`` under ``template``, or why it fails."""
    try:
        found = _tokenize(
            tokenizer,
            case["messages"],
            return_assistant_tokens_mask=True,
            chat_template=template,
            tools=case.get("tools"),
        )
    except Exception as error:  # templates raise anything
        return f"{type(error).__name__}: {error}"
    return Masked(ids=tuple(found["input_ids"]), mask=tuple(map(bool, found["assistant_masks"])))


def of_trl_completion(case: dict[str, Any], tokenizer: Any) -> Masked | str:
    """Return the row that ``SFTTrainer`` makes of a prompt and a completion under the model's own template, or why it
    fails."""
    prompt, completion = case["prompt"], case["completion"]
    try:
        before = _tokenize(tokenizer, prompt, add_generation_prompt=True, tools=case.get("tools"))["input_ids"]
        ids = _tokenize(tokenizer, prompt + completion, tools=case.get("tools"))["input_ids"]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    start = common_prefix_length(before, ids)
    return Masked(ids=tuple(ids), mask=(False,) * start + (True,) * (len(ids) - start))


def trained_text(row: Masked, tokenizer: Any) -> str:
    """Return the text of the trained tokens, with ``…`` for every run of other tokens."""
    text, was_trained = "", True
    for token, on in zip(row.ids, row.mask, strict=True):
        text += tokenizer.decode([token]) if on else "…" if was_trained else ""
        was_trained = on
    return text


def compared(ours: list[Masked] | str, theirs: Masked | str, eos: int) -> str:
    """Return the letters of :data:`REASONS` that explain the difference.

    Raises:
        ValueError: No reason explains the difference.
    """
    if isinstance(ours, str):
        return "C" if "shows tool calls" in ours else "B" if isinstance(theirs, str) else _unexplained(ours, theirs)
    if isinstance(theirs, str):
        return "F"
    if len(ours) > 1:
        return "R"
    (row,) = ours
    if row == theirs:
        return "="
    letters = ""
    if row.ids == (*theirs.ids, eos):
        row, letters = Masked(ids=row.ids[:-1], mask=row.mask[:-1]), "E"
    elif row.ids[:-1] == theirs.ids[:-1] and row.ids[-1] == eos != theirs.ids[-1] and row.mask[-1] and theirs.mask[-1]:
        row, letters = Masked(ids=theirs.ids, mask=row.mask), "N"
    elif row.ids != theirs.ids:
        return "T"
    if row.mask != theirs.mask:
        letters += "O" if _is_opening(row.mask, theirs.mask) else _unexplained(row, theirs)
    return letters


def _is_opening(ours: Sequence[bool], theirs: Sequence[bool]) -> bool:
    """Return whether all tokens that only TRL trains are directly before a run of tokens that both train."""
    also = [theirs_on and not ours_on for ours_on, theirs_on in zip(ours, theirs, strict=True)]
    is_covered = all(theirs_on for ours_on, theirs_on in zip(ours, theirs, strict=True) if ours_on)
    follows = zip(also, [*also[1:], False], [*ours[1:], False], strict=True)
    behind = [ours_next for on, goes_on, ours_next in follows if on and not goes_on]
    return is_covered and all(behind)


def _unexplained(ours: object, theirs: object) -> str:
    raise ValueError(f"a difference without a reason: {ours} and {theirs}")


def page() -> str:
    """Return the whole page."""
    with _quietly():
        own, marked, completions = [], [], []
        examples: dict[tuple[str, str], str] = {}
        for model in TEMPLATES:
            tokenizer = make_tokenizer(model)
            eos, template = tokenizer.eos_token_id, get_training_chat_template(tokenizer)
            cells: list[list[str]] = [[], [], []]
            for name, case in CASES.items():
                ours, theirs = of_alto(case, tokenizer), of_trl(case, tokenizer, template)
                letters = compared(ours, theirs, eos)
                cells[0].append(letters)
                if letters not in ("=", "B"):
                    examples.setdefault((model, letters), _example(name, ours, theirs, tokenizer))
                split = {**case, "prompt": case["messages"][:-1], "completion": case["messages"][-1:]}
                del split["messages"]
                cells[2].append(compared(of_alto(split, tokenizer), of_trl_completion(split, tokenizer), eos))
            with_marks = make_tokenizer(model)
            with_marks.chat_template = template
            for case in CASES.values():
                cells[1].append(compared(of_alto(case, with_marks), of_trl(case, with_marks, None), eos))
            for rows, of_model in zip((own, marked, completions), cells, strict=True):
                rows.append([model, *of_model])
    reasons = "\n".join(f"- `{letter}` {reason}" for letter, reason in REASONS.items())
    shown = "\n".join(f"- {model}, `{letters}`, {text}" for (model, letters), text in examples.items())
    return PAGE_TEXT.format(
        version=trl.__version__,
        own=_table(own),
        marked=_table(marked),
        completions=_table(completions),
        reasons=reasons,
        examples=shown,
        styles=_of_result(),
    )


def _of_result() -> str:
    """Return the counts of the check of templates in several styles, with their origin."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    counts = [f"| {name.replace('_', ' ')} | {count} |" for name, count in result["figures"].items()]
    return "\n".join(["| comparisons | |", "|---|---|", *counts, "", *provenance(result)])


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| template | {' | '.join(CASES)} |", "|---|" + "---|" * len(CASES)]
    lines += ["| " + " | ".join((row[0], *(f"`{cell}`" for cell in row[1:]))) + " |" for row in rows]
    return "\n".join(lines)


def _example(name: str, ours: list[Masked] | str, theirs: Masked | str, tokenizer: Any) -> str:
    alto = "refused" if isinstance(ours, str) else " and ".join(_code(trained_text(row, tokenizer)) for row in ours)
    other = "fails" if isinstance(theirs, str) else _code(trained_text(theirs, tokenizer))
    return f"{name}: ALTO {alto}; TRL {other}"


def _code(text: str) -> str:
    return "`` " + text.replace("\n", "⏎") + " ``"


PAGE_TEXT = """# Which tokens are trained under each chat template

Generated by `tools/make_template_docs.py` with TRL {version}; do not edit. ALTO's masks are
compared with the masks that TRL's own code makes. The templates come from the `trl` package. The tokenizer comes from
alto-tiny, with the special tokens of each template added.

ALTO trains every turn of the assistant, with its tool calls and its end. The model sees all other turns, such
as tool results, but they are not trained. If a template marks the assistant's text with `{{% generation %}}`,
the marked text is trained. Otherwise ALTO writes the turns so far twice with the template: once with the
opening of a reply, and once with the reply itself. The reply begins at the first token that differs. So if one
token contains the last blank of the opening and the first letters of the reply, it is trained. If a template writes
no end of a turn, the first token of the next turn is the end.

## The letters

{reasons}

## The model's own template

Rows of messages, compared with TRL with `assistant_only_loss=True`, which uses a training template of its own
instead of the model's.

{own}

## Templates with generation marks

The tokenizer has TRL's training template here, and both libraries follow its marks.

{marked}

## A prompt and a completion

The same rows with the last turn as the completion and all other turns as the prompt, compared with TRL's
`completion_only_loss`; both use the model's own template.

{completions}

## Examples of differences

Only the trained tokens of a row are shown: … replaces all others, and ⏎ is a line break.

{examples}

## Seven styles of templates, every `train_on`

`python -m tools.templates --scale cpu` compares token ids and trained tokens with the results of TRL's own
preprocessing. The rows are twelve kinds of conversations, five raw prompts with completions, and two texts.
Each is written by seven chat templates (alto-tiny's own, and six in the style of ChatML, Llama 3, Qwen 2.5,
Qwen 3, Mistral and Gemma) and trained with every `train_on`. `tools/results/templates-cpu.json` has a row for
every difference, with its reason and both texts, in which the trained part is in brackets. A difference without
a known reason fails the gate.

{styles}
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
