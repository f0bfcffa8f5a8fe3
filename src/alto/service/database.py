"""Opening and migrating the service's database."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from alto.errors import ServiceError
from alto.service.settings import ServiceSettings
from alto.service.store import Store

_LOG = logging.getLogger("alto.service")


@contextlib.contextmanager
def opened_store(settings: ServiceSettings, *, creates: bool = True) -> Iterator[Store]:
    """Yield the migrated database and close it afterwards. The data folder becomes private to this user, even if it
    existed before; if it belongs to another user, only log a warning.

    Args:
        creates: Create a database file that does not exist.

    Raises:
        ServiceError: The folder or the database cannot be used, or does not exist.
    """
    store = Store(settings.database_url)
    if not creates and store.is_sqlite and not Path(store.url.database or "").exists():
        raise ServiceError(
            f"data_dir: expected the database of a service, found no file {store.url.database}; name the service's "
            "folder with --data-dir, or make a first key with alto keys create"
        )
    try:
        settings.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        _restrict_access(settings.root)
    except OSError as error:
        raise ServiceError(
            f"data_dir: expected a folder that can be written, found {settings.root} ({error.strerror}); "
            "choose a different folder"
        ) from error
    try:
        store.migrate()
        yield store
    finally:
        store.close()


def _restrict_access(folder: Path) -> None:
    """Remove group and other access from ``folder``. If another user owns the folder, only log a warning."""
    state = folder.stat()
    if not state.st_mode & 0o077:
        return
    if state.st_uid == os.geteuid():
        folder.chmod(stat.S_IMODE(state.st_mode) & ~0o077)
    else:
        _LOG.warning(
            "data_dir: other users of this machine may have access to %s, which belongs to a different user", folder
        )
