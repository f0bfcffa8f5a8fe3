"""Generation with vLLM: one engine, and a LoRA request for every adapter. ``pip install 'alto-lora[vllm]'``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from alto.backbone import load_config, resolve_model
from alto.errors import DataError, UnsupportedError
from alto.lora import SavedAdapter, is_read_per_expert, write_per_expert
from alto.spec import BaseModelSpec
from alto.spec.base_model import QUANTISATION_KEYS

__all__ = ["complete_with_vllm"]

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allocates for; an adapter gets the next larger."""

_MAX_LORAS = 8
"""Adapters that it has on the GPU at a time; the others wait in the machine's memory."""


def complete_with_vllm(
    base: BaseModelSpec,
    adapters: Sequence[SavedAdapter | None],
    prompts: Sequence[Sequence[int]],
    *,
    ends: Sequence[int],
    max_new_tokens: int,
) -> list[list[list[int]]]:
    """The result of :func:`alto.evaluation.generate.complete`, up to the rounding of vLLM's kernels.

    Args:
        base: The base model.
        adapters: None is the base alone.
        prompts: Token ids of each prompt.
        ends: Tokens that end a text, beside those the model's own file names.
        max_new_tokens: Largest number of new tokens of a text.

    Raises:
        UnsupportedError: vLLM is not installed, or cannot serve the base model or an adapter as it is asked to.
        DataError: A prompt leaves no position to write to.
    """
    try:
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest
    except ImportError as error:
        raise UnsupportedError(
            f"backend: expected vLLM, found that it cannot be imported ({error}); pip install 'alto-lora[vllm]', or "
            "leave --backend out"
        ) from error
    ranks = [adapter.rank for adapter in adapters if adapter is not None]
    for adapter in adapters:
        if adapter is not None and adapter.has_patterns:
            raise UnsupportedError(
                f"backend: expected one rank and one scale for all modules of an adapter, which is what vLLM reads, "
                f"found several in {adapter.config_file} (rank_pattern, alpha_pattern); leave --backend out"
            )
        if adapter is not None and adapter.weights.extras:
            raise UnsupportedError(
                f"backend: expected an adapter of low-rank matrices alone, which is what vLLM reads, found more "
                f"in {adapter.folder} (bias, use_dora); leave --backend out"
            )
    _check(base, ranks)
    try:
        engine = LLM(
            model=resolve_model(base.id),
            dtype=base.dtype,
            trust_remote_code=base.trust_remote_code,
            enable_lora=bool(ranks),
            max_loras=max(1, min(len(ranks), _MAX_LORAS)),
            max_cpu_loras=max(1, len(ranks)),
            max_lora_rank=min(rank for rank in _RANKS if rank >= max(ranks, default=1)),
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
            asked = [(request, {"prompt_token_ids": list(prompt)}) for request in requests for prompt in prompts]
            outputs = engine.generate(
                [prompt for _, prompt in asked], sampling, lora_request=[request for request, _ in asked]
            )
    except ValueError as error:
        raise DataError(
            f"exact_match: expected prompts that vLLM takes, found: {error}; leave long rows out, or use a base model "
            "with more positions"
        ) from error
    texts = [_without_end(output.outputs[0].token_ids, ends) for output in outputs]
    return [texts[start : start + len(prompts)] for start in range(0, len(texts), len(prompts))]


def _as_vllm_reads(adapter: SavedAdapter, base: BaseModelSpec, folder: Path) -> Path:
    """The folder of ``adapter``; or ``folder``, with the matrices of its experts by themselves."""
    if not adapter.has_experts:
        return adapter.folder
    model_type = load_config(base).get_text_config().model_type
    if not is_read_per_expert(adapter, model_type):
        return adapter.folder
    write_per_expert(adapter, model_type, folder)
    return folder


def _check(base: BaseModelSpec, ranks: Sequence[int]) -> None:
    if base.quantisation != "none":
        raise UnsupportedError(
            "backend: expected a base model as it lies on disk, found one that is to be quantised "
            f"({', '.join(QUANTISATION_KEYS.values())}), which vLLM does differently; leave --backend out"
        )
    if max(ranks, default=0) > _RANKS[-1]:
        raise UnsupportedError(
            f"backend: expected adapters of rank {_RANKS[-1]} at most, which vLLM takes, found rank {max(ranks)}; "
            "leave --backend out"
        )


def _without_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    end = next((position for position, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[:end])
