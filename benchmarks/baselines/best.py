"""The best adapter so far on disk, which a user of PEFT keeps of a sweep."""

from __future__ import annotations

import math
from pathlib import Path

from peft import PeftModel

from benchmarks.baselines.job import Evaluation

__all__ = ["BestAdapter"]


class BestAdapter:
    """Keeps the adapter with the lowest validation loss in a folder, as PEFT saves it.

    Attributes:
        folder: Its folder, which is absent before the first finite loss.
        loss: Its validation loss; infinite before the first one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loss = math.inf

    def keep(self, model: PeftModel, evaluation: Evaluation) -> bool:
        """Save the adapter if it is better than all earlier ones; return whether it is."""
        is_better = math.isfinite(evaluation.loss) and evaluation.loss < self.loss
        if is_better:
            self.loss = evaluation.loss
            model.save_pretrained(str(self.folder))
        return is_better
