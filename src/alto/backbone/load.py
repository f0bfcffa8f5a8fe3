"""Finds and loads the frozen base model."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError, TemplateSyntaxError
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils.chat_template_utils import _compile_jinja_template

from alto.backbone.backbone import Backbone
from alto.backbone.quantised import bitsandbytes_config, unpack_on_use
from alto.backbone.reading import auto_class, check_is_causal, has_pickle_weights, reading
from alto.backbone.sharded_load import load_sharded
from alto.errors import ModelError, ModelNotFoundError, UnsupportedError
from alto.spec import LOAD_IN_4BIT, BaseModelSpec, is_object_name

SHIPPED_MODELS = ("alto-tiny",)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_SHOWN = 3

_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
"""Names in ``torch.cpu.get_capabilities`` of the x86 and ARM instructions for products in half precision."""

_EXTENSIONS = {"bfloat16": "AVX512-BF16, AMX or ARM's BF16", "float16": "AVX512-FP16, AMX-FP16 or ARM's FP16"}

_COPY_AGAIN = "copy or download the model again"
_NAME_AS_MODEL = (
    "copy or download the model again; or, if it loads with 'num_gpus: 1', save it with the names that "
    "transformers gives its weights (save_pretrained with save_original_format=False)"
)


def resolve_model(model: str) -> str:
    """Return the argument of ``from_pretrained`` for ``model``: a shipped model's folder, a local folder, or a hub id.

    Raises:
        ModelNotFoundError: ``model`` resembles a shipped model's name, or names a model that was given as an object.
    """
    if is_object_name(model):
        raise ModelNotFoundError(
            f"model: expected a model that this process can load, found {model}, which was given to alto.Task as an "
            "object and has no name that loads it; give the object again: engine.resume(RUN, model=…, tokenizer=…), "
            "result.load_best(model=…); or save it to a folder with save_pretrained, and name the folder"
        )
    if model in SHIPPED_MODELS:
        return str(resources.files("alto") / "assets" / model)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    near = difflib.get_close_matches(model.lower(), SHIPPED_MODELS, n=1, cutoff=0.8)
    if near:  # before a request to the hub, which takes half a minute without a connection
        raise ModelNotFoundError(f"model: expected a model, found none called {model!r}; did you mean {near[0]!r}?")
    return model


def load_backbone(
    spec: BaseModelSpec,
    *,
    device: torch.device | str = "cpu",
    mesh: DeviceMesh | None = None,
    gradient_checkpointing: bool = False,
) -> Backbone:
    """Load a causal LM and its tokenizer, freeze it, and make its forward pass padding-free.

    Args:
        spec: The base model and its precision. A model given as an object is changed: see
            :func:`alto.backbone.borrowed`.
        mesh: Ranks over which the model is sharded. Each rank keeps a part, and all must run the same number of forward
            passes. None keeps the complete model on this rank.

    Raises:
        ModelNotFoundError: There is no model of that name, or a file is missing.
        ModelError: The model is not a complete causal LM with a tokenizer, comes with code that ``trust_remote_code``
            does not allow, or has no weights of the kind that ``use_safetensors`` selects.
        UnsupportedModelError: The forward pass would differ from the model's own.
        UnsupportedError: ``torch_compile`` without a compiler, quantisation without bitsandbytes, a model that is
            quantised by other means, or a CPU without instructions for the requested half precision. With ``mesh``:
            ``torch_compile``, pickle files, or a model quantised on disk.
    """
    if spec.torch_compile and mesh is not None:
        raise UnsupportedError(
            "torch_compile: expected a base model on one GPU, found one sharded over several, whose "
            "weights are gathered and freed layer by layer; remove the key, or set num_gpus to 1"
        )
    _check_half_precision(spec, torch.device(device))
    tokenizer = load_tokenizer(spec)
    return Backbone(
        load_network(spec, device=device, mesh=mesh),
        tokenizer,
        resolve_model(spec.id) if spec.is_loadable else spec.id,
        gradient_checkpointing=gradient_checkpointing,
        torch_compile=spec.torch_compile,
    )


def _check_half_precision(spec: BaseModelSpec, device: torch.device) -> None:
    """Check that a CPU has instructions for the half precision of the base model: without them, products are many times
    slower.

    Raises:
        UnsupportedError: The CPU does not have these instructions.
    """
    dtype = spec.dtype if spec.objects is None else spec.objects.dtype
    place = device.type if spec.objects is None else spec.objects.model.device.type
    instructions = _INSTRUCTIONS.get(dtype)
    if place != "cpu" or instructions is None:
        return
    found = torch.cpu.get_capabilities()
    if any(found.get(name) for name in instructions):
        return
    remedy = "set dtype: float32 (auto means that on a CPU)" if spec.objects is None else "give model.float()"
    raise UnsupportedError(
        f"dtype: expected a CPU with instructions for {dtype} ({_EXTENSIONS[dtype]}), found one without them, on which "
        f"{dtype} is tens to hundreds of times slower than float32; {remedy}, or use a GPU"
    )


def end_tokens(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a text: the tokenizer's EOS, which ends every trained row, and the model's own EOS
    tokens."""
    own = generation_config.eos_token_id if generation_config is not None else None
    named = own if isinstance(own, list) else [own]
    return frozenset(token for token in (*named, tokenizer.eos_token_id) if token is not None)


def load_tokenizer(spec: BaseModelSpec) -> Any:
    """Load the tokenizer of a base model without reading weights; raise the same errors as :func:`load_backbone`."""
    tokenizer = copy.deepcopy(spec.objects.tokenizer) if spec.objects is not None else _read_tokenizer(spec)
    if spec.chat_template is not None:
        _check_template(spec.chat_template)
        tokenizer.chat_template = spec.chat_template
    _check_offsets(spec.id, tokenizer)
    return tokenizer


def _read_tokenizer(spec: BaseModelSpec) -> Any:
    config, path = load_config(spec), resolve_model(spec.id)
    remedy = "save the tokenizer of the model into the model's folder (tokenizer.save_pretrained)"
    what = "a tokenizer (tokenizer.json, tokenizer_config.json)"
    try:
        with reading(spec.id, path, what, remedy):
            return AutoTokenizer.from_pretrained(path, config=config, trust_remote_code=spec.trust_remote_code)
    except ModelError as error:
        # Some tokenizers use other file names, so only a failed load shows that there is no tokenizer.
        if Path(path).is_dir() and not any(Path(path).glob("tokenizer*")):
            raise type(error)(f"model: expected {what} in {spec.id!r}, found no such file; {remedy}") from error
        raise


def _check_template(text: str) -> None:
    try:
        _compile_jinja_template(text)
    except TemplateError as error:
        line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ModelError(
            f"chat_template: expected a Jinja template, found a text that is not valid ({error}{line}); correct it"
        ) from None


def _check_offsets(model: str, tokenizer: Any) -> None:
    """Check that a tokenizer with a chat template reports where in the text its tokens begin: this identifies the
    tokens of replies."""
    if getattr(tokenizer, "chat_template", None) and not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"model: expected a tokenizer of {model!r} that reports where tokens begin in a text (tokenizer.json), "
            f"as its chat template needs, found {type(tokenizer).__name__}, which is written in Python and does not; "
            "save a fast tokenizer into the model's folder, or remove the chat template: turns are then encoded one "
            "by one"
        )


def loading_class(spec: BaseModelSpec) -> str:
    """Return the name of transformers' class that loads a base model.

    Raises:
        ModelNotFoundError, ModelError: See :func:`load_config`.
    """
    name: str = auto_class(load_config(spec)).__name__
    return name


def load_network(
    spec: BaseModelSpec, *, device: torch.device | str = "cpu", mesh: DeviceMesh | None = None
) -> PreTrainedModel:
    """Load the model itself on ``device``, with its own forward pass; for ``spec``, ``mesh`` and errors see
    :func:`load_backbone`."""
    if spec.objects is not None:
        assert mesh is None, "the engine refuses several GPUs"
        given: PreTrainedModel = spec.objects.model
        return given
    model, config, path = spec.id, load_config(spec), resolve_model(spec.id)
    device = torch.device(device)
    if mesh is not None:
        _check_shardable(spec, config)
    quantisation = bitsandbytes_config(spec, config)
    is_quantised = quantisation is not None or hasattr(config, "quantization_config")
    wanted = _DTYPES.get(spec.dtype) or (torch.float32 if device.type == "cpu" else None)
    what = "weights (model.safetensors)" if spec.use_safetensors else "weights (pytorch_model.bin)"
    with reading(model, path, what, _COPY_AGAIN):
        try:
            if mesh is not None:
                network, report = load_sharded(
                    path,
                    config,
                    dtype=wanted or _own_dtype(config),
                    device=device,
                    mesh=mesh,
                    quantisation=quantisation,
                    trust_remote_code=spec.trust_remote_code,
                )
                _check_complete(model, report, _NAME_AS_MODEL)
                return network
            loaded: Any = auto_class(config).from_pretrained(
                path,
                config=config,
                dtype=wanted or "auto",
                quantization_config=quantisation,
                device_map={"": device} if is_quantised else None,
                trust_remote_code=spec.trust_remote_code,
                use_safetensors=spec.use_safetensors,
                ignore_mismatched_sizes=True,  # _check_complete raises a better error
                output_loading_info=True,
            )
        except OSError as error:
            if spec.use_safetensors and has_pickle_weights(path):
                remedy = "convert it to safetensors"
                if mesh is None:
                    remedy += ", or set 'use_safetensors: false': transformers then reads only its tensors"
                raise ModelError(
                    f"model: expected {what} in {model!r}, found only pytorch_model.bin, a pickle, which may run code "
                    f"when a program reads all of it; {remedy}"
                ) from error
            raise
    network, report = loaded
    _check_complete(model, report, _COPY_AGAIN)
    if is_quantised:
        unpack_on_use(network)
    on_device: PreTrainedModel = network.to(device)
    return on_device


def _own_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    named: Any = config.dtype
    return getattr(torch, named) if isinstance(named, str) else named


def _check_shardable(spec: BaseModelSpec, config: PreTrainedConfig) -> None:
    """Check that the weights can be read slice by slice: unquantised safetensors."""
    if hasattr(config, "quantization_config"):
        raise UnsupportedError(
            f"num_gpus: a model that is already quantized on disk cannot be sharded over GPUs: {spec.id!r}. Use the "
            f"unquantized model with '{LOAD_IN_4BIT}', or set num_gpus to 1"
        )
    if not spec.use_safetensors:
        raise UnsupportedError(
            "num_gpus: expected safetensors, because every GPU reads only a part of such a file, found "
            f"'use_safetensors: false'; convert {spec.id!r} to safetensors and remove the key, or set num_gpus to 1"
        )


def load_config(spec: BaseModelSpec) -> PreTrainedConfig:
    """Load the configuration of a base model; raise the same errors as :func:`load_backbone`."""
    if spec.objects is not None:
        own: PreTrainedConfig = spec.objects.model.config
        check_is_causal(spec.id, own)
        return own
    model, path = spec.id, resolve_model(spec.id)
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            _check_is_no_adapter(model, Path(path))
            raise ModelNotFoundError(
                f"model: expected config.json of a causal language model in {model!r}, found no such file; "
                f"name a folder that save_pretrained has written"
            )
        what = "config.json of a causal language model"
    else:
        what = f"one of {', '.join(SHIPPED_MODELS)}, a local folder or a hub id, with a causal language model"
    with reading(model, path, what, "use a base model that transformers supports"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=spec.trust_remote_code)
    check_is_causal(model, config)
    return config


def _check_is_no_adapter(model: str, folder: Path) -> None:
    """Check that a folder is neither an adapter nor a run with an adapter; the error suggests the keys to write.

    Raises:
        ModelError: The folder contains an adapter.
    """
    found = next((path for path in (folder, folder / "best") if (path / "adapter_config.json").is_file()), None)
    if found is None:
        return
    try:
        base = json.loads((found / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, TypeError, KeyError):
        base = None
    named = base if isinstance(base, str) else "the base model that it was trained on"
    where = f"{model!r}" if found == folder else f"the run {model!r}"
    raise ModelError(
        f"model: expected a base model, found an adapter in {where}; set model: {named}, and, to continue from the "
        f"adapter, init_adapter: {found}"
    )


def _check_complete(model: str, report: Mapping[str, Any], remedy: str) -> None:
    """Check that no weight is missing or has a wrong shape, because transformers would fill it with random numbers."""
    wrong = [f"no {name}" for name in sorted(report["missing_keys"])]
    wrong += [
        f"{name} as {tuple(found)} instead of {tuple(expected)}"
        for name, found, expected in sorted(report["mismatched_keys"])
    ]
    if wrong:
        shown = ", ".join(wrong[:_MAX_SHOWN]) + (f" and {len(wrong) - _MAX_SHOWN} more" * (len(wrong) > _MAX_SHOWN))
        raise ModelError(
            f"model: expected every weight that config.json of {model!r} asks for in the files beside it, found "
            f"{shown}; {remedy}, or correct its config.json"
        )
