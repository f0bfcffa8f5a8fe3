"""Missing packages of a machine without a network: found by following requirements, for its Python instead of this
one."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tools import carry_wheels
from tools.carry_wheels import CannotCarryError, Machine, collect

ROOT = Path(__file__).resolve().parents[2]

MACHINE = Machine(
    python_version="3.12", platforms=("manylinux_2_28_x86_64",), packages={"torch": "2.11.0", "six": None}
)


class Index:
    """Packages by name, version and requirements; gives the newest one that satisfies, as pip does."""

    def __init__(self, packages: Mapping[str, Mapping[str, list[str]]]) -> None:
        self.packages = packages
        self.fetched: list[str] = []

    def __call__(self, text: str, machine: Machine, folder: Path) -> Path:
        requirement = Requirement(text)
        fitting = [version for version in self.packages[requirement.name] if requirement.specifier.contains(version)]
        if not fitting:
            raise CannotCarryError(f"pip finds no wheel of {text}")
        version = max(fitting, key=Version)
        self.fetched.append(f"{requirement.name}-{version}")
        name = f"{requirement.name.replace('-', '_')}-{version}"
        wheel = folder / f"{name}-py3-none-any.whl"
        requires = "".join(f"Requires-Dist: {item}\n" for item in self.packages[requirement.name][version])
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}.dist-info/METADATA", f"Name: {requirement.name}\nVersion: {version}\n{requires}")
        return wheel


def names(wheels: list[Path]) -> list[str]:
    return ["-".join(wheel.name.split("-")[:2]) for wheel in wheels]


def test_what_is_required_is_carried_and_what_is_there_is_not(tmp_path: Path) -> None:
    index = Index(
        {
            "a": {"1.0": ["b-c==2.0", "six>=1", "torch>=2.11", "win; sys_platform == 'win32'", "tool; extra == 'dev'"]},
            "b-c": {"2.0": ["Typing.Things>=1"], "2.1": []},
            "Typing.Things": {"1.5": []},
        }
    )
    (tmp_path / "old-1.0-py3-none-any.whl").touch()
    assert names(collect(["a>=1"], MACHINE, tmp_path, index)) == ["Typing.Things-1.5", "a-1.0", "b_c-2.0"]
    assert not (tmp_path / "old-1.0-py3-none-any.whl").exists()


@pytest.mark.parametrize(("python", "carried"), [("3.10", ["a-1", "backport-1"]), ("3.12", ["a-1"])])
def test_markers_are_judged_by_the_machine(tmp_path: Path, python: str, carried: list[str]) -> None:
    index = Index({"a": {"1": ["backport; python_version < '3.11'"]}, "backport": {"1": []}})
    machine = Machine(python_version=python, platforms=MACHINE.platforms, packages={})
    assert names(collect(["a"], machine, tmp_path, index)) == carried


def test_extras_that_are_asked_for_are_followed(tmp_path: Path) -> None:
    index = Index({"a": {"1": ["b[fast]"]}, "b": {"1": ["c; extra == 'fast'", "d; extra == 'slow'"]}, "c": {"1": []}})
    assert names(collect(["a"], MACHINE, tmp_path, index)) == ["a-1", "b-1", "c-1"]


def test_a_package_that_is_there_but_too_old_is_carried(tmp_path: Path) -> None:
    machine = Machine(python_version="3.12", platforms=MACHINE.platforms, packages={"a": "1.9"})
    index = Index({"a": {"2.0": []}})
    assert names(collect(["a>=2"], machine, tmp_path, index)) == ["a-2.0"]
    assert names(collect(["a>=1"], machine, tmp_path, index)) == []


def test_one_version_has_to_satisfy_all_and_brings_its_own_requirements(tmp_path: Path) -> None:
    index = Index(
        {"a": {"1": []}, "b": {"1": ["a<2"], "2": ["old"]}, "c": {"2": ["x-core==2"], "1": ["x-core==1"]}, "old": {}}
        | {"d": {"1": ["c<2"]}, "x-core": {"1": [], "2": []}}
    )
    assert names(collect(["c", "d"], MACHINE, tmp_path, index)) == ["c-1", "d-1", "x_core-1"]
    with pytest.raises(CannotCarryError, match=r"no wheel of c(<2,>=2|>=2,<2)"):
        collect(["c>=2", "d"], MACHINE, tmp_path, index)


@pytest.mark.parametrize("version", ["2.10.0", None])
def test_torch_is_never_carried(tmp_path: Path, version: str | None) -> None:
    machine = Machine(
        python_version="3.12", platforms=MACHINE.platforms, packages={} if version is None else {"torch": version}
    )
    with pytest.raises(
        CannotCarryError, match=rf"ALTO requires torch>=2\.11, found {version or 'none'} on the machine"
    ):
        collect(["torch>=2.11"], machine, tmp_path, Index({}))


def test_wanted_is_what_pyproject_says_but_for_reports() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = {Requirement(text).name for text in carry_wheels.wanted_packages(pyproject, tests=False)}
    assert {"torch", "transformers", "pydantic"} <= wanted
    assert not wanted & {"plotly", "pytest"}
    tests = {Requirement(text).name for text in carry_wheels.wanted_packages(pyproject, tests=True)}
    assert tests - wanted == {"pytest", "hypothesis"}


def test_a_machine_describes_itself(tmp_path: Path) -> None:
    description = carry_wheels.describe()
    assert description["python_version"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert description["packages"]["torch"]
    assert len(description["platforms"]) > 3
    machine = Machine(**{**description, "platforms": tuple(description["platforms"])})
    wanted = carry_wheels.wanted_packages((ROOT / "pyproject.toml").read_text(encoding="utf-8"), tests=True)
    assert collect(wanted, machine, tmp_path, Index({})) == []
