"""The verdict on one model type."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Verdict"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one model type.

    Attributes:
        status: ``exact``, ``refused`` (a named error), ``wrong``, ``traceback`` (any other exception), ``cannot_build``
            (transformers itself cannot train the tiny model), ``timeout`` or ``crash``.
        reason: The error or the difference; empty if it is exact.
        loss_error: Largest relative error of a job's loss.
        gradient_error: Largest relative error in norm of a job's adapter gradients.
        export_error, merged_error: Relative distance between ALTO's logits and those of an exported adapter that plain
            PEFT has loaded, or merged.
        rows: ``packed`` or ``padded``: how ALTO lays out its sequences.
    """

    model_type: str
    model_class: str = ""
    status: str
    reason: str = ""
    loss_error: float | None = None
    gradient_error: float | None = None
    export_error: float | None = None
    merged_error: float | None = None
    rows: str = ""
