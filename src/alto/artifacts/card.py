"""Parts of every model card: the header, which the Hugging Face hub reads, and Python code that runs the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from alto.records import LabelSet
from alto.spec import is_object_name

TokenizerPlace = Literal["base", "folder"]

_LIMIT = "---\n"
_FOLDER = 'folder = "path/to/this/folder"'
_CODE = re.compile(r"```python\n(?:(?!```).)*path/to/this/folder(?:(?!```).)*```\n", re.DOTALL)
_PIPELINES = {"AutoModelForImageTextToText": "image-text-to-text"}
"""The hub's pipeline tag, by the ``Auto`` class of the model; all other classes have ``text-generation``."""


def card_header(base_model: str, *, library: str, pipeline: str, tags: Sequence[str]) -> str:
    """Return the header of a card, with the keys that PEFT 0.21 and transformers write.

    Args:
        base_model: The argument of ``from_pretrained``; an empty one omits the key.
        library, pipeline: ``library_name`` and ``pipeline_tag``.
    """
    lines = [f"base_model: {json.dumps(base_model)}"] if base_model else []
    lines += [f"library_name: {library}", f"pipeline_tag: {pipeline}", "tags:"]
    lines += [f"- {json.dumps(tag)}" for tag in sorted(tags)]
    return _LIMIT + "".join(f"{line}\n" for line in lines) + _LIMIT


def adapter_tags(base_model: str) -> list[str]:
    """Return the tags of an adapter: ALTO's tag, PEFT's tags, and one for the base model if that has a name."""
    return ["alto", "lora", "transformers", *([f"base_model:adapter:{base_model}"] if base_model else [])]


def without_header(card: str) -> str:
    """Return the text of a card without its header."""
    if not card.startswith(_LIMIT):
        return card
    _, found, text = card.removeprefix(_LIMIT).partition(f"\n{_LIMIT}")
    return text.lstrip("\n") if found else card


def with_code(card: str, code: str) -> str:
    """Replace the Python code that ALTO wrote into ``card`` by ``code``; unchanged if there is no such code."""
    return _CODE.sub(lambda _: code, card, count=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """Facts about a trained model that decide how it is loaded and prompted.

    Attributes:
        model_class: Name of transformers' class that loads the base model.
        has_template: Whether the tokenizer has a chat template, or the task sets one.
        labels: Labels of the classification head; None without a head.
        rows: ``form`` and ``of_messages`` of its training rows, as in a run's journal; empty if unknown.
        trust_remote_code: Whether the base model comes with code of its own.
    """

    model_class: str
    has_template: bool
    labels: LabelSet | None = None
    rows: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    @property
    def pipeline(self) -> str:
        """The hub's pipeline tag of the model."""
        if self.labels is not None:
            return "text-classification"
        return _PIPELINES.get(self.model_class, "text-generation")

    def adapter_code(self, base_model: str, tokenizer_in: TokenizerPlace) -> str:
        """Return a block of Python code that loads the adapter and prints one result.

        Args:
            base_model: Name of the base model in the adapter: the argument of ``from_pretrained``, or the name of an
                object.
            tokenizer_in: ``folder`` if the tokenizer is in the adapter's folder; ``base`` for the tokenizer of the base
                model.
        """
        settings = {} if self.labels is None else self.labels.to_config()
        tokenizer = self._load("AutoTokenizer", "folder" if tokenizer_in == "folder" else repr(base_model))
        base = self._load(self._class, repr(base_model), settings)
        classes = f"{self._class}, AutoTokenizer"
        if is_object_name(base_model):
            how = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            loaded = f", loaded as {self._class} with {how}" if settings else ""
            base = f"...  # the model that ALTO was given as an object, {base_model}{loaded}; put it here"
            classes = "AutoTokenizer"
            if tokenizer_in == "base":
                tokenizer, classes = "...  # the tokenizer that ALTO was given with it; put it here", ""
        lines = [
            f"tokenizer = {tokenizer}",
            *(["# a warning that score.weight is MISSING is expected: the adapter brings it"] if settings else []),
            f"base = {base}",
            "model = PeftModel.from_pretrained(base, folder).eval()",
        ]
        imports = ["from peft import PeftModel", *([f"from transformers import {classes}"] if classes else [])]
        return self._block(imports, lines)

    def merged_code(self) -> str:
        """Return a block of Python code that loads the merged model from its folder and prints one result."""
        tokenizer, model = self._load("AutoTokenizer", "folder"), self._load(self._class, "folder")
        imports = [f"from transformers import {self._class}, AutoTokenizer"]
        return self._block(imports, [f"tokenizer = {tokenizer}", f"model = {model}.eval()"])

    @property
    def _class(self) -> str:
        return self.model_class if self.labels is None else "AutoModelForSequenceClassification"

    @property
    def is_chat(self) -> bool:
        """Whether texts are formatted with the chat template."""
        if self.labels is not None:
            return bool(self.rows.get("of_messages"))
        return self.has_template and not self._is_raw

    @property
    def _is_raw(self) -> bool:
        """Whether replies follow their prompts directly, without template and line break."""
        form = str(self.rows.get("form", ""))
        return form == "text" or form.startswith("raw_")

    def _load(self, of: str, where: str, settings: Mapping[str, Any] | None = None) -> str:
        trusted = {"trust_remote_code": True} if self.trust_remote_code else {}
        given = {**(settings or {}), **trusted}
        return f"{of}.from_pretrained({', '.join([where, *(f'{key}={value!r}' for key, value in given.items())])})"

    def _block(self, imports: Sequence[str], loading: Sequence[str]) -> str:
        """Return a block of Python code: imports, ``loading``, and one result."""
        result = self._answer() if self.labels is None else self._label(self.labels)
        outside = imports if self.labels is None else ["import torch", *imports]
        lines = [*outside, "", _FOLDER, *loading, "", *result]
        return "\n".join(["```python", *lines, "```", ""])

    def _answer(self) -> list[str]:
        inputs = 'tokenizer("Hello", return_tensors="pt")'
        if not self._is_raw:
            inputs = 'tokenizer("Hello\\n", return_tensors="pt")'
        if self.is_chat:
            inputs = (
                "tokenizer.apply_chat_template(\n    messages, add_generation_prompt=True, return_dict=True, "
                'return_tensors="pt"\n)'
            )
        return [
            *(['messages = [{"role": "user", "content": "Hello"}]'] if self.is_chat else []),
            f"inputs = {inputs}",
            "output = model.generate(**inputs, max_new_tokens=100, do_sample=False)",
            'answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)',
            "print(answer)",
        ]

    def _label(self, labels: LabelSet) -> list[str]:
        inputs = [
            'text = "Hello"',
            'inputs = tokenizer(text, return_tensors="pt")  # for two texts: tokenizer(text, text_pair, ...)',
        ]
        if self.is_chat:
            inputs = [
                'messages = [{"role": "user", "content": "Hello"}]',
                'inputs = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")',
            ]
        found = "label = model.config.id2label[int(logits.argmax())]"
        if labels.problem_type == "multi_label_classification":
            found = "label = [model.config.id2label[index] for index, logit in enumerate(logits) if logit > 0]"
        if labels.problem_type == "regression":
            found = "label = float(logits)" if labels.num_labels == 1 else "label = logits.tolist()"
        return [
            "model.config.pad_token_id = tokenizer.pad_token_id  # batches of several rows need it",
            *inputs,
            "with torch.no_grad():",
            "    logits = model(**inputs).logits[0]",
            found,
            "print(label)",
        ]
