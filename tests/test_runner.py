"""One task on this process's device: what is said where it cannot begin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import make_task

from alto.engine import runner
from alto.engine.runner import TaskRunner
from alto.errors import DeviceMemoryError


def test_a_base_that_does_not_fit_says_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.00 GiB.")

    monkeypatch.setattr(runner, "load_backbone", out_of_memory)
    with pytest.raises(DeviceMemoryError, match=r"'alto-tiny' \(all of it\) .* set num_gpus to more than 1"):
        TaskRunner().begin(make_task(tmp_path), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
