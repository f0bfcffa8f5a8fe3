"""The search space of a task: grids, sampled values, and paired values."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from alto.base import quoted
from alto.errors import ConflictingKeysError, SpecError
from alto.spec.data_keys import MIXTURE_WEIGHTS
from alto.spec.job_config import JOB_FIELDS, MAPPING_FIELDS, JobConfig
from alto.spec.keys import canonical_keys
from alto.spec.method import Method, find_method
from alto.spec.validation import plain

# Conversion of Optuna, Ray Tune and W&B sweep distributions in a search space into ranges and lists.
#
# They are recognised by module and class, or by their keys, so none of these packages has to be installed.

_MAX_VALUES = 10_000

_OF_SWEEPS = frozenset({"distribution", "values", "value", "min", "max"})
"""Keys that a W&B sweep parameter may have if it is a list, a value or a range."""


def as_values(value: Any, path: str, *, is_integer: bool) -> Any:
    """Convert a distribution to a list or range that :meth:`alto.spec.SearchSpace.parse` accepts.

    NumPy arrays with one axis and Python's ``range`` become lists. Any other value is returned unchanged.

    A distribution with a single value becomes a list of one. A distribution of whole numbers becomes a list of them if
    the field also takes fractions, because a range of that field would contain fractions.

    Args:
        value: ``FloatDistribution``, ``IntDistribution`` or ``CategoricalDistribution`` of Optuna; ``choice``,
            ``uniform``, ``loguniform``, ``randint``, ``lograndint`` (both exclude their upper end) or ``grid_search``
            of Ray Tune; a parameter of a W&B sweep: ``{values: […]}``, ``{value: …}``,
            ``{distribution: …, min: …, max: …}``.
        is_integer: Whether ranges of the field contain only whole numbers.

    Raises:
        SpecError: The distribution is neither a range nor a list (a normal distribution, for example).
    """
    package, kind = type(value).__module__.partition(".")[0], type(value).__name__
    if package == "optuna" and kind.endswith("Distribution"):
        return _of_optuna(value, kind, path, is_integer=is_integer)
    if package == "ray" and kind in ("Float", "Integer", "Categorical", "Function", "Quantized"):
        return _of_ray(value, kind, path, is_integer=is_integer)
    if isinstance(value, range) or (package == "numpy" and getattr(value, "ndim", None) == 1):
        _check_count(len(value), value, path)
        return list(value) if isinstance(value, range) else value.tolist()
    if isinstance(value, dict) and value.keys() == {"grid_search"}:
        return value["grid_search"]
    if isinstance(value, Mapping) and value.keys() & {"distribution", "values", "value"}:
        return _of_a_sweep(value, path)
    return value


def _of_a_sweep(value: Mapping[Any, Any], path: str) -> Any:
    # ``uniform`` and ``int_uniform`` are the same here: the field decides whether the numbers are whole.
    kind = value.get("distribution")
    if value.keys() - _OF_SWEEPS:
        raise _unknown(dict(value), path)
    if kind in (None, "categorical") and isinstance(value.get("values"), list):
        return value["values"]
    if kind in (None, "constant") and "value" in value:
        return value["value"]
    if kind in ("uniform", "int_uniform", "log_uniform_values") and {"min", "max"} <= value.keys():
        return {"min": value["min"], "max": value["max"], "log": kind == "log_uniform_values"}
    raise _unknown(dict(value), path)


def _of_optuna(value: Any, kind: str, path: str, *, is_integer: bool) -> Any:
    if kind == "CategoricalDistribution":
        return list(value.choices)
    if kind not in ("FloatDistribution", "IntDistribution"):
        raise _unknown(value, path)
    is_whole = kind == "IntDistribution"
    step = value.step
    if step is not None and not (is_whole and step == 1):
        count = math.floor((value.high - value.low) / step + 1e-9) + 1
        _check_count(count, value, path)
        # Multiples of the step are rounded, so that 0.1 and 3 steps of 0.1 give 0.4.
        return [value.low + index * step if is_whole else _rounded(value.low + index * step) for index in range(count)]
    if is_whole and not is_integer:
        return _whole_numbers(value, value.low, value.high, path, log=value.log)
    return _range(value.low, value.high, log=value.log)


def _of_ray(value: Any, kind: str, path: str, *, is_integer: bool) -> Any:
    if kind == "Categorical":
        return list(value.categories)
    sampler = type(value.sampler).__name__.lstrip("_") if getattr(value, "sampler", None) is not None else "Uniform"
    if kind not in ("Float", "Integer") or sampler not in ("Uniform", "LogUniform"):
        raise _unknown(value, path)
    log = sampler == "LogUniform"
    if kind == "Float":
        return _range(value.lower, value.upper, log=log)
    high = value.upper - 1  # Ray's integer ranges exclude their upper end
    return _range(value.lower, high, log=log) if is_integer else _whole_numbers(value, value.lower, high, path, log=log)


def _range(low: float, high: float, *, log: bool) -> Any:
    return [low] if low == high else {"min": low, "max": high, "log": bool(log)}


def _whole_numbers(value: object, low: int, high: int, path: str, *, log: bool) -> list[int]:
    """Return all whole numbers of a distribution, for a field that also takes fractions."""
    if log and low != high:
        raise SpecError(
            f"{path} should be a range of real numbers, or a list, because the field is not limited to whole numbers, "
            f"found {quoted(value)}. Write {{min: {low}, max: {high}, log: true}}, or list some of them."
        )
    _check_count(high - low + 1, value, path)
    return list(range(low, high + 1))


def _check_count(count: int, value: object, path: str) -> None:
    if count > _MAX_VALUES:
        raise SpecError(f"{path} should have at most {_MAX_VALUES} values, found {count} in {quoted(value)}.")


def _rounded(value: float) -> float:
    return float(f"{value:.12g}")


def _unknown(value: object, path: str) -> SpecError:
    return SpecError(
        f"{path} should be a value, a list, a range, or a uniform or log-uniform distribution, found {quoted(value)}. "
        "Use {min: …, max: …, log: true}, or a list."
    )


MAX_JOBS = 10_000
"""A search space that expands to more jobs than this is refused."""

_MOST_DRAWS = 1000
"""Maximum number of draws for each requested configuration."""

_OPEN = 8
"""Number of values that a range without ``num`` is counted as, if the number of configurations tried depends on the
size of the search space."""

_NUMBERS_THAT_MAY_BE_WHOLE = frozenset({"num_train_epochs", "warmup_steps"})
"""Fields that take fractions, but whose ranges contain only whole numbers if both ends are whole."""

_PAIRED = "paired"
_SAMPLED_FIELDS = ("min", "max", "log", "num")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A range: ``num`` values of ``[min, max]``, drawn uniformly, or uniformly in the logarithm with ``log``.

    Integers are drawn without repeats.

    Attributes:
        num: Number of values in a grid; None if the search is not a grid.
    """

    min: float
    max: float
    log: bool
    num: int | None
    is_integer: bool

    @property
    def num_distinct(self) -> int:
        """Number of different values, at most :data:`MAX_JOBS`."""
        if self.is_integer:
            return min(MAX_JOBS, int(self.max) - int(self.min) + 1)
        # The two ends may be so close that there are few double-precision numbers between them.
        found = int((self.max - self.min) / math.ulp(self.max)) + 1
        if self.log:
            low, high = math.log(self.min), math.log(self.max)
            found = min(found, int((high - low) / max(math.ulp(low), math.ulp(high))) + 1)
        return min(MAX_JOBS, found)

    def draw(self, key: str, seed: int) -> tuple[float, ...]:
        """Return the values for ``key``; they depend on the key and the seed, not on the rest of the search space."""
        return _drawn(self, key, seed)

    def quantile(self, fraction: float) -> float:
        """Return the value below which ``fraction`` of the distribution lies."""
        # Integers get equal shares of [min, max + 1), so that the two ends are as likely as the others.
        low, high = self.min, self.max + 1 if self.is_integer else self.max
        if self.log:
            low, high = math.log(low), math.log(high)
        value = low + (high - low) * fraction
        if self.log:
            value = math.exp(value)
        # Rounding may go past an end of the range.
        return min(max(math.floor(value) if self.is_integer else value, self.min), self.max)

    def to_dict(self) -> dict[str, Any]:
        num = {} if self.num is None else {"num": self.num}
        return {"min": self.min, "max": self.max, "log": self.log, **num}


@functools.lru_cache(maxsize=64)
def _drawn(sampled: Sampled, key: str, seed: int) -> tuple[float, ...]:
    """Draw the values for :meth:`Sampled.draw`; cached, because every configuration of a pairing needs them."""
    source = random.Random(f"{seed}/{key}")
    assert sampled.num is not None, "no values of a grid"
    if not sampled.is_integer:
        return tuple(sampled.quantile(source.random()) for _ in range(sampled.num))
    distinct: dict[float, None] = {}
    while len(distinct) < sampled.num:
        distinct[sampled.quantile(source.random())] = None
    return tuple(distinct)


def written(key: str, value: Any) -> Any:
    """Return a value of the field ``key`` as in a task file: mapping fields as mappings, other tuples as lists."""
    if key in (*MAPPING_FIELDS, MIXTURE_WEIGHTS) and isinstance(value, tuple):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One field and the values it takes, in the order in which they were written."""

    key: str
    values: tuple[Any, ...] | Sampled

    def __len__(self) -> int:
        return self.values.num or _OPEN if isinstance(self.values, Sampled) else len(self.values)

    @property
    def num_distinct(self) -> int:
        """Number of different values, at most :data:`MAX_JOBS`."""
        return self.values.num_distinct if isinstance(self.values, Sampled) else len(self.values)

    def draw(self, seed: int) -> tuple[Any, ...]:
        return self.values.draw(self.key, seed) if isinstance(self.values, Sampled) else self.values

    def to_dict(self) -> dict[str, Any]:
        if isinstance(self.values, Sampled):
            return {self.key: self.values.to_dict()}
        return {self.key: [written(self.key, value) for value in self.values]}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """A grid over groups of axes; the axes of a group vary together.

    Attributes:
        groups: Groups of axes: a single field is a group of one axis, a ``paired`` mapping a group of several. The last
            group varies fastest.
        paired: Indices of the groups that were written under ``paired``.
        is_auto: Whether the ranges will be replaced when the base model is known.
    """

    groups: tuple[tuple[Axis, ...], ...] = ()
    paired: frozenset[int] = frozenset()
    is_auto: bool = False

    @classmethod
    def parse(cls, given: object, method: Method | None = None) -> SearchSpace:
        """Read and check ``search_space``.

        A scalar is one value, a list is a grid, ``{min, max, log, num}`` is sampled. ``mixture_weights`` is a list of
        mappings, or a mapping of names to lists, whose combinations are all tried. ``paired`` is a mapping of equally
        long lists (or sampled ranges), or a list of such mappings.

        Args:
            method: Method whose settings may vary as well as the fields of every job; None is ``sft``, which has none.

        Raises:
            SpecError: A job cannot have a value, a list is empty or has repeats, lists under ``paired`` have different
                lengths, or there are more than :data:`MAX_JOBS` jobs.
            UnknownKeyError, ConflictingKeysError, UnsupportedError: See :func:`alto.spec.keys.canonical_keys`.
        """
        method = find_method("sft") if method is None else method
        fields = method.canonical(_mapping(given, "search_space"), (*JOB_FIELDS, _PAIRED), "search_space")
        groups: list[tuple[Axis, ...]] = []
        paired: set[int] = set()
        for key, value in fields.items():
            if key == _PAIRED:
                mappings = value if isinstance(value, list | tuple) else [value]
                pairings = [
                    _pairing(mapping, f"search_space.{_PAIRED}[{index}]", method)
                    for index, mapping in enumerate(mappings)
                ]
                paired.update(range(len(groups), len(groups) + len(pairings)))
                groups.extend(pairings)
            else:
                groups.append((_axis(key, value, f"search_space.{key}", method),))
        space = cls(groups=tuple(groups), paired=frozenset(paired))
        repeated = next((key for key in space.keys if space.keys.count(key) > 1), None)
        if repeated is not None:
            raise ConflictingKeysError(
                f"search_space sets {repeated!r} in two places, inside and outside of 'paired' or in two pairings; "
                f"expected one. Remove one of them."
            )
        if len(space) > MAX_JOBS:
            raise SpecError(
                f"search_space should expand to at most {MAX_JOBS} jobs, found {len(space)}. "
                f"Shorten some lists, or sample with {{min, max, num}}."
            )
        return space

    @property
    def keys(self) -> tuple[str, ...]:
        """Canonical names of all fields that are set here."""
        return tuple(axis.key for group in self.groups for axis in group)

    @property
    def varied(self) -> tuple[str, ...]:
        """Canonical names of the fields that take more than one value."""
        return tuple(axis.key for group in self.groups for axis in group if len(axis) > 1)

    def __len__(self) -> int:
        """Return the number of configurations without expanding them."""
        return math.prod(len(group[0]) for group in self.groups)

    def expand(self, seed: int) -> Iterator[dict[str, Any]]:
        """Yield every configuration, canonical names to values as written; ``seed`` decides the sampled values."""
        columns = []
        for group in self.groups:
            drawn = [[(axis.key, value) for value in axis.draw(seed)] for axis in group]
            columns.append(list(zip(*drawn, strict=True)))
        for row in itertools.product(*columns):
            yield dict(itertools.chain.from_iterable(row))

    def extremes(self, seed: int) -> Iterator[dict[str, Any]]:
        """Yield the combinations of all listed values and both ends of every range, at most :data:`MAX_JOBS`.

        ``seed`` decides the sampled values of pairings.
        """
        columns = [
            [((group[0].key, end),) for end in (group[0].values.min, group[0].values.max)]
            if len(group) == 1 and isinstance(group[0].values, Sampled)
            else list(zip(*([(axis.key, value) for value in axis.draw(seed)] for axis in group), strict=True))
            for group in self.groups
        ]
        for row in itertools.islice(itertools.product(*columns), MAX_JOBS):
            yield dict(itertools.chain.from_iterable(row))

    @property
    def num_distinct(self) -> int:
        """Number of different configurations, at most :data:`MAX_JOBS`."""
        return min(MAX_JOBS, math.prod(_num_distinct(group) for group in self.groups))

    def sample(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Draw ``count`` different configurations in the form of :meth:`expand`.

        Each value, or each position in a pairing, is drawn uniformly (from a range, by its distribution). A larger
        ``count`` only adds configurations after the same first ones.

        Raises:
            SpecError: ``count`` is above :attr:`num_distinct`, or too few different configurations were drawn.
        """
        if count > self.num_distinct:
            raise SpecError(
                f"search_space should have {count} different configurations to draw, found {self.num_distinct}. Add "
                "values to it, or draw fewer."
            )
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        number = 0
        while len(found) < count:
            source = random.Random(f"{seed}/search/{number}")
            drawn = self.at([source.random() for _ in self.groups], seed)
            found.setdefault(tuple(drawn.values()), drawn)
            number += 1
            if number > _MOST_DRAWS * count:
                raise SpecError(
                    f"search_space should have {count} different configurations to draw, found {len(found)} in "
                    f"{number} draws. Widen its ranges, or draw fewer."
                )
        return list(found.values())

    def at(self, fractions: Sequence[float], seed: int) -> dict[str, Any]:
        """Return the configuration at a fraction in [0, 1) of each group; ``seed`` decides the values of pairings."""
        values = {}
        for group, fraction in zip(self.groups, fractions, strict=True):
            for axis in group:
                if len(group) == 1 and isinstance(axis.values, Sampled):
                    values[axis.key] = axis.values.quantile(fraction)
                else:
                    values[axis.key] = axis.draw(seed)[int(fraction * len(axis))]
        return values

    @property
    def open_ranges(self) -> tuple[str, ...]:
        """Fields with a range that has no ``num``; with such a field there is no grid."""
        axes = (axis for group in self.groups for axis in group)
        return tuple(axis.key for axis in axes if isinstance(axis.values, Sampled) and axis.values.num is None)

    def to_dict(self) -> dict[str, Any]:
        """Return the canonical form, which :meth:`parse` reads back to an equal object; scalars become lists of one."""
        result: dict[str, Any] = {}
        for index, group in enumerate(self.groups):
            fields = {key: value for axis in group for key, value in axis.to_dict().items()}
            if index in self.paired:
                result.setdefault(_PAIRED, []).append(fields)
            else:
                result.update(fields)
        return result


def _num_distinct(group: tuple[Axis, ...]) -> int:
    """Return the number of different values of a group, at most :data:`MAX_JOBS`; paired lists may have repeats."""
    if len(group) == 1:
        return group[0].num_distinct
    are_lists = not any(isinstance(axis.values, Sampled) for axis in group)
    return len(set(zip(*(axis.draw(0) for axis in group), strict=True))) if are_lists else len(group[0])


def _mapping(value: object, path: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(
            f"{path} should map fields to their values, found {quoted(value)} ({type(value).__name__}). "
            f"For example: {{learning_rate: [1.0e-4, 2.0e-4]}}."
        )
    return value


def _pairing(value: object, path: str, method: Method) -> tuple[Axis, ...]:
    given = method.canonical(_mapping(value, path), JOB_FIELDS, path)
    fields = {key: _values(key, values, f"{path}.{key}", method) for key, values in given.items()}
    if not fields:
        raise SpecError(f"{path} should tie two or more fields together, found none. Name them, or remove 'paired'.")
    for key, values in fields.items():
        if not isinstance(values, list | tuple | Mapping):
            raise SpecError(
                f"{path}.{key} should be a list as long as the lists it is paired with, found {quoted(values)}. Move "
                "a fixed value out of 'paired'."
            )
    axes = tuple(_axis(key, values, f"{path}.{key}", method, may_repeat=True) for key, values in fields.items())
    if len({len(axis) for axis in axes}) > 1:
        found = ", ".join(f"{axis.key} with {len(axis)}" for axis in axes)
        raise SpecError(
            f"{path} should hold the same number of values for every field, found {found}. Add or remove values."
        )
    return axes


def _values(key: str, value: object, path: str, method: Method) -> Any:
    """Convert a distribution of another package to a list or range; a mapping field's mapping is a value itself."""
    if isinstance(value, Mapping) and key in (*MAPPING_FIELDS, MIXTURE_WEIGHTS):
        return value
    return as_values(value, path, is_integer=int in _kinds(key, method) or key in _NUMBERS_THAT_MAY_BE_WHOLE)


def _axis(key: str, value: object, path: str, method: Method, *, may_repeat: bool = False) -> Axis:
    value = _values(key, value, path, method)
    if key == MIXTURE_WEIGHTS and isinstance(value, Mapping):
        value = _weights_grid(value, path)
    is_mapping = key in MAPPING_FIELDS
    if isinstance(value, Mapping) and not is_mapping:
        return Axis(key=key, values=_sampled(key, value, path, method))
    given = value if isinstance(value, list | tuple) else [value]
    # A mapping becomes pairs, which can be hashed.
    values = plain([tuple(item.items()) if isinstance(item, Mapping) and is_mapping else item for item in given])
    if not 1 <= len(values) <= MAX_JOBS:
        raise SpecError(
            f"{path} should hold from 1 to {MAX_JOBS} values, found {len(values)}. "
            f"{'Remove some.' if values else 'Add one, or remove the key.'}"
        )
    for index, item in enumerate(values):
        _check_value(key, item, f"{path}[{index}]" if isinstance(value, list | tuple) else path, method)
    repeated = [item for item, count in Counter(values).items() if count > 1]
    if repeated and not may_repeat:
        raise SpecError(f"{path} should hold different values, found {quoted(repeated[0])} twice. Remove one.")
    return Axis(key=key, values=values)


def _weights_grid(value: Mapping[Any, Any], path: str) -> list[dict[Any, Any]]:
    """Return all combinations of the sources' weights; each source has one weight or a list of them."""
    lists = [item if isinstance(item, list | tuple) else [item] for item in value.values()]
    if (found := math.prod(map(len, lists))) > MAX_JOBS:
        raise SpecError(
            f"{path} should have at most {MAX_JOBS} combinations of weights, found {found}. Shorten some lists."
        )
    return [dict(zip(value, weights, strict=True)) for weights in itertools.product(*lists)]


def _check_value(key: str, value: object, path: str, method: Method) -> None:
    try:
        if key in method.fields:
            method.check_setting(key, value)
        else:
            # Checked alone: whether values fit together can only be checked for a whole job.
            error = JobConfig.error_of(key, value)
            if error is not None:
                raise error
    except SpecError as error:
        raise SpecError(f"In {path}: {error}") from None


def _kinds(key: str, method: Method) -> tuple[Any, ...]:
    """Return the types of a field's values."""
    annotation = {**JobConfig.model_fields, **method.fields}[key].annotation
    return get_args(annotation) or (annotation,)


def _sampled(key: str, given: Mapping[Any, Any], path: str, method: Method) -> Sampled:
    kinds = _kinds(key, method)
    if not {int, float} & set(kinds):
        raise SpecError(
            f"{path} is not a number and cannot be sampled; expected a value or a list, found {quoted(dict(given))}."
        )
    form = canonical_keys(given, fields=_SAMPLED_FIELDS, aliases={}, where=path)
    missing = [name for name in ("min", "max") if name not in form]
    if missing:
        raise SpecError(
            f"{path} should have 'min' and 'max' to be sampled, found no {' and no '.join(map(repr, missing))}. "
            f"For example: {{min: 1.0e-5, max: 1.0e-3, log: true, num: 8}}."
        )
    low, high, num, log = form["min"], form["max"], form.get("num"), form.get("log", False)
    for name in ("min", "max"):
        _check_value(key, form[name], f"{path}.{name}", method)
        if not isinstance(form[name], int | float):
            raise SpecError(f"{path}.{name} should be a number, found {quoted(form[name])}. Use a number.")
    if not isinstance(log, bool):
        raise SpecError(f"{path}.log should be true or false, found {quoted(log)}. Use one of them.")
    if num is not None and (isinstance(num, bool) or not isinstance(num, int) or not 1 <= num <= MAX_JOBS):
        raise SpecError(
            f"{path}.num should be a whole number from 1 to {MAX_JOBS}, found {quoted(num)}. Choose one in that range."
        )
    if not low < high:
        raise SpecError(
            f"{path} should have min < max, found min={quoted(low)} and max={quoted(high)}. Exchange or correct them."
        )
    if log and low <= 0:
        raise SpecError(
            f"{path} needs min > 0 to be sampled in the logarithm, found {quoted(low)}. Raise it, or drop 'log'."
        )
    # ``warmup_steps`` is a number of steps if both ends are whole numbers, else a share.
    is_integer = int in kinds or (key in _NUMBERS_THAT_MAY_BE_WHOLE and isinstance(low, int) and isinstance(high, int))
    if is_integer and num is not None and num > high - low + 1:
        raise SpecError(
            f"{path} should draw at most as many values as there are, {high - low + 1} from {low} to {high}, "
            f"found num={num}. Lower 'num'."
        )
    return Sampled(
        min=int(low) if is_integer else float(low),
        max=int(high) if is_integer else float(high),
        log=log,
        num=num,
        is_integer=is_integer,
    )
