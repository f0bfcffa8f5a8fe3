"""OpenAI's unmodified client against a service with simulated executors: each of its methods for fine-tuning, files,
uploads and models, its types as the oracle of every answer, pages, and repeated requests."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from openai.types import FileDeleted, FileObject, Model, ModelDeleted, Upload
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint
from openai.types.uploads import UploadPart
from services import ROWS, Served, served, wait_for

from alto.service.errors import ApiError
from alto.service.store.tables import FileRow, JobRow, PartRow, UploadRow
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster

FIXED = {"learning_rate": 1e-4, "n_epochs": 1}
PART = {"mime_type": "application/jsonl", "purpose": "fine-tune"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("service")
    with served(root, open_plane=simulated_plane(root, lambda: SimulatedCluster(duration_s=0.3))) as found:
        yield found


@pytest.fixture(scope="module")
def client(service: Served) -> Iterator[openai.OpenAI]:
    with service.client() as found:
        yield found


@pytest.fixture(scope="module")
def done(service: Served, client: openai.OpenAI) -> Any:
    job = client.fine_tuning.jobs.create(
        model="alto-tiny", training_file=service.upload(client), hyperparameters={"n_epochs": 1}, metadata={"a": "b"}
    )
    return service.finished(client, job.id)


def strict(kind: Any, response: Any) -> Any:
    """Return the answer as an object of the client, without coercion; its type lacks the status ``paused``."""
    values = json.loads(response.http_response.content)
    if values.get("status") == "paused" and kind is FineTuningJob:
        values["status"] = "queued"
    return kind.model_validate(values, strict=True)


def strict_page(kind: Any, response: Any) -> list[Any]:
    values = json.loads(response.http_response.content)
    assert values["object"] == "list"
    if "has_more" in values:
        ids = [each["id"] for each in values["data"]]
        assert (values["first_id"], values["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    return [kind.model_validate(each, strict=True) for each in values["data"]]


# -- every method ------------------------------------------------------------------------------------------------------


def methods_of(resource: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in dir(type(resource)):
        if name.startswith(("_", "with_")):
            continue
        found = getattr(resource, name)
        if inspect.ismethod(found):
            yield prefix + name, found
        elif hasattr(found, "_client"):
            yield from methods_of(found, f"{prefix}{name}.")


NONE = openai.NotFoundError
BAD = openai.BadRequestError
UNKNOWN: dict[str, tuple[dict[str, Any], type[openai.APIStatusError] | None]] = {
    "fine_tuning.alpha.graders.run": ({"grader": {"type": "string_check"}, "model_sample": "a"}, BAD),
    "fine_tuning.alpha.graders.validate": ({"grader": {"type": "string_check"}}, BAD),
    "fine_tuning.checkpoints.permissions.create": (
        {"fine_tuned_model_checkpoint": "ft:a:ckpt", "project_ids": ["x"]}, BAD,
    ),
    "fine_tuning.checkpoints.permissions.delete": (
        {"permission_id": "x", "fine_tuned_model_checkpoint": "ft:a:ckpt"}, BAD,
    ),
    "fine_tuning.checkpoints.permissions.list": ({"fine_tuned_model_checkpoint": "ft:a:ckpt"}, BAD),
    "fine_tuning.checkpoints.permissions.retrieve": ({"fine_tuned_model_checkpoint": "ft:a:ckpt"}, BAD),
    "fine_tuning.jobs.cancel": ({"fine_tuning_job_id": "ftjob-0"}, NONE),
    "fine_tuning.jobs.checkpoints.list": ({"fine_tuning_job_id": "ftjob-0"}, NONE),
    "fine_tuning.jobs.create": ({"model": "alto-tiny", "training_file": "file-0"}, NONE),
    "fine_tuning.jobs.list": ({"after": "ftjob-0"}, NONE),
    "fine_tuning.jobs.list_events": ({"fine_tuning_job_id": "ftjob-0"}, NONE),
    "fine_tuning.jobs.pause": ({"fine_tuning_job_id": "ftjob-0"}, NONE),
    "fine_tuning.jobs.resume": ({"fine_tuning_job_id": "ftjob-0"}, NONE),
    "fine_tuning.jobs.retrieve": ({"fine_tuning_job_id": "ftjob-0"}, NONE),
    "files.content": ({"file_id": "file-0"}, NONE),
    "files.create": ({"file": ("a.jsonl", b"{}"), "purpose": "batch"}, BAD),
    "files.delete": ({"file_id": "file-0"}, NONE),
    "files.list": ({"after": "file-0"}, NONE),
    "files.retrieve": ({"file_id": "file-0"}, NONE),
    "files.retrieve_content": ({"file_id": "file-0"}, NONE),
    "files.wait_for_processing": ({"id": "file-0"}, NONE),
    "uploads.cancel": ({"upload_id": "upload-0"}, NONE),
    "uploads.complete": ({"upload_id": "upload-0", "part_ids": ["part-0"]}, NONE),
    "uploads.create": ({"bytes": 2**40, "filename": "a", "mime_type": "a", "purpose": "fine-tune"}, BAD),
    "uploads.parts.create": ({"upload_id": "upload-0", "data": b"abc"}, NONE),
    "uploads.upload_file_chunked": (
        {"file": b"abc", "filename": "a", "bytes": 3, "mime_type": "a", "purpose": "vision"}, BAD,
    ),
    "models.delete": ({"model": "ft:none"}, NONE),
    "models.list": ({}, None),
    "models.retrieve": ({"model": "ft:none"}, NONE),
}  # fmt: skip
"""Requests by method for absent or unsupported objects, and the client's errors."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_method_answers_or_refuses_by_a_typed_error(client: openai.OpenAI) -> None:
    found = dict[str, Any]()
    for name in ("fine_tuning", "files", "uploads", "models"):
        found.update(methods_of(getattr(client, name), f"{name}."))
    assert found.keys() == UNKNOWN.keys(), "the client has other methods than this table"
    for name, (arguments, kind) in UNKNOWN.items():
        if kind is None:
            found[name](**arguments)
            continue
        with pytest.raises(kind) as caught:
            found[name](**arguments)
        assert caught.value.request_id, name
        assert caught.value.body["message"], name  # type: ignore[index]
        assert caught.value.body.keys() == {"message", "type", "param", "code"}, name  # type: ignore[union-attr]


@pytest.mark.parametrize("action", ["cancel", "pause", "resume"])
def test_states_that_forbid_a_change_are_400(client: openai.OpenAI, done: Any, action: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        getattr(client.fine_tuning.jobs, action)(done.id)
    assert caught.value.code == "invalid_state"


# -- objects -----------------------------------------------------------------------------------------------------------


def test_jobs_are_what_the_client_types_say(service: Served, client: openai.OpenAI, done: Any) -> None:
    raw = client.fine_tuning.jobs.with_raw_response
    job = strict(FineTuningJob, raw.retrieve(done.id))
    assert (job.status, job.error) == ("succeeded", None)
    assert job.finished_at >= job.created_at
    assert {"learning_rate", "r"} <= job.hyperparameters.to_dict().keys(), "the best configuration's, beside OpenAI's"
    assert strict_page(FineTuningJob, raw.list(limit=100))
    events = strict_page(FineTuningJobEvent, raw.list_events(done.id, limit=100))
    assert {event.type for event in events} == {"message", "metrics"}
    assert strict_page(FineTuningJobCheckpoint, client.fine_tuning.jobs.checkpoints.with_raw_response.list(done.id))
    file = service.upload(client)
    methods: list[Any] = [
        {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": [2, 4]}}},
        {"type": "supervised"},
        {"type": "dpo", "dpo": {"hyperparameters": {"beta": "auto", "n_epochs": "auto", "learning_rate": 1e-4}}},
        {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.5, "batch_size": 4, "r": [4, 8]}}},
        {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3, "learning_rate_multiplier": 2}}},
        {
            "type": "reinforcement",
            "reinforcement": {
                "grader": {
                    "type": "string_check",
                    "name": "right",
                    "operation": "eq",
                    "input": "{{sample.output_text}}",
                    "reference": "{{item.reference}}",
                },
                "hyperparameters": {"n_epochs": 1, "learning_rate_multiplier": 1, "compute_multiplier": 0.5},
            },
        },
    ]
    for method in methods:
        answer = raw.create(model="alto-tiny", training_file=file, method=method, suffix="a", seed=3, metadata={})
        created = strict(FineTuningJob, answer)
        strict(FineTuningJob, raw.retrieve(created.id))
        with contextlib.suppress(openai.BadRequestError):  # it has ended already
            strict(FineTuningJob, raw.cancel(created.id))
    bad = service.upload(client, b'{"prompt": 3}\n')
    failed = service.finished(client, client.fine_tuning.jobs.create(model="alto-tiny", training_file=bad).id)
    assert strict(FineTuningJob, raw.retrieve(failed.id)).error.message


@pytest.mark.parametrize("n_epochs", [0.4, 1.5, 2])
def test_epochs_are_returned_as_they_were_sent(service: Served, client: openai.OpenAI, n_epochs: Any) -> None:
    job = client.fine_tuning.jobs.create(
        model="alto-tiny", training_file=service.upload(client), hyperparameters={**FIXED, "n_epochs": n_epochs}
    )
    shown = job.hyperparameters
    assert (shown.n_epochs, type(shown.n_epochs)) == (n_epochs, type(n_epochs))
    client.fine_tuning.jobs.cancel(job.id)


def test_integrations_are_refused_with_a_route_that_exists(service: Served, client: openai.OpenAI, done: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.create(
            model="alto-tiny",
            training_file=service.upload(client),
            integrations=[{"type": "wandb", "wandb": {"project": "a"}}],
        )
    (path,) = re.findall(r"/api/\S+", str(caught.value.body["message"]))  # type: ignore[index]
    assert httpx2.get(f"{service.url}{path}".replace("{id}", done.id)).status_code == 200


def test_codes_of_what_is_not_there_are_words(service: Served, client: openai.OpenAI, done: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.fine_tuning.jobs.retrieve("ftjob-0")
    assert caught.value.code == "fine_tuning_job_not_found"


def test_files_are_what_the_client_types_say(client: openai.OpenAI, done: Any) -> None:
    raw = client.files.with_raw_response
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    file = strict(FileObject, raw.create(file=("a.jsonl", ROWS), purpose="fine-tune", expires_after=expiry))
    assert (file.bytes, file.filename, file.status) == (len(ROWS), "a.jsonl", "processed")
    assert file.expires_at == file.created_at + 3600
    assert client.files.content(file.id).read() == ROWS
    assert strict(FileObject, raw.retrieve(file.id)) == file
    broken = strict(FileObject, raw.create(file=("a.jsonl", b"{\n"), purpose="fine-tune"))
    assert (broken.status, bool(broken.status_details)) == ("error", True)
    assert {each.purpose for each in strict_page(FileObject, raw.list())} == {"fine-tune", "fine-tune-results"}
    assert {each.purpose for each in client.files.list(purpose="fine-tune-results")} == {"fine-tune-results"}
    assert strict(FileDeleted, raw.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


@pytest.mark.parametrize(
    "expiry",
    [{"anchor": "created_at", "seconds": 3599}, {"anchor": "created_at", "seconds": 2592001},
     {"anchor": "now", "seconds": 3600}, {"anchor": "created_at"}, {"seconds": 3600}],
)  # fmt: skip
def test_an_expiry_out_of_bounds_is_refused(client: openai.OpenAI, expiry: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(file=("a", ROWS), purpose="fine-tune", expires_after=expiry)


def test_an_expired_file_is_gone(service: Served, client: openai.OpenAI) -> None:
    file = service.upload(client)
    with service.service.store.writing() as session:
        session.query(FileRow).filter_by(id=file).update({"expires_at": 1})
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file)
    assert file not in {each.id for each in client.files.list()}
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.create(model="alto-tiny", training_file=file)


def test_models_are_what_the_client_types_say(service: Served, client: openai.OpenAI) -> None:
    job = client.fine_tuning.jobs.create(
        model="alto-tiny", training_file=service.upload(client), hyperparameters=FIXED, suffix="gone"  # type: ignore[arg-type]
    )  # fmt: skip
    name = service.finished(client, job.id).fine_tuned_model
    raw = client.models.with_raw_response
    assert {"alto-tiny", name} <= {model.id for model in strict_page(Model, raw.list())}
    assert strict(Model, raw.retrieve(name)).owned_by == "default"
    assert strict(Model, raw.retrieve("alto-tiny")).owned_by == "alto"
    assert strict(ModelDeleted, raw.delete(name)).deleted
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(name)
    with pytest.raises(openai.BadRequestError):
        client.models.delete("alto-tiny")


def test_uploads_are_what_the_client_types_say(client: openai.OpenAI) -> None:
    raw = client.uploads.with_raw_response
    upload = strict(Upload, raw.create(bytes=len(ROWS), filename="a.jsonl", **PART))  # type: ignore[arg-type]
    halves = [ROWS[:100], ROWS[100:]]
    parts = [strict(UploadPart, client.uploads.parts.with_raw_response.create(upload.id, data=half)) for half in halves]
    with pytest.raises(openai.BadRequestError, match="md5"):
        client.uploads.complete(upload.id, part_ids=[part.id for part in parts], md5="0" * 32)
    for wrong in ([parts[0].id], [parts[0].id] * 2, ["part-0"], [parts[0].id, parts[1].id, parts[1].id]):
        with pytest.raises(openai.BadRequestError, match="part_ids"):
            client.uploads.complete(upload.id, part_ids=wrong)
    whole = strict(Upload, raw.complete(upload.id, part_ids=[part.id for part in parts]))
    assert whole.file.status == "processed"
    assert client.files.content(whole.file.id).read() == ROWS
    for refused in (client.uploads.cancel, lambda name: client.uploads.parts.create(name, data=b"x")):
        with pytest.raises(openai.BadRequestError, match="completed"):
            refused(upload.id)  # type: ignore[operator]
    given_up = client.uploads.create(bytes=3, filename="../../a.jsonl", **PART)  # type: ignore[arg-type]
    assert given_up.filename == "a.jsonl"
    assert strict(Upload, raw.cancel(given_up.id)).status == "cancelled"
    assert client.uploads.cancel(given_up.id).status == "cancelled"


def test_a_file_is_uploaded_in_chunks(client: openai.OpenAI) -> None:
    upload = client.uploads.upload_file_chunked(
        file=ROWS,
        filename="a.jsonl",
        bytes=len(ROWS),
        mime_type="application/jsonl",
        purpose="fine-tune",
        part_size=999,
    )
    assert upload.file is not None
    assert client.files.content(upload.file.id).read() == ROWS


@pytest.mark.parametrize(("data", "message"), [(b"", "found none"), (b"four", "found more")])
def test_parts_are_neither_empty_nor_more_than_announced(client: openai.OpenAI, data: bytes, message: str) -> None:
    upload = client.uploads.create(bytes=3, filename="a", **PART)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match=message):
        client.uploads.parts.create(upload.id, data=io.BytesIO(data))


# -- pages -------------------------------------------------------------------------------------------------------------


def test_pages_have_each_object_once_while_others_are_made(service: Served, client: openai.OpenAI) -> None:
    first = [service.upload(client) for _ in range(7)]
    is_over = threading.Event()

    def make_more() -> None:
        while not is_over.is_set():
            service.upload(client)

    with ThreadPoolExecutor(2) as pool:
        makers = [pool.submit(make_more) for _ in range(2)]
        try:
            newest_first = [file.id for file in client.files.list(limit=2)]
            oldest_first = list[str]()
            for file in client.files.list(limit=2, order="asc"):  # it never ends while others are made
                oldest_first.append(file.id)
                if set(first) <= set(oldest_first):
                    break
        finally:
            is_over.set()
        for maker in makers:
            maker.result()
    for seen, expected in ((newest_first, first[::-1]), (oldest_first, first)):
        assert len(seen) == len(set(seen))
        assert [file for file in seen if file in first] == expected


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 100])
def test_pages_of_events_end_where_they_end(client: openai.OpenAI, done: Any, limit: int) -> None:
    whole = client.fine_tuning.jobs.list_events(done.id, limit=100)
    ids = [event.id for event in whole.data]
    assert not whole.has_more
    assert [event.id for event in client.fine_tuning.jobs.list_events(done.id, limit=limit)] == ids
    at_the_end = client.fine_tuning.jobs.list_events(done.id, limit=min(100, len(ids)))
    assert (len(at_the_end.data), at_the_end.has_more) == (len(ids), False)
    assert client.fine_tuning.jobs.list_events(done.id, limit=len(ids) - 1).has_more
    points = client.fine_tuning.jobs.checkpoints.list(done.id, limit=100).data
    assert list(client.fine_tuning.jobs.checkpoints.list(done.id, limit=limit)) == points
    behind = client.fine_tuning.jobs.list_events(done.id, after=ids[-1])
    assert (behind.data, behind.has_more) == ([], False)


def test_pages_of_jobs_and_files_go_on_after_what_was_deleted(service: Served, client: openai.OpenAI) -> None:
    files = [service.upload(client) for _ in range(3)]
    client.files.delete(files[1])
    page = client.files.list(after=files[1], limit=1)
    assert [file.id for file in page.data] == [files[0]]
    ids = [client.fine_tuning.jobs.create(model="alto-tiny", training_file=files[0]).id for _ in range(3)]
    assert [job.id for job in client.fine_tuning.jobs.list(limit=3).data] == ids[::-1]
    assert client.fine_tuning.jobs.list(after=ids[1], limit=1).data[0].id == ids[0]
    for job in ids:
        client.fine_tuning.jobs.cancel(job)


@pytest.mark.parametrize("limit", [0, -1, 101, 10**30, "x", "1.5", ""])
@pytest.mark.parametrize("list_", ["jobs", "events", "checkpoints", "files"])
def test_limits_have_bounds(client: openai.OpenAI, done: Any, list_: str, limit: Any) -> None:
    lists: dict[str, Callable[[], Any]] = {
        "jobs": lambda: client.fine_tuning.jobs.list(limit=limit),
        "events": lambda: client.fine_tuning.jobs.list_events(done.id, limit=limit),
        "checkpoints": lambda: client.fine_tuning.jobs.checkpoints.list(done.id, limit=limit),
        "files": lambda: client.files.list(limit=10_001 if limit == 101 else limit),
    }
    with pytest.raises(openai.BadRequestError, match="limit"):
        lists[list_]()


@pytest.mark.parametrize("after", ["", "x", "file-0", "'; --", "é", "ftevent-1-1", "0" * 200])
def test_nonsense_to_begin_after_is_not_found(client: openai.OpenAI, done: Any, after: str) -> None:
    for call in (
        lambda: client.fine_tuning.jobs.list(after=after),
        lambda: client.fine_tuning.jobs.list_events(done.id, after=after),
        lambda: client.fine_tuning.jobs.checkpoints.list(done.id, after=after),
        lambda: client.files.list(after=after),
    ):
        with pytest.raises(openai.NotFoundError, match=r"after|fine_tuning_job_id"):
            call()
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.list_events(done.id, after=f"ftevent-{done.id.partition('-')[2]}-999999")


KEYS = {
    "team": "a",
    "é": "ü",
    'q"q': '"',
    "a.b": "$",
    " ": " ",
    "back\\slash": "\\",
    "[0]": "x",
    "'": "'",
    "%": "%",
    "": "",
}


def test_metadata_filters_by_any_key(service: Served, client: openai.OpenAI) -> None:
    file = service.upload(client)
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=file, metadata=KEYS).id
    other = client.fine_tuning.jobs.create(model="alto-tiny", training_file=file).id
    assert client.fine_tuning.jobs.retrieve(job).metadata == KEYS
    for key, value in KEYS.items():
        assert [each.id for each in client.fine_tuning.jobs.list(metadata={key: value})] == [job], key
        assert not client.fine_tuning.jobs.list(metadata={key: f"{value}x"}).data
    assert not client.fine_tuning.jobs.list(metadata={"team": "a", "a.b": "x"}).data
    without = {each.id for each in client.fine_tuning.jobs.list(extra_query={"metadata": "null"}, limit=100)}
    assert other in without
    assert job not in without
    with pytest.raises(openai.BadRequestError, match="at most 16"):
        client.fine_tuning.jobs.list(metadata={f"k{number}": "x" for number in range(17)})


@pytest.mark.parametrize(
    "pairs", [{f"k{n}": "x" for n in range(17)}, {"k" * 65: "x"}, {"k": "x" * 513}, {"k": 1}, {"k": None}, "text"]
)
def test_metadata_have_bounds(service: Served, client: openai.OpenAI, pairs: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="metadata"):
        client.fine_tuning.jobs.create(model="alto-tiny", training_file="file-0", metadata=pairs)


# -- repeated requests -------------------------------------------------------------------------------------------------

RETRY = {"x-stainless-retry-count": "1"}


def repeated(service: Served, client: openai.OpenAI) -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Return by kind the table of an object, and a request that creates it."""
    file = service.upload(client)
    upload = client.uploads.create(bytes=1000, filename="a", **PART).id  # type: ignore[arg-type]
    return {
        "job": (JobRow, lambda **more: client.fine_tuning.jobs.create(
            model="alto-tiny", training_file=file, hyperparameters=FIXED, **more)),
        "file": (FileRow, lambda **more: client.files.create(file=("b.jsonl", ROWS), purpose="fine-tune", **more)),
        "upload": (UploadRow, lambda **more: client.uploads.create(bytes=7, filename="c", **PART, **more)),
        "part": (PartRow, lambda **more: client.uploads.parts.create(upload, data=b"abc", **more)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["job", "file", "upload", "part"])
def test_a_repeated_request_creates_nothing(service: Served, client: openai.OpenAI, kind: str) -> None:
    table, create = repeated(service, client)[kind]
    first = create().id

    def count() -> int:
        with service.service.store.reading() as session:
            # Jobs that end meanwhile have files of their own.
            return session.query(table).filter(table.purpose == "fine-tune" if table is FileRow else True).count()

    before = count()
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda _: create(extra_headers=RETRY).id, range(8)))
    assert set(again) == {first}
    assert count() == before
    assert create().id != first, "without the retry header it is another request"
    with ThreadPoolExecutor(8) as pool:
        key = {"Idempotency-Key": f"key of {kind}"}
        keyed = set(pool.map(lambda _: create(extra_headers=key).id, range(8)))
    assert len(keyed) == 1
    assert count() == before + 2


def test_a_key_is_for_one_body(service: Served, client: openai.OpenAI) -> None:
    key = {"Idempotency-Key": "one"}
    first = client.files.create(file=("a", ROWS), purpose="fine-tune", extra_headers=key)
    assert client.files.create(file=("a", ROWS), purpose="fine-tune", extra_headers=key).id == first.id
    for name, content in (("b", ROWS), ("a", ROWS + ROWS)):
        with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
            client.files.create(file=(name, content), purpose="fine-tune", extra_headers=key)
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
        client.files.create(file=("a", ROWS), purpose="fine-tune", expires_after=expiry, extra_headers=key)
    upload = client.uploads.create(bytes=7, filename="c", **PART, extra_headers=key)  # type: ignore[arg-type]
    assert upload.id != first.id, "keys of other addresses are separate"


def test_an_upload_completes_once(service: Served, client: openai.OpenAI) -> None:
    upload = client.uploads.create(bytes=len(ROWS), filename="once.jsonl", **PART)  # type: ignore[arg-type]
    part = client.uploads.parts.create(upload.id, data=ROWS).id
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: client.uploads.complete(upload.id, part_ids=[part]).file.id, range(8)))  # type: ignore[union-attr]
    assert len(set(found)) == 1
    assert [file.filename for file in client.files.list()].count("once.jsonl") == 1


def test_the_client_repeats_a_lost_answer_by_itself(service: Served) -> None:
    lost = list[str]()

    class Lossy(httpx2.HTTPTransport):
        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            response = super().handle_request(request)
            if request.method == "POST" and not lost:
                lost.append(json.loads(response.read())["id"])
                raise httpx2.ReadError("the connection was cut")
            return response

    with httpx2.Client(transport=Lossy()) as http:
        client = service.client(max_retries=2, http_client=http)
        assert service.upload(client) == lost[0]


def test_requests_have_ids(service: Served, client: openai.OpenAI) -> None:
    assert client.models.list()._request_id.startswith("req_")  # type: ignore[union-attr]
    named = client.models.with_raw_response.list(extra_headers={"x-request-id": "mine-1"})
    assert named.headers["x-request-id"] == "mine-1"
    for bad in ("a b", "x" * 65, "<script>"):
        named = client.models.with_raw_response.list(extra_headers={"x-request-id": bad})
        assert named.headers["x-request-id"] != bad


def test_a_paused_job_is_a_job(service: Served, client: openai.OpenAI) -> None:
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client), hyperparameters=FIXED)  # type: ignore[arg-type]
    wait_for(lambda: client.fine_tuning.jobs.retrieve(job.id).status != "validating_files")
    raw = client.fine_tuning.jobs.with_raw_response
    strict(FineTuningJob, raw.pause(job.id))
    assert client.fine_tuning.jobs.retrieve(job.id).status == "paused"
    strict(FineTuningJob, raw.resume(job.id))
    strict(FineTuningJob, raw.cancel(job.id))


@pytest.mark.parametrize("kind", ["job", "upload"])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_the_repetition_of_a_request_that_was_one_too_many_creates_an_object_of_its_own(
    service: Served, monkeypatch: pytest.MonkeyPatch, kind: str, *, is_cancelled: bool
) -> None:
    """The unmodified client repeats a request after 429, and must not get an older object."""
    client = service.client(max_retries=2)
    create = repeated(service, client)[kind][1]
    older = create().id
    if is_cancelled:
        (client.fine_tuning.jobs if kind == "job" else client.uploads).cancel(older)
    created = refused_once(service, monkeypatch, create)
    assert created != older
    assert create(extra_headers=RETRY).id == created, "it has succeeded, so it is remembered"


def test_a_repetition_that_is_one_too_many_still_finds_what_the_lost_answer_was_about(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = repeated(service, service.client(max_retries=2))["job"][1]
    lost = create().id
    assert refused_once(service, monkeypatch, lambda: create(extra_headers=RETRY)) == lost


def test_a_key_of_a_request_that_was_refused_is_free(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    create = repeated(service, service.client(max_retries=2))["job"][1]
    key = {"Idempotency-Key": "refused at first"}
    older = create().id
    created = refused_once(service, monkeypatch, lambda: create(extra_headers=key))
    assert created != older
    assert create(extra_headers=key).id == created
    assert create(extra_headers=RETRY).id == older, "a request with a key does not affect those without"


@pytest.mark.parametrize("kind", ["job", "file", "upload"])
def test_a_repetition_finds_no_object_that_was_cancelled_or_deleted(
    service: Served, client: openai.OpenAI, kind: str
) -> None:
    """If a proxy has refused the request, this service never saw it."""
    create = repeated(service, client)[kind][1]
    older = create().id
    end = {"job": client.fine_tuning.jobs.cancel, "file": client.files.delete, "upload": client.uploads.cancel}
    end[kind](older)
    assert create(extra_headers=RETRY).id != older


def refused_once(service: Served, monkeypatch: pytest.MonkeyPatch, create: Callable[[], Any]) -> str:
    """Return the id of the object created by a request whose first attempt was refused by the rate limit."""
    take, refused = service.service.rates.take, list[str]()

    def refuse_once(name: str, requests_per_s: float | None) -> None:
        if not refused:
            refused.append(name)
            raise ApiError(429, "too many", code="rate_limit_exceeded", headers={"Retry-After": "1"})
        take(name, requests_per_s)

    with monkeypatch.context() as patch:
        patch.setattr(service.service.rates, "take", refuse_once)
        created = str(create().id)
    assert refused
    return created
