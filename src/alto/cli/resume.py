"""``alto resume``: resumes an interrupted run or queue."""

from __future__ import annotations

from typing import Annotated

import typer

from alto.cli.options import AsJson, Quiet, Strategy, TrustRemoteCode
from alto.cli.paths import InterruptedRun, interrupted_run
from alto.cli.run import work_on_queue
from alto.cli.tune import train
from alto.runs import QueueDir, QueueProgress

__all__ = ["resume"]


def resume(
    run: InterruptedRun = None,
    num_gpus: Annotated[
        int | None, typer.Option("--num-gpus", min=1, help="Number of GPUs from now on; not for a queue.")
    ] = None,
    strategy: Strategy = "adapter_parallel",
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            help="For a queue that began on a Ray cluster at an address, or on a package's cluster: the same value "
            "again.",
        ),
    ] = "local",
    wait_for_tasks: Annotated[
        bool,
        typer.Option("--wait-for-tasks", help="For a queue: keep running when all tasks have ended, until alto drain."),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Resume an interrupted RUN or queue from its last checkpoint; by default the latest interrupted one in ./runs.

    A queue keeps the strategy that it started with.
    """
    root = interrupted_run(run)
    if QueueDir.exists(root):
        work_on_queue(
            lambda engine: (
                root,
                engine.resume_queue(root, trust_remote_code=trust_remote_code, keep_open=wait_for_tasks),
            ),
            QueueProgress.before_resume(root),
            as_json=as_json,
            quiet=quiet,
            queue=root,
            output_dir=root.parent,
            cluster=cluster,
        )
    else:
        train(
            lambda engine: engine.resume(root, num_gpus=num_gpus, trust_remote_code=trust_remote_code),
            strategy=strategy,
            output_dir=root.parent,
            as_json=as_json,
            quiet=quiet,
            run=root,
        )
