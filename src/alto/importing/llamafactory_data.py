"""LLaMA-Factory's datasets: entries of ``dataset_info.json``, read and written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alto.base import quoted, read_json
from alto.errors import SpecError, UnsupportedError
from alto.importing.draft import Draft, checked
from alto.importing.keys import ExportedJob
from alto.importing.sources import (
    ImportedSource,
    builder_of,
    message_form,
    put_sources,
    readable_path,
    report_split,
    tool_columns,
)
from alto.spec import Method

INFO = "dataset_info.json"
"""Name of the file that describes datasets."""

_MEDIA = ("images", "videos", "audios")
_KEYS = (
    *("hf_hub_url", "ms_hub_url", "om_hub_url", "file_name", "script_url", "formatting", "ranking", "subset", "split"),
    *("folder", "num_samples", "columns", "tags"),
)
_COLUMNS = (
    *("prompt", "query", "response", "history", "messages", "system", "tools", "chosen", "rejected", "kto_tag"),
    *_MEDIA,
)
_COLUMNS_OF_FORMS: Mapping[str, Mapping[str, str]] = {
    "messages": {"messages": "messages"},
    "sharegpt": {"messages": "messages"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "unpaired_preference": {"prompt": "prompt", "response": "completion", "kto_tag": "label"},
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "prompt_completion": {"prompt": "prompt", "response": "completion"},
    "raw_prompt_completion": {"prompt": "prompt", "response": "completion"},
}
"""Our names of columns by LLaMA-Factory's, for every form of rows."""

_EXTRA_COLUMNS = ("system", "tools")
"""Columns that rows of every form may have, under one name in both."""

_OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}
_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "messages": {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": _OPENAI_TAGS},
    "sharegpt": {"formatting": "sharegpt", "columns": {"messages": "conversations"}},
    "preference": {"ranking": True},
    "unpaired_preference": {},
    "alpaca": {"formatting": "alpaca"},
    "prompt_completion": {"formatting": "alpaca"},
    "raw_prompt_completion": {"formatting": "alpaca"},
}
"""Keys of a dataset that say the form of its rows."""

_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_ROLE_OF_TAG = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function",
    "system_tag": "system",
}


def read_datasets(draft: Draft, method: Method) -> None:
    """Read ``dataset``, ``eval_dataset``, ``dataset_dir``, and the keys for mixing several datasets."""
    if draft.replaces_dataset("dataset", "eval_dataset", "dataset_dir", "mix_strategy", "interleave_probs"):
        return
    names, held_out = (_data_names(draft.take(key)) for key in ("dataset", "eval_dataset"))
    strategy, probabilities = draft.take("mix_strategy", "concat"), draft.take("interleave_probs")
    folder = draft.take("dataset_dir", "data")
    if not names:
        return
    info, at = _read_info(draft, folder)
    sources = [_source(draft, info, at, name, method) for name in names]
    if strategy != "concat" and len(sources) > 1:
        # Without probabilities, LLaMA-Factory takes rows from all sources in turn.
        weights = _data_names(probabilities) or ["1"] * len(sources)
        sources = [_weighted(source, weight) for source, weight in zip(sources, weights, strict=False)]
        if probabilities is not None:
            draft.used("interleave_probs", "the weights of the mixture's sources")
    elif probabilities is not None:
        draft.not_needed("interleave_probs", "LLaMA-Factory uses it only if mix_strategy interleaves several datasets")
    put_sources(draft, sources, "dataset")
    if any(source.form == "alpaca" for source in sources):
        draft.used(
            "dataset", "dataset_format: alpaca: an input follows its instruction after a blank line, not a line break"
        )
    if len(held_out) > 1:
        draft.not_supported("eval_dataset", "only one dataset of validation rows can be named; set validation_dataset")
    elif held_out:
        _put_validation(draft, _source(draft, info, at, held_out[0], method), sources)


def _data_names(given: object) -> list[str]:
    listed = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else []
    return [str(name).strip() for name in listed]


def _weighted(source: ImportedSource, weight: str) -> ImportedSource:
    try:
        probability = float(weight)
    except ValueError:
        raise SpecError(f"interleave_probs: expected numbers, found {quoted(weight)}. Correct it.") from None
    return ImportedSource(
        path=source.path, form=source.form, columns=source.columns, config=source.config, weight=probability
    )


def _put_validation(draft: Draft, found: ImportedSource, sources: list[ImportedSource]) -> None:
    like = sources[0]
    if len(sources) == 1 and (found.form, found.columns) == (like.form, like.columns) and found.has_usual_split:
        draft.put("validation_dataset", found.path)
    else:
        draft.not_supported(
            "eval_dataset",
            "validation rows must have the form, the columns and the split 'train' of the training rows: convert them, "
            "and set validation_dataset",
        )


def _read_info(draft: Draft, folder: object) -> tuple[Mapping[str, Any] | None, Path]:
    """Return the contents of ``dataset_info.json`` and its folder; the contents are None if datasets have hub names."""
    if folder == "ONLINE":
        return None, draft.folders[0]
    if not isinstance(folder, str) or folder.startswith("REMOTE:"):
        raise UnsupportedError(
            f"dataset_dir: expected a local folder with a {INFO}, found {quoted(folder)}. Download the data, and set "
            "dataset_dir to the downloaded folder."
        )
    looked = [base / part for base in draft.folders for part in (Path(folder).expanduser(), Path())]
    at = next((path for path in looked if (path / INFO).is_file()), None)
    if at is None:
        raise SpecError(
            f"dataset_dir: no {INFO} in {' or '.join(dict.fromkeys(map(str, looked)))}. Correct dataset_dir, or run "
            "ALTO from the folder where you run LLaMA-Factory."
        )
    try:
        info = read_json(at / INFO)
    except (OSError, ValueError) as error:
        raise SpecError(f"{at / INFO}: expected a JSON object, found: {error}. Correct the file.") from None
    if not isinstance(info, Mapping):
        raise SpecError(f"{at / INFO}: expected a JSON object, found {quoted(info)}. Correct the file.")
    return info, at


def _source(draft: Draft, info: Mapping[str, Any] | None, at: Path, name: str, method: Method) -> ImportedSource:
    if info is None:
        return ImportedSource(path=name, form="alpaca")
    entry, where = info.get(name), f"the dataset {quoted(name)} of {at / INFO}"
    if not isinstance(entry, Mapping):
        raise SpecError(f"{where}: expected a mapping, found {quoted(entry)}. Correct the name, or add the dataset.")
    if entry.get("num_samples") is not None:
        draft.not_supported("num_samples", f"in {where}: set max_samples, which applies to every source")
    columns = entry.get("columns")
    if not isinstance(columns, Mapping | None):
        raise SpecError(f"{where}: expected columns that are a mapping, found {quoted(columns)}. Correct the file.")
    media = [key for key in _MEDIA if (columns or {}).get(key)]
    if media:
        raise UnsupportedError(
            f"{where}: expected rows of text, found a column of {media[0]}: ALTO trains text models. Name "
            "a different dataset."
        )
    form, roles = _form(entry, columns, where, method)
    for part, known in ((entry, _KEYS), (columns or {}, _COLUMNS), (entry.get("tags") or {}, _TAGS)):
        draft.report_unread(part, known, f"{INFO}[{name}]")
    source = ImportedSource(
        path=_path(draft, entry, at, where),
        form=form,
        columns=roles,
        config=entry.get("subset"),
        split=entry.get("split"),
    )
    report_split(draft, source, f"{INFO}[{name}].split")
    return source


def _path(draft: Draft, entry: Mapping[str, Any], at: Path, where: str) -> str:
    if isinstance(entry.get("hf_hub_url"), str):
        if entry.get("folder"):
            raise UnsupportedError(
                f"{where}: expected a whole hub dataset, found only its folder {quoted(entry['folder'])}. Download "
                "the file, and set file_name."
            )
        return str(entry["hf_hub_url"])
    file = entry.get("file_name")
    if not isinstance(file, str):
        raise UnsupportedError(
            f"{where}: expected file_name or hf_hub_url, found {quoted(dict(entry))}. Download the rows, and set "
            "file_name."
        )
    return readable_path(draft, os.path.abspath(at / file), where)


def _form(
    entry: Mapping[str, Any], columns: Mapping[str, Any] | None, where: str, method: Method
) -> tuple[str, dict[str, str]]:
    """Return form and columns of the rows; ``ranking`` indicates pairs, and ``kto_tag`` labelled replies."""
    formatting, named = entry.get("formatting", "alpaca"), dict(columns or {})
    is_pair, is_labelled = bool(entry.get("ranking")), bool(named.get("kto_tag"))
    if is_pair != bool(method.entry.is_paired) or is_labelled != method.entry.is_labelled:
        kind = "pairs" if is_pair else "labelled replies" if is_labelled else "replies"
        raise UnsupportedError(
            f"{where}: expected rows for method {method.name!r}, found {kind}. Name another dataset, or another stage."
        )
    if formatting in ("sharegpt", "openai"):
        form, roles = _conversation(entry, named, where, is_pair=is_pair, is_labelled=is_labelled)
    elif formatting == "alpaca":
        form, roles = _alpaca(columns, where, is_pair=is_pair, is_labelled=is_labelled)
    else:
        raise UnsupportedError(
            f"{where}: expected the formatting alpaca or sharegpt, found {quoted(formatting)}. Convert the rows."
        )
    return form, {**roles, **{role: named[role] for role in _EXTRA_COLUMNS if named.get(role)}}


def _conversation(
    entry: Mapping[str, Any], named: Mapping[str, Any], where: str, *, is_pair: bool, is_labelled: bool
) -> tuple[str, dict[str, str]]:
    given = checked(entry.get("tags") or {}, dict, f"tags of {where}")
    tags = {**_TAGS, **given}
    # If the file has tags, speakers without a tag do not occur in its rows.
    roles = {_ROLE_OF_TAG[tag]: [tags[tag]] for tag in (given or _TAGS) if tag in _ROLE_OF_TAG}
    form = message_form(tags["role_tag"], tags["content_tag"], roles, where)
    messages = named.get("messages", "conversations")
    if is_labelled:
        return "unpaired_preference", {"messages": messages, "label": named["kto_tag"]}
    if is_pair:
        return "preference", {"prompt": messages, **_pair(named)}
    return form, {"messages": messages}


def _alpaca(
    columns: Mapping[str, Any] | None, where: str, *, is_pair: bool, is_labelled: bool
) -> tuple[str, dict[str, str]]:
    if columns is None and not is_pair:
        return "alpaca", {}
    named = dict(columns or {"prompt": "instruction", "query": "input"})
    prompt, query, reply = (named.get(key) for key in ("prompt", "query", "response"))
    if is_pair:
        return "preference", _known({"prompt": prompt, "input": query, **_pair(named)})
    if prompt is None or reply is None:
        raise UnsupportedError(
            f"{where}: expected a column of prompts and one of responses, found {quoted(named)}. Name both in columns."
        )
    if is_labelled:
        if query is not None:
            raise UnsupportedError(
                f"{where}: expected one column of prompts for labelled replies, found {quoted(prompt)} and "
                f"{quoted(query)}. Join them in the rows."
            )
        return "unpaired_preference", _alto_columns("unpaired_preference", named)
    form = "prompt_completion" if query is None and named.get("history") is None else "alpaca"
    return form, _alto_columns(form, named)


def _alto_columns(form: str, named: Mapping[str, Any]) -> dict[str, str]:
    return _known({role: named.get(name) for name, role in _COLUMNS_OF_FORMS[form].items()})


def _pair(named: Mapping[str, Any]) -> dict[str, str]:
    return {role: named.get(role, role) for role in ("chosen", "rejected")}


def _known(columns: Mapping[str, str | None]) -> dict[str, str]:
    return {role: column for role, column in columns.items() if column is not None}


def written_dataset(job: ExportedJob) -> dict[str, Any]:
    """Return the entry of ``dataset_info.json``."""
    task, rows = job.task, job.rows
    if builder_of(task):
        source: dict[str, Any] = {"file_name": str(task.dataset)}
    else:
        source = {"hf_hub_url": str(task.dataset), "subset": task.dataset_config, "split": task.dataset_train_split}
    named = tool_columns("LLaMA-Factory", rows, _COLUMNS_OF_FORMS)
    named |= {role: rows.columns[role] for role in _EXTRA_COLUMNS if role in rows.columns}
    found: dict[str, Any] = {**source, **_LAYOUTS[rows.form]}
    found["columns"] = {**found.get("columns", {}), **named}
    return {key: value for key, value in found.items() if value is not None}
