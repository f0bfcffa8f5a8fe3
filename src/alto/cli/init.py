"""``alto init``: a first task file for a dataset and a base model."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

import typer

from alto.base import replace_file
from alto.cli.options import DEFAULT_MODEL, complete_task_key
from alto.errors import DataFormatError, SpecError
from alto.records.data import UNREAD_COLUMNS
from alto.spec import (
    JOB_ALIASES,
    TASK_ALIASES,
    JobConfig,
    Task,
    build_task,
    default_name,
    find_method,
    overridden,
    read_yaml,
    usual_learning_rate,
    write_yaml,
)

if TYPE_CHECKING:
    from alto.records import DataPreview, DataSurvey

GoalName: TypeAlias = Literal["reply", "prefer", "rate", "reward", "classify", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """An aim of training in plain words.

    Attributes:
        meaning: Completes "The model learns to …".
        roles: Roles of the columns that its rows need.
    """

    method: str
    meaning: str
    roles: tuple[str, ...]


GOALS: Mapping[GoalName, Goal] = {
    "reply": Goal(method="sft", meaning="reply as the rows do", roles=("prompt", "completion")),
    "prefer": Goal(method="dpo", meaning="prefer the better of two replies", roles=("prompt", "chosen", "rejected")),
    "rate": Goal(
        method="kto",
        meaning="give replies like those marked good, not like those marked bad",
        roles=("prompt", "completion", "label"),
    ),
    "reward": Goal(
        method="grpo",
        meaning="give answers that earn a reward, by trying several",
        roles=("prompt", "completion"),
    ),
    "classify": Goal(method="classification", meaning="sort texts into classes", roles=("text", "label")),
    "score": Goal(method="regression", meaning="predict numbers from texts", roles=("text", "label")),
}

_COMMENTS: Mapping[str, str] = {
    "name": "names the folder of a run: runs/{name}-<date>",
    "model": "the frozen base model: a Hugging Face id, a local folder, or alto-tiny",
    "columns": "which column of the dataset has which role",
    "validation_dataset": "never trained on; all configurations are compared on these rows",
    "test_dataset": "never used to train or to choose; alto eval measures the winner on these rows",
    "num_train_epochs": "how often a configuration sees every row",
    "lora_alpha": "strength of an adapter",
    "beta": "how strongly an adapter is kept near the base model",
    "learning_rate": "size of a step",
    "r": "rank: the size of an adapter",
    "per_device_train_batch_size": "rows per training step",
    "num_generations": "answers to each prompt, which are compared",
    "max_completion_length": "tokens of an answer at most",
}
_REWARDS: Mapping[str, str] = {
    "numeric": "1 if the last number of an answer is that of the row's reply, else 0",
    "json": "1 if the JSON in an answer is that of the row's reply, else 0",
    "tool_call": "1 if an answer calls the tools that the row's reply calls, else 0",
    "exact": "1 if an answer is the row's reply, else 0",
    "similarity": "from 0 to 1, how similar an answer is to the row's reply",
}
"""Comments on built-in scorers."""

_COLUMN = 38
"""Column of the comments, if the line is not longer."""

_TYPICAL_HIDDEN_SIZE = 2000
_LORA_ALPHA = 32
"""The value with which usual learning rates suit every rank."""

_FEW_ROWS, _MANY_ROWS = 2_000, 20_000
_LENGTHS = (1024, 2048, 4096)


def init(
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help="The rows to learn from: a file, a hub dataset or a preset.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Base model: a hub id, a local folder, or alto-tiny.")
    ] = None,
    goal: Annotated[
        GoalName | None,
        typer.Option(
            "--goal",
            help="What the model should learn: reply as the rows do, prefer the better of two replies, rate replies "
            "as good or bad, give answers that earn a reward, classify texts, or score them with numbers; by default "
            "what the columns suggest.",
        ),
    ] = None,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="Task file to write.")] = Path("task.yaml"),
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Write this key too, or instead: 'columns={prompt: request, completion: reply}'.",
            autocompletion=complete_task_key,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Look at DATA, and write a task file with comments for it: the method, a validation split, and a search space.

    On a terminal, ask for what is not given. Nothing is downloaded, except rows of a hub dataset.
    """
    if to.exists() and not force:
        raise SpecError(f"--to: expected a new file, found {to}. Name a different file, or replace it with --force.")
    given = {_canonical(key): value for key, value in overridden({}, overrides or ()).items()}
    data = data or _ask("Rows to learn from (a file, a hub dataset or a preset)", "DATA")
    typer.echo(f"reading {data}", err=True)  # the imports may take long
    from alto.engine.survey import count_labels, fitting_reward, look_at, survey_data

    names = {"dataset": data, "model": model or DEFAULT_MODEL}
    survey = survey_data(Task(**_about_data(names | given)))
    model = model or _ask("Base model (a hub id, a local folder, or alto-tiny)", "--model", DEFAULT_MODEL)
    if not survey.methods and "columns" not in given:
        if not _can_ask():
            raise DataFormatError(_unknown_columns(data, survey, goal))
        typer.echo(f"The rows have the columns {', '.join(survey.columns)}.")
        goal = goal or _ask_goal(get_args(GoalName))
        roles = GOALS[goal].roles
        given["columns"] = {role: _ask(f"Column with the {role}", "--set columns") for role in roles}
        survey = survey_data(Task(**_about_data(names | given)))
    method = given.get("method") or _method(survey, goal)
    values = {**names, "model": model, "method": method, **given}
    if find_method(method).entry.generates and "reward_funcs" not in values:
        values["reward_funcs"] = [fitting_reward(Task(**_about_data(values)))]
    typer.echo(f"{data}: {survey.num_rows:,} rows, {_form(survey, values['method'])}")
    counts: Counter[str] = Counter()
    if values["method"] == "classification":
        counts = sum(count_labels(_without_limit(values)), counts)
        typer.echo(f"labels: {_listed(counts)}")
    values |= _validation(values, survey, counts)
    if find_method(values["method"]).entry.problem_types:
        values |= _test(values, survey, counts)
    if _is_unbalanced(counts) and not {"metric", "select_by"} & values.keys():
        values["metric"] = "macro_f1"
    if few := _few(count_labels(_without_limit(values))[1]) if counts else {}:
        more = ", or raise validation_split" if "validation_split" in values else ""
        typer.echo(f"Labels with few validation rows: {_listed(few)}. Chance decides their scores; add rows{more}.")
    seen = look_at(_without_limit(values))
    for note in () if seen is None else seen[0].notes:
        if note.startswith(UNREAD_COLUMNS):
            typer.echo(note)
    chosen = {key: value for key, value in _defaults(values, survey, seen).items() if key not in values}
    values |= chosen
    text = _text(_beside(to.parent, values), {**_facts(survey, values, seen), **_facts_of_rates(chosen)})
    task = Task(**{**read_yaml(text), **{key: values[key] for key in _PATHS if key in values}})
    _write(to, text)
    if "lora_alpha" in chosen:
        typer.echo(
            f"lora_alpha: {_LORA_ALPHA} for every rank, as the learning rates expect; without this key it is 2*r"
        )
    if seen is None:
        typer.echo(f"The tokens of the rows are not counted: {model} is not on this machine; alto plan downloads it.")
    jobs = f"{len(task.jobs)} {'configuration' if len(task.jobs) == 1 else 'configurations'}"
    file = shlex.quote(str(to))
    typer.echo(f"{to}: {jobs} of method {task.method} on {task.model}. Next:")
    typer.echo(f"  alto plan {file}    # memory and time; trains nothing\n  alto tune {file}    # trains")


def _without_limit(values: Mapping[str, Any]) -> Task:
    """Return a task whose rows are not cut."""
    return build_task({"max_length": 2**20, **values})


def _canonical(key: str) -> str:
    return TASK_ALIASES.get(key, JOB_ALIASES.get(key, key))


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _ask(question: str, parameter: str, default: str | None = None) -> str:
    """Ask for a parameter that was not given.

    Raises:
        typer.BadParameter: The standard input is not a terminal.
    """
    if not _can_ask():
        raise typer.BadParameter(
            "expected a value, found none, and no terminal to ask for it; give it on the command line",
            param_hint=parameter,
        )
    answer: str = typer.prompt(question, default=default)
    return answer.strip()


def _ask_goal(names: Sequence[GoalName]) -> GoalName:
    typer.echo("What should the model learn?")
    for name in names:
        typer.echo(f"  {name:9} to {GOALS[name].meaning}")
    while (answer := _ask("Goal", "--goal", names[0])) not in names:
        typer.echo(f"Expected one of {', '.join(names)}, found {answer}.")
    return next(name for name in names if name == answer)


def _unknown_columns(data: str, survey: DataSurvey, goal: GoalName | None) -> str:
    """Return the error for columns whose names say no form, with a command for each likely goal."""
    commands = []
    for name in ("reply", "classify") if goal is None else (goal,):
        roles, columns = GOALS[name].roles, survey.columns
        named = columns if len(columns) == len(roles) else [f"COLUMN{number}" for number in range(1, len(roles) + 1)]
        pairs = ", ".join(f"{role}: {column}" for role, column in zip(roles, named, strict=True))
        setting = shlex.quote(f"columns={{{pairs}}}")
        commands.append(f"to {GOALS[name].meaning}: alto init {shlex.quote(data)} --goal {name} --set {setting}")
    return (
        f"columns: expected names that say what they hold, such as prompt and completion, found "
        f"{', '.join(survey.columns)}. Name them, {'; '.join(commands)}"
    )


def _method(survey: DataSurvey, goal: GoalName | None) -> str:
    """Return the method for the goal; without a goal, ask if several methods fit, or else take the likeliest."""
    if goal is None:
        fitting = [name for method in survey.methods for name in GOALS if GOALS[name].method == method]
        if not fitting:
            return "sft"  # the error about its columns lists all forms
        goal = _ask_goal(fitting) if len(fitting) > 1 and _can_ask() else fitting[0]
        if len(fitting) > 1:
            typer.echo(
                f"goal: {goal}; the columns also fit --goal {' or '.join(name for name in fitting if name != goal)}"
            )
    return GOALS[goal].method


def _about_data(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that decide how rows are read, for a task of the default method."""
    return {key: values[key] for key in ("dataset", "model", "columns", "dataset_format") if key in values}


def _form(survey: DataSurvey, method: str) -> str:
    form = survey.methods.get("sft" if find_method(method).entry.generates else method)
    return form or f"columns {', '.join(survey.columns)}"


# The values.

_SPLIT_NAMES = ("validation", "valid", "val", "dev")


def _validation(values: Mapping[str, Any], survey: DataSurvey, counts: Counter[str]) -> dict[str, Any]:
    """Return the rows to validate on: a file beside the training file, the dataset's own split, or a share of it."""
    if survey.has_validation or {"validation_dataset", "validation_split"} & values.keys():
        return {}
    if file := _beside_training(values["dataset"], _SPLIT_NAMES):
        return {"validation_dataset": file}
    return {"validation_split": _share(survey.num_rows, counts, most=0.25)}


def _test(values: Mapping[str, Any], survey: DataSurvey, counts: Counter[str]) -> dict[str, Any]:
    """Return the rows to test on, found as those to validate on are."""
    if survey.has_test or {"test_dataset", "test_split"} & values.keys():
        return {}
    if file := _beside_training(values["dataset"], ("test",)):
        return {"test_dataset": file}
    return {"test_split": _share(survey.num_rows, counts, most=0.2)}


def _beside_training(dataset: str, names: Sequence[str]) -> str:
    """Return the file of the first of ``names`` that is beside a file of training rows; empty if there is none."""
    file = Path(dataset).expanduser()
    stem, dot, endings = file.name.partition(".")
    if stem.lower() not in ("train", "training") or not file.is_file():
        return ""
    others = (file.with_name(f"{name}{dot}{endings}") for name in names)
    return next((str(other) for other in others if other.is_file()), "")


def _share(num_rows: int, counts: Counter[str], *, most: float) -> float:
    """Return the share of rows to set aside, with a few rows of the rarest label if ``most`` allows."""
    # Few rows compare configurations by chance, and thousands add nothing.
    wanted = min(max(num_rows / 10, 50), 1000) / max(num_rows, 1)
    rarest = min(counts.values(), default=0)
    return float(f"{min(max(wanted, 2 * _FEW_OF_LABEL / rarest if rarest else 0), most):.2g}")


# Labels.

_FEW_OF_LABEL = 5
_MOST_LABELS = 12
_UNBALANCED = 3


def _is_unbalanced(counts: Mapping[str, int]) -> bool:
    """Return whether one label has so many more rows than another that accuracy hides the rare one."""
    return bool(counts) and max(counts.values()) >= _UNBALANCED * min(counts.values())


def _few(counts: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count < _FEW_OF_LABEL}


def _listed(counts: Mapping[str, int]) -> str:
    """Return labels with their numbers of rows, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    shown = [f"{name!r}: {count:,}" for name, count in ordered[:_MOST_LABELS]]
    return ", ".join(shown) + (f", and {len(ordered) - len(shown)} more" if len(ordered) > len(shown) else "")


def _defaults(values: Mapping[str, Any], survey: DataSurvey, seen: tuple[DataPreview, int] | None) -> dict[str, Any]:
    """Return what else a first task sets, in the order of the file."""
    method = find_method(values["method"])
    compares, generates = method.compares_replies, method.entry.generates
    usual = usual_learning_rate(_TYPICAL_HIDDEN_SIZE if seen is None else seen[1], compares_replies=compares)
    longest = 0 if seen is None else seen[0].row_tokens[2]
    last_length = max(_LENGTHS[-1], longest) if generates else _LENGTHS[-1]  # rewards compare with whole replies
    num_epochs = 3 if survey.num_rows < _FEW_ROWS and not compares else 1 if survey.num_rows >= _MANY_ROWS else 2
    space: dict[str, list[Any]] = {
        "learning_rate": [float(f"{factor * usual:.1e}") for factor in (1 / 3, 1, 3)],
        "r": [8, 32],
    }
    if generates:
        space["num_generations"] = [4, 8]
    else:
        space["per_device_train_batch_size"] = [2, 8] if survey.num_rows < _FEW_ROWS else [4, 16]
    return {
        "name": default_name(values["dataset"]),
        "max_length": next((length for length in _LENGTHS if longest <= length), last_length),
        "num_train_epochs": num_epochs,
        **({"per_device_train_batch_size": 32, "max_completion_length": 256} if generates else {}),
        **({} if {"learning_rate", "search_space"} & values.keys() else {"lora_alpha": _LORA_ALPHA}),
        **({"beta": 0.1} if "beta" in method.fields and not generates else {}),
        "search_space": {key: value for key, value in space.items() if key not in values},
    }


def _facts(survey: DataSurvey, values: Mapping[str, Any], seen: tuple[DataPreview, int] | None) -> dict[str, str]:
    """Return comments with facts about the dataset, by key."""
    share = values.get("validation_split")
    set_aside = "" if share is None else f" ({max(1, round(share * survey.num_rows)):,} rows)"
    lengths = ""
    if seen is not None:
        least, median, most = seen[0].row_tokens
        lengths = f"; these have {least:,} to {most:,} tokens, half of them at most {median:,.0f}"
    facts = {
        "method": f"learns to {_meaning(values['method'])}",
        "dataset": f"{survey.num_rows:,} rows, {_form(survey, values['method'])}",
        "validation_split": f"share{set_aside} never trained on; all configurations are compared on it",
        "test_split": "share never used to train or to choose; alto eval measures the winner on it",
        "metric": "mean F1 of the labels, so that a rare one counts as much as a frequent one; or accuracy",
        "max_length": f"longer rows are cut{lengths}",
    }
    if find_method(values["method"]).entry.generates:
        facts["max_length"] = f"longer rows are refused{lengths}"
        facts["per_device_train_batch_size"] = "answers per training step, to all prompts together"
        first = values["reward_funcs"][0]
        if isinstance(first, str) and first in _REWARDS:
            facts["reward_funcs"] = _REWARDS[first]
    return facts


def _facts_of_rates(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Return comments on learning rates and ``lora_alpha`` that the user has not set."""
    facts = {}
    if "learning_rate" in chosen.get("search_space", {}):
        facts["learning_rate"] = f"{_COMMENTS['learning_rate']}; the middle one is usual for this model and method"
    if "lora_alpha" in chosen:
        facts["lora_alpha"] = f"{_COMMENTS['lora_alpha']}; {_LORA_ALPHA} suits every rank below; 2*r without this key"
    return facts


def _meaning(method: str) -> str:
    others = {"orpo": "prefer", "cpo": "prefer"}
    return next(goal.meaning for name, goal in GOALS.items() if goal.method == method or others.get(method) == name)


# The file.

_PATHS = ("model", "dataset", "validation_dataset", "test_dataset")
_GROUPS = (
    ("name", "model", "method"),
    ("dataset", "columns", "validation_dataset", "validation_split", "test_dataset", "test_split", "max_length"),
)


def _beside(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with paths as they are written into a file in ``folder``."""
    root = folder.resolve()
    found = dict(values)
    for key in _PATHS:
        path = Path(str(values.get(key) or "")).expanduser()
        is_there = path.is_dir() if key == "model" else path.is_file()
        if not values.get(key) or not is_there:
            continue
        path = path.resolve()
        inside = path.is_relative_to(root)
        written = path.relative_to(root).as_posix() if inside else str(path)
        found[key] = f"./{written}" if inside and key == "model" else written
    return found


def _text(values: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    """Return the text of the task file."""
    grouped = {key for group in _GROUPS for key in group}
    groups = [*_GROUPS, [key for key in values if key not in grouped and key != "search_space"]]
    blocks = ["# A task for ALTO, written by alto init. Every key may be changed; docs/reference.md explains all keys."]
    comments = {**{key: text.format(**values) for key, text in _COMMENTS.items()}, **facts}
    for group in groups:
        lines = [_line(key, values[key], comments) for key in group if key in values]
        blocks.append("\n".join(lines))
    space = values["search_space"]
    if isinstance(space, Mapping):
        counts = [len(value) for value in space.values() if isinstance(value, list)]
        product = f": {' x '.join(map(str, counts))}" if len(counts) == len(space) > 1 else ""
        comment = f"every combination is a configuration{product}"
        lines = [_commented("search_space:", comment), *(_line(key, space[key], comments, "  ") for key in space)]
        blocks.append("\n".join(lines))
    else:
        blocks.append(_line("search_space", space, comments))
    return "\n\n".join(blocks) + "\n"


def _line(key: str, value: object, comments: Mapping[str, str], indent: str = "") -> str:
    written = write_yaml({key: value}).rstrip("\n")
    if "\n" in written:
        written = f"{key}: {_flow(value)}"
    name = _canonical(key)
    return _commented(indent + written, comments.get(name) or _description(name))


def _flow(value: object) -> str:
    """Return ``value`` on one line; rates are written as people do: 3.0e-4."""
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, float) and 0 < value < 1:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}" if float(f"{value:.1e}") == value else repr(value)
    return json.dumps(value, ensure_ascii=False)


def _commented(written: str, comment: str) -> str:
    return f"{written:{_COLUMN}}  # {comment}"


def _description(key: str) -> str:
    fields = {**Task.model_fields, **JobConfig.model_fields}
    return (fields[key].description if key in fields else None) or "see docs/reference.md"


def _write(file: Path, text: str) -> None:
    """Write the file completely or not at all.

    Raises:
        SpecError: It cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, text)
    except OSError as error:
        raise SpecError(
            f"--to: expected a file that can be written, found {file}: {error}. Name a different file."
        ) from None
