"""Ollama's Modelfile: its template gives the prompts of the tokenizer's chat template."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import pytest
from exported import save_adapter, save_base
from transformers import AutoTokenizer, GenerationConfig

import alto
from alto.artifacts.modelfile import ChatPrompt
from alto.backbone import load_tokenizer
from alto.spec import BaseModelSpec

pytest.importorskip("gguf", reason="needs the extra 'gguf'")

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

TURN = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful AI.<|im_end|>\\n' }}{% endif %}"
)
LOOP = "{% for message in messages %}"
TEMPLATES = {
    "chatml": LOOP + TURN + "{% endfor %}" + ASKS,
    "with a default system prompt": DEFAULT + LOOP + TURN + "{% endfor %}" + ASKS,
    "with other ends": (
        LOOP + "{{ '[' + message['role'] + ']' + message['content'] | trim }}"
        "{{ '</s>' if message['role'] == 'assistant' else '\\n\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
}
CASES = [
    [("user", "Hi.")],
    [("system", "Be brief."), ("user", "Hi.")],
    [("system", "Be brief."), ("user", "Hi."), ("assistant", "Yes?"), ("user", "What is 2 + 2?")],
    [("user", "Hi."), ("assistant", "Yes?"), ("user", 'A {brace} and "quotes"')],
]


def run_go(template: str, messages: list[dict[str, str]]) -> str:
    """Run a template of Go, translated into one of Jinja, on messages."""
    ends: list[str] = []

    def translate(match: re.Match[str]) -> str:
        action = match[1].strip()
        if action.startswith("range "):
            ends.append("{% endfor %}")
            return "{% for turn in messages %}"
        if action == "end":
            return ends.pop()
        if action in ("$turn.Content", ".Prompt"):
            return "{{ turn.content }}"
        condition = re.sub(r'eq \$turn\.Role ("\w+")', r"turn.role == \1", action)
        condition = re.sub(r'ne \(index \.Messages 0\)\.Role ("\w+")', r"messages[0].role != \1", condition)
        if condition.startswith("else if "):
            return f"{{% elif {condition.removeprefix('else if ')} %}}"
        assert condition.startswith("if "), action
        ends.append("{% endif %}")
        return f"{{% {condition} %}}"

    translated = re.sub(r"\{\{(.*?)\}\}", translate, template)
    assert not ends
    return jinja2.Environment(keep_trailing_newline=True).from_string(translated).render(messages=messages)


@pytest.mark.parametrize("name", [*TEMPLATES, "alto-tiny's own"])
def test_it_gives_the_prompts_of_the_chat_template(name: str) -> None:
    tokenizer = load_tokenizer(BaseModelSpec(id="alto-tiny"))
    tokenizer.chat_template = TEMPLATES.get(name, tokenizer.chat_template)
    prompt = ChatPrompt.of(tokenizer)
    assert prompt is not None
    for case in CASES:
        messages = [{"role": role, "content": content} for role, content in case]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert run_go(prompt.to_go(), messages) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_spaces_that_the_template_removes_are_noticed(name: str) -> None:
    tokenizer = load_tokenizer(BaseModelSpec(id="alto-tiny"))
    tokenizer.chat_template = TEMPLATES[name]
    prompt = ChatPrompt.of(tokenizer)
    assert prompt is not None
    assert prompt.keeps_spaces == ("trim" not in TEMPLATES[name])
    messages = [{"role": "user", "content": " Hi.\n"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (run_go(prompt.to_go(), messages) == expected) == prompt.keeps_spaces


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] }}",  # later messages are left out
        LOOP + "{{ loop.index }}" + TURN + "{% endfor %}" + ASKS,
        LOOP + "{{ raise_exception('no system') if message['role'] == 'system' }}" + TURN + "{% endfor %}" + ASKS,
        LOOP + "{{ '{' + '{' }}" + TURN + "{% endfor %}" + ASKS,  # Go would read an action
    ],
)
def test_a_template_of_another_form_has_no_prompt(template: str) -> None:
    tokenizer = load_tokenizer(BaseModelSpec(id="alto-tiny"))
    tokenizer.chat_template = template
    assert ChatPrompt.of(tokenizer) is None


def test_the_file_names_the_model_its_template_and_the_end_of_an_answer(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATES["chatml"]
    tokenizer.save_pretrained(base)
    GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, eos_token_id=[0, 2]).save_pretrained(base)
    adapter = save_adapter(base, tmp_path / "adapter")
    alto.Engine().export(adapter, tmp_path / "model", gguf="f16")
    alto.Engine().export(adapter, tmp_path / "alone", gguf="adapter")
    model, alone = ((tmp_path / each / "Modelfile").read_text(encoding="utf-8") for each in ("model", "alone"))
    assert model.startswith('FROM ./adapter-F16.gguf\nTEMPLATE """')
    assert f"FROM {base}\nADAPTER ./adapter-lora.gguf\nTEMPLATE " in alone
    tokens = sorted({0, 2, tokenizer.eos_token_id})  # trained rows end with the tokenizer's own
    ends = [f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(index)}"' for index in tokens]
    settings = ["PARAMETER temperature 0.7", "PARAMETER top_p 0.9"]
    for text in (model, alone):
        assert [line for line in text.splitlines() if line.startswith("PARAMETER")] == [*ends, *settings]


def test_a_notice_says_that_a_template_is_missing(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(base)
    result = alto.Engine().export(save_adapter(base, tmp_path / "adapter"), tmp_path / "gguf", gguf="adapter")
    assert any("has no TEMPLATE" in note for note in result.notes)
    assert "TEMPLATE" not in (tmp_path / "gguf" / "Modelfile").read_text(encoding="utf-8")


def test_a_notice_says_that_messages_are_not_trimmed(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATES["with other ends"]
    tokenizer.save_pretrained(base)
    result = alto.Engine().export(save_adapter(base, tmp_path / "adapter"), tmp_path / "gguf", gguf="adapter")
    assert any("removes spaces and line breaks around the messages" in note for note in result.notes)
    assert "TEMPLATE" in (tmp_path / "gguf" / "Modelfile").read_text(encoding="utf-8")
