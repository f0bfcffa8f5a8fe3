"""Two-way tables of the keys of other tools, each read as a setting of a task and written for an exported job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from alto.spec import JobConfig, Method, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The layout of a task's rows.

    Attributes:
        form: Form of the rows (a task's ``dataset_format``).
        of_messages: Whether replies are lists of messages instead of texts; None if unknown.
    """

    name: str
    form: str
    columns: Mapping[str, str] = field(default_factory=dict)
    of_messages: bool | None = None


_WITHOUT_EFFECT: Mapping[str, Any] = {"loraplus_lr_ratio": 1, "init_lora_weights": "default"}
"""Values of settings that are not written, because every tool begins with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedJob:
    """A job whose configuration is written for another tool.

    Attributes:
        model: The base model, as an argument of ``from_pretrained``.
        trained: Settings that decide the training, with the names and meanings of TRL and transformers.
    """

    task: Task
    config: JobConfig
    model: str
    rows: Rows
    folder: Path
    trained: Mapping[str, Any]

    def setting(self, name: str) -> Any:
        """Return the value of a field of the job or its task as it is written; None if there is nothing to write."""
        if name in self.trained:
            value = self.trained[name]
        else:
            owners = (self.config.objective, self.config, self.task)
            value = next((getattr(owner, name) for owner in owners if name in type(owner).model_fields), None)
        if value is False or value == _WITHOUT_EFFECT.get(name):
            return None
        if isinstance(value, tuple):
            return list(value)
        return int(value) if name == "lora_alpha" and float(value).is_integer() else value

    @property
    def warmup(self) -> dict[str, Any]:
        """Warmup with the names from before transformers 5, in which steps and their share are different keys."""
        given = self.trained.get("warmup_steps", 0)
        is_fraction = 0 < given < 1
        return {"warmup_steps": None if is_fraction else given, "warmup_ratio": given if is_fraction else None}


@dataclass(frozen=True, slots=True)
class Key:
    """A setting of a task, and the key that holds it in a tool's configuration.

    Attributes:
        ours: A field of a task, of a job, or of its method's settings; empty for a key that only the tool has.
        theirs: The tool's key; None if the setting is read and never written.
        write: Returns the key's value for a job, None to leave it out; by default, the value of the setting, unless it
            is false. The tool's reader has code of its own for a key with another value.
        also: Other spellings, which are read too.
        by_code: Whether the reader has code of its own for a key without ``write``.
    """

    ours: str
    theirs: str | None
    write: Callable[[ExportedJob], Any] | None = None
    also: tuple[str, ...] = field(default=(), kw_only=True)
    methods: tuple[str, ...] = field(default=(), kw_only=True)
    by_code: bool = field(default=False, kw_only=True)


def same(*names: str) -> tuple[Key, ...]:
    """Return rows for keys that have one name in both."""
    return tuple(Key(name, name) for name in names)


TRAINER_KEYS = same(
    *("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "optim", "optim_args", "weight_decay", "max_grad_norm"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "seed", "neftune_noise_alpha"),
)
"""Keys of transformers' ``TrainingArguments``, which all tools have."""


def _warmup(name: str) -> Key:
    return Key(name, name, lambda job: job.warmup[name])


WARMUP_KEYS = (_warmup("warmup_steps"), _warmup("warmup_ratio"))
"""Keys of warmup from before transformers 5."""

CHECKPOINTING_KEY = Key(
    "gradient_checkpointing", "gradient_checkpointing", lambda job: job.task.gradient_checkpointing is True
)
"""Whether activations are recomputed; ALTO decides by the available memory if nothing is set."""

OUTPUT_KEY = Key("", "output_dir", lambda job: str(job.folder / "output"))
"""The folder of the tool's results."""


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """All keys of a tool: settings that tasks have too, in the order in which they are written, and others.

    Attributes:
        unneeded: Keys that do not affect training; each dictionary key is the reason.
        unsupported: Keys that affect training; each dictionary key says what to do instead.
        off: Values by key, in addition to null, false and empty values, that request nothing.
        never_off: Keys for which false and empty values are not ignored.
    """

    keys: tuple[Key, ...]
    unneeded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unsupported: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    off: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    never_off: Collection[str] = ()

    @cached_property
    def not_needed(self) -> Mapping[str, str]:
        """Keys that do not affect training, and why."""
        return {key: why for why, keys in self.unneeded.items() for key in keys}

    @cached_property
    def not_supported(self) -> Mapping[str, str]:
        """Keys that affect training, and what to do instead."""
        return {key: why for why, keys in self.unsupported.items() for key in keys}

    def names(self, method: Method) -> dict[str, str]:
        """Return our names by the tool's spellings, for keys whose reading is a renaming.

        A table is per tool, because tools use one key for different fields: ``alpha`` of TRL's CPO is not
        ``lora_alpha``.
        """
        renamed = [key for key in self.keys if key.write is None and not key.by_code]
        spelt = {spelling: key.ours for key in renamed for spelling in (key.theirs, *key.also) if spelling is not None}
        return {**method.aliases, **{spelling: name for spelling, name in spelt.items() if spelling != name}}

    def is_off(self, key: str, value: object) -> bool:
        """Return whether ``key`` with ``value`` requests nothing."""
        if value is None or value in self.off.get(key, ()):
            return True
        return key not in self.never_off and (value is False or value in ("", [], {}))

    def written(self, job: ExportedJob) -> dict[str, Any]:
        """Return the keys and values that make the tool train ``job``."""
        found = {}
        for key in self.keys:
            if key.theirs is None or (key.methods and job.task.method not in key.methods):
                continue
            value = job.setting(key.ours) if key.write is None else key.write(job)
            if value is not None and value != {}:
                found[key.theirs] = value
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFiles:
    """The files of another tool's configuration.

    Attributes:
        command: Words of the training command, before the name of the configuration file.
        others: Texts of additional files, by file name.
    """

    keys: Mapping[str, Any]
    command: tuple[str, ...]
    others: Mapping[str, str] = field(default_factory=dict)
