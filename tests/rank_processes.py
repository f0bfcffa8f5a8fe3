"""Python processes that are the ranks of one executor, as ``alto.cluster`` would have started them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 300.0


def run_ranks(size: int, module: str, *arguments: str | Path) -> None:
    """Run ``python -m module arguments`` as so many ranks, to their ends; fails with what the first to fail printed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    here = Path(__file__).parent
    common = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    # One that fails takes the others with it, which say only that it has gone.
    failed = [output for output, code in zip(outputs, codes, strict=True) if code]
    assert not failed, f"exit codes {codes}\n" + "\n--- another rank\n".join(output[-4000:] for output in failed)
