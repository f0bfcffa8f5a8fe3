"""Which tokens are trained: the assistant's turns and their end, nothing else; and what is cut or left out."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import load_tokenizer

from alto.data import Conversation, Message, encode_conversation, encode_dataset
from alto.errors import DataError

EOS = 1


class Letters:
    """A tokenizer without a chat template: a letter is its code point; a BOS goes first where asked for."""

    chat_template = None
    eos_token_id: int | None = EOS

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [ord(letter) for letter in text]}


@pytest.fixture(scope="module")
def shipped() -> Any:
    return load_tokenizer()


@pytest.fixture
def tokenizer(shipped: Any) -> Any:
    """The shipped tokenizer; a template that a test puts on it is taken off again."""
    template = shipped.chat_template
    yield shipped
    shipped.chat_template = template


def talk(*turns: str) -> Conversation:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return tuple(Message(roles[turn[0]], turn[2:]) for turn in turns)


def trained_runs(conversation: Conversation, tokenizer: Any) -> list[str]:
    """Texts of the runs of trained tokens."""
    row = encode_conversation(conversation, tokenizer)
    runs: list[list[int]] = []
    was_trained = False
    for token, is_trained in zip(row.input_ids, row.is_trained, strict=True):
        if is_trained:
            runs = runs if was_trained else [*runs, []]
            runs[-1].append(token)
        was_trained = is_trained
    return [tokenizer.decode(run) for run in runs]


def test_template_trains_the_reply_and_its_end_only(tokenizer: Any) -> None:
    conversation = talk("s:be brief", "u:two and two?", "a:It is four.")
    assert trained_runs(conversation, tokenizer) == ["It is four.<|end|>"]
    whole = "<|system|>be brief<|end|><|user|>two and two?<|end|><|assistant|>It is four.<|end|>"
    assert tokenizer.decode(encode_conversation(conversation, tokenizer).input_ids) == whole


def test_every_turn_of_the_assistant_is_trained(tokenizer: Any) -> None:
    conversation = talk("u:one", "a:first", "u:two", "a:second", "u:left out")
    assert trained_runs(conversation, tokenizer) == ["first<|end|>", "second<|end|>"]
    assert "left out" not in tokenizer.decode(encode_conversation(conversation, tokenizer).input_ids)


def test_same_words_in_a_user_turn_are_not_trained(tokenizer: Any) -> None:
    assert trained_runs(talk("u:yes", "a:yes"), tokenizer) == ["yes<|end|>"]


def test_a_row_that_begins_with_the_assistant(tokenizer: Any) -> None:
    assert trained_runs(talk("a:hello", "u:hi", "a:well?"), tokenizer) == ["hello<|end|>", "well?<|end|>"]


def test_eos_ends_a_row_exactly_once(tokenizer: Any) -> None:
    row = encode_conversation(talk("u:one", "a:two"), tokenizer)
    assert row.input_ids[-1] == EOS
    assert row.input_ids[-2] != EOS


def test_eos_is_added_to_a_template_without_one(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    row = encode_conversation(talk("u:one", "a:two"), tokenizer)
    assert row.input_ids.count(EOS) == 1
    assert row.input_ids[-1] == EOS
    assert row.is_trained[-1]


def test_eos_is_not_added_behind_a_template_that_ends_turns_with_a_newline(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    row = encode_conversation(talk("u:one", "a:two"), tokenizer)
    assert row.input_ids.count(EOS) == 2
    assert tokenizer.decode(row.input_ids).endswith("two<|end|>\n")


@pytest.mark.parametrize(
    "rewriting",
    [
        # Thinking of earlier turns dropped, as reasoning models do.
        "{% for m in messages %}<|{{ m.role }}|>{% if loop.last %}(hm){% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        # The number of turns goes first.
        "{{ messages | length }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any, rewriting: str) -> None:
    tokenizer.chat_template = rewriting
    with pytest.raises(DataError, match=r"found that it rewrites them; use single-turn rows"):
        encode_conversation(talk("u:one", "a:first", "u:two", "a:second"), tokenizer)


def test_a_template_that_refuses_the_turns(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"found user, assistant \(roles must alternate\); change the rows"):
        encode_conversation(talk("u:one", "a:first"), tokenizer)


def test_without_a_template_turns_are_plain_text_and_eos() -> None:
    row = encode_conversation(talk("s:S", "u:one", "a:two", "u:?", "a:!", "u:x"), Letters())
    assert row.input_ids == (0, *map(ord, "S\none\ntwo?\n!"), EOS)
    trained = [chr(token) for token, on in zip(row.input_ids, row.is_trained, strict=True) if on]
    assert trained == [*"two", "!", chr(EOS)]


def test_a_tokenizer_without_eos_adds_none() -> None:
    tokenizer = Letters()
    tokenizer.eos_token_id = None
    assert encode_conversation(talk("u:q", "a:r"), tokenizer).input_ids == (0, *map(ord, "q\nr"))


def test_targets_are_the_next_trained_token() -> None:
    dataset = encode_dataset([talk("u:q", "a:rs")], Letters(), 100, "training")
    assert dataset.input_ids[0].tolist() == [0, *map(ord, "q\nrs"), EOS]
    assert dataset.targets[0].tolist() == [-100, -100, ord("r"), ord("s"), EOS, -100]
    assert (len(dataset), dataset.num_tokens, dataset.num_trained_tokens) == (1, 6, 3)


def test_rows_are_cut_and_rows_without_a_trained_token_left_out() -> None:
    rows = [talk("u:q", "a:rs"), talk("u:q", "a:" + "r" * 20), talk("u:" + "q" * 20, "a:r")]
    dataset = encode_dataset(rows, Letters(), 8, "training")
    assert [ids.numel() for ids in dataset.input_ids] == [6, 8]
    assert dataset.targets[1].tolist() == [-100, -100, *[ord("r")] * 5, -100]
    assert (dataset.num_truncated, dataset.num_skipped) == (2, 1)


def test_a_row_of_exactly_max_length_is_not_cut() -> None:
    assert encode_dataset([talk("u:q", "a:rs")], Letters(), 6, "training").num_truncated == 0


def test_nothing_to_train_is_an_error() -> None:
    rows = [talk("u:" + "q" * 20, "a:r")] * 3
    with pytest.raises(DataError, match=r"in the validation data, found none of 3 .* max_length 8; raise max_length"):
        encode_dataset(rows, Letters(), 8, "validation")
    tokenizer = Letters()
    tokenizer.eos_token_id = None
    with pytest.raises(DataError, match="check that completions are not empty"):
        encode_dataset([talk("u:q", "a:")], tokenizer, 8, "training")
