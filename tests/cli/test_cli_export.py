"""``alto export``: experts as vLLM reads them, from a run or an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from moe_models import build_mixture, random_adapter
from safetensors.torch import load_file
from tiny import load_tokenizer, make_task, save_model
from typer.testing import CliRunner

import alto
from alto.cli import app
from alto.errors import AltoError, DiskFullError, RunExistsError, RunNotFoundError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model = build_mixture("mixtral", vocab_size=len(load_tokenizer()), max_position_embeddings=128)
    model.save_pretrained(tmp_path / "base")
    load_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_the_best_adapter_of_a_run_is_written_with_every_expert_by_itself(base: Path, tmp_path: Path) -> None:
    task = make_task(
        tmp_path,
        model=str(base),
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        search_space={"lr": [1e-3], "r": [2]},
        max_steps=2,
        report_to="none",
    )
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    done = CliRunner().invoke(app, ["export", result.run_dir, str(tmp_path / "vllm")])
    assert done.exit_code == 0, done.output
    assert done.output == f"adapter: {tmp_path / 'vllm'}\n"
    tensors = load_file(tmp_path / "vllm" / "adapter_model.safetensors")
    experts = {f"block_sparse_moe.experts.{number}.w{which}" for number in range(4) for which in (1, 2, 3)}
    modules = {*(f"model.layers.{layer}.{name}" for layer in range(2) for name in (*experts, "self_attn.q_proj"))}
    assert set(tensors) == {f"base_model.model.{name}.lora_{which}.weight" for name in modules for which in "AB"}
    config = json.loads((tmp_path / "vllm" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "w1", "w2", "w3"]
    # gate and up are trained as one matrix, whose A they share
    first = "base_model.model.model.layers.0.block_sparse_moe.experts.0"
    assert tensors[f"{first}.w1.lora_A.weight"].equal(tensors[f"{first}.w3.lora_A.weight"])


def invoke(*arguments: object) -> tuple[type[AltoError], str]:
    error = CliRunner().invoke(app, ["export", *(str(argument) for argument in arguments)]).exception
    assert isinstance(error, AltoError)
    return type(error), str(error)


def test_what_cannot_be_exported_is_named(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = random_adapter(build_mixture("mixtral"), tmp_path / "adapter")
    kind, said = invoke(tmp_path / "absent", tmp_path / "vllm", "--base", base)
    assert kind is RunNotFoundError
    assert "expected a run (task.yaml) or an adapter" in said
    kind, said = invoke(adapter, adapter, "--base", base)
    assert kind is RunExistsError
    assert said == f"{adapter}: expected no such folder, or an empty one, found files; name another"
    kind, said = invoke(adapter, tmp_path / "vllm", "--base", save_model(tmp_path / "dense"))
    assert kind is UnsupportedError
    assert "found model type 'llama'; serve the folder as it is" in said
    assert not (tmp_path / "vllm").exists()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("alto.engine.engine.write_per_expert", full)
    kind, said = invoke(adapter, tmp_path / "vllm", "--base", base)
    assert kind is DiskFullError
    assert said.endswith("No space left on device; free disk space, or name another folder")
