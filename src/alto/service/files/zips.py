"""Zip files of artefact folders, made while they are sent."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping

from alto.service.files.artefacts import Artefacts, chunks_of

__all__ = ["zip_chunks"]


class _Sink(io.RawIOBase):
    """A stream that holds the bytes written since it was last emptied; it cannot seek."""

    def __init__(self) -> None:
        super().__init__()
        self._held = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        found = bytes(data)  # type: ignore[call-overload]
        self._held += found
        return len(found)

    def empty(self) -> bytes:
        found = bytes(self._held)
        self._held.clear()
        return found


def zip_chunks(artefacts: Artefacts, folder: str, names: Iterable[str], texts: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield a zip file of contents below ``folder`` in pieces, without compression, because weights do not shrink.

    Args:
        names: Names of the contents, relative to ``folder``.
        texts: Contents by name that replace the stored ones.

    Raises:
        FileNotFoundError: A content is missing.
    """
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            # Sizes are not known in advance: without 64-bit sizes a file could have no more than 2 GiB.
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as entry:
                kept = io.BytesIO(texts[name]) if name in texts else artefacts.open(f"{folder}/{name}")
                for chunk in chunks_of(kept):
                    entry.write(chunk)
                    yield sink.empty()
    yield sink.empty()
