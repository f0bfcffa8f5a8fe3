"""The service's database: tenants, keys, files, jobs and models."""

from alto.service.store.store import Store

__all__ = ["Store"]
