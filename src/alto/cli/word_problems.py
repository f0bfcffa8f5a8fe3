"""Make the quickstart's data: short word problems whose answers show their arithmetic, in GSM8K's form.

    python examples/make_word_problems.py --output examples/data/word_problems

This writes ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl``, with one ``{"question": ..., "answer": ...}`` per
line. An answer has one line per step, ``3 * 12 = 36 eggs``, and ends with ``#### 36``. All splits have the same kinds
of problem; no two rows, in any split, are one kind of problem with the same numbers. The same seed and counts give the
same files.

``examples/make_word_problems.py`` is a link to this file, which needs only Python; ``alto demo`` imports it.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

SIZES = {"train": 400, "validation": 60, "test": 100}
"""Default numbers of rows of the splits."""

LARGEST_VALUE = 500
GIVE_UP_AFTER = 2000  # draws of one template in a row without a row that is new

NAMES = (
    *(("Ava", "she"), ("Ben", "he"), ("Carla", "she"), ("Dan", "he"), ("Emma", "she"), ("Finn", "he")),
    *(("Grace", "she"), ("Henry", "he"), ("Ida", "she"), ("Jack", "he"), ("Kate", "she"), ("Leo", "he")),
    *(("Mary", "she"), ("Noah", "he"), ("Olga", "she"), ("Paul", "he"), ("Rosa", "she"), ("Sam", "he")),
    *(("Tom", "he"), ("Uma", "she"), ("Vera", "she"), ("Will", "he"), ("Yara", "she"), ("Zeno", "he")),
)
THINGS = (
    *("apples", "books", "cards", "coins", "cups", "eggs", "flowers", "keys", "letters", "nuts", "oranges"),
    *("pears", "pens", "plums", "rings", "shells", "stamps", "stones", "toys"),
)
HOLDERS = ("bags", "baskets", "boxes", "cases", "drawers", "jars", "rows", "trays")

OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True, kw_only=True)
class Template:
    """One kind of problem.

    Attributes:
        question: Text with fields: a number's letter, or ``name``, ``friend``, ``he``, ``things``, ``holders``; a field
            in capitals begins with a capital letter.
        numbers: Smallest and largest value of every number in the question.
        steps: Arithmetic of a solution, one line per step; ``x``, ``y``, ``z`` are the results of the first steps.
        units: Unit of each step's result; may use the question's fields.
        formula: The answer computed directly from the question's numbers, independently of ``steps``, so that each
            checks the other.
    """

    question: str
    numbers: Mapping[str, tuple[int, int]]
    steps: tuple[str, ...]
    units: tuple[str, ...]
    formula: str


TEMPLATES = (
    Template(
        question="{name} has {a} {things}. {friend} gives {name} {b} more. How many {things} does {name} have now?",
        numbers={"a": (5, 90), "b": (3, 60)},
        steps=("a + b",),
        units=("{things}",),
        formula="a + b",
    ),
    Template(
        question="{name} had {a} {things} and lost {b} of them. How many {things} are left?",
        numbers={"a": (20, 99), "b": (3, 60)},
        steps=("a - b",),
        units=("{things}",),
        formula="a - b",
    ),
    Template(
        question="There are {a} {holders} with {b} {things} in each. How many {things} are there in all?",
        numbers={"a": (2, 25), "b": (3, 30)},
        steps=("a * b",),
        units=("{things}",),
        formula="a * b",
    ),
    Template(
        question="{name} puts {a} {things} into {b} {holders}, the same number in each. How many {things} are in one?",
        numbers={"a": (10, 300), "b": (2, 20)},
        steps=("a / b",),
        units=("{things}",),
        formula="a / b",
    ),
    Template(
        question="{name} has {a} {holders} with {b} {things} in each. {He} gives {c} {things} to {friend}. "
        "How many {things} are left?",
        numbers={"a": (2, 12), "b": (3, 15), "c": (2, 40)},
        steps=("a * b", "x - c"),
        units=("{things}", "{things}"),
        formula="a * b - c",
    ),
    Template(
        question="{name} buys {a} {things} for {b} dollars each and pays with {c} dollars. "
        "How many dollars does {he} get back?",
        numbers={"a": (2, 12), "b": (2, 12), "c": (10, 100)},
        steps=("a * b", "c - x"),
        units=("dollars", "dollars"),
        formula="c - a * b",
    ),
    Template(
        question="{name} reads {a} pages a day for {b} days. The book has {c} pages. How many pages are left to read?",
        numbers={"a": (4, 40), "b": (2, 14), "c": (50, 400)},
        steps=("a * b", "c - x"),
        units=("pages", "pages"),
        formula="c - b * a",
    ),
    Template(
        question="{name} has {a} {things}. {friend} has {b} times as many. How many {things} do they have together?",
        numbers={"a": (3, 60), "b": (2, 9)},
        steps=("a * b", "x + a"),
        units=("{things}", "{things}"),
        formula="a * (b + 1)",
    ),
    Template(
        question="{name} has {a} {things} and {friend} has {b} more than {name}. "
        "How many {things} do they have together?",
        numbers={"a": (4, 80), "b": (2, 40)},
        steps=("a + b", "a + x"),
        units=("{things}", "{things}"),
        formula="2 * a + b",
    ),
    Template(
        question="{name} finds {a} {things} and {friend} finds {b}. They share them equally. How many does each get?",
        numbers={"a": (3, 60), "b": (3, 60)},
        steps=("a + b", "x / 2"),
        units=("{things}", "{things}"),
        formula="(a + b) / 2",
    ),
    Template(
        question="{name} has {a} {things}. {He} gives half of them to {friend} and then finds {b} more. "
        "How many {things} does {he} have now?",
        numbers={"a": (6, 120), "b": (2, 60)},
        steps=("a / 2", "x + b"),
        units=("{things}", "{things}"),
        formula="(a + 2 * b) / 2",
    ),
    Template(
        question="A train goes {a} miles an hour for {b} hours, then {c} miles more. How many miles does it go?",
        numbers={"a": (20, 70), "b": (2, 6), "c": (5, 60)},
        steps=("a * b", "x + c"),
        units=("miles", "miles"),
        formula="c + a * b",
    ),
    Template(
        question="{name} earns {a} dollars an hour. {He} works {b} hours on Monday and {c} hours on Friday. "
        "How many dollars does {he} earn?",
        numbers={"a": (6, 25), "b": (2, 9), "c": (2, 9)},
        steps=("b + c", "x * a"),
        units=("hours", "dollars"),
        formula="a * b + a * c",
    ),
    Template(
        question="{name} wants a bike that costs {a} dollars. {He} has {b} dollars and saves {c} dollars a week. "
        "How many weeks must {he} save?",
        numbers={"a": (40, 250), "b": (5, 100), "c": (2, 20)},
        steps=("a - b", "x / c"),
        units=("dollars", "weeks"),
        formula="(a - b) / c",
    ),
    Template(
        question="{name} fills {a} boxes with {b} eggs each and has {c} eggs left over. "
        "{He} sells {d} eggs. How many eggs remain?",
        numbers={"a": (2, 12), "b": (4, 12), "c": (1, 9), "d": (3, 60)},
        steps=("a * b", "x + c", "y - d"),
        units=("eggs", "eggs", "eggs"),
        formula="a * b + c - d",
    ),
    Template(
        question="{name} bakes {a} trays of {b} rolls, eats {c} and packs the rest in bags of {d}. "
        "How many bags are full?",
        numbers={"a": (2, 10), "b": (4, 12), "c": (1, 9), "d": (2, 8)},
        steps=("a * b", "x - c", "y / d"),
        units=("rolls", "rolls", "bags"),
        formula="(a * b - c) / d",
    ),
    Template(
        question="A shop sells pens for {a} dollars and books for {b} dollars. {name} buys {c} pens and {d} books. "
        "How many dollars does {he} pay?",
        numbers={"a": (2, 6), "b": (5, 20), "c": (2, 9), "d": (2, 6)},
        steps=("a * c", "b * d", "x + y"),
        units=("dollars", "dollars", "dollars"),
        formula="c * a + d * b",
    ),
)


def evaluate(expression: str, values: Mapping[str, int]) -> Fraction:
    """Return the exact value of an expression of whole numbers, letters from ``values`` and ``+ - * /``.

    Raises:
        ValueError: The expression contains anything else.
        ZeroDivisionError: It divides by zero.
    """

    def value_of(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)):
                return Fraction(number)
            case ast.Name(id=letter):
                return Fraction(values[letter])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value_of(left), value_of(right))
        raise ValueError(f"expected whole numbers, letters and + - * /, found {ast.unparse(node)!r}")

    return value_of(ast.parse(expression, mode="eval").body)


def solve(template: Template, numbers: Mapping[str, int]) -> list[tuple[str, int]] | None:
    """Return every step as shown and its value, or None if a value is not a whole number in 1..LARGEST_VALUE."""
    values = dict(numbers)
    shown = []
    for letter, step in zip("xyz", template.steps, strict=False):
        value = evaluate(step, values)
        if value.denominator != 1 or not 1 <= value <= LARGEST_VALUE:
            return None
        text = re.sub(r"[a-z]", lambda match: str(values[match.group()]), step)
        values[letter] = int(value)
        shown.append((text, int(value)))
    return shown


def write_row(template: Template, numbers: Mapping[str, int], rng: random.Random) -> dict[str, str] | None:
    """Return the problem with these numbers, or None if :func:`solve` returns None."""
    steps = solve(template, numbers)
    if steps is None:
        return None
    answer = steps[-1][1]
    assert evaluate(template.formula, numbers) == answer, (template, numbers)

    (name, pronoun), (friend, _) = rng.sample(NAMES, 2)
    fields: dict[str, str | int] = {"name": name, "friend": friend, "he": pronoun, "He": pronoun.capitalize()}
    fields |= {"things": rng.choice(THINGS), "holders": rng.choice(HOLDERS), **numbers}
    lines = [
        f"{text} = {value} {unit.format_map(fields)}" for (text, value), unit in zip(steps, template.units, strict=True)
    ]
    return {"question": template.question.format_map(fields), "answer": "\n".join([*lines, f"#### {answer}"])}


def make_rows(count: int, seed: int) -> list[dict[str, str]]:
    """Return ``count`` problems, with the templates in equal parts and in random order.

    Raises:
        ValueError: There are not that many different problems.
    """
    rng = random.Random(seed)
    open_templates = list(range(len(TEMPLATES)))
    used: set[tuple[int, ...]] = set()
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        if not open_templates:
            raise ValueError(f"expected at most {len(rows)} rows in all, found {count}; ask for fewer")
        for index in open_templates[:]:
            row = draw_row(index, used, rng)
            if row is None:
                open_templates.remove(index)
            else:
                rows.append(row)
    rows = rows[:count]
    rng.shuffle(rows)
    return rows


def draw_row(index: int, used: set[tuple[int, ...]], rng: random.Random) -> dict[str, str] | None:
    """Return a problem of template ``index`` with numbers that are not in ``used``, and add them; None if none is
    found."""
    template = TEMPLATES[index]
    for _ in range(GIVE_UP_AFTER):
        numbers = {letter: rng.randint(low, high) for letter, (low, high) in template.numbers.items()}
        key = (index, *numbers.values())
        if key in used:
            continue
        row = write_row(template, numbers, rng)
        if row is not None:
            used.add(key)
            return row
    return None


def write_splits(
    output: Path, sizes: Mapping[str, int], seed: int, make: Callable[[int, int], list[dict[str, str]]] = make_rows
) -> None:
    """Cut one list of rows into the splits, and write a file for each.

    The first split is written last, so that its presence shows that all are there.

    Args:
        make: Returns a number of rows for a seed.
    """
    rows = make(sum(sizes.values()), seed)
    output.mkdir(parents=True, exist_ok=True)
    ends = accumulate(sizes.values())
    for (split, size), end in reversed(list(zip(sizes.items(), ends, strict=True))):
        lines = "".join(json.dumps(row) + "\n" for row in rows[end - size : end])
        (output / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def row_count(text: str) -> int:
    """Parse a number of rows from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of rows, at least 1, found {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make short word problems with checkable answers.")
    default_output = Path(__file__).parent / "data" / "word_problems"
    parser.add_argument("--output", type=Path, default=default_output, help="folder for the three files")
    parser.add_argument("--seed", type=int, default=0)
    for split, size in SIZES.items():
        parser.add_argument(f"--{split}", type=row_count, default=size, metavar="ROWS")
    options = parser.parse_args(arguments)
    sizes = {split: getattr(options, split) for split in SIZES}
    try:
        write_splits(options.output, sizes, options.seed)
    except ValueError as error:
        parser.error(str(error))
    counts = ", ".join(f"{size} {split}" for split, size in sizes.items())
    print(f"Wrote {counts} rows to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
