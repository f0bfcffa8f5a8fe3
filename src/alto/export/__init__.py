"""The outputs of a run: the best adapter, the report, and progress on the terminal."""

from alto.export.adapter import export_best, is_outdated
from alto.export.comparison import comparison_table, write_comparison
from alto.export.notebook import result_html
from alto.export.plain import PlainView
from alto.export.plan import plan_text, schedule_text
from alto.export.preview import preview_text
from alto.export.queue_report import write_queue_report
from alto.export.queue_view import LiveQueueView, open_queue_view, queue_summary, task_list
from alto.export.report import report_page, write_report
from alto.export.run_list import run_list
from alto.export.terminal import LiveView, final_summary, open_view
from alto.export.watch import watch_run
from alto.runs import RunHistory

__all__ = [
    "LiveQueueView",
    "LiveView",
    "PlainView",
    "RunHistory",
    "comparison_table",
    "export_best",
    "final_summary",
    "is_outdated",
    "open_queue_view",
    "open_view",
    "plan_text",
    "preview_text",
    "queue_summary",
    "report_page",
    "result_html",
    "run_list",
    "schedule_text",
    "task_list",
    "watch_run",
    "write_comparison",
    "write_queue_report",
    "write_report",
]
