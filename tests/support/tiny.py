"""A task small enough to train in a test: a random-weight Llama with the shipped tokenizer, and a few short rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from alto.backbone import Backbone, resolve_model
from alto.data import TaskData, read_task_rows
from alto.early_exit import journal as loss_records
from alto.early_exit.journal import Curves
from alto.executor import RunInputs, TaskContext, TaskSession, run_alone
from alto.records import TaskOutcome
from alto.runs import Journal, Observer, RunDir, read_history, task_outcome
from alto.runs.events import decode
from alto.spec import Task

NUM_ROWS = 24


def load_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model("alto-tiny"))


def random_llama(vocab_size: int) -> LlamaForCausalLM:
    """Return a Llama of two layers, always with the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def save_model(folder: Path) -> Path:
    """Save the random Llama and its tokenizer in the form that ``from_pretrained`` reads."""
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(folder)
    random_llama(len(tokenizer)).save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int = NUM_ROWS, *, first: int = 0) -> Path:
    """Write ``count`` short sums, one JSON object per line."""
    numbers = range(first, first + count)
    rows = [{"prompt": f"{n} plus {n % 7}?", "completion": f" It is {n + n % 7}." + " Yes." * (n % 3)} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_task(folder: Path, **changes: Any) -> Task:
    """Return a task on 24 training and 6 validation rows in ``folder``."""
    settings: dict[str, Any] = {
        "name": "tiny",
        "model": "alto-tiny",
        "dataset": str(write_rows(folder / "train.jsonl")),
        "validation_dataset": str(write_rows(folder / "validation.jsonl", 6, first=100)),
        "num_train_epochs": 5,
    }
    return Task(**(settings | changes))


def load_tiny(task: Task) -> tuple[Backbone, TaskData]:
    """Load the random Llama, instead of the model that ``task`` names, and the task's data."""
    tokenizer = load_tokenizer()
    return Backbone(random_llama(len(tokenizer)), tokenizer, "random-llama"), read_task_rows(task).encode(tokenizer)


def run_task(task: Task, run_dir: RunDir, observers: Sequence[Observer] = ()) -> TaskOutcome:
    """Train ``task`` on the random Llama."""
    backbone, data = load_tiny(task)
    with Journal(run_dir.journal_file, observers) as journal:
        run_alone(TaskSession(TaskContext.of(task, backbone, data), journal, RunInputs(run_dir=run_dir)))
    return task_outcome(read_history(run_dir.root), run_dir)


def read_journal(run_dir: str | Path) -> list[dict[str, Any]]:
    lines = (Path(run_dir) / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def curves_of(events: Sequence[Mapping[str, Any]]) -> dict[str, Curves]:
    """Return the loss curves of all jobs from the lines of a journal."""
    return loss_records.curves_of([decode(event) for event in events])
