"""Progress of a run as plain lines, for logs and pipes; the number of lines is limited.

The end of a job takes at most one line, and every rung takes one. Repeated events are thinned: admissions are collected
into one line, the improvement needed for a "best so far" line grows with the number of such lines, and progress is
written after every tenth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from alto.records import ExitReason, Sample
from alto.runs import JobHistory, JournalEntry, RunHistory, events
from alto.runs.progress import fraction_done, outlook
from alto.spec import LOSS
from alto.views.choice import choice_notes
from alto.views.metrics import describe_test, format_metric, metric_name
from alto.views.tables import explain_exit
from alto.views.wording import (
    clean,
    describe_adapter_check,
    describe_compiling,
    describe_config,
    describe_finalists,
    describe_measuring,
    describe_memory_event,
    describe_origin,
    describe_outlook,
    describe_profile,
    describe_refit,
    describe_rungs,
    describe_samples_trained,
    describe_savings,
    describe_scoring,
    describe_time,
    format_count,
    format_count_of,
    format_duration,
    format_loss,
    format_percent,
    tidy_config,
    varying_keys,
)

MAX_SHOWN = 5
MAX_CHARS = 240
"""Largest number of characters shown of a text; the report has the whole text."""


def describe_samples(history: RunHistory) -> str:
    """Return text such as ``5 validation prompts continued by the base, job-003 and job-001``, or why there are no
    samples; empty if the task requests none."""
    if history.sampling_failure:
        return f"no samples were generated: {clean(history.sampling_failure)}"
    if not history.samples:
        return ""
    *others, last = ["the base", *map(clean, history.samples[0].adapters)]
    by = f"{', '.join(others)} and {last}" if others else last
    if history.refit is not None:  # a refit also trains on these rows
        prompts = f"{format_count_of(len(history.samples), 'prompt')} of rows that are also trained on,"
    else:
        prompts = format_count_of(len(history.samples), "validation prompt")
    return f"{prompts} continued by {by}"


def samples_text(history: RunHistory) -> list[RenderableType]:
    """Return the first samples of a run, shortened, with each text on its own line; empty without samples."""
    if history.sampling_failure:
        return [Text(f"note: {describe_samples(history)}", style="yellow")]
    if not history.samples:
        return []
    shown = history.samples[:MAX_SHOWN]
    more = f"; {len(history.samples) - len(shown)} more in the report" if len(history.samples) > len(shown) else ""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for number, sample in enumerate(shown, start=1):
        for index, (who, text, style) in enumerate(_lines(sample)):
            table.add_row("" if index else str(number), Text(who), Text(_shortened(text), style=style))
    return ["", Text(f"samples: {describe_samples(history)}{more}"), table, ""]


def _lines(sample: Sample) -> list[tuple[str, str, str]]:
    """Return for each text of a sample its author, the text, and its style."""
    adapters = [
        (clean(job) if index else f"★ {clean(job)}", text, "" if index else "green")
        for index, (job, text) in enumerate(sample.adapters.items())
    ]
    return [
        ("prompt", sample.prompt, "bold"),
        ("reference", sample.reference, ""),
        ("base", sample.base, ""),
        *adapters,
    ]


def _shortened(text: str) -> str:
    """Return ``text`` on one line, shortened, with a sign at line ends; a note replaces blank text."""
    line = " ⏎ ".join(cleaned for part in text.splitlines() if (cleaned := clean(part)))
    if not line:
        return "(nothing)"
    return line if len(line) <= MAX_CHARS else line[: MAX_CHARS - 1] + "…"


# The text of an admission before and after the names of the jobs.
ADMITTED, RESUMED = ("admitted", ""), ("resumed", "")
MOVES = {"balances": ("moved", " to other ranks"), "data_parallel": ("moved", " to all ranks")}

# A new best is written if it is better than the last written one by this fraction, which doubles every ten lines.
SMALLEST_NEWS = 0.005


class PlainView:
    """Writes one line per noteworthy event to ``stream``; a context manager like the live view."""

    def __init__(self, stream: IO[str]) -> None:
        self.history = RunHistory()
        self._stream = stream
        self._keys: tuple[str, ...] = ()
        self._admitted: list[str] = []
        self._admission = ADMITTED
        self._num_bests_reported = 0
        self._best_reported: float | None = None
        self._tenths_reported = 0
        self._measuring_since: float | None = None

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        self._report_admitted()

    def observe(self, entry: JournalEntry) -> None:
        """Apply one entry of the journal and write a line about it if needed."""
        if isinstance(entry.event, events.MeasuringBegun):
            self._measuring_since = entry.time if self._measuring_since is None else self._measuring_since
            self._say(describe_measuring(entry.event), after_s=entry.time - self._measuring_since)
            return
        self.history.apply(entry)
        if isinstance(entry.event, events.TaskStarted | events.JobAdded):
            self._keys = varying_keys([tidy_config(job.config) for job in self.history.jobs.values()])
        if not entry.is_replayed:  # replayed events were written when they happened
            self._report(entry.event)

    def _report(self, event: events.Event) -> None:
        """Write a line about ``event``, which has already been applied to the history."""
        match event:
            case events.TaskStarted(notes=notes):
                self._on_started(event)
                self._report_notes(notes)
            case events.TaskResumed(notes=notes):
                self._on_resumed()
                self._report_notes(notes)
            case events.TaskInterrupted():
                self._report_admitted()
                self._say(f"interrupted with {format_percent(fraction_done(self.history))} done")
            case events.TaskCompleted():
                self._on_completed()
            case events.WarmupEnded():
                self._on_rung()
            case events.BestMeasured() if event.loss_rows:
                rows = format_count_of(len(event.loss_rows), "validation row")
                loss = format_loss(event.validation_loss)
                self._say(f"{self._name(self.history.jobs[event.job])} has loss {loss} on {rows}")
            case events.KernelsCompiled():
                self._say(describe_compiling(event))
            case events.ProfileMeasured():
                self._say(describe_profile(event))
            case events.OutOfMemory():
                self._say(describe_memory_event(event))
            case events.RungScored():
                what = describe_finalists(event.scores) if event.scores else f"the scorer failed: {event.failure}"
                self._say(f"answers at the rung at {format_percent(event.progress)}: {clean(what)}")
            case events.FinalistsJudged():
                if event.failure:
                    self._say(describe_scoring(event.scores, self.history.scorer, event.failure))
                else:
                    self._say(f"answers of the finalists: {describe_finalists(event.scores)}")
            case events.SamplesGenerated():
                self._say(describe_samples(self.history))
            case events.AdapterChecked():
                self._on_adapter_checked()
            case events.JobAdded():
                self._on_added(event)
            case events.JobReopened():
                job = self.history.jobs[event.job]
                self._say(f"{self._name(job)} reopened, resumes after step {job.step} of {job.total_steps}")
            case events.JobAdmitted():
                self._on_admitted(event.job, ADMITTED)
            case events.JobResumed():
                self._on_admitted(event.job, MOVES.get(event.reason, RESUMED))
            case events.JobEvaluated():
                self._on_evaluated()
                self._report_progress()
            case events.JobExited():
                self._on_exited(self.history.jobs[event.job])
            case events.JobCompleted():
                job = self.history.jobs[event.job]
                if self.history.refit is not None:
                    self._say(f"{self._name(job)} completed")
                    return
                measured = "validation loss " if self.history.metric == LOSS else ""
                self._say(f"{self._name(job)} completed, best {measured}{self._best_value(job)}")

    def _on_started(self, started: events.TaskStarted) -> None:
        history = self.history
        held_out = f"{started.num_validation} to validate" if started.refit is None else "no validation"
        self._say(
            f"task {clean(history.name)}: {format_count_of(len(history.jobs), 'job')} ({clean(started.method)}) on "
            f"{clean(started.model or 'the base model')}, dataset {clean(started.dataset or 'unnamed')}, "
            f"{started.num_train} rows to train and {held_out}"
        )
        if history.num_ranks > 1:
            self._say(f"on {history.num_ranks} ranks, {format_count(history.num_slots)} slots in total")
        rungs = describe_rungs(history)
        if rungs:
            policy = clean(started.early_exit.get("policy", "on"))
            self._say(f"early exit {policy}: {rungs}")

    def _report_notes(self, notes: Sequence[str]) -> None:
        for note in notes:
            self._say(f"note: {clean(note)}")

    def _on_adapter_checked(self) -> None:
        check = self.history.adapter_check
        assert check is not None
        self._say(("warning: " if check.status == "different" else "") + describe_adapter_check(check))

    def _on_resumed(self) -> None:
        history = self.history
        self._tenths_reported = int(fraction_done(history) * 10)
        self._best_reported = self._score(history.best) if history.best else None
        ranks = f" on {history.num_ranks} ranks" if history.num_ranks > 1 else ""
        num_ended = sum(job.has_ended for job in history.jobs.values())
        self._say(
            f"resumed{ranks}: {num_ended} of {len(history.jobs)} jobs have ended, "
            f"{format_percent(fraction_done(history))} done"
        )

    def _on_added(self, event: events.JobAdded) -> None:
        job = self.history.jobs[event.job]
        start = (
            "" if job.is_suggested or event.forked_at else ", with its weights" if event.warm else ", from new weights"
        )
        place = f" in place of {clean(event.replaces)}" if event.replaces else ""
        self._say(f"{self._name(job)} added: {describe_origin(job)}{start}{place}")

    def _on_admitted(self, job: str, admission: tuple[str, str]) -> None:
        if admission != self._admission:
            self._report_admitted()
            self._admission = admission
        self._admitted.append(job)
        # The first admissions fill the slots; later ones are collected, so that many jobs take few lines.
        if len(self._admitted) >= max(1, self.history.num_slots // 2, len(self.history.jobs) // 10):
            self._report_admitted()

    def _report_admitted(self) -> None:
        if not self._admitted:
            return
        names = ", ".join(clean(job) for job in self._admitted[:4])
        more = f" and {len(self._admitted) - 4} more" if len(self._admitted) > 4 else ""
        verb, where = self._admission
        self._say(f"{verb} {names}{more}{where}")
        self._admitted.clear()

    def _on_evaluated(self) -> None:
        best = self.history.best
        if best is None:
            return
        least = SMALLEST_NEWS * 2 ** (self._num_bests_reported // 10)
        earlier = self._best_reported
        if earlier is not None and not self._score(best) < earlier - least * abs(earlier):
            return
        self._num_bests_reported += 1
        self._best_reported = self._score(best)
        self._say(
            f"best so far {self._best_value(best)}: {self._name(best)} at step {best.best_step} of {best.total_steps}"
        )

    def _on_exited(self, job: JobHistory) -> None:
        # The line of the rung already counts the underperforming jobs.
        if job.exit_reason != ExitReason.UNDERPERFORMING:
            self._say(
                f"{self._name(job)} ended at {format_percent(job.progress)}, {clean(job.outcome)}: {explain_exit(job)}"
            )

    def _on_rung(self) -> None:
        rung = self.history.rungs[-1]
        if not rung.dropped:
            return
        self._report_admitted()
        self._say(
            f"rung at {format_percent(rung.progress)}: {len(rung.kept)} kept, {len(rung.dropped)} ended as "
            "underperforming"
        )

    def _report_progress(self) -> None:
        history = self.history
        found = outlook(history, history.last_seen_at or 0.0)
        tenths = int(found.fraction_done * 10)
        if tenths <= self._tenths_reported or tenths == 10:
            return
        self._tenths_reported = tenths
        facts = [
            describe_samples_trained(history),
            f"{format_percent(history.saved_share)} saved",
            *describe_outlook(found),
        ]
        self._say(f"{tenths * 10} % done: {', '.join(facts)}")

    def _on_completed(self) -> None:
        self._report_admitted()
        history, best = self.history, self.history.best
        outcome = f"best {self._best_value(best)}: {self._name(best)}" if best is not None else "no usable job"
        if history.refit is not None and best is not None:
            outcome = describe_refit(history.refit)
        if best is not None and (tested := describe_test(history, best)):
            outcome += f", test loss {tested}"
        for note in choice_notes(history):
            self._say(f"note: {clean(note)}")
        self._say(
            f"done in {format_duration(history.duration_s)}: {outcome}; {describe_samples_trained(history)}, "
            f"{describe_savings(history)}"
        )
        if sentences := describe_time(history):
            self._say("; ".join(sentences))

    def _score(self, job: JobHistory) -> float:
        """Return the sort key of a job's best value; lower is better."""
        return job.best_validation_loss if self.history.metric == LOSS else -job.best_score

    def _best_value(self, job: JobHistory) -> str:
        """Return a job's best value as text."""
        metric = self.history.metric
        if metric == LOSS:
            return format_loss(job.best_validation_loss)
        return f"{metric_name(metric)} {format_metric(metric, job.best_metrics.get(metric))}"

    def _name(self, job: JobHistory) -> str:
        config = describe_config(tidy_config(job.config), self._keys)
        return f"{clean(job.job)} ({config})" if config else clean(job.job)

    def _say(self, line: str, *, after_s: float | None = None) -> None:
        """Write a line with the time since the run began, or ``after_s`` seconds."""
        text = f"[{format_duration(self.history.duration_s if after_s is None else after_s):>11}] {line}\n"
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        # If the encoding of the log lacks a character, replace the character instead of ending the run.
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()
