"""``alto export``: results of a run for other programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import IDS, apart, logits_of, save_adapter
from moe_models import build_mixture, random_adapter
from peft import PeftModel
from safetensors.torch import load_file
from tiny import load_tokenizer, make_task, save_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

import alto
from alto.artifacts.export import request_command
from alto.cli import app
from alto.errors import AltoError, DiskFullError, RunChangedError, RunExistsError, RunNotFoundError, UnsupportedError
from alto.importing import import_file, imported_task

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model = build_mixture("mixtral", vocab_size=len(load_tokenizer()), max_position_embeddings=128)
    model.save_pretrained(tmp_path / "base")
    load_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> alto.TaskResult:
    """A run of two jobs on a random Llama, with their own chat template."""
    folder = tmp_path_factory.mktemp("run")
    task = make_task(
        folder,
        model=str(save_model(folder / "base")),
        search_space={"lr": [0.03, 0.01], "r": [3]},
        target_modules=["q_proj", "down_proj"],
        max_steps=4,
        early_exit=False,
        chat_template=TEMPLATE,
        report_to="none",
    )
    return alto.Engine(output_dir=folder / "runs").tune(task)


def exported(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["export", *(str(argument) for argument in arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*arguments: object) -> tuple[type[AltoError], str]:
    error = CliRunner().invoke(app, ["export", *(str(argument) for argument in arguments)]).exception
    assert isinstance(error, AltoError)
    return type(error), str(error)


def on_base(run: alto.TaskResult, adapter: Path) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(Path(run.run_dir).parents[1] / "base")
    return logits_of(PeftModel.from_pretrained(base, adapter))


def test_the_best_adapter_is_written_with_a_line_for_vllm(run: alto.TaskResult, tmp_path: Path) -> None:
    printed = exported(run.run_dir, "--to", tmp_path / "out")
    folder, base = tmp_path / "out", Path(run.run_dir).parents[1] / "base"
    assert printed == (
        f"adapter: {folder}\nserve with: vllm serve {base} --enable-lora --max-lora-rank 8 --chat-template "
        f"{folder}/chat_template.jinja --lora-modules tiny={folder}\nthen ask it: "
        "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d "
        """'{"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}'\n"""
    )
    best = Path(run.adapter_dir)
    for name in ("adapter_config.json", "adapter_model.safetensors", "metrics.json"):
        assert (folder / name).read_bytes() == (best / name).read_bytes()
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    theirs, ours = (path.read_text(encoding="utf-8") for path in (best / "README.md", folder / "README.md"))
    (before, _, after), kept = (re.split(r"```python\n|\n```\n", card.split("---\n", 2)[2]) for card in (ours, theirs))
    assert [before, after] == kept[::2]  # the Python code in between loads the tokenizer from here
    assert f"base_model:adapter:{base}" in theirs
    assert "base_model" not in ours.split("---\n")[1]  # the hub accepts only its own models


def test_a_job_is_merged_and_the_difference_is_printed(run: alto.TaskResult, tmp_path: Path) -> None:
    (other,) = (job.job for job in run.job_results if job.job != run.best_job)
    adapter = Path(run.run_dir) / "jobs" / other / "best"
    printed = json.loads(exported(run.run_dir, "--to", tmp_path / "json", "--merged", "--job", other, "--json"))
    assert (printed["form"], printed["folder"]) == ("merged", str(tmp_path / "json"))
    assert printed["difference"] < 1e-5
    found = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "json"))
    assert apart(found, on_base(run, adapter)) < 1e-5
    assert apart(found, on_base(run, Path(run.adapter_dir))) > 1e-4  # it is that job
    lines = exported(run.run_dir, "--to", tmp_path / "text", "--merged").splitlines()
    assert lines[0].startswith(f"model: {tmp_path / 'text'} (logits differ from the adapter's by ")
    assert lines[1] == f"serve with: vllm serve {tmp_path / 'text'}"
    assert lines[2].startswith(
        f"or, without vLLM and without a GPU: transformers serve {tmp_path / 'text'} --port 8000 "
    )
    assert lines[3].startswith("then ask it: curl http://127.0.0.1:8000/v1/chat/completions ")
    assert f'{{"model": "{tmp_path / "text"}", "messages"' in lines[3]


def test_the_configuration_of_another_trainer_is_that_of_the_job(run: alto.TaskResult, tmp_path: Path) -> None:
    (other,) = (job for job in run.job_results if job.job != run.best_job)
    printed = exported(run.run_dir, "--to", tmp_path / "out", "--config", "trl", "--job", other.job)
    file = tmp_path / "out" / "trl.yaml"
    notes = [line.removeprefix("note: TRL has no place for ") for line in printed.splitlines()[1:-1]]
    assert [note.partition(":")[0] for note in notes] == ["validation_dataset", "dataset_format"]
    assert printed.splitlines()[-1] == f"train with: trl sft --config {file}"
    found = imported_task([import_file(file, "trl", ["method=sft"])], ["method=sft"]).task.jobs[0].config
    assert found.to_dict() == dict(other.config)


def test_a_base_that_has_changed_is_not_merged_with(run: alto.TaskResult, tmp_path: Path) -> None:
    base = Path(run.run_dir).parents[1] / "base"
    kept = (base / "model.safetensors").read_bytes()
    changed = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        changed.model.norm.weight.add_(1.0)
    changed.save_pretrained(base)
    try:
        kind, printed = refused(run.run_dir, "--to", tmp_path / "out", "--merged")
    finally:
        (base / "model.safetensors").write_bytes(kept)
    assert kind is RunChangedError
    assert "with --base" in printed
    assert not (tmp_path / "out").exists()


def test_a_classifier_is_merged_with_its_head_and_labels(tmp_path: Path) -> None:
    rows = [{"text": f"{n} {'good' if n % 2 else 'bad'}", "label": "yes" if n % 2 else "no"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = alto.Task(
        model=str(save_model(tmp_path / "base")),
        dataset=str(tmp_path / "rows.jsonl"),
        method="classification",
        search_space={"lr": [0.03], "r": [2]},
        max_steps=3,
        report_to="none",
    )
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    printed = exported(result.run_dir, "--to", tmp_path / "adapter")
    assert "vLLM cannot serve the adapter" in printed
    assert "curl" not in printed
    labels: dict[str, Any] = {"num_labels": 2}
    fresh = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", **labels)
    expected = PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()(input_ids=IDS).logits
    for source in (result.run_dir, tmp_path / "adapter"):
        folder = tmp_path / f"merged-{Path(source).name}"
        exported(source, "--to", folder, "--merged")
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        assert apart(model(input_ids=IDS).logits, expected) < 1e-5
        assert model.config.id2label == {0: "no", 1: "yes"}
    kind, printed = refused(result.run_dir, "--to", tmp_path / "gguf", "--gguf", "f16")
    assert (kind, "found a classification head" in printed) == (UnsupportedError, True)


@pytest.mark.parametrize(("kind", "holds"), [("adapter", "adapter: "), ("q8_0", "model: ")])
def test_a_line_says_what_a_gguf_file_holds(kind: str, holds: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra 'gguf'")
    adapter = save_adapter(save_model(tmp_path / "base"), tmp_path / "mine")
    printed = exported(adapter, "--to", tmp_path / "file", "--gguf", kind)
    assert printed.startswith(f"{holds}{tmp_path / 'file'}")
    assert f"ollama create mine -f {tmp_path / 'file' / 'Modelfile'} && ollama run mine\n" in printed
    assert printed.endswith(f"then ask it: {request_command('mine', is_chat=True, port=8080)}\n")


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
    printed = exported(result.run_dir, "--to", tmp_path / "vllm", "--per-expert")
    assert printed == (
        f"adapter: {tmp_path / 'vllm'}\nserve with: vllm serve {base} --enable-lora --max-lora-rank 8 --lora-modules "
        f"tiny={tmp_path / 'vllm'}\nthen ask it: {request_command('tiny', is_chat=True)}\n"
    )
    tensors = load_file(tmp_path / "vllm" / "adapter_model.safetensors")
    experts = {f"block_sparse_moe.experts.{number}.w{which}" for number in range(4) for which in (1, 2, 3)}
    modules = {*(f"model.layers.{layer}.{name}" for layer in range(2) for name in (*experts, "self_attn.q_proj"))}
    assert set(tensors) == {f"base_model.model.{name}.lora_{which}.weight" for name in modules for which in "AB"}
    config = json.loads((tmp_path / "vllm" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "w1", "w2", "w3"]
    # gate and up are trained as one matrix, whose A they share
    first = "base_model.model.model.layers.0.block_sparse_moe.experts.0"
    assert tensors[f"{first}.w1.lora_A.weight"].equal(tensors[f"{first}.w3.lora_A.weight"])
    assert "PEFT does not load this form" in (tmp_path / "vllm" / "README.md").read_text(encoding="utf-8")


def test_what_cannot_be_exported_is_named(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = random_adapter(build_mixture("mixtral"), tmp_path / "adapter")
    options = ("--per-expert", "--base", base)
    kind, printed = refused(tmp_path / "absent", "--to", tmp_path / "vllm", *options)
    assert kind is RunNotFoundError
    assert "expected a run (task.yaml) or an adapter" in printed
    kind, printed = refused(adapter, "--to", adapter, *options)
    assert kind is RunExistsError
    expected = "expected a folder that does not exist yet, or an empty one, found"
    assert printed == f"{adapter}: {expected} a folder with 2 files; name another folder, or remove this one"
    (adapter / "model.gguf").touch()
    kind, printed = refused(adapter, "--to", adapter / "model.gguf", "--gguf", "f16", "--base", base)
    assert kind is RunExistsError
    assert printed.endswith(f"model.gguf: {expected} a file; name a folder; ALTO names the files in it")
    dense = save_model(tmp_path / "dense")
    kind, printed = refused(adapter, "--to", tmp_path / "vllm", "--per-expert", "--base", dense)
    assert kind is UnsupportedError
    assert "found model type 'llama'; serve the folder as it is" in printed
    assert not (tmp_path / "vllm").exists()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("alto.artifacts.export.write_per_expert", full)
    kind, printed = refused(adapter, "--to", tmp_path / "vllm", *options)
    assert kind is DiskFullError
    assert printed.endswith("No space left on device; free disk space, or name another folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "dense"]


def test_a_job_without_an_adapter_is_named_with_those_that_have_one(run: alto.TaskResult, tmp_path: Path) -> None:
    kind, printed = refused(run.run_dir, "--to", tmp_path / "out", "--job", "job-009")
    assert kind is RunNotFoundError
    assert "found 'job-009'; jobs with a best adapter: job-000, job-001" in printed
