"""The comparison with TRL's preprocessing at its smallest scale; it detects a difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

from alto.data.encode import Encoder
from alto.data.messages import Conversation
from tools.templates import __main__ as templates
from tools.templates.chat_templates import STYLES, make_tokenizer
from tools.templates.conversations import MESSAGES


def test_the_smallest_scale_passes_its_gate(tmp_path: Path) -> None:
    assert templates.main(["--scale", "smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "templates-smoke.json").read_text(encoding="utf-8"))
    figures = found["figures"]
    assert found["gate"] == "passed"
    assert figures["cases"] == figures["equal"] + figures["different"] > 40
    assert (figures["unexplained"], len(found["rows"])) == (0, figures["different"] + figures["refused_by_both"])
    assert all(row["reason"] for row in found["rows"] if row["verdict"] == "different")


def test_an_unexplained_difference_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Encoder.rows

    def without_the_end(encoder: Encoder, conversation: Conversation) -> Any:
        [row] = encode(encoder, conversation)
        return [type(row)(row.input_ids, (*row.is_trained[:-1], False))]

    monkeypatch.setattr(Encoder, "rows", without_the_end)
    rows = list(templates.compare_all("llama-3", True))
    result = templates.summarise(rows, "smoke")
    assert (result.gate, result.figures) == ("failed", {})
    assert all(row.verdict == "different" and not row.reason for row in rows)


@pytest.mark.parametrize("name", STYLES)
def test_marks_change_no_text(name: str) -> None:
    texts = []
    for is_marked in (False, True):
        tokenizer = make_tokenizer(name, is_marked=is_marked)
        assert ("{% generation %}" in tokenizer.chat_template) == (is_marked or name == "alto-tiny")
        texts.append(tokenizer.apply_chat_template(MESSAGES["several turns"]["messages"], tokenize=False))
    assert texts[0] == texts[1]
    assert "Second." in texts[0]
