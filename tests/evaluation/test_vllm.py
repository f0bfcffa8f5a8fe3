"""The requests to vLLM, against a fake with vLLM's documented interface."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from moe_models import MODELS, random_adapter
from safetensors.torch import load_file

from alto.backbone import resolve_model
from alto.data import Conversation, HeldoutRows, Message
from alto.errors import DataError, UnsupportedError
from alto.evaluation import EvaluationSettings, measure
from alto.evaluation.vllm import complete_with_vllm
from alto.lora import AdapterWeights, SavedAdapter, read_saved_adapter
from alto.spec import BaseModelSpec
from alto.version import install_command

BASE = BaseModelSpec(id="alto-tiny", dtype="float32")
END = 1
MAX_MODEL_LENGTH = 64


def adapter(name: str, rank: int = 4) -> SavedAdapter:
    weights = AdapterWeights({"x": (torch.zeros(4, rank), torch.zeros(rank, 4))})
    return SavedAdapter(folder=Path("/adapters") / name, base_model="", scales={"x": 1.0}, rank=rank, weights=weights)


@dataclass(frozen=True)
class LoRARequest:
    """``vllm.lora.request.LoRARequest``: ids count from 1."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        assert self.lora_int_id > 0


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    temperature: float
    max_tokens: int
    stop_token_ids: Sequence[int]


class LLM:
    """``vllm.LLM``: completes a prompt with its adapter's number and the prompt again, then ends."""

    made: list[Mapping[str, Any]]

    def __init__(self, **settings: Any) -> None:
        LLM.made.append(settings)
        if settings["dtype"] == "float8":
            raise RuntimeError("Engine core initialization failed")
        if settings["max_lora_rank"] not in (1, 8, 16, 32, 64, 128, 256, 320, 512):
            raise ValueError("max_lora_rank")
        self._settings = settings

    def generate(
        self,
        prompts: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams,
        *,
        lora_request: Sequence[LoRARequest | None],
    ) -> list[Any]:
        assert len(lora_request) == len(prompts)
        assert sampling_params.temperature == 0
        assert len({request for request in lora_request if request}) <= self._settings["max_cpu_loras"]
        outputs = []
        for prompt, request in zip(prompts, lora_request, strict=True):
            ids = prompt["prompt_token_ids"]
            if len(ids) > MAX_MODEL_LENGTH:
                raise ValueError(f"The decoder prompt (length {len(ids)}) is longer than the maximum model length")
            tokens = [*self.reply(ids, request), *sampling_params.stop_token_ids][: sampling_params.max_tokens]
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]))
        return outputs

    @staticmethod
    def reply(ids: Sequence[int], request: LoRARequest | None) -> list[int]:
        return [100 + (request.lora_int_id if request else 0), *ids]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module, lora, request = ModuleType("vllm"), ModuleType("vllm.lora"), ModuleType("vllm.lora.request")
    LLM.made = []
    module.LLM, module.SamplingParams, request.LoRARequest = LLM, SamplingParams, LoRARequest  # type: ignore[attr-defined]
    for name, fake in (("vllm", module), ("vllm.lora", lora), ("vllm.lora.request", request)):
        monkeypatch.setitem(sys.modules, name, fake)


def complete(adapters: Sequence[SavedAdapter | None], prompts: Sequence[Sequence[int]], **changes: Any) -> Any:
    return complete_with_vllm(BASE, adapters, prompts, **({"ends": [END], "max_new_tokens": 8} | changes))


@pytest.mark.usefixtures("vllm")
def test_one_engine_answers_for_all_adapters_and_the_base() -> None:
    found = complete([adapter("a", 4), adapter("b", 24), None], [[5, 6], [7]])
    assert found == [[[101, 5, 6], [101, 7]], [[102, 5, 6], [102, 7]], [[100, 5, 6], [100, 7]]]
    assert LLM.made == [
        {
            "model": resolve_model("alto-tiny"),
            "dtype": "float32",
            "trust_remote_code": False,
            "enable_lora": True,
            "max_loras": 2,
            "max_cpu_loras": 2,
            "max_lora_rank": 32,
        }
    ]


@pytest.mark.usefixtures("vllm")
def test_few_of_many_adapters_are_on_the_gpu_at_a_time() -> None:
    found = complete([adapter(str(number)) for number in range(9)], [[5]])
    assert found == [[[101 + number, 5]] for number in range(9)]
    assert (LLM.made[0]["max_loras"], LLM.made[0]["max_cpu_loras"]) == (8, 9)


@pytest.mark.usefixtures("vllm")
def test_a_text_ends_where_it_ends_or_has_all_its_tokens() -> None:
    assert complete([adapter("a")], [[5, END, 6]]) == [[[101, 5]]]
    assert complete([adapter("a")], [[5, 6, 7, 8]], max_new_tokens=3) == [[[101, 5, 6]]]


@pytest.mark.usefixtures("vllm")
def test_answers_are_judged_as_those_of_alto(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny import load_tokenizer

    tokenizer = load_tokenizer()
    answers = {1: "#### 3", 2: "#### 4"}

    def reply(_: Sequence[int], request: LoRARequest | None) -> list[int]:
        assert request is not None
        return list(tokenizer(answers[request.lora_int_id], add_special_tokens=False)["input_ids"])

    monkeypatch.setattr(LLM, "reply", staticmethod(reply))
    rows = [Conversation([Message("user", f"{n} plus 2?"), Message("assistant", f"#### {n + 2}")]) for n in (1, 2, 1)]
    found = measure(
        {"a": adapter("a"), "b": adapter("b")},
        HeldoutRows(name="sums", rows=rows, max_length=100),
        EvaluationSettings(backend="vllm"),
        base=BASE,
        max_tokens_per_pass=100,
    )
    assert [(one.name, one.evaluation.num_correct) for one in found.adapters] == [("a", 2), ("b", 1)]
    assert {one.evaluation.settings["backend"] for one in found.adapters} == {"vllm"}
    assert [one.evaluation.loss for one in found.adapters] == [None, None]


@pytest.mark.usefixtures("vllm")
def test_what_vllm_cannot_do_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="rank 512 at most, which vLLM takes, found rank 600"):
        complete([adapter("a", 600)], [[5]])
    with pytest.raises(UnsupportedError, match="found one that is quantised on loading"):
        complete_with_vllm(
            BaseModelSpec(id="alto-tiny", quantisation="4bit"), [adapter("a")], [[5]], ends=[END], max_new_tokens=1
        )
    with pytest.raises(UnsupportedError, match="found: Engine core initialization failed; leave --backend out"):
        complete_with_vllm(
            BaseModelSpec(id="alto-tiny", dtype="float8"),
            *([adapter("a")], [[5]]),
            ends=[END],
            max_new_tokens=1,
        )
    with pytest.raises(DataError, match="longer than the maximum model length"):
        complete([adapter("a")], [list(range(2, 99))])


def test_without_vllm_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UnsupportedError, match=re.escape(install_command("vllm"))):
        complete([adapter("a")], [[5]])


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("name", ["qwen3-moe-dense", "gpt-oss"])
def test_experts_are_written_as_vllm_reads_them_on_this_base(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are written separately if the base's checkpoint has them so, and stacked as in PEFT's file otherwise."""
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "base")
    folder = random_adapter(model, tmp_path / "adapter")
    seen: list[tuple[str, list[str]]] = []

    def reply(ids: Sequence[int], request: LoRARequest) -> list[int]:
        keys = load_file(Path(request.lora_path) / "adapter_model.safetensors").keys()
        seen.append((request.lora_path, sorted(key for key in keys if ".experts." in key)))
        return list(ids)

    monkeypatch.setattr(LLM, "reply", staticmethod(reply))
    base = BaseModelSpec(id=str(tmp_path / "base"), dtype="float32")
    complete_with_vllm(base, [read_saved_adapter(folder)], [[5, 6]], ends=[END], max_new_tokens=8)
    ((path, keys),) = seen
    assert (path == str(folder)) == (name == "gpt-oss")
    assert any(".experts.3.down_proj.lora_B" in key for key in keys) == (name != "gpt-oss")
    assert path == str(folder) or not Path(path).exists()
