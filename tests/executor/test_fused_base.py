"""A step on a base with fused kernels for layers and losses equals the step on the base's own classes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_kernels import functions
from resident_jobs import PAIRS, Bank, assert_same_step, make_model, make_task
from tiny import make_task as make_tiny_task
from tiny import read_journal, run_task

from alto.backbone import Backbone
from alto.backbone.fused_layers import Fusion
from alto.executor.beginning import _fusion_notes
from alto.kernels import layer_triton, torch_backend
from alto.runs import RunDir

CONFIGS: list[dict[str, Any]] = [
    {"lr": 1e-3, "r": 4, "batch_size": 1, "seed": 1, "lora_dropout": 0.3},
    {"lr": 1e-3, "r": 4, "batch_size": 1, "seed": 2, "target_modules": ["o_proj", "down_proj"], "use_dora": True},
    {"lr": 1e-3, "r": 4, "batch_size": 1, "seed": 3, "target_modules": ["lm_head", "embed_tokens", "k_proj"]},
]


def fused(monkeypatch: pytest.MonkeyPatch, *given: Any, **settings: Any) -> Bank:
    """Return a bank on a fused base; adapters use the machine's backend, which on a CPU is many times faster."""
    ops = functions()
    with monkeypatch.context() as patch:
        patch.setattr("alto.backbone.backbone.layer_functions_on", lambda device: ops)
        bank = Bank(*given, **settings)
    assert {"rms_norm", "swiglu", "rotary", "cross_entropy"} == set(bank.backbone.fusion.counts)
    return bank


def unfused(monkeypatch: pytest.MonkeyPatch, *given: Any, **settings: Any) -> Bank:
    with monkeypatch.context() as patch:
        patch.setattr("alto.backbone.backbone.layer_functions_on", lambda device: None)
        bank = Bank(*given, **settings)
    assert not bank.backbone.fusion.counts
    return bank


SLOW = pytest.mark.slow("kernels")


@pytest.mark.parametrize(
    ("name", "is_checkpointed"),
    [("llama", True), *(pytest.param(*case, marks=SLOW) for case in (("llama", False), ("qwen3", True)))],
)
def test_a_step_is_that_of_the_base_s_own_classes(
    name: str, is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(CONFIGS)
    banks = [build(monkeypatch, make_model(name), task) for build in (unfused, fused)]
    if is_checkpointed:
        for bank in banks:
            bank.backbone.checkpoint_layers()
    expected, found = (bank.step() for bank in banks)
    assert len(found) == len(CONFIGS)
    for job, facts in found.items():
        assert_same_step(facts, expected[job])


@SLOW
def test_preference_pairs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task([CONFIGS[0] | {"lora_dropout": 0.0}], method="dpo")
    expected = unfused(monkeypatch, make_model("llama"), task, data=PAIRS).step()
    for job, facts in fused(monkeypatch, make_model("llama"), task, data=PAIRS).step().items():
        assert_same_step(facts, expected[job])


@SLOW
@pytest.mark.parametrize("op", ["rms_norm_backward", "swiglu_backward", "rotary", "cross_entropy"])
def test_a_wrong_kernel_shows(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(CONFIGS[:1])
    expected = unfused(monkeypatch, make_model("llama"), task).step()
    bank = fused(monkeypatch, make_model("llama"), task)
    right = getattr(layer_triton, op)

    def wrong(*given: Any, **settings: Any) -> Any:
        found = right(*given, **settings)
        return found * 1.01 if not isinstance(found, tuple) else (found[0] * 1.01, *found[1:])

    monkeypatch.setattr(layer_triton, op, wrong)
    if op == "cross_entropy":
        bank.backbone._head.kernel = wrong
    [found] = bank.step().values()
    with pytest.raises(AssertionError):
        assert_same_step(found, *expected.values())


def test_its_kernels_are_compiled_with_those_of_the_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, sampled = Bank(make_model("llama"), make_task(CONFIGS[:1])), []
    monkeypatch.setattr(torch_backend, "compile_kernels", lambda run: run() or iter(()))
    monkeypatch.setattr(Backbone, "sample_kernels", lambda self: sampled.append(self))
    assert list(bank.trainer.compile_kernels([job.config for job in bank.jobs])) == []
    assert sampled == [bank.backbone]


def test_they_are_compiled_where_linear_layers_have_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    bank = fused(monkeypatch, make_model("llama"), make_task(CONFIGS))
    monkeypatch.setattr(layer_triton, "launch", lambda kernel, *_, **__: launched.append(kernel.fn.__name__))
    bank.backbone.sample_kernels()
    assert any("swiglu" in name for name in launched)


def test_the_journal_says_what_is_fused(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", task := make_tiny_task(tmp_path, num_train_epochs=1))
    run_task(task, run_dir)
    started = read_journal(run_dir.root)[0]
    assert started["fused"] == {"kept": {"all": "the backend of the kernels is not Triton"}}
    assert not any("fused" in note for note in started["notes"]), "a CPU run has no note about fusion"


@pytest.mark.parametrize(
    ("counts", "kept", "expected"),
    [
        ({"rms_norm": 5}, {}, ()),
        ({}, {"all": "why"}, ("No module of the base model runs with fused kernels (all: why).",)),
        (
            {"rms_norm": 5},
            {"GemmaMLP": "why", "cross_entropy": "how"},
            ("Some modules of the base model run without fused kernels (GemmaMLP: why; cross_entropy: how).",),
        ),
    ],
)
def test_on_a_gpu_a_note_says_what_is_not(
    counts: dict[str, int], kept: dict[str, str], expected: tuple[str, ...]
) -> None:
    fusion = Fusion(counts=counts, kept=kept)
    for device, notes in (("cuda", expected), ("cpu", ())):
        backbone: Any = SimpleNamespace(fusion=fusion, device=torch.device(device))
        assert _fusion_notes(backbone) == notes
