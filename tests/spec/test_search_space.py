"""Search spaces, and distributions of Optuna and Ray Tune in them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from budgets import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from alto.errors import ConflictingKeysError, SpecError, UnknownKeyError, UnsupportedError
from alto.spec import JobConfig, SearchSpace, Task
from alto.spec.method import find_method
from alto.spec.search import auto_space, usual_learning_rate
from alto.spec.search_space import MAX_JOBS, Sampled


def expand(given, seed=42):
    return list(SearchSpace.parse(given).expand(seed))


def test_empty_space_is_one_configuration():
    assert expand({}) == [{}]
    assert len(SearchSpace.parse({})) == 1


def test_grid_with_the_last_key_fastest_and_scalars_fixed():
    assert expand({"lr": [1e-4, 1e-3], "seed": 7, "rank": [8, 16]}) == [
        {"learning_rate": 1e-4, "seed": 7, "r": 8},
        {"learning_rate": 1e-4, "seed": 7, "r": 16},
        {"learning_rate": 1e-3, "seed": 7, "r": 8},
        {"learning_rate": 1e-3, "seed": 7, "r": 16},
    ]


def test_paired_keys_vary_together_at_the_place_of_the_word():
    space = {"seed": [1, 2], "paired": {"r": [8, 16], "lora_alpha": ["r", 4]}, "weight_decay": [0.0, 0.1]}
    rows = expand(space)
    assert [(row["seed"], row["r"], row["lora_alpha"], row["weight_decay"]) for row in rows] == [
        (seed, r, alpha, decay) for seed in (1, 2) for r, alpha in ((8, "r"), (16, 4)) for decay in (0.0, 0.1)
    ]


def test_several_pairings_make_a_grid_of_pairs():
    rows = expand({"paired": [{"r": [8, 16], "lora_alpha": [1, 2]}, {"lr": [1e-4, 1e-3, 1e-2], "seed": [1, 2, 1]}]})
    assert len(rows) == 6
    assert {(row["r"], row["lora_alpha"]) for row in rows} == {(8, 1), (16, 2)}
    assert {(row["learning_rate"], row["seed"]) for row in rows} == {(1e-4, 1), (1e-3, 2), (1e-2, 1)}


def test_a_list_of_module_lists_is_a_grid_over_sets_of_modules():
    assert expand({"target_modules": [["q", "v"], "all-linear"]}) == [
        {"target_modules": ("q", "v")},
        {"target_modules": "all-linear"},
    ]


SAMPLED_LR = {"min": 1e-5, "max": 1e-2, "log": True, "num": 200}


def test_sampled_values_depend_on_the_key_and_the_seed_alone():
    alone = [row["learning_rate"] for row in expand({"lr": SAMPLED_LR})]
    assert alone == [row["learning_rate"] for row in expand({"seed": 1, "learning_rate": SAMPLED_LR, "r": 8})]
    paired = {"lr": SAMPLED_LR, "seed": list(range(200))}
    assert alone == [row["learning_rate"] for row in expand({"paired": paired})]
    assert alone != [row["learning_rate"] for row in expand({"lr": SAMPLED_LR}, seed=43)]
    decay = [row["weight_decay"] for row in expand({"weight_decay": SAMPLED_LR})]
    assert alone != decay


def test_sampled_values_stay_the_same_over_versions():
    rows = expand({"lr": {**SAMPLED_LR, "num": 2}, "r": {"min": 1, "max": 64, "num": 3}})
    assert [row["r"] for row in rows[:3]] == [25, 53, 58]
    assert [rows[0]["learning_rate"], rows[3]["learning_rate"]] == pytest.approx(
        [0.0009056532222209434, 0.00135852931344615], rel=1e-12
    )


def test_log_draws_are_uniform_in_the_logarithm():
    shares = [math.log10(row["learning_rate"] / 1e-5) / 3 for row in expand({"lr": SAMPLED_LR})]
    counts = [sum(low <= share < low + 0.25 for share in shares) for low in (0, 0.25, 0.5, 0.75)]
    assert min(counts) > 30
    linear = [row["learning_rate"] for row in expand({"lr": {**SAMPLED_LR, "log": False}})]
    assert sum(rate > 5e-3 for rate in linear) > 70


@settings(max_examples=examples(60))
@given(
    low=st.integers(1, 300),
    span=st.integers(1, 300),
    share=st.floats(0.01, 1),
    log=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_sampled_integers_are_distinct_integers_within_their_ends(low, span, share, log, seed):
    num = math.ceil(share * (span + 1))
    values = [row["r"] for row in expand({"r": {"min": low, "max": low + span, "log": log, "num": num}}, seed)]
    assert all(type(value) is int for value in values)
    assert len(set(values)) == len(values) == num
    assert low <= min(values)
    assert max(values) <= low + span


@settings(max_examples=examples(60))
@given(
    ends=st.tuples(st.floats(1e-9, 1.0), st.floats(1e-9, 1.0)).filter(lambda ends: ends[0] < ends[1]),
    log=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_sampled_floats_stay_within_their_ends(ends, log, seed):
    rows = expand({"lr": {"min": ends[0], "max": ends[1], "log": log, "num": 5}}, seed)
    assert all(ends[0] <= row["learning_rate"] <= ends[1] for row in rows)


VALID = [
    {},
    {"lr": [1e-4, 1e-3], "r": 8},
    {"target_modules": [["q", "v"], "all-linear"], "max_steps": [None, 10]},
    {"lr": SAMPLED_LR, "num_train_epochs": {"min": 1.0, "max": 3, "num": 2}},
    {"seed": [1, 2], "paired": {"r": [8, 16], "lora_alpha": ["2*r", 4]}, "weight_decay": [0.1]},
    {"paired": [{"r": [8, 16], "seed": [1, 1]}, {"lr": SAMPLED_LR}]},
]


@pytest.mark.parametrize("given", VALID)
def test_length_and_round_trip(given):
    space = SearchSpace.parse(given)
    assert len(space) == len(list(space.expand(1)))
    assert SearchSpace.parse(space.to_dict()) == space
    assert hash(SearchSpace.parse(space.to_dict())) == hash(space)


def test_varied_names_the_columns_worth_showing():
    space = SearchSpace.parse({"lr": [1e-4, 1e-3], "seed": 7, "paired": {"r": [8, 16], "alpha": [1, 2]}})
    assert space.varied == ("learning_rate", "r", "lora_alpha")
    assert space.keys == ("learning_rate", "seed", "r", "lora_alpha")


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        (None, SpecError, r"^search_space should map fields .* found None"),
        ([1], SpecError, r"^search_space should map fields"),
        ({"lr": []}, SpecError, r"^search_space.learning_rate should hold from 1 .* found 0. Add one"),
        ({"lr": [1e-4, 1e-3, 1e-4]}, SpecError, r"different values, found 0.0001 twice"),
        ({"weight_decay": [0, 0.0]}, SpecError, r"different values"),
        ({"max_steps": [None, None]}, SpecError, r"different values, found None twice"),
        (
            {"lr": [1e-4, "1e-3"]},
            SpecError,
            r"^In search_space.learning_rate\[1\]: .*text\)\. Write 1e-3 without quotes\.",
        ),
        ({"lr": "1e-3"}, SpecError, r"^In search_space.learning_rate: .*text\)\. Write 1e-3 without quotes\."),
        ({"r": [8, [16]]}, SpecError, r"^In search_space.r\[1\]"),
        ({"rnk": [8]}, UnknownKeyError, r"search_space has the unknown key 'rnk'. Did you mean 'rank'"),
        ({"pair": {}}, UnknownKeyError, r"Did you mean 'paired'"),
        ({"lr": 1, "learning_rate": 1}, ConflictingKeysError, r"both 'lr' and 'learning_rate'"),
        ({"use_qalora": [True, False]}, UnsupportedError, r"search_space has the key 'use_qalora'"),
        ({"paired": 3}, SpecError, r"^search_space.paired\[0\] should map fields"),
        ({"paired": {}}, SpecError, r"found none"),
        ({"paired": {"r": [1, 2], "lr": [1]}}, SpecError, r"the same number .* r with 2, learning_rate with 1"),
        ({"paired": {"r": [1, 2], "lr": 1}}, SpecError, r"Move a fixed value out of 'paired'"),
        ({"paired": {"r": [1, 0]}}, SpecError, r"^In search_space.paired\[0\].r\[1\]"),
        ({"paired": {"rnk": [8]}}, UnknownKeyError, r"^search_space.paired\[0\] has the unknown key"),
        ({"r": 8, "paired": {"rank": [1, 2]}}, ConflictingKeysError, r"'r' in two places"),
        ({"paired": [{"r": [1]}, {"r": [2]}]}, ConflictingKeysError, r"'r' in two places"),
    ],
)
def test_refused(given, error, reason):
    with pytest.raises(error, match=reason):
        SearchSpace.parse(given)


@pytest.mark.parametrize(
    ("field", "change", "reason"),
    [
        ("lr", {"num": 0}, r"found 0"),
        ("lr", {"num": True}, r"found True"),
        ("lr", {"num": 10**9}, r"found 1000000000"),
        ("lr", {"min": "1e-5"}, r"^In search_space.learning_rate.min: .*Write 1e-5 without"),
        ("lr", {"min": 0}, r"^In search_space.learning_rate.min"),
        ("lr", {"max": float("inf")}, r"^In search_space.learning_rate.max"),
        ("lr", {"min": 1e-2}, r"min < max, found min=0\.01 and max=0\.01"),
        ("lr", {"log": 1}, r"log should be true or false"),
        ("weight_decay", {"min": 0.0}, r"needs min > 0"),
        ("lora_alpha", {"min": "r"}, r"min should be a number, found 'r'"),
        ("max_steps", {"min": None}, r"min should be a number, found None"),
        ("r", {"min": 1, "max": 4, "num": 5}, r"as there are, 4 from 1 to 4, found num=5"),
        ("r", {"min": 1.5, "max": 4}, r"whole number"),
        ("lr_scheduler_type", {}, r"cannot be sampled"),
        ("target_modules", {}, r"cannot be sampled"),
    ],
)
def test_sampling_refused(field, change, reason):
    with pytest.raises(SpecError, match=reason):
        SearchSpace.parse({field: SAMPLED_LR | change})


@pytest.mark.parametrize(
    ("field", "change", "reason"),
    [
        ("loss_type", {}, r"cannot be sampled"),
        ("beta", {"min": 0}, r"^In search_space.beta.min: beta .*>= 1e-06"),
        ("label_smoothing", {"max": 0.5}, r"^In search_space.label_smoothing.max"),
    ],
)
def test_sampling_a_setting_of_the_method_refused(field, change, reason):
    with pytest.raises(SpecError, match=reason):
        SearchSpace.parse({field: SAMPLED_LR | change}, find_method("dpo"))


def test_sampling_with_missing_or_unknown_words():
    with pytest.raises(SpecError, match=r"found no 'max'.*For example:"):
        SearchSpace.parse({"lr": {"min": 1e-4}})
    with pytest.raises(UnknownKeyError, match=r"search_space.learning_rate has the unknown key 'nums'.*'num'"):
        SearchSpace.parse({"lr": {"min": 1e-4, "max": 1, "nums": 3}})


def test_too_many_jobs_are_counted_not_made():
    values = list(range(1, 1001))
    with pytest.raises(SpecError, match=r"at most 10000 jobs, found 1000000000"):
        SearchSpace.parse({"r": values, "batch_size": values, "seed": values})
    with pytest.raises(SpecError, match=r"from 1 to 10000 values, found 10001"):
        SearchSpace.parse({"seed": list(range(MAX_JOBS + 1))})
    at_the_limit = SearchSpace.parse({"seed": list(range(100)), "r": list(range(1, 101))})
    assert len(at_the_limit) == MAX_JOBS


@settings(max_examples=examples(40))
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "learning_rate": st.lists(st.floats(1e-6, 1), min_size=1, max_size=4, unique=True),
            "r": st.lists(st.integers(1, 1024), min_size=1, max_size=4, unique=True),
            "seed": st.integers(0, 99),
        },
    )
)
def test_grid_is_the_plain_product(space):
    lists = [value if isinstance(value, list) else [value] for value in space.values()]
    assert expand(space) == [dict(zip(space, row, strict=True)) for row in itertools.product(*lists)]


class TestAuto:
    def test_the_usual_rate_falls_with_the_hidden_size_and_not_with_the_rank(self):
        assert usual_learning_rate(2000) == pytest.approx(5e-4)
        assert usual_learning_rate(3584) == pytest.approx(3.17e-4, rel=0.01)
        assert usual_learning_rate(128) == pytest.approx(4.28e-3, rel=0.01)
        assert [usual_learning_rate(size) for size in (4096, 8192, 16384)] == [3e-4] * 3, "it falls no further"
        space = auto_space(4096)
        drawn = list(space.expand(1))
        assert len(drawn) == 5 * 4 * 3
        assert {row["lora_alpha"] for row in drawn} == {32}
        assert space.to_dict()["learning_rate"] == {"min": 6e-5, "max": 1.5e-3, "log": True, "num": 5}
        assert all(6e-5 <= row["learning_rate"] <= 1.5e-3 for row in drawn)

    def test_a_task_has_ranges_before_the_model_is_known_and_keeps_the_word(self):
        task = Task(model="some/model", dataset="x.jsonl", search_space="auto", search="tpe")
        assert task.to_dict()["search_space"] == "auto"
        assert Task(**task.to_dict()) == task
        resolved = task.replace(search_space=auto_space(4096))
        assert resolved.to_dict()["search_space"]["learning_rate"]["max"] == 1.5e-3
        assert Task(**resolved.to_dict()) == resolved
        assert max(job.config.learning_rate for job in resolved.jobs) <= 1.5e-3

    def test_batch_sizes_are_multiples_of_the_completions_of_a_prompt(self):
        keys = {"model": "some/model", "dataset": "x.jsonl", "method": "grpo", "reward_funcs": ["exact"]}
        for chosen, sizes in (({}, {16, 32, 64}), ({"num_generations": 4}, {8, 16, 32})):
            task = Task(**keys, **chosen, search_space="auto")
            assert {job.config.per_device_train_batch_size for job in task.jobs} == sizes

    def test_what_is_set_beside_it_does_not_vary(self):
        task = Task(model="some/model", dataset="x.jsonl", search_space="auto", r=8, lora_alpha=16)
        assert {(job.config.r, job.config.lora_alpha) for job in task.jobs} == {(8, 16)}
        assert len(task.jobs) == 15


def test_mappings_may_vary_and_be_paired():
    space = SearchSpace.parse(
        {
            "rank_pattern": [{}, {"q_proj": 4, "v_proj": 2}],
            "alpha_pattern": {"k_proj": 3.0},
            "warmup_steps": [0, 0.1, 5],
            "paired": {
                "lr_scheduler_type": ["linear", "cosine_with_min_lr"],
                "lr_scheduler_kwargs": [{}, {"min_lr_rate": 0.1}],
            },
        }
    )
    assert len(space) == 12
    assert SearchSpace.parse(space.to_dict()) == space
    assert space.to_dict()["rank_pattern"] == [{}, {"q_proj": 4, "v_proj": 2}]
    configs = [JobConfig(**values) for values in space.expand(0)]
    assert len(set(configs)) == 12
    assert {config.rank_pattern for config in configs} == {(), (("q_proj", 4), ("v_proj", 2))}
    assert {(config.lr_scheduler_type, config.lr_scheduler_kwargs) for config in configs} == {
        ("linear", ()),
        ("cosine_with_min_lr", (("min_lr_rate", 0.1),)),
    }


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"rank_pattern": [{"q_proj": 0}]}, r"search_space\.rank_pattern\[0\]: rank_pattern should give 'q_proj'"),
        ({"rank_pattern": [{}, {}]}, "different values"),
        ({"lr_scheduler_kwargs": {"min": 1, "max": 2}}, "should have settings of schedules as keys"),
    ],
)
def test_mappings_are_checked_one_by_one(space, message):
    with pytest.raises(SpecError, match=message):
        SearchSpace.parse(space)


def test_warmup_is_sampled_in_whole_steps_or_as_a_share():
    steps = SearchSpace.parse({"warmup_steps": {"min": 0, "max": 50, "num": 4}})
    assert all(isinstance(values["warmup_steps"], int) for values in steps.expand(0))
    shares = SearchSpace.parse({"warmup_steps": {"min": 0.0, "max": 0.2, "num": 4}})
    assert len({values["warmup_steps"] for values in shares.expand(0)}) == 4
    assert all(0 < values["warmup_steps"] < 0.2 for values in shares.expand(0))


def test_no_more_configurations_are_drawn_than_there_are():
    space = SearchSpace.parse({"r": [8, 16], "learning_rate": [1e-4, 1e-3]})
    assert len(space.sample(space.num_distinct, 0)) == 4
    with pytest.raises(SpecError, match=r"should have 5 different configurations to draw, found 4\. Add values"):
        space.sample(5, 0)


def test_paired_values_that_repeat_count_once():
    space = SearchSpace.parse({"paired": {"r": [8, 8, 16], "learning_rate": [1e-4, 1e-4, 1e-3]}})
    assert space.num_distinct == 2
    assert {config["r"] for config in space.sample(2, 0)} == {8, 16}


def test_a_name_that_is_not_auto_is_refused_with_the_one_that_is():
    with pytest.raises(SpecError, match=r"or be 'auto', found 'automatic'\. Use auto"):
        Task(model="alto-tiny", dataset="rows.jsonl", search_space="automatic")


def test_extremes_are_all_listed_values_and_both_ends_of_ranges():
    ends = {"learning_rate": {"min": 1e-5, "max": 1e-3}, "r": [8, 16]}
    space = SearchSpace.parse({**ends, "paired": {"seed": [1, 2], "adam_beta1": [0.8, 0.9]}})
    found = list(space.extremes(0))
    assert len(found) == 8
    assert {config["learning_rate"] for config in found} == {1e-5, 1e-3}
    assert {(config["seed"], config["adam_beta1"]) for config in found} == {(1, 0.8), (2, 0.9)}


def test_what_a_search_may_suggest_is_checked_before_it_begins():
    """None of the jobs at the task's start is near the end of the range."""
    schedule = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.001e-5}}
    space = {"learning_rate": {"min": 1e-5, "max": 1e-3}, "r": [8, 16]}
    with pytest.raises(SpecError, match="may choose any of them, found learning_rate=1e-05, r=8: lr_scheduler_type"):
        Task(model="alto-tiny", dataset="rows.jsonl", search="tpe", search_space=space, **schedule)
    above = {"learning_rate": {"min": 2e-5, "max": 1e-3}, "r": [8, 16]}
    assert len(Task(model="alto-tiny", dataset="rows.jsonl", search="tpe", search_space=above, **schedule).jobs) > 1


def test_a_grid_of_weights_is_counted_before_it_is_made() -> None:
    weights = {f"source-{number}": list(range(1, 1000)) for number in range(30)}
    with pytest.raises(SpecError, match="at most 10000 combinations of weights"):
        SearchSpace.parse({"mixture_weights": weights})


@pytest.mark.parametrize("log", [False, True])
def test_a_range_has_no_more_values_than_there_are_numbers(log: bool) -> None:
    space = SearchSpace.parse({"learning_rate": {"min": 1e-4, "max": math.nextafter(1e-4, 1), "log": log}})
    assert space.num_distinct <= 2
    assert len(space.sample(space.num_distinct, seed=0)) == space.num_distinct
    with pytest.raises(SpecError, match="3 different configurations to draw"):
        space.sample(3, seed=0)


def test_configurations_of_a_pairing_are_drawn_from_values_that_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[float] = []
    quantile = Sampled.quantile
    monkeypatch.setattr(Sampled, "quantile", lambda self, share: numbers.append(share) or quantile(self, share))
    pairing = {key: {"min": 1e-5, "max": 3e-3, "num": 500} for key in ("learning_rate", "weight_decay")}
    SearchSpace.parse({"paired": pairing}).sample(100, seed=987654)
    assert len(numbers) == 1000


def space(**fields: Any) -> dict[str, Any]:
    return SearchSpace.parse(fields).to_dict()


def test_distributions_of_optuna() -> None:
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


def test_distributions_of_ray() -> None:
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
    """The ends of W&B's ``log_uniform`` are exponents of e: as a range it would mean another one."""
    with pytest.raises(SpecError, match=r"learning_rate should be a value, a list, a range.* Use \{min: "):
        space(learning_rate=parameter)


def test_arrays_and_ranges_of_python_are_lists() -> None:
    numpy = pytest.importorskip("numpy")
    found = space(learning_rate=numpy.logspace(-5, -3, 3), r=range(4, 8), seed=numpy.arange(2))
    assert found == {"learning_rate": pytest.approx([1e-5, 1e-4, 1e-3]), "r": [4, 5, 6, 7], "seed": [0, 1]}
    paired = SearchSpace.parse({"paired": {"lr": numpy.array([1e-4, 1e-3]), "r": range(4, 6)}})
    assert len(paired) == 2
    with pytest.raises(SpecError, match=r"search_space\.seed should have at most 10000 values, found 10000000"):
        space(seed=range(10_000_000))
