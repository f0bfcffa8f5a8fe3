"""The plan of each scale."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PLANS", "DurationCase", "ModelPlan", "PeakCase", "Plan"]


@dataclass(frozen=True, slots=True)
class PeakCase:
    """Jobs that take steps together, and the limit of their passes."""

    num_jobs: int
    batch_size: int
    max_tokens_per_pass: int = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationCase:
    """A task that is trained to its end."""

    name: str
    ranks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    num_rows: int
    num_epochs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """The measurements of one base model.

    Attributes:
        shape: Name in ``benchmarks.kernels.shapes.SHAPES``.
        tokenizer: Tokenizer whose lengths of GSM8K's rows are used.
        ranks: Ranks of the jobs whose peaks are predicted.
    """

    shape: str
    tokenizer: str
    ranks: tuple[int, ...]
    peaks: tuple[PeakCase, ...]
    durations: tuple[DurationCase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of one scale."""

    device: str
    models: tuple[ModelPlan, ...]
    dtype: str = "float32"


def _peaks(*cases: tuple[int, ...]) -> tuple[PeakCase, ...]:
    """Return cases from their values, in the order of the attributes."""
    return tuple(PeakCase(*case) for case in cases)


PLANS = {
    "smoke": Plan(
        device="cpu",
        models=(
            ModelPlan(
                shape="smoke",
                tokenizer="alto-tiny",
                ranks=(4, 8),
                peaks=_peaks((1, 2)),
                durations=(DurationCase(name="two", ranks=(4, 8), batch_sizes=(2,), num_rows=8),),
            ),
        ),
    ),
    "cpu": Plan(
        device="cpu",
        models=(
            ModelPlan(
                shape="tiny",
                tokenizer="alto-tiny",
                ranks=(16, 32, 64),
                peaks=_peaks((1, 1), (1, 16), (4, 2), (8, 4), (16, 1), (16, 4), (16, 4, 4096)),
                durations=(
                    DurationCase(name="tiny-wide", ranks=(16, 32, 64) * 4, batch_sizes=(1,), num_rows=96),
                    DurationCase(name="tiny-mixed", ranks=(8, 16), batch_sizes=(1, 2, 4, 8), num_rows=128),
                    DurationCase(name="tiny-alone", ranks=(32,), batch_sizes=(4,), num_rows=240, num_epochs=3),
                    DurationCase(name="tiny-large", ranks=(32, 64), batch_sizes=(16,), num_rows=240, num_epochs=2),
                ),
            ),
            ModelPlan(
                shape="25m",
                tokenizer="gpt2",
                ranks=(16, 32, 64),
                peaks=_peaks((1, 1), (1, 8), (4, 2), (8, 1), (16, 2), (16, 4, 4096)),
                durations=(
                    DurationCase(name="25m-pair", ranks=(16, 64), batch_sizes=(2,), num_rows=64),
                    DurationCase(name="25m-wide", ranks=(8, 16, 32), batch_sizes=(1, 4), num_rows=32),
                ),
            ),
        ),
    ),
    "gpu": Plan(
        device="cuda",
        dtype="bfloat16",
        models=(
            ModelPlan(
                shape="1b",
                tokenizer="gpt2",
                ranks=(16, 32, 64),
                peaks=_peaks((1, 1), (1, 16), (4, 4), (8, 8), (16, 1), (16, 8), (16, 16, 8192)),
                durations=(
                    DurationCase(name="1b-wide", ranks=(16, 32, 64) * 4, batch_sizes=(1,), num_rows=96),
                    DurationCase(name="1b-mixed", ranks=(16, 64), batch_sizes=(1, 4, 8), num_rows=192),
                ),
            ),
        ),
    ),
}
