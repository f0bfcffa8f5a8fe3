"""What jobs do not train of a base, and leave out of its training, is said wherever notes are: before training."""

from __future__ import annotations

from pathlib import Path

import pytest
from moe_models import build_mixture
from profiles import measured_at_once
from tiny import load_tokenizer, make_task, read_journal
from typer.testing import CliRunner

import alto
from alto.backbone import build_skeleton
from alto.cli.app import app
from alto.errors import ModelError
from alto.executor import model_notes
from alto.spec import BaseModelSpec, JobConfig


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> alto.Task:
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    model = build_mixture("qwen3-moe-dense", vocab_size=len(tokenizer), attention_dropout=0.1)
    model.save_pretrained(folder / "model")
    space = {"lr": [0.05], "r": [3]}
    return make_task(folder, model=str(folder / "model"), search_space=space, max_steps=1, report_to="none")


def expected(task: alto.Task) -> tuple[str, ...]:
    notes = model_notes(build_skeleton(BaseModelSpec(id=task.model)), [job.config for job in task.jobs], task.method)
    experts, dropout, balance = notes
    assert experts.startswith("The experts of the base model are not trained: 6,144 weights")
    assert dropout.startswith("attention_dropout 0.1 of the base model: not applied")
    assert balance.startswith("router_aux_loss_coef 0.001 of the base model: the loss that balances")
    assert "is added to a job's loss in training" in balance
    return notes


def test_tune_says_so_before_the_first_step(task: alto.Task, tmp_path: Path) -> None:
    result = alto.Engine(output_dir=tmp_path).tune(task)
    assert set(expected(task)) <= set(read_journal(result.run_dir)[0]["notes"])


def test_plan_says_so(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_at_once(monkeypatch)
    assert set(expected(task)) <= set(alto.Engine().plan(task).notes)


def test_preview_says_so(task: alto.Task) -> None:
    assert set(expected(task)) <= set(alto.Engine().preview(task).notes)
    shown = CliRunner().invoke(app, ["preview", task.dataset, "--model", task.model])
    assert "note:        attention_dropout 0.1 of the base model" in shown.output


def test_a_skeleton_has_the_models_modules_and_no_memory(task: alto.Task) -> None:
    skeleton = build_skeleton(BaseModelSpec(id=task.model))
    model = build_mixture("qwen3-moe-dense", vocab_size=skeleton.config.vocab_size)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name: parameter.shape for name, parameter in skeleton.named_parameters()} == shapes
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    of_skeleton, of_model = (model_notes(one, [JobConfig()], "sft") for one in (skeleton, model))
    assert (of_skeleton[0], of_skeleton[-1]) == (of_model[0], of_model[-1])


def test_a_configuration_without_a_causal_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match=r"expected config\.json of a causal language model"):
        build_skeleton(BaseModelSpec(id=str(tmp_path)))
