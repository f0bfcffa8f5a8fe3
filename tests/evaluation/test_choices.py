"""Multiple choice: the most likely of the distinct replies, with transformers' likelihoods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny import load_tokenizer, random_llama

from alto.backbone import Backbone
from alto.data import Conversation, Message
from alto.data.encode import Encoder
from alto.errors import DataError, DeviceMemoryError
from alto.evaluation.finalists import FinalistJudge
from alto.evaluation.loss import Choices, HeldoutPass, options_of
from alto.evaluation.target import loaded_adapters
from alto.spec import Scoring

OPTIONS = ("no", "perhaps not at all", "yes")
LIKED = ("yes", "no", "perhaps not at all", "yes", "no")
ROWS = [Conversation([Message("user", f"Is {n} odd?"), Message("assistant", reply)]) for n, reply in enumerate(LIKED)]


@pytest.fixture
def backbone() -> Backbone:
    model = random_llama(len(load_tokenizer()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # makes likelihoods differ
    return Backbone(model, load_tokenizer(), "tiny")


def by_transformers(backbone: Backbone, rows: Sequence[Conversation], options: Sequence[str]) -> list[float]:
    """Compute the accuracy row by row and option by option, without a batch."""
    right = []
    for row in rows:
        found = []
        for option in options:
            (encoded,) = Encoder(backbone.tokenizer).rows(Conversation((*row[:-1], Message("assistant", option))))
            ids = torch.tensor([encoded.input_ids])
            with torch.no_grad(), backbone.own_attention():
                log_probs = backbone.model(ids).logits[0].double().log_softmax(-1)
            trained = [at for at, is_trained in enumerate(encoded.is_trained) if is_trained]
            found.append(sum(float(log_probs[at - 1, encoded.input_ids[at]]) for at in trained))
        right.append(float(options[found.index(max(found))] == row[-1].content))
    return right


def scores_of_base(backbone: Backbone, rows: Sequence[Conversation]) -> list[float]:
    with loaded_adapters(backbone, [None], "tiny") as served:
        (scores,) = Choices(rows, options_of(rows), backbone).scores(served, ["base"], lambda: None)
    return list(scores)


def test_the_most_likely_option_counts(backbone: Backbone) -> None:
    assert options_of(ROWS) == OPTIONS
    wanted = by_transformers(backbone, ROWS, OPTIONS)
    assert 0 < sum(wanted) < len(wanted), "all rows have the same outcome"
    assert scores_of_base(backbone, ROWS) == wanted


def test_only_the_last_turn_counts_and_earlier_ones_are_read(backbone: Backbone) -> None:
    talk = [Conversation([Message("user", "Is 1 odd?"), Message("assistant", "yes"), *row]) for row in ROWS]
    wanted = by_transformers_last(backbone, talk)
    tokens = [Choices(rows, OPTIONS, backbone)._dataset.num_trained_tokens for rows in (ROWS, talk)]
    assert tokens[0] == tokens[1], "the likelihood is that of the last turn alone"
    assert scores_of_base(backbone, talk) == wanted


def by_transformers_last(backbone: Backbone, rows: Sequence[Conversation]) -> list[float]:
    masked = [
        Conversation(
            Message(turn.role, turn.content, is_context=True) if at < len(row) - 1 else turn
            for at, turn in enumerate(row)
        )
        for row in rows
    ]
    return by_transformers(backbone, masked, OPTIONS)


def test_less_memory_gives_the_same_scores(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    before = scores_of_base(backbone, ROWS)
    found, limits = HeldoutPass.log_probs, []

    def short_of_memory(heldout: HeldoutPass) -> list[torch.Tensor]:
        limits.append(heldout.max_tokens_per_pass)
        if heldout.max_tokens_per_pass > 100:
            raise torch.OutOfMemoryError("no memory, as the test wants it")
        return found(heldout)

    monkeypatch.setattr(HeldoutPass, "log_probs", short_of_memory)
    assert scores_of_base(backbone, ROWS) == before
    assert len(limits) > 2
    assert limits[-1] <= 100


def test_a_row_that_does_not_fit_into_memory(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> object:
        raise torch.OutOfMemoryError("no memory, as the test wants it")

    monkeypatch.setattr(HeldoutPass, "log_probs", no_memory)
    with pytest.raises(DeviceMemoryError, match="not enough memory on cpu for a row of"):
        scores_of_base(backbone, ROWS)


def test_too_many_replies_and_a_single_one_are_refused(backbone: Backbone) -> None:
    many = [Conversation([Message("user", "?"), Message("assistant", str(n))]) for n in range(27)]
    assert len(options_of(many[:26])) == 26
    for rows in (many, many[:1] * 3):
        with pytest.raises(DataError, match=r"select_by multiple_choice: .* 2 to 26 distinct replies.*; or remove"):
            FinalistJudge(rows, backbone, "tiny", Scoring(scorer="multiple_choice"))


def test_rows_that_are_too_long_are_refused(backbone: Backbone) -> None:
    long = [Conversation([Message("user", "Is it? " * 200), Message("assistant", reply)]) for reply in ("yes", "no")]
    with pytest.raises(DataError, match=r"expected rows that fit into the model's 128 positions .* found \d+ of \d+"):
        FinalistJudge([*ROWS, *long], backbone, "tiny", Scoring(scorer="multiple_choice"))


def test_what_fails_is_in_the_judgement(backbone: Backbone, tmp_path: Path) -> None:
    judge = FinalistJudge(ROWS, backbone, "tiny", Scoring(scorer="multiple_choice"))
    judgement = judge({"job-000": tmp_path}, lambda: None)
    assert (judgement.scorer, judgement.rows) == ("multiple_choice", {})
    assert "expected an adapter in PEFT's format" in judgement.failure
