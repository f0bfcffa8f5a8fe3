"""The folder in which the ranks of an executor find each other."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping

FOLDER = "ALTO_RENDEZVOUS"
"""Environment variable that names the folder; :meth:`alto.executor.Ranks.join` reads it."""

LOOPBACK = "lo"
"""Name of the loopback interface in every Linux network namespace. All ranks of an executor are on one machine."""


class Rendezvous:
    """A folder that only this user can enter, for the store in which ranks exchange addresses and a secret.

    A store on a port would answer any process that can reach it. The process that watches an executor makes the folder;
    either side removes it when the executor has ended.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="alto-ranks-")  # mode 0700
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables of the ranks: the folder, and the only interface on which libraries may listen."""
        return {
            FOLDER: self._folder,
            "GLOO_SOCKET_IFNAME": LOOPBACK,
            "NCCL_SOCKET_IFNAME": f"={LOOPBACK}",
            "NCCL_RAS_ENABLE": "0",  # a status service that accepts any connection
        }

    def close(self) -> None:
        """Remove the folder."""
        self._remove()


def remove_rendezvous() -> None:
    """Remove the folder of the executor whose first rank this process is."""
    if os.environ.get(FOLDER):
        shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
