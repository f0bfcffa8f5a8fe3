"""The tokenised rows of a task, shared by all its jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

from alto.data.dataset import VIEWS, EncodedDataset, Unread, joined
from alto.data.encode import closing_text, tools_remedy
from alto.data.formats import Layout
from alto.data.messages import Conversation
from alto.data.rows import RowLimit, counted, listed, quoted
from alto.data.template import PARALLEL_CALLS
from alto.errors import DataError
from alto.records.data import UNREAD_COLUMNS

FEW_ROWS = 10
"""Number of validation rows below which their loss is mostly chance."""

_MAX_LABELS = 12

MUCH_CUT = 0.5
"""Share of truncated rows above which ``max_length`` is probably a mistake."""


def reading_notes(num_validation: int, num_repeated: int) -> list[str]:
    """Return notices about the rows before tokenisation.

    Args:
        num_repeated: Number of validation rows that are also training rows.
    """
    notes = []
    if num_repeated:
        notes.append(
            f"{counted(num_repeated, 'validation row')} of {num_validation} also in the training data: the validation "
            "loss looks better than it is, and overfitting is seen late."
        )
    if num_validation < FEW_ROWS:
        notes.append(
            f"The validation data is only {counted(num_validation, 'row')}: configurations are ranked by little more "
            "than chance; raise validation_split or name a validation_dataset."
        )
    return notes


def mixture_notes(train: EncodedDataset, validation: EncodedDataset) -> list[str]:
    """Return a notice about the sources and the epoch of a mixture; empty for a single dataset."""
    if not train.sources:
        return []
    of_validation = dict(validation.sources)
    sources = ", ".join(
        f"{name} ({count:,} rows" + (f", {of_validation[name]:,} for validation)" if name in of_validation else ")")
        for name, count in train.sources
    )
    return [f"A mixture of {sources}. An epoch has {len(train):,} rows, drawn by the weights of each job."]


def label_notes(train: EncodedDataset, validation: EncodedDataset) -> list[str]:
    """Return notices about the labels of texts: how many rows have each label, which labels have few validation rows,
    and which labels no row has.

    For a regression, they name the outputs that are equal in all rows. Empty for rows without labels."""
    if train.label_set is None:
        return []
    if train.label_set.problem_type == "regression":
        return _number_notes(train, validation)
    counts, of_validation = _label_counts(train), _label_counts(validation)
    names = train.label_set.names
    shown = [f"{quoted(name)[1:-1]} ({counts[name]:,} and {of_validation[name]:,})" for name in names[:_MAX_LABELS]]
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    few = [name for name in names if 0 < of_validation[name] < FEW_ROWS]
    rests = f" F1 rests on fewer than ten validation rows for {listed(few)}." if few else ""
    notes = [f"Labels and their training and validation rows: {', '.join(shown)}{more}.{rests}"]
    for what, found in (("training", counts), ("validation", of_validation)):
        absent = [name for name in train.label_set.names if not found[name]]
        if absent:
            notes.append(f"No {what} row has the label {listed(absent)}.")
    return notes


def _number_notes(train: EncodedDataset, validation: EncodedDataset) -> list[str]:
    effects = {"training": "there is nothing to learn", "validation": "pearson, the correlation, is undefined"}
    notes = []
    for (what, effect), dataset in zip(effects.items(), (train, validation), strict=True):
        assert dataset.label_set is not None
        assert dataset.classes is not None
        rows = [label for label in dataset.classes if isinstance(label, tuple)]
        outputs = zip(dataset.label_set.names, zip(*rows, strict=True), strict=True)
        equal = [name for name, numbers in outputs if len(set(numbers)) == 1]
        if equal:
            notes.append(f"All {what} rows have the same value of {listed(equal)}: {effect}.")
    return notes


def _label_counts(dataset: EncodedDataset) -> Counter[str]:
    assert dataset.label_set is not None
    assert dataset.classes is not None
    counts: Counter[str] = Counter()
    for label in dataset.classes:
        indices = (label,) if isinstance(label, int) else (index for index, mark in enumerate(label) if mark)
        counts.update(dataset.label_set.names[index] for index in indices)
    return counts


def test_notes(num_rows: int, num_known: int) -> list[str]:
    """Return notices about the test rows.

    Args:
        num_known: Number of test rows that are also training or validation rows.
    """
    if not num_known:
        return []
    return [
        f"{counted(num_known, 'test row')} of {num_rows} also in the training or validation data: the test loss looks "
        "better than it is."
    ]


def unread_notes(columns: Mapping[str, int], unread: Sequence[Unread], tokenizer: Any, form: str) -> list[str]:
    """Return notices about parts of rows of the form ``form`` that training does not use."""
    notes = []
    if columns:
        label = next((name for name in ("label", "labels") if name in columns), None)
        is_text = form in ("text", "messages", "sharegpt")
        way = f"; set method: classification (for numbers: regression) if {label} is to be learned"
        unread_columns = ", ".join(
            f"{quoted(name)[1:-1]} (in {counted(count, 'row')})" for name, count in columns.items()
        )
        notes.append(
            f"{UNREAD_COLUMNS}: {unread_columns}; assign one to a role with columns if it should be read"
            f"{way if label is not None and is_text else ''}."
        )
    if unread:
        parts = ", ".join(map(_unread, unread))
        advice = f"; {tools_remedy(tokenizer)}" if any(part.what == "tool_calls" for part in unread) else ""
        notes.append(f"Parts of conversations that the chat template does not show: {parts}{advice}.")
    return notes


def _unread(unread: Unread) -> str:
    kind, _, of_kind = unread.what.partition(": ")
    of = f"{unread.count:,} of {unread.total:,}"
    if unread.what == PARALLEL_CALLS:
        return f"all calls of a turn except the first (in {of} turns with several calls)"
    if kind == "row" and of_kind:
        return f"{quoted(of_kind)[1:-1]} (in {of} rows)"
    if kind == "role" and of_kind:
        return f"the text of turns of the role {quoted(of_kind)[1:-1]} ({of} turns)"
    return f"{quoted(unread.what)[1:-1]} (in {of} messages)"


def tokenizer_notes(tokenizer: Any, conversations: Iterable[Conversation]) -> list[str]:
    """Return notices about a tokenizer without an EOS token or a chat template.

    Raises:
        DataError: Neither an EOS token nor the chat template ends a reply, so the model would never learn to stop.
    """
    notes = []
    is_conversation = any(conversation[0].role != "text" for conversation in conversations)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if tokenizer.eos_token_id is None:
        end = closing_text(tokenizer) if has_template and is_conversation else ""
        if not end:
            raise DataError(
                "model: expected a tokenizer with an EOS token or a chat template that ends a reply, found neither, so "
                "that the model would never learn to stop; set eos_token in its tokenizer_config.json"
            )
        notes.append(
            f"The tokenizer names no EOS token: replies end with the template's {quoted(end)}; use it as the stop "
            "text when you serve the adapter."
        )
    if is_conversation and not has_template:
        notes.append(
            "The tokenizer has no chat template: a prompt is plain text followed by a line break, and the "
            "adapter expects the same when it is served; dataset_format: raw_prompt_completion (for pairs: "
            "raw_preference) adds no line break."
        )
    return notes


def encoding_notes(dataset: EncodedDataset, what: str, limit: RowLimit) -> list[str]:
    """Return notices about rows of the ``what`` data that tokenisation cut at ``limit`` or left out."""
    notes = [bad.note for bad in dataset.refused]
    total = len(dataset) + dataset.num_skipped
    row = f"{what} {'pair' if dataset.is_paired else 'row'}"
    if dataset.num_unrolled:
        notes.append(
            f"{counted(dataset.num_unrolled, row)} with several replies trained one reply at a time: the chat "
            f"template rewrites earlier turns. So there are {total} examples."
        )
    if dataset.num_truncated:
        fraction = dataset.num_truncated / total
        advice = f"; {limit.remedy}" if fraction > MUCH_CUT else ""
        notes.append(f"{dataset.num_truncated:,} of {total:,} {row}s ({fraction:.1%}) cut at {limit.name}{advice}.")
    if dataset.num_shortened:
        replies = "reply" if dataset.num_shortened == 1 else "replies"
        notes.append(
            f"{dataset.num_shortened:,} trained {replies} of the {what} data shortened: the chat template leaves words "
            "out (thoughts, for instance), and these are not trained."
        )
    num_cut_off = dataset.num_skipped - dataset.num_masked - dataset.num_alike
    reasons: tuple[tuple[int, str], ...] = (
        (num_cut_off, f"no trained token within {limit.name}"),
        (dataset.num_masked, "no trained token in them"),
    )
    if dataset.is_paired:
        reasons = (
            (num_cut_off, f"no part in which the replies differ is within {limit.name}"),
            (dataset.num_masked, "a reply is empty, or is not to be trained"),
            (dataset.num_alike, "chosen and rejected are the same"),
        )
    notes += [f"{count:,} of {total:,} {row}s left out: {reason}." for count, reason in reasons if count]
    return notes


EvaluationSplit: TypeAlias = Literal["validation", "test"]
"""A split that is not trained on."""

SPLITS = ("train", "validation", "test")
"""Names of the splits, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The rows of a task, tokenised.

    Attributes:
        validation: Validation rows; empty if a winner is trained again on all rows.
        test: Rows that are used neither for training nor for selection; None if there are none.
        num_repeated: Number of validation rows that are also training rows.
        num_known_test: Number of test rows that are also training or validation rows.
        num_bad: Number of rows left out because they cannot be used.
        notes: Notices about the data, as sentences.
        layout: Form and columns of the training rows; for a mixture, those of the first source. None if unknown.
        max_length: Number of tokens at which a row is cut; None if unknown.
    """

    train: EncodedDataset
    validation: EncodedDataset
    test: EncodedDataset | None = None
    num_repeated: int = 0
    num_known_test: int = 0
    num_bad: int = 0
    notes: tuple[str, ...] = ()
    layout: Layout | None = None
    max_length: int | None = None

    @property
    def splits(self) -> tuple[EncodedDataset, ...]:
        """The training, validation and test rows, without empty splits."""
        return tuple(self.named_splits.values())

    @property
    def named_splits(self) -> dict[str, EncodedDataset]:
        """The splits that have rows, by name, in the order of :data:`SPLITS`."""
        found = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in found.items() if split is not None and len(split)}

    @property
    def has_validation(self) -> bool:
        """Whether there are validation rows."""
        return len(self.validation) > 0

    def held_out(self, split: EvaluationSplit) -> EncodedDataset:
        """Return the validation or the test rows, which have to exist."""
        dataset = self.validation if split == "validation" else self.test
        assert dataset is not None, f"the task has no {split} rows"
        assert len(dataset), f"the task has no {split} rows"
        return dataset

    def with_splits(self, splits: Sequence[EncodedDataset]) -> Self:
        """Return the same data with other ``splits``, as many and in the same order."""
        named: dict[str, Any] = dict(zip(self.named_splits, splits, strict=True))
        return replace(self, **named)

    def with_all_rows(self) -> Self:
        """Return the same data with the validation rows after the training rows, source by source, and no validation
        rows."""
        notes = reading_notes(len(self.validation), self.num_repeated)
        return replace(
            self,
            train=_together(self.train, self.validation),
            validation=EncodedDataset(input_ids=(), targets=()),
            num_repeated=0,
            notes=tuple(note for note in self.notes if note not in notes),
        )

    def counts(self) -> dict[str, int]:
        """Return the numbers of rows and tokens of every split, of rows cut or left out, and of shared rows."""
        counts = {
            f"{name}_{what}": count
            for name, split in self.named_splits.items()
            for what, count in (
                ("rows", len(split)),
                ("tokens", split.num_tokens),
                ("trained_tokens", split.num_trained_tokens),
                ("truncated_rows", split.num_truncated),
                ("skipped_rows", split.num_skipped),
                ("masked_rows", split.num_masked),
                ("unrolled_rows", split.num_unrolled),
                ("alike_rows", split.num_alike),
            )
        }
        known_test = {"shared_test_rows": self.num_known_test} if self.test is not None else {}
        return {**counts, "shared_rows": self.num_repeated, **known_test, "bad_rows": self.num_bad}


def _together(train: EncodedDataset, validation: EncodedDataset) -> EncodedDataset:
    """Concatenate both datasets; for a mixture, source by source."""
    if not train.sources:
        return joined([train, validation], store=VIEWS)
    parts: dict[str, list[EncodedDataset]] = {name: [] for name, _ in train.sources}
    for split in (train, validation):
        first = 0
        for name, count in split.sources:
            parts[name] += [split.rows(first, first + count)] if count else []
            first += count
        assert first == len(split), "every row is of a source"
    return joined([joined(of_source, store=VIEWS) for of_source in parts.values()], list(parts), VIEWS)
