"""Builds transformers' sequence classification model around the body of a causal LM, and checks that it computes the
same logits as training here."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from alto.errors import UnsupportedModelError
from alto.records import LabelSet

if TYPE_CHECKING:
    from alto.backbone.backbone import Backbone

_LENGTHS = (23, 9)
LOGIT_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest relative difference of the logits, in norm."""


def classifier_of(model: PreTrainedModel, labels: LabelSet) -> PreTrainedModel:
    """Return transformers' ``...ForSequenceClassification`` on the body of ``model``, with a head of zeros.

    Raises:
        UnsupportedModelError: Transformers has no such class for the model; or its body differs; or its head is not a
            linear module ``score`` without a bias.
    """
    config = copy.deepcopy(model.config)
    config.update(labels.to_config())
    try:
        with torch.device("meta"):
            classifier = AutoModelForSequenceClassification.from_config(config)
    except ValueError:
        raise _unsupported(model, "transformers to have a sequence classification model of it", "none") from None
    prefix = classifier.base_model_prefix
    if type(getattr(classifier, prefix, None)) is not type(getattr(model, prefix, model)):
        raise _unsupported(model, f"{type(classifier).__name__} to have the same body", "a different one")
    head = getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise _unsupported(model, f"{type(classifier).__name__} to have a linear head score without bias", f"{head}")
    classifier.score = nn.Linear(head.in_features, head.out_features, bias=False, device=model.device).to(model.dtype)
    nn.init.zeros_(classifier.score.weight)
    classifier.eval()  # before it gets the body: recomputed layers of the body must stay in training mode
    setattr(classifier, prefix, getattr(model, prefix))
    found: PreTrainedModel = classifier.requires_grad_(False)
    return found


@torch.no_grad()
def check_classifier(backbone: Backbone, labels: LabelSet) -> None:
    """Check that the logits of transformers' model equal those of a head on the hidden state of a row's last token.

    Raises:
        UnsupportedModelError: The logits differ; or see :func:`classifier_of`.
    """
    classifier: Any = classifier_of(backbone.model, labels)
    generator = torch.Generator().manual_seed(0)
    weight_KH = torch.randn(classifier.score.weight.shape, generator=generator)
    classifier.score.weight.copy_(weight_KH)
    rows = [_random_ids(backbone, length, generator) for length in _LENGTHS]
    with backbone.own_attention():
        expected_QK = torch.cat([classifier(input_ids=ids[None], use_cache=False).logits for ids in rows])
    positions = torch.cat([torch.arange(length) for length in _LENGTHS]).to(backbone.device)
    hidden_TH = backbone.hidden_states(torch.cat(rows), positions, _LENGTHS)
    last = torch.tensor(_LENGTHS, device=backbone.device).cumsum(0) - 1
    found_QK = classifier.score(hidden_TH[last])
    difference = float((found_QK.float() - expected_QK.float()).norm() / expected_QK.float().norm())
    if not difference <= LOGIT_TOLERANCES[backbone.dtype]:
        raise _unsupported(
            backbone.model,
            f"{type(classifier).__name__} to read the hidden state of the last token",
            f"logits that differ by {difference:.1e} (relative)",
        )


def _random_ids(backbone: Backbone, length: int, generator: torch.Generator) -> Tensor:
    """Return random token ids without the padding token, which transformers' model would skip."""
    config = backbone.model.config.get_text_config()
    ids = torch.randint(0, int(config.vocab_size) - 1, (length,), generator=generator)
    padding = config.pad_token_id
    ids = ids if padding is None else torch.where(ids >= padding, ids + 1, ids)
    return ids.to(backbone.device)


def _unsupported(model: PreTrainedModel, expected: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"method classification or regression: {type(model).__name__}: expected {expected}, found {found}; use another "
        "base model, or method: sft with the label as the reply"
    )
