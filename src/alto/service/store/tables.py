"""The tables of the service. Times are unix seconds; the database numbers rows that have an order of their own."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, Float, ForeignKey, Integer, MetaData, String, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = JSON().with_variant(JSONB(), "postgresql")
Number = BigInteger().with_variant(Integer(), "sqlite")
"""Type of row numbers; SQLite generates numbers only for columns of type Integer."""


class Base(DeclarativeBase):
    """The base of all tables."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_name)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class Tenant(Base):
    """An owner of keys, files and jobs. A limit of None means unlimited.

    Attributes:
        max_gpus: Maximum number of GPUs that its tasks use at a time.
        max_tasks: Maximum number of tasks that have not ended.
        max_bytes: Maximum total size of its files and run folders.
        requests_per_s: Maximum request rate, averaged over a few seconds.
        shares_executors: Whether its tasks may be trained in one process with tasks of other tenants.
    """

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    max_gpus: Mapped[int | None] = mapped_column(Integer)
    max_tasks: Mapped[int | None] = mapped_column(Integer)
    max_bytes: Mapped[int | None] = mapped_column(BigInteger)
    requests_per_s: Mapped[float | None] = mapped_column(Float)
    shares_executors: Mapped[bool] = mapped_column(Boolean, default=False)


class KeyRow(Base):
    """A bearer key; only a hash of its secret is stored.

    Attributes:
        secret_hash: SHA-256 of the secret, which has 256 random bits, as hexadecimal digits.
        scopes: Permissions of the key, see :data:`alto.service.access.SCOPES`.
    """

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name"), index=True)
    name: Mapped[str] = mapped_column(String(100))
    secret_hash: Mapped[str] = mapped_column(String(64), unique=True)
    scopes: Mapped[list[str]] = mapped_column(Json)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int | None] = mapped_column(BigInteger)
    revoked_at: Mapped[int | None] = mapped_column(BigInteger)


class FileRow(Base):
    """A file. Rows of deleted files stay, without name and content, so that a page can begin after them.

    Attributes:
        status: ``processed``, or ``error`` with the reason in ``status_details``.
    """

    __tablename__ = "files"

    number: Mapped[int] = mapped_column(Number, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    filename: Mapped[str] = mapped_column(Text)
    purpose: Mapped[str] = mapped_column(String(64))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int | None] = mapped_column(BigInteger)
    deleted_at: Mapped[int | None] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(String(16))
    status_details: Mapped[str | None] = mapped_column(Text)


class UploadRow(Base):
    """A file that is uploaded in parts."""

    __tablename__ = "uploads"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    filename: Mapped[str] = mapped_column(Text)
    purpose: Mapped[str] = mapped_column(String(64))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int] = mapped_column(BigInteger)
    expires_after_s: Mapped[int | None] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(String(16))
    file: Mapped[str | None] = mapped_column(String(64))


class PartRow(Base):
    """A part of an upload."""

    __tablename__ = "upload_parts"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    upload: Mapped[str] = mapped_column(ForeignKey("uploads.id"), index=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    num_bytes: Mapped[int] = mapped_column(BigInteger)


class JobRow(Base):
    """A fine-tuning job of the API, which is a task of ALTO.

    Attributes:
        request: Body of the request that created it.
        task: Keys and values of its task, without its files.
        pairs: Its metadata.
        error: Code, message and param of the error if it failed.
        result: Results that the API reports; None unless it has succeeded.
        run_dir: Folder of its run; None until it is made.
        lease: Number of times that its run was given to the control plane. The run's folder refuses an executor with an
            older lease.
        num_events: Number of its last event.
        journal_seq: Number of entries of the run's journal that were turned into events.
    """

    __tablename__ = "jobs"

    number: Mapped[int] = mapped_column(Number, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    status: Mapped[str] = mapped_column(String(32), index=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    started_at: Mapped[int | None] = mapped_column(BigInteger)
    finished_at: Mapped[int | None] = mapped_column(BigInteger)
    estimated_finish: Mapped[int | None] = mapped_column(BigInteger)
    model: Mapped[str] = mapped_column(Text)
    training_file: Mapped[str] = mapped_column(String(64))
    validation_file: Mapped[str | None] = mapped_column(String(64))
    seed: Mapped[int] = mapped_column(BigInteger)
    suffix: Mapped[str | None] = mapped_column(String(64))
    priority: Mapped[int] = mapped_column(Integer, default=0)
    request: Mapped[dict[str, Any]] = mapped_column(Json)
    task: Mapped[dict[str, Any]] = mapped_column(Json)
    pairs: Mapped[dict[str, str] | None] = mapped_column(Json)
    error: Mapped[dict[str, Any] | None] = mapped_column(Json)
    result: Mapped[dict[str, Any] | None] = mapped_column(Json)
    fine_tuned_model: Mapped[str | None] = mapped_column(Text)
    run_dir: Mapped[str | None] = mapped_column(Text)
    lease: Mapped[int] = mapped_column(Integer, default=0)
    num_events: Mapped[int] = mapped_column(Integer, default=0)
    journal_seq: Mapped[int] = mapped_column(Integer, default=0)


class JobEvent(Base):
    """An event of a job; ``number`` counts from 1 within the job, without gaps, in the order of commits."""

    __tablename__ = "job_events"

    job: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    created_at: Mapped[int] = mapped_column(BigInteger)
    level: Mapped[str] = mapped_column(String(8))
    type: Mapped[str] = mapped_column(String(16))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any] | None] = mapped_column(Json)


class Checkpoint(Base):
    """A training step of a task's job with a new best validation loss; its adapter replaces the previous checkpoint's.

    Attributes:
        model: Name under which the API lists it.
    """

    __tablename__ = "checkpoints"

    number: Mapped[int] = mapped_column(Number, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    job: Mapped[str] = mapped_column(String(64), index=True)
    task_job: Mapped[str] = mapped_column(String(64))
    step: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[int] = mapped_column(BigInteger)
    model: Mapped[str] = mapped_column(Text)
    metrics: Mapped[dict[str, Any]] = mapped_column(Json)


class ModelRow(Base):
    """A model that a job has returned.

    Attributes:
        adapter: Folder of the adapter among the artifacts.
        serving: State of its registration with a vLLM server: ``none``, ``pending``, ``ready`` or ``failed``. A deleted
            model becomes ``none`` once the server has unloaded it.
        serving_details: Why it failed, waits, or is not registered.
    """

    __tablename__ = "models"

    number: Mapped[int] = mapped_column(Number, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(512), unique=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    job: Mapped[str] = mapped_column(String(64))
    base_model: Mapped[str] = mapped_column(Text)
    adapter: Mapped[str] = mapped_column(Text)
    created_at: Mapped[int] = mapped_column(BigInteger)
    deleted_at: Mapped[int | None] = mapped_column(BigInteger)
    serving: Mapped[str] = mapped_column(String(16), default="none")
    serving_details: Mapped[str | None] = mapped_column(Text)


class AliasRow(Base):
    """A name that points to the newest ready model of a tenant, base model and suffix.

    Attributes:
        model: Id of that model.
        moved_at: Time at which it began to point to that model.
    """

    __tablename__ = "aliases"

    name: Mapped[str] = mapped_column(String(512), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    base_model: Mapped[str] = mapped_column(Text)
    suffix: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(512), index=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    moved_at: Mapped[int] = mapped_column(BigInteger)


class ReplayRow(Base):
    """The object that a request has created. If the request is repeated, nothing is created.

    Attributes:
        digest: SHA-256 of tenant, path, and the idempotency key or the body.
        kind: Kind of the object; ``id`` is its id.
    """

    __tablename__ = "replays"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    kind: Mapped[str] = mapped_column(String(16))
    id: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger, index=True)


class LeaderRow(Base):
    """The lease of the server that drives the control plane.

    Attributes:
        epoch: Number of the current leader, larger than the numbers of earlier leaders, whose writes are refused.
        holder: A random id of the leader, new at each of its starts; empty if no server leads.
        renewed_at: Time of the lease's last renewal, by the clock of the database.
    """

    __tablename__ = "leader"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    epoch: Mapped[int] = mapped_column(BigInteger)
    holder: Mapped[str] = mapped_column(Text)
    renewed_at: Mapped[float] = mapped_column(Float)
