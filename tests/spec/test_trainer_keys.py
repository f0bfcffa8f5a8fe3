"""Every key of common trainers and adapters is a key of a task, or has an answer of one line."""

from __future__ import annotations

import dataclasses
from inspect import signature
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

from peft import LoraConfig
from transformers import TrainingArguments
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, ModelConfig, SFTConfig, SFTTrainer

from alto.errors import AltoError, UnsupportedError
from alto.spec import Task
from alto.spec.keys import FIELD_DEFAULTS, NOT_NEEDED_KEYS, TRAINER_OFF_VALUES, UNSUPPORTED_KEYS

METHODS: dict[type[Any], str] = {
    TrainingArguments: "sft",
    SFTConfig: "sft",
    DPOConfig: "dpo",
    KTOConfig: "kto",
    LoraConfig: "sft",
    ModelConfig: "sft",
}
FIELDS = [(kind, field) for kind in METHODS for field in dataclasses.fields(kind)]
NAMES = [f"{kind.__name__}.{field.name}" for kind, field in FIELDS]

NOT_AS_THEIR_DEFAULT = {
    # TRL trains every token of messages where this is false.
    ("SFTConfig", "assistant_only_loss"),
    # Dropout of an adapter is applied where lora_dropout asks for it.
    ("DPOConfig", "disable_dropout"),
    ("KTOConfig", "disable_dropout"),
    # The rows of a job are shuffled.
    ("KTOConfig", "train_sampling_strategy"),
    # PEFT chooses modules by the architecture.
    ("LoraConfig", "target_modules"),
    ("ModelConfig", "lora_target_modules"),
    # TRL trains all weights.
    ("ModelConfig", "use_peft"),
    # a key without a value of its own here
    ("ModelConfig", "model_name_or_path"),
}
"""Fields whose default asks for something that ALTO does not do."""


def task_with(kind: type[Any], key: str, value: object) -> Task:
    given = {"model": "alto-tiny", "dataset": "train.jsonl", "method": METHODS[kind]}
    if key in ("model_name_or_path", "dataset_name"):
        del given["model"]
    return Task(**given, **{key: value})


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=NAMES)
def test_a_field_is_known(kind: type[Any], field: dataclasses.Field[Any]) -> None:
    for value in ("something", None, 3, [1], {"a": 1}):
        try:
            task_with(kind, field.name, value)
        except AltoError as error:
            message = str(error)
            assert "unknown key" not in message
            assert "Did you mean" not in message


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=NAMES)
def test_a_default_asks_for_nothing(kind: type[Any], field: dataclasses.Field[Any]) -> None:
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    if dataclasses.is_dataclass(default):
        default = dataclasses.asdict(default)  # type: ignore[arg-type]
    default = getattr(default, "value", default)
    if (kind.__name__, field.name) in NOT_AS_THEIR_DEFAULT:
        with pytest.raises(AltoError):
            task_with(kind, field.name, default)
    else:
        task_with(kind, field.name, default)


KEYS = {"model", "train_dataset", "eval_dataset"}
TRAINERS = (SFTTrainer, DPOTrainer, KTOTrainer)
ARGUMENTS = sorted({name for trainer in TRAINERS for name in signature(trainer).parameters} - KEYS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_a_trainer_is_a_key_or_is_answered(name: str) -> None:
    """A user may have replaced ``SFTTrainer(`` by ``alto.Task(`` in a script."""
    with pytest.raises(UnsupportedError, match=f"the task has the key '{name}', which is not supported\\. [A-Z]"):
        Task(**{"model": "alto-tiny", "dataset": "train.jsonl", name: lambda: "something"})


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_defaults_of_a_trainer_ask_for_nothing(trainer: type[Any]) -> None:
    given = {name: parameter.default for name, parameter in signature(trainer).parameters.items()}
    given |= {"model": "alto-tiny", "train_dataset": "train.jsonl"}
    assert Task(**given).jobs == Task(model="alto-tiny", dataset="train.jsonl").jobs


def test_no_exception_is_left_over() -> None:
    fields = {(kind.__name__, field.name) for kind, field in FIELDS}
    assert fields >= NOT_AS_THEIR_DEFAULT


@pytest.mark.parametrize("kind", [TrainingArguments, SFTConfig, DPOConfig, KTOConfig])
def test_all_defaults_together_make_a_task(kind: type[Any]) -> None:
    """A user may paste them: the task is the one without them."""
    given = {}
    for field in dataclasses.fields(kind):
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
        if (kind.__name__, field.name) not in NOT_AS_THEIR_DEFAULT:
            given[field.name] = getattr(default, "value", default)
    task = Task(model="alto-tiny", dataset="train.jsonl", method=METHODS[kind], **given)
    (job,) = task.jobs
    assert job.config.max_steps is None
    assert job.config.learning_rate == given["learning_rate"]
    assert task.eval_steps == Task.model_fields["eval_steps"].default


def test_a_key_that_is_answered_is_no_field() -> None:
    """Otherwise its answer would never be read."""
    answered = {*NOT_NEEDED_KEYS, *UNSUPPORTED_KEYS}
    assert not answered & set(Task.model_fields)
    assert TRAINER_OFF_VALUES.keys() <= answered
    assert FIELD_DEFAULTS.keys() <= {*Task.model_fields, "max_steps"}


@pytest.mark.parametrize(
    ("key", "value"), [("max_steps", -2), ("max_steps", True), ("eval_steps", 0), ("data_seed", -1)]
)
def test_other_values_are_no_defaults(key: str, value: object) -> None:
    with pytest.raises(AltoError, match=key):
        Task(model="m", dataset="d", **{key: value})


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("save_steps", 100, "not needed: ALTO keeps the best and the last checkpoint of every job"),
        ("deepspeed", "ds.json", "not needed: ALTO starts its own processes"),
        ("assistant_only_loss", False, "Use 'train_on: all'"),
        ("dataset_text_field", "body", "Name the column of texts with 'columns"),
        ("dataloader_drop_last", True, "keeps the last, smaller batch"),
    ],
)
def test_an_answer_is_one_line(key: str, value: object, reason: str) -> None:
    with pytest.raises(AltoError) as caught:
        Task(model="m", dataset="d", **{key: value})
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["train_dataset", "activation_checkpointing", "chat_template_path", "lora_target_parameters"]
)
def test_spellings_of_trainers_are_read(key: str) -> None:
    values = {
        "train_dataset": ("dataset", "train.jsonl"),
        "activation_checkpointing": ("gradient_checkpointing", True),
        "chat_template_path": ("chat_template", "{{ messages }}"),
    }
    given: dict[str, Any] = {"model": "m", **({} if key == "train_dataset" else {"dataset": "d"})}
    if key == "lora_target_parameters":
        task = Task(**given, **{key: ["mlp.experts.down_proj"]})
        assert task.jobs[0].config.target_parameters == ("mlp.experts.down_proj",)
    else:
        name, value = values[key]
        assert getattr(Task(**given, **{key: value}), name) == value
