from __future__ import annotations

import copy
import itertools
import pickle

import peft
import pytest
import torch
import transformers
from budgets import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from alto.errors import ConflictingKeysError, SpecError, UnknownKeyError, UnsupportedError
from alto.records import Rung
from alto.spec import JobConfig, rung_step
from alto.spec.job_config import JOB_FIELDS
from alto.spec.method import find_method


def test_defaults():
    config = JobConfig()
    assert config.to_dict() == {
        "learning_rate": 2e-4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "r": 16,
        "lora_alpha": 32.0,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "init_lora_weights": "default",
        "lora_dropout": 0.0,
        "target_modules": "all-linear",
        "target_parameters": None,
        "exclude_modules": None,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "neftune_noise_alpha": None,
        "router_aux_loss_coef": None,
        "loraplus_lr_ratio": 1.0,
        "num_train_epochs": 3,
        "max_steps": None,
        "lr_scheduler_type": "linear",
        "lr_scheduler_kwargs": {},
        "warmup_steps": 0,
        "warmup_ratio": 0.0,
        "optim": "adamw_torch",
        "optim_args": {},
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "seed": 42,
    }


@pytest.mark.parametrize(
    ("given", "alpha"),
    [
        ({"r": 8}, 16.0),
        ({"r": 8, "lora_alpha": 12}, 12.0),
        ({"r": 8, "lora_alpha": 0.5}, 0.5),
        ({"r": 8, "lora_alpha": "r"}, 8.0),
        ({"lora_alpha": "2*r", "r": 64}, 128.0),
        ({"r": 8, "alpha": " 0.5 * r "}, 4.0),
        ({"r": 8, "alpha": "1e1*r"}, 80.0),
    ],
)
def test_lora_alpha_is_resolved(given, alpha):
    config = JobConfig(**given)
    assert config.lora_alpha == alpha
    assert type(config.lora_alpha) is float


@pytest.mark.parametrize("alpha", ["2r", "r*2", "-1*r", "0*r", "", "2*s", "32", "rr", "nan*r", 0, -1, None, True, [32]])
def test_an_invalid_lora_alpha(alpha):
    with pytest.raises(SpecError, match=r"^lora_alpha "):
        JobConfig(lora_alpha=alpha)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("all-linear", "all-linear"),
        (["all-linear"], "all-linear"),
        ("peft-default", "peft-default"),
        (["peft-default"], "peft-default"),
        ("All-Linear", "all-linear"),
        (r".*\.(q|v)_proj", r".*\.(q|v)_proj"),
        ("self_attn.q_proj", ("self_attn.q_proj",)),
        ("q_proj", ("q_proj",)),
        (["v_proj", "q_proj"], ("q_proj", "v_proj")),
        (("mlp.up_proj",), ("mlp.up_proj",)),
    ],
)
def test_target_modules_have_one_form(given, stored):
    assert JobConfig(target_modules=given).target_modules == stored


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("q_proj,v_proj", r"Write \[q_proj, v_proj\]"),
        ("q_proj v_proj", r"Write \[q_proj, v_proj\]"),
        ([".*_proj"], r"A pattern cannot be in a list"),
        (".*(q|v_proj", r"a regular expression.*unterminated subpattern.*For example:"),
        ("*_proj", r"nothing to repeat"),
        ("", r"found ''"),
        ("  ", r"found '  '"),
        ([], r"a list of names or a pattern, found \[\]"),
        ([1], r"found 1"),
        (None, r"found None"),
        (["q", "q"], r"once"),
        (["all-linear", "q"], r"found both in"),
        (["peft-default", "q"], r"found both in"),
    ],
)
def test_target_modules_refused(given, reason):
    with pytest.raises(SpecError, match=rf"^target_modules should .*{reason}"):
        JobConfig(target_modules=given)


OUTSIDE = {
    "learning_rate": [0, -1e-4],
    "per_device_train_batch_size": [0, 4097, 1.5],
    "r": [0, 1025, 8.5],
    "lora_dropout": [-0.1, 1.0],
    "loraplus_lr_ratio": [0, -1.0],
    "num_train_epochs": [0, -0.5, 10**9 + 1, float("nan")],
    "max_steps": [0, -1, 10**9 + 1, 1.5],
    "lr_scheduler_type": ["step", 1],
    "warmup_steps": [-1, 10**9 + 1],
    "gradient_accumulation_steps": [0, 4097, 2.5],
    "warmup_ratio": [-0.1, 1.0],
    "weight_decay": [-0.1],
    "max_grad_norm": [-1.0],
    "neftune_noise_alpha": [-0.1],
    "router_aux_loss_coef": [-0.1],
    "adam_beta1": [-0.1, 1.0],
    "adam_beta2": [-0.1, 1.0],
    "adam_epsilon": [0.0],
    "seed": [-1, 2**32],
}
NUMBERS = [field for field in OUTSIDE if field != "lr_scheduler_type"]
NULLABLE = ("max_steps", "max_grad_norm", "neftune_noise_alpha", "router_aux_loss_coef")


def test_every_field_is_covered_by_a_table():
    rest = {"lora_alpha", "use_rslora", "init_lora_weights", "optim", "lr_scheduler_kwargs", "mixture_weights"}
    # These are in test_optimizers.py, tests/lora/test_shape.py and test_experts.py.
    rest |= {"optim_args"}
    rest |= {"target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"}
    rest |= {"rank_pattern", "alpha_pattern"}
    rest |= {"bias", "use_dora"}  # tests/lora/test_extras.py
    rest |= {"modules_to_save"}  # tests/lora/test_vocabulary.py
    assert set(OUTSIDE) | rest == set(JOB_FIELDS)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in OUTSIDE.items() for value in values])
def test_outside_the_domain(field, value):
    with pytest.raises(SpecError, match=rf"^{field} .* should be .*, found {value!r} .*\. (Choose|Use|Write)"):
        JobConfig(**{field: value})


@pytest.mark.parametrize("value", ["1e-4", "8", True, float("nan"), float("inf"), [8], {"min": 1}, 8 + 0j])
@pytest.mark.parametrize("field", NUMBERS)
def test_what_is_no_finite_number_is_never_coerced(field, value):
    with pytest.raises(SpecError, match=rf"^{field} .* should be .* number"):
        JobConfig(**{field: value})


@pytest.mark.parametrize("field", NUMBERS)
def test_null_only_where_it_means_something(field):
    if field in NULLABLE:
        assert getattr(JobConfig(**{field: None}), field) is None
    else:
        with pytest.raises(SpecError, match=r"found null\. Remove the key for the default\."):
            JobConfig(**{field: None})


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"lr": "1e-4"}, "Write 1e-4 without quotes."),
        ({"lr": "0.1"}, "Write 0.1 without quotes."),
        ({"r": "many"}, "Write a number."),
        ({"r": True}, "Write a number, not true or false."),
        ({"r": 8.0}, "Write 8, without a point."),
        ({"r": [8, 16]}, "what varies between jobs belongs under 'search_space'."),
        ({"lr": float("nan")}, "Write a finite number."),
    ],
)
def test_the_remedy_fits_the_mistake(given, remedy):
    with pytest.raises(SpecError) as caught:
        JobConfig(**given)
    assert str(caught.value).endswith(remedy)
    assert not isinstance(caught.value, ValidationError)


def test_all_mistakes_are_named_at_once_and_each_once():
    with pytest.raises(SpecError) as caught:
        JobConfig(r="x", lora_alpha="2*r", seed=-1)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["r", "seed"]


def test_keys_go_through_the_one_table_of_names():
    assert JobConfig(lr=1e-3, rank=4) == JobConfig(learning_rate=1e-3, r=4)
    with pytest.raises(UnknownKeyError, match="the job"):
        JobConfig(learning_rte=1)
    with pytest.raises(ConflictingKeysError):
        JobConfig(lr=1e-3, learning_rate=1e-3)
    with pytest.raises(UnsupportedError):
        JobConfig(use_qalora=True)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (True, "default"),
        ("default", "default"),
        ("gaussian", "gaussian"),
        ("Gaussian", "gaussian"),
        ("orthogonal", "orthogonal"),
    ],
)
def test_initial_weights_have_one_spelling(given, stored):
    assert JobConfig(init_lora_weights=given).init_lora_weights == stored


@pytest.mark.parametrize(
    ("given", "why"),
    [
        *((name, "the base model's weights, which all jobs share") for name in ("pissa", "pissa_niter_4", "PiSSA")),
        *((name, "the base model's weights, which all jobs share") for name in ("olora", "loftq", "corda")),
        *((name, "on the training rows") for name in ("eva", "lora_ga")),
        ("mica", "a variant of LoRA"),
        (False, "would not start from the base model"),
    ],
)
def test_other_ways_to_start_are_refused_by_name_with_a_reason(given, why):
    with pytest.raises(
        UnsupportedError, match=f"init_lora_weights: .* found {str(given).lower()!r}.*{why}".replace("'false'", "false")
    ):
        JobConfig(init_lora_weights=given)


def test_orthogonal_starts_need_even_ranks():
    assert JobConfig(init_lora_weights="orthogonal", r=6, rank_pattern={"q_proj": 2}).r == 6
    for wrong in ({"r": 5}, {"r": 6, "rank_pattern": {"q_proj": 3}}):
        with pytest.raises(SpecError, match=r"'orthogonal' should come with even ranks.* found rank [35]"):
            JobConfig(init_lora_weights="orthogonal", **wrong)


@pytest.mark.parametrize("given", ["kaiming", 1, 0, None, ["gaussian"]])
def test_what_is_no_way_to_start(given):
    with pytest.raises(
        SpecError, match=r"^init_lora_weights .* should be 'default' or 'gaussian' or 'orthogonal', found"
    ):
        JobConfig(init_lora_weights=given)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("adamw_torch", "adamw_torch"),
        ("adamw_torch_fused", "adamw_torch"),
        ("adamw", "adamw_torch"),
        ("adamw_8bit", "adamw_8bit"),
        ("adamw_bnb_8bit", "adamw_8bit"),
        ("paged_adamw_8bit", "paged_adamw_8bit"),
    ],
)
@pytest.mark.parametrize("key", ["optim", "optimizer"])
def test_an_optimizer_has_one_spelling(key, given, stored):
    """Every spelling but the shortest is a name that Hugging Face knows."""
    assert given == "adamw" or given in set(transformers.training_args.OptimizerNames)
    assert JobConfig(**{key: given}).optim == stored


@pytest.mark.parametrize("given", ["adam", "", 8, None, True])
def test_what_is_no_optimizer_is_refused(given):
    with pytest.raises(
        SpecError, match=r"^optim .* should be 'adamw_torch' or .* or 'adafactor', found .*(Use|Remove)"
    ):
        JobConfig(optim=given)


@pytest.mark.parametrize("given", [1, "true", None])
def test_rslora_is_a_truth_value(given):
    with pytest.raises(SpecError, match=r"^use_rslora .* should be true or false"):
        JobConfig(use_rslora=given)


def test_a_pasted_peft_configuration_is_understood():
    """It has everything that PEFT writes, at its defaults, except what we set."""
    pasted = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["v_proj", "q_proj"], use_rslora=True).to_dict()
    pasted["target_modules"] = sorted(pasted["target_modules"])
    expected = JobConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_rslora=True)
    assert JobConfig(**pasted) == expected
    assert JobConfig(**(pasted | {"bias": "all", "use_dora": True})) == expected.replace(bias="all", use_dora=True)
    saved = JobConfig(**(pasted | {"modules_to_save": ["lm_head"]}))
    assert saved == expected.replace(modules_to_save=("lm_head",))
    for key, value in {
        "trainable_token_indices": [3],
    }.items():
        with pytest.raises(UnsupportedError, match=repr(key)):
            JobConfig(**(pasted | {key: value}))


def test_warmup_is_given_one_way():
    with pytest.raises(SpecError, match=r"exclude each other.*warmup_steps=3 and warmup_ratio=0\.1"):
        JobConfig(warmup_steps=3, warmup_ratio=0.1)
    with pytest.raises(SpecError, match="constant_with_warmup"):
        JobConfig(lr_scheduler_type="constant", warmup_steps=1)
    assert JobConfig(lr_scheduler_type="constant_with_warmup", warmup_ratio=0.1).num_warmup_steps(100) == 10


def test_whole_epochs_may_be_written_as_floats():
    assert JobConfig(num_train_epochs=3.0) == JobConfig(num_train_epochs=3)


def test_zero_norm_means_no_clipping():
    assert JobConfig(max_grad_norm=0) == JobConfig(max_grad_norm=None)
    assert JobConfig(max_grad_norm=0).max_grad_norm is None


def test_zero_noise_means_none_and_pairs_have_none():
    assert JobConfig(neftune_noise_alpha=0) == JobConfig()
    for name in ("dpo", "orpo"):
        with pytest.raises(UnsupportedError, match=f"neftune_noise_alpha: expected no value with method '{name}'"):
            JobConfig.of(find_method(name), {"neftune_noise_alpha": 5.0})


def test_frozen_equal_hashable_and_copied_with_checks():
    config = JobConfig(r=8, target_modules=["v", "q"])
    with pytest.raises(ValidationError, match="frozen"):
        config.r = 4
    assert hash(config) == hash(JobConfig(r=8, target_modules=["q", "v"]))
    assert JobConfig(**config.to_dict()) == config
    assert config.replace(learning_rate=1).learning_rate == 1.0
    for change in (config.replace, lambda **changes: config.model_copy(update=changes)):
        with pytest.raises(SpecError, match=r"^r "):
            change(r=0)
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def trained_rows(config, num_rows):
    """Return the batch sizes of the whole job, as torch's DataLoader makes them, epoch after epoch."""
    loader = torch.utils.data.DataLoader(range(num_rows), batch_size=config.per_device_train_batch_size)
    epochs = config.num_train_epochs if config.max_steps is None else config.max_steps
    sizes = [len(batch) for _ in range(epochs) for batch in loader]
    return sizes[: config.max_steps]


@pytest.mark.parametrize(("epochs", "steps"), [(0.01, 1), (0.5, 4), (1.5, 11), (2, 14), (2.0, 14)])
def test_a_part_of_an_epoch_has_the_steps_of_hf_trainer(epochs, steps):
    """27 rows, 4 per step: 7 steps per epoch, rounded up as in transformers.Trainer.set_initial_training_values."""
    config = JobConfig(per_device_train_batch_size=4, num_train_epochs=epochs)
    assert config.total_steps(27) == steps
    assert config.samples_after(11, 27) == 27 + 4 * 4
    assert config.to_dict()["num_train_epochs"] == epochs
    assert JobConfig(num_train_epochs=2.0) == JobConfig(num_train_epochs=2)
    assert str(JobConfig(num_train_epochs=2.0).num_train_epochs) == "2"


@settings(max_examples=examples(50))
@given(
    num_rows=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    epochs=st.integers(1, 4),
    max_steps=st.none() | st.integers(1, 30),
)
def test_steps_and_samples_are_those_of_a_data_loader(num_rows, batch_size, epochs, max_steps):
    config = JobConfig(batch_size=batch_size, num_train_epochs=epochs, max_steps=max_steps)
    sizes = trained_rows(config, num_rows)
    assert config.total_steps(num_rows) == len(sizes)
    assert [config.samples_after(step, num_rows) for step in range(len(sizes) + 1)] == [
        sum(sizes[:step]) for step in range(len(sizes) + 1)
    ]


@settings(max_examples=examples(50))
@given(total=st.integers(1, 5000), ratio=st.floats(0.001, 0.999))
def test_warmup_ratio_rounds_as_transformers_does(total, ratio):
    arguments = transformers.TrainingArguments.__new__(transformers.TrainingArguments)
    arguments.warmup_steps = ratio
    assert JobConfig(warmup_ratio=ratio).num_warmup_steps(total) == arguments.get_warmup_steps(total)


@pytest.mark.parametrize(
    ("given_settings", "total", "earliest"),
    [
        ({}, 19, 0.0),
        ({"warmup_ratio": 0.03}, 19, 2 / 19),
        ({"warmup_ratio": 0.1}, 1000, 0.025),
        ({"warmup_steps": 1}, 2, 2 / 3),
        ({"warmup_steps": 50}, 20, 0.25),
    ],
)
def test_jobs_are_compared_after_a_quarter_of_the_warmup_and_a_step_that_learns(
    given_settings, total, earliest
) -> None:
    config = JobConfig(**given_settings)
    assert config.earliest_rung(total) == pytest.approx(earliest)
    if given_settings and total > 3:
        assert config.learning_rate_at(rung_step(Rung(progress=earliest, keep=0.5), total) - 1, total) > 0


SCHEDULES = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.75}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 1e-5, "power": 2.5}),
    ("polynomial", {"lr_end": 0}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 13}),
    ("cosine_with_min_lr", {"min_lr": 1e-5}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 2.0}),
    ("cosine_warmup_with_min_lr", {"min_lr": 2e-5}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2, "warmup_lr_rate": 0.3}),
    ("warmup_stable_decay", {"num_decay_steps": 10}),
    ("warmup_stable_decay", {"num_decay_steps": 4, "num_stable_steps": 3, "min_lr_ratio": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 0, "num_stable_steps": 3, "min_lr_ratio": 0.1}),
    *(
        ("warmup_stable_decay", {"num_decay_steps": 30, "warmup_type": shape, "decay_type": shape, "min_lr_ratio": 0.2})
        for shape in ("linear", "cosine", "1-sqrt")
    ),
]


def rates_of_transformers(config, total_steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=config.learning_rate)
    theirs = transformers.get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.num_warmup_steps(total_steps),
        num_training_steps=total_steps,
        scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs),
    )
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(total_steps - 1):
        optimizer.step()
        theirs.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize("total_steps", [1, 7, 50])
@pytest.mark.parametrize(
    ("scheduler", "kwargs", "warmup"),
    [
        ("constant", {}, {}),
        *(
            (*schedule, warmup)
            for schedule, warmup in itertools.product(
                SCHEDULES,
                [{}, {"warmup_steps": 5}, {"warmup_steps": 0.3}, {"warmup_ratio": 0.13}, {"warmup_steps": 80}],
            )
        ),
    ],
)
def test_learning_rates_are_those_of_transformers_to_the_last_bit(scheduler, kwargs, warmup, total_steps):
    config = JobConfig(learning_rate=3e-4, lr_scheduler_type=scheduler, lr_scheduler_kwargs=kwargs, **warmup)
    found = [config.learning_rate_at(step, total_steps) for step in range(total_steps)]
    assert found == rates_of_transformers(config, total_steps)


def test_every_schedule_of_transformers_is_trained_or_refused_with_a_reason():
    known = {kind.value for kind in transformers.SchedulerType}
    trained = {"constant", *(scheduler for scheduler, _ in SCHEDULES)}
    for name in known - trained:
        for spelling in (name, transformers.SchedulerType(name)):
            with pytest.raises(UnsupportedError, match=rf"before the job starts, found '{name}': its rate depends"):
                JobConfig(lr_scheduler_type=spelling)
    assert known - trained == {"reduce_lr_on_plateau", "greedy"}
    assert JobConfig(lr_scheduler_type=transformers.SchedulerType.COSINE).lr_scheduler_type == "cosine"


@pytest.mark.parametrize(
    ("scheduler", "kwargs", "message"),
    [
        ("linear", {"num_cycles": 2}, r"settings of lr_scheduler_type 'linear' \(none\), found 'num_cycles'"),
        ("cosine", {"min_lr": 1e-5}, r"'cosine' \(num_cycles\), found 'min_lr'"),
        ("cosine_with_min_lr", {}, "should have one of min_lr and min_lr_rate .* found neither"),
        ("cosine_with_min_lr", {"min_lr": 0, "min_lr_rate": 0.1}, "found min_lr and min_lr_rate"),
        ("warmup_stable_decay", {}, "should have num_decay_steps in lr_scheduler_kwargs"),
        ("polynomial", {"lr_end": 1.0}, "should end at a rate below learning_rate"),
        ("cosine", {"cycles": 2}, r"^lr_scheduler_kwargs should have settings of schedules as keys .* found 'cycles'"),
        ("cosine", {"num_cycles": 0}, "^lr_scheduler_kwargs should have a number > 0 for num_cycles, found 0"),
        ("cosine", {"num_cycles": "2"}, "should have a number > 0 for num_cycles, found '2'"),
        ("cosine", {"num_cycles": True}, "should have a number > 0 for num_cycles, found True"),
        ("warmup_stable_decay", {"num_decay_steps": 1.0}, "a whole number >= 0 for num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 1, "decay_type": "sqrt"}, "'linear', 'cosine' or '1-sqrt'"),
        ("cosine", ["num_cycles"], "^lr_scheduler_kwargs should map settings of the schedule to values"),
    ],
)
def test_settings_that_a_schedule_does_not_have(scheduler, kwargs, message):
    with pytest.raises(SpecError, match=message):
        JobConfig(lr_scheduler_type=scheduler, lr_scheduler_kwargs=kwargs)


@pytest.mark.parametrize(("given", "steps"), [(3, 3), (3.0, 3), (0.05, 5), (0.051, 6), (1.0, 1), (0, 0)])
def test_warmup_steps_are_a_number_or_a_share(given, steps):
    arguments = transformers.TrainingArguments.__new__(transformers.TrainingArguments)
    arguments.warmup_steps = given
    assert JobConfig(warmup_steps=given).num_warmup_steps(100) == arguments.get_warmup_steps(100) == steps
    assert JobConfig(warmup_steps=3.0) == JobConfig(warmup_steps=3)
    assert JobConfig(warmup_steps=3.0).to_dict()["warmup_steps"] == 3


def test_a_share_of_several_steps_is_no_number_of_steps():
    with pytest.raises(
        SpecError, match=r"warmup_steps should be an integer number of steps, or a fraction below 1, found 1\.5"
    ):
        JobConfig(warmup_steps=1.5)


def test_micro_steps_make_a_step():
    config = JobConfig(per_device_train_batch_size=2, gradient_accumulation_steps=3, num_train_epochs=2)
    assert config.rows_per_step == 6
    assert (config.steps_per_epoch(13), config.total_steps(13)) == (3, 6)
    assert [config.samples_after(step, 13) for step in range(5)] == [0, 6, 12, 13, 19]
    dpo = find_method("dpo")
    assert JobConfig.of(dpo, {"gradient_accumulation_steps": 1}).rows_per_step == 8
    with pytest.raises(UnsupportedError, match=r"gradient_accumulation_steps: expected 1 with method 'dpo'.*Multiply"):
        JobConfig.of(dpo, {"gradient_accumulation_steps": 2})


def test_mappings_are_kept_in_order_and_can_be_hashed_and_written():
    given = {"rank_pattern": {"q_proj": 4, "a": 2}, "alpha_pattern": {"v_proj": 3}, "lr_scheduler_type": "cosine"}
    config = JobConfig(**given, lr_scheduler_kwargs={"num_cycles": 1.5})
    assert config.rank_pattern == (("q_proj", 4), ("a", 2))
    assert hash(config) == hash(JobConfig(**config.to_dict()))
    assert JobConfig(**config.to_dict()) == config
    assert list(config.to_dict()["rank_pattern"].items()) == [("q_proj", 4), ("a", 2)]
    assert config.to_dict()["alpha_pattern"] == {"v_proj": 3.0}
    assert config.replace(r=4).rank_pattern == config.rank_pattern


def test_a_classification_head_has_no_router_loss() -> None:
    """0 switches it off, and null leaves it to the base model."""
    for name in ("sft", "dpo", "kto", "cpo", "orpo"):
        values = [JobConfig.of(find_method(name), {"moe_aux_loss_coef": value}) for value in (0, 0.01, None)]
        assert [config.router_aux_loss_coef for config in values] == [0.0, 0.01, None]
    for name in ("classification", "regression"):
        assert JobConfig.of(find_method(name), {"router_aux_loss_coef": 0}).router_aux_loss_coef == 0.0
        with pytest.raises(UnsupportedError, match=f"router_aux_loss_coef: expected no value with method '{name}'"):
            JobConfig.of(find_method(name), {"router_aux_loss_coef": 0.01})
    with pytest.raises(UnsupportedError, match="Set 'router_aux_loss_coef'"):
        JobConfig.of(find_method("sft"), {"output_router_logits": True})
