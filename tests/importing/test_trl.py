"""Configurations of TRL and transformers, as YAML and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import load_tokenizer
from trl_rows import trl_row

from alto.data import Conversation, Message
from alto.data.encode import Encoder
from alto.errors import AltoError, SpecError, UnsupportedError
from alto.importing import ImportedFile, ImportedTask, NoteKind, import_file, imported_task

BASE: dict[str, Any] = {
    "model_name_or_path": "alto-tiny",
    "dataset_name": "a/b",
    "use_peft": True,
    "lora_target_modules": "all-linear",
    "assistant_only_loss": True,
}


def imported(folder: Path, *overrides: str, **keys: Any) -> ImportedFile:
    (folder / "config.json").write_text(json.dumps(BASE | keys), encoding="utf-8")
    return import_file(folder / "config.json", "trl", overrides)


def line(found: ImportedFile, key: str) -> str:
    (text,) = [str(note) for note in found.notes if note.key == key]
    return text


def task(folder: Path, *overrides: str, **keys: Any) -> ImportedTask:
    return imported_task([imported(folder, *overrides, **keys)], overrides)


@pytest.mark.parametrize(
    ("keys", "method", "rate"),
    [
        ({}, "sft", 2e-5),
        ({"loss_type": "nll"}, "sft", 2e-5),
        ({"assistant_only_loss": None, "beta": 0.2}, "dpo", 1e-6),
        ({"assistant_only_loss": None, "loss_type": ["ipo"]}, "dpo", 1e-6),
        ({"assistant_only_loss": None, "loss_type": "kto", "beta": 0.2}, "kto", 1e-6),
        ({"assistant_only_loss": None, "desirable_weight": 0.5}, "kto", 1e-6),
        ({"assistant_only_loss": None, "loss_type": "simpo", "simpo_gamma": 0.4}, "cpo", 1e-6),
        ({"assistant_only_loss": None, "loss_type": "simpo", "beta": 2.0}, "cpo", 1e-6),
        ({"assistant_only_loss": None, "cpo_alpha": 0.5}, "cpo", 1e-6),
    ],
)
def test_the_command_and_its_defaults(folder: Path, keys: dict[str, Any], method: str, rate: float) -> None:
    found = imported(folder, **keys)
    expected = {"method": method, "learning_rate": rate, "max_length": 1024, "per_device_train_batch_size": 8}
    assert expected.items() <= found.values.items()
    config = imported_task([found]).task.jobs[0].config
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.05 if method == "sft" else 0.0)


def test_the_command_may_be_named(folder: Path) -> None:
    keys = {"assistant_only_loss": None}
    found = imported(folder, **keys)
    assert "--set method=dpo" in line(found, "(TRL's command)")
    named = task(folder, "method=dpo", **keys)
    assert (named.task.method, named.values["learning_rate"]) == ("dpo", 1e-6)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"max_length": None}, {"max_length": 2**20}),
        ({"max_seq_length": 2048}, {"max_length": 2048}),
        ({"max_seq_length": 2048, "max_length": 512}, {"max_length": 512}),
        ({"lora_modules_to_save": ["lm_head"]}, {"modules_to_save": ["lm_head"]}),
        ({"completion_only_loss": False, "assistant_only_loss": None}, {"train_on": "all"}),
        ({"dataset_text_field": "body"}, {"columns": {"text": "body"}}),
        (
            {"dataset_config": "en", "dataset_train_split": "train_sft"},
            {"dataset_config": "en", "dataset_train_split": "train_sft"},
        ),
        ({"dtype": "float16"}, {"dtype": "float16"}),
        ({"bf16": True}, {"dtype": "bfloat16"}),
        ({"load_in_4bit": True}, {"load_in_4bit": True}),
        ({"lora_target_modules": ["all-linear"]}, {"target_modules": "all-linear"}),
        ({"lora_target_modules": None}, {"target_modules": "peft-default"}),
        ({"use_dora": True}, {"use_dora": True}),
        ({"gradient_checkpointing": True}, {"gradient_checkpointing": True}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, {"lr_scheduler_type": "constant"}),
        ({"chat_template_path": "template.jinja"}, {"chat_template": "TEMPLATE"}),
    ],
)
def test_keys_that_become_another_one(folder: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    (folder / "template.jinja").write_text("{{ messages }}", encoding="utf-8")
    if expected.get("chat_template"):
        expected = {"chat_template": str(folder / "template.jinja")}
    found = imported(folder, **keys)
    assert expected.items() <= found.values.items()
    imported_task([found])


def test_datasets_are_a_mixture(folder: Path) -> None:
    entries = [
        {"path": "a/b", "name": "en", "split": "train_sft", "fraction": 0.7},
        {"path": "json", "data_files": "data/chat_messages.jsonl", "fraction": 0.3},
    ]
    found = task(folder, datasets=entries, test_split_size=0.2)
    sources = found.task
    texts = [note.text for note in found.files[0].notes if note.key.endswith(".fraction")]
    assert len(texts) == 2
    assert "TRL trains on the first rows of each dataset, so few that no row repeats" in texts[0]
    assert [(source.path, source.weight, source.dataset_train_split) for source in sources.sources] == [
        ("a/b", 0.7, "train_sft"),
        (str(folder / "data" / "chat_messages.jsonl"), 0.3, None),
    ]
    assert sources.validation_split == 0.2


@pytest.mark.parametrize(
    ("keys", "error", "reason"),
    [
        ({"use_peft": False}, UnsupportedError, "TRL would train all weights"),
        ({"datasets": [{"path": "a/b", "data_dir": "x"}]}, UnsupportedError, r"datasets\[0\]: expected a hub dataset"),
        ({"datasets": ["a/b"]}, SpecError, r"datasets\[0\]: expected a mapping"),
        (
            {"dataset_name": "data"},
            UnsupportedError,
            "dataset_name: expected a file or a hub dataset, found the folder",
        ),
        ({"dataset_name": None}, SpecError, "expected a dataset, found none. Give it with --set dataset=NAME"),
        ({"model_name_or_path": None}, SpecError, "expected a model, found none"),
        ({"lr_scheduler_kwargs": "{"}, SpecError, "lr_scheduler_kwargs: expected a mapping, or its JSON text"),
        ({"optim": "lion_8bit"}, UnsupportedError, "optim: expected one of"),
        ({"loss_type": ["aot"], "assistant_only_loss": None, "beta": 0.1}, SpecError, "'aot', which sorts"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    folder: Path, keys: dict[str, Any], error: type[AltoError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        task(folder, **keys)


@pytest.mark.parametrize(
    ("keys", "key", "kind"),
    [
        ({"assistant_only_loss": False}, "assistant_only_loss", NoteKind.USED),
        ({"lora_target_modules": None}, "lora_target_modules", NoteKind.USED),
        ({"packing": True}, "packing", NoteKind.USED),
        ({"loss_type": "dft"}, "loss_type", NoteKind.NOT_SUPPORTED),
        ({"model_init_kwargs": {"dtype": "x"}}, "model_init_kwargs", NoteKind.NOT_SUPPORTED),
        ({"no_remove_unused_columns": True}, "no_remove_unused_columns", NoteKind.NOT_NEEDED),
        ({"report_to": ["comet_ml"]}, "report_to", NoteKind.NOT_SUPPORTED),
        ({"chat_template_path": "Qwen/Qwen3-0.6B"}, "chat_template_path", NoteKind.NOT_SUPPORTED),
        ({"beta": 0.3}, "beta", NoteKind.NOT_NEEDED),
        ({"data_seed": 7}, "data_seed", NoteKind.NOT_NEEDED),
        ({"eval_steps": 50}, "eval_steps", NoteKind.NOT_NEEDED),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, "warmup_ratio", NoteKind.NOT_NEEDED),
    ],
)
def test_what_is_not_taken_over_is_reported(folder: Path, keys: dict[str, Any], key: str, kind: NoteKind) -> None:
    (found,) = [note for note in imported(folder, **keys).notes if note.key == key]
    assert found.kind is kind


EVERYWHERE = {"dataset_format", "eval_strategy", "lora_target_modules", "output_dir", "save_steps", "use_cpu"}


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("TrainingArguments", {*EVERYWHERE, "(TRL's command)", "assistant_only_loss"}),
        ("SFTConfig", {*EVERYWHERE, "assistant_only_loss", "bf16"}),
        ("DPOConfig", {*EVERYWHERE, "bf16"}),
        ("KTOConfig", {*EVERYWHERE, "bf16", "train_sampling_strategy"}),
    ],
)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_trainers_written_as_json(folder: Path, name: str, reported: set[str]) -> None:
    """They write every field; fields at their defaults are not reported."""
    trl = pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    import transformers

    kind = getattr(trl, name, None) or getattr(transformers, name)
    arguments = kind(output_dir=str(folder / "out"), learning_rate=3e-5, report_to="none", save_steps=20, use_cpu=True)
    (folder / "args.json").write_text(arguments.to_json_string(), encoding="utf-8")
    found = import_file(folder / "args.json")
    assert found.tool.title == "TRL"
    assert {note.key for note in found.notes} == reported
    whole = imported_task([found], ["model=alto-tiny", "dataset=a/b"]).task
    assert whole.method == {"DPOConfig": "dpo", "KTOConfig": "kto"}.get(name, "sft")
    assert whole.jobs[0].config.learning_rate == 3e-5
    assert {field.name for field in dataclasses.fields(kind)} <= json.loads(arguments.to_json_string()).keys()


@pytest.mark.parametrize(
    ("keys", "dropout"), [({}, 0.0), ({"disable_dropout": False}, 0.1), ({"disable_dropout": True}, 0.0)]
)
def test_dropout_of_preferences_is_that_of_trl(folder: Path, keys: dict[str, Any], dropout: float) -> None:
    made = task(folder, beta=0.1, assistant_only_loss=None, lora_dropout=0.1, **keys)
    assert made.task.jobs[0].config.lora_dropout == dropout


def test_alpha_of_cpo_is_not_that_of_the_adapter(folder: Path) -> None:
    """TRL's CPO has ``alpha``, of AlphaPO's reward, besides ``cpo_alpha``; other tools mean lora_alpha by it."""
    keys = {"assistant_only_loss": None, "loss_type": "simpo", "cpo_alpha": 0.3, "lora_alpha": 12}
    plain = task(folder, **keys, alpha=0.0)
    assert not [note for note in plain.files[0].notes if note.key == "alpha"]
    config = plain.task.jobs[0].config
    assert (config.lora_alpha, config.objective.to_dict()["cpo_alpha"]) == (12, 0.3)
    found = imported(folder, **keys, alpha=0.25)
    assert line(found, "alpha") == "alpha: not supported: ALTO does not have AlphaPO's form of the reward"
    assert found.values["lora_alpha"] == 12
    without = imported(folder, **{**keys, "lora_alpha": None}, alpha=0.25)
    assert without.values["lora_alpha"] == 32, "TRL's default"


@pytest.mark.parametrize(("gamma", "reported"), [(0.5, False), (0.7, True)])
def test_gamma_of_simpo_belongs_to_its_loss(folder: Path, gamma: float, reported: bool) -> None:
    """TRL has the setting for every loss of CPO, with the value 0.5, and reads it for SimPO only."""
    made = task(folder, assistant_only_loss=None, cpo_alpha=0.3, loss_type="ipo", simpo_gamma=gamma)
    assert made.task.jobs[0].config.objective.to_dict()["loss_type"] == "ipo"
    expected = ["simpo_gamma: not needed: TRL reads it only with loss_type: simpo"] if reported else []
    assert [str(note) for note in made.files[0].notes if note.key == "simpo_gamma"] == expected
    other = task(folder, "loss_type=simpo", assistant_only_loss=None, cpo_alpha=0.3, simpo_gamma=gamma)
    assert other.task.jobs[0].config.objective.to_dict()["simpo_gamma"] == gamma


@pytest.mark.parametrize("key", ["alpha", "rank", "dropout", "batch_size", "epochs", "optimizer", "lr", "cutoff_len"])
def test_spellings_of_other_tools_are_no_keys_of_trl(folder: Path, key: str) -> None:
    found = imported(folder, **{key: 3})
    near = " (did you mean 'optim'?)" if key == "optimizer" else ""
    assert line(found, key) == f"{key}: unknown: ALTO does not know this key{near}; it is left out"
    assert found.values == imported(folder).values


@pytest.mark.parametrize("name", ["cpo.CPOConfig", "orpo.ORPOConfig"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_experimental_trainers_written_as_json(folder: Path, name: str) -> None:
    module, _, kind = name.partition(".")
    made = getattr(pytest.importorskip(f"trl.experimental.{module}"), kind)
    arguments = made(output_dir=str(folder / "out"), report_to="none", save_steps=20, use_cpu=True, beta=0.3)
    (folder / "args.json").write_text(arguments.to_json_string(), encoding="utf-8")
    found = import_file(folder / "args.json", None, [f"method={module}"])
    assert {note.key for note in found.notes} == {*EVERYWHERE, "bf16"}
    config = imported_task([found], ["model=alto-tiny", "dataset=a/b"]).task.jobs[0].config
    assert (config.learning_rate, config.lora_alpha, config.objective.beta) == (1e-6, 32, 0.3)


@pytest.mark.parametrize("split", ["train", "train[:50%]"])
def test_a_part_of_a_file_is_reported(folder: Path, split: str) -> None:
    """All rows of a file are used; users who asked for half of them must know."""
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    listed = [{"path": "json", "data_files": "rows.jsonl", "split": split}]
    answer = "not supported: a file has no splits: all of its rows are used; set max_samples for a part of them"
    for keys, key in (
        ({"dataset_name": None, "datasets": listed}, "datasets[0].split"),
        ({"dataset_name": "rows.jsonl", "datasets": None, "dataset_train_split": split}, "dataset_train_split"),
    ):
        found = imported(folder, **keys)
        expected = [] if split == "train" else [f"{key}: {answer}"]
        assert [str(note) for note in found.notes if note.key == key] == expected


def test_use_peft_alone_has_the_adapter_of_trl(folder: Path) -> None:
    (folder / "bare.yaml").write_text("model_name_or_path: m\ndataset_name: a/b\nuse_peft: true\n", encoding="utf-8")
    config = imported_task([import_file(folder / "bare.yaml")]).task.jobs[0].config
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.05)


HAND_WRITTEN = {"num_train_epochs": 2, "learning_rate": 1e-4, "lr_scheduler_type": "cosine"}


@pytest.mark.parametrize("ending", ["json", "yaml"])
@pytest.mark.parametrize(
    ("keys", "adapter"),
    [
        ({"r": 16, "target_modules": "all-linear"}, (16, 8, 0.0)),
        ({"target_modules": ["q_proj"]}, (8, 8, 0.0)),
        ({"r": 4, "lora_alpha": 32, "lora_dropout": 0.1}, (4, 32, 0.1)),
    ],
)
def test_keys_of_peft_have_its_defaults(
    folder: Path, ending: str, keys: dict[str, Any], adapter: tuple[int, float, float]
) -> None:
    peft = pytest.importorskip("peft")
    of_peft = peft.LoraConfig(**keys)
    assert (of_peft.r, of_peft.lora_alpha, of_peft.lora_dropout) == adapter
    (folder / f"args.{ending}").write_text(json.dumps(HAND_WRITTEN | keys), encoding="utf-8")
    found = import_file(folder / f"args.{ending}")
    config = imported_task([found], ["model=m", "dataset=a/b"]).task.jobs[0].config
    assert (found.tool.title, (config.r, config.lora_alpha, config.lora_dropout)) == ("TRL", adapter)
    chosen = [note for note in found.notes if "target_modules" in note.key]
    assert bool(chosen) == ("target_modules" not in keys)


@pytest.mark.parametrize(
    "override",
    ["target_modules=all-linear", "lora_target=q_proj", "search_space={target_modules: [q_proj, k_proj]}"],
)
def test_overrides_are_not_reported_as_defaults(folder: Path, override: str) -> None:
    (folder / "args.json").write_text(json.dumps(HAND_WRITTEN), encoding="utf-8")
    found = import_file(folder / "args.json", None, [override, "train_on=all"])
    assert not {"lora_target_modules", "target_modules", "assistant_only_loss"} & {note.key for note in found.notes}
    assert "target_modules" not in found.values
    imported_task([found], ["model=m", "dataset=a/b", "train_on=all", override])


def test_orpo_has_the_learning_rate_of_trl(folder: Path) -> None:
    made = task(folder, "method=orpo", assistant_only_loss=None, beta=0.2)
    assert (made.task.method, made.task.jobs[0].config.learning_rate) == ("orpo", 1e-6)


@pytest.mark.parametrize("completion", [None, False])
@pytest.mark.parametrize("assistant", [False, True])
def test_trained_tokens_of_messages_are_those_of_trl(folder: Path, assistant: bool, completion: bool | None) -> None:
    """The labels of TRL's ``SFTTrainer`` decide; where it trains all by default, a note says what ALTO does."""
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    turns = ["What is 1 + 1?", "2", "And 2 + 2?", "4"]
    row = {"messages": [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]}
    tokenizer = load_tokenizer()
    _, expected = trl_row(row, tokenizer, assistant_only=assistant, completion_only=completion)
    made = task(folder, assistant_only_loss=assistant, completion_only_loss=completion)
    conversation = Conversation(Message(turn["role"], turn["content"]) for turn in row["messages"])
    (found,) = Encoder(tokenizer, made.task.train_on).rows(conversation)
    if assistant or completion is False:
        assert list(found.is_trained) == expected
    else:
        assert "train_on=all" in line(made.files[0], "assistant_only_loss")


@pytest.mark.parametrize(
    ("keys", "value"),
    [({}, "none"), ({"use_peft": False}, "false"), ({"lora_r": 8, "lora_target_modules": "all-linear"}, "none")],
)
def test_a_file_of_trls_command_trains_all_weights_by_default(keys: dict[str, Any], value: str, folder: Path) -> None:
    """``use_peft`` is false by default there, whatever the file says about an adapter."""
    file = folder / "full.yaml"
    file.write_text(json.dumps({"model_name_or_path": "m", "dataset_name": "a/b", **keys}), encoding="utf-8")
    with pytest.raises(UnsupportedError, match=f"use_peft: expected true, found {value}: TRL would train all weights"):
        import_file(file)


@pytest.mark.parametrize(
    ("loss", "kept", "message"),
    [
        ("sigmoid", 0.0, "TRL does not use it with loss_type: sigmoid"),
        (["sigmoid", "sft"], 0.0, "TRL does not use it with loss_type: sigmoid"),
        ("robust", 0.1, None),
        (["sigmoid", "robust"], 0.1, "TRL does not apply it to the part loss_type: sigmoid"),
        ("ipo", 0.0, "TRL does not use it with loss_type: ipo"),
        (["hinge", "sft"], 0.0, "TRL does not use it with loss_type: hinge, sft"),
    ],
)
def test_label_smoothing_is_that_of_trl(folder: Path, loss: Any, kept: float, message: str | None) -> None:
    """``DPOTrainer._compute_loss`` of TRL 1.16 uses it only in ``robust`` and ``exo_pair``."""
    found = task(folder, beta=0.2, loss_type=loss, label_smoothing=0.1)
    assert {job.config.objective.label_smoothing for job in found.task.jobs} == {kept}
    notes = [str(note) for note in found.files[0].notes if note.key == "label_smoothing"]
    assert [message in note for note in notes] == ([True] if message else [])


@pytest.mark.parametrize(("loss", "kept"), [("ipo", 0.0), ("hinge", 0.0), ("sigmoid", 0.1), ("simpo", 0.1)])
def test_label_smoothing_of_cpo_is_that_of_trl(folder: Path, loss: str, kept: float) -> None:
    found = task(folder, "method=cpo", beta=0.2, loss_type=loss, label_smoothing=0.1)
    assert {job.config.objective.label_smoothing for job in found.task.jobs} == {kept}
    notes = [str(note) for note in found.files[0].notes if note.key == "label_smoothing"]
    assert notes == ([] if kept else [f"label_smoothing: not needed: TRL does not use it with loss_type: {loss}"])


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        ({"completion_only_loss": True}, "raw_prompt_completion"),
        ({"beta": 0.2}, "raw_preference"),
        ({"desirable_weight": 1.0}, None),
        ({"assistant_only_loss": True}, ""),
    ],
    ids=["sft", "dpo", "kto", "messages"],
)
def test_a_note_says_that_only_trl_joins_texts(keys: dict[str, Any], remedy: str | None, folder: Path) -> None:
    """The chat template gives them other tokens; with ``assistant_only_loss`` TRL takes only messages."""
    (folder / "lora.yaml").write_text(json.dumps(keys | {"use_peft": True}), encoding="utf-8")

    def found(*overrides: str) -> list[str]:
        notes = import_file(folder / "lora.yaml", "trl", overrides).notes
        return [note.text for note in notes if note.key == "dataset_format"]

    if remedy == "":
        assert found() == []
        return
    (text,) = found()
    assert "TRL joins the texts unchanged" in text
    assert text.endswith(f": --set dataset_format={remedy}" if remedy else "unchanged")
    assert found("dataset_format=messages") == []


def test_training_on_the_assistants_replies_alone_is_reported(tmp_path: Path) -> None:
    assert "used as train_on: completion" in line(imported(tmp_path), "assistant_only_loss")
