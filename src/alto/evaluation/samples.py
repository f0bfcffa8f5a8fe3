"""Greedy continuations of validation prompts by the base and by adapters, to be read side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from alto.backbone import Backbone
from alto.data import Conversation, LabelledText, Pair
from alto.errors import DataError
from alto.evaluation.adapter import loaded_adapters
from alto.evaluation.generate import complete, max_positions
from alto.evaluation.guarded import Guard, failure_text
from alto.evaluation.prompts import Prompt, prompt_of
from alto.evaluation.settings import EvaluationSettings
from alto.lora import read_saved_adapter
from alto.records import Sample, Samples

__all__ = ["Sampler"]


class Sampler:
    """Lets the base model and several of its adapters continue the same prompts.

    Args:
        rows: Validation rows. The first ``num_samples`` of those with a prompt, shorter than the model's positions, and
            a reply in text are used.
        backbone: The base; no job trains on it meanwhile.
        num_samples: Prompts that are continued.
        max_new_tokens: Longest continuation.

    Raises:
        DataError: No row has a prompt and a reply.
    """

    def __init__(
        self,
        rows: Iterable[Conversation | Pair | LabelledText],
        backbone: Backbone,
        *,
        num_samples: int,
        max_new_tokens: int,
    ) -> None:
        self._prompts = list(islice(_usable(rows, backbone), num_samples))
        if not self._prompts:
            raise DataError(
                "num_samples: expected a validation row with a reply in text after a prompt that the model has "
                "positions for, found none; add such rows, or remove num_samples"
            )
        self._backbone = backbone
        self._max_new_tokens = max_new_tokens

    def __call__(self, adapters: Mapping[str, Path], on_turn: Callable[[], None]) -> Samples:
        """Continue the prompts by the base and by every adapter. A generation that fails is no error: the reason is in
        the result.

        Args:
            adapters: Adapter folders by job.
            on_turn: Called after every token; what it raises is raised.
        """
        guard = Guard(on_turn)
        try:
            return Samples(rows=self._rows(adapters, guard))
        except Exception as error:
            if error is guard.raised or isinstance(error, torch.AcceleratorError):
                raise
            return Samples(failure=failure_text(error))

    def _rows(self, adapters: Mapping[str, Path], on_turn: Callable[[], None]) -> tuple[Sample, ...]:
        saved = [read_saved_adapter(folder) for folder in adapters.values()]
        with loaded_adapters(self._backbone, [None, *saved], self._backbone.path) as served:
            texts = complete(
                self._backbone,
                served,
                [prompt.ids for prompt in self._prompts],
                max_new_tokens=self._max_new_tokens,
                batch_size=EvaluationSettings().batch_size,
                on_done=lambda _: on_turn(),
            )
        tokenizer: Any = self._backbone.tokenizer
        of_base, *of_adapters = [
            [tokenizer.decode(text, skip_special_tokens=True) for text in of_slot] for of_slot in texts
        ]
        return tuple(
            Sample(
                prompt=tokenizer.decode(prompt.ids),
                reference=prompt.reference,
                base=base,
                adapters=dict(zip(adapters, own, strict=True)),
            )
            for prompt, base, *own in zip(self._prompts, of_base, *of_adapters, strict=True)
        )


def _usable(rows: Iterable[Conversation | Pair | LabelledText], backbone: Backbone) -> Iterator[Prompt]:
    """Prompts of the rows that have one, with a position left to write to."""
    limit = max_positions(backbone)
    for row in rows:
        try:
            prompt = prompt_of(row, backbone.tokenizer)
        except DataError:  # a row without a prompt, or that the chat template refuses
            continue
        if prompt is not None and (limit is None or len(prompt.ids) < limit):
            yield prompt
