"""The site: links as on GitHub lead to pages and files, and one that leads nowhere stops the build.

``make lint`` builds the whole site in the same way.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="needs the docs extra: pip install 'alto-lora[docs]'")

ROOT = Path(__file__).resolve().parents[2]

PAGES = {
    "README.md": "# Home\n\n[a](docs/a.md#one-two), [recipe](examples/recipes/x/README.md), [web](https://example.org)\n",
    "CONTRIBUTING.md": "# Contributing\n",
    "CHANGELOG.md": "# Changes\n",
    "docs/a.md": "# A\n\n## One two\n\n[b](b.md), [file](../examples/x.yaml), [home](../README.md#home)\n",
    "docs/b.md": "# B\n\n```mermaid\nflowchart TD\n    c --> d\n    d --> e\n    c --> e\n```\n",
    "examples/recipes/x/README.md": "# X\n\n[a](../../../docs/a.md), [script](run.py)\n",
    "examples/recipes/x/run.py": "print()\n",
    "examples/x.yaml": "model: alto-tiny\n",
}


DEAD = [
    ("docs/a.md", "dead-1.md"),
    ("docs/a.md", "b.md#dead-2"),
    ("docs/a.md", "#dead-3"),
    ("docs/a.md", "../examples/dead-4.yaml"),
    ("docs/a.md", "../README.md#dead-5"),
    ("README.md", "docs/dead-6.md"),
    ("examples/recipes/x/README.md", "dead-7.py"),
]
"""Links that lead nowhere, and the pages that get them."""


def make(folder: Path) -> None:
    """Write a small project with this project's settings and hooks, but without its navigation."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[0]
    for name, text in {**PAGES, "mkdocs.yml": settings}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for name in ("tools/site.py", "docs/site.css"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def build(folder: Path) -> str:
    """Build the site as ``make site`` does, and return the warnings; empty if the build succeeds."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    warnings = "".join(line for line in done.stderr.splitlines() if line.startswith(("WARNING", "ERROR")))
    assert (done.returncode == 0) is (warnings == ""), done.stderr
    return warnings


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small project whose site is built."""
    folder = tmp_path_factory.mktemp("site")
    make(folder)
    assert build(folder) == ""
    return folder


def read(folder: Path, page: str) -> str:
    return (folder / "site" / page / "index.html").read_text(encoding="utf-8")


def links(text: str) -> list[str]:
    """Return the addresses in the text of a page, except those in the page itself."""
    article = text[text.index("<article") : text.index("</article>")]
    return [link for link in re.findall(r'<a href="([^"]*)"', article) if not link.startswith("#")]


def test_links_lead_where_they_lead_on_github(site: Path) -> None:
    assert links(read(site, ".")) == ["a/#one-two", "recipes/x/", "https://example.org"]
    assert links(read(site, "a")) == ["../b/", "../examples/x.yaml", "../#home"]
    assert links(read(site, "recipes/x")) == ["../../a/", "../../examples/recipes/x/run.py"]
    for file in ("examples/x.yaml", "examples/recipes/x/run.py"):
        assert (site / "site" / file).read_bytes() == (site / file).read_bytes()


def test_every_dead_link_is_named(tmp_path: Path) -> None:
    make(tmp_path)
    for page, link in DEAD:
        with (tmp_path / page).open("a", encoding="utf-8") as file:
            file.write(f"\n[dead]({link})\n")
    assert set(re.findall(r"dead-\d", build(tmp_path))) == {f"dead-{number}" for number in range(1, 8)}


def test_a_flowchart_is_a_picture_with_every_box_below_those_that_point_to_it(site: Path) -> None:
    text = read(site, "b")
    heights = {name: int(y) for y, name in re.findall(r'<text x="\d+" y="(\d+)">(\w)</text>', text)}
    assert sorted(heights, key=lambda name: heights[name]) == ["c", "d", "e"]
    assert len(set(heights.values())) == text.count("marker-end") == 3


def test_a_page_loads_nothing_from_other_servers(site: Path) -> None:
    tags = re.findall(r"<(?:script|img|iframe|link)\b[^>]*>", read(site, "a"))
    loaded = [address for tag in tags for address in re.findall(r'(?:src|href)="([^"]*)"', tag)]
    assert any(address.endswith(".css") for address in loaded)
    assert [address for address in loaded if re.match(r"(https?:)?//", address)] == []
