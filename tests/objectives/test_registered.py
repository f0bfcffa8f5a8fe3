"""An objective of the user's own: the one of docs/objectives.md, as an installed package brings it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from preference_pairs import make_pairs
from resident_jobs import DATA, PAIRS, Bank, assert_same_step, make_model, make_task

from alto.backbone import Backbone
from alto.data import JobRows, TaskData, collate
from alto.errors import DataError, ShapeError, SpecError, UnsupportedError
from alto.executor import Executor, RunStart, TaskContext
from alto.objectives import check_rows, find_objective, job_losses, micro_batch_terms, registry
from alto.runs import Action, Journal, Mailbox, RunDir, read_events
from alto.spec import Task

PAGE = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
CONFIGS: list[dict[str, object]] = [
    {"beta": 2.0, "lr": 1e-3, "r": 4, "batch_size": 1, "seed": 1},
    {"beta": 0.5, "lr": 5e-4, "r": 16, "batch_size": 4, "seed": 2},
    {"beta": 1.0, "lr": 5e-4, "r": 8, "batch_size": 8, "seed": 3},
]

Install = Callable[[str], None]

OBJECTIVE = """
class SimPO:
    metrics, scores, needs_reference = {metrics}, {gains}, True
    def check(self, dataset, configs): ...
    def terms(self, losses_S, batch, configs): ...
"""


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package with the given source on the path, registered as the page says."""

    def installed(source: str) -> None:
        section, entry = block("toml").replace('"', "").splitlines()
        assert section == "[project.entry-points.alto.objectives]"
        module = entry.partition("= ")[2].partition(":")[0]
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[alto.objectives]\n{entry}\n", encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return installed


@pytest.fixture
def task(install: Install) -> Task:
    install(block("python"))
    return make_task(CONFIGS, method="simpo")


def test_its_loss_is_that_of_the_paper(task: Task) -> None:
    objective, backbone = find_objective("simpo"), Backbone(make_model("llama"), None, "unused")
    with torch.no_grad():
        batch = collate(PAIRS.train, [JobRows(0, (3, 1, 8))])
        (found,) = job_losses(objective, backbone, batch, [task.jobs[1].config]).tolist()
        expected = []
        for row in (3, 1, 8):
            chosen, rejected = replies_of(backbone, row)
            expected.append(-float(torch.log(torch.sigmoid(0.5 * chosen.mean() - 0.5 * rejected.mean() - 1.0))))
    assert found == pytest.approx(sum(expected) / 3, rel=1e-5)


def replies_of(backbone: Backbone, row: int) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of the tokens of both replies, float64."""
    batch = collate(PAIRS.train, [JobRows(0, (row,))])
    hidden_TH = backbone.hidden_states(
        batch.input_ids_T, batch.position_ids_T, batch.sequence_lengths, batch.sequence_prefixes
    )
    losses_S = backbone.token_losses(hidden_TH[batch.loss_positions_S], batch.loss_targets_S)
    return (-losses_S.double()).split(batch.sequence_targets)


def test_its_jobs_train_in_company_as_they_do_alone(task: Task) -> None:
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
        Executor.build(TaskContext.of(task, backbone, data), journal, RunStart(run_dir=run_dir)).run()
    events = read_events(run_dir.journal_file)
    assert (events[0]["method"], events[-1]["event"]) == ("simpo", "task_completed")
    assert "references" not in events[0]
    assert all(set(event["metrics"]) == set(find_objective("simpo").metrics) for event in events if "metrics" in event)
    assert any("metrics" in event for event in events)


def test_it_refuses_rows_of_talk(task: Task) -> None:
    with pytest.raises(DataError, match="method simpo: expected preference pairs"):
        find_objective(task.method).check(DATA.train, [])


def test_a_method_that_nobody_brings_is_unknown() -> None:
    with pytest.raises(SpecError, match="should be one of sft, dpo, orpo, found 'simpo'"):
        make_task(CONFIGS, method="simpo")
    with pytest.raises(UnsupportedError, match="install that package here"):
        find_objective("simpo")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_like_it", "cannot be loaded .*nothing_like_it"),
        ("class SimPO:\n    metrics = gains = ()\n    needs_reference = False", "found it without check, terms"),
        ("SimPO = 3", "cannot be loaded .*not callable"),
        (OBJECTIVE.format(metrics=("wins",), scores=("win_rate",)), "found metrics .*wins.* and gains .*win_rate"),
        (OBJECTIVE.format(metrics=("loss",), scores=()), "none of them 'loss'"),
    ],
)
def test_a_package_that_brings_no_objective_is_named(install: Install, source: str, message: str) -> None:
    install(source)
    with pytest.raises(UnsupportedError, match=f"simpo_objective:SimPO.*{message}"):
        find_objective("simpo")


@pytest.mark.parametrize(
    ("line", "wrong", "found"),
    [
        ("pairs.terms(losses_Q, preference_metrics(rewards_Q2))", "pairs.terms(losses_Q, {})", "{'loss': (2,)}"),
        ("pairs.terms(losses_Q, preference_metrics(rewards_Q2))", "Terms(sums_J=losses_Q)", "{'loss': (16,)}"),
    ],
)
def test_terms_that_are_not_one_per_job_are_refused(install: Install, line: str, wrong: str, found: str) -> None:
    install("from alto.objectives import Terms\n" + block("python").replace(line, wrong))
    task, backbone = make_task(CONFIGS[:2], method="simpo"), Backbone(make_model("llama"), None, "unused")
    batch = collate(PAIRS.train, [JobRows(0, (3, 1)), JobRows(1, (8,))])
    with pytest.raises(ShapeError, match=f"SimPO.terms: expected numbers per job .* found {re.escape(found)}"):
        micro_batch_terms(find_objective("simpo"), backbone, batch, [job.config for job in task.jobs])


def test_one_that_asks_the_base_about_rows_of_talk_is_refused(install: Install) -> None:
    install(OBJECTIVE.format(metrics=(), scores=()))
    check_rows(find_objective("simpo"), PAIRS.train, [])
    with pytest.raises(DataError, match=r"SimPO asks the base .* expected preference pairs, found rows with one reply"):
        check_rows(find_objective("simpo"), DATA.train, [])


def test_two_packages_with_one_method_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [EntryPoint(name="simpo", value=f"{package}:SimPO", group="alto.objectives") for package in ("b", "a")]
    monkeypatch.setattr(registry, "entry_points", lambda **_: both)
    with pytest.raises(UnsupportedError, match=r"registers 'simpo', found 2 \(a:SimPO, b:SimPO\); remove all but one"):
        find_objective("simpo")


def test_a_clone_is_checked_by_it(install: Install, tmp_path: Path) -> None:
    refusing = block("python").replace(
        'check_pairs(dataset, "simpo")',
        'check_pairs(dataset, "simpo")\n        if any(config.beta > 10 for config in configs):\n'
        '            from alto.errors import SpecError\n            raise SpecError("beta is too large")',
    )
    install(refusing)
    task = make_task(CONFIGS, method="simpo")
    run_dir = RunDir.create(tmp_path / "runs", task)
    backbone = Backbone(make_model("llama"), None, "unused")
    mailbox = Mailbox(run_dir)
    command = mailbox.send(Action.CLONE, "job-000", changes={"beta": 50.0})
    with Journal(run_dir.journal_file) as journal:
        Executor.build(TaskContext.of(task, backbone, PAIRS), journal, RunStart(run_dir=run_dir)).run()
    events = read_events(run_dir.journal_file)
    refused = next(event for event in events if event["event"] == "command_refused")
    assert (refused["command"], refused["why"]) == (command, "beta is too large")
    assert events[-1]["event"] == "task_completed"
