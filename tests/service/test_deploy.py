"""The files in ``deploy`` start the service with options that it has."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from alto.cli.app import app

DEPLOY = Path(__file__).parents[2] / "deploy"


def commands() -> dict[str, list[str]]:
    unit = (DEPLOY / "alto.service").read_text(encoding="utf-8").splitlines()
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    [started] = [line.partition("=")[2] for line in unit if line.startswith("ExecStart=")]
    [run] = [line.removeprefix("CMD ") for line in image if line.startswith("CMD ")]
    return {
        "alto.service": ["alto", *shlex.split(started)[1:]],
        "Dockerfile": json.loads(run),
        "compose.yaml": services["alto"]["command"],
    }


@pytest.mark.parametrize("name", ["alto.service", "Dockerfile", "compose.yaml"])
def test_the_command_has_only_options_of_alto_serve(name: str) -> None:
    program, command, *options = commands()[name]
    assert (program, command) == ("alto", "serve")
    serve = get_command(app).commands["serve"]
    known = {option for parameter in serve.params for option in parameter.opts}
    assert {option for option in options if option.startswith("--")} <= known
    assert "--data-dir" in options


def test_the_image_installs_extras_that_exist() -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = re.findall(r"EXTRAS=(\S+)", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    assert len(lists) == 2
    for extras in lists:
        assert {"service", "s3"} <= set(extras.split(",")) <= set(project["optional-dependencies"])
