"""Compares greedy answers of many adapters on one base, generated all at once, with PEFT, one adapter at a time.

    python -m benchmarks.paper generate --scale cpu

The model is ``alto-tiny``, with generated word problems and adapters of random weights, each with another rank, scale
and set of modules. ``peft`` answers with one adapter after the other, with all its questions in one padded batch of
``generate``. ``mixed`` gives PEFT rows of all adapters in a batch (``adapter_names``). ``alto`` lets every adapter
answer in the same passes. Model and adapters are in memory before any of them begins. The gate: every adapter writes
the same tokens with ``alto`` as with ``peft``, or differs first where two tokens are equally likely up to the last
digits of float32; and the adapters do not all write the same text.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig

from alto.backbone import Backbone, load_backbone, load_network, resolve_model
from alto.data import Conversation, Message, encode_prompt
from alto.evaluation.generate import complete, end_tokens
from alto.evaluation.target import loaded_adapters
from alto.lora import AdapterWeights, ModuleNames, SavedAdapter, linear_modules, read_saved_adapter, write_adapter
from alto.spec import BaseModelSpec, JobConfig
from benchmarks.common import ROOT, format_table, option_parser, publish_figures
from benchmarks.turns import by_turns, median_seconds

MODEL = "alto-tiny"
GOALS = {"generation_speedup": (">=", 3.0)}
TIE = 1e-4
"""Difference of two logits up to which float32 sums in another order may exchange them."""

BATCH_SIZE = 128
"""Number of texts at a time when adapters share a batch."""

Texts = list[list[list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Numbers of adapters, of questions for each adapter, and of tokens of an answer."""

    num_adapters: int
    num_questions: int
    max_new_tokens: int
    repeats: int


PLANS = {
    "smoke": (Case(num_adapters=3, num_questions=3, max_new_tokens=6, repeats=1),),
    "cpu": (
        Case(num_adapters=8, num_questions=16, max_new_tokens=128, repeats=5),
        Case(num_adapters=8, num_questions=64, max_new_tokens=128, repeats=3),
        Case(num_adapters=1, num_questions=16, max_new_tokens=128, repeats=5),
    ),
}
"""Cases by scale; the first one makes the figure."""

CONFIGS = (
    {"r": 8},
    {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    {"r": 4, "use_rslora": True},
    {"r": 32, "lora_alpha": 32, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    {"r": 64, "lora_alpha": 32},
    {"r": 8, "lora_alpha": 32, "target_modules": ["o_proj"]},
    {"r": 16, "use_rslora": True, "target_modules": ["k_proj", "down_proj"]},
    {"r": 2, "lora_alpha": 8},
)
"""Settings of the adapters, used in turn."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, PLANS, threads=True).parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in PLANS[options.scale]:
            rows.append(measure(case, Path(folder), failures))
            print(format_table(list(rows[-1]), [list(rows[-1].values())]), flush=True)
    return publish_figures(
        options,
        "generate",
        gate_failures=failures,
        figures=lambda: {"generation_speedup": rows[0]["speedup"], "generation_over_mixed": rows[0]["over_mixed"]},
        goals=GOALS,
        rows=rows,
        notes=[
            "generation_speedup is of the first case, over one adapter at a time, generation_over_mixed over PEFT's "
            "batches of rows of all adapters; seconds are medians, the ways taking turns.",
            "ties are texts that part where two tokens are as likely to the last digits of float32.",
        ],
    )


def measure(case: Case, folder: Path, failures: list[str]) -> dict[str, Any]:
    """Return the row of one case."""
    backbone = load_backbone(BaseModelSpec(id=MODEL))
    adapters = [_adapter(backbone, number, folder / f"adapter-{number}") for number in range(case.num_adapters)]
    prompts = questions(backbone.tokenizer, case.num_questions)
    peft = _Peft(adapters, end_tokens(backbone.model.generation_config, backbone.tokenizer))

    def alto() -> Texts:
        with loaded_adapters(backbone, adapters, MODEL) as served:
            texts = complete(
                backbone,
                served,
                prompts,
                max_new_tokens=case.max_new_tokens,
                batch_size=BATCH_SIZE,
                on_done=lambda _: None,
            )
            return [[text.tokens for text in of_adapter] for of_adapter in texts]

    ways: dict[str, Callable[[], Any]] = {
        "peft": lambda: peft.complete(prompts, case.max_new_tokens),
        "mixed": lambda: peft.complete_mixed(prompts, case.max_new_tokens),
        "alto": alto,
    }
    rounds = list(by_turns(ways, case.repeats))
    texts: dict[str, Texts] = {name: rounds[-1][name][0] for name in ("peft", "alto")}
    ties = _compare(texts["peft"], texts["alto"], prompts, peft, failures)
    if case.num_adapters > 1 and len({repr(of_adapter) for of_adapter in texts["alto"]}) < case.num_adapters:
        failures.append(f"of {case.num_adapters} adapters two wrote the same: they do not matter to the texts")
    medians = median_seconds(rounds)
    num_tokens = sum(len(text) + 1 for of_adapter in texts["alto"] for text in of_adapter)
    return {
        "adapters": case.num_adapters,
        "questions": case.num_questions,
        "tokens": num_tokens,
        "peft_s": medians["peft"],
        "mixed_s": medians["mixed"],
        "alto_s": medians["alto"],
        "alto_tokens_per_s": num_tokens / medians["alto"],
        "speedup": medians["peft"] / medians["alto"],
        "over_mixed": medians["mixed"] / medians["alto"],
        "ties": ties,
    }


class _Peft:
    """A separate model with all adapters on it, of which one at a time is active."""

    def __init__(self, adapters: Sequence[SavedAdapter], ends: frozenset[int]) -> None:
        network, first = load_network(BaseModelSpec(id=MODEL)), adapters[0]
        self._names = [f"adapter{number}" for number in range(len(adapters))]
        model: Any = PeftModel.from_pretrained(network, first.folder, adapter_name=self._names[0])
        for name, adapter in zip(self._names[1:], adapters[1:], strict=True):
            model.load_adapter(adapter.folder, adapter_name=name)
        self._model, self._ends = model.eval(), ends

    def complete(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Texts:
        texts = []
        for number in range(len(self._names)):
            self._choose(number)
            texts.append(self._generate(prompts, max_new_tokens))
        return texts

    def complete_mixed(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Return each adapter's answers, batch by batch, from rows that name their adapter."""
        rows = [(name, prompt) for prompt in sorted(prompts, key=len) for name in self._names]
        for start in range(0, len(rows), BATCH_SIZE):
            names, batch = zip(*rows[start : start + BATCH_SIZE], strict=True)
            self._generate(batch, max_new_tokens, adapter_names=list(names))

    def _generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> list[list[int]]:
        width = max(map(len, prompts))
        config = GenerationConfig(
            do_sample=False, eos_token_id=sorted(self._ends), pad_token_id=0, max_new_tokens=max_new_tokens
        )
        output = self._model.generate(
            input_ids=torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            generation_config=config,
            **options,
        )
        return [self._cut(text) for text in output[:, width:].tolist()]

    @torch.no_grad()
    def logits(self, number: int, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits of the token after ``tokens``, by adapter ``number``."""
        self._choose(number)
        found: torch.Tensor = self._model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
        return found

    def _choose(self, number: int) -> None:
        self._model.set_adapter(self._names[number])

    def _cut(self, text: Sequence[int]) -> list[int]:
        return list(text[: next((at for at, token in enumerate(text) if token in self._ends), len(text))])


def _compare(expected: Texts, found: Texts, prompts: Sequence[Sequence[int]], peft: _Peft, failures: list[str]) -> int:
    """Return the number of texts that differ first at a tie; texts that differ elsewhere go to ``failures``."""
    ties = 0
    for number, (of_peft, of_alto) in enumerate(zip(expected, found, strict=True)):
        for question, (first, second) in enumerate(zip(of_peft, of_alto, strict=True)):
            if first == second:
                continue
            at = next((at for at, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1), None)
            gap = torch.inf
            if at is not None:
                logits = peft.logits(number, [*prompts[question], *first[:at]])
                gap = float((logits[first[at]] - logits[second[at]]).abs())
            if gap > TIE:
                failures.append(f"adapter {number} answers question {question} otherwise than PEFT (gap {gap:.2g})")
            else:
                ties += 1
    return ties


def questions(tokenizer: Any, count: int) -> list[list[int]]:
    """Return word problems in the form in which the model is asked."""
    spec = importlib.util.spec_from_file_location("make_word_problems", ROOT / "examples" / "make_word_problems.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look for their own module there
    spec.loader.exec_module(script)
    return [
        encode_prompt(Conversation([Message("user", row["question"])]), tokenizer) for row in script.make_rows(count, 0)
    ]


def _adapter(backbone: Backbone, number: int, folder: Path) -> SavedAdapter:
    """Write a random adapter, which changes the base's text, into a folder that both ways read."""
    config = JobConfig(**CONFIGS[number % len(CONFIGS)])
    generator = torch.Generator().manual_seed(number)
    modules = linear_modules(backbone.model)

    def is_meant(name: str) -> bool:
        return config.target_modules == "all-linear" or name.rsplit(".", 1)[-1] in config.target_modules

    weights = {
        module.name: (
            torch.randn(module.in_features, config.r, generator=generator) / module.in_features**0.5,
            torch.randn(config.r, module.out_features, generator=generator) * 0.05,
        )
        for module in modules
        if is_meant(module.name)
    }
    write_adapter(folder, AdapterWeights(weights), config, resolve_model(MODEL), ModuleNames.of(backbone.model))
    return read_saved_adapter(folder)
