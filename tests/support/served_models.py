"""Fine-tuned models that are put directly into a service, as a finished job leaves them."""

from __future__ import annotations

import io
import json

from sqlalchemy import select

from alto.service.access import create_key
from alto.service.context import Service
from alto.service.models import fine_tuned_name
from alto.service.store.tables import JobRow, ModelRow

__all__ = ["add_model", "key_of", "row_of"]


def add_model(
    service: Service,
    job: str,
    *,
    tenant: str = "default",
    suffix: str | None = None,
    base: str = "base",
    **config: object,
) -> str:
    """Make a model with its job ``ftjob-…``, and return its id; its adapter is two small files, one with ``config``."""
    name = fine_tuned_name(base, tenant, suffix, f"ftjob-{job}")
    adapter = f"models/{tenant}/ftjob-{job}"
    files = {
        "adapter_config.json": json.dumps({"r": 8, **config}).encode(),
        "adapter_model.safetensors": job.encode() * 1000,
    }
    for file, content in files.items():
        service.artefacts.write(f"{adapter}/{file}", io.BytesIO(content))
    with service.store.writing() as session:
        row = JobRow(
            id=f"ftjob-{job}",
            tenant=tenant,
            status="succeeded",
            created_at=1,
            finished_at=2,
            model=base,
            training_file="file-1",
            seed=1,
            suffix=suffix,
            priority=0,
            request={},
            task={},
            result={"hyperparameters": {"r": 24}},
            fine_tuned_model=name,
            lease=1,
            num_events=0,
            journal_seq=0,
        )
        session.add(row)
        session.add(
            ModelRow(
                id=name,
                tenant=tenant,
                job=row.id,
                base_model=base,
                adapter=adapter,
                created_at=2,
                serving="none",
            )
        )
    return name


def row_of(service: Service, model: str) -> ModelRow:
    """Return the present row of a model, deleted or not."""
    with service.store.reading() as session:
        row = session.scalar(select(ModelRow).where(ModelRow.id == model))
    assert row is not None
    return row


def key_of(service: Service, tenant: str, *scopes: str) -> str:
    with service.store.writing() as session:
        return create_key(session, tenant, scopes=scopes or ("read", "write", "chat"))[1]
