"""Datasets with a short name: their hub ids, and how their rows are split."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from alto.spec import RowFormName

__all__ = ["PRESETS", "Preset", "find_preset", "nearest_preset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A hub dataset and its defaults, which a task's own keys override.

    Attributes:
        names: Names of the dataset in a task, besides ``hub_id``.
        max_length: Tokens at which a row is cut: the value of its authors' own recipes; for GSM8K, enough for all rows.
        config: Configuration on the hub; None if there is only one.
        train_split, test_split: Splits on the hub; there is no test split if rows are held out of the training split.
        row_counts: Numbers of training, validation and test rows drawn from the training split with the task's
            ``data_seed``; None if its rows are used as they are.
    """

    names: tuple[str, ...]
    hub_id: str
    max_length: int
    config: str | None = None
    form: RowFormName
    train_split: str = "train"
    test_split: str | None = None
    row_counts: tuple[int, int, int] | None = None


PRESETS = (
    Preset(
        names=("gsm8k", "math/gsm8k"),
        hub_id="openai/gsm8k",
        max_length=512,
        config="main",
        form="prompt_completion",
        test_split="test",
    ),
    Preset(
        names=("tulu-3", "tulu3"),
        hub_id="allenai/tulu-3-sft-mixture",
        max_length=4096,
        form="messages",
        row_counts=(9_000, 1_000, 1_000),
    ),
    Preset(
        names=("openthoughts3", "openthoughts-3"),
        hub_id="open-thoughts/OpenThoughts3-1.2M",
        max_length=16384,
        form="sharegpt",
    ),
    Preset(
        names=("ultrafeedback",),
        hub_id="HuggingFaceH4/ultrafeedback_binarized",
        max_length=1024,
        form="auto",
        train_split="train_prefs",
        test_split="test_prefs",
    ),
)


def find_preset(name: str) -> Preset | None:
    """Return the preset called ``name``, in upper or lower case."""
    wanted = name.lower()
    return next((preset for preset in PRESETS if wanted in (*preset.names, preset.hub_id.lower())), None)


def nearest_preset(name: str) -> str | None:
    """Return the name of the preset that is probably meant by ``name``; None if none is similar."""
    near = difflib.get_close_matches(name.lower(), [name for preset in PRESETS for name in preset.names], n=1)
    return near[0] if near else None
