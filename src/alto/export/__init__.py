"""The outputs of a run: the best adapter, the report, and progress on the terminal."""

from alto.export.adapter import METRICS_NAME, export_best, is_outdated
from alto.export.card import ModelUse
from alto.export.choice import choice_notes
from alto.export.comparison import comparison_table, write_comparison
from alto.export.gantt import gantt_figure
from alto.export.metrics import loss_unit
from alto.export.notebook import result_html
from alto.export.pages import page_environment, plotly_bundle
from alto.export.plain import PlainView
from alto.export.plan import plan_text, preview_text, run_list, schedule_text
from alto.export.queue_report import write_queue_report
from alto.export.queue_view import LiveQueueView, open_queue_view, queue_summary, task_list
from alto.export.report import report_page, write_report
from alto.export.run_drawings import RunFigures, run_figures
from alto.export.tables import JobTable, job_table, run_notes
from alto.export.terminal import LiveView, final_summary, open_view, watch_run
from alto.export.wording import describe_task
from alto.runs import RunHistory

__all__ = [
    "METRICS_NAME",
    "JobTable",
    "LiveQueueView",
    "LiveView",
    "ModelUse",
    "PlainView",
    "RunFigures",
    "RunHistory",
    "choice_notes",
    "comparison_table",
    "describe_task",
    "export_best",
    "final_summary",
    "gantt_figure",
    "is_outdated",
    "job_table",
    "loss_unit",
    "open_queue_view",
    "open_view",
    "page_environment",
    "plan_text",
    "plotly_bundle",
    "preview_text",
    "queue_summary",
    "report_page",
    "result_html",
    "run_figures",
    "run_list",
    "run_notes",
    "schedule_text",
    "task_list",
    "watch_run",
    "write_comparison",
    "write_queue_report",
    "write_report",
]
