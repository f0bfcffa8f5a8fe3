import json
import math
import re
import subprocess

import pytest

from benchmarks import common
from benchmarks.common import (
    Result,
    commit_id,
    format_table,
    goal_reached,
    machine_info,
    package_versions,
    publish,
    spread,
)


def result(**changes):
    fields = {
        "benchmark": "sweep",
        "scale": "smoke",
        "gate_failures": [],
        "figures": {"batched_over_sequential": 3.1, "samples_saved": 0.8},
        "goals": {
            "batched_over_sequential": (">=", 2.5),
            "samples_saved": (">=", 0.85),
            "best_loss_ratio": ("<=", 1.005),
        },
        "rows": [{"job": "a", "loss": math.inf}, {"job": "b", "loss": math.nan}],
        "notes": ["240 rows."],
    }
    return Result.of(**fields | changes)


def test_the_file_has_the_fields_of_the_design_and_is_strict_json(tmp_path):
    path = result().write(tmp_path)
    assert path.name == "sweep-smoke.json"
    found = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert list(found) == [
        *("benchmark", "scale", "command", "commit", "date", "machine", "versions"),
        *("gate", "figures", "goals", "rows", "notes"),
    ]
    assert found["goals"]["samples_saved"] == [">=", 0.85]
    assert [float(row["loss"]) for row in found["rows"]] == pytest.approx([math.inf, math.nan], nan_ok=True)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])


def test_a_result_that_cannot_be_written_leaves_the_old_one_and_no_litter(tmp_path, monkeypatch):
    old = result().write(tmp_path).read_text()
    with monkeypatch.context() as patch:
        patch.setattr("benchmarks.common.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            result(notes=["new"]).write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep-smoke.json"]
    assert (tmp_path / "sweep-smoke.json").read_text() == old


def test_a_failed_gate_publishes_no_figures_and_says_why(tmp_path, capsys):
    failed = result(gate_failures=["losses of job 3 differ by 0.2"])
    assert publish(failed, tmp_path) == 1
    assert failed.gate == "failed"
    assert failed.figures == {}
    assert failed.notes == ("No figures, the gate failed: losses of job 3 differ by 0.2", "240 rows.")
    printed = capsys.readouterr().out
    assert "losses of job 3 differ by 0.2" in printed
    assert "reached" not in printed


def test_figures_beside_a_failed_gate_are_refused():
    with pytest.raises(ValueError, match="no figures beside a failed gate"):
        Result(
            **{name: getattr(result(), name) for name in Result.__dataclass_fields__ if name != "gate"}, gate="failed"
        )


def test_the_table_sets_figures_against_goals(tmp_path, capsys):
    assert publish(result(), tmp_path) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert lines["batched_over_sequential"] == ["3.1", ">=", "2.5", "reached"]
    assert lines["samples_saved"] == ["0.8", ">=", "0.85", "missed"]
    assert lines["best_loss_ratio"] == ["none", "<=", "1.005", "missed"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": "huge"}, "scale of smoke, cpu, gpu"),
        ({"figures": {"x": math.nan}}, "finite number for figure 'x'"),
        ({"figures": {"x": True}}, "finite number for figure 'x'"),
        ({"goals": {"x": ("=>", 1.0)}}, "in goal 'x', found '=>'"),
    ],
)
def test_what_is_no_result_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        result(**changes)


@pytest.mark.parametrize(
    ("value", "goal", "reached"),
    [
        (2.5, (">=", 2.5), True),
        (2.5, (">", 2.5), False),
        (1.006, ("<=", 1.005), False),
        (1.0, ("<", 1.005), True),
        (math.nan, (">=", 0.0), False),
        (math.nan, ("<=", 0.0), False),
    ],
)
def test_goal_reached(value, goal, reached):
    assert goal_reached(value, goal) is reached


def test_spread():
    found = spread([4.0, 1.0, 2.0])
    assert (found.median, found.minimum, found.maximum, found.count) == (2.0, 1.0, 4.0, 3)
    assert found.relative == 1.5
    for bad in ([], [1.0, math.nan]):
        with pytest.raises(ValueError, match="finite measurement"):
            spread(bad)


def test_format_table_puts_numbers_right_and_words_left():
    assert format_table(("job", "loss"), [("first", 1.25), ("b", 10.5)]) == (
        "job    loss\n-----  ----\nfirst  1.25\nb      10.5"
    )
    assert format_table(("job",), []) == ""


def test_commit_id_tells_changed_code_from_new_results(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert commit_id(tmp_path / "nowhere") == "unknown"
    git("init")
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "--no-verify", "-m", "first")
    clean = commit_id(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{40}", clean)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "sweep-cpu.json").write_text("{}")
    assert commit_id(tmp_path) == clean
    (tmp_path / "code.py").write_text("x = 2\n")
    assert commit_id(tmp_path) == f"{clean}-dirty"


def test_machine_and_versions_name_what_was_measured_on():
    machine = machine_info()
    assert machine["cpu"]
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 2**28
    versions = package_versions(("torch", "no-such-package"))
    assert set(versions) == {"python", "torch"}


def test_the_source_is_known_by_its_content(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    (tmp_path / "src" / "alto").mkdir(parents=True)
    digests = []
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", "x = 2"), ("notes.md", "x = 3")):
        (tmp_path / "src" / "alto" / name).write_text(text, encoding="utf-8")
        common.source_digest.cache_clear()
        digests.append(common.source_digest())
    common.source_digest.cache_clear()
    assert len(set(digests[:3])) == 3
    assert digests[3] == digests[2]
