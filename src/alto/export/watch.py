"""Shows the live view of a run that another process works on."""

from __future__ import annotations

import time

from rich.console import Console

from alto.export.terminal import LiveView
from alto.runs import RunDir, read_history

__all__ = ["watch_run"]


def watch_run(console: Console, run: RunDir, every_s: float) -> None:
    """Redraw the state of ``run`` from its journal every ``every_s`` seconds until no process works on it any more."""
    with LiveView(console) as view:
        while True:
            is_live = run.is_locked()
            view.show(read_history(run.root))
            if not is_live:
                return
            time.sleep(every_s)
