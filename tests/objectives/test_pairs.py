"""Losses on pairs against plain float64 formulas, each pair alone; and the independence of a pair from others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from preference_pairs import laid_out_whole, make_pairs
from torch import Tensor
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.data import EncodedDataset, JobRows, TokenBatch, collate
from alto.errors import DataError
from alto.kernels import TokenSchedule
from alto.lora import AdapterBank, AdapterShape, BankLayout, inject, linear_modules
from alto.objectives import (
    Learners,
    Objective,
    Terms,
    find_objective,
    job_losses,
    micro_batch_terms,
    reference_sums,
)
from alto.spec import JobConfig
from alto.spec.method import find_method
from alto.spec.objective_settings import CPO_LOSS_TYPES, LOSS_TYPES, CpoSettings, DpoSettings, OrpoSettings

PAIRS = make_pairs(40, seed=0, vocabulary=97)
REFERENCES = -40 * torch.rand(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DATA = replace(PAIRS, references=REFERENCES, reference_tails=0.3 * REFERENCES.flip(1))
DPO, ORPO, CPO = find_objective("dpo"), find_objective("orpo"), find_objective("cpo")
JOBS = [
    JobRows(DATA, 2, (0, 3, 9)),
    JobRows(DATA, 0, (1,)),
    JobRows(DATA, 1, tuple(range(10, 38))),
    JobRows(DATA, 3, (4, 2, 7, 39)),
]


def config(loss_type: str | list[str] | None = None, **values: Any) -> JobConfig:
    """Return a configuration of DPO with a form of its loss, or of ORPO without one."""
    if loss_type is None:
        return JobConfig.of(find_method("orpo"), values)
    values = {"label_smoothing": 0.01, **values} if loss_type == "exo_pair" else values
    return JobConfig.of(find_method("dpo"), {"loss_type": loss_type, **values})


def cpo(loss_type: str, **values: Any) -> JobConfig:
    return JobConfig.of(find_method("cpo"), {"loss_type": loss_type, **values})


class GivenLosses:
    """A backbone whose token losses are given."""

    def __init__(self, losses_S: Tensor) -> None:
        self.losses_S = losses_S

    def hidden_states(self, input_ids_T: Tensor, *_: object) -> Tensor:
        return input_ids_T[:, None]

    def token_losses(self, hidden_SH: Tensor, targets_S: Tensor, *_: object) -> Tensor:
        return self.losses_S


def draw_losses(batch: TokenBatch) -> Tensor:
    return 6 * torch.rand(sum(batch.job_targets), generator=torch.Generator().manual_seed(0))


def log_sigmoid(x: Tensor) -> Tensor:
    return x.clamp(max=0) - (1 + (-x.abs()).exp()).log()


def expected_dpo(chosen: Tensor, rejected: Tensor, row: int, job: JobConfig, num_chosen: float) -> Tensor:
    """Return the loss of one pair from the log-probabilities of its replies' tokens, by the papers' formulas.

    Args:
        num_chosen: Tokens of the chosen replies of the job's batch, divided by its pairs.
    """
    settings = job.objective
    assert isinstance(settings, DpoSettings)
    beta, noise, tau = settings.beta, settings.label_smoothing, settings.discopop_tau
    share = 1.0 if settings.ld_alpha is None else settings.ld_alpha
    shared = min(len(chosen), len(rejected))
    heads = DATA.references[row] - DATA.reference_tails[row]
    references = heads + share * DATA.reference_tails[row]
    ratios = [
        reply[:shared].sum() + share * reply[shared:].sum() - reference
        for reply, reference in zip((chosen, rejected), references, strict=True)
    ]
    power = settings.f_alpha_divergence_coef - 1
    scores = {
        "reverse_kl": lambda ratio: ratio,
        "forward_kl": lambda ratio: 1 - (-ratio).exp(),
        "js_divergence": lambda ratio: (2 * ratio.exp() / (1 + ratio.exp())).log(),
        "alpha_divergence": lambda ratio: ((power * ratio).exp() - 1) / power,
    }[settings.f_divergence_type]
    scores = [scores(ratio) for ratio in ratios]
    per_token = scores[0] / len(chosen) - scores[1] / len(rejected)
    logit = beta * (scores[0] - scores[1])
    right, wrong = (-log_sigmoid(sign * logit) for sign in (1, -1))
    forms = {
        "exo_pair": lambda: (
            torch.sigmoid(logit) * (-right - math.log(1 - noise)) + torch.sigmoid(-logit) * (-wrong - math.log(noise))
        ),
        "nca_pair": lambda: (
            -log_sigmoid(beta * ratios[0]) - (log_sigmoid(-beta * ratios[0]) + log_sigmoid(-beta * ratios[1])) / 2
        ),
        "bco_pair": lambda: -log_sigmoid(beta * ratios[0]) - log_sigmoid(-beta * ratios[1]),
        "sppo_hard": lambda: (ratios[0] - 1 / (2 * beta)) ** 2 + (ratios[1] + 1 / (2 * beta)) ** 2,
        "discopop": lambda: right * torch.sigmoid(-logit / tau) + (-logit).exp() * torch.sigmoid(logit / tau),
        "sft": lambda: -chosen.sum() / num_chosen,
        "sigmoid": lambda: (1 - noise) * right + noise * wrong,
        "sigmoid_norm": lambda: -log_sigmoid(beta * per_token),
        "ipo": lambda: (per_token - 1 / (2 * beta)) ** 2,
        "hinge": lambda: (1 - beta * (scores[0] - scores[1])).clamp(min=0),
        "robust": lambda: ((1 - noise) * right - noise * wrong) / (1 - 2 * noise),
        "apo_zero": lambda: 1 - torch.sigmoid(beta * ratios[0]) + torch.sigmoid(beta * ratios[1]),
        "apo_down": lambda: torch.sigmoid(beta * ratios[0]) + 1 - torch.sigmoid(beta * (ratios[0] - ratios[1])),
    }
    names = settings.loss_type if isinstance(settings.loss_type, tuple) else (settings.loss_type,)
    weights = settings.loss_weights or [1.0] * len(names)
    losses = [weight * forms[name]() for name, weight in zip(names, weights, strict=True)]
    return sum(losses) + (settings.rpo_alpha or 0.0) * forms["sft"]()


def expected_cpo(chosen: Tensor, rejected: Tensor, row: int, job: JobConfig, num_chosen: float) -> Tensor:
    settings = job.objective
    assert isinstance(settings, CpoSettings)
    beta, noise, gamma = settings.beta, settings.label_smoothing, settings.simpo_gamma
    margin, per_token = chosen.sum() - rejected.sum(), chosen.mean() - rejected.mean()
    smoothed = lambda logit: -(1 - noise) * log_sigmoid(logit) - noise * log_sigmoid(-logit)  # noqa: E731
    loss = {
        "sigmoid": lambda: smoothed(beta * margin),
        "hinge": lambda: (1 - beta * margin).clamp(min=0),
        "ipo": lambda: (per_token - 1 / (2 * beta)) ** 2,
        "simpo": lambda: smoothed(beta * per_token - (0.5 if gamma is None else gamma)),
    }[settings.loss_type]()
    return loss - settings.cpo_alpha * chosen.sum() / num_chosen


def expected_orpo(chosen: Tensor, rejected: Tensor, row: int, job: JobConfig, num_chosen: float) -> Tensor:
    p = [side.mean().exp() for side in (chosen, rejected)]
    odds = [x / (1 - x) for x in p]
    assert isinstance(job.objective, OrpoSettings)
    return -p[0].log() - job.objective.beta * log_sigmoid((odds[0] / odds[1]).log())


MANY_FORMS = [
    config(["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    config(["sft", "sigmoid", "bco_pair"], loss_weights=[1.0, 0.8, 0.2], beta=0.5),
    config(["ipo", "nca_pair"]),
    config(["hinge"], loss_weights=[3.0], ld_alpha=0.5, rpo_alpha=0.1),
]
DIVERGENCES = {
    name: [config(form, f_divergence_type=name, beta=0.01) for form in ("sigmoid", "ipo", "hinge", "sft")]
    for name in ("forward_kl", "js_divergence", "alpha_divergence")
} | {
    "mixed-divergences": [
        config("sigmoid", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=2.0, beta=1e-6),
        config("sigmoid"),
        config("sigmoid", f_divergence_type="js_divergence"),
        config("sigmoid", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.3, beta=0.05),
    ]
}


@pytest.mark.parametrize(
    ("objective", "expected", "configs"),
    [
        *((DPO, expected_dpo, [config(name, beta=beta) for beta in (0.01, 0.1, 0.5, 2.0)]) for name in LOSS_TYPES),
        (DPO, expected_dpo, [config("sigmoid", label_smoothing=noise) for noise in (0.0, 0.1, 0.3, 0.49)]),
        (DPO, expected_dpo, [config("robust", label_smoothing=noise) for noise in (0.0, 0.1, 0.3, 0.4)]),
        (DPO, expected_dpo, [config("exo_pair", label_smoothing=noise) for noise in (0.001, 0.1, 0.3, 0.49)]),
        (DPO, expected_dpo, [config("discopop", discopop_tau=tau) for tau in (0.02, 0.05, 1.0, 3.0)]),
        (DPO, expected_dpo, [config(name) for name in ("ipo", "sigmoid", "apo_zero", "ipo")]),
        (DPO, expected_dpo, [config("sigmoid", rpo_alpha=alpha) for alpha in (None, 0.0, 0.3, 2.0)]),
        (DPO, expected_dpo, [config("sigmoid", ld_alpha=alpha) for alpha in (None, 0.0, 0.4, 1.0)]),
        (DPO, expected_dpo, MANY_FORMS),
        *((DPO, expected_dpo, DIVERGENCES[name]) for name in DIVERGENCES),
        *(
            (CPO, expected_cpo, [cpo(name, cpo_alpha=alpha) for alpha in (1.0, 0.0, 0.5, 3.0)])
            for name in CPO_LOSS_TYPES
        ),
        (CPO, expected_cpo, [cpo("simpo", beta=2.0, simpo_gamma=gamma) for gamma in (0.0, 0.5, 1.0, 2.0)]),
        (CPO, expected_cpo, [cpo(name, beta=0.5, label_smoothing=0.1) for name in ("simpo", "sigmoid") * 2]),
        (CPO, expected_cpo, [cpo(name) for name in CPO_LOSS_TYPES]),
        (ORPO, expected_orpo, [config(beta=beta) for beta in (0.05, 0.1, 0.5, 2.0)]),
    ],
    ids=[
        *LOSS_TYPES,
        *("smoothed-sigmoid", "smoothed-robust", "smoothed-exo", "discopop-tau", "mixed", "rpo", "ld", "many"),
        *DIVERGENCES,
        *(f"cpo-{name}" for name in CPO_LOSS_TYPES),
        *("simpo-gamma", "cpo-smoothed", "cpo-mixed", "orpo"),
    ],
)
def test_losses_and_gradients_are_those_of_the_papers(
    objective: Objective, expected: Callable[..., Tensor], configs: list[JobConfig]
) -> None:
    batch = collate(JOBS)
    losses_S = draw_losses(batch)
    (found_J, gradient_S), _ = reduced(objective, losses_S, batch, configs)
    log_probs_S = (-losses_S.double()).requires_grad_()
    replies = iter(log_probs_S.split(batch.sequence_targets))
    means = [
        sum(
            expected(next(replies), next(replies), row, settings, job.totals.num_chosen / len(job.rows))
            for row in job.rows
        )
        / len(job.rows)
        for job, settings in zip(JOBS, configs, strict=True)
    ]
    (wanted_S,) = torch.autograd.grad(sum(means), log_probs_S)
    assert found_J.tolist() == pytest.approx([float(mean.detach()) for mean in means], rel=1e-6)
    assert -gradient_S.double().numpy() == pytest.approx(wanted_S.numpy(), rel=1e-5, abs=1e-12)
    assert gradient_S.abs().max() > 1e-4


def reduced(
    objective: Objective, losses_S: Tensor, batch: TokenBatch, configs: Sequence[JobConfig]
) -> tuple[tuple[Tensor, Tensor], Terms]:
    """Return the loss per job, the gradient of their sum for the token losses, and the terms."""
    losses_S = losses_S.detach().clone().requires_grad_()
    backbone: Any = GivenLosses(losses_S)
    losses_J = job_losses(backbone, batch, [Learners(objective, tuple(configs))])
    (gradient_S,) = torch.autograd.grad(losses_J.sum(), losses_S)
    with torch.no_grad():
        return (losses_J.detach(), gradient_S), micro_batch_terms(
            backbone, batch, [Learners(objective, tuple(configs))]
        )[0]


SMALL_JOBS = [JobRows(DATA, slot, tuple(range(slot % 30, slot % 30 + 1 + slot % 7))) for slot in range(40)]
"""Small jobs: the pairs of one job do not fill a vector, those of all do."""

MIXED = ["ipo", "sigmoid", "apo_zero", "robust"]
OVERFLOWING = [
    config("discopop", beta=1e6),
    config("sigmoid", f_divergence_type="forward_kl", beta=1e-3),
    config(["sft", "bco_pair", "sigmoid"], loss_weights=[0.3, 0.7, 1.1], ld_alpha=0.5),
    config("exo_pair", beta=0.5),
]
"""Losses with powers that are infinite for other jobs' pairs."""


@pytest.mark.parametrize(
    ("objective", "configs"),
    [
        *((DPO, [config(name, beta=beta) for beta in (0.3, 0.1, 0.5, 0.05)]) for name in LOSS_TYPES),
        (DPO, [config(name, beta=beta) for name, beta in zip(MIXED, (0.3, 0.1, 0.5, 0.05), strict=True)]),
        (DPO, MANY_FORMS),
        (DPO, OVERFLOWING),
        *((DPO, DIVERGENCES[name]) for name in DIVERGENCES),
        (CPO, [cpo(name) for name in CPO_LOSS_TYPES]),
        (ORPO, [config(beta=beta) for beta in (0.05, 0.1, 0.5, 2.0)]),
    ],
    ids=[*LOSS_TYPES, "mixed", "many", "overflowing", *DIVERGENCES, "cpo", "orpo"],
)
def test_nan_and_other_jobs_change_no_bit_of_a_job(objective: Objective, configs: list[JobConfig]) -> None:
    batch, configs = collate(SMALL_JOBS), configs * (len(SMALL_JOBS) // 4)
    clean_S = draw_losses(batch)
    poisoned_S = clean_S.clone()
    poisoned_S[batch.job_targets[0]] = float("nan")  # the second job's
    (_, clean), terms = reduced(objective, clean_S, batch, configs)
    (_, poisoned), poisoned_terms = reduced(objective, poisoned_S, batch, configs)
    assert poisoned_terms.sums_J.isnan().nonzero().flatten().tolist() == [1]
    parts = zip(*(x.split(batch.job_targets) for x in (clean_S, clean, poisoned)), strict=True)
    for index, (mine_S, gradient, beside_nan) in enumerate(parts):
        (_, expected), alone = reduced(objective, mine_S, collate([SMALL_JOBS[index]]), [configs[index]])
        compared = [terms] if index == 1 else [terms, poisoned_terms]
        assert torch.equal(gradient, expected)
        assert index == 1 or torch.equal(beside_nan, expected)
        assert all(torch.equal(found.sums_J[index], alone.sums_J[0]) for found in compared)
        for name in objective.method.entry.metrics:
            assert all(torch.equal(found.metrics[name][index], alone.metrics[name][0]) for found in compared), name


def test_metrics_are_means_over_pairs_once_divided_by_weight() -> None:
    batch = collate(JOBS[:1])
    losses_S = draw_losses(batch)
    terms = micro_batch_terms(GivenLosses(losses_S), batch, [Learners(DPO, (config("sigmoid", beta=0.5),))])[0]
    log_probs = -torch.stack([part.double().sum() for part in losses_S.split(batch.sequence_targets)]).view(-1, 2)
    scores = log_probs - DATA.references[list(JOBS[0].rows)]
    expected = {
        "reward_accuracy": float((scores[:, 0] > scores[:, 1]).double().mean()),
        "reward_margin": 0.5 * float((scores[:, 0] - scores[:, 1]).mean()),
        "chosen_reward": 0.5 * float(scores[:, 0].mean()),
        "rejected_reward": 0.5 * float(scores[:, 1].mean()),
        "kl": float(scores.mean()),
    }
    assert batch.job_weights == (3,)
    assert {name: float(sums_J[0]) / 3 for name, sums_J in terms.metrics.items()} == pytest.approx(expected)


def test_a_reply_that_is_certain_has_finite_odds_and_gradients() -> None:
    batch = collate(JOBS[1:2])
    losses_S = draw_losses(batch)
    losses_S[: batch.sequence_targets[0]] = 0.0
    (found_J, gradient_S), _ = reduced(ORPO, losses_S, batch, [config()])
    assert math.isfinite(float(found_J))
    assert bool(gradient_S.isfinite().all())


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_rows_with_one_reply_are_refused(method: str) -> None:
    conversation = EncodedDataset(input_ids=(torch.tensor([1, 2, 3]),), targets=(torch.tensor([2, 3, -100]),))
    with pytest.raises(DataError, match=f"method {method}: expected preference pairs"):
        find_objective(method).check(conversation, [])
    with pytest.raises(DataError, match="method sft: expected rows that are conversations"):
        find_objective("sft").check(DATA, [])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_that_both_replies_share_changes_no_loss_and_no_gradient(
    tiny_model: Callable[..., PreTrainedModel], architecture: str
) -> None:
    configs = [config("sigmoid"), config("ipo", beta=0.5), config("hinge")]
    whole = laid_out_whole(PAIRS)
    assert whole.num_tokens > 1.2 * PAIRS.num_tokens
    results = []
    for pairs in (PAIRS, whole):
        backbone = Backbone(tiny_model(architecture), None, "tiny")
        jobs = [JobRows(pairs, slot, tuple(range(first, first + 3))) for slot, first in enumerate((0, 12, 30))]
        batch = collate(jobs)
        with torch.no_grad():
            references = reference_sums(backbone, batch)[0]
        batch = replace(batch, references_Q2=references, job_references=batch.job_rows)
        bank, run = adapted(backbone)
        results.append((references, run(DPO, batch, configs), bank.grads_ZP))
    (references, losses, gradients), (wanted_references, wanted_losses, wanted_gradients) = results
    assert references.numpy() == pytest.approx(wanted_references.numpy(), rel=1e-5)
    assert losses.tolist() == pytest.approx(wanted_losses.tolist(), rel=1e-5)
    for slot in range(3):
        assert float((gradients[slot] - wanted_gradients[slot]).norm() / wanted_gradients[slot].norm()) < 1e-4


def adapted(backbone: Backbone) -> tuple[AdapterBank, Callable[..., Tensor]]:
    """Return three random adapters on ``backbone``, and a function that runs a forward and backward pass."""
    modules = linear_modules(backbone.model)
    bank = AdapterBank(BankLayout(modules=modules, max_rank=4), 3)
    context = inject(backbone.model, bank)
    for slot in range(3):
        bank.occupy(slot, AdapterShape(rank=4 - slot, targets=modules))
        bank.initialise(slot, slot)
        for _, _, b in bank.matrices(bank.params_ZP, slot):
            b.copy_(0.05 * torch.randn(b.shape, generator=torch.Generator().manual_seed(slot)))

    def run(objective: Objective, batch: TokenBatch, configs: Sequence[JobConfig]) -> Tensor:
        with context.use(TokenSchedule.build(batch.slots, batch.job_tokens, [2.0] * len(batch.slots))):
            losses = job_losses(backbone, batch, [Learners(objective, tuple(configs))])
            losses.sum().backward()
        return losses.detach()

    return bank, run
