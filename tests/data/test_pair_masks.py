"""Token ids and trained tokens of preference pairs and labelled replies against TRL's ``DPOTrainer`` and
``KTOTrainer``, whose preprocessing is the oracle."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

from budgets import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from merging import BLANK, MARKED, merging_tokenizer
from trl_rows import trl_labelled_row, trl_pair

from tools.templates.chat_templates import STYLES, make_tokenizer  # isort: skip

from alto.data import EncodedDataset, Encoding, tokenize
from alto.data.convert import to_labelled, to_pair
from alto.data.formats import find_layout
from alto.data.rows import RawRow
from alto.errors import DataFormatError

Tokens = tuple[list[int], list[bool]]
TOKENIZER = make_tokenizer("alto-tiny", is_marked=False)


def turn(role: str, text: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}]


ASKED = turn("user", "  2 plus 2?\n")
GOOD, BAD = turn("assistant", "It is 4."), turn("assistant", "5\n")
EARLIER = [*turn("user", "One?"), *turn("assistant", "First."), *turn("user", "Two?")]

PAIRS = {
    "explicit prompt": {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    "implicit prompt": {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},
    "explicit, several turns": {"prompt": EARLIER, "chosen": GOOD, "rejected": BAD},
    "implicit, several turns": {"chosen": EARLIER + GOOD, "rejected": EARLIER + BAD},
    "replies that begin alike": {
        "prompt": ASKED,
        "chosen": turn("assistant", "It is 4."),
        "rejected": turn("assistant", "It is 4, or 5."),
    },
    "unicode": {"prompt": turn("user", "世界?"), "chosen": turn("assistant", "¡Hola, 🌍!"), "rejected": BAD},
}


def rows_of(dataset: EncodedDataset) -> list[Tokens]:
    """Return the ids of every sequence, and whether each token is trained; a target is at the position before its
    token."""
    found = []
    for ids, targets, spans in zip(dataset.input_ids, dataset.targets, dataset.spans, strict=True):
        start = 0
        for span in spans:
            assert span.prefix == 0
            part = slice(start, start + span.length)
            trained = [False, *(target != -100 for target in targets[part].tolist())][:-1]
            found.append((ids[part].tolist(), trained))
            start = part.stop
    return found


def pair_of_alto(row: dict[str, Any], tokenizer: Any, form: str = "auto") -> list[Tokens]:
    raw = RawRow("rows.jsonl:1", row)
    pair = to_pair(raw, find_layout([raw], form, {}, is_paired=True))
    return rows_of(tokenize([pair], Encoding(tokenizer=tokenizer, max_length=1000, shares_prompts=False), "training"))


def ended(row: Tokens, tokenizer: Any) -> Tokens:
    """Append EOS to TRL's ``row``, as ALTO does to every row; Gemma's template does not write it."""
    ids, mask = row
    eos = tokenizer.eos_token_id
    return (ids, mask) if eos in ids[-2:] else ([*ids, eos], [*mask, True])


def first_untrained(row: Tokens) -> Tokens:
    """Mark the first token of TRL's ``row`` as untrained: nothing predicts it, and TRL's loss leaves it out as well."""
    ids, mask = row
    return ids, [False, *mask[1:]]


def texts_between_marks(row: Tokens, tokenizer: Any) -> str:
    return tokenizer.decode([token for token, on in zip(*row, strict=True) if on])


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_have_the_tokens_and_masks_of_trl(name: str, style: str, is_marked: bool) -> None:
    tokenizer, row = make_tokenizer(style, is_marked=is_marked), PAIRS[name]
    expected = [ended(side, tokenizer) for side in trl_pair(row, tokenizer)]
    found = pair_of_alto(row, tokenizer)
    assert found == expected
    # The comparison would notice a trained prompt, or swapped replies.
    assert found != found[::-1]
    assert not any(mask[0] for _, mask in found)


def test_calls_and_tools_in_pairs_are_those_of_trl() -> None:
    tokenizer = make_tokenizer("qwen-2.5", is_marked=False)
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    row = {
        "prompt": ASKED,
        "chosen": [{"role": "assistant", "content": "", "tool_calls": calls}],
        "rejected": [{"role": "assistant", "content": "No.", "tool_calls": None}],
        "tools": [{"type": "function", "function": function}],
    }
    found = pair_of_alto(row, tokenizer)
    assert found == list(trl_pair(row, tokenizer))
    assert '"city": "Oslo"' in texts_between_marks(found[0], tokenizer)


words = st.text("ab \nYes.ü", min_size=1, max_size=8) | st.sampled_from(["Yes", "Yes.", "Yesterday", " Yes", "No"])


@settings(max_examples=examples(60), deadline=None)
@given(question=words, chosen=words, rejected=words)
def test_replies_that_merge_with_the_opening_begin_at_one_token(question: str, chosen: str, rejected: str) -> None:
    if not chosen.strip() or not rejected.strip() or chosen == rejected:
        return
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = BLANK
    row = {
        "prompt": turn("user", question),
        "chosen": turn("assistant", chosen),
        "rejected": turn("assistant", rejected),
    }
    assert pair_of_alto(row, tokenizer) == list(trl_pair(row, tokenizer))


def test_the_blank_that_merges_with_one_reply_is_trained_in_the_other() -> None:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = BLANK
    row = {"prompt": ASKED, "chosen": turn("assistant", "Yes"), "rejected": turn("assistant", "No")}
    found = pair_of_alto(row, tokenizer)
    assert [texts_between_marks(side, tokenizer) for side in found] == [" Yes<|end|>", " No<|end|>"]
    assert found == list(trl_pair(row, tokenizer))


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_labelled_replies_have_the_tokens_and_masks_of_trl(style: str, is_marked: bool) -> None:
    tokenizer = make_tokenizer(style, is_marked=is_marked)
    row = {"prompt": EARLIER, "completion": GOOD, "label": True}
    raw = RawRow("rows.jsonl:1", row)
    labelled = to_labelled(raw, find_layout([raw], "auto", {}, is_labelled=True))
    [found] = rows_of(tokenize([labelled], Encoding(tokenizer=tokenizer, max_length=1000), "training"))
    assert found == ended(trl_labelled_row(row, tokenizer), tokenizer)


def test_marks_around_a_part_of_a_reply_do_not_hold_in_pairs() -> None:
    tokenizer = make_tokenizer("alto-tiny", is_marked=False)
    tokenizer.chat_template = MARKED.replace("({{ m.mood }})", "")
    row = PAIRS["explicit prompt"]
    found = pair_of_alto(row, tokenizer)
    assert found == [ended(side, tokenizer) for side in trl_pair(row, tokenizer)]
    assert "noted" in texts_between_marks(found[0], tokenizer)


RAW_PAIRS = {
    "explicit prompt": {"prompt": "2 plus 2 is", "chosen": " 4.", "rejected": " 5."},
    "a blank at the end of the prompt": {"prompt": "Yes or no? ", "chosen": "Yes", "rejected": "No"},
    "in a word": {"prompt": "straw", "chosen": "berries", "rejected": "s"},
    "implicit prompt": {
        "chosen": "\n\nHuman: 2 plus 2?\n\nAssistant: 4",
        "rejected": "\n\nHuman: 2 plus 2?\n\nAssistant: 5",
    },
    "implicit, unlike only behind a blank": {"chosen": "I say yes", "rejected": "I say no"},
    "implicit, one begins with the other": {"chosen": "I say yes", "rejected": "I say yes, or no"},
    "implicit, nothing in common": {"chosen": "yes", "rejected": "no"},
    "ended by their text": {"prompt": "2?", "chosen": "4<|end|>", "rejected": "5"},
}


@pytest.mark.parametrize("has_template", [True, False])
@pytest.mark.parametrize("name", RAW_PAIRS)
def test_raw_pairs_are_joined_as_in_trl(name: str, has_template: bool) -> None:
    tokenizer, row = make_tokenizer("alto-tiny", is_marked=False), RAW_PAIRS[name]
    if not has_template:
        tokenizer.chat_template = None
    assert pair_of_alto(row, tokenizer, "raw_preference") == [
        first_untrained(side) for side in trl_pair(row, tokenizer)
    ]


@settings(max_examples=examples(15), deadline=None)
@given(prompt=words, chosen=words, rejected=words, is_explicit=st.booleans())
def test_any_raw_pair_is_as_in_trl(prompt: str, chosen: str, rejected: str, is_explicit: bool) -> None:
    tokenizer = merging_tokenizer()
    replies = {"chosen": chosen + "c", "rejected": rejected + "r"}
    row = {"prompt": prompt, **replies} if is_explicit else {side: prompt + text for side, text in replies.items()}
    assert pair_of_alto(row, tokenizer, "raw_preference") == [
        first_untrained(side) for side in trl_pair(row, tokenizer)
    ]


def test_raw_pairs_hold_texts_only() -> None:
    with pytest.raises(DataFormatError, match="expected chosen to be a text"):
        pair_of_alto(PAIRS["explicit prompt"] | {"prompt": "x"}, TOKENIZER, "raw_preference")


def test_texts_without_a_prompt_are_refused_with_a_hint_at_the_raw_form() -> None:
    with pytest.raises(DataFormatError, match="texts that begin with the prompt, join them unchanged with dataset_f"):
        pair_of_alto(RAW_PAIRS["implicit prompt"], TOKENIZER)
