"""Rows as TRL prepares them with its own code: the oracle of tests of ``alto.data``."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

from tools.templates.trl_rows import trl_row

__all__ = ["trl_labelled_row", "trl_pair", "trl_row"]


def trl_pair(row: dict[str, Any], tokenizer: Any) -> tuple[tuple[list[int], list[bool]], ...]:
    """Return token ids of the chosen and of the rejected conversation of ``row`` in TRL's ``DPOTrainer``, and whether
    each is part of the completion."""
    [found] = _prepared("DPOTrainer", row, tokenizer, truncation_mode="keep_start")
    return tuple(_joined(found["prompt_ids"], found[f"{side}_ids"]) for side in ("chosen", "rejected"))


def trl_labelled_row(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return token ids of ``row`` in TRL's ``KTOTrainer``, and whether each is part of the completion."""
    weights = SimpleNamespace(calculate_KL=False, desirable_weight=1.0, undesirable_weight=1.0)
    [found] = _prepared("KTOTrainer", row, tokenizer, **vars(weights))
    return _joined(found["prompt_ids"], found["completion_ids"])


def _prepared(trainer: str, row: dict[str, Any], tokenizer: Any, **settings: Any) -> Any:
    import datasets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl

    datasets.disable_progress_bars()
    arguments = SimpleNamespace(dataset_num_proc=None, max_length=None, **settings)
    itself = SimpleNamespace(_tokenizer=tokenizer, **settings)
    rows = datasets.Dataset.from_list([row])
    return getattr(trl, trainer)._prepare_dataset(itself, rows, tokenizer, arguments, "train")


def _joined(prompt: list[int], completion: list[int]) -> tuple[list[int], list[bool]]:
    return [*prompt, *completion], [False] * len(prompt) + [True] * len(completion)
