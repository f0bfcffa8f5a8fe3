"""The frozen base model of a task, and how it is loaded."""

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
"""The key for each quantisation, in tasks, in the journal, in metrics files and in transformers."""

LOAD_IN_4BIT = f"{QUANTISATION_KEYS['4bit']}: true"
"""The line of a task file that loads the model in 4 bits; error messages suggest it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelSpec:
    """A base model and how it is loaded. Equal specifications load equal models as long as the files do not change.

    Attributes:
        id: A model shipped with ALTO, a hub id, or a local folder.
        dtype: Precision of the weights; ``auto`` is float32 on the CPU and the model's own dtype on CUDA.
        quantisation: How bitsandbytes quantises the linear layers, except the output head: ``4bit`` is NF4 with double
            quantisation, ``8bit`` one byte per weight with one scale per row. ``none`` keeps the model as it is on
            disk, quantised or not.
        torch_compile: Compile the layers: fewer and larger launches, but the first steps include the compilation.
        use_safetensors: Read safetensors weights; False reads pickle files instead, from which transformers loads only
            tensors.
        trust_remote_code: Run Python code that comes with the model if transformers has no code for it.
        chat_template: Text of a chat template that replaces the tokenizer's own; None keeps the tokenizer's.
        objects: A model and a tokenizer that are already loaded; None if they are loaded from ``id``. They are not part
            of :meth:`task_keys`, and :meth:`key` holds only their fingerprint.
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
        """Return all fields as plain values, for a cache key: different specifications have different keys.

        A model that cannot be loaded by its ``id`` is represented by its fingerprint.
        """
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "objects"}
        if self.chat_template is None:
            del values["chat_template"]  # keeps the keys from before this field existed
        if self.objects is not None and is_object_name(self.id) and self.objects.fingerprint is not None:
            values["object"] = {name: self.objects.fingerprint[name] for name in ("weights", "config")}
        return values

    @property
    def is_loadable(self) -> bool:
        """Whether any process can load the model by its ``id``."""
        return not is_object_name(self.id)

    def task_keys(self) -> dict[str, Any]:
        """Return the equivalent keys of a task."""
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
    """Return both quantisation keys of a task with their values; the journal has the same keys."""
    return {key: name == quantisation for name, key in QUANTISATION_KEYS.items()}


def quantisation_of(keys: Mapping[str, Any]) -> Quantisation:
    """Return the quantisation that ``keys`` of a task or of a quantised model's configuration set; by default none."""
    return next((name for name, key in QUANTISATION_KEYS.items() if keys.get(key)), "none")
