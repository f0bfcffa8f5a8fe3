"""The tokens that are trained: all replies, the last one, or all tokens; and raw prompts with their completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

from budgets import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import load_tokenizer, make_task
from trl_rows import trl_row

from alto.data import encode_prompt, read_task_rows
from alto.data.convert import to_conversation
from alto.data.encode import Encoder
from alto.data.formats import find_layout
from alto.data.rows import RawRow
from alto.errors import DataFormatError, SpecError
from alto.spec import Task, load_task

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four."},
]


def encoded(row: dict[str, Any], train_on: Any = "completion", form: str = "auto", tokenizer: Any = None) -> Any:
    raw = RawRow("rows.jsonl:1", row)
    [found] = Encoder(tokenizer or load_tokenizer(), train_on).rows(to_conversation(raw, find_layout([raw], form, {})))
    return list(found.input_ids), list(found.is_trained)


def test_all_is_what_trl_trains_without_a_mask() -> None:
    row = {"messages": TURNS}
    assert encoded(row, "all") == trl_row(row, load_tokenizer())
    assert all(encoded(row, "all")[1])
    open_end = {"messages": [*TURNS, {"role": "user", "content": "Five?"}]}
    assert encoded(open_end, "all") == trl_row(open_end, load_tokenizer())


def test_last_is_what_trl_trains_of_a_prompt_and_its_completion() -> None:
    found = encoded({"messages": TURNS}, "last")
    assert found == trl_row({"prompt": TURNS[:-1], "completion": TURNS[-1:]}, load_tokenizer())
    ids, mask = encoded({"messages": TURNS})
    assert ids == found[0]
    assert sum(mask) > sum(found[1]) > 0


def test_last_and_all_of_a_text_are_the_whole_text() -> None:
    row = {"text": "Once upon a time."}
    assert encoded(row, "last") == encoded(row, "all") == encoded(row) == trl_row(row, load_tokenizer())


@pytest.mark.parametrize("has_template", [True, False])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("3 plus 3? ", "6"),
        ("3 plus 3?", " 6"),
        ("", "6"),
        ("no blank", "between"),
        ("ends itself ", "6<|end|>"),
        ("line\n", "\nline\n"),
        ("<|user|>x<|end|>", "<|assistant|>y<|end|>\n"),
    ],
)
def test_raw_prompts_are_joined_as_in_trl(prompt: str, completion: str, has_template: bool) -> None:
    tokenizer = load_tokenizer()
    if not has_template:
        tokenizer.chat_template = None
    row = {"prompt": prompt, "completion": completion}
    found = encoded(row, form="raw_prompt_completion", tokenizer=tokenizer)
    assert found == trl_row(row, tokenizer)
    whole = encoded(row, "all", form="raw_prompt_completion", tokenizer=tokenizer)
    assert whole == trl_row(row, tokenizer, completion_only=False)


TOKENIZER = load_tokenizer()


@settings(max_examples=examples(15), deadline=None)
@given(prompt=st.text(max_size=20), completion=st.text(min_size=1, max_size=20))
def test_any_raw_row_is_as_in_trl(prompt: str, completion: str) -> None:
    row = {"prompt": prompt, "completion": completion + "."}
    assert encoded(row, form="raw_prompt_completion", tokenizer=TOKENIZER) == trl_row(row, TOKENIZER)


def test_a_raw_prompt_is_asked_as_it_is() -> None:
    raw = RawRow("rows.jsonl:1", {"prompt": "3 plus 3? ", "completion": "6"})
    conversation = to_conversation(raw, find_layout([raw], "raw_prompt_completion", {}))
    assert encode_prompt(conversation[:1], TOKENIZER) == TOKENIZER("3 plus 3? ")["input_ids"]


def test_raw_rows_hold_texts_only() -> None:
    with pytest.raises(DataFormatError, match="expected prompt to be a text"):
        encoded({"prompt": TURNS[:1], "completion": "x"}, form="raw_prompt_completion")


def test_the_key_reaches_every_split(tmp_path: Path) -> None:
    counts = {}
    for train_on in ("completion", "all"):
        data = read_task_rows(make_task(tmp_path, train_on=train_on)).encode(TOKENIZER)
        counts[train_on] = data.counts()
        assert counts[train_on]["train_tokens"] == data.train.num_tokens
    for split in ("train", "validation"):
        assert counts["all"][f"{split}_trained_tokens"] > counts["completion"][f"{split}_trained_tokens"]
        # Nothing predicts the first token of a row.
        expected = counts["all"][f"{split}_tokens"] - counts["all"][f"{split}_rows"]
        assert counts["all"][f"{split}_trained_tokens"] == expected


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_replies_of_pairs_and_labelled_rows_are_trained(method: str) -> None:
    with pytest.raises(SpecError, match=f"train_on should be 'completion' with method '{method}'"):
        Task(model="alto-tiny", dataset="x.jsonl", method=method, train_on="all")


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>({{ m.content }})<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_task_sets_the_template_by_text_or_by_file(tmp_path: Path) -> None:
    from alto.backbone import load_tokenizer as load
    from alto.spec import load_task

    own = make_task(tmp_path)
    (tmp_path / "own.jinja").write_text(TEMPLATE, encoding="utf-8")
    (tmp_path / "task.yaml").write_text(
        json.dumps({"model": "alto-tiny", "dataset": "rows.jsonl", "chat_template": "own.jinja"})
    )
    by_file, by_text = load_task(tmp_path / "task.yaml"), own.replace(chat_template=TEMPLATE)
    for task in (by_file, by_text):
        assert load(task.base_model).chat_template == TEMPLATE
    assert load(own.base_model).chat_template == TOKENIZER.chat_template
    assert by_file.base_model == by_text.base_model != own.base_model
    assert Task(**by_text.to_dict()) == by_text
    long = own.replace(chat_template=TEMPLATE + "{# " + "x" * 50_000 + " #}")
    assert len(long.base_model.chat_template or "") > 50_000


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "absent.jinja",
            "should be a Jinja text with .*, a file with such a text, or chatml-tools, found 'absent.jinja': No such",
        ),
        ("{{ x", "chat_template: expected a Jinja template, found a text that is not valid .* in line 1"),
    ],
)
def test_no_template(tmp_path: Path, template: str, message: str) -> None:
    from alto.backbone import load_tokenizer as load
    from alto.errors import AltoError

    with pytest.raises(AltoError, match=message):
        load(make_task(tmp_path, chat_template=template).base_model)


def test_the_name_of_the_shipped_template_is_no_path(tmp_path: Path) -> None:
    (tmp_path / "chatml-tools").write_text("{{ 'a file' }}", encoding="utf-8")
    (tmp_path / "task.yaml").write_text(
        "model: alto-tiny\ndataset: alto/word-problems\nchat_template: chatml-tools\n", encoding="utf-8"
    )
    task = load_task(tmp_path / "task.yaml")
    assert task.chat_template == "chatml-tools"
    assert "<tool_call>" in (task.base_model.chat_template or "")
    named = load_task(tmp_path / "task.yaml", ["chat_template=" + str(tmp_path / "chatml-tools")])
    assert named.base_model.chat_template == "{{ 'a file' }}"
