"""Collect the packages that another machine lacks as wheels, to carry them there: a machine with a GPU may have its own
torch, and no network.

    python tools/carry_wheels.py --describe > machine.json     # on that machine: what it has; needs nothing but Python
    python tools/carry_wheels.py --machine machine.json        # here: wheels/ gets what it lacks

On that machine, with the checkout and ``wheels/`` in it, run::

    python -m pip install --no-index --no-deps --target carried wheels/*.whl
    PYTHONPATH=carried make bench-gpu

The wanted packages are the base dependencies of ``pyproject.toml``, except those that only reports need, and with
``--tests`` also the test runner; and all packages that these require in turn under that machine's Python. Without a
description, the machine is assumed to have torch, Triton, transformers and PEFT with their dependencies (``--has``
names others).
"""

from __future__ import annotations

import argparse
import email
import json
import platform
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

FOR_REPORTS_ONLY = ("plotly",)
"""Base dependencies that neither a benchmark nor a test marked ``gpu`` imports."""

TEST_RUNNER = ("pytest", "hypothesis")
"""Packages of the extra ``dev`` that tests need."""

OWN = ("torch", "triton", "transformers", "peft", "numpy", "tokenizers")
"""Packages that must fit a machine's GPU, its driver and each other; they are never carried."""

USUALLY_THERE = (
    *OWN,
    *("accelerate", "click", "filelock", "fsspec", "hf-xet", "httpx", "huggingface-hub", "jinja2", "markdown-it-py"),
    *("markupsafe", "mdurl", "mpmath", "networkx", "packaging", "psutil", "pygments", "pyyaml", "regex", "rich"),
    *("safetensors", "setuptools", "shellingham", "sympy", "tqdm", "typer", "typing-extensions"),
)
"""Packages that are installed with torch, Triton, transformers and PEFT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine to which the wheels are carried.

    Attributes:
        python_version: Version such as ``"3.12"``.
        platforms: Tags of wheels that it accepts, such as ``"manylinux_2_28_x86_64"``.
        packages: Installed packages by normal name; a version of None is unknown, and assumed to fit.
    """

    python_version: str
    platforms: tuple[str, ...]
    packages: Mapping[str, str | None]

    @property
    def environment(self) -> dict[str, str]:
        """Values by which the markers of requirements are evaluated."""
        architecture = next((name for name in ("x86_64", "aarch64") if self.platforms[0].endswith(name)), "x86_64")
        return {
            "python_version": self.python_version,
            "python_full_version": f"{self.python_version}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": architecture,
        }


class CannotCarryError(ValueError):
    """Raised if a wanted package cannot be carried; the message names the package, the reason and the remedy."""


Fetch = Callable[[str, Machine, Path], Path]
"""Function that gets a requirement such as ``"pydantic>=2.12"``, the machine and a folder, and returns the wheel that
it has put there."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.describe:
        print(json.dumps(describe(), indent=1))
        return 0
    machine = _machine(options)
    wanted = wanted_packages((ROOT / "pyproject.toml").read_text(encoding="utf-8"), tests=options.tests)
    try:
        wheels = collect(wanted, machine, options.to)
    except CannotCarryError as error:
        raise SystemExit(str(error)) from None
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:6.2f} MB  {wheel}")
    total = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(f"{total:6.2f} MB  in {len(wheels)} wheels for Python {machine.python_version}")
    return 0


def describe() -> dict[str, Any]:
    """Return a description of this machine, for ``--machine`` on another one."""
    _, libc = platform.libc_ver()
    newest = int(libc.split(".")[1]) if libc else 17
    tags = [f"manylinux_2_{minor}_{platform.machine()}" for minor in range(newest, 4, -1)]
    old = [f"manylinux{name}_{platform.machine()}" for name in ("2014", "2010", "1")]
    return {
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "platforms": tags + old,
        "packages": {_normal(found.name): found.version for found in metadata.distributions() if found.name},
    }


def wanted_packages(pyproject: str, *, tests: bool) -> list[str]:
    """Return the requirements of the GPU benchmarks, and with ``tests`` of the tests, from ``pyproject.toml``."""
    from packaging.requirements import Requirement

    project = tomllib.loads(pyproject)["project"]
    wanted = [text for text in project["dependencies"] if Requirement(text).name not in FOR_REPORTS_ONLY]
    if tests:
        wanted += [text for text in project["optional-dependencies"]["dev"] if Requirement(text).name in TEST_RUNNER]
    return wanted


def collect(wanted: Sequence[str], machine: Machine, folder: Path, fetch: Fetch | None = None) -> list[Path]:
    """Fetch the wheels of ``wanted``, and of all their requirements, that ``machine`` lacks. ``folder`` then holds only
    these wheels.

    Raises:
        CannotCarryError: A package of ``OWN`` is missing there or too old, or no wheel satisfies all packages that
            require it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bounds: dict[str, list[str]] = {}
    while True:
        for old in folder.glob("*.whl"):
            old.unlink()
        try:
            return _walk(wanted, machine, folder, fetch or _download, bounds)
        except _DoesNotFitError as error:  # from the start, because another version may require other packages
            bounds.setdefault(error.name, []).append(error.specifier)


class _DoesNotFitError(Exception):
    """Raised if a wheel that was fetched for one requirement does not satisfy another."""

    def __init__(self, name: str, specifier: str) -> None:
        self.name, self.specifier = name, specifier


def _walk(
    wanted: Sequence[str], machine: Machine, folder: Path, fetch: Fetch, bounds: Mapping[str, Sequence[str]]
) -> list[Path]:
    """Walk once through the requirements; ``bounds`` are specifiers by package that are known beforehand."""
    from packaging.requirements import Requirement

    wheels: dict[str, Path] = {}
    pending = [("ALTO", "", text) for text in wanted]
    while pending:
        asked_by, extra, text = pending.pop(0)
        requirement = Requirement(text)
        name = _normal(requirement.name)
        is_meant = requirement.marker is None or requirement.marker.evaluate(machine.environment | {"extra": extra})
        if not is_meant or _is_there(requirement, machine):
            continue
        if name in OWN:
            raise CannotCarryError(
                f"{asked_by} requires {requirement.name}{requirement.specifier}, found "
                f"{machine.packages.get(name) or 'none'} on the machine: install it there, because it has to fit the "
                "machine's driver and its torch"
            )
        if name not in wheels:
            specifiers = ",".join(filter(None, [str(requirement.specifier), *bounds.get(name, ())]))
            wheels[name] = fetch(f"{requirement.name}{specifiers}", machine, folder)
            pending += [(name, "", text) for text in _requirements(wheels[name])]
        elif not requirement.specifier.contains(_version(wheels[name]), prereleases=True):
            raise _DoesNotFitError(name, str(requirement.specifier))
        pending += [(name, extra, text) for extra in sorted(requirement.extras) for text in _requirements(wheels[name])]
    return sorted(wheels.values())


def _is_there(requirement: Any, machine: Machine) -> bool:
    name = _normal(requirement.name)
    if name not in machine.packages:
        return False
    version = machine.packages[name]
    return version is None or requirement.specifier.contains(version, prereleases=True)


def _requirements(wheel: Path) -> list[str]:
    return _metadata(wheel).get_all("Requires-Dist") or []


def _version(wheel: Path) -> str:
    return str(_metadata(wheel)["Version"])


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1)
        return email.message_from_bytes(archive.read(name))


def _download(requirement: str, machine: Machine, folder: Path) -> Path:
    before = set(folder.glob("*.whl"))
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--implementation", "cp", "--python-version", machine.python_version),
        *(item for tag in machine.platforms for item in ("--platform", tag)),
        *("--dest", str(folder), requirement),
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise CannotCarryError(
            f"pip finds no wheel of {requirement} for Python {machine.python_version} on {machine.platforms[0]}:\n"
            f"{done.stderr.strip()}"
        )
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel


def _normal(name: str) -> str:
    return "-".join(part for part in name.lower().replace("_", "-").replace(".", "-").split("-") if part)


def _machine(options: argparse.Namespace) -> Machine:
    if options.machine is not None:
        content = json.loads(options.machine.read_text(encoding="utf-8"))
        return Machine(
            python_version=content["python_version"],
            platforms=tuple(content["platforms"]),
            packages=content["packages"],
        )
    has = [name.partition("==") for name in options.has or USUALLY_THERE]
    return Machine(
        python_version=options.python_version,
        platforms=tuple(options.platform),
        packages={_normal(name): version or None for name, _, version in has},
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--describe", action="store_true", help="print what this machine has, and do nothing else")
    parser.add_argument("--machine", type=Path, help="what --describe printed on the machine")
    parser.add_argument("--tests", action="store_true", help="carry what runs the tests, too")
    parser.add_argument("--to", type=Path, default=ROOT / "wheels")
    parser.add_argument("--python-version", default="3.12")
    parser.add_argument(
        "--platform", nargs="+", default=[f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)], help="wheel tags"
    )
    parser.add_argument("--has", nargs="+", metavar="NAME[==VERSION]", help="packages that the machine has")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
