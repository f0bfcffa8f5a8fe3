"""``alto doctor``: facts about an installation, its problems with remedies, and what extras are for."""

from __future__ import annotations

import json
import tomllib
from email.message import Message
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from alto.cli import app, doctor
from alto.engine import health
from alto.kernels import reference
from alto.version import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that requires what is installed, whether or not ALTO itself is installed."""
    require(monkeypatch, [f"torch=={torch.__version__}"], {})
    come_from(monkeypatch, None)


def come_from(monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None) -> None:
    """Make pip's note on where the package came from; None without a note, for an index."""
    text, others = None if origin is None else json.dumps(origin), metadata.distribution
    ours = SimpleNamespace(read_text=lambda file: text)
    monkeypatch.setattr(metadata, "distribution", lambda name: ours if name == "alto-lora" else others(name))


def require(monkeypatch: pytest.MonkeyPatch, needed: list[str], extras: dict[str, list[str]]) -> None:
    about = Message()
    for text in [*needed, *(f"{text}; extra == '{extra}'" for extra, texts in extras.items() for text in texts)]:
        about["Requires-Dist"] = text
    for extra in extras:
        about["Provides-Extra"] = extra
    monkeypatch.setattr(metadata, "metadata", lambda name: about)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *words])


def facts_of(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoke("--json", *words).stdout)
    return found


def test_a_sound_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    done = invoke()
    assert done.exit_code == 0, done.output
    assert f"alto:        {__version__} in " in done.output
    assert f"torch {torch.__version__}" in done.output
    assert "equal to the reference" in done.output
    assert f"HF_HOME:     {tmp_path / 'hub'}, " in done.output
    assert "everything that ALTO needs works" in done.output
    assert not (tmp_path / "hub").exists()


def test_json_has_the_same_facts(tmp_path: Path) -> None:
    found = facts_of()
    assert found["problems"] == []
    assert {"alto", "python", "packages", "gpu", "memory", "kernels", "HF_HOME", "ALTO_CACHE", "runs"} <= set(
        found["facts"]
    )


def test_a_missing_or_old_requirement_is_a_problem_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    require(monkeypatch, ["torch>=999", "absent-package>=2", "numpy; sys_platform == 'win32'"], {})
    done = invoke()
    assert done.exit_code == 1
    assert f"problem: expected torch>=999, found version {torch.__version__}; pip install 'torch>=999'" in done.output
    assert "problem: expected absent-package>=2, found none; pip install 'absent-package>=2'" in done.output
    assert "numpy;" not in done.output
    require(monkeypatch, ["absent-package>=2"], {"data": ["torch>=1"]})
    assert facts_of()["extras"] == {"data": []}
    assert "everything" not in done.output


def test_extras_are_listed_with_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    require(monkeypatch, [], {"data": ["torch>=1"], "gguf": ["absent-package>=2"]})
    done = invoke()
    assert done.exit_code == 0
    assert "extras:      data\n" in done.output
    assert "GGUF files for llama.cpp and Ollama: pip install 'alto-lora[gguf]' (needs absent-package>=2)" in done.output
    assert facts_of()["extras"] == {"data": [], "gguf": ["absent-package>=2"]}


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'alto-lora[gguf]' "),
        (
            {"url": "file:///home/me/a%20clone", "dir_info": {"editable": True}},
            "pip install -e '/home/me/a clone[gguf]' ",
        ),
        ({"url": "file:///home/me/alto", "dir_info": {}}, "pip install '/home/me/alto[gguf]' "),
        ({"url": "https://example.org/alto.git", "vcs_info": {}}, "pip install 'alto-lora[gguf]' "),
    ],
)
def test_an_extra_is_installed_from_where_alto_came_from(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, command: str
) -> None:
    require(monkeypatch, [], {"gguf": ["absent-package>=2"]})
    come_from(monkeypatch, origin)
    assert f"Ollama: {command}(needs" in invoke().output


def test_a_package_with_an_extra_of_its_own_is_shown_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    require(monkeypatch, [], {"peft": ["peft>=999"], "service": ["absent-package", "peft>=999"]})
    assert facts_of()["extras"] == {"peft": ["peft>=999"], "service": ["absent-package"]}


def test_extras_are_unknown_where_alto_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", fail)
    found = facts_of()
    assert found["facts"]["extras"].startswith("unknown, because ALTO runs from its source")
    assert (found["extras"], found["problems"]) == ({}, [])


def test_every_extra_has_a_use() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(doctor.EXTRAS) == set(settings["project"]["optional-dependencies"])


@pytest.mark.parametrize("name", ["HF_HOME", "ALTO_CACHE"])
def test_a_folder_that_cannot_be_written_is_a_problem(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(name, str(tmp_path / "file" / "cache"))
    done = invoke()
    assert done.exit_code == 1
    assert f"problem: expected {name} to be a folder for new files, found {tmp_path / 'file' / 'cache'}" in done.output
    assert f"set {name} to a folder on another disk" in done.output


def test_too_little_disk_space_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_LEAST_FREE_BYTES", 2**60)
    assert "expected at least 1 GiB free for runs, found " in invoke().output


def test_wrong_results_of_kernels_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        __name__ = "alto.kernels.wrong_backend"
        grouped_shrink = staticmethod(reference.grouped_shrink)

        @staticmethod
        def grouped_expand(s: Any, operands: Any, ys: list[torch.Tensor], schedule: Any) -> None:
            reference.grouped_expand(s, operands, ys, schedule)
            ys[0][1] *= 1.1

    def choose(name: str | None = None, **_: object) -> Any:
        return Wrong() if name is None else reference

    monkeypatch.setattr(health, "choose_backend", choose)
    (problem,) = facts_of()["problems"]
    assert problem.startswith("expected kernels that compile and run, found RuntimeError: the kernels' results differ")
    assert "ALTO_KERNELS=torch" in problem


def test_an_unknown_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_KERNELS", "fast")
    assert facts_of()["problems"] == [
        "ALTO_KERNELS: expected one of reference, torch, triton, found 'fast'; unset it to let ALTO choose"
    ]


def test_a_library_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("libcudart.so.13: cannot open shared object file\nmore")

    monkeypatch.setattr(health, "gpus", fail)
    found = facts_of()
    assert found["problems"] == [
        "expected PyTorch and transformers that can be imported, found OSError: libcudart.so.13: cannot open shared "
        "object file; install them again: pip install --force-reinstall torch transformers"
    ]
    assert "runs" in found["facts"]


def test_a_gpu_that_pytorch_cannot_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert health.hidden_gpu().startswith(f"PyTorch {torch.__version__}, which ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert health.hidden_gpu() == ""


def test_the_device_of_this_machine_is_shown() -> None:
    found = facts_of()["facts"]["gpu"]
    assert torch.cuda.get_device_name(0) in found if torch.cuda.is_available() else found.startswith("no GPU")
