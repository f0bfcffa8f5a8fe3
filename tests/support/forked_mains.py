"""Functions that zygotes run in their tests: ``main`` of modules, which does what its first argument names."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from alto.cluster.processes import HELD_SIGNALS


def main() -> None:
    """Do what ``argv`` says: an action, a file, and the arguments that the zygote adds."""
    action, file = sys.argv[1], Path(sys.argv[2])
    if action == "report":
        imported = sorted({"torch", "transformers"} & sys.modules.keys())
        import torch

        facts = {
            "argv": sys.argv[3:],
            "cwd": str(Path.cwd()),
            "environment": dict(os.environ),
            "parent": os.getppid(),
            "leads": os.getsid(0) == os.getpid(),
            "held": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(HELD_SIGNALS)),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "threads": torch.get_num_threads(),
            "imported": imported,
            "cuda": torch.cuda.is_initialized(),
        }
        file.write_text(json.dumps(facts), encoding="utf-8")
        os._exit(7)
    file.touch()
    if action == "raise":
        raise RuntimeError("as the test wants it")
    while True:
        time.sleep(0.1)
