"""Greedy continuations of validation prompts by the base model and by adapters, for side-by-side reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from alto.backbone import Backbone
from alto.data import Row
from alto.errors import DataError
from alto.evaluation.generate import Prompt, complete, max_positions, prompt_of
from alto.evaluation.scorers import attempted
from alto.evaluation.settings import EvaluationSettings
from alto.evaluation.target import loaded_adapters
from alto.lora import read_saved_adapter
from alto.records import Sample, Samples


class Sampler:
    """A sampler that lets the base model and several adapters continue the same prompts.

    Args:
        rows: Validation rows. The first ``num_samples`` rows are used that have a reply and a prompt shorter than the
            model's positions.
        backbone: The base model; no job may train on it while samples are generated.

    Raises:
        DataError: No row has such a prompt and a reply.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        backbone: Backbone,
        *,
        num_samples: int,
        max_new_tokens: int,
    ) -> None:
        self._prompts = list(islice(_usable(rows, backbone), num_samples))
        if not self._prompts:
            raise DataError(
                "num_samples: expected a validation row with a text reply after a prompt that fits into the "
                "model's positions, found none; add such rows, or remove num_samples"
            )
        self._backbone = backbone
        self._max_new_tokens = max_new_tokens

    def __call__(self, adapters: Mapping[str, Path], on_turn: Callable[[], None]) -> Samples:
        """Continue the prompts with the base model and with every adapter. If generation fails, return the reason
        instead of raising an error.

        Args:
            adapters: Adapter folders by job.
            on_turn: Called after every token; its exceptions are raised from here.
        """
        rows, failure = attempted(lambda turn: self._rows(adapters, turn), on_turn)
        return Samples(rows=rows or (), failure=failure)

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
            [tokenizer.decode(text.tokens, skip_special_tokens=True) for text in of_slot] for of_slot in texts
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


def _usable(rows: Iterable[Row], backbone: Backbone) -> Iterator[Prompt]:
    """Yield the prompts of rows that have one, if it leaves at least one position for the answer."""
    limit = max_positions(backbone)
    for row in rows:
        try:
            prompt = prompt_of(row, backbone.tokenizer)
        except DataError:  # the row has no prompt, or the chat template refuses it
            continue
        if prompt is not None and (limit is None or len(prompt.ids) < limit):
            yield prompt
