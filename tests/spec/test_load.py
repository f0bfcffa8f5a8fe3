"""Task files: what is read and what is refused; a file must be regular and of reasonable size."""

from __future__ import annotations

import os
import socket
import textwrap
from pathlib import Path

import pytest

from alto.base.files import is_number, read_bytes, read_json
from alto.errors import ConflictingKeysError, SpecError, UnknownKeyError, UnsupportedError
from alto.spec import EarlyExit, Task, load_task


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "task.yaml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write_file


BASE = "model: alto-tiny\ndataset: train.jsonl\n"


def test_a_file_reads_as_the_same_task_in_python(write):
    path = write("""
        model: alto-tiny
        dataset: train.jsonl
        cutoff_len: 256
        lora_alpha: 2*r
        early_exit: {policy: paper}
        search_space:
          lr: [1.0e-4, 0.0005]
          rank: [8, 16]
          paired:
            batch_size: [1, 2]
            seed: {min: 0, max: 9, num: 2}
    """)
    assert load_task(path) == Task(
        model="alto-tiny",
        dataset="train.jsonl",
        max_length=256,
        lora_alpha="2*r",
        early_exit=EarlyExit(policy="paper"),
        search_space={
            "learning_rate": [1e-4, 5e-4],
            "r": [8, 16],
            "paired": {"per_device_train_batch_size": [1, 2], "seed": {"min": 0, "max": 9, "num": 2}},
        },
    )


def test_what_is_written_reads_back(write):
    task = Task(model="m", dataset="d", lr=1e-5, search_space={"r": [4], "alpha": ["r", 1e-5]}, early_exit=False)
    assert load_task(write(task.to_yaml())) == task


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        ("", SpecError, "found an empty file. Write lines such as 'model: alto-tiny'"),
        ("# nothing\n", SpecError, "found an empty file"),
        ("- a\n", SpecError, "found a list at the top"),
        ("just text\n", SpecError, "found a str at the top"),
        ("a: [1\n", SpecError, "should be valid YAML, found: .*line 2"),
        ("a: 1\n---\nb: 2\n", SpecError, "should be valid YAML"),
        ("model: !!python/object:os.system x\n", SpecError, "should be valid YAML"),
        ("model: \x07\n", SpecError, "should be valid YAML"),
        ("name: 2024-13-45\n", SpecError, "should be valid YAML"),
        ("model: a\nmodel: b\n", SpecError, "the key 'model' is given twice.*line 2"),
        (BASE + "search_space:\n", SpecError, "search_space should map"),
        (BASE + "1: 2\n", SpecError, "should have text as keys, found 1"),
        (BASE + "lerning_rate: 0.1\n", UnknownKeyError, "In .*task.yaml: .*'learning_rate'"),
        (BASE + "lr: 0.1\nlearning_rate: 0.1\n", ConflictingKeysError, "both 'lr' and 'learning_rate'"),
        (BASE + "use_qalora: true\n", UnsupportedError, "In .*task.yaml: .*'use_qalora'"),
    ],
)
def test_refused_naming_the_file(write, text, error, reason):
    path = write(text)
    with pytest.raises(error, match=f"(?s){reason}") as caught:
        load_task(path)
    assert str(path) in str(caught.value)


def test_no_such_file_and_no_such_text(tmp_path):
    with pytest.raises(SpecError, match=r"nowhere.yaml should be a task file, found no such file"):
        load_task(tmp_path / "nowhere.yaml")
    with pytest.raises(SpecError, match=r"should be a readable YAML file"):
        load_task(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(SpecError, match=r"binary.yaml should be a readable YAML file in UTF-8"):
        load_task(tmp_path / "binary.yaml")


def test_paths_are_relative_to_the_file_where_they_exist(write, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / "data" / name).touch()
    path = write("model: ./base\ndataset: data/train.jsonl\neval_dataset: ./data/val.jsonl\n")
    monkeypatch.chdir("/")
    task = load_task(path)
    assert task.model == str(tmp_path / "base")
    assert task.dataset == str(tmp_path / "data" / "train.jsonl")
    assert task.validation_dataset == str(tmp_path / "data" / "val.jsonl")
    assert task.name == "train"


def test_what_does_not_exist_beside_the_file_stays_as_written(write, tmp_path):
    (tmp_path / "alto-tiny").mkdir()
    task = load_task(write("model: alto-tiny\ndataset: openai/gsm8k\n"))
    assert (task.model, task.dataset) == ("alto-tiny", "openai/gsm8k")


def test_a_path_in_an_override_is_relative_to_the_current_directory(write, tmp_path):
    (tmp_path / "other.jsonl").touch()
    assert load_task(write(BASE), ["dataset=other.jsonl"]).dataset == "other.jsonl"


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (["lr=1e-4"], {"learning_rate": 1e-4}),
        (["lr=1E5"], {"learning_rate": 1e5}),
        (["lr=2.5e-4"], {"learning_rate": 2.5e-4}),
        (["search_space.lr=[1e-4, 5e-4]"], {"search_space": {"lr": [1e-4, 5e-4]}}),
        (
            ["search_space.lr={min: 1e-5, max: 1e-3, num: 2}"],
            {"search_space": {"lr": {"min": 1e-5, "max": 1e-3, "num": 2}}},
        ),
        (["search_space.paired.r=[1, 2]"], {"search_space": {"paired": {"r": [1, 2]}}}),
        (["early_exit.policy=paper"], {"early_exit": {"policy": "paper"}}),
        (["early_exit=true", "early_exit.policy=paper"], {"early_exit": {"policy": "paper"}}),
        (["early_exit=false"], {"early_exit": False}),
        (["max_samples=5", "max_samples=null"], {}),
        (["name='12'"], {"name": "12"}),
        (["dataset=a=b"], {"dataset": "a=b"}),
        ([" lr = 0.5 "], {"learning_rate": 0.5}),
        (["alpha=2*r"], {"lora_alpha": "2*r"}),
        (["target_modules=[q, v]"], {"target_modules": ["q", "v"]}),
    ],
)
def test_overrides(write, overrides, changes):
    assert load_task(write(BASE), overrides) == Task(**({"model": "alto-tiny", "dataset": "train.jsonl"} | changes))


def test_an_override_replaces_any_spelling_in_place_and_leaves_the_rest(write):
    path = write(
        BASE + "lora_r: 4\nsearch_space: {lr: [0.1, 0.2], seed: [1, 2]}\nearly_exit: {policy: paper, window: 3}\n"
    )
    task = load_task(path, ["rank=8", "search_space.learning_rate=[0.3]", "early_exit.window=4"])
    assert task.fixed == {"r": 8}
    assert list(task.search_space.to_dict().items()) == [("learning_rate", [0.3]), ("seed", [1, 2])]
    assert task.early_exit == EarlyExit(policy="paper", window=4)


@pytest.mark.parametrize(
    ("override", "error", "reason"),
    [
        ("lr", SpecError, "An override should be key=value, found 'lr'"),
        ("=3", SpecError, "An override should be key=value"),
        ("early_exit..policy=paper", SpecError, "An override should be key=value"),
        ("lr=[1", SpecError, "should be valid YAML"),
        ("name=2024-13-45", SpecError, "should be valid YAML"),
        ("lr='1e-4'", SpecError, r"lr \(learning_rate, .*text"),
        ("dataset.path=x", SpecError, "reaches into 'dataset', expected a mapping there, found 'train.jsonl'"),
        ("lr_rate=1", UnknownKeyError, "'lr_rate'"),
        ("search_space.lrr=1", UnknownKeyError, "search_space has the unknown key 'lrr'"),
        ("early_exit.polcy=paper", UnknownKeyError, "'policy'"),
    ],
)
def test_overrides_refused(write, override, error, reason):
    with pytest.raises(error, match=reason):
        load_task(write(BASE), [override])


@pytest.mark.parametrize(
    "overrides",
    [
        ["learning_rate=1e-4", "lr=1e-3"],
        ["lr=1e-3", "name=x", "learning_rate=1e-3"],
        ["base_model=a", "model=b"],
        ["search_space.rank=[4]", "search_space.lora_r=[8]"],
        ["search_space.paired.lr=[1e-4]", " search_space . paired . learning_rate = [1e-4]"],
    ],
)
def test_two_spellings_of_one_key_among_the_overrides_are_refused(write, overrides):
    with pytest.raises(ConflictingKeysError, match=r"found both '.*' and '.*'\. Remove one\."):
        load_task(write(BASE), overrides)


def test_a_fault_of_an_override_is_not_one_of_the_file(write):
    path = write(BASE)
    with pytest.raises(UnknownKeyError, match="the unknown key 'learning_rte'") as refused:
        load_task(path, ["name=x", "learning_rte=1e-3"])
    assert str(refused.value).startswith(f"In {path} with --set 'name=x' --set 'learning_rte=1e-3': the task has ")
    broken = write(BASE + "learning_rte: 1.0e-3\n")
    with pytest.raises(UnknownKeyError) as refused:
        load_task(broken, ["name=x"])
    assert str(refused.value).startswith(f"In {broken}: the task has ")


def test_the_last_of_overrides_with_one_spelling_counts(write):
    assert load_task(write(BASE), ["lr=1e-4", "lr=1e-3"]).fixed == {"learning_rate": 1e-3}


@pytest.mark.parametrize("written", ["lr", "learning_rate"])
@pytest.mark.parametrize("override", ["lr=5e-4", "learning_rate=5e-4"])
@pytest.mark.parametrize("place", ["search_space: {{{}: [1.0e-4, 1.0e-3]}}\n", "{}: 0.1\n"])
def test_an_override_replaces_a_key_that_the_file_fixes_or_searches_in_any_spelling(write, place, written, override):
    task = load_task(write(BASE + place.format(written)), [override])
    assert task.fixed == {"learning_rate": 5e-4}
    assert len(task.jobs) == 1


def test_yaml_merge_keys_are_no_repeats(write):
    path = write(BASE + "early_exit: {<<: {window: 3, policy: paper}, window: 4}\n")
    assert load_task(path).early_exit == EarlyExit(policy="paper", window=4)


def test_an_override_fixes_what_the_file_searches(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("model: alto-tiny\ndataset: rows.jsonl\nsearch_space: {lr: [1.0e-4, 1.0e-3], r: [4, 8]}\n")
    task = load_task(file, ["learning_rate=5e-4"])
    assert [(job.config.learning_rate, job.config.r) for job in task.jobs] == [(5e-4, 4), (5e-4, 8)]


@pytest.mark.parametrize(
    "text", ["prompt,completion\na,b\n", "prompt,completion\n'a: b, \"c\nd\": e'f\n", "a,b\n\xe9\xe9,c\n"]
)
def test_a_dataset_given_for_a_task_is_recognised(text: str, tmp_path: Path) -> None:
    """This holds for a file that is not YAML, or not UTF-8, too."""
    file = tmp_path / "tickets.csv"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(SpecError, match=r"looks like a dataset\. Write a task file .*'dataset: tickets\.csv'"):
        load_task(file)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_regular_file_is_read_whole_and_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_bytes(tmp_path / "file", 5) == read_bytes(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(tmp_path / "file", 4)


def test_a_pipe_without_a_writer_is_not_waited_for(pipe: Path) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(pipe, 5)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path, 5)
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(Path("/dev/zero"), 5)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))
        with pytest.raises(OSError, match=r"No such device|not a regular file"):
            read_bytes(tmp_path / "socket", 5)


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": Infinity}', "[" * 100_000, "\xff", "9" * 5000])
def test_what_is_no_strict_json_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError):  # noqa: PT011  (json's own words)
        read_json(tmp_path / "file")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2, -0.1, True, "1", None, 10**400])
def test_numbers_have_bounds(value: object) -> None:
    assert is_number(0.5, least=0, most=1)
    assert not is_number(value, least=0, most=1)
