"""Batches without padding: the content of each tensor, and the division of a step into passes and over ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from alto.backbone.sequences import Sequences
from alto.data import EncodedDataset, JobRows, collate, share_rows, split_into_micro_batches
from alto.data.batch import BatchTotals


def dataset_of(*lengths: int) -> EncodedDataset:
    """Return rows where row ``i`` holds ids ``100 i, 100 i + 1, …``; all but its first two tokens are trained."""
    input_ids = tuple(torch.arange(length) + 100 * row for row, length in enumerate(lengths))
    targets = tuple(torch.cat([ids[1:], torch.tensor([-100])]).clone() for ids in input_ids)
    for row in targets:
        row[0] = -100
    return EncodedDataset(input_ids=input_ids, targets=targets)


def test_collate_lays_rows_end_to_end() -> None:
    dataset = dataset_of(3, 4, 5)
    batch = collate([JobRows(dataset, 7, (2, 0)), JobRows(dataset, 2, (1,))])
    assert batch.slots == (7, 2)
    assert batch.sequence_lengths == (5, 3, 4)
    assert batch.job_tokens == (8, 4)
    assert batch.input_ids_T.tolist() == [200, 201, 202, 203, 204, 0, 1, 2, 100, 101, 102, 103]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    assert batch.loss_positions_S.tolist() == [1, 2, 3, 6, 9, 10]
    assert batch.loss_targets_S.tolist() == [202, 203, 204, 2, 102, 103]
    assert batch.job_targets == (4, 2)


def test_a_target_is_the_token_that_follows_in_its_own_row() -> None:
    dataset = dataset_of(6, 2, 9)
    batch = collate([JobRows(dataset, 0, (0, 1, 2)), JobRows(dataset, 1, (2, 1))])
    assert torch.equal(batch.input_ids_T[batch.loss_positions_S + 1], batch.loss_targets_S)
    assert (batch.position_ids_T[batch.loss_positions_S + 1] > 0).all()


def test_the_same_rows_may_serve_many_jobs() -> None:
    dataset = dataset_of(3, 4)
    alone, together = (
        collate([JobRows(dataset, 0, (1,))]),
        collate([JobRows(dataset, 0, (1,)), JobRows(dataset, 1, (1,))]),
    )
    assert together.input_ids_T.tolist() == alone.input_ids_T.tolist() * 2
    assert together.job_targets == alone.job_targets * 2


lengths_strategy = st.lists(st.integers(2, 30), min_size=1, max_size=8)


@given(lengths_strategy, st.data(), st.integers(1, 80), st.booleans())
def test_passes_cover_all_rows_once_in_order_within_the_bound(
    lengths: list[int], data: st.DataObject, max_tokens: int, split_jobs: bool
) -> None:
    dataset = dataset_of(*lengths)
    one_job = st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6)
    jobs = [JobRows(dataset, slot, tuple(rows)) for slot, rows in enumerate(data.draw(st.lists(one_job, max_size=5)))]
    micro_batches = list(split_into_micro_batches(jobs, max_tokens, split_jobs=split_jobs))

    assert [(part.slot, row) for parts in micro_batches for part in parts for row in part.rows] == [
        (job.slot, row) for job in jobs for row in job.rows
    ]
    for parts in micro_batches:
        assert len({part.slot for part in parts}) == len(parts)
        tokens = sum(lengths[row] for part in parts for row in part.rows)
        assert tokens <= max_tokens or (len(parts) == 1 and len(parts[0].rows) == 1)
    for job in jobs:
        own = [part for parts in micro_batches for part in parts if part.slot == job.slot]
        is_whole = sum(lengths[row] for row in job.rows) <= max_tokens
        assert own == [job] or split_jobs or not is_whole
        done = 0
        for part in own:
            assert part.first_token == done
            assert part.totals.weight == sum(lengths[row] - 2 for row in job.rows)
            assert part.whole is not None or part == job
            done += sum(lengths[row] for row in part.rows)


def totals(num_trained: int) -> BatchTotals:
    return BatchTotals(weight=num_trained, num_chosen=num_trained)


def test_passes_are_as_few_as_order_allows() -> None:
    dataset = dataset_of(4, 4, 4)
    jobs = [JobRows(dataset, slot, (slot,)) for slot in range(3)]
    assert list(split_into_micro_batches(jobs, 8)) == [jobs[:2], jobs[2:]]
    assert list(split_into_micro_batches(jobs, 12)) == [jobs]
    large = JobRows(dataset, 0, (0, 1, 2))
    parts = [JobRows(dataset, 0, (0, 1), 0, totals(6)), JobRows(dataset, 0, (2,), 8, totals(6))]
    assert list(split_into_micro_batches([large], 8)) == [[part] for part in parts]
    small = JobRows(dataset, 1, (0,))
    after_small = [[small, JobRows(dataset, 0, (0,), 0, totals(6))], [JobRows(dataset, 0, (1, 2), 4, totals(6))]]
    assert list(split_into_micro_batches([small, large], 8)) == after_small
    assert list(split_into_micro_batches([large], 12)) == [[large]]
    assert list(split_into_micro_batches([large], 8, split_jobs=True)) == [[part] for part in parts]


@given(lengths_strategy, st.integers(1, 6), st.data())
def test_the_ranks_share_all_rows_once_in_order_and_evenly(
    lengths: list[int], num_ranks: int, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=10))
    shares = share_rows(JobRows(dataset_of(*lengths), 3, tuple(rows)), num_ranks)

    assert len(shares) == num_ranks
    parts = [share for share in shares if share is not None]
    assert [row for part in parts for row in part.rows] == rows
    done = 0
    for part in parts:
        assert part.rows
        assert (part.slot, part.first_token) == (3, done)
        assert part.totals.weight == sum(lengths[row] - 2 for row in rows)
        done += sum(lengths[row] for row in part.rows)
    mean = done / num_ranks
    largest = max(sum(lengths[row] for row in part.rows) for part in parts)
    assert largest <= mean + max(lengths[row] for row in rows)


def test_rows_of_equal_length_are_shared_evenly() -> None:
    dataset = dataset_of(*[5] * 8)
    whole = JobRows(dataset, 0, tuple(range(8)))
    for num_ranks, expected in [(2, [4, 4]), (4, [2, 2, 2, 2]), (8, [1] * 8), (3, [3, 2, 3])]:
        shares = share_rows(whole, num_ranks)
        assert [len(share.rows) for share in shares if share is not None] == expected
    alone = JobRows(dataset, 0, (4,))
    assert sum(share is None for share in share_rows(alone, 3)) == 2


def test_shares_are_cut_into_passes_that_know_where_they_are_in_the_batch() -> None:
    """A rank splits its share; dropout masks depend on ``first_token``."""
    dataset = dataset_of(4, 4, 4, 4)
    _, share = share_rows(JobRows(dataset, 0, (0, 1, 2, 3)), 2)
    assert share == JobRows(dataset, 0, (2, 3), 8, totals(8))
    assert list(split_into_micro_batches([share], 8)) == [[share]]
    assert list(split_into_micro_batches([share], 4)) == [
        [JobRows(dataset, 0, (2,), 8, totals(8))],
        [JobRows(dataset, 0, (3,), 12, totals(8))],
    ]


def test_an_idle_batch_is_one_token_of_no_job() -> None:
    batch = collate([])
    assert (batch.slots, batch.job_tokens, batch.job_first_tokens) == ((), (), ())
    assert batch.sequence_lengths == (1,)
    assert batch.input_ids_T.shape == batch.position_ids_T.shape == (1,)
    assert batch.loss_positions_S.shape == batch.loss_targets_S.shape == (sum(batch.job_targets),)


@given(lengths_strategy, st.data())
def test_a_part_of_a_batch_is_the_batch_of_its_jobs(lengths: list[int], data: st.DataObject) -> None:
    plain = dataset_of(*lengths)
    references = torch.arange(2.0 * len(lengths), dtype=torch.float64).view(-1, 2)
    with_references = dataclasses.replace(dataset_of(*lengths), references=references)
    rows = st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=4).map(tuple)
    drawn = data.draw(st.lists(st.tuples(st.booleans(), rows), min_size=1, max_size=5))
    jobs = [
        JobRows(with_references if is_referenced else plain, slot, of_job)
        for slot, (is_referenced, of_job) in enumerate(drawn)
    ]
    first = data.draw(st.integers(0, len(jobs) - 1))
    last = data.draw(st.integers(first + 1, len(jobs)))
    found, expected = collate(jobs).part(first, last), collate(jobs[first:last])
    for field in dataclasses.fields(found):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs, field.name


@st.composite
def rows_with_common_beginnings(draw: st.DrawFn) -> EncodedDataset:
    """Draw rows of few distinct token ids, so that they begin alike, each with a trained end."""
    input_ids, targets = [], []
    common = draw(st.lists(st.integers(0, 1), min_size=30, max_size=30))
    for _ in range(draw(st.integers(1, 6))):
        num_common, rest = draw(st.integers(0, 30)), draw(st.lists(st.integers(0, 1), min_size=2, max_size=9))
        ids = torch.tensor(common[:num_common] + rest)
        first = draw(st.integers(0, len(ids) - 2))
        target = torch.full_like(ids, -100)
        target[first:-1] = ids[first + 1 :]
        input_ids.append(ids)
        targets.append(target)
    return EncodedDataset(input_ids=tuple(input_ids), targets=tuple(targets))


@given(rows_with_common_beginnings(), rows_with_common_beginnings())
def test_rows_that_share_their_beginnings_see_the_same_tokens_and_predict_the_same(
    first: EncodedDataset, second: EncodedDataset
) -> None:
    jobs = [JobRows(dataset, slot, tuple(range(len(dataset)))) for slot, dataset in enumerate((first, second))]
    whole, shared = collate(jobs), collate([replace(job, shares_beginnings=True) for job in jobs])
    assert sum(shared.job_tokens) == len(shared.input_ids_T) <= len(whole.input_ids_T)
    assert shared.job_targets == whole.job_targets
    assert shared.sequence_targets == whole.sequence_targets
    assert torch.equal(shared.loss_targets_S, whole.loss_targets_S)
    for name in ("input_ids_T", "position_ids_T"):
        values = getattr(shared, name)
        assert torch.equal(values[shared.loss_positions_S], getattr(whole, name)[whole.loss_positions_S])
        seen = values[
            Sequences(shared.sequence_lengths, shared.sequence_prefixes)
            .with_prefixes(torch.arange(len(values))[:, None, None])
            .flatten()
        ]
        assert torch.equal(seen, getattr(whole, name))


def test_a_shared_beginning_goes_through_the_model_once_and_a_job_shares_none_with_another() -> None:
    ids = torch.arange(12)
    target = torch.full_like(ids, -100)
    target[9:-1] = ids[10:]
    dataset = EncodedDataset(input_ids=(ids,) * 3, targets=(target,) * 3)
    shares = {"shares_beginnings": True}
    batch = collate([JobRows(dataset, 0, (0, 1, 2), **shares), JobRows(dataset, 1, (0,), **shares)])
    assert batch.sequence_lengths == (12, 3, 3, 12)
    assert batch.sequence_prefixes == (0, 9, 9, 0)
    assert batch.job_tokens == (18, 12)
    assert collate([JobRows(dataset, 0, (0, 1, 2))]).sequence_prefixes == (0, 0, 0)
