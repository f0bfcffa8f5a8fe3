"""Hooks of the documentation's site (``mkdocs.yml``): pages from outside of ``docs/``, links as on GitHub, pictures.

``make site`` writes the site, and fails if a link leads nowhere.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent

LINK = re.compile(r"(?<=\]\()([^)#\s]+)")
"""The path in a Markdown link, without its anchor."""

FLOWCHART = re.compile(r"^```mermaid\nflowchart TD\n(.*?)^```", re.M | re.S)

COLUMN_PX, ROW_PX, BOX_PX = 118, 72, (104, 28)
"""Distances between the boxes of a picture, and their width and height."""


def outside_pages() -> dict[str, str]:
    """Return the path in the site of every page outside of ``docs/``, by its path in the repository."""
    pages = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
    for recipe in sorted((ROOT / "examples" / "recipes").glob("*/README.md")):
        pages[recipe.relative_to(ROOT).as_posix()] = f"recipes/{recipe.parent.name}.md"
    return pages


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages outside of ``docs/``."""
    for source, place in outside_pages().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead where they lead on GitHub, and draw Mermaid's flowcharts."""
    source = Path(str(page.file.abs_src_path)).relative_to(ROOT)
    places = outside_pages()

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(source.parent.as_posix(), found[1]))
        if "://" in found[1] or not (ROOT / target).is_file():
            return found[1]  # mkdocs reports it if it is no address
        place = places.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(place) is None:  # a file of the repository, which the site gets too
            files.append(File.generated(config, place, abs_src_path=str(ROOT / target)))
        return posixpath.relpath(place, posixpath.dirname(page.file.src_uri))

    return FLOWCHART.sub(lambda chart: _drawn(re.findall(r"(\w+) --> (\w+)", chart[1])), LINK.sub(link, markdown))


def _drawn(arrows: Sequence[tuple[str, str]]) -> str:
    """Return a flowchart as SVG, in the colours of the page: every box is below all boxes with an arrow to it."""
    rows = _rows(arrows)
    width, height = COLUMN_PX * max(map(len, rows)), ROW_PX * len(rows)
    box_width, box_height = BOX_PX
    middle = {
        name: (width * (column + 0.5) / len(names), ROW_PX * (number + 0.5))
        for number, names in enumerate(rows)
        for column, name in enumerate(names)
    }

    def parts() -> Iterator[str]:
        for start, end in arrows:
            (x, top), (to_x, bottom) = middle[start], middle[end]
            top, bottom = top + box_height / 2, bottom - box_height / 2 - 6
            bend = ROW_PX / 2
            yield f'<path d="M{x:.0f},{top:.0f} C{x:.0f},{top + bend:.0f} {to_x:.0f},{bottom - bend:.0f} '
            yield f'{to_x:.0f},{bottom:.0f}" marker-end="url(#tip)"/>'
        for name, (x, y) in middle.items():
            yield f'<rect x="{x - box_width / 2:.0f}" y="{y - box_height / 2:.0f}" rx="4" '
            yield f'width="{box_width}" height="{box_height}"/><text x="{x:.0f}" y="{y + 4:.0f}">{name}</text>'

    tip = '<marker id="tip" viewBox="0 0 6 6" refX="1" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    tip += '<path d="M0,0 6,3 0,6z"/></marker>'
    return (
        f'<figure class="flowchart"><svg role="img" viewBox="0 0 {width} {height}"><defs>{tip}</defs>'
        f"{''.join(parts())}</svg></figure>"
    )


def _rows(arrows: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Return the boxes of every row; inside a row, they are in the order of the boxes above them, so that few arrows
    cross."""
    above: dict[str, list[str]] = {}
    for start, end in arrows:
        above.setdefault(start, [])
        above.setdefault(end, []).append(start)
    row: dict[str, int] = {}
    for name in TopologicalSorter(above).static_order():
        row[name] = max((row[start] + 1 for start in above[name]), default=0)
    rows: list[list[str]] = []
    share: dict[str, float] = {}
    for number in range(max(row.values()) + 1):
        names = sorted(name for name in row if row[name] == number)
        names.sort(key=lambda name: sum(share[start] for start in above[name]) / max(1, len(above[name])))
        share |= {name: (column + 0.5) / len(names) for column, name in enumerate(names)}
        rows.append(names)
    return rows
