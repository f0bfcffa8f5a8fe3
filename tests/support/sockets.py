"""The sockets on which processes wait for connections, as Linux lists them in ``/proc``."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Listening", "descendants", "listening_sockets"]

_TCP_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Listening:
    """A TCP socket that accepts connections, or a UDP socket that is bound."""

    kind: str
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        address = ipaddress.ip_address(self.host)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback

    def connect(self) -> socket.socket:
        kind = socket.SOCK_STREAM if self.kind.startswith("tcp") else socket.SOCK_DGRAM
        family = socket.AF_INET6 if self.kind.endswith("6") else socket.AF_INET
        connection = socket.socket(family, kind)
        connection.settimeout(1.0)
        try:
            connection.connect((self.host, self.port))
        except OSError:
            connection.close()
            raise
        return connection


def descendants(root: int) -> set[int]:
    """Return ``root`` and every living process that it, or one of its descendants, has started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, last = {root}, set[int]()
    while found != last:
        last, found = found, found | {pid for pid, parent in parents.items() if parent in found}
    return found


def listening_sockets(pids: set[int]) -> set[Listening]:
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    link = os.readlink(entry)
                    if link.startswith("socket:["):
                        inodes.add(link.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", kind).read_text(encoding="utf-8").splitlines()[1:]:
                _, address, _, state, *_, inode = line.split()[:10]
                if inode in inodes and (kind.startswith("udp") or state == _TCP_LISTEN):
                    host, _, port = address.partition(":")
                    found.add(Listening(kind, _host(host), int(port, 16)))
    return found


def _host(text: str) -> str:
    """Return an address from the form of ``/proc``: words of four bytes, each in the byte order of this machine."""
    raw = bytes.fromhex(text)
    words = [raw[start : start + 4][::-1] for start in range(0, len(raw), 4)]
    return str(ipaddress.ip_address(b"".join(words)))
