"""The sections about a run directory.

The meanings of the numbers of an exit are written here, because no code states them; the tests compare their names with
those of the rules.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence

from alto.early_exit import Divergence, OverfittingGap, OverfittingUpturn, judge_step_loss
from alto.early_exit.patterns import judge_point
from alto.early_exit.policy import select
from alto.records import Candidate, ExitDecision, ExitReason, LossPoint
from alto.runs import queue_dir, run_dir
from tools.make_reference.markdown import code, table

__all__ = ["EVIDENCE", "evidence_section", "exits", "journal_section", "run_section"]

EVIDENCE: Mapping[str, str] = {
    "train_loss": "the loss that is not finite",
    "train_ema": "smoothed training loss",
    "validation_loss": "validation loss that was judged; at a rung, interpolated to exactly the rung's share of steps",
    "train_slope": "slope of the smoothed training loss, nats per evaluation",
    "validation_slope": "slope of the validation loss",
    "tau_slope": "the key of that name: both slopes reached it",
    "in_a_row": "number of evaluations in a row at which the condition held: the patience",
    "gap": "(validation − smoothed training loss) / smoothed training loss, with 0.001 in place of a smaller divisor",
    "tau_gap": "the key of that name: the gap exceeded it",
    "rise": "validation loss minus the best validation loss before it",
    "margin": "the larger of `tau_upturn` × best loss (at least 0.001) and `tau_noise` × noise: the rise exceeded it",
    "noise": "standard deviation of the job's own validation loss around its trend",
    "best_validation_loss": "the best validation loss before it",
    "rank": "rank at the rung; 1 is best",
    "num_competing": "number of jobs that were ranked",
    "num_kept": "number of jobs that were kept",
    "cutoff_loss": "validation loss of the last job kept",
    "score": "value of the `metric` by which the task selects",
    "cutoff_score": "score of the last job kept",
}
"""Meaning of each number in the ``evidence`` of ``job_exited``."""


def run_section() -> str:
    return f"""## Run directory

```
{_drawn(run_dir)}
```

Trackers add folders of their own, see [trackers.md](trackers.md). `best/` is all that is needed to serve the adapter.

Many tasks (`alto run`) share the folder of their queue:

```
{_drawn(queue_dir)}
```
"""


def _drawn(module: object) -> str:
    """Return the drawing of a folder in the docstring of a module."""
    drawn = re.split(r"::\n\n", inspect.getdoc(module) or "")[1]
    return textwrap.dedent(re.split(r"\n\n(?=\S)", drawn)[0]).rstrip()


def journal_section() -> str:
    return """## Journal

`journal.jsonl` has one JSON object per line: `seq` (0, 1, …), `time` (unix seconds), `event`, and the event's own
fields. [events.md](events.md) lists every event of runs and queues.
"""


def evidence_section() -> str:
    rows = [
        [code(decision.reason), why, ", ".join(f"`{key}`" for key in decision.evidence)] for why, decision in exits()
    ]
    return f"""## Numbers of an exit

The event `job_exited` has these numbers in its field `evidence`, and the report shows them:

{table(("reason", "because", "numbers"), rows)}

{table(("number", "meaning"), [[code(key), meaning] for key, meaning in EVIDENCE.items()])}

A job that reached a rung after the rung was decided also has `progress`, the rung's share of the job's steps.
`{ExitReason.STOPPED}` (by `alto job stop`) has no numbers. `{ExitReason.FAILED}` means that something does not fit into
memory. If it is a row by itself, the numbers are `row_tokens`, the tokens of that row, and `largest_micro_batch`, the
tokens of the largest micro-batch that fitted. If it is the adapter of a configuration that the search suggested, the
number is `adapter_bytes`, its bytes with gradient and optimizer state.
"""


def exits() -> list[tuple[str, ExitDecision]]:
    """Return every kind of verdict that ends a job, made by the rules themselves on suitable curves."""
    rising, turning = _curve([1.0, 2.0, 3.0, 4.0]), _curve([3.0, 2.0, 1.0, 2.0, 3.0])
    apart = _curve([2.0, 2.0], train=1.0)
    candidates = [Candidate(job=f"job-{number}", step=1, validation_loss=float(number)) for number in range(2)]
    gaining = [dataclasses.replace(candidate, score=-candidate.validation_loss) for candidate in candidates]
    decisions = [
        ("both losses rise", Divergence().judge(rising)),
        ("a training loss is not finite", judge_step_loss("job", 1, float("nan"))),
        ("a validation loss is not finite", judge_point(_curve([float("nan")])[0])),
        ("validation has turned upward (`policy: alto`)", OverfittingUpturn(tau_noise=0).judge(turning)),
        ("validation lies above training (`policy: paper`)", OverfittingGap().judge(apart)),
        ("not kept at a rung", select(1, candidates).dropped[0]),
        ("not kept at a rung, by a `metric`", select(1, gaining).dropped[0]),
    ]
    return [(why, decision) for why, decision in decisions if decision is not None]


def _curve(validation: Sequence[float], train: float | None = None) -> list[LossPoint]:
    return [
        LossPoint(job="job", step=step, total_steps=10, train_ema=train or loss, validation_loss=loss)
        for step, loss in enumerate(validation, start=1)
    ]
