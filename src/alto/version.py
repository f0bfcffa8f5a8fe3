"""Versions of ALTO and of the packages on which its results depend."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from urllib.parse import urlsplit
from urllib.request import url2pathname

__version__ = "0.2.0"
"""Version of this source, whether it is installed or only on the path; the build reads it from here."""


def version_of(package: str) -> str | None:
    """Return the version of a package by its distribution name; None if it is not installed.

    ALTO's own version is known even if its source is used without being installed.
    """
    if package == "alto-lora":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation: from the clone or file it came from, or by name."""
    try:
        text = metadata.distribution("alto-lora").read_text("direct_url.json")  # pip writes it if no index was used
    except metadata.PackageNotFoundError:
        text = None
    origin = json.loads(text) if text else {}
    is_file = str(origin.get("url", "")).startswith("file:")
    name = url2pathname(urlsplit(origin["url"]).path) if is_file else "alto-lora"
    option = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {option}{shlex.quote(f'{name}[{extra}]')}"
