"""Retired words are gone, and docstrings begin as CONTRIBUTING.md asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import check_docstrings
from tools.check_docstrings import complaints

ROOT = Path(__file__).parents[2]

RETIRED = {
    "of the sweep decided": "% done",
    "decided_share": "fraction_done",
    "no room for": "hidden columns",
    "no space for: ": "hidden columns",
    "next to nothing": "selection would happen after one step",
    "too little training; move": "selection would happen after one step",
    "move the rungs": "use later rungs",
    "error of the law": "memory estimate error",
    "error of the model": "memory estimate error",
    '} came"': "submitted",
    "early steps wide": "log x-axis",
    "how dearly": "strength of the KL penalty",
    "once more stops at once": "Press Ctrl-C again to stop at once",
    "teach nothing": "have no advantage; all have the same reward",
    "sign of life": "heartbeat",
    "take the place of": "are used instead of",
    "takes the place of": "is used instead of",
    "take their place": "are used instead",
    "in the place of": "instead of",
    "equally many": "the same number of",
    "whatever the ": "for any",
    "all at once": "together, or at the same time",
    "rising order": "increasing order",
    "beside the loss": "other than the loss",
    "nothing in them is to be trained": "no trained token in them",
    "to a further task": "to another task",
    " shall ": "must, or is to",
    "; stored is": "it is stored as",
    "; stored are": "it is stored as",
    ", none of which": "a sentence of its own",
    ", some of which": "a sentence of its own",
    ", all of which": "a sentence of its own",
    ", each of which": "a sentence of its own",
    ", most of which": "a sentence of its own",
    "in small letters": "in lower case",
    "is that of TRL": "is the same as in TRL",
    "are those of TRL": "are the same as in TRL",
    "rising progress": "order of progress",
}
"""Retired phrases, each with its replacement."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield the texts that users read, and the code that writes them."""
    paths = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.*")]
    for path in [*paths, *(ROOT / "src" / "alto").rglob("*.py"), *(ROOT / "src" / "alto").rglob("*.jinja")]:
        if path.is_file():
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


@pytest.mark.parametrize("phrase", RETIRED)
def test_a_retired_phrase_is_gone(phrase: str) -> None:
    assert [name for name, text in texts() if phrase in text] == [], f"say: {RETIRED[phrase]}"


def test_there_are_texts_to_be_read() -> None:
    assert {"README.md", "docs/tutorial.md", "examples/preferences.yaml"} <= {name for name, _ in texts()}


def test_the_source_has_no_complaints(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_docstrings.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""What makes it so."""', '1: expected a docstring that does not begin with "What"'),
        ('class A:\n    """Of all its files."""', '2: expected a docstring that does not begin with "Of"'),
        ('def test_a():\n    """Of three jobs, two."""', '2: expected a docstring that does not begin with "Of"'),
        (
            '@pytest.fixture\ndef a():\n    """What a run leaves."""',
            '3: expected a docstring that does not begin with "What"',
        ),
        ('x = 1\n"""That of a job."""\n\nclass B:\n    y = 2\n    """As of x."""', 'begin with "As"'),
        ('def f():\n    """The sum."""', '2: expected a docstring that begins with a verb, found "The"'),
        ('def f(a):\n    """Add.\n\n    Args:\n        a: Of the sum.\n    """', "5: expected an entry that does not"),
    ],
)
def test_a_riddle_is_found(text: str, found: str) -> None:
    assert any(found in complaint for complaint in complaints(text))


@pytest.mark.parametrize(
    "text",
    [
        'def f(a):\n    """Return the sum.\n\n    Args:\n        a: The other number.\n    """',
        'class A:\n    """A job."""\n\n    @property\n    def b(self):\n        """The slot of the job."""',
        'class A:\n    x = 1\n    """The number."""',
        'def test_a():\n    """A job that has ended keeps its adapter."""',
        '@pytest.fixture(scope="module")\ndef a():\n    """The folder of a run."""',
        "def f():\n    pass",
    ],
)
def test_plain_sentences_pass(text: str) -> None:
    assert list(complaints(text)) == []
