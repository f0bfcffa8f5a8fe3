"""Orders of a cluster to one of its processes, and reports of that process: files in a private folder.

::

    <folder>/
        order-000001.json    an order; removed once it is read
        ended-000001.json    how the attempt of that order ended
        output.log           output of the process while it works on several runs, or on none
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from alto.base import read_json
from alto.cluster.attempt import AttemptDir, read_ending
from alto.cluster.base import Ending, TaskTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOrder:
    """An order to work on a run, in addition to the runs that the process already works on.

    Attributes:
        number: Number of the order, unique in its process.
    """

    number: int
    attempt_dir: str
    ticket: TaskTicket

    @property
    def attempt(self) -> AttemptDir:
        """The folder of the attempt."""
        return AttemptDir(Path(self.attempt_dir))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrder:
    """An order to let the attempt of another order save and end; other attempts continue.

    Attributes:
        stopped: Number of the other order.
    """

    number: int
    stopped: int


Order = WorkOrder | StopOrder
_KINDS: dict[str, TypeAdapter[Order]] = {kind.__name__: TypeAdapter(kind) for kind in (WorkOrder, StopOrder)}


class Orders:
    """The folder of one process, which only this user can enter.

    Attributes:
        takes_more: Whether the process can work on further runs, according to its reports so far.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.output = root / "output.log"
        self.takes_more = True
        self._num_given = 0

    @classmethod
    def create(cls) -> Self:
        """Make a new folder, which is removed with this object at the latest.

        Raises:
            OSError: The folder cannot be made.
        """
        orders = cls(Path(tempfile.mkdtemp(prefix="alto-executor-")))  # mode 0700
        weakref.finalize(orders, shutil.rmtree, orders.root, ignore_errors=True)
        return orders

    # -- the cluster's side ----------------------------------------------------------------------------------------

    def work(self, ticket: TaskTicket, attempt: AttemptDir) -> int:
        """Order to work on a task; return the number of the order.

        Raises:
            OSError: The order cannot be written.
        """
        self._num_given += 1
        order = WorkOrder(number=self._num_given, attempt_dir=str(attempt.root), ticket=ticket)
        self._write_order(order)
        return order.number

    def stop(self, number: int) -> None:
        """Order to end the attempt of order ``number``; errors as in :meth:`work`."""
        self._num_given += 1
        self._write_order(StopOrder(number=self._num_given, stopped=number))

    def ended(self, number: int) -> Ending | None:
        """Return how the attempt of order ``number`` ended; None if the process has not reported it yet."""
        ending = read_ending(self._ended(number))
        if ending is not None:
            self.takes_more = self.takes_more and read_json(self._ended(number)).get("is_reusable") is True
        return ending

    def remove(self) -> None:
        """Remove the folder after its process has ended."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _write_order(self, order: Order) -> None:
        self._write(self.root / f"order-{order.number:06}.json", {type(order).__name__: asdict(order)})

    # -- the side of the process -----------------------------------------------------------------------------------

    def new(self) -> list[Order]:
        """Return the orders since the last call, oldest first."""
        found: list[Order] = []
        for path in sorted(self.root.glob("order-*.json")):
            ((kind, fields),) = json.loads(path.read_bytes()).items()
            found.append(_KINDS[kind].validate_python(fields))
            path.unlink()
        return found

    def report(self, order: WorkOrder, ending: Ending, *, is_reusable: bool) -> bool:
        """Report the end of an attempt, here and in its folder; return whether it could be reported here."""
        order.attempt.write_ending(ending)
        with contextlib.suppress(OSError):
            self._write(self._ended(order.number), asdict(ending) | {"is_reusable": is_reusable})
            return True
        return False

    def _ended(self, number: int) -> Path:
        return self.root / f"ended-{number:06}.json"

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        """Write a file atomically, so that no reader sees a part of it. It need not survive a crash of the machine."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(content), encoding="utf-8")
        fresh.replace(path)
