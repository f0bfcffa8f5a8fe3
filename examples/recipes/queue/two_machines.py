"""Run a command on a Ray cluster of two machines, which this machine simulates: Ray nodes with one CPU slot each.

    python examples/recipes/queue/two_machines.py alto run a.yaml b.yaml --cluster auto

Needs ``pip install "alto-lora[ray]"``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20


def main(command: Sequence[str]) -> int:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, num_gpus=0, include_dashboard=False, object_store_memory=STORE_BYTES)  # the head
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=0, object_store_memory=STORE_BYTES)
        return subprocess.run(command, env=os.environ | {"RAY_ADDRESS": cluster.address}, check=False).returncode
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
