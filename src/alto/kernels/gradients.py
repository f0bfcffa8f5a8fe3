"""In which step the gradients of a bank were written: the first product of a step overwrites, later ones are added.

So no gradient is set to zero after a step, and none is read before the first product of the next.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["GradientSteps", "GroupGradients"]


class GradientSteps:
    """Numbers the steps of every slot, for all groups of modules of a bank."""

    def __init__(self, num_slots: int) -> None:
        self.of_slots = [0] * num_slots

    def end(self, slots: Sequence[int]) -> None:
        """End the present step of ``slots``: their gradients are of no use any more."""
        for slot in slots:
            self.of_slots[slot] += 1


class GroupGradients:
    """The gradients of one group of modules.

    Args:
        steps: Of the bank.
    """

    def __init__(self, steps: GradientSteps) -> None:
        self._steps = steps.of_slots
        self._written = [-1] * len(steps.of_slots)

    def begin(self, slots: Sequence[int]) -> tuple[bool, ...]:
        """Whether each of ``slots`` has a gradient of its present step; from now on it has."""
        steps, written = self._steps, self._written
        found = tuple([written[slot] == steps[slot] for slot in slots])
        if not all(found):
            for slot in slots:
                written[slot] = steps[slot]
        return found

    def has(self, slot: int) -> bool:
        """Whether ``slot`` has a gradient of its present step."""
        return self._written[slot] == self._steps[slot]
