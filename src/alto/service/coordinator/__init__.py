"""The coordinator: reconciles the cluster with the database. One server at a time drives the control plane."""

from alto.service.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]
