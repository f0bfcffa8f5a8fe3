"""The document of the API against its answers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from services import ROWS, Served, served

from alto.service.serve import create_app

NUM_EXAMPLES = 15
"""Requests per operation."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("service")) as found:
        yield found


def test_every_operation_is_described(service: Served) -> None:
    document = create_app(service.service).openapi()
    names = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            names.append(operation["operationId"])
            assert operation["description"], (method, path)
            if operation.get("security") == []:
                continue
            for status in ("400", "401", "403", "404", "413", "429", "default"):
                schema = operation["responses"][status]["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}, (method, path)
            assert "422" not in operation["responses"], "it is answered by 400"
    assert len(names) == len(set(names)) > 30


def test_the_document_says_which_requests_need_a_key(service: Served) -> None:
    document = create_app(service.service).openapi()
    (scheme,) = document["security"]
    (found,) = (document["components"]["securitySchemes"][name] for name in scheme)
    assert (found["type"], found["scheme"]) == ("http", "bearer")
    open_to_all = {
        path
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if operation.get("security") == []
    }
    assert open_to_all == {"/healthz", "/readyz", "/metrics"}


def test_checkpoints_are_those_of_every_configuration(service: Served) -> None:
    operation = create_app(service.service).openapi()["paths"]["/v1/fine_tuning/jobs/{job_id}/checkpoints"]["get"]
    assert "of every configuration" in operation["description"]


@pytest.mark.slow("campaigns")
def test_no_request_makes_the_service_fail(service: Served) -> None:
    """For every operation there are requests that the document allows, and requests that it forbids."""
    import schemathesis
    from hypothesis import HealthCheck, given, seed, settings
    from schemathesis import GenerationMode

    client = service.client()
    file = service.upload(client)
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=file).id
    upload = client.uploads.create(bytes=len(ROWS), filename="a", mime_type="a", purpose="fine-tune").id
    known = {"file_id": file, "job_id": job, "task": job, "upload_id": upload}
    client.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by packages that it loads
        schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    num_answers = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:

            @seed(0)
            @settings(
                max_examples=NUM_EXAMPLES, deadline=None, database=None, derandomize=False,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                nonlocal num_answers
                if num_answers % 2:  # existing objects
                    case.path_parameters.update({key: known[key] for key in case.path_parameters if key in known})
                if case.path.endswith("/events") and case.path.startswith("/api") and num_answers % 2:
                    return  # it ends with the job
                answer = case.call(base_url=service.url, timeout=30)
                num_answers += 1
                if case.path == "/readyz":
                    assert answer.status_code in (405, 503), "this server does not lead"
                    return
                assert answer.status_code < 500, (case, answer.text)
                assert answer.status_code != 409

            try:
                check()
            except Exception as error:
                if "Unsatisfiable" not in type(error).__name__:  # there is nothing to forbid
                    raise
    assert num_answers > 500
