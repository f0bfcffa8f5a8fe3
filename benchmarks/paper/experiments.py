"""Every benchmark by name: the tables and figures of the paper, and the others."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EXPERIMENTS", "OTHERS", "PAPER", "Experiment", "load"]

Goal = tuple[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A table or figure, and what measures it.

    Functions are named as ``package.module:function``, so that what one experiment needs is no need of the others.

    Attributes:
        title: Of its section in the page.
        topic: The result file is ``<topic>-<scale>.json``; more about it may stand in ``notes/<topic>.md``.
        program: Measures it and writes the result file: takes arguments as a command line has them and returns an exit
            code, 0 where the gate passed.
        recorded: Instead of a program: what an experiment on the recorded sweeps finds on them.
        drawing: Fills axes with what was found, if there is a picture.
        panels: How many axes it has, beside each other.
        shows: What the paper shows by it, and what is measured here; empty for what the paper does not have.
        paper: The paper's values of figures, as it gives them.
        goals: Ours, of an experiment on recordings; programs have their own.
        figures: Those that the page shows; all where empty.
        scales: Where it can be measured.
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
    """The function that ``package.module:function`` names."""
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


_CURVES = "benchmarks.paper.curves"

PAPER: Mapping[str, Experiment] = {
    "sensitivity": Experiment(
        title="How much the configuration matters",
        shows="The quality of an adapter depends on learning rate, rank and batch size. Here: the best validation loss "
        "of every configuration of the recorded sweeps, those of preference tuning too, and of these the best reward "
        "accuracy.",
        topic="sensitivity",
        recorded=f"{_CURVES}:sensitivity",
        drawing=f"{_CURVES}:draw_sensitivity",
        panels=2,
    ),
    "batch-size": Experiment(
        title="Quality and batch size",
        shows="Small batches reach better adapters, so that a GPU is filled by many adapters rather than by large "
        "batches. Here: the best loss of each batch size over the best of the sweep.",
        topic="batch_size",
        recorded=f"{_CURVES}:batch_size",
        drawing=f"{_CURVES}:draw_batch_size",
    ),
    "patterns": Experiment(
        title="Three patterns of curves that lead nowhere",
        shows="Diverging, overfitting and underperforming jobs. Here: how many jobs of the recorded sweeps Algorithm 1 "
        "ends by each pattern, and the curves of the one that would have lost most.",
        topic="patterns",
        recorded=f"{_CURVES}:patterns",
        drawing=f"{_CURVES}:draw_patterns",
        panels=3,
    ),
    "rank-correlation": Experiment(
        title="Early ranks and final ranks",
        shows="After a short warmup the order of the jobs is close to that of their ends. Here: Spearman's coefficient "
        "between the validation losses at a share of the steps and the best loss that each job reaches.",
        topic="rank_correlation",
        recorded=f"{_CURVES}:rank_correlation",
        drawing=f"{_CURVES}:draw_rank_correlation",
    ),
    "warmup-sweep": Experiment(
        title="How long a warmup has to be",
        shows="5 % of the steps, after which the best quarter continues. Here: what that would keep of the final best "
        "quarter and of the winners, for warmups of 1 to 20 %.",
        topic="warmup_sweep",
        recorded=f"{_CURVES}:warmup_sweep",
        drawing=f"{_CURVES}:draw_warmup_sweep",
    ),
    "samples-saved": Experiment(
        title="Samples that are not trained, by pattern",
        shows="Early exit saves 72 to 83 % of the samples, overfitting 24 % and diverging jobs 12 % of preference "
        "tuning among them. Here: the default policy and Algorithm 1 on the same recorded curves.",
        topic="samples_saved",
        recorded=f"{_CURVES}:samples_saved",
        drawing=f"{_CURVES}:draw_samples_saved",
        panels=2,
        paper={"paper_saved": "0.72 to 0.83"},
        goals={"default_saved": (">=", 0.92)},
    ),
    "early-exit-quality": Experiment(
        title="What early exit costs in quality, per batch size",
        shows="Nothing, according to the paper. Here: the jobs of each batch size of a recorded sweep as a sweep by "
        "themselves, by the default policy.",
        topic="early_exit_quality",
        recorded=f"{_CURVES}:early_exit_quality",
        drawing=f"{_CURVES}:draw_early_exit_quality",
        paper={"regret_mean": "1"},
        goals={"regret_mean": ("<=", 1.002)},
    ),
    "utilization": Experiment(
        title="Memory and device use of one adapter and of many",
        shows="One job at a small batch size leaves most of a GPU's memory and arithmetic unused; many adapters on one "
        "frozen base fill it. Here: the share of a large GEMM's FLOP/s and the peak of memory of 1 to 32 adapters "
        "together, and of one job with PEFT.",
        topic="utilization",
        program="benchmarks.paper.utilization:main",
        drawing="benchmarks.paper.utilization:draw_utilization",
        panels=2,
        scales=("smoke", "cpu", "gpu"),
    ),
    "kernels": Experiment(
        title="A training step of many adapters",
        shows="Grouped GEMMs over all adapters against one launch an adapter and one adapter at a time.",
        topic="kernels",
        program="benchmarks.kernels.program:main",
        scales=("smoke", "cpu", "gpu"),
    ),
    "end-to-end": Experiment(
        title="A sweep of 60 configurations, end to end",
        shows="Up to 9.5 times the speed of LoRAFusion on one GPU with early exit; 4.7 times that of one job after the "
        "other, 1.7 times by batching. Here: the same grid on three datasets, beside what people use today.",
        topic="end_to_end",
        program="benchmarks.end_to_end.program:main",
        paper={"over_trl": "4.7", "batched_over_sequential": "1.7", "over_lorafusion": "9.5"},
        scales=("smoke", "cpu", "gpu"),
    ),
    "quality": Experiment(
        title="The best that is found against recommended settings",
        shows="A sweep finds better adapters than settings that are recommended for all. Here: the best of the paper's "
        "grid by the default policy against what Unsloth and the authors of LoRA Without Regret recommend.",
        topic="quality",
        program="benchmarks.end_to_end.quality:main",
        scales=("smoke", "cpu", "gpu"),
    ),
    "dpo": Experiment(
        title="Preference tuning, end to end",
        shows="1.7 times the speed of one job after the other by batching, 4.7 times with early exit.",
        topic="dpo",
        program="benchmarks.dpo.program:main",
        paper={"batched_over_sequential": "1.7", "early_exit_over_sequential": "4.7"},
    ),
    "makespan": Experiment(
        title="Many tasks: batching, scheduling, early exit",
        shows="What batching (B), the scheduler (S) and early exit (EE) save of the time until the last of eleven "
        "tasks has ended.",
        topic="makespan",
        program="benchmarks.makespan:main",
    ),
    "adapter-parallel": Experiment(
        title="Adapters on several GPUs",
        shows="Adapter parallelism against FSDP, tensor and pipeline parallelism; up to 13.8 times the speed of "
        "LoRAFusion with early exit on bases of 70 billion parameters.",
        topic="adapter_parallel",
        program="benchmarks.adapter_parallel.program:main",
        scales=("smoke", "cpu", "gpu"),
    ),
}
"""The paper's tables and figures, in the order in which ``all`` measures them: the shortest first."""

OTHERS: Mapping[str, Experiment] = {
    "real": Experiment(
        title="Sweeps on a pretrained model, beside what people use",
        topic="real",
        program="benchmarks.real.program:main",
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
        title="What the host does for a step's kernels",
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
    "service": Experiment(
        title="A service under load",
        topic="service",
        program="benchmarks.service.program:main",
    ),
}
"""What the paper does not have."""

EXPERIMENTS: Mapping[str, Experiment] = {**PAPER, **OTHERS}
"""All of them."""
