"""The reference agrees with the code; a real journal has every kind of event."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import measured_at_once
from tiny import make_task, save_model

from alto.engine.runner import TaskRunner
from alto.errors import TaskInterruptedError
from alto.executor import shared_bank
from alto.lora import AdapterBank, BankLayout
from alto.runs import JobAction, JournalEntry, Mailbox, RunDir, read_entries
from alto.runs.events import (
    WIRE_NAMES,
    GpusOffered,
    JobAdded,
    JobEvaluated,
    KernelsCompiled,
    MeasurementFailed,
    MeasuringBegun,
    RunEvent,
    RungScored,
    ShareReceived,
)
from tools.make_reference import page as reference
from tools.make_reference.runs import EVIDENCE, exits, run_section

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run with everything that the journal of one process can hold."""

    folder: Path
    entries: tuple[JournalEntry, ...]


class Commander:
    """An observer that records the events of a run, sends it every kind of command, and interrupts it once."""

    def __init__(self, runs: Path) -> None:
        self.entries: list[JournalEntry] = []
        self.wants_to_stop = False
        self._runs = runs

    def observe(self, entry: JournalEntry) -> None:
        if entry.is_replayed:
            return
        self.entries.append(entry)
        evaluations = [entry.event for entry in self.entries if isinstance(entry.event, JobEvaluated)]
        if entry.event in evaluations and len(evaluations) == 1:
            (run,) = self._runs.iterdir()
            mailbox = Mailbox(RunDir.open(run))
            job = evaluations[0].job
            for action in (JobAction.STOP, JobAction.RESUME, JobAction.RESUME):
                mailbox.send(action, job)
            mailbox.send(JobAction.CLONE, job, changes={"seed": 1})
        self.wants_to_stop |= isinstance(entry.event, JobAdded)


@contextmanager
def memory_for_one_slot() -> Iterator[None]:
    """Refuse every bank of more than one slot."""

    class Bank(AdapterBank):
        def __init__(self, layout: BankLayout, num_slots: int, **options: Any) -> None:
            if num_slots > 1:
                raise torch.OutOfMemoryError("no memory, as the test wants it")
            super().__init__(layout, num_slots, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_bank, "AdapterBank", Bank)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three jobs and a clone on the tiny model: planned, short of memory, commanded, interrupted and resumed."""
    folder = tmp_path_factory.mktemp("reference")
    answers = folder / "answers.jsonl"
    answers.write_text('{"prompt": "1 plus 1?", "completion": "#### 2"}\n' * 6, encoding="utf-8")
    task = make_task(
        folder,
        validation_dataset=str(answers),
        select_by="eval_accuracy",
        num_samples=1,
        sample_max_new_tokens=4,
        model=str(save_model(folder / "model")),
        search_space={"lr": [1e-3, 3e-3, 1e-2]},
        early_exit={"rungs": [[0.4, 0.5]], "detect_overfitting": False},
        max_slots=2,
        report_to="none",
    )
    runs = folder / "runs"
    meddler = Commander(runs)
    runner = TaskRunner(observers=[meddler.observe], is_interrupted=lambda: meddler.wants_to_stop)
    with pytest.MonkeyPatch.context() as patch:
        measured_at_once(patch)
        runner.plan(task)
    with memory_for_one_slot():
        with pytest.raises(TaskInterruptedError):
            runner.begin(task, runs)
        meddler.wants_to_stop = False
        (path,) = runs.iterdir()
        runner.resume(RunDir.open(path), trust_remote_code=False)
    return Run(folder=path, entries=tuple(meddler.entries))


def test_the_page_is_generated_from_the_code_as_it_is() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run python -m tools.make_reference"


def test_every_key_has_a_meaning_in_plain_words() -> None:
    for line in reference.page().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 4 and cells[3]:
            assert len(cells[1]) > 5, line
        assert "``" not in line.replace("```", ""), line
        assert ":class:" not in line


def test_a_run_writes_every_event_and_no_other(run: Run) -> None:
    entries = read_entries(run.folder / "journal.jsonl")
    found = {type(entry.event) for entry in (*entries, *run.entries)}
    assert found - {MeasuringBegun} == {
        event for event in WIRE_NAMES if issubclass(event, RunEvent)
    } - {  # only observers receive these
        GpusOffered,  # needs several GPUs
        KernelsCompiled,  # needs a GPU
        MeasurementFailed,  # needs a reward that fails at the end
        RungScored,  # needs a task whose rungs rank by answers
        ShareReceived,  # needs several tasks
    }
    assert not any(entry.unknown for entry in entries)


def test_every_number_of_an_exit_is_explained() -> None:
    found = exits()
    assert len(found) == 7
    assert {key for _, decision in found for key in decision.evidence} == set(EVIDENCE)


def test_the_run_directory_is_drawn_as_it_is(run: Run) -> None:
    drawn = run_section()
    for path in run.folder.iterdir():
        assert re.search(rf"^    {re.escape(path.name)}\b", drawn, re.MULTILINE), path.name
