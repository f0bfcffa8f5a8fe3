"""Distributions of Optuna and Ray Tune in a search space mean what they mean there."""

from __future__ import annotations

from typing import Any

import pytest

from alto.errors import SpecError
from alto.spec import SearchSpace


def space(**fields: Any) -> dict[str, Any]:
    return SearchSpace.parse(fields).to_dict()


def test_those_of_optuna() -> None:
    distributions = pytest.importorskip("optuna", reason="the distributions are Optuna's").distributions
    found = space(
        learning_rate=distributions.FloatDistribution(1e-5, 1e-2, log=True),
        r=distributions.CategoricalDistribution([4, 8]),
        lora_dropout=distributions.FloatDistribution(0.1, 0.4, step=0.1),
        per_device_train_batch_size=distributions.IntDistribution(2, 8, step=2),
        num_train_epochs=distributions.IntDistribution(1, 3),
    )
    assert found == {
        "learning_rate": {"min": 1e-5, "max": 1e-2, "log": True},
        "r": [4, 8],
        "lora_dropout": [0.1, 0.2, 0.3, 0.4],
        "per_device_train_batch_size": [2, 4, 6, 8],
        "num_train_epochs": {"min": 1, "max": 3, "log": False},
    }


def test_those_of_ray() -> None:
    tune = pytest.importorskip("ray.tune", reason="the distributions are Ray's")
    found = space(
        learning_rate=tune.loguniform(1e-5, 1e-2),
        lora_dropout=tune.uniform(0.0, 0.5),
        r=tune.choice([4, 8]),
        num_train_epochs=tune.randint(1, 4),
        seed=tune.grid_search([1, 2]),
    )
    assert found == {
        "learning_rate": {"min": 1e-5, "max": 1e-2, "log": True},
        "lora_dropout": {"min": 0.0, "max": 0.5, "log": False},
        "r": [4, 8],
        "num_train_epochs": {"min": 1, "max": 3, "log": False},
        "seed": [1, 2],
    }
    for refused in (tune.quniform(0.0, 0.5, 0.1), tune.randn(), tune.sample_from(lambda spec: 1)):
        with pytest.raises(SpecError, match="learning_rate should be a value, a list, a range"):
            space(learning_rate=refused)


def test_paired_fields_take_them_too() -> None:
    distributions = pytest.importorskip("optuna", reason="the distributions are Optuna's").distributions
    pair = {"r": distributions.CategoricalDistribution([4, 8]), "lora_alpha": [8.0, 8.5]}
    assert space(paired=pair) == {"paired": [{"r": [4, 8], "lora_alpha": [8.0, 8.5]}]}


def test_whole_numbers_stay_whole_where_a_field_takes_all() -> None:
    distributions = pytest.importorskip("optuna", reason="the distributions are Optuna's").distributions
    found = space(lora_alpha=distributions.IntDistribution(7, 9), warmup_steps=distributions.IntDistribution(0, 9))
    assert found == {"lora_alpha": [7, 8, 9], "warmup_steps": {"min": 0, "max": 9, "log": False}}
    with pytest.raises(SpecError, match="not limited to whole numbers"):
        space(lora_alpha=distributions.IntDistribution(8, 64, log=True))
    with pytest.raises(SpecError, match="at most 10000 values, found 20000"):
        space(lora_alpha=distributions.IntDistribution(1, 20_000))


def test_whole_numbers_of_ray_stay_whole() -> None:
    tune = pytest.importorskip("ray.tune", reason="the distributions are Ray's")
    assert space(lora_alpha=tune.randint(7, 10), r=tune.lograndint(2, 9)) == {
        "lora_alpha": [7, 8, 9],
        "r": {"min": 2, "max": 8, "log": True},
    }
    with pytest.raises(SpecError, match="not limited to whole numbers"):
        space(lora_alpha=tune.lograndint(8, 64))


def test_a_distribution_of_one_value_is_that_value() -> None:
    distributions = pytest.importorskip("optuna", reason="the distributions are Optuna's").distributions
    found = space(
        learning_rate=distributions.FloatDistribution(1e-3, 1e-3), r=distributions.IntDistribution(4, 4, log=True)
    )
    assert found == {"learning_rate": [1e-3], "r": [4]}


def test_steps_of_whole_numbers_and_of_fractions_end_where_optuna_ends() -> None:
    distributions = pytest.importorskip("optuna", reason="the distributions are Optuna's").distributions
    found = space(
        lora_dropout=distributions.FloatDistribution(0.0, 0.3, step=0.1), r=distributions.IntDistribution(1, 7, step=3)
    )
    assert found == {"lora_dropout": [0.0, 0.1, 0.2, 0.3], "r": [1, 4, 7]}


def test_parameters_of_a_sweep_of_wandb() -> None:
    found = space(
        learning_rate={"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-2},
        r={"values": [4, 8]},
        lora_alpha={"value": 16},
        lora_dropout={"distribution": "uniform", "min": 0.0, "max": 0.5},
        num_train_epochs={"distribution": "int_uniform", "min": 1, "max": 3},
        seed={"distribution": "categorical", "values": [1, 2]},
        rank_pattern=[{"values": 8}, {}],
    )
    assert found == {
        "learning_rate": {"min": 1e-5, "max": 1e-2, "log": True},
        "r": [4, 8],
        "lora_alpha": [16],
        "lora_dropout": {"min": 0.0, "max": 0.5, "log": False},
        "num_train_epochs": {"min": 1, "max": 3, "log": False},
        "seed": [1, 2],
        "rank_pattern": [{"values": 8}, {}],
    }


@pytest.mark.parametrize(
    "parameter",
    [
        {"distribution": "log_uniform", "min": -10, "max": -5},
        {"distribution": "q_uniform", "min": 1e-4, "max": 1e-3, "q": 1e-4},
        {"distribution": "normal", "mu": 0.0, "sigma": 1.0},
        {"values": [1e-3, 1e-4], "probabilities": [0.9, 0.1]},
        {"distribution": "uniform", "min": 1e-4},
    ],
)
def test_a_parameter_of_a_sweep_that_is_no_range_and_no_list_is_refused(parameter: dict[str, Any]) -> None:
    """``log_uniform`` of W&B has exponents of e for its ends: taken for a range it would be another one."""
    with pytest.raises(SpecError, match=r"learning_rate should be a value, a list, a range.* Write \{min: "):
        space(learning_rate=parameter)


def test_arrays_and_ranges_of_python_are_lists() -> None:
    numpy = pytest.importorskip("numpy")
    found = space(learning_rate=numpy.logspace(-5, -3, 3), r=range(4, 8), seed=numpy.arange(2))
    assert found == {"learning_rate": pytest.approx([1e-5, 1e-4, 1e-3]), "r": [4, 5, 6, 7], "seed": [0, 1]}
    paired = SearchSpace.parse({"paired": {"lr": numpy.array([1e-4, 1e-3]), "r": range(4, 6)}})
    assert len(paired) == 2
    with pytest.raises(SpecError, match=r"search_space\.seed should have at most 10000 values, found 10000000"):
        space(seed=range(10_000_000))
