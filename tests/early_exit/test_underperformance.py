from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import policy
from alto.records import Candidate, ExitReason, Rung, RungResult
from alto.spec.early_exit import ceil_fraction

INF, NAN = math.inf, math.nan


def candidates(losses: dict[str, float], ended: str = "") -> list[Candidate]:
    return [
        Candidate(job=job, step=5, validation_loss=loss, is_training=job not in ended) for job, loss in losses.items()
    ]


def select(rung: Rung, ranked: list[Candidate]) -> RungResult:
    return policy.select(ceil_fraction(rung.keep, len(ranked)), ranked)


def dropped(rung_result) -> list[str]:
    return [decision.job for decision in rung_result.dropped]


@pytest.mark.parametrize(
    ("case", "losses", "ended", "keep", "kept", "out"),
    [
        ("the best half", {"a": 4, "b": 1, "c": 3, "d": 2}, "", 0.5, ["b", "d"], ["c", "a"]),
        ("rounded up", {"a": 3, "b": 2, "c": 1}, "", 0.5, ["c", "b"], ["a"]),
        ("ties by job id", {"c": 1, "b": 1, "a": 1}, "", 0.34, ["a", "b"], ["c"]),
        ("NaN last", {"a": NAN, "b": 9, "c": INF}, "", 0.3, ["b"], ["a", "c"]),
        ("not finite never kept", {"a": NAN, "b": 9, "c": INF}, "", 1.0, ["b"], ["a", "c"]),
        ("nobody finite", {"b": NAN, "a": -INF}, "", 1.0, [], ["a", "b"]),
        ("one job is kept", {"a": 5}, "", 0.01, ["a"], []),
        ("one is kept of the smallest share", {"a": 5, "b": 4}, "", 1e-12, ["b"], ["a"]),
        ("an ended job takes a place", {"a": 1, "b": 2}, "a", 0.5, ["a"], ["b"]),
        ("an ended job is not dropped", {"a": 3, "b": 2}, "a", 0.5, ["b"], []),
        ("an ended job counts", {"a": 3, "b": 2, "c": 1}, "a", 0.34, ["c", "b"], []),
        ("no job has a value", {}, "", 0.5, [], []),
    ],
)
def test_who_is_kept(case, losses, ended, keep, kept, out) -> None:
    rung_result = select(Rung(progress=0.05, keep=keep), candidates(losses, ended))
    assert list(rung_result.kept) == kept
    assert dropped(rung_result) == out


def test_evidence() -> None:
    rung_result = select(Rung(progress=0.05, keep=0.5), candidates({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}))
    verdict = rung_result.dropped[1]
    assert (verdict.job, verdict.step, verdict.reason) == ("d", 5, ExitReason.UNDERPERFORMING)
    assert verdict.evidence == {
        "rank": 4.0,
        "validation_loss": 4.0,
        "num_competing": 4.0,
        "num_kept": 2.0,
        "cutoff_loss": 2.0,
    }


def test_there_is_no_cutoff_if_no_job_is_kept() -> None:
    assert "cutoff_loss" not in select(Rung(progress=0.05, keep=0.5), candidates({"a": NAN})).dropped[0].evidence


losses_of_jobs = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3), st.floats(0, 10) | st.sampled_from([NAN, INF]), min_size=1, max_size=40
)


@given(losses_of_jobs, st.integers(1, 100), st.randoms(use_true_random=False))
def test_exactly_the_share_is_kept_whatever_the_order(
    losses: dict[str, float], percent: int, draw: random.Random
) -> None:
    rung, everybody = Rung(progress=0.05, keep=percent / 100), candidates(losses)
    rung_result = select(rung, everybody)
    finite = sum(math.isfinite(loss) for loss in losses.values())
    assert len(rung_result.kept) == min(ceil_fraction(percent / 100, len(losses)), finite)
    assert sorted([*rung_result.kept, *dropped(rung_result)]) == sorted(losses)
    worst = max((losses[job] for job in rung_result.kept), default=-INF)
    assert all(not losses[job] < worst for job in dropped(rung_result))
    shuffled = draw.sample(everybody, len(everybody))
    again = select(rung, shuffled)
    assert (again.kept, dropped(again)) == (rung_result.kept, dropped(rung_result))


@given(losses_of_jobs, st.integers(1, 100))
def test_only_the_order_of_losses_matters(losses: dict[str, float], percent: int) -> None:
    rung = Rung(progress=0.05, keep=percent / 100)
    doubled = {job: loss * 2 for job, loss in losses.items()}
    assert select(rung, candidates(losses)).kept == select(rung, candidates(doubled)).kept


LEADING = [1.0, 2.0, 1.5, 1.2, 0.8, 1.1]


@pytest.mark.parametrize(
    ("case", "behind", "start_loss", "is_kept"),
    [
        ("by 0.2 on every row, a tenth of the decrease of 2", [0.2] * 6, 3.27, False),
        ("by 0.05 on every row, a fortieth of the decrease", [0.05] * 6, 3.27, True),
        ("by 0.2 on average, with an error of 0.13", [1.0, -0.3, 0.4, -0.2, 0.1, 0.2], 3.27, True),
        ("what the first began with is not known", [0.2] * 6, None, True),
        ("the first has gained nothing", [0.2] * 6, 1.2, True),
        ("rows that are not finite", [0.2] * 5 + [INF], 3.27, True),
        ("rows that are not known", [], 3.27, True),
        ("fewer rows", [0.2] * 4, 3.27, False),
        ("one row tells no error", [0.2], 3.27, True),
    ],
)
def test_a_job_clearly_behind_the_best_does_not_continue_though_there_is_a_place(
    case: str, behind: list[float], start_loss: float | None, is_kept: bool
) -> None:
    first = Candidate(job="a", step=5, validation_loss=1.27, start_loss=start_loss, loss_rows=tuple(LEADING))
    rows = tuple(one + more for one, more in zip(LEADING, behind, strict=False))
    mean = sum(behind) / len(behind) if behind and all(map(math.isfinite, behind)) else 0.2
    second = Candidate(job="b", step=5, validation_loss=1.27 + mean, start_loss=start_loss, loss_rows=rows)
    for ranked in ([first, second], [second, first]):
        found = policy.select(2, ranked, ends_clear_losers=True)
        assert list(found.kept) == (["a", "b"] if is_kept else ["a"]), case
        assert dropped(found) == ([] if is_kept else ["b"])
        assert list(policy.select(2, ranked).kept) == ["a", "b"]
    assert is_kept or found.dropped[0].evidence["num_kept"] == 1.0


def test_repetitions_of_a_configuration_are_not_ended_as_clear_losers() -> None:
    jobs = {"a": 1.0, "b": 1.0, "c": 1.5, "d": 1.5}
    ranked = [
        Candidate(job=job, step=5, validation_loss=loss, start_loss=3.0, loss_rows=(loss,) * 6)
        for job, loss in jobs.items()
    ]
    found = policy.select(2, ranked, ends_clear_losers=True, configuration_of=dict.fromkeys("ab", "a"))
    assert set(found.kept) == set(jobs) - {"d"}
