"""Scope of an error: one job, storage (a disk or the artefact store), or the whole service."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from alto import errors
from alto.errors import AltoError, DataError, ModelError, RunWriteError
from alto.service.coordinator.leadership import LostLeadershipError
from alto.service.errors import ApiError

__all__ = ["code_of", "code_of_end", "is_of_service", "is_of_storage", "missing_file"]


def is_of_service(error: Exception) -> bool:
    """Return whether no job can be worked on: the database does not answer, or another server leads."""
    return isinstance(error, LostLeadershipError | OperationalError | InterfaceError | PoolTimeoutError)


def code_of(error: Exception, code: str) -> tuple[str, str | None]:
    """Return the error code and request parameter for an error of a job; ``code`` is the default."""
    if isinstance(error, ApiError):
        return error.code or code, error.param
    return _code_of_class(type(error), code)


def code_of_end(error: str, code: str) -> tuple[str, str | None]:
    """Return the same for an executor that ended with an error whose class is called ``error``."""
    found = getattr(errors, error, None)
    return _code_of_class(found if isinstance(found, type) else Exception, code)


def _code_of_class(kind: type, code: str) -> tuple[str, str | None]:
    if issubclass(kind, DataError):
        return "invalid_training_file", "training_file"
    if issubclass(kind, ModelError):
        return "invalid_model", "model"
    return code, None


def is_of_storage(error: Exception) -> bool:
    """Return whether a disk or the artefact store failed, so that the job may succeed later (unless a file is gone)."""
    return isinstance(error, RunWriteError) or (
        isinstance(error, OSError) and not isinstance(error, AltoError | FileNotFoundError)
    )


def missing_file(error: FileNotFoundError) -> str:
    """Return a message for the user that names the missing file of a job."""
    name = Path(str(error.filename)).name if error.filename else str(error)
    return f"expected all files of the job, found that {name} is gone; create the job again"
