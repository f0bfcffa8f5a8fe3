"""What came of one model type."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Verdict"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of one model type.

    Attributes:
        status: ``exact``, ``refused`` (a named error), ``wrong``, ``traceback`` (any other exception), ``cannot_build``
            (transformers itself cannot train the tiny model), ``timeout`` or ``crash``.
        reason: The error, or what differs; empty where it is exact.
        loss_error: Largest relative error of a job's loss.
        gradient_error: Largest relative error in norm of a job's adapter gradients.
        export_error, merged_error: Relative distance of the logits of an exported adapter that plain PEFT loads, and
            merges, from ALTO's.
        rows: ``packed`` or ``padded``: how ALTO lays out sequences for it.
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
