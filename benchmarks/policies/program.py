"""Replays early-exit policies on the recorded sweeps, and measures what each saves and what it loses of the winner.

A recording has the curves of a sweep whose jobs were all trained to their end, so any policy can be replayed on it:
ALTO's presets, the paper's rule, and the schedulers of Ray Tune and Optuna. Jobs are chosen by the validation rows. If
the recording has test rows, which were not used for the choice, they judge the jobs. Nothing is trained here.

    python -m benchmarks.paper policies --scale cpu
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from alto import EarlyExit
from alto.early_exit import Recording
from benchmarks.common import option_parser, publish_figures
from benchmarks.paper import curves
from benchmarks.paper.recordings import is_preference, read_recordings
from benchmarks.policies.family import FAMILY, SMALL_FAMILY, best_member, name_of
from benchmarks.policies.outcomes import Outcome, improvement_lost, interval, outcome_of, replayed
from benchmarks.policies.peers import PEERS, Kept

EVERYTHING = EarlyExit(enabled=False)
OWN: Mapping[str, EarlyExit] = {
    "cautious": EarlyExit(preset="cautious"),
    "greedy": EarlyExit(preset="greedy"),
    "two rungs": EarlyExit(rungs=((0.025, 0.5), (0.05, 0.2))),
    "two rungs, whole steps": EarlyExit(rungs=((0.025, 0.5), (0.05, 0.2)), equal_shares=False),
    "paper": curves.PAPER,
}
"""Policies by name; ``two rungs, whole steps`` was the default of version 0.1."""

NUM_DRAWS = {"smoke": 20, "cpu": 1000}
GOALS = {
    "regret_worst_sft": ("<=", 1.002),
    "lost_over_paper_worst": ("<=", 0.0),
    "lost_over_paper_upper": ("<=", 0.001),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, NUM_DRAWS).parse_args(arguments)
    recordings = read_recordings(options.scale)
    failures = gate(recordings)
    family = SMALL_FAMILY if options.scale == "smoke" else FAMILY
    return publish_figures(
        options,
        "policies",
        gate_failures=failures,
        figures=lambda: figures(recordings, family, NUM_DRAWS[options.scale]),
        goals=GOALS,
        rows=[] if failures else rows(recordings),
        notes=[] if failures else about(recordings),
    )


def own(settings: EarlyExit) -> Callable[[Recording], Sequence[Kept]]:
    return lambda recording: [replayed(recording, settings)]


def default(recording: Recording) -> Sequence[Kept]:
    """Return the default settings for a task of this kind."""
    return [replayed(recording, curves.default_of(recording))]


POLICIES = {"default": default, **{name: own(settings) for name, settings in OWN.items()}, **PEERS}


def rows(recordings: Mapping[str, Recording]) -> list[dict[str, Any]]:
    """Return a row for every policy on every recording; for policies that draw, the means of five seeds."""
    return [
        {"recording": name, "policy": policy, **mean(outcomes(recording, policy))}
        for name, recording in recordings.items()
        for policy in POLICIES
    ]


def outcomes(recording: Recording, policy: str) -> list[Outcome]:
    best = replayed(recording, EVERYTHING)
    return [outcome_of(recording, kept, best) for kept in POLICIES[policy](recording)]


def mean(found: Sequence[Outcome]) -> dict[str, Any]:
    values = [asdict(outcome) for outcome in found]
    numbers = {
        key: statistics.fmean(value[key] for value in values) if None not in [value[key] for value in values] else None
        for key in ("saved", "regret", "test_regret", "lost", "within_error")
    }
    return {**numbers, "winner": values[0]["job"]}


def figures(recordings: Mapping[str, Recording], family: Sequence[EarlyExit], num_draws: int) -> dict[str, float]:
    """Return means over recordings. The savings of the default policy and of the paper's are figures of
    ``samples-saved``."""
    found: dict[str, float] = {}
    for policy in POLICIES:
        of_policy = [mean(outcomes(recording, policy)) for recording in recordings.values()]
        key = policy.replace(", ", "_").replace(" ", "_").lower()
        found[f"lost_{key}"] = statistics.fmean(outcome["lost"] for outcome in of_policy)
        if policy not in ("default", "paper"):
            found[f"saved_{key}"] = statistics.fmean(outcome["saved"] for outcome in of_policy)
    defaults = {name: outcomes(recording, "default")[0] for name, recording in recordings.items()}
    sft = [outcome for name, outcome in defaults.items() if not is_preference(recordings[name])]
    found["regret_worst_sft"] = max(judged_regret(outcome) for outcome in sft)
    found["lost_over_paper_worst"] = max(map(lost_over_paper, recordings.values()))
    found["lost_over_paper_upper"] = max(
        interval(recording, lost_over_paper, num_draws)[1] for recording in recordings.values()
    )
    return found | left_out(recordings, family)


def judged_regret(outcome: Outcome) -> float:
    """Return the regret on the test rows, which is 1 if the two adapters are within one paired standard error; without
    test rows, the regret on the validation rows."""
    if outcome.within_error:
        return 1.0
    found = outcome.regret if outcome.test_regret is None else outcome.test_regret
    assert found is not None
    return found


def lost_over_paper(recording: Recording) -> float:
    """Return the default's loss of the winner's improvement, minus that of the paper's rule."""
    best = replayed(recording, EVERYTHING)
    ((ours,), (papers,)) = (POLICIES[policy](recording) for policy in ("default", "paper"))
    return improvement_lost(recording, ours, best) - improvement_lost(recording, papers, best)


def left_out(recordings: Mapping[str, Recording], family: Sequence[EarlyExit]) -> dict[str, float]:
    """Return what the best policies of a family save and lose on recordings that were not used to choose them."""
    began = time.perf_counter()
    found: list[dict[str, tuple[float, float]]] = []
    bests = {name: replayed(recording, EVERYTHING) for name, recording in recordings.items()}
    for settings in family:
        outcomes_of = {
            name: outcome_of(recording, replayed(recording, settings), bests[name])
            for name, recording in recordings.items()
        }
        found.append({name: (outcome.saved, outcome.lost) for name, outcome in outcomes_of.items()})
    duration_s = time.perf_counter() - began
    chosen = {name: best_member(family, found, name) for name in recordings}
    for name, number in chosen.items():
        saved, lost = found[number][name]
        print(f"without {name}: {name_of(family[number])} saves {saved:.1%}, loses {lost:.2%}")
    overall = best_member(family, found, "")
    print(f"by all: {name_of(family[overall])}")
    return {
        "left_out_saved": statistics.fmean(found[number][name][0] for name, number in chosen.items()),
        "left_out_lost": statistics.fmean(found[number][name][1] for name, number in chosen.items()),
        "num_policies": float(len(family)),
        "replay_s": duration_s,
    }


def about(recordings: Mapping[str, Recording]) -> list[str]:
    return [
        f"{name}: {len(found.jobs)} jobs of {min(job.total_steps for job in found.jobs)} to "
        f"{max(job.total_steps for job in found.jobs)} steps, {found.task.get('num_validation')} validation rows, "
        + (f"{len(found.jobs[0].tests[0].rows)} test rows" if found.jobs[0].tests else "no test rows")
        for name, found in recordings.items()
    ]


def gate(recordings: Mapping[str, Recording]) -> list[str]:
    """Return the faults of the recordings and of their replay; every recording must also have the base's validation
    loss."""
    return curves.gate(recordings) + [
        f"{name}: expected the base's validation loss of every job, found jobs without; record it anew"
        for name, recording in recordings.items()
        if any(job.start is None for job in recording.jobs)
    ]
