"""Digests of what the tokens of rows depend on: files, tokenizers and code."""

from __future__ import annotations

import hashlib
import importlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from alto.base import replace_file
from alto.data.dataset import writing_cache
from alto.errors import DataError, UnsupportedError
from alto.version import version_of

_PACKAGES = ("alto-lora", "transformers", "tokenizers", "sentencepiece", "tiktoken", "jinja2", "datasets", "pyarrow")

_SETTLED_S = 2.0
"""If a file has not changed for this many seconds, its times reveal every later change. Some file systems store times
in steps of this length."""

_PROBE = "A tokenizer's settings show in <|im_start|>user\n  what it makes of a text. </s><eos>"


def file_digest(path: Path, folder: Path) -> str:
    """Return the SHA-256 of the content of ``path``, in hexadecimal digits.

    Args:
        folder: Folder for digests of files that have not changed since, so that they are not read again.

    Raises:
        DataError: The file changes while it is read, or cannot be read.
        RunWriteError: ``folder`` cannot be written.
    """
    began = time.time()
    state = _state(path)
    known = folder / f"{digest_of_json([str(path.resolve()), state])}.sha256"
    content = _known_digest(known)
    if content is None:
        content = _content(path)
        if _state(path) != state:
            raise changed(path)
        if began - max(state[-2:]) / 1e9 > _SETTLED_S:
            with writing_cache(folder):
                folder.mkdir(parents=True, exist_ok=True)
                replace_file(known, content)
    return content


def changed(path: Path | str) -> DataError:
    """Return the error for a file that has changed between two reads."""
    return DataError(
        f"expected rows that do not change while they are tokenised, found that {path} has changed; start again when "
        "it is complete"
    )


def _state(path: Path) -> tuple[int, ...]:
    """Return device, inode, size, and the times of the last changes in nanoseconds."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"expected a readable file, found {path} ({error.strerror}); check it") from error
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _known_digest(file: Path) -> str | None:
    try:
        known = file.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return known if len(known) == hashlib.sha256().digest_size * 2 else None


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"expected a readable file, found {path} ({error.strerror}); check it") from error


def digest_of_json(value: Any) -> str:
    """Return a name for ``value``, made of JSON values: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def code_digest() -> str:
    """Return a digest of the code that reads and tokenises: this package, and the versions of the packages it uses."""
    digest = hashlib.sha256(repr([(name, version_of(name)) for name in _PACKAGES]).encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of ``tokenizer`` with its chat template.

    It covers the files that the tokenizer saves, its own code if that is not part of transformers, and its tokens of a
    test text, which reveal settings that it does not save.

    Raises:
        UnsupportedError: The tokenizer cannot be saved.
    """
    digest = hashlib.sha256(f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}".encode())
    module = importlib.import_module(type(tokenizer).__module__)
    if not module.__name__.startswith("transformers.") and module.__file__ is not None:
        digest.update(Path(module.__file__).read_bytes())
    with tempfile.TemporaryDirectory(prefix="alto-tokenizer-") as folder:
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:  # a tokenizer's own code may raise anything
            raise UnsupportedError(
                "token_cache: expected a tokenizer that can be saved (else its cached tokens cannot be found again), "
                f"found {type(tokenizer).__name__} ({error!s:.200}); set token_cache: memory"
            ) from error
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file():
                digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    for special in (False, True):
        digest.update(repr(list(tokenizer(_PROBE, add_special_tokens=special, verbose=False)["input_ids"])).encode())
    return digest.hexdigest()
