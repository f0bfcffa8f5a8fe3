"""Results of tasks for users of the Python interface: tables, curves, the best adapter, comparisons."""

from alto.results.best_config import BestConfig
from alto.results.comparison import RunComparison
from alto.results.task_result import TaskResult, load_run

__all__ = ["BestConfig", "RunComparison", "TaskResult", "load_run"]
