"""Translation of a fine-tuning request to the keys of an ALTO task.

A number fixes a setting, ``"auto"`` searches the usual values, a list is a grid. The hyperparameters may include ALTO's
settings under ALTO's names, except settings that would read files, contact servers or run code on the
service's machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from alto.base import nearest_key, quoted
from alto.errors import SpecError, UnsupportedError
from alto.service.errors import ApiError, refused
from alto.service.openai.graders import select_by_of
from alto.spec import JOB_ALIASES, MAPPING_FIELDS, TASK_ALIASES, TASK_FIELDS, Task, usual_learning_rate

# Module names in requests, which must be plain names. ALTO itself also takes regular expressions, but an expression of
# a stranger can keep a process busy forever.

_FIELDS = frozenset(
    {
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_pattern",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
    }
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


def check_module_names(values: Mapping[str, Any]) -> None:
    """Check that settings that name modules have only plain names, even in a search space and in lists.

    Raises:
        ApiError: A setting has something else.
    """
    for key, value in values.items():
        if JOB_ALIASES.get(key, key) in _FIELDS:
            for name in _texts(value):
                if _NAME.fullmatch(name) is None:
                    raise refused(
                        f"{key}: expected names of modules, such as q_proj, found {quoted(name)}; a service does not "
                        "accept regular expressions",
                        "hyperparameters",
                    )
        elif key in ("search_space", "paired") and isinstance(value, Mapping):
            check_module_names(value)


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value; for a mapping, its keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for each in value:
            yield from _texts(each)


# Errors about hyperparameters in the words of the request: its keys as they were sent, and no keys that requests may
# not have.

_MOST_KNOWN = 24
"""Maximum number of known keys that an error lists."""

_OPENAI = ("n_epochs", "batch_size", "learning_rate_multiplier")
_USUAL = "learning_rate, r, lora_alpha, lora_dropout, weight_decay"
_ALL = "ALTO's reference (docs/reference.md) lists all keys."
_OF_TASK = f"Usual keys are {', '.join(_OPENAI)}, {_USUAL}, search_space, search and early_exit. {_ALL}"
_OF_SPACE = f"Usual keys are num_train_epochs, per_device_train_batch_size, {_USUAL}. {_ALL}"


def worded(text: str, sent: Mapping[str, str], refused: Collection[str]) -> str:
    """Return the text of a task's error, reworded for the sender of a request.

    Args:
        text: Error text with ALTO's names.
        sent: Keys of the request that are other spellings of ALTO's names, by these names.
        refused: Keys that a request may not have.
    """
    for name, key in sent.items():
        # Lists and ranges among the hyperparameters became a search space, which the sender does not know.
        place = "" if "search_space" in sent else r"(?:search_space\.)?"
        text = re.sub(rf"(?<![\w.*']){place}{re.escape(name)}\b(?=[\[.: (])", key, text)
    usual = _OF_SPACE if text.startswith("search_space") else _OF_TASK
    text = re.sub(r"Known keys are ([\w, ]+)\.", lambda found: _known(found[1], refused, usual), text)
    return re.sub(
        r"(the task )?has the unknown key '(\w+)'\.( Did you mean '(\w+)'\?)?",
        lambda found: _unknown(found, refused),
        text,
    )


def worded_note(text: str) -> str:
    """Return a notice about a task with the request's name for the rows to validate on."""
    return text.replace("a validation_dataset", "a validation_file")


def param_of(text: str, sent: Mapping[str, str], default: str) -> str:
    """Return the key of the request that a task's error is about; ``default`` if it is about several keys, or none.

    Args:
        text: Error text with ALTO's names.
        sent: All keys of the request, by ALTO's names.
        default: Name of all the keys together.
    """
    found = re.match(r"the task has the (?:unknown )?key '(\w+)'", text)
    found = found or re.match(r"(?:In )?(?:search_space\.)?(\w+)(?=[\[.: (])", text)
    if found is None or "\n" in text:
        return default
    place = "search_space" if "search_space." in found[0] else found[1]
    return sent.get(found[1], sent.get(place, default))


def _known(listed: str, refused: Collection[str], usual: str) -> str:
    names = [name for name in listed.split(", ") if name not in refused]
    return usual if len(names) > _MOST_KNOWN else f"Known keys are {', '.join(names)}."


def _unknown(found: re.Match[str], refused: Collection[str]) -> str:
    """Return the text for an unknown key, with a suggestion that a request may follow, if there is one."""
    task, key, suggestion, near = found.groups()
    about = f"{task or ''}has the unknown key {key!r}."
    near = (nearest_key(key, _OPENAI) if task else None) or (near if near not in refused else None)
    if near is not None:
        return f"{about} Did you mean {near!r}?"
    return f"{about} {_OF_TASK}" if task and suggestion else about


REINFORCEMENT = "reinforcement"
METHODS = {"supervised": "sft", "dpo": "dpo", REINFORCEMENT: "grpo"}

ALLOWED_TASK_KEYS = frozenset(
    {
        "early_exit",
        "search",
        "search_space",
        "eval_steps",
        "num_samples",
        "sample_max_new_tokens",
        "repeat_by",
        "max_slots",
        "max_tokens_per_step",
        "max_tokens_per_pass",
        "gradient_checkpointing",
        "dtype",
        "adapter_dtype",
        "optim_state_dtype",
        "load_in_4bit",
        "load_in_8bit",
        "num_gpus",
        "priority",
        "dataset_format",
        "columns",
        "validation_split",
        "test_split",
        "max_samples",
        "data_seed",
        "max_length",
        "train_on",
        "metric",
        "select_by",
        "num_finalists",
        "on_bad_row",
    }
)
"""Keys of a task that requests may set. The others name files, servers, packages or code of the service's machine, or
the service sets them."""

_REFUSED_JOB_KEYS = frozenset({"objective", "config", "tokenizer", "task_type", "mixture_weights"})
"""Arguments for Python objects, settings that change the method, and weights of files that a job does not have."""
_REFUSED_EARLY_EXIT_KEYS = frozenset({"rules"})
"""Keys that load packages."""

_REFUSED_KEYS = (frozenset(TASK_FIELDS) - ALLOWED_TASK_KEYS) | _REFUSED_JOB_KEYS | _REFUSED_EARLY_EXIT_KEYS

_MULTIPLIER = "learning_rate_multiplier"
_LARGEST_MULTIPLIER = 1e6
_LARGEST_COMPUTE = 128
_BATCH = "per_device_train_batch_size"
_NAMES = {
    _MULTIPLIER: "learning_rate",
    "n_epochs": "num_train_epochs",
    "batch_size": _BATCH,
}
_AUTO_VALUES: dict[str, Any] = {
    "num_train_epochs": [1, 2, 3],
    _BATCH: [2, 4, 8],
    "r": [8, 16, 32, 64],
    "beta": [0.05, 0.1, 0.3],
}
_LISTS = frozenset(
    {
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
    }
)
"""Settings whose single value is a list; a grid of them is a list of lists."""
_AUTO = "auto"
_NUM_RATES = 5
_USUAL_RATE = usual_learning_rate(2000)


def build(values: Mapping[str, Any], hyperparameters: Mapping[str, Any] | None = None) -> Task:
    """Return the task of ``values``.

    Args:
        hyperparameters: Hyperparameters as they were sent; errors use their names.

    Raises:
        ApiError: A value is invalid.
    """
    try:
        return Task(**values)
    except (SpecError, UnsupportedError) as error:
        text, sent = str(error), {_name_of(key): key for key in hyperparameters or {}}
        renamed = {name: key for name, key in sent.items() if name != key and key != _MULTIPLIER}
        message = worded(text, renamed, _REFUSED_KEYS)
        raise refused(message, param_of(text, sent, "hyperparameters")) from None


def _name_of(key: str) -> str:
    """Return the ALTO name for a hyperparameter in an OpenAI request."""
    return _NAMES.get(key) or JOB_ALIASES.get(key) or TASK_ALIASES.get(key, key)


_GENERATIONS, _DEFAULT_GENERATIONS = "num_generations", 8
_DEFAULT_PROMPTS = 4
"""Number of prompts in a step, if a request does not say."""

_ONLY_AUTO = {
    "eval_interval": "the time of evaluations is a share of a job's steps: use eval_steps",
    "eval_samples": "each evaluation generates the most likely completion of every validation row",
}
"""Hyperparameters of OpenAI's reinforcement method that ALTO has no number for, and why."""


def _of_reinforcement(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a job that learns from rewards, with ALTO's meaning of the batch size: OpenAI's
    counts prompts, ALTO's counts completions.

    Raises:
        ApiError: A value has no equivalent here.
    """
    found = {key: value for key, value in hyperparameters.items() if value is not None}
    for key, reason in _ONLY_AUTO.items():
        if (value := found.pop(key, _AUTO)) != _AUTO:
            raise refused(f"{key}: expected 'auto', found {quoted(value)}; {reason}", key)
    if (effort := found.pop("reasoning_effort", "default")) != "default":
        raise refused(
            f"reasoning_effort: expected 'default', found {quoted(effort)}; give rows with chat_template_kwargs, if "
            "the model's chat template has such an option",
            "reasoning_effort",
        )
    multiplier = found.pop("compute_multiplier", _AUTO)
    if multiplier != _AUTO:
        if _GENERATIONS in found:
            raise refused(
                f"hyperparameters: expected compute_multiplier or {_GENERATIONS}, found both; remove one",
                "hyperparameters",
                "conflicting_keys",
            )
        is_number = isinstance(multiplier, int | float) and not isinstance(multiplier, bool)
        if not (is_number and 0 < multiplier <= _LARGEST_COMPUTE):
            raise refused(
                f"compute_multiplier: expected 'auto' or a number above 0 and at most {_LARGEST_COMPUTE}, found "
                f"{quoted(multiplier)}; correct it",
                "compute_multiplier",
            )
        found[_GENERATIONS] = max(2, round(multiplier * _DEFAULT_GENERATIONS))
    if "search_space" in found or any(_name_of(key) == _BATCH and key != "batch_size" for key in found):
        return found
    counts = found.get(_GENERATIONS, _DEFAULT_GENERATIONS)
    counts = counts if isinstance(counts, list) else [counts]
    if not all(isinstance(count, int) and count > 0 for count in counts):
        return found  # the task's error says what is wrong
    factor = math.lcm(*counts)
    sizes = found.get("batch_size", _DEFAULT_PROMPTS)
    sizes = _AUTO_VALUES[_BATCH] if sizes == _AUTO else sizes
    if isinstance(sizes, list):
        found["batch_size"] = [_times(size, factor) for size in sizes]
    elif isinstance(sizes, Mapping):
        found["batch_size"] = {
            key: _times(sizes[key], factor) if key in ("min", "max") else sizes[key] for key in sizes
        }
    else:
        found["batch_size"] = _times(sizes, factor)
    return found


def _times(size: Any, factor: int) -> Any:
    return size * factor if isinstance(size, int | float) and not isinstance(size, bool) else size


def task_values(method: str, hyperparameters: Mapping[str, Any], *, seed: int | None) -> dict[str, Any]:
    """Return keys and values of a request's task, except its model, its rows and its rewards.

    Args:
        method: Type of the method, one of :data:`METHODS`.
        seed: Seed of the request; None leaves the seeds to ALTO.

    Raises:
        ApiError: A key is not allowed or given twice, or a value is invalid.
    """
    check_module_names(hyperparameters)
    if method == REINFORCEMENT:
        hyperparameters = _of_reinforcement(hyperparameters)
    values: dict[str, Any] = {"method": METHODS[method]}
    space: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for key, value in hyperparameters.items():
        if value is None:
            continue
        name = _name_of(key)
        if (other := spellings.setdefault(name, key)) != key:
            raise refused(
                f"hyperparameters: expected {other} or {key}, found both; remove one",
                "hyperparameters",
                "conflicting_keys",
            )
        if key == _MULTIPLIER:
            value = _rates(value)
        elif name in TASK_FIELDS:
            _check_allowed(key, name, value)
            values[name] = select_by_of(value) if name == "select_by" else value
            continue
        elif name in _REFUSED_JOB_KEYS:
            raise _not_allowed(key)
        value = _searched(name, value)
        if _is_searched(name, value):
            space[name] = value
        else:
            values[name] = value
    own = values.pop("search_space", None)
    if own is not None and space:
        raise refused(
            f"hyperparameters: expected search_space or lists of values, found both ({', '.join(space)}); put all "
            "into one of them",
            "hyperparameters",
            "conflicting_keys",
        )
    searched = space if own is None else own
    # If neither a learning rate nor ``search`` nor any searched value is given, the default space is searched.
    is_fixed = searched or any(key in values for key in ("learning_rate", "search"))
    values["search_space"] = searched if is_fixed else _AUTO
    if seed is not None:
        values.setdefault("seed", seed)
        values.setdefault("data_seed", seed)
        if isinstance(searched, Mapping) and "seed" in searched:
            del values["seed"]
    return values


def clone_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a clone's settings under ALTO's names; OpenAI's names are accepted as in requests for jobs.

    Raises:
        ApiError: A key is not allowed or given twice, or a value is invalid.
    """
    check_module_names(changes)
    found: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for key, value in changes.items():
        name = _name_of(key)
        if (other := spellings.setdefault(name, key)) != key:
            raise refused(f"changes: expected {other} or {key}, found both; remove one", "changes", "conflicting_keys")
        if name in _REFUSED_JOB_KEYS:
            raise _not_allowed(key, "changes")
        found[name] = _rate(value) if key == _MULTIPLIER else value
    return found


def multiplier_of(learning_rate: float) -> float:
    """Return the ``learning_rate_multiplier`` of a learning rate."""
    return float(f"{learning_rate / _USUAL_RATE:.6g}")


def _is_searched(name: str, value: Any) -> bool:
    """Return whether a value is a grid or a range, rather than a single value that is a list or a mapping itself."""
    if isinstance(value, list):
        return name not in _LISTS or all(isinstance(each, list) for each in value)
    return isinstance(value, Mapping) and name not in MAPPING_FIELDS and "min" in value


def _searched(name: str, value: Any) -> Any:
    """Return ``value``, with ``auto`` replaced by the usual values."""
    if value != _AUTO:
        return value
    if name == "learning_rate":
        least, most = float(f"{_USUAL_RATE / 10:.3g}"), float(f"{_USUAL_RATE * 10:.3g}")
        return {"min": least, "max": most, "log": True, "num": _NUM_RATES}
    if name in _AUTO_VALUES:
        return _AUTO_VALUES[name]
    raise refused(
        f"{quoted(name)}: expected a value or a list of values, found 'auto', which only n_epochs, batch_size, "
        f"learning_rate_multiplier, {', '.join(sorted(_AUTO_VALUES))} and learning_rate accept; give a value",
        "hyperparameters",
    )


def _rates(value: Any) -> Any:
    """Return learning rates for multipliers of the usual rate: for one number, a list or a range."""
    if value == _AUTO:
        return _AUTO
    if isinstance(value, Mapping) and "min" in value:
        return {**value, **{end: _rates([value[end]])[0] for end in ("min", "max") if end in value}}
    return [_rate(each) for each in value] if isinstance(value, list) else _rate(value)


def _rate(multiplier: Any) -> float:
    is_number = isinstance(multiplier, int | float) and not isinstance(multiplier, bool)
    if not (is_number and 0 < multiplier <= _LARGEST_MULTIPLIER):
        raise refused(
            f"{_MULTIPLIER}: expected a number above 0 and at most {_LARGEST_MULTIPLIER:g}, or, for a new job, 'auto' "
            f"or a list or a range of such numbers, found {quoted(multiplier)}; correct it",
            _MULTIPLIER,
        )
    return float(f"{multiplier * _USUAL_RATE:.6g}")


def _check_allowed(key: str, name: str, value: Any) -> None:
    if name not in ALLOWED_TASK_KEYS:
        raise _not_allowed(key)
    if name == "early_exit" and isinstance(value, Mapping):
        for inner in _REFUSED_EARLY_EXIT_KEYS.intersection(value):
            raise _not_allowed(f"early_exit.{inner}")


def _not_allowed(key: str, param: str = "hyperparameters") -> ApiError:
    return refused(
        f"{key}: expected settings of training and search, found a key that a service sets itself or does not allow; "
        "remove it",
        param,
        "not_allowed",
    )
