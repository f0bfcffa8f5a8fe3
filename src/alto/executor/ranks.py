"""The processes (ranks) of one executor, and the messages between them.

Every rank makes the same decisions from the same records, so messages are small: the losses of a step, inputs that only
the first rank can read (a signal, the clock, the mailbox), and barriers. Adapters are never sent. Messages are tensors
and typed JSON; no message can name code to run.
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

T = TypeVar("T")

TIMEOUT = timedelta(hours=1)
"""Timeout of a collective between ranks; the heartbeat's timeout is much shorter."""

PROOF_TIMEOUT = timedelta(minutes=2)
"""Time that the other end of a new connection has to prove that it is a rank."""

_SECRET_BYTES = 32


class Ranks:
    """This process among the ranks of its executor. All ranks call the same methods in the same order."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Connect to the other ranks that the environment names (``RANK``, ``WORLD_SIZE``), through the folder
        ``ALTO_RENDEZVOUS``. Without these variables the process is the only rank.

        Tensors on ``device`` go over NCCL if it is a GPU; everything else goes over gloo. Each rank listens for the
        others on the interface that ``GLOO_SOCKET_IFNAME`` names, so another process may connect first. Therefore each
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
        """Return the device mesh over which the base model is sharded; None if the base model is whole."""
        return None if self.is_alone else init_device_mesh(device.type, (self.size,))

    @property
    def is_first(self) -> bool:
        """Whether this rank writes everything that is written once: the journal, answers, reports."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sums over all ranks; a value that only one rank has is kept exactly."""
        if self.is_alone or not values:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def max(self, value: float) -> float:
        """Return the largest ``value`` of all ranks."""
        if self.is_alone:
            return value
        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest.item())

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank."""
        return self.max(float(flag)) > 0.0

    def broadcast(self, value: T, kind: Any) -> T:
        """Return the ``value`` of the first rank; the values of other ranks are ignored.

        Args:
            kind: Type of the value, such as ``bool`` or ``TaskOutcome | None``. A JSON round trip must give an equal
                value; floats keep their bits.

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
        """Return the first rank's ``value``, a tensor of ``shape`` and ``dtype`` on the CPU or None; the ``value`` of
        other ranks is ignored."""
        if self.is_alone or not self.broadcast(value is not None, bool):
            return value if self.is_first else None
        tensor = torch.zeros(*shape, dtype=dtype)
        if self.is_first:
            assert value is not None
            tensor.copy_(value)
        dist.broadcast(tensor, src=0)
        return tensor

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place; afterwards all ranks have the same bits."""
        if not self.is_alone:
            dist.all_reduce(tensor)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.max(0.0)


def prove_connections(rank: int, size: int, secret: bytes, timeout: timedelta = PROOF_TIMEOUT) -> None:
    """Exchange proofs with every other rank, over the connection that all later messages between the two take.

    A process that has taken over one end cannot get the proof from the other end, which is connected to another
    process. Without special rights no process can write into a TCP connection of two others.

    Args:
        secret: A secret shared by all ranks and known to no other process.
        timeout: Time that the other end of a connection has.

    Raises:
        RankConnectionError: A rank did not prove that it has ``secret``.
    """
    others = [other for other in range(size) if other != rank]
    sent = []
    for other in others:
        with contextlib.suppress(RuntimeError):  # a broken connection gives no proof either; it is handled below
            sent.append(dist.isend(_proof(secret, rank, other), other))
    wrong = [other for other in others if not _is_proven(secret, other, rank, timeout)]
    for work in sent:
        with contextlib.suppress(RuntimeError):  # a receiver that gets no proof reports it itself
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
    """Return the proof, ``[32]`` bytes and valid for ``receiver`` only, that ``sender`` has the secret."""
    digest = hmac.digest(secret, f"{sender}>{receiver}".encode(), "sha256")
    return torch.tensor(list(digest), dtype=torch.uint8)


@functools.cache
def _codec(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _encoded(codec: TypeAdapter[Any], value: object) -> bytes:
    return json.dumps(codec.dump_python(value)).encode()  # mode "json" would lose non-finite numbers


def _decoded(codec: TypeAdapter[Any], text: bytes, kind: Any) -> Any:
    try:
        return codec.validate_python(json.loads(text))
    except (ValueError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
        raise RankConnectionError(
            f"expected {kind} from the first rank, found something else ({error!s:.200}); install the same version of "
            "ALTO for all ranks, then resume the run"
        ) from error
