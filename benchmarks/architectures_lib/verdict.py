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
    """

    model_type: str
    model_class: str = ""
    status: str
    reason: str = ""
    loss_error: float | None = None
    gradient_error: float | None = None
