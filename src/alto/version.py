"""Versions of ALTO and of the packages on which its results depend."""

from __future__ import annotations

from importlib import metadata

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
