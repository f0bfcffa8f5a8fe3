"""``alto preview``: a task file or a data file, on a terminal or in a pipe; no weights are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from tiny import make_task, write_rows
from typer.testing import CliRunner, Result

from alto.cli import app
from alto.data import files
from alto.data.rows import RawRow
from alto.errors import AltoError, BadRowsError, DataFormatError


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["preview", *map(str, arguments)])


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("weights"))


def test_a_data_file_with_marks(tmp_path: Path) -> None:
    done = invoke(write_rows(tmp_path / "rows.jsonl"), "--rows", 2)
    assert done.exit_code == 0, done.output
    assert "form:        prompt_completion (prompt from prompt, completion from completion)\n" in done.stdout
    assert "<|user|>0 plus 0?<|end|><|assistant|>⟦ It is 0.<|end|>⟧\n" in done.stdout
    assert done.stdout.count("--- example") == 2
    assert "\x1b" not in done.stdout


def test_what_is_marked_is_what_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    turns = [("user", "q"), ("assistant", "first"), ("user", "r"), ("assistant", "second")]
    path.write_text(
        json.dumps([{"messages": [{"role": role, "content": text} for role, text in turns]}] * 4), encoding="utf-8"
    )
    facts = json.loads(invoke(path, "--json").stdout)
    trained = [text for text, is_trained in facts["examples"][0]["segments"] if is_trained]
    assert trained == ["first<|end|>", "second<|end|>"]
    assert facts["form"] == "messages"
    assert facts["counts"]["shared_rows"] == 1


def test_there_is_a_row_of_every_label_before_a_second_one_of_any(tmp_path: Path) -> None:
    path, labels = tmp_path / "rows.csv", ["late", "late", "late", "late", "broken", "late", "lost", "lost"]
    lines = (f"parcel {number},{label}\n" for number, label in enumerate(labels))
    path.write_text("text,label\n" + "".join(lines), encoding="utf-8")
    options = ("--set", "method=classification", "--set", f"validation_dataset={path}")
    for num_rows, shown in ((2, ["late", "broken"]), (4, ["late", "broken", "lost", "late"])):
        facts = json.loads(invoke(path, "--json", "--rows", num_rows, *options).stdout)
        assert [example["label"] for example in facts["examples"]] == shown


def test_only_the_first_rows_of_large_data_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, num_lines = tmp_path / "rows.jsonl", 0
    line = json.dumps({"prompt": "q", "completion": "a" * 60}) + "\n"
    path.write_text(line * 60_000, encoding="utf-8")

    def counted(lines: IO[str], where: str) -> Iterator[RawRow]:
        nonlocal num_lines
        for row in files._json_lines(lines, where):
            num_lines += 1
            yield row

    monkeypatch.setitem(files._READERS, ".jsonl", counted)
    facts = json.loads(invoke(path, "--json").stdout)
    assert num_lines == 501
    assert (facts["num_read"], facts["counts"]["train_rows"], facts["counts"]["validation_rows"]) == (500, 450, 50)
    assert len(facts["examples"]) == 3
    assert "read: the first 1,200 rows of each dataset; all numbers below count these rows" in " ".join(
        invoke(path, "--rows", 600).stdout.split()
    )
    few = invoke(path, "--set", "validation_split=0.01").stdout
    assert "validation:  5 rows" in few
    assert "The validation data is only" not in few


def test_an_error_of_large_data_is_that_of_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    short, long = ({"prompt": "q", "completion": "a b " * number} for number in (15, 1600))
    rows = [long] * 700 + [short] * 300
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    facts = json.loads(invoke(path, "--json", "--set", "max_length=100").stdout)
    assert (facts["num_read"], facts["counts"]["train_rows"]) == (None, 900)
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(BadRowsError, match="1001: expected one JSON object per line"):
        raise invoke(path, "--set", "max_length=100").exception or AssertionError


def test_a_task_file_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(make_task(tmp_path, max_length=64).to_yaml(), encoding="utf-8")
    facts = json.loads(invoke(path, "--json", "--rows", 1, "--set", "max_samples=10").stdout)
    assert (facts["counts"]["train_rows"], facts["max_length"], len(facts["examples"])) == (10, 64, 1)


def test_overrides_and_form_of_a_data_file(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("task,reply\n" + "".join(f"q{n},a{n}\n" for n in range(20)), encoding="utf-8")
    with pytest.raises(DataFormatError, match="found task, reply"):
        raise invoke(path).exception or AssertionError
    done = invoke(path, "--set", "columns={prompt: task, completion: reply}", "--format", "prompt_completion")
    assert "prompt from task, completion from reply" in done.stdout
    assert "⟦a" in done.stdout


def test_escapes_in_the_data_are_written_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"prompt": "\x1b[31m<b>", "completion": "[bold]\u202e"})
    path.write_text(f"{row}\n{row}\n", encoding="utf-8")
    done = invoke(path)
    assert r"<|user|>\x1b[31m<b><|end|><|assistant|>⟦[bold]\u202e<|end|>⟧" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    "arguments", [["absent.jsonl"], ["absent.yaml"], ["gsm9k"], ["rows.jsonl", "--format", "tulu"]]
)
def test_errors_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl")
    done = invoke(*arguments)
    assert isinstance(done.exception, AltoError)
    assert done.stdout == ""


def write_pairs(path: Path) -> Path:
    pairs = [{"prompt": f"{n} plus 1?", "chosen": f"It is {n + 1}.", "rejected": "Who knows?"} for n in range(20)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return path


def test_a_pair_is_its_prompt_and_then_both_replies(tmp_path: Path) -> None:
    done = invoke(write_pairs(tmp_path / "pairs.jsonl"), "--set", "method=dpo", "--rows", 1)
    assert done.exit_code == 0, done.output
    assert "form:        preference (chosen from chosen, rejected from rejected, prompt from prompt)\n" in done.stdout
    assert done.stdout.endswith(
        "<|user|>1 plus 1?<|end|><|assistant|>\n--- chosen\n⟦It is 2.<|end|>⟧\n--- rejected\n⟦Who knows?<|end|>⟧\n"
    )


def test_what_is_marked_of_a_pair_is_what_is_trained(tmp_path: Path) -> None:
    pair = {
        "chosen": [("user", "q"), ("assistant", "x"), ("user", "r"), ("assistant", "so so")],
        "rejected": [("user", "q"), ("assistant", "x"), ("user", "r"), ("assistant", "so not")],
    }
    row = {
        side: [{"role": role, "content": text} for role, text in conversation] for side, conversation in pair.items()
    }
    path = tmp_path / "pairs.jsonl"
    path.write_text((json.dumps(row) + "\n") * 12, encoding="utf-8")
    facts = json.loads(invoke(path, "--set", "method=orpo", "--json").stdout)
    prompt = "<|user|>q<|end|><|assistant|>x<|end|><|user|>r<|end|><|assistant|>"
    assert facts["examples"][0]["segments"] == [[prompt, False]]
    assert facts["examples"][0]["chosen"] == [["so so<|end|>", True]]
    assert facts["examples"][0]["rejected"] == [["so not<|end|>", True]]
    longest = facts["row_tokens"][2]
    assert longest < facts["examples"][0]["num_tokens"] < 2 * longest


@pytest.mark.parametrize("keys", [["buyer.nam"], ["total", "buyer.nam"]])
def test_a_key_that_no_reply_has_is_refused_with_the_nearest_one(tmp_path: Path, keys: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    reply = json.dumps({"buyer": {"name": "Ada", "city": "Oslo"}, "total": 3})
    path.write_text(
        "".join(json.dumps({"prompt": f"p{n}", "completion": reply}) + "\n" for n in range(12)), encoding="utf-8"
    )
    options = ("--set", f"select_by={{scorer: json, keys: {json.dumps(keys)}}}")
    done = invoke(path, *options)
    assert str(done.exception) == (
        "select_by json: expected the key 'buyer.nam' in the JSON object of at least one reply, found it in none of 1; "
        "did you mean 'buyer.name'? Correct keys, or remove select_by"
    )
    assert invoke(path, "--set", "select_by={scorer: json, keys: [buyer.name]}").exit_code == 0
    without = write_rows(tmp_path / "texts.jsonl")
    assert "select_by json: expected validation rows whose replies have a JSON value with buyer.name" in str(
        invoke(without, "--set", "select_by={scorer: json, keys: [buyer.name]}").exception
    )
