"""Configurations for other trainers: read back, they give the exported job, or say what is left out."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from alto.artifacts import Rows, Winner
from alto.artifacts.export import new_folder
from alto.artifacts.tool_config import write_tool_config
from alto.backbone import resolve_model
from alto.errors import SpecError, UnsupportedError
from alto.importing import NoteKind, import_file, imported_task
from alto.lora import AdapterWeights, SavedAdapter
from alto.spec import BaseModelSpec, JobConfig, Task

TOOLS = ("trl", "axolotl", "llamafactory")
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"

PLAIN: dict[str, Any] = {
    "learning_rate": 3e-4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "r": 8,
    "lora_alpha": 24,
    "lora_dropout": 0.05,
    "num_train_epochs": 2,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "weight_decay": 0.01,
    "max_grad_norm": 0.5,
    "adam_beta2": 0.95,
    "seed": 7,
}
PAIRS: dict[str, Any] = {**PLAIN, "gradient_accumulation_steps": 1, "lora_dropout": 0.0}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sft": ({**PLAIN, "target_modules": ["q_proj", "v_proj"], "max_length": 300}, TOOLS),
    "all-linear, steps": ({**PLAIN, "max_steps": 50, "warmup_ratio": 0, "warmup_steps": 5}, TOOLS),
    "experts": ({**PLAIN, "lora_dropout": 0.0, "target_parameters": ["experts.down_proj"]}, ("trl", "axolotl")),
    "dora, rslora, head": ({**PLAIN, "use_dora": True, "modules_to_save": ["lm_head"], "lora_dropout": 0.0}, TOOLS),
    "neftune": ({**PLAIN, "neftune_noise_alpha": 5.0, "use_rslora": True}, TOOLS),
    "no clipping": ({**PLAIN, "max_grad_norm": 0}, TOOLS),
    "other optimizer": ({**PLAIN, "optim": "sgd", "optim_args": {"momentum": 0.9}}, TOOLS),
    "schedule": (
        {**PLAIN, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        TOOLS,
    ),
    "all tokens": ({**PLAIN, "train_on": "all"}, TOOLS),
    "bfloat16 in 4 bits": ({**PLAIN, "dtype": "bfloat16", "load_in_4bit": True}, TOOLS),
    "LoRA+": ({**PLAIN, "loraplus_lr_ratio": 8.0}, ("axolotl", "llamafactory")),
    "share to validate on": ({**PLAIN, "validation_split": 0.2}, TOOLS),
    "template": ({**PLAIN, "chat_template": TEMPLATE}, ("trl", "axolotl")),
    "dpo": ({**PAIRS, "method": "dpo", "beta": 0.3}, TOOLS),
    "cdpo": ({**PAIRS, "method": "dpo", "label_smoothing": 0.1}, ("axolotl", "llamafactory")),
    "robust": ({**PAIRS, "method": "dpo", "loss_type": "robust", "label_smoothing": 0.1}, ("trl",)),
    "ipo": ({**PAIRS, "method": "dpo", "loss_type": "ipo", "beta": 0.3}, TOOLS),
    "sum of forms": ({**PAIRS, "method": "dpo", "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, ("trl",)),
    "rpo": ({**PAIRS, "method": "dpo", "rpo_alpha": 0.5}, ("trl", "llamafactory")),
    "orpo": ({**PAIRS, "method": "orpo", "beta": 0.2}, ("axolotl", "llamafactory")),
    "simpo": (
        {**PAIRS, "method": "cpo", "loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.5},
        ("axolotl", "llamafactory"),
    ),
    "kto": ({**PAIRS, "method": "kto", "desirable_weight": 1.5}, TOOLS),
}
"""Keys of a task, and the tools that can express all of them."""

FORMS = {"sft": "prompt_completion", "kto": "unpaired_preference"}
COLUMNS = {
    "prompt_completion": {"prompt": "prompt", "completion": "completion"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "unpaired_preference": {"prompt": "prompt", "completion": "completion", "label": "label"},
}


def winner_of(
    folder: Path, keys: dict[str, Any], form: str | None = None, *, of_messages: bool | None = None, **columns: str
) -> Winner:
    """Return a job as a run of a task with these keys has it."""
    data = folder / "rows.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    task = Task(**({"name": "mine", "model": "alto-tiny", "dataset": str(data)} | keys))
    form = form or FORMS.get(task.method, "preference")
    weights = AdapterWeights({})
    adapter = SavedAdapter(folder=folder, base_model=resolve_model("alto-tiny"), scales={}, rank=8, weights=weights)
    rows = Rows(name="mine", form=form, columns=columns or COLUMNS[form], of_messages=of_messages)
    (job,) = task.jobs
    return Winner(name="mine", adapter=adapter, base=task.base_model, task=task, config=job.config, rows=rows)


def written(winner: Winner, tool: Any, folder: Path) -> tuple[Path, str, tuple[str, ...]]:
    with new_folder(folder) as fresh:
        command, notes = write_tool_config(winner, tool, fresh, folder)
    return folder / f"{tool}.yaml", command, notes


def normal(config: JobConfig) -> dict[str, Any]:
    """Return a job's settings in one form: warmup as a share or as steps, DPO's loss forms by their weights."""
    found = config.to_dict()
    found["warmup"] = found.pop("warmup_ratio") or found.pop("warmup_steps")
    found.pop("warmup_steps", None)
    if "rpo_alpha" in found:
        names = found.pop("loss_type")
        names = [names] if isinstance(names, str) else names
        weights = found.pop("loss_weights") or [1.0] * len(names)
        alpha = found.pop("rpo_alpha")
        found["forms"] = dict(zip(names, weights, strict=True)) | ({} if alpha is None else {"sft": alpha})
    return found


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_imported_as_the_same_job(case: str, tool: str, tmp_path: Path) -> None:
    keys, complete = CASES[case]
    winner = winner_of(tmp_path, keys)
    assert winner.task is not None
    assert winner.config is not None
    if tool == "trl" and winner.task.method in ("orpo", "cpo"):
        with pytest.raises(UnsupportedError, match=f"that TRL trains from a .* file, found '{winner.task.method}'"):
            written(winner, tool, tmp_path / "out")
        return
    file, command, notes = written(winner, tool, tmp_path / "out")
    assert command.endswith(str(file))
    overrides = [f"method={winner.task.method}"] if tool == "trl" else []
    found = imported_task([import_file(file, tool, overrides)], overrides).task
    if tool in complete:
        assert notes == ()
        assert normal(found.jobs[0].config) == normal(winner.config)
        assert found.dataset == winner.task.dataset
        assert resolve_model(found.model) == resolve_model("alto-tiny")
        assert (found.max_length or 1024) == (winner.task.max_length or 1024)
        assert found.base_model.chat_template == winner.task.base_model.chat_template
        for key in ("method", "train_on", "dtype", "load_in_4bit", "validation_split"):
            assert getattr(found, key) == getattr(winner.task, key)
    else:
        assert notes
        comments = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
        assert comments[1:] == [f"# {note}" for note in notes]


@pytest.mark.parametrize(
    ("tool", "keys", "notes"),
    [
        ("trl", {"loraplus_lr_ratio": 8.0}, ["TRL has no place for loraplus_lr_ratio: 8.0."]),
        ("trl", {"bias": "all"}, ["TRL has no place for bias: 'all'."]),
        ("trl", {"train_on": "last"}, ["TRL has no place for train_on: 'last'."]),
        ("axolotl", {"rank_pattern": {"q_proj": 4}}, ["Axolotl has no place for rank_pattern: {'q_proj': 4}."]),
        ("llamafactory", {"adapter_dtype": "bfloat16"}, ["LLaMA-Factory has no place for adapter_dtype: 'bfloat16'."]),
        ("trl", {"optim_state_dtype": "bfloat16"}, ["TRL has no place for optim_state_dtype: 'bfloat16'."]),
    ],
)
def test_settings_without_a_key_in_the_tool_are_reported(
    tool: str, keys: dict[str, Any], notes: list[str], tmp_path: Path
) -> None:
    _, _, found = written(winner_of(tmp_path, PLAIN | keys), tool, tmp_path / "out")
    assert list(found) == notes


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renamed an option
@pytest.mark.parametrize("case", [name for name, (_, tools) in CASES.items() if "trl" in tools])
def test_trl_itself_reads_the_file(case: str, tmp_path: Path) -> None:
    """TRL's parser refuses keys that it does not know."""
    from trl import DatasetMixtureConfig, DPOConfig, KTOConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    winner = winner_of(tmp_path, {**CASES[case][0], "report_to": "none"})
    assert winner.task is not None
    file, command, _ = written(winner, "trl", tmp_path / "out")
    kind = {"sft": SFTConfig, "dpo": DPOConfig, "kto": KTOConfig}[winner.task.method]
    assert command == f"trl {winner.task.method} --config {file}"
    parser = TrlParser((ScriptArguments, kind, ModelConfig, DatasetMixtureConfig))
    _, training, model, data = parser.parse_args_and_config(["--config", str(file)], fail_with_unknown_args=True)
    config = winner.config
    assert config is not None
    assert (model.lora_r, model.lora_alpha, training.learning_rate) == (8, 24, 3e-4)
    assert training.max_grad_norm == (config.max_grad_norm or 0.0)
    assert training.seed == 7
    assert data.datasets[0].data_files == winner.task.dataset
    assert training.gradient_checkpointing is False


@pytest.mark.parametrize(
    ("form", "columns", "of_axolotl", "of_llamafactory"),
    [
        (
            "messages",
            {"messages": "turns"},
            {"type": "chat_template", "field_messages": "turns"},
            {"formatting": "sharegpt", "columns": {"messages": "turns"}},
        ),
        (
            "alpaca",
            {"instruction": "ask", "input": "more", "output": "say"},
            {"type": {"field_instruction": "ask", "field_input": "more", "field_output": "say"}},
            {"formatting": "alpaca", "columns": {"prompt": "ask", "query": "more", "response": "say"}},
        ),
        ("text", {"text": "body"}, {"type": "completion", "field": "body"}, {}),
    ],
)
def test_rows_are_described_by_their_columns(
    form: str, columns: dict[str, str], of_axolotl: dict[str, Any], of_llamafactory: dict[str, Any], tmp_path: Path
) -> None:
    winner = winner_of(tmp_path, PLAIN, form, **columns)
    file, _, _ = written(winner, "axolotl", tmp_path / "axolotl")
    (dataset,) = yaml.safe_load(file.read_text(encoding="utf-8"))["datasets"]
    assert of_axolotl.items() <= dataset.items()
    found = imported_task([import_file(file, "axolotl")]).task
    assert (found.dataset_format, dict(found.columns)) == (form, columns)
    if of_llamafactory:
        file, _, _ = written(winner, "llamafactory", tmp_path / "llamafactory")
        info = json.loads((tmp_path / "llamafactory" / "dataset_info.json").read_text(encoding="utf-8"))
        assert of_llamafactory.items() <= info["mine"].items()
        found = imported_task([import_file(file, "llamafactory")]).task
        assert (found.dataset_format, dict(found.columns)) == (form, columns)


def test_what_other_tools_cannot_train_is_refused(tmp_path: Path) -> None:
    sources = [{"path": "a/b", "name": "one"}, {"path": "c/d", "name": "two"}]
    with pytest.raises(UnsupportedError, match="found a mixture of 2 sources"):
        written(winner_of(tmp_path, {"dataset": sources}), "trl", tmp_path / "out")
    with pytest.raises(UnsupportedError, match="found 'gsm8k', a name that other tools do not know"):
        written(winner_of(tmp_path, {"dataset": "gsm8k"}), "trl", tmp_path / "out")
    keys = {"method": "classification", "problem_type": "single_label_classification", "id2label": ["no", "yes"]}
    with pytest.raises(UnsupportedError, match="found 'classification'"):
        written(winner_of(tmp_path, keys, "prompt_completion"), "axolotl", tmp_path / "out")
    adapter = winner_of(tmp_path, {}).adapter
    bare = Winner(name="mine", adapter=adapter, base=BaseModelSpec(id="alto-tiny"))
    with pytest.raises(SpecError, match="expected a run, whose task names the model, the data and the method"):
        written(bare, "trl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_texts_that_trl_joins_without_the_chat_template_are_reported(method: str, tmp_path: Path) -> None:
    keys = PAIRS | {"method": method}
    _, _, notes = written(winner_of(tmp_path, keys, of_messages=False), "trl", tmp_path / "texts")
    assert [note.split("'")[1] for note in notes if "dataset_format" in note] == [FORMS.get(method, "preference")]
    _, _, notes = written(winner_of(tmp_path, keys, of_messages=True), "trl", tmp_path / "messages")
    assert notes == ()


@pytest.mark.parametrize(
    ("form", "of_messages", "is_noted"),
    [
        ("prompt_completion", False, True),
        ("preference", False, True),
        ("messages", True, False),
        ("text", False, False),
    ],
)
def test_custom_types_of_axolotl_write_no_chat_template(
    form: str, of_messages: bool, is_noted: bool, tmp_path: Path
) -> None:
    keys = PAIRS | {"method": "dpo" if form == "preference" else "sft"}
    winner = winner_of(tmp_path, keys, form, of_messages=of_messages, **COLUMNS.get(form, {"text": "text"}))
    _, _, notes = written(winner, "axolotl", tmp_path / "out")
    assert notes == ((f"Axolotl has no place for dataset_format: '{form}'.",) if is_noted else ())


@pytest.mark.parametrize("tool", ["axolotl", "llamafactory"])
@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_lists_of_messages_are_no_texts_of_another_tool(method: str, tool: str, tmp_path: Path) -> None:
    """Axolotl would write the list itself into the prompt, as Python prints it."""
    keys = PAIRS | {"method": method}
    written(winner_of(tmp_path, keys, of_messages=False), tool, tmp_path / "texts")
    with pytest.raises(UnsupportedError, match=r"expected texts in the columns of \w+, .* found lists of messages"):
        written(winner_of(tmp_path, keys, of_messages=True), tool, tmp_path / "messages")


SETTINGS = st.fixed_dictionaries(
    {
        "learning_rate": st.floats(1e-7, 1e-1),
        "per_device_train_batch_size": st.integers(1, 64),
        "r": st.integers(1, 128),
        "lora_alpha": st.floats(0.5, 256),
        "target_modules": st.sampled_from(["all-linear", ["q_proj"], ["down_proj", "v_proj"]]),
        "use_rslora": st.booleans(),
        "use_dora": st.booleans(),
        "modules_to_save": st.sampled_from([None, ["lm_head"]]),
        "num_train_epochs": st.sampled_from([0.5, 1, 2, 7]),
        "max_steps": st.sampled_from([None, 1, 400]),
        "lr_scheduler_type": st.sampled_from(["linear", "cosine", "constant_with_warmup", "inverse_sqrt"]),
        "weight_decay": st.floats(0, 1),
        "max_grad_norm": st.sampled_from([0, 0.3, 1]),
        "adam_beta1": st.floats(0, 0.99),
        "adam_epsilon": st.floats(1e-12, 1e-4),
        "seed": st.integers(0, 2**32 - 1),
        "max_length": st.integers(16, 8192),
        "dtype": st.just("bfloat16"),  # Axolotl has no key for float32
        "load_in_4bit": st.booleans(),
        "validation_split": st.floats(0.01, 0.5),
    }
)
"""Settings that all tools have."""

WARMUPS = st.one_of(
    st.fixed_dictionaries({"warmup_ratio": st.floats(0.01, 0.9)}),
    st.fixed_dictionaries({"warmup_steps": st.integers(0, 99)}),
)
METHODS = st.one_of(
    st.fixed_dictionaries(
        {"gradient_accumulation_steps": st.integers(1, 16), "train_on": st.sampled_from(["completion", "all"])}
    ),
    st.fixed_dictionaries({"method": st.just("dpo"), "beta": st.floats(1e-3, 10)}),
    st.fixed_dictionaries(
        {
            "method": st.just("kto"),
            "per_device_train_batch_size": st.integers(2, 64),
            "beta": st.floats(1e-3, 10),
            "desirable_weight": st.floats(0, 5),
            "undesirable_weight": st.floats(0, 5),
        }
    ),
)


@settings(max_examples=40, deadline=None)
@given(keys=SETTINGS, warmup=WARMUPS, method=METHODS)
def test_what_is_exported_and_imported_again_is_the_same_configuration(
    keys: dict[str, Any], warmup: dict[str, Any], method: dict[str, Any]
) -> None:
    given = keys | warmup | method
    for tool in TOOLS:
        with tempfile.TemporaryDirectory() as name:
            winner = winner_of(Path(name), given)
            file, _, notes = written(winner, tool, Path(name) / "out")
            overrides = [f"method={given['method']}"] if tool == "trl" and "method" in given else []
            imported = import_file(file, tool, overrides)
            found = imported_task([imported], overrides).task
        assert notes == (), tool
        assert not [note for note in imported.notes if note.kind is NoteKind.UNKNOWN], tool
        assert winner.config is not None
        assert normal(found.jobs[0].config) == normal(winner.config), tool
        for key in ("max_length", "dtype", "load_in_4bit", "validation_split", "train_on", "method"):
            assert getattr(found, key) == getattr(winner.task, key), (tool, key)
