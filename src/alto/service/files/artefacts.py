"""Storage of the service's files and adapters, on a disk or in any store that fsspec knows."""

from __future__ import annotations

import contextlib
import io
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from alto.errors import ServiceError
from alto.service.ids import new_id

_CHUNK_BYTES = 2**20


def chunks_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file in pieces, and close the file at the end."""
    with file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


class Artefacts:
    """Stored contents by name. A content is written completely or not at all, and never changed in place.

    Args:
        url: A folder, or a URL of fsspec such as ``s3://bucket/alto``.

    Raises:
        ServiceError: fsspec does not know this kind of store, or a package for it is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            # Another server of the service may write at any time, so listings of a remote store are not kept.
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise ServiceError(
                f"artefacts: expected a folder or an fsspec URL, found an address that cannot be opened ({error}); "
                "correct it, or install the package that the error names"
            ) from error

    def write(self, name: str, source: BinaryIO) -> None:
        """Store the content of ``source`` under ``name``.

        Raises:
            OSError: The content cannot be written.
        """
        target, unfinished = self._path(name), self._path(f"{name}.{new_id('new')}")
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        try:
            with self._fs.open(unfinished, "wb") as file:
                shutil.copyfileobj(source, file, _CHUNK_BYTES)
            self._fs.mv(unfinished, target)
        except BaseException:
            if self._fs.exists(unfinished):
                self._fs.rm(unfinished)
            raise

    def write_folder(self, name: str, folder: Path) -> None:
        """Store the files of ``folder`` under ``name``; existing files with the same names are replaced."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    self.write(f"{name}/{path.relative_to(folder).as_posix()}", file)

    def open(self, name: str) -> BinaryIO:
        """Open the content ``name`` for reading.

        Raises:
            FileNotFoundError: There is no such content.
        """
        file: BinaryIO = self._fs.open(self._path(name), "rb")
        return file

    def local_folder(self, name: str) -> Path | None:
        """Return the local path of the contents below ``name``; None if they are in a remote store."""
        return Path(self._path(name)) if isinstance(self._fs, LocalFileSystem) else None

    def names(self, folder: str) -> list[str]:
        """Return the names of all contents below ``folder``, relative to it and sorted."""
        root = self._path(folder)
        if not self._fs.exists(root):
            return []
        return sorted(path[len(root) :].lstrip("/") for path in self._fs.find(root))

    def fetch(self, name: str, to: Path) -> None:
        """Copy a content to a file, completely or not at all."""
        to.parent.mkdir(parents=True, exist_ok=True)
        unfinished = to.with_name(f".{to.name}.{new_id('new')}")
        try:
            with self.open(name) as source, unfinished.open("wb") as file:
                shutil.copyfileobj(source, file, _CHUNK_BYTES)
            unfinished.replace(to)
        finally:
            unfinished.unlink(missing_ok=True)

    def fetch_folder(self, name: str, to: Path) -> None:
        """Copy the contents below ``name`` to a new folder, completely or not at all.

        Raises:
            FileNotFoundError: There are no contents below ``name``.
        """
        found = self.names(name)
        if not found:
            raise FileNotFoundError(f"nothing is stored under {name}")
        unfinished = to.with_name(f".{to.name}.{new_id('new')}")
        try:
            for each in found:
                self.fetch(f"{name}/{each}", unfinished / each)
            unfinished.rename(to)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def delete(self, name: str) -> None:
        """Delete a content or a folder of contents; no error if absent."""
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):  # not there, or removed by another request at the same time
            self._fs.rm(path, recursive=True)

    def _path(self, name: str) -> str:
        parts = name.split("/")
        assert all(part not in ("", ".", "..") for part in parts), f"invalid artefact name: {name!r}"
        return "/".join((self._root.rstrip("/"), *parts))


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
