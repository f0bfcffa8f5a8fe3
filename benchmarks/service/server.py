"""A service with simulated executors, as a program: ``python -m benchmarks.service.server ROOT PORT GPUS SECONDS``."""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from alto.service.coordinator import Coordinator
from alto.service.coordinator.leadership import Leadership
from alto.service.serve import create_app, opened_service
from alto.service.settings import ServiceSettings
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster


def main(root: str, port: str, num_gpus: str, duration_s: str) -> None:
    """Serve until the process is ended."""
    settings = ServiceSettings(data_dir=root, port=int(port))
    plane = simulated_plane(Path(root), lambda: SimulatedCluster(num_gpus=int(num_gpus), duration_s=float(duration_s)))
    with opened_service(settings) as service:
        coordinator = Coordinator(service, Leadership(service.store), plane)
        coordinator.start()
        uvicorn.run(create_app(service, coordinator), port=settings.port, log_config=None, timeout_graceful_shutdown=1)
        coordinator.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
