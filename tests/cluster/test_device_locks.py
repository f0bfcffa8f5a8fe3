"""Exclusive GPUs: a second controller of the machine is refused by name, and any end of a process frees its GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from alto.cluster.device_locks import DeviceLocks
from alto.cluster.local import LocalCluster
from alto.errors import DeviceBusyError, RunWriteError

HOLDER = """
    import sys
    from pathlib import Path
    from alto.cluster.local import DeviceLocks

    locks = DeviceLocks(["one", "two"], Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_gpu_of_another_process_is_refused_by_name_until_that_is_gone(tmp_path: Path) -> None:
    code = "\n".join(line[4:] for line in HOLDER.splitlines())
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DeviceBusyError, match=rf"GPU two is in use by ALTO process {holder.pid} on") as caught:
            DeviceLocks(["three", "two"], tmp_path)
        assert isinstance(caught.value, BlockingIOError)
        DeviceLocks(["three"], tmp_path).release()  # the failed attempt did not keep it
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    DeviceLocks(["one", "two"], tmp_path).release()


def test_locks_are_given_back_and_may_be_given_back_twice(tmp_path: Path) -> None:
    locks = DeviceLocks(["one"], tmp_path)
    with pytest.raises(DeviceBusyError, match=f"ALTO process {os.getpid()} on this machine"):
        DeviceLocks(["one"], tmp_path)
    locks.release()
    locks.release()
    DeviceLocks(["one"], tmp_path).release()


def test_a_child_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    locks = DeviceLocks(["one"], tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as child:
        locks.release()
        DeviceLocks(["one"], tmp_path).release()
        child.kill()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("no folder")
    with pytest.raises(RunWriteError, match=r"expected to write .*locks/gpu-one\.lock, found.*set ALTO_CACHE"):
        DeviceLocks(["one"], tmp_path / "locks")


def test_two_clusters_of_one_machine_share_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not matter what CUDA_VISIBLE_DEVICES calls them: the second GPU is number 1 for one cluster, 0 for the
    other."""
    uuids = ["aaa", "bbb", "ccc"]
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    first = LocalCluster(total_gpus=2)
    assert sorted(path.name for path in (tmp_path / "locks").iterdir()) == ["gpu-aaa.lock", "gpu-bbb.lock"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbb")
    uuids[:] = ["bbb"]
    with pytest.raises(DeviceBusyError, match="GPU bbb"):
        LocalCluster()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    uuids[:] = ["ccc"]
    LocalCluster().close()
    first.close()


def test_slots_of_the_cpu_are_shares_and_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    first, second = LocalCluster(total_gpus=2), LocalCluster(total_gpus=2)
    assert not (tmp_path / "locks").exists()
    first.close()
    second.close()
