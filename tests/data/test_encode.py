"""The tokens that are trained: the assistant's turns and their ends, nothing else; and what is cut or left out."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import load_tokenizer

from alto.data import Conversation, EncodedDataset, Encoding, Message, tokenize
from alto.data.encode import EncodedRow, Encoder
from alto.errors import DataError

EOS = 1


class Letters:
    """A tokenizer without a chat template: a letter's id is its code point; BOS comes first if requested."""

    chat_template = None
    eos_token_id: int | None = EOS
    eos_token = chr(EOS)

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [ord(letter) for letter in text]}


@pytest.fixture(scope="module")
def shipped() -> Any:
    return load_tokenizer()


@pytest.fixture
def tokenizer(shipped: Any) -> Any:
    """The shipped tokenizer; its own template is restored after the test."""
    template = shipped.chat_template
    yield shipped
    shipped.chat_template = template


def conversation(*turns: str) -> Conversation:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return Conversation(Message(roles[turn[0]], turn[2:]) for turn in turns)


def encode(rows: list[Conversation], tokenizer: Any, max_length: int, what: str = "training") -> EncodedDataset:
    return tokenize(rows, Encoding(tokenizer=tokenizer, max_length=max_length), what)


def encode_one(conversation: Conversation, tokenizer: Any) -> EncodedRow:
    [row] = Encoder(tokenizer).rows(conversation)
    return row


def trained_runs(conversation: Conversation, tokenizer: Any) -> list[str]:
    """Return the texts of the runs of trained tokens."""
    return runs_of(encode_one(conversation, tokenizer), tokenizer)


def runs_of(row: EncodedRow, tokenizer: Any) -> list[str]:
    runs: list[list[int]] = []
    was_trained = False
    for token, is_trained in zip(row.input_ids, row.is_trained, strict=True):
        if is_trained:
            runs = runs if was_trained else [*runs, []]
            runs[-1].append(token)
        was_trained = is_trained
    return [tokenizer.decode(run) for run in runs]


def test_template_trains_the_reply_and_its_end_only(tokenizer: Any) -> None:
    turns = conversation("s:be brief", "u:two and two?", "a:It is four.")
    assert trained_runs(turns, tokenizer) == ["It is four.<|end|>"]
    whole = "<|system|>be brief<|end|><|user|>two and two?<|end|><|assistant|>It is four.<|end|>"
    assert tokenizer.decode(encode_one(turns, tokenizer).input_ids) == whole


def test_every_turn_of_the_assistant_is_trained(tokenizer: Any) -> None:
    turns = conversation("u:one", "a:first", "u:two", "a:second", "u:left out")
    assert trained_runs(turns, tokenizer) == ["first<|end|>", "second<|end|>"]
    assert "left out" not in tokenizer.decode(encode_one(turns, tokenizer).input_ids)


def test_same_words_in_a_user_turn_are_not_trained(tokenizer: Any) -> None:
    assert trained_runs(conversation("u:yes", "a:yes"), tokenizer) == ["yes<|end|>"]


def test_a_row_that_begins_with_the_assistant(tokenizer: Any) -> None:
    assert trained_runs(conversation("a:hello", "u:hi", "a:well?"), tokenizer) == ["hello<|end|>", "well?<|end|>"]


def test_eos_ends_a_row_exactly_once(tokenizer: Any) -> None:
    row = encode_one(conversation("u:one", "a:two"), tokenizer)
    assert row.input_ids[-1] == EOS
    assert row.input_ids[-2] != EOS


def test_eos_is_added_to_a_template_without_one(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    row = encode_one(conversation("u:one", "a:two"), tokenizer)
    assert row.input_ids.count(EOS) == 1
    assert row.input_ids[-1] == EOS
    assert row.is_trained[-1]


def test_eos_is_not_added_behind_a_template_that_ends_turns_with_a_newline(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    row = encode_one(conversation("u:one", "a:two"), tokenizer)
    assert row.input_ids.count(EOS) == 2
    assert tokenizer.decode(row.input_ids).endswith("two<|end|>\n")


QWEN3_LIKE = (
    # Removes the thoughts of earlier turns; keeps those of the last turn, or inserts an empty one.
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}"
    "{% set answer = m.content.split('</think>')[-1] %}"
    "{% set thought = m.content.split('</think>')[0] + '</think>' if '</think>' in m.content else '<think></think>' %}"
    "{% if loop.index0 > ns.last %}{{ thought }}{% endif %}{{ answer }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_gives_a_row_for_every_reply(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN3_LIKE
    turns = conversation(
        "u:one", "a:<think>hm</think>first", "u:two", "a:second", "u:three", "a:<think>so</think>third"
    )
    rows = Encoder(tokenizer).rows(turns)
    assert [tokenizer.decode(row.input_ids) for row in rows] == [
        "<|user|>one<|end|>\n<|assistant|><think>hm</think>first<|end|>\n",
        "<|user|>one<|end|>\n<|assistant|>first<|end|>\n<|user|>two<|end|>\n"
        "<|assistant|><think></think>second<|end|>\n",
        "<|user|>one<|end|>\n<|assistant|>first<|end|>\n<|user|>two<|end|>\n<|assistant|>second<|end|>\n"
        "<|user|>three<|end|>\n<|assistant|><think>so</think>third<|end|>\n",
    ]
    assert [runs_of(row, tokenizer) for row in rows] == [
        ["<think>hm</think>first<|end|>\n"],
        ["<think></think>second<|end|>\n"],
        ["<think>so</think>third<|end|>\n"],
    ]


def test_every_row_starts_with_what_the_model_is_shown_when_it_writes_the_reply(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN3_LIKE
    turns = conversation("u:one", "a:<think>hm</think>first", "u:two", "a:second")
    for row, position in zip(Encoder(tokenizer).rows(turns), (1, 3), strict=True):
        messages = [{"role": turn.role, "content": turn.content} for turn in turns[:position]]
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        start = row.is_trained.index(True)
        assert tokenizer.decode(row.input_ids[:start]) == shown


def test_rows_of_single_turns_stay_whole_under_such_a_template(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN3_LIKE
    dataset = encode([conversation("u:one", "a:x"), conversation("u:1", "a:2", "u:3", "a:4")], tokenizer, 100)
    assert (len(dataset), dataset.num_unrolled) == (3, 1)


def test_a_template_that_rewrites_text_before_the_reply_is_refused(tokenizer: Any) -> None:
    # The number of turns comes first.
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    )
    with pytest.raises(DataError, match=r"found that it rewrites it; set another chat_template"):
        Encoder(tokenizer).rows(conversation("u:one", "a:first", "u:two", "a:second"))


def test_a_reply_that_is_context_is_shown_and_not_trained(tokenizer: Any) -> None:
    shown = Message("assistant", "first", is_context=True)
    turns = Conversation((*conversation("u:one"), shown, *conversation("u:two", "a:second")))
    assert trained_runs(turns, tokenizer) == ["second<|end|>"]
    assert "first<|end|>" in tokenizer.decode(encode_one(turns, tokenizer).input_ids)
    assert Encoder(tokenizer).rows(turns[:3]) == []


def test_plain_text_is_trained_whole_and_ends(tokenizer: Any) -> None:
    assert trained_runs(Conversation([Message("text", "Once upon a time")]), tokenizer) == ["Once upon a time<|end|>"]


def test_a_template_that_refuses_the_turns(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"found user, assistant \(roles must alternate\); change the rows"):
        encode_one(conversation("u:one", "a:first"), tokenizer)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages[0] + 1 }}", "{{ [][3].x }}", "{% for i in 5 %}{% endfor %}"]
)
def test_a_template_that_fails_is_named(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="expected turns that the model's chat template takes"):
        encode_one(conversation("u:one", "a:first"), tokenizer)


def test_without_a_template_turns_are_plain_text_and_eos() -> None:
    row = encode_one(conversation("s:S", "u:one", "a:two", "u:?", "a:!", "u:x"), Letters())
    assert row.input_ids == (0, *map(ord, "S\none\ntwo?\n!"), EOS)
    trained = [chr(token) for token, on in zip(row.input_ids, row.is_trained, strict=True) if on]
    assert trained == [*"two", "!", chr(EOS)]


def test_a_tokenizer_without_eos_adds_none() -> None:
    tokenizer = Letters()
    tokenizer.eos_token_id = None
    assert encode_one(conversation("u:q", "a:r"), tokenizer).input_ids == (0, *map(ord, "q\nr"))


def test_targets_are_the_next_trained_token() -> None:
    dataset = encode([conversation("u:q", "a:rs")], Letters(), 100)
    assert dataset.input_ids[0].tolist() == [0, *map(ord, "q\nrs"), EOS]
    assert dataset.targets[0].tolist() == [-100, -100, ord("r"), ord("s"), EOS, -100]
    assert (len(dataset), dataset.num_tokens, dataset.num_trained_tokens) == (1, 6, 3)


def test_rows_are_cut_and_rows_without_a_trained_token_left_out() -> None:
    rows = [conversation("u:q", "a:rs"), conversation("u:q", "a:" + "r" * 20), conversation("u:" + "q" * 20, "a:r")]
    dataset = encode(rows, Letters(), 8)
    assert [ids.numel() for ids in dataset.input_ids] == [6, 8]
    assert dataset.targets[1].tolist() == [-100, -100, *[ord("r")] * 5, -100]
    assert (dataset.num_truncated, dataset.num_skipped) == (2, 1)


def test_a_row_of_exactly_max_length_is_not_cut() -> None:
    assert encode([conversation("u:q", "a:rs")], Letters(), 6).num_truncated == 0


def test_rows_in_which_nothing_is_to_be_trained_are_left_out_and_counted_apart() -> None:
    shown_only = Conversation((*conversation("u:q"), Message("assistant", "r", is_context=True)))
    dataset = encode([conversation("u:q", "a:rs"), shown_only, conversation("u:" + "q" * 20, "a:r")], Letters(), 8)
    assert (len(dataset), dataset.num_skipped, dataset.num_masked) == (1, 2, 1)


def test_no_whole_row_is_an_error_unless_rows_are_plain_text() -> None:
    with pytest.raises(DataError, match=r"fit into max_length 5, found all 2 longer.*raise max_length"):
        encode([conversation("u:q", "a:rs"), conversation("u:q", "a:rst")], Letters(), 5)
    books = encode([Conversation([Message("text", "a long book")])], Letters(), 5)
    assert (books.num_truncated, books.targets[0].tolist()) == (1, [*map(ord, "a lo"), -100])


def test_nothing_to_train_is_an_error() -> None:
    rows = [conversation("u:" + "q" * 20, "a:r")] * 3
    with pytest.raises(DataError, match=r"in the validation data, found none of 3 .* max_length 8; raise max_length"):
        encode(rows, Letters(), 8, "validation")
    tokenizer = Letters()
    tokenizer.eos_token_id = None
    with pytest.raises(DataError, match="check that completions are not empty"):
        encode([conversation("u:q", "a:")], tokenizer, 8)


def test_long_rows_bring_no_warning_of_the_tokenizer(shipped: Any, caplog: pytest.LogCaptureFixture) -> None:
    shipped.deprecation_warnings.clear()
    encode([conversation("u:q", "a:" + "word " * 3000), conversation("u:q", "a:r")], shipped, 64)
    assert caplog.text == ""
