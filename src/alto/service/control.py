"""Journal folders of a service's control planes. Each leader has its own folder, so a leader that hangs does not block
the next one."""

from __future__ import annotations

from pathlib import Path

__all__ = ["control_folder", "newest_journal"]

_CONTROL = "control"


def control_folder(root: Path, epoch: int) -> Path:
    """Return the folder for the leader of an epoch; ``root`` is the data folder."""
    return root / _CONTROL / f"{epoch:08d}"


def newest_journal(root: Path) -> Path | None:
    """Return the journal of the latest leader; None if there was no leader yet."""
    found = sorted((root / _CONTROL).glob("*/journal.jsonl"))
    return found[-1] if found else None
