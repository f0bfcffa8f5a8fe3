"""The project as a whole: its version, the cost of its import, what it ships, what it reads."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from budgets import FULL_EXAMPLES, NIGHTLY_EXAMPLES, QUICK_EXAMPLES, SLOW_KINDS

import alto
from alto import errors
from alto.version import version_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "alto"

TENSOR_LIBRARIES = ("torch", "transformers", "triton", "safetensors", "tokenizers")
HEAVY_EXTRAS = (
    *("ortools", "ray", "bitsandbytes", "fastapi", "sqlalchemy"),
    *("trl", "peft", "datasets", "accelerate"),
    *("tensorboard", "mlflow", "wandb", "trackio", "vllm", "gguf"),
)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_build_takes_the_version_from_the_source() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["dynamic"] == ["version"]
    source = (ROOT / settings["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.+)"$', source, re.M) == [alto.__version__]
    assert version_of("alto-lora") == alto.__version__


@pytest.mark.parametrize(
    ("own", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_spin_briefly_unless_the_user_says_otherwise(own: dict[str, str], expected: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import alto, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    found = subprocess.run([sys.executable, "-c", code], env=kept | own, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == expected


def test_versions_are_known_where_alto_is_not_installed() -> None:
    """A machine may have the source on its path, and ALTO not installed."""
    code = "\n".join(
        [
            "from importlib import metadata",
            "found = metadata.version",
            "def version(name):",
            "    if name == 'alto-lora':",
            "        raise metadata.PackageNotFoundError(name)",
            "    return found(name)",
            "metadata.version = version",
            "import alto",
            "from alto.executor import beginning, cache",
            "print(alto.__version__, cache.versions()['alto-lora'], beginning._versions()['alto-lora'])",
        ]
    )
    assert run_python(code).split() == [alto.__version__] * 3


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert version_of("torch") is not None
    assert version_of("no-such-package") is None


def test_changelog_knows_the_version() -> None:
    assert re.search(rf"^## .*{re.escape(alto.__version__)}", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)


def test_every_exported_name_is_there() -> None:
    assert {"Engine", "Task", "EarlyExit", "AltoError"} <= set(alto.__all__)
    assert set(alto.__all__) <= set(dir(alto))
    for name in alto.__all__:
        assert getattr(alto, name) is not None
    with pytest.raises(AttributeError, match="Enginn"):
        alto.Enginn  # noqa: B018


def test_import_alto_is_light() -> None:
    loaded = json.loads(run_python("import alto, json, sys; print(json.dumps(sorted(sys.modules)))"))
    assert "alto" in loaded
    assert not set(loaded) & {*TENSOR_LIBRARIES, *HEAVY_EXTRAS, "pydantic", "yaml"}
    run_python("import alto; assert alto.spec.Task is alto.Task and alto.records.ExitReason is alto.ExitReason")


def test_engine_imports_where_no_heavy_extra_is_installed() -> None:
    code = "import alto.engine, alto.cli, typer; [*typer.main.get_command(alto.cli.app).commands.values()]"
    run_python(f"import sys; sys.modules.update(dict.fromkeys({HEAVY_EXTRAS!r})); {code}")


def test_the_help_imports_no_command() -> None:
    code = "from typer.testing import CliRunner; import alto.cli; CliRunner().invoke(alto.cli.app, ['--help'])"
    loaded = set(run_python(f"import sys; {code}; print(*sys.modules)").split())
    assert "alto.cli.app" in loaded
    assert not loaded & {"alto.cli.tune", "alto.spec", "alto.runs", "pydantic", *TENSOR_LIBRARIES}


def test_the_help_has_the_words_of_the_commands() -> None:
    code = (
        "import alto.cli, typer; from alto.cli.app import _summaries; found = typer.main.get_command(alto.cli.app)\n"
        "real = {n: (c.help, c.rich_help_panel, c.name) for n, c in found.commands.items()}\n"
        "assert real == {n: (c.help, c.rich_help_panel, c.name) for n, c in _summaries().items()}, real"
    )
    run_python(code)


def test_type_checkers_see_the_types_of_an_installed_alto() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert text.rstrip().endswith("limitations under the License.")


def test_drawn_error_tree_is_the_real_one() -> None:
    drawn: dict[str, tuple[str, str | None]] = {}
    parents = ["AltoError"]
    for branch, name, builtin in re.findall(
        r"^ {4}((?:│   |    )*(?:├── |└── ))(\w+)(?: \((\w+)\))?", errors.__doc__ or "", re.M
    ):
        depth = len(branch) // 4
        drawn[name] = (parents[depth - 1], builtin or None)
        parents[depth:] = [name]
    real = {
        name: (kind.__bases__[0].__name__, kind.__bases__[1].__name__ if len(kind.__bases__) > 1 else None)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and kind is not errors.AltoError
    }
    assert drawn == real
    assert {"AltoError", *drawn} == set(errors.__all__)


def test_shipped_model_is_whole_and_small() -> None:
    files = {path.name: path.stat().st_size for path in (PACKAGE / "assets" / "alto-tiny").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"} <= set(files)
    assert sum(files.values()) <= 8 * 2**20


CODE_IN_DATA = {
    *("pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("torch.load", "torch.save", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("dist.broadcast_object_list", "dist.all_gather_object", "dist.gather_object", "dist.scatter_object_list"),
    *("dist.send_object_list", "dist.recv_object_list", "eval", "exec"),
}
"""Modules and functions that can run code named in the data that they read."""

ALLOWED_CODE_IN_DATA = {
    ("backbone/reading.py", "pickle"),
    ("data/dataset.py", "pickle"),
    ("spec/strict_yaml.py", "yaml.load"),
}
"""Exceptions: for the class of an error that transformers raises; for rows in an unnamed file, which only the process
that wrote them can open; with a loader derived from PyYAML's safe one."""


def test_nothing_reads_data_that_could_run_code() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom():
                    names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
                case ast.Call():
                    names = [ast.unparse(node.func)]
                case _:
                    continue
            found |= {(str(path.relative_to(PACKAGE)), name) for name in names if name in CODE_IN_DATA}
    assert found == ALLOWED_CODE_IN_DATA


def test_contributors_read_what_only_the_full_run_tests() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page.partition("\n## Tests\n")[2], re.M)) == SLOW_KINDS
    assert f"tries {FULL_EXAMPLES} examples instead of {QUICK_EXAMPLES} " in page
    assert f"`make test-nightly` tries {NIGHTLY_EXAMPLES}," in page


def test_continuous_integration_runs_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*?##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    workflows = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    change = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"^for target in (.+); do$", change, re.M) == ["quickstart lint test-all"]
    assert "run: .ci/run" in workflows["ci"]
    assert re.findall(r"\bmake ([a-z-]+)", workflows["nightly"]) == ["test-nightly"]
    assert {"quickstart", "lint", "test", "test-all", "test-nightly", "durations"} <= targets


def test_one_file_knows_the_version() -> None:
    """The changelog, and results, which name the version that measured them, are exceptions."""
    known = re.compile(rf"(?<![\w.]){re.escape(alto.__version__)}(?![\w.])")
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml", "Makefile")]
    for folder in ("src", "docs", "deploy", "examples"):
        files += [
            path for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py", ".yaml", ".yml", ".toml")
        ]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    found = [
        path.relative_to(ROOT).as_posix()
        for path, text in texts.items()
        if any(known.search(line) and "alto-lora" not in line for line in text.splitlines())
    ]
    assert found == ["src/alto/version.py"]


def test_changes_of_this_version_come_first_and_older_ones_are_past() -> None:
    """Every earlier version that the source names is in the changelog, below this one."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d+\.\d+)\.\d+", changelog, re.M)
    assert alto.__version__.startswith(f"{versions[0]}.")
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    spoken = {number for source in sources for number in re.findall(r"(?:\b[Vv]ersion|ALTO) (0\.\d+)\b", source)}
    assert spoken
    assert spoken <= set(versions[1:])
