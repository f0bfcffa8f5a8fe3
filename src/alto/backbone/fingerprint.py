"""The fingerprint of a base model: a few digests by which a run recognises the model that it began with.

Two folders with the same weights, configuration and code are one model, for any path, split of the weights over files,
and time of writing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file

from alto.backbone.load import resolve_model
from alto.backbone.reading import reading
from alto.spec import BaseModelSpec

__all__ = [
    "base_differences",
    "base_fingerprint",
    "named_tensors",
    "object_fingerprint",
    "tokenizer_fingerprint",
    "weight_files",
]

WHOLE_BYTES = 64 * 1024
"""Tensors up to this size are digested whole; larger ones in `NUM_WINDOWS` windows of `WINDOW_BYTES`, the first at
their beginning, the last at their end."""

WINDOW_BYTES = 4096
NUM_WINDOWS = 4

_NO_PART_OF_IT = ("_name_or_path", "transformers_version", "_commit_hash")
"""Keys of ``config.json`` that change when a model is saved again."""


_TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "additional_chat_templates/*.jinja")

_TOP_BYTES = 8
"""The size of the header of a safetensors file, in front of it."""

_LFS_POINTER = b"version https://git-lfs"

_FILE_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types of numbers as safetensors names them."""


def base_fingerprint(spec: BaseModelSpec) -> dict[str, Any]:
    """The fingerprint of a base model that can be loaded, in plain values: JSON keeps it as it is.

    ``weights`` is a digest of every tensor's name, type, shape and sampled numbers, ``config`` of ``config.json``,
    ``code`` of the Python files beside it where they are what is run; ``commit`` is the hub's. ``files`` has the size
    and the modification time (nanoseconds) of each file of weights, for information only. Of a model that is an object
    it is what :func:`object_fingerprint` gave before anything was trained on it.

    Raises:
        ModelNotFoundError: A file cannot be read.
        ModelError: A file has another format than its name says.
    """
    if spec.objects is not None and not spec.is_loadable:
        assert spec.objects.fingerprint is not None, "alto.engine finds it"
        return dict(spec.objects.fingerprint)
    path = resolve_model(spec.id)
    with reading(spec.id, path, "the files that it was loaded from", "copy or download the model again"):
        folder = _folder(spec.id)
        code = _code(folder) if spec.trust_remote_code and _brings_code(folder) else []
        return _fingerprint(folder, code, use_safetensors=spec.use_safetensors)


def tokenizer_fingerprint(spec: BaseModelSpec) -> str | None:
    """A digest of the files that a base model's tokenizer and chat templates may be read from: all text beside the
    weights. None where there are none.

    Raises:
        ModelNotFoundError: A file cannot be read.
    """
    path = resolve_model(spec.id)
    with reading(spec.id, path, "the files of its tokenizer", "copy or download the model again"):
        folder = _folder(spec.id)
        files = [file for pattern in _TOKENIZER_FILES for file in sorted(folder.glob(pattern))]
        return _digest([file.name.encode() + b"\0" + file.read_bytes() for file in files])


def _fingerprint(folder: Path, code: list[bytes], *, use_safetensors: bool) -> dict[str, Any]:
    files = weight_files(folder, use_safetensors=use_safetensors)
    return {
        "weights": _digest(sorted(piece for file in files for piece in _tensors(file))),
        "config": _digest([_config(folder)]),
        "code": _digest(code),
        "commit": _commit(folder),
        "files": {file.name: [(stat := file.stat()).st_size, stat.st_mtime_ns] for file in files},
    }


def object_fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """The fingerprint of a model in memory: the one that it has when it is saved with ``save_pretrained``, where that
    keeps the names of its weights.

    Args:
        model: Without adapters.
    """
    config = json.loads(model.config.to_json_string())
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    return {
        "weights": _digest(sorted(_in_memory(name, tensor) for name, tensor in named_tensors(model).items())),
        "config": _digest([_config_bytes(config)]),
        "code": None,
        "commit": None,
        "files": {},
    }


def named_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of a model by their names, each once: tied ones under the first of their names."""
    found: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        found.setdefault(place, (name, tensor))
    return dict(found.values())


def _in_memory(name: str, tensor: Tensor) -> bytes:
    """The digest of a tensor, as :func:`_safetensors` gives it for one in a file."""
    digest = hashlib.sha256(f"{name} {_FILE_DTYPES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}".encode())
    numbers = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for offset, size in _windows(tensor.nbytes):
        digest.update(numbers[offset : offset + size].cpu().numpy().tobytes())
    return digest.digest()


def base_differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The differences of the second model from the first, as text; empty where they are equal."""
    differences = []
    if expected["weights"] != found["weights"]:
        sizes = {name: size for name, (size, _) in expected["files"].items()}
        changed = [
            f"{name} ({_bytes(sizes.get(name))}, expected; {_bytes(size)}, found)"
            for name, (size, _) in found["files"].items()
            if sizes.get(name) != size
        ]
        differences.append("other weights" + (f": {', '.join(changed[:3])}" if changed else ""))
    if expected["config"] != found["config"]:
        differences.append("another config.json")
    # Of one commit the hub's cache may hold more files than before, and none that is another one.
    is_one_commit = expected["commit"] is not None and expected["commit"] == found["commit"]
    if expected["code"] != found["code"] and not is_one_commit:
        differences.append("another Python code beside its config.json")
    if differences and expected["commit"] != found["commit"]:
        differences.append(f"revision {found['commit']} instead of {expected['commit']}")
    return differences


def _folder(model: str) -> Path:
    """The folder of its files: for a hub id, that of its revision in the cache."""
    path = resolve_model(model)
    if Path(path).is_dir():
        return Path(path)
    config = cached_file(path, "config.json")
    assert config is not None
    return Path(config).parent


def _commit(folder: Path) -> str | None:
    return folder.name if folder.parent.name == "snapshots" else None


def weight_files(folder: Path, *, use_safetensors: bool = True) -> list[Path]:
    """The files that are read, as transformers chooses them."""
    single, index = (
        (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) if use_safetensors else (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    )
    if (folder / single).is_file():
        return [folder / single]
    if (folder / index).is_file():
        weight_map = json.loads((folder / index).read_text("utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    return sorted(folder.glob("*.safetensors" if use_safetensors else "*.bin"))


def _config(folder: Path) -> bytes:
    return _config_bytes(json.loads((folder / "config.json").read_text("utf-8")))


def _config_bytes(config: Mapping[str, Any]) -> bytes:
    kept = {key: value for key, value in config.items() if key not in _NO_PART_OF_IT}
    return json.dumps(kept, sort_keys=True).encode()


def _brings_code(folder: Path) -> bool:
    """Whether the model or its tokenizer names classes of its own, in Python files beside it."""
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file() and "auto_map" in json.loads(path.read_text("utf-8")):
            return True
    return False


def _code(folder: Path) -> list[bytes]:
    return [path.name.encode() + b"\0" + path.read_bytes() for path in sorted(folder.glob("*.py"))]


def _tensors(file: Path) -> Iterator[bytes]:
    """A digest of every tensor, which identifies it."""
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            yield from _safetensors(opened)
        elif zipfile.is_zipfile(opened):
            yield from _archive(opened)
        else:
            yield hashlib.file_digest(opened, "sha256").digest()


def _archive(file: BinaryIO) -> Iterator[bytes]:
    """An archive holds a checksum of every tensor in its directory."""
    try:
        entries = zipfile.ZipFile(file).infolist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{file.name}: {error}") from error
    for entry in entries:
        yield f"{entry.filename.partition('/')[2]} {entry.file_size} {entry.CRC}".encode()


def _safetensors(file: BinaryIO) -> Iterator[bytes]:
    num_bytes = os.fstat(file.fileno()).st_size
    top = file.read(_TOP_BYTES)
    if _LFS_POINTER.startswith(top) and file.read(len(_LFS_POINTER) - len(top)) == _LFS_POINTER[len(top) :]:
        raise ValueError(f"{file.name} is a pointer of Git LFS, not the file itself: git lfs pull downloads that")
    length = int.from_bytes(top, "little")
    if len(top) < _TOP_BYTES or length > num_bytes - _TOP_BYTES:
        raise ValueError(f"{file.name} ends after {num_bytes:,} bytes, within its header")
    header = json.loads(file.read(length))
    first = _TOP_BYTES + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= num_bytes - first:
            raise ValueError(f"{file.name} ends after {num_bytes:,} bytes, within {name}")
        digest = hashlib.sha256(f"{name} {entry['dtype']} {entry['shape']}".encode())
        for offset, size in _windows(end - begin):
            file.seek(first + begin + offset)
            digest.update(file.read(size))
        yield digest.digest()


def _windows(num_bytes: int) -> list[tuple[int, int]]:
    """Where a tensor is read, and how many bytes there."""
    if num_bytes <= WHOLE_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - WINDOW_BYTES
    return [(math.floor(last * part / (NUM_WINDOWS - 1)), WINDOW_BYTES) for part in range(NUM_WINDOWS)]


def _digest(pieces: list[bytes]) -> str | None:
    """Of all pieces in their order; None where there are none."""
    if not pieces:
        return None
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(hashlib.sha256(piece).digest())
    return digest.hexdigest()[:32]


def _bytes(size: int | None) -> str:
    return "no such file" if size is None else f"{size:,} bytes"
