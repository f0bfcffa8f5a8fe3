"""Docstrings of the source begin as CONTRIBUTING.md asks for, and the check of that bites."""

from __future__ import annotations

import pytest

from tools import check_docstrings
from tools.check_docstrings import complaints


def test_the_source_has_no_complaints(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_docstrings.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""What makes it so."""', '1: expected a docstring that does not begin with "What"'),
        ('class A:\n    """Of all its files."""', '2: expected a docstring that does not begin with "Of"'),
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
        "def f():\n    pass",
    ],
)
def test_plain_sentences_pass(text: str) -> None:
    assert list(complaints(text)) == []
