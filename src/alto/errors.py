"""The errors of ALTO.

::

    AltoError
    ├── SpecError (ValueError)              a task, or another specification, is not valid
    │   ├── UnknownKeyError                 an unknown key; names the one that was probably meant
    │   └── ConflictingKeysError            two spellings of one field, or one field in two places
    ├── DataError (ValueError)              a dataset cannot be read or holds nothing to train on
    │   ├── DataFileNotFoundError (FileNotFoundError)
    │   └── DataFormatError                 a dataset or a row has no supported form
    │       └── BadRowsError                some rows of a dataset cannot be used, or all of them
    ├── ModelError (ValueError)             the base model cannot be used
    │   ├── ModelNotFoundError (FileNotFoundError)
    │   ├── UnsupportedModelError           ALTO's forward pass would differ from the model's own
    │   └── TargetModuleError               a target or rank that does not fit the model
    ├── RunError (RuntimeError)             a run on disk is not what it should be
    │   ├── RunExistsError (FileExistsError)
    │   ├── RunNotFoundError (FileNotFoundError)
    │   ├── RunBusyError (BlockingIOError)  another process works on it
    │   ├── RunChangedError (ValueError)    its base model, data or settings have changed since it began
    │   ├── RunWriteError (OSError)         its disk cannot be written
    │   │   └── DiskFullError               it is full, or a quota is used up
    │   ├── JobCommandError (ValueError)    a command to a job cannot be carried out
    │   │   └── MailboxFullError            too many commands are already waiting for a task
    │   └── QueueCommandError (ValueError)  a command to a queue cannot be carried out
    ├── TaskInterruptedError (RuntimeError) a task was interrupted; it can be resumed
    ├── NoResultError (RuntimeError)        a task ended without any usable adapter
    ├── TasksFailedError (RuntimeError)     some tasks of a queue were given up; the others have their results
    ├── DeviceBusyError (BlockingIOError)   another process uses the GPU
    ├── ClusterLostError (ConnectionError)  the cluster on which tasks run can no longer be reached, or used as before
    ├── ClusterVersionError (RuntimeError)  nodes of a cluster have other versions of ALTO or its packages
    ├── RankConnectionError (ConnectionError)  a rank is connected to something that is not a rank of its executor
    ├── HubError (ConnectionError)          the Hugging Face hub refuses a request, or cannot be reached
    ├── UntrustedCodeError (PermissionError)  a task or queue needs code or a server that the caller has not allowed
    ├── DeviceMemoryError (MemoryError)     something does not fit into the device's memory and cannot be split
    ├── ProfileError (ValueError)           measurements that do not determine the model fitted to them
    ├── ScheduleError (ValueError)          a schedule that must not be run
    ├── ServiceError (RuntimeError)         the service cannot be started or reached with its settings
    ├── UnsupportedError (NotImplementedError)  this version does not support it
    └── ShapeError (ValueError)             the inputs of an op do not fit together

Each also subclasses the builtin in brackets, so that code that does not know ALTO can catch it.
A message states what was expected, what was found, and what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AltoError",
    "BadRowsError",
    "ClusterLostError",
    "ClusterVersionError",
    "ConflictingKeysError",
    "DataError",
    "DataFileNotFoundError",
    "DataFormatError",
    "DeviceBusyError",
    "DeviceMemoryError",
    "DiskFullError",
    "HubError",
    "JobCommandError",
    "MailboxFullError",
    "ModelError",
    "ModelNotFoundError",
    "NoResultError",
    "ProfileError",
    "QueueCommandError",
    "RankConnectionError",
    "RunBusyError",
    "RunChangedError",
    "RunError",
    "RunExistsError",
    "RunNotFoundError",
    "RunWriteError",
    "ScheduleError",
    "ServiceError",
    "ShapeError",
    "SpecError",
    "TargetModuleError",
    "TaskInterruptedError",
    "TasksFailedError",
    "UnknownKeyError",
    "UnsupportedError",
    "UnsupportedModelError",
    "UntrustedCodeError",
]


class AltoError(Exception):
    """Base class of all errors that ALTO raises on purpose."""


class SpecError(AltoError, ValueError):
    """A task, or another specification, is not valid."""


class UnknownKeyError(SpecError):
    """An unknown key."""


class ConflictingKeysError(SpecError):
    """Two spellings of one field were given, or one field in two places."""


class DataError(AltoError, ValueError):
    """A dataset cannot be read or holds nothing to train on."""


class DataFileNotFoundError(DataError, FileNotFoundError):
    """The dataset file does not exist."""


class DataFormatError(DataError):
    """A dataset or a row has no supported form."""


class BadRowsError(DataFormatError):
    """Some or all rows of a dataset cannot be used; the message lists the first of them and counts each kind of
    fault."""


class ModelError(AltoError, ValueError):
    """The base model cannot be used."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """The base model is neither shipped, nor a local folder, nor reachable on the hub."""


class UnsupportedModelError(ModelError):
    """ALTO's padding-free forward pass would differ from the model's own."""


class TargetModuleError(ModelError):
    """A target module or rank does not fit the model."""


class RunError(AltoError, RuntimeError):
    """A run on disk is not what it should be."""


class RunExistsError(RunError, FileExistsError):
    """The output directory already holds a run."""


class RunNotFoundError(RunError, FileNotFoundError):
    """There is no run where one was expected."""


class RunBusyError(RunError, BlockingIOError):
    """Another process works on the run."""


class RunChangedError(RunError, ValueError):
    """A run's base model, data or settings have changed since it began."""


class RunWriteError(RunError, OSError):
    """The run's disk cannot be written: it is full, read-only or broken. Earlier commits are intact."""


class DiskFullError(RunWriteError):
    """The run's disk is full, a quota is used up, or a file has reached the maximum size. Another attempt would fail
    in the same way until space is freed."""


class JobCommandError(RunError, ValueError):
    """A command to a job cannot be carried out."""


class MailboxFullError(JobCommandError):
    """Too many commands are already waiting for a task."""


class QueueCommandError(RunError, ValueError):
    """A command to a queue cannot be carried out."""


class TaskInterruptedError(AltoError, RuntimeError):
    """A task was interrupted; the run can be resumed."""


class NoResultError(AltoError, RuntimeError):
    """A task ended without any usable adapter."""


class TasksFailedError(AltoError, RuntimeError):
    """Some tasks of a queue were given up; the others have their results.

    Attributes:
        results: A :class:`alto.TaskResult` for each of the other tasks.
    """

    def __init__(self, message: str, *, results: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.results = tuple(results)


class DeviceBusyError(AltoError, BlockingIOError):
    """Another process on this machine uses the GPU."""


class ClusterLostError(AltoError, ConnectionError):
    """The cluster on which tasks run can no longer be reached, or used as before; saved work can be resumed."""


class ClusterVersionError(AltoError, RuntimeError):
    """Nodes of a cluster have other versions of ALTO or torch than the process that starts tasks on them."""


class RankConnectionError(AltoError, ConnectionError):
    """A rank is connected to something that is not a rank of its executor, or received data that no rank sends."""


class HubError(AltoError, ConnectionError):
    """The Hugging Face hub refuses a request, or cannot be reached."""


class UntrustedCodeError(AltoError, PermissionError):
    """A task or queue needs code or a server that only its file names, and the caller has not allowed it."""


class DeviceMemoryError(AltoError, MemoryError):
    """Something does not fit into the device's memory and cannot be split further."""


class ProfileError(AltoError, ValueError):
    """Measurements of memory or time do not determine the model fitted to them."""


class ScheduleError(AltoError, ValueError):
    """A schedule is not a valid solution of its problem and must not be run."""


class ServiceError(AltoError, RuntimeError):
    """The service cannot be started or reached, or its database cannot be used, with its settings."""


class UnsupportedError(AltoError, NotImplementedError):
    """This version does not support what was requested."""


class ShapeError(AltoError, ValueError):
    """The inputs of an op do not fit together."""
