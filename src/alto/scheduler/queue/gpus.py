"""The GPUs of a cluster: present, free and lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alto.errors import SpecError
from alto.records import Gpu, Node

__all__ = ["GpuPool"]


class GpuPool:
    """The GPUs of a cluster: the present ones, the free ones, and all that were ever declared.

    Raises:
        SpecError: Two nodes have the same name.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        names = [node.name for node in nodes]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise SpecError(f"node: expected a unique name for each node, found {twice[0]!r} twice; rename one")
        self._present = {Gpu(node.name, index) for node in nodes for index in node.gpus}
        self._declared = set(self._present)
        self._taken: set[Gpu] = set()
        self.free = set(self._present)
        self.nodes = self.declared_nodes = _nodes(self._present)
        """Present nodes, without nodes that have no GPU left; and nodes with every GPU that they ever had."""

    def __len__(self) -> int:
        return len(self._present)

    @property
    def free_nodes(self) -> tuple[Node, ...]:
        """The nodes that have free GPUs, with only the free ones."""
        return _nodes(self.free)

    def __contains__(self, gpu: Gpu) -> bool:
        return gpu in self._present

    def lose(self, gpu: Gpu) -> bool:
        """Remove a lost GPU and return whether it was present."""
        was_there = gpu in self._present
        self._present.discard(gpu)
        self.free.discard(gpu)
        self.nodes = _nodes(self._present)
        return was_there

    def add(self, gpu: Gpu) -> bool:
        """Add a GPU and return whether it is new; while a task still holds it, it is not free."""
        if gpu in self._present:
            return False
        self._present.add(gpu)
        self._declared.add(gpu)
        self.nodes, self.declared_nodes = _nodes(self._present), _nodes(self._declared)
        if gpu not in self._taken:
            self.free.add(gpu)
        return True

    def take(self, gpus: Iterable[Gpu]) -> None:
        gpus = set(gpus)
        assert gpus <= self.free, f"{gpus - self.free} are not free"
        self.free -= gpus
        self._taken |= gpus

    def give_back(self, gpus: Iterable[Gpu]) -> None:
        """Release GPUs; a GPU that was lost meanwhile does not become free."""
        gpus = set(gpus)
        self._taken -= gpus
        self.free |= gpus & self._present


def _nodes(gpus: Iterable[Gpu]) -> tuple[Node, ...]:
    indices: dict[str, list[int]] = {}
    for gpu in sorted(gpus):
        indices.setdefault(gpu.node, []).append(gpu.index)
    return tuple(Node(name=name, gpus=tuple(found)) for name, found in indices.items())
