"""Hosts of ranks in the tests of clusters that use PyTorch; imported before the ranks are forked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from cluster_hosts import alone, tell

from alto.base import replace_file
from alto.executor import Ranks


@alone
def ranks_meet(run_dir: str, is_interrupted: Callable[[], bool]) -> None:
    """Let the first rank write the environment of each rank."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ALTO_RENDEZVOUS", "OMP_NUM_THREADS")
    ranks = Ranks.join(torch.device("cpu"))
    replace_file(Path(run_dir) / f"met-{ranks.rank}", json.dumps({name: os.environ[name] for name in names}))
    ranks.barrier()
    if ranks.is_first:
        files = [Path(run_dir) / f"met-{rank}" for rank in range(ranks.size)]
        tell(run_dir, "met", ranks=[json.loads(file.read_text("utf-8")) for file in files])
    ranks.barrier()
