"""Adapters of every kind, their exports, and the answers of PEFT with which servers are compared."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from alto import Engine, Task, TaskResult
from alto.errors import UnsupportedError
from alto.spec import LABELS_NAME
from benchmarks.rows import write_rows

__all__ = ["CLASSIFIER", "KINDS", "Answer", "Exported", "answers_of", "export", "peft_model", "scores_of", "train"]

_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CLASSIFIER = "classifier"
KINDS: Mapping[str, Mapping[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "r": 16},
    "patterns": {"rank_pattern": {"q_proj": 4, "down_proj": 16}, "alpha_pattern": {"v_proj": 48, "down_proj": 8}},
    "dora": {"use_dora": True},
    "lm_head": {"modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": [*_LINEAR, "embed_tokens"]},
    CLASSIFIER: {"method": "classification"},
}
"""Settings of the tasks that train an adapter of every kind."""

_THINGS = ("pens", "books", "coins", "stamps", "marbles", "apples", "keys", "cards")
_NAMES = ("Ava", "Ben", "Chloe", "Dan", "Eva", "Finn", "Gus", "Hana")
QUESTIONS = tuple(
    f"{name} has {3 + number} {thing} and buys {2 * number + 1} more. How many {thing} are there?"
    for number, (name, thing) in enumerate(zip(_NAMES, _THINGS, strict=True))
)
"""Prompts that no adapter is trained on."""

NUM_NEW_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A greedy answer to a question.

    Attributes:
        question: The user's message; for a model without a chat template, the whole prompt.
        prompt_ids: Tokens of the prompt.
        token_ids: Tokens of the answer.
        logprobs: Natural logarithm of the probability of each of these tokens.
    """

    question: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An export of an adapter.

    Attributes:
        path: Folder of the export, or its GGUF file; None if ALTO refused to write it.
        why: ALTO's reason for not writing it, or for not serving it with vLLM; empty if there is none.
    """

    path: Path | None
    why: str = ""


def train(model: str, kind: str, folder: Path) -> TaskResult:
    """Train an adapter of a kind for a few steps, with a high learning rate, so that it changes the answers."""
    folder.mkdir(parents=True)
    task = Task(
        name=kind,
        model=model,
        dataset=write_rows(folder / "train.jsonl", list(_rows(kind, 16))),
        validation_dataset=write_rows(folder / "validation.jsonl", list(_rows(kind, 4))),
        max_length=128,
        num_train_epochs=1,
        eval_steps=1.0,
        early_exit=False,
        report_to="none",
        max_slots=1,
        max_tokens_per_step=2048,
        max_tokens_per_pass=2048,
        gradient_checkpointing=False,
        search_space={"learning_rate": [2e-3], "per_device_train_batch_size": [2]},
        **KINDS[kind],
    )
    return Engine(output_dir=folder / "runs").tune(task)


def _rows(kind: str, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        name, thing = _NAMES[-number % 8], _THINGS[(3 * number + 2) % 8]
        total = 10 + number
        text = f"{name} counts {total - 4} {thing} and finds 4 more. How many {thing} does {name} have?"
        if kind == CLASSIFIER:
            yield {"text": text, "label": "even" if total % 2 == 0 else "odd"}
        else:
            yield {"prompt": text, "completion": f"{total} {thing} in all."}


def export(adapter: Path, folder: Path, **form: Any) -> Exported:
    """Export an adapter in a form of :meth:`alto.Engine.export`."""
    try:
        result = Engine().export(adapter, folder, **form)
    except UnsupportedError as error:
        return Exported(path=None, why=str(error))
    why = "" if result.command else " ".join(result.notes)
    files = [Path(result.folder) / name for name in result.files if name.endswith(".gguf")]
    return Exported(path=files[0] if files else Path(result.folder), why=why)


def peft_model(base: str, adapter: Path | None) -> tuple[Any, Any]:
    """Return a model in float32 and its tokenizer, loaded by transformers; with an adapter, by PEFT.

    Args:
        base: Folder of the base model, or of a merged model.
        adapter: Folder of an adapter; None for the base model alone.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    folder = Path(base) if adapter is None else adapter
    has_tokenizer = (folder / "tokenizer_config.json").exists()  # adapters of a service have none
    tokenizer = AutoTokenizer.from_pretrained(folder if has_tokenizer else base)
    labels = folder / LABELS_NAME
    is_merged_classifier = adapter is None and "SequenceClassification" in (folder / "config.json").read_text()
    if is_merged_classifier or (adapter is not None and labels.exists()):
        size = {} if is_merged_classifier else {"num_labels": 2}
        model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, **size)
        model.config.pad_token_id = tokenizer.pad_token_id
    else:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft reads attributes that transformers has renamed
            model = PeftModel.from_pretrained(model, str(adapter))
    return model.eval(), tokenizer


@torch.no_grad()
def answers_of(model: Any, tokenizer: Any) -> list[Answer]:
    """Return the model's greedy answers to all questions; tokens that end an answer do not end these."""
    answers = []
    for question in QUESTIONS:
        prompt = prompt_ids(tokenizer, question)
        token_ids, logprobs = list[int](), list[float]()
        for _ in range(NUM_NEW_TOKENS):
            logits = model(input_ids=torch.tensor([prompt + token_ids]), logits_to_keep=1).logits
            best = logits[0, -1].log_softmax(-1).max(-1)
            token_ids.append(int(best.indices))
            logprobs.append(float(best.values))
        answers.append(Answer(question=question, prompt_ids=prompt, token_ids=token_ids, logprobs=logprobs))
    return answers


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """Return the tokens of a question, as a chat message if the tokenizer has a chat template."""
    if not tokenizer.chat_template:
        return list(tokenizer(question)["input_ids"])
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def scores_of(model: Any, tokenizer: Any) -> list[list[float]]:
    """Return the probabilities of a classifier's labels for the text of each question."""
    return [model(**tokenizer(question, return_tensors="pt")).logits[0].softmax(-1).tolist() for question in QUESTIONS]


def read_answers(values: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Return answers from the values of :meth:`Answer.to_dict`."""
    return [Answer(**value) for value in values]


def dump(answers: Sequence[Answer]) -> str:
    """Return answers as JSON."""
    return json.dumps([answer.to_dict() for answer in answers])
