"""Chat templates in the style of well-known models, and a tokenizer that has their tokens.

``[[`` and ``]]`` stand for ``{% generation %}`` and ``{% endgeneration %}``. With these marks TRL knows the assistant's
part (``assistant_only_loss``); without them the text is the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer

from alto.backbone import resolve_model

__all__ = ["STYLES", "Style", "make_tokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """A chat template, with places for marks, and its special tokens.

    Attributes:
        text: The template; None for alto-tiny's own.
        eos: The EOS token; None keeps alto-tiny's.
        tokens: Tokens that the template writes.
    """

    text: str | None
    eos: str | None = None
    tokens: tuple[str, ...] = ()


_CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}[[{{ m.content }}{{ '<|im_end|>' }}]]
{%- else %}{{ m.content }}{{ '<|im_end|>' }}{% endif %}
{{- '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_LLAMA3 = """{{ '<|begin_of_text|>' }}{% for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{%- if m.role == 'assistant' %}[[{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}]]
{%- else %}{{ m.content | trim }}{{ '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_QWEN25 = """{% if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are a helpful assistant.{% endif %}
{{- '\\n\\n# Tools\\n\\n<tools>' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}[[{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}]]{{ '\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_QWEN3 = """{% set last = namespace(user=-1) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}[[{% if m.reasoning_content and loop.index0 > last.user %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}{{ '<|im_end|>' }}]]
{%- else %}{{ m.content }}{{ '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_MISTRAL = """{{ '<s>' }}{% set start = namespace(system='') %}{% for m in messages %}
{%- if m.role == 'system' %}{% set start.system = m.content + '\\n\\n' %}
{%- elif m.role == 'user' %}{{ '[INST] ' + start.system + m.content + ' [/INST]' }}{% set start.system = '' %}
{%- elif m.role == 'assistant' %}[[{{ ' ' + m.content }}{{ '</s>' }}]]
{%- else %}{{ raise_exception('Only user, system and assistant roles are supported!') }}{% endif %}{% endfor %}"""

_GEMMA = """{{ '<bos>' }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{%- if m.role == 'assistant' %}[[{{ m.content | trim }}{{ '<end_of_turn>' }}]]
{%- else %}{{ m.content | trim }}{{ '<end_of_turn>' }}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

_IM = ("<|im_start|>", "<|im_end|>")

STYLES: Mapping[str, Style] = {
    "alto-tiny": Style(text=None),
    "chatml": Style(text=_CHATML, eos="<|im_end|>", tokens=_IM),
    "llama-3": Style(
        text=_LLAMA3,
        eos="<|eot_id|>",
        tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "qwen-2.5": Style(text=_QWEN25, eos="<|im_end|>", tokens=_IM),
    "qwen-3": Style(text=_QWEN3, eos="<|im_end|>", tokens=_IM),
    "mistral": Style(text=_MISTRAL, eos="</s>", tokens=("<s>", "</s>", "[INST]", "[/INST]")),
    "gemma": Style(text=_GEMMA, eos="<eos>", tokens=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
}


def make_tokenizer(name: str, *, is_marked: bool) -> Any:
    """Return alto-tiny's tokenizer with the tokens and the template of a style; a marked template marks the assistant's
    part."""
    style = STYLES[name]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("alto-tiny"))
    if style.text is None:
        return tokenizer
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in style.tokens])
    tokenizer.eos_token = style.eos
    begin, end = ("{% generation %}", "{% endgeneration %}") if is_marked else ("", "")
    # A tag must not replace one that trims blanks.
    text = re.sub(r"\[\[", begin, style.text)
    tokenizer.chat_template = re.sub(r"\]\]\n?", end, text)
    return tokenizer
