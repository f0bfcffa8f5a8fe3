"""Tools, calls, results and other keys of messages: which of them reach the template, and what is reported of the
rest."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="needs the data extra: pip install 'alto-lora[data]'")

import pyarrow as pa
import pyarrow.parquet as pq
from tiny import load_tokenizer
from transformers import AutoTokenizer

from alto.data import Conversation, Message, TaskRows, encode_prompt, read_task_rows
from alto.data.convert import to_conversation, to_pair
from alto.data.encode import EncodedRow, Encoder
from alto.data.formats import find_layout
from alto.data.rows import RawRow
from alto.errors import BadRowsError, DataError, DataFormatError
from alto.spec import Task
from alto.spec.data_keys import chat_template_text

WEATHER = {"type": "function", "function": {"name": "weather", "description": "Rain.", "parameters": {}}}
OSLO = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
ROME = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
ASKED = {"role": "user", "content": "Rain?"}
RESULT = {"role": "tool", "content": "rain"}
REPLY = {"role": "assistant", "content": "It rains."}


def calling(*calls: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **keys}


def convert(row: dict[str, Any], form: str = "auto") -> Conversation:
    raw = RawRow("rows.jsonl:7", row)
    return to_conversation(raw, find_layout([raw], form, {}))


def refusal(row: dict[str, Any]) -> str:
    with pytest.raises(DataFormatError) as caught:
        convert(row)
    message = str(caught.value)
    assert message.startswith("rows.jsonl:7: expected ")
    assert message.endswith("; correct the row")
    return message


@pytest.fixture(scope="module")
def shipped() -> Any:
    return load_tokenizer()


@pytest.fixture
def tokenizer(shipped: Any) -> Iterator[Any]:
    """The shipped tokenizer; its own template is restored after the test."""
    template = shipped.chat_template
    yield shipped
    shipped.chat_template = template


@pytest.fixture
def qwen(tokenizer: Any) -> Any:
    return with_template(tokenizer, "qwen2_5")


def with_template(tokenizer: Any, name: str) -> Any:
    """Give the tokenizer one of the templates in the installed trl."""
    file = resources.files("trl").joinpath("chat_templates", f"{name}.jinja")
    tokenizer.chat_template = file.read_text(encoding="utf-8")
    return tokenizer


def shown(row: EncodedRow, tokenizer: Any) -> str:
    return str(tokenizer.decode(row.input_ids))


def trained(row: EncodedRow, tokenizer: Any) -> str:
    return str(tokenizer.decode([token for token, on in zip(row.input_ids, row.is_trained, strict=True) if on]))


@pytest.mark.parametrize(
    "call",
    [
        OSLO,
        {"name": "weather", "arguments": {"city": "Oslo"}},
        {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        {"name": "weather", "arguments": '{"city":"Oslo"}'},
        json.dumps(OSLO),
    ],
)
def test_every_way_to_write_a_call_comes_to_the_same(call: Any, qwen: Any) -> None:
    conversation = convert({"messages": [ASKED, calling(call)], "tools": [WEATHER]})
    assert conversation == convert({"messages": [ASKED, calling(OSLO)], "tools": [WEATHER]})
    assert conversation == convert({"messages": [ASKED, calling(call, content=None)], "tools": json.dumps([WEATHER])})
    [row] = Encoder(qwen).rows(conversation)
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert called in trained(row, qwen)


def test_the_older_form_of_a_call_and_of_its_result() -> None:
    older = [
        ASKED,
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
    ]
    functions = {"messages": [*older, {**RESULT, "role": "function", "name": "weather"}, REPLY]}
    tools = {"messages": [ASKED, calling(OSLO), {**RESULT, "name": "weather"}, REPLY], "tools": [WEATHER]}
    assert convert({**functions, "functions": [WEATHER["function"]]}) == convert(tools)


def test_an_id_and_other_keys_of_a_call_are_kept() -> None:
    [call] = convert({"messages": [ASKED, calling({"id": "a1", **OSLO})]})[1].other_keys()["tool_calls"]
    assert call == {"id": "a1", **OSLO}


def test_tools_calls_and_results_are_shown_and_calls_alone_are_trained(qwen: Any) -> None:
    turns = [ASKED, calling(OSLO, ROME), RESULT, {**RESULT, "content": "sun"}, REPLY]
    [row] = Encoder(qwen).rows(convert({"messages": turns, "tools": [WEATHER]}))
    whole = qwen.apply_chat_template(turns, tools=[WEATHER], tokenize=False)
    assert shown(row, qwen).startswith(whole.rstrip("\n"))
    assert trained(row, qwen).count("<tool_call>") == 2
    assert "It rains." in trained(row, qwen)
    assert "tool_response" not in trained(row, qwen)
    assert "tool_response" in shown(row, qwen)


def test_reasoning_and_any_other_key_reach_the_template(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
        "{% if m.mood %}[{{ m.mood }}]{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [ASKED, {**REPLY, "reasoning_content": "hm", "mood": "glad", "weight": 1}]
    [row] = Encoder(tokenizer).rows(convert({"messages": turns}))
    assert trained(row, tokenizer) == "(hm)[glad]It rains.<|end|>"


def test_arguments_of_the_template_and_a_prompt_with_tools(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{{ style }}{{ tools | length }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    row = {"messages": [ASKED, REPLY], "tools": [WEATHER], "chat_template_kwargs": {"style": "short"}}
    conversation = convert(row)
    [encoded] = Encoder(tokenizer).rows(conversation)
    assert shown(encoded, tokenizer) == "short1<|user|>Rain?<|end|><|assistant|>It rains.<|end|>"
    prompt = encode_prompt(conversation[:1], tokenizer)
    assert tokenizer.decode(prompt) == "short1<|user|>Rain?<|end|><|assistant|>"
    assert pickle.loads(pickle.dumps(conversation)) == conversation
    assert conversation != tuple(conversation)
    assert hash(conversation) != hash(convert({**row, "tools": [WEATHER, WEATHER]}))
    message = refusal({**row, "chat_template_kwargs": {"tokenize": True}})
    assert "chat_template_kwargs that the chat template itself reads, not tokenize" in message


def test_content_in_parts_is_joined_and_other_parts_are_refused_by_name() -> None:
    parts = [{"type": "text", "text": "Ra"}, "in", {"type": "input_text", "text": "?"}]
    assert convert({"messages": [{**ASKED, "content": parts}, REPLY]})[0] == Message("user", "Rain?")
    for kind in ("image_url", "image", "input_audio", "video"):
        message = refusal({"messages": [{**ASKED, "content": [{"type": kind, kind: "x"}]}, REPLY]})
        assert f"content of text, not a part of the type {kind}: only text models are trained" in message


@pytest.mark.parametrize(
    ("template", "role"),
    [("{{ m.role }}", "system"), ("{% if m.role == 'developer' %}developer!{% endif %}", "developer")],
)
def test_a_developer_is_the_system_where_the_template_does_not_know_one(
    tokenizer: Any, template: str, role: str
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<|" + template + "|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [{"role": "developer", "content": "Be brief."}, ASKED, REPLY]
    [row] = Encoder(tokenizer).rows(convert({"messages": turns}))
    assert shown(row, tokenizer).startswith(f"<|{role}")


def test_a_template_that_takes_arguments_as_text_and_content_alone_is_given_these(tokenizer: Any) -> None:
    with_template(tokenizer, "deepseekv3")
    conversation = convert({"messages": [ASKED, calling(OSLO), RESULT, REPLY], "tools": [WEATHER]})
    [row] = Encoder(tokenizer).rows(conversation)
    assert '```json\n{"city": "Oslo"}\n```' in trained(row, tokenizer)


def test_calls_that_the_template_does_not_show_are_never_trained_as_an_end_alone(tokenizer: Any) -> None:
    conversation = convert({"messages": [ASKED, calling(OSLO), RESULT, REPLY], "tools": [WEATHER]})
    says = r"shows tool calls, found one that does not show .*'weather'.*: only the end of this.*leave such"
    with pytest.raises(DataError, match=says):
        Encoder(tokenizer).rows(conversation)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"shows tool calls, found no template to show .*'weather'"):
        Encoder(tokenizer).rows(conversation)


def test_sharegpt_calls_and_observations() -> None:
    turns = [
        {"from": "human", "value": "Rain?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "It rains."},
    ]
    own = {"messages": [ASKED, calling(OSLO), RESULT, REPLY], "tools": [WEATHER]}
    assert convert({"conversations": turns, "tools": json.dumps([WEATHER])}) == convert(own)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"messages": [ASKED, calling({"function": {"arguments": {}}})]}, "every call to have the name of a function"),
        (
            {"messages": [ASKED, calling({"name": "f", "arguments": "{"})]},
            "arguments that are a JSON object or its text",
        ),
        (
            {"messages": [ASKED, calling({"name": "f", "arguments": [1]})]},
            "arguments that are a JSON object or its text",
        ),
        ({"messages": [ASKED, calling(7)]}, "every call to have the name of a function"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": 7}]}, "tool_calls to be a list of calls"),
        (
            {"messages": [ASKED, calling(OSLO, function_call={"name": "f"})]},
            "only one of tool_calls and function_call, the older name of a single call, found",
        ),
        (
            {"messages": [ASKED, REPLY], "tools": "no"},
            "tools to be a list of JSON schemas, or its JSON text, found 'no'",
        ),
        ({"messages": [ASKED, REPLY], "tools": [7]}, "every tool to be a JSON schema"),
        ({"messages": [ASKED, REPLY], "tools": {"a": 1}}, "tools to be a list of JSON schemas"),
        ({"messages": [ASKED, REPLY], "tools": [WEATHER], "functions": [WEATHER]}, "only one of tools and functions"),
        ({"messages": [ASKED, {**REPLY, "mood": "\ud800"}]}, "a text without broken characters"),
        ({"messages": [ASKED, REPLY], "chat_template_kwargs": [1]}, "chat_template_kwargs to be an object"),
    ],
)
def test_a_wrong_call_or_tool_names_its_row(row: dict[str, Any], found: str) -> None:
    assert found in refusal(row)


def test_pairs_take_tools_and_calls(qwen: Any) -> None:
    raw = RawRow(
        "rows.jsonl:1",
        {"prompt": [ASKED], "chosen": [calling(OSLO)], "rejected": [calling(ROME)], "tools": [WEATHER]},
    )
    pair = to_pair(raw, find_layout([raw], "auto", {}, is_paired=True))
    for conversation, city in zip(pair.conversations, ("Oslo", "Rome"), strict=True):
        [row] = Encoder(qwen).rows(conversation)
        assert city in trained(row, qwen)
        assert "# Tools" in shown(row, qwen)
    openai = RawRow(
        "rows.jsonl:1",
        {
            "input": {"messages": [ASKED], "tools": [WEATHER]},
            "preferred_output": [calling(OSLO)],
            "non_preferred_output": [calling(ROME)],
        },
    )
    assert to_pair(openai, find_layout([openai], "auto", {}, is_paired=True)) == pair


def read(folder: Path, rows: list[dict[str, Any]], **keys: Any) -> TaskRows:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_task_rows(Task(model="alto-tiny", dataset=str(path), validation_dataset=str(path), **keys))


def test_pairs_of_calls_are_not_empty_replies(tmp_path: Path, qwen: Any) -> None:
    row = {"prompt": [ASKED], "chosen": [calling(OSLO)], "rejected": [calling(ROME)], "tools": [WEATHER]}
    data = read(tmp_path, [row] * 12, method="dpo").encode(qwen)
    assert (len(data.train), data.train.num_masked) == (12, 0)


def test_what_nothing_reads_is_listed_once_with_counts(tmp_path: Path, tokenizer: Any) -> None:
    plain = {"messages": [ASKED, REPLY], "source": "web", "id": None}
    kept = {"messages": [ASKED, {**REPLY, "reasoning_content": "hm"}, {**RESULT, "tool_call_id": "a"}, REPLY]}
    rows = [plain] * 10 + [{**kept, "source": "book", "tools": [WEATHER], "id": 7}] * 3
    notes = read(tmp_path, rows).encode(tokenizer).notes
    assert notes[:2] == (
        "Columns that nothing reads: source (in 13 rows), id (in 3 rows); assign one to a role with columns if it "
        "should be read.",
        "Parts of conversations that the chat template does not show: tools (in 3 of 3 rows), reasoning_content (in 3 "
        "of 3 messages), tool_call_id (in 3 of 3 messages).",
    )
    assert not any("nothing reads" in note or "does not show" in note for note in notes[2:])


@pytest.mark.parametrize(
    "row", [{"text": "warm", "label": "good"}, {"messages": [ASKED, REPLY], "labels": ["good"]}], ids=["text", "turns"]
)
def test_a_label_that_nothing_reads_names_the_method_that_does(tmp_path: Path, tokenizer: Any, row: Any) -> None:
    (note, *_) = read(tmp_path, [row] * 12).encode(tokenizer).notes
    column = list(row)[-1]
    assert note == (
        f"Columns that nothing reads: {column} (in 12 rows); assign one to a role with columns if it should be read; "
        f"set method: classification (for numbers: regression) if {column} is to be learned."
    )


def test_what_the_template_reads_is_not_listed(tmp_path: Path, qwen: Any) -> None:
    rows = [{"messages": [ASKED, calling({"id": "x", **OSLO}, ROME), RESULT, REPLY], "tools": [WEATHER]}] * 12
    assert not any("does not show" in note for note in read(tmp_path, rows).encode(qwen).notes)


def test_parallel_calls_of_which_a_template_writes_the_first_alone_are_listed(tmp_path: Path, tokenizer: Any) -> None:
    with_template(tokenizer, "gptoss")
    rows = [{"messages": [ASKED, calling(OSLO, ROME), RESULT, REPLY], "tools": [WEATHER]}] * 12
    notes = read(tmp_path, rows).encode(tokenizer).notes
    assert any("all calls of a turn except the first (in 12 of 12 turns with several calls)" in note for note in notes)


def test_a_role_that_the_template_passes_over_is_listed(tmp_path: Path, tokenizer: Any) -> None:
    with_template(tokenizer, "phi3")
    rows = [{"messages": [ASKED, {**REPLY, "content": "Wait."}, RESULT, REPLY]}] * 12
    notes = read(tmp_path, rows).encode(tokenizer).notes
    assert any("the text of turns of the role tool (12 of 12 turns)" in note for note in notes)


def test_thoughts_that_the_template_takes_out_of_a_reply_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    with_template(tokenizer, "deepseek_r1_distill")
    rows = [{"messages": [ASKED, {**REPLY, "content": "<think>hm</think>It rains."}]}] * 12
    notes = read(tmp_path, rows).encode(tokenizer).notes
    assert any(note.startswith("12 trained replies of the training data shortened") for note in notes)
    qwen3 = read(tmp_path, rows).encode(with_template(tokenizer, "qwen3"))
    assert not any("shortened" in note for note in qwen3.notes)


def test_keys_that_arrow_fills_with_null_are_not_there(tmp_path: Path) -> None:
    turns = [ASKED, calling(OSLO), calling({"type": "function", "function": {"name": "add", "arguments": {"x": 1}}})]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": turns}] * 12), path)
    [row, *_] = read_task_rows(Task(model="alto-tiny", dataset=str(path))).train
    assert isinstance(row, tuple)
    calls = [turn.other_keys()["tool_calls"][0]["function"]["arguments"] for turn in row[1:]]
    assert calls == [{"city": "Oslo"}, {"x": 1}]


@pytest.mark.parametrize("token_cache", ["memory", "disk"])
def test_rows_whose_calls_no_template_shows_are_named_by_file_and_line_and_explained_once(
    tmp_path: Path, shipped: Any, token_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows reach the template after a split, and from a file if the data is large."""
    rows = [{"messages": [ASKED, REPLY]}, {"messages": [ASKED, calling(OSLO)], "tools": [WEATHER]}] * 12
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    task = Task(model="alto-tiny", dataset=str(path), validation_split=0.25, token_cache=token_cache)
    with pytest.raises(BadRowsError) as caught:
        read_task_rows(task).encode(shipped)
    message = str(caught.value)
    assert message.count("expected a chat template that shows tool calls") == 1
    assert "conversation" not in message
    *_, first, others = message.split("\n")
    assert first.startswith(f"  {path}:")
    assert "more like it: " in others
    numbers = [int(number) for number in re.findall(r"(?<=[: ])\d+(?=[:,]|$)", f"{first.split(': ')[0]}:, {others}")]
    assert len(numbers) > 5
    assert all(number % 2 == 0 for number in numbers)


SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def chatml() -> Any:
    """Return a tokenizer with SmolLM2's special tokens and template, or SmolLM2's own from ``ALTO_TEST_SMOLLM2``."""
    if folder := os.environ.get("ALTO_TEST_SMOLLM2"):
        return AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    tokenizer.chat_template = SMOLLM2_TEMPLATE
    return tokenizer


def test_calls_under_a_template_without_tools_are_refused_with_one_that_trains_them(
    tmp_path: Path, chatml: Any
) -> None:
    turns = [ASKED, calling(OSLO, ROME), RESULT, {**RESULT, "content": "sun"}, REPLY]
    rows = [{"messages": turns, "tools": [WEATHER]}] * 12
    with pytest.raises(DataError, match="set chat_template: chatml-tools, which shows them, or leave"):
        read(tmp_path, rows).encode(chatml)

    task = Task(model="alto-tiny", dataset=str(tmp_path / "rows.jsonl"), chat_template="chatml-tools")
    chatml.chat_template = task.base_model.chat_template
    encoded = read(tmp_path, rows).encode(chatml)
    assert (len(encoded.train), encoded.train.num_shortened) == (12, 0)
    assert not any("does not show" in note for note in encoded.notes)
    [row] = Encoder(chatml).rows(convert(rows[0]))
    text = shown(row, chatml)
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert json.dumps(WEATHER) in text
    assert text.count("<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n") == 1
    called, answer = trained(row, chatml).removesuffix("\n").split("<|im_end|>")[:2]
    assert answer.strip() == "It rains."
    calls = [json.loads(call) for call in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", called)]
    assert calls == [OSLO["function"], ROME["function"]]
    assert re.sub(r"<tool_call>\n.*?\n</tool_call>", "", called).strip() == ""
    assert row.input_ids[-2:].count(chatml.eos_token_id) == 1
    prompt = encode_prompt(convert(rows[0])[:1], chatml)
    assert row.input_ids[: len(prompt)] == tuple(prompt)


def test_a_call_beside_text_under_the_shipped_template(chatml: Any) -> None:
    chatml.chat_template = chat_template_text("chatml-tools")
    system = {"role": "system", "content": "Be brief."}
    given = {"name": "f", "arguments": {"text": 'say "å"\n'}}
    [row] = Encoder(chatml).rows(convert({"messages": [system, ASKED, calling(given, content="Wait.")]}))
    written = json.dumps(given, ensure_ascii=False)
    assert trained(row, chatml).strip() == f"Wait.\n<tool_call>\n{written}\n</tool_call><|im_end|>"
    assert shown(row, chatml).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n")
    arguments = {**given, "arguments": json.dumps(given["arguments"], ensure_ascii=False)}  # as OpenAI clients send
    turn = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": arguments}]}
    assert written in chatml.apply_chat_template([ASKED, turn], tokenize=False)


def test_calls_that_are_not_shown_beside_text_are_noted_with_the_remedy(tmp_path: Path, chatml: Any) -> None:
    rows = [{"messages": [ASKED, calling(OSLO, content="Wait."), RESULT, REPLY]}] * 12
    notes = read(tmp_path, rows).encode(chatml).notes
    assert any("tool_calls (in 12 of 12 messages); set chat_template: chatml-tools" in note for note in notes)
