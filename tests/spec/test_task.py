from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from alto.errors import ConflictingKeysError, SpecError, UnknownKeyError, UnsupportedError
from alto.spec import EarlyExit, Job, JobConfig, Task, load_task


def task(**changes):
    return Task(**{"model": "alto-tiny", "dataset": "data/train.jsonl"} | changes)


def test_defaults():
    plain = task()
    assert plain.name == "train"
    assert plain.early_exit == EarlyExit()
    assert plain.jobs == (Job(id="job-000", config=JobConfig()),)
    assert {key: value for key, value in plain.to_dict().items() if key not in ("early_exit", "search_space")} == {
        "name": "train",
        "model": "alto-tiny",
        "dataset": "data/train.jsonl",
        "dataset_config": None,
        "dataset_train_split": None,
        "dataset_test_split": None,
        "dataset_format": "auto",
        "columns": {},
        "validation_dataset": None,
        "validation_split": None,
        "test_dataset": None,
        "test_split": None,
        "test_jobs": "auto",
        "max_samples": None,
        "data_seed": 42,
        "problem_type": None,
        "num_labels": None,
        "id2label": None,
        "on_bad_row": "error",
        "token_cache": "auto",
        "train_on": "completion",
        "chat_template": None,
        "method": "sft",
        "metric": "loss",
        "select_by": "metric",
        "num_finalists": 4,
        "num_samples": 0,
        "sample_max_new_tokens": 128,
        "repeat_by": "seed",
        "init_adapter": None,
        "refit": None,
        "num_gpus": 1,
        "priority": 0,
        "tenant": "",
        "share_executor": True,
        "keep": "finalists",
        "max_length": None,
        "eval_steps": 0.05,
        "max_slots": None,
        "max_tokens_per_step": None,
        "max_tokens_per_pass": None,
        "gradient_checkpointing": False,
        "torch_compile": False,
        "dtype": "auto",
        "load_in_4bit": False,
        "load_in_8bit": False,
        "adapter_dtype": "float32",
        "optim_state_dtype": None,
        "trust_remote_code": False,
        "use_safetensors": True,
        "report_to": "auto",
        "checkpoint_interval_s": 60.0,
        "search": {},
    }


def test_the_papers_listing_is_understood():
    listing = Task(
        model="alto-tiny",
        dataset="gsm8k",
        num_gpus=1,
        search_space={"lr": [1e-5, 5e-5], "batch_size": [1, 2], "rank": [16, 32]},
    )
    assert len(listing.jobs) == 8
    assert listing.jobs[1].config == JobConfig(lr=1e-5, batch_size=1, rank=32)
    assert listing.jobs[1].config.lora_alpha == 64.0


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("gsm8k", "gsm8k"),
        ("openai/gsm8k", "gsm8k"),
        ("data/my train.jsonl.gz", "my-train"),
        ("C:\\data\\x.JSON", "x"),
        ("v1.2.csv", "v1.2"),
        ("../..", "task"),
        ("données.json", "donn-es"),
        (".hidden.jsonl", "hidden"),
        ("x" * 200, "x" * 100),
    ],
)
def test_name_comes_from_the_dataset(dataset, name):
    assert task(dataset=dataset).name == name


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", ".x", "-x", "a b", "é", "x" * 101, "a\n", 7])
def test_unsafe_names(name):
    with pytest.raises(SpecError, match=r"^name "):
        task(name=name)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"model": ""}, SpecError, r"^model .*should be non-empty text, found ''"),
        ({"dataset": 3}, SpecError, r"^dataset .*should be non-empty text, found 3"),
        ({"validation_split": 0}, SpecError, r"^validation_split "),
        ({"validation_split": 1.0}, SpecError, r"^validation_split "),
        ({"max_samples": 0}, SpecError, r"^max_samples "),
        ({"data_seed": -1}, SpecError, r"^data_seed "),
        ({"num_gpus": 0}, SpecError, r"^num_gpus "),
        ({"max_length": 0}, SpecError, r"^max_length "),
        ({"eval_steps": 0.0}, SpecError, r"^eval_steps "),
        ({"eval_steps": 50}, SpecError, r"^eval_steps \(share of a job's steps"),
        ({"max_slots": 0}, SpecError, r"^max_slots "),
        ({"max_tokens_per_pass": 0}, SpecError, r"^max_tokens_per_pass "),
        ({"torch_compile": 1}, SpecError, r"^torch_compile .*should be true or false, found 1"),
        (
            {"gradient_checkpointing": "yes"},
            SpecError,
            r"^gradient_checkpointing .*should be true or false or 'auto', found 'yes'",
        ),
        ({"load_in_4bit": True, "load_in_8bit": True}, ConflictingKeysError, r"^load_in_4bit and load_in_8bit"),
        (
            {"adapter_dtype": "float16"},
            SpecError,
            r"^adapter_dtype .*should be 'float32' or 'bfloat16', found 'float16'",
        ),
        (
            {"optim_state_dtype": "8bit"},
            SpecError,
            r"^optim_state_dtype .*should be 'float32' or 'bfloat16' or null, found '8bit'",
        ),
        (
            {"optim_state_dtype": "bfloat16", "optim": "adamw_8bit"},
            SpecError,
            r"^optim_state_dtype should be left out with optim 'adamw_8bit', whose state has its own precision, "
            r"found 'bfloat16'. Remove it, or set optim: adamw_torch for every job.",
        ),
        (
            {"optim_state_dtype": "float32", "search_space": {"optim": ["adamw_torch", "sgd"]}},
            SpecError,
            r"^optim_state_dtype should be left out with optim 'sgd'",
        ),
        ({"dtype": "bf16"}, SpecError, r"^dtype .*'bfloat16'"),
        ({"bf16": True}, UnsupportedError, r"Use 'dtype: bfloat16'"),
        (
            {"method": "reward"},
            SpecError,
            r"^method should be one of sft, dpo, orpo, .*, found 'reward'\. Correct the name",
        ),
        ({"method": "ipo"}, SpecError, r"found 'ipo'\. Set method: dpo and loss_type: ipo"),
        ({"method": ""}, SpecError, r"^method should be one of"),
        ({"method": 3}, SpecError, r"^method .*found 3"),
        (
            {"beta": 0.1},
            UnknownKeyError,
            r"^'beta' is a setting of method dpo, orpo, cpo, kto and grpo, found with",
        ),
        (
            {"method": "orpo", "loss_type": "ipo"},
            UnknownKeyError,
            r"^'loss_type' is a setting of method dpo, cpo, kto and grpo",
        ),
        (
            {"search_space": {"beta": [0.1, 0.2]}},
            UnknownKeyError,
            r"^'beta' is a setting of method dpo, orpo, cpo, kto and grpo",
        ),
        ({"method": "dpo", "beta": "0.1"}, SpecError, r"^beta .*Write 0\.1 without quotes"),
        ({"method": "dpo", "loss_type": "kto"}, SpecError, r"^loss_type should be one of sigmoid, .*, found 'kto'"),
        ({"method": "dpo", "loss_type": "orpo"}, SpecError, r"found 'orpo'\. Set method: orpo"),
        ({"method": "dpo", "loss_type": "simpo"}, SpecError, r"found 'simpo'\. Set method: cpo and loss_type: simpo"),
        ({"method": "dpo", "loss_type": "aot"}, SpecError, r"found 'aot', which sorts the log-ratios of the whole"),
        ({"method": "dpo", "loss_type": []}, SpecError, r"^loss_type should name one or more forms"),
        ({"method": "dpo", "loss_type": ["ipo", "ipo"]}, SpecError, r"^loss_type should name one or more forms, each"),
        (
            {"method": "dpo", "loss_type": ["ipo", "sft"], "loss_weights": [1.0]},
            SpecError,
            r"^loss_weights should be 2 numbers, one for each form of loss_type, found 1\.",
        ),
        ({"method": "dpo", "loss_weights": [-1.0]}, SpecError, r"^loss_weights should be numbers > 0, found"),
        ({"method": "dpo", "loss_type": "sft", "rpo_alpha": 1.0}, SpecError, r"^rpo_alpha is the weight of the form"),
        ({"method": "dpo", "loss_type": "exo_pair"}, SpecError, r"^label_smoothing should be above 0 with loss_type"),
        (
            {"method": "dpo", "loss_type": "nca_pair", "f_divergence_type": "forward_kl"},
            SpecError,
            r"^f_divergence_type should be 'reverse_kl' with loss_type 'nca_pair', found 'forward_kl'",
        ),
        ({"method": "dpo", "f_alpha_divergence_coef": 0.2}, SpecError, r"^f_alpha_divergence_coef should be 0\.5 with"),
        ({"method": "dpo", "discopop_tau": 0.2}, SpecError, r"^discopop_tau should be 0\.05 with loss_type 'sigmoid'"),
        ({"method": "dpo", "ld_alpha": 1.5}, SpecError, r"^ld_alpha \("),
        ({"method": "dpo", "use_weighting": True}, UnsupportedError, r"the probabilities of all tokens"),
        ({"method": "cpo", "simpo_gamma": 0.5}, SpecError, r"^simpo_gamma belongs to loss_type 'simpo', found 0\.5"),
        ({"method": "cpo", "loss_type": "hinge", "label_smoothing": 0.1}, SpecError, r"^label_smoothing should be 0"),
        (
            {"method": "dpo", "loss_type": "ipo", "label_smoothing": 0.1},
            SpecError,
            r"^label_smoothing should be 0 with loss_type 'ipo', found 0\.1\. .*: sigmoid or robust",
        ),
        (
            {"method": "dpo", "label_smoothing": 0.1, "search_space": {"loss_type": ["robust", "ipo"]}},
            SpecError,
            r"^In job-001 \(loss_type=ipo\): label_smoothing should be 0",
        ),
        ({"search_space": {"method": ["sft", "dpo"]}}, UnknownKeyError, r"Move it to the top level"),
        ({"method": "dpo", "rl": "dpo"}, ConflictingKeysError, r"both 'method' and 'rl'"),
        ({"method": "dpo", "ref_model": "m"}, UnsupportedError, r"The reference of dpo is the frozen base"),
        ({"early_exit": 3}, SpecError, r"^early_exit should be true, false or a mapping"),
        ({"early_exit": {1: 2}}, SpecError, r"^early_exit should have text as keys"),
        ({"early_exit": {"polcy": "paper"}}, UnknownKeyError, r"early_exit.*'policy'"),
        ({"early_exit": {"tau_gap": -1}}, SpecError, r"early_exit\.tau_gap"),
        ({"policy": "paper"}, UnknownKeyError, r"expected under 'early_exit'"),
        ({"modle": "x"}, UnknownKeyError, r"the task has the unknown key 'modle'. Did you mean 'model'"),
        ({"base_model": "x"}, ConflictingKeysError, r"both 'model' and 'base_model'"),
        ({"r": [8, 16]}, SpecError, r"^r .*found \[8, 16\].*belongs under 'search_space'"),
        ({"lr": "1e-4"}, SpecError, r"found '1e-4' \(text\)\. Write 1e-4 without quotes"),
        ({"lr": 1e-4, "search_space": {"learning_rate": [1e-3]}}, ConflictingKeysError, r"both at the top level"),
        ({"r": 8, "search_space": {"paired": {"rank": [4]}}}, ConflictingKeysError, r"'r' is given both"),
        ({"search_space": {"max_length": [512]}}, UnknownKeyError, r"Move it to the top level"),
        ({"search_space": {"cutoff_len": [512]}}, UnknownKeyError, r"Move it to the top level"),
        ({"search_space": None}, SpecError, r"^search_space should map"),
        (
            {"warmup_ratio": 0.1, "search_space": {"warmup_steps": [0, 5]}},
            SpecError,
            r"^In job-001 \(warmup_steps=5\): ",
        ),
        ({"validation_dataset": "v.jsonl", "validation_split": 0.2}, ConflictingKeysError, r"validation_split"),
        ({"dataset_format": "sharegtp"}, SpecError, r"^dataset_format .*'sharegpt'"),
        ({"dataset_config": ""}, SpecError, r"^dataset_config "),
        ({"columns": {"promt": "q"}}, SpecError, r"^columns should have roles.*'promt'; roles are messages, system"),
        ({"columns": {"prompt": 3}}, SpecError, r"^columns should map roles to names"),
        ({"columns": ["prompt"]}, SpecError, r"^columns should map roles to names"),
        ({"columns": {"prompt": "q", "system": "q"}}, SpecError, r"^columns should give every role a different column"),
    ],
)
def test_refused_where_it_is_built(changes, error, reason):
    with pytest.raises(error, match=reason) as caught:
        task(**changes)
    assert not isinstance(caught.value, ValidationError)


@pytest.mark.parametrize("key", ["model", "dataset"])
def test_what_every_task_needs(key):
    given = {"model": "alto-tiny", "dataset": "d"}
    del given[key]
    with pytest.raises(SpecError, match=rf"^{key} .*is missing: expected non-empty text( or a list)?, found nothing"):
        Task(**given)


def test_early_exit_forms():
    assert task(early_exit=True).early_exit == EarlyExit()
    assert task(early_exit=False).early_exit == EarlyExit(enabled=False)
    assert task(early_exit={"policy": "paper"}).early_exit == EarlyExit(policy="paper")
    assert task(early_exit=EarlyExit(policy="paper")).early_exit == EarlyExit(policy="paper")


@pytest.mark.parametrize("method", ["sft", "classification", "dpo", "orpo", "cpo", "kto"])
def test_methods_that_compare_replies_keep_more_jobs_for_longer(method):
    preset = "preferences" if method in ("dpo", "orpo", "cpo", "kto") else None
    plain = task(method=method)
    assert plain.early_exit == EarlyExit(preset=preset)
    assert Task(**plain.to_dict()) == plain
    assert task(method=method, early_exit={"finish_from": 0.6}).early_exit == EarlyExit(preset=preset, finish_from=0.6)
    for own in ({"preset": "cautious"}, {"rungs": [[0.1, 0.5]]}, {"policy": "paper"}, {"select_ratio": 0.5}):
        assert task(method=method, early_exit=own).early_exit == EarlyExit(**own)


def test_fixed_fields_reach_every_job_and_warmup_ratio_is_the_schedules():
    tuned = task(lr=1e-3, alpha="r", warmup_ratio=0.1, search_space={"r": [4, 8]})
    assert tuned.fixed == {"learning_rate": 1e-3, "lora_alpha": "r", "warmup_ratio": 0.1}
    assert [job.config for job in tuned.jobs] == [
        JobConfig(learning_rate=1e-3, r=4, lora_alpha=4, warmup_ratio=0.1),
        JobConfig(learning_rate=1e-3, r=8, lora_alpha=8, warmup_ratio=0.1),
    ]


def test_configurations_that_come_to_the_same_are_named():
    with pytest.raises(SpecError, match=r"found that job-001 and job-002 are equal \(r=8, lora_alpha=r\)"):
        task(search_space={"paired": {"r": [4, 8, 8], "lora_alpha": [8, 8, "r"]}})


@pytest.mark.parametrize(("num", "last"), [(1, "job-000"), (1000, "job-999"), (1001, "job-1000"), (10_000, "job-9999")])
def test_ids_are_padded_to_the_number_of_jobs(num, last):
    jobs = task(search_space={"seed": list(range(num))}).jobs
    assert jobs[-1].id == last
    assert [job.id for job in jobs] == sorted(job.id for job in jobs)


ROUND_TRIPS = [
    {},
    {"early_exit": False, "dtype": "bfloat16", "name": "x"},
    {"early_exit": {"rungs": [[0.1, 0.5], [0.2, 0.5]]}},
    {"validation_dataset": "v.jsonl", "max_samples": 10},
    {"dataset_config": "main", "dataset_train_split": "a", "columns": {"prompt": "q"}, "dataset_format": "text"},
    {"lr": 1e-5, "target_modules": ["v", "q"], "alpha": "0.5*r", "search_space": {"r": [4, 8]}},
    {"max_grad_norm": 0, "search_space": {"paired": [{"r": [4, 8], "alpha": [1, "r"]}, {"seed": [1, 2]}], "lr": 1e-7}},
    {"search_space": {"lr": {"min": 1e-6, "max": 1e-2, "log": True, "num": 5}}, "data_seed": 7},
    {"dataset": Path("data/x.jsonl"), "search_space": {"lr": [*np.logspace(-5, -3, 3)]}},
    {"adam_epsilon": np.float64(1e-9), "target_modules": ("q", "v")},
    {"method": "dpo", "dataset_format": "openai_preference"},
    {"rl": "dpo", "rl_beta": 0.2, "search_space": {"pref_loss": ["sigmoid", "ipo"]}},
    {"stage": "orpo", "search_space": {"pref_beta": {"min": 0.01, "max": 1.0, "log": True, "num": 3}}},
]


@pytest.mark.parametrize("changes", ROUND_TRIPS)
def test_round_trip(changes):
    original = task(**changes)
    for again in (
        Task(**original.to_dict()),
        Task(**yaml.safe_load(original.to_yaml())),
        pickle.loads(pickle.dumps(original)),
        copy.deepcopy(original),
    ):
        assert again == original
        assert again.jobs == original.jobs
        assert again.to_dict() == original.to_dict()


def test_tasks_differ_by_what_they_ask():
    assert task(lr=1e-3) != task(lr=1e-4)
    assert task(search_space={"r": [8]}) != task(r=8)
    assert task(search_space={"r": [8, 16]}) != task(search_space={"r": [16, 8]})


def test_replace_checks_and_takes_aliases():
    original = task(lr=1e-3, search_space={"r": [4, 8]})
    assert original.replace(learning_rate=1e-2).jobs == task(lr=1e-2, search_space={"r": [4, 8]}).jobs
    assert original.replace(lr=1e-2) == original.replace(learning_rate=1e-2)
    assert len(original.model_copy(update={"search_space": {"r": [4]}}).jobs) == 1
    with pytest.raises(SpecError, match=r"^max_slots"):
        original.replace(max_slots=0)
    validated = original.replace(validation_dataset="v.jsonl")
    assert validated.validation_dataset == "v.jsonl"
    assert validated.replace(validation_split=0.2).to_dict() == original.to_dict() | {"validation_split": 0.2}


def test_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        task().max_slots = 3
    fixed = task(lr=1e-3).fixed
    fixed["learning_rate"] = 1
    assert task(lr=1e-3).fixed == {"learning_rate": 1e-3}


def preferring(**changes):
    return task(method="dpo", **changes)


def settings_of(tuned):
    return [tuple(job.config.objective.to_dict().values())[:3] for job in tuned.jobs]


def test_a_method_fills_in_its_own_settings_and_no_others():
    assert settings_of(task()) == [()]
    assert settings_of(preferring()) == [(0.1, "sigmoid", 0.0)]
    assert settings_of(task(method="orpo")) == [(0.1,)]
    assert preferring().fixed == {}


def test_settings_of_a_method_vary_like_any_other():
    tuned = preferring(beta=0.3, search_space={"loss_type": ["sigmoid", "ipo"], "r": [4]})
    assert settings_of(tuned) == [(0.3, "sigmoid", 0.0), (0.3, "ipo", 0.0)]
    tuned = preferring(search_space={"beta": [0.05, 0.1], "label_smoothing": [0.0, 0.2]})
    assert settings_of(tuned) == [(beta, "sigmoid", smoothing) for beta in (0.05, 0.1) for smoothing in (0.0, 0.2)]
    tuned = preferring(search_space={"paired": {"loss_type": ["ipo", "hinge"], "beta": [0.5, 0.01]}})
    assert settings_of(tuned) == [(0.5, "ipo", 0.0), (0.01, "hinge", 0.0)]
    sampled = preferring(search_space={"beta": {"min": 0.01, "max": 1.0, "log": True, "num": 20}})
    assert all(0.01 <= beta <= 1 for beta, *_ in settings_of(sampled))


def test_a_default_written_out_is_not_another_job():
    with pytest.raises(SpecError, match=r"job-000 and job-001 are equal"):
        preferring(search_space={"beta": [None, 0.1]})


def test_the_method_can_be_replaced_with_its_settings():
    original = preferring(beta=0.3)
    assert settings_of(original.replace(loss_type="ipo")) == [(0.3, "ipo", 0.0)]
    assert settings_of(original.replace(method="orpo")) == [(0.3,)]
    with pytest.raises(UnknownKeyError, match="found with method 'sft'"):
        original.replace(method="sft")
    assert original.replace(method="sft", beta=None).jobs == task().jobs


def test_configurations_as_version_0_1_wrote_them_are_read():
    written = {"learning_rate": 1e-3, "beta": None, "loss_type": None, "label_smoothing": None}
    assert task().job_config(written) == JobConfig(learning_rate=1e-3)
    orpo = task(method="orpo", beta=0.3, lr=1e-3)
    assert orpo.job_config({**written, "beta": 0.3}) == orpo.jobs[0].config
    dpo = preferring(loss_type="ipo", lr=1e-3)
    assert dpo.job_config({**dpo.jobs[0].config.to_dict()}) == dpo.jobs[0].config
    settings = list(dpo.jobs[0].config.to_dict())
    assert settings[settings.index("seed") + 1 :][:3] == ["beta", "loss_type", "label_smoothing"]


def test_a_loss_of_several_forms_is_one_configuration():
    several = ["sigmoid", "bco_pair", "sft"]
    (job,) = preferring(loss_type=several, loss_weights=[0.8, 0.2, 1]).jobs
    assert job.config.objective.forms == {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}
    assert job.config.replace(beta=0.2).objective.loss_type == tuple(several)
    assert preferring(loss_type=["ipo"]).jobs[0].config.objective.loss_type == "ipo"
    tuned = preferring(search_space={"loss_type": [several, "ipo", ["hinge"]], "beta": [0.1]})
    assert [job.config.objective.loss_type for job in tuned.jobs] == [tuple(several), "ipo", "hinge"]
    assert Task(**yaml.safe_load(yaml.safe_dump(tuned.to_dict(), sort_keys=False))) == tuned
    found = preferring(search_space={"rpo_alpha": {"min": 0.1, "max": 1.0, "num": 3}, "ld_alpha": [0.5, None]})
    assert {job.config.objective.ld_alpha for job in found.jobs} == {0.5, None}
    assert all(job.config.objective.forms["sft"] == job.config.objective.rpo_alpha for job in found.jobs)


def test_own_methods_ask_no_packages(monkeypatch):
    monkeypatch.setattr("alto.base.plugins.entry_points", lambda **_: pytest.fail("looked at every package"))
    assert [preferring().method, task().method] == ["dpo", "sft"]


def test_settings_that_are_mappings_are_written_and_read_back(tmp_path):
    given = {
        "rank_pattern": {"q_proj": 4, "o_proj": 2},
        "alpha_pattern": {"v_proj": 3},
        "layers_to_transform": [0, 1],
        "exclude_modules": ["k_proj"],
        "lr_scheduler_type": "cosine",
    }
    space = {"lr_scheduler_kwargs": [{}, {"num_cycles": 1.5}], "layers_pattern": [None, "layers"]}
    task = Task(model="base", dataset="rows.jsonl", **given, search_space=space)
    assert len(task.jobs) == 4
    (tmp_path / "task.yaml").write_text(task.to_yaml(), encoding="utf-8")
    found = load_task(tmp_path / "task.yaml")
    assert found == task
    assert [job.config for job in found.jobs] == [job.config for job in task.jobs]
    assert task.jobs[2].config.lr_scheduler_kwargs == (("num_cycles", 1.5),)
    assert "rank_pattern:\n  q_proj: 4\n  o_proj: 2\n" in task.to_yaml()
