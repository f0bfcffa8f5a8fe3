"""A tokenizer whose tokens merge across the beginning of a reply, and templates that write such beginnings."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

__all__ = ["BLANK", "MARKED", "merging_tokenizer"]

BLANK = (
    # The opening of a reply ends in a blank, as in many templates without tokens of their own.
    "{% for m in messages %}{{ 'User: ' if m.role == 'user' else 'Assistant: ' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
MARKED = (
    # The mood in brackets is the assistant's; the note after it is not.
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>note:"
    "{% generation %}({{ m.mood }}){{ m.content }}<|end|>{% endgeneration %}noted{% else %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>note:{% endif %}"
)


def merging_tokenizer() -> Any:
    """Return a tokenizer of letters, with a blank that merges with a following ``Yes``: `` Yes`` is one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Y", "e"), ("Ye", "s"), ("Ġ", "Yes"), ("Ċ", "Ċ")]
    vocabulary = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|end|>", "<|user|>", "<|assistant|>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
