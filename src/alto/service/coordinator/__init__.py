"""What makes the database's wishes true: one server at a time drives the control plane."""

from alto.service.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]
