"""Forms of rows, recognised by a dataset's columns or named by the task.

============================  ================================================================================
form                          columns (optional ones in brackets)
============================  ================================================================================
``messages``                  ``messages`` or ``conversations``: a list of ``{role, content}``; an assistant message may
                              have ``tool_calls`` instead of content; [``system``, and see below]
``sharegpt``                  the same columns: a list of ``{from, value}``; [``system``, and see below]
``prompt_completion``         ``prompt`` and ``completion`` or ``response``, or ``question`` and ``answer``, each a
                              text or messages; [``system``]
``raw_prompt_completion``     the same columns, texts only; never recognised, has to be named
``alpaca``                    ``instruction``, ``output``; [``input``, ``system``, ``history``]
``text``                      ``text``; only if no other form fits
``preference``                ``chosen`` and ``rejected`` (or ``chosen_response`` and ``rejected_response``), each a
                              text or messages, and a prompt in the columns of an entry of :data:`_PROMPTS`, which is
                              optional if both are lists of messages that begin with it; [``system``]
``raw_preference``            ``chosen`` and ``rejected``, texts only, which begin with the prompt if there is no
                              ``prompt``; never recognised, has to be named
``openai_preference``         ``input`` (``{messages: […]}``), ``preferred_output``, ``non_preferred_output``
``unpaired_preference``       the columns of ``prompt_completion``, or a list of messages that ends with the reply, and
                              ``label``: whether the reply is desirable; only if the method learns from labels
``text_classification``       ``label`` or ``labels``, and one or two texts in columns of an entry of :data:`_TEXTS`, or
                              ``messages``; only if the method learns the labels of texts
============================  ================================================================================

``tools`` (or its older name ``functions``) and ``chat_template_kwargs`` (further arguments of the chat template) are
optional in all forms but ``text``, the raw forms, ``text_classification`` and ``openai_preference``, whose ``input``
may hold ``tools``.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from alto.data.rows import FaultKind, RawRow, RowFault, listed, quoted
from alto.errors import DataFormatError

_NAMED_FORMS = ("raw_prompt_completion", "raw_preference")
"""Forms that are never recognised, because another form has the same columns."""

_PAIR_FORMS = ("preference", "raw_preference", "openai_preference")
_LABELLED_FORM = "unpaired_preference"
_CLASSIFICATION_FORM = "text_classification"

_Columns = tuple[tuple[str, str], ...]

_TEXTS: tuple[_Columns, ...] = (
    (("text", "text"),),
    (("text", "sentence"),),
    (("messages", "messages"),),
    (("text", "text"), ("text_pair", "text_pair")),
    (("text", "sentence1"), ("text_pair", "sentence2")),
    (("text", "premise"), ("text_pair", "hypothesis")),
    (("text", "question1"), ("text_pair", "question2")),
    (("text", "question"), ("text_pair", "sentence")),
)
"""Columns of the text, or the two texts, of a label; if several entries fit, one with two texts is used."""

_REQUIRED: tuple[tuple[str, _Columns], ...] = (
    ("messages", (("messages", "messages"),)),
    ("messages", (("messages", "conversations"),)),
    ("prompt_completion", (("prompt", "prompt"), ("completion", "completion"))),
    ("prompt_completion", (("prompt", "prompt"), ("completion", "response"))),
    ("prompt_completion", (("prompt", "question"), ("completion", "answer"))),
    ("raw_prompt_completion", (("prompt", "prompt"), ("completion", "completion"))),
    ("raw_prompt_completion", (("prompt", "prompt"), ("completion", "response"))),
    ("raw_prompt_completion", (("prompt", "question"), ("completion", "answer"))),
    ("alpaca", (("instruction", "instruction"), ("output", "output"))),
    ("text", (("text", "text"),)),
    ("preference", (("chosen", "chosen"), ("rejected", "rejected"))),
    ("preference", (("chosen", "chosen_response"), ("rejected", "rejected_response"))),
    ("raw_preference", (("chosen", "chosen"), ("rejected", "rejected"))),
    ("raw_preference", (("chosen", "chosen_response"), ("rejected", "rejected_response"))),
    (
        "openai_preference",
        (
            ("input", "input"),
            ("preferred_output", "preferred_output"),
            ("non_preferred_output", "non_preferred_output"),
        ),
    ),
    *(
        ("unpaired_preference", (("prompt", prompt), ("completion", completion), ("label", "label")))
        for prompt, completion in (("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
    ),
    *(("unpaired_preference", (("messages", column), ("label", "label"))) for column in ("messages", "conversations")),
    *(("text_classification", (*texts, ("label", label))) for texts in _TEXTS for label in ("label", "labels")),
)
"""Every layout of a form: its roles and their default columns."""

_BESIDE_TURNS = ("tools", "functions", "chat_template_kwargs")

_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "messages": ("system", *_BESIDE_TURNS),
    "prompt_completion": ("system", *_BESIDE_TURNS),
    "raw_prompt_completion": (),
    "alpaca": ("input", "system", "history", *_BESIDE_TURNS),
    "text": (),
    "preference": ("prompt", "input", "system", *_BESIDE_TURNS),
    "raw_preference": ("prompt",),
    "openai_preference": (),
    "unpaired_preference": ("system", *_BESIDE_TURNS),
    "text_classification": (),
}

_REPLIES = ("messages", "completion", "chosen", "preferred_output")
"""Roles of columns that hold replies, as texts or as messages."""

_PROMPTS: tuple[Mapping[str, str], ...] = (
    {"prompt": "prompt"},
    {"prompt": "question"},
    {"prompt": "instruction", "input": "input"},
    {"prompt": "instruction"},
    {"prompt": "input"},
    {"prompt": "conversations"},
)
"""Columns of the prompt of a pair; the first entry whose columns the dataset has is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The form of a dataset's rows, and its columns as pairs of role and column.

    ``of_messages`` says whether replies are lists of messages rather than texts.
    """

    form: str
    columns: _Columns
    of_messages: bool = False

    def __str__(self) -> str:
        return f"{self.form} ({listed(column for _, column in self.columns)})"

    def column(self, role: str) -> str | None:
        """Return the column of ``role``; None if there is none."""
        return dict(self.columns).get(role)

    @property
    def is_paired(self) -> bool:
        """Whether a row is a preference pair."""
        return self.form in _PAIR_FORMS

    def misfit(self, row: RawRow) -> RowFault | None:
        """Return the fault of a row if a required column is missing; None if it has all of them."""
        optional = _OPTIONAL["messages" if self.form == "sharegpt" else self.form]
        if all(column in row.values for role, column in self.columns if role not in optional):
            return None
        reason = (
            f"expected the columns of the other rows, {self}, found {listed(row.values)}; add what is missing, or put "
            "rows of a different form into a separate file"
        )
        return RowFault(FaultKind.NO_COLUMNS, reason)

    @property
    def is_labelled(self) -> bool:
        """Whether a row is a reply with a label."""
        return self.form == _LABELLED_FORM

    @property
    def is_classified(self) -> bool:
        """Whether a row is a text with a label."""
        return self.form == _CLASSIFICATION_FORM

    @property
    def num_texts(self) -> int:
        """Number of texts of a row."""
        return sum(role in ("text", "text_pair", "messages") for role, _ in self.columns)


def find_layout(
    rows: Sequence[RawRow],
    form: str,
    columns: Mapping[str, str],
    *,
    is_paired: bool | None = None,
    is_labelled: bool = False,
    is_classified: bool = False,
    is_unlabelled: bool = False,
) -> Layout:
    """Find the layout that fits most rows; the other rows have a fault (:meth:`Layout.misfit`).

    Args:
        rows: Rows of the dataset, at least one of them without a fault.
        form: Name of the form, or ``auto``.
        columns: Column of every role whose column is not the default.
        is_paired: Whether to use the columns of pairs if a dataset has columns of both kinds; None means no preference.
        is_labelled: Whether only labelled replies and pairs are accepted; if a dataset has both, the replies are used.
        is_classified: Whether only labelled texts are accepted.
        is_unlabelled: Whether these texts come without the column of the label.

    Raises:
        DataFormatError: No layout fits any row, or several fit the same number of rows and all fit the first of these.
    """
    without = "label" if is_unlabelled else ""
    columns = {role: column for role, column in columns.items() if role != without}
    candidates = [
        layout
        for layout in _candidates(form, columns, without)
        if layout.is_classified == is_classified
        and (layout.is_labelled or layout.is_paired if is_labelled else form != "auto" or not layout.is_labelled)
    ]
    if not candidates:
        raise DataFormatError(
            f"columns: these roles do not all belong to {'one dataset format' if form == 'auto' else f'format {form}'}"
            f": {listed(columns)}; keep only the roles of one format"
        )
    first_with: dict[tuple[str, ...], RawRow] = {}
    counts: Counter[tuple[str, ...]] = Counter()
    for row in _readable(rows):
        names = tuple(row.values)
        first_with.setdefault(names, row)
        counts[names] += 1
    _check_columns(first_with.values(), columns)
    num_fitting = {
        layout: sum(count for names, count in counts.items() if layout.misfit(first_with[names]) is None)
        for layout in candidates
    }
    if not any(num_fitting.values()):
        raise _no_form(next(iter(first_with.values())), _of_kind(candidates, is_paired), form)
    common = _preferred(
        num_fitting, counts.total(), is_paired=is_paired, is_labelled=is_labelled, is_classified=is_classified
    )
    first = next(row for row in first_with.values() if any(layout.misfit(row) is None for layout in common))
    common = [layout for layout in common if layout.misfit(first) is None]
    if len(common) > 1:
        raise DataFormatError(
            f"{first.where}: expected columns of one form, found the columns of {_joined_names(common, ' and ')}; "
            f"{_choose(common)}"
        )
    return _completed(common[0], rows, {name for names in counts for name in names}, form, columns)


def _preferred(
    num_fitting: Mapping[Layout, int], num_rows: int, *, is_paired: bool | None, is_labelled: bool, is_classified: bool
) -> list[Layout]:
    """Return the layouts that fit the largest number of rows. If several do, keep those that use the most columns."""
    found = _fitting_most(num_fitting)
    wanted = {layout: count for layout, count in num_fitting.items() if layout.is_paired == is_paired}
    is_other_kind = all(layout.is_paired != is_paired for layout in found)
    if wanted and is_other_kind and 2 * max(wanted.values()) >= num_rows:
        found = _fitting_most(wanted)  # for the wanted kind, half of the rows are enough
    found = _of_kind(found, is_paired)
    if is_labelled:
        found = [layout for layout in found if layout.is_labelled] or found
        found = [layout for layout in found if layout.column("messages") is None] or found
    if is_classified:
        most_texts = max(layout.num_texts for layout in found)
        found = [layout for layout in found if layout.num_texts == most_texts]
    if len(found) > 1:
        found = [layout for layout in found if layout.form != "text"]
    return found


def _fitting_most(num_fitting: Mapping[Layout, int]) -> list[Layout]:
    most = max(num_fitting.values())
    return [layout for layout, count in num_fitting.items() if count == most]


def _of_kind(layouts: list[Layout], is_paired: bool | None) -> list[Layout]:
    """Return the layouts of pairs, or the layouts of replies. If there are none of this kind, return all layouts."""
    return [layout for layout in layouts if layout.is_paired == is_paired] or layouts


def _readable(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    return (row for row in rows if row.fault is None)


def _check_columns(rows: Collection[RawRow], columns: Mapping[str, str]) -> None:
    if not columns:
        return
    names = {name: None for row in rows for name in row.values}  # in the dataset's order
    for role, column in columns.items():
        if column not in names:
            near = difflib.get_close_matches(column.lower(), {name.lower(): name for name in names}, n=1)
            meant = next((name for name in names if near and name.lower() == near[0]), None)
            raise DataFormatError(
                f"columns: expected a column of the dataset for {role} ({listed(names)}), found {quoted(column)}; "
                + (f"did you mean {quoted(meant)}?" if meant is not None else "correct the name")
            )


def _candidates(form: str, columns: Mapping[str, str], without: str = "") -> list[Layout]:
    """Return the layouts of ``form`` with the roles in ``columns``, and without the role ``without``."""
    wanted = "messages" if form == "sharegpt" else form
    layouts = []
    for name, required in _REQUIRED:
        roles = {*dict(required), *_OPTIONAL[name]}
        if "text" in columns and "text_pair" in dict(required) and "text_pair" not in columns:
            continue  # the task names only one text
        if wanted in (name if name in _NAMED_FORMS else "auto", name) and roles.issuperset(columns):
            layouts.append(
                Layout(
                    form=name,
                    columns=tuple((role, columns.get(role, usual)) for role, usual in required if role != without),
                )
            )
    return list(dict.fromkeys(layouts))


def _completed(
    layout: Layout, rows: Sequence[RawRow], present: set[str], form: str, columns: Mapping[str, str]
) -> Layout:
    """Return ``layout`` with the optional columns that the dataset has, and with its shape of messages named."""
    name = layout.form
    if name == "messages":
        name = form if form != "auto" else _shape(rows, dict(layout.columns)["messages"])
    of_messages = any(_holds_messages(rows, column) for role, column in layout.columns if role in _REPLIES)
    columns_found = (*layout.columns, *_optional(layout, present, columns))
    return Layout(form=name, columns=columns_found, of_messages=of_messages)


def _holds_messages(rows: Sequence[RawRow], column: str) -> bool:
    """Return whether the first value of ``column`` is a list of messages, or one message."""
    values = (row.values.get(column) for row in _readable(rows))
    return isinstance(next((value for value in values if value is not None), None), list | Mapping)


def _optional(layout: Layout, present: set[str], columns: Mapping[str, str]) -> _Columns:
    """Return the optional columns that the dataset has: those that the task names, and the default ones."""
    roles = _OPTIONAL[layout.form]
    free = present.difference(columns.values())
    usual: Mapping[str, str] = {role: role for role in roles}
    if layout.form == "preference":
        ways = () if "prompt" in columns else _PROMPTS
        prompt = next((way for way in ways if free.issuperset(way.values())), {})
        usual = {**{role: role for role in ("system", *_BESIDE_TURNS)}, **prompt}
    found = {**{role: column for role, column in usual.items() if column in free}, **columns}
    return tuple((role, found[role]) for role in roles if role in found)


def _shape(rows: Sequence[RawRow], column: str) -> str:
    for row in _readable(rows):
        turns = row.values.get(column)
        if isinstance(turns, list) and turns and isinstance(turns[0], Mapping):
            return "sharegpt" if "from" in turns[0] else "messages"
    return "messages"


def _no_form(row: RawRow, candidates: Sequence[Layout], form: str) -> DataFormatError:
    what = "the columns of a form" if form == "auto" else f"the columns of the form {form}"
    is_paired = all(layout.is_paired for layout in candidates)
    roles: tuple[str, ...] = ("prompt", "chosen", "rejected") if is_paired else ("prompt", "completion")
    if candidates[0].is_classified:
        roles = ("text", "label") if candidates[0].column("label") else ("text",)
    example = ", ".join(f"{role}: <its column>" for role in roles)
    by_form: dict[str, list[Layout]] = {}
    for layout in candidates:
        by_form.setdefault(layout.form, []).append(layout)
    shown = [
        max(layouts, key=lambda layout: sum(column in row.values for _, column in layout.columns))
        for layouts in by_form.values()
    ]
    other = " (docs/data.md lists other names of columns)" if len(shown) < len(candidates) else ""
    is_settled = is_paired or any(layout.is_labelled or layout.is_classified for layout in candidates)
    classified = "set method: classification and columns: {text: <its column>, label: <its column>}"
    return DataFormatError(
        f"{row.where}: expected {what}: {_joined_names(shown)}{other}; found {listed(row.values)}; name roles with "
        f"columns, such as {{{example}}}, or rename the columns"
        + (f"; to learn labels of texts, {classified}" if form == "auto" and not is_settled else "")
    )


def _joined_names(layouts: Sequence[Layout], joint: str = " or ") -> str:
    return joint.join(map(str, layouts))


def _choose(layouts: Sequence[Layout]) -> str:
    """Return advice for a message: how the task can choose one of ``layouts``, which fit equally well."""
    if len({layout.form for layout in layouts}) == len(layouts):
        return f"name one with dataset_format: {' or '.join(layout.form for layout in layouts)}"
    ways = ["{" + ", ".join(f"{role}: {column}" for role, column in layout.columns) + "}" for layout in layouts]
    return f"name one with columns: {' or '.join(ways)}"
