"""Samples: the base and the adapters generate what transformers and PEFT generate for validation prompts, and a task
records and shows it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import by_loss, stopped_once_all_are_trained, tune
from peft import PeftModel
from peft_adapters import save_with_peft
from rich.console import Console
from tiny import load_tokenizer, make_task, random_llama, read_journal
from typer.testing import CliRunner

import alto
from alto.backbone import Backbone
from alto.cli import app
from alto.data import Conversation, LabelledText, Message, Pair
from alto.engine import runner
from alto.errors import DataError, SpecError, TaskInterruptedError, UnsupportedError
from alto.evaluation import Sampler, samples
from alto.records import Judgement, Samples
from alto.runs import JournalEntry, read_entries, read_history
from alto.runs.events import SamplesGenerated
from alto.views import final_summary
from alto.views.plain import PlainView

# PEFT reads a transformers property by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LENGTH = 6
ROWS = [
    Conversation([Message("user", "1 plus 1?"), Message("assistant", "It is 2.")]),
    Conversation([Message("text", "plain text alone")]),
    Conversation(
        [Message("user", "Who? " * 200), Message("assistant", "The prompt is longer than the model's positions.")]
    ),
    Conversation([Message("user", "Say nothing."), Message("assistant", "  ")]),
    Conversation([Message("assistant", "A reply alone.")]),
    LabelledText("a text", None, 1),
    Pair(
        chosen=Conversation([Message("user", "2 plus 2?"), Message("assistant", "It is 4.")]),
        rejected=Conversation([Message("user", "2 plus 2?"), Message("assistant", "Five.")]),
    ),
    Conversation([Message("text", "3 plus 3", is_context=True), Message("text", " is 6.")]),
    Conversation([Message("user", "never used"), Message("assistant", "as the first three are enough")]),
]


def make_sampler(rows: Sequence[Any] = ROWS, *, num_samples: int = 3) -> Sampler:
    backbone = Backbone(random_llama(len(load_tokenizer())), load_tokenizer(), "tiny")
    return Sampler(rows, backbone, num_samples=num_samples, max_new_tokens=LENGTH)


def generated_by_peft(prompt: str, folder: Path | None) -> str:
    """Generate with transformers, the oracle."""
    tokenizer = load_tokenizer()
    model: Any = random_llama(len(tokenizer)).eval()
    if folder is not None:
        model = PeftModel.from_pretrained(model, folder).eval()
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        output = model.generate(input_ids=ids, do_sample=False, max_new_tokens=LENGTH)
    text: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    def model() -> Any:
        return random_llama(len(load_tokenizer()))

    return {
        "job-001": save_with_peft(model(), tmp_path / "a", seed=1, r=2, lora_alpha=32),
        "job-000": save_with_peft(model(), tmp_path / "b", seed=2, r=5, lora_alpha=40, target_modules=["o_proj"]),
    }


def test_texts_are_those_of_transformers_and_peft(folders: dict[str, Path]) -> None:
    found = make_sampler()(folders, lambda: None)
    assert found.failure == ""
    assert [one.reference for one in found.rows] == ["It is 2.", "It is 4.", " is 6."]
    for one in found.rows:
        assert list(one.adapters) == ["job-001", "job-000"]
        assert one.base == generated_by_peft(one.prompt, None)
        assert dict(one.adapters) == {job: generated_by_peft(one.prompt, folder) for job, folder in folders.items()}
    assert len({text for one in found.rows for text in (one.base, *one.adapters.values())}) > 3, (
        "the weights change the text"
    )


def test_the_prompt_is_what_the_model_sees_before_the_reply(folders: dict[str, Path]) -> None:
    found = make_sampler()(folders, lambda: None)
    assert [one.prompt for one in found.rows] == [
        "<|user|>1 plus 1?<|end|><|assistant|>", "<|user|>2 plus 2?<|end|><|assistant|>", "3 plus 3",
    ]  # fmt: skip


def test_rows_without_a_prompt_are_refused_in_words() -> None:
    with pytest.raises(DataError, match="num_samples: expected a validation row with a text reply after a prompt"):
        make_sampler(ROWS[1:6])


def test_a_generation_that_fails_is_a_reason_and_what_the_caller_raises_is_raised(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise TaskInterruptedError("stop")

    with pytest.raises(TaskInterruptedError, match="stop"):
        make_sampler()(folders, stop)
    sampler = make_sampler()

    def fail(error: Exception) -> Callable[..., None]:
        def complete(*_: object, **__: object) -> None:
            raise error

        return complete

    monkeypatch.setattr(samples, "complete", fail(ValueError("no  text\n today")))
    assert sampler(folders, lambda: None) == Samples(failure="ValueError: no text today")
    monkeypatch.setattr(samples, "complete", fail(torch.AcceleratorError("the device is lost")))
    with pytest.raises(torch.AcceleratorError):
        sampler(folders, lambda: None)


# -- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def task(tmp_path: Path, model: Path) -> alto.Task:
    return make_task(
        tmp_path,
        **{"model": str(model), "max_steps": 2, "search_space": {"lr": [1e-4, 3e-3, 3e-2]}},
        early_exit=False,
        num_samples=2,
        sample_max_new_tokens=4,
    )


def test_a_run_records_and_shows_them(task: alto.Task) -> None:
    pytest.importorskip("pandas", reason="tables need the extra 'data'")
    result = tune(task)
    best, runner_up, _ = by_loss(result)
    run = Path(result.run_dir)
    *_, sampled, checked, completed = read_journal(run)
    names = [event["event"] for event in (sampled, checked, completed)]
    assert names == ["samples_generated", "adapter_checked", "task_completed"]
    assert "failure" not in sampled
    rows = sampled["samples"]
    assert [row["prompt"] for row in rows] == [
        f"<|user|>{n} plus {n % 7}?<|end|><|assistant|>" for n in (100, 101)
    ]  # fmt: skip
    assert [list(row["adapters"]) for row in rows] == [[best, runner_up]] * 2
    assert result.lead is not None
    assert result.lead.runner_up == runner_up
    frame = result.samples
    assert list(frame.columns) == ["prompt", "reference", "base", best, runner_up]
    assert frame["base"].tolist() == [row["base"] for row in rows]
    assert frame[best].tolist() == [row["adapters"][best] for row in rows]
    assert alto.load_run(run).samples.equals(frame)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.count('<article class="sample">') == 2
    shown = json.loads(CliRunner().invoke(app, ["show", str(run), "--json"]).stdout)
    assert (shown["samples"], shown["sampling_failure"]) == (rows, None)


def test_a_loaded_adapter_generates_the_same(task: alto.Task) -> None:
    """The winner is loaded by PEFT from the run's folder; the base's texts are the base's own."""
    result = tune(task)
    sample = read_history(result.run_dir).samples[0]
    tokenizer = load_tokenizer()
    ids = tokenizer(sample.prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    peft_model = result.load_best()
    with torch.no_grad():
        own = peft_model.generate(input_ids=ids, do_sample=False, max_new_tokens=4)
        with peft_model.disable_adapter():
            base = peft_model.generate(input_ids=ids, do_sample=False, max_new_tokens=4)
    texts = [tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True) for found in (own, base)]
    assert [sample.adapters[result.best_job], sample.base] == texts


def test_the_runner_up_is_the_next_best_by_what_chose(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(finalists: Mapping[str, Path], on_turn: Callable[[], None]) -> Judgement:
        rows = {job: (float(place), place + 0.5) for place, job in enumerate(finalists)}
        return Judgement(scorer="python", rows=rows)

    monkeypatch.setattr(runner, "FinalistJudge", lambda *_: judge)
    scoring = {"scorer": "python", "function": "scoring_functions:length"}
    result = tune(task.replace(select_by=scoring, num_finalists=3))
    history = read_history(result.run_dir)
    assert list(history.samples[0].adapters) == list(reversed(by_loss(result)))[:2]
    assert next(iter(history.samples[0].adapters)) == result.best_job


def test_without_the_key_nothing_is_generated(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Sampler", None)
    for num_samples in (0, None):
        result = tune(task.replace(num_samples=num_samples))
        assert not any(isinstance(entry.event, SamplesGenerated) for entry in entries_of(result))
        assert read_history(result.run_dir).samples == ()
        assert "<h2>Samples</h2>" not in Path(result.run_dir, "report.html").read_text(encoding="utf-8")


def entries_of(result: alto.TaskResult) -> list[JournalEntry]:
    return read_entries(Path(result.run_dir) / "journal.jsonl")


def test_a_failure_costs_nothing_but_the_samples(task: alto.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __call__(self, adapters: Mapping[str, Path], on_turn: Callable[[], None]) -> Samples:
            return Samples(failure="no memory <today>")

    plain = tune(task.replace(num_samples=0))
    monkeypatch.setattr(runner, "Sampler", Failing)
    result = tune(task)
    assert (result.best_job, result.best_validation_loss) == (plain.best_job, plain.best_validation_loss)
    message = "no samples were generated: no memory <today>"
    assert message in summary(result)
    page = Path(result.run_dir, "report.html").read_text(encoding="utf-8")
    assert "No samples were generated: no memory &lt;today&gt;" in page
    stream = io.StringIO()
    view = PlainView(stream)
    for entry in entries_of(result):
        view.observe(entry)
    assert message in stream.getvalue()


def summary(result: alto.TaskResult, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(final_summary(read_history(result.run_dir), result.run_dir))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_shows_them_within_its_width(task: alto.Task, width: int) -> None:
    result = tune(task)
    best, runner_up, _ = by_loss(result)
    text = summary(result, width)
    assert f"samples: 2 validation prompts continued by the base, {best} and {runner_up}" in text
    assert all(len(line) <= width for line in text.splitlines() if "runs/" not in line)
    for sample in read_history(result.run_dir).samples:
        assert sample.prompt in text
        assert sample.reference in text


def test_a_run_that_is_stopped_while_they_are_generated_generates_them_when_it_is_resumed(task: alto.Task) -> None:
    run = stopped_once_all_are_trained(task, 3)
    assert not read_history(run).samples
    result = alto.Engine().resume(run)
    events = [entry.event for entry in entries_of(result) if isinstance(entry.event, SamplesGenerated)]
    assert [len(event.samples) for event in events] == [2]


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["classification", "regression"])
def test_methods_that_generate_nothing_are_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(SpecError, match=f"num_samples should be 0 with method '{method}', whose adapters predict"):
        make_task(tmp_path, method=method, num_samples=5)
    assert make_task(tmp_path, method=method, num_samples=None).num_samples is None


def test_several_ranks_are_refused(task: alto.Task) -> None:
    with pytest.raises(UnsupportedError, match="num_samples: expected 0 with num_gpus 2, found 2 for 'tiny'"):
        alto.Engine().tune(task.replace(num_gpus=2))


@pytest.mark.parametrize("changes", [{"num_samples": -1}, {"num_samples": "5"}, {"sample_max_new_tokens": 0}])
def test_values_out_of_their_domain_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(changes))):
        make_task(tmp_path, **changes)


def test_rows_that_nothing_can_continue_are_refused_before_anything_is_written(task: alto.Task, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a plain text"}\n' * 6, encoding="utf-8")
    changes = {"dataset": str(texts), "validation_dataset": str(texts)}
    with pytest.raises(DataError, match="num_samples: expected a validation row"):
        alto.Engine(output_dir=tmp_path / "runs").tune(task.replace(**changes))
    assert not (tmp_path / "runs").exists()
