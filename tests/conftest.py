"""What every room's tests share: no network, and models small enough to run in milliseconds."""

from __future__ import annotations

import os

# Read by huggingface_hub when it is imported, so it has to stand before anything that imports transformers.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

# Read by triton when it is imported: without a GPU its kernels are interpreted on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable

import pytest
from architectures import build_tiny
from transformers import PreTrainedModel

pytest_plugins = ["journals"]  # journals written by hand


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Profiles that the machine's user has measured decide no test."""
    os.environ["ALTO_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """``tiny_model(architecture, seed=0, **config)``: a new random-weight model of transformers' own class, float32."""
    return build_tiny
