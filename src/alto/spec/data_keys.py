"""The keys of a task that name its base model and its data, and that control how rows become tokens.

A dataset is one, or a mixture of several sources, from which each job draws rows by its own weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

from pydantic import Field, field_validator

from alto.base import quoted
from alto.errors import SpecError
from alto.records import ProblemType
from alto.spec.keys import canonical_keys
from alto.spec.module_names import pairs_of
from alto.spec.validation import MAX_CHARS, SpecModel, check_path, is_finite_number, path_text

RowFormName = Literal[
    "auto",
    "messages",
    "sharegpt",
    "prompt_completion",
    "raw_prompt_completion",
    "alpaca",
    "text",
    "preference",
    "raw_preference",
    "openai_preference",
    "unpaired_preference",
    "text_classification",
]


_COLUMN_ROLES = (
    *("messages", "system", "prompt", "completion", "instruction", "input", "output", "history", "text", "text_pair"),
    *("chosen", "rejected", "preferred_output", "non_preferred_output", "label"),
    *("tools", "functions", "chat_template_kwargs"),
)
"""Roles of a dataset's columns: the keys of ``columns``."""


ROW_COLUMNS = frozenset({*_COLUMN_ROLES, "conversations", "question", "answer", "response", "sentence"})
"""Usual names of columns; rows are recognised by them."""


def check_columns(columns: object) -> dict[str, str]:
    """Check ``columns`` of a task or a source and return it as a dictionary."""
    if not isinstance(columns, Mapping) or not all(
        isinstance(item, str) and item for pair in columns.items() for item in pair
    ):
        raise ValueError(
            f"should map roles to names of the dataset's columns, found {quoted(columns)}. "
            "For example: {prompt: question, completion: solution}."
        )
    unknown = [role for role in columns if role not in _COLUMN_ROLES]
    if unknown:
        raise ValueError(
            f"should have roles as keys, found {quoted(unknown[0])}; roles are {', '.join(_COLUMN_ROLES)}. Write the "
            "role on the left, and the name of the dataset's column on the right."
        )
    if len(set(columns.values())) < len(columns):
        raise ValueError(
            f"should give every role a different column, found the same column for two roles: {quoted(dict(columns))}"
            ". Remove one of the two roles, or give it another column."
        )
    return dict(columns)


def label_names(value: object) -> tuple[str, ...]:
    """Check ``id2label`` of a task and return the names in order.

    Args:
        value: A list of names, or a mapping from the indices 0 to K - 1 to names.

    Raises:
        ValueError: ``value`` is neither, or two names are the same.
    """
    given: list[object] = list(value) if isinstance(value, list | tuple) else []
    if isinstance(value, Mapping):
        indices = {str(key): name for key, name in value.items()}
        given = [indices.get(str(index)) for index in range(len(value))]
    names = [name for name in given if isinstance(name, str) and name]
    if not names or len(set(names)) < len(given):
        raise ValueError(
            f"should give labels 0 to K - 1 different names, found {quoted(value)}. For example: {{0: negative, "
            "1: positive}; put names that look like numbers or truth values in quotes."
        )
    return tuple(names)


MIXTURE_WEIGHTS = "mixture_weights"
"""The field of a job that holds its mixture weights."""

Weights = tuple[tuple[str, float], ...]
"""The share of each source, by its name; the shares add up to 1."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MAX_SOURCES = 64
_ALIASES = {
    "dataset": "path",
    "split": "dataset_train_split",
    "test_split": "dataset_test_split",
    "config": "dataset_config",
    "format": "dataset_format",
}


class MixtureSource(SpecModel):
    """One source of a mixture, with the keys that a task without a mixture has for its dataset.

    Attributes:
        path: A file, a hub dataset or a preset.
        name: Name of the source in weights, events and reports; the default is the file's name without suffixes.
        weight: Weight of the source for jobs that set no ``mixture_weights``.
        dataset_config, dataset_train_split, dataset_test_split, dataset_format, columns, validation_dataset: Same as
            the task's keys.
    """

    path: str = Field(min_length=1, description="a file, a hub dataset or a preset")
    name: str = Field(min_length=1, max_length=40, description="name of the source")
    weight: float = Field(
        default=1.0, ge=0, le=1e6, description="weight of the source, if a job sets no mixture_weights"
    )
    dataset_config: str | None = Field(default=None, min_length=1, description="configuration of a hub dataset")
    dataset_train_split: str | None = Field(default=None, min_length=1, description="split to train on")
    dataset_test_split: str | None = Field(default=None, min_length=1, description="split with held-out rows")
    dataset_format: RowFormName | None = Field(
        default=None, description="format of the rows; by default that of the task"
    )
    columns: Mapping[str, str] = Field(default={}, description="names of the columns by role")
    validation_dataset: str | None = Field(default=None, min_length=1, description="validation rows")

    _accept_paths = field_validator("path", "validation_dataset", mode="before")(path_text)
    _check_paths = field_validator("path", "validation_dataset")(check_path)
    _check_columns = field_validator("columns", mode="before")(check_columns)

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(
                f"should be letters, digits, '.', '_' and '-', the first a letter or digit, found {quoted(value)}. "
                "Choose another name."
            )
        return value


def parse_sources(given: object) -> tuple[MixtureSource, ...]:
    """Return the sources of a task whose ``dataset`` is a list."""
    assert isinstance(given, list | tuple)
    if not 1 <= len(given) <= _MAX_SOURCES:
        raise SpecError(
            f"dataset should be one dataset, or a list of 1 to {_MAX_SOURCES} sources, found {len(given)}. For "
            "example: [{path: maths.jsonl, weight: 0.7}, {path: chat.jsonl, weight: 0.3}]."
        )
    sources = tuple(_parsed(item, index) for index, item in enumerate(given))
    names = [source.name for source in sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SpecError(f"dataset should give every source a different name, found {quoted(twice)} twice. Set 'name'.")
    if not any(source.weight for source in sources):
        raise SpecError("dataset should have a source with a weight above 0, found none. Raise one.")
    return sources


def _parsed(item: object, index: int) -> MixtureSource:
    where = f"dataset[{index}]"
    if isinstance(item, MixtureSource):
        return item
    if not isinstance(item, Mapping):
        raise SpecError(
            f"{where} should be a mapping with a path, found {quoted(item)}. For example: "
            "{path: maths.jsonl, weight: 0.7}."
        )
    values = canonical_keys(item, fields=tuple(MixtureSource.model_fields), aliases=_ALIASES, where=where)
    values.setdefault("name", default_name(values.get("path"))[:40])
    if isinstance(values.get("weight"), int) and not isinstance(values["weight"], bool):
        values["weight"] = float(values["weight"])
    try:
        return MixtureSource(**values)
    except SpecError as error:
        raise SpecError(f"In {where}: {error}") from None


def normalised(value: object) -> Weights | None:
    """Return weights by name, scaled so that they add up to 1; None stays.

    Args:
        value: A mapping of names to weights, or a list of such pairs.

    Raises:
        ValueError: ``value`` is neither, a weight is negative or not finite, or all are 0.
    """
    if value is None:
        return None
    pairs = pairs_of(value) or ()
    are_numbers = all(
        isinstance(name, str) and isinstance(weight, int | float) and not isinstance(weight, bool)
        for name, weight in pairs
    )
    if not pairs or not are_numbers or len(dict(pairs)) < len(pairs):
        raise ValueError(
            f"should map names of sources to weights, found {quoted(value)}. For example: {{maths: 0.7, chat: 0.3}}."
        )
    are_weights = all(is_finite_number(weight) and weight >= 0 for _, weight in pairs)
    total = sum(float(weight) for _, weight in pairs) if are_weights else 0.0
    if not 0 < total < math.inf:
        raise ValueError(
            f"should hold finite weights >= 0, at least one of them above 0, found {quoted(dict(pairs))}. Correct them."
        )
    if math.isclose(total, 1.0, rel_tol=1e-12):
        return tuple((name, float(weight)) for name, weight in pairs)
    return tuple((name, weight / total) for name, weight in pairs)


def ordered(weights: Weights, sources: Sequence[MixtureSource]) -> Weights:
    """Return the weights of a job in the order of its task's sources."""
    if not sources:
        raise SpecError(
            f"{MIXTURE_WEIGHTS} should be set only if 'dataset' is a list of sources, found one dataset. Remove the "
            "key."
        )
    by_name, expected = dict(weights), [source.name for source in sources]
    if by_name.keys() != set(expected):
        raise SpecError(
            f"{MIXTURE_WEIGHTS} should have a weight for every source ({', '.join(expected)}), found "
            f"{', '.join(map(quoted, by_name))}. Correct the names; 0 leaves a source out."
        )
    return tuple((name, by_name[name]) for name in expected)


TEMPLATE_NAME = "chat_template.jinja"
"""Name of the file with the chat template in the folder of an exported adapter. transformers uses the same name beside
a tokenizer."""

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
            f"found {quoted(value)}: {reason}. Correct the path, or give the template itself."
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
        test_dataset, test_split: Rows to test on, or the share of the dataset's rows set aside to test on. No job is
            trained on these rows or selected by them, so the test loss shows how good the best adapters are on new
            rows. If both are None, nothing is tested.
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

    _accept_paths = field_validator("model", "validation_dataset", "test_dataset", "chat_template", mode="before")(
        path_text
    )
    _check_paths = field_validator("model", "dataset", "validation_dataset", "test_dataset")(check_path)
    _check_columns = field_validator("columns", mode="before")(check_columns)

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

    @field_validator("dataset", mode="before")
    @classmethod
    def _check_dataset(cls, value: object) -> object:
        value = path_text(value)
        if isinstance(value, tuple) and value and all(isinstance(item, MixtureSource) for item in value):
            return value
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"(training rows) should be non-empty text, found {quoted(value)}. Give a path or a name, or a list "
                "of sources such as [{path: maths.jsonl, weight: 0.7}, {path: chat.jsonl, weight: 0.3}]."
            )
        if len(value) > MAX_CHARS:
            raise ValueError(f"should be text of at most {MAX_CHARS} characters, found {quoted(value)}. Shorten it.")
        return value

    @field_validator("id2label", mode="before")
    @classmethod
    def _list_names(cls, value: object) -> object:
        return None if value is None else label_names(value)

    @property
    def sources(self) -> tuple[MixtureSource, ...]:
        """The sources of a mixture; empty if there is only one dataset."""
        return () if isinstance(self.dataset, str) else self.dataset

    @property
    def dataset_name(self) -> str:
        """The dataset as text; for a mixture, the paths of all sources."""
        return " + ".join(source.path for source in self.sources) if self.sources else str(self.dataset)

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """Names of all datasets: files, hub datasets and presets."""
        of_sources = (name for source in self.sources for name in (source.path, source.validation_dataset))
        named = (self.dataset, self.validation_dataset, self.test_dataset, *of_sources)
        return tuple(name for name in named if isinstance(name, str))

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
