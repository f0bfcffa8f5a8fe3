"""Names of datasets: a file, a preset or the hub; and the paper's datasets in their own schemas."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("datasets", reason="needs the data extra: pip install 'alto-lora[data]'")

import datasets
import huggingface_hub
from tiny import write_rows

from alto.data import Message, read_heldout_rows, read_task_rows
from alto.data.source import PRESETS, find_preset
from alto.errors import DataError, DataFileNotFoundError, DataFormatError, UnsupportedError
from alto.spec import Task
from alto.version import install_command

Hub = Callable[..., None]

REAL_DATA = Path(__file__).parents[2] / "../shared/data"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """``hub(name, config, split=rows, …)`` adds a dataset to a hub that has no others."""
    shelf: dict[tuple[str, str | None], datasets.DatasetDict] = {}

    def load(name: str, config: str | None = None) -> datasets.DatasetDict:
        if not any(name == known for known, _ in shelf):
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
        if (name, config) not in shelf:
            raise ValueError(f"Config name is missing.\nPlease pick one among {[c for _, c in shelf]}")
        return shelf[name, config]

    def put(name: str, config: str | None = None, **splits: list[dict[str, Any]]) -> None:
        shelf[name, config] = datasets.DatasetDict(
            {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    return put


def make(dataset: str, **keys: Any) -> Task:
    return Task(model="alto-tiny", dataset=dataset, **keys)


def prompts(rows: Any) -> list[str]:
    return [row[0].content for row in rows]


def gsm8k(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"question": f"q{n}", "answer": f"2+{n}=<<2+{n}={n + 2}>>\n#### {n + 2}"} for n in range(first, first + count)
    ]


def tulu(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"personahub_{n}",
            "messages": [{"content": f"q{n}", "role": "user"}, {"content": f"a{n}", "role": "assistant"}],
            "source": "ai2-adapt-dev/personahub_math_v5_regen_149960",
        }
        for n in range(count)
    ]


def openthoughts(count: int) -> list[dict[str, Any]]:
    return [
        {
            "difficulty": 8 if n % 2 else None,
            "source": "stackexchange_codegolf",
            "domain": "code",
            "conversations": [
                {"from": "human", "value": f"q{n}"},
                {"from": "gpt", "value": f"<think>\nhm\n</think>\n\na{n}"},
            ],
        }
        for n in range(count)
    ]


def ultrafeedback(count: int) -> list[dict[str, Any]]:
    def conversation(n: int, reply: str) -> list[dict[str, str]]:
        return [{"content": f"q{n}", "role": "user"}, {"content": reply, "role": "assistant"}]

    return [
        {
            "prompt": f"q{n}",
            "prompt_id": f"{n:064x}",
            "chosen": conversation(n, "good"),
            "rejected": conversation(n, "bad"),
            "messages": conversation(n, "good"),
            "score_chosen": 8.5,
            "score_rejected": 2.0,
        }
        for n in range(count)
    ]


@pytest.mark.parametrize("name", ["gsm8k", "math/gsm8k", "openai/gsm8k", "GSM8K"])
def test_gsm8k_brings_its_own_test_rows(hub: Hub, name: str) -> None:
    hub("openai/gsm8k", "main", train=gsm8k(20), test=gsm8k(5, first=100))
    rows = read_task_rows(make(name))
    assert (len(rows.train), len(rows.validation), rows.layout.form) == (18, 2, "prompt_completion")
    assert prompts(read_heldout_rows(make(name), None).rows) == ["q100", "q101", "q102", "q103", "q104"]


@pytest.mark.skipif(not (REAL_DATA / "gsm8k").is_dir(), reason="the real GSM8K is not on this machine")
def test_gsm8k_itself_has_the_papers_lengths(hub: Hub) -> None:
    name = str(REAL_DATA / "gsm8k" / "train.jsonl")
    rows = read_task_rows(make(name, validation_dataset=str(REAL_DATA / "gsm8k" / "test.jsonl")))
    assert (len(rows.train), len(rows.validation), rows.layout.form) == (7_473, 1_319, "prompt_completion")


@pytest.mark.skipif(not (REAL_DATA / "pref_mix").is_dir(), reason="the preference pairs are not on this machine")
def test_real_preferences_are_pairs_or_their_chosen_replies() -> None:
    name = str(REAL_DATA / "pref_mix" / "pairs.jsonl.gz")
    with pytest.raises(DataFormatError, match="found preference pairs"):
        read_task_rows(make(name))
    rows = read_task_rows(make(name, method="dpo"))
    assert (len(rows.train), len(rows.validation), rows.layout.form) == (5_400, 600, "preference")
    assert len(read_task_rows(make(name, columns={"completion": "chosen"})).train) == 5_400


def test_tulu_3_draws_the_papers_split_from_its_only_one(hub: Hub) -> None:
    hub("allenai/tulu-3-sft-mixture", train=tulu(11_050))
    task = make("tulu-3")
    rows = read_task_rows(task)
    held_out = read_heldout_rows(task, None).rows
    assert (len(rows.train), len(rows.validation), len(held_out)) == (9_000, 1_000, 1_000)
    assert len({*prompts(rows.train), *prompts(rows.validation), *prompts(held_out)}) == 11_000


def test_tulu_3_with_too_few_rows(hub: Hub) -> None:
    hub("allenai/tulu-3-sft-mixture", train=tulu(30))
    with pytest.raises(DataError, match=r"at least 11000 rows to draw 9000, 1000, 1000 from, found 30"):
        read_task_rows(make("tulu-3"))
    assert len(read_task_rows(make("tulu-3", dataset_train_split="train")).train) == 27


def test_openthoughts3(hub: Hub) -> None:
    hub("open-thoughts/OpenThoughts3-1.2M", train=openthoughts(10))
    rows = read_task_rows(make("openthoughts3"))
    assert rows.layout.form == "sharegpt"
    assert rows.train[0][1] == Message("assistant", f"<think>\nhm\n</think>\n\na{rows.train[0][0].content[1:]}")
    assert read_heldout_rows(make("openthoughts3"), None).rows == rows.validation


def test_ultrafeedback_is_talk_or_pairs_as_the_method_asks(hub: Hub) -> None:
    hub("HuggingFaceH4/ultrafeedback_binarized", train_prefs=ultrafeedback(10), test_prefs=ultrafeedback(4))
    assert read_task_rows(make("ultrafeedback")).layout.form == "messages"
    pairs = read_task_rows(make("ultrafeedback", method="dpo"))
    assert (len(pairs.train), len(pairs.validation), pairs.layout.form) == (9, 1, "preference")
    assert [[turn.content for turn in conversation][1:] for conversation in pairs.train[0].conversations] == [
        ["good"],
        ["bad"],
    ]
    assert len(read_heldout_rows(make("ultrafeedback", method="dpo"), None).rows) == 4
    chosen = make("ultrafeedback", columns={"completion": "chosen"})
    assert [turn.content for turn in read_task_rows(chosen).train[0]][1:] == ["good"]


def test_pairs_of_the_hub_bring_their_own_splits(hub: Hub) -> None:
    columns = ("chosen", "rejected", "score_chosen", "score_rejected")
    rows = [{name: row[name] for name in columns} for row in ultrafeedback(10)]
    hub("trl-lib/ultrafeedback_binarized", train=rows, test=rows[:3])
    task = make("trl-lib/ultrafeedback_binarized", method="dpo")
    conversations = [conversation for row in read_heldout_rows(task, None).rows for conversation in row.conversations]
    assert prompts(conversations) == ["q0", "q0", "q1", "q1", "q2", "q2"]


def test_a_file_wins_over_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    write_rows(tmp_path / "gsm8k" / "train.jsonl", 10)
    assert len(read_task_rows(make("gsm8k/train.jsonl")).train) == 9
    with pytest.raises(DataFileNotFoundError, match="expected a file, found the folder gsm8k; name a file in it"):
        read_task_rows(make("gsm8k"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("absent.jsonl", "found nothing at absent.jsonl; check the path"),
        ("data/absent.jsonl", "found nothing at data/absent.jsonl"),
        ("data/absent.csv.gz", "found nothing at data/absent.csv.gz"),
        ("./openai/gsm8k", "found nothing at openai/gsm8k"),
        ("/absent/file", "found nothing at /absent/file"),
        ("a/b/c", "found nothing at a/b/c"),
        ("train", "a hub dataset (owner/name) or one of gsm8k, tulu-3, openthoughts3, ultrafeedback"),
        ("gsm8", "did you mean 'gsm8k'?"),
    ],
)
def test_what_is_nothing(name: str, hint: str) -> None:
    with pytest.raises(DataFileNotFoundError) as caught:
        read_task_rows(make(name))
    assert str(caught.value).startswith("dataset: expected a file")
    assert hint in str(caught.value)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", 10)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(read_task_rows(make("~/rows.jsonl")).train) == 9


def test_a_hub_dataset_with_its_own_splits(hub: Hub) -> None:
    hub("me/mine", "easy", train=gsm8k(10), validation=gsm8k(3, first=50), test=gsm8k(2, first=90))
    task = make("me/mine", dataset_config="easy")
    rows = read_task_rows(task)
    assert (len(rows.train), prompts(rows.validation)) == (10, ["q50", "q51", "q52"])
    assert prompts(read_heldout_rows(task, None).rows) == ["q90", "q91"]
    assert len(read_task_rows(task.replace(validation_split=0.5)).train) == 5
    on_test = task.replace(dataset_train_split="test", dataset_test_split="train")
    assert len(read_task_rows(on_test).train) == 2
    assert len(read_heldout_rows(on_test, None).rows) == 10
    assert (
        read_heldout_rows(task.replace(dataset_train_split="test"), None).rows
        == read_task_rows(task.replace(dataset_train_split="test")).validation
    )


def test_held_out_rows_can_be_named(hub: Hub, tmp_path: Path) -> None:
    hub("openai/gsm8k", "main", train=gsm8k(20), test=gsm8k(5, first=100))
    task = make(str(write_rows(tmp_path / "rows.jsonl", 10)))
    assert len(read_heldout_rows(task, None).rows) == 1
    assert len(read_heldout_rows(task, "gsm8k").rows) == 5
    assert len(read_heldout_rows(task, str(write_rows(tmp_path / "other.jsonl", 7))).rows) == 7


@pytest.mark.parametrize("of_mixture", [False, True])
def test_rows_to_test_on_are_those_of_the_task(hub: Hub, tmp_path: Path, of_mixture: bool) -> None:
    """This holds for a dataset with its own test split too: the winner was chosen by the validation rows."""
    hub("me/mine", train=gsm8k(20), test=gsm8k(2, first=90))
    other = str(write_rows(tmp_path / "test.jsonl", 4))
    of_task = make(
        [{"path": "me/mine"}, {"path": str(write_rows(tmp_path / "more.jsonl", 9))}] if of_mixture else "me/mine"
    )
    named = read_heldout_rows(of_task.replace(test_dataset=other), None)
    assert (len(named.rows), named.name) == (4, f"{other} (test rows)")
    shared = of_task.replace(test_split=0.2)
    held_out = read_heldout_rows(shared, None)
    assert held_out.rows == list(read_task_rows(shared).test or ())
    assert held_out.name == f"{shared.dataset_name} (test rows)"
    assert not {*prompts(held_out.rows)} & {"q90", "q91"}


def test_hub_rows_to_validate_on(hub: Hub, tmp_path: Path) -> None:
    hub("me/mine", train=gsm8k(10), validation=gsm8k(3, first=50))
    task = make(str(write_rows(tmp_path / "rows.jsonl", 10)), validation_dataset="me/mine")
    assert prompts(read_task_rows(task).validation) == ["q50", "q51", "q52"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"dataset_train_split": "trian"},
            r"dataset_train_split: expected a split of me/mine \(train, test\), found 'trian'",
        ),
        (
            {"dataset_test_split": "dev"},
            r"dataset_test_split: expected a split of me/mine \(train, test\), found 'dev'",
        ),
        ({"dataset_config": "hard"}, r"found me/mine \(Config name is missing\.\); check dataset_config"),
        ({"dataset_train_split": "test"}, "expected at least one row, found none in the split test"),
    ],
)
def test_wrong_splits_and_configurations(hub: Hub, keys: dict[str, Any], message: str) -> None:
    hub("me/mine", train=gsm8k(10), test=[])
    with pytest.raises(DataError, match=message):
        read_task_rows(make("me/mine", **keys))


def test_splits_of_a_file_are_refused(tmp_path: Path) -> None:
    task = make(str(write_rows(tmp_path / "rows.jsonl")), dataset_test_split="test")
    with pytest.raises(
        DataError, match=r"dataset_test_split: expected a hub dataset.*found the file .*validation_dataset"
    ):
        read_task_rows(task)


def test_a_hub_dataset_that_is_not_there(hub: Hub) -> None:
    with pytest.raises(
        DataFileNotFoundError, match=r"expected a dataset of the hub, found none under me/mine.*hf auth login"
    ):
        read_task_rows(make("me/mine"))


def test_an_unreachable_hub_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(dataset_info=fail))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("loading would retry for half a minute"))
    with pytest.raises(
        DataError, match=r"no connection \(Name or service not known\); go online, set HF_HUB_OFFLINE=1"
    ):
        read_task_rows(make("me/mine"))


def test_offline_without_a_copy() -> None:
    with pytest.raises(DataError, match="found no connection"):
        read_task_rows(make("alto-tests/never-downloaded"))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnsupportedError, match=re.escape(install_command("data"))):
        read_task_rows(make("gsm8k"))


def test_no_name_means_two_presets() -> None:
    names = [name for preset in PRESETS for name in (*preset.names, preset.hub_id.lower())]
    assert len(set(names)) == len(names)
    assert all(find_preset(name.upper()) for name in names)


@pytest.mark.parametrize(("name", "tokens"), [("gsm8k", 512), ("tulu-3", 4096), ("openthoughts3", 16384)])
def test_a_preset_knows_how_long_its_rows_are(hub: Hub, name: str, tokens: int) -> None:
    hub("openai/gsm8k", "main", train=gsm8k(20), test=gsm8k(5))
    hub("allenai/tulu-3-sft-mixture", train=tulu(11_000))
    hub("open-thoughts/OpenThoughts3-1.2M", train=openthoughts(20))
    assert read_task_rows(make(name)).max_length == tokens
    assert read_task_rows(make(name, max_length=64)).max_length == 64
    assert read_heldout_rows(make(name), None).max_length == tokens


@pytest.mark.parametrize("has_splits", [False, True])
def test_a_folder_of_save_to_disk_is_recognised(has_splits: bool, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(gsm8k(3))
    (datasets.DatasetDict(train=rows) if has_splits else rows).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataFileNotFoundError, match=r"which save_to_disk .*datasets\.load_from_disk\('.*saved'\)"):
        read_task_rows(make(str(tmp_path / "saved")))


def test_blanks_in_names_of_columns_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("Customer Question, Agent Reply ,id\na,b,1\nc,d,2\n", encoding="utf-8")
    with pytest.raises(DataFormatError, match="found Customer Question, ' Agent Reply ', id"):
        read_task_rows(make(str(path)))
