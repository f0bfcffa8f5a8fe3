"""Inspects data and a model before there is a task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from alto.backbone import load_config, model_folder
from alto.data import HeadStore, LabelledText, Row, read_task_rows, survey_rows
from alto.engine.start import preview_task
from alto.errors import ModelNotFoundError
from alto.evaluation import fitting_scorer
from alto.records import DataPreview, DataSurvey, LabelSet
from alto.spec import Task

_NUM_READ = 500


def survey_data(task: Task) -> DataSurvey:
    """Find the methods that can learn from the dataset of ``task``; see :func:`alto.data.survey_rows`."""
    return survey_rows(task)


def look_at(task: Task) -> tuple[DataPreview, int] | None:
    """Return the data of ``task`` as its model will see it, and the hidden size of the model.

    If the model is not on this machine, nothing is downloaded: the rows are only read and checked, and the result is
    None.

    Raises:
        ModelNotFoundError: There is no local folder of that name, or the name resembles a shipped model's.
        ModelError, DataError: The model or the data cannot be used.
    """
    try:
        model_folder(task.model, local_files_only=True)
    except ModelNotFoundError:
        raise
    except (OSError, ValueError):  # not a hub id, or never downloaded
        if task.model.startswith((".", "/", "~")):
            load_config(task.base_model)  # raises an error that names the folder
        read_task_rows(task, head=HeadStore(_NUM_READ))
        return None
    return preview_task(task, num_rows=0), load_config(task.base_model).get_text_config().hidden_size


def count_labels(task: Task) -> tuple[Counter[str], Counter[str]]:
    """Return how many training and how many validation rows of a classification task have each label.

    Raises:
        DataError: The rows cannot be read.
    """
    rows = read_task_rows(task)
    assert rows.labels is not None, "the rows of a classification task have labels"
    return _counts(rows.train, rows.labels.labels), _counts(rows.validation, rows.labels.labels)


def _counts(rows: Iterable[Row], labels: LabelSet) -> Counter[str]:
    counts = Counter(dict.fromkeys(labels.names, 0))
    for row in rows:
        assert isinstance(row, LabelledText)
        assert row.label is not None, "a task's rows have labels"
        value = labels.value_of(row.label)
        counts.update(map(str, value) if isinstance(value, tuple) else [str(value)])
    return counts


def fitting_reward(task: Task) -> str:
    """Return the built-in scorer that suits the replies of ``task``; see :func:`alto.evaluation.fitting_scorer`.

    Raises:
        DataError: The rows cannot be read.
    """
    return fitting_scorer(read_task_rows(task, head=HeadStore(_NUM_READ)).train)
