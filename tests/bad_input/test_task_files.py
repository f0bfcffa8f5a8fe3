"""Task files and overrides that are invalid, unreadable or malicious."""

from __future__ import annotations

import math
import typing
from pathlib import Path
from typing import Any

import pytest
from counting import num_calls
from pydantic import BaseModel

from alto.errors import AltoError, SpecError
from alto.spec import EarlyExit, JobConfig, Task, load_task
from alto.spec.job_config import MAPPING_FIELDS
from alto.spec.keys import FIELD_DEFAULTS
from alto.spec.objective_settings import DpoSettings

TASK = "model: alto-tiny\ndataset: train.jsonl\n"
BITS = "0x" + "f" * 5000
"""An integer that Python reads and refuses to write."""

MANY_CALLS = 1_000_000
"""A limit on function calls: fewer than the oversized input has values, many more than refusing it takes."""


def kinds(model: type[BaseModel], key: str) -> set[Any]:
    annotation = model.model_fields[key].annotation
    return set(typing.get_args(annotation) or (annotation,))


KEYS = [
    (model, key)
    for model in (Task, JobConfig, EarlyExit, DpoSettings)
    for key in model.model_fields
    if key != "objective"  # it holds the method's settings
]
NUMBERS = [(model, key) for model, key in KEYS if {int, float} & kinds(model, key)]
NO_NUMBERS = [math.nan, math.inf, -math.inf, -1, -1e-9, True, False, "1e-4", "NaN", [], {}, [1], 10**400, -(16**5000)]


def task_with(model: type[BaseModel], key: str, value: Any) -> Task:
    settings = {"early_exit": {key: value}} if model is EarlyExit else {key: value}
    settings |= {"method": "dpo"} if model is DpoSettings else {}
    return Task(**{"model": "alto-tiny", "dataset": "train.jsonl"} | settings)


@pytest.mark.parametrize(("model", "key"), NUMBERS, ids=[key for _, key in NUMBERS])
def test_no_number_is_taken_for_one(model: type[BaseModel], key: str) -> None:
    for value in NO_NUMBERS:
        if value in FIELD_DEFAULTS.get(key, ()):
            continue  # as in TrainingArguments, and tested with them
        with pytest.raises(SpecError) as caught:
            task_with(model, key, value)
        error = str(caught.value)
        assert key in error
        assert "should be" in error
        assert "found" in error
        assert len(error) < 400


@pytest.mark.parametrize(("model", "key"), NUMBERS, ids=[key for _, key in NUMBERS])
def test_bounds_hold_at_zero(model: type[BaseModel], key: str) -> None:
    """Where zero is invalid, negative zero is too; where it is valid, both are."""
    outcomes = []
    for zero in (0, 0.0, -0.0):
        if isinstance(zero, float) and float not in kinds(model, key):
            continue
        refused: list[str] = []
        try:
            task_with(model, key, zero)
        except SpecError as error:
            refused.append(str(error))
        assert all(key in text for text in refused)
        outcomes.append(bool(refused))
    assert len(set(outcomes)) == 1


@pytest.mark.parametrize(("model", "key"), KEYS)
def test_nothing_is_no_value_unless_the_key_says_so(model: type[BaseModel], key: str) -> None:
    # Null means a mapping without keys, as PEFT and LLaMA-Factory write it.
    stands_for_default = model is Task and None in FIELD_DEFAULTS.get(key, ())  # as in TrainingArguments
    if type(None) in kinds(model, key) or model is DpoSettings or key in MAPPING_FIELDS or stands_for_default:
        task_with(model, key, None)
    else:
        with pytest.raises(AltoError, match=rf"(?s){key}.*found"):
            task_with(model, key, None)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("lerning_rate: 0.1", "UnknownKeyError: In task.yaml: the task has the unknown key 'lerning_rate'. Did you"),
        ("m\u043edel: x", r"the unknown key 'mоdel' ('m\u043edel'). Did you mean 'model'?"),
        ("lr: 0.1\nlearning_rate: 0.1", "ConflictingKeysError: In task.yaml: the task gives 'learning_rate' twice"),
        ("lr: 0.1\nsearch_space: {lr: [0.1]}", "ConflictingKeysError"),
        ("lr: '1e-4'", "Write 1e-4 without quotes"),
        ("model: other", "the key 'model' is given twice"),
        ("search_space: {lr: []}", "search_space.learning_rate should hold from 1 to 10000 values, found 0"),
        ("search_space: {lr: [0.1, 0.1]}", "should hold different values, found 0.1 twice"),
        ("search_space: {lr: {min: 1.0e-5, max: 1.0e-2, num: 1000}, seed: {min: 0, max: 9999, num: 1000}}",
         "at most 10000 jobs, found 1000000"),
        ("name: ../../x", "name should be a file name of at most 100 letters"),
        ("name: \"\\e[31mred\"", r"found '\x1b[31mred'"),
        ("name: no", "found False (a truth value). Put it in quotes if it is meant"),
        ("name: 2024-01-01", "found datetime.date(2024, 1, 1) (date). Put it in quotes"),
        ("name: 2024-13-45", "the timestamp '2024-13-45' is not valid"),
        ("name: !!python/object:os.system x", "could not determine a constructor"),
        ("seed: !!int ''", "the int '' is not valid"),
        ("seed: !!bool maybe", "the bool 'maybe' is not valid"),
        ("name: !!timestamp soon", "the timestamp 'soon' is not valid"),
        ("lr: 1" + ":00" * 300 + ".5", "is not valid"),
        (f"seed: {BITS}", "found a number of 20000 bits"),
        (f"early_exit: {{rungs: [[{BITS}, 1]]}}", "found [[a number of 20000 bits, 1]]"),
        ("seed: " + "9" * 5000, "the int '999"),
        ("method: simpo", "method should be one of sft, dpo, orpo, cpo, kto, classification, regression, grpo, "
         "found 'simpo'. Set method: cpo"),
        ("beta: 0.1", "UnknownKeyError: In task.yaml: 'beta' is a setting of method dpo, orpo, cpo, kto and grpo"),
        ("method: orpo\nlabel_smoothing: 0.1", "'label_smoothing' is a setting of method dpo and cpo"),
        ("method: dpo\nbeta: 0", "beta (strength of the penalty for deviating from the base model) should be a finite"),
        ("method: dpo\nbeta: .nan", "Write a finite number"),
        ("method: dpo\nbeta: high", "found 'high' (text). Write a number"),
        ("method: dpo\nloss_type: simpo", "loss_type should be one of sigmoid, sigmoid_norm, ipo, hinge"),
        ("method: dpo\nloss_type: hinge\nlabel_smoothing: 0.1", "label_smoothing should be 0 with loss_type 'hinge'"),
        ("method: dpo\nref_model: other", "has the key 'ref_model', which is not supported. The reference of dpo is"),
        ("trust_remote_code: 1", "should be true or false, found 1"),
        ("use_safetensors: maybe", "should be true or false, found 'maybe'"),
        ("target_modules: 'a{99999999999999999999}'", "the repetition number is too large"),
        ("target_modules: '" + "(" * 3000 + ")" * 3000 + "'", "target_modules should be"),
        ("columns: {prompt: [q]}", "columns should map roles"),
        ("report_to: {a: b}", "report_to should be"),
        ("validation_dataset: \"a\\0b\"", r"found 'a\x00b': a NUL character"),
        ("validation_dataset: ~nosuchuser/x", "found '~nosuchuser/x': no home folder for ~nosuchuser"),
        ("validation_dataset: " + "x" * 300, ": File name too long"),
        ("validation_dataset: " + "x/" * 5000, "validation_dataset should be text of at most 4095 characters"),
        ("validation_dataset: \"\\ud800\"", r"found '\ud800'"),
        ("name: " + "k" * 1_000_000, "name should be text of at most 4095 characters"),
        ("lora_alpha: " + "k" * 1_000_000, "lora_alpha should be a number"),
        ("search_space: " + "k" * 1_000_000, "search_space should map fields"),
        ("1: 2", "task.yaml should have text as keys, found 1"),
        ("\ttab: 1", "should be valid YAML"),
        ("lr: " + "[" * 3000 + "]" * 3000, "more than 32 levels"),
        ("".join(" " * depth + "a:\n" for depth in range(1500)), "more than 32 levels"),
        ("search_space: {lr: &a [*a]}", "an alias inside of the value that it repeats"),
    ],
)  # fmt: skip
def test_a_wrong_task_is_refused_in_words(refusal: Any, folder: Path, lines: str, message: str) -> None:
    (folder / "task.yaml").write_text(TASK + lines + "\n", encoding="utf-8")
    error = refusal("tune", "task.yaml")
    assert "task.yaml" in error
    assert message in error


def bomb(template: str) -> str:
    """Return ten lines, each of which repeats the one before nine times."""
    lines = ["x0: &x0 " + template.format("1, 1")]
    for level in range(1, 10):
        lines.append(f"x{level}: &x{level} " + template.format(", ".join([f"*x{level - 1}"] * 9)))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        bomb("[{}]") + f"{TASK}search_space: {{lr: *x9}}\n",
        bomb("[{}]").replace("1, 1", "k, k") + f"{TASK}target_modules: *x9\n",
        bomb("{{<<: [{}]}}").replace("[1, 1]", "{k: 1}") + TASK,
        TASK + "search_space: {lr: [" + ", ".join(f"{number}.0e-9" for number in range(1_000_000)) + "]}\n",
        TASK + "search_space: {seed: {min: 0, max: 4294967295, num: 1000000}}\n",
    ],
    ids=["aliases", "aliases of text", "merges", "a million points written out", "a million points sampled"],
)  # fmt: skip
def test_what_is_too_large_is_refused_before_it_is_unfolded(refusal: Any, folder: Path, text: str) -> None:
    (folder / "task.yaml").write_text(text, encoding="utf-8")
    refusal("tune", "absent.yaml")  # so that imports do not count
    num_calls(lambda: refusal("tune", "task.yaml"), at_most=MANY_CALLS)


def test_the_maximum_number_of_jobs_is_read_back(tmp_path: Path) -> None:
    """The largest file that can be written can be read."""
    task = Task(model="alto-tiny", dataset="rows.jsonl", search_space={"seed": list(range(10_000))})
    (tmp_path / "task.yaml").write_text(task.to_yaml(), encoding="utf-8")
    assert load_task(tmp_path / "task.yaml") == task


def test_more_than_can_be_read_back_is_no_task() -> None:
    rates = [1e-3 + number * 1e-9 for number in range(10_000)]
    keys = ("lr", "weight_decay", "loraplus_lr_ratio", "adam_epsilon", "max_grad_norm")
    with pytest.raises(SpecError, match="a task should hold at most 50000 values, found 50"):
        Task(model="m", dataset="d", search_space={"paired": dict.fromkeys(keys, rates)})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("", "should be key=value, found ''"),
        ("=", "should be key=value, found '='"),
        ("k" * 100_000, "should be key=value, found 'kkk"),
        (".".join("a" * 5000) + "=1", "found 5000 nested keys"),
        ("lr=" + "[" * 5000, "more than 32 levels"),
        (f"lr=0x{'f' * 5000}", "found a number of 20000 bits"),
        ("search_space.0.lr=1", "search_space has the unknown key '0'"),
        ("model.x=1", "reaches into 'model', expected a mapping there, found 'alto-tiny'"),
        ("lr=!!set 0", "expected a mapping node, but found scalar"),
        ("lr=!!set {a, b}", "lr (learning_rate, the peak learning rate) should be"),
        ("\udcff=1", r"the unknown key '\udcff'"),
        ("dataset=\udcff.jsonl", "should be valid YAML"),
        ("name=../../x", "name should be a file name"),
        ("model=../../etc", "ModelNotFoundError: model: expected"),
        ("model=a/../b", "ModelNotFoundError: model: expected"),
        ("model='~nosuchuser/x'", "no home folder for ~nosuchuser"),
        ("rank_pattern={query: 4}", "TargetModuleError: rank_pattern: expected to find linear modules"),
    ],
)
def test_a_wrong_override_is_refused_in_words(refusal: Any, override: str, message: str) -> None:
    assert message in refusal("tune", "task.yaml", "--set", override)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("absent.yaml", "absent.yaml should be a task file, found no such file"),
        ("absent\x1b[31m\u202e.yaml", r"absent\x1b[31m\u202e.yaml should be a task file"),
        (".", "Is a directory"),
        ("/dev/zero", "of at most 2097152 bytes, found more"),
        ("x" * 300, "File name too long"),
        ("loop", "symbolic links"),
        ("latin.yaml", "should be a readable YAML file in UTF-8"),
        ("binary.yaml", "special characters are not allowed"),
        ("train.jsonl", "found what looks like a dataset"),
    ],
)
def test_a_file_that_is_no_task(refusal: Any, folder: Path, file: str, message: str) -> None:
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "latin.yaml").write_bytes("name: é".encode("latin-1"))
    (folder / "binary.yaml").write_bytes(bytes(range(128)))
    assert message in refusal("tune", file)


def test_a_task_whose_dataset_is_itself(refusal: Any, folder: Path) -> None:
    (folder / "task.yaml").write_text("model: alto-tiny\ndataset: task.yaml\n", encoding="utf-8")
    assert "expected a file ending in .jsonl" in refusal("tune", "task.yaml")


@pytest.mark.parametrize("output_dir", ["train.jsonl", "train.jsonl/runs", "/proc/runs", "x" * 300, "loop"])
def test_an_output_folder_that_cannot_be(refusal: Any, folder: Path, output_dir: str) -> None:
    (folder / "loop").symlink_to(folder / "loop")
    assert "RunError: output_dir: expected a folder that can be written" in refusal(
        "tune", "task.yaml", "-o", output_dir
    )


class TestWithoutPermission:
    @pytest.fixture(autouse=True)
    def closed(self, folder: Path) -> None:
        """The folder ``closed/`` cannot be entered, ``mute.*`` cannot be read; ``broken.jsonl`` can, and has no
        rows."""
        (folder / "closed").mkdir()
        for name in ("mute.yaml", "mute.jsonl"):
            (folder / name).touch()
            (folder / name).chmod(0)
        (folder / "closed").chmod(0)
        (folder / "broken.jsonl").write_text("{no json\n", encoding="utf-8")
        for parent in (folder, *folder.parents[:-2]):
            parent.chmod(0o755)

    @pytest.mark.parametrize("file", ["mute.yaml", "closed/task.yaml"])
    def test_to_a_task(self, refusal_to_nobody: Any, file: str) -> None:
        assert "Permission denied" in refusal_to_nobody("tune", file, like=["tune", "broken.jsonl"])

    @pytest.mark.parametrize("command", ["show", "report", "resume", "eval"])
    def test_to_a_run(self, refusal_to_nobody: Any, command: str) -> None:
        assert "Permission denied" in refusal_to_nobody(command, "closed/run", like=[command, "absent"])

    @pytest.mark.parametrize("file", ["mute.jsonl", "closed/train.jsonl"])
    @pytest.mark.parametrize(
        "arguments",
        [
            ("preview", "{}"),
            ("tune", "task.yaml", "--set", "dataset={}"),
            ("tune", "task.yaml", "--set", "validation_dataset={}"),
        ],
        ids=lambda arguments: arguments[-1],
    )
    def test_to_a_dataset(self, refusal_to_nobody: Any, arguments: tuple[str, ...], file: str) -> None:
        of_nobody, of_root = ([word.format(name) for word in arguments] for name in (file, "broken.jsonl"))
        assert file in refusal_to_nobody(*of_nobody, like=of_root)

    def test_to_a_model(self, refusal_to_nobody: Any) -> None:
        like = ["tune", "task.yaml", "--set", "model=absent/model"]
        assert "Permission denied" in refusal_to_nobody("tune", "task.yaml", "--set", "model=closed/model", like=like)

    def test_to_the_output_folder(self, refusal_to_nobody: Any) -> None:
        like = ["tune", "task.yaml", "-o", "train.jsonl"]
        assert "Permission denied" in refusal_to_nobody("tune", "task.yaml", "-o", "closed", like=like)
