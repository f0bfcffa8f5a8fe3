"""Write the picture of packages in ``docs/architecture.md`` from the imports in the source.

python -m tools.make_package_graph
"""

from __future__ import annotations

import re
from pathlib import Path

import grimp
import networkx

PAGE = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
LEFT_OUT = {"", "__main__", "base", "errors", "records", "spec", "version"}
"""``alto`` itself, how it is started, and what all packages may import."""


def page() -> str:
    """Return the page with its picture made anew."""
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(r"```mermaid\n.*?```", lambda _: f"```mermaid\n{picture()}```", text, flags=re.DOTALL)


def picture() -> str:
    """Return a Mermaid flowchart: an arrow goes from a package to one it imports.

    An import that a chain of other arrows already shows has no arrow of its own.
    """
    modules = grimp.build_graph("alto", cache_dir=None)
    packages = networkx.DiGraph()
    for importer in modules.modules:
        for imported in modules.find_modules_directly_imported_by(importer):
            if (edge := (_package(importer), _package(imported))) and edge[0] != edge[1]:
                packages.add_edge(*edge)
    packages.remove_nodes_from(LEFT_OUT)
    arrows = networkx.transitive_reduction(packages).edges
    return "flowchart TD\n" + "".join(f"    {importer} --> {imported}\n" for importer, imported in sorted(arrows))


def _package(module: str) -> str:
    """Return the name of the package below ``alto`` that holds ``module``; empty for ``alto`` itself."""
    return module.removeprefix("alto").removeprefix(".").split(".")[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
