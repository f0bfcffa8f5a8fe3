"""The tables and figures of the paper, and what measures each of them here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes

from benchmarks.paper import curves
from benchmarks.paper.curves import Found, Recordings

__all__ = ["EXPERIMENTS", "Drawing", "Experiment"]

Goal = tuple[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A picture of a result.

    Attributes:
        draw: Fills axes with what was found.
        panels: How many axes there are, beside each other.
    """

    draw: Callable[[Found, Sequence[Axes]], None]
    panels: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One table or figure.

    Attributes:
        title: Of its section.
        shows: What the paper shows by it, and what is measured here.
        topic: The result file is ``<topic>-<scale>.json``.
        measure: For an experiment on the recorded sweeps: what it finds on them.
        program: For another one: the script in ``benchmarks`` that measures it.
        paper: The paper's values of figures, as it gives them.
        goals: Ours, of an experiment on recordings; programs have their own.
        figures: Of a program: those that the page shows; all where empty.
        scales: Where it can be measured.
    """

    title: str
    shows: str
    topic: str
    measure: Callable[[Recordings], Found] | None = None
    program: str | None = None
    drawing: Drawing | None = None
    paper: Mapping[str, str] = field(default_factory=dict)
    goals: Mapping[str, Goal] = field(default_factory=dict)
    figures: Sequence[str] = ()
    scales: Sequence[str] = ("smoke", "cpu")


EXPERIMENTS: Mapping[str, Experiment] = {
    "sensitivity": Experiment(
        title="How much the configuration matters",
        shows="The quality of an adapter depends on learning rate, rank and batch size. Here: the best validation loss "
        "of every configuration of the recorded sweeps, those of preference tuning too.",
        topic="sensitivity",
        measure=curves.sensitivity,
        drawing=Drawing(draw=curves.draw_sensitivity),
    ),
    "batch-size": Experiment(
        title="Quality and batch size",
        shows="Small batches reach better adapters, so that a GPU is filled by many adapters rather than by large "
        "batches. Here: the best loss of each batch size over the best of the sweep.",
        topic="batch_size",
        measure=curves.batch_size,
        drawing=Drawing(draw=curves.draw_batch_size),
    ),
    "patterns": Experiment(
        title="Three patterns of curves that lead nowhere",
        shows="Diverging, overfitting and underperforming jobs. Here: how many jobs of the recorded sweeps Algorithm 1 "
        "ends by each pattern, and the curves of the one that would have lost most.",
        topic="patterns",
        measure=curves.patterns,
        drawing=Drawing(draw=curves.draw_patterns, panels=3),
    ),
    "rank-correlation": Experiment(
        title="Early ranks and final ranks",
        shows="After a short warmup the order of the jobs is close to that of their ends. Here: Spearman's coefficient "
        "between the validation losses at a share of the steps and the best loss that each job reaches.",
        topic="rank_correlation",
        measure=curves.rank_correlation,
        drawing=Drawing(draw=curves.draw_rank_correlation),
    ),
    "warmup-sweep": Experiment(
        title="How long a warmup has to be",
        shows="5 % of the steps, after which the best quarter continues. Here: what that would keep of the final best "
        "quarter and of the winners, for warmups of 1 to 20 %.",
        topic="warmup_sweep",
        measure=curves.warmup_sweep,
        drawing=Drawing(draw=curves.draw_warmup_sweep),
    ),
    "samples-saved": Experiment(
        title="Samples that are not trained, by pattern",
        shows="Early exit saves 72 to 83 % of the samples, overfitting 24 % and diverging jobs 12 % of preference "
        "tuning among them. Here: the default policy and Algorithm 1 on the same recorded curves.",
        topic="samples_saved",
        measure=curves.samples_saved,
        drawing=Drawing(draw=curves.draw_samples_saved, panels=2),
        paper={"paper_saved": "0.72 to 0.83"},
        goals={"default_saved": (">=", 0.83)},
    ),
    "early-exit-quality": Experiment(
        title="What early exit costs in quality, per batch size",
        shows="Nothing. Here: the jobs of each batch size of a recorded sweep as a sweep by themselves, by the default "
        "policy.",
        topic="early_exit_quality",
        measure=curves.early_exit_quality,
        drawing=Drawing(draw=curves.draw_early_exit_quality),
        paper={"regret_mean": "1"},
        goals={"regret_mean": ("<=", 1.002)},
    ),
    "kernels": Experiment(
        title="A training step of many adapters",
        shows="Grouped GEMMs over all adapters against one launch an adapter and one adapter at a time.",
        topic="kernels",
        program="kernels.py",
        scales=("smoke", "cpu", "gpu"),
    ),
    "end-to-end": Experiment(
        title="A sweep of 60 configurations, end to end",
        shows="Up to 9.5 times the speed of LoRAFusion on one GPU with early exit; 4.7 times that of one job after the "
        "other. Here: the same grid against TRL and PEFT, one job after the other.",
        topic="sweep",
        program="sweep.py",
        paper={"early_exit_over_sequential": "4.7"},
        figures=("batched_over_sequential", "early_exit_over_sequential", "best_loss_ratio", "samples_saved"),
    ),
    "dpo": Experiment(
        title="Preference tuning, end to end",
        shows="1.7 times the speed of one job after the other by batching, 4.7 times with early exit.",
        topic="dpo",
        program="dpo.py",
        paper={"batched_over_sequential": "1.7", "early_exit_over_sequential": "4.7"},
    ),
    "makespan": Experiment(
        title="Many tasks: batching, scheduling, early exit",
        shows="What batching (B), the scheduler (S) and early exit (EE) save of the time until the last of eleven "
        "tasks has ended.",
        topic="makespan",
        program="makespan.py",
    ),
    "adapter-parallel": Experiment(
        title="Adapters on several GPUs",
        shows="Adapter parallelism against FSDP, tensor and pipeline parallelism; up to 13.8 times the speed of "
        "LoRAFusion with early exit on bases of 70 billion parameters.",
        topic="adapter_parallel",
        program="adapter_parallel.py",
        scales=("smoke", "cpu", "gpu"),
    ),
}
"""By the name that the command takes, in the order in which ``all`` measures them: the shortest first."""
