"""The version of ALTO, and of the packages that its results depend on."""

from __future__ import annotations

from importlib import metadata

__all__ = ["__version__", "version_of"]

__version__ = "0.2.0"
"""Of this source, whether it is installed or only on the path; the build reads it from here."""


def version_of(package: str) -> str | None:
    """The version of an installed ``package``, by the name that it is installed by; None where it is not installed.

    ALTO's own is known where its source is used without being installed, too.
    """
    if package == "alto-lora":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
