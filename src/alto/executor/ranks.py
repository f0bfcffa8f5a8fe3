"""The processes (ranks) of one executor, and the messages between them.

Every rank makes the same decisions from the same records, so messages are small: the losses of a step,
what only the first rank can read (a signal, the clock, the mailbox), and barriers. Adapters are never sent. Messages
are tensors and typed JSON; no message can name code to be run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from alto.errors import RankConnectionError

__all__ = ["Ranks"]

T = TypeVar("T")

TIMEOUT = timedelta(hours=1)
"""Timeout of a collective between ranks; the heartbeat's timeout is much shorter."""

PROOF_TIMEOUT = timedelta(minutes=2)
"""How long the other end of a new connection may take to prove that it is a rank."""

_SECRET_BYTES = 32


class Ranks:
    """This process among those of its executor. All of them call the same methods in the same order.

    Attributes:
        rank: The number of this one, from 0.
        size: How many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Connect to the other ranks that the environment names (``RANK``, ``WORLD_SIZE``), through the folder
        ``ALTO_RENDEZVOUS``; without these variables the process is the only rank.

        Tensors on ``device`` go over NCCL where that is a GPU; all else goes over gloo. Each rank listens for the
        others on the interface that ``GLOO_SOCKET_IFNAME`` names, so another process can be the first to connect: each
        connection begins with a proof that its other end can read the folder.

        Raises:
            RankConnectionError: A connection does not lead to a rank.
        """
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            store = dist.FileStore(str(Path(os.environ["ALTO_RENDEZVOUS"]) / "store"), size)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
            if rank == 0:
                store.set("secret", secrets.token_hex(_SECRET_BYTES))
            prove_connections(rank, size, store.get("secret"))
        return cls(rank, size)

    def mesh(self, device: torch.device) -> DeviceMesh | None:
        """What a base model is sharded over; None for one that is whole."""
        return None if self.is_alone else init_device_mesh(device.type, (self.size,))

    @property
    def is_first(self) -> bool:
        """Whether this one writes what is written once: the journal, answers, reports."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """The element-wise sums over all ranks; a value that only one rank has is kept exactly."""
        if self.is_alone or not values:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def max(self, value: float) -> float:
        """The largest ``value`` of any rank."""
        if self.is_alone:
            return value
        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest.item())

    def any(self, flag: bool) -> bool:
        """Whether ``value`` is true on any rank."""
        return self.max(float(flag)) > 0.0

    def broadcast(self, value: T, kind: Any) -> T:
        """The ``value`` of the first rank; those of the others are ignored.

        Args:
            kind: The type of the value, such as ``bool`` or ``TaskOutcome | None``: what JSON and back gives an equal
                value of. A float keeps its bits.

        Raises:
            RankConnectionError: The received value has another type.
        """
        if self.is_alone:
            return value
        codec = _codec(kind)
        text = _encoded(codec, value) if self.is_first else b""
        num_bytes = torch.tensor([len(text)])
        dist.broadcast(num_bytes, src=0)
        raw = torch.zeros(int(num_bytes), dtype=torch.uint8)
        if self.is_first:
            raw.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(raw, src=0)
        return value if self.is_first else _decoded(codec, raw.numpy().tobytes(), kind)

    def broadcast_tensor(self, value: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """A tensor of ``shape`` and ``dtype`` on the CPU that the first rank has, or None where it has none; the
        others' ``value`` does not count."""
        if self.is_alone or not self.broadcast(value is not None, bool):
            return value if self.is_first else None
        tensor = torch.zeros(*shape, dtype=dtype)
        if self.is_first:
            assert value is not None
            tensor.copy_(value)
        dist.broadcast(tensor, src=0)
        return tensor

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place; all of them have the same bits then."""
        if not self.is_alone:
            dist.all_reduce(tensor)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.max(0.0)


def prove_connections(rank: int, size: int, secret: bytes, timeout: timedelta = PROOF_TIMEOUT) -> None:
    """Exchange proofs with every other rank, over the connection that all later messages between the two take.

    A process that has taken over one end cannot get the proof from the other end, which is connected to another
    process; and without special rights no process can write into a TCP connection of two others.

    Args:
        rank: Of this process.
        size: How many ranks there are.
        secret: Shared by all ranks and known to no other process.
        timeout: How long the other end of a connection may take.

    Raises:
        RankConnectionError: A rank did not prove that it has ``secret``.
    """
    others = [other for other in range(size) if other != rank]
    sent = []
    for other in others:
        with contextlib.suppress(RuntimeError):  # a broken connection proves nothing either; it is handled below
            sent.append(dist.isend(_proof(secret, rank, other), other))
    wrong = [other for other in others if not _is_proven(secret, other, rank, timeout)]
    for work in sent:
        with contextlib.suppress(RuntimeError):  # an end without proof is not read from
            assert work is not None
            work.wait(timeout)
    if wrong:
        raise RankConnectionError(
            f"expected rank {rank} to be connected to the other ranks of its executor, found that the process that "
            f"answers for rank {', '.join(map(str, wrong))} does not have their secret; another process of this "
            "machine connects to its port (ss -tnp shows which): end it, then resume the run"
        )


def _is_proven(secret: bytes, sender: int, receiver: int, timeout: timedelta) -> bool:
    proof = torch.zeros(hashlib.sha256().digest_size, dtype=torch.uint8)
    try:
        received = dist.irecv(proof, sender)
        assert received is not None
        received.wait(timeout)
    except RuntimeError:  # gloo's error for a broken connection or a timeout
        return False
    return hmac.compare_digest(bytes(proof.tolist()), bytes(_proof(secret, sender, receiver).tolist()))


def _proof(secret: bytes, sender: int, receiver: int) -> Tensor:
    """Proof, ``[32]`` bytes, for ``receiver`` only, that ``sender`` has the secret."""
    digest = hmac.digest(secret, f"{sender}>{receiver}".encode(), "sha256")
    return torch.tensor(list(digest), dtype=torch.uint8)


@functools.cache
def _codec(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _encoded(codec: TypeAdapter[Any], value: object) -> bytes:
    return json.dumps(codec.dump_python(value)).encode()  # mode "json" would lose what is not finite


def _decoded(codec: TypeAdapter[Any], text: bytes, kind: Any) -> Any:
    try:
        return codec.validate_python(json.loads(text))
    except (ValueError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
        raise RankConnectionError(
            f"expected {kind} from the first rank, found something else ({error!s:.200}); install the same version of "
            "ALTO for all ranks, then resume the run"
        ) from error
