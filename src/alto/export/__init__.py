"""What is left of a run: the best adapter, the report, and how progress looks meanwhile."""

from alto.export.adapter import export_best
from alto.export.report import write_report
from alto.export.terminal import LiveView, PlainView, final_summary
from alto.runs import RunHistory

__all__ = ["LiveView", "PlainView", "RunHistory", "export_best", "final_summary", "write_report"]
