"""HTML reports of runs, queues and comparisons, readable offline; their parts for notebooks and the dashboard."""

from alto.report.comparison import comparison_table, write_comparison
from alto.report.gantt import gantt_figure
from alto.report.notebook import result_html
from alto.report.pages import page_environment, plotly_bundle
from alto.report.queue_report import write_queue_report
from alto.report.report import report_page, write_report
from alto.report.run_drawings import RunFigures, run_figures

__all__ = [
    "RunFigures",
    "comparison_table",
    "gantt_figure",
    "page_environment",
    "plotly_bundle",
    "report_page",
    "result_html",
    "run_figures",
    "write_comparison",
    "write_queue_report",
    "write_report",
]
