"""What happens in a run, shown in the experiment trackers people use; no tracker can delay or break training.

``base`` says what a tracker is, a module a tool implements it, ``feed`` tells it what the journal tells, and
``background`` keeps it away from the training thread.
"""

from alto.trackers.background import tracking
from alto.trackers.base import Tracker
from alto.trackers.choice import chosen_trackers

__all__ = ["Tracker", "chosen_trackers", "tracking"]
