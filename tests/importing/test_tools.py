"""Recognition of the tool that a configuration file belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_configs import CONFIGS, write_configs
from typer.testing import CliRunner

from alto.cli import app
from alto.errors import SpecError, UnsupportedError
from alto.importing import TOOLS, import_file, imported_task
from alto.importing.imported import recognise


def test_marks_of_the_tools_are_their_own() -> None:
    names = list(TOOLS)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            assert not TOOLS[name].marks & TOOLS[other].marks, (name, other)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_configuration_has_marks_of_one_tool_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_configs(tmp_path / "work"))
    assert import_file(Path(name)).tool.title == CONFIGS[name][0]


@pytest.mark.parametrize(
    ("text", "arguments", "reason"),
    [
        (
            "learning_rate: 1e-4\n",
            (),
            "found none of their keys. Name the tool with --from llamafactory or axolotl or trl",
        ),
        (
            "stage: sft\nbase_model: x\n",
            (),
            "found as many keys of llamafactory as of axolotl. Name the tool with --from llamafactory or axolotl.",
        ),
        ("stage: sft\n", ("--from", "unsloth"), "--from: expected one of llamafactory, axolotl, trl, found 'unsloth'"),
        ("", (), "should describe a configuration, found an empty file"),
        ("a: [\n", (), "should be valid YAML"),
        ("1: 2\n", (), "should have text for keys"),
        ("- a\n", (), "should map keys to values, found a list"),
    ],
)
def test_files_of_no_tool(text: str, arguments: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    done = CliRunner().invoke(app, ["import", str(tmp_path / "c.yaml"), *arguments])
    assert isinstance(done.exception, SpecError)
    assert reason in str(done.exception)


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": NaN}'])
def test_json_that_is_no_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=r"c\.json: expected a JSON object"):
        import_file(tmp_path / "c.json")


def test_no_such_file(tmp_path: Path) -> None:
    for name in ("c.json", "c.yaml"):
        with pytest.raises(SpecError, match=name):
            import_file(tmp_path / name)


def test_the_tool_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model_name_or_path: m\ndataset_name: a/b\nuse_peft: true\n", encoding="utf-8")
    assert import_file(tmp_path / "c.yaml", "trl").values["dataset"] == "a/b"
    assert import_file(tmp_path / "c.yaml", "llamafactory").tool.title == "LLaMA-Factory"


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (
            "axolotl",
            "base_model: alto-tiny\nadapter: lora\nlearning_rate: 1e-4\ndatasets: [{path: 's3://a/b', type: other}]\n",
        ),
        ("llamafactory", "model_name_or_path: alto-tiny\nstage: sft\ndataset: nothing\ndataset_dir: nowhere\n"),
        ("trl", "model_name_or_path: alto-tiny\nuse_peft: true\ndatasets: [{path: a, data_dir: b}]\n"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_replaced_as_the_error_says(tool: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    with pytest.raises((SpecError, UnsupportedError)):
        import_file(tmp_path / "c.yaml", tool)
    overrides = ["dataset=a/b", "columns={prompt: q, completion: a}"]
    found = import_file(tmp_path / "c.yaml", tool, overrides)
    task = imported_task([found], overrides).task
    assert (task.dataset, task.columns) == ("a/b", {"prompt": "q", "completion": "a"})
    assert any(note.key in ("datasets", "dataset") and "'--set dataset'" in note.text for note in found.notes)


@pytest.mark.parametrize(
    ("keys", "tool"),
    [
        (["learning_rate", "num_train_epochs"], "TRL"),
        (["learning_rate", "per_device_train_batch_size", "eval_strategy", "warmup_ratio", "lr_scheduler_type"], "TRL"),
        (["learning_rate", "r", "lora_alpha"], "TRL"),
        (["target_modules"], "TRL"),
        (["dataset", "num_train_epochs", "lora_alpha"], "LLaMA-Factory"),
        (["micro_batch_size", "lr_scheduler_type"], "Axolotl"),
    ],
)
def test_keys_of_a_trainer_alone_are_of_trl(keys: list[str], tool: str) -> None:
    assert recognise(keys, "c.json").title == tool


def test_a_sweep_of_wandb_is_recognised() -> None:
    keys = ["program", "method", "metric", "parameters", "early_terminate"]
    with pytest.raises(SpecError, match=r"sweep\.yaml: expected a configuration of .*, found a sweep of W&B\. .*--set"):
        recognise(keys, "sweep.yaml")
