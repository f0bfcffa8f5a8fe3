"""Loads a base model in shards: every rank reads its own slices of the files, and no rank holds the whole model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from alto.backbone.quantised import QuantisedLinear, plan_packing
from alto.backbone.reading import auto_class
from alto.backbone.sharding import find_roots, shard

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_sharded(
    path: str,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    mesh: DeviceMesh,
    quantisation: BitsAndBytesConfig | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Load the model of ``config`` with this rank's part of the safetensors weights at ``path``.

    All ranks call this together. The files must use the model's names of weights.

    Args:
        dtype: Precision of the model; None for that of the files.
        quantisation: How to quantise the linear layers, one weight at a time.

    Returns:
        The model; and ``missing_keys`` and ``mismatched_keys`` in transformers' format.

    Raises:
        OSError: There are no safetensors files.
        UnsupportedModelError: The model is not built of layers.
    """
    with _Files(path) as files:
        with parameters_on_meta():
            network: PreTrainedModel = auto_class(config).from_config(
                config, dtype=dtype or files.dtype, trust_remote_code=trust_remote_code
            )
        network.eval()
        if quantisation is not None:
            plan_packing(network, quantisation)
        shard(network, mesh)
        _give_memory(network, device)
        report = _fill(network, files, mesh, device)
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

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first weight."""
        key, file = next(iter(self._file_of.items()))
        first: Tensor = file.get_slice(key)[:0]
        return first.dtype

    def find(self, names: Iterable[str], prefix: str) -> str | None:
        """Return the name of a weight in the files: its own name, or the name without the prefix of the model's
        body."""
        keys = (key for name in names for key in (name, name.removeprefix(f"{prefix}.")))
        return next((key for key in keys if key in self._file_of), None)

    def part(self, key: str) -> Any:
        """Return a handle of the weight, from which slices can be read."""
        return self._file_of[key].get_slice(key)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def _weight_files(path: str) -> list[str]:
    single = cached_file(path, _WEIGHTS, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        return [str(single)]
    index = cached_file(path, _INDEX, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise OSError(f"there is no file {_WEIGHTS}")
    files, _ = get_checkpoint_shard_files(path, index)
    return [str(file) for file in files]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules inside the context with parameters that take no memory; their buffers are real."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.data.to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _give_memory(network: nn.Module, device: torch.device) -> None:
    """Allocate memory for this rank's parts of the parameters; buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.to_empty(device=device)
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])


@torch.no_grad()
def _fill(network: PreTrainedModel, files: _Files, mesh: DeviceMesh, device: torch.device) -> Mapping[str, Any]:
    missing: list[str] = []
    mismatched: list[tuple[str, Any, Any]] = []
    for names, tensor, layer in _required_weights(network):
        key = files.find(names, network.base_model_prefix)
        if key is None:
            missing.append(names[0])
            continue
        part = files.part(key)
        expected = tuple(tensor.shape) if layer is None else (layer.out_features, layer.in_features)
        if tuple(part.get_shape()) != expected:
            mismatched.append((names[0], part.get_shape(), expected))
            continue
        source = part if layer is None else layer.pack(part[...].to(layer.dtype), device)
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(_rows_of_rank(source, tensor.shape[0], mesh))
        else:
            tensor.copy_(source[...])
    return {"missing_keys": missing, "mismatched_keys": mismatched}


def _required_weights(network: PreTrainedModel) -> Iterator[tuple[list[str], Tensor, QuantisedLinear | None]]:
    """Yield the required weights: the names of each, its destination, and the layer that packs it before it is copied,
    or None."""
    stored = network.state_dict(keep_vars=True)
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in stored.items():
        names[id(tensor)].append(name)
    layers = {id(module.packed): module for module in network.modules() if isinstance(module, QuantisedLinear)}
    for key, own in names.items():
        layer = layers.get(key)
        shown = own if layer is None else [name.removesuffix("packed") + "weight" for name in own]
        yield shown, stored[own[0]], layer


def _rows_of_rank(source: Any, num_rows: int, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows, split as FSDP splits them: equal numbers per rank, fewer for the last ranks."""
    per_rank = -(-num_rows // mesh.size())
    first = min(mesh.get_local_rank() * per_rank, num_rows)
    rows: Tensor = source[first : min(first + per_rank, num_rows)]
    return rows
