"""Generation with vLLM: one engine, and a LoRA request per adapter. Needs ``pip install 'alto-lora[vllm]'``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from alto.backbone import load_config, resolve_model
from alto.errors import DataError, UnsupportedError
from alto.lora import SavedAdapter, is_read_per_expert, vllm_obstacle, vllm_rank, write_per_expert
from alto.spec import QUANTISATION_KEYS, BaseModelSpec
from alto.version import install_command

_MAX_LORAS = 8
"""Maximum number of adapters on the GPU at a time; the others wait in host memory."""


def complete_with_vllm(
    base: BaseModelSpec,
    adapters: Sequence[SavedAdapter | None],
    prompts: Sequence[Sequence[int]],
    *,
    ends: Sequence[int],
    max_new_tokens: int,
) -> list[list[list[int]]]:
    """Return the result of :func:`alto.evaluation.generate.complete`, up to the rounding of vLLM's kernels.

    Args:
        adapters: The adapters; None means the base model alone.
        ends: Tokens that end a text, in addition to those that the model's own files name.

    Raises:
        UnsupportedError: vLLM is not installed, or cannot serve the base model or an adapter as requested.
        DataError: vLLM rejects a prompt, for example because it is too long.
    """
    try:
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest
    except ImportError as error:
        raise UnsupportedError(
            f"backend: expected vLLM, found that it cannot be imported ({error}); {install_command('vllm')}, "
            "or leave --backend out"
        ) from error
    loras = [adapter for adapter in adapters if adapter is not None]
    _check(base, loras)
    ranks = [adapter.rank for adapter in loras]
    try:
        engine = LLM(
            model=resolve_model(base.id),
            dtype=base.dtype,
            trust_remote_code=base.trust_remote_code,
            enable_lora=bool(ranks),
            max_loras=max(1, min(len(ranks), _MAX_LORAS)),
            max_cpu_loras=max(1, len(ranks)),
            max_lora_rank=vllm_rank(max(ranks, default=1)),
        )
    except (ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"backend: expected a base model that vLLM serves with LoRA, found: {error}; leave --backend out"
        ) from error
    sampling = SamplingParams(temperature=0, max_tokens=max_new_tokens, stop_token_ids=sorted(ends))
    try:
        with TemporaryDirectory() as scratch:
            requests = [
                None
                if adapter is None
                else LoRARequest(
                    f"adapter-{number}", number, str(_as_vllm_reads(adapter, base, Path(scratch, str(number))))
                )
                for number, adapter in enumerate(adapters, start=1)
            ]
            inputs = [(request, {"prompt_token_ids": list(prompt)}) for request in requests for prompt in prompts]
            outputs = engine.generate(
                [prompt for _, prompt in inputs], sampling, lora_request=[request for request, _ in inputs]
            )
    except ValueError as error:
        raise DataError(
            f"backend: expected prompts that vLLM accepts, found: {error}; leave long rows out, or use a base "
            "model with more positions"
        ) from error
    texts = [_without_end(output.outputs[0].token_ids, ends) for output in outputs]
    return [texts[start : start + len(prompts)] for start in range(0, len(texts), len(prompts))]


def _as_vllm_reads(adapter: SavedAdapter, base: BaseModelSpec, folder: Path) -> Path:
    """Return the folder of ``adapter``, or ``folder`` with separate matrices for every expert if vLLM needs them."""
    if not adapter.has_experts:
        return adapter.folder
    model_type = load_config(base).get_text_config().model_type
    if not is_read_per_expert(adapter, model_type):
        return adapter.folder
    write_per_expert(adapter, model_type, folder)
    return folder


def _check(base: BaseModelSpec, adapters: Sequence[SavedAdapter]) -> None:
    for adapter in adapters:
        obstacle = vllm_obstacle(adapter, load_config(base).get_text_config().model_type)
        if obstacle is not None:
            expected, found = obstacle
            raise UnsupportedError(f"backend: expected {expected}, found {found}; leave --backend out")
    if base.quantisation != "none":
        raise UnsupportedError(
            "backend: expected a base model that is loaded as stored on disk, found one that is quantised on loading "
            f"({', '.join(QUANTISATION_KEYS.values())}), which vLLM does differently; leave --backend out"
        )


def _without_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    end = next((position for position, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[:end])
