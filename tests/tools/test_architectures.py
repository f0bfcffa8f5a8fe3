"""The sweep of model classes at its smallest scale: it tells wrong from exact, and a class that dies or hangs does not
end it."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="the oracle needs the extra 'bench'")

from tools.architectures import __main__ as architecture_sweep
from tools.architectures import check as checks
from tools.architectures import examine
from tools.architectures.renamed import renamed_by_peft
from tools.architectures.tiny import build_tiny
from tools.architectures.verdict import Verdict

# PEFT reads a transformers property by its deprecated name.
pytestmark = [
    pytest.mark.slow("benchmarks"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def test_the_smallest_scale_passes_its_gate(tmp_path: Path) -> None:
    assert architecture_sweep.main(["--scale", "smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "architectures-smoke.json").read_text(encoding="utf-8"))
    statuses = {row["model_type"]: row["status"] for row in found["rows"]}
    exact = ("llama", "qwen2_moe", "stablelm", "gpt2", "bloom", "llava")
    assert statuses == {**dict.fromkeys(exact, "exact"), "bart": "refused"}
    assert {row["model_type"] for row in found["rows"] if row["rows"] == "padded"} == {"bloom"}
    assert (found["gate"], found["figures"]["exact"], found["figures"]["wrong"]) == ("passed", 6, 0)


def test_another_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    distorted = checks._OwnTraining.step

    def step(self: object, facts: object) -> object:
        loss, gradients = distorted(self, facts)
        return loss, {name: value * (1 + 3e-4) for name, value in gradients.items()}

    monkeypatch.setattr(checks._OwnTraining, "step", step)
    verdict = checks.check("llama")
    assert verdict.status == "wrong"
    assert verdict.gradient_error == pytest.approx(3e-4, rel=0.1)


@pytest.mark.parametrize("leaves_out", [True, False])
def test_tensors_that_peft_renames_are_left_out_or_found(leaves_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of this kind has shared experts, whose names transformers changes in old checkpoints."""
    if not leaves_out:
        monkeypatch.setattr("alto.lora.targets._LEFT_OUT", {})
    found = renamed_by_peft(build_tiny("laguna", 64))
    assert (found == []) == leaves_out
    assert all("shared_experts" in name for name in found)


def die(model_type: str, sender: object) -> None:
    os._exit(7)


def hang(model_type: str, sender: object) -> None:
    time.sleep(600)


@pytest.mark.parametrize(("kind", "status", "limit_s"), [(die, "crash", 60.0), (hang, "timeout", 0.1)])
def test_a_class_that_dies_or_hangs_is_counted(
    kind: object, status: str, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "_examine", kind)
    verdict = examine.examine(multiprocessing.get_context("fork"), "llama", limit_s)
    assert (verdict.model_type, verdict.status) == ("llama", status)
    assert architecture_sweep.summarise([verdict], "smoke").notes[0].startswith("No figures, the gate failed: llama is")


def test_what_is_no_answer_counts_as_a_traceback() -> None:
    statuses = ("exact", "traceback", "timeout", "crash", "refused")
    verdicts = [Verdict(model_type=status, status=status) for status in statuses]
    figures = architecture_sweep.summarise(verdicts, "cpu").figures
    assert (figures["exact"], figures["tracebacks"], figures["refused"], figures["classes"]) == (1, 3, 1, 5)
