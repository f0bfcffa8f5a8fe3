"""The picture of packages shows the imports of the source."""

from __future__ import annotations

import pytest

pytest.importorskip("grimp", reason="the picture needs the dev extra: pip install -e '.[dev]'")

from tools import make_package_graph as generator


def test_the_picture_is_made_from_the_imports_as_they_are() -> None:
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run python -m tools.make_package_graph"


def test_an_arrow_goes_from_the_importer_and_chains_need_no_second_arrow() -> None:
    arrows = generator.picture().splitlines()[1:]
    assert "    cli --> service" in arrows
    assert "    lora --> kernels" in arrows
    assert "    engine --> kernels" not in arrows
