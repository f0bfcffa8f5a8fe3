"""Notes of a run: parts of a base that jobs do not train, and the kernels and layers that are compiled."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from moe_models import build_mixture
from profiles import measured_at_once
from tiny import load_tokenizer, make_task, read_journal, run_task
from typer.testing import CliRunner

import alto
from alto.backbone import build_skeleton
from alto.cli.app import app
from alto.errors import ModelError
from alto.executor import beginning, model_notes
from alto.executor.beginning import compile_notes
from alto.executor.trainer import Trainer
from alto.runs import RunDir
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


def _state(*, is_compiled: bool = True, is_padded: bool = False, groups: tuple[int, int] = (8, 8)) -> Any:
    backbone = SimpleNamespace(is_compiled=is_compiled, is_padded=is_padded)
    passes = SimpleNamespace(forward_context=SimpleNamespace(graph_groups=groups))
    return SimpleNamespace(context=SimpleNamespace(backbone=backbone), trainer=SimpleNamespace(passes=passes))


def test_without_torch_compile_there_is_no_note() -> None:
    assert compile_notes(_state(is_compiled=False)) == ()


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, r"for 8 of 8 inputs of linear modules\.$"),
        (
            {"groups": (6, 8)},
            r"for 6 of 8 inputs .* outside the .* as .* biases \(bias\) or magnitudes \(use_dora\)\.$",
        ),
        ({"groups": (0, 8), "is_padded": True}, r"for 0 of 8 inputs .* outside the compiled .* as rows are padded\.$"),
    ],
)
def test_what_is_inside_and_why_others_are_not(state: dict[str, Any], expected: str) -> None:
    [note] = compile_notes(_state(**state))
    assert re.search(expected, note), note


SPACE = {"lr": [1e-3], "lora_dropout": [0.0, 0.1], "optim": ["sgd"], "batch_size": [8]}


def events_of(folder: Path) -> list[dict[str, Any]]:
    task = make_task(folder, search_space=SPACE, num_train_epochs=1)
    run_dir = RunDir.create(folder / "run", task)
    run_task(task, run_dir)
    return read_journal(run_dir.root)


@pytest.mark.parametrize(("every_s", "expected"), [(0.0, [0, 1, 2, 3, 4]), (math.inf, [0, 4])])
def test_it_says_how_far_they_are_before_the_base_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float, expected: list[int]
) -> None:
    compiled: list[list[tuple[float, str]]] = []

    def compile_kernels(trainer: Trainer, configs: Sequence[JobConfig]) -> Iterator[tuple[int, int]]:
        compiled.append([(config.lora_dropout, config.optim) for config in configs])
        return iter([(done, 4) for done in range(5)])

    monkeypatch.setattr(Trainer, "compile_kernels", compile_kernels)
    monkeypatch.setattr(beginning, "_REPORT_EVERY_S", every_s)
    events = events_of(tmp_path)
    assert compiled == [[(0.0, "sgd"), (0.1, "sgd")]]
    found = [event for event in events if event["event"] == "kernels_compiled"]
    assert events[1 : 1 + len(found)] == found, "after task_started, before base_evaluated"
    assert [(event["done"], event["total"]) for event in found] == [(done, 4) for done in expected]
    durations = [event["duration_s"] for event in found]
    assert durations == sorted(durations)


def test_where_nothing_is_compiled_it_says_nothing(tmp_path: Path) -> None:
    assert not any(event["event"] == "kernels_compiled" for event in events_of(tmp_path))
