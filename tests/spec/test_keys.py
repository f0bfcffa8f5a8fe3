from __future__ import annotations

import pytest

from alto.errors import ConflictingKeysError, SpecError, UnknownKeyError, UnsupportedError
from alto.spec import Task
from alto.spec.job_config import JOB_FIELDS
from alto.spec.keys import (
    JOB_ALIASES,
    NOT_NEEDED_KEYS,
    OFF_VALUES,
    TASK_ALIASES,
    UNSUPPORTED_KEYS,
    canonical_keys,
)
from alto.spec.load import build_task
from alto.spec.task import TASK_FIELDS

BASE = {"model": "m", "dataset": "d"}


def canonical(given):
    return canonical_keys(given, fields=JOB_FIELDS, aliases=JOB_ALIASES, where="here")


def test_every_spelling_means_one_existing_field():
    assert set(JOB_ALIASES.values()) <= set(JOB_FIELDS)
    assert set(TASK_ALIASES.values()) <= set(TASK_FIELDS)
    spellings = [*JOB_FIELDS, *TASK_FIELDS, *JOB_ALIASES, *TASK_ALIASES, *UNSUPPORTED_KEYS, *NOT_NEEDED_KEYS]
    assert len(spellings) == len(set(spellings))


def test_renames_and_keeps_order_and_values():
    given = {"rank": 4, "learning_rate": 0.1, "alpha": "r"}
    assert list(canonical(given).items()) == [("r", 4), ("learning_rate", 0.1), ("lora_alpha", "r")]


@pytest.mark.parametrize("alias", sorted(JOB_ALIASES))
def test_alias_beside_its_field_conflicts(alias):
    with pytest.raises(ConflictingKeysError, match=rf"here gives '{JOB_ALIASES[alias]}' twice.*'{alias}'"):
        canonical({JOB_ALIASES[alias]: 1, alias: 1})


def test_two_aliases_of_one_field_conflict():
    with pytest.raises(ConflictingKeysError, match="both 'rank' and 'lora_r'"):
        canonical({"rank": 4, "lora_r": 4})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("learning_rat", "learning_rate"),
        ("Learning_Rate", "learning_rate"),
        ("batchsize", "batch_size"),
        ("target_module", "target_modules"),
        ("lora_rnk", "lora_rank"),
    ],
)
def test_misspelt_key_names_the_nearest_and_where_it_stood(written, meant):
    with pytest.raises(UnknownKeyError, match=rf"here has the unknown key '{written}'. Did you mean '{meant}'\?"):
        canonical({written: 1})


def test_key_near_to_nothing_lists_the_canonical_names():
    with pytest.raises(UnknownKeyError, match=r"Known keys are adam_beta1, .*weight_decay\.") as caught:
        canonical({"xyzzy": 1})
    assert "micro_batch_size" not in str(caught.value)


@pytest.mark.parametrize("key", [True, 1, None])
def test_a_key_that_is_not_text(key):
    with pytest.raises(UnknownKeyError, match="expected text"):
        canonical({key: 1})


@pytest.mark.parametrize("key", sorted(UNSUPPORTED_KEYS))
def test_unsupported_keys_are_refused_by_name_everywhere(key):
    with pytest.raises(UnsupportedError, match=f"here has the key '{key}', which is not supported"):
        canonical({key: "something"})


@pytest.mark.parametrize("key", sorted(NOT_NEEDED_KEYS))
def test_keys_that_are_not_needed_say_why(key):
    with pytest.raises(
        UnsupportedError, match=rf"here has the key '{key}', which is not needed: .*\. Remove the key\."
    ):
        canonical({key: "something"})


@pytest.mark.parametrize(
    ("key", "off"),
    [
        *((key, None) for key in sorted({*UNSUPPORTED_KEYS, *NOT_NEEDED_KEYS})),
        *((key, off) for key in OFF_VALUES for off in OFF_VALUES[key]),
    ],
)
def test_an_unsupported_key_that_is_off_asks_for_nothing(key, off):
    assert canonical({"r": 4, key: off}) == {"r": 4}


def test_a_setting_with_the_name_of_an_unsupported_key_is_kept_even_if_it_is_off():
    """An objective of a package may have such a setting."""
    given = {"reference_free": False, "rpo_alpha": 0.5}
    assert canonical_keys(given, fields=tuple(given), aliases={}, where="here") == given


def test_only_keys_that_are_refused_can_be_off():
    assert OFF_VALUES.keys() <= {*UNSUPPORTED_KEYS, *NOT_NEEDED_KEYS}


@pytest.mark.parametrize(
    "key",
    [
        "deepspeeed",  # seed
        "save_stepz",  # max_steps
        "eval_batch_size",  # batch_size
        "use_lora",  # use_dora
        "use_qlora",  # use_dora
        "adam_beta3",  # adam_beta1
        "test_size",  # val_size
        "xyz_steps",
        "max_steps_per_epoch",  # max_steps
        "lr2",
        "",
        "_",
        "a" * 100_000,
    ],
)
def test_another_key_is_not_taken_for_a_misspelt_one(key):
    with pytest.raises(UnknownKeyError) as caught:
        Task(model="m", dataset="d", **{key: 1})
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learningrate", "learning_rate"),
        ("learning-rate", "learning_rate"),
        ("lerning_rate", "learning_rate"),
        ("laerning_rate", "learning_rate"),
        ("max_seq_len", "max_seq_length"),
        ("optimizer_args", "optim_args"),
        ("data", "dataset"),
        ("datasets", "dataset"),
        ("gradient_acumulation_step", "gradient_accumulation_steps"),
    ],
)
def test_a_misspelt_key_of_a_task_is_found(key, meant):
    with pytest.raises(UnknownKeyError, match=rf"Did you mean '{meant}'\?"):
        Task(model="m", **({"dataset": "d"} if meant != "dataset" else {}), **{key: 1})


def test_all_keys_that_are_refused_are_named_at_once():
    given = {"lerning_rate": 1, "save_steps": 100, "use_qalora": True, "xyzzy": 1, 3: 4, "r": 8, "logging_steps": 10}
    with pytest.raises(UnknownKeyError) as caught:
        canonical(given)
    *lines, last = str(caught.value).splitlines()
    assert [line.split("key ")[1].split()[0].strip(",.") for line in lines] == [
        *("'lerning_rate'", "'save_steps'", "'use_qalora'", "'xyzzy'", "3")
    ]
    assert last.startswith("Known keys are adam_beta1, ")


def test_keys_that_are_known_and_refused_are_no_misspelt_ones():
    with pytest.raises(UnsupportedError) as caught:
        canonical({"save_steps": 100, "use_qalora": True})
    assert len(str(caught.value).splitlines()) == 2


def test_a_long_list_of_keys_is_shortened():
    with pytest.raises(UnknownKeyError, match="here has 180 further keys that are unknown or not supported") as caught:
        canonical({f"k{number}x": 1 for number in range(200)})
    assert len(str(caught.value).splitlines()) == 22


def test_keys_of_other_places_are_named_with_the_others():
    with pytest.raises(UnknownKeyError) as caught:
        Task(model="m", dataset="d", policy="paper", tau_gap=0.1, save_steps=1)
    assert [line.split("key ")[1].split(",")[0] for line in str(caught.value).splitlines()] == [
        *("'policy'", "'tau_gap'", "'save_steps'")
    ]
    with pytest.raises(UnknownKeyError) as caught:
        Task(model="m", dataset="d", search_space={"max_length": [1], "model": ["a"]})
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(UnknownKeyError) as caught:
        Task(model="m", dataset="d", beta=0.1, loss_type="ipo")
    assert len(str(caught.value).splitlines()) == 2


def test_attention_of_other_programs_is_answered() -> None:
    with pytest.raises(UnsupportedError, match="'flash_attention', which is not needed: ALTO chooses its kernels and"):
        Task(model="m", dataset="d", flash_attention=True)
    assert Task(model="m", dataset="d", flash_attention=False, sdp_attention=False).model == "m"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("val_size", 20, "val_size (validation_split, share of the rows set aside for validation) should be a finite"),
        ("lr", -1, "lr (learning_rate, the peak learning rate) should be a finite number > 0, found -1"),
        ("validation_split", 20, "validation_split (share of the rows set aside for validation) should be a finite"),
    ],
)
def test_a_value_is_refused_under_the_name_that_the_user_wrote(key: str, value: object, message: str) -> None:
    for make in (lambda: Task(model="m", dataset="d", **{key: value}), lambda: build_task(BASE, [f"{key}={value}"])):
        with pytest.raises(SpecError) as caught:
            make()
        assert str(caught.value).startswith(message)
