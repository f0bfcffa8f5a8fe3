"""The keys of a task that name its base model and its data, and that control how rows become tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias

from pydantic import Field, field_validator

from alto.base import quoted
from alto.records import ProblemType
from alto.spec.data_forms import RowFormName, check_columns, label_names
from alto.spec.mixture import MixtureSource
from alto.spec.validation import MAX_CHARS, SpecModel, check_path

TEMPLATE_NAME = "chat_template.jinja"
"""Name of its file in the folder of an exported adapter; transformers uses the same name beside a tokenizer."""

TOOLS_TEMPLATE = "chatml-tools"
"""Name of ALTO's own template: ChatML turns, with tools and tool calls in the format of Hermes and Qwen 2.5."""

_MAX_BYTES = 2**20


def is_template_text(value: str) -> bool:
    """Return whether ``value`` is the text of a template and not a path: it contains a Jinja tag."""
    return "{{" in value or "{%" in value


def is_template_name(value: str) -> bool:
    """Return whether ``value`` names a template that is shipped with ALTO."""
    return value == TOOLS_TEMPLATE


def chat_template_text(value: str) -> str:
    """Return the text of the template that ``value`` is, or that it names: a shipped template or a file.

    Raises:
        ValueError: The file does not exist, cannot be read, or holds no template.
    """
    if is_template_text(value):
        return value
    if is_template_name(value):
        file = resources.files("alto").joinpath("assets", "chat-templates", f"{value}.jinja")
        return file.read_text(encoding="utf-8")
    path = Path(value).expanduser()
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(
                f"should be a file of at most {_MAX_BYTES} bytes, found {quoted(value)}. Name a smaller file."
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"should be a Jinja text with {{{{ … }}}} or {{% … %}}, a file with such a text, or {TOOLS_TEMPLATE}, "
            f"found {quoted(value)}: {reason}. Correct the path, or write the template itself."
        ) from None
    if not is_template_text(text):
        raise ValueError(
            "should be a file with a Jinja text that contains {{ … }} or {% … %}, found neither in "
            f"{quoted(value)}. Name a different file."
        )
    return text


OnBadRow: TypeAlias = Literal["error", "skip"]
"""The treatment of rows that cannot be used."""

TrainOn: TypeAlias = Literal["completion", "all", "last"]
"""The tokens of a row that are trained."""

TokenCacheName: TypeAlias = Literal["auto", "memory", "disk"]
"""The place where the tokens of the rows are kept."""

_MAX_TEMPLATE_CHARS = 2**18

MAX_SEED = 2**32 - 1
_MAX_NAME_CHARS = 100
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DATA_SUFFIXES = {".gz", ".zst", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt"}


class DataKeys(SpecModel):
    """The keys of a task that name its base model and its data.

    Attributes:
        name: A safe file name; the default is the dataset's file name without its suffixes.
        model: A model shipped with ALTO, a hub id, or a local folder.
        dataset: A file of training rows, a hub dataset (``owner/name``) or a preset such as ``gsm8k``; or a mixture,
            a list of several datasets with weights: ``[{path, weight, name}, …]``.
        dataset_config: Configuration of a hub dataset; None uses its only configuration, or the preset's.
        dataset_train_split, dataset_test_split: Splits of a hub dataset; None uses ``train`` and ``test``, or the
            preset's. The test split is for ``alto eval``: nothing is trained or selected on it.
        dataset_format: The form of the rows; ``auto`` recognises it by their columns.
        columns: The dataset's column for each role (``prompt``, ``completion``, ``messages``, …), if its names differ
            from the defaults.
        validation_dataset: Rows to validate on, named in the same way as ``dataset``.
        validation_split: Share of the dataset's rows set aside to validate on. If this key and ``validation_dataset``
            are both None, the dataset's own validation rows are used, or else a tenth of its rows.
        test_dataset, test_split: Rows to test on, or the share of the dataset's rows set aside to test on. Nothing is
            trained on them or selected by them, so the test loss of the best adapters is what a user can expect. If
            both are None, nothing is tested.
        test_jobs: The jobs whose new best adapters are tested. ``auto`` tests the leading job, so that the winner is
            tested in the end; if a metric, answers or means over seeds choose the winner, it tests every job. ``all``
            always tests every job.
        max_samples: Use only this many rows of the dataset, or of each source of a mixture.
        data_seed: Seed of the split and of the sampled values of the search space.
        max_length: Tokens at which a row is truncated; the number of truncated rows is reported before training starts.
            None uses the value of a preset, and 1024 for any other dataset. Rows are always truncated to the model's
            maximum number of positions.
        train_on: The tokens of a row that are trained: ``completion``, all replies of the assistant; ``last``, only the
            last reply; ``all``, the whole text. For preference pairs, only replies are trained.
        chat_template: A chat template that replaces the tokenizer's own: a Jinja text, a file that holds one, or
            ``chatml-tools``, ALTO's own template with tool calls. It is written beside the best adapter as
            ``chat_template.jinja``.
        problem_type: The problem that a classification head learns, as transformers names it. None derives it:
            ``regression`` with method ``regression``; else multi-label if the labels of a row are a list, and
            single-label if not.
        num_labels: Number of labels; None counts the labels of the rows.
        id2label: Names of the labels in the order of the head's outputs, as a list or a mapping from their indices.
            None uses the sorted names of the rows' labels; numbers are named ``LABEL_0`` and so on.
        on_bad_row: The treatment of rows that cannot be used. ``error`` lists every fault once, with the places of its
            rows, and counts every kind; ``skip`` leaves the rows out and reports their number before training. If all
            rows are bad, it is always an error.
        token_cache: The place where tokens are kept: in ``memory``; or on ``disk``, in files that later runs and other
            processes reuse, with only a bounded part in memory. ``auto`` is ``disk`` if the texts of the task have
            256 MiB or more, and already from 4 MiB if the cache can be written; but rows with labels for a
            classification head are kept in memory. Tokens, splits and the order of rows are the same either way.
    """

    name: str = Field(description="name of the task and its run")
    model: str = Field(min_length=1, description="base model: a shipped name, a hub id or a folder")
    dataset: str | tuple[MixtureSource, ...] = Field(min_length=1, description="training rows")
    dataset_config: str | None = Field(default=None, min_length=1, description="configuration of a hub dataset")
    dataset_train_split: str | None = Field(default=None, min_length=1, description="split to train on")
    dataset_test_split: str | None = Field(default=None, min_length=1, description="split with held-out rows")
    dataset_format: RowFormName = Field(default="auto", description="format of the rows")
    columns: Mapping[str, str] = Field(default={}, description="names of the columns by role")
    validation_dataset: str | None = Field(default=None, min_length=1, description="validation rows")
    validation_split: float | None = Field(
        default=None, gt=0, lt=1, description="share of the rows set aside for validation"
    )
    test_dataset: str | None = Field(default=None, min_length=1, description="test rows")
    test_split: float | None = Field(default=None, gt=0, lt=1, description="share of the rows set aside for tests")
    test_jobs: Literal["auto", "all"] = Field(default="auto", description="jobs whose best adapters are tested")
    max_samples: int | None = Field(default=None, ge=1, le=10**9, description="number of rows to use")
    data_seed: int = Field(default=42, ge=0, le=MAX_SEED, description="seed of the split and of sampled values")
    max_length: int | None = Field(default=None, ge=1, le=2**20, description="maximum number of tokens in a row")
    train_on: TrainOn = Field(default="completion", description="which tokens of a row are trained")
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        max_length=_MAX_TEMPLATE_CHARS,
        description="chat template that replaces the tokenizer's own",
    )
    problem_type: ProblemType | None = Field(default=None, description="problem that a classification head learns")
    num_labels: int | None = Field(default=None, ge=1, le=2**16, description="number of labels")
    id2label: tuple[str, ...] | None = Field(default=None, description="names of the labels by index")
    on_bad_row: OnBadRow = Field(default="error", description="how rows that cannot be used are treated")
    token_cache: TokenCacheName = Field(default="auto", description="where the tokens of the rows are kept")

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if _SAFE_NAME.fullmatch(name) is None or len(name) > _MAX_NAME_CHARS:
            raise ValueError(
                f"should be a file name of at most {_MAX_NAME_CHARS} letters, digits, '.', '_' and '-', the first a "
                f"letter or digit, found {quoted(name)}. Choose another name."
            )
        return name

    @field_validator("chat_template")
    @classmethod
    def _check_chat_template(cls, value: str | None) -> str | None:
        if value is not None:
            chat_template_text(value)
        return value

    @field_validator("model", "validation_dataset", "test_dataset", "chat_template", mode="before")
    @classmethod
    def _accept_paths(cls, value: object) -> object:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("dataset", mode="before")
    @classmethod
    def _check_dataset(cls, value: object) -> object:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(value, tuple) and value and all(isinstance(item, MixtureSource) for item in value):
            return value
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"(training rows) should be non-empty text, found {quoted(value)}. Write a path or a name, or a list "
                "of sources such as [{path: maths.jsonl, weight: 0.7}, {path: chat.jsonl, weight: 0.3}]."
            )
        if len(value) > MAX_CHARS:
            raise ValueError(f"should be text of at most {MAX_CHARS} characters, found {quoted(value)}. Shorten it.")
        return value

    @field_validator("model", "dataset", "validation_dataset", "test_dataset")
    @classmethod
    def _check_can_be_a_path(cls, value: Any) -> Any:
        if isinstance(value, str):
            check_path(value)
        return value

    @field_validator("id2label", mode="before")
    @classmethod
    def _list_names(cls, value: object) -> object:
        return None if value is None else label_names(value)

    @field_validator("columns", mode="before")
    @classmethod
    def _check_columns(cls, columns: object) -> object:
        return check_columns(columns)

    @property
    def sources(self) -> tuple[MixtureSource, ...]:
        """The sources of a mixture; empty if there is only one dataset."""
        return () if isinstance(self.dataset, str) else self.dataset

    @property
    def dataset_name(self) -> str:
        """The dataset as text; for a mixture, the paths of all sources."""
        return " + ".join(source.path for source in self.sources) if self.sources else str(self.dataset)

    def of_source(self, source: MixtureSource) -> DataKeys:
        """Return the keys for the rows of one source: the source's own keys, completed by those of the task."""
        own = source.model_dump(exclude={"path", "name", "weight"})
        if own["dataset_format"] is None:
            del own["dataset_format"]
        kept = {key: getattr(self, key) for key in DataKeys.model_fields if key not in (*own, "test_dataset")}
        return DataKeys(**(kept | own | {"dataset": source.path}))


def default_name(dataset: object) -> str:
    """Return a safe name made from the dataset's name: ``data/my train.jsonl.gz`` becomes ``my-train``."""
    if isinstance(dataset, list | tuple):
        paths = [item.get("path") if isinstance(item, Mapping) else getattr(item, "path", item) for item in dataset]
        return "-".join(map(default_name, paths))[:_MAX_NAME_CHARS] or "task"
    path = PurePosixPath(str(dataset).replace("\\", "/"))
    while path.suffix.lower() in _DATA_SUFFIXES:
        path = path.with_suffix("")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).lstrip("._-").rstrip("-")
    return name[:_MAX_NAME_CHARS] or "task"
