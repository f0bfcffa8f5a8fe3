"""Completions that jobs sample while they train: independent of other jobs, by the weights that train on them, the same
after a resumption; and rewards that fail."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_grpo import GivenRewards, Spelling
from oracle_kto import LABELLED
from resident_jobs import DATA, Bank, make_model, make_task, make_trainer
from tiny import read_journal

import alto
from alto.backbone import Backbone
from alto.data import IGNORED, EncodedDataset, JobRows
from alto.early_exit import audit
from alto.errors import DataError, NoResultError, SpecError, TaskInterruptedError, UntrustedCodeError
from alto.evaluation import ScorerFailedError, Text, generate
from alto.executor import JobState, MicroBatches, TaskContext, initial_states, rollouts, stages
from alto.executor.rollouts import RewardFailedError, encoded, group_advantages
from alto.objectives import token_losses
from alto.runs import read_entries
from alto.spec import JobConfig, Task
from alto.spec.objective_settings import GrpoSettings

OTHERS = 15
JOBS: list[dict[str, object]] = [
    {"seed": seed, "r": (4, 8, 16)[seed % 3], "lr": 1e-2, "temperature": (0.5, 1.0, 1.5)[seed % 3]}
    for seed in range(OTHERS + 1)
]


def bank_of(configs: list[dict[str, object]], slots: list[int] | None = None) -> Bank:
    values = {"num_generations": 4, "batch_size": 8, "max_completion_length": 10}
    task = make_task(configs, method="grpo", reward_funcs=["exact"], **(values | {"max_tokens_per_pass": 600}))
    bank = Bank(make_model("llama"), task, slots=slots, rewards=GivenRewards())
    bank.backbone.tokenizer = Spelling()
    return bank


def test_a_job_samples_the_same_alone_and_among_fifteen_others() -> None:
    many = bank_of(JOBS, [*range(5, OTHERS + 1), *range(5)])
    for _ in range(2):
        many.step()
    among = many.trainer._rollouts.sample(many.jobs)
    num_equal = num_texts = 0
    for job, config in list(zip(many.jobs, JOBS, strict=True))[:6]:
        alone = bank_of([config])
        (own,) = alone.jobs
        own.step = job.step
        alone.trainer.bank.write(own.slot, many.trainer.bank.read(job.slot))
        expected = alone.trainer._rollouts.sample([own])[own].texts
        num_texts += len(expected)
        num_equal += sum(text.tokens == other.tokens for text, other in zip(among[job].texts, expected, strict=True))
    # A number within rounding of the border between two tokens may choose the other one.
    assert num_equal >= num_texts - 1, f"{num_texts - num_equal} of {num_texts} texts differ"
    assert len({tuple(text.tokens) for sampled in among.values() for text in sampled.texts}) > num_texts


def test_random_numbers_depend_on_the_seed_of_a_job_and_on_its_step() -> None:
    bank = bank_of([{"seed": 1}, {"seed": 2}])
    job, other = bank.jobs

    def numbers(of_job: JobState) -> list[float]:
        return list(rollouts.Sampled.of_rows(of_job, 0, [0], bank.backbone).texts[0].numbers)

    first = numbers(job)
    assert numbers(job) == first
    assert numbers(other) != first
    job.step += 1
    assert numbers(job) != first, "the same row in a later epoch"


@torch.no_grad()
def training_log_probs(bank: Bank, job: JobState, texts: list[Text]) -> list[float]:
    """Return the log-probabilities of all sampled tokens in a pass over complete texts, as in training."""
    rows = [encoded(text) for text in texts]
    dataset = EncodedDataset(input_ids=tuple(ids for ids, _ in rows), targets=tuple(targets for _, targets in rows))
    passes = bank.trainer.passes
    batch = passes.collate([JobRows(dataset, job.slot or 0, tuple(range(len(rows))), shares_beginnings=True)])
    with passes.evaluating(batch, passes.local_jobs([job])):
        return (-token_losses(bank.backbone, batch, [job.config.objective.logit_scale])).tolist()


def sampled_log_probs(bank: Bank, job: JobState, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Text], list[float]]:
    """Sample the completions of the next step; return them and the log-probabilities they were drawn with."""
    found: dict[int, list[float]] = {}
    draw = generate._next_tokens

    def recording(logits_BV: torch.Tensor, texts: list[Text]) -> torch.Tensor:
        next_B = draw(logits_BV, texts)
        for text, logits_V, token in zip(texts, logits_BV, next_B, strict=True):
            assert text.sampling is not None
            log_probs_V = (logits_V / text.sampling.temperature).log_softmax(-1)
            found.setdefault(id(text), []).append(float(log_probs_V[token]))
        return next_B

    with monkeypatch.context() as patch:
        patch.setattr(generate, "_next_tokens", recording)
        texts = list(bank.trainer._rollouts.sample([job])[job].texts)
    return texts, [value for text in texts for value in found[id(text)]]


def test_completions_are_sampled_by_the_weights_that_train_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = bank_of(JOBS[:3])
    for _ in range(2):
        bank.step()
    for job in bank.jobs:
        texts, drawn = sampled_log_probs(bank, job, monkeypatch)
        assert training_log_probs(bank, job, texts) == pytest.approx(drawn, abs=1e-4)
        bank.trainer.backward([job])
        bank.trainer.update([job])
        stale = training_log_probs(bank, job, texts)
        assert max(abs(one - other) for one, other in zip(stale, drawn, strict=True)) > 1e-2, "yesterday's adapter"


def test_the_completions_of_a_step_are_kept_until_the_job_has_taken_it() -> None:
    bank = bank_of(JOBS[:2])
    rollouts = bank.trainer._rollouts
    first = rollouts.of_step(bank.jobs)
    assert rollouts.of_step(bank.jobs[:1])[bank.jobs[0]] is first[bank.jobs[0]]
    bank.jobs[0].step += 1
    again = rollouts.of_step(bank.jobs)
    assert again[bank.jobs[0]] is not first[bank.jobs[0]]


@pytest.mark.parametrize(
    ("rewards", "scale", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], "none", [0.75, -0.25, -0.25, -0.25]),
        ([1.0, 0.0, 0.0, 0.0], "group", [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]),
        ([1.0, math.nan, 0.0, math.nan], "none", [0.5, 0.0, -0.5, 0.0]),
        ([0.5, 0.5, 0.5, 0.5], "group", [0.0] * 4),
        ([math.nan] * 4, "group", [0.0] * 4),
        ([2.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], "batch", [1.5 / 0.8865, *[-0.5 / 0.8865] * 3, 0, 0, 0, 0]),
    ],
)
def test_advantages_compare_a_reward_with_those_of_its_group(
    rewards: list[float], scale: str, expected: list[float]
) -> None:
    settings = GrpoSettings(num_generations=4, scale_rewards=scale)
    if scale == "batch":
        expected = [value * 0.8865 / (0.707106781 + 1e-4) for value in expected]
    assert group_advantages(rewards, settings) == pytest.approx(expected)


class FirstEqual(GivenRewards):
    """Rewards that are equal for the completions of the first call, and different afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []

    def __call__(self, completions: Any, on_turn: Any) -> list[float]:
        self.calls.append([completion.answer.prompt for completion in completions])
        return [float(number % 2) if len(self.calls) > 1 else 0.25 for number in range(len(completions))]


def rewarded_bank(dynamic_sampling: int) -> tuple[Bank, FirstEqual]:
    bank = bank_of([{"seed": 5, "r": 4, "dynamic_sampling": dynamic_sampling}])
    rewards = FirstEqual()
    (job,) = bank.jobs
    job.context = replace(job.context, rewards=rewards)
    return bank, rewards


def test_a_row_that_no_reward_can_score_counts_as_the_mean_of_the_others_in_an_evaluation() -> None:
    texts = [Text(0, (5,), 3, tokens=[7], end=end, is_finished=True) for end in (1, 1, None)]
    sampled = rollouts.Sampled(texts, [rollouts.Reference((7,), {})] * 3, GrpoSettings())
    found = sampled.evaluated([1.0, math.nan, 0.5], Spelling())
    assert found.rows["reward"] == (1.0, 0.75, 0.5)
    assert found.loss == -0.75
    assert found.metrics["truncated"] == pytest.approx(1 / 3)
    assert found.metrics["completion_tokens"] == pytest.approx(5 / 3)
    assert [answer.reward for answer in found.answers] == [1.0, None, 0.5]


def test_the_reply_of_a_row_is_its_last_trained_part() -> None:
    ignored, ids = IGNORED, torch.arange(2, 10)
    targets = torch.tensor([ignored, 4, 5, ignored, ignored, 8, 9, ignored])
    dataset = EncodedDataset(input_ids=(ids,), targets=(targets,))
    assert rollouts.prompt_and_reply(dataset, 0) == ((2, 3, 4, 5, 6, 7), [8, 9])


def test_other_prompts_are_drawn_for_those_that_teach_nothing() -> None:
    bank, rewards = rewarded_bank(dynamic_sampling=3)
    (rollout,) = bank.trainer._rollouts.of_step(bank.jobs).values()
    first, *others = rewards.calls
    assert [len(set(prompts)) for prompts in others] == [1, 1], "both groups were drawn again, once"
    assert not {prompt for prompts in others for prompt in prompts} <= set(first)
    assert len(rollout.dataset) == 8
    assert rollout.metrics["equal_groups"] == 0.0
    assert rollout.metrics["reward"] == 0.25, "the mean reward is that of prompts which were not chosen by it"
    again, _ = rewarded_bank(dynamic_sampling=3)
    (repeated,) = again.trainer._rollouts.of_step(again.jobs).values()
    assert all(map(torch.equal, repeated.dataset.input_ids, rollout.dataset.input_ids))


def test_without_dynamic_sampling_such_prompts_train_nothing() -> None:
    bank, rewards = rewarded_bank(dynamic_sampling=0)
    (rollout,) = bank.trainer._rollouts.of_step(bank.jobs).values()
    assert len(rewards.calls) == 1
    assert len(rollout.dataset) == 0
    assert rollout.metrics["equal_groups"] == 1.0


class Failing(GivenRewards):
    """Rewards of one job, which fail in its given calls."""

    def __init__(self, calls: list[int], number: int, fails_at: Collection[int] = ()) -> None:
        self._calls, self._number, self._fails_at = calls, number, fails_at

    def __call__(self, completions: Any, on_turn: Any) -> list[float]:
        self._calls.append(self._number)
        if self._calls.count(self._number) in self._fails_at:
            raise ScorerFailedError(f"no reward of job {self._number}")
        return super().__call__(completions, on_turn)


def counting(bank: Bank, fails_at: Mapping[int, Collection[int]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the rewards of jobs fail in the given calls; return the list of calls, by the jobs' numbers, with -1 for
    every call that samples."""
    calls: list[int] = []
    for number, job in enumerate(bank.jobs):
        job.context = replace(job.context, rewards=Failing(calls, number, fails_at.get(number, ())))
    write = rollouts.write
    monkeypatch.setattr(rollouts, "write", lambda *args, **settings: calls.append(-1) or write(*args, **settings))
    return calls


def failing(work: Callable[[Sequence[JobState]], object], bank: Bank) -> tuple[list[int], object]:
    """Do the work of all jobs as an executor does, without those for which it fails; return these, and the result."""
    left, failed = list(bank.jobs), []
    while True:
        try:
            return failed, work(left)
        except RewardFailedError as error:
            failed.append(error.slot)
            left = [job for job in left if job.slot != error.slot]


def test_jobs_do_not_sample_again_when_the_rewards_of_others_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = bank_of(JOBS[:4])
    calls = counting(bank, {0: [1], 2: [1]}, monkeypatch)
    failed, found = failing(bank.trainer._rollouts.of_step, bank)
    assert failed == [0, 2]
    assert calls == [-1, 0, 1, 2, 3]
    others = bank_of(JOBS[:4])
    expected = others.trainer._rollouts.of_step(others.jobs)
    for number in (1, 3):
        mine, its = found[bank.jobs[number]], expected[others.jobs[number]]
        assert all(map(torch.equal, mine.dataset.input_ids, its.dataset.input_ids))
        assert mine.dataset.advantages == its.dataset.advantages


def test_a_reward_that_fails_for_another_prompt_ends_only_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = bank_of([config | {"dynamic_sampling": 2} for config in JOBS[:2]])
    calls = counting(bank, {1: [2]}, monkeypatch)
    monkeypatch.setattr(rollouts, "are_equal", lambda group: True)
    failed, _ = failing(bank.trainer._rollouts.of_step, bank)
    assert failed == [1]
    first, *drawn_again = [list(group) for is_sampled, group in groupby(calls, (-1).__ne__) if is_sampled]
    assert first == [0, 1]
    assert drawn_again == [[0, 0, 1], [0, 0]], "two groups of the first job, and the first of the other, which fails"


def test_jobs_are_not_evaluated_again_when_the_rewards_of_others_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = bank_of(JOBS[:3])
    calls = counting(bank, {1: [1, 2], 2: [2]}, monkeypatch)
    failed, found = failing(lambda jobs: bank.trainer.evaluate(jobs), bank)
    assert failed == [1]
    assert calls == [-1, 0, 1, 2]
    assert len(found) == 2
    assert bank.trainer.evaluate(bank.jobs[:1]) == found[:1]
    assert calls[4:] == [-1, 0], "a later evaluation is a new one"


def test_a_batch_that_did_not_fit_into_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, sizes = bank_of(JOBS[:2]), []

    class ShortOfMemory(generate._Batch):
        def __init__(self, backbone: Backbone, adapters: Any, texts: Sequence[Text], ends: Any) -> None:
            sizes.append(len(texts))
            if len(texts) > 5:
                raise torch.OutOfMemoryError("no memory, as the test wants it")
            super().__init__(backbone, adapters, texts, ends)

    monkeypatch.setattr(generate, "_Batch", ShortOfMemory)
    bank.trainer._rollouts.sample(bank.jobs)
    assert sizes[:3] == [16, 8, 4]
    sizes.clear()
    bank.jobs[0].step += 1
    bank.trainer._rollouts.sample(bank.jobs)
    assert max(sizes) <= 5


def test_profiling_samples_as_many_completions_as_a_step_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, found = bank_of(JOBS[:2]), []
    monkeypatch.setattr("alto.executor.rollouts.write", lambda *args, **_: found.extend(args[2]) or len(args[2]))
    num_tokens = bank.trainer.sample_rows(bank.jobs, 3)
    per_job = [len(job.order.rows_of_step(0)) for job in bank.jobs]
    assert [sum(text.slot == job.slot for text in found) for job in bank.jobs] == per_job
    assert {text.budget for text in found} == {3}
    assert num_tokens == sum(len(prompt) for prompt in {id(text.prompt): text.prompt for text in found}.values())


# -- whole runs ------------------------------------------------------------------------------------------------------

REWARDS = """
def tokens(completion_ids, **_):
    if any(len(ids) > 6 for ids in completion_ids):
        raise ValueError("too long")
    return [float(len(set(ids))) for ids in completion_ids]

def untested(completion_ids, reference, **_):
    if any(int(text) >= 100 for text in reference):
        raise ValueError("a row of the test file")
    return [sum(ids) % 13 / 13 for ids in completion_ids]

def constant(completion_ids, **_):
    return [0.5 for ids in completion_ids]

def checksum(completion_ids, **_):
    return [sum(ids) % 13 / 13 for ids in completion_ids]

def last(completion_ids, seen=[], **_):
    seen.append(len(completion_ids))
    if 5 in seen:  # the rows of the last measurement
        raise ValueError("no more")
    return [sum(ids) % 13 / 13 for ids in completion_ids]

def weighted(prompts, completion_ids, reference, answer, weight, **_):
    asked = [prompt.split("What is ")[1].split(" ")[0] for prompt in prompts]
    assert asked == [str(given["asked"]) for given in weight], (asked, weight)
    assert answer == reference, (answer, reference)
    return [given["value"] * (sum(ids) % 13) for ids, given in zip(completion_ids, weight)]
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "length_rewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": f"What is {n} + {n % 7}?", "completion": str(n + n % 7)} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def make(**changes: Any) -> Task:
        settings: dict[str, Any] = {
            "model": "alto-tiny",
            "dataset": str(tmp_path / "rows.jsonl"),
            "validation_split": 0.25,
            "method": "grpo",
            "reward_funcs": ["length_rewards:checksum"],
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "max_completion_length": 6,
            "max_steps": 5,
            "report_to": "none",
            "max_slots": 2,
            "max_tokens_per_step": 500,
            "max_tokens_per_pass": 500,
            "checkpoint_interval_s": 0,
            "search_space": {"learning_rate": [1e-3, 1e-2]},
            "early_exit": {"enabled": False},
        }
        settings |= changes
        return Task(**{key: value for key, value in settings.items() if key not in settings["search_space"]})

    return make


def curves(run_dir: str | Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for event in read_journal(run_dir):
        if event["event"] == "train":
            found.setdefault(event["job"], [])[event["first_step"] - 1 :] = event["losses"]
    return found


def test_a_run_that_was_stopped_and_resumed_samples_what_it_would_have(task: Any, tmp_path: Path) -> None:
    whole = alto.Engine(output_dir=tmp_path / "whole").tune(task())
    calls = iter(range(3))
    engine = alto.Engine(output_dir=tmp_path / "stopped", is_interrupted=lambda: next(calls, None) is None)
    with pytest.raises(TaskInterruptedError):
        engine.tune(task())
    (stopped,) = (tmp_path / "stopped").iterdir()
    with pytest.raises(
        UntrustedCodeError, match="reward_funcs: expected permission from you to call the Python function"
    ):
        alto.Engine(output_dir=tmp_path / "stopped").resume(stopped)
    resumed = alto.Engine(output_dir=tmp_path / "stopped").resume(stopped, trust_remote_code=True)
    assert curves(resumed.run_dir) == curves(whole.run_dir)
    assert len({loss for losses in curves(whole.run_dir).values() for loss in losses}) > 5
    assert resumed.best_validation_loss == whole.best_validation_loss


@pytest.mark.parametrize("token_cache", ["memory", "disk"])
def test_functions_get_the_columns_of_each_completions_own_row(token_cache: str, task: Any, tmp_path: Path) -> None:
    rows = [
        {
            "question": f"What is {n} + {n % 7}?",
            "answer": str(n + n % 7),
            "weight": {"asked": n, "value": n % 3},
        }
        for n in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = alto.Engine(output_dir=tmp_path / "runs").tune(
        task(reward_funcs=["length_rewards:weighted"], token_cache=token_cache)
    )
    assert [job.exit_reason for job in result.job_results] == [None, None]
    assert len({loss for losses in curves(result.run_dir).values() for loss in losses}) > 5
    assert not any("Columns that nothing reads" in note for note in result.notes)


def test_a_reward_that_fails_ends_only_its_job_with_the_reason(task: Any, tmp_path: Path) -> None:
    space = {"max_completion_length": [5, 12]}
    result = alto.Engine(output_dir=tmp_path / "runs").tune(
        task(reward_funcs=["length_rewards:tokens"], search_space=space)
    )
    short, long = result.job_results
    assert short.exit_reason is None
    assert long.exit_reason == "failed"
    assert "length_rewards:tokens: it raised ValueError: too long" in long.exit_evidence["reward"]
    assert "of the prompt '<|user|>What is" in long.exit_evidence["reward"]
    assert "a reward failed: length_rewards:tokens" in (Path(result.run_dir) / "report.html").read_text("utf-8")


def test_a_run_records_what_it_sampled(task: Any, tmp_path: Path) -> None:
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task(eval_steps=0.4))
    events = read_journal(result.run_dir)
    for event in (event for event in events if event["event"] == "train"):
        metrics = event["metrics"]
        assert {len(values) for values in metrics.values()} == {len(event["losses"])}
        assert metrics["reward"] == pytest.approx([-loss for loss in event["losses"]])
        assert all(0 < entropy < 8 for entropy in metrics["entropy"])
        assert all(1 <= tokens <= 6 for tokens in metrics["completion_tokens"])
        assert {*metrics["truncated"], *metrics["equal_groups"]} <= {number / 8 for number in range(9)}
    (start,) = [value for event in events if event["event"] == "base_evaluated" for value in event["values"]]
    evaluations = [event for event in events if event["event"] == "eval"]
    assert evaluations
    for found in (start, *evaluations):
        assert len(found["answers"]) == 3
        assert [answer["prompt"] for answer in found["answers"]] == [answer["prompt"] for answer in start["answers"]]
        assert "entropy" in found["metrics"]
    page = (Path(result.run_dir) / "report.html").read_text("utf-8")
    assert "Answers while it learned" in page
    assert "before training, reward" in page


def test_jobs_whose_rewards_never_differ_end_as_collapsed(task: Any, tmp_path: Path) -> None:
    result = alto.Engine(output_dir=tmp_path / "runs").tune(
        task(
            reward_funcs=["length_rewards:constant"],
            early_exit={"collapse_patience": 2, "select": False},
            max_steps=8,
            eval_steps=0.25,
        )
    )
    assert {job.exit_reason for job in result.job_results} == {"collapsed"}
    assert result.best_validation_loss == -0.5, "its best adapter still competes"
    page = (Path(result.run_dir) / "report.html").read_text("utf-8")
    assert "all completions of each prompt had equal rewards for 2 steps, with a mean reward of 0.5" in page
    assert audit(read_entries(Path(result.run_dir) / "journal.jsonl")) == ()


def test_a_reward_that_fails_in_the_last_measurement_is_named(task: Any, tmp_path: Path) -> None:
    early_exit = {"evaluations": [[1.0, 2]], "final_evaluations": [1, 5]}
    result = alto.Engine(output_dir=tmp_path / "runs").tune(
        task(reward_funcs=["length_rewards:last"], early_exit=early_exit, eval_steps=1.0)
    )
    (failed,) = [event for event in read_journal(result.run_dir) if event["event"] == "measurement_failed"]
    assert failed["job"] == result.best_job
    (evaluated,) = [
        event for event in read_journal(result.run_dir) if event["event"] == "eval" and event["job"] == failed["job"]
    ]
    assert result.best_validation_loss == evaluated["validation_loss"]
    (note,) = [note for note in result.notes if "could not be measured" in note]
    assert note.startswith(f"{failed['job']} could not be measured once more at the end (a reward failed: length_rewar")
    assert "length_rewards:last: it raised ValueError: no more" in note
    assert "of the prompt '<|user|>What is" in note
    assert "so its earlier evaluation counts" in (Path(result.run_dir) / "report.html").read_text("utf-8")


@pytest.mark.parametrize("early_exit", [{"enabled": False}, {"evaluations": [[1.0, 2]], "final_evaluations": [1, 5]}])
def test_a_reward_that_fails_on_test_rows_is_named(early_exit: dict[str, Any], task: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} + 0?", "completion": str(n)} for n in (100, 200, 300)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    made = task(
        reward_funcs=["length_rewards:untested"], test_dataset=str(tmp_path / "test.jsonl"), early_exit=early_exit
    )
    result = alto.Engine(output_dir=tmp_path / "runs").tune(made)
    events = read_journal(result.run_dir)
    failed = [event for event in events if event["event"] == "measurement_failed"]
    assert {event["split"] for event in failed} == {"test"}
    assert result.best_job in {event["job"] for event in failed}
    assert ("" in {event["job"] for event in failed}) is ("enabled" in early_exit), "the base model is tested too"
    assert [event for event in events if event["event"] == "base_evaluated"]
    assert result.test_loss is None
    (note,) = [note for note in result.notes if "test rows" in note]
    assert note.startswith("The test rows could not be measured (a reward failed: length_rewards:untested: it raised")
    assert f"{result.best_job}" in note
    assert "The test rows could not be measured" in (Path(result.run_dir) / "report.html").read_text("utf-8")


def test_if_all_rewards_fail_the_task_fails_and_names_the_function(task: Any, tmp_path: Path) -> None:
    with pytest.raises(NoResultError, match="a reward failed in 2 of 2 jobs: length_rewards:tokens: it raised"):
        alto.Engine(output_dir=tmp_path / "runs").tune(
            task(reward_funcs=["length_rewards:tokens"], max_completion_length=12)
        )


def test_a_missing_function_is_found_before_a_run_is_made(task: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="reward_funcs: expected a function 'none'"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task(reward_funcs=["length_rewards:none"]))
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 40}, "expected rows that fit into max_length, because rewards compare with their replies"),
        ({"train_on": "all"}, r"expected rows of a prompt and a reply, found \d+ without a prompt"),
    ],
)
def test_rows_whose_replies_rewards_cannot_compare_with_are_refused(
    changes: dict[str, Any], message: str, task: Any, tmp_path: Path
) -> None:
    made = task(**changes)
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "Count to thirty.", "completion": " ".join(map(str, range(1, 31)))}) + "\n")
    with pytest.raises(DataError, match=message):
        alto.Engine(output_dir=tmp_path / "runs").tune(made)


@pytest.mark.parametrize("order", ["rewards first", "rewards last"])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_task_of_another_method_in_the_same_bank_trains_as_alone(order: str, has_gradient: bool) -> None:
    assert losses_of_kto(order, has_gradient) == losses_of_kto("alone", has_gradient)


class EqualRewards(GivenRewards):
    def __call__(self, completions: Any, on_turn: Any) -> list[float]:
        return [1.0] * len(completions)


def losses_of_kto(order: str, has_gradient: bool) -> list[list[float]]:
    """Return the losses of jobs of KTO beside jobs that learn from rewards."""
    common: dict[str, Any] = {"max_tokens_per_pass": 600}
    backbone = Backbone(make_model("llama"), None, "unused")
    backbone.tokenizer = Spelling()
    rewarded = make_task(
        [{"seed": 1, "r": 4}, {"seed": 2, "r": 4}],
        method="grpo",
        reward_funcs=["exact"],
        num_generations=4,
        batch_size=8,
        max_completion_length=10,
        **common,
    )
    labelled = make_task([{"seed": 3, "batch_size": 6}, {"seed": 4, "batch_size": 5}], method="kto", r=4, **common)
    rewards = GivenRewards() if has_gradient else EqualRewards()
    of_rewards = replace(TaskContext.of(rewarded, backbone, DATA), rewards=rewards)
    of_kto = stages.with_references(TaskContext.of(labelled, backbone, LABELLED), MicroBatches(100, lambda event: None))
    first, second = initial_states(of_rewards), initial_states(of_kto)
    jobs = {"rewards first": first + second, "rewards last": second + first, "alone": second}[order]
    trainer = make_trainer(replace(of_rewards, jobs=of_rewards.jobs + of_kto.jobs), 5)
    for slot, job in enumerate(first + second):
        job.slot = slot
        if job in jobs:
            trainer.admit(job, slot)
    found = []
    for _ in range(3):
        losses = trainer.backward(jobs)
        trainer.update(jobs)
        trainer.prepare(jobs)
        values = trainer.read(losses)
        found.append([values[jobs.index(job)] for job in second])
        for job in jobs:
            job.step += 1
    return found


def test_a_batch_counts_completions() -> None:
    config = JobConfig.of(
        Task(model="m", dataset="d", method="grpo", reward_funcs="exact")._method,
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "num_generations": 8},
    )
    assert config.rows_per_step == 4
    assert config.total_steps(10) == 3 * 3
