"""docs/python.md is one program, and it runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


@pytest.mark.slow("queues")
def test_the_page_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "['first']" in printed, "the cancelled task has no result, the other has one"
    assert "UnknownKeyError" in printed
    assert "Did you mean" in printed
    names_of_runs = [folder.name for folder in (tmp_path / "runs").iterdir()]
    for prefix in ("watched-", "queue-"):
        assert any(name.startswith(prefix) for name in names_of_runs), names_of_runs
