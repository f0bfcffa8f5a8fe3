"""The packages of machines with a GPU, as an environment for processes: torch, Triton, transformers and PEFT, their
requirements, the few wheels that ``tools/carry_wheels.py`` carries there, and ALTO's bare source.

Other packages that are installed here can be neither imported nor found in such a process, nor in its children.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.carry_wheels import wanted_packages

__all__ = ["ROOT", "gpu_stack"]

ROOT = Path(__file__).resolve().parents[2]
THERE = ("torch", "triton", "transformers", "peft")

_HIDE = """
import sys
from importlib.metadata import MetadataPathFinder

MODULES, DISTRIBUTIONS = {modules}, {distributions}

sys.modules.update(dict.fromkeys(MODULES))  # None: not importable, and not there for whoever looks
found = MetadataPathFinder.find_distributions


def find_distributions(*arguments, **settings):
    for one in found(*arguments, **settings):
        if (one.name or "").lower().replace("_", "-").replace(".", "-") not in DISTRIBUTIONS:
            yield one


MetadataPathFinder.find_distributions = find_distributions
"""


def gpu_stack(folder: Path, *, tests: bool = False) -> dict[str, str]:
    """Return environment variables for a process with these packages.

    Args:
        folder: An empty folder of the test, for files that hide the other packages.
        tests: Include the packages that run the tests.
    """
    wanted = wanted_packages((ROOT / "pyproject.toml").read_text(encoding="utf-8"), tests=tests)
    there = _with_requirements([*THERE, *wanted])
    installed = {canonicalize_name(one.name) for one in metadata.distributions()}
    hidden = installed - there
    assert "plotly" not in there
    assert "alto-lora" not in there
    owners = metadata.packages_distributions()
    modules = [
        module
        for module, names in owners.items()
        if module != "alto" and {canonicalize_name(name) for name in names} <= hidden
    ]
    text = _HIDE.format(modules=json.dumps(sorted(modules)), distributions=json.dumps(sorted(hidden)))
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")]),
        "ALTO_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def _with_requirements(texts: Iterable[str]) -> set[str]:
    """Return names of packages, and of all that they require here."""
    found: set[str] = set()
    pending = [Requirement(text) for text in texts]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        pending += map(Requirement, requires)
    return found
