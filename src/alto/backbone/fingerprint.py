"""The fingerprint of a base model: digests that a run uses to check that it resumes with the model it started with.

Two folders with the same weights, configuration and code have the same fingerprint. It does not depend on the folder's
path, on how the weights are split into files, or on modification times.
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

WHOLE_BYTES = 64 * 1024
"""Tensors up to this size are digested completely. Larger tensors are digested in ``NUM_WINDOWS`` windows of
``WINDOW_BYTES``, the first at the beginning, the last at the end."""

WINDOW_BYTES = 4096
NUM_WINDOWS = 4

_NO_PART_OF_IT = ("_name_or_path", "transformers_version", "_commit_hash")
"""Keys of ``config.json`` that change when a model is saved again."""


_TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "additional_chat_templates/*.jinja")

_TOP_BYTES = 8
"""Bytes at the start of a safetensors file that hold the length of its header."""

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
"""Names of dtypes in safetensors files."""


def base_fingerprint(spec: BaseModelSpec) -> dict[str, Any]:
    """Return the fingerprint of a base model as plain values that JSON preserves.

    ``weights`` is a digest of every tensor's name, dtype, shape and sampled numbers, ``config`` a digest of
    ``config.json``, and ``code`` a digest of the Python files next to it if they are executed. ``commit`` is the hub's
    commit. ``files`` contains the size and the modification time (nanoseconds) of each weight file, for information
    only. For a model given as an object, this is the result of :func:`object_fingerprint` before training.

    Raises:
        ModelNotFoundError: A file cannot be read.
        ModelError: The format of a file differs from its name.
    """
    if spec.objects is not None and not spec.is_loadable:
        assert spec.objects.fingerprint is not None, "alto.engine finds it"
        return dict(spec.objects.fingerprint)
    path = resolve_model(spec.id)
    with reading(spec.id, path, "the files that it was loaded from", "copy or download the model again"):
        folder = model_folder(spec.id)
        code = _code(folder) if spec.trust_remote_code and _brings_code(folder) else []
        return _fingerprint(folder, code, use_safetensors=spec.use_safetensors)


def tokenizer_fingerprint(spec: BaseModelSpec) -> str | None:
    """Return a digest of all text files in the folder of the weights; the tokenizer and chat templates are read from
    these. None if there are no text files.

    Raises:
        ModelNotFoundError: A file cannot be read.
    """
    path = resolve_model(spec.id)
    with reading(spec.id, path, "the files of its tokenizer", "copy or download the model again"):
        folder = model_folder(spec.id)
        files = [file for pattern in _TOKENIZER_FILES for file in sorted(folder.glob(pattern))]
        return _digest([file.name.encode() + b"\0" + file.read_bytes() for file in files])


def _fingerprint(folder: Path, code: list[bytes], *, use_safetensors: bool) -> dict[str, Any]:
    files = weight_files(folder, use_safetensors=use_safetensors)
    return {
        "weights": _digest(sorted(piece for file in files for piece in _tensors(file))),
        "config": _digest([_config_bytes(json.loads((folder / "config.json").read_text("utf-8")))]),
        "code": _digest(code),
        "commit": folder.name if folder.parent.name == "snapshots" else None,
        "files": {file.name: [(stat := file.stat()).st_size, stat.st_mtime_ns] for file in files},
    }


def object_fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Return the fingerprint of a model in memory, without adapters.

    It is identical to the fingerprint of the folder that ``save_pretrained`` writes, if ``save_pretrained`` keeps the
    names of the weights.
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
    """Return the weights of a model by name; tied weights occur once, under the first of their names."""
    found: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        found.setdefault(place, (name, tensor))
    return dict(found.values())


def _in_memory(name: str, tensor: Tensor) -> bytes:
    """Return the digest of a tensor in memory; :func:`_safetensors` computes the same digest for a tensor in a file."""
    digest = hashlib.sha256(f"{name} {_FILE_DTYPES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}".encode())
    numbers = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for offset, size in _windows(tensor.nbytes):
        digest.update(numbers[offset : offset + size].cpu().numpy().tobytes())
    return digest.digest()


def base_differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two fingerprints; empty if the models are identical."""
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
        differences.append("a different config.json")
    # For the same commit, the hub's cache may contain more files than before, but no changed file.
    is_one_commit = expected["commit"] is not None and expected["commit"] == found["commit"]
    if expected["code"] != found["code"] and not is_one_commit:
        differences.append("different Python code next to its config.json")
    if differences and expected["commit"] != found["commit"]:
        differences.append(f"revision {found['commit']} instead of {expected['commit']}")
    return differences


def model_folder(model: str, *, local_files_only: bool = False) -> Path:
    """Return the folder of the model's files; for a hub id, the folder of its revision in the cache.

    Raises:
        OSError, ValueError: There is no such model.
    """
    path = resolve_model(model)
    if Path(path).is_dir():
        return Path(path)
    config = cached_file(path, "config.json", local_files_only=local_files_only)
    assert config is not None
    return Path(config).parent


def weight_files(folder: Path, *, use_safetensors: bool = True) -> list[Path]:
    """Return the weight files that transformers would read."""
    single, index = (
        (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) if use_safetensors else (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    )
    if (folder / single).is_file():
        return [folder / single]
    if (folder / index).is_file():
        weight_map = json.loads((folder / index).read_text("utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    return sorted(folder.glob("*.safetensors" if use_safetensors else "*.bin"))


def _config_bytes(config: Mapping[str, Any]) -> bytes:
    kept = {key: value for key, value in config.items() if key not in _NO_PART_OF_IT}
    return json.dumps(kept, sort_keys=True).encode()


def _brings_code(folder: Path) -> bool:
    """Return whether the model or its tokenizer uses classes that are defined in Python files next to it."""
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file() and "auto_map" in json.loads(path.read_text("utf-8")):
            return True
    return False


def _code(folder: Path) -> list[bytes]:
    return [path.name.encode() + b"\0" + path.read_bytes() for path in sorted(folder.glob("*.py"))]


def _tensors(file: Path) -> Iterator[bytes]:
    """Yield bytes that identify each tensor of a weight file."""
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            yield from _safetensors(opened)
        elif zipfile.is_zipfile(opened):
            yield from _archive(opened)
        else:
            yield hashlib.file_digest(opened, "sha256").digest()


def _archive(file: BinaryIO) -> Iterator[bytes]:
    """Yield name, size and checksum of every entry; the directory of a zip archive holds them."""
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
        raise ValueError(f"{file.name} is a pointer of Git LFS, not the file itself: git lfs pull downloads the file")
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
    """Return the offset and the size in bytes of every part of a tensor that is digested."""
    if num_bytes <= WHOLE_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - WINDOW_BYTES
    return [(math.floor(last * part / (NUM_WINDOWS - 1)), WINDOW_BYTES) for part in range(NUM_WINDOWS)]


def _digest(pieces: list[bytes]) -> str | None:
    """Return a digest of all pieces in their order; None if there are no pieces."""
    if not pieces:
        return None
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(hashlib.sha256(piece).digest())
    return digest.hexdigest()[:32]


def _bytes(size: int | None) -> str:
    return "no such file" if size is None else f"{size:,} bytes"
