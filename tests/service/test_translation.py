"""The translation of requests into jobs, and the settings that requests can never set."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from alto.data.task_data import reading_notes
from alto.service.errors import ApiError
from alto.service.openai.translation import ALLOWED_TASK_KEYS, build, clone_changes, task_values, worded_note
from alto.spec.job_config import JOB_FIELDS
from alto.spec.keys import JOB_ALIASES, TASK_ALIASES
from alto.spec.task import TASK_FIELDS

ROWS = {"model": "alto-tiny", "name": "task", "dataset": "training.jsonl", "report_to": "none"}
"""Keys that a service sets itself."""

REFUSED_TASK_KEYS = {
    # models, rows and code of the service's machine
    *("model", "init_adapter", "refit", "trust_remote_code", "use_safetensors", "torch_compile", "chat_template"),
    *("dataset", "dataset_config", "dataset_train_split", "dataset_test_split", "validation_dataset", "test_dataset"),
    # Trackers reach other servers.
    "report_to",
    # set by the service itself
    *("name", "method", "tenant", "share_executor", "checkpoint_interval_s", "keep", "token_cache", "test_jobs"),
    # Requests cannot name these methods.
    *("problem_type", "num_labels", "id2label", "reward_funcs", "reward_weights"),
}


def task_of(values: dict[str, Any], method: str = "supervised", seed: int | None = None) -> Any:
    return build({**task_values(method, values, seed=seed), **ROWS}, values)


def space(values: dict[str, Any], **more: Any) -> dict[str, list[Any]]:
    """Return the values that the jobs of a request have, for the fields in which they differ."""
    configs = [job.config.to_dict() for job in task_of(values, **more).jobs]
    varied = {key: {str(config[key]): config[key] for config in configs} for key in configs[0]}
    return {key: sorted(found.values()) for key, found in varied.items() if len(found) > 1}


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"n_epochs": 2}, {"num_train_epochs": 2}),
        ({"num_train_epochs": 2}, {"num_train_epochs": 2}),
        ({"epochs": 0.5}, {"num_train_epochs": 0.5}),
        ({"batch_size": 3}, {"per_device_train_batch_size": 3}),
        ({"lr": 1e-3}, {"learning_rate": 1e-3}),
        ({"lora_rank": 4, "alpha": "2*r"}, {"r": 4, "lora_alpha": 8.0}),
        ({"target_modules": ["q_proj", "v_proj"]}, {"target_modules": ("q_proj", "v_proj")}),
        ({"modules_to_save": ["lm_head"]}, {"modules_to_save": ("lm_head",)}),
        ({"layers_to_transform": [0, 1]}, {"layers_to_transform": (0, 1)}),
        ({"seed": 7}, {"seed": 7}),
        ({"optim_args": {}, "optim": "sgd"}, {"optim": "sgd"}),
        ({"n_epochs": None, "lr": 1e-3}, {"learning_rate": 1e-3}),
    ],
)  # fmt: skip
def test_one_value_is_fixed(values: dict[str, Any], fields: dict[str, Any]) -> None:
    for job in task_of(values if "lr" in values else {"lr": 1e-4, **values}).jobs:
        assert {key: getattr(job.config, key) for key in fields} == fields


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"lr": [1e-4, 3e-4], "r": [8, 64]}, {"learning_rate": [1e-4, 3e-4], "r": [8, 64]}),
        ({"lr": 1e-4, "n_epochs": "auto"}, {"num_train_epochs": [1, 2, 3]}),
        ({"lr": 1e-4, "batch_size": "auto"}, {"per_device_train_batch_size": [2, 4, 8]}),
        ({"lr": 1e-4, "r": "auto"}, {"r": [8, 16, 32, 64]}),
        ({"lr": 1e-4, "target_modules": [["q_proj"], ["v_proj"]]}, {"target_modules": [["q_proj"], ["v_proj"]]}),
        ({"lr": 1e-4, "seed": [1, 2]}, {"seed": [1, 2]}),
        ({"search_space": {"lr": [1e-4, 2e-4]}}, {"learning_rate": [1e-4, 2e-4]}),
        ({"search_space": {"paired": {"lr": [1e-4, 2e-4], "r": [4, 8]}}}, {"learning_rate": [1e-4, 2e-4], "r": [4, 8]}),
    ],
)  # fmt: skip
def test_lists_and_auto_are_searched(values: dict[str, Any], found: dict[str, list[Any]]) -> None:
    varied = space(values)
    assert {key: [list(each) if isinstance(each, tuple) else each for each in all_] for key, all_ in varied.items()
            if key in found} == found  # fmt: skip


def test_rates_are_searched_around_the_usual_one() -> None:
    usual = task_of({"learning_rate_multiplier": 1}).jobs[0].config.learning_rate
    for key in ("learning_rate_multiplier", "learning_rate", "lr"):
        rates = space({key: "auto"})["learning_rate"]
        assert len(rates) == 5
        assert usual / 11 < min(rates) < max(rates) < usual * 11
    assert space({"learning_rate_multiplier": [1, 2]})["learning_rate"] == [usual, 2 * usual]
    given = {"min": 0.1, "max": 10, "log": True, "num": 3}
    bounds = {"min": usual / 10, "max": usual * 10, "log": True, "num": 3}
    assert space({"learning_rate_multiplier": given}) == space({"lr": bounds})


def test_without_a_rate_the_usual_space_is_searched() -> None:
    assert len(space({})["learning_rate"]) > 1
    assert len(space({"n_epochs": 1})["learning_rate"]) > 1


@pytest.mark.parametrize("beta", [[0.1, 0.3], "auto", {"min": 0.05, "max": 0.5, "num": 3}])
def test_beta_of_dpo_is_fixed_or_searched(beta: Any) -> None:
    assert task_of({"beta": 0.2, "lr": 1e-4}, "dpo").jobs[0].config.to_dict()["beta"] == 0.2
    assert len(space({"beta": beta, "lr": 1e-4}, method="dpo")["beta"]) >= 2


def test_beta_belongs_to_dpo() -> None:
    with pytest.raises(ApiError, match="beta"):
        task_of({"beta": 0.2, "lr": 1e-4})


def test_the_seed_of_a_request_decides_all_seeds() -> None:
    task = task_of({"lr": 1e-4}, seed=7)
    assert (task.data_seed, task.jobs[0].config.seed) == (7, 7)
    assert task_of({"lr": 1e-4, "data_seed": 3}, seed=7).data_seed == 3
    assert space({"lr": 1e-4, "seed": [1, 2]}, seed=7)["seed"] == [1, 2]
    assert space({"search_space": {"seed": [1, 2]}}, seed=7)["seed"] == [1, 2]


def test_settings_of_search_and_early_exit_are_nested() -> None:
    task = task_of(
        {
            "search": {"algorithm": "random", "budget": {"jobs": 3}},
            "early_exit": {"preset": "greedy"},
            "lr": {"min": 1e-5, "max": 1e-3},
        }
    )
    assert len(task.jobs) == 3
    assert task.early_exit.preset == "greedy"
    assert not task_of({"early_exit": False, "lr": 1e-4}).early_exit.enabled


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rat": 1e-4}, "Did you mean 'learning_rate'"),
        ({"n_epoch": 1}, "Did you mean 'n_epochs'"),
        ({"search": {"algoritm": "tpe"}}, "Did you mean 'algorithm'"),
        ({"early_exit": {"presett": "greedy"}}, "Did you mean 'preset'"),
        ({"search_space": {"learning_rat": [1]}}, "Did you mean 'learning_rate'"),
        ({"lora_dropout": "auto"}, "found 'auto'"),
        ({"x" * 10_000: "auto"}, "found 'auto'"),
        ({"search_space": {"r": [4]}, "lr": [1e-4, 1e-3]}, "found both"),
        ({"n_epochs": "many"}, "^n_epochs"),
        ({"n_epochs": True}, "^n_epochs"),
        ({"learning_rate_multiplier": {"min": 0, "max": 1}}, "a range of such numbers, found 0"),
        ({"learning_rate_multiplier": {"min": 1, "max": "x"}}, "a range of such numbers, found 'x'"),
        ({"learning_rate_multiplier": {"min": 1}}, "found no 'max'"),
        ({"learning_rate_multiplier": {}}, "above 0"),
        ({"n_epochs": [1, 1]}, "different values"),
        ({"n_epochs": []}, "from 1 to"),
        ({"n_epochs": float("nan")}, "finite"),
        ({"learning_rate_multiplier": 0}, "above 0"),
        ({"learning_rate_multiplier": True}, "above 0"),
        ({"learning_rate_multiplier": [1, "x"]}, "above 0"),
        ({"learning_rate_multiplier": float("nan")}, "above 0"),
        ({"learning_rate_multiplier": float("inf")}, "above 0"),
        ({"learning_rate_multiplier": 10**400}, "above 0"),
        ({"r": 10**400}, "r "),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        task_of(values)
    assert caught.value.status == 400
    assert len(caught.value.message) < 5000


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"n_epochs": 0}, "n_epochs", "n_epochs (epochs over"),
        ({"batch_size": 0}, "batch_size", "batch_size (number of rows"),
        ({"n_epochs": [1, 0]}, "n_epochs", "In n_epochs[1]: n_epochs (epochs over"),
        ({"n_epochs": {"min": 1}}, "n_epochs", "n_epochs should have 'min' and 'max'"),
        ({"lr": -1}, "lr", "lr (the peak"),
        ({"r": 0}, "r", "r (the adapter's rank)"),
        ({"lora_rank": 0}, "lora_rank", "lora_rank (the adapter's rank)"),
        ({"search_space": {"r": [0]}}, "search_space", "In search_space.r[0]: r ("),
        ({"early_exit": {"ema_alpha": 4}}, "early_exit", "early_exit.ema_alpha ("),
        ({"fp16": True}, "fp16", "the task has the key 'fp16'"),
        ({"foo": 1}, "foo", "the task has the unknown key 'foo'. Usual keys are n_epochs, "),
        ({"foo": 1, "bar": 2}, "hyperparameters", "the task has the unknown key 'foo'.\n"),
        ({"learning_rate_multiplier": {"min": 1, "max": 1}}, "learning_rate_multiplier", "search_space.learning_rate "),
    ],
)  # fmt: skip
def test_mistakes_have_the_names_that_were_sent(values: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        task_of(values)
    assert (caught.value.param, caught.value.message[: len(message)]) == (param, message)
    assert not any(name in caught.value.message for name in ("num_train_epochs", "per_device"))


@pytest.mark.parametrize("values", [{"foo": 1}, {"datase": 1}, {"tenantt": 1}, {"early_exit": {"rulez": 1}}])
def test_no_key_is_suggested_that_would_be_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        task_of(values)
    words = set(re.findall(r"\w+", caught.value.message))
    assert not words & (REFUSED_TASK_KEYS - {"method", "name", "model"} | {"rules", "mixture_weights"})
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("place", [lambda values: values, lambda values: {"search_space": values}])
def test_the_usual_keys_of_errors_may_be_sent(place: Any) -> None:
    with pytest.raises(ApiError) as caught:
        task_of(place({"foo": [1]}))
    listed = re.search(r"Usual keys are ([\w, ]+)\.", caught.value.message)
    assert listed is not None
    for name in re.split(", | and ", listed[1]):
        if name not in ("search_space", "search", "early_exit"):
            value = 0.25 if name in ("learning_rate", "lora_dropout", "weight_decay") else 1
            task_of(place({name: [value]}))


SPELLINGS = {
    **{alias: {alias, name} for alias, name in {**JOB_ALIASES, **TASK_ALIASES}.items()},
    "n_epochs": {"n_epochs", "num_train_epochs"},
    "batch_size": {"batch_size", "per_device_train_batch_size"},
    "learning_rate_multiplier": {"learning_rate_multiplier", "lr"},
}


@pytest.mark.parametrize("keys", SPELLINGS.values(), ids=SPELLINGS)
def test_two_spellings_of_one_setting_are_refused(keys: set[str]) -> None:
    refused = {TASK_ALIASES.get(key, key) for key in keys} & REFUSED_TASK_KEYS
    with pytest.raises(ApiError, match="not allow" if refused else "found both"):
        task_of(dict.fromkeys(sorted(keys), 1))


def test_every_key_of_a_task_is_allowed_or_refused_on_purpose() -> None:
    assert not REFUSED_TASK_KEYS & ALLOWED_TASK_KEYS
    assert set(TASK_FIELDS) == ALLOWED_TASK_KEYS | REFUSED_TASK_KEYS


NEVER = sorted(
    [key for key in (*TASK_FIELDS, *TASK_ALIASES) if TASK_ALIASES.get(key, key) in REFUSED_TASK_KEYS]
    + ["config", "tokenizer", "objective", "task_type", "mixture_weights", "rules", "problem_type"]
)
VALUES = ("/etc/passwd", "http://localhost:1/", True, ["/etc/passwd"], {"path": "/etc/passwd"}, {"min": 1, "max": 2})


@pytest.mark.parametrize("key", NEVER)
def test_what_reaches_outside_is_refused_in_every_place(key: str) -> None:
    places = (
        lambda value: {key: value},
        lambda value: {"search_space": {key: value}},
        lambda value: {"search_space": {"paired": [{key: [value], "lr": [1e-4]}]}},
        lambda value: {"search": {key: value}},
        lambda value: {"search": {"budget": {key: value}}},
        lambda value: {"early_exit": {key: value}},
    )
    for place, value in itertools.product(places, VALUES):
        with pytest.raises(ApiError) as caught:
            task_of(place(value))
        assert caught.value.status == 400


def test_rules_of_packages_are_refused() -> None:
    for rules in ({"divergence": True}, {}, None):
        with pytest.raises(ApiError, match="not allow"):
            task_of({"early_exit": {"rules": rules}, "lr": 1e-4})


def test_no_field_of_a_job_is_a_path_or_an_address() -> None:
    """A field that holds text is listed with what it accepts; a new one must be reviewed."""
    words = ("/etc/passwd", "http://localhost:1/x", "os.system")
    taken = set()
    for field in JOB_FIELDS:
        for word in words:
            try:
                task_of({"lr": 1e-4, field: word} if field != "learning_rate" else {field: word})
            except ApiError:
                continue
            taken.add(field)
    # Patterns for names of modules, and names of parameters.
    assert taken <= {"target_modules", "exclude_modules", "target_parameters", "modules_to_save", "layers_pattern"}


@pytest.mark.parametrize(
    "values",
    [
        {"lr": [n * 1e-6 for n in range(1, 1001)], "r": list(range(1, 1001))},
        {"search_space": {"mixture_weights": {f"s{n}": list(range(1, 1000)) for n in range(9)}}},
        {"lr": {"min": 1e-5, "max": 1e-3, "num": 10**9}},
        {"r": {"min": 1, "max": 10**9}},
        {"search": {"algorithm": "random", "budget": {"jobs": 10**9}}},
        {"search": {"algorithm": "pbt", "num_initial_jobs": 10**9}, "lr": {"min": 1e-5, "max": 1e-3}},
    ],
)
def test_grids_are_counted_before_they_are_made(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alto.spec.search.JobConfig.of", lambda *_: pytest.fail("it makes jobs"))
    with pytest.raises(ApiError, match=r"at most|<=|1 to|should"):
        task_of(values)


@pytest.mark.parametrize(
    "values",
    [
        {"target_modules": "(([a-z_.0-9]+)+)+X"},
        {"target_modules": ["q_proj", "v.*"]},
        {"search_space": {"target_modules": [["q_proj"], ["(a+)+b"]], "lr": [1e-4]}},
        {"rank_pattern": {"^(a+)+$": 8}},
        {"modules_to_save": [["lm_head|x"]]},
    ],
)
def test_regular_expressions_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="names of modules"):
        task_of({"lr": 1e-4, **values})


def test_names_of_modules_are_taken() -> None:
    found = task_of({"lr": 1e-4, "target_modules": ["q_proj", "mlp.down_proj"]}).jobs[0].config.target_modules
    assert set(found) == {"q_proj", "mlp.down_proj"}


def test_a_clone_takes_the_names_of_a_request() -> None:
    changes = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 2, "lora_dropout": 0.1}
    assert clone_changes(changes) == {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": task_values("supervised", changes, seed=None)["learning_rate"],
        "lora_dropout": 0.1,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"n_epochs": 2, "num_train_epochs": 3},
        {"learning_rate_multiplier": "auto"},
        {"learning_rate_multiplier": [1, 2]},
        {"target_modules": ".*"},
        *({key: "x"} for key in ("objective", "config", "tokenizer")),
    ],
)
def test_a_clone_takes_single_values_and_nothing_that_a_request_may_not_set(changes: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        clone_changes(changes)


def test_a_notice_on_few_rows_names_the_key_of_requests() -> None:
    (note,) = reading_notes(4, 0)
    assert "or name a validation_dataset" in note
    assert worded_note(note).endswith("raise validation_split or name a validation_file.")
