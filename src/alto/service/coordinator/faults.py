"""What an error concerns: one job, the disk or the store of artefacts, or the whole service."""

from __future__ import annotations

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from alto.errors import AltoError, DataError, ModelError, RunWriteError
from alto.service.coordinator.leadership import LostLeadershipError
from alto.service.errors import ApiError

__all__ = ["code_of", "is_of_service", "is_of_storage"]


def is_of_service(error: Exception) -> bool:
    """Whether no job can be worked on: the database does not answer, or another server leads."""
    return isinstance(error, LostLeadershipError | OperationalError | InterfaceError | PoolTimeoutError)


def code_of(error: Exception, code: str) -> tuple[str, str | None]:
    """The code and the parameter of a job's error: ``code`` where neither its rows nor its model are the cause."""
    match error:
        case DataError():
            return "invalid_training_file", "training_file"
        case ModelError():
            return "invalid_model", "model"
        case ApiError():
            return error.code or code, error.param
    return code, None


def is_of_storage(error: Exception) -> bool:
    """Whether a disk or the store of artefacts refused: the same job may succeed later, unless a file is gone."""
    return isinstance(error, RunWriteError) or (
        isinstance(error, OSError) and not isinstance(error, AltoError | FileNotFoundError)
    )
