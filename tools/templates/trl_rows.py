"""Rows as TRL's ``SFTTrainer`` prepares them: its own code, without a trainer and a model."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

__all__ = ["trl_row"]


def trl_row(
    row: dict[str, Any], tokenizer: Any, *, assistant_only: bool = False, completion_only: bool | None = None
) -> tuple[list[int], list[bool]]:
    """Return the token ids of ``row``, and whether each is trained.

    Args:
        assistant_only: ``assistant_only_loss``; the tokenizer's own template must have ``{% generation %}``.
        completion_only: ``completion_only_loss``; None is TRL's default: true if the row has a completion.
    """
    import datasets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import SFTTrainer

    if completion_only is None:
        completion_only = "completion" in row
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=completion_only)
    args = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=assistant_only,
        max_length=None,
        use_liger_kernel=False,
        packing=False,
        shuffle_dataset=False,
        truncation_mode="keep_start",
    )
    datasets.disable_progress_bars()
    prepare: Any = SFTTrainer._prepare_dataset
    [found] = prepare(trainer, datasets.Dataset.from_list([row]), tokenizer, args, False, None, "train")
    return list(found["input_ids"]), [label != -100 for label in found["labels"]]
