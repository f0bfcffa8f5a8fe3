"""Tests for every causal-LM and vision-language class of the installed transformers whether ALTO trains it exactly on
rows of text, or refuses it.

    python -m tools.architectures --scale cpu

For each class a tiny model with random weights is made, saved, and loaded as a task loads its base model. Three jobs of
different rank, batch size and row lengths train one step together. The loss and the adapter gradients of each job are
compared with Hugging Face PEFT, which trains the same adapter alone on the same rows, in float32. One adapter is
exported, and then loaded and merged by plain PEFT.

``exact``: losses agree to 1e-5, gradients to 1e-4 in norm, logits of the export to 1e-5. ``refused``: ALTO raised a
named error with the reason. ``wrong``: they differ. ``tracebacks``: any other exception, a crash, or no answer in time.
``cannot_build``: transformers or PEFT itself cannot train the tiny model.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import Result, commit_id, format_table, option_parser, publish
from tools import RESULTS_DIR
from tools.architectures.examine import examine, preloaded_context
from tools.architectures.verdict import Verdict

SMOKE = ("llama", "qwen2_moe", "stablelm", "gpt2", "bloom", "bart", "llava")
GOALS = {"exact": (">=", 120), "wrong": ("<=", 0), "tracebacks": ("<=", 0)}
TIME_LIMIT_S = 180.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = option_parser(__doc__, ("smoke", "cpu"), out=RESULTS_DIR)
    parser.add_argument("--models", nargs="+", metavar="TYPE", help="model types, instead of those of the scale")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, metavar="SECONDS", help="for one model type")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep verdicts there, and take those of this commit")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS", help="go on another time")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.stop_after
    context = preloaded_context()
    verdicts = []
    for model_type in options.models or _model_types(options.scale):
        if time.monotonic() > end:
            print(f"stopped after {len(verdicts)} classes; the same command goes on")
            return 2
        verdict = _kept(options.keep, model_type) or examine(context, model_type, options.time_limit)
        _keep(options.keep, verdict)
        verdicts.append(verdict)
        print(f"{verdict.model_type}: {verdict.status}{': ' * bool(verdict.reason)}{verdict.reason}", flush=True)
    print(format_table(("verdict", "classes"), Counter(verdict.status for verdict in verdicts).most_common()))
    return publish(summarise(verdicts, options.scale), options.out)


def _kept(folder: Path | None, model_type: str) -> Verdict | None:
    """Return the verdict that an earlier call at this commit has saved; None if there is none."""
    file = folder and folder / commit_id() / f"{model_type}.json"
    return Verdict(**json.loads(file.read_text(encoding="utf-8"))) if file and file.exists() else None


def _keep(folder: Path | None, verdict: Verdict) -> None:
    if folder is not None:
        file = folder / commit_id() / f"{verdict.model_type}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(verdict)), encoding="utf-8")


def summarise(verdicts: Sequence[Verdict], scale: str) -> Result:
    """Return the result: counts as figures, verdicts as rows."""
    count = Counter(verdict.status for verdict in verdicts)
    figures = {
        "exact": count["exact"],
        "refused": count["refused"],
        "wrong": count["wrong"],
        "tracebacks": count["traceback"] + count["timeout"] + count["crash"],
        "cannot_build": count["cannot_build"],
        "classes": len(verdicts),
        "packed": sum(verdict.status == "exact" and verdict.rows == "packed" for verdict in verdicts),
    }
    notes = [
        "Adapters sit on the dense linear modules of attention and, where there are any, on stacked experts and their "
        "routers; the indexers of sparse attention have none.",
        "Dropout, jitter and router losses are off in the tiny models; windows are 5 tokens, chunks 7, rows 5 to 34.",
        "PEFT trains the model that transformers itself loads from the same folder, on rows padded on the right.",
    ]
    return Result.of(
        benchmark="architectures",
        scale=scale,
        gate_failures=list(_failures(verdicts)),
        figures=figures,
        goals=GOALS if scale == "cpu" else {name: GOALS[name] for name in ("wrong", "tracebacks")},
        rows=[asdict(verdict) for verdict in verdicts],
        notes=notes,
    )


def _failures(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Return why the gate fails. Llama is known to train exactly, so if it does not, no other verdict can be
    trusted."""
    for verdict in verdicts:
        if verdict.model_type == "llama" and verdict.status != "exact":
            yield f"llama is {verdict.status}: {verdict.reason}"


def _model_types(scale: str) -> Sequence[str]:
    from tools.architectures.tiny import model_types

    return SMOKE if scale == "smoke" else model_types()


if __name__ == "__main__":
    raise SystemExit(main())
