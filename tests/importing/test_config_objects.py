"""Configuration objects of PEFT, transformers and TRL: the resulting task, and what is reported or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

import peft
import transformers
import trl
from accelerate.state import AcceleratorState

from alto.errors import ConflictingKeysError, SpecError, UnsupportedError
from alto.spec import Task

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LORA = {"r": 4, "lora_alpha": 12, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
ON_CPU = {"use_cpu": True, "bf16": False}


def lora(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**(LORA | changes))


def sft(**settings: Any) -> trl.SFTConfig:
    return trl.SFTConfig(**(ON_CPU | settings))


def task(*configs: Any, **keys: Any) -> Task:
    return Task(**{"model": "alto-tiny", "dataset": "rows.jsonl"} | keys, config=list(configs))


def test_both_configurations_become_the_keys_of_the_task() -> None:
    found = task(
        lora(), sft(learning_rate=3e-4, per_device_train_batch_size=2, weight_decay=0.1, max_length=64, seed=7)
    )
    (job,) = found.jobs
    assert found.method == "sft"
    assert (found.max_length, found.report_to) == (64, "none")
    config = job.config
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 12, 0.1)
    assert config.target_modules == ("q_proj", "v_proj")
    assert (config.learning_rate, config.per_device_train_batch_size) == (3e-4, 2)
    assert (config.weight_decay, config.seed, config.num_train_epochs) == (0.1, 7, 3)


def test_defaults_are_those_of_the_classes_and_not_those_of_tasks() -> None:
    """The trainer would train with the classes' defaults."""
    (job,) = task(lora(), sft()).jobs
    arguments = sft()
    for key in ("learning_rate", "per_device_train_batch_size", "num_train_epochs", "weight_decay", "max_grad_norm"):
        assert getattr(job.config, key) == getattr(arguments, key), key
    (plain,) = Task(model="alto-tiny", dataset="rows.jsonl").jobs
    assert plain.config.learning_rate != arguments.learning_rate
    default = peft.LoraConfig(target_modules="all-linear")
    (job,) = task(default).jobs
    assert (job.config.r, job.config.lora_alpha, job.config.lora_dropout) == (default.r, default.lora_alpha, 0.0)
    assert job.config.learning_rate == plain.config.learning_rate, "without a trainer the task has its own"


def test_the_written_task_needs_no_objects() -> None:
    found = task(lora(), sft(learning_rate=3e-4))
    assert "config" not in found.to_dict()
    assert Task(**found.to_dict()) == found
    assert found.notes


def test_one_object_needs_no_list() -> None:
    keys = {"model": "alto-tiny", "dataset": "rows.jsonl"}
    assert Task(**keys, config=lora()) == task(lora())


@pytest.mark.parametrize(
    ("kind", "method"),
    [(trl.SFTConfig, "sft"), (trl.DPOConfig, "dpo"), (trl.KTOConfig, "kto"), (transformers.TrainingArguments, "sft")],
)
def test_the_class_decides_the_method_and_its_defaults_are_accepted(kind: type[Any], method: str) -> None:
    arguments = kind(**ON_CPU)
    found = task(lora(lora_dropout=0.0), arguments)
    assert found.method == method
    assert found.jobs[0].config.learning_rate == arguments.learning_rate


@pytest.mark.parametrize("name", ["orpo.ORPOConfig", "cpo.CPOConfig"])
def test_experimental_trainers_too(name: str) -> None:
    module, _, kind = name.partition(".")
    arguments = getattr(pytest.importorskip(f"trl.experimental.{module}"), kind)(**ON_CPU, beta=0.3)
    found = task(lora(), arguments)
    assert (found.method, found.jobs[0].config.objective.beta) == (module, 0.3)


def test_a_key_of_a_trainer_is_no_other_tools_spelling_of_a_field() -> None:
    """``alpha`` of TRL's CPO is a parameter of its loss, not ``lora_alpha``."""
    kind = pytest.importorskip("trl.experimental.cpo").CPOConfig
    assert task(lora(), kind(**ON_CPU)).jobs[0].config.lora_alpha == 12
    with pytest.raises(UnsupportedError, match="alpha: not supported: ALTO does not have AlphaPO"):
        task(lora(), kind(**ON_CPU, alpha=0.5))


def test_a_preference_step_is_that_of_the_trainer() -> None:
    """TRL averages its loss over a step, and switches dropout off."""
    arguments = trl.DPOConfig(**ON_CPU, per_device_train_batch_size=2, gradient_accumulation_steps=4, beta=0.3)
    found = task(lora(), arguments)
    (job,) = found.jobs
    assert (job.config.per_device_train_batch_size, job.config.lora_dropout) == (8, 0.0)
    assert job.config.objective.beta == 0.3
    assert any(note.startswith("gradient_accumulation_steps: used as") for note in found.notes)
    assert any(note.startswith("lora_dropout: used as 0.0") for note in found.notes)


def test_a_classifier_is_one_by_its_task_type() -> None:
    arguments = transformers.TrainingArguments(use_cpu=True, learning_rate=1e-3)
    found = task(lora(task_type="SEQ_CLS", modules_to_save=["score"]), arguments)
    assert found.method == "classification"
    assert found.jobs[0].config.learning_rate == 1e-3
    assert found.max_length is None, "transformers' trainer cuts nothing"
    assert task(lora(task_type="SEQ_CLS"), arguments, problem_type="regression").method == "regression"


def test_what_the_user_gives_overrules_what_the_objects_have() -> None:
    config = sft(learning_rate=3e-4, max_steps=100, lr_scheduler_type="cosine", warmup_steps=9, seed=3)
    found = task(
        lora(),
        config,
        lr=1e-3,
        num_train_epochs=2,
        lr_scheduler_type="constant_with_warmup",
        warmup_ratio=0.1,
        report_to="none",
    )
    (job,) = found.jobs
    assert (job.config.learning_rate, job.config.num_train_epochs, job.config.max_steps) == (1e-3, 2, None)
    assert (job.config.lr_scheduler_type, job.config.warmup_ratio, job.config.seed) == ("constant_with_warmup", 0.1, 3)


def test_a_search_space_overrules_them_too() -> None:
    found = task(lora(), sft(learning_rate=3e-4), search_space={"lr": [1e-4, 1e-3], "rank": [2, 8]})
    assert [(job.config.learning_rate, job.config.r) for job in found.jobs] == [
        (rate, rank) for rate in (1e-4, 1e-3) for rank in (2, 8)
    ]
    assert {job.config.lora_alpha for job in found.jobs} == {12}
    automatic = task(lora(), sft(), search_space="auto")
    assert len({job.config.r for job in automatic.jobs}) > 1


def test_settings_that_change_nothing_are_noted_together() -> None:
    found = task(lora(), sft(logging_steps=7, save_steps=3, output_dir="elsewhere"))
    keys = [note.partition(":")[0] for note in found.notes]
    assert {"logging_steps", "save_steps", "output_dir"} <= set(keys)
    assert not any("--set" in note for note in found.notes), "only the command line's note"
    noted = {note.partition(":")[0] for note in task(lora(), sft()).notes}
    assert noted <= {"assistant_only_loss", "bf16", "dataset_format", "eval_strategy", "use_cpu"}, (
        "defaults that ask for nothing are not reported"
    )
    assert found.replace(seed=5).notes == found.notes


def test_settings_that_would_change_what_is_learned_are_refused_together() -> None:
    config = sft(dataloader_drop_last=True, label_smoothing_factor=0.1, assistant_only_loss=False)
    with pytest.raises(UnsupportedError) as caught:
        task(lora(layer_replication=[(0, 1)]), config)
    message = str(caught.value)
    assert message.startswith("config: expected settings that ALTO supports, found 3 that it does not support:\n")
    for key in ("dataloader_drop_last", "label_smoothing_factor", "layer_replication"):
        assert f"  {key}: not supported: " in message
    assert "assistant_only_loss" not in message


def test_without_modules_those_are_trained_that_peft_chooses() -> None:
    for configs in ([lora(target_modules=None)], [lora(target_modules=None), sft()]):
        found = task(*configs)
        assert found.jobs[0].config.target_modules == "peft-default"
        (note,) = [note for note in found.notes if note.startswith("target_modules: used as target_modules: peft-")]
        assert note.endswith("for all linear layers, use target_modules=all-linear")
    assert task(sft()).jobs[0].config.target_modules == "all-linear", "no adapter is configured"
    found = task(lora(target_modules=None), target_modules=["k_proj"])
    assert found.jobs[0].config.target_modules == ("k_proj",)


@pytest.mark.parametrize(
    ("configs", "error", "message"),
    [
        (lambda: [3], SpecError, r"config should be a peft.LoraConfig.* found 3 \(int\)"),
        (lambda: [{"r": 4}], SpecError, r"found \{'r': 4\} \(dict\)"),
        (lambda: [lora(), lora(r=8)], SpecError, "config should have one LoraConfig, found LoraConfig and LoraConfig"),
        (lambda: [peft.VeraConfig()], UnsupportedError, "expected a peft.LoraConfig, found VeraConfig"),
        (
            lambda: [trl.RewardConfig(**ON_CPU)],
            UnsupportedError,
            "expected one of TRL's SFTConfig.* found RewardConfig",
        ),
    ],
)
def test_other_objects_are_refused(configs: Callable[[], list[Any]], error: type[Exception], message: str) -> None:
    given = configs()
    with pytest.raises(error, match=message):
        task(*given)


def test_the_state_of_an_existing_trainer_stays() -> None:
    """New training arguments of transformers clear it."""
    arguments = sft()
    AcceleratorState._shared_state["kept"] = True
    try:
        task(lora(), arguments)
        assert AcceleratorState._shared_state.get("kept")
    finally:
        AcceleratorState._shared_state.pop("kept", None)


def test_a_best_configuration_is_the_job_again(tmp_path: Path) -> None:
    """``TaskResult.best_config`` for TRL is read back as the same configuration."""
    import alto

    rows = [{"prompt": f"{a} + 1 =", "completion": f" {a + 1}"} for a in range(12)]
    keys: dict[str, Any] = {"model": "alto-tiny", "dataset": rows, "report_to": "none", "max_steps": 2}
    settings = {"learning_rate": 2e-3, "r": 2, "lora_alpha": 6, "warmup_ratio": 0.5, "optim": "adamw_torch", "seed": 3}
    first = Task(**keys, **settings)
    result = alto.Engine(output_dir=tmp_path, progress=False).tune(first)
    best, training, not_carried = result.best_config
    assert not_carried == {"dataset_format": "prompt_completion"}
    again = Task(model="alto-tiny", dataset=rows, config=[best, training])
    (was,), (found,) = first.jobs, again.jobs
    apart = {
        key
        for key in was.config.model_dump()
        if getattr(was.config, key) != getattr(found.config, key) and key not in ("warmup_ratio", "warmup_steps")
    }
    assert apart <= {"target_modules"}, "the adapter names the modules that all-linear meant"
    assert was.config.num_warmup_steps(2) == found.config.num_warmup_steps(2)


def test_a_saved_adapter_takes_the_place_of_the_default_initial_weights() -> None:
    """``LoraConfig`` has a default for them that nobody wrote."""
    assert task(lora(), init_adapter="adapter").init_adapter == "adapter"
    assert task(lora()).replace(init_adapter="adapter").init_adapter == "adapter"
    with pytest.raises(ConflictingKeysError, match="init_lora_weights and init_adapter are both given"):
        task(lora(init_lora_weights="gaussian"), init_adapter="adapter")


def test_a_configuration_and_a_method_of_two_trainers_are_refused() -> None:
    """The settings of one trainer would be dropped, or mean nothing, in the other."""
    with pytest.raises(ConflictingKeysError, match=r"method should be 'dpo', .* of DPOConfig, found 'sft'"):
        task(lora(), trl.DPOConfig(**ON_CPU), method="sft")
    with pytest.raises(ConflictingKeysError, match=r"method should be 'sft', .* of SFTConfig, found 'dpo'"):
        task(lora(), sft(), rl="dpo")
    assert task(lora(), trl.DPOConfig(**ON_CPU), method="dpo").method == "dpo"


def test_the_note_that_trl_joins_texts_is_for_its_trainers_only() -> None:
    """With transformers' own arguments the user makes the tokens."""

    def noted(arguments: Any, **keys: Any) -> bool:
        return any(note.startswith("dataset_format: ") for note in task(lora(), arguments, **keys).notes)

    assert noted(sft())
    assert noted(trl.DPOConfig(**ON_CPU))
    assert not noted(sft(), dataset_format="raw_prompt_completion")
    assert not noted(transformers.TrainingArguments(use_cpu=True))
