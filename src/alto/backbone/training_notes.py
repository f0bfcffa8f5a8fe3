"""Notices about settings in a model's configuration that are not applied in training.

The frozen base model computes as in evaluation while jobs train: with random masks over a batch of many jobs, a job
would depend on the other jobs in the batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

_RANDOM = re.compile(r"drop|jitter")
_ELSEWHERE = re.compile(r"^(classifier|summary|cls|encoder)")
"""Keys of heads and encoders, which a causal language model does not run."""


def config_notes(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return notices about dropout and jitter of the base model."""
    text = config.get_text_config(decoder=True)
    applied = [f"{name} {value:g}" for name, value in _numbers(text.to_dict()) if value > 0]
    if not applied:
        return ()
    return (
        f"{', '.join(applied)} of the base model: not applied; it computes as in evaluation while jobs train, so "
        "that no job depends on others (TRL's trainers apply it: they train with model.train()).",
    )


def _numbers(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the probabilities of dropout and the widths of jitter, also from nested settings."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}.")
        elif (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and _RANDOM.search(name)
            and not _ELSEWHERE.search(str(key))
        ):
            yield name, float(value)
