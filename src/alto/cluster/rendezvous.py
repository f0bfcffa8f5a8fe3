"""Where the ranks of an executor find each other."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

__all__ = ["Rendezvous"]

HOST = "127.0.0.1"


class Rendezvous:
    """A store of PyTorch's, there for as long as this object is.

    Whoever watches an executor opens it, and its ranks are told where: a port that was only chosen here and opened
    there could be somebody else's by then.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self) -> None:
        try:
            self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        except DistError as error:
            raise OSError(f"no port for the ranks of an executor to meet at: {error}") from error

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables by which ``torch.distributed.init_process_group`` finds it."""
        return {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # or the first rank would open one of its own at that port
        }
