"""Rows beyond the model's limits: cut and counted if too long, refused if a token has no embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import load_tokenizer, make_task, random_llama, save_model
from transformers import OPTConfig, OPTForCausalLM

from alto.data import Conversation, Encoding, Message, Pair, tokenize
from alto.engine import Engine
from alto.engine.runner import TaskRunner
from alto.errors import DataError, ModelError
from alto.records import ModelLimits

TOKENIZER = load_tokenizer()
POSITIONS = 128


def conversation(question: str, reply: str) -> Conversation:
    return Conversation([Message("user", question), Message("assistant", reply)])


def write_long_rows(path: Path, *, is_paired: bool = False) -> str:
    """Write eleven short rows and one of about 290 tokens."""
    replies = [f"It is {number}." for number in range(11)] + ["seven is a number " * 70]
    if is_paired:
        rows: list[dict[str, Any]] = [
            {"prompt": "How many?", "chosen": reply, "rejected": "None."} for reply in replies
        ]
    else:
        rows = [{"prompt": "How many?", "completion": reply} for reply in replies]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def save_learned_positions(folder: Path, vocab_size: int) -> str:
    """Save a model with a table of positions: exceeding it is an index error, and on a GPU ends the process."""
    config = OPTConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dropout=0.0,
    )
    OPTForCausalLM(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("method", ["sft", "dpo"])
@pytest.mark.parametrize("kind", ["rotary", "learned"])
def test_rows_longer_than_the_models_positions_are_cut_and_counted(tmp_path: Path, kind: str, method: str) -> None:
    model = save_model(tmp_path / "m") if kind == "rotary" else save_learned_positions(tmp_path / "m", len(TOKENIZER))
    rows = write_long_rows(tmp_path / "rows.jsonl", is_paired=method == "dpo")
    task = make_task(tmp_path, model=str(model), method=method, dataset=rows, validation_dataset=rows)
    what = "pair" if method == "dpo" else "row"
    cut = f"1 of 12 training {what}s (8.3%) cut"
    expected = f"{cut} at the model's 128 positions, which are fewer than max_length 1024."
    preview = Engine().preview(task)
    assert preview.row_tokens[2] == POSITIONS
    assert (preview.counts["train_truncated_rows"], preview.counts["validation_truncated_rows"]) == (1, 1)
    assert expected in preview.notes
    data = TaskRunner()._prepare(task).context.data
    assert data.train.longest_sequence == data.validation.longest_sequence == POSITIONS
    assert expected in data.notes


def test_max_length_below_the_positions_is_what_cuts() -> None:
    rows = [conversation("q", "r"), conversation("q", "seven " * 50)]
    encoding = Encoding(tokenizer=TOKENIZER, max_length=20, limits=ModelLimits(max_positions=POSITIONS))
    dataset = tokenize(rows, encoding, "training")
    assert max(dataset.sequence_lengths) == 20


def test_no_row_within_the_positions_is_refused_by_them() -> None:
    encoding = Encoding(tokenizer=TOKENIZER, max_length=100, limits=ModelLimits(max_positions=12))
    with pytest.raises(
        DataError,
        match=r"to fit into the model's 12 positions, which are fewer than max_length 100, found all 2 longer.*; "
        "shorten the rows, or use a base model with more positions",
    ):
        tokenize([conversation("q", "seven " * 50)] * 2, encoding, "training")
    pair = Pair(chosen=conversation("question " * 40, "a"), rejected=conversation("question " * 40, "b"))
    with pytest.raises(DataError, match=r"found none of 1 with two different replies in the model's 12 positions"):
        tokenize([pair], encoding, "training")


def test_a_token_without_an_embedding_is_refused_before_training(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_llama(len(TOKENIZER)).save_pretrained(folder)
    tokenizer = load_tokenizer()
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": "q", "completion": "plain"}] * 11 + [{"prompt": "q", "completion": "a <|new|> one"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = make_task(tmp_path, model=str(folder), dataset=str(path), validation_dataset=str(path))
    size = len(TOKENIZER)
    expected = (
        rf"token ids below the {size:,} rows of its embedding, found {size:,} \('<\|new\|>'\) in .*rows\.jsonl:12"
    )
    for attempt in (Engine().preview, TaskRunner()._prepare):
        with pytest.raises(ModelError, match=expected):
            attempt(task)
    pair = Pair(chosen=conversation("q", "a <|new|> one"), rejected=conversation("q", "b"))
    encoding = Encoding(tokenizer=tokenizer, max_length=100, limits=ModelLimits(vocab_size=size))
    with pytest.raises(ModelError, match=r"found .*'<\|new\|>'\) in pair 1 of the training data"):
        tokenize([pair], encoding, "training")
