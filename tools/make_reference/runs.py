"""The sections about a run directory.

What a number of an exit means is written by hand here, because no code says it; the tests compare it with the rules.
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
from alto.records import ExitDecision, ExitReason, LossPoint, Standing
from alto.runs import queue_dir, run_dir
from tools.make_reference.markdown import code, table

__all__ = ["EVIDENCE", "evidence_section", "exits", "journal_section", "run_section"]

EVIDENCE: Mapping[str, str] = {
    "train_loss": "the loss that is not finite",
    "train_ema": "smoothed training loss",
    "validation_loss": "validation loss that was judged; at a rung interpolated to exactly its share of the steps",
    "train_slope": "slope of the smoothed training loss, nats per evaluation",
    "validation_slope": "slope of the validation loss",
    "tau_slope": "the key: both slopes reached it",
    "in_a_row": "evaluations in a row at which it held: the patience",
    "gap": "(validation − smoothed training loss) / smoothed training loss, that taken for 0.001 at least",
    "tau_gap": "the key: the gap exceeded it",
    "rise": "validation loss over the best before it",
    "margin": "the larger of `tau_upturn` × best (0.001 at least) and `tau_noise` × noise: the rise exceeded it",
    "noise": "standard deviation of the job's own validation loss around its trend",
    "best_validation_loss": "the best before it",
    "rank": "place at the rung, 1 is best",
    "num_competing": "jobs that were ranked",
    "num_kept": "places that were given",
    "cutoff_loss": "validation loss of the last job kept",
    "score": "value of the `metric` that the task chooses by",
    "cutoff_score": "that of the last job kept",
}
"""Numbers in the ``evidence`` of a ``job_exited``."""


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
    """The folder that is drawn at the top of a module."""
    drawn = re.split(r"::\n\n", inspect.getdoc(module) or "")[1]
    return textwrap.dedent(re.split(r"\n\n(?=\S)", drawn)[0]).rstrip()


def journal_section() -> str:
    return """## Journal

`journal.jsonl` has one JSON object a line: `seq` (0, 1, …), `time` (unix seconds), `event`, and the event's own fields.
[events.md](events.md) lists every event of runs and queues.
"""


def evidence_section() -> str:
    rows = [
        [code(decision.reason), why, ", ".join(f"`{key}`" for key in decision.evidence)] for why, decision in exits()
    ]
    return f"""## Numbers of an exit

The field `evidence` of `job_exited`, also shown in the report:

{table(("reason", "because", "numbers"), rows)}

{table(("number", "meaning"), [[code(key), meaning] for key, meaning in EVIDENCE.items()])}

A job that reached a rung after it was decided has `progress`, too: the rung's share of its steps.
`{ExitReason.STOPPED}` (by `alto job stop`) has no numbers. `{ExitReason.FAILED}` (a row does not fit into memory by
itself) has `row_tokens`, the tokens of that row, and `largest_micro_batch`, those of the largest micro-batch that
fitted; or, of a suggestion of the search whose adapter does not fit, `adapter_bytes`, its bytes with gradient and
optimizer state.
"""


def exits() -> list[tuple[str, ExitDecision]]:
    """Every way to end by a verdict, decided by the rules themselves on curves made for it."""
    rising, turning = _curve([1.0, 2.0, 3.0, 4.0]), _curve([3.0, 2.0, 1.0, 2.0, 3.0])
    apart = _curve([2.0, 2.0], train=1.0)
    standings = [Standing(job=f"job-{number}", step=1, validation_loss=float(number)) for number in range(2)]
    gaining = [dataclasses.replace(standing, score=-standing.validation_loss) for standing in standings]
    decisions = [
        ("both losses rise", Divergence().judge(rising)),
        ("a training loss is not finite", judge_step_loss("job", 1, float("nan"))),
        ("a validation loss is not finite", judge_point(_curve([float("nan")])[0])),
        ("validation has turned upward (`policy: alto`)", OverfittingUpturn(tau_noise=0).judge(turning)),
        ("validation lies above training (`policy: paper`)", OverfittingGap().judge(apart)),
        ("not kept at a rung", select(1, standings).dropped[0]),
        ("not kept at a rung, by a `metric`", select(1, gaining).dropped[0]),
    ]
    return [(why, decision) for why, decision in decisions if decision is not None]


def _curve(validation: Sequence[float], train: float | None = None) -> list[LossPoint]:
    return [
        LossPoint(job="job", step=step, total_steps=10, train_ema=train or loss, validation_loss=loss)
        for step, loss in enumerate(validation, start=1)
    ]
