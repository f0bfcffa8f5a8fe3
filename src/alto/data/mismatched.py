"""Rows in which a prompt has the reply of another row; KTO estimates on them how far an adapter is from the base
model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alto.data.dataset import IGNORED, EncodedDataset

__all__ = ["mismatched_rows"]


def mismatched_rows(dataset: EncodedDataset, rows: Sequence[int]) -> EncodedDataset:
    """Return the prompt of each of ``rows`` with the reply of the row before it, the first with that of the last row.

    TRL's ``KTOTrainer`` pairs them in the same way in a batch. Rows are cut at the same length as those of ``dataset``.
    A row without a trained token left is kept, so that means over all rows count it as 0.

    Args:
        dataset: Conversations with a reply at their end.
        rows: Indices of the rows of one job's batch, in order.
    """
    input_ids, targets = [], []
    for row, other in zip(rows, [rows[-1], *rows[:-1]], strict=True):
        begin, begin_of_other = _first_target(dataset, row), _first_target(dataset, other)
        prompt, reply = dataset.input_ids[row][: begin + 1], dataset.input_ids[other][begin_of_other + 1 :]
        ids = torch.cat([prompt, reply])[: dataset.max_length]
        sought = torch.cat([torch.full((begin,), IGNORED), dataset.targets[other][begin_of_other:]])[: len(ids)]
        sought[-1] = IGNORED  # the last token of a row predicts nothing
        input_ids.append(ids)
        targets.append(sought)
    return EncodedDataset(
        input_ids=tuple(input_ids), targets=tuple(targets), num_truncated=0, num_skipped=0, labels=(True,) * len(rows)
    )


def _first_target(dataset: EncodedDataset, row: int) -> int:
    """Return the position that predicts the first trained token of a row: the last position of its prompt."""
    return int((dataset.targets[row] != IGNORED).nonzero()[0])
