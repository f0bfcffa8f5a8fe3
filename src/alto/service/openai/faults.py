"""Errors about hyperparameters in the words of the request: its keys as they were sent, and no keys that requests may
not have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from alto.spec.suggestions import nearest_key

__all__ = ["param_of", "worded"]

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
