"""Budgets of a session of tests: ``pytest`` proves what users rely on in minutes, ``pytest --all`` runs everything, and
``pytest --nightly`` tries and kills more often.

They are ``make test``, ``make test-all`` and ``make test-nightly``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, settings

__all__ = [
    "FULL_EXAMPLES",
    "NIGHTLY_EXAMPLES",
    "QUICK_EXAMPLES",
    "SLOW_KINDS",
    "examples",
    "kills",
    "load_budget",
    "reason_to_skip",
    "slowest_first",
]

SLOW_KINDS = {
    "benchmarks": "benchmarks at their smallest scale, and their gates",
    "browser": "reports and the dashboard of a service in a real browser",
    "campaigns": "runs that are killed and resumed at many instants, damaged in many ways, or on full disks",
    "kernels": "every kernel in Triton's interpreter over all shapes, and compiled for every GPU",
    "minutes": "benchmarks and examples that run for a minute and whose parts other tests cover; only with `--nightly`",
    "models": "further architectures, mixtures and quantisations (`make test` has one of each kind), and torch.compile",
    "queues": "queues that are measured and run by separate executors, and long listings of the documentation",
    "ray": "Ray clusters whose nodes die",
    "servers": "a service with a real vLLM server; `make test-servers` makes what it needs",
}
"""Kinds of tests that need ``--all`` or ``--nightly``: the argument of the marker ``slow``, as in CONTRIBUTING.md."""

QUICK_EXAMPLES = 10
FULL_EXAMPLES = 15
NIGHTLY_EXAMPLES = 100
"""Examples that hypothesis tries: without an option, with ``--all``, and with ``--nightly``."""

_WHOLE_EXAMPLES = 25
"""The budget from which on a test with a number of examples of its own tries all of them."""

_LONG_S = 20.0


def load_budget(num_examples: int) -> None:
    """Choose how many examples hypothesis tries; before the files of the tests are imported.

    In no budget does a test fail because the machine is busy.
    """
    name = f"{num_examples}-examples"
    settings.register_profile(
        name, max_examples=num_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile(name)


def examples(full: int) -> int:
    """Return how many examples to try if ``--nightly`` tries ``full``; at least five."""
    return min(full, max(5, full * settings.default.max_examples // _WHOLE_EXAMPLES))


def kills(nightly: int) -> int:
    """Return how often a campaign kills if ``--nightly`` kills ``nightly`` times; three in ten of them otherwise."""
    return nightly if settings.default.max_examples >= NIGHTLY_EXAMPLES else max(3, 3 * nightly // 10)


def slowest_first(
    items: Sequence[pytest.Item], num_workers: int, durations: Mapping[str, float] | None = None
) -> list[pytest.Item]:
    """Return ``items`` in an order in which every worker begins with slow files, so that none is left for the end.

    A worker of ``--dist worksteal`` begins with its part of the list, and takes tests from the end of another's part
    when its own is done. The tests of a file stay together.

    Args:
        durations: CPU seconds of files; one that is not there takes long if a test of it is marked ``slow``.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    unknown = {file: _LONG_S for file, of in files.items() if any(item.get_closest_marker("slow") for item in of)}
    seconds = unknown | dict(durations or {})
    long = sorted((file for file in files if seconds.get(file, 0.0) >= _LONG_S), key=lambda file: -seconds[file])
    slow = [files[file] for file in long]
    rest = [item for file, of in files.items() if file not in long for item in of]
    order: list[pytest.Item] = []
    for worker in range(num_workers):
        part = [item for of in slow[worker::num_workers] for item in of]
        num_rest = max(0, (worker + 1) * len(items) // num_workers - len(order) - len(part))
        order += [*part, *rest[:num_rest]]
        rest = rest[num_rest:]
    return [*order, *rest]


def reason_to_skip(item: pytest.Item, *, runs_all: bool, is_nightly: bool) -> str:
    """Return why a test does not run with these options; empty if it does, like GPU tests where there is a GPU.

    Raises:
        pytest.UsageError: The test is marked ``slow`` without one of `SLOW_KINDS`.
    """
    for mark in item.iter_markers("slow"):
        if len(mark.args) != 1 or mark.args[0] not in SLOW_KINDS or mark.kwargs:
            raise pytest.UsageError(
                f"{item.nodeid}: expected the marker slow with one of {', '.join(SLOW_KINDS)}, found "
                f"slow{mark.args}; name the kind, or add one to tests/support/budgets.py"
            )
        (kind,) = mark.args
        if item.get_closest_marker("gpu") is None and not (is_nightly if kind == "minutes" else runs_all):
            return f"only with {'--nightly' if kind == 'minutes' else '--all'}: {SLOW_KINDS[kind]}"
    return ""
