"""Objects that the parts of a running service share."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy.orm import Session

from alto.service.access import DEFAULT_TENANT, SCOPES, Caller, RateLimiter
from alto.service.files import Artefacts
from alto.service.histories import Histories
from alto.service.previews import Previews
from alto.service.settings import ServiceSettings
from alto.service.store import Store
from alto.service.store.replays import Refusals
from alto.service.store.tables import JobRow, Tenant

__all__ = ["Limits", "Service", "ServiceOf", "service_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a tenant; None means unlimited."""

    max_gpus: int | None
    max_tasks: int | None
    max_bytes: int | None
    requests_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Service:
    """A running service, as its request handlers and its coordinator use it.

    Attributes:
        store: The migrated database.
        artefacts: Storage of files and adapters.
        rates: Rate limiter for tenants' requests.
        histories: Cached histories of runs.
        previews: Cached previews of drafts' rows.
        refusals: Requests that were refused while the database did not answer.
        work: Set when the coordinator has something to do.
    """

    settings: ServiceSettings
    store: Store
    artefacts: Artefacts
    rates: RateLimiter = field(default_factory=RateLimiter)
    histories: Histories = field(default_factory=Histories)
    previews: Previews = field(default_factory=Previews)
    refusals: Refusals = field(default_factory=Refusals)
    work: threading.Event = field(default_factory=threading.Event)

    def limits_of(self, tenant: Tenant | None) -> Limits:
        """Return the limits of a tenant; the settings supply limits that it does not have itself."""
        names = ("max_gpus", "max_tasks", "max_bytes", "requests_per_s")
        found = {name: getattr(tenant, name, None) for name in names}
        return Limits(**{name: getattr(self.settings, name) if found[name] is None else found[name] for name in names})

    def run_of(self, job: JobRow) -> Path:
        """Return the run folder of a job. It holds copies of the job's files, so deleted uploads do not affect it."""
        return self.settings.root / "runs" / job.tenant / job.id

    def run_bytes(self, tenant: str) -> int:
        """Return the total size of a tenant's run folders in bytes; files that are removed meanwhile do not count."""
        found = 0
        for folder, _, names in os.walk(self.settings.root / "runs" / tenant):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    found += os.lstat(os.path.join(folder, name)).st_size
        return found

    def tenant(self, session: Session, caller: Caller) -> Tenant | None:
        """Return the row of the caller's tenant; None if the tenant has no row."""
        return session.get(Tenant, caller.tenant)

    @property
    def open_caller(self) -> Caller:
        """The caller of requests without a key, if no key is needed."""
        return Caller(tenant=DEFAULT_TENANT, scopes=frozenset(SCOPES))


def service_of(request: Request) -> Service:
    """Return the service that a request was sent to."""
    found: Service = request.app.state.service
    return found


ServiceOf = Annotated[Service, Depends(service_of)]
