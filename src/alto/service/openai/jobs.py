"""``/v1/fine_tuning/jobs``: each job is a task of ALTO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel, ConfigDict, Field, field_validator
from sqlalchemy import ColumnElement, Text, cast, exists, func, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session

from alto.service.access import Caller
from alto.service.context import Service, ServiceOf
from alto.service.errors import ApiError, not_found, refused
from alto.service.ids import new_id, now
from alto.service.models import base_model_of
from alto.service.openai.files import FINE_TUNE, check_quota, find_file
from alto.service.openai.graders import reward_values
from alto.service.openai.objects import After, Limit, checkpoint_object, event_object, job_object, list_object
from alto.service.openai.translation import METHODS, REINFORCEMENT, build, task_values
from alto.service.settings import MOST_NAME_CHARS
from alto.service.store.jobs import add_event, cancel_job, count_open, find_job, page_of, pause_job, resume_job
from alto.service.store.store import RequestMark
from alto.service.store.tables import Checkpoint, JobEvent, JobRow, Tenant
from alto.service.web.access import Reader, Writer
from alto.service.web.answers import mark_of
from alto.service.web.bodies import BodyRoute
from alto.spec import Task, unserved_by_vllm

_MOST_PAIRS = 16
_DEFAULT_SEED = 42

router = APIRouter(prefix="/fine_tuning", route_class=BodyRoute)


class _MethodSettings(BaseModel):
    hyperparameters: dict[str, Any] = Field(default_factory=dict)


class _Reinforcement(_MethodSettings):
    model_config = ConfigDict(extra="forbid")

    grader: dict[str, Any]


class _Method(BaseModel):
    type: str
    supervised: _MethodSettings | None = None
    dpo: _MethodSettings | None = None
    reinforcement: _Reinforcement | None = None


class JobRequest(BaseModel):
    """The body of a request for a job."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=MOST_NAME_CHARS)
    training_file: str = Field(min_length=1, max_length=64)
    validation_file: str | None = Field(default=None, max_length=64)
    method: _Method | None = None
    hyperparameters: dict[str, Any] | None = None
    seed: int | None = Field(default=None, ge=0, le=2**31 - 1)
    suffix: str | None = Field(default=None, min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = None
    integrations: list[dict[str, Any]] | None = None

    @field_validator("metadata")
    @classmethod
    def _check_pairs(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if value is not None and len(value) > _MOST_PAIRS:
            raise ValueError(f"expected at most {_MOST_PAIRS} pairs, found {len(value)}")
        return value

    @property
    def kind(self) -> str:
        """Type of the method."""
        return "supervised" if self.method is None else self.method.type

    def checked_hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters.

        Raises:
            ApiError: This service does not train the method, or the hyperparameters are given twice.
        """
        if self.kind not in METHODS:
            raise refused(
                f"method.type: expected {' or '.join(METHODS)}, found {self.kind[:50]!r}; use one of these",
                "method",
                "unsupported_method",
            )
        settings = None if self.method is None else getattr(self.method, self.kind)
        inner = {} if settings is None else settings.hyperparameters
        if inner and self.hyperparameters:
            raise refused(
                "hyperparameters: expected values in method or at the top level, found both; remove the top-level "
                "values",
                "hyperparameters",
                "conflicting_keys",
            )
        return inner or self.hyperparameters or {}

    def checked_grader(self) -> dict[str, Any]:
        """Return the grader of the method ``reinforcement``.

        Raises:
            ApiError: The request has no grader.
        """
        if self.method is None or self.method.reinforcement is None:
            raise refused(
                "method.reinforcement: expected a grader, which scores the answers to learn from, found none; add one",
                "grader",
            )
        return self.method.reinforcement.grader


@router.post("/jobs")
def create(
    request: Request,
    service: ServiceOf,
    caller: Writer,
    body: JobRequest,
    priority: Annotated[int | None, Header(alias="alto-priority", ge=0, le=100)] = None,
) -> dict[str, Any]:
    """Accept a job. Once this is answered, the job survives any crash, and is trained once."""
    mark = mark_of(request, caller.tenant, request.state.body_hash)
    return job_object(create_job(service, caller, body, priority=priority, mark=mark))


def create_job(
    service: Service, caller: Caller, body: JobRequest, *, priority: int | None = None, mark: RequestMark
) -> JobRow:
    """Accept a job of ``caller``.

    Args:
        priority: Priority among the caller's other jobs, if it is not among the hyperparameters.
        mark: Identifies repetitions of the request.

    Raises:
        ApiError: The request is invalid or exceeds a limit.
    """
    values = draft_of(service, body)
    if priority is not None:
        if "priority" in values:
            raise refused(
                "alto-priority: expected this header or priority in the hyperparameters, found both; remove one",
                "alto-priority",
                "conflicting_keys",
            )
        values["priority"] = priority
    with service.store.writing() as session:
        before = mark.find(session)
        if before is not None:
            known = find_job(session, caller.tenant, before)
            if mark.key or known.status != "cancelled":  # cancelled: its client had the answer, so this is a new job
                return known
        for file, param in ((body.training_file, "training_file"), (body.validation_file, "validation_file")):
            if file is not None:
                check_usable(session, caller.tenant, file, param)
        limits = service.limits_of(session.get(Tenant, caller.tenant))
        num_gpus, most = int(values.get("num_gpus", 1)), limits.max_tasks
        if limits.max_gpus is not None and num_gpus > limits.max_gpus:
            raise refused(
                f"num_gpus: expected at most {limits.max_gpus}, the maximum of this tenant, found {num_gpus}",
                "hyperparameters",
                "too_many_gpus",
            )
        if most is not None and (num_open := count_open(session, caller.tenant)) >= most:
            raise ApiError(
                429,
                f"expected at most {most} open jobs, found {num_open}; wait for one to end, or cancel one",
                code="too_many_jobs",
                headers={"Retry-After": "60", "x-should-retry": "false"},
            )
        check_quota(service, session, caller, 0, param=None)
        row = JobRow(
            id=new_id("ftjob"),
            tenant=caller.tenant,
            status="validating_files",
            created_at=now(),
            model=body.model,
            training_file=body.training_file,
            validation_file=body.validation_file,
            seed=_DEFAULT_SEED if body.seed is None else body.seed,
            suffix=body.suffix,
            priority=int(values.get("priority", 0)),
            request=body.model_dump(mode="json", exclude_none=True),
            task=values,
            pairs=body.metadata,
            lease=0,
            num_events=0,
            journal_seq=0,
        )
        session.add(row)
        add_event(session, row, f"Created fine-tuning job: {row.id}")
        add_event(session, row, f"Validating training file: {row.training_file}")
        for note in serving_notes(service, body.model, _task_of(values)):
            add_event(session, row, note, level="warn")
        mark.note(session, "job", row.id)
    service.work.set()
    return row


def serving_notes(service: Service, base_model: str, task: Task) -> list[str]:
    """Return a notice if the service's vLLM server cannot serve the adapters of some configurations of a task."""
    if not service.settings.is_served(base_model):
        return []
    names = dict.fromkeys(name for job in task.jobs for name in unserved_by_vllm(job.config.model_dump()))
    if not names:
        return []
    return [
        f"vLLM cannot serve an adapter with {' or '.join(names)}: if such a configuration wins, serve the merged "
        "weights instead (POST /api/models/{id}/merged)"
    ]


def draft_of(service: Service, body: JobRequest) -> dict[str, Any]:
    """Return keys and values of a request's task, with everything checked except its rows.

    Raises:
        ApiError: The request is invalid.
    """
    if body.integrations:
        raise refused(
            "integrations: expected none, found some; follow the events of the job, or its curves under "
            "/api/tasks/{id}/curves",
            "integrations",
            "unsupported",
        )
    hyperparameters = body.checked_hyperparameters()
    values = task_values(body.kind, hyperparameters, seed=body.seed)
    if body.kind == REINFORCEMENT:
        values |= reward_values(body.checked_grader(), values.get("columns"), service.settings.graders)
    values |= base_model_of(service.settings, body.model)
    task = _task_of(values, hyperparameters)
    if len(task.jobs) > service.settings.max_jobs:
        raise refused(
            f"hyperparameters: expected at most {service.settings.max_jobs} configurations, found "
            f"{len(task.jobs)}; search fewer values, or set search: {{algorithm: tpe}} with a budget",
            "hyperparameters",
            "too_many_configurations",
        )
    return values


def _task_of(values: Mapping[str, Any], hyperparameters: Mapping[str, Any] | None = None) -> Task:
    """Return the task of :func:`draft_of`'s values, without its rows; see :func:`build` for ``hyperparameters``."""
    return build({**values, "name": "task", "dataset": "training.jsonl", "report_to": "none"}, hyperparameters)


def check_usable(session: Session, tenant: str, file: str, param: str) -> None:
    """Check that a file can be trained on.

    Raises:
        ApiError: There is no such file, it has another purpose, or its rows are damaged.
    """
    row = find_file(session, tenant, file, param)
    if row.purpose != FINE_TUNE:
        raise refused(f"{param}: expected a file for {FINE_TUNE!r}, found one for {row.purpose!r}", param)
    if row.status != "processed":
        raise refused(f"{param}: {row.status_details or 'the file cannot be used'}", param, "invalid_file_format")


@router.get("/jobs")
def list_(
    request: Request, service: ServiceOf, caller: Reader, after: After = None, limit: Limit = 20
) -> dict[str, Any]:
    """List the tenant's jobs, newest first; ``metadata[k]=v`` filters them, ``metadata=null`` finds jobs without it."""
    with service.store.reading() as session:
        statement = select(JobRow).where(JobRow.tenant == caller.tenant)
        for condition in _conditions(service, request):
            statement = statement.where(condition)
        number = None if after is None else find_job(session, caller.tenant, after, "after").number
        rows, has_more = page_of(session, statement, JobRow.number, after=number, limit=limit)
    return list_object([job_object(row) for row in rows], has_more=has_more)


@router.get("/jobs/{job_id}")
def get(service: ServiceOf, caller: Reader, job_id: str) -> dict[str, Any]:
    """Return a job."""
    with service.store.reading() as session:
        return job_object(find_job(session, caller.tenant, job_id))


@router.post("/jobs/{job_id}/{action}")
def change(
    service: ServiceOf, caller: Writer, job_id: str, action: Literal["cancel", "pause", "resume"]
) -> dict[str, Any]:
    """Cancel, pause or resume a job; return it with its new status."""
    changes = {"cancel": cancel_job, "pause": pause_job, "resume": resume_job}
    with service.store.writing() as session:
        row = changes[action](session, caller.tenant, job_id)
    service.work.set()
    return job_object(row)


@router.get("/jobs/{job_id}/events")
def events(service: ServiceOf, caller: Reader, job_id: str, after: After = None, limit: Limit = 20) -> dict[str, Any]:
    """List the events of a job, newest first."""
    with service.store.reading() as session:
        job = find_job(session, caller.tenant, job_id)
        number = None if after is None else _number_of_event(job, after)
        statement = select(JobEvent).where(JobEvent.job == job.id)
        rows, has_more = page_of(session, statement, JobEvent.number, after=number, limit=limit)
    return list_object([event_object(row) for row in rows], has_more=has_more)


@router.get("/jobs/{job_id}/checkpoints")
def checkpoints(
    service: ServiceOf, caller: Reader, job_id: str, after: After = None, limit: Limit = 10
) -> dict[str, Any]:
    """List steps with a new best validation loss, of every configuration, newest first. They are only names: adapters
    of checkpoints cannot be fetched or used."""
    with service.store.reading() as session:
        job = find_job(session, caller.tenant, job_id)
        statement = select(Checkpoint).where(Checkpoint.job == job.id)
        number = None
        if after is not None:
            number = session.scalar(select(Checkpoint.number).where(Checkpoint.id == after, Checkpoint.job == job.id))
            if number is None:
                raise not_found("checkpoint", after, "after")
        rows, has_more = page_of(session, statement, Checkpoint.number, after=number, limit=limit)
    return list_object([checkpoint_object(row) for row in rows], has_more=has_more)


def _conditions(service: Service, request: Request) -> list[ColumnElement[bool]]:
    """Return the request's conditions on the metadata of jobs."""
    found: list[ColumnElement[bool]] = []
    for key, value in request.query_params.multi_items():
        if key == "metadata" and value == "null":
            # A JSON column has two kinds of null.
            found.append(JobRow.pairs.is_(None) | (cast(JobRow.pairs, Text) == "null"))
        elif key.startswith("metadata[") and key.endswith("]"):
            name = key[len("metadata[") : -1]
            if service.store.is_sqlite:
                # A JSON path of SQLite cannot name every key.
                pairs = func.json_each(JobRow.pairs).table_valued("key", "value")
                found.append(exists().where(pairs.c.key == name, pairs.c.value == value))
            else:
                found.append(JobRow.pairs.op("@>")(cast({name: value}, JSONB)))
    if len(found) > _MOST_PAIRS:
        raise refused(f"metadata: expected at most {_MOST_PAIRS} conditions, found {len(found)}", "metadata")
    return found


def _number_of_event(job: JobRow, event: str) -> int:
    prefix, _, number = event.rpartition("-")
    if prefix != f"ftevent-{job.id.partition('-')[2]}" or not number.isdecimal() or int(number) > job.num_events:
        raise not_found("event", event, "after")
    return int(number)
