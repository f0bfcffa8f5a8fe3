"""Where the control planes of a service keep their journals: each leader has a folder of its own, so that one that
stands still keeps nobody waiting."""

from __future__ import annotations

from pathlib import Path

__all__ = ["control_folder", "newest_journal"]

_CONTROL = "control"


def control_folder(root: Path, epoch: int) -> Path:
    """Folder of the leader of an epoch; ``root`` is the data folder."""
    return root / _CONTROL / f"{epoch:08d}"


def newest_journal(root: Path) -> Path | None:
    """The journal of the latest leader; None before there was one."""
    found = sorted((root / _CONTROL).glob("*/journal.jsonl"))
    return found[-1] if found else None
