"""``alto doctor``: what is installed, and whether it works."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from packaging.requirements import Requirement

from alto.base import cache_home, first_line
from alto.cli.options import RUNS
from alto.cli.output import print_json
from alto.errors import AltoError
from alto.version import __version__, install_command, version_of

EXTRAS: Mapping[str, str] = {
    "bench": "the benchmarks",
    "bnb": "quantised base models and 8-bit optimizers",
    "data": "Parquet files and datasets of the hub",
    "docs": "this documentation as a site",
    "gguf": "GGUF files for llama.cpp and Ollama",
    "gpu": "Triton kernels on NVIDIA GPUs",
    "peft": "the check of adapters with PEFT, alto export --merged, and the Python code of model cards",
    "ray": "clusters of several machines",
    "s3": "files of the service in an S3-compatible store",
    "scheduler": "optimal schedules of many tasks",
    "search": "search: tpe",
    "service": "alto serve",
    "tracking": "TensorBoard",
    "vllm": "fast answers in alto eval",
    "dev": "development of ALTO",
}
"""The use of each extra."""

_SHOWN = ("torch", "triton", "transformers", "tokenizers", "safetensors", "peft", "datasets", "vllm", "numpy")
_LEAST_FREE_BYTES = 2**30


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """The facts about an installation, and its problems.

    Attributes:
        facts: Values by name, as they are shown.
        extras: Missing packages of every extra; empty if it is installed.
        problems: Problems that keep ALTO from working: "expected …, found …; remedy".
    """

    facts: dict[str, str] = field(default_factory=dict)
    extras: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON and nothing else.")] = False,
) -> None:
    """Check the installation: versions, devices, kernels, memory, disk space and extras.

    The exit code is 1 if something that ALTO needs does not work; each problem is shown with its remedy.
    """
    found = diagnosis()
    if as_json:
        print_json({**dataclasses.asdict(found), "uses": dict(EXTRAS)})
    else:
        for line in _lines(found):
            typer.echo(line)
    if found.problems:
        raise typer.Exit(1)


def diagnosis() -> Diagnosis:
    """Check this installation; an error of any library becomes a problem."""
    found = Diagnosis()
    found.facts["alto"] = f"{__version__} in {Path(__file__).parents[1]}"
    found.facts["python"] = f"{platform.python_version()} in {sys.prefix}"
    found.facts["system"] = f"{platform.platform()}, {os.cpu_count()} cores"
    versions = {name: version_of(name) for name in _SHOWN}
    found.facts["packages"] = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    _check_requirements(found)
    remedy = "install them again: pip install --force-reinstall torch transformers"
    with _becoming_problem(found, "PyTorch and transformers that can be imported", remedy):
        from alto.engine import health

        _check_devices(found, health)
        _check_kernels(found, health)
    for name, folder, remedy in _folders():
        _check_folder(found, name, folder, remedy)
    return found


@contextlib.contextmanager
def _becoming_problem(found: Diagnosis, expected: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except AltoError as error:
        found.problems.append(str(error))
    except Exception as error:  # of any library
        found.problems.append(f"expected {expected}, found {type(error).__name__}: {first_line(error)}; {remedy}")


def _check_requirements(found: Diagnosis) -> None:
    """Compare the installed packages with those that ALTO and its extras require."""
    try:
        about = metadata.metadata("alto-lora")
    except metadata.PackageNotFoundError:
        found.facts["extras"] = "unknown, because ALTO runs from its source without being installed"
        return
    requirements = [Requirement(text) for text in about.get_all("Requires-Dist") or ()]
    for requirement in requirements:
        if _applies(requirement, "") and (fault := _fault(requirement)):
            found.problems.append(f"expected {_short(requirement)}, found {fault}; pip install '{_short(requirement)}'")
    extras = about.get_all("Provides-Extra") or ()
    for extra in extras:
        # A package with an extra of its name is shown only there, though other extras contain that extra.
        own = [item for item in requirements if item.name == extra or item.name not in extras]
        needed = [item for item in own if _applies(item, extra) and not _applies(item, "")]
        found.extras[extra] = [_short(item) for item in needed if _fault(item)]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _short(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _fault(requirement: Requirement) -> str:
    """Return what is installed instead of the requirement; empty if it is met."""
    version = version_of(requirement.name)
    if version is None:
        return "none"
    return "" if requirement.specifier.contains(version, prereleases=True) else f"version {version}"


def _check_devices(found: Diagnosis, health: ModuleType) -> None:
    gpus = [f"{gpu.name} ({_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free)" for gpu in health.gpus()]
    found.facts["gpu"] = ", ".join(gpus) or "no GPU; jobs train on the CPU"
    found.facts["memory"] = _gib(health.memory_bytes())
    if hidden := health.hidden_gpu():
        found.problems.append(
            f"expected a PyTorch that can use the NVIDIA GPU of this machine, found {hidden}; update the driver, or "
            "install the PyTorch for its CUDA version: https://pytorch.org/get-started/locally"
        )


def _check_kernels(found: Diagnosis, health: ModuleType) -> None:
    remedy = (
        "Triton needs a C compiler and Python's headers (apt-get install gcc python3-dev); ALTO_KERNELS=torch trains "
        "without Triton, slowly"
    )
    with _becoming_problem(found, "kernels that compile and run", remedy):
        found.facts["kernels"] = f"{health.check_kernels()}, equal to the reference"


def _folders() -> Iterator[tuple[str, Path, str]]:
    """Yield the name, the place and the remedy of every folder that ALTO writes to."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    yield (
        "HF_HOME",
        Path(os.environ.get("HF_HOME") or caches / "huggingface"),
        "set HF_HOME to a folder on another disk",
    )
    yield "ALTO_CACHE", cache_home(), "set ALTO_CACHE to a folder on another disk"
    yield "runs", RUNS.resolve(), "start ALTO in another folder, or name one with --output-dir"


def _check_folder(found: Diagnosis, name: str, folder: Path, remedy: str) -> None:
    """Check that files can be written into ``folder``, or that it can be made, and that there is space."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    found.facts[name] = f"{folder}, {_gib(free)} free"
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"alto")
    except OSError as error:
        found.problems.append(f"expected {name} to be a folder for new files, found {folder}: {error}; {remedy}")
        return
    if free < _LEAST_FREE_BYTES:
        found.problems.append(f"expected at least 1 GiB free for {name}, found {_gib(free)} in {folder}; {remedy}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def _lines(found: Diagnosis) -> Iterator[str]:
    width = max(map(len, found.facts)) + 3
    for name, value in found.facts.items():
        yield f"{name + ':':{width}}{value}"
    installed = [extra for extra, missing in found.extras.items() if not missing]
    if found.extras:
        yield f"{'extras:':{width}}{', '.join(installed) or 'none'}"
        yield "not installed:"
    for extra, missing in found.extras.items():
        if missing and extra != "dev":  # those who need it know it
            yield f"  {EXTRAS.get(extra, '')}: {install_command(extra)} (needs {', '.join(missing)})"
    yield "" if found.problems else "everything that ALTO needs works"
    for problem in found.problems:
        yield f"problem: {problem}"
