"""Settings for all tests: no network, a time budget, and models small enough to run in milliseconds."""

from __future__ import annotations

import os

# huggingface_hub reads it when imported, so it must be set before anything imports transformers.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

# Triton reads it when imported: without a GPU its kernels are interpreted on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from architectures import build_tiny
from budgets import FULL_EXAMPLES, NIGHTLY_EXAMPLES, QUICK_EXAMPLES, load_budget, reason_to_skip, slowest_first
from durations import Durations, read_durations
from transformers import PreTrainedModel

pytest_plugins = ["journals"]  # journals written by hand


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="run the slow tests too, and try more examples; fails if a file takes three times its CPU time",
    )
    parser.addoption("--nightly", action="store_true", help="like --all, with more examples and kills, and no limits")
    parser.addoption(
        "--write-durations", action="store_true", help="write the CPU time of every file to tests/durations.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    is_nightly = config.option.nightly
    config.option.all = config.option.all or is_nightly
    load_budget(NIGHTLY_EXAMPLES if is_nightly else FULL_EXAMPLES if config.option.all else QUICK_EXAMPLES)
    writes = config.option.write_durations
    checks = config.option.all and not is_nightly and not writes
    config.pluginmanager.register(Durations(checks=checks, writes=writes))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        reason = reason_to_skip(item, runs_all=config.option.all, is_nightly=config.option.nightly)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_workers > 1:
        items[:] = slowest_first(items, num_workers, read_durations())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt imported modules and collected tests from garbage collection, which would scan them again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # so that the interpreter frees it when it ends


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep profiles measured by the user of this machine out of all tests."""
    os.environ["ALTO_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of profiles and estimates that no other test has written to."""
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama and its tokenizer, which no test changes."""
    from tiny import save_model

    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """``tiny_model(architecture, seed=0, **config)``: a new random-weight model of transformers' own class, float32."""
    return build_tiny


@pytest.fixture
def computes_in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that reports instructions for half precision, so that tests pass on any CPU.

    Without the instructions torch computes the same, up to rounding, but more slowly.
    """
    found = {**torch.cpu.get_capabilities(), "avx512_bf16": True, "avx512_fp16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
