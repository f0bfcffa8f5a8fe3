"""Formats numbers and names for users: losses, shares, durations, configuration values.

Text that comes from a user (names of tasks, models, datasets, jobs) passes through :func:`clean` before it is shown in
a terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from alto.records import AdapterCheck, FinalistScore, Rung
from alto.runs import JobHistory, RunHistory
from alto.runs.events import KernelsCompiled, MeasuringBegun, OutOfMemory, ProfileMeasured, RefitFact, TaskStarted
from alto.runs.progress import Outlook, exit_totals, training_all_s
from alto.spec import places_at

# Canonical key -> name in a narrow column. The order is the order of the columns.
SHORT_NAMES = {
    "learning_rate": "lr",
    "per_device_train_batch_size": "bs",
    "r": "r",
    "lora_alpha": "alpha",
    "alpha/r": "alpha/r",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "beta": "beta",
    "weight_decay": "wd",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "lr_scheduler_type": "schedule",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup ratio",
    "max_grad_norm": "clip",
    "max_length": "length",
    "optim": "optim",
    "seed": "seed",
}


def clean(text: object) -> str:
    """Return ``text`` on one line, without control, escape and bidirectional-override characters."""
    return "".join(char for char in " ".join(str(text).split()) if char.isprintable())


def clean_lines(text: str) -> str:
    """Return ``text`` without control, escape and bidirectional-override characters; keep line ends and tabs."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def short_name(key: str) -> str:
    """Return the name of a configuration key for a narrow column: ``lr`` for ``learning_rate``."""
    return SHORT_NAMES.get(key, key)


def tidy_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``lora_alpha`` in ``config`` by ``alpha/r``, the number that scales an adapter.

    So a sweep over ranks with ``lora_alpha: 2*r`` shows one varying key, not two.
    """
    tidy = dict(config)
    rank, alpha = tidy.get("r"), tidy.get("lora_alpha")
    if isinstance(rank, int) and isinstance(alpha, int | float) and rank:
        del tidy["lora_alpha"]
        tidy["alpha/r"] = alpha / rank
    return tidy


def varying_keys(configs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the keys whose values differ between ``configs``, best-known keys first; a missing key differs from any
    value."""
    keys = list(dict.fromkeys(key for config in configs for key in config))
    varying = [key for key in keys if len({_canonical(config, key) for config in configs}) > 1]
    order = {key: index for index, key in enumerate(SHORT_NAMES)}
    return tuple(sorted(varying, key=lambda key: order.get(key, len(order))))


def describe_config(config: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return the values of ``keys`` in one line: ``lr 2e-4 · bs 4 · r 16``."""
    return " · ".join(f"{clean(short_name(key))} {format_setting(config[key])}" for key in keys if key in config)


def describe_task(started: TaskStarted | None) -> list[str]:
    """Return method, model, dataset, row counts and ranks of a task; empty if it has not begun."""
    if started is None:
        return []
    facts = [short_path(name) for name in (started.method, started.model, started.dataset) if name]
    if started.num_train:
        held_out = "no validation" if started.refit is not None else f"{started.num_validation} to validate"
        facts.append(f"{started.num_train} rows to train, {held_out}")
    if started.num_ranks > 1:
        facts.append(f"{started.num_ranks} ranks")
    return facts


def describe_refit(refit: RefitFact) -> str:
    """Describe a refit: ``refit of …/runs/sums-20261123 (job-003), no validation``."""
    return f"refit of {short_path(refit.run)} ({clean(refit.job)}), no validation"


def short_path(name: object) -> str:
    """Return the last two parts of a long absolute path; return anything else unchanged."""
    text = clean(name)
    parts = PurePath(text).parts
    return str(PurePath("…", *parts[-2:])) if PurePath(text).is_absolute() and len(parts) > 3 else text


def describe_rungs(history: RunHistory) -> str:
    """Describe how many of the jobs so far rungs keep: ``at 5 % keep 5 of 8 jobs, at 25 % at most 3, from 40 % only the
    best``. Rungs that keep all are left out; empty if no rung ends a job."""
    rungs, num_jobs = history.rung_settings, len(history.jobs)
    texts, left = [], num_jobs
    for index, rung in enumerate(rungs):
        kept, at = places_at(rungs, index, num_jobs), format_percent(rung.progress)
        if rung.max_kept is not None:
            texts.append(f"from {at} only the best")
        elif kept < left:
            most = f"at most {kept}" if rung.ends_clear_losers else f"{kept}"
            texts.append(f"at {at} {most}" if texts else f"at {at} keep {most} of {format_count_of(num_jobs, 'job')}")
        left = kept
    return ", ".join(texts)


def describe_rung(rung: Rung) -> str:
    """Describe a rung: ``2.5 % keep 20 %``, or ``40 % only the best``."""
    kept = f"keep {format_percent(rung.keep)}" if rung.max_kept is None else "only the best"
    return f"{format_percent(rung.progress)} {kept}"


def describe_finalists(finalists: Sequence[FinalistScore]) -> str:
    """Return the score of each finalist with its interval: ``job-000 4 of 5 right (38–96 %), job-001 2 of 5 right
    (12–77 %)``, or ``job-000 0.713 (0.65–0.78) on 40 rows``."""
    return ", ".join(f"{clean(score.job)} {_describe_score(score)}" for score in finalists)


def _describe_score(score: FinalistScore) -> str:
    if score.num_correct is not None:
        return f"{score.num_correct} of {score.num_questions} right{_interval(score)}"
    return f"{score.score:.3g}{_interval(score)} on {format_count_of(score.num_questions, 'row')}"


def _interval(score: FinalistScore) -> str:
    if score.interval is None:
        return ""
    low, high = score.interval
    return f" ({low:.3g}–{high:.3g})" if score.num_correct is None else f" ({100 * low:.0f}–{100 * high:.0f} %)"


def format_score(score: FinalistScore | None) -> str:
    """Format a score with its interval for a narrow column: ``80 % (38–96 %)``, ``0.713 (0.65–0.78)``, or a dash."""
    if score is None:
        return "–"
    shown = f"{score.score:.3g}" if score.num_correct is None else f"{100 * score.score:.0f} %"
    return f"{shown}{_interval(score)}"


def describe_scoring(finalists: Sequence[FinalistScore], scorer: str, failure: str) -> str:
    """Describe in one line how the winner was chosen among the finalists: by their scores, or why there are none; empty
    if only the metric chose."""
    if failure:
        return f"the scorer {clean(scorer)} failed: {clean(failure)}; the metric chose the winner"
    if not finalists:
        return ""
    by = "answers" if scorer in ("", "eval_accuracy") else f"answers ({clean(scorer).replace('_', ' ')})"
    interval = "; 95 % intervals" if any(score.interval is not None for score in finalists) else ""
    return f"chosen by {by}: {describe_finalists(finalists)}{interval}"


def describe_test_rows(num_known: int) -> str:
    """Describe the test rows, of which ``num_known`` are also training or validation rows."""
    if not num_known:
        return "the test rows"
    are = "is" if num_known == 1 else "are"
    return f"the test rows, of which {num_known:,} {are} also in the training or validation data"


def describe_adapter_check(check: AdapterCheck) -> str:
    """Describe in a sentence whether PEFT loads the best adapter as it was trained."""
    if check.status == "unchecked":
        return f"the best adapter was not loaded into PEFT to check it: {clean(check.why)}"
    peft = f"PEFT {clean(check.peft)}"
    if check.status == "equal":
        difference = f"{check.difference or 0.0:.1e}"
        return f"{peft} loads the best adapter as it was trained (logits differ by {difference}, relative)"
    return (
        f"{peft} does not load the best adapter as it was trained: {clean(check.why)}. ALTO does (alto eval); use the "
        "adapter with PEFT only after its logits are the same there"
    )


def describe_memory_event(event: OutOfMemory) -> str:
    """Describe the change after memory ran out: ``memory ran out in the forward pass; micro-batches now have at most
    512 tokens``."""
    phase = event.phase
    where = {"forward": "the forward pass", "backward": "the backward pass", "bank": "setting up the slots"}
    if event.num_slots is not None:
        change = f"now {event.num_slots} slots"
    elif phase == "update":
        change = "tried again"
    else:
        change = f"micro-batches now have at most {format_count(event.max_tokens_per_pass)} tokens"
    return f"memory ran out in {where.get(phase, 'the ' + clean(phase))}; {change}"


def describe_origin(job: JobHistory) -> str:
    """Describe the origin of a job that was added during the run; empty for other jobs."""
    if job.is_suggested:
        return "suggested by the search"
    if job.origin is None:
        return ""
    origin = clean(job.origin)
    return f"continues {origin} from step {format_count(job.forked_at)}" if job.forked_at else f"clone of {origin}"


def describe_outlook(found: Outlook) -> list[str]:
    """Return ``about 3 min 05 s left`` and ``1,200 tokens/s``, without unknown values."""
    facts = []
    if found.remaining_s is not None:
        facts.append(f"about {format_duration(found.remaining_s)} left")
    if found.tokens_per_s is not None:
        facts.append(f"{format_count(found.tokens_per_s)} tokens/s")
    return facts


def describe_measuring(event: MeasuringBegun) -> str:
    """Describe what is measured, how long it takes, and where the result is kept."""
    left = "" if event.remaining_s is None else f": about {format_duration(event.remaining_s)} left"
    if event.is_update:
        return f"measuring {clean(event.task)}{left}"
    where = f" in {clean(event.kept_in)}" if event.kept_in else ""
    return (
        f"measuring memory and time of {clean(event.task)} on {clean(event.model)}{left}, longer on a busy machine; "
        f"the result is kept{where} for later runs of the same task"
    )


def describe_profile(event: ProfileMeasured) -> str:
    """Describe how the jobs are packed and how long the run may take: ``12 slots, micro-batches of 4,096 tokens; about
    1 min 13 s …``."""
    known = "earlier" if event.is_cached else f"in {format_duration(event.profile_s)}"
    known += ", while other programs used the machine: times are rough" if event.throughput.is_unsteady else ""
    return (
        f"{format_count_of(event.max_slots, 'slot')}, "
        f"micro-batches of {format_count(event.max_tokens_per_pass)} tokens; "
        f"about {format_duration(event.expected_duration_s)} expected, {format_duration(event.duration_s)} if no job "
        f"ends early (profile measured {known})"
    )


def describe_compiling(event: KernelsCompiled) -> str:
    """Describe the progress of compiling kernels: ``compiling kernels for the first step: 3 of 24``."""
    if event.done < event.total:
        return f"compiling kernels for the first step: {event.done} of {event.total}"
    return f"{format_count(event.total)} kernels compiled in {format_duration(event.duration_s)}"


def format_setting(value: Any) -> str:
    """Format a configuration value: ``2e-4`` for ``0.0002``, commas in a list, a dash for None and empty mappings."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _format_float(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_setting(item)}" for key, item in value.items()) or "–"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(format_setting(item) for item in value)
    return clean(value)


def format_loss(loss: float | None) -> str:
    """Format a loss: four decimals, three significant digits from 1000 on and near zero, a dash for None."""
    if loss is None:
        return "–"
    if math.isnan(loss):
        return "not a number"
    if math.isinf(loss):
        return "infinite"
    if loss == 0 or 0.001 <= abs(loss) < 1000:
        return f"{loss:.4f}"
    return _format_float(float(f"{loss:.3g}"))


def format_percent(share: float) -> str:
    """Format a fraction in percent: ``2.5 %`` for ``0.025``."""
    return f"{round(share * 100, 1):g} %"


def describe_samples_trained(history: RunHistory) -> str:
    """Describe the work done: ``1,200 of 3,000 samples trained``."""
    return f"{format_count(history.samples_trained)} of {format_count(history.samples_budgeted)} samples trained"


def describe_savings(history: RunHistory, *, with_reasons: bool = False) -> str:
    """Describe what early exit saved and a budget cut off: ``60 % saved, 38 % cut off by the budget``.

    Args:
        with_reasons: Whether to name how the jobs ended, with the share of each reason if there are several.
    """
    saved = f"{format_percent(history.saved_share)} saved"
    totals = [total for total in exit_totals(history) if total.samples_saved] if with_reasons else []
    shares = [f" {format_percent(total.share)}" for total in totals] if len(totals) > 1 else [""]
    if totals:
        reasons = [f"{clean(total.outcome)}{share}" for total, share in zip(totals, shares, strict=True)]
        saved += f" by early exit ({', '.join(reasons)})"
    if not history.samples_cut_off:
        return saved
    return f"{saved}, {format_percent(history.samples_cut_off / history.samples_budgeted)} cut off by the budget"


def describe_time(history: RunHistory) -> list[str]:
    """Describe how the time of a run was spent, and how long training all jobs would take, see
    :func:`alto.runs.progress.training_all_s`; unknown values are left out."""
    total_s = history.duration_s + history.measuring_s
    if not history.time_s or not total_s:
        return []
    spent = {**history.time_s, "measuring": history.measuring_s}
    words = {"training": "training", "evaluation": "evaluating", "measuring": "measuring", "saving": "saving"}
    by_word = {word: spent.get(name, 0.0) / total_s for name, word in words.items()}
    by_word["other"] = max(0.0, 1.0 - sum(by_word.values()))
    shares = ", ".join(f"{word} {format_percent(share)}" for word, share in by_word.items() if share >= 0.0005)
    whole_s = training_all_s(history)
    if whole_s is None or history.samples_trained == history.samples_budgeted:
        return [f"time: {shares}"]
    without = "further evaluations or measuring" if history.measuring_s else "further evaluations"
    return [
        f"time: {shares}",
        f"training all jobs: about {format_duration(whole_s)}, without {without}",
    ]


def format_age(seconds: float) -> str:
    """Format an age in its largest unit: ``42 s``, ``5 min``, ``3 h``, ``12 days``."""
    total = max(0, round(seconds))
    for unit, size in (("day", 86400), ("h", 3600), ("min", 60)):
        if total >= size:
            return f"{total // size} {unit}" + ("s" if unit == "day" and total >= 2 * size else "")
    return f"{total} s"


def format_count(count: float) -> str:
    """Format a whole number with thousands separators."""
    return f"{count:,.0f}"


def format_count_of(count: int, unit: str) -> str:
    """Format a count with its unit: ``1 row``, ``1,200 rows``."""
    return f"{format_count(count)} {unit}{'' if count == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """Format seconds in the two largest units that matter: ``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


def format_hours(hours: float) -> str:
    """Format hours of a device: ``0.0067``, ``3.25``, ``1,204``."""
    return f"{hours:,.0f}" if hours >= 1000 else f"{float(f'{hours:.3g}'):.6g}"


def format_money(amount: float) -> str:
    """Format an amount of money without its currency: ``12.40``, ``1,250.00``, ``0.0042``."""
    return f"{amount:,.2f}" if amount == 0 or amount >= 0.1 else f"{amount:.2g}"


def _format_float(value: float) -> str:
    if not math.isfinite(value) or value == 0 or 0.01 <= abs(value) < 1e6:
        return f"{value:.6g}"
    mantissa, exponent = f"{value:.6e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _canonical(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key], sort_keys=True, default=str) if key in config else "missing"
