"""What the steps of a task take of this device, measured before it is trained."""

from alto.executor.profiling.measure import MARGIN, slot_bytes
from alto.executor.profiling.profile import Profile, find_profile, profile_task
from alto.executor.profiling.sketch import RowLength, lengths_of

__all__ = ["MARGIN", "Profile", "RowLength", "find_profile", "lengths_of", "profile_task", "slot_bytes"]
