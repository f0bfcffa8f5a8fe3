"""Marks of tests that need a package of an extra."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="needs the bnb extra: pip install 'alto-lora[bnb]'"
)
