"""The notebooks of examples/ run from top to bottom, print what their text says, and are stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_sweep", "preferences"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    """Remove the outputs of a run with ``jupyter nbconvert --clear-output --inplace``."""
    notebook = read(path)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {}), cell["id"]
            compile("".join(cell["source"]), cell["id"], "exec")
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}
    assert path.read_text(encoding="utf-8") == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


@pytest.fixture(
    scope="module",
    params=[NOTEBOOKS[0], *(pytest.param(path, marks=pytest.mark.slow("minutes")) for path in NOTEBOOKS[1:])],
    ids=lambda path: path.stem,
)
def executed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A notebook with its outputs, run in an empty folder."""
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run with the extra 'dev'")
    pytest.importorskip("ipykernel", reason="notebooks are run with the extra 'dev'")
    import nbformat

    folder = tmp_path_factory.mktemp(request.param.stem)
    notebook = nbformat.read(request.param, as_version=4)
    nbformat.validate(notebook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALTO_CACHE", str(folder / "cache"))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("PLOTLY_RENDERER", "plotly_mimetype")
        client = nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        client.execute()
    return dict(notebook)


def outputs(notebook: dict[str, Any], cell: str) -> list[Any]:
    [found] = [each["outputs"] for each in notebook["cells"] if each["id"] == cell]
    return list(found)


def data(notebook: dict[str, Any], cell: str) -> dict[str, Any]:
    """Return the value of a cell's last line, by media type."""
    shown = ("execute_result", "display_data")
    [found] = [output["data"] for output in outputs(notebook, cell) if output["output_type"] in shown]
    return dict(found)


def printed(notebook: dict[str, Any], cell: str) -> str:
    return "".join(each["text"] for each in outputs(notebook, cell) if each["output_type"] == "stream")


@pytest.mark.slow("queues")
@pytest.mark.filterwarnings("ignore")  # warnings of Jupyter's client
class TestANotebook:
    def test_shows_progress_and_result(self, executed: dict[str, Any]) -> None:
        tune = next(cell["id"] for cell in executed["cells"] if "engine.tune(" in cell["source"])
        lines = printed(executed, tune)
        assert "early exit alto" in lines
        assert "rung at" in lines
        shown = data(executed, "show-result")
        assert '<div class="alto-result"' in shown["text/html"]
        assert "polyline" in shown["text/html"]

    def test_shows_jobs_as_a_table_and_curves_as_a_figure(self, executed: dict[str, Any]) -> None:
        assert "<table" in data(executed, "jobs")["text/html"]
        plot = next(cell["id"] for cell in executed["cells"] if cell["id"].startswith("plot-"))
        figure = data(executed, plot)["application/vnd.plotly.v1+json"]
        assert len(figure["data"]) > 1
        assert all(len(trace["x"]) for trace in figure["data"])

    def test_warns_of_nothing(self, executed: dict[str, Any]) -> None:
        """tqdm's warning where ipywidgets is not installed is the exception."""
        errors = [
            (cell["id"], output["text"])
            for cell in executed["cells"]
            for output in cell.get("outputs", ())
            if output["output_type"] == "stream" and output["name"] == "stderr" and "TqdmWarning" not in output["text"]
        ]
        assert errors == []


@pytest.mark.slow("queues")
@pytest.mark.filterwarnings("ignore")  # warnings of Jupyter's client
def test_the_notebooks_end_as_they_say(executed: dict[str, Any]) -> None:
    if any(cell["id"] == "make-pairs" for cell in executed["cells"]):
        assert "Evaluation(" in data(executed, "evaluate")["text/plain"]
        assert "with the adapter" in data(executed, "load")["text/html"]
    else:
        assert data(executed, "load")["text/plain"].strip("'\"")
        assert "Lead(" in printed(executed, "show-lead")
        assert "validation loss" in data(executed, "closer")["text/html"]
