"""Shows plans, runs and queues as text: in the terminal, live or as plain lines."""

from alto.views.choice import choice_notes
from alto.views.metrics import loss_unit
from alto.views.plain import PlainView
from alto.views.plan import plan_text, preview_text, run_list, schedule_text
from alto.views.queue_view import LiveQueueView, open_queue_view, queue_summary, task_list
from alto.views.tables import JobTable, job_table, run_notes
from alto.views.terminal import LiveView, final_summary, open_view, watch_run
from alto.views.wording import describe_task, format_loss

__all__ = [
    "JobTable",
    "LiveQueueView",
    "LiveView",
    "PlainView",
    "choice_notes",
    "describe_task",
    "final_summary",
    "format_loss",
    "job_table",
    "loss_unit",
    "open_queue_view",
    "open_view",
    "plan_text",
    "preview_text",
    "queue_summary",
    "run_list",
    "run_notes",
    "schedule_text",
    "task_list",
    "watch_run",
]
