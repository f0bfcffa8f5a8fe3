from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.errors import DeviceMemoryError
from alto.records import MemoryProfile, Throughput, ThroughputPoint
from alto.scheduler import PackingRequest, choose_packing

MIB = 2**20
MEMORY = MemoryProfile(
    fixed_bytes=100 * MIB,
    bytes_per_token=0.1 * MIB,
    capacity_bytes=1000 * MIB,
    margin=0.9,
    error_median=0.0,
    error_worst=0.0,
    points=(),
)
# Two tokens a millisecond at best, and 95 % of that from 1,000 tokens on.
THROUGHPUT = Throughput(
    step_s=0.0,
    job_s=0.0,
    token_s=5e-4,
    eval_token_s=1e-4,
    points=(
        ThroughputPoint(num_jobs=1, num_tokens=500, duration_s=0.4),
        ThroughputPoint(num_jobs=2, num_tokens=1000, duration_s=0.51),
        ThroughputPoint(num_jobs=4, num_tokens=2000, duration_s=1.0),
    ),
)
REQUEST = PackingRequest(
    step_tokens=(200,) * 30,
    most_step_tokens=(2400,) * 30,
    longest_row=300,
    slot_bytes=10 * MIB,
    usual_tokens_per_pass=4096,
)


def test_slots_are_as_many_as_saturate_the_device_and_passes_as_long_as_usual():
    packing = choose_packing(REQUEST, MEMORY, THROUGHPUT)
    assert packing.max_slots == 5  # 1,000 tokens of 200 each
    assert packing.max_tokens_per_pass == 4096
    assert packing.max_tokens_per_step == 4096
    assert packing.peak_bytes <= 900 * MIB


def test_micro_batches_are_no_larger_than_the_longest_rows_of_the_resident_jobs():
    rows = replace(REQUEST, step_tokens=(400, 600), most_step_tokens=(500, 900), longest_row=300)
    packing = choose_packing(rows, MEMORY, THROUGHPUT)
    assert packing.max_slots == 2
    assert packing.max_tokens_per_pass == 1400
    assert packing.peak_bytes == 260 * MIB  # base 100, 2 slots of 10, 1,400 tokens of a tenth
    one = choose_packing(replace(rows, step_tokens=(400,), most_step_tokens=(500,)), MEMORY, THROUGHPUT)
    assert (one.max_tokens_per_pass, one.peak_bytes) == (500, 160 * MIB)
    given = choose_packing(replace(rows, max_tokens_per_pass=4096), MEMORY, THROUGHPUT)
    assert given.peak_bytes == packing.peak_bytes  # a higher limit of the task is never reached


def test_the_largest_jobs_count_where_not_all_are_resident():
    rows = replace(REQUEST, step_tokens=(400, 600, 600), most_step_tokens=(500, 900, 700), max_slots=1)
    assert choose_packing(rows, MEMORY, THROUGHPUT).max_tokens_per_pass == 900


def test_where_tokens_take_no_memory_slots_alone_limit():
    packing = choose_packing(REQUEST, replace(MEMORY, bytes_per_token=0.0), THROUGHPUT)
    assert (packing.max_slots, packing.max_tokens_per_pass) == (5, 4096)


def test_slots_that_leave_no_room_for_a_saturated_step_are_given_up():
    packing = choose_packing(replace(REQUEST, slot_bytes=200 * MIB), MEMORY, THROUGHPUT)
    assert packing.max_slots == 3
    assert packing.max_tokens_per_pass == 2000  # (900 - 100 - 600 MiB) of tenths


def test_what_the_task_sets_is_kept():
    packing = choose_packing(
        replace(REQUEST, max_slots=7, max_tokens_per_step=50, max_tokens_per_pass=400), MEMORY, THROUGHPUT
    )
    assert (packing.max_slots, packing.max_tokens_per_step, packing.max_tokens_per_pass) == (7, 50, 400)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"longest_row": 8000}, "max_length: 7900"),
        ({"max_slots": 80}, "77 slots and micro-batches of 300 tokens fit"),
        ({"max_tokens_per_pass": 9000}, "1 slots and micro-batches of 7,900 tokens fit"),
        ({"slot_bytes": 900 * MIB}, "smaller r"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(changes: dict[str, int], fits: str):
    with pytest.raises(DeviceMemoryError, match=fits):
        choose_packing(replace(REQUEST, **changes), MEMORY, THROUGHPUT)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max_slots": 1}, "max_slots is 1 in the task"),
        ({"step_tokens": (200,)}, "there is one job"),
        (
            {"step_tokens": (1200, 1500)},
            "the smallest job alone has 1,200 tokens per step, and no measured step is more than 5 % faster per token "
            "than that of 1,000; a second slot would only delay the first results",
        ),
        # 900 MiB are planned; 100 are the base's and 700 those of two slots, a token takes a tenth.
        (
            {"slot_bytes": 350 * MIB, "longest_row": 1500},
            "with two slots of 350.0 MiB, memory is left for micro-batches of 1,000 tokens, but 1,500 tokens "
            "are needed",
        ),
    ],
)
def test_one_slot_has_a_reason(changes: dict[str, Any], why: str):
    packing = choose_packing(replace(REQUEST, **changes), MEMORY, THROUGHPUT)
    assert (packing.max_slots, packing.why_one_slot) == (1, why)


def test_several_slots_need_no_reason():
    assert choose_packing(REQUEST, MEMORY, THROUGHPUT).why_one_slot == ""
    assert choose_packing(replace(REQUEST, max_slots=2), MEMORY, THROUGHPUT).why_one_slot == ""


def test_several_ranks_share_the_slots_and_each_has_passes_of_its_own():
    packing = choose_packing(replace(REQUEST, num_ranks=2), MEMORY, THROUGHPUT)
    assert packing.max_slots == 5  # 1,000 tokens of 200 each, on both together
    assert packing.max_tokens_per_pass == 4096
    assert packing.max_tokens_per_step == 2 * 4096
    one = choose_packing(replace(REQUEST, max_slots=3), MEMORY, THROUGHPUT)
    assert packing.peak_bytes == one.peak_bytes  # the fullest rank has three of the five


def test_ranks_make_room_for_slots_that_one_has_not():
    request = replace(REQUEST, slot_bytes=200 * MIB)
    assert choose_packing(request, MEMORY, THROUGHPUT).max_slots == 3
    assert choose_packing(replace(request, num_ranks=2), MEMORY, THROUGHPUT).max_slots == 5


def test_no_rank_is_left_without_a_slot_or_without_tokens():
    large = replace(REQUEST, step_tokens=(600, 3000, 600, 600, 600), slot_bytes=150 * MIB, usual_tokens_per_pass=300)
    packing = choose_packing(replace(large, num_ranks=4), MEMORY, THROUGHPUT)
    assert packing.max_slots == 4
    assert packing.max_tokens_per_step == 4 * 3000
    assert choose_packing(replace(large, num_ranks=8), MEMORY, THROUGHPUT).max_slots == 5


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        (
            {"max_slots": 80 * 4},
            "80 slots of .* on each of 4 ranks; 77 slots per rank .308 in total. and micro-batches of 300",
        ),
        ({"longest_row": 8000}, "1 slots of .* on each of 4 ranks; .* max_length: 7900"),
    ],
)
def test_what_does_not_fit_on_a_rank_is_refused_with_what_does(changes: dict[str, int], fits: str):
    with pytest.raises(DeviceMemoryError, match=fits):
        choose_packing(replace(REQUEST, num_ranks=4, **changes), MEMORY, THROUGHPUT)


@given(
    step_tokens=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    longest_row=st.integers(1, 3000),
    slot_mib=st.integers(1, 500),
    usual=st.integers(1, 10_000),
    num_ranks=st.integers(1, 5),
)
def test_a_packing_is_never_over_the_memory_that_is_planned_with(
    step_tokens: list[int], longest_row: int, slot_mib: int, usual: int, num_ranks: int
):
    request = PackingRequest(
        step_tokens=step_tokens,
        most_step_tokens=[2 * tokens for tokens in step_tokens],
        longest_row=longest_row,
        slot_bytes=slot_mib * MIB,
        usual_tokens_per_pass=usual,
        num_ranks=num_ranks,
    )
    packing = choose_packing(request, MEMORY, THROUGHPUT)
    assert 1 <= packing.max_slots <= len(step_tokens)
    largest_pass = max(packing.max_tokens_per_pass, longest_row)
    bank_bytes = math.ceil(packing.max_slots / num_ranks) * slot_mib * MIB
    assert MEMORY.peak_bytes(largest_pass, bank_bytes) <= MEMORY.margin * MEMORY.capacity_bytes
