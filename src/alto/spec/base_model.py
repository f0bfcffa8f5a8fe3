"""Which frozen base model is loaded, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from alto.spec.base_objects import BaseObjects, is_object_name

__all__ = [
    "LOAD_IN_4BIT",
    "QUANTISATION_KEYS",
    "BaseModelSpec",
    "Dtype",
    "Quantisation",
    "quantisation_keys",
    "quantisation_of",
]

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantisation = Literal["none", "4bit", "8bit"]

QUANTISATION_KEYS: Mapping[Quantisation, str] = {"4bit": "load_in_4bit", "8bit": "load_in_8bit"}
"""The key that sets a quantisation: in tasks, in the journal and in files of metrics, and in transformers."""

LOAD_IN_4BIT = f"{QUANTISATION_KEYS['4bit']}: true"
"""The line of a task file that sets 4 bits, for the remedies of errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelSpec:
    """A base model and how it is loaded. Equal specifications load equal bases, as long as the files stay the same.

    Attributes:
        id: A model shipped with ALTO, a hub id, or a local folder.
        dtype: Precision of the weights; ``auto`` is float32 on the CPU and the model's own on CUDA.
        quantisation: Keep the linear layers, but not the output head, quantised by bitsandbytes: ``4bit`` is NF4 with
            double quantisation, ``8bit`` one byte a number with a scale a row. ``none`` keeps the model as it is on
            disk, quantised or not.
        torch_compile: Compile the layers: fewer, larger launches, after compilation in the first steps.
        use_safetensors: Read safetensors weights; False reads pickle files instead, of which transformers takes tensors
            and nothing else.
        trust_remote_code: Run Python code that comes with the model, where transformers has none for it.
        chat_template: Text of a template in place of its tokenizer's own; None keeps that.
        objects: Model and tokenizer that are used as they are; None where they are loaded. They are not part of
            :meth:`key` and :meth:`task_keys`.
    """

    id: str
    dtype: Dtype = "auto"
    quantisation: Quantisation = "none"
    torch_compile: bool = False
    use_safetensors: bool = True
    trust_remote_code: bool = False
    chat_template: str | None = None
    objects: BaseObjects | None = field(default=None, repr=False)

    def key(self) -> dict[str, Any]:
        """All fields as plain values, for the key of a cache: different specifications have different keys. A model
        that nothing loads has its fingerprint there."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "objects"}
        if self.chat_template is None:
            del values["chat_template"]  # as before there was such a field
        if self.objects is not None and is_object_name(self.id) and self.objects.fingerprint is not None:
            values["object"] = {name: self.objects.fingerprint[name] for name in ("weights", "config")}
        return values

    @property
    def is_loadable(self) -> bool:
        """Whether its name loads it, in any process."""
        return not is_object_name(self.id)

    def task_keys(self) -> dict[str, Any]:
        """The equivalent keys of a task."""
        return {
            "model": self.id,
            "dtype": self.dtype,
            **quantisation_keys(self.quantisation),
            "torch_compile": self.torch_compile,
            "trust_remote_code": self.trust_remote_code,
            "use_safetensors": self.use_safetensors,
            **({} if self.chat_template is None else {"chat_template": self.chat_template}),
        }


def quantisation_keys(quantisation: Quantisation) -> dict[str, bool]:
    """Both keys of a task with their values; the journal has the same."""
    return {key: name == quantisation for name, key in QUANTISATION_KEYS.items()}


def quantisation_of(keys: Mapping[str, Any]) -> Quantisation:
    """The quantisation that the keys of a task, or of a quantised model's configuration, set; ``none`` by default."""
    return next((name for name, key in QUANTISATION_KEYS.items() if keys.get(key)), "none")
