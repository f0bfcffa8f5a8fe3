"""Which cluster a name opens, those of installed packages included."""

from __future__ import annotations

import json
from pathlib import Path

import packages
import pytest
from tiny import make_task, save_model

import alto
from alto.cluster import open_cluster
from alto.cluster.local import LocalCluster
from alto.errors import SpecError, UnsupportedError

FILES = packages.files_of("clusters.md", after="### One that wraps another", until="### One that starts executors")


def test_local_is_this_machine() -> None:
    cluster = open_cluster("local", total_gpus=2)
    assert isinstance(cluster, LocalCluster)
    cluster.close()


@pytest.mark.parametrize("name", ["locl", "slurm://head", "ray", ""])
def test_an_unknown_cluster_is_refused_by_name(name: str) -> None:
    with pytest.raises(SpecError, match="cluster"):
        open_cluster(name, total_gpus=None)


def test_one_of_a_package_that_is_no_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {**FILES, "accounts/__init__.py": "open_accounted = 3\n"}
    packages.install(tmp_path, broken, monkeypatch)
    with pytest.raises(UnsupportedError, match=r"accounts:open_accounted of the package .* expected a function"):
        open_cluster("accounts://x", total_gpus=1)


@pytest.mark.parametrize(
    ("line", "wrong", "message"),
    [
        ("return AccountedCluster(", "return (", r"that the package opens, tuple, .* without nodes, has_gpus"),
        (
            "return AccountedCluster(",
            "1 / 0; (",
            r"the cluster 'accounts': .* ZeroDivisionError: .* in __init__.py:4\d of accounts",
        ),
        ("    def stop(", "    def end(", r"AccountedCluster, .* found it without stop; correct that package"),
        ("return self._inner.nodes", "return None", r"AccountedCluster.nodes: expected a sequence of .* found None"),
    ],
)
def test_one_that_opens_no_cluster_is_refused(
    line: str, wrong: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FILES["accounts/__init__.py"]
    assert line in source
    packages.install(tmp_path, {**FILES, "accounts/__init__.py": source.replace(line, wrong)}, monkeypatch)
    with pytest.raises(UnsupportedError, match=message):
        open_cluster("accounts://x", total_gpus=1)


def test_a_package_cannot_take_the_name_of_alto_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = FILES["pyproject.toml"].replace("accounts = ", "local = ")
    packages.install(tmp_path, {**FILES, "pyproject.toml": toml}, monkeypatch)
    with pytest.raises(
        UnsupportedError, match=r"cluster: expected 'local' to be registered by ALTO only, .*accounts:open_"
    ):
        open_cluster("local", total_gpus=1)


def test_the_page_s_cluster_runs_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.install(tmp_path, FILES, monkeypatch)
    accounts = tmp_path / "accounts.jsonl"
    engine = alto.Engine(cluster=f"accounts://{accounts}", output_dir=tmp_path / "runs")
    model = str(save_model(tmp_path / "model"))
    (result,) = engine.batched_execution([make_task(tmp_path, model=model, num_train_epochs=1)])
    assert Path(result.adapter_dir).is_dir()
    lines = [json.loads(line) for line in accounts.read_text(encoding="utf-8").splitlines()]
    assert [line["outcome"] for line in lines if "outcome" in line] == ["finished", "finished"], (
        "measured, then trained"
    )
    assert {line["entry"].rpartition(":")[2] for line in lines if "entry" in line} == {"Planning", "Training"}
