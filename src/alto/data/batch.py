"""The rows of each step of a job, and padding-free batches: the rows of many jobs, concatenated into one row of tokens.

Shapes: ``T`` tokens, ``S`` positions that predict a trained token, ``J`` jobs of the batch, ``Q`` pairs.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from alto.data.dataset import IGNORED, Advantage, EncodedDataset, Span
from alto.records import LabelSet, RowLabel

_LEAST_SHARED = 8
"""Minimum number of shared tokens; sharing fewer costs as much as it saves."""


class DataOrder:
    """The rows of each step of a job: every epoch has its own shuffle, which depends only on seed and epoch.

    The last batch of an epoch holds the remaining rows, as in Hugging Face's Trainer. The rows of any step can be
    computed at any time, so a job that is parked or resumed needs no random state.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._rows_N = torch.empty(0, dtype=torch.int64)

    def rows_of_step(self, step: int) -> list[int]:
        """Return the row numbers of the step with 0-based index ``step``."""
        epoch, position = divmod(step, -(-self._num_rows // self._batch_size))
        if epoch != self._epoch:
            self._epoch, self._rows_N = epoch, self._rows_of_epoch(epoch)
        rows: list[int] = self._rows_N[position * self._batch_size :][: self._batch_size].tolist()
        return rows

    def _rows_of_epoch(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(self._num_rows, generator=generator)


def mixture_counts(num_rows: int, shares: Sequence[float]) -> list[int]:
    """Return the number of rows of every source in an epoch: its share of ``num_rows``.

    Numbers are rounded so that they add up to ``num_rows`` (largest remainders; the first source wins a tie).

    Args:
        shares: Share of every source; they sum to 1.
    """
    exact = [num_rows * share for share in shares]
    counts = [math.floor(value + 1e-9) for value in exact]
    left = num_rows - sum(counts)
    by_remainder = sorted(
        (index for index, share in enumerate(shares) if share > 0), key=lambda index: counts[index] - exact[index]
    )
    for index in itertools.islice(itertools.cycle(by_remainder), left):
        counts[index] += 1
    return counts


class MixtureOrder(DataOrder):
    """The rows of each step of a job, drawn from sources by its own weights.

    With any weights, an epoch has as many rows as all sources together, and every source has its share of them
    (:func:`mixture_counts`). The rows of a source are an endless stream of shuffles. Every epoch continues the stream
    where the previous epoch stopped. So a source that is smaller than its share repeats in new shuffles, and a larger
    source gives other rows in later epochs. The rows of an epoch are shuffled together.

    Args:
        sizes: Number of rows of every source; the dataset holds one source after the other.
        shares: Share of every source; they sum to 1.
    """

    def __init__(self, sizes: Sequence[int], shares: Sequence[float], batch_size: int, seed: int) -> None:
        assert len(sizes) == len(shares), "one share per source"
        super().__init__(sum(sizes), batch_size, seed)
        self._sizes = tuple(sizes)
        self._firsts = tuple(itertools.accumulate(sizes, initial=0))[:-1]
        self._counts = mixture_counts(sum(sizes), shares)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of rows of every source in an epoch."""
        return tuple(self._counts)

    def _rows_of_epoch(self, epoch: int) -> Tensor:
        drawn_N = torch.cat(
            [
                first + self._stream(source, size, epoch * count, count)
                for source, (first, size, count) in enumerate(zip(self._firsts, self._sizes, self._counts, strict=True))
            ]
        )
        return drawn_N[self._shuffle(len(drawn_N), "epoch", epoch)]

    def _stream(self, source: int, size: int, start: int, count: int) -> Tensor:
        """Return rows ``start`` to ``start + count - 1`` of a source's endless stream of shuffles."""
        if not count:
            return torch.empty(0, dtype=torch.int64)
        first, last = start // size, (start + count - 1) // size
        rows = torch.cat([self._shuffle(size, f"source {source}", number) for number in range(first, last + 1)])
        return rows[start - first * size :][:count]

    def _shuffle(self, size: int, what: str, number: int) -> Tensor:
        digest = hashlib.sha256(f"{self._seed}/{what}/{number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randperm(size, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSize:
    """The size of a forward pass over some rows.

    Attributes:
        longest: Number of tokens of the longest sequence, including its prefix.
    """

    num_tokens: int = 0
    num_sequences: int = 0
    longest: int = 0

    def __add__(self, other: PassSize) -> PassSize:
        return PassSize(
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
            longest=max(self.longest, other.longest),
        )

    def positions(self, *, is_padded: bool) -> int:
        """Return the number of positions that the model computes: all tokens, or all rows padded to the longest."""
        return self.num_sequences * self.longest if is_padded else self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTotals:
    """Sums over the whole batch of a job, which may be split over micro-batches and ranks.

    Attributes:
        weight: Total weight of the rows.
        num_chosen: Number of trained tokens in chosen replies; if rows are not pairs, of all trained tokens.
        num_desirable: Number of rows that are labelled as desirable.
    """

    weight: int
    num_chosen: int
    num_desirable: int = 0


@dataclass(frozen=True, slots=True)
class JobRows:
    """Rows of one job: its whole batch, a rank's share of it, or one micro-batch.

    Attributes:
        dataset: Rows of the job's task.
        slot: Slot of the job in the bank of this process; with several ranks, its local slot.
        rows: Indices into ``dataset``.
        first_token: Number of tokens of the job's batch before these rows, in other micro-batches or on other ranks.
        whole: Sums over the job's whole batch; None if ``rows`` is the whole batch.
        factors: Factor on the weight of each row in the mean loss of the batch; empty if all are 1.
        shares_beginnings: Whether an untrained beginning that a row shares with an earlier row of the same pass goes
            through the model only once.
    """

    dataset: EncodedDataset = field(compare=False, repr=False)
    slot: int
    rows: tuple[int, ...]
    first_token: int = 0
    whole: BatchTotals | None = None
    factors: tuple[float, ...] = ()
    shares_beginnings: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.dataset.num_row_tokens[row] for row in self.rows)

    @property
    def size(self) -> PassSize:
        """The size of a forward pass over these rows alone."""
        spans = [span for row in self.rows for span in self.dataset.spans[row]]
        return PassSize(
            num_tokens=self.num_tokens,
            num_sequences=len(spans),
            longest=max((span.prefix + span.length for span in spans), default=0),
        )

    @property
    def totals(self) -> BatchTotals:
        """Sums over the job's whole batch."""
        if self.whole is not None:
            return self.whole
        return BatchTotals(
            weight=sum(self.dataset.weights[row] for row in self.rows),
            num_chosen=sum(self.dataset.num_chosen[row] for row in self.rows),
            num_desirable=sum(map(self._is_desirable, self.rows)),
        )

    @property
    def labels(self) -> tuple[bool, ...]:
        """Whether each row is labelled as desirable; false if there are no labels."""
        return tuple(map(self._is_desirable, self.rows))

    @property
    def classes(self) -> tuple[RowLabel, ...]:
        """The class label of each row; empty if the rows are not labelled texts."""
        known = self.dataset.classes
        return () if known is None else tuple(known[row] for row in self.rows)

    @property
    def advantages(self) -> tuple[Advantage, ...]:
        """The weight of each row; empty if the rows are not sampled completions."""
        known = self.dataset.advantages
        return () if known is None else tuple(known[row] for row in self.rows)

    def _is_desirable(self, row: int) -> bool:
        return self.dataset.labels is not None and self.dataset.labels[row]

    def single_rows(self) -> Iterator[JobRows]:
        """Yield each row by itself."""
        first_token, totals = self.first_token, self.totals
        for index, row in enumerate(self.rows):
            factors = self.factors[index : index + 1]
            one = replace(self, rows=(row,), first_token=first_token, whole=totals, factors=factors)
            yield one
            first_token += one.num_tokens

    def joined(self, more: Sequence[JobRows]) -> JobRows:
        """Return these rows together with those of ``more``, which follow them in the job's batch."""
        parts = (self, *more)
        return replace(
            self,
            rows=tuple(row for part in parts for row in part.rows),
            factors=tuple(factor for part in parts for factor in part.factors),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Tokens of one forward pass, job after job, row after row.

    Attributes:
        slots: Slot of each of the ``J`` jobs in the bank of this process, in token order.
        input_ids_T, position_ids_T: Token ids and positions; positions continue after the prefix of a sequence.
        sequence_lengths: Number of tokens of each sequence: a row, or one side of a pair.
        sequence_prefixes: Length of the prefix of each sequence: 0, a pair's prompt, or the beginning that a row shares
            with another of its job. The prefix is the beginning of the latest sequence without a prefix.
        loss_positions_S: Indices into ``T`` of the positions that predict a trained token, ascending.
        loss_targets_S: Token id to be predicted at each of these positions.
        sequence_targets: Number of the ``S`` positions in each sequence.
        job_targets: Number of the ``S`` positions of each job.
        job_weights: Total weight of each job's whole batch, which may be split over micro-batches: the number of
            trained tokens; for pairs and rows with labels, the number of rows.
        job_chosen: Number of trained tokens in the chosen replies of each job's whole batch.
        job_desirable: Number of rows of each job's whole batch that are labelled as desirable.
        row_labels: Whether each row is labelled as desirable.
        job_label_sets: The label set of each job; None if its rows are not labelled texts.
        row_classes: The class label of each labelled text, in row order.
        row_factors: Factor on the weight of each row in the mean loss of its job's whole batch.
        job_sampled: Number of rows of each job in ``row_advantages``: all its rows, or 0 if they were not sampled.
        row_advantages: The weight of each sampled completion, in row order.
        job_first_tokens: Number of tokens of each job's batch before these rows.
        job_references: Number of rows of each job in ``references_Q2``: all its rows, or 0 if its data has no
            references.
        references_Q2: Reference log-probs of the chosen and the rejected reply of each pair, float64 nats; None if no
            job of the batch has them.
        reference_tails_Q2: The part of ``references_Q2`` that comes from tokens beyond the length of the pair's shorter
            reply.
        kl_J: Estimated divergence of each job's adapter from the base model over its whole batch, float64 nats; 0 for
            jobs that do not need it, None if no job does.
        reference_losses_S: Cross-entropy of every trained token under the base model, float32 nats; None if no job
            needs it.
    """

    slots: tuple[int, ...]
    input_ids_T: Tensor
    position_ids_T: Tensor
    sequence_lengths: tuple[int, ...]
    sequence_prefixes: tuple[int, ...]
    job_tokens: tuple[int, ...]
    loss_positions_S: Tensor
    loss_targets_S: Tensor
    sequence_targets: tuple[int, ...]
    job_targets: tuple[int, ...]
    job_rows: tuple[int, ...]
    job_sequences: tuple[int, ...]
    job_weights: tuple[int, ...]
    job_chosen: tuple[int, ...]
    job_first_tokens: tuple[int, ...]
    job_desirable: tuple[int, ...] = ()
    row_labels: tuple[bool, ...] = ()
    job_label_sets: tuple[LabelSet | None, ...] = ()
    row_classes: tuple[RowLabel, ...] = ()
    row_factors: tuple[float, ...] = ()
    job_sampled: tuple[int, ...] = ()
    row_advantages: tuple[Advantage, ...] = ()
    job_references: tuple[int, ...] = ()
    references_Q2: Tensor | None = None
    reference_tails_Q2: Tensor | None = None
    kl_J: Tensor | None = None
    reference_losses_S: Tensor | None = None

    @property
    def _classified_rows(self) -> tuple[int, ...]:
        """Number of rows of each job in ``row_classes``."""
        of_jobs = zip(self.job_rows, self.job_label_sets, strict=True)
        return tuple(0 if labels is None else count for count, labels in of_jobs)

    def part(self, first: int, last: int) -> TokenBatch:
        """Return jobs ``first`` to ``last - 1`` as a batch; tensors are views, except ``loss_positions_S``."""
        tokens, sequences = _range(self.job_tokens, first, last), _range(self.job_sequences, first, last)
        targets, references = _range(self.job_targets, first, last), _range(self.job_references, first, last)
        return TokenBatch(
            slots=self.slots[first:last],
            input_ids_T=self.input_ids_T[tokens],
            position_ids_T=self.position_ids_T[tokens],
            sequence_lengths=self.sequence_lengths[sequences],
            sequence_prefixes=self.sequence_prefixes[sequences],
            job_tokens=self.job_tokens[first:last],
            loss_positions_S=self.loss_positions_S[targets] - tokens.start,
            loss_targets_S=self.loss_targets_S[targets],
            sequence_targets=self.sequence_targets[sequences],
            job_targets=self.job_targets[first:last],
            job_rows=self.job_rows[first:last],
            job_sequences=self.job_sequences[first:last],
            job_weights=self.job_weights[first:last],
            job_chosen=self.job_chosen[first:last],
            job_first_tokens=self.job_first_tokens[first:last],
            job_desirable=self.job_desirable[first:last],
            row_labels=self.row_labels[_range(self.job_rows, first, last)],
            job_label_sets=self.job_label_sets[first:last],
            row_classes=self.row_classes[_range(self._classified_rows, first, last)],
            row_factors=self.row_factors[_range(self.job_rows, first, last)],
            job_sampled=self.job_sampled[first:last],
            row_advantages=self.row_advantages[_range(self.job_sampled, first, last)],
            job_references=self.job_references[first:last],
            references_Q2=_rows(self.references_Q2, references),
            reference_tails_Q2=_rows(self.reference_tails_Q2, references),
            kl_J=None if self.kl_J is None else self.kl_J[first:last],
            reference_losses_S=None if self.reference_losses_S is None else self.reference_losses_S[targets],
        )


def collate(jobs: Sequence[JobRows], device: torch.device | str = "cpu") -> TokenBatch:
    """Concatenate the rows of ``jobs`` into one batch; jobs of the same task have to be adjacent.

    Without jobs, return one token that belongs to no job and whose loss reaches no adapter: a rank without rows takes
    part in gathering the base model too.
    """
    if not jobs:
        return _dummy_batch(device)
    laid_J = [list(_sequences_of(job)) for job in jobs]
    input_ids, targets, _ = zip(*(row for of_job in laid_J for row in of_job), strict=True)
    spans_J = [[span for _, _, of_row in of_job for span in of_row] for of_job in laid_J]
    spans = [span for of_job in spans_J for span in of_job]
    lengths, prefixes = [span.length for span in spans], [span.prefix for span in spans]
    ends_N = torch.tensor(lengths).cumsum(0)
    targets_T = torch.cat(targets)
    loss_positions_S = (targets_T >= 0).nonzero().squeeze(1)
    trained_up_to_N = torch.searchsorted(loss_positions_S, ends_N)
    referring = [job for job in jobs if job.dataset.references is not None]
    totals = [job.totals for job in jobs]
    return TokenBatch(
        slots=tuple(job.slot for job in jobs),
        input_ids_T=_send(torch.cat(input_ids), device),
        position_ids_T=_send(_positions(lengths, prefixes, ends_N), device),
        sequence_lengths=tuple(lengths),
        sequence_prefixes=tuple(prefixes),
        job_tokens=tuple(sum(span.length for span in of_job) for of_job in spans_J),
        loss_positions_S=_send(loss_positions_S, device),
        loss_targets_S=_send(targets_T[loss_positions_S], device),
        sequence_targets=tuple(trained_up_to_N.diff(prepend=trained_up_to_N.new_zeros(1)).tolist()),
        job_targets=tuple(sum(job.dataset.num_trained[row] for row in job.rows) for job in jobs),
        job_rows=tuple(len(job.rows) for job in jobs),
        job_sequences=tuple(len(of_job) for of_job in spans_J),
        job_weights=tuple(total.weight for total in totals),
        job_chosen=tuple(total.num_chosen for total in totals),
        job_desirable=tuple(total.num_desirable for total in totals),
        row_labels=tuple(label for job in jobs for label in job.labels),
        job_label_sets=tuple(job.dataset.label_set for job in jobs),
        row_classes=tuple(label for job in jobs for label in job.classes),
        row_factors=tuple(factor for job in jobs for factor in job.factors or (1.0,) * len(job.rows)),
        job_sampled=tuple(len(job.advantages) for job in jobs),
        row_advantages=tuple(advantage for job in jobs for advantage in job.advantages),
        job_first_tokens=tuple(job.first_token for job in jobs),
        job_references=tuple(0 if job.dataset.references is None else len(job.rows) for job in jobs),
        references_Q2=_gathered(referring, [job.dataset.references for job in referring], device),
        reference_tails_Q2=_gathered(referring, [job.dataset.reference_tails for job in referring], device),
    )


def _sequences_of(job: JobRows) -> Iterator[tuple[Tensor, Tensor, tuple[Span, ...]]]:
    """Yield token ids, targets and sequences of the rows of ``job``, without the beginnings that they share with
    earlier rows."""
    provider: Tensor | None = None
    for row in job.rows:
        ids, targets, spans = job.dataset.input_ids[row], job.dataset.targets[row], job.dataset.spans[row]
        if job.shares_beginnings and len(spans) == 1:
            shared = 0 if provider is None else _num_shared(provider, ids, targets)
            if shared >= _LEAST_SHARED:
                ids, targets, spans = ids[shared:], targets[shared:], (Span(spans[0].length - shared, shared),)
            else:
                provider = ids
        yield ids, targets, spans


def _num_shared(provider: Tensor, ids: Tensor, targets: Tensor) -> int:
    """Return the number of leading tokens that are the same in ``provider`` and do not predict a trained token."""
    most = min(len(provider), len(ids) - 1)
    differs = (provider[:most] != ids[:most]) | (targets[:most] >= 0)
    return int(differs.int().argmax()) if differs.any() else most


def _positions(lengths: Sequence[int], prefixes: Sequence[int], ends_N: Tensor) -> Tensor:
    """Return the positions of all tokens, ``[T]`` int64; in each sequence they count up from the prefix length."""
    lengths_N = torch.tensor(lengths)
    firsts_N = ends_N - lengths_N - torch.tensor(prefixes)
    return torch.arange(sum(lengths)) - firsts_N.repeat_interleave(lengths_N)


def _dummy_batch(device: torch.device | str) -> TokenBatch:
    token = torch.zeros(1, dtype=torch.long)
    return TokenBatch(
        slots=(),
        input_ids_T=_send(token, device),
        position_ids_T=_send(token, device),
        sequence_lengths=(1,),
        sequence_prefixes=(0,),
        job_tokens=(),
        loss_positions_S=_send(token, device),
        loss_targets_S=_send(token, device),
        sequence_targets=(1,),
        job_targets=(1,),
        job_rows=(1,),
        job_sequences=(1,),
        job_weights=(1,),
        job_chosen=(1,),
        job_first_tokens=(),
    )


def share_rows(job: JobRows, num_ranks: int) -> list[JobRows | None]:
    """Split the rows of ``job`` over ``num_ranks`` ranks; None for a rank that gets no row.

    Each rank gets consecutive rows with about the same number of tokens: at most the mean plus its longest row."""
    rows = list(job.single_rows())
    total, shares, first = job.num_tokens, [], 0
    for rank in range(num_ranks):
        wanted = total * (rank + 1) / num_ranks
        last = first
        # A row belongs to the rank in whose part of the tokens its middle lies.
        while last < len(rows) and rows[last].first_token + rows[last].num_tokens / 2 <= wanted:
            last += 1
        part = rows[first:last]
        shares.append(part[0].joined(part[1:]) if part else None)
        first = last
    return shares


def split_into_micro_batches(
    jobs: Sequence[JobRows], max_tokens: int, *, split_jobs: bool = False, is_padded: bool = False
) -> Iterator[list[JobRows]]:
    """Split the work of a step into micro-batches of at most ``max_tokens`` tokens, in order.

    A row larger than ``max_tokens`` is a micro-batch of its own. No tensor is made, so this cannot run out of memory.

    Args:
        split_jobs: Whether the rows of every job may be split over micro-batches, which fills them best. Otherwise,
            only jobs with more than ``max_tokens`` tokens are split.
        is_padded: Whether the model computes padded rows, so that padding counts as tokens.
    """
    current: list[JobRows] = []
    filled = PassSize()
    for job in jobs:
        is_whole = not split_jobs and job.size.positions(is_padded=is_padded) <= max_tokens
        for part in [job] if is_whole else job.single_rows():
            size = part.size
            if current and (filled + size).positions(is_padded=is_padded) > max_tokens:
                yield current
                current, filled = [], PassSize()
            if current and current[-1].slot == part.slot:
                current[-1] = current[-1].joined([part])
            else:
                current.append(part)
            filled += size
    if current:
        yield current


def _range(counts: Sequence[int], first: int, last: int) -> slice:
    """Return the slice of the elements of jobs ``first`` to ``last - 1``; ``counts`` has each job's element count."""
    start = sum(counts[:first])
    return slice(start, start + sum(counts[first:last]))


def _rows(references_Q2: Tensor | None, rows: slice) -> Tensor | None:
    return None if references_Q2 is None or rows.start == rows.stop else references_Q2[rows]


def _gathered(jobs: Sequence[JobRows], values: Sequence[Tensor | None], device: torch.device | str) -> Tensor | None:
    """Concatenate, for all jobs, the rows of ``values`` that each job uses, as ``[Q, 2]`` on ``device``.

    Jobs whose dataset has no values get zeros. Return None if no dataset has values.
    """
    if all(of_dataset is None for of_dataset in values):
        return None
    return _send(
        torch.cat(
            [
                torch.zeros(len(job.rows), 2, dtype=torch.float64) if of_dataset is None else of_dataset[list(job.rows)]
                for job, of_dataset in zip(jobs, values, strict=True)
            ]
        ),
        device,
    )


def _send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy to ``device`` without host-device synchronisation."""
    pinned = tensor.pin_memory() if torch.device(device).type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


# Rows in which a prompt has the reply of another row; KTO estimates on them how far an adapter is from the base model.


def mismatched_rows(dataset: EncodedDataset, rows: Sequence[int]) -> EncodedDataset:
    """Return the prompt of each of ``rows`` with the reply of the row before it; the first row gets the reply of the
    last.

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
        row_targets = torch.cat([torch.full((begin,), IGNORED), dataset.targets[other][begin_of_other:]])[: len(ids)]
        row_targets[-1] = IGNORED  # the last token of a row predicts nothing
        input_ids.append(ids)
        targets.append(row_targets)
    return EncodedDataset(input_ids=tuple(input_ids), targets=tuple(targets), labels=(True,) * len(rows))


def _first_target(dataset: EncodedDataset, row: int) -> int:
    """Return the position that predicts the first trained token of a row: the last position of its prompt."""
    return int((dataset.targets[row] != IGNORED).nonzero()[0])
