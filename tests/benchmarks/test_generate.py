"""The benchmark of generation at its smallest scale, and a gate that fails on wrong results."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("peft", reason="the baseline needs the extra 'bench'")

from benchmarks import generate

# PEFT reads a transformers property by its deprecated name.
pytestmark = [
    pytest.mark.slow("benchmarks"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def test_the_smallest_scale_passes_its_gate(tmp_path):
    assert generate.main(["--scale", "smoke", "--threads", "1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "generate-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    assert found["figures"]["generation_speedup"] > 0
    assert set(found["goals"]) <= set(found["figures"])


def test_another_text_fails_the_gate(tmp_path, monkeypatch):
    def swapped(*arguments, **settings):
        first, second, *others = complete(*arguments, **settings)
        return [second, first, *others]

    complete = generate.complete
    monkeypatch.setattr(generate, "complete", swapped)
    assert generate.main(["--scale", "smoke", "--threads", "1", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "generate-smoke.json").read_text(encoding="utf-8"))
    assert found["figures"] == {}
    assert "adapter 0 answers question 0 otherwise than PEFT" in " ".join(found["notes"])
