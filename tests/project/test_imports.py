"""The import contracts: the package keeps them, every allowed import is allowed, and each contract refuses a
violation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("importlinter", reason="needs the extra 'dev'")

import grimp
from importlinter.api import read_configuration
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.protected import ProtectedContract
from importlinter.domain.contract import Contract

CONFIGURATION = read_configuration(str(Path(__file__).parents[2] / ".importlinter"))
KINDS: dict[str, type[Contract]] = {
    "forbidden": ForbiddenContract,
    "protected": ProtectedContract,
    "acyclic_siblings": AcyclicSiblingsContract,
}
CONTRACTS: dict[str, dict[str, Any]] = {options["id"]: options for options in CONFIGURATION["contracts_options"]}

ALLOWED = {
    "spec": ("errors", "records"),
    "lora": ("kernels",),
    "data": ("base", "errors", "spec"),
    "objectives": ("backbone", "data"),
    "executor": ("early_exit", "scheduler", "search", "data", "backbone", "lora", "objectives", "kernels"),
    "evaluation": ("data", "backbone", "lora", "objectives", "runs"),
    "engine": (
        *("early_exit", "scheduler", "kernels", "lora", "data", "backbone", "objectives", "executor", "views"),
        *("report", "trackers", "cluster", "artifacts"),
    ),
    "cluster": ("scheduler", "runs"),
    "trackers": ("runs", "spec", "errors"),
    "cli": ("engine", "spec", "runs", "views", "report", "importing"),
    "service": ("engine", "spec", "runs", "results", "errors", "records"),
    "artifacts": ("runs", "views", "importing", "records", "spec"),
    "importing": ("errors", "spec"),
    "views": ("errors", "records", "spec", "runs"),
    "report": ("errors", "records", "spec", "runs", "views"),
}
"""Some of the packages that each package may import."""

BREACHES = [
    ("ground", "alto.base", "alto.spec"),
    ("pure", "alto.spec", "torch"),
    ("pure", "alto.early_exit", "transformers"),
    ("pure", "alto.scheduler", "peft"),
    ("pure", "alto.runs", "torch"),
    ("pure", "alto.records", "alto.kernels"),
    ("light", "alto.executor", "peft"),
    ("light", "alto.engine", "ray"),
    ("light", "alto.engine", "wandb"),
    ("light", "alto.evaluation", "vllm"),
    ("kernels", "alto.data", "alto.kernels"),
    ("inputs", "alto.lora", "alto.data"),
    ("inputs", "alto.backbone", "alto.data"),
    ("inputs", "alto.data", "alto.backbone"),
    ("steps", "alto.kernels", "alto.lora"),
    ("steps", "alto.data", "alto.objectives"),
    ("decisions", "alto.early_exit", "alto.scheduler"),
    ("decisions", "alto.cli", "alto.early_exit"),
    ("search", "alto.scheduler", "alto.search"),
    ("light", "alto.executor", "optuna"),
    ("pure", "alto.search", "torch"),
    ("decisions", "alto.evaluation", "alto.early_exit"),
    ("runs", "alto.lora", "alto.runs"),
    ("ends", "alto.report", "alto.executor"),
    ("report", "alto.executor", "alto.report"),
    ("views", "alto.runs", "alto.views"),
    ("evaluation", "alto.artifacts", "alto.evaluation"),
    ("trackers", "alto.executor", "alto.trackers"),
    ("trackers", "alto.cli", "alto.trackers"),
    ("trackers", "alto.cli", "alto.cluster"),
    ("engine", "alto.executor", "alto.engine"),
    ("pure", "alto.importing", "transformers"),
    ("importing", "alto.engine", "alto.importing"),
    ("ends", "alto.cli", "alto.artifacts"),
    ("ends", "alto.results", "alto.artifacts"),
    ("ends", "alto.artifacts", "alto.executor"),
    ("light", "alto.engine", "gguf"),
    ("runs", "alto.importing", "alto.runs"),
    ("cli", "alto.engine", "alto.cli"),
    ("results", "alto.executor", "alto.results"),
    ("service", "alto.engine", "alto.service"),
    ("light", "alto.engine", "fastapi"),
    ("light", "alto.cli", "sqlalchemy"),
    ("trackers", "alto.service", "alto.cluster"),
    ("light", "alto.engine", "pandas"),
    ("front", "alto.data", "alto"),
    ("circles", "alto.records", "alto.spec"),
]
"""A contract, and an import that it refuses: importer and imported."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """All imports of the package, as ``lint-imports`` sees them."""
    settings = CONFIGURATION["session_options"]
    assert set(settings) == {"root_packages", "include_external_packages", "unmatched_ignore_imports_alerting"}
    (package,) = settings["root_packages"]
    is_whole = settings["include_external_packages"] == "True"
    return grimp.build_graph(package, include_external_packages=is_whole, cache_dir=None)


def keeps(graph: grimp.ImportGraph, contract: str) -> bool:
    options = CONTRACTS[contract]
    kind = KINDS[options["type"]]
    rule = kind(name=options["name"], session_options=CONFIGURATION["session_options"], contract_options=options)
    return rule.check(copy.deepcopy(graph), verbose=False).kept


def with_import(graph: grimp.ImportGraph, importer: str, imported: str) -> grimp.ImportGraph:
    changed = copy.deepcopy(graph)
    if imported not in changed.modules:
        assert not imported.startswith("alto"), imported
        changed.add_module(imported, is_squashed=True)
    assert importer in changed.modules
    changed.add_import(importer=importer, imported=imported)
    return changed


def test_every_contract_has_a_breach_that_shows_it_bites() -> None:
    assert set(CONTRACTS) == {contract for contract, _, _ in BREACHES}


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_package_keeps_its_contracts(graph: grimp.ImportGraph, contract: str) -> None:
    assert keeps(graph, contract)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_allowed_imports_are_allowed(graph: grimp.ImportGraph, contract: str) -> None:
    for importer, packages in ALLOWED.items():
        for imported in packages:
            graph = with_import(graph, f"alto.{importer}", f"alto.{imported}")
    graph = with_import(graph, "alto.kernels", "torch")
    assert keeps(graph, contract)


@pytest.mark.parametrize(("contract", "importer", "imported"), BREACHES)
def test_a_contract_refuses(graph: grimp.ImportGraph, contract: str, importer: str, imported: str) -> None:
    assert not keeps(with_import(graph, importer, imported), contract)


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("import house.kitchen", "house.kitchen"),
        ("from house import kitchen", "house.kitchen"),
        ("from house.kitchen import knife", "house.kitchen"),
        ("def cook():\n    import peft", "peft"),
        ("def cook():\n    from torch.cuda import Event", "torch"),
    ],
)
def test_an_import_is_found_anywhere(text: str, imported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"__init__": "", "kitchen": "", "hall": text}
    (tmp_path / "house").mkdir()
    for name, source in files.items():
        (tmp_path / "house" / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = grimp.build_graph("house", include_external_packages=True, cache_dir=None)
    assert seen.find_modules_directly_imported_by("house.hall") == {imported}
