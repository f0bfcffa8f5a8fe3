"""A user's own objective: the example of docs/objectives.md, as an installed package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import packages
import pytest
import torch
from preference_pairs import make_pairs
from resident_jobs import DATA, PAIRS, Bank, assert_same_step, make_model, make_task
from tiny import write_rows
from typer.testing import CliRunner

import alto
from alto.backbone import Backbone
from alto.cli import app
from alto.data import EncodedDataset, JobRows, TaskData, collate
from alto.errors import DataError, ShapeError, SpecError, UnknownKeyError, UnsupportedError
from alto.executor import RunInputs, TaskContext, TaskSession, resolve_early_exit, run_alone
from alto.objectives import Learners, find_objective, job_losses, micro_batch_terms
from alto.report.importance import importance_of_settings
from alto.runs import JobAction, Journal, Mailbox, RunDir, read_events, read_history
from alto.spec import Task, load_task
from alto.views import loss_unit

FILES = packages.files_of("objectives.md", until="## One on conversations")
FOCAL = packages.files_of("objectives.md", after="## One on conversations")
ENTRY, TERMS = "simpo/__init__.py", "simpo/objective.py"
CONFIGS: list[dict[str, object]] = [
    {"beta": 2.0, "lr": 1e-3, "r": 4, "batch_size": 1, "seed": 1},
    {"beta": 0.5, "lr": 5e-4, "r": 16, "batch_size": 4, "seed": 2, "target_margin": 0.5},
    {"beta": 1.0, "lr": 5e-4, "r": 8, "batch_size": 8, "seed": 3},
]

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install(entry=(old, new), terms=(old, new))`` installs the page's package, changed in one place of a module."""

    def installed(entry: tuple[str, str] = ("", ""), terms: tuple[str, str] = ("", "")) -> None:
        files = dict(FILES)
        for name, (old, new) in ((ENTRY, entry), (TERMS, terms)):
            assert old in files[name]
            files[name] = files[name].replace(old, new) if old else new or files[name]
        packages.install(tmp_path / "package", files, monkeypatch)

    return installed


@pytest.fixture
def task(install: Install) -> Task:
    install()
    return make_task(CONFIGS, method="simpo")


def test_its_loss_is_that_of_the_paper(task: Task) -> None:
    objective, backbone = find_objective("simpo"), Backbone(make_model("llama"), None, "unused")
    with torch.no_grad():
        batch = collate([JobRows(PAIRS.train, 0, (3, 1, 8))])
        (found,) = job_losses(backbone, batch, [Learners(objective, (task.jobs[1].config,))]).tolist()
        expected = []
        for row in (3, 1, 8):
            chosen, rejected = replies_of(backbone, row)
            expected.append(-float(torch.log(torch.sigmoid(0.5 * chosen.mean() - 0.5 * rejected.mean() - 0.5))))
    assert found == pytest.approx(sum(expected) / 3, rel=1e-5)


def replies_of(backbone: Backbone, row: int) -> tuple[torch.Tensor, ...]:
    """Return the log-probabilities of the tokens of both replies, float64."""
    batch = collate([JobRows(PAIRS.train, 0, (row,))])
    hidden_TH = backbone.hidden_states(
        batch.input_ids_T, batch.position_ids_T, batch.sequence_lengths, batch.sequence_prefixes
    )
    losses_S = backbone.token_losses(hidden_TH[batch.loss_positions_S], batch.loss_targets_S)
    return (-losses_S.double()).split(batch.sequence_targets)


def test_its_jobs_train_beside_others_as_they_do_alone(task: Task) -> None:
    together = Bank(make_model("llama"), task, data=PAIRS)
    alone = [Bank(make_model("llama"), make_task([config], method="simpo"), data=PAIRS) for config in CONFIGS]
    found = list(together.step().values())
    for facts, bank in zip(found, alone, strict=True):
        (expected,) = bank.step().values()
        assert_same_step(facts, expected)
    assert len({round(facts.loss, 3) for facts in found}) == 3


def test_a_task_with_it_runs_to_its_end(task: Task, tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "runs", task)
    backbone = Backbone(make_model("llama"), None, "unused")
    data = TaskData(train=make_pairs(12, seed=1), validation=PAIRS.validation)
    with Journal(run_dir.journal_file) as journal:
        run_alone(TaskSession(TaskContext.of(task, backbone, data), journal, RunInputs(run_dir=run_dir)))
    events = read_events(run_dir.journal_file)
    assert (events[0]["method"], events[-1]["event"]) == ("simpo", "task_completed")
    assert "references" not in events[0]
    assert all(
        set(event["metrics"]) == set(find_objective("simpo").method.entry.metrics)
        for event in events
        if "metrics" in event
    )
    assert any("metrics" in event for event in events)


@pytest.mark.parametrize("says_so", [True, False])
def test_its_evaluations_get_a_share_of_the_time_if_its_entry_says_so(install: Install, says_so: bool) -> None:
    install(entry=("", "") if says_so else ("has_row_losses=True", "has_row_losses=False"))
    task_file = make_task(CONFIGS, method="simpo")
    data = TaskData(train=PAIRS.train, validation=make_pairs(200, seed=2))
    task = resolve_early_exit(task_file, data, begins=True)
    assert any(rows < 200 for _, rows in task.early_exit.evaluations or ()) == says_so


def test_an_evaluation_on_some_pairs_keeps_the_loss_of_each(task: Task, tmp_path: Path) -> None:
    data = TaskData(train=PAIRS.train, validation=make_pairs(60, seed=2))
    resolved = resolve_early_exit(task, data, begins=True)
    run_dir = RunDir.create(tmp_path / "runs", resolved)
    backbone = Backbone(make_model("llama"), None, "unused")
    with Journal(run_dir.journal_file) as journal:
        run_alone(TaskSession(TaskContext.of(resolved, backbone, data), journal, RunInputs(run_dir=run_dir)))
    evaluations = [event for event in read_events(run_dir.journal_file) if event["event"] == "eval"]
    assert min(len(event["loss_rows"]) for event in evaluations) == 32, "the minimum number of pairs"
    for event in evaluations:
        mean = sum(event["loss_rows"]) / len(event["loss_rows"])
        assert event["validation_loss"] == pytest.approx(mean, rel=1e-5)


def test_an_evaluation_without_the_losses_that_its_entry_promises_is_refused(install: Install) -> None:
    source = FILES[TERMS].replace("import Pairs", "import Pairs, Terms")
    source = source.replace("return pairs.terms(", "all_terms = pairs.terms(")
    install(terms=("", source + "        return Terms(sums_J=all_terms.sums_J, metrics=all_terms.metrics)\n"))
    bank = Bank(make_model("llama"), make_task(CONFIGS[:2], method="simpo"), data=PAIRS)
    bank.step()
    with pytest.raises(ShapeError, match=r"SimPO.terms: expected rows with 'loss', .* simpo says has_row_losses"):
        bank.trainer.evaluate(bank.jobs)


def test_its_loss_is_shown_in_its_unit_where_it_is_installed(install: Install) -> None:
    assert loss_unit("simpo") == "in the unit of simpo"
    install()
    assert loss_unit("simpo") == "mean over pairs"


def test_it_refuses_conversations(task: Task) -> None:
    with pytest.raises(DataError, match="method simpo: expected preference pairs"):
        find_objective(task.method).check(DATA.train, [])


def test_a_method_without_a_package_is_unknown() -> None:
    for ask in (lambda: make_task(CONFIGS, method="simpo"), lambda: find_objective("simpo")):
        with pytest.raises(SpecError, match=r"method should be one of sft, dpo, .*, found 'simpo'\. Set method: cpo"):
            ask()
    with pytest.raises(SpecError, match=r"method should be one of sft, dpo, .*, found 'mine'\..* or install the"):
        find_objective("mine")


def test_its_settings_are_checked_where_the_task_is_read(task: Task) -> None:
    assert [job.config.objective.to_dict() for job in task.jobs] == [
        {"beta": 2.0, "target_margin": 1.0},
        {"beta": 0.5, "target_margin": 0.5},
        {"beta": 1.0, "target_margin": 1.0},
    ]
    with pytest.raises(
        UnknownKeyError, match=r"the task has the unknown key 'target_margn'\. Did you mean 'target_margin'"
    ):
        task.replace(target_margn=1.0)
    with pytest.raises(
        SpecError, match=r"^In search_space.target_margin\[1\]: target_margin \(lead .* <= 100, found 200"
    ):
        task.replace(search_space={"target_margin": [1.0, 200.0]})
    with pytest.raises(
        UnknownKeyError, match=r"^'loss_type' is a setting of method dpo, cpo, kto and grpo, found with"
    ):
        task.replace(loss_type="ipo")
    with pytest.raises(
        SpecError, match=r"metric 'kl' is .* with method 'simpo' \(available: loss, reward_accuracy, reward_margin\)"
    ):
        task.replace(metric="kl")
    sampled = task.replace(search_space={"target_margin": {"min": 0.5, "max": 2.0, "num": 3}})
    margins = [job.config.to_dict()["target_margin"] for job in sampled.jobs]
    assert len(set(margins)) == 3
    assert all(0.5 <= margin <= 2.0 for margin in margins)


@pytest.mark.usefixtures("task")
def test_reading_a_task_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(FILES["task.yaml"], encoding="utf-8")
    code = "import sys; from alto.spec import load_task; load_task('task.yaml'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize(
    ("entry", "terms", "message"),
    [
        (("", "import nothing_like_it"), ("", ""), "simpo:SIMPO .*cannot be used .*nothing_like_it"),
        (("", "SIMPO = 3"), ("", ""), "simpo:SIMPO .*expected an alto.spec.ObjectiveEntry, found int"),
        (
            ("scores=PREFERENCE_SCORES", 'scores=("win_rate",)'),
            ("", ""),
            "simpo:SIMPO .*metrics .* and scores .*win_rate",
        ),
        (("metrics=PREFERENCE_METRICS", 'metrics=("loss",)'), ("", ""), "simpo:SIMPO .*no metric called 'loss'"),
        (
            ("metrics=PREFERENCE_METRICS", 'metrics="margin"'),
            ("", ""),
            "simpo:SIMPO .*metrics: expected a tuple of n",
        ),
        (('("beta",)', '("beta")'), ("", ""), "simpo:SIMPO .*reward_margin: expected a tuple of names, found 'beta'"),
        (
            ('("beta",)', '("gamma",)'),
            ("", ""),
            "simpo:SIMPO .*scaled_by: expected settings of .*gamma",
        ),
        (("reward_margin", "margin"), ("", ""), "simpo:SIMPO .*scaled_by: expected settings of .*'margin'"),
        (('"simpo.objective:SimPO"', "SimPOSettings"), ("", ""), "simpo:SIMPO .*implementation: expected text such as"),
        (
            ("default=2.0", "default=0"),
            ("", ""),
            r"simpo:SIMPO .*expected defaults .*beta .* > 0 .*found 0",
        ),
        (("", ""), ("", "import nothing_like_it"), "simpo.objective:SimPO, .*cannot be loaded .*nothing_like_it"),
        (("", ""), ("", "SimPO = 3"), "simpo.objective:SimPO, .*cannot be loaded .*not callable"),
        (("", ""), ("", "class SimPO:\n    pass"), "simpo.objective:SimPO, .*found it without check, terms"),
    ],
)
def test_a_package_that_brings_no_objective_is_named(
    install: Install, entry: tuple[str, str], terms: tuple[str, str], message: str
) -> None:
    install(entry, terms)
    with pytest.raises(UnsupportedError, match=message):
        find_objective("simpo")


@pytest.mark.parametrize("name", ["learning_rate", "lr", "metric", "objective", "paired"])
def test_a_setting_with_the_name_of_another_key_is_refused(install: Install, name: str) -> None:
    install(entry=("target_margin: float", f"{name}: float"))
    with pytest.raises(UnsupportedError, match=f"method 'simpo': expected settings with unique names, found '{name}'"):
        make_task([{"seed": 1}], method="simpo")


@pytest.mark.parametrize(
    ("line", "wrong", "found"),
    [
        ("pairs.terms(losses_Q, preference_metrics(rewards_Q2))", "pairs.terms(losses_Q, {})", "{'loss': (2,)}"),
        ("pairs.terms(losses_Q, preference_metrics(rewards_Q2))", "Terms(sums_J=losses_Q)", "{'loss': (16,)}"),
    ],
)
def test_terms_that_are_not_one_per_job_are_refused(install: Install, line: str, wrong: str, found: str) -> None:
    source = FILES[TERMS].replace("import Pairs", "import Pairs, Terms")
    install(terms=("", source.replace(line, wrong)))
    task, backbone = make_task(CONFIGS[:2], method="simpo"), Backbone(make_model("llama"), None, "unused")
    batch = collate([JobRows(PAIRS.train, 0, (3, 1)), JobRows(PAIRS.train, 1, (8,))])
    with pytest.raises(ShapeError, match=f"SimPO.terms: expected numbers per job .* found {re.escape(found)}"):
        micro_batch_terms(
            backbone,
            batch,
            [Learners(find_objective("simpo"), tuple(job.config for job in task.jobs))],
        )


@pytest.mark.parametrize(
    ("line", "wrong", "error", "message"),
    [
        ("return pairs.terms(losses_Q,", "return (losses_Q,", UnsupportedError, "expected an .*Terms, found tuple"),
        ("return pairs.terms(", "pairs.terms(", UnsupportedError, "expected an alto.objectives.Terms, found NoneType"),
        ("pairs.terms(losses_Q,", "pairs.terms(losses_Q.detach(),", ShapeError, "found some without a gradient"),
        (
            "job.target_margin for",
            "job.margin for",
            UnsupportedError,
            r"SimPO.terms: .* AttributeError: .*'margin', in objective.py:\d+ of simpo; correct that package",
        ),
    ],
)
def test_terms_that_raise_or_are_none_are_named(
    install: Install, line: str, wrong: str, error: type[Exception], message: str
) -> None:
    install(terms=(line, wrong))
    task = make_task(CONFIGS[:2], method="simpo")
    bank = Bank(make_model("llama"), task, data=PAIRS)
    with pytest.raises(error, match=message):
        bank.step()


def test_memory_that_runs_out_in_terms_is_dealt_with_as_elsewhere(install: Install) -> None:
    source = FILES[TERMS].replace(
        "        pairs = Pairs", "        raise MemoryError('no room')\n        pairs = Pairs"
    )
    install(terms=("", source))
    batch = collate([JobRows(PAIRS.train, 0, (3, 1))])
    losses_S = torch.ones(sum(batch.job_targets))
    with pytest.raises(MemoryError, match=r"^no room$"):
        find_objective("simpo").terms(losses_S, batch, [])


def test_a_check_that_raises_is_named(install: Install) -> None:
    install(terms=("        pass", "        dataset.absent"))
    with pytest.raises(
        UnsupportedError, match=r"SimPO.check: .* AttributeError: .*'absent', in objective.py:\d+ of simpo"
    ):
        find_objective("simpo").check(PAIRS.train, [])


def test_a_package_cannot_take_the_name_of_a_method_of_alto_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = FILES["pyproject.toml"].replace("simpo = ", "sft = ")
    packages.install(tmp_path, {**FILES, "pyproject.toml": toml}, monkeypatch)
    with pytest.raises(
        UnsupportedError, match=r"method: expected 'sft' to be registered by ALTO only, found .*simpo:SIMPO"
    ):
        find_objective("sft")


def test_a_job_whose_loss_is_nan_ends_and_no_other_notices(install: Install, tmp_path: Path) -> None:
    source = FILES[TERMS].replace(
        "for job in settings])\n        target", "for job in settings]) * nan_Q\n        target"
    )
    nan = "        nan_Q = pairs.of_jobs([float('nan') if job.beta == 0.5 else 1.0 for job in settings])\n"
    install(terms=("", source.replace("        beta_Q", nan + "        beta_Q")))
    task = make_task(CONFIGS[:2], method="simpo", early_exit={"select": False})
    run_dir = RunDir.create(tmp_path / "runs", task)
    backbone = Backbone(make_model("llama"), None, "unused")
    with Journal(run_dir.journal_file) as journal:
        run_alone(TaskSession(TaskContext.of(task, backbone, PAIRS), journal, RunInputs(run_dir=run_dir)))
    events = read_events(run_dir.journal_file)
    (ended,) = [event for event in events if event["event"] == "job_exited"]
    assert (ended["job"], ended["reason"], ended["evidence"]) == ("job-001", "diverging", {"train_loss": "nan"})
    assert events[-1]["event"] == "task_completed"
    assert events[-1]["best_job"] == "job-000"


def focal_losses(losses_S: torch.Tensor, gamma: float) -> torch.Tensor:
    return (1 - torch.exp(-losses_S)) ** gamma * losses_S


def test_the_one_on_conversations_is_the_focal_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.install(tmp_path, FOCAL, monkeypatch)
    task = make_task([{"gamma": 0.0}, {"gamma": 2.0}], method="focal")
    objective = find_objective("focal")
    batch = collate([JobRows(DATA.train, 0, (3, 1)), JobRows(DATA.train, 1, (2, 0, 4))])
    losses_S = torch.rand(sum(batch.job_targets), generator=torch.Generator().manual_seed(0)) * 3
    losses_S[0] = 0.0
    losses_S.requires_grad_()
    terms = objective.terms(losses_S, batch, [job.config for job in task.jobs])
    parts = losses_S.detach().split(batch.job_targets)
    expected = [float(focal_losses(part, gamma).sum()) for part, gamma in zip(parts, (0.0, 2.0), strict=True)]
    assert terms.sums_J.tolist() == pytest.approx(expected, rel=1e-5)
    assert terms.metrics["known_share"].tolist() == [int((part < 0.6931).sum()) for part in parts]
    assert float(terms.rows["known_share"].sum()) == float(terms.metrics["known_share"].sum())
    terms.sums_J.sum().backward()
    assert losses_S.grad is not None
    assert losses_S.grad.isfinite().all()


def test_jobs_of_the_one_on_conversations_train_beside_others_as_they_do_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.install(tmp_path, FOCAL, monkeypatch)
    configs = [
        {"gamma": 0.5, "lr": 1e-3, "r": 4, "batch_size": 1, "seed": 1},
        {"gamma": 3.0, "lr": 5e-4, "r": 8, "batch_size": 4, "seed": 2},
    ]
    together = Bank(make_model("llama"), make_task(configs, method="focal"))
    alone = [Bank(make_model("llama"), make_task([config], method="focal")) for config in configs]
    for facts, bank in zip(list(together.step().values()), alone, strict=True):
        (expected,) = bank.step().values()
        assert_same_step(facts, expected)


def test_the_one_on_conversations_refuses_replies_of_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.install(tmp_path, FOCAL, monkeypatch)
    short = EncodedDataset(input_ids=(torch.tensor([1, 2]),), targets=(torch.tensor([2, -100]),))
    with pytest.raises(DataError, match=r"^focal: expected replies of several tokens, found rows with one each"):
        find_objective("focal").check(short, [])


def test_the_one_on_conversations_is_searched_by_its_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.install(tmp_path / "package", FOCAL, monkeypatch)
    write_rows(tmp_path / "rows.jsonl", 20)
    (tmp_path / "focal.yaml").write_text(FOCAL["focal.yaml"], encoding="utf-8")
    task = load_task(tmp_path / "focal.yaml", ["num_train_epochs=1", "early_exit=false", "max_length=32", "r=2"])
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    history = read_history(result.run_dir)
    gammas = {job.config["gamma"] for job in history.jobs.values()}
    assert len(gammas) == 3
    assert all(0.5 <= gamma <= 3.0 for gamma in gammas)
    best = json.loads((Path(result.adapter_dir) / "metrics.json").read_text(encoding="utf-8"))
    assert 0.0 <= best["metrics"]["known_share"] <= 1.0


def test_one_that_needs_the_reference_takes_pairs_alone(install: Install) -> None:
    install(entry=("is_paired=True", "needs_reference=True"))
    find_objective("simpo").check(PAIRS.train, [])
    with pytest.raises(DataError, match=r"method simpo: expected preference pairs .*found rows with one reply"):
        find_objective("simpo").check(DATA.train, [])


def test_two_packages_with_one_method_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [EntryPoint(name="simpo", value=f"{package}:SIMPO", group="alto.objectives") for package in ("b", "a")]
    monkeypatch.setattr("alto.base.plugins.entry_points", lambda **_: both)
    with pytest.raises(UnsupportedError, match=r"registers 'simpo', found 2 \(a:SIMPO, b:SIMPO\); remove all but one"):
        find_objective("simpo")


def test_a_clone_is_checked_by_it(install: Install, tmp_path: Path) -> None:
    check = "        if any(job.beta > 10 for job in settings):\n            raise SpecError('beta is too large')\n"
    source = FILES[TERMS].replace("        pass", check + "        pass")
    install(
        terms=("", source.replace("from alto.objectives", "from alto.errors import SpecError\nfrom alto.objectives"))
    )
    task = make_task(CONFIGS, method="simpo")
    run_dir = RunDir.create(tmp_path / "runs", task)
    backbone = Backbone(make_model("llama"), None, "unused")
    mailbox = Mailbox(run_dir)
    refused = mailbox.send(JobAction.CLONE, "job-000", changes={"beta": 50.0})
    cloned = mailbox.send(JobAction.CLONE, "job-000", changes={"target_margin": 0.25})
    with Journal(run_dir.journal_file) as journal:
        run_alone(TaskSession(TaskContext.of(task, backbone, PAIRS), journal, RunInputs(run_dir=run_dir)))
    events = read_events(run_dir.journal_file)
    refusal = next(event for event in events if event["event"] == "command_refused")
    assert (refusal["command"], refusal["why"]) == (refused, "beta is too large")
    added = next(event for event in events if event["event"] == "job_added")
    assert added["command"] == cloned
    assert added["config"] == {**task.jobs[0].config.to_dict(), "target_margin": 0.25}
    assert events[-1]["event"] == "task_completed"


def test_its_setting_is_searched_from_the_task_file_to_the_report(install: Install, tmp_path: Path) -> None:
    """The page's task file with eight jobs, so that settings can be compared."""
    install()
    rows = [{"prompt": f"{n} plus 1?", "chosen": f" It is {n + 1}.", "rejected": " No."} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "task.yaml").write_text(FILES["task.yaml"], encoding="utf-8")
    assert len(load_task(tmp_path / "task.yaml").jobs) == 4
    changes = ["search_space.seed=[1, 2]", "num_train_epochs=1", "early_exit=false", "max_length=32", "r=2"]
    changes += ["keep=all"]
    task = load_task(tmp_path / "task.yaml", changes)
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    history = read_history(result.run_dir)
    margins = {job.config["target_margin"] for job in history.jobs.values()}
    assert (margins, {job.config["beta"] for job in history.jobs.values()}) == ({0.5, 1.5}, {2.5})
    best = json.loads((Path(result.adapter_dir) / "metrics.json").read_text(encoding="utf-8"))
    assert best["config"] == json.loads(json.dumps(task.jobs[int(result.best_job[-1])].config.to_dict()))
    assert set(best["metrics"]) == set(alto.spec.PREFERENCE_METRICS)
    found = importance_of_settings(history)
    assert found is not None
    assert set(found.keys) == {"learning_rate", "target_margin", "seed"}
    assert "target_margin" in (Path(result.run_dir) / "report.html").read_text(encoding="utf-8")
    notes = read_events(Path(result.run_dir) / "journal.jsonl")[0]["notes"]
    assert not any("Jobs differ in" in note for note in notes), "the accuracy does not depend on the margin"

    def clone(change: str) -> str:
        done = CliRunner().invoke(app, ["job", "clone", result.run_dir, "job-000", "--set", change])
        return f"{type(done.exception).__name__}: {done.exception}"

    assert "UnknownKeyError: the job has the unknown key 'target_margn'. Did you mean 'target_margin'" in clone(
        "target_margn=1.0"
    )
    assert "SpecError: target_margin (lead that the chosen reply is to have) should be" in clone("target_margin=-1")
    assert clone("target_margin=1.0") == "NoneType: None"
    further = alto.Engine(output_dir=tmp_path / "runs").resume(result.run_dir).job_results[-1]
    assert further.config["target_margin"] == 1.0
    assert further.steps > 0
