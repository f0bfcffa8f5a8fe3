"""A user's package as a page of the documentation writes it, installed into a folder with real metadata."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def files_of(page: str, *, after: str = "", until: str = "") -> dict[str, str]:
    """Return the files that a page shows: blocks whose first line is a comment with their name, and ``pyproject.toml``.

    Args:
        page: Name of the page in ``docs``.
        after: Heading after which to look.
        until: Heading at which to stop.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    text = text[text.index(after) :]
    text = text[: text.index(until)] if until else text
    files = {}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        named = re.match(r"# ([\w./]+\.\w+)\n", block)
        if named is not None:
            files.setdefault(named[1], block)
        elif language == "toml":
            files.setdefault("pyproject.toml", block)
    return files


def install(folder: Path, files: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the Python ``files`` on the path, here and in child processes, as ``pip install`` of their project would."""
    project = tomllib.loads(files["pyproject.toml"])["project"]
    names = set()
    for name, source in files.items():
        if name.endswith(".py"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
            names.add(name.removesuffix(".py").partition("/")[0])
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *([inherited] if inherited else [])]))
    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        monkeypatch.delitem(sys.modules, module)
