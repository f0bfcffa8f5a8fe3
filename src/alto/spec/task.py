"""Tasks: a base model, a dataset, and the configurations to try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, PrivateAttr, field_validator

from alto.base import quoted
from alto.errors import SpecError, UnknownKeyError, UnsupportedError
from alto.records import LabelSet
from alto.spec import task_checks
from alto.spec.base_model import (
    BaseModelSpec,
    BaseObjects,
    Dtype,
    Origin,
    check_object_keys,
    quantisation_of,
    with_base_objects,
)
from alto.spec.data_keys import MIXTURE_WEIGHTS, DataKeys, chat_template_text, default_name, ordered, parse_sources
from alto.spec.early_exit import EarlyExit
from alto.spec.job_config import JOB_FIELDS, JobConfig
from alto.spec.keys import JOB_ALIASES, TASK_ALIASES, canonical_keys, spelt_as
from alto.spec.method import Method, find_method
from alto.spec.row_objects import with_config_objects, with_rows_in_files
from alto.spec.scoring import LOSS, Scoring, check_metric, check_metric_name, parse_reward_funcs, parse_select_by
from alto.spec.search import AUTO, Job, Search, auto_space, first_configurations, repetitions
from alto.spec.search_space import SearchSpace, written
from alto.spec.strict_yaml import write_yaml
from alto.spec.task_checks import Refit
from alto.spec.validation import check_path, parsed, path_text, plain

AdapterDtype = Literal["float32", "bfloat16"]
Keep = Literal["winner", "finalists", "all"]
TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")
"""Experiment trackers that a task can report to."""

DEFAULT_METHOD = "sft"


class Task(DataKeys):
    """One tuning task, checked completely by its constructor: every job of its search space is valid.

    Fields of a job (:class:`JobConfig`, including aliases) and settings of the method may be given beside the task's
    own keys; they are then fixed for every job. :class:`DataKeys` has the keys about data.

    Two arguments can be Python objects, which files cannot contain. ``model`` may be a loaded
    ``transformers.PreTrainedModel``, given with its ``tokenizer``, for a run in this process. ``config`` is a
    configuration of PEFT, transformers or TRL, or a list of them; it sets keys that are not given explicitly.

    Attributes:
        method: ``sft`` learns replies; ``dpo``, ``orpo`` and ``cpo`` learn from pairs which reply is preferred;
            ``kto`` learns from labels which replies are desirable; ``classification`` and ``regression`` learn the
            labels of texts. Packages may register others (:class:`alto.spec.ObjectiveEntry`).
        metric: The metric that selects the best checkpoint of a job, the jobs that continue at rungs, and the best job:
            the validation loss, or a metric of the method where higher is better; the loss breaks ties. Divergence and
            overfitting are always judged by losses.
        init_adapter: A saved LoRA adapter, or a run (its best adapter is used). Every job begins with this adapter and
            a fresh optimizer. If the method compares with a reference, this adapter is the reference, as in TRL. The
            jobs have its ranks, targets, scales and extra tensors; keys about them need not be given.
        refit: The finished run whose best job is trained again on all rows, including validation rows. ``alto refit``
            sets this key; such a task has no validation.
        num_gpus: GPUs the task runs on (``alto run``); on a machine without GPUs, CPU slots.
        priority: Priority of the task; a waiting task is never delayed by a task of lower priority.
        tenant: The tenant whose GPU quota the task counts against.
        share_executor: Whether the task may be trained in one process with other tasks on the same base model (``alto
            run``), if all of them are then done sooner. The results are the same.
        eval_steps: Share of a job's own steps between two evaluations (the ratio form of HF's field).
        early_exit: A mapping of settings; true for the defaults, false for no early exit.
        search: How configurations are chosen from the search space, and the budget: a mapping of settings, or the name
            of an algorithm.
        repeat_by: The key in which repetitions of a configuration differ. Jobs of a grid that differ only in this key
            repeat one configuration: rungs and the end of the task rank configurations by the means of their jobs, and
            the best job of the best configuration is exported. With ``none``, every job is a separate configuration.
        search_space: Fields that vary between jobs; ``auto`` uses ranges around a usual learning rate for the base
            model's hidden size, with ranks, batch sizes and ``lora_alpha`` 32.
        select_by: The criterion that chooses the winner. With ``metric``, the key ``metric`` decides. With
            ``eval_accuracy``, the best jobs answer the validation rows that end in ``#### N``, and the job with the
            most correct answers wins (if equal, the one with the lower validation loss). A mapping names a scorer of
            answers. Only ``metric`` works on several GPUs.
        reward_funcs: Scorers of the completions of a method that generates (``grpo``), one or more: the name of a
            scorer of ``select_by``, a mapping of its settings, or ``module:function``. Such a function has TRL's
            signature: it is called with the keyword arguments ``prompts``, ``completions``, ``completion_ids``,
            ``reference`` and the names of the rows' other columns, lists with an entry for each completion, and returns
            a list of numbers, or None for completions that it cannot score. It runs in a process of its own.
        reward_weights: Weight of each reward in the sum; by default 1.
        num_finalists: Number of best jobs by the metric that are scored if ``select_by`` is not ``metric``.
        num_samples: Number of validation prompts (the first rows) for which the base model, the best adapter and the
            adapter of the next best job generate greedy answers at the end of the task, for comparison. 0 or None:
            none. On one GPU only.
        sample_max_new_tokens: Maximum length of such an answer, in tokens.
        report_to: Experiment trackers by name, ``all`` that are installed, or ``none``; ``auto`` is TensorBoard if it
            is installed. Trackers read their settings from their own environment variables.
        gradient_checkpointing: Recompute activations instead of keeping them; with ``auto`` the engine decides by the
            available memory.
        load_in_4bit, load_in_8bit: Keep the base model's linear layers, except its output head, in 4 bits (NF4 with
            double quantisation) or in 8 bits with bitsandbytes. A model that is quantised on disk needs neither.
        adapter_dtype: Precision of adapters, their gradients and the state of ``adamw_torch``; ``bfloat16`` is PEFT's
            ``autocast_adapter_dtype=False`` on a base model of that precision.
        optim_state_dtype: Precision of the state of ``adamw_torch``, if it differs from the adapters' precision:
            ``bfloat16`` uses stochastic rounding, which is exact on average, and half the memory of ``float32``. None
            uses the adapters' precision, rounded to nearest as in torch. If set, all jobs must use ``adamw_torch``.
        max_slots: Maximum number of resident jobs. None lets the engine decide: as many as fit and make a step faster.
            If other tasks run in the same process, jobs may also use slots that those tasks leave empty.
        max_tokens_per_step: Largest average number of tokens in a step of all resident jobs; a single job may have
            more. None lets the engine decide.
        max_tokens_per_pass: Largest number of tokens of a micro-batch (one forward and backward pass); a larger step is
            split. None lets the engine decide by the device.
        checkpoint_interval_s: Maximum work, in seconds, that a killed run loses; checkpoints are less frequent if
            writing them would take more than a twentieth of the time.
        keep: The adapters that stay in the run's folder when the task ends. ``winner``: only the winner's.
            ``finalists``: the adapters of the winner, of jobs that did all their steps, of jobs ranked at the last
            rung, and of jobs with scored answers. ``all``: all adapters, and the states from which jobs are resumed.
            Without ``all``, a job that a rule ends loses that state at the next checkpoint, and a finished run accepts
            no further jobs.

    Raises:
        SpecError: A value is out of its domain, values contradict each other, two jobs are the same, or there are
            too many jobs.
        UnknownKeyError, ConflictingKeysError: A key is unknown, or a field is given twice.
        UnsupportedError: A setting is not supported by this version.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    method: str = Field(default=DEFAULT_METHOD, description="what is learned from a row")
    metric: str = Field(default=LOSS, min_length=1, description="value by which the best adapter is selected")
    init_adapter: str | None = Field(
        default=None, min_length=1, description="saved adapter, or run, that every job begins with"
    )
    refit: Refit | None = Field(default=None, description="trains all rows, without validation (alto refit)")
    num_gpus: int = Field(default=1, ge=1, le=4096, description="devices the task runs on")
    priority: int = Field(default=0, ge=0, le=100, description="priority among waiting tasks")
    tenant: str = Field(default="", max_length=100, description="tenant whose GPU quota the task counts against")
    share_executor: bool = Field(default=True, description="may be trained in one process with other tasks")
    eval_steps: float = Field(default=0.05, gt=0, le=1, description="share of a job's steps between two evaluations")
    select_by: Literal["metric", "eval_accuracy"] | Scoring = Field(
        default="metric", description="what chooses the winner"
    )
    reward_funcs: tuple[Scoring, ...] = Field(default=(), description="what scores generated completions")
    reward_weights: tuple[float, ...] | None = Field(default=None, description="weight of each reward")
    num_finalists: int = Field(
        default=4, ge=1, le=1024, description="number of jobs whose answers are scored to choose the winner"
    )
    num_samples: int | None = Field(
        default=0, ge=0, le=1000, description="number of validation prompts that are continued"
    )
    sample_max_new_tokens: int = Field(
        default=128, ge=1, le=2**17, description="maximum number of tokens that continue a prompt"
    )
    early_exit: EarlyExit = Field(default=EarlyExit(), description="early-exit settings")
    search: Search = Field(default=Search(), description="how configurations are found")
    repeat_by: Literal["seed", "none"] = Field(
        default="seed", description="key in which repetitions of a configuration differ"
    )
    max_slots: int | None = Field(default=None, ge=1, le=1024, description="maximum number of resident jobs")
    max_tokens_per_step: int | None = Field(
        default=None, ge=1, le=2**24, description="maximum number of tokens in a step of all resident jobs"
    )
    max_tokens_per_pass: int | None = Field(
        default=None, ge=1, le=2**24, description="maximum number of tokens in a micro-batch"
    )
    gradient_checkpointing: Literal[True, False, "auto"] = Field(
        default=False, description="recompute activations instead of keeping them"
    )
    torch_compile: bool = Field(default=False, description="compile the layers of the base model")
    checkpoint_interval_s: float = Field(default=60.0, ge=0, le=86400, description="seconds between two checkpoints")
    keep: Keep = Field(default="finalists", description="which adapters stay on disk when the task ends")
    dtype: Dtype = Field(default="auto", description="precision of the base model")
    load_in_4bit: bool = Field(default=False, description="keep the base model's linear layers in 4 bits (NF4)")
    load_in_8bit: bool = Field(default=False, description="keep the base model's linear layers in 8 bits")
    adapter_dtype: AdapterDtype = Field(
        default="float32", description="precision of adapters, their gradients and the state of adamw_torch"
    )
    optim_state_dtype: AdapterDtype | None = Field(
        default=None, description="precision of the state of adamw_torch; by default that of the adapters"
    )
    trust_remote_code: bool = Field(default=False, description="run the Python code that comes with a model")
    use_safetensors: bool = Field(default=True, description="read safetensors weights; false reads pickle files")
    report_to: str | tuple[str, ...] = Field(default="auto", description="experiment trackers")
    search_space: SearchSpace = Field(default=SearchSpace(), description="what varies between the jobs")

    _fixed: dict[str, Any] = PrivateAttr()
    _method: Method = PrivateAttr()
    _jobs: tuple[Job, ...] = PrivateAttr()
    _repetitions: Mapping[str, str] = PrivateAttr()
    _origin: Origin = PrivateAttr()

    def __init__(self, /, **values: Any) -> None:
        values, objects = with_base_objects(values)
        values, notes = with_config_objects(values)
        values = task_checks.with_task_type(values)
        method = _method_of(values)
        given = with_rows_in_files(method.without_others(_canonical(values, method)))
        fixed = {key: given.pop(key) for key in tuple(given) if key not in TASK_FIELDS}
        early_exit = EarlyExit.parse(given.get("early_exit", True))
        is_late = method.compares_replies or method.entry.generates
        given["early_exit"] = early_exit.with_preset("preferences") if is_late else early_exit
        given["search"] = Search.parse(given.get("search", {}))
        given["select_by"] = parse_select_by(given.get("select_by", "metric"))
        given["reward_funcs"] = parse_reward_funcs(given.get("reward_funcs", ()))
        if isinstance(given.get("refit"), Mapping):
            given["refit"] = parsed(Refit, given["refit"], "refit", example="{run: runs/sums, job: job-003, steps: 40}")
        if isinstance(given.get("dataset"), list | tuple):
            given["dataset"] = parse_sources(given["dataset"])
        space = given.get("search_space", {})
        given["search_space"] = _auto_space(method, fixed) if space == AUTO else _search_space(space, method)
        given.setdefault("name", default_name(given.get("dataset")))
        task_checks.check_given_once(given, fixed)
        with spelt_as(values, method.spellings):
            super().__init__(**given)
        self._origin = Origin(objects=objects, notes=notes)
        if objects is not None:
            check_object_keys(self, objects)
        task_checks.check_splits(self.validation_split, self.test_split)
        check_metric(self.metric, self.method, method.entry.scores)
        with spelt_as(values, method.spellings):
            task_checks.check_fixed(fixed, self.search_space, method)
        self._fixed = {key: plain(value) for key, value in fixed.items()}
        task_checks.check_search(self.search, self.search_space, self.early_exit)
        self._method = method
        self._jobs = self._first_jobs()
        is_repeated = (
            self.repeat_by == "seed" and self.search.algorithm == "grid" and "seed" in self.search_space.varied
        )
        self._repetitions = repetitions(self._jobs) if is_repeated else {}
        self._check_suggestions()
        task_checks.check_selection(self.select_by, method)
        task_checks.check_samples(self.num_samples, method)
        task_checks.check_rewards(self.reward_funcs, self.reward_weights, method, self.num_gpus)
        task_checks.check_train_on(self.train_on, method)
        task_checks.check_label_keys(self, method, self.num_gpus)
        task_checks.check_mixture(self)
        if self.optim_state_dtype is not None:
            for config in (*(job.config for job in self._jobs), *self.extreme_configs()):
                task_checks.check_state_dtype(self.optim_state_dtype, config)
        if self.refit is not None:
            max_steps = [job.config.max_steps for job in self._jobs]
            task_checks.check_refit(self.refit, self, self.early_exit, self.select_by, max_steps)
        task_checks.check_scored_rungs(self.scoring, self.early_exit, self.search)
        task_checks.check_size(self.to_dict())

    _accept_folder = field_validator("init_adapter", mode="before")(path_text)
    _check_folder = field_validator("init_adapter")(check_path)
    _check_metric = field_validator("metric", mode="before")(check_metric_name)

    @field_validator("reward_weights", mode="before")
    @classmethod
    def _take_weights(cls, value: Any) -> Any:
        return plain(value)

    @field_validator("report_to", mode="before")
    @classmethod
    def _check_report_to(cls, value: Any) -> Any:
        if value in ("auto", "all", "none"):
            return value
        names = (value,) if isinstance(value, str) else value
        is_list = isinstance(names, list | tuple) and bool(names)
        if not is_list or not all(name in TRACKERS for name in names) or len(set(names)) < len(names):
            raise ValueError(
                f"should be 'auto', 'all', 'none', or one or more of {', '.join(TRACKERS)}, found {quoted(value)}. "
                "For example: [tensorboard, wandb]."
            )
        return tuple(names)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs that the task begins with, always the same for equal tasks. For a grid: all configurations of the
        search space, the last key varying fastest."""
        return self._jobs

    @property
    def repetitions(self) -> Mapping[str, str]:
        """For each job whose configuration is repeated, the id of the first job with that configuration."""
        return self._repetitions

    @property
    def base_model(self) -> BaseModelSpec:
        """The base model that the task names, and how it is loaded."""
        return BaseModelSpec(
            id=self.model,
            dtype=self.dtype,
            quantisation=quantisation_of({"load_in_4bit": self.load_in_4bit, "load_in_8bit": self.load_in_8bit}),
            torch_compile=self.torch_compile,
            use_safetensors=self.use_safetensors,
            trust_remote_code=self.trust_remote_code,
            chat_template=None if self.chat_template is None else chat_template_text(self.chat_template),
            objects=self.objects,
        )

    @property
    def objects(self) -> BaseObjects | None:
        """The base model and its tokenizer if they were given as objects. They are not keys: :meth:`to_dict` omits
        them."""
        return self._origin.objects

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes, as sentences, on settings that were not adopted unchanged."""
        return self._origin.notes

    @property
    def scoring(self) -> Scoring | None:
        """The scorer of the jobs' answers; None if the metric alone chooses the winner."""
        if isinstance(self.select_by, Scoring):
            return self.select_by
        return None if self.select_by == "metric" else Scoring(scorer="exact_match")

    @property
    def label_set(self) -> LabelSet | None:
        """The labels of the task's rows once they are known, else None."""
        if self.problem_type is None or self.id2label is None:
            return None
        return LabelSet(problem_type=self.problem_type, names=self.id2label)

    def with_labels(self, labels: LabelSet) -> Self:
        """Return the task with the labels that were found in its rows."""
        return self.replace(problem_type=labels.problem_type, num_labels=None, id2label=labels.names)

    def with_note(self, note: str) -> Self:
        """Return the task with a further note."""
        found = self.replace()
        found._origin = replace(found._origin, notes=(*self.notes, note))
        return found

    @property
    def needs_trust(self) -> bool:
        """Whether the task runs code, or contacts a server, that its file names."""
        scorers = (*self.reward_funcs, *([] if self.scoring is None else [self.scoring]))
        return self.trust_remote_code or any(scorer.reaches_outside for scorer in scorers)

    @property
    def keeps_columns(self) -> bool:
        """Whether columns of rows that have no role are kept, because reward functions get them."""
        return any(scoring.scorer == "python" for scoring in self.reward_funcs)

    @property
    def fixed(self) -> dict[str, Any]:
        """The fields that the top level fixes for every job: canonical names to values as written."""
        return dict(self._fixed)

    def job_config(self, values: Mapping[str, Any]) -> JobConfig:
        """Return the configuration of a job of this task from one flat mapping; see :meth:`JobConfig.of`."""
        config = self._config(values)
        task_checks.check_state_dtype(self.optim_state_dtype, config)
        return config

    def _config(self, values: Mapping[str, Any]) -> JobConfig:
        """Return a configuration; in a mixture, the weights of the sources are its default, and give its order."""
        if self.sources and values.get(MIXTURE_WEIGHTS) is None:
            values = {**values, MIXTURE_WEIGHTS: {source.name: source.weight for source in self.sources}}
        config = JobConfig.of(self._method, values)
        if config.mixture_weights is None:
            return config
        weights = ordered(config.mixture_weights, self.sources)
        return config if weights == config.mixture_weights else config.replace(**{MIXTURE_WEIGHTS: dict(weights)})

    def _first_jobs(self) -> tuple[Job, ...]:
        configurations = first_configurations(self.search, self.search_space, self.data_seed)
        digits = max(3, len(str(len(configurations) - 1)))
        first_with: dict[JobConfig, str] = {}
        jobs = []
        for index, varied in enumerate(configurations):
            job_id = f"job-{index:0{digits}d}"
            try:
                config = self._config({**self._fixed, **varied})
            except UnknownKeyError:
                raise  # the error is the same for every job
            except SpecError as error:
                place = f"{job_id} ({_shown(varied)})" if varied else job_id
                raise SpecError(f"In {place}: {error}") from None
            other = first_with.setdefault(config, job_id)
            if other != job_id:
                raise SpecError(
                    f"search_space should make every job different, found that {other} and {job_id} are equal "
                    f"({_shown(varied)}). Remove one of the equivalent values."
                )
            jobs.append(Job(id=job_id, config=config, values=varied))
        return tuple(jobs)

    def _check_suggestions(self) -> None:
        """Check configurations that the search may choose later: those of listed values and of both ends of ranges."""
        for varied in self.search_space.extremes(self.data_seed) if self.search.algorithm == "tpe" else ():
            try:
                self._config({**self._fixed, **varied})
            except SpecError as error:
                raise SpecError(
                    "search_space should contain only valid configurations, because search "
                    f"{self.search.algorithm!r} may choose any of them, found {_shown(varied)}: {error}"
                ) from None

    def extreme_configs(self) -> Iterator[JobConfig]:
        """Yield configurations that the search ``tpe`` may choose later, with every listed value and both ends of
        ranges; nothing for other searches."""
        if self.search.algorithm == "tpe":
            for varied in self.search_space.extremes(self.data_seed):
                yield self.job_config({**self._fixed, **varied})

    def to_dict(self) -> dict[str, Any]:
        """Return the task under canonical keys, including defaults: ``Task(**task.to_dict()) == task``."""
        own = self.model_dump(
            mode="json", exclude={"early_exit", "search", "search_space", "select_by", "reward_funcs"}
        )
        own["select_by"] = self.select_by if isinstance(self.select_by, str) else self.select_by.to_dict()
        if self.reward_funcs:
            own["reward_funcs"] = [scorer.to_dict() for scorer in self.reward_funcs]
        else:
            del own["reward_weights"]  # so that tasks without rewards are written as before
        search = self.search.model_dump(mode="json", exclude_defaults=True)
        early_exit = self.early_exit.model_dump(mode="json", exclude_none=True)
        fixed = {key: written(key, value) for key, value in self._fixed.items()}
        space = AUTO if self.search_space.is_auto else self.search_space.to_dict()
        return {**own, **fixed, "early_exit": early_exit, "search": search, "search_space": space}

    def to_yaml(self) -> str:
        """Return the text of a file that :func:`alto.spec.load_task` reads back to an equal task."""
        return write_yaml(self.to_dict())

    def replace(self, **changes: Any) -> Self:
        """Return a new, fully checked task with some keys changed.

        Setting ``validation_dataset`` removes ``validation_split``, and the reverse; the same holds for
        ``test_dataset`` and ``test_split``. If the model was passed as a Python object, it is kept unless ``model`` is
        one of the changes.
        """
        changes, objects = with_base_objects(changes)
        changes = _canonical(changes, _method_of({"method": self.method, **changes}))
        kept = self.to_dict()
        for what in ("validation", "test"):
            if changes.get(f"{what}_dataset") is not None:
                kept.pop(f"{what}_split")
            if changes.get(f"{what}_split") is not None:
                kept.pop(f"{what}_dataset")
        objects = objects if "model" in changes else self.objects
        model = {} if objects is None else {"model": objects}
        found = type(self)(**(kept | changes | model))
        found._origin = replace(found._origin, notes=self.notes)
        return found


def _shown(varied: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={written(key, value)}" for key, value in varied.items())


TASK_FIELDS: tuple[str, ...] = tuple(Task.model_fields)
"""Canonical names of a task's own fields."""


def _method_of(values: Mapping[str, Any]) -> Method:
    """Return the method that ``values`` name in any spelling; it decides which other keys are allowed."""
    names = [value for key, value in values.items() if TASK_ALIASES.get(key, key) == "method"]
    # A value that is not text is reported later, together with the task's other values.
    method = find_method(names[-1] if names and isinstance(names[-1], str) else DEFAULT_METHOD)
    taken = {*TASK_FIELDS, *JobConfig.model_fields, *JOB_ALIASES, *TASK_ALIASES, "paired"}
    clashing = sorted(taken & {*method.fields, *method.entry.settings.aliases})
    if clashing:
        raise UnsupportedError(
            f"method {method.name!r}: expected settings with unique names, found {clashing[0]!r}, which is already a "
            "key of tasks; rename it in the package that registers the method"
        )
    return method


def _canonical(values: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """Return ``values`` under canonical names."""
    fields = (*TASK_FIELDS, *JOB_FIELDS, *method.known_keys)
    elsewhere = {key: "early_exit" for key in EarlyExit.model_fields if key not in fields}
    return canonical_keys(values, fields=fields, aliases=method.spellings, where="the task", elsewhere=elsewhere)


def _auto_space(method: Method, fixed: Mapping[str, Any]) -> SearchSpace:
    return auto_space(
        fixed=fixed,
        compares_replies=method.compares_replies,
        completions_per_row=method.settings(fixed).completions_per_row,
    )


def _search_space(value: object, method: Method) -> SearchSpace:
    if isinstance(value, SearchSpace):
        return value
    if isinstance(value, str):
        raise SpecError(
            f"search_space should map fields to their values, or be {AUTO!r}, found {quoted(value)}. Use {AUTO}, or "
            "for example {learning_rate: [1.0e-4, 2.0e-4]}."
        )
    if isinstance(value, Mapping):
        misplaced = [key for key in value if key in TASK_FIELDS or key in TASK_ALIASES]
        if misplaced:
            raise UnknownKeyError(
                "\n".join(
                    f"search_space has the key {key!r}, expected fields of a job: this one is the same for all jobs of "
                    "a task. Move it to the top level of the task."
                    for key in misplaced
                )
            )
    return SearchSpace.parse(value, method)
