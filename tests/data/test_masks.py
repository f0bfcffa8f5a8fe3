"""The start and end of a reply: tokens that merge with its opening, marks of the template, ends written by others.

TRL's own functions are the oracle: ``common_prefix_length`` for a prompt and a completion, and the assistant masks of
``apply_chat_template``.
"""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

from budgets import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from merging import BLANK, MARKED, merging_tokenizer
from tiny import load_tokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from alto.data import Conversation, Encoding, Message, tokenize
from alto.data.encode import EncodedRow, Encoder
from alto.errors import DataError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.data_utils import _tokenize, common_prefix_length

GPT2 = Path(__file__).resolve().parents[3] / "shared" / "tokenizers" / "gpt2"

ENDLESS = (
    # Only the next turn ends a turn, as in GLM.
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PREFILLED = (
    # A reply opens with a thought, which a finished reply no longer has, as in R1.
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>' }}{% endif %}"
)
LAST_EOS = (
    # One EOS token ends the whole conversation, after the end of its last turn, as in Phi-3.
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|user|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)


def gpt2_tokenizer() -> Any:
    if not GPT2.is_dir():
        pytest.skip(f"no tokenizer of GPT-2 in {GPT2}")
    ranks = json.loads(gzip.decompress((GPT2 / "encoder.json.gz").read_bytes()))
    merges = gzip.decompress((GPT2 / "vocab.bpe.gz").read_bytes()).decode().split("\n")[1:]
    tokenizer = Tokenizer(BPE(vocab=ranks, merges=[tuple(pair.split()) for pair in merges if pair]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


@pytest.fixture(scope="module")
def shipped() -> Any:
    return load_tokenizer()


@pytest.fixture
def tokenizer(shipped: Any) -> Iterator[Any]:
    template = shipped.chat_template
    yield shipped
    shipped.chat_template = template


def conversation(*turns: str) -> Conversation:
    roles = {"s": "system", "u": "user", "a": "assistant", "c": "assistant"}
    return Conversation(Message(roles[turn[0]], turn[2:], is_context=turn[0] == "c") for turn in turns)


def plain(conversation: Sequence[Message]) -> list[dict[str, Any]]:
    return [{"role": turn.role, "content": turn.content, **turn.other_keys()} for turn in conversation]


def trained_runs(row: EncodedRow, tokenizer: Any) -> list[str]:
    runs: list[list[int]] = []
    was_trained = False
    for token, on in zip(row.input_ids, row.is_trained, strict=True):
        if on:
            runs = runs if was_trained else [*runs, []]
            runs[-1].append(token)
        was_trained = on
    return [tokenizer.decode(run) for run in runs]


def completion_of_trl(conversation: Conversation, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return token ids and mask as ``SFTTrainer`` makes them from a prompt and a completion of one turn."""
    prompt, completion = plain(conversation[:-1]), plain(conversation[-1:])
    before = _tokenize(tokenizer, prompt, add_generation_prompt=True)["input_ids"]
    ids = _tokenize(tokenizer, prompt + completion)["input_ids"]
    start = common_prefix_length(before, ids)
    return list(ids), [False] * start + [True] * (len(ids) - start)


def test_a_reply_of_one_word_that_merges_with_the_blank_before_it_is_trained() -> None:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = BLANK
    [row] = Encoder(tokenizer).rows(conversation("u:Is it?", "a:Yes"))
    assert trained_runs(row, tokenizer) == [" Yes<|end|>"]
    assert (list(row.input_ids), list(row.is_trained)) == completion_of_trl(
        conversation("u:Is it?", "a:Yes"), tokenizer
    )


def test_so_is_each_one_of_several() -> None:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = BLANK
    [row] = Encoder(tokenizer).rows(conversation("u:Is it?", "a:Yes", "u:And now?", "a:Yes"))
    assert trained_runs(row, tokenizer) == [" Yes<|end|>", " Yes<|end|>"]


texts = st.text("ab \nYes.ü", min_size=1, max_size=8)


@pytest.mark.parametrize(
    "template", [BLANK, BLANK.replace("Assistant: ", "Assistant:\\n\\n"), ENDLESS, PREFILLED, LAST_EOS]
)
@pytest.mark.parametrize("make", [merging_tokenizer, load_tokenizer, gpt2_tokenizer])
def test_a_prompt_and_its_completion_are_masked_as_trl_does(make: Any, template: str) -> None:
    tokenizer = make()
    tokenizer.chat_template = template

    @settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
    @given(question=texts, earlier=texts, again=texts, reply=texts)
    def check(question: str, earlier: str, again: str, reply: str) -> None:
        for turns in (
            conversation(f"u:{question}", f"a:{reply}"),
            conversation(f"u:{question}", f"c:{earlier}", f"u:{again}", f"a:{reply}"),
        ):
            [row] = Encoder(tokenizer).rows(turns)
            ids, mask = completion_of_trl(turns, tokenizer)
            if row.input_ids[-1] == tokenizer.eos_token_id and ids[-1] != tokenizer.eos_token_id:
                ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]  # ALTO ends every row
            assert (list(row.input_ids), list(row.is_trained)) == (ids, mask)

    check()


def test_an_end_that_the_next_turn_writes_is_trained_in_every_turn() -> None:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = ENDLESS
    [row] = Encoder(tokenizer).rows(
        conversation("u:one", "a:first", "u:two", "a:second", "u:x", "c:shown", "u:y", "a:z")
    )
    assert trained_runs(row, tokenizer) == ["first<|user|>", "second<|user|>", "z<|end|>"]


def test_an_end_that_is_no_token_of_its_own_is_not_trained() -> None:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = ENDLESS.replace("<|{{ m.role }}|>", "{{ m.role }}:").replace(
        "<|assistant|>", "assistant:"
    )
    [row] = Encoder(tokenizer).rows(conversation("u:one", "a:first", "u:two", "a:second"))
    assert trained_runs(row, tokenizer) == ["first", "second<|end|>"]


def test_an_opening_that_a_finished_reply_does_not_have_is_left_out() -> None:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = PREFILLED
    [row] = Encoder(tokenizer).rows(conversation("u:one", "a:first", "u:two", "a:second"))
    assert trained_runs(row, tokenizer) == ["first<|end|>", "second<|end|>"]
    assert "<think>" not in tokenizer.decode(row.input_ids)


def test_an_eos_behind_the_last_turn_makes_no_row_for_every_reply() -> None:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = LAST_EOS
    encoding = Encoding(tokenizer=tokenizer, max_length=100)
    dataset = tokenize([conversation("u:one", "a:first", "u:two", "a:second")], encoding, "training")
    assert (len(dataset), dataset.num_unrolled) == (1, 0)
    [row] = Encoder(tokenizer).rows(conversation("u:one", "a:first", "u:two", "a:second"))
    assert trained_runs(row, tokenizer) == ["first<|user|>\n", "second<|user|>\n<|end|>"]


def marked(*turns: str) -> Conversation:
    return Conversation(
        Message(turn.role, turn.content, turn.is_context, '{"mood": "glad"}' if turn.role == "assistant" else "")
        for turn in conversation(*turns)
    )


def test_marks_of_the_template_say_what_is_trained_as_in_trl(tokenizer: Any) -> None:
    tokenizer.chat_template = MARKED
    turns = marked("u:one", "a:first", "u:two", "a:second")
    [row] = Encoder(tokenizer).rows(turns)
    assert trained_runs(row, tokenizer)[:2] == ["(glad)first<|end|>", "(glad)second<|end|>"]
    found = _tokenize(tokenizer, plain(turns), return_assistant_tokens_mask=True)
    ids, mask = found["input_ids"], list(map(bool, found["assistant_masks"]))
    assert (list(row.input_ids[: len(ids)]), list(row.is_trained[: len(ids)])) == (ids, mask)


def test_replies_that_are_context_are_not_trained_whatever_the_marks_say(tokenizer: Any) -> None:
    tokenizer.chat_template = MARKED.replace("noted", "")
    [row] = Encoder(tokenizer).rows(marked("u:one", "c:first", "u:two", "a:second"))
    assert trained_runs(row, tokenizer) == ["(glad)second<|end|>"]


def test_marks_hold_where_the_text_before_a_reply_is_rewritten(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages | length }}" + MARKED.replace("noted", "")
    [row] = Encoder(tokenizer).rows(marked("u:one", "a:first", "u:two", "a:second"))
    assert trained_runs(row, tokenizer) == ["(glad)first<|end|>", "(glad)second<|end|>"]
    tokenizer.chat_template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(DataError, match="leave the text before a reply unchanged"):
        Encoder(tokenizer).rows(marked("u:one", "a:first", "u:two", "a:second"))
