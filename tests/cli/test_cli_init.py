"""``alto init``: the file it writes is short, has comments, and passes ``alto plan``, for rows of every form."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from profiles import measured_at_once
from typer.testing import CliRunner, Result

from alto.cli import app, init
from alto.data.formats import _REQUIRED
from alto.errors import BadRowsError, DataError, DataFileNotFoundError, DataFormatError, ModelNotFoundError, SpecError
from alto.spec import Task, load_task

ROOT = Path(__file__).parents[2]
NUM_ROWS = 60
Make = Callable[[int], Mapping[str, Any]]


def turns(n: int, reply: str, names: Sequence[str] = ("role", "content", "user", "assistant")) -> list[dict[str, str]]:
    role, content, user, assistant = names
    return [{role: user, content: f"What is {n}?"}, {role: assistant, content: reply}]


def reply(n: int) -> str:
    return f"It is {n}." + " Yes." * (n % 3)


FORMS: dict[str, tuple[str, str, Make]] = {
    "messages": ("sft", ".jsonl", lambda n: {"messages": turns(n, reply(n))}),
    "conversations": ("sft", ".json", lambda n: {"conversations": turns(n, reply(n))}),
    "sharegpt": (
        "sft",
        ".jsonl",
        lambda n: {"conversations": turns(n, reply(n), ("from", "value", "human", "gpt"))},
    ),
    "prompt_completion": ("sft", ".jsonl", lambda n: {"prompt": f"What is {n}?", "completion": reply(n)}),
    "response": ("sft", ".csv", lambda n: {"prompt": f"What is {n}?", "response": reply(n)}),
    "question_answer": ("sft", ".tsv", lambda n: {"question": f"What is {n}?", "answer": reply(n)}),
    "raw_prompt_completion": ("sft", ".jsonl", lambda n: {"prompt": f"{n} is", "completion": f" {n}"}),
    "alpaca": ("sft", ".json", lambda n: {"instruction": "Say it.", "input": str(n), "output": reply(n)}),
    "text": ("sft", ".jsonl", lambda n: {"text": f"A plain text about {n}."}),
    "preference": ("dpo", ".jsonl", lambda n: {"prompt": f"{n}?", "chosen": reply(n), "rejected": "No."}),
    "preference_of_messages": (
        "dpo",
        ".jsonl",
        lambda n: {"chosen": turns(n, reply(n)), "rejected": turns(n, "No.")},
    ),
    "responses": (
        "dpo",
        ".jsonl",
        lambda n: {"prompt": f"{n}?", "chosen_response": reply(n), "rejected_response": "No."},
    ),
    "raw_preference": ("dpo", ".jsonl", lambda n: {"chosen": f"{n} is {reply(n)}", "rejected": f"{n} is no."}),
    "openai_preference": (
        "dpo",
        ".jsonl",
        lambda n: {
            "input": {"messages": turns(n, "")[:1]},
            "preferred_output": turns(n, reply(n))[1:],
            "non_preferred_output": turns(n, "No.")[1:],
        },
    ),
    "unpaired_preference": (
        "kto",
        ".jsonl",
        lambda n: {"prompt": f"{n}?", "completion": reply(n), "label": n % 3 > 0},
    ),
    "labelled_messages": ("kto", ".jsonl", lambda n: {"messages": turns(n, reply(n)), "label": n % 3 > 0}),
    "classes": ("classification", ".csv", lambda n: {"text": f"Row {n} is fine.", "label": ("good", "bad")[n % 2]}),
    "numbered_classes": ("classification", ".csv", lambda n: {"sentence": f"Row {n}.", "label": n % 3}),
    "classes_of_messages": (
        "classification",
        ".jsonl",
        lambda n: {"messages": turns(n, reply(n)), "label": ("good", "bad")[n % 2]},
    ),
    "two_texts": (
        "classification",
        ".tsv",
        lambda n: {"premise": f"{n} is a number.", "hypothesis": f"{n} is one.", "label": ("yes", "no")[n % 2]},
    ),
    "several_labels": ("classification", ".jsonl", lambda n: {"text": f"Row {n}.", "labels": ["a", "b"][: 1 + n % 2]}),
    "numbers": ("regression", ".csv", lambda n: {"text": f"Row {n} is fine.", "label": n / 10}),
    "stars": ("regression", ".csv", lambda n: {"text": f"Row {n} is fine.", "label": 1 + n % 5}),
}
"""Rows of every form: the method, the ending of the file, and a function that makes row ``n``."""


def write(path: Path, make: Make, count: int = NUM_ROWS) -> Path:
    rows = [make(n) for n in range(count)]
    if path.suffix in (".csv", ".tsv"):
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]), delimiter="," if path.suffix == ".csv" else "\t")
        table.writeheader()
        table.writerows(rows)
        path.write_text(text.getvalue(), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a device that is measured at once."""
    monkeypatch.chdir(tmp_path)
    measured_at_once(monkeypatch)
    return tmp_path


def invoke(*words: object, answers: str | None = None) -> Result:
    return CliRunner().invoke(app, [*map(str, words)], input=answers)


def made(*words: object) -> Task:
    """Return the task that ``alto init`` writes into ``task.yaml``."""
    done = invoke("init", *words)
    assert done.exit_code == 0, (done.output, done.exception)
    return load_task("task.yaml")


@pytest.fixture
def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line that may ask."""
    monkeypatch.setattr(init, "_can_ask", lambda: True)


def test_every_form_of_the_documentation_is_tried() -> None:
    tried = {name for name in FORMS if name in {form for form, _ in _REQUIRED}} | {"text_classification"}
    assert tried == {form for form, _ in _REQUIRED}


@pytest.mark.parametrize("name", FORMS)
def test_a_plan_accepts_the_file_for_rows_of_every_form(folder: Path, name: str) -> None:
    method, ending, make = FORMS[name]
    data = write(folder / f"rows{ending}", make)
    form = ("--set", f"dataset_format={name}") if name.startswith("raw_") else ()
    task = made(data, "--model", "alto-tiny", *form)
    assert task.method == method
    assert 4 <= len(task.jobs) <= 16
    assert task.validation_split == 0.25
    planned = invoke("plan", "task.yaml", "--json")
    assert planned.exit_code == 0, (planned.output, planned.exception)
    [facts] = json.loads(planned.stdout)["tasks"]
    assert facts["num_jobs"] == len(task.jobs)


def test_the_file_is_short_and_every_key_has_a_comment(folder: Path) -> None:
    write(folder / "rows.jsonl", FORMS["preference"][2])
    made("rows.jsonl", "--model", "alto-tiny", "--set", "max_slots=3", "--set", "early_exit.policy=paper")
    text = (folder / "task.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line]
    assert len(lines) <= 20
    assert all(re.search(r"# \w.{5}", line) for line in lines), text
    assert max(map(len, lines)) <= 140
    assert yaml.safe_load(text)["dataset"] == "rows.jsonl"
    assert "60 rows, preference (chosen, rejected, prompt)" in text
    assert "early_exit: {" in text


def test_commands_to_go_on_with_are_printed(folder: Path) -> None:
    write(folder / "rows.jsonl", FORMS["text"][2])
    done = invoke("init", "rows.jsonl", "--model", "alto-tiny", "--to", "my tasks/a.yaml")
    assert done.exit_code == 0, done.output
    assert "alto plan 'my tasks/a.yaml'" in done.output
    assert "alto tune 'my tasks/a.yaml'" in done.output
    assert load_task("my tasks/a.yaml").dataset == str(folder / "rows.jsonl")


@pytest.mark.usefixtures("at_a_terminal")
@pytest.mark.parametrize(
    ("name", "words", "answers", "flags"),
    [
        ("text", (), "rows.jsonl\nalto-tiny\n", ()),
        ("text", ("rows.jsonl",), "\n", ()),
        ("unpaired_preference", (), "rows.jsonl\n\nbetter\nreply\n", ("--goal", "reply")),
        ("unpaired_preference", ("--model", "alto-tiny"), "rows.jsonl\n\n", ("--goal", "rate")),
    ],
)
def test_questions_and_flags_give_the_same_file(
    folder: Path, name: str, words: Sequence[str], answers: str, flags: Sequence[str]
) -> None:
    write(folder / "rows.jsonl", FORMS[name][2])
    asked = invoke("init", *words, answers=answers)
    assert asked.exit_code == 0, (asked.output, asked.exception)
    text = (folder / "task.yaml").read_bytes()
    given = invoke("init", "rows.jsonl", "--model", "alto-tiny", *flags, "--to", "other.yaml")
    assert given.exit_code == 0, given.output
    assert (folder / "other.yaml").read_bytes() == text


@pytest.mark.usefixtures("at_a_terminal")
def test_columns_of_other_names_are_asked_for(folder: Path) -> None:
    write(folder / "rows.csv", lambda n: {"request": f"{n}?", "reply": reply(n)})
    asked = invoke("init", "rows.csv", answers="alto-tiny\nreply\nrequest\nreply\n")
    assert asked.exit_code == 0, (asked.output, asked.exception)
    assert "The rows have the columns request, reply." in asked.output
    text = (folder / "task.yaml").read_bytes()
    assert load_task("task.yaml").columns == {"prompt": "request", "completion": "reply"}
    columns = "columns={prompt: request, completion: reply}"
    made("rows.csv", "--model", "alto-tiny", "--set", columns, "--force")
    assert (folder / "task.yaml").read_bytes() == text


def test_a_real_terminal_is_asked(folder: Path) -> None:
    data = write(folder / "rows.jsonl", FORMS["text"][2])
    ours, theirs = pty.openpty()
    os.write(ours, f"{data}\nalto-tiny\n".encode())
    command = [sys.executable, "-m", "alto", "init", "--to", str(folder / "task.yaml")]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, check=False, cwd=ROOT)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert "Base model" in done.stdout
    assert load_task(folder / "task.yaml").model == "alto-tiny"


@pytest.mark.parametrize(("words", "missing"), [(("--model", "alto-tiny"), "DATA"), (("rows.jsonl",), "--model")])
def test_without_a_terminal_everything_has_to_be_given(folder: Path, words: Sequence[str], missing: str) -> None:
    write(folder / "rows.jsonl", FORMS["text"][2])
    done = invoke("init", *words)
    assert done.exit_code == 2
    assert f"Invalid value for {missing}" in done.output
    assert not (folder / "task.yaml").exists()


def test_a_file_is_replaced_only_with_force(folder: Path) -> None:
    write(folder / "rows.jsonl", FORMS["text"][2])
    (folder / "task.yaml").write_text("mine")
    done = invoke("init", "rows.jsonl", "--model", "alto-tiny")
    assert isinstance(done.exception, SpecError)
    assert "--to: expected a new file, found task.yaml" in str(done.exception)
    assert (folder / "task.yaml").read_text() == "mine"
    assert made("rows.jsonl", "--model", "alto-tiny", "--force").method == "sft"


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("absent.jsonl",), DataFileNotFoundError, "found nothing at absent.jsonl"),
        (("rows.jsonl", "--goal", "prefer"), DataFormatError, "expected preference pairs for method dpo"),
        (("rows.jsonl", "--goal", "reward"), DataError, "without a prompt"),
        (("odd.csv",), DataFormatError, "Name them, to reply as the rows do: alto init"),
        (("bad.jsonl",), BadRowsError, "on_bad_row: skip"),
        (("rows.jsonl", "--model", "./absent"), ModelNotFoundError, "found no such folder"),
        (("rows.jsonl", "--set", "learning_rat=1"), SpecError, "learning_rate"),
        (("rows.jsonl", "--to", "rows.jsonl/task.yaml"), SpecError, "--to: expected a file that can be written"),
    ],
)
def test_nothing_is_written_after_an_error(
    folder: Path, words: Sequence[str], error: type[Exception], message: str
) -> None:
    write(folder / "rows.jsonl", FORMS["text"][2])
    write(folder / "odd.csv", lambda n: {"request": f"{n}?", "reply": reply(n)})
    (folder / "bad.jsonl").write_text('{"text": "a"}\n' * 20 + "{\n")
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    model = () if "--model" in words else ("--model", "alto-tiny")
    done = invoke("init", *words, *model)
    assert isinstance(done.exception, error), done.output
    assert message in str(done.exception)
    assert {path: path.read_bytes() for path in folder.rglob("*")} == before


def test_a_model_that_is_elsewhere_is_not_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / "rows.jsonl", FORMS["preference"][2])
    monkeypatch.setattr("alto.engine.survey.preview_task", lambda *_, **__: pytest.fail("read"))
    done = invoke("init", "rows.jsonl", "--model", "owner/of-a-7b-model")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "owner/of-a-7b-model is not on this machine" in done.output
    task = load_task("task.yaml")
    assert sorted({job.config.learning_rate for job in task.jobs}) == [1.7e-5, 5e-5, 1.5e-4]


def test_a_validation_file_beside_the_training_file_is_used(folder: Path) -> None:
    write(folder / "train.jsonl", FORMS["messages"][2])
    write(folder / "valid.jsonl", FORMS["messages"][2], 9)
    task = made("train.jsonl", "--model", "alto-tiny")
    assert task.validation_dataset == str(folder / "valid.jsonl")
    assert "validation_dataset: valid.jsonl" in (folder / "task.yaml").read_text()


@pytest.mark.parametrize(("count", "num_validation", "epochs"), [(60, 15, 3), (400, 48, 3), (3000, 300, 2)])
def test_the_number_of_rows_decides_the_split_and_the_epochs(
    folder: Path, count: int, num_validation: int, epochs: int
) -> None:
    write(folder / "rows.jsonl", FORMS["text"][2], count)
    task = made("rows.jsonl", "--model", "alto-tiny")
    assert task.validation_split is not None
    assert round(task.validation_split * count) == num_validation
    assert f"share ({num_validation} rows) never trained on" in (folder / "task.yaml").read_text()
    assert task.jobs[0].config.num_train_epochs == epochs


def labelled(folder: Path, **counts: int) -> Path:
    """Write rows with such numbers of labels."""
    labels = [label for label, count in counts.items() for _ in range(count)]
    return write(folder / "rows.csv", lambda n: {"text": f"Text {n}.", "label": labels[n]}, len(labels))


@pytest.mark.parametrize(
    ("counts", "metric", "splits", "few"),
    [
        ({"good": 299, "bad": 100}, "loss", (0.13, 0.13), None),
        ({"good": 300, "bad": 100}, "macro_f1", (0.12, 0.12), None),
        ({"good": 360, "bad": 50}, "macro_f1", (0.2, 0.2), None),
        ({"good": 390, "bad": 6, "odd": 4}, "macro_f1", (0.25, 0.2), "'bad': 2, 'odd': 2"),
    ],
)
def test_labels_are_counted_and_decide_the_metric_and_the_splits(
    folder: Path, counts: dict[str, int], metric: str, splits: tuple[float, float], few: str | None
) -> None:
    done = invoke("init", labelled(folder, **counts), "--model", "alto-tiny", "--set", "data_seed=1")
    assert done.exit_code == 0, (done.output, done.exception)
    shown = ", ".join(f"{name!r}: {count}" for name, count in counts.items())
    assert f"labels: {shown}\n" in done.stdout
    task = load_task("task.yaml")
    assert (task.metric, (task.validation_split, task.test_split)) == (metric, splits)
    said = re.search("Labels with few validation rows: (.*)[.] Chance", done.stdout)
    assert (said and said[1]) == few
    assert done.stderr == f"reading {folder / 'rows.csv'}\n"


def test_rows_to_test_on_are_not_split_off_if_there_are_some(folder: Path) -> None:
    for name in ("train", "test"):
        write(folder / f"{name}.csv", FORMS["numbers"][2])
    task = made("train.csv", "--model", "alto-tiny")
    assert (task.test_dataset, task.test_split) == (str(folder / "test.csv"), None)
    write(folder / "rows.csv", FORMS["classes"][2])
    given = made("rows.csv", "--model", "alto-tiny", "--set", "test_split=0.1", "--set", "metric=accuracy", "--force")
    assert (given.test_split, given.metric) == (0.1, "accuracy")


def test_long_rows_are_not_cut_if_the_model_takes_them(folder: Path) -> None:
    write(folder / "rows.jsonl", lambda n: {"text": "a b " * (400 if n else 600)})
    task = made("rows.jsonl", "--model", "alto-tiny")
    assert task.max_length == 2048
    assert re.search(
        r"max_length: 2048 +# longer rows are cut; these have [\d,]+ to 1,\d\d\d tokens",
        (folder / "task.yaml").read_text(),
    )


def test_a_local_model_is_written_as_a_path(folder: Path, model: Path) -> None:
    write(folder / "rows.jsonl", FORMS["text"][2])
    (folder / "base").symlink_to(model)
    assert made("rows.jsonl", "--model", "base").model == str(model)


REPLIES: dict[str, Callable[[int], str]] = {
    "numeric": str,
    "json": lambda n: json.dumps({"sum": n, "is_even": n % 2 == 0}),
    "tool_call": lambda n: json.dumps({"name": "add", "arguments": {"n": n}}),
    "exact": lambda n: ("yes", "no, 3 of them")[n % 2],
    "similarity": lambda n: f"It is {n}. " + "This is a long reply. " * (1 + n % 3),
}
"""Replies for which each scorer suits best."""


@pytest.mark.parametrize("scorer", REPLIES)
def test_a_task_that_learns_from_rewards_has_a_scorer_that_suits_the_replies(folder: Path, scorer: str) -> None:
    write(folder / "rows.jsonl", lambda n: {"prompt": f"What is {n}?", "completion": REPLIES[scorer](n)})
    task = made("rows.jsonl", "--model", "alto-tiny", "--goal", "reward")
    assert (task.method, [reward.scorer for reward in task.reward_funcs]) == ("grpo", [scorer])
    assert len(task.jobs) == 12
    planned = invoke("plan", "task.yaml", "--json")
    assert planned.exit_code == 0, (planned.output, planned.exception)
    lines = [line for line in (folder / "task.yaml").read_text(encoding="utf-8").splitlines() if line]
    assert len(lines) <= 20
    assert all(re.search(r"# \w.{5}", line) for line in lines), lines
    (comment,) = [line.partition("# ")[2] for line in lines if line.startswith("reward_funcs:")]
    assert "reply" in comment


@pytest.mark.parametrize(
    ("override", "alphas"),
    [
        ("name=a", {32}),
        ("r=4", {32}),
        ("lora_alpha=8", {8}),
        ("learning_rate=1e-3", {16, 64}),
        ("search_space={lr: [1e-4, 1e-3], r: [8, 32]}", {16, 64}),
    ],
)
def test_alpha_is_fixed_only_with_learning_rates_that_are_for_it(
    folder: Path, override: str, alphas: set[float]
) -> None:
    write(folder / "rows.jsonl", FORMS["text"][2])
    done = invoke("init", "rows.jsonl", "--model", "alto-tiny", "--set", override)
    assert done.exit_code == 0, (done.output, done.exception)
    assert {job.config.lora_alpha for job in load_task("task.yaml").jobs} == alphas
    text = (folder / "task.yaml").read_text(encoding="utf-8")
    assert ("lora_alpha: 32 for every rank" in done.stdout) == ("32 suits every rank below" in text) == (alphas == {32})
    assert ("; the middle one is usual" in text) == (not override.startswith(("learning_rate", "search_space")))
    assert "# size of a step" in text


_CLASSIFY = "--goal classify --set 'columns={text: ticket, label: team}'"


@pytest.mark.parametrize(
    ("goal", "row", "commands"),
    [
        (
            (),
            {"ticket": "Broken.", "team": "a"},
            ("reply --set 'columns={prompt: ticket, completion: team}'", _CLASSIFY),
        ),
        (("--goal", "classify"), {"ticket": "Broken.", "team": "a"}, (_CLASSIFY,)),
        (
            ("--goal", "prefer"),
            {"a": "x", "b": "y"},
            ("'columns={prompt: COLUMN1, chosen: COLUMN2, rejected: COLUMN3}'",),
        ),
    ],
)
def test_columns_of_unknown_names_are_an_error_with_the_commands_that_name_them(
    folder: Path, goal: tuple[str, ...], row: dict[str, str], commands: tuple[str, ...]
) -> None:
    write(folder / "rows.jsonl", lambda _: row, 4)
    result = invoke("init", "rows.jsonl", "--model", "alto-tiny", *goal)
    assert isinstance(result.exception, DataFormatError)
    assert f"found {', '.join(row)}. Name them, to " in str(result.exception)
    for command in commands:
        assert command in str(result.exception)
    assert str(result.exception).count("alto init") == len(commands)
    assert not (folder / "task.yaml").exists()


def test_columns_that_nothing_reads_are_named(folder: Path) -> None:
    write(folder / "rows.csv", lambda n: {"text": f"Row {n}.", "lable": n % 2})
    done = invoke("init", "rows.csv", "--model", "alto-tiny")
    assert "Columns that nothing reads: lable (in 60 rows)" in done.stdout


def test_rewards_of_ones_own_are_kept(folder: Path) -> None:
    write(folder / "rows.jsonl", FORMS["prompt_completion"][2])
    task = made("rows.jsonl", "--model", "alto-tiny", "--set", "method=grpo", "--set", "reward_funcs=[contains]")
    assert [reward.scorer for reward in task.reward_funcs] == ["contains"]
