"""A benchmark in pieces: what is on disk at each time, and what counts towards a result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.pieces import GateFailedError, Origin, Piece, Study, assemble, read_pieces, run_pieces, write_piece
from tools import merge_results
from tools.merge_results import merge

pytestmark = pytest.mark.slow("benchmarks")

STUDY = Study(
    benchmark="b", scale="gpu", pieces=("one", "two", "three"), goals={"x_two": (">=", 2.0)}, notes=("In general.",)
)
MACHINE = {
    "cpu": "C",
    "cores": 16,
    "memory_bytes": 137_438_953_472,
    "platform": "Linux-1",
    "gpus": [{"name": "G", "memory_bytes": 150 * 10**9}],
}
ORIGIN = Origin(commit="a" * 40, source="s", machine=MACHINE, versions={"torch": "2.11.0", "triton": "3.6.0"})


@pytest.fixture
def origin(monkeypatch):
    """A function that sets the origin of the next commands."""

    def here(**changes):
        monkeypatch.setattr(Origin, "here", staticmethod(lambda: replace(ORIGIN, **changes)))

    here()
    return here


def good(name, value=1.0):
    def action(piece, flush):
        piece.rows.append({"table": "t", "of": name})
        piece.figures[f"x_{name}"] = value

    return {name: action}


def result_in(folder: Path):
    return json.loads((folder / "b-gpu.json").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("origin")
class TestOneRun:
    def test_writes_a_result_of_all(self, tmp_path, capsys):
        assert run_pieces(STUDY, good("one") | good("two", 3.0) | good("three"), tmp_path) == 0
        result = result_in(tmp_path)
        assert (result["gate"], result["commit"]) == ("passed", "a" * 40)
        assert result["figures"] == {"x_one": 1.0, "x_two": 3.0, "x_three": 1.0}
        assert [row["of"] for row in result["rows"]] == ["one", "two", "three"]
        assert result["notes"] == ["In general."]
        assert "reached" in capsys.readouterr().out

    def test_has_on_disk_what_it_found_when_it_is_killed(self, tmp_path):
        def killed(piece, flush):
            piece.rows.append({"table": "t", "of": "half"})
            flush()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_pieces(STUDY, good("one") | {"two": killed}, tmp_path)
        one, two = read_pieces(STUDY, tmp_path)
        assert one.is_sound
        assert not two.is_finished
        assert two.rows == [{"table": "t", "of": "half"}]
        assert result_in(tmp_path)["figures"] == {"x_one": 1.0}
        notes = assemble(STUDY, [one, two]).notes
        assert notes[:2] == ("Ended before it was whole: two.", "Not measured: three.")

    def test_goes_on_after_a_failure_and_says_so_at_the_end(self, tmp_path):
        def fails(piece, flush):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 46 GiB")

        assert run_pieces(STUDY, {"one": fails} | good("two"), tmp_path) == 1
        result = result_in(tmp_path)
        assert (result["gate"], result["figures"]) == ("passed", {"x_two": 1.0})
        assert result["notes"][:2] == ["Failed: one: out of memory", "Not measured: three."]

    def test_publishes_nothing_of_a_red_gate(self, tmp_path):
        def red(piece, flush):
            good("one", 7.0)["one"](piece, flush)
            flush()
            raise GateFailedError(["job 3 is 0.2 off"])

        assert run_pieces(STUDY, {"one": red} | good("two"), tmp_path) == 1
        result = result_in(tmp_path)
        assert (result["gate"], result["figures"]) == ("partly passed", {"x_two": 1.0})
        assert [row["of"] for row in result["rows"]] == ["two"]
        assert result["notes"][0] == "Without figures, its gate failed: job 3 is 0.2 off"
        assert run_pieces(STUDY, {"two": red}, tmp_path) == 1
        assert (result_in(tmp_path)["gate"], result_in(tmp_path)["figures"]) == ("failed", {})


class TestSeveralCommands:
    def test_make_one_result_of_one_origin(self, tmp_path, origin):
        run_pieces(STUDY, good("two"), tmp_path)
        origin(commit="unknown", machine=MACHINE | {"platform": "Linux-2", "memory_bytes": 137_438_000_000})
        assert run_pieces(STUDY, good("one"), tmp_path) == 0
        assert result_in(tmp_path)["figures"] == {"x_one": 1.0, "x_two": 1.0}
        assert result_in(tmp_path)["commit"] == "a" * 40

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"commit": "b" * 40}, "commit bbbbbbbbbbbbbbbbbb, not aaaaaaaaaaaaaaaaaa"),
            ({"source": "other"}, "another state of the source"),
            ({"commit": "unknown", "source": "other"}, "another state of the source"),
            ({"machine": MACHINE | {"gpus": [{"name": "H", "memory_bytes": 150 * 10**9}]}}, "gpus "),
            ({"machine": MACHINE | {"memory_bytes": 68_719_476_736}}, "memory_bytes "),
            ({"machine": MACHINE | {"cores": 8}}, "cores 8, not 16"),
            ({"versions": {"torch": "2.11.0", "triton": "3.7.0"}}, "triton 3.7.0, not 3.6.0"),
            ({"versions": {"torch": "2.11.0"}}, "triton none, not 3.6.0"),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_two_origins_are_never_one_result(self, tmp_path, origin, capsys, changes, message):
        run_pieces(STUDY, good("two"), tmp_path / "a")
        old = read_pieces(STUDY, tmp_path / "a")[0]
        origin(**changes)
        run_pieces(STUDY, good("one"), tmp_path / "b")
        new = read_pieces(STUDY, tmp_path / "b")[0]
        assert any(message in phrase for phrase in new.origin.differences(old.origin))
        with pytest.raises(ValueError, match="Expected pieces of one commit, machine and set of versions"):
            merge(STUDY, [tmp_path / "a", tmp_path / "b"], tmp_path / "c")
        assert not (tmp_path / "c").exists()
        capsys.readouterr()
        assert run_pieces(STUDY, good("three"), tmp_path / "a") == 0
        assert result_in(tmp_path / "a")["figures"] == {"x_three": 1.0}
        assert "left out, because it is of another run: two: " in capsys.readouterr().out

    def test_a_long_study_may_span_commits_and_then_names_them(self, tmp_path, origin):
        study = replace(STUDY, spans_sources=True)
        run_pieces(study, good("one"), tmp_path)
        origin(commit="b" * 40, source="other")
        run_pieces(study, good("two"), tmp_path)
        result = result_in(tmp_path)
        assert result["figures"] == {"x_one": 1.0, "x_two": 1.0}
        assert [row["commit"] for row in result["rows"]] == ["a" * 40, "b" * 40]
        assert result["commit"] == "b" * 40
        origin(machine=MACHINE | {"cores": 8})
        run_pieces(study, good("three"), tmp_path)
        assert result_in(tmp_path)["figures"] == {"x_three": 1.0}

    def test_a_piece_without_times_may_be_of_another_machine(self, tmp_path, origin):
        study = replace(STUDY, untimed=["two"])
        run_pieces(study, good("one"), tmp_path)
        origin(machine=MACHINE | {"cpu": "another"})
        run_pieces(study, good("two"), tmp_path)
        assert result_in(tmp_path)["figures"] == {"x_two": 1.0}
        origin()
        run_pieces(study, good("three"), tmp_path)
        result = result_in(tmp_path)
        assert result["figures"] == {"x_one": 1.0, "x_two": 1.0, "x_three": 1.0}
        assert result["machine"] == MACHINE
        assert [row.get("cpu") for row in result["rows"]] == [None, "another", None]

    def test_from_several_folders_are_merged_and_the_latest_counts(self, tmp_path, origin, monkeypatch):
        for day, value in ((1, 5.0), (2, 6.0)):
            run_pieces(STUDY, good("two", value) | good("one"), tmp_path / str(day))
            for piece in read_pieces(STUDY, tmp_path / str(day)):
                piece.date = f"2026-01-0{day}T00:00:00+00:00"
                write_piece(STUDY, piece, tmp_path / str(day))
        result = merge(STUDY, [tmp_path / "2", tmp_path / "1"], tmp_path / "both")
        assert result.figures == {"x_one": 1.0, "x_two": 6.0}
        assert (result.date, result.gate) == ("2026-01-02T00:00:00+00:00", "passed")
        assert json.loads(result.to_json()) == result_in(tmp_path / "both")
        with pytest.raises(ValueError, match="Expected a piece of b-gpu"):
            merge(STUDY, [tmp_path], tmp_path / "none")

    @pytest.mark.parametrize(("source", "commit"), [("s", "c" * 40), ("other", "unknown")])
    def test_measured_without_git_get_the_commit_of_the_same_source(
        self, tmp_path, origin, monkeypatch, source, commit
    ):
        origin(commit="unknown", source=source)
        run_pieces(STUDY, good("two"), tmp_path / "a")
        monkeypatch.setattr(merge_results, "source_digest", lambda: "s")
        monkeypatch.setattr(merge_results, "commit_id", lambda: "c" * 40)
        assert merge(STUDY, [tmp_path / "a"], tmp_path / "b").commit == commit
        assert read_pieces(STUDY, tmp_path / "b")[0].origin.commit == commit

    def test_void_what_an_earlier_one_found_of_the_same_piece(self, tmp_path, origin):
        def fails(piece, flush):
            raise RuntimeError("no GPU\nany more")

        run_pieces(STUDY, good("one") | good("two"), tmp_path)
        assert run_pieces(STUDY, {"two": fails}, tmp_path) == 1
        assert result_in(tmp_path)["figures"] == {"x_one": 1.0}
        assert result_in(tmp_path)["notes"][0] == "Failed: two: RuntimeError: no GPU"


def test_a_piece_that_is_whole_and_green_is_sound():
    assert Piece(name="a", is_finished=True).is_sound
    for change in ({"is_finished": False}, {"failures": ["f"]}, {"errors": ["e"]}):
        assert not Piece(**{"name": "a", "is_finished": True, **change}).is_sound
