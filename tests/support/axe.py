"""WCAG's rules, levels A and AA, checked on pages in a browser by axe-core."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["SCHEMES", "WIDTHS", "violations"]

RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa")
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")


def violations(page: Any) -> list[str]:
    """Return what breaks a rule on a page of Playwright, at every width and in both colour schemes."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the extra dev is not installed").Axe()
    found = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(100)  # until figures are drawn in the other colours
            results = axe.run(page, options={"runOnly": list(RULES), "resultTypes": ["violations"]}).response
            found += [
                f"{width} px, {scheme}: {broken['id']}: {node['html']:.200}: {node['failureSummary']}"
                for broken in results["violations"]
                for node in broken["nodes"]
            ]
    return found
