"""The tokenizer of a model in a GGUF file, as llama.cpp reads it: byte-level BPE, or SentencePiece's BPE.

llama.cpp splits texts for byte-level BPE with its own regular expressions; a file names one of them
(``tokenizer.ggml.pre``). ALTO does not rely on the tokenizer's name: it splits a text with the tokenizer and with six
of llama.cpp's expressions, written for the package ``tokenizers``, and takes the name of the one that splits it in the
same way. Conventions come from llama.cpp, ``convert_hf_to_gguf.py`` (``get_vocab_base``), ``gguf-py/gguf/vocab.py``,
``src/llama-vocab.cpp``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from alto.errors import UnsupportedError

USE_CONVERTER = "export the merged model with --merged, and convert that folder with llama.cpp's convert_hf_to_gguf.py"


def unsupported(expected: str, found: str) -> UnsupportedError:
    return UnsupportedError(f"gguf: expected {expected}, found {found}; {USE_CONVERTER}")


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_by(expression: str, *, then_as_gpt2: bool = False) -> PreTokenizer:
    pieces = Split(Regex(expression), "isolated")
    return Sequence([pieces, ByteLevel(add_prefix_space=False, use_regex=then_as_gpt2)])


@dataclass(frozen=True, slots=True)
class _Splitter:
    """One of llama.cpp's methods to split a text.

    Attributes:
        build: Returns the equivalent for the package ``tokenizers``.
        ignores_merges: Whether a piece that is a token is used without applying merges; None matches both settings.
    """

    build: Callable[[], PreTokenizer]
    ignores_merges: bool | None = False


_SPLITTERS: Mapping[str, _Splitter] = {
    "gpt-2": _Splitter(lambda: ByteLevel(add_prefix_space=False, use_regex=True)),
    "smollm": _Splitter(lambda: _split_by(r"\p{N}", then_as_gpt2=True)),
    "llama-bpe": _Splitter(lambda: _split_by(_LLAMA3), True),
    "dbrx": _Splitter(lambda: _split_by(_LLAMA3), False),
    "qwen2": _Splitter(lambda: _split_by(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}")),
    "tekken": _Splitter(lambda: _split_by(_TEKKEN), None),
}
"""Splitters by llama.cpp's names."""

_TEXT = (
    "Hello, World!  It's 7, 42, 365, 2024 and 1234567 (3.14) - we've DON'T, you'LL, camelCase HTTPServer.\n\n\t  tabs\n"
    "   spaces   \r\n...!!! ??--==/* x_y */ a/b//c\n"
    "привет МИР Ελλάδα 你好世界 こんにちは กำลัง ភាសាខ្មែរ naïve café 🚀🙂 «»"
    " \n \n\nend"
)
"""The text by which splitters are compared."""

_NAMED = ("bos", "eos", "unk", "pad")

_SPACE = "▁"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")

_SENTENCEPIECE: Mapping[str, Any] = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    },
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    },
}
"""Normalizer, pre-tokenizer and decoder of a tokenizer that equals SentencePiece's BPE and adds no space before the
text."""


def add_vocabulary(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    """Add the tokens, merges or scores, special tokens and chat template of ``tokenizer`` to the metadata of a file.

    Args:
        writer: A ``gguf.GGUFWriter``.
        tokenizer: A tokenizer of transformers.
        vocab_size: Number of rows of the model's embeddings; rows without a token become unused tokens ``[PAD…]``.

    Raises:
        UnsupportedError: llama.cpp would split texts in another way.
    """
    import gguf

    state = _state_of(tokenizer)
    is_sentencepiece = bool(state["model"].get("byte_fallback"))
    texts: list[str] = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds = [gguf.TokenType.UNUSED] * vocab_size
    beyond = {added.content for index, added in tokenizer.added_tokens_decoder.items() if index >= vocab_size}
    for text, index in tokenizer.get_vocab().items():
        if text in beyond:  # such as <image_soft_token> of Gemma 3, which a model of text has no row for
            continue
        if index >= vocab_size:
            expected = f"at most {vocab_size} tokens, as many as the base model has embeddings"
            raise unsupported(expected, f"token {index}")
        is_byte = is_sentencepiece and _BYTE.fullmatch(text)
        texts[index], kinds[index] = text, gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL
    for index, added in tokenizer.added_tokens_decoder.items():
        if added.content in beyond:
            continue
        is_control = added.special or (added.content.startswith("<|") and added.content.endswith("|>"))
        kinds[index] = gguf.TokenType.CONTROL if is_control else gguf.TokenType.USER_DEFINED
        if is_sentencepiece and not is_control:
            texts[index] = added.content.replace(_SPACE, " ")  # llama.cpp finds these before it replaces spaces
    # Older files store the two parts of a merge as one text.
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    if is_sentencepiece:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(merges, texts))
        writer.add_add_space_prefix(False)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_splitter_of(tokenizer, bool(state["model"].get("ignore_merges"))))
        writer.add_token_merges(merges)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    for name in _NAMED:
        index = getattr(tokenizer, f"{name}_token_id", None)
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(int(index))
    begins, ends = _marks(tokenizer)
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)


def _state_of(tokenizer: Any) -> dict[str, Any]:
    """Return the ``tokenizer.json`` contents of a BPE tokenizer that llama.cpp knows."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise unsupported("a tokenizer of the package tokenizers (tokenizer.json)", type(tokenizer).__name__)
    state: dict[str, Any] = json.loads(backend.to_str())
    model, decoder, normalizer = (state.get(part) or {} for part in ("model", "decoder", "normalizer"))
    if model.get("type") == "BPE" and model.get("byte_fallback"):
        found = {part: state.get(part) for part in _SENTENCEPIECE}
        if found["pre_tokenizer"] is None:  # without spaces in a text, it has nothing to split
            found["pre_tokenizer"] = _SENTENCEPIECE["pre_tokenizer"]
        if found != _SENTENCEPIECE:
            raise unsupported(
                "a SentencePiece tokenizer that only replaces spaces, as Gemma's", "other steps before or after it"
            )
        return state
    kinds = {step.get("type") for step in decoder.get("decoders", [decoder])}
    if model.get("type") != "BPE" or kinds != {"ByteLevel"}:
        raise unsupported("a byte-level BPE tokenizer", f"{model.get('type')} with the decoder {decoder.get('type')}")
    if normalizer.get("type") not in (None, "NFC"):
        raise unsupported("a tokenizer that does not change texts", f"the normalizer {normalizer.get('type')}")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise unsupported("a BPE tokenizer that does not mark parts of words", "continuing_subword_prefix or a suffix")
    return state


def _scores(merges: Iterable[str], texts: Iterable[str]) -> list[float]:
    """Return scores with which SentencePiece merges in the order of ``merges``: it first merges the pair whose result
    has the highest score.

    Raises:
        UnsupportedError: Merges that result in the same token do not follow each other, so no scores have their order.
    """
    scores: dict[str, float] = {}
    previous = ""
    for merge in merges:
        text = merge.replace(" ", "")
        if text != previous and text in scores:
            raise unsupported(
                "all merges that result in the same token to follow each other", f"those of {text!r} in two places"
            )
        scores.setdefault(text, -1.0 - len(scores))
        previous = text
    least = -1.0 - len(scores)
    return [scores.get(text, least) for text in texts]


def _splitter_of(tokenizer: Any, ignores_merges: bool) -> str:
    own = tokenizer.backend_tokenizer.pre_tokenizer
    wanted = [] if own is None else _pieces(own)
    for name, splitter in _SPLITTERS.items():
        if splitter.ignores_merges in (None, ignores_merges) and _pieces(splitter.build()) == wanted:
            return name
    raise unsupported(f"a tokenizer that splits texts like one of {', '.join(_SPLITTERS)}", "a different splitter")


def _pieces(splitter: PreTokenizer) -> list[str]:
    return [piece for piece, _ in splitter.pre_tokenize_str(_TEXT)]


def _marks(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether the tokenizer adds the BOS token to every text, and whether it adds the EOS token."""
    bare, marked = (tokenizer("a", add_special_tokens=is_marked)["input_ids"] for is_marked in (False, True))
    for begins in (False, True):
        for ends in (False, True):
            before = [tokenizer.bos_token_id] if begins else []
            after = [tokenizer.eos_token_id] if ends else []
            if marked == [*before, *bare, *after]:
                return begins, ends
    raise unsupported("a tokenizer that adds only the BOS and EOS tokens", f"{marked} for a text of {bare}")
