"""Exponential smoothing of training losses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alto.errors import SpecError

__all__ = ["Ema", "ema_of"]


@dataclass(slots=True)
class Ema:
    """A running average ``ema = alpha * loss + (1 - alpha) * ema``, started by the first loss.

    Attributes:
        alpha: Weight of the newest loss, in (0, 1].
        value: The average so far; None before the first loss.
        count: Number of losses.
    """

    alpha: float
    value: float | None = None
    count: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha <= 1.0:
            raise SpecError(
                f"ema_alpha: expected a weight in (0, 1], found {self.alpha}. Use 1 for no smoothing, a "
                "smaller value for more smoothing."
            )

    def update(self, loss: float) -> float:
        """Add the loss of one more step and return the average after it."""
        self.value = loss if self.value is None else self.alpha * loss + (1.0 - self.alpha) * self.value
        self.count += 1
        return self.value


def ema_of(losses: Iterable[float], alpha: float) -> tuple[float, ...]:
    """Return the running average after each of ``losses``, bit-identical to `Ema` with one loss at a time."""
    ema = Ema(alpha)
    return tuple(ema.update(loss) for loss in losses)
