"""A task from its file to PEFT: the best adapter has the same logits in PEFT; an export that cannot be equal says
so."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import MIXTURES, build_mixture
from peft import PeftModel
from rich.console import Console
from tiny import load_tokenizer, make_task, random_llama, read_journal
from torch import Tensor
from transformers import PreTrainedModel

import alto
from alto.engine import runner
from alto.lora import read_saved_adapter
from alto.records import AdapterCheck
from alto.runs import read_history
from alto.views import PlainView, final_summary

# PEFT reads a transformers property by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.tensor([[3, 5, 8, 13, 21, 34, 55, 2]])
DIFFERENT = AdapterCheck(status="different", why="layer.gate without the adapter", difference=0.44, peft="9.9")


def base(name: str, vocab_size: int) -> PreTrainedModel:
    if name == "llama":
        return random_llama(vocab_size)
    return build_mixture(name, vocab_size=vocab_size, max_position_embeddings=128)


def make(folder: Path, name: str, **changes: Any) -> alto.Task:
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    base(name, len(tokenizer)).save_pretrained(folder / "model")
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"] if name == "qwen2-moe-shared" else "all-linear"
    settings = {
        "model": str(folder / "model"),
        "search_space": {"lr": [0.05], "r": [3]},
        "target_modules": targets,
        "max_steps": 3,
        "report_to": "none",
    }
    return make_task(folder, **settings | changes)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("name", ["llama", *MIXTURES])
def test_the_best_adapter_of_a_task_has_the_same_logits_in_peft(name: str, tmp_path: Path) -> None:
    result = alto.Engine(output_dir=tmp_path / "runs").tune(make(tmp_path, name))
    best = Path(result.adapter_dir)
    adapter = read_saved_adapter(best)
    expected = base(name, len(load_tokenizer()))
    before = logits(expected)
    with torch.no_grad():
        for module, (a_KR, b_RN) in adapter.weights.items():
            expected.get_submodule(module).weight += adapter.scales[module] * (a_KR @ b_RN).T
    after = logits(expected)
    assert (after - before).norm() / before.norm() > 1e-2  # training changed it
    found = logits(PeftModel.from_pretrained(base(name, len(load_tokenizer())), best))
    assert (found - after).norm() / after.norm() < 1e-5
    check = json.loads((best / "metrics.json").read_text())["peft_check"]
    assert check["status"] == "equal"
    assert check["difference"] < 1e-5
    assert result.adapter_check == AdapterCheck(**check)


def test_a_task_whose_adapter_peft_reads_otherwise_ends_with_its_result_and_a_warning_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PeftCheck", lambda *_, **__: lambda folder: DIFFERENT)
    output = io.StringIO()
    with PlainView(output) as progress:
        result = alto.Engine(output_dir=tmp_path / "runs", observers=[progress.observe]).tune(make(tmp_path, "llama"))
    sentence = "PEFT 9.9 does not load the best adapter as it was trained: layer.gate without the adapter"
    assert f"warning: {sentence}" in output.getvalue()
    assert result.adapter_check == DIFFERENT
    run, best = Path(result.run_dir), Path(result.adapter_dir)
    assert json.loads((best / "metrics.json").read_text())["peft_check"]["status"] == "different"
    assert f"> **Warning.** {sentence}" in (best / "README.md").read_text()
    assert sentence in (run / "report.html").read_text()
    shown = Console(file=io.StringIO(), width=400, record=True)
    shown.print(final_summary(read_history(run), run))
    assert f"note: {sentence}" in shown.export_text()
    last, completed = read_journal(run)[-2:]
    assert (last["event"], last["job"], completed["event"]) == ("adapter_checked", result.best_job, "task_completed")


def test_without_peft_the_log_and_the_metrics_say_that_nothing_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked = AdapterCheck(status="unchecked", why="peft is not installed")
    monkeypatch.setattr(runner, "PeftCheck", lambda *_, **__: lambda folder: unchecked)
    monkeypatch.setattr(runner, "version_of", lambda package: None)
    planned = alto.Engine().plan(make(tmp_path, "llama")).notes
    assert planned[-1].startswith("The best adapter will not be loaded into PEFT to check it: peft is not installed; ")
    output = io.StringIO()
    with PlainView(output) as progress:
        result = alto.Engine(output_dir=tmp_path / "runs", observers=[progress.observe]).tune(make(tmp_path, "llama"))
    assert "the best adapter was not loaded into PEFT to check it: peft is not installed" in output.getvalue()
    best = Path(result.adapter_dir)
    assert json.loads((best / "metrics.json").read_text())["peft_check"]["why"] == "peft is not installed"
    assert "Warning" not in (best / "README.md").read_text()
