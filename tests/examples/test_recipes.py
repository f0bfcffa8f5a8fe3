"""The recipes: their pages and files agree, and every command of a page runs, on a tiny model for two steps.

A new folder in ``examples/recipes`` is tested without a change of this file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from profiles import measured_at_once
from typer.testing import CliRunner

from alto.cli import app

ROOT = Path(__file__).resolve().parents[2]
RECIPES = Path("examples") / "recipes"
NAMES = sorted(page.parent.name for page in (ROOT / RECIPES).glob("*/README.md"))
DATA = ("*.jsonl", "*.csv")

MAX_LINES = 50
"""Maximum number of lines of a page, which is read at one look."""
MAX_BYTES = 100_000
"""Maximum size of a file of data."""

TINY = ("--set", "model=alto-tiny", "--set", "max_steps=2", "--set", "max_samples=24")
SMALLER = {
    "preview": TINY,
    "plan": TINY,
    "tune": TINY,
    "run": TINY,
    "eval": ("--limit", "4"),
}
"""Options that make a command of a page small, by the name of the command."""
BEST = ("runs/*/best/adapter_model.safetensors", "runs/queue-*/tasks/*/best/adapter_model.safetensors")


def page(name: str) -> str:
    return (ROOT / RECIPES / name / "README.md").read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    """Return the fenced blocks of a language in a recipe's page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)


def commands(name: str) -> list[str]:
    """Return the lines of a page's shell blocks; a line that ends in a backslash is continued."""
    lines = "".join(blocks(name, "bash")).replace("\\\n", "").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def starts_processes(name: str) -> bool:
    return any(line.startswith(("alto run ", "alto serve")) for line in commands(name))


def expanded(line: str) -> list[str]:
    """Return the words of a command, with files and folders as a shell in the current directory finds them."""
    found = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    return found.stdout.split("\0")[:-1]


def run_alto(words: list[str]) -> str:
    """Run ``alto`` with these words, made small, and return its output."""
    result = CliRunner().invoke(app, [*words, *SMALLER.get(words[0], ())])
    assert result.exit_code == 0, f"{shlex.join(words)}: {result.exception or ''}\n{result.output}"
    return result.output


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipes at their places, which is the current directory."""
    shutil.copytree(ROOT / RECIPES, tmp_path / RECIPES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_recipes() -> None:
    assert {"extraction", "labels", "queue", "service", "serve"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_index_and_the_site_have_the_recipe(name: str) -> None:
    index = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert f"(../examples/recipes/{name}/README.md)" in index
    assert f"recipes/{name}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_short_and_says_what_a_reader_wants_to_know(name: str) -> None:
    assert len(page(name).splitlines()) <= MAX_LINES
    assert re.findall(r"^## (.+)$", page(name), re.MULTILINE) == ["You should see", "Your own data"]
    shown = commands(name)
    for file in sorted((ROOT / RECIPES / name).glob("*.yaml")):
        for command in ("plan", "tune"):
            assert any(line.startswith(f"alto {command} {RECIPES / name / file.name}") for line in shown), file.name


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_parts_of_the_files(name: str) -> None:
    """In rows, ``…`` stands for a part that is left out."""
    for block in blocks(name, "yaml"):
        texts = [file.read_text(encoding="utf-8") for file in (ROOT / RECIPES / name).glob("*.yaml")]
        assert any(block in text for text in texts), block
    shown = [line for language in ("json", "csv") for block in blocks(name, language) for line in block.splitlines()]
    files = [file for pattern in DATA for file in (ROOT / RECIPES / name).glob(pattern)]
    assert bool(shown) >= bool(files), "expected a row of the data on the page"
    rows = [row for file in files for row in file.read_text(encoding="utf-8").splitlines()]
    for line in shown:
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        assert any(pattern.fullmatch(row) for row in rows), line


@pytest.mark.parametrize(("name", "line"), [(name, line) for name in NAMES for line in commands(name)])
def test_a_command_exists_with_its_options(name: str, line: str) -> None:
    words = shlex.split(re.sub(r"\$\(.*?\)", "FOLDER", line), comments=True)
    if words[0] == "python":
        assert (ROOT / words[1]).is_file()
        words = words[words.index("alto") :] if "alto" in words else ["alto"]
    if words[0] == "alto":
        result = CliRunner().invoke(app, [*words[1:], "--help"])
        assert result.exit_code == 0, result.output
    else:
        assert words[0] in ("vllm", "transformers", "ollama", "curl", "pip"), "a program that this test does not know"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow("queues")] if starts_processes(name) else [])
        for name in NAMES
        if name != "service"  # which has a test of its own
    ],
)
def test_the_commands_of_a_page_run(name: str, clone: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: None) -> None:
    measured_at_once(monkeypatch)
    num_tasks = 0
    for line in commands(name):
        words = expanded(line)
        if words[0] == "alto":
            run_alto(words[1:])
            num_tasks += sum(word.endswith(".yaml") for word in words) if words[1] in ("tune", "run") else 0
    assert sum(len(list(clone.glob(pattern))) for pattern in BEST) == num_tasks > 0


def test_the_script_makes_the_data(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / RECIPES / "make_data.py", "--output", tmp_path], check=True)
    for pattern in DATA:
        made = {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob(pattern)}
        kept = {file.relative_to(ROOT / RECIPES): file.read_bytes() for file in (ROOT / RECIPES).rglob(pattern)}
        assert made == kept
        assert all(0 < len(content) <= MAX_BYTES for content in kept.values())


def test_no_row_is_in_two_files() -> None:
    files = [file for pattern in DATA for file in (ROOT / RECIPES).rglob(pattern)]
    rows = [row for file in files for row in file.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len(set(rows)) > 1000


# -- scripts -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow("ray")
def test_the_queue_runs_its_tasks_on_two_machines_of_ray(clone: Path) -> None:
    (line,) = [line for line in commands("queue") if line.startswith("python ")]
    words = expanded(line)
    place = words.index("alto")
    command = [sys.executable, *words[1:place], sys.executable, "-m", "alto", *words[place + 1 :], *TINY]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (queue,) = clone.glob("runs/queue-*")
    events = [json.loads(line) for line in (queue / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    (started,) = [event for event in events if event["event"] == "queue_started"]
    assert [len(node["gpus"]) for node in started["nodes"] if node["gpus"]] == [1, 1]
    assert len(list(clone.glob(BEST[1]))) == 3


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a service with real executors, but without a vLLM server."""
    why = "needs the service extra and the openai client"
    services = pytest.importorskip("services", reason=why, exc_type=ImportError)
    root = tmp_path / "service"
    with services.served(root, open_plane=services.local_plane(root)) as found:
        yield found.url


@pytest.mark.slow("queues")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT and transformers
def test_the_service_tunes_a_model_and_its_adapter_answers(
    address: str, clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = [line for line in commands("service") if line.startswith("python ")]
    _, script, *arguments = expanded(line)
    spec = importlib.util.spec_from_file_location("tune_and_ask", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tiny = str(Path(sys.modules["alto"].__file__ or "").parent / "assets" / "alto-tiny")
    small = ["--url", address, "--model", "alto-tiny", "--base", tiny, "--max-steps", "2"]
    monkeypatch.setattr(sys, "argv", [script, *arguments, *small])
    module.main()
    printed = capsys.readouterr().out
    assert "tuned: ft:alto-tiny:default:ferry:" in printed
    assert printed.partition(f"{module.QUESTION}\n")[2].strip(), "an answer, of any number of lines"
    assert (clone / "ferry-adapter" / "adapter_model.safetensors").is_file()
