"""Common parts of all benchmarks: the result file, the table, and the origin of the numbers.

A benchmark measures, builds one ``Result`` with ``Result.of`` and calls ``publish``. A result whose correctness gate
failed has no figures, only the reason (law 7 of the design).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from alto.errors import ModelError
from alto.version import version_of

__all__ = [
    "DATA_DIR",
    "GSM8K",
    "PREFERENCE_PAIRS",
    "REAL_MODEL",
    "RESULTS_DIR",
    "ROOT",
    "SCALES",
    "Result",
    "Spread",
    "command_line",
    "commit_id",
    "format_table",
    "goal_reached",
    "machine_info",
    "option_parser",
    "package_versions",
    "provenance",
    "publish",
    "publish_figures",
    "readable_model",
    "source_digest",
    "spread",
    "strict_json",
    "write_file",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS_DIR = ROOT / "benchmarks" / "results"
DATA_DIR = ROOT.parent / "shared" / "data"
"""Folder of the real datasets, if it exists; it is beside the project, never in it."""
GSM8K = DATA_DIR / "gsm8k" / "train.jsonl"
PREFERENCE_PAIRS = DATA_DIR / "pref_mix" / "pairs.jsonl.gz"
REAL_MODEL = ROOT / ".models" / "smollm2-135m"
"""Folder of a pretrained model, if ``tools/make_real_model.py`` has made it."""
SCALES = ("smoke", "cpu", "gpu", "model")
GATES = ("passed", "partly passed", "failed")
PACKAGES = (
    "torch", "triton", "transformers", "peft", "trl", "accelerate", "ray", "optuna", "ortools", "alto-lora"
)  # fmt: skip

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": lambda value, bound: value >= bound,
    "<=": lambda value, bound: value <= bound,
    ">": lambda value, bound: value > bound,
    "<": lambda value, bound: value < bound,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one run of one benchmark; the fields of the result file, in its order.

    Attributes:
        benchmark: Topic; with ``scale`` it names the file.
        gate: ``"passed"``; ``"failed"``, without figures; or ``"partly passed"``: some of several gates failed, and the
            figures are those of the others.
        figures: Published figures: finite numbers by name.
        goals: Figure name to ``(comparison, bound)``, such as ``(">=", 2.5)``.
        rows: Measurements from which the figures were made, one mapping per measurement.
        notes: Sentences that a reader needs: subsets, choices that favour a baseline, why a gate failed.
    """

    benchmark: str
    scale: str
    command: str
    commit: str
    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    gate: str
    figures: Mapping[str, float]
    goals: Mapping[str, tuple[str, float]]
    rows: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"Expected a scale of {', '.join(SCALES)}, found {self.scale!r}.")
        if self.gate not in GATES:
            raise ValueError(f"Expected a gate of {', '.join(GATES)}, found {self.gate!r}.")
        if self.gate == "failed" and self.figures:
            raise ValueError(
                f"Expected no figures beside a failed gate, found {', '.join(self.figures)}: use Result.of, "
                "which drops them."
            )
        for name, value in self.figures.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(
                    f"Expected a finite number for figure {name!r}, found {value!r}. Put it into the rows."
                )
        for name, (comparison, _) in self.goals.items():
            if comparison not in _COMPARE:
                raise ValueError(f"Expected one of {', '.join(_COMPARE)} in goal {name!r}, found {comparison!r}.")

    @classmethod
    def of(
        cls,
        *,
        benchmark: str,
        scale: str,
        gate_failures: Sequence[str],
        figures: Mapping[str, float],
        goals: Mapping[str, tuple[str, float]],
        rows: Sequence[Mapping[str, Any]] = (),
        notes: Sequence[str] = (),
    ) -> Result:
        """Return a result of this process, commit and machine, with the current time.

        Args:
            gate_failures: Faults, one sentence each; empty means that the gate passed. Otherwise ``figures`` are
                dropped, and the sentences come first in the notes.
        """
        return cls(
            benchmark=benchmark,
            scale=scale,
            command=command_line(),
            commit=commit_id(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=machine_info(),
            versions=package_versions(),
            gate="failed" if gate_failures else "passed",
            figures={} if gate_failures else dict(figures),
            goals=dict(goals),
            rows=tuple(rows),
            notes=(*(f"No figures, the gate failed: {failure}" for failure in gate_failures), *notes),
        )

    def verdict(self, name: str) -> bool:
        """Return whether figure ``name`` reaches its goal; a goal without its figure is missed."""
        return name in self.figures and goal_reached(self.figures[name], self.goals[name])

    def table(self) -> str:
        """Return figures with their goals as plain text, then the notes."""
        rows = []
        for name in dict.fromkeys((*self.goals, *self.figures)):
            value = f"{self.figures[name]:.4g}" if name in self.figures else "none"
            if name in self.goals:
                comparison, bound = self.goals[name]
                rows.append((name, value, f"{comparison} {bound:g}", "reached" if self.verdict(name) else "missed"))
            else:
                rows.append((name, value, "", ""))
        head = f"{self.benchmark} ({self.scale}), gate {self.gate}, commit {self.commit[:12]}"
        if self.commit.endswith("-dirty"):
            head += " with uncommitted changes"
        parts = [head, format_table(("figure", "value", "goal", ""), rows), *(f"- {note}" for note in self.notes)]
        return "\n".join(part for part in parts if part)

    def to_json(self) -> str:
        """Return the text of the result file: strict JSON, in which NaN and infinities in rows are ``"nan"``,
        ``"inf"``, ``"-inf"``."""
        return strict_json(asdict(self))

    def write(self, directory: Path = RESULTS_DIR) -> Path:
        """Write ``<benchmark>-<scale>.json`` into ``directory``, whole or not at all, and return its path."""
        path = directory / f"{self.benchmark}-{self.scale}.json"
        write_file(path, self.to_json())
        return path


def option_parser(
    description: str | None,
    scales: Iterable[str],
    *,
    model: str | None = None,
    dataset: Path | None = None,
    threads: bool = False,
    out: Path = RESULTS_DIR,
) -> argparse.ArgumentParser:
    """Return the options that benchmarks have in common: ``--scale`` and ``--out``; ``--model`` and ``--dataset`` if
    their default is given; ``--threads`` if requested."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper NAME" if out == RESULTS_DIR else None,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # options are recognised by their full names
    )
    choices = tuple(scales)
    parser.add_argument("--scale", choices=choices, default=choices[0])
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="folder of the result file")
    if model is not None:
        about = "base model: a folder, a hub id or alto-tiny"
        parser.add_argument("--model", type=readable_model, default=model, help=about)
    if dataset is not None:
        about = "file of the rows, JSON lines" if dataset.suffix else "folder of the datasets"
        parser.add_argument("--dataset", type=Path, default=dataset, help=about)
    if threads:
        import torch

        parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch, on a CPU")
    return parser


def readable_model(name: str) -> str:
    """Return ``name`` if a base model of that name can be read; for use as the type of an option."""
    from alto.backbone import load_tokenizer
    from alto.spec import BaseModelSpec

    try:
        load_tokenizer(BaseModelSpec(id=name))
    except ModelError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def publish(result: Result, directory: Path = RESULTS_DIR) -> int:
    """Print the table, write the file, and return the exit code: 0 if the gate passed, else 1. A missed goal does not
    change it."""
    print(result.table())
    path = result.write(directory)
    print(f"written to {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return 0 if result.gate == "passed" else 1


def publish_figures(
    options: argparse.Namespace,
    benchmark: str,
    *,
    gate_failures: Sequence[str],
    figures: Callable[[], Mapping[str, float]],
    goals: Mapping[str, tuple[str, float]],
    rows: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
) -> int:
    """Publish the measurements of a program at ``options.scale`` in ``options.out``; the smallest scale has no goals.

    Args:
        options: Options of :func:`option_parser`.
        benchmark: See :class:`Result`, also for rows and notes.
        gate_failures: See :meth:`Result.of`.
        figures: Function that computes the figures; called only if the gate has passed.
        goals: Goals by scale, for scales at which they mean something.
    """
    result = Result.of(
        benchmark=benchmark,
        scale=options.scale,
        gate_failures=gate_failures,
        figures={} if gate_failures else figures(),
        goals={} if options.scale == "smoke" else goals,
        rows=rows,
        notes=notes,
    )
    return publish(result, options.out)


def strict_json(value: Any) -> str:
    """Return ``value`` as strict JSON, in which NaN and infinities are ``"nan"``, ``"inf"``, ``"-inf"``."""
    return json.dumps(_strict(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_file(path: Path, text: str) -> None:
    """Write ``text``, whole or not at all; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def goal_reached(value: float, goal: tuple[str, float]) -> bool:
    """Return whether ``value`` satisfies ``goal``, such as ``(">=", 2.5)``; NaN never does."""
    comparison, bound = goal
    return _COMPARE[comparison](value, bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Repeated measurements of one quantity: their median, extremes and number."""

    median: float
    minimum: float
    maximum: float
    count: int = field(default=1)

    @property
    def relative(self) -> float:
        """Range divided by the median: 0.1 means that the extremes differ by 10 % of the median."""
        return (self.maximum - self.minimum) / self.median if self.median else 0.0

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.minimum:.4g} to {self.maximum:.4g}, n={self.count})"


def spread(values: Iterable[float]) -> Spread:
    """Return the ``Spread`` of measurements.

    Raises:
        ValueError: There are none, or one is not finite.
    """
    numbers = list(values)
    if not numbers or not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"Expected at least one finite measurement and no others, found {numbers}.")
    return Spread(median=statistics.median(numbers), minimum=min(numbers), maximum=max(numbers), count=len(numbers))


def format_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return columns of plain text, with numbers aligned right; empty text if there are no rows."""
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        return ""
    is_number = [all(_is_number(row[i]) for row in cells) for i in range(len(columns))]
    widths = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, cells)])


def command_line() -> str:
    """Return the command line of this process, with paths relative to the repository if they are in it."""
    _, *arguments = sys.orig_argv
    return shlex.join(["python", *map(_relative, arguments)])


def provenance(result: Mapping[str, Any]) -> list[str]:
    """Return the origin of the figures in a result file, and its notes, as the items of a Markdown list."""
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    versions = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
    return [
        f"- `{result['command']}`, commit {result['commit']}, {result['date']}, gate {result['gate']}",
        f"- {machine}",
        f"- {versions}",
        *(f"- {note}" for note in result["notes"]),
    ]


def commit_id(root: Path = ROOT) -> str:
    """Return the commit, with ``-dirty`` if files that could change a figure differ from it; ``unknown`` without
    git."""
    try:
        head = _git(root, "rev-parse", "HEAD").strip()
        # Results, and pages about them, must not make the measured code look changed.
        folders = (*(f"benchmarks/{folder}" for folder in ("results", "recordings", "notes")), "tools/results")
        written = [f":(exclude){folder}" for folder in folders]
        changed = _git(root, "status", "--porcelain", "--", ".", *written).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def machine_info() -> dict[str, Any]:
    """Return CPU model, usable cores, memory in bytes, platform, torch's threads, and the GPUs if there are any."""
    import torch

    info: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "torch_threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        info["gpus"] = [
            {
                "name": device.name,
                "memory_bytes": device.total_memory,
                "compute_capability": f"{device.major}.{device.minor}",
            }
            for device in devices
        ]
        info["cuda"] = torch.version.cuda
    return info


@cache
def source_digest() -> str:
    """Return the SHA-256 of the names and contents of ALTO's sources and of the benchmarks' sources."""
    files = [path for folder in ("src/alto", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    files += (ROOT / "benchmarks").glob("*/*lengths.json")
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def package_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the installed ones of ``packages``."""
    found = {package: version_of(package) for package in packages}
    return {"python": platform.python_version()} | {
        package: version for package, version in found.items() if version is not None
    }


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _relative(argument: str) -> str:
    path = Path(argument)
    return str(path.relative_to(ROOT)) if path.is_absolute() and path.is_relative_to(ROOT) else argument


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell in ("", "none")
    return True
