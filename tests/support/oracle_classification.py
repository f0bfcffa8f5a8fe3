"""The oracle of classification heads: transformers' ``...ForSequenceClassification`` with PEFT and torch's AdamW."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from oracle import SoloJob, padded_batch
from resident_jobs import VOCABULARY, make_dataset
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from alto.data import EncodedDataset, TaskData
from alto.records import LabelSet, RowLabel
from alto.spec import JobConfig

ONE_LABEL = LabelSet(problem_type="single_label_classification", names=("negative", "neutral", "positive"))
SEVERAL_LABELS = LabelSet(problem_type="multi_label_classification", names=("short", "early", "odd", "even"))
ONE_NUMBER = LabelSet(problem_type="regression", names=("LABEL_0",))
TWO_NUMBERS = LabelSet(problem_type="regression", names=("LABEL_0", "LABEL_1"))


def labelled(num_rows: int, seed: int, labels: LabelSet) -> EncodedDataset:
    """Return rows of 5 to 40 tokens, whose labels depend on their first token and length."""
    rows = make_dataset(num_rows, seed)
    targets = []
    for ids in rows.input_ids:
        target = torch.full_like(ids, -100)
        target[-1] = 0
        targets.append(target)
    return EncodedDataset(
        input_ids=rows.input_ids,
        targets=tuple(targets),
        classes=tuple(_label(ids, labels) for ids in rows.input_ids),
        label_set=labels,
    )


def _label(ids: Tensor, labels: LabelSet) -> RowLabel:
    first, length = int(ids[0]), ids.numel()
    if labels.problem_type == "single_label_classification":
        return first % labels.num_labels
    if labels.problem_type == "regression":
        return tuple([first / VOCABULARY, length / 20][: labels.num_labels])
    return tuple(map(float, (length < 20, first < VOCABULARY // 2, first % 2, not first % 2)))


def data_of(labels: LabelSet) -> TaskData:
    return TaskData(train=labelled(28, 1, labels), validation=labelled(9, 2, labels))


def as_classifier(base: PreTrainedModel, labels: LabelSet) -> PreTrainedModel:
    """Return transformers' own model with a copy of the body of ``base``, and a new head."""
    config = copy.deepcopy(base.config)
    config.update(labels.to_config())
    model = AutoModelForSequenceClassification.from_config(config, dtype=base.dtype)
    getattr(model, model.base_model_prefix).load_state_dict(base.base_model.state_dict())
    found: PreTrainedModel = model.eval()
    return found


def padded_texts(dataset: EncodedDataset, rows: Sequence[int], padding: int = 0) -> dict[str, Tensor]:
    """Return rows as transformers' collator makes them."""
    assert dataset.classes is not None
    batch = padded_batch(dataset, rows, padding)
    labels = [dataset.classes[row] for row in rows]
    is_class = isinstance(labels[0], int)
    return batch | {"labels": torch.tensor(labels, dtype=torch.long if is_class else torch.float32)}


class SoloClassifier(SoloJob):
    """One job on texts with labels, whose loss transformers computes."""

    def __init__(self, base: PreTrainedModel, dataset: EncodedDataset, config: JobConfig, **settings: Any) -> None:
        assert dataset.label_set is not None
        super().__init__(
            as_classifier(base, dataset.label_set), dataset, config, tamper={"task_type": "SEQ_CLS"}, **settings
        )

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        rows = self._order.rows_of_step(self.step + self._first_step)
        return super()._loss(padded_texts(self._dataset, rows, self._padding))

    @torch.no_grad()
    def logits(self, dataset: EncodedDataset) -> Tensor:
        found: Tensor = self.model(**padded_texts(dataset, range(len(dataset)))).logits
        return found
