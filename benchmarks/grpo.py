"""Measures reinforcement learning: configurations of GRPO together, beside TRL's ``GRPOTrainer`` one by one.

    python -m tools.make_real_model --models smollm2-135m
    python -m benchmarks.paper grpo --scale cpu

The task is ``examples/rewards.yaml``: SmolLM2-135M learns to add two numbers and to answer with the number only.
``batched`` trains all configurations without early exit, ``early exit`` is the task as it is. Both are timed as a
whole: set-up, measuring, sampling, rewards, training, evaluation, saving. TRL trains the first steps of one
configuration for each number of completions per prompt, with its own generation, without evaluations; its time per step
stands for all. The test of isolation measures how far steps are from TRL's. The gate: the winner's reward on prompts
that nothing was chosen by is higher than that of the base model.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from matplotlib.axes import Axes

from alto import Engine, Task, TaskResult
from alto.runs import read_history
from alto.spec import load_task
from benchmarks.common import ROOT, option_parser, publish_figures
from benchmarks.paper.curves import Found
from benchmarks.rows import read_rows

MODEL = ROOT / ".models" / "smollm2-135m"
GOALS = {
    "batched_over_trl": (">=", 4.5),
    "early_exit_over_trl": (">=", 10.0),
    "reward_gain": (">=", 0.4),
    "parity_worst": ("<=", 1e-5),
}
SPACE = {"learning_rate": [1e-4, 3e-4, 1e-3, 3e-3], "num_generations": [4, 8]}
"""Eight configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps of the task, steps that ``batched`` and TRL take, the model, and whether the steps are enough to learn."""

    steps: int
    batched_steps: int
    trl_steps: int
    model: str
    has_gate: bool = True


PLANS = {
    "smoke": Plan(steps=4, batched_steps=2, trl_steps=1, model="alto-tiny", has_gate=False),
    "cpu": Plan(steps=40, batched_steps=12, trl_steps=4, model=str(MODEL)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, PLANS, threads=True).parse_args(arguments)
    torch.set_num_threads(options.threads)
    plan = PLANS[options.scale]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = task_of(plan, folder / "rows")
        for size in SPACE["num_generations"]:
            rows.append({"system": "trl", "num_generations": size, "step_s": trl_step_s(task, plan, size, folder)})
            print(rows[-1], flush=True)
        rows.append({"system": "parity", "parity_worst": parity_worst(folder)})
        print(rows[-1], flush=True)
        batched = task.replace(max_steps=plan.batched_steps, early_exit=False, eval_steps=1.0, test_dataset=None)
        for system, each in (("batched", batched), ("early exit", task)):
            result, duration_s = tuned(each, folder / system.replace(" ", "-"))
            rows.append({"system": system, "duration_s": duration_s, "samples_saved": result.samples_saved})
            print(rows[-1], flush=True)
        before, after = rewards(result, task, plan)
        curve = [0.0 - loss for loss in read_history(result.run_dir).jobs[result.best_job].train_losses]
    rows[-1] |= {"winner": result.best_job, "reward": after, "base_reward": before, "curve": curve}
    return publish_figures(
        options,
        "grpo",
        gate_failures=gate(before, after) if plan.has_gate else [],
        figures=lambda: figures(rows, plan),
        goals=GOALS,
        rows=rows,
        notes=[
            f"{len(task.jobs)} configurations, {plan.steps} steps of 32 completions of at most 16 tokens; batched: the "
            f"first {plan.batched_steps} steps of all, evaluated once; TRL: {plan.trl_steps} steps of two of them.",
            "reward_gain is the winner's mean reward on 256 test prompts, answered with the most likely tokens, less "
            "the base model's. parity_worst is the largest relative difference of a loss or of weights from those of "
            "GRPOTrainer, in five steps of nine configurations (all loss types, with and without beta), each step from "
            "equal state on equal completions. The picture shows the mean reward of the winner's 32 completions at "
            "each step.",
        ],
    )


def draw_curve(found: Found, axes: Sequence[Axes]) -> None:
    """Draw the mean reward of the winner's completions at each training step."""
    (axis,), curve = axes, found.rows[-1]["curve"]
    axis.plot(range(1, len(curve) + 1), curve, "o-", markersize=3)
    axis.axhline(found.rows[-1]["base_reward"], color="black", linestyle=":", label="base model, test prompts")
    axis.axhline(found.rows[-1]["reward"], color="black", linestyle="--", label="winner, test prompts")
    axis.set_xlabel("training step")
    axis.set_ylabel("mean reward")
    axis.set_ylim(-0.02, 1.02)
    axis.legend(fontsize=8, frameon=False, loc="upper left")


def gate(before: float, after: float) -> list[str]:
    """Return the fault of a winner that answers no better than the base model; empty if it does."""
    return [] if after > before else [f"expected a reward above the base model's {before}, found {after}"]


def task_of(plan: Plan, folder: Path) -> Task:
    """Return the task of the example with eight configurations, on rows made in ``folder``."""
    command = (sys.executable, str(ROOT / "examples" / "make_additions.py"), "--output", str(folder))
    subprocess.run(command, check=True)
    files = {"dataset": "train", "validation_dataset": "validation", "test_dataset": "test"}
    task = load_task(
        ROOT / "examples" / "rewards.yaml", [f"{key}={folder / split}.jsonl" for key, split in files.items()]
    )
    return task.replace(model=plan.model, max_steps=plan.steps, report_to="none", search_space=SPACE)


def tuned(task: Task, output_dir: Path) -> tuple[TaskResult, float]:
    """Return the result of a task and the seconds of the whole run."""
    began = time.perf_counter()
    result = Engine(output_dir=output_dir).tune(task)
    return result, time.perf_counter() - began


def rewards(result: TaskResult, task: Task, plan: Plan) -> tuple[float, float]:
    """Return the share of test prompts that the base model and the winner answer rightly."""
    limit = None if plan.has_gate else 8
    report = Engine().evaluate(
        result.run_dir,
        dataset=task.test_dataset,
        metric="numeric",
        baseline=True,
        max_new_tokens=16,
        limit=limit,
    )
    assert report.baseline is not None
    return report.baseline.score, report.adapters[0].evaluation.score


def parity_worst(folder: Path) -> float:
    """Run the test that compares steps with TRL's, and return the largest relative difference that it found.

    Raises:
        subprocess.CalledProcessError: The test fails.
    """
    report = folder / "isolation.xml"
    test = "tests/executor/test_isolation_grpo.py"
    options = (
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "equal_trl_alone",
        f"--junitxml={report}",
        "-o",
        "junit_family=xunit1",
    )
    subprocess.run((sys.executable, "-m", "pytest", test, *options), cwd=ROOT, check=True)
    (found,) = ElementTree.parse(report).iterfind(".//property[@name='parity_worst']")
    return float(found.attrib["value"])


def trl_step_s(task: Task, plan: Plan, num_generations: int, folder: Path) -> float:
    """Return the seconds of a step of TRL's trainer, which generates with transformers; the first step is not timed."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from alto.backbone import resolve_model

    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    def numeric(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = (completion[0]["content"] for completion in completions)
        return [
            float(text.strip().rstrip(".").split()[-1:] == [right]) for text, right in zip(texts, answer, strict=True)
        ]

    base = resolve_model(plan.model)
    settings = GRPOConfig(
        output_dir=str(folder / f"trl-{num_generations}"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        per_device_train_batch_size=32,
        num_generations=num_generations,
        max_completion_length=16,
        learning_rate=1e-3,
        max_steps=1 + plan.trl_steps,
        seed=0,
    )
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["completion"]}
        for row in read_rows(Path(str(task.dataset)))
    ]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        reward_funcs=numeric,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[Clock()],
    )
    trainer.train()
    steps = [later - earlier for earlier, later in itertools.pairwise(times[1:])]
    return statistics.median(steps)


def figures(rows: Sequence[dict[str, Any]], plan: Plan) -> dict[str, float]:
    """Return the speed-ups over TRL, and the rise of the reward."""
    trl_s = [row["step_s"] for row in rows if row["system"] == "trl"]
    of_all_s = len(SPACE["learning_rate"]) * sum(trl_s)
    parity, batched, tuned_row = (row for row in rows if row["system"] != "trl")
    return {
        "batched_over_trl": of_all_s * plan.batched_steps / batched["duration_s"],
        "early_exit_over_trl": of_all_s * plan.steps / tuned_row["duration_s"],
        "reward_gain": tuned_row["reward"] - tuned_row["base_reward"],
        "parity_worst": parity["parity_worst"],
        "trl_step_s": statistics.fmean(trl_s),
        "batched_step_s": batched["duration_s"] / plan.batched_steps / 8,
    }
