"""The coordinator: starts and stops tasks so that the cluster matches the jobs in the database. Only the server that
holds the leader lease does this."""

from alto.service.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]
