"""A task of preference pairs, prepared once for all jobs of the baseline and for the judge of finished adapters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.baselines.job import common_prefix

__all__ = ["PreparedPairs", "prepare_pairs", "tokenize_pairs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPairs:
    """A task that is prepared for any number of jobs.

    Attributes:
        model: The base model, float32 on the CPU; every job works on its own copy.
        train: Result of :func:`tokenize_pairs` for the training pairs, in file order. It is on disk, where TRL keeps
            reference log-probabilities beside it for later jobs.
        validation: The same of the validation pairs, sorted by length so that evaluation batches have little padding.
        max_length: Largest number of tokens of a sequence.
        duration_s: Seconds to load and tokenise, which count once for the sweep.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    validation: Dataset
    max_length: int
    duration_s: float


def prepare_pairs(
    model: str | Path,
    train_rows: Iterable[Mapping[str, str]],
    validation_rows: Iterable[Mapping[str, str]],
    folder: Path,
    *,
    max_length: int,
) -> PreparedPairs:
    """Load ``model`` (folder or hub id) and write tokenised pairs into ``folder``.

    Raises:
        ValueError: See :func:`tokenize_pairs`.
    """
    start = time.perf_counter()
    disable_progress_bars()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    train = tokenize_pairs(tokenizer, train_rows, max_length=max_length)
    validation = tokenize_pairs(tokenizer, validation_rows, max_length=max_length)
    validation.sort(key=lambda pair: max(len(pair["chosen_ids"]), len(pair["rejected_ids"])) + len(pair["prompt_ids"]))
    return PreparedPairs(
        model=base,
        tokenizer=tokenizer,
        train=_on_disk(train, folder / "train"),
        validation=_on_disk(validation, folder / "validation"),
        max_length=max_length,
        duration_s=time.perf_counter() - start,
    )


def tokenize_pairs(
    tokenizer: PreTrainedTokenizerBase, rows: Iterable[Mapping[str, str]], *, max_length: int
) -> list[dict[str, list[int]]]:
    """Return ``prompt_ids``, ``chosen_ids`` and ``rejected_ids`` of ``prompt``/``chosen``/``rejected`` rows, as TRL
    makes them of conversations.

    Raises:
        ValueError: A sequence is longer than ``max_length``, so the systems might cut it differently.
    """
    pairs = []
    for row in rows:
        prompt = [{"role": "user", "content": row["prompt"]}]
        prompt_ids: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        whole: dict[str, Any] = {
            reply: tokenizer.apply_chat_template(
                [*prompt, {"role": "assistant", "content": row[reply]}], return_dict=False
            )
            for reply in ("chosen", "rejected")
        }
        longest = max(map(len, whole.values()))
        if longest > max_length:
            raise ValueError(f"Expected sequences of at most {max_length} tokens, found one of {longest}: drop it.")
        shared = min(common_prefix(prompt_ids, ids) for ids in whole.values())
        replies = {f"{reply}_ids": ids[shared:] for reply, ids in whole.items()}
        pairs.append({"prompt_ids": prompt_ids[:shared], **replies})
    return pairs


def _on_disk(pairs: list[dict[str, list[int]]], folder: Path) -> Dataset:
    Dataset.from_list(pairs).save_to_disk(folder)
    return Dataset.load_from_disk(folder)
