"""Preference pairs of a small counting language, laid out with their prompt once or whole."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from alto.data import EncodedDataset, Span

IGNORED = -100


def make_pairs(num_pairs: int, seed: int, *, vocabulary: int = 160) -> EncodedDataset:
    """Return pairs. Prompts have 2 to 14 tokens that count up; the chosen reply continues with the same difference, the
    rejected one with another. Replies have 1 to 16 tokens. A pair has its prompt once."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def count(first: int, stride: int, length: int) -> Tensor:
        return 2 + (first + stride * torch.arange(length)) % (vocabulary - 2)

    input_ids, targets, spans = [], [], []
    for _ in range(num_pairs):
        first, stride, num_prompt = draw(0, vocabulary), draw(1, 3), draw(2, 14)
        prompt, last = count(first, stride, num_prompt), first + stride * (num_prompt - 1)
        chosen, rejected = (count(last + step, step, draw(1, 16)) for step in (stride, stride + draw(1, 4)))
        shared = num_prompt - 1
        input_ids.append(torch.cat([prompt, chosen, prompt[-1:], rejected]))
        targets.append(torch.cat([torch.full((shared,), IGNORED), *map(_predicting, (chosen, rejected))]))
        spans.append((Span(num_prompt + len(chosen)), Span(1 + len(rejected), shared)))
    return EncodedDataset(input_ids=tuple(input_ids), targets=tuple(targets), spans=tuple(spans))


def laid_out_whole(dataset: EncodedDataset) -> EncodedDataset:
    """Return the same pairs, each side with a prompt of its own."""
    of_rows = [whole_sequences(dataset, row) for row in range(len(dataset))]
    return replace(
        dataset,
        input_ids=tuple(torch.cat([ids for ids, _ in sides]) for sides in of_rows),
        targets=tuple(torch.cat([targets for _, targets in sides]) for sides in of_rows),
        spans=tuple(tuple(Span(ids.numel()) for ids, _ in sides) for sides in of_rows),
    )


def whole_sequences(dataset: EncodedDataset, row: int) -> list[tuple[Tensor, Tensor]]:
    """Return token ids and targets of every sequence of a row, with its prefix."""
    ids, targets = dataset.input_ids[row], dataset.targets[row]
    sequences, start = [], 0
    for span in dataset.spans[row]:
        own = slice(start, start + span.length)
        prefix = torch.full((span.prefix,), IGNORED)
        sequences.append((torch.cat([ids[: span.prefix], ids[own]]), torch.cat([prefix, targets[own]])))
        start += span.length
    return sequences


def _predicting(reply: Tensor) -> Tensor:
    """Return the targets of the prompt's last token and of the tokens of ``reply``."""
    return torch.cat([reply, torch.tensor([IGNORED])])
