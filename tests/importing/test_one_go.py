"""Configurations from the documentation of each tool are trained by two commands, ``alto import`` and ``alto tune``.
Only the base model is replaced, and hub datasets by files with rows of their form."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from foreign_configs import CONFIGS, LOCAL_ROWS
from optional import needs_bitsandbytes
from safetensors.torch import load_file
from tiny import read_journal
from typer.testing import CliRunner

from alto.cli import app
from alto.importing import import_file, imported_task

LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """The settings of a file, as its tool understands them.

    Attributes:
        rows: Rows of a step: batch size times accumulation steps.
        epochs: Passes over the training rows.
        targets: Layers with adapters.
        config: Further settings of the job, by ALTO's names.
    """

    method: str
    rows: int
    epochs: int
    targets: tuple[str, ...] = LINEAR
    config: dict[str, Any] = field(default_factory=dict)


MEANINGS = {
    "llamafactory-sft.yaml": Meaning(
        method="sft",
        rows=1 * 8,
        epochs=3,
        config={
            "learning_rate": 1e-4,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.1,
            "warmup_steps": 0,
            "r": 8,
            "lora_alpha": 16,  # twice the rank, if the file has none
            "lora_dropout": 0,
            "gradient_accumulation_steps": 8,
            "optim": "adamw_torch",
            "weight_decay": 0,
            "max_grad_norm": 1,
        },
    ),
    "llamafactory-dpo.yaml": Meaning(
        method="dpo",
        rows=1 * 8,
        epochs=3,
        targets=("q_proj", "v_proj"),
        config={
            "learning_rate": 5e-6,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.1,
            "r": 8,
            "lora_alpha": 16,
            "beta": 0.2,
            "loss_type": "sigmoid",
            "rpo_alpha": None,
            "label_smoothing": 0,
            "lora_dropout": 0,  # the trainer switches it off
        },
    ),
    "axolotl-lora.yml": Meaning(
        method="sft",
        rows=2 * 4,
        epochs=4,
        config={
            "learning_rate": 2e-4,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.1,
            "r": 32,
            "lora_alpha": 16,
            "lora_dropout": 0.05,
            "gradient_accumulation_steps": 4,
            "weight_decay": 0,
        },
    ),
    "axolotl-instruct.yml": Meaning(
        method="sft",
        rows=2 * 4,
        epochs=3,
        config={
            "learning_rate": 2e-4,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.1,
            "r": 16,
            "lora_alpha": 32,
            "lora_dropout": 0.05,
            "gradient_accumulation_steps": 4,
            "optim": "adamw_8bit",  # another name of adamw_bnb_8bit
        },
    ),
    "axolotl-qlora.yml": Meaning(
        method="sft",
        rows=2 * 4,
        epochs=4,
        targets=("q_proj", "v_proj"),
        config={
            "learning_rate": 2e-4,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "warmup_steps": 10,
            "warmup_ratio": 0,
            "r": 32,
            "lora_alpha": 16,
            "lora_dropout": 0.05,
        },
    ),
    "axolotl-dpo.yml": Meaning(
        method="dpo",
        rows=2 * 4,
        epochs=4,
        config={
            "learning_rate": 2e-4,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 10,
            "r": 32,
            "lora_alpha": 16,
            "beta": 0.2,
            "loss_type": "sigmoid",
            "optim": "adamw_8bit",  # another name of adamw_bnb_8bit
        },
    ),
    "trl-sft.yaml": Meaning(
        method="sft",
        rows=2 * 8,
        epochs=1,
        targets=("k_proj", "o_proj", "q_proj", "v_proj"),
        config={
            "learning_rate": 2e-4,
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
            "warmup_ratio": 0,
            "r": 32,
            "lora_alpha": 16,
            "lora_dropout": 0.05,
            "gradient_accumulation_steps": 8,
        },
    ),
    "trl-dpo.yaml": Meaning(
        method="dpo",
        rows=2 * 8,
        epochs=1,
        config={
            "learning_rate": 5e-6,
            "lr_scheduler_type": "linear",
            "r": 32,
            "lora_alpha": 16,
            "beta": 0.3,
            "loss_type": "sigmoid",
        },
    ),
    "trl-kto.yaml": Meaning(
        method="kto",
        rows=8 * 2,
        epochs=2,
        config={
            "learning_rate": 5e-7,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.1,
            "r": 16,
            "lora_alpha": 16,
            "beta": 0.2,
            "loss_type": "kto",
            "desirable_weight": 1,
            "undesirable_weight": 1.33,
        },
    ),
}
QUICK = ("llamafactory-sft.yaml", "trl-dpo.yaml")
QUANTISED = ("axolotl-instruct.yml", "axolotl-qlora.yml", "axolotl-dpo.yml", "trl-kto.yaml")
NAMES = [
    pytest.param(
        name,
        marks=[
            *([] if name in QUICK else [pytest.mark.slow("models")]),
            *([needs_bitsandbytes] if name in QUANTISED else []),
        ],
    )
    for name in MEANINGS
]


def localise(file: Path) -> str:
    """Replace hub datasets in ``file`` by rows on this machine; return its name."""
    text = file.read_text(encoding="utf-8")
    for hub, path in LOCAL_ROWS.items():
        text = text.replace(f"dataset_name: {hub}", f"dataset_name: {path}")
    file.write_text(text, encoding="utf-8")
    return file.name


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout.strip()


def test_all_kinds_are_here() -> None:
    """Each tool with supervised rows and with pairs; rows of messages and of instructions; labelled replies."""
    found = {(CONFIGS[name][0], meaning.method) for name, meaning in MEANINGS.items()}
    assert found == {(tool, method) for tool in ("LLaMA-Factory", "Axolotl", "TRL") for method in ("sft", "dpo")} | {
        ("TRL", "kto")
    }
    assert MEANINGS.keys() <= CONFIGS.keys()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_two_commands_train_what_the_file_says(name: str, folder: Path) -> None:
    meaning = MEANINGS[name]
    run("import", localise(folder / name), "--to", "task.yaml")
    best = Path(run("tune", "task.yaml", "--set", "early_exit=false", "--set", "keep=all", "--quiet"))

    events = read_journal(best.parent)
    started, done = events[0], events[-1]
    assert (started["event"], done["event"]) == ("task_started", "task_completed")
    assert started["method"] == meaning.method
    (job,) = started["jobs"]
    config = job["config"]
    assert {key: config[key] for key in meaning.config} == meaning.config
    assert config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == meaning.rows
    assert config["num_train_epochs"] == meaning.epochs
    assert job["total_steps"] == meaning.epochs * math.ceil(started["num_train"] / meaning.rows)
    trained = [loss for event in events if event["event"] == "train" for loss in event["losses"]]
    assert len(trained) == job["total_steps"], "without early exit a job trains to its end, as with its own tool"
    assert all(math.isfinite(loss) for loss in trained)

    adapter = json.loads((best / "adapter_config.json").read_text(encoding="utf-8"))
    assert (adapter["r"], adapter["lora_alpha"]) == (meaning.config["r"], meaning.config["lora_alpha"])
    assert tuple(sorted(adapter["target_modules"])) == meaning.targets
    matrices = load_file(best.parent / "jobs" / job["job"] / "last" / "adapter_model.safetensors")
    halves_of_a = {key: matrix for key, matrix in matrices.items() if ".lora_A." in key}
    assert {key.split(".")[-3] for key in halves_of_a} == set(meaning.targets)
    assert {matrix.shape[0] for matrix in halves_of_a.values()} == {meaning.config["r"]}
    assert any(matrix.any() for key, matrix in matrices.items() if ".lora_B." in key), "B begins with zeros"


PARSED = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "num_train_epochs", "weight_decay", "max_grad_norm"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "seed"),
)
"""Settings of TRL's trainers that have the same names in jobs."""


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("trl-")])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_trls_own_parser_reads_the_same(name: str, folder: Path) -> None:
    """Its defaults are included."""
    pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")
    from importlib import import_module

    parser = import_module(f"trl.scripts.{MEANINGS[name].method}").make_parser()
    words = ["--config", name, "--use_cpu", "true", "--bf16", "false"]
    _, arguments, adapter, _ = parser.parse_args_and_config(words, fail_with_unknown_args=False)
    task = imported_task([import_file(folder / name)]).task
    config = task.jobs[0].config
    assert {key: getattr(config, key) for key in PARSED} == {key: getattr(arguments, key) for key in PARSED}
    rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == rows
    assert task.max_length == arguments.max_length
    assert (config.r, config.lora_alpha) == (adapter.lora_r, adapter.lora_alpha)
    dropout = 0 if getattr(arguments, "disable_dropout", False) else adapter.lora_dropout
    assert config.lora_dropout == dropout
    targets = adapter.lora_target_modules
    assert config.target_modules == (targets if isinstance(targets, str) else tuple(sorted(targets)))
    assert task.load_in_4bit == adapter.load_in_4bit
    if task.method != "sft":
        objective = config.objective.to_dict()
        forms = arguments.loss_type if isinstance(arguments.loss_type, list) else [arguments.loss_type]
        assert (objective["beta"], [objective["loss_type"]]) == (arguments.beta, forms)
