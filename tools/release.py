"""Builds a release and checks it as a stranger would install it.

    python -m tools.release                          # what make release runs
    python -m tools.release --pythons 3.11           # for one version of Python

It writes the source archive, the wheel and the release notes into ``dist/``. It checks what they contain, installs the
wheel into an empty environment for every version of Python, runs ``alto doctor`` and ``alto demo`` there without a
network, and compares the licences of everything that was installed with a list. A version of Python that this machine
does not have is named, and counts as a failure.

The interpreter that runs this needs ``build``, ``twine`` and ``pip-licenses``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

__all__ = ["contents_faults", "find_python", "forbidden", "main", "release_notes"]

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
DEFAULT_TORCH = "2.13.0"

ALLOWED = re.compile(
    r"(the )?(mit|apache|bsd|isc|psf|python software foundation|mpl[- ]2|mozilla public license 2|unlicense|zlib|0bsd"
    r"|hpnd|zpl|cc0|cnri-python|bsl-1\.0|public domain)",
    re.IGNORECASE,
)
"""Beginnings of licences that a dependency may have: permissive ones (BSL-1.0 is Boost's), and Mozilla's."""


def release_notes(changelog: str, version: str) -> str:
    """Return the section of ``version`` in the changelog.

    Raises:
        ValueError: There is none, or it is empty.
    """
    section = re.search(rf"^## {re.escape(version)}(?!\S)[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None or not section[1].strip():
        raise ValueError(f"CHANGELOG.md: expected a section '## {version} …' with text, found none; write it")
    return f"# ALTO {version}\n\n{section[1].strip()}\n"


def contents_faults(files: Collection[str], expected: Collection[str]) -> list[str]:
    """Return the files that an archive lacks, or should not have."""
    return [f"lacks {name}" for name in sorted(set(expected) - set(files))] + [
        f"should not have {name}" for name in sorted(set(files) - set(expected))
    ]


def forbidden(licences: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the packages whose licence is not allowed.

    Args:
        licences: Rows of ``pip-licenses --format=json``. All parts of a licence have to be allowed, or one of several
            that are joined by OR.
    """
    found = []
    for row in licences:
        choices = re.split(r"\s+OR\s+", row["License"])
        is_nvidias = row["Name"].startswith(("nvidia-", "cuda-"))  # needed by PyTorch's CUDA build, licences unnamed
        if not is_nvidias and not any(all(map(_is_allowed, re.split(r"\s+AND\s+|;", choice))) for choice in choices):
            found.append(f"{row['Name']} {row['Version']}: {row['License']}")
    return found


def _is_allowed(licence: str) -> bool:
    return ALLOWED.match(licence.strip(" ()")) is not None


def find_python(version: str) -> str | None:
    """Return an interpreter of this version: on the path, from pyenv, or from uv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    candidates = [f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    if shutil.which("uv"):
        found = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True, check=False)
        candidates += found.stdout.split()
    for candidate in candidates:
        code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return None


def _run(*command: str | Path, **how: object) -> str:
    """Run a command, show it, and return what it prints.

    Raises:
        subprocess.CalledProcessError: It failed; its output was printed.
    """
    print("$", *command, flush=True)
    words = list(map(str, command))
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **how)  # type: ignore[call-overload]
    if done.returncode:
        print(done.stdout)
        raise subprocess.CalledProcessError(done.returncode, words)
    return str(done.stdout)


def build(out: Path) -> tuple[Path, Path, str]:
    """Build both archives into ``out``, check them, and return the wheel, the source archive and the version."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("alto_lora-*"), *out.glob("release-notes-*")):
        old.unlink()
    _run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    [wheel], [source] = list(out.glob("*.whl")), list(out.glob("*.tar.gz"))
    print(_run(sys.executable, "-m", "twine", "check", "--strict", wheel, source), end="")
    version = wheel.name.split("-")[1]
    tracked = _run("git", "-C", ROOT, "ls-files", "src/alto").split()
    about = f"alto_lora-{version}.dist-info"
    expected = [name.removeprefix("src/") for name in tracked]
    expected += [f"{about}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")]
    with zipfile.ZipFile(wheel) as archive:
        faults = [f"{wheel.name} {fault}" for fault in contents_faults(archive.namelist(), expected)]
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "examples/quickstart.yaml", *tracked):
            faults += [] if name in names else [f"{source.name} lacks {name}"]
    if faults:
        raise ValueError("\n".join(faults))
    return wheel, source, version


def try_out(wheel: Path, python: str, torch: str) -> list[str]:
    """Install the wheel into an empty environment, run it in an empty folder, and return forbidden licences."""
    with tempfile.TemporaryDirectory(prefix="alto-release-") as scratch:
        folder = Path(scratch)
        own = folder / "venv" / "bin" / "python"
        _run(python, "-m", "venv", folder / "venv")
        _run(own, "-m", "pip", "install", "--quiet", f"torch=={torch}")  # first, so that nothing else chooses it
        _run(own, "-m", "pip", "install", "--quiet", wheel)
        home = folder / "home"
        home.mkdir()
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ALTO_", "HF_"))},
            **{"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"},
        }
        for command in ("doctor", "demo"):
            print(_run(own.with_name("alto"), command, cwd=home, env=environment), end="")
        rows = json.loads(_run(sys.executable, "-m", "piplicenses", "--python", own, "--format=json", "--from=mixed"))
        print(f"{len(rows)} packages; licences: {', '.join(sorted({row['License'][:40] for row in rows}))}")
        return forbidden(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build a release and check it.")
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, metavar="VERSION")
    parser.add_argument("--torch", default=DEFAULT_TORCH, metavar="VERSION")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args(arguments)
    problems = []
    try:
        wheel, _, version = build(options.out)
        notes = release_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
        (options.out / f"release-notes-{version}.md").write_text(notes, encoding="utf-8")
    except (ValueError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    for name in options.pythons:
        python = find_python(name)
        if python is None:
            problems.append(f"Python {name}: not tried, because this machine has no such interpreter")
            continue
        try:
            unfit = try_out(wheel, python, options.torch)
        except subprocess.CalledProcessError as error:
            problems.append(f"Python {name}: {error}")
            continue
        problems += [f"Python {name}: licence that is not allowed: {package}" for package in unfit]
        print(f"Python {name}: installed, alto doctor and alto demo work")
    print(*problems or [f"{wheel.name} is ready in {options.out}"], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
