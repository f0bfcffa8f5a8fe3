"""What the steps of a task take of this device, measured before it is trained."""

from alto.executor.profiling.profile import Profile, profile_task

__all__ = ["Profile", "profile_task"]
