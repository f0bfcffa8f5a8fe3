"""Linear layers of the base model with weights in 4 or 8 bits, packed by bitsandbytes."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert

from alto.backbone.reading import auto_class
from alto.errors import ModelError, UnsupportedError
from alto.spec import LOAD_IN_4BIT, QUANTISATION_KEYS, BaseModelSpec, Quantisation, quantisation_keys, quantisation_of
from alto.version import install_command

_PACKAGES = ("bitsandbytes", "accelerate")  # transformers loads bitsandbytes through accelerate


class QuantisedLinear(nn.Linear):
    """A frozen linear layer with a packed weight, dequantised for every product.

    The weight is dequantised in the forward pass and again in the backward pass, and freed after each.
    Activations are not rounded. bitsandbytes' own 8-bit product rounds them on some devices. It also treats a whole
    column differently if one token in it is large, so tokens of one job would change those of another.

    ``packed`` is the weight in bitsandbytes' format: bytes of two numbers each, or ``[N, K]`` int8. The quantisation
    state is small and never sharded, even if ``packed`` is.

    Args:
        layer: A ``Linear4bit`` or ``Linear8bitLt`` on its final device; or on the meta device, if :meth:`pack` makes
            its weight later.
    """

    packed: nn.Parameter
    scale_N1: Tensor

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        from bitsandbytes.nn.modules import Linear4bit

        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias if layer.bias is None else nn.Parameter(layer.bias.to(dtype), requires_grad=False)
        self.dtype = dtype
        self.quant_state: Any = None
        self._is_4bit = isinstance(layer, Linear4bit)
        if layer.weight.is_meta:
            kind: Any = type(layer.weight)
            self._packing = kind, dict(vars(layer.weight))  # bitsandbytes' settings for packing
            num_bytes = -(-layer.weight.numel() // 2)
            shape = (num_bytes, 1) if self._is_4bit else layer.weight.shape
            packed = torch.empty(shape, dtype=torch.uint8 if self._is_4bit else torch.int8, device="meta")
        else:
            packed = layer.weight.data
            self._keep_state(layer.weight)
        self.packed = nn.Parameter(packed, requires_grad=False)

    def pack(self, weight_NK: Tensor, device: torch.device) -> Tensor:
        """Pack a weight, given on the CPU in the dtype of the base model; return the whole packed weight on ``device``.

        The quantisation state is kept; the caller copies this rank's part of the result into ``packed``.
        """
        kind, settings = self._packing
        made = kind(weight_NK, requires_grad=False, **settings).to(device)
        self._keep_state(made)
        packed: Tensor = made.data
        return packed

    def _keep_state(self, packed: Any) -> None:
        if self._is_4bit:
            self.quant_state = packed.quant_state
        else:
            self.register_buffer("scale_N1", packed.SCB[:, None] * (1.0 / 127.0), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter in plain layers
        """The weight ``[N, K]`` in the dtype of the base model, dequantised at each access."""
        if not self._is_4bit:
            return self.packed.to(self.dtype).mul_(self.scale_N1)
        from bitsandbytes.functional import dequantize_4bit

        weight_NK: Tensor = dequantize_4bit(self.packed, self.quant_state)
        return weight_NK.to(self.dtype)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # bitsandbytes' state is not a tensor, and breaks graphs
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self)
        return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy @ ctx.layer.weight, None


def bitsandbytes_config(spec: BaseModelSpec, config: PreTrainedConfig) -> BitsAndBytesConfig | None:
    """Return how to quantise the linear layers of a base model while it is read; None if quantisation is not requested,
    or if they are quantised on disk.

    Args:
        config: The model's own configuration, which describes its quantisation on disk.

    Raises:
        ModelError: The model is quantised on disk in another way than requested.
        UnsupportedError: A package is missing, or the model is quantised on disk by other means than bitsandbytes.
    """
    wanted, on_disk = spec.quantisation, _quantisation_on_disk(spec.id, config)
    if wanted == on_disk == "none":
        return None
    key = QUANTISATION_KEYS.get(wanted)
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        what = f"{key}: expected" if key else f"model: {spec.id!r} is quantised by bitsandbytes, expected"
        raise UnsupportedError(
            f"{what} the packages {' and '.join(_PACKAGES)}, found no {' and no '.join(missing)}; install what is "
            f"missing with: {install_command('bnb')}; or use an unquantised base"
        )
    if on_disk == "none":
        return BitsAndBytesConfig(
            **quantisation_keys(wanted), bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    if wanted not in ("none", on_disk):
        raise ModelError(
            f"model: expected an unquantised model to load in {_bits(wanted)} bits, found that {spec.id!r} is stored "
            f"on disk in {_bits(on_disk)} bits; remove {key!r}, or use the unquantised model"
        )
    return None


def unpack_on_use(network: PreTrainedModel) -> None:
    """Replace the layers of bitsandbytes in ``network`` by :class:`QuantisedLinear`, without copying weights."""
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    packed = [
        (name, module) for name, module in network.named_modules() if isinstance(module, Linear4bit | Linear8bitLt)
    ]
    for name, module in packed:
        network.set_submodule(name, QuantisedLinear(module, network.dtype))


def plan_packing(network: PreTrainedModel, quantisation: BitsAndBytesConfig) -> None:
    """Replace the layers that bitsandbytes would quantise by :class:`QuantisedLinear`, whose weights are packed later.
    All layers of ``network`` are on the meta device."""
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    kept = get_keys_to_not_convert(network)
    replace_with_bnb_linear(network, modules_to_not_convert=kept, quantization_config=quantisation)
    unpack_on_use(network)


def _quantisation_on_disk(model: str, config: PreTrainedConfig) -> Quantisation:
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        return "none"
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    found = quantisation_of(settings)
    method = settings.get("quant_method") or "bitsandbytes"
    if method != "bitsandbytes" or found == "none":
        raise UnsupportedError(
            f"model: expected a base model that is unquantised or quantised by bitsandbytes in 4 or 8 bits, found that "
            f"{model!r} is quantised by {method}; use the unquantised model, with '{LOAD_IN_4BIT}' "
            "to make it small"
        )
    return found


def _bits(quantisation: Quantisation) -> str:
    return quantisation.removesuffix("bit")


def dequantised(network: PreTrainedModel, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a model of the same class with plain linear layers, in the dtype of ``network``; its logits are equal, and
    it can be saved. If nothing is quantised, return ``network`` itself.

    Args:
        network: A result of :func:`alto.backbone.load_network`.
    """
    layers = {name: module for name, module in network.named_modules() if isinstance(module, QuantisedLinear)}
    if not layers:
        return network
    config = copy.deepcopy(network.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: Any = auto_class(config).from_config(config, dtype=network.dtype, trust_remote_code=trust_remote_code)
    packed = {f"{name}.packed" for name in layers}
    weights: dict[str, Tensor] = {name: value for name, value in network.state_dict().items() if name not in packed}
    with torch.no_grad():
        weights |= {f"{name}.weight": layer.weight for name, layer in layers.items()}
    plain.load_state_dict(weights)
    plain.generation_config = network.generation_config
    model: PreTrainedModel = plain.to(network.device).eval().requires_grad_(False)
    return model
