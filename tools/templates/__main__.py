"""Compares with TRL which tokens are trained, for conversations of several kinds under several chat templates.

    python -m tools.templates --scale cpu

For every conversation, ALTO's token ids and trained tokens are compared with those of TRL's own preprocessing
(``SFTTrainer``, without a model): ``assistant_only_loss`` on a template with ``{% generation %}``,
``completion_only_loss`` on prompts and completions, and no mask at all.

``equal``: token ids and trained tokens are the same; or both refuse the conversation (also counted separately).
``different``: all others, each with its reason. ``unexplained``: there is no known reason, and the gate fails.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from alto.data.convert import to_conversation
from alto.data.encode import Encoder
from alto.data.formats import find_layout
from alto.data.rows import RawRow
from alto.errors import AltoError
from alto.spec import TrainOn
from benchmarks.common import Result, format_table, option_parser, publish
from tools import RESULTS_DIR
from tools.templates.chat_templates import STYLES, make_tokenizer
from tools.templates.conversations import MESSAGES, RAW, TEXTS
from tools.templates.trl_rows import trl_row

SMOKE_STYLES = ("alto-tiny", "chatml", "gemma")
SMOKE_KINDS = ("plain", "system", "several turns", "raw, in a word", "text")
GOALS = {"equal": (">=", 250), "unexplained": ("<=", 0)}

REASONS = {
    "eos": "ALTO ends every row with the EOS token, at which engines stop; the template writes another end.",
    "line break": "Without marks a reply lasts until the next turn, as in TRL's completion_only_loss: the line break "
    "after its end is trained. The marks end before it.",
    "unrolled": "The template writes earlier replies differently once another turn follows. ALTO trains a row for "
    "every reply, as the model writes it; TRL trains one row.",
    "call": "The template does not show calls of tools. ALTO refuses a reply of which only the end would be trained; "
    "TRL trains that end.",
    "form": "The template fails on messages as TRL passes them; ALTO passes the same in a form that it accepts.",
    "": "unexplained",
}

Found = list[tuple[list[int], list[bool]]]
"""Rows: token ids, and whether each is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison; ``reason`` explains the difference, and is empty if the two are equal."""

    template: str
    kind: str
    comparison: str
    verdict: str
    reason: str = ""
    alto: str = ""
    trl: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = option_parser(__doc__, ("smoke", "cpu"), out=RESULTS_DIR)
    options = parser.parse_args(arguments)
    is_smoke = options.scale == "smoke"
    rows = [row for name in STYLES if not is_smoke or name in SMOKE_STYLES for row in compare_all(name, is_smoke)]
    counts = Counter((row.template, row.verdict) for row in rows)
    verdicts = ("equal", "refused by both", "different")
    table = [(name, *(counts[name, verdict] for verdict in verdicts)) for name in STYLES]
    print(format_table(("template", *verdicts), [line for line in table if any(line[1:])]))
    return publish(summarise(rows, options.scale), options.out)


def summarise(rows: Sequence[Row], scale: str) -> Result:
    """Return the result: counts as figures, and every comparison that is not equal as a row."""
    count = Counter(row.verdict for row in rows)
    unexplained = [row for row in rows if row.verdict == "different" and not row.reason]
    figures = {
        "cases": len(rows),
        "equal": count["equal"] + count["refused by both"],
        "different": count["different"],
        "refused_by_both": count["refused by both"],
        "unexplained": len(unexplained),
    }
    goals = GOALS if scale == "cpu" else {"unexplained": ("<=", 0)}
    return Result.of(
        benchmark="templates",
        scale=scale,
        gate_failures=[f"{row.template}, {row.kind}, {row.comparison}: {row.alto} | {row.trl}" for row in unexplained],
        figures=figures,
        goals=goals,
        rows=[asdict(row) for row in rows if row.verdict != "equal"],
        notes=[f"{reason}: {REASONS[reason]}" for reason in sorted({row.reason for row in rows} - {""})],
    )


def compare_all(name: str, is_smoke: bool) -> Iterator[Row]:
    """Return every comparison under one template."""
    plain, marked = (make_tokenizer(name, is_marked=is_marked) for is_marked in (False, True))
    has_marks = "generation %}" in str(marked.chat_template)

    def wanted(cases: Mapping[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        return [(kind, row) for kind, row in cases.items() if not is_smoke or kind in SMOKE_KINDS]

    for kind, row in wanted(MESSAGES):
        split = _split(row)
        if has_marks:
            of_marks = _of_trl(row, marked, assistant_only=True)
            yield _compared(name, kind, "completion", _of_alto(row, plain), of_marks, plain)
            yield _compared(name, kind, "completion, marked", _of_alto(row, marked), of_marks, plain)
        elif sum(turn["role"] == "assistant" for turn in row["messages"]) == 1:
            yield _compared(name, kind, "completion", _of_alto(row, plain), _of_trl(split, plain), plain)
        yield _compared(name, kind, "last", _of_alto(row, plain, "last"), _of_trl(split, plain), plain)
        yield _compared(name, kind, "all", _of_alto(row, plain, "all"), _of_trl(row, plain), plain)
        yield _compared(name, kind, "prompt and completion", _of_alto(split, plain), _of_trl(split, plain), plain)
    for kind, row in wanted(RAW):
        raw = "raw_prompt_completion"
        yield _compared(name, kind, "completion", _of_alto(row, plain, form=raw), _of_trl(row, plain), plain)
        whole = _of_trl(row, plain, completion_only=False)
        yield _compared(name, kind, "all", _of_alto(row, plain, "all", form=raw), whole, plain)
    for kind, row in wanted(TEXTS):
        yield _compared(name, kind, "completion", _of_alto(row, plain), _of_trl(row, plain), plain)


def _split(row: dict[str, Any]) -> dict[str, Any]:
    """Return the messages before the last one as the prompt, and the last one as the completion."""
    rest = {key: value for key, value in row.items() if key != "messages"}
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:], **rest}


def _of_alto(row: dict[str, Any], tokenizer: Any, train_on: TrainOn = "completion", form: str = "auto") -> Found | str:
    raw = RawRow("row", row)
    try:
        found = Encoder(tokenizer, train_on).rows(to_conversation(raw, find_layout([raw], form, {})))
    except AltoError as error:
        return str(error)
    return [(list(one.input_ids), list(one.is_trained)) for one in found]


def _of_trl(row: dict[str, Any], tokenizer: Any, **settings: Any) -> Found | str:
    try:
        with _quietly():
            return [trl_row(row, tokenizer, **settings)]
    except Exception as error:  # a template may raise anything
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the warnings of transformers and TRL about rows and templates inside the context."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _compared(name: str, kind: str, comparison: str, ours: Found | str, theirs: Found | str, tokenizer: Any) -> Row:
    if isinstance(ours, str) and isinstance(theirs, str):
        verdict, reason = "refused by both", ""
    elif ours == theirs:
        verdict, reason = "equal", ""
    else:
        verdict, reason = "different", explain(ours, theirs, tokenizer)
    shown = ("", "") if verdict == "equal" else (_shown(ours, tokenizer), _shown(theirs, tokenizer))
    return Row(
        template=name,
        kind=kind,
        comparison=comparison,
        verdict=verdict,
        reason=reason,
        alto=shown[0],
        trl=shown[1],
    )


def explain(ours: Found | str, theirs: Found | str, tokenizer: Any) -> str:
    """Return the key of :data:`REASONS` that explains the difference to the last token; empty if there is none."""
    if isinstance(ours, str):
        return "call" if "shows tool calls" in ours else ""
    if isinstance(theirs, str):
        return "form"
    if len(ours) > 1:
        return "unrolled"
    ((ids, mask),), ((their_ids, their_mask),) = ours, theirs
    reasons = []
    if ids == [*their_ids, tokenizer.eos_token_id] and mask[-1]:
        ids, mask = ids[:-1], mask[:-1]
        reasons.append("eos")
    if ids != their_ids:
        return ""
    line_break = tokenizer("\n", add_special_tokens=False)["input_ids"]
    more = [place for place, (on, of_trl) in enumerate(zip(mask, their_mask, strict=True)) if on != of_trl]
    if more:
        if not all(mask[place] and [ids[place]] == line_break and mask[place - 1] for place in more):
            return ""
        reasons.append("line break")
    return reasons[-1] if reasons else ""


def _shown(found: Found | str, tokenizer: Any) -> str:
    """Return the text with trained tokens in brackets."""
    if isinstance(found, str):
        return found[:200]
    rows = []
    for ids, mask in found:
        runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
        texts = [(tokenizer.decode([token for token, _ in run]), on) for on, run in runs]
        rows.append("".join(f"⟦{text}⟧" if on else text for text, on in texts))
    return " ¦ ".join(rows)


if __name__ == "__main__":
    raise SystemExit(main())
