"""All benchmarks by name: the tables and figures of the paper, and the others."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EXPERIMENTS", "OTHERS", "PAPER", "Experiment", "load"]

Goal = tuple[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A table or figure, and the function that measures it.

    Functions are named ``package.module:function``, so that the imports of one experiment are not needed for others.

    Attributes:
        title: Title of its section in the page.
        topic: The result file is ``<topic>-<scale>.json``; ``notes/<topic>.md`` may explain it.
        program: Function that measures it and writes the result file. It takes command-line arguments and returns an
            exit code, 0 if the gate passed.
        recorded: Function that computes the experiment from the recorded sweeps, instead of a program.
        drawing: Function that draws the result on axes; None if there is no picture.
        panels: Number of axes in the picture, side by side.
        shows: Result of the paper, and what is measured here; empty if the paper has no such experiment.
        paper: The paper's values of figures, as it gives them.
        goals: Goals of an experiment on recordings; programs have their own.
        figures: Figures that the page shows; empty for all.
        scales: Scales at which it can be measured.
    """

    title: str
    topic: str
    program: str | None = None
    recorded: str | None = None
    drawing: str | None = None
    panels: int = 1
    shows: str = ""
    paper: Mapping[str, str] = field(default_factory=dict)
    goals: Mapping[str, Goal] = field(default_factory=dict)
    figures: Sequence[str] = ()
    scales: Sequence[str] = ("smoke", "cpu")


def load(function: str) -> Callable[..., Any]:
    """Return the function that ``package.module:function`` names."""
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


_CURVES = "benchmarks.paper.curves"

PAPER: Mapping[str, Experiment] = {
    "sensitivity": Experiment(
        title="How much the configuration matters",
        shows="The quality of an adapter depends on learning rate, rank and batch size. Here: the best validation loss "
        "of every configuration of the recorded sweeps; for sweeps of preference tuning, also the best reward "
        "accuracy.",
        topic="sensitivity",
        recorded=f"{_CURVES}:sensitivity",
        drawing=f"{_CURVES}:draw_sensitivity",
        panels=2,
    ),
    "batch-size": Experiment(
        title="Quality and batch size",
        shows="Small batches give better adapters, so many adapters instead of large batches should fill a GPU. Here: "
        "the best loss of each batch size, divided by the best loss of the sweep.",
        topic="batch_size",
        recorded=f"{_CURVES}:batch_size",
        drawing=f"{_CURVES}:draw_batch_size",
    ),
    "patterns": Experiment(
        title="Three patterns of losing jobs",
        shows="Jobs diverge, overfit or underperform. Here: how many jobs of the recorded sweeps Algorithm 1 ends by "
        "each pattern, and for each pattern the curves of the job that would have lost most.",
        topic="patterns",
        recorded=f"{_CURVES}:patterns",
        drawing=f"{_CURVES}:draw_patterns",
        panels=3,
    ),
    "rank-correlation": Experiment(
        title="Early ranks and final ranks",
        shows="After a short warmup the order of the jobs is close to their final order. Here: Spearman's coefficient "
        "between the validation losses at a share of the steps and the best loss that each job reaches.",
        topic="rank_correlation",
        recorded=f"{_CURVES}:rank_correlation",
        drawing=f"{_CURVES}:draw_rank_correlation",
    ),
    "warmup-sweep": Experiment(
        title="How long a warmup has to be",
        shows="A warmup of 5 % of the steps is enough; then the best quarter continues. Here: which share of the final "
        "best quarter and of the winners this rule keeps, for warmups of 1 to 20 %.",
        topic="warmup_sweep",
        recorded=f"{_CURVES}:warmup_sweep",
        drawing=f"{_CURVES}:draw_warmup_sweep",
    ),
    "samples-saved": Experiment(
        title="Samples that are not trained, by pattern",
        shows="Early exit saves 72 to 83 % of the samples; in preference tuning, overfitting jobs account for 24 % and "
        "diverging jobs for 12 %. Here: the default policy and Algorithm 1 on the same recorded curves.",
        topic="samples_saved",
        recorded=f"{_CURVES}:samples_saved",
        drawing=f"{_CURVES}:draw_samples_saved",
        panels=2,
        paper={"paper_saved": "0.72 to 0.83"},
        goals={"default_saved": (">=", 0.92)},
    ),
    "early-exit-quality": Experiment(
        title="What early exit costs in quality, per batch size",
        shows="Early exit costs no quality. Here: the default policy on recorded sweeps, with the jobs of each batch "
        "size as a separate sweep.",
        topic="early_exit_quality",
        recorded=f"{_CURVES}:early_exit_quality",
        drawing=f"{_CURVES}:draw_early_exit_quality",
        paper={"regret_mean": "1"},
        goals={"regret_mean": ("<=", 1.002)},
    ),
    "utilization": Experiment(
        title="Memory and device use of one adapter and of many",
        shows="One job at a small batch size leaves most of a GPU's memory and arithmetic unused; many adapters on one "
        "frozen base fill it. Here: FLOP/s as a share of those of a large GEMM, and the memory peak, of 1 to 32 "
        "adapters together, and of one job with PEFT.",
        topic="utilization",
        program="benchmarks.paper.utilization:main",
        drawing="benchmarks.paper.utilization:draw_utilization",
        panels=2,
        scales=("smoke", "cpu", "gpu"),
    ),
    "kernels": Experiment(
        title="A training step of many adapters",
        shows="Grouped GEMMs over all adapters, compared with one launch per adapter and with one adapter at a time.",
        topic="kernels",
        program="benchmarks.kernels.program:main",
        scales=("smoke", "cpu", "gpu"),
    ),
    "end-to-end": Experiment(
        title="A sweep of 60 configurations, end to end",
        shows="On one GPU ALTO with early exit is up to 9.5 times as fast as LoRAFusion. It is 4.7 times as fast as "
        "one job after the other, and 1.7 times by batching alone. Here: the same grid on three datasets, compared "
        "with the tools that people use today.",
        topic="end_to_end",
        program="benchmarks.end_to_end.program:main",
        paper={"over_trl": "4.7", "batched_over_sequential": "1.7", "over_lorafusion": "9.5"},
        scales=("smoke", "cpu", "gpu"),
    ),
    "quality": Experiment(
        title="The best adapter of a sweep and recommended settings",
        shows="A sweep finds better adapters than settings that are recommended for all models and data. Here: the "
        "best adapter that the default policy finds in the paper's grid, compared with the settings that Unsloth and "
        "the authors of LoRA Without Regret recommend.",
        topic="quality",
        program="benchmarks.end_to_end.quality:main",
        scales=("smoke", "cpu", "gpu"),
    ),
    "dpo": Experiment(
        title="Preference tuning, end to end",
        shows="Batching is 1.7 times as fast as one job after the other, and with early exit 4.7 times.",
        topic="dpo",
        program="benchmarks.dpo.program:main",
        paper={"batched_over_sequential": "1.7", "early_exit_over_sequential": "4.7"},
    ),
    "makespan": Experiment(
        title="Many tasks: batching, scheduling, early exit",
        shows="The time until the last of eleven tasks has ended, with batching (B), with the scheduler (S) and with "
        "early exit (EE).",
        topic="makespan",
        program="benchmarks.makespan:main",
    ),
    "adapter-parallel": Experiment(
        title="Adapters on several GPUs",
        shows="Adapter parallelism is compared with FSDP, tensor and pipeline parallelism; with early exit it is up to "
        "13.8 times as fast as LoRAFusion on bases of 70 billion parameters.",
        topic="adapter_parallel",
        program="benchmarks.adapter_parallel.program:main",
        scales=("smoke", "cpu", "gpu"),
    ),
}
"""The paper's tables and figures, in the order in which ``all`` measures them: the shortest first."""

OTHERS: Mapping[str, Experiment] = {
    "real": Experiment(
        title="Sweeps on a pretrained model, compared with the tools that people use",
        topic="real",
        program="benchmarks.real.program:main",
        scales=("smoke", "cpu", "gpu"),
    ),
    "policies": Experiment(
        title="Early-exit policies, by replay on recorded sweeps",
        topic="policies",
        program="benchmarks.policies.program:main",
    ),
    "times": Experiment(
        title="Early-exit policies, by replay, in time",
        topic="times",
        program="benchmarks.policies.times:main",
    ),
    "search": Experiment(
        title="Four searches of one space, against Optuna around PEFT",
        topic="search",
        program="benchmarks.search:main",
    ),
    "shared-prompts": Experiment(
        title="Preference pairs whose prompt goes through the model once",
        topic="shared_prompts",
        program="benchmarks.shared_prompts:main",
    ),
    "launches": Experiment(
        title="Time of the host to launch a step's kernels",
        topic="launches",
        program="benchmarks.kernels.launches:main",
    ),
    "memory": Experiment(
        title="Memory and time, predicted and measured",
        topic="memory",
        program="benchmarks.memory.program:main",
        scales=("smoke", "cpu", "gpu"),
    ),
    "scheduler": Experiment(
        title="Which task runs where and when",
        topic="scheduler",
        program="benchmarks.scheduler:main",
    ),
    "colocation": Experiment(
        title="Six tasks in one process",
        topic="colocation",
        program="benchmarks.colocation:main",
    ),
    "generate": Experiment(
        title="Answers of eight adapters",
        topic="generate",
        program="benchmarks.generate:main",
    ),
    "grpo": Experiment(
        title="Reinforcement learning with rewards",
        topic="grpo",
        program="benchmarks.grpo:main",
        drawing="benchmarks.grpo:draw_curve",
    ),
    "servers": Experiment(
        title="What ALTO exports, in the servers that people use",
        topic="servers",
        program="benchmarks.servers.program:main",
    ),
    "service": Experiment(
        title="A service under load",
        topic="service",
        program="benchmarks.service.program:main",
    ),
}
"""Experiments that the paper does not have."""

EXPERIMENTS: Mapping[str, Experiment] = {**PAPER, **OTHERS}
"""All experiments."""
