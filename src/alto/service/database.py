"""The database of a service, opened and migrated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from alto.errors import ServiceError
from alto.service.settings import ServiceSettings
from alto.service.store import Store

__all__ = ["opened_store"]


@contextlib.contextmanager
def opened_store(settings: ServiceSettings) -> Iterator[Store]:
    """The database, in the form of this version, until the block is left; its folder is made for this user alone.

    Raises:
        ServiceError: The folder or the database cannot be used.
    """
    try:
        settings.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ServiceError(
            f"data_dir: expected a folder that can be written, found {settings.root} ({error.strerror}); choose another"
        ) from error
    store = Store(settings.database_url)
    try:
        store.migrate()
        yield store
    finally:
        store.close()
