"""Pairs as token ids: the prompt once, followed by each whole reply; and pairs that teach nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from budgets import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import load_tokenizer

from alto.data import Conversation, EncodedDataset, Encoding, JobRows, Message, Pair, Span, collate, digest_of, tokenize
from alto.data.encode import Encoder
from alto.errors import DataError

EOS = 1
IGNORED = -100


class Letters:
    """A tokenizer without a chat template: a letter's id is its code point; BOS comes first if requested."""

    chat_template = None
    eos_token_id: int | None = EOS

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [ord(letter) for letter in text]}


TOKENIZER = load_tokenizer()


def pair(prompt: str, chosen: str, rejected: str) -> Pair:
    return Pair(*(Conversation([Message("user", prompt), Message("assistant", reply)]) for reply in (chosen, rejected)))


def encode(*pairs: Pair, max_length: int = 100, tokenizer: Any = None, **how: Any) -> EncodedDataset:
    return tokenize(pairs, Encoding(tokenizer=tokenizer or Letters(), max_length=max_length, **how), "training")


def letters(text: str) -> list[int]:
    return [*map(ord, text)]


def whole(dataset: EncodedDataset, row: int = 0) -> list[tuple[list[int], list[int]]]:
    """Return ids and targets of both conversations of a row, each with its prompt."""
    ids, targets = dataset.input_ids[row].tolist(), dataset.targets[row].tolist()
    first, second = dataset.spans[row]
    assert first.prefix == 0
    assert first.length + second.length == len(ids)
    prompt = slice(0, second.prefix)
    return [
        (ids[: first.length], targets[: first.length]),
        (ids[prompt] + ids[first.length :], targets[prompt] + targets[first.length :]),
    ]


def test_a_prompt_is_stored_once_except_its_last_token_which_predicts_both_replies() -> None:
    dataset = encode(pair("q", "xy", "z"))
    assert dataset.input_ids[0].tolist() == [0, *letters("q\nxy"), EOS, *letters("\nz"), EOS]
    assert dataset.targets[0].tolist() == [
        *(IGNORED, IGNORED, ord("x"), ord("y"), EOS, IGNORED),
        *(ord("z"), EOS, IGNORED),
    ]
    assert dataset.spans == ((Span(6), Span(3, prefix=2)),)
    assert (dataset.num_tokens, dataset.num_trained_tokens, dataset.num_trained, dataset.weights) == (9, 5, (5,), (1,))
    assert dataset.sequence_lengths == (6, 5)


def test_laid_out_whole_nothing_is_shared() -> None:
    dataset = encode(pair("q", "xy", "z"), shares_prompts=False)
    assert dataset.spans == ((Span(6), Span(5)),)
    assert dataset.input_ids[0].tolist() == [0, *letters("q\nxy"), EOS, 0, *letters("q\nz"), EOS]


texts = st.text("ab ", min_size=1, max_size=6)


@settings(max_examples=examples(60))
@given(prompt=texts, replies=st.tuples(texts, texts), max_length=st.integers(3, 40), real=st.booleans())
def test_both_talks_are_those_of_a_conversation_cut_as_one(
    prompt: str, replies: tuple[str, str], max_length: int, real: bool
) -> None:
    tokenizer = TOKENIZER if real else Letters()
    one = pair(prompt, *replies)
    try:
        shared, apart = (
            encode(one, max_length=max_length, tokenizer=tokenizer, shares_prompts=share) for share in (True, False)
        )
    except DataError:
        return
    assert whole(shared) == whole(apart)
    for (ids, targets), conversation in zip(whole(shared), one.conversations, strict=True):
        [row] = Encoder(tokenizer).rows(conversation)
        assert ids == list(row.input_ids[:max_length])
        trained = [token if on else IGNORED for token, on in zip(row.input_ids, row.is_trained, strict=True)]
        assert targets == [*trained[1:max_length], IGNORED]


def test_replies_that_begin_alike_are_still_trained_apart() -> None:
    dataset = encode(pair("q", "same start, one end", "same start, other"), tokenizer=TOKENIZER)
    trained = [[token for token in targets if token != IGNORED] for _, targets in whole(dataset)]
    assert [TOKENIZER.decode(tokens) for tokens in trained] == [
        "same start, one end<|end|>",
        "same start, other<|end|>",
    ]


def test_a_pass_takes_positions_and_prefixes_from_the_pairs() -> None:
    dataset = encode(pair("q", "xy", "z"), pair("long", "a", "bcd"))
    references = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.float64)
    dataset = dataclasses.replace(dataset, references=references)
    batch = collate([JobRows(dataset, slot=3, rows=(1, 0))])
    assert batch.sequence_lengths == (8, 5, 6, 3)
    assert batch.sequence_prefixes == (0, 5, 0, 2)
    assert batch.position_ids_T.tolist() == [*range(8), *range(5, 10), *range(6), *range(2, 5)]
    assert (batch.sequence_targets, batch.job_targets) == ((2, 4, 3, 2), (11,))
    assert (batch.job_rows, batch.job_weights) == ((2,), (2,))
    assert batch.references_Q2 is not None
    assert batch.references_Q2.tolist() == [[-3.0, -4.0], [-1.0, -2.0]]


def test_pairs_that_teach_nothing_are_left_out_and_counted() -> None:
    shown = Message("assistant", "shown", is_context=True)
    dataset = encode(
        pair("q", "good", "bad"),
        pair("q", "same", "same"),
        pair("q", "", "bad"),
        pair("q", "good", " \n"),
        Pair(chosen=Conversation([Message("user", "q"), shown]), rejected=pair("q", "x", "bad").rejected),
        pair("q" * 40, "good", "bad"),
        pair("q", "the same until the very end: x", "the same until the very end: y"),
        pair("q", "good", "long " * 10),
        max_length=20,
    )
    assert [ids.numel() for ids in dataset.input_ids] == [13, 26]
    assert (dataset.num_skipped, dataset.num_alike, dataset.num_masked) == (6, 1, 3)
    assert dataset.num_truncated == 3


def test_no_pair_left_is_an_error() -> None:
    with pytest.raises(
        DataError, match=r"found none of 2 with two different replies in max_length 20; raise max_length"
    ):
        encode(pair("q", "same", "same"), pair("q" * 40, "a", "b"), max_length=20)


def conversation(*turns: str) -> Conversation:
    roles = {"u": "user", "a": "assistant", "c": "assistant"}
    return Conversation(Message(roles[turn[0]], turn[2:], is_context=turn[0] == "c") for turn in turns)


REWRITING = (
    # Only the last turn shows a thought of the assistant.
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}(hm){% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def rewriting() -> Any:
    template = TOKENIZER.chat_template
    TOKENIZER.chat_template = REWRITING
    yield TOKENIZER
    TOKENIZER.chat_template = template


def test_several_replies_behind_the_prompt_are_all_trained() -> None:
    long = Pair(chosen=conversation("u:q", "a:x", "u:r", "a:y"), rejected=conversation("u:q", "a:z"))
    trained = [[chr(token) for token in targets if token > EOS] for _, targets in whole(encode(long))]
    assert trained == [["x", "y"], ["z"]]


def test_several_replies_that_the_template_rewrites_are_refused(rewriting: Any) -> None:
    long = Pair(chosen=conversation("u:question", "a:x", "u:r", "a:y"), rejected=conversation("u:question", "a:z"))
    with pytest.raises(DataError, match=r"found 2 in the conversation that begins with 'question', and the model's"):
        encode(long, tokenizer=rewriting)


def test_replies_of_the_prompt_may_be_rewritten(rewriting: Any) -> None:
    before = ("u:one", "c:x", "u:two")
    dataset = encode(Pair(conversation(*before, "a:y"), conversation(*before, "a:z")), tokenizer=rewriting)
    assert [rewriting.decode(ids) for ids, _ in whole(dataset)] == [
        f"<|user|>one<|end|><|assistant|>x<|end|><|user|>two<|end|><|assistant|>(hm){reply}<|end|>" for reply in "yz"
    ]


def test_the_digest_tells_how_pairs_are_laid_out() -> None:
    one, other = pair("q", "xy", "z"), pair("q", "z", "xy")
    digests = {digest_of(encode(one)), digest_of(encode(one, shares_prompts=False)), digest_of(encode(other))}
    assert len(digests) == 3
    assert digest_of(encode(one)) in digests
