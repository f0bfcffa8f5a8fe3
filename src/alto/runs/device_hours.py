"""Device hours that a run took, and that early exit saved: the numbers that terminals and pages share."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from alto.errors import SpecError
from alto.runs.history import RunHistory
from alto.runs.progress import time_saved_s

__all__ = ["PRICE_VARIABLE", "DeviceHours", "device_hours", "price_of_hour"]

PRICE_VARIABLE = "ALTO_GPU_HOUR_PRICE"
"""Environment variable with the price of an hour of one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHours:
    """The cost of a run in hours of GPUs, or of CPU slots if it had no GPU.

    Attributes:
        device: ``GPU`` or ``CPU slot``.
        num_devices: Ranks that train the run since it was last resumed.
        spent_h: Hours from its first event to its latest, without interruptions, times ``num_devices``.
        saved_h: Hours that the samples saved by early exit would have taken at the run's own average pace; None if
            nothing was saved or the pace is unknown.
        price: Price of one such hour; None if none was given.
    """

    device: str
    num_devices: int
    spent_h: float
    saved_h: float | None
    price: float | None = None

    @property
    def whole_h(self) -> float | None:
        """Hours if every job had trained to its end, at the same pace; None if ``saved_h`` is None."""
        return None if self.saved_h is None else self.spent_h + self.saved_h

    def cost(self, hours: float | None) -> float | None:
        """Return the price of ``hours``, in the currency of the price; None if either is unknown."""
        return None if hours is None or self.price is None else hours * self.price


def device_hours(history: RunHistory, price: float | None = None) -> DeviceHours:
    """Return the device hours that a run took so far.

    Args:
        history: History of the run.
        price: Price of an hour of one device; see :func:`price_of_hour`.
    """
    is_gpu = history.started is not None and history.started.device.startswith("cuda")
    saved_s = time_saved_s(history)
    return DeviceHours(
        device="GPU" if is_gpu else "CPU slot",
        num_devices=history.num_ranks,
        spent_h=history.duration_s * history.num_ranks / 3600,
        saved_h=None if saved_s is None else saved_s * history.num_ranks / 3600,
        price=price,
    )


def price_of_hour(given: float | None, of_task: float | None = None) -> float | None:
    """Return the price of an hour of one GPU.

    It is ``given``, else the environment variable ``ALTO_GPU_HOUR_PRICE``, else the price in the task's budget, else
    None.

    Raises:
        SpecError: The environment variable holds no price.
    """
    if given is not None:
        return given
    text = os.environ.get(PRICE_VARIABLE, "").strip()
    if not text:
        return of_task
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise SpecError(
            f"{PRICE_VARIABLE}: expected the price of an hour of one GPU, a number of 0 or more, found {text!r:.40}; "
            "correct or unset it"
        )
    return price
