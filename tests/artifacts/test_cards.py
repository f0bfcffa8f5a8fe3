"""Python code in model cards: it runs, and computes what transformers and PEFT compute when called directly."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import save_adapter, save_base
from moe_models import build_mixture, random_adapter
from peft import PeftModel
from tiny import load_tokenizer, make_task, random_llama, save_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

import alto

# PEFT reads a transformers property by its deprecated name, and warns about tied weights.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

FOLDER = 'folder = "path/to/this/folder"'
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)
CHAT = "<|user|>Hello<|end|><|assistant|>"

LABELLED: dict[str, Any] = {"method": "classification", "search_space": {"lr": [0.03], "r": [2]}}
SORTS = ("bad", "good", "so-so")
ROWS: dict[str, Any] = {
    "text": {"text": "{n} plus {n}"},
    "one": {"text": "row {n}", "label": lambda n: SORTS[n % 3]},
    "messages": {"messages": [{"role": "user", "content": "row {n}"}], "label": lambda n: SORTS[n % 3]},
    "several": {"text": "row {n}", "labels": lambda n: [name for at, name in enumerate(SORTS) if (n + at) % 2]},
    "number": {"text": "row {n}", "label": lambda n: n / 7},
    "numbers": {"text": "row {n}", "label": lambda n: [n / 7, 1.0]},
}


def save_untied(folder: Path) -> Path:
    """Save a random Llama that does not repeat its last token for ever, with its tokenizer."""
    config = random_llama(len(load_tokenizer())).config
    config.tie_word_embeddings = False
    LlamaForCausalLM(config).save_pretrained(save_model(folder))
    return folder


def task_of(folder: Path, **changes: Any) -> alto.Task:
    """Return a task on a random model."""
    settings = {
        "model": str(folder / "base") if "model" in changes else str(save_untied(folder / "base")),
        "search_space": {"lr": [0.05], "r": [3]},
        "target_modules": ["q_proj", "down_proj"],
        "max_steps": 3,
        "report_to": "none",
    }
    task: alto.Task = make_task(folder, **settings | changes)
    return task


def rows_of(folder: Path, kind: str) -> dict[str, Any]:
    """Return the keys of a task on rows of a kind of :data:`ROWS`."""

    def filled(value: Any, n: int) -> Any:
        if callable(value):
            return value(n)
        return json.loads(json.dumps(value).replace("{n}", str(n)))

    for split, numbers in {"train": range(20), "validation": range(20, 30)}.items():
        rows = [{key: filled(value, n) for key, value in ROWS[kind].items()} for n in numbers]
        (folder / f"{kind}-{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = (str(folder / f"{kind}-{split}.jsonl") for split in ("train", "validation"))
    return dict(zip(("dataset", "validation_dataset"), found, strict=True))


def run_card(folder: Path, elsewhere: pytest.MonkeyPatch, **objects: Any) -> dict[str, Any]:
    """Run the Python code of the card in ``folder`` from another directory, and return the names it defines.

    Args:
        objects: The values that a reader fills in for ``...``, by name.
    """
    (code,) = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert code.splitlines().count(FOLDER) == 1
    code = code.replace(FOLDER, f"folder = {str(folder)!r}")
    for name in objects:
        pattern = rf"^{name} = \.\.\.(?=  # the \w+ that ALTO was given .*; put it here$)"
        code, count = re.subn(pattern, f"{name} = {name}", code, flags=re.MULTILINE)
        assert count == 1
    names = dict(objects)
    elsewhere.chdir(folder.parent)
    exec(compile(code, "card", "exec"), names)
    return names


@torch.no_grad()
def follows(model: Any, names: dict[str, Any], prompt: str) -> bool:
    """Return whether each token that the card generated for ``prompt`` is the most likely one for ``model``."""
    tokenizer = load_tokenizer()
    ids, start = names["output"][0], tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert ids[: len(start)].tolist() == start
    new = ids[len(start) :]
    assert len(new) == 100 or new[-1] == tokenizer.eos_token_id
    assert names["answer"] == tokenizer.decode(new, skip_special_tokens=True)
    return torch.equal(model(input_ids=ids[None]).logits[0, len(start) - 1 : -1].argmax(-1), new)


def adapted(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()


def exported(source: str | Path, folder: Path, **how: Any) -> Path:
    alto.Engine().export(source, folder, **how)
    return folder


CAUSAL: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, CHAT),
    "DoRA": ({"use_dora": True}, CHAT),
    "whole head": ({"modules_to_save": ["lm_head"]}, CHAT),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, CHAT),
    "template": ({"chat_template": TEMPLATE}, "[user] Hello> "),
    "raw": ({"dataset_format": "raw_prompt_completion"}, "Hello"),
    "text": ({}, "Hello"),
}


@pytest.mark.parametrize("kind", CAUSAL)
def test_cards_of_language_models_give_an_answer(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, prompt = CAUSAL[kind]
    task = task_of(tmp_path, **(rows_of(tmp_path, "text") if kind == "text" else settings))
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task)
    best, base = Path(result.adapter_dir), tmp_path / "base"
    by_hand = adapted(base, best)
    names = run_card(best, monkeypatch)
    assert follows(by_hand, names, prompt)
    assert not follows(AutoModelForCausalLM.from_pretrained(base), names, prompt)  # training changed the model
    others: dict[str, dict[str, Any]] = {"adapter": {}, "merged": {"merged": True}, "job": {"job": result.best_job}}
    for name, how in others.items():
        source = best if name == "merged" else result.run_dir
        names = run_card(exported(source, tmp_path / name, **how), monkeypatch)
        assert follows(by_hand, names, prompt)
        assert isinstance(names["model"], PeftModel) == (name != "merged")


@pytest.mark.parametrize("has_template", [True, False])
def test_the_card_of_an_object_runs_with_the_object(
    has_template: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_untied(tmp_path / "base")
    tokenizer = load_tokenizer()
    if not has_template:
        tokenizer.chat_template = None
        (base / "chat_template.jinja").unlink()

    def load() -> Any:
        model = AutoModelForCausalLM.from_pretrained(base)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.5)  # so that no name loads the same weights
        return model

    result = alto.Engine(output_dir=tmp_path / "runs").tune(task_of(tmp_path, model=load(), tokenizer=tokenizer))
    by_hand = PeftModel.from_pretrained(load(), result.adapter_dir).eval()
    prompt = CHAT if has_template else "Hello\n"
    names = run_card(Path(result.adapter_dir), monkeypatch, base=load())
    assert follows(by_hand, names, prompt)
    load().save_pretrained(base)
    monkeypatch.chdir(tmp_path)
    folder = exported(result.run_dir, tmp_path / "adapter", base="base")
    assert follows(by_hand, run_card(folder, monkeypatch), prompt)


CLASSIFIED = {
    "one": (LABELLED, "Hello"),
    "messages": (LABELLED, "<|user|>Hello<|end|>"),
    "several": (LABELLED, "Hello"),
    "number": (LABELLED | {"method": "regression"}, "Hello"),
    "numbers": (LABELLED | {"method": "regression"}, "Hello"),
}


def label_of(kind: str, logits_K: torch.Tensor) -> Any:
    if kind.startswith("number"):
        return logits_K.tolist() if kind == "numbers" else logits_K.item()
    names = sorted(SORTS)
    if kind == "several":
        return [name for name, logit in zip(names, logits_K.tolist(), strict=True) if logit > 0]
    return names[max(range(3), key=logits_K.tolist().__getitem__)]


@pytest.mark.parametrize("kind", CLASSIFIED)
def test_cards_of_heads_give_a_label(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, text = CLASSIFIED[kind]
    result = alto.Engine(output_dir=tmp_path / "runs").tune(task_of(tmp_path, **rows_of(tmp_path, kind), **settings))
    best, base = Path(result.adapter_dir), tmp_path / "base"
    count = {"number": 1, "numbers": 2}.get(kind, 3)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=count)
    with torch.no_grad():
        expected = (
            PeftModel.from_pretrained(model, best).eval()(**load_tokenizer()(text, return_tensors="pt")).logits[0]
        )
    for folder in (best, exported(result.run_dir, tmp_path / "adapter"), exported(best, tmp_path / "again")):
        names = run_card(folder, monkeypatch)
        assert torch.equal(names["logits"], expected)
        assert names["label"] == label_of(kind, expected)
        assert names["model"].config.pad_token_id == load_tokenizer().pad_token_id
    merged = run_card(exported(result.run_dir, tmp_path / "merged", merged=True), monkeypatch)
    assert torch.allclose(merged["logits"], expected, atol=1e-5)
    assert merged["label"] == label_of(kind, merged["logits"])


def test_a_head_without_label_names_has_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(tmp_path, **rows_of(tmp_path, "one"), **LABELLED)
    best = Path(alto.Engine(output_dir=tmp_path / "runs").tune(task).adapter_dir)
    named = run_card(best, monkeypatch)["label"]
    for name in ("labels.json", "README.md"):
        (best / name).unlink()
    expected = f"LABEL_{sorted(SORTS).index(named)}"
    assert run_card(exported(best, tmp_path / "adapter"), monkeypatch)["label"] == expected
    assert run_card(exported(best, tmp_path / "merged", merged=True), monkeypatch)["label"] == expected


def test_cards_of_an_adapter_from_elsewhere_run_and_a_card_of_its_own_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_untied(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    (adapter / "README.md").unlink()  # PEFT wrote it
    by_hand = adapted(base, adapter)
    assert follows(by_hand, run_card(exported(adapter, tmp_path / "out"), monkeypatch), CHAT)
    assert follows(by_hand, run_card(exported(adapter, tmp_path / "merged", merged=True), monkeypatch), CHAT)
    own = "# Mine\n\n```python\nprint('my own')\n```\n"
    (adapter / "README.md").write_text(own, encoding="utf-8")
    assert (exported(adapter, tmp_path / "own") / "README.md").read_text("utf-8").endswith(f"---\n\n{own}")


def command_of(folder: Path) -> list[str]:
    (code,) = re.findall(r"^```bash\n(.*)\n```$", (folder / "README.md").read_text("utf-8"), re.MULTILINE)
    return shlex.split(code)


def test_cards_of_forms_for_other_programs_have_their_command(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra 'gguf'")
    adapter = save_adapter(save_base(tmp_path / "dense"), tmp_path / "adapter")
    assert command_of(exported(adapter, tmp_path / "gguf", gguf="q8_0")) == [
        *("llama-server", "--jinja", "-m", "adapter-Q8_0.gguf")
    ]
    base = save_base(tmp_path / "base", "mixtral")
    experts = random_adapter(build_mixture("mixtral", vocab_size=len(load_tokenizer())), tmp_path / "experts")
    folder = exported(experts, tmp_path / "vllm", per_expert=True, base=str(base))
    *serve, modules = command_of(folder)
    assert serve == ["vllm", "serve", str(base), "--enable-lora", "--max-lora-rank", "8", "--lora-modules"]
    assert modules == "experts=path/to/this/folder"
