"""Reports a run to experiment trackers; no tracker can delay or break training.

``base`` defines the interface of a tracker, one module per tool implements it, and ``feed`` calls it for journal
entries, outside of the training thread.
"""

from alto.trackers.base import Tracker
from alto.trackers.choice import chosen_trackers
from alto.trackers.feed import tracking

__all__ = ["Tracker", "chosen_trackers", "tracking"]
