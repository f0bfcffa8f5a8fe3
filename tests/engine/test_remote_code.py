"""Python code of a base model runs only if the caller allows it, never because a run's own files say so."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from tiny import make_task, save_model
from transformers import dynamic_module_utils
from typer.testing import CliRunner

import alto
from alto.cli.app import app
from alto.cluster import Outcome, run_host
from alto.engine import work
from alto.errors import UntrustedCodeError
from alto.runs import QueueDir, QueueEntry, RunDir

CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

Path({marker!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


class Planted:
    """A base model with its own code, which creates ``marker`` when it runs."""

    def __init__(self, folder: Path) -> None:
        self.marker = folder / "executed"
        self.model = save_model(folder / "model")
        config = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        config["auto_map"] = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
        config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
        (self.model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (self.model / "own_code.py").write_text(CODE.format(marker=str(self.marker)), encoding="utf-8")

    def forget(self) -> None:
        """Forget the code's modules, because Python does not run an imported module again."""
        for name in [name for name in sys.modules if name.startswith("transformers_modules.")]:
            del sys.modules[name]
        self.marker.unlink()

    @property
    def has_run(self) -> bool:
        return self.marker.exists()


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return Planted(tmp_path)


@pytest.fixture
def task(planted: Planted, tmp_path: Path) -> alto.Task:
    return make_task(
        tmp_path, model=str(planted.model), trust_remote_code=True, num_train_epochs=1, r=4, report_to="none"
    )


@pytest.fixture
def waiting(task: alto.Task, tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", task)


@pytest.fixture
def finished(task: alto.Task, tmp_path: Path, planted: Planted) -> RunDir:
    """A finished run; the user's task allowed the code."""
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    assert planted.has_run
    planted.forget()
    return RunDir.open(result.run_dir)


def queue_of(task: alto.Task, folder: Path, **settings: object) -> QueueDir:
    entry = QueueEntry(task=task.name, num_gpus=1, duration_s=1.0)
    usual = {"method": "lpt", "strategy": "adapter_parallel", "cluster": "local", "total_gpus": 1, "quotas": {}}
    return QueueDir.create(folder, [entry], [task], {**usual, **settings})


def test_a_run_is_resumed_with_the_callers_permission_alone(waiting: RunDir, planted: Planted) -> None:
    with pytest.raises(
        UntrustedCodeError, match=r"expected permission from you.*found it only in .*task\.yaml.*--trust"
    ):
        alto.Engine().resume(waiting.root)
    with pytest.raises(UntrustedCodeError):
        alto.Engine().resume(waiting.root, num_gpus=2)
    assert not planted.has_run
    alto.Engine().resume(waiting.root, trust_remote_code=True)
    assert planted.has_run


def test_a_run_is_evaluated_with_the_callers_permission_alone(finished: RunDir, planted: Planted) -> None:
    with pytest.raises(UntrustedCodeError, match="expected permission from you"):
        alto.Engine().evaluate(finished.root)
    with pytest.raises(UntrustedCodeError):
        alto.Engine().evaluate(finished.root, base="alto-tiny")
    assert not planted.has_run
    alto.Engine().evaluate(finished.root, trust_remote_code=True, metric="loss")
    assert planted.has_run


def test_permission_for_adapters_alone_is_for_their_base(finished: RunDir, planted: Planted, tmp_path: Path) -> None:
    adapter = shutil.copytree(finished.best, tmp_path / "adapter")
    rows = str(tmp_path / "validation.jsonl")
    with pytest.raises(alto.errors.ModelError, match="its own Python code"):
        alto.Engine().evaluate(adapter, dataset=rows, metric="loss")
    assert not planted.has_run
    alto.Engine().evaluate(adapter, dataset=rows, metric="loss", trust_remote_code=True)
    assert planted.has_run


def test_permission_does_not_switch_on_what_the_task_does_not_ask_for(
    waiting: RunDir, planted: Planted, task: alto.Task
) -> None:
    waiting.resolve(task.replace(trust_remote_code=False))
    with pytest.raises(alto.errors.ModelError, match="its own Python code"):
        alto.Engine().resume(waiting.root, trust_remote_code=True)
    assert not planted.has_run


@pytest.mark.parametrize("command", ["report", "show", "resume"])
def test_what_only_reads_a_finished_run_needs_none(finished: RunDir, planted: Planted, command: str) -> None:
    result = CliRunner().invoke(app, [command, str(finished.root)])
    assert result.exit_code == 0, result.output
    assert not planted.has_run


@pytest.mark.parametrize("command", ["resume", "eval"])
def test_the_flag_of_the_command(
    command: str, request: pytest.FixtureRequest, planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = request.getfixturevalue("waiting" if command == "resume" else "finished")
    refused = CliRunner().invoke(app, [command, str(run.root)])
    assert isinstance(refused.exception, UntrustedCodeError)
    assert not planted.has_run
    allowed = CliRunner().invoke(app, [command, str(run.root), "--trust-remote-code"])
    assert allowed.exit_code == 0, allowed.output
    assert planted.has_run


def test_a_queue_is_resumed_with_the_callers_permission_alone(
    task: alto.Task, planted: Planted, tmp_path: Path
) -> None:
    queue = queue_of(task, tmp_path)
    with pytest.raises(UntrustedCodeError, match="expected permission from you"):
        alto.Engine().resume_queue(queue.root)
    assert queue.run.journal_file.read_bytes() == b""
    assert not planted.has_run


@pytest.mark.parametrize("does", [work.TRAIN, work.PLAN, work.PLAN_ANEW])
def test_an_executor_has_permission_from_who_started_it(
    does: str,
    waiting: RunDir,
    planted: Planted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file may have been replaced since somebody looked at it."""
    for found in ("", "0"):
        monkeypatch.setenv("ALTO_TRUST_REMOTE_CODE", found)
        assert run_host(does, str(waiting.root), lambda: False).error == "UntrustedCodeError"
    assert not planted.has_run
    if does == work.TRAIN:
        monkeypatch.setenv("ALTO_TRUST_REMOTE_CODE", "1")
        assert run_host(does, str(waiting.root), lambda: False).outcome is Outcome.FINISHED
        assert planted.has_run


def test_the_address_of_a_ray_cluster_comes_from_the_caller(task: alto.Task, tmp_path: Path) -> None:
    queue = queue_of(
        task.replace(model="alto-tiny", trust_remote_code=False), tmp_path, cluster="ray://192.0.2.66:10001"
    )
    with pytest.raises(UntrustedCodeError, match=r"--cluster ray://192\.0\.2\.66:10001"):
        alto.Engine().resume_queue(queue.root)
    refused = CliRunner().invoke(app, ["resume", str(queue.root)])
    assert isinstance(refused.exception, UntrustedCodeError)


def test_the_cluster_that_the_caller_names_is_taken(
    task: alto.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OpenedError(Exception):
        pass

    def opened(name: str, **_: object) -> None:
        raise OpenedError(name)

    monkeypatch.setattr("alto.engine.queue_setup.open_cluster", opened)
    plain = task.replace(model="alto-tiny", trust_remote_code=False)
    for began_on, named, taken in (
        ("ray://192.0.2.66:10001", "ray://head:10001", "ray://head:10001"),
        ("auto", "local", "auto"),
        ("local", "local", "local"),
    ):
        queue = queue_of(plain, tmp_path, cluster=began_on)
        with pytest.raises(OpenedError, match=f"^{taken}$"):
            alto.Engine(cluster=named).resume_queue(queue.root)


def test_other_files_of_a_run_switch_nothing_on(finished: RunDir, planted: Planted) -> None:
    """An adapter's own configuration may name code for PEFT; ALTO reads matrices only."""
    path = finished.best / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_mapping"] = {"base_model_class": "OwnForCausalLM", "parent_library": "own_code"}
    path.write_text(json.dumps(config), encoding="utf-8")
    values = yaml.safe_load(finished.task_file.read_text(encoding="utf-8"))
    finished.task_file.write_text(yaml.safe_dump(values | {"trust_remote_code": False}), encoding="utf-8")
    with pytest.raises(alto.errors.RunChangedError, match="different Python code"):
        alto.Engine().evaluate(finished.root)
    assert not planted.has_run
