"""Commands, settings and programs on the pages fit this version, also those that no other test runs."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from alto.cli import app
from alto.spec import Task

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "examples/recipes/*/README.md")
    for page in sorted(ROOT.glob(pattern))
}
PAGES.pop("docs/upgrading.md")  # names what earlier versions had

FOREIGN = ("base_model:", "method: simpo", "method: focal", "plateau:")
"""Signs of settings of Axolotl, and of settings that need the packages on their pages; other tests run these."""
SERVICE_KEYS = {"graders", "models", "vllm"}


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """Yield the pages' fenced blocks of these languages, each with the name of its page."""
    for page, text in PAGES.items():
        for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
            if language in languages:
                yield page, block


def shell_commands() -> Iterator[tuple[str, str]]:
    """Yield the arguments of every ``alto`` in blocks for a shell; other programs may start it."""
    names = set(get_command(app).commands)  # type: ignore[attr-defined]
    for page, block in blocks("bash", "console"):
        for line in re.sub(r"\$\(.*?\)", "FOLDER", block.replace("\\\n", "")).splitlines():
            for part in line.removeprefix("$ ").split("&&"):
                words = shlex.split(part, comments=True)
                for place, word in enumerate(words):
                    first = all("=" in earlier for earlier in words[:place])
                    if word.split("/")[-1] == "alto" and (first or {*words[place + 1 : place + 2]} & names):
                        yield page, shlex.join(words[place + 1 :])


def inline_commands() -> Iterator[tuple[str, str]]:
    """Yield the arguments of every ``alto`` in the text of a page."""
    for page, text in PAGES.items():
        for found in re.findall(r"`alto ([^`\n]+)`", text):
            yield page, re.sub(r"[\[\]]", "", found.replace("[OPTIONS]", ""))


def check(arguments: str, *, may_be_short: bool) -> None:
    """Let the command's own parser read ``arguments``; a short command may lack what is required."""
    words, name, command, context = shlex.split(arguments), "alto", get_command(app), None
    if words[:1] == ["--install-completion"]:  # would be carried out
        assert any(words[0] in option.opts for option in command.params)
        return
    while True:
        try:
            context = command.make_context(name, words, parent=context)
        except SystemExit:  # --help, --version, or a group alone
            return
        except Exception as error:
            kind = type(error).__name__
            if may_be_short and (kind in ("MissingParameter", "NoArgsIsHelpError") or "requires an arg" in str(error)):
                return
            if kind == "Exit":
                return
            raise AssertionError(f"alto {arguments}: {error}") from error
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        found, command, words = command.resolve_command(context, rest)
        name = found or ""


@pytest.mark.parametrize(("page", "arguments"), sorted(set(shell_commands())))
def test_a_command_for_a_shell_is_complete(page: str, arguments: str) -> None:
    check(arguments, may_be_short=False)


@pytest.mark.parametrize(("page", "arguments"), sorted(set(inline_commands())))
def test_a_command_in_the_text_exists_with_its_options(page: str, arguments: str) -> None:
    check(arguments, may_be_short=True)


@pytest.mark.parametrize(
    ("page", "block"), [found for found in blocks("yaml") if not any(sign in found[1] for sign in FOREIGN)]
)
def test_settings_are_valid(page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chatml.jinja").write_text("{{ messages }}", encoding="utf-8")
    written = yaml.safe_load(block)
    if SERVICE_KEYS & set(written):
        settings = pytest.importorskip("alto.service.settings", reason="needs the service extra", exc_type=ImportError)
        settings.ServiceSettings(**written)
    else:
        task = Task(**{"model": "alto-tiny", "dataset": "rows.jsonl", **written})
        assert task.jobs


@pytest.mark.parametrize(("page", "block"), list(blocks("python")))
def test_a_program_compiles_and_imports_what_exists(page: str, block: str) -> None:
    """Packages that are not installed, and those that a page writes itself, are left out."""
    for node in ast.walk(compile(block, page, "exec", ast.PyCF_ONLY_AST)):
        if isinstance(node, ast.Import):
            imported = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in imported:
            if importlib.util.find_spec(module.partition(".")[0]) is not None:
                found = importlib.import_module(module)
                assert not name or hasattr(found, name), f"from {module} import {name}"


def test_the_table_of_limits_has_every_limit_with_its_default_and_code() -> None:
    why = "needs the service extra"
    context = pytest.importorskip("alto.service.context", reason=why, exc_type=ImportError)
    fields = importlib.import_module("alto.service.settings").ServiceSettings.model_fields
    section = PAGES["docs/service.md"].partition("### Limits")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    own = {field.name for field in dataclasses.fields(context.Limits)}
    assert {name for name, *_ in rows} == own | {name for name in fields if name.startswith("max_")}
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src/alto/service").rglob("*.py"))
    for name, default, _, effect in rows:
        assert default == ("no limit" if fields[name].default is None else str(fields[name].default)), name
        codes = re.findall(r"`([a-z_]+)`", effect)
        assert codes, name
        assert all(f'"{code}"' in source for code in codes), effect


def test_there_are_commands_settings_and_programs_on_the_pages() -> None:
    shown = {arguments for _, arguments in shell_commands()}
    assert {"tune task.yaml", "keys create team-a --settings /etc/alto/service.yaml --data-dir /var/lib/alto"} <= shown
    assert len(shown) > 60
    assert len(set(inline_commands())) > 100
