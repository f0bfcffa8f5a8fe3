"""Multiple-choice scoring: checks whether a row's own reply is the most likely of several options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from alto.backbone import Backbone, is_out_of_memory, limits_of, release_memory
from alto.data import Conversation, ConversationWithTools, Message, encode_rows
from alto.errors import DataError, DeviceMemoryError
from alto.evaluation.answers import reply_position
from alto.evaluation.generate import max_positions
from alto.evaluation.loss import sequence_log_probs
from alto.evaluation.scorers import OnTurn
from alto.lora import ServedAdapters

__all__ = ["MAX_OPTIONS", "Choices", "options_of"]

MAX_OPTIONS = 26
"""Maximum number of distinct replies to choose from."""

_MAX_TOKENS = 8192
"""Initial number of tokens in a forward pass; halved whenever memory runs out."""


def options_of(rows: Sequence[Conversation]) -> tuple[str, ...]:
    """Return the distinct replies of ``rows``, in alphabetical order.

    Raises:
        DataError: There are fewer than 2, or more than 26, distinct replies.
    """
    options = sorted({_reply(row).content for row in rows})
    if not 2 <= len(options) <= MAX_OPTIONS:
        raise DataError(
            f"expected validation rows with 2 to {MAX_OPTIONS} distinct replies to choose from, found "
            f"{len(options)} in {len(rows)} rows; use another scorer, or other rows"
        )
    return tuple(options)


class Choices:
    """A scorer that compares the likelihoods of all options as the reply to each row; it generates nothing.

    The likelihood of an option covers all its tokens and the token that ends the reply. If several options are equally
    likely, the first one in ``options`` wins.

    Args:
        rows: Rows with a reply.
        options: Options for all rows; every row's own reply is one of them.

    Raises:
        DataError: A row has no prompt, or a row with one of the options does not fit into the model's positions.
    """

    def __init__(self, rows: Sequence[Conversation], options: Sequence[str], backbone: Backbone) -> None:
        self._options = tuple(options)
        self._right = torch.tensor([self._options.index(_reply(row).content) for row in rows])
        tried = [_with_reply(row, option) for row in rows for option in options]
        limit = max_positions(backbone)
        self._dataset = encode_rows(
            tried, backbone.tokenizer, limit or 2**31, "validation", limits=limits_of(backbone.model.config)
        )
        if self._dataset.num_truncated or len(self._dataset) != len(tried):
            raise DataError(
                f"expected rows that fit into the model's {limit} positions with every option, found "
                f"{self._dataset.num_truncated or abs(len(tried) - len(self._dataset))} of {len(tried)} that do not; "
                "leave long rows out, or use a base model with more positions"
            )
        self._backbone = backbone

    def scores(self, served: ServedAdapters, names: Sequence[str], on_turn: OnTurn) -> list[Sequence[float]]:
        """Return each adapter's scores of all rows: 1 if the row's own reply is the most likely option, else 0.

        Args:
            names: Names of the adapters in error messages.
            on_turn: Called after every forward pass.

        Raises:
            DeviceMemoryError: Memory is too small for a single row.
            NoResultError: A likelihood is not a finite number.
        """
        log_probs = self._log_probs(served, names, on_turn)
        shape = (len(self._right), len(self._options))
        return [(of_adapter.view(shape).argmax(1) == self._right).double().tolist() for of_adapter in log_probs]

    def _log_probs(self, served: ServedAdapters, names: Sequence[str], on_turn: OnTurn) -> list[torch.Tensor]:
        longest = self._dataset.longest_sequence
        max_tokens = max(_MAX_TOKENS, longest)
        while True:
            try:
                found = sequence_log_probs(
                    self._backbone,
                    served,
                    self._dataset,
                    names=names,
                    max_tokens_per_pass=max_tokens,
                    on_done=lambda _: on_turn(),
                )
                return [of_adapter.cpu() for of_adapter in found]
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if max_tokens <= longest:
                    raise DeviceMemoryError(
                        f"expected memory for a row of {longest} tokens, found less on {self._backbone.device}; free "
                        "memory"
                    ) from None
            release_memory()
            max_tokens = max(longest, max_tokens // 2)


def _reply(row: Conversation) -> Message:
    position = reply_position(row)
    assert position is not None, "the row has a reply"
    return row[position]


def _with_reply(row: Conversation, option: str) -> Conversation:
    """Return ``row`` with ``option`` as its last reply, which is the only turn whose likelihood is computed."""
    position = reply_position(row)
    assert position is not None, "the row has a reply"
    before = (replace(turn, is_context=True) if turn.role == "assistant" else turn for turn in row[:position])
    turns = (*before, Message("assistant", option))
    return ConversationWithTools(turns, row.template_arguments) if isinstance(row, ConversationWithTools) else turns
