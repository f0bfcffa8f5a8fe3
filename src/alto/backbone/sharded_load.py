"""Loading a base model in parts: every rank reads its own slices of the files, and none ever holds the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from alto.backbone.sharding import find_roots, shard

__all__ = ["load_sharded"]

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_sharded(
    path: str,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """The model of ``config`` with this rank's part of the safetensors weights at ``path``, and what was amiss.

    All ranks call this together. The files must name weights as the model does.

    Returns:
        The model; and ``missing_keys`` and ``mismatched_keys`` as transformers reports them.

    Raises:
        OSError: There are no safetensors files.
    """
    with _parameters_on_meta():
        network: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    network.eval()
    shard(network, mesh)
    _give_memory(network, device)
    with _Files(path) as files:
        report = _fill(network, files, mesh)
    if not any(report.values()):
        find_roots(network)
    return network, report


class _Files:
    """The weights of a model on disk, by name."""

    def __init__(self, path: str) -> None:
        self._open = ExitStack()
        self._file_of: dict[str, Any] = {}
        for file in _weight_files(path):
            opened = self._open.enter_context(safe_open(file, framework="pt", device="cpu"))
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    def find(self, name: str, prefix: str) -> str | None:
        """Under which name the files have a parameter: its own, or without the prefix of the model's body."""
        return next((key for key in (name, name.removeprefix(f"{prefix}.")) if key in self._file_of), None)

    def part(self, key: str) -> Any:
        """What slices of the weight can be taken from."""
        return self._file_of[key].get_slice(key)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def _weight_files(path: str) -> list[str]:
    index = cached_file(path, _INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        files, _ = get_checkpoint_shard_files(path, index)
        return [str(file) for file in files]
    return [str(cached_file(path, _WEIGHTS))]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are built inside get parameters without memory; their buffers are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.data.to("meta"), requires_grad=False)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _give_memory(network: nn.Module, device: torch.device) -> None:
    """Memory for this rank's parts of the parameters; buffers keep their numbers."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.to_empty(device=device)
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])


@torch.no_grad()
def _fill(network: PreTrainedModel, files: _Files, mesh: DeviceMesh) -> Mapping[str, Any]:
    missing: list[str] = []
    mismatched: list[tuple[str, Any, Any]] = []
    for name, parameter in network.named_parameters():
        key = files.find(name, network.base_model_prefix)
        if key is None:
            missing.append(name)
            continue
        part = files.part(key)
        if list(part.get_shape()) != list(parameter.shape):
            mismatched.append((name, part.get_shape(), parameter.shape))
            continue
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(_rows_of_rank(part, parameter.shape[0], mesh))
        else:
            parameter.copy_(part[:])
    return {"missing_keys": missing, "mismatched_keys": mismatched}


def _rows_of_rank(part: Any, num_rows: int, mesh: DeviceMesh) -> Tensor:
    """This rank's rows, as FSDP deals them: as many to each, the last ranks may have fewer."""
    per_rank = -(-num_rows // mesh.size())
    first = min(mesh.get_local_rank() * per_rank, num_rows)
    rows: Tensor = part[first : min(first + per_rank, num_rows)]
    return rows
