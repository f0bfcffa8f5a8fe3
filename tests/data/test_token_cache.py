"""Tokens on disk: the same data as in memory, written once, completely or not at all."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import load_tokenizer

from alto.data import TaskData, dataset, digest_of, digests, read_task_rows, reading, token_cache
from alto.data import files as files_module
from alto.data.digests import tokenizer_digest
from alto.errors import BadRowsError, DataError, DiskFullError, RunWriteError
from alto.executor.profiling.sketch import lengths_of
from alto.records import ModelLimits
from alto.spec import Task

pytest.importorskip("pyarrow", reason="needs the data extra: pip install 'alto-lora[data]'")

import pyarrow as pa
import pyarrow.parquet as pq

TOKENIZER = load_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dataset, "_CHUNK_ROWS", 8)
    return tmp_path / "cache" / "tokens"


def write(path: Path, rows: list[Any]) -> str:
    """Write ``rows`` in the format of the file's suffix; a text is a line of its own."""
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".csv":
        cells = [list(rows[0]), *(list(row.values()) for row in rows)]
        path.write_text("".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in cells))
    else:
        path.write_text(lines)
    return str(path)


def sums(count: int, first: int = 0) -> list[Any]:
    return [
        {"prompt": f"{n} plus {n % 7}?", "completion": f" It is {n + n % 7}." + " Yes." * (n % 3), "level": n % 2}
        for n in range(first, first + count)
    ]


def pairs(count: int) -> list[Any]:
    return [{"prompt": f"q{n}", "chosen": f" yes, {n}", "rejected": " no" + "!" * (n % 4)} for n in range(count)]


def labelled(count: int) -> list[Any]:
    return [{"prompt": f"q{n}", "completion": f" so {n}", "label": n % 3 == 0} for n in range(count)]


def encode(task: Task, **limits: Any) -> TaskData:
    return read_task_rows(task).encode(TOKENIZER, ModelLimits(**limits))


def both(dataset: Any, **keys: Any) -> tuple[TaskData, TaskData]:
    task = Task(model="alto-tiny", dataset=dataset, **keys)
    return encode(task.replace(token_cache="memory")), encode(task.replace(token_cache="disk"))


def assert_equal(in_memory: TaskData, on_disk: TaskData) -> None:
    assert digest_of(*on_disk.splits) == digest_of(*in_memory.splits)
    assert on_disk.counts() == in_memory.counts()
    assert on_disk.notes[:-1] == in_memory.notes
    assert on_disk.notes[-1].startswith("The tokens of the data are read from disk (")
    for disk, memory in zip(on_disk.splits, in_memory.splits, strict=True):
        for column in ("input_ids", "targets"):
            found, expected = getattr(disk, column), getattr(memory, column)
            assert all(map(torch.equal, found, expected)), column
            assert found[-1].dtype == torch.int64
            assert torch.equal(found[-1], expected[-1])
        for column in ("spans", "num_row_tokens", "num_trained", "num_chosen", "weights"):
            assert list(getattr(disk, column)) == list(getattr(memory, column)), column
            assert getattr(disk, column)[0] == getattr(memory, column)[0]
        assert (disk.labels is None) == (memory.labels is None)
        assert list(disk.labels or ()) == list(memory.labels or ())
        for fact in ("refused", "unread", "sources", "max_length", "sequence_lengths", "longest_row"):
            assert getattr(disk, fact) == getattr(memory, fact), fact
        assert lengths_of(disk) == lengths_of(memory)
        assert [digest_of(part) for part in disk.parts(2)] == [digest_of(part) for part in memory.parts(2)]


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    keys=st.fixed_dictionaries(
        {
            "max_samples": st.sampled_from([None, 20]),
            "data_seed": st.integers(0, 3),
            "validation_split": st.sampled_from([None, 0.3]),
            "test_split": st.sampled_from([None, 0.1]),
            "max_length": st.sampled_from([100, 300]),
            "train_on": st.sampled_from(["completion", "all", "last"]),
        }
    ),
)
def test_any_rows_and_splits_are_those_in_memory(
    seed: int, keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Some rows are bad: empty completions, and lines that are not JSON."""
    letters = random.Random(seed)
    texts = ["".join(letters.choices("aé\u3042 \t", k=letters.randint(0, 30))) for _ in range(50)]
    lines = [{"prompt": prompt, "completion": reply} for prompt, reply in zip(texts[::2], texts[1::2], strict=True)]
    file = write(tmp_path_factory.mktemp("rows") / "rows.jsonl", [*lines[:7], "{", *lines[7:], *sums(5)])
    assert_equal(*both(file, on_bad_row="skip", **keys))


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("apart", [(), ("validation_dataset",), ("validation_dataset", "test_dataset")], ids=str)
def test_mixtures_with_rows_apart(method: str, apart: tuple[str, ...], tmp_path: Path) -> None:
    make = sums if method == "sft" else pairs
    sources = [{"path": write(tmp_path / f"{name}.jsonl", make(size))} for name, size in (("a", 12), ("b", 7))]
    other = write(tmp_path / "other.jsonl", make(5))
    in_memory, on_disk = both(sources, method=method, **dict.fromkeys(apart, other))
    assert_equal(in_memory, on_disk)
    if apart:
        rows_a_line = 2 if method == "kto" else 1
        assert on_disk.train.sources == (("a", 12 * rows_a_line), ("b", 7 * rows_a_line))
        assert len(on_disk.validation) == 5 * rows_a_line


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.csv", "rows.parquet"])
def test_every_format_of_file(name: str, tmp_path: Path) -> None:
    assert_equal(*both(write(tmp_path / name, sums(25))))


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_pairs_and_labelled_replies(method: str, tmp_path: Path) -> None:
    assert_equal(*both(write(tmp_path / "pairs.jsonl", pairs(25)), method=method, test_split=0.2))
    if method == "kto":
        assert_equal(*both(write(tmp_path / "labelled.jsonl", labelled(25)), method=method))


def test_mixtures(tmp_path: Path) -> None:
    held_out = write(tmp_path / "held-out.jsonl", sums(9, first=500))
    sources = [
        {"path": write(tmp_path / "few.jsonl", sums(12))},
        {"path": write(tmp_path / "more.jsonl", sums(23, first=70)), "validation_dataset": held_out},
    ]
    assert_equal(*both(sources, test_split=0.1))
    assert_equal(*both(sources, validation_dataset=held_out, test_dataset=held_out))
    pairs_of = [{"path": write(tmp_path / f"pairs-{n}.jsonl", pairs(12 + n))} for n in range(2)]
    assert_equal(*both(pairs_of, method="dpo"))


def test_validation_rows_that_are_trained_too_are_counted(tmp_path: Path) -> None:
    twice = write(tmp_path / "twice.jsonl", sums(11) + sums(3))
    in_memory, on_disk = both(write(tmp_path / "rows.jsonl", sums(20)), validation_dataset=twice, test_dataset=twice)
    assert in_memory.num_repeated == on_disk.num_repeated == 14
    assert_equal(in_memory, on_disk)


def test_bad_rows_are_the_same_error(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [*sums(10), "{", {"prompt": "q", "completion": ""}])
    errors = []
    for where in ("memory", "disk", "disk"):
        with pytest.raises(BadRowsError) as caught:
            read_task_rows(Task(model="alto-tiny", dataset=file, token_cache=where))
        errors.append(str(caught.value))
    assert errors[0] == errors[1] == errors[2]


def test_auto_means_disk_from_a_size_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    task = Task(model="alto-tiny", dataset=write(tmp_path / "rows.jsonl", sums(20)))
    encode(task)
    assert not cache.exists()
    monkeypatch.setattr(reading, "LARGE_BYTES", 1000)
    assert "read from disk" in encode(task).notes[-1]
    assert cache.is_dir()


def test_auto_keeps_tokens_that_take_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"text": "Yes. " * 10**6}, *({"text": f"{n}"} for n in range(30))])
    task = Task(model="alto-tiny", dataset=file, max_length=20)
    first = encode(task)
    assert len(entries(cache)) == 1
    with monkeypatch.context() as patch:
        patch.setattr(files_module, "_READERS", {})  # the second start reads no rows
        assert digest_of(*encode(task).splits) == digest_of(*first.splits)
    assert_equal(encode(task.replace(token_cache="memory")), first)


def test_auto_keeps_less_data_in_memory_where_the_cache_cannot_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(model="alto-tiny", dataset=write(tmp_path / "rows.jsonl", sums(20)))
    expected = digest_of(*encode(task).splits)
    monkeypatch.setattr(reading, "SLOW_BYTES", 1000)
    with monkeypatch.context() as patch:
        patch.setattr(token_cache._HashedFile, "finish", _disk_is_full)
        with pytest.warns(UserWarning, match="computed again at every start: .*token_cache: memory"):
            assert digest_of(*encode(task).splits) == expected
        patch.setattr(reading, "LARGE_BYTES", 1000)
        with pytest.raises(DiskFullError):
            encode(task)
    with monkeypatch.context() as patch:
        patch.setattr(type(TOKENIZER), "save_pretrained", _disk_is_full)
        with pytest.warns(UserWarning, match="computed again at every start: .*can be saved"):
            assert digest_of(*encode(task).splits) == expected
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="computed again at every start: expected to write"):
        assert digest_of(*encode(task).splits) == expected


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(model="alto-tiny", dataset=write(tmp_path / "rows.jsonl", sums(20)), token_cache="disk")


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir()) if cache.exists() else []


def test_a_second_run_reads_no_row(task: Task, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    first = digest_of(*encode(task).splits)
    monkeypatch.setattr(files_module, "_READERS", {})
    again = read_task_rows(task)
    assert (again.layout.form, again.max_length) == ("prompt_completion", 1024)
    assert digest_of(*again.encode(TOKENIZER, ModelLimits()).splits) == first
    assert len(entries(cache)) == 1


def test_validation_rows_can_be_read_after_all(task: Task) -> None:
    encode(task)
    in_memory = read_task_rows(task.replace(token_cache="memory"))
    assert list(read_task_rows(task).validation) == in_memory.validation


def test_other_settings_are_other_tokens(task: Task, cache: Path) -> None:
    encode(task)
    encode(task.replace(max_length=20))
    encode(task.replace(data_seed=7))
    encode(task, max_positions=20)
    encode(task.replace(name="another"))
    assert len(entries(cache)) == 4
    other = load_tokenizer()
    other.chat_template = "{% for message in messages %}{{ message.content }};{% endfor %}"
    assert tokenizer_digest(TOKENIZER) == tokenizer_digest(load_tokenizer()) != tokenizer_digest(other)


def test_tokens_of_another_tenant_are_not_found(task: Task, cache: Path) -> None:
    encode(task.replace(tenant="a"))
    encode(task.replace(tenant="b"))
    assert len(entries(cache)) == 2


def test_other_content_of_the_same_size_and_time_is_other_data(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file keeps its modification time, and digests of files are cached by it from the first read on."""
    monkeypatch.setattr(digests, "_SETTLED_S", -1e9)
    file = tmp_path / "rows.jsonl"
    first = encode(task)
    before = file.stat()
    file.write_text(file.read_text().replace("plus", "less"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert digest_of(*encode(task).splits) != digest_of(*first.splits)
    assert_equal(encode(task.replace(token_cache="memory")), encode(task))


def test_a_file_that_changes_while_it_is_read_is_refused(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def rows(path: Path, key: str) -> Iterator[Any]:
        yield from original(path, key)
        with path.open("a") as file:
            file.write('{"prompt": "late", "completion": "late"}\n')

    original = files_module._rows
    monkeypatch.setattr(files_module, "_rows", rows)
    with pytest.raises(DataError, match="rows that do not change while they are tokenised"):
        encode(task)
    assert not entries(cache)


@pytest.mark.parametrize("file", ["ids.bin", "trained.bin", "rows.bin"])
def test_a_damaged_entry_is_made_again(file: str, task: Task, cache: Path) -> None:
    first = digest_of(*encode(task).splits)
    (entry,) = entries(cache)
    damaged = entry / "train-0" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged"):
        assert digest_of(*encode(task).splits) == first
    damaged.unlink()
    with pytest.warns(UserWarning, match="is damaged"):
        assert digest_of(*encode(task).splits) == first


def test_a_writer_that_is_killed_leaves_nothing_that_is_read(task: Task, cache: Path) -> None:
    """The child process ends between any two writes, as a killed one does."""
    expected = digest_of(*encode(task.replace(token_cache="memory")).splits)
    for after in (0, 1, 3, 40, 68, 72, 75):
        child = os.fork()
        if child == 0:  # pragma: no cover
            _end_after(after)
            encode(task)
            os._exit(0)
        os.waitpid(child, 0)
        left = [path for path in entries(cache) if not path.name.startswith(".")]
        assert all((path / "data.json").is_file() for path in left)
    assert digest_of(*encode(task).splits) == expected
    assert [path.name.startswith(".") for path in entries(cache)] == [False]


def _end_after(count: int) -> None:
    """End this process without clean-up at the write, fsync or rename after ``count`` others."""
    left = [count]

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not left[0]:
                os._exit(9)
            left[0] -= 1
            return original(*args, **kwargs)

        return call

    os.fsync, Path.rename, Path.mkdir = counted(os.fsync), counted(Path.rename), counted(Path.mkdir)  # type: ignore
    token_cache._HashedFile.write = counted(token_cache._HashedFile.write)  # type: ignore[method-assign]


def test_two_at_once_tokenise_once(task: Task, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, found = [], []
    original = files_module._rows
    monkeypatch.setattr(files_module, "_rows", lambda *args: reads.append(args) or original(*args))
    threads = [threading.Thread(target=lambda: found.append(digest_of(*encode(task).splits))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 3
    assert len(entries(cache)) == 1
    assert len(reads) <= 2  # one process may read the rows and another one tokenise them


@pytest.mark.parametrize("what", ["rows", "tokens"])
def test_a_full_disk_is_named(what: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(model="alto-tiny", dataset=write(tmp_path / "rows.jsonl", sums(150)), token_cache="disk")
    with monkeypatch.context() as patch:
        if what == "rows":
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        else:
            patch.setattr(token_cache._HashedFile, "finish", _disk_is_full)
        try:
            with pytest.raises(DiskFullError, match=r"ALTO_CACHE.*token_cache: memory"):
                encode(task)
        finally:
            if what == "rows":
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not entries(cache)
    encode(task)


def _disk_is_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_that_cannot_be_written_is_named(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "file"))
    with pytest.raises(RunWriteError, match=r"expected to write .*ALTO_CACHE"):
        read_task_rows(task)


def test_unused_entries_are_removed(task: Task, cache: Path) -> None:
    encode(task)
    (old,) = entries(cache)
    os.utime(old, (0, 0))
    encode(task.replace(max_length=20))
    assert old not in entries(cache)
    assert len(entries(cache)) == 1


def test_used_entries_and_the_locks_of_others_stay(task: Task, cache: Path) -> None:
    """Removing a lock that a process holds would let another process in."""
    encode(task)
    (used,) = entries(cache)
    lock = cache / f"{used.name}.lock"
    for path in (used, lock):
        os.utime(path, (0, 0))
    encode(task)
    assert time.time() - used.stat().st_mtime < 3600
    encode(task.replace(max_length=20))
    assert used in entries(cache)
    assert len(entries(cache)) == 2
    assert lock.exists()
