"""A user's own rule: the example of docs/early-exit.md, as an installed package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import packages
import pytest
from journals import entries
from tiny import write_rows
from typer.testing import CliRunner

import alto
from alto.cli import app
from alto.early_exit import Collapse, Divergence, OverfittingGap, Policy, Recording, Rule, audit, policy_from, replay
from alto.errors import SpecError, TaskInterruptedError, UnknownKeyError, UnsupportedError
from alto.records import ExitDecision, LossPoint
from alto.runs import read_events, read_history
from alto.spec import EarlyExit, Task, load_task

FILES = packages.files_of("early-exit.md", after="## A rule of your own")
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install(old, new)`` installs the page's package with ``old`` replaced; without ``old``, with another source."""

    def installed(old: str = "", new: str = "") -> None:
        source = FILES["my_rules.py"]
        assert old in source
        source = source.replace(old, new) if old else new or source
        packages.install(tmp_path / "package", {**FILES, "my_rules.py": source}, monkeypatch)

    return installed


@pytest.fixture
def plateau(install: Install) -> None:
    install()


def curve(*validation: float) -> list[LossPoint]:
    return [
        LossPoint(job="a", step=10 * (index + 1), total_steps=100, train_ema=loss, validation_loss=loss)
        for index, loss in enumerate(validation)
    ]


@pytest.mark.usefixtures("plateau")
def test_it_judges_after_the_rules_of_the_policy_with_its_settings() -> None:
    settings = EarlyExit(policy="paper", detect_divergence=False, rules={"plateau": {"threshold": 0.1, "patience": 2}})
    policy = policy_from(settings)
    assert [type(rule).__name__ for rule in policy.rules] == ["OverfittingGap", "Plateau"]
    assert policy.judge(curve(2.0, 1.0, 0.99)) is None
    verdict = policy.judge(curve(2.0, 1.0, 0.99, 0.98))
    assert verdict is not None
    assert (verdict.job, verdict.step, verdict.reason) == ("a", 40, "plateau")
    assert verdict.evidence == {
        "fall": pytest.approx(0.01 / 0.99),
        "threshold": 0.1,
        "best_validation_loss": 0.99,
        "in_a_row": 2,
    }
    assert policy_from(EarlyExit(enabled=False, rules={"plateau": True})) == Policy()


@pytest.mark.usefixtures("plateau")
def test_its_settings_are_those_of_the_task_file() -> None:
    task = Task(model="m", dataset="d", early_exit={"rules": {"plateau": {"patience": 5, "threshold": None}}})
    assert task.to_dict()["early_exit"]["rules"] == {"plateau": {"threshold": 0.01, "patience": 5}}
    assert Task(**task.to_dict()) == task
    assert task.early_exit.resolved().rules == task.early_exit.rules
    assert EarlyExit.of_run(task.early_exit.resolved().to_dict()) == task.early_exit.resolved()
    assert EarlyExit(rules={"plateau": True}) == EarlyExit(rules={"plateau": {}}) != EarlyExit()


@pytest.mark.usefixtures("plateau")
def test_reading_a_task_with_a_rule_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(FILES["task.yaml"], encoding="utf-8")
    code = "import sys; from alto.spec import load_task; load_task('task.yaml'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_task_without_rules_is_written_as_before() -> None:
    assert "rules" not in EarlyExit().to_dict()
    assert "rules" not in Task(model="m", dataset="d").to_dict()["early_exit"]


@pytest.mark.usefixtures("plateau")
@pytest.mark.parametrize(
    ("early_exit", "error", "message"),
    [
        (
            {"rules": {"platau": {}}},
            SpecError,
            r"^early_exit\.rules should be one of .*plateau, found 'platau'.*'plateau'",
        ),
        (
            {"rules": {"plateau": {"treshold": 1}}},
            UnknownKeyError,
            r"^early_exit\.rules\.plateau has .*mean 'threshold'",
        ),
        (
            {"rules": {"plateau": {"threshold": 1}}},
            SpecError,
            r"^early_exit\.rules\.plateau\.threshold \(smallest .* < 1",
        ),
        (
            {"rules": {"plateau": 0.3}},
            SpecError,
            r"^early_exit\.rules\.plateau should be a mapping of settings, or true",
        ),
        ({"rules": ["plateau"]}, SpecError, r"^early_exit\.rules should map names of rules to their settings, found"),
        (
            {"rules": {"divergence": {}}},
            SpecError,
            r"^early_exit\.rules: expected rules that are not part of policy 'alto'",
        ),
        ({"rule": {}}, UnknownKeyError, r"^early_exit has the unknown key 'rule'\. Did you mean 'rules'"),
    ],
)
def test_what_is_wrong_is_refused_where_the_task_is_read(
    early_exit: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Task(model="m", dataset="d", early_exit=early_exit)


def test_a_rule_of_the_other_policy_can_be_added() -> None:
    rules = policy_from(EarlyExit(detect_overfitting=False, rules={"overfitting_gap": {"tau_gap": 0.5}})).rules
    assert rules == (Divergence(), Collapse(), OverfittingGap(tau_gap=0.5))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "import nothing_like_it", "cannot be used .*nothing_like_it"),
        ("", "Plateau = 3", r"expected a subclass of alto.early_exit.Rule, found int"),
        ("default=0.01", "default=1.5", r"Plateau: expected defaults .*threshold .* < 1, found 1.5"),
        ("default=3", 'default="3"', r"Plateau: expected defaults .*patience .* whole number .* found '3' \(text\)"),
        ("    def judge", "    def judgement", "expected Plateau to have a judge method"),
        (
            'reason = "plateau"',
            'reason = "stopped"',
            "other than underperforming, stopped, failed, budget, found 'stopped'",
        ),
        ('reason = "plateau"', 'reason = "No <progress>"', "a word or two of lower-case letters"),
        ('    reason = "plateau"\n', "", "found None"),
    ],
)
def test_a_package_that_brings_no_rule_is_named(install: Install, old: str, new: str, message: str) -> None:
    install(old, new)
    with pytest.raises(UnsupportedError, match=f"my_rules:Plateau of the package that registers 'plateau'.*{message}"):
        EarlyExit(rules={"plateau": True})


def test_two_packages_with_one_rule_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [EntryPoint(name="x", value=f"{package}:X", group="alto.early_exit_rules") for package in ("b", "a")]
    monkeypatch.setattr("alto.base.plugins.entry_points", lambda **_: both)
    with pytest.raises(UnsupportedError, match=r"registers 'x', found 2 \(a:X, b:X\); remove all but one"):
        EarlyExit(rules={"x": True})


@pytest.mark.usefixtures("plateau")
def test_the_page_s_curve_is_judged_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "try_rule.py").write_text(FILES["try_rule.py"], encoding="utf-8")
    done = subprocess.run([sys.executable, "try_rule.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("ExitDecision(job='job-000', step=4, reason='plateau', evidence={'fall': ")


def test_a_package_cannot_take_the_name_of_a_rule_of_alto_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = FILES["pyproject.toml"].replace("plateau = ", "divergence = ")
    packages.install(tmp_path, {**FILES, "pyproject.toml": toml}, monkeypatch)
    with pytest.raises(
        UnsupportedError, match=r"rules: expected 'divergence' to be registered by ALTO only, found .*my_rules:Plateau"
    ):
        EarlyExit(rules={"divergence": True})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            "1 / 0",
            r"Plateau.judge of a at step 20: .* ZeroDivisionError: division by zero, in my_rules.py:\d+ of my_rules;",
        ),
        ("True", r"Plateau.judge: expected None or an alto.early_exit.ExitDecision, found bool; correct the rule"),
        ('{"fall": 0.1}', r"found dict; correct the rule"),
        ("self._ends(history, None)", r"expected evidence that maps names to numbers .*, found NoneType; correct"),
        ('self._ends(history, {"fall": "0.1"})', r"found 'fall': str; correct the rule"),
        ("self._ends(history, {1: 0.1})", r"found 1: float; correct the rule"),
    ],
)
def test_a_rule_that_raises_or_returns_something_else_is_named(install: Install, returned: str, message: str) -> None:
    source = FILES["my_rules.py"].replace("import Rule", "import ExitDecision, Rule")
    old = "return verdict_in_a_row(history, self._stands_still, patience=self.patience, reason=self.reason)"
    assert old in source
    ends = (
        "\n    def _ends(self, history, evidence):\n        last = history[-1]\n        return ExitDecision("
        "job=last.job, step=last.step, reason=self.reason, evidence=evidence)\n"
    )
    install("", source.replace(old, f"return {returned}") + ends)
    with pytest.raises(UnsupportedError, match=message):
        policy_from(EarlyExit(rules={"plateau": True})).judge(curve(2.0, 1.0))


class Confused(Rule):
    reason = "confused"

    job: str = "a"
    step: int = 10
    because: str = "confused"

    def judge(self, history: object) -> ExitDecision:
        return ExitDecision(job=self.job, step=self.step, reason=self.because)


@pytest.mark.parametrize("wrong", [{"job": "another"}, {"step": 9}, {"because": "stopped"}])
def test_a_verdict_that_is_not_the_rule_s_is_refused(wrong: dict[str, object]) -> None:
    assert Policy(rules=(Confused(),)).judge(curve(1.0)) is not None
    (found,) = wrong.values()
    with pytest.raises(
        UnsupportedError, match=rf"Confused.judge: expected a verdict on a at step 10 .*found.* '?{found}"
    ):
        Policy(rules=(Confused(**wrong),)).judge(curve(1.0))


def test_its_exits_are_in_journal_report_and_replay(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's task file is interrupted and resumed by the engine; the same rule then replays a recording of its
    jobs."""
    install()
    write_rows(tmp_path / "rows.jsonl", 40)
    (tmp_path / "task.yaml").write_text(FILES["task.yaml"], encoding="utf-8")
    changes = ["num_train_epochs=4", "max_length=32", "r=2", "report_to=none", "early_exit.evaluation_share=all"]
    runs = tmp_path / "runs"

    def has_evaluated() -> bool:
        return any('"eval"' in journal.read_text(encoding="utf-8") for journal in runs.glob("*/journal.jsonl"))

    with pytest.raises(TaskInterruptedError):
        alto.Engine(output_dir=runs, is_interrupted=has_evaluated).tune(load_task(tmp_path / "task.yaml", changes))
    (run,) = runs.iterdir()
    engine = alto.Engine(output_dir=runs)
    result = engine.resume(run)

    events = read_events(Path(result.run_dir) / "journal.jsonl")
    (ended,) = [event for event in events if event["event"] == "job_exited"]
    assert (ended["job"], ended["reason"]) == ("job-000", "plateau")
    assert ended["evidence"] == {
        "fall": pytest.approx(0.0, abs=0.001),
        "threshold": 0.001,
        "best_validation_loss": pytest.approx(ended["best_validation_loss"], rel=1e-3),
        "in_a_row": 2,
    }
    assert events[0]["early_exit"]["rules"] == {"plateau": {"threshold": 0.001, "patience": 2}}
    assert audit(entries(events)) == ()
    assert result.best_job == "job-001"
    assert result.job_results[0].exit_reason == "plateau"

    page = (Path(result.run_dir) / "report.html").read_text(encoding="utf-8")
    assert "plateau" in page
    assert "threshold 1e-3" in page
    shown = CliRunner().invoke(app, ["show", result.run_dir])
    assert shown.exit_code == 0, shown.output
    assert "plateau" in shown.output
    status = json.loads(CliRunner().invoke(app, ["show", result.run_dir, "--json"]).output)
    assert "plateau" in json.dumps(status)

    full = engine.tune(load_task(tmp_path / "task.yaml", [*changes, "early_exit=false", "name=full"]))
    recording = Recording.from_journal(entries(read_events(Path(full.run_dir) / "journal.jsonl")))
    settings = EarlyExit(select=False, rules={"plateau": {"threshold": 0.001, "patience": 2}})
    replayed = replay(recording, policy_from(settings), settings.ema_alpha)
    assert replayed.exits == {"job-000": ("plateau", ended["step"])}
    assert set(replayed.saved_by) == {"plateau"}

    # The journal can be read without the package.
    monkeypatch.setattr("alto.base.plugins.entry_points", lambda **_: ())
    assert read_history(result.run_dir).jobs["job-000"].exit_reason == "plateau"
    assert CliRunner().invoke(app, ["report", result.run_dir]).exit_code == 0
