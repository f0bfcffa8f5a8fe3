"""The page of events agrees with the event classes."""

from __future__ import annotations

import dataclasses

from alto.runs.events import WIRE_NAMES, QueueEvent, RunEvent
from tools import make_event_docs as generator


def test_the_page_is_generated_from_the_classes_as_they_are() -> None:
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run python -m tools.make_event_docs"


def test_what_has_a_meaning_is_a_field() -> None:
    assert all(issubclass(event, RunEvent | QueueEvent) for event in WIRE_NAMES)
    for kind in [*WIRE_NAMES, *generator.parts(WIRE_NAMES)]:
        meanings = generator.meanings(kind)
        assert set(meanings) <= {field.name for field in dataclasses.fields(kind)}, kind
        assert all(meanings.values()), kind


def test_every_event_is_on_the_page() -> None:
    page = generator.page()
    for kind, name in WIRE_NAMES.items():
        assert f"### `{name}`\n\n`{kind.__name__}`: " in page
