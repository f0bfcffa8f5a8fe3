"""``/new``: a form for a task. Its texts become the body of a request, which the page sends to the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from alto.runs.progress import price_of_hour
from alto.service.context import ServiceOf
from alto.service.dashboard.rendering import PageRoute, page
from alto.service.errors import refused
from alto.service.openai.files import FINE_TUNE
from alto.service.openai.translation import METHODS, REINFORCEMENT
from alto.service.store.tables import FileRow
from alto.service.web.access import Reader
from alto.spec import NotYamlError, read_yaml

_MOST_CHARS = 20_000
_MOST_FILES = 200
_MOST_SEED = 2**31 - 1

router = APIRouter()
_pages = APIRouter(route_class=PageRoute)


class FormTexts(BaseModel):
    """The texts in the fields of the form; empty fields are not sent.

    Attributes:
        grader: For the method ``reinforcement``: the name of a scorer, or a grader as YAML or JSON.
        extra: Further hyperparameters, as YAML or JSON.
    """

    model_config = ConfigDict(extra="forbid", str_max_length=_MOST_CHARS, str_strip_whitespace=True)

    model: str
    training_file: str
    validation_file: str = ""
    method: str = "supervised"
    grader: str = ""
    hyperparameters: dict[str, str] = Field(default_factory=dict, max_length=32)
    seed: str = ""
    suffix: str = ""
    extra: str = ""


@_pages.get("/new")
def form(request: Request, service: ServiceOf, caller: Reader) -> HTMLResponse:
    """Return the page with the form."""
    with service.store.reading() as session:
        files = list(
            session.scalars(
                select(FileRow)
                .where(
                    FileRow.tenant == caller.tenant,
                    FileRow.purpose == FINE_TUNE,
                    FileRow.status == "processed",
                    FileRow.deleted_at.is_(None),
                )
                .order_by(FileRow.number.desc())
                .limit(_MOST_FILES)
            )
        )
    return page(
        request,
        "new.html.jinja",
        caller,
        models=sorted(service.settings.models),
        hub_models=service.settings.hub_models,
        methods=list(METHODS),
        files=files,
        price=price_of_hour(None),
        can_write="write" in caller.scopes,
    )


@router.post("/dashboard/request")
def request_of(caller: Reader, body: FormTexts) -> dict[str, Any]:
    """Return the body of a task request for the texts of the form; ``param`` of an error names the field."""
    values = {key: _value(key, text) for key, text in body.hyperparameters.items() if text}
    extra = _extra(body.extra)
    if twice := sorted(values.keys() & extra.keys()):
        raise refused(
            f"extra: expected only keys whose own field is empty, found {', '.join(twice)}; give each key once",
            "extra",
            "conflicting_keys",
        )
    settings: dict[str, Any] = {"hyperparameters": {**values, **extra}}
    if body.method == REINFORCEMENT:
        settings["grader"] = _grader(body.grader)
    found: dict[str, Any] = {
        "model": body.model,
        "training_file": body.training_file,
        "method": {"type": body.method, body.method: settings},
    }
    optional = {"validation_file": body.validation_file, "suffix": body.suffix, "seed": _seed(body.seed)}
    return found | {key: value for key, value in optional.items() if value not in ("", None)}


def _value(key: str, text: str) -> Any:
    """Return the value of a text: a number, a word, a list (with or without brackets) or a range."""
    is_list = "," in text and text[0] not in "[{"
    try:
        return read_yaml(f"[{text}]" if is_list else text)
    except NotYamlError:
        raise refused(
            f"{key}: expected a number, auto, a list such as 1e-4, 3e-4, or a range such as {{min: 1e-5, max: 1e-3, "
            f"log: true, num: 5}}, found {text[:50]!r}; correct it",
            key,
        ) from None


def _grader(text: str) -> Mapping[str, Any]:
    """Return the grader that a text names; one word is its type."""
    try:
        found = read_yaml(text) if text else None
    except NotYamlError:
        found = None
    if isinstance(found, str):
        return {"type": found}
    if not isinstance(found, Mapping):
        raise refused(
            "grader: expected the name of a scorer such as numeric, or a grader such as {type: similarity, measure: "
            f"rouge_l}}, found {text[:50]!r}; name one",
            "grader",
        )
    return found


def _extra(text: str) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        found = read_yaml(text)
    except NotYamlError as error:
        raise refused(f"extra: expected YAML or JSON, found something else ({error}); correct it", "extra") from None
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise refused(
            f"extra: expected keys with values, such as lora_dropout: 0.05, found {str(found)[:50]!r}; correct it",
            "extra",
        )
    return found


def _seed(text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or int(text) > _MOST_SEED:
        raise refused(f"seed: expected a whole number from 0 to {_MOST_SEED}, found {text[:50]!r}; correct it", "seed")
    return int(text)


router.include_router(_pages)
