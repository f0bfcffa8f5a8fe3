"""``alto resume``: go on with what was interrupted."""

from __future__ import annotations

from alto.cli.options import AsJson, Quiet
from alto.cli.paths import Run
from alto.cli.run import work_on_queue
from alto.cli.tune import train
from alto.runs import QueueDir

__all__ = ["resume"]


def resume(
    run: Run,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Go on with an interrupted RUN, or queue of runs, from its last checkpoint."""
    if QueueDir.exists(run):
        work_on_queue(lambda engine: engine.resume_queue(run), as_json=as_json, quiet=quiet, output_dir=run.parent)
    else:
        train(lambda engine: engine.resume(run), output_dir=run.parent, as_json=as_json, quiet=quiet)
