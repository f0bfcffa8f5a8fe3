"""The profile of a task, cached or measured now: its memory model and its throughput model."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from alto.backbone import Backbone
from alto.base import is_number
from alto.errors import DeviceMemoryError, ProfileError, UnsupportedError
from alto.executor import cache
from alto.executor.context import JobState
from alto.executor.profiling.measure import MARGIN, Measured, measure
from alto.executor.profiling.meter import CoreTime, memory_share, spread_of
from alto.executor.profiling.sketch import RowLength
from alto.executor.profiling.threads import keep_thread_times
from alto.executor.ranks import Ranks
from alto.records import UNSTEADY, MemoryProfile, TaskPlan, Throughput
from alto.scheduler import fit_memory, fit_throughput
from alto.spec import SHAPE_FIELDS, JobConfig, Task

CHILD_TIMEOUT_S = 1800.0

_UNMEASURED = "set max_slots, max_tokens_per_step and max_tokens_per_pass, so that no profile is needed"

_MAX_MEASURED = 1e18
"""Largest plausible value of a measurement, in bytes, tokens or seconds."""

_ABOUT = 1.2
"""Ratio from which two lengths count as different."""

_SHAPE_KEYS = ("r", *SHAPE_FIELDS[3:])
"""Settings of a job that change the products of its adapter, and so the time of a step. Scale factors are left out,
because they do not change the time."""

_KEYS = ("method", "adapter_dtype", "optim_state_dtype", "gradient_checkpointing", "max_slots", "tenant")
"""Settings of a task that affect the memory and time of its steps, in addition to base model, jobs and row lengths. The
tenant is included because a cache hit is reported, and must not reveal what another tenant has trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Memory and duration of a task's steps.

    Attributes:
        name: Name of the measurement in the cache.
    """

    memory: MemoryProfile
    throughput: Throughput
    is_cached: bool
    duration_s: float
    name: str


def find_profile(
    task: Task, lengths: Sequence[RowLength], device: torch.device, *, num_ranks: int = 1
) -> Profile | None:
    """Return the cached profile of the task on the device; None if there is none.

    Args:
        lengths: Lengths of the task's rows, from :func:`alto.executor.profiling.sketch.lengths_of`.
    """
    key = _key(task, lengths, device, num_ranks)
    found = cache.load("profiles", key)
    if found is None:
        return None
    try:
        measured = Measured.from_dict(found)
        _check(measured)
        measured = replace(measured, capacity_bytes=int(measured.capacity_bytes * memory_share()))
        return _profile(measured, cache.name_of(key), is_cached=True)
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
    on_progress: Callable[[float], None] = lambda remaining_s: None,
) -> Profile:
    """Measure now, and write the profile to the cache.

    Args:
        lengths: Lengths of the task's rows, from :func:`alto.executor.profiling.sketch.lengths_of`.
        num_rows: Number of rows of the training split.
        max_tokens: Largest number of tokens of a step.
        backbone: The base model, for a CUDA device or one of several ranks. A single rank on a CPU measures in a
            separate process and does not use it.
        on_progress: Called with the expected seconds until the measurement ends, after each improved estimate.

    Raises:
        DeviceMemoryError: Not even one row of one job fits, or nothing larger does.
        ProfileError: The measuring process failed, or took too long.
        UnsupportedError: The base model is an object that the measuring process cannot load.
    """
    ranks = ranks or Ranks()
    if device.type == "cpu" and ranks.is_alone:
        measured = _measured_in_child(task, lengths, num_rows=num_rows, max_tokens=max_tokens, on_progress=on_progress)
    else:
        assert backbone is not None
        measured = measure(
            task, backbone, lengths, num_rows=num_rows, max_tokens=max_tokens, ranks=ranks, on_progress=on_progress
        )
    measured = ranks.broadcast(measured, Measured)
    key = _key(task, lengths, device, ranks.size)
    if ranks.is_first:
        # Processes on CPU slots, each with a part of the memory, use one measurement.
        of_machine = replace(measured, capacity_bytes=int(measured.capacity_bytes / memory_share()))
        cache.save("profiles", key, of_machine.to_dict())
        if measured.threads:
            keep_thread_times(task.model, measured.threads)
    return _profile(measured, cache.name_of(key), is_cached=False)


def _check(measured: Measured) -> None:
    """Check that cached values are plausible measurements.

    Raises:
        ValueError: A value cannot have been measured.
    """
    values = [value for point in measured.memory for value in asdict(point).values()]
    values += [value for point in measured.durations for value in asdict(point).values()]
    values += [value for point in measured.threads for value in asdict(point).values()]
    for value in (
        *values,
        measured.eval_token_s,
        measured.sample_token_s,
        measured.capacity_bytes,
        measured.duration_s,
    ):
        if not is_number(value, least=0, most=_MAX_MEASURED):
            raise ValueError(f"invalid measurement: {value!r:.40}")


def _profile(measured: Measured, name: str, *, is_cached: bool) -> Profile:
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
            token_s=speed.token_s + measured.sample_token_s,
            eval_token_s=measured.eval_token_s or measured.sample_token_s,
            points=measured.durations,
            num_threads=measured.num_threads,
        ),
        is_cached=is_cached,
        duration_s=measured.duration_s,
        name=name,
    )


def _key(task: Task, lengths: Sequence[RowLength], device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Return everything that the measurements depend on."""
    name = platform.processor() or platform.machine()
    return {
        **{key: getattr(task, key) for key in _KEYS},
        "base": task.base_model.key(),
        "weights": cache.weights_of(task.model),
        "jobs": sorted(
            {
                (
                    json.dumps([*(getattr(job.config, key) for key in _SHAPE_KEYS), _has_router_loss(job.config)]),
                    job.config.optim,
                    job.config.lora_dropout > 0,
                    job.config.neftune_noise_alpha is not None,
                    job.config.sequences_per_step,
                    *([True] if job.config.objective.needs_kl else []),
                    *([size] if (size := job.config.objective.completions_per_row) > 1 else []),
                )
                for job in task.jobs
            }
        ),
        "lengths": _about(lengths),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else name,
        "threads": torch.get_num_threads(),
        "ranks": num_ranks,
        "versions": cache.versions(),
    }


def _about(lengths: Sequence[RowLength]) -> list[int]:
    """Round the lengths, so that tasks with similar rows share a measurement: memory and time grow with the tokens. The
    numbers are the mean and the longest row, the mean of trained tokens, and the sequences of a row."""
    tokens = [length.num_tokens for length in lengths]
    trained = statistics.fmean(sum(span.num_trained for span in length.spans) for length in lengths)
    numbers = (statistics.fmean(tokens), max(tokens), trained)
    return [*(round(math.log(max(number, 1.0), _ABOUT)) for number in numbers), len(lengths[0].spans)]


def _has_router_loss(config: JobConfig) -> bool | None:
    """Return whether the job trains with router losses; None if the base model and the method decide."""
    return None if config.router_aux_loss_coef is None else config.router_aux_loss_coef > 0


def _measured_in_child(
    task: Task,
    lengths: Sequence[RowLength],
    *,
    num_rows: int,
    max_tokens: int,
    on_progress: Callable[[float], None],
) -> Measured:
    if not task.base_model.is_loadable:
        raise UnsupportedError(
            "profile: expected a base model that can be loaded by name, because on a CPU a separate process measures "
            f"memory, found {task.model}; set max_slots, max_tokens_per_step and max_tokens_per_pass, so that nothing "
            "is measured, or save the model to a folder with save_pretrained, and name the folder"
        )
    request = {
        "task": task.to_dict(),
        "lengths": [length.spans for length in lengths],
        "num_rows": num_rows,
        "max_tokens": max_tokens,
        "threads": torch.get_num_threads(),
    }
    code, answer, message = _ask_child(json.dumps(request), on_progress)
    try:
        found: dict[str, Any] = json.loads(answer)
        if "no_memory" in found:
            raise DeviceMemoryError(found["no_memory"])
        return Measured.from_dict(found)
    except (IndexError, ValueError, KeyError, TypeError) as error:
        raise ProfileError(
            f"profile: the process that measures memory returned no measurements (exit code {code}): {message!r}. If "
            f"it ran out of memory, free memory on this machine; or {_UNMEASURED}"
        ) from error


def _ask_child(request: str, on_progress: Callable[[float], None]) -> tuple[int, str, str]:
    """Return the exit code of the measuring process, the last line that it printed, and the last line of its errors.

    Raises:
        ProfileError: The measurement took too long.
    """
    answer, is_late = "", threading.Event()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "alto.executor.profiling.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None

        def stop() -> None:
            is_late.set()
            child.kill()

        timer = threading.Timer(CHILD_TIMEOUT_S, stop)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # the process has exited, and its exit code says why
                child.stdin.write(request)
                child.stdin.close()
            for line in child.stdout:
                answer = line
                with contextlib.suppress(ValueError, TypeError):  # a library has printed this line
                    if set(message := json.loads(line)) == {"remaining_s"}:
                        on_progress(float(message["remaining_s"]))
            code = child.wait()
        except BaseException:
            child.kill()
            raise
        finally:
            timer.cancel()
        if is_late.is_set():
            raise ProfileError(
                f"profile: expected steps of two sizes within {CHILD_TIMEOUT_S / 60:g} minutes, found that they take "
                f"longer; {_UNMEASURED}, or try again when the machine is less busy"
            )
        errors.seek(0)
        return code, answer, (errors.read().strip().splitlines() or ["nothing"])[-1]


_FIRST, _EVERY = 64, 8
"""Number of first steps that are recorded, and interval of the recorded steps after them. Counting the tokens of every
step would take too much time."""

_LEAST, _MOST = 8, 512
"""Smallest number of recorded steps for a correction, and number of latest steps that the correction uses."""

_CLOSE = 0.1
"""Relative difference below which durations are not corrected, because the throughput model has errors of this size."""


class StepTimes:
    """Durations of steps, each relative to the duration that was measured beforehand.

    A machine that is busy during the measurement makes every duration longer. The durations that a run has observed
    replace them in the cache, for later runs and plans. All durations are corrected by one factor, so that jobs are
    packed as before. They get longer only if no other programs used the machine during the run, or if some did during
    the measurement too.

    Args:
        forecast: The plan of the run, with its measured throughput; without it (None), no step is recorded.
    """

    def __init__(self, forecast: TaskPlan | None) -> None:
        self._expected = None if forecast is None else forecast.throughput
        self._name = "" if forecast is None else forecast.profile
        self._num_steps = 0
        self._before = CoreTime.now()
        self._ratios: deque[float] = deque(maxlen=_MOST)

    def note(self, jobs: Sequence[JobState], duration_s: float) -> None:
        """Record a step that ``jobs`` have just taken in ``duration_s`` seconds; their step counts do not include this
        step yet."""
        self._num_steps += 1
        if self._expected is None or (self._num_steps > _FIRST and self._num_steps % _EVERY):
            return
        expected_s = self._expected.duration_s(len(jobs), sum(job.next_step_tokens for job in jobs))
        self._ratios.append(duration_s / expected_s)

    def refine(self) -> None:
        """Correct the measurement in the cache. Nothing is changed if few steps were recorded, if they agree with the
        measurement, or if the task was measured again in the meantime."""
        if self._expected is None or len(self._ratios) < _LEAST:
            return
        factor, waited = statistics.median(self._ratios), self._before.waited_since()
        is_only_now_busy = waited >= UNSTEADY and not self._expected.is_unsteady
        if abs(factor - 1.0) < _CLOSE or (factor > 1.0 and is_only_now_busy):
            return
        spread = max(spread_of(self._ratios), waited)
        expected = self._expected

        def corrected(values: Any) -> Any:
            measured = Measured.from_dict(values)
            if measured.durations != expected.points:
                return None
            durations = tuple(
                replace(point, duration_s=point.duration_s * factor, spread=spread) for point in measured.durations
            )
            times = {name: getattr(measured, name) * factor for name in ("eval_token_s", "sample_token_s")}
            return replace(measured, durations=durations, **times).to_dict()

        cache.revise("profiles", self._name, corrected)
