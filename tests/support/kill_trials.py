"""Kills runs at chosen instants and resumes them; a program of its own, so that it may fork.

    python kill_trials.py FOLDER SEED NUM_KILLS [KIND…]

Every life of a run is a forked process that dies by SIGKILL: at a filesystem operation, in the middle of a journal line
or of a weight file, while a job trains past a rung that is not decided yet, or at any moment. Then the next life
resumes it and dies too, until the last one may finish. The kinds of death are drawn from the named ones, or from all.
There are at least NUM_KILLS kills, and one of each kind. The program prints one JSON object: the number of kills by
kind, and the differences from a run that was never killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers
from journals import entries
from tiny import make_task, save_model

import alto
from alto.early_exit import audit
from alto.executor import JobState, checkpoint, session
from alto.executor.slot_manager import TrainingState
from alto.runs import JobAction, Mailbox, RunDir, read_events
from alto.runs import journal as journal_module

LIVES_PER_RUN = 4
FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")
KINDS = ("file", "line", "weights", "ahead", "time")
SPACE = {"lr": [1e-3, 1e-2, 0.3, 1e30], "batch_size": [4, 8]}


class Instants:
    """Counts the operations of a process on disk, and kills it at a chosen count.

    Attributes:
        seen: Number of times that each kind of instant has been passed.
    """

    def __init__(self, kind: str | None = None, at: int = 0) -> None:
        self.seen: Counter[str] = Counter()
        self._kind, self._at = kind, at

    def is_reached(self, kind: str) -> bool:
        """Return whether this is the instant to die."""
        self.seen[kind] += 1
        return kind == self._kind and self.seen[kind] == self._at

    def watch(self, root: Path) -> None:
        """Count from now on, in this process."""
        sys.addaudithook(lambda event, args: self._on_audit(event, args, str(root)))
        write_bytes = journal_module.Journal.append
        instants = self

        class TornFile:
            def __init__(self, file: Any) -> None:
                self._file = file

            def write(self, data: bytes) -> int:
                if instants.is_reached("line"):
                    self._file.write(data[: len(data) // 2])
                    die()
                return int(self._file.write(data))

            def __getattr__(self, name: str) -> Any:
                return getattr(self._file, name)

        def append(journal: Any, event: Any) -> Any:
            if not isinstance(journal._file, TornFile):
                journal._file = TornFile(journal._file)
            return write_bytes(journal, event)

        journal_module.Journal.append = append  # type: ignore[method-assign]
        save_file = checkpoint.save_file

        def save(tensors: Any, path: Path, **options: Any) -> None:
            save_file(tensors, path, **options)
            if instants.is_reached("weights"):
                os.truncate(path, path.stat().st_size // 2)
                die()

        checkpoint.save_file = save
        active = TrainingState.active

        def about_to_train(state: TrainingState) -> list[JobState]:
            jobs = active(state)
            if any(state.selection.rungs.is_waiting(job.id) for job in jobs) and self.is_reached("ahead"):
                die()
            return jobs

        TrainingState.active = about_to_train  # type: ignore[method-assign]

    def _on_audit(self, event: str, args: Any, root: str) -> None:
        if event in FILE_EVENTS and args and str(args[0]).startswith(root):
            is_read = event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR))
            if not is_read and self.is_reached("file"):
                die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def live(folder: Path, model: Path, instants: Instants, report: Path | None = None) -> None:
    """Live one life: begin the run in ``folder``, or continue it."""
    session.MAX_SAVING_FRACTION = 1e9  # a checkpoint whenever the task asks for one
    transformers.logging.set_verbosity_error()
    runs = folder / "runs"
    instants.watch(runs)
    started = time.monotonic()
    engine = alto.Engine(output_dir=runs)
    if (root := run_in(runs)) is None:
        engine.tune(task_for(folder, model))
    else:
        engine.resume(root)
    if report is not None:
        report.write_text(json.dumps({"seen": instants.seen, "duration_s": time.monotonic() - started}))


def task_for(folder: Path, model: Path) -> alto.Task:
    return make_task(
        folder,
        model=str(model),
        search_space=SPACE,
        r=8,
        max_grad_norm=0,
        num_train_epochs=3,
        eval_steps=0.3,  # some steps lie between evaluations
        max_slots=3,
        early_exit=alto.EarlyExit(rungs=((0.2, 0.5), (0.5, 0.75)), overfitting_patience=1, tau_noise=0.5),
        checkpoint_interval_s=0,
        report_to="none",
    )


def run_in(runs: Path) -> Path | None:
    return next((path for path in runs.glob("tiny-*") if (path / "task.yaml").exists()), None)


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a process of its own, and return the process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int:
    """Return the exit code of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def facts(root: Path) -> dict[str, Any]:
    """Return the facts that must not depend on how often the run was killed."""
    events = read_events(root / "journal.jsonl")
    kept = ("task_started", "job_added", "train", "eval", "warmup_ended", "job_exited", "job_completed")
    curves: dict[str, list[float]] = {}
    lives: dict[str, list[Any]] = {}
    for event in events:
        if event["event"] == "train":
            curves.setdefault(event["job"], []).extend(event["losses"])
        elif event["event"] in kept:
            subject = event.get("job", "task")
            changing = ("seq", "time", "versions", "dataset", "base_model", "model")
            lives.setdefault(subject, []).append({k: v for k, v in event.items() if k not in changing})
    last = {k: v for k, v in events[-1].items() if k not in ("seq", "time", "time_s")}
    files = {str(path.relative_to(root)): path.read_bytes().hex() for path in sorted(root.rglob("*.safetensors"))}
    return {
        "curves": curves,
        "lives": lives,
        "last": last,
        "files": files,
        "audit": list(map(str, audit(entries(events)))),
    }


def compare(root: Path, expected: dict[str, Any]) -> list[str]:
    """Return the differences from the undisturbed run, and files that were left over."""
    found = facts(root)
    differences = [key for key in expected if found[key] != expected[key]]
    leftovers = [path.name for path in root.rglob("*") if path.name.endswith((".new", ".partial", ".previous"))]
    missing = [name for name in ("best/metrics.json", "best/README.md", "report.html") if not (root / name).is_file()]
    return differences + leftovers + missing


def trial(
    folder: Path, model: Path, rng: random.Random, kinds: Sequence[str], counts: dict[str, Any], kills: Counter[str]
) -> Path:
    """Kill one run several times, and return its folder."""
    folder.mkdir()
    missing = [kind for kind in kinds if not kills[kind]]
    for _ in range(rng.randint(1, LIVES_PER_RUN)):
        kind = rng.choice(missing or kinds)
        instants = Instants(kind, rng.randint(1, counts["seen"].get(kind, 1)))
        pid = fork(lambda chosen=instants: live(folder, model, chosen))
        if kind == "time":
            time.sleep(rng.uniform(0.0, 1.1 * counts["duration_s"]))
            os.kill(pid, signal.SIGKILL)
        code = ended(pid)
        assert code in (0, -signal.SIGKILL), f"a life after {sum(kills.values())} kills ended with {code}"
        kills[kind] += code != 0
        if code == 0:
            break
    assert ended(fork(lambda: live(folder, model, Instants()))) == 0, "the last life did not end well"
    root = run_in(folder / "runs")
    assert root is not None
    return root


def commanded_trial(folder: Path, model: Path, rng: random.Random, kills: Counter[str]) -> list[str]:
    """Kill a run while it carries out commands; each of them must take effect once."""
    folder.mkdir()
    ended(fork(lambda: live(folder, model, Instants("line", rng.randint(2, 12)))))
    root = run_in(folder / "runs")
    assert root is not None
    mailbox = Mailbox(RunDir(root))
    mailbox.send(JobAction.STOP, "job-001")
    mailbox.send(JobAction.CLONE, "job-000", changes={"learning_rate": 2e-3, "r": 12})
    for _ in range(3):
        instants = Instants("file", rng.randint(1, 40))
        kills["command"] += ended(fork(lambda chosen=instants: live(folder, model, chosen))) != 0
    assert ended(fork(lambda: live(folder, model, Instants()))) == 0
    events = read_events(root / "journal.jsonl")
    stopped = [e["job"] for e in events if e["event"] == "job_exited" and e["reason"] == "stopped"]
    added = [e["job"] for e in events if e["event"] == "job_added"]
    problems = [] if stopped == ["job-001"] else [f"stopped {stopped}"]
    problems += [] if added == ["job-008"] else [f"added {added}"]
    return problems + list(map(str, audit(entries(events)))) + [c.id for c in mailbox.pending()]


def main() -> None:
    folder, seed, num_kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    model = save_model(folder / "model")
    quiet = folder / "undisturbed"
    quiet.mkdir()
    assert ended(fork(lambda: live(quiet, model, Instants(), folder / "counts.json"))) == 0
    counts = json.loads((folder / "counts.json").read_text())
    root = run_in(quiet / "runs")
    assert root is not None
    expected = facts(root)
    kills: Counter[str] = Counter()
    problems: dict[str, list[str]] = {}
    number = 0
    kinds = sys.argv[4:] or KINDS
    wanted = kinds if sys.argv[4:] else (*KINDS, "command")
    while sum(kills.values()) < num_kills or not all(kills[kind] for kind in wanted):
        number += 1
        home = folder / f"trial-{number}"
        if number % 4 == 0:
            found = commanded_trial(home, model, rng, kills)
        else:
            found = compare(trial(home, model, rng, kinds, counts, kills), expected)
        if found:
            problems[str(home)] = found
        else:
            shutil.rmtree(home)
    print(json.dumps({"kills": kills, "problems": problems, "counts": counts, "last": expected["last"]}))


if __name__ == "__main__":
    main()
