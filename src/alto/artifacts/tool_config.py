"""Writing of a TRL, Axolotl or LLaMA-Factory configuration that trains the exported job.

:mod:`alto.importing` has the tables of these tools' keys, and reads the written file back. Every setting that is then
different is reported, so that no setting is lost silently.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from alto.artifacts.winner import Winner
from alto.base import quoted
from alto.errors import SpecError, UnsupportedError
from alto.importing import NAMED_TYPES, TOOLS, ExportedJob, Rows, check_dataset, import_file, imported_task
from alto.records import ForeignTool
from alto.results.best_config import reads_otherwise_in_trl, training_arguments
from alto.spec import DpoSettings, JobConfig, Task, write_yaml

_SHARED = (
    *("method", "dataset", "dataset_config", "dataset_train_split", "max_length", "train_on"),
    *("validation_dataset", "validation_split", "max_samples", "dtype", "load_in_4bit", "load_in_8bit"),
)
"""Keys of a task that affect training or validation of its jobs."""

_OF_FORMS = ("loss_type", "loss_weights", "rpo_alpha")
"""Settings of DPO that are compared as one weighted sum of loss forms."""


def write_tool_config(winner: Winner, tool: ForeignTool, fresh: Path, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Write the configuration of ``tool`` that trains the job of ``winner``.

    Args:
        fresh: The folder in which files are written.
        folder: The final path of ``fresh``.

    Returns:
        The command that starts training; and notices, as sentences, one for each setting that the tool does not have.
    """
    task, config = winner.task, winner.config
    if task is None or config is None or winner.rows is None:
        raise SpecError(
            f"config: expected a run, whose task names the model, the data and the method, found the adapter "
            f"{winner.adapter.folder}; name the run"
        )
    check_dataset(task)
    model, title = winner.base_model, TOOLS[tool].title
    trained = training_arguments(task, config.to_dict(), {"form": winner.rows.form})
    job = ExportedJob(task=task, config=config, model=model, rows=winner.rows, folder=fresh, trained=trained)
    written = TOOLS[tool].files(job)
    if written is None:
        raise UnsupportedError(
            f"config: expected a method that {title} trains from a configuration file, found {task.method!r}"
            f"{' with this loss_type' if task.method == 'cpo' else ''}; result.best_config has PEFT's and TRL's objects"
        )
    for name, text in written.others.items():
        (fresh / name).write_text(text, encoding="utf-8")
    file = fresh / f"{tool}.yaml"
    file.write_text(write_yaml(dict(written.keys)), encoding="utf-8")
    left = _left_out(task, config, winner.rows, file, tool)
    notes = tuple(f"{title} has no place for {line}." for line in left)
    comments = "".join(f"# {note}\n" for note in notes)
    keys = {key: _moved(value, str(fresh), str(folder)) for key, value in written.keys.items()}
    file.write_text(f"# Exported by alto from {winner.name}\n{comments}{write_yaml(keys)}", encoding="utf-8")
    return shlex.join([*written.command, str(folder / file.name)]), notes


def _moved(value: Any, old: str, new: str) -> Any:
    """Return ``value`` with the leading folder ``old`` replaced by ``new``; other values are returned unchanged."""
    return new + value.removeprefix(old) if isinstance(value, str) and value.startswith(old) else value


def _left_out(task: Task, config: JobConfig, rows: Rows, file: Path, tool: ForeignTool) -> list[str]:
    """Return the settings, as ``key: value``, that are lost when ``file`` is imported again."""
    method = [f"method={task.method}"] if tool == "trl" else []
    imported = imported_task([import_file(file, tool, method)], method).task
    ours, theirs = _comparable(config), _comparable(imported.jobs[0].config)
    differing = {key: value for key, value in ours.items() if value != theirs.get(key)}
    for key in _SHARED:
        value = getattr(task, key)
        usual = 1024 if key == "max_length" else Task.model_fields[key].default
        if (value or usual) != (getattr(imported, key) or usual):
            differing[key] = value
    if tool == "trl":
        differing |= _unread_by_trl(rows)
    elif tool == "axolotl" and rows.of_messages is False and rows.form not in NAMED_TYPES:
        differing["dataset_format"] = rows.form  # Axolotl's custom types do not use the chat template
    if task.base_model.chat_template != imported.base_model.chat_template:
        differing["chat_template"] = task.chat_template
    if task.adapter_dtype != "float32":
        differing["adapter_dtype"] = task.adapter_dtype
    if task.optim_state_dtype is not None:
        differing["optim_state_dtype"] = task.optim_state_dtype
    return [f"{key}: {quoted(value)}" for key, value in differing.items()]


def _unread_by_trl(rows: Rows) -> dict[str, Any]:
    """Return row settings that TRL cannot express: it knows only fixed column names, and joins texts directly."""
    if reads_otherwise_in_trl(rows.form, rows.of_messages):
        return {"dataset_format": rows.form}
    renamed = {role: column for role, column in rows.columns.items() if role != column}
    return {"columns": renamed} if renamed else {}


def _comparable(config: JobConfig) -> dict[str, Any]:
    """Return the settings of a job, in one spelling where several are possible."""
    found = config.to_dict()
    found["warmup_steps"] = found.pop("warmup_ratio", 0) or found.get("warmup_steps", 0)
    if isinstance(config.objective, DpoSettings):
        found |= dict.fromkeys(_OF_FORMS)
        found["loss_type"] = dict(config.objective.forms)
    return found
