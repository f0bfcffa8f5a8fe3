"""docs/coming-from-trl.md is one program in which TRL's trainers and ALTO train the same adapters."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import alto
from alto.backbone import load_network, resolve_model
from alto.cli import app
from alto.data import DataOrder
from alto.runs import RunDir, load_run_task
from alto.spec import BaseModelSpec, load_task
from alto.spec.job_config import JOB_FIELDS
from alto.spec.method import find_method
from alto.spec.task import TASK_FIELDS

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

import datasets
import transformers
import trl
from peft import LoraConfig, get_peft_model_state_dict
from resident_jobs import Bank

from benchmarks.baselines.trl_parts import OrderedSampler

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of TRL and of what it calls

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from-trl.md").read_text(encoding="utf-8")
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
TOLERANCE = 1e-4


def blocks(language: str) -> list[str]:
    """Return the page's blocks, with the model that ships with ALTO."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [text.replace(MODEL, str(resolve_model("alto-tiny"))) for name, text in fenced if name == language]


def adapter_of(model: Any) -> dict[str, Tensor]:
    """Return a copy of an adapter in training, by the names in PEFT's files."""
    return {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(model).items()}


def start_of(trainer: Any) -> dict[str, Tensor]:
    """Return ALTO's initial adapter for the rank and seed of ``trainer``, by the names in PEFT's files."""
    lora = trainer.model.peft_config["default"]
    settings = {"max_tokens_per_pass": 1000, "r": lora.r, "lora_alpha": lora.lora_alpha, "seed": trainer.args.seed}
    task = alto.Task(model="alto-tiny", dataset="none.jsonl", **settings)
    bank = Bank(load_network(BaseModelSpec(id="alto-tiny")), task)
    found = {}
    for name, (a, b) in bank.trainer.bank.read(bank.jobs[0].slot).items():
        found[f"base_model.model.{name}.lora_A.weight"] = a.T
        found[f"base_model.model.{name}.lora_B.weight"] = b.T
    return found


@dataclass(frozen=True, kw_only=True)
class Page:
    """The state after the page's blocks.

    Attributes:
        names: Its variables.
        starts: The initial adapter of each trainer, by the id of the trainer.
    """

    names: dict[str, Any]
    starts: dict[int, dict[str, Tensor]]

    def run(self, block: str) -> None:
        """Run ``block``; trainers begin with ALTO's adapters and take rows in ALTO's order."""
        train = transformers.Trainer.train

        def from_altos_start(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            start = start_of(trainer)
            with torch.no_grad():
                for name, parameter in trainer.model.named_parameters():
                    if parameter.requires_grad:
                        parameter.copy_(start.pop(name.replace(".default.", ".")))
            assert not start, "the trainer has other modules than the job"
            self.starts[id(trainer)] = adapter_of(trainer.model)
            return train(trainer, *args, **kwargs)

        def in_altos_order(trainer: Any, *_: Any) -> OrderedSampler:
            num_rows, size = len(trainer.train_dataset), trainer.args.per_device_train_batch_size
            order, num_steps = DataOrder(num_rows, size, trainer.args.seed), -(-num_rows // size)

            def epoch(number: int) -> list[int]:
                steps = range(number * num_steps, (number + 1) * num_steps)
                return [row for step in steps for row in order.rows_of_step(step)]

            return OrderedSampler(epoch, num_rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformers.Trainer, "train", from_altos_start)
            patch.setattr(transformers.Trainer, "_get_train_sampler", in_altos_order)
            exec(compile(block, "docs/coming-from-trl.md", "exec"), self.names)

    def distance(self, trainer: str, expected: Mapping[str, Tensor]) -> float:
        """Return the distance of the trainer's adapter from ``expected``, relative to the trainer's update."""
        found, start = adapter_of(self.names[trainer].model), self.starts[id(self.names[trainer])]
        assert found.keys() == expected.keys() == start.keys()

        def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
            return sum(float((one[name] - other[name]).double().square().sum()) for name in one) ** 0.5

        return apart(found, expected) / apart(found, start)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page after its last block; its runs keep the adapters of a job's last step."""
    folder, task = tmp_path_factory.mktemp("page"), alto.Task
    page = Page(names={"__name__": "page"}, starts={})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        patch.setattr(alto, "Task", lambda **settings: task(**settings, keep="all"))
        for block in blocks("python"):
            page.run(block)
        yield page


def last_adapter(result: alto.TaskResult) -> dict[str, Tensor]:
    """Return the best job's adapter after its last step."""
    folder = RunDir(Path(result.run_dir)).job(result.best_job, "last")
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.slow("queues")
class TestBothPrograms:
    @pytest.mark.parametrize(
        ("trainer", "result"), [("trainer", "one"), ("preferences", "preferred"), ("again", "sweep")]
    )
    def test_train_the_same_adapter(self, page: Page, trainer: str, result: str) -> None:
        """In the last case TRL trains the sweep's winner again, with ``result.best_config``."""
        found: alto.TaskResult = page.names[result]
        (best,) = (job for job in found.job_results if job.job == found.best_job)
        assert best.exit_reason is None, "a job that ended early is not what TRL has trained"
        assert page.distance(trainer, last_adapter(found)) <= TOLERANCE

    def test_measure_the_same_validation_loss(self, page: Page) -> None:
        """TRL evaluates eight rows as one batch, so that its loss is a mean over tokens."""
        curve = page.names["one"].curves
        assert page.names["trainer"].evaluate()["eval_loss"] == pytest.approx(
            curve["validation_loss"].iloc[-1], rel=TOLERANCE
        )

    def test_the_adapter_that_trl_has_saved_is_the_one_that_was_compared(self, page: Page) -> None:
        saved = load_file("trl-sums/adapter/adapter_model.safetensors")
        assert page.distance("trainer", saved) == 0.0

    def test_the_comparison_finds_a_learning_rate_of_one_per_cent_more(self, page: Page) -> None:
        [script] = [block for block in blocks("python") if "SFTConfig(" in block]
        other = Page(names=dict(page.names), starts={})
        other.run(script.replace("learning_rate=2e-3", "learning_rate=2.02e-3"))
        assert other.distance("trainer", last_adapter(page.names["one"])) > 10 * TOLERANCE

    def test_the_file_is_the_task_of_the_program(self, page: Page) -> None:
        Path("task.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
        written = load_task("task.yaml")
        trained = load_run_task(RunDir(Path(page.names["one"].run_dir)), trust_remote_code=False)
        assert written.jobs == trained.jobs
        for key in ("model", "dataset", "validation_dataset", "dtype", "max_length", "method"):
            assert getattr(written, key) == getattr(trained, key), key
        assert not written.early_exit.enabled
        assert not trained.early_exit.enabled

    def test_the_arguments_are_imported_as_the_configuration_of_the_program(self, page: Page) -> None:
        for command in blocks("bash")[0].splitlines():
            done = CliRunner().invoke(app, shlex.split(command)[1:])
            assert done.exit_code == 0, done.output
        trained = load_run_task(RunDir(Path(page.names["one"].run_dir)), trust_remote_code=False)
        imported = load_task("imported.yaml")
        assert (imported.jobs[0].config, imported.max_length) == (trained.jobs[0].config, trained.max_length)
        swept = [(job.config.learning_rate, job.config.r) for job in load_task("sweep.yaml").jobs]
        assert swept == [(rate, rank) for rate in (1e-4, 5e-4, 2e-3) for rank in (8, 32)]

    def test_the_objects_of_the_script_are_the_configuration_of_the_program(self, page: Page) -> None:
        trained = load_run_task(RunDir(Path(page.names["one"].run_dir)), trust_remote_code=False)
        same = page.names["same"]
        assert (same.jobs[0].config, same.max_length) == (trained.jobs[0].config, trained.max_length)
        assert same.base_model.dtype == trained.base_model.dtype == "float32"

    def test_the_winner_is_ready_to_generate(self, page: Page) -> None:
        model = page.names["model"]
        assert not model.training
        assert "default" in model.peft_config


NAME = re.compile(r"`([a-z][a-z0-9_]*)`")
VALUES = {"completion", "all", "auto"}
"""Values of keys that the table names beside them."""


def names_of_scripts() -> set[str]:
    """Return the arguments of TRL's trainers, of their configurations and of PEFT's."""
    configurations = (trl.SFTConfig, trl.DPOConfig, LoraConfig)
    trainers = (trl.SFTTrainer, trl.DPOTrainer)
    return {field.name for kind in configurations for field in fields(kind)} | {
        name for kind in trainers for name in signature(kind).parameters
    }


def table() -> list[tuple[str, str]]:
    found = re.findall(r"^\| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
    return [(script, task) for script, task in found if "in the script" not in script]


def test_the_table_names_what_scripts_have_and_what_tasks_have() -> None:
    assert len(table()) > 15
    keys = {*TASK_FIELDS, *JOB_FIELDS}
    for script, task in table():
        assert set(NAME.findall(script)) <= names_of_scripts(), script
        assert set(NAME.findall(task)) - VALUES <= keys, task


def test_what_has_the_same_name_in_both_has_it() -> None:
    listed = PAGE.split("This table leaves out arguments with the same name in both:")[1].split("\n\n")[0]
    names = set(NAME.findall(listed))
    assert len(names) > 10
    assert names <= names_of_scripts()
    assert names <= {*TASK_FIELDS, *JOB_FIELDS}


def test_the_defaults_that_are_named_are_those_of_this_version() -> None:
    (line,) = (line for line in PAGE.splitlines() if line.startswith("- **Defaults.**"))
    assert "`learning_rate` is 2e-4 with every method (TRL: 2e-5, with preferences 1e-6), `r` is 16" in line
    for method in ("sft", "dpo"):
        task = alto.Task(model="m", dataset="rows.jsonl", method=find_method(method).name)
        assert (task.jobs[0].config.learning_rate, task.jobs[0].config.r) == (2e-4, 16)
    defaults = {kind: {field.name: field.default for field in fields(kind)} for kind in (trl.SFTConfig, trl.DPOConfig)}
    assert defaults[trl.SFTConfig]["learning_rate"] == 2e-5
    assert defaults[trl.DPOConfig]["learning_rate"] == 1e-6
    assert {of["max_length"] for of in defaults.values()} == {1024}
