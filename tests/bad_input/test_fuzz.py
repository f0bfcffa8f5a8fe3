"""Any input: a task is accepted and survives its own file, or a named error refuses it."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from budgets import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alto.data.convert import to_conversation, to_pair
from alto.data.formats import find_layout
from alto.data.rows import RawRow
from alto.errors import AltoError
from alto.spec import EarlyExit, JobConfig, Task, build_task, load_task, parse_override
from alto.spec.keys import JOB_ALIASES, TASK_ALIASES, UNSUPPORTED_KEYS

FEW = settings(max_examples=examples(80))

BASE = {"model": "alto-tiny", "dataset": "no-such-rows.jsonl"}

KEYS = sorted(
    {
        *(Task.model_fields | JobConfig.model_fields | EarlyExit.model_fields),
        *(JOB_ALIASES | TASK_ALIASES | UNSUPPORTED_KEYS),
        *("paired", "min", "max", "log", "num", "prompt", "completion"),
    }
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**13_000), max_value=2**13_000),
    st.integers(0, 64),
    st.floats(),
    st.floats(0, 1),
    st.text(max_size=20),
    st.sampled_from([*KEYS, "auto", "all-linear", "2*r", "r", "1e-4", "paper", "linear", "~x", "../x", ".*", "(", ""]),
    st.dates(),
    st.datetimes(timezones=st.just(datetime.UTC) | st.none()),
    st.binary(max_size=5),
)
keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=8), st.integers(), st.none(), st.booleans())
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
sampled = st.fixed_dictionaries({"min": scalars, "max": scalars, "num": scalars}, optional={"log": scalars})


def check(path: Path, overrides: list[str]) -> None:
    """Check that the file at ``path`` is refused by a named error, or that its task can be written and read back."""
    try:
        task = load_task(path, overrides)
    except AltoError:
        return
    copy = path.with_name("copy.yaml")
    copy.write_text(task.to_yaml(), encoding="utf-8")
    again = load_task(copy)
    assert again == task
    assert again.jobs == task.jobs


def check_text(text: str, overrides: list[str] | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        check(path, overrides or [])


def check_values(task: Any) -> None:
    """Check ``task`` as the content of a file, and as keyword arguments."""
    check_text(yaml.safe_dump(task, allow_unicode=True))
    if isinstance(task, Mapping) and all(isinstance(key, str) for key in task):
        try:
            Task(**task)
        except AltoError:
            return


@FEW
@given(values | st.dictionaries(keys, values, max_size=6))
def test_any_values(task: Any) -> None:
    check_values(task)


@FEW
@given(st.dictionaries(keys, values, max_size=3), st.sets(st.sampled_from(sorted(BASE)), max_size=1))
def test_a_task_with_keys_added_replaced_and_dropped(changes: dict[Any, Any], dropped: set[str]) -> None:
    task = {**BASE, **changes}
    check_values({key: value for key, value in task.items() if key not in dropped})


@FEW
@given(
    st.dictionaries(
        st.sampled_from([*JobConfig.model_fields, "paired"]), values | sampled | st.lists(scalars), max_size=3
    )
)
def test_any_search_space(space: dict[str, Any]) -> None:
    check_values({**BASE, "search_space": space})


@FEW
@given(st.dictionaries(st.sampled_from(sorted(EarlyExit.model_fields)), values, max_size=3))
def test_any_early_exit(early_exit: dict[str, Any]) -> None:
    check_values({**BASE, "early_exit": early_exit})


@settings(max_examples=examples(150))
@given(
    st.text(max_size=60)
    | st.text("{}[]:,-?&*!|>%@`'\"# \n\tab1<=~.", max_size=60)
    | st.from_regex(
        r"(x: (!!(int|float|bool|timestamp|set|omap|pairs|binary|null|str) ?[\[{'a1:.-]{0,4}|&a|\*a)\n?){1,3}"
    )
)
@example("x: !!timestamp a")
@example("x: !!int ''")
def test_any_text(text: str) -> None:
    check_text(text)
    check_text("model: m\ndataset: no-such-rows.jsonl\n" + text)


@settings(max_examples=examples(150))
@given(st.lists(st.text(max_size=30) | st.tuples(keys, st.text(max_size=20)).map(lambda pair: f"{pair[0]}={pair[1]}")))
@example(["early_exit.window=1", "early_exit=true", "early_exit.rungs.x=1"])
def test_any_overrides(overrides: list[str]) -> None:
    check_text(yaml.safe_dump(BASE), overrides)
    for override in overrides:
        try:
            parse_override(override)
            build_task(BASE, [override])
        except AltoError:
            continue


messages = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "from", "value", "weight"]), scalars | st.just("user"), max_size=3
    )
    | scalars,
    max_size=3,
)
columns = st.sampled_from(
    [
        *("messages", "conversations", "prompt", "completion", "response", "question", "answer", "instruction"),
        *("input", "output", "text", "chosen", "rejected", "system", "history", "\x1b[31m"),
        *("chosen", "rejected", "preferred_output", "non_preferred_output"),
    ]
)


FORMS = (
    "messages",
    "sharegpt",
    "prompt_completion",
    "alpaca",
    "text",
    "preference",
    "raw_preference",
    "openai_preference",
)


@settings(max_examples=examples(150))
@given(
    rows=st.lists(st.dictionaries(columns, messages | values | st.just("text"), max_size=4), min_size=1, max_size=4),
    form=st.sampled_from(["auto", *FORMS]),
    roles=st.dictionaries(
        st.sampled_from(["prompt", "completion", "messages", "text", "system", "chosen"]), columns, max_size=2
    ),
    is_paired=st.sampled_from([None, True, False]),
)
def test_any_rows(rows: list[dict[str, Any]], form: str, roles: dict[str, str], is_paired: bool | None) -> None:
    raw = [RawRow(f"rows.jsonl:{number}", row) for number, row in enumerate(rows, start=1)]
    try:
        layout = find_layout(raw, form, roles, is_paired=is_paired)
        for row in raw:
            assert to_pair(row, layout).conversations if layout.is_paired else to_conversation(row, layout)
    except AltoError:
        return


turns = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant"]),
    st.sampled_from(["a", "b"]),
)


@settings(max_examples=examples(150))
@given(
    prompt=st.none() | st.just("a") | st.lists(turns, max_size=2),
    replies=st.lists(st.just("a") | turns | st.lists(turns, max_size=4), min_size=2, max_size=2),
)
def test_any_talks_are_a_pair_or_refused(prompt: Any, replies: list[Any]) -> None:
    row = RawRow("rows.jsonl:1", {"prompt": prompt, "chosen": replies[0], "rejected": replies[1]})
    try:
        pair = to_pair(row, find_layout([row], "auto", {}))
    except AltoError:
        return
    both = zip(*pair.conversations, strict=False)
    shared = sum(1 for _ in takewhile(lambda turns: turns[0] == turns[1] and not turns[0].is_trained, both))
    assert shared > 0
    assert [conversation[shared].role for conversation in pair.conversations] == ["assistant", "assistant"]
    assert all(
        turn.is_trained == (turn.role == "assistant")
        for conversation in pair.conversations
        for turn in conversation[shared:]
    )
