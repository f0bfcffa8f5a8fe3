"""What the parts of a running service share."""

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
    """What a tenant may use at most; None sets no limit."""

    max_gpus: int | None
    max_tasks: int | None
    max_bytes: int | None
    requests_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service, as the handlers of its requests and its coordinator have it.

    Attributes:
        settings: How it is set up.
        store: Its database, migrated.
        artefacts: Where files and adapters are kept.
        rates: Requests of tenants.
        histories: Of runs, as their journals are now.
        previews: Of the rows of drafts.
        refusals: Requests that were refused while the database did not answer.
        work: Set where the coordinator has something to do.
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
        """The limits of a tenant, or those of the settings where it has none of its own."""
        names = ("max_gpus", "max_tasks", "max_bytes", "requests_per_s")
        found = {name: getattr(tenant, name, None) for name in names}
        return Limits(**{name: getattr(self.settings, name) if found[name] is None else found[name] for name in names})

    def run_of(self, job: JobRow) -> Path:
        """Folder of the run of a job; it has everything of it, so that deleted files do not matter."""
        return self.settings.root / "runs" / job.tenant / job.id

    def run_bytes(self, tenant: str) -> int:
        """Bytes of the files in the folders of all runs of a tenant; one that is removed meanwhile does not count."""
        found = 0
        for folder, _, names in os.walk(self.settings.root / "runs" / tenant):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    found += os.lstat(os.path.join(folder, name)).st_size
        return found

    def tenant(self, session: Session, caller: Caller) -> Tenant | None:
        """The row of the caller's tenant; None for the one that needs no key."""
        return session.get(Tenant, caller.tenant)

    @property
    def open_caller(self) -> Caller:
        """Who asks without a key, where none is needed."""
        return Caller(tenant=DEFAULT_TENANT, scopes=frozenset(SCOPES))


def service_of(request: Request) -> Service:
    """The service that a request was sent to."""
    found: Service = request.app.state.service
    return found


ServiceOf = Annotated[Service, Depends(service_of)]
