"""The profile of a task: from the cache, or measured now; and the laws that it gives."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from alto.backbone import Backbone
from alto.errors import DeviceMemoryError, ProfileError
from alto.executor import cache
from alto.executor.profiling.measure import MARGIN, Measured, measure
from alto.executor.profiling.sketch import RowLength
from alto.executor.ranks import Ranks
from alto.records import MemoryProfile, Throughput
from alto.scheduler import fit_memory, fit_throughput
from alto.spec import Task
from alto.spec.base_model import QUANTISATION_KEYS
from alto.spec.outside import is_number

__all__ = ["Profile", "find_profile", "profile_task"]

CHILD_TIMEOUT_S = 1800.0

_MAX_MEASURED = 1e18
"""Of bytes, tokens and seconds."""

_KEYS = ("method", "adapter_dtype", "gradient_checkpointing", "max_slots")
"""Of a task, what decides what its steps take, beside its base model, its jobs and the lengths of its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What steps of a task take.

    Attributes:
        is_cached: It was measured in an earlier run.
        duration_s: What measuring took, whenever it was.
    """

    memory: MemoryProfile
    throughput: Throughput
    is_cached: bool
    duration_s: float


def find_profile(
    task: Task, lengths: Sequence[RowLength], device: torch.device, *, num_ranks: int = 1
) -> Profile | None:
    """The profile of such a task on such a device, if there is one in the cache.

    Args:
        task: Its base model, its method and its jobs count.
        lengths: Of the task's rows, from :func:`alto.executor.profiling.sketch.lengths_of`.
        device: On which it would be trained.
        num_ranks: Processes that would train it.
    """
    key = _key(task, lengths, device, num_ranks)
    found = cache.load("profiles", key)
    if found is None:
        return None
    try:
        measured = Measured.from_dict(found)
        _check(measured)
        return _profile(measured, is_cached=True)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        cache.discard("profiles", key, error)
        return None


def profile_task(
    task: Task,
    lengths: Sequence[RowLength],
    device: torch.device,
    *,
    num_rows: int,
    max_tokens: int,
    backbone: Backbone | None = None,
    ranks: Ranks | None = None,
) -> Profile:
    """Measure now, and remember.

    Args:
        task: Whose steps are taken.
        lengths: Of the task's rows, from :func:`alto.executor.profiling.sketch.lengths_of`.
        device: Where steps are taken.
        num_rows: How many it trains on.
        max_tokens: Tokens up to which steps are measured.
        backbone: The base model on a CUDA device, or on one of several ranks. On a CPU the steps are else taken in a
            process of their own, whose memory is that of nobody else, and this one is not used.
        ranks: This process among those that measure together.

    Raises:
        DeviceMemoryError: Not even one row of one job fits.
        ProfileError: The process that measures failed.
    """
    ranks = ranks or Ranks()
    if device.type == "cpu" and ranks.is_alone:
        measured = _measured_in_child(task, lengths, num_rows=num_rows, max_tokens=max_tokens)
    else:
        assert backbone is not None
        measured = measure(task, backbone, lengths, num_rows=num_rows, max_tokens=max_tokens, ranks=ranks)
    measured = ranks.broadcast(measured, Measured)
    if ranks.is_first:
        cache.save("profiles", _key(task, lengths, device, ranks.size), measured.to_dict())
    return _profile(measured, is_cached=False)


def _check(measured: Measured) -> None:
    """Raises ValueError where what was read cannot have been measured."""
    values = [value for point in measured.memory for value in asdict(point).values()]
    values += [value for point in measured.durations for value in asdict(point).values()]
    for value in (*values, measured.eval_token_s, measured.capacity_bytes, measured.duration_s):
        if not is_number(value, least=0, most=_MAX_MEASURED):
            raise ValueError(f"a measurement of {value!r:.40}")


def _profile(measured: Measured, *, is_cached: bool) -> Profile:
    # A law of tokens needs two sizes. Where one step alone fitted, all of it is called fixed.
    sizes = {point.num_tokens for point in measured.memory}
    if len(sizes) < 2:
        raise ProfileError(
            f"memory profile: expected steps of two sizes or more to fit into memory, found one, of {min(sizes)} "
            f"tokens; lower max_length or r, set gradient_checkpointing: true, or {QUANTISATION_KEYS['4bit']}: true"
        )
    fit, speed = fit_memory(measured.memory), fit_throughput(measured.durations)
    return Profile(
        memory=MemoryProfile(
            fixed_bytes=fit.fixed_bytes,
            bytes_per_token=fit.bytes_per_token,
            capacity_bytes=measured.capacity_bytes,
            margin=MARGIN,
            error_median=fit.error_median,
            error_worst=fit.error_worst,
            points=measured.memory,
        ),
        throughput=Throughput(
            step_s=speed.step_s,
            job_s=speed.job_s,
            token_s=speed.token_s,
            eval_token_s=measured.eval_token_s,
            points=measured.durations,
        ),
        is_cached=is_cached,
        duration_s=measured.duration_s,
    )


def _key(task: Task, lengths: Sequence[RowLength], device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Everything that what is measured depends on."""
    name = platform.processor() or platform.machine()
    return {
        **{key: getattr(task, key) for key in _KEYS},
        "base": task.base_model.key(),
        "weights": cache.weights_of(task.model),
        "jobs": sorted(
            {
                (
                    job.config.r,
                    json.dumps(job.config.target_modules),
                    job.config.optim,
                    job.config.lora_dropout > 0,
                    job.config.per_device_train_batch_size,
                )
                for job in task.jobs
            }
        ),
        "lengths": [length.spans for length in lengths],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else name,
        "threads": torch.get_num_threads(),
        "ranks": num_ranks,
        "versions": cache.versions(),
    }


def _measured_in_child(task: Task, lengths: Sequence[RowLength], *, num_rows: int, max_tokens: int) -> Measured:
    request = {
        "task": task.to_dict(),
        "lengths": [length.spans for length in lengths],
        "num_rows": num_rows,
        "max_tokens": max_tokens,
        "threads": torch.get_num_threads(),
    }
    child = subprocess.run(
        [sys.executable, "-m", "alto.executor.profiling.child"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )
    answer = child.stdout.strip().splitlines()[-1:]
    try:
        found: dict[str, Any] = json.loads(answer[0])
        if "no_memory" in found:
            raise DeviceMemoryError(found["no_memory"])
        return Measured.from_dict(found)
    except (IndexError, ValueError, KeyError, TypeError) as error:
        told = child.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise ProfileError(
            f"profile: expected measurements from a process of its own, found that it ended with code "
            f"{child.returncode} and said {told[0]!r}; free memory on this machine, or set max_slots, "
            "max_tokens_per_step and max_tokens_per_pass, and nothing has to be profiled"
        ) from error
