"""The number of CPU threads: measured with the steps of a task, kept by base model, and used by its runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import MEASURED
from tiny import load_tiny, make_task

from alto import Engine
from alto.errors import TaskInterruptedError
from alto.executor import cache
from alto.executor.profiling import kept_thread_times, planning, profile, using_threads
from alto.executor.profiling.measure import Measured, measure
from alto.executor.profiling.meter import CoreTime
from alto.executor.profiling.sketch import lengths_of
from alto.executor.profiling.threads import fastest, keep_thread_times, thread_counts
from alto.executor.trainer import Trainer
from alto.records import ThreadTime

pytestmark = [
    pytest.mark.usefixtures("empty_cache"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="about threads of a CPU"),
]


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr(CoreTime, "waited_since", lambda before: 0.0)  # on a busy machine, fewer threads are not tried
    yield
    torch.set_num_threads(before)


class Machine:
    """A clock by which an action takes a number of seconds for each thread that torch has."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self._seconds, self._now = seconds, 0.0

    def __call__(self) -> float:
        self._now += self._seconds[torch.get_num_threads()]
        return self._now


def take_measures(tmp_path: Path, clock: Any) -> Measured:
    task = make_task(tmp_path, search_space={"r": [2, 8]})
    backbone, data = load_tiny(task)
    lengths = lengths_of(data.train)
    return measure(task, backbone, lengths, num_rows=len(data.train), max_tokens=2**30, clock=clock)


def times(**seconds: float) -> tuple[ThreadTime, ...]:
    return tuple(ThreadTime(num_threads=int(number[1:]), duration_s=value) for number, value in seconds.items())


def test_all_halves_of_the_threads_are_measured_and_durations_are_those_of_the_fastest(tmp_path: Path) -> None:
    found = take_measures(tmp_path, Machine({4: 0.04, 2: 0.01, 1: 0.02}))
    assert [(time.num_threads, round(time.duration_s, 6)) for time in found.threads] == [
        (4, 0.04),
        (2, 0.01),
        (1, 0.02),
    ]
    assert found.num_threads == 2
    assert [point.duration_s for point in found.durations] == pytest.approx([0.01] * len(found.durations))
    num_tokens = found.eval_token_s and 0.01 / found.eval_token_s
    assert num_tokens == pytest.approx(round(num_tokens))  # the evaluation was timed with two threads
    assert torch.get_num_threads() == 4
    assert Measured.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_fewer_threads_are_chosen_only_where_they_are_clearly_faster() -> None:
    assert fastest(times(n4=1.0, n2=0.97, n1=2.0)).num_threads == 4
    assert fastest(times(n4=1.0, n2=0.9, n1=0.88)).num_threads == 2
    assert fastest(times(n4=1.0, n2=0.9, n1=0.5)).num_threads == 1
    assert thread_counts(12) == [12, 6, 3, 1]


def test_measurements_of_an_unsteady_machine_and_slow_ones_try_all_threads_only(tmp_path: Path) -> None:
    class Unsteady(Machine):
        def __call__(self) -> float:
            self._now += next(self._jumps)
            return self._now

        _jumps = (0.01 * (1 + index // 2 % 3) for index in range(10**6))

    assert len(take_measures(tmp_path, Unsteady({})).threads) == 1
    assert len(take_measures(tmp_path, Machine({4: 3600.0})).threads) == 1


def test_kept_times_are_found_by_model_and_number_of_threads_and_damaged_ones_are_discarded() -> None:
    keep_thread_times("alto-tiny", times(n4=1.0, n2=0.5))
    assert kept_thread_times("alto-tiny", 4) == times(n4=1.0, n2=0.5)
    assert kept_thread_times("alto-tiny", 2) == kept_thread_times("another", 4) == ()
    for damaged in ([[4, "fast"]], [[4, -1.0]], [[3, 1.0]], [4], 7):
        [file] = (cache.cache_home() / "threads").glob("*.json")
        file.write_text(f'{{"key": {{}}, "measured": {str(damaged).replace(chr(39), chr(34))}}}', encoding="utf-8")
        with pytest.warns(UserWarning, match="is damaged"):
            assert kept_thread_times("alto-tiny", 4) == ()
        assert not file.exists()
        keep_thread_times("alto-tiny", times(n4=1.0))


def test_a_run_and_its_resumption_use_the_fastest_number_and_leave_torch_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_threads = replace(MEASURED, threads=times(n4=0.5, n2=0.2, n1=0.3))
    monkeypatch.setattr(profile, "_measured_in_child", lambda *args, **more: with_threads)
    monkeypatch.setattr(planning, "_ROOMY", 0.0)  # so that it is measured
    used, backward = [], Trainer.backward

    def watched(trainer: Trainer, *args: Any) -> Any:
        used.append(torch.get_num_threads())
        return backward(trainer, *args)

    monkeypatch.setattr(Trainer, "backward", watched)
    task = make_task(tmp_path, search_space={"r": [2, 4]}, num_train_epochs=4, early_exit=False)
    interrupted = Engine(output_dir=tmp_path / "runs", is_interrupted=lambda: len(used) >= 2)
    with pytest.raises(TaskInterruptedError):
        interrupted.tune(task)
    assert used == [2, 2]
    assert torch.get_num_threads() == 4
    [run] = (tmp_path / "runs").iterdir()
    Engine().resume(run)
    assert set(used[2:]) == {2}
    assert torch.get_num_threads() == 4
    assert kept_thread_times(task.model, 4) == with_threads.threads


def test_a_run_does_not_use_more_threads_than_torch_has(tmp_path: Path) -> None:
    with using_threads(8):
        assert torch.get_num_threads() == 4
    with using_threads(None):
        assert torch.get_num_threads() == 4
    with using_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 4
