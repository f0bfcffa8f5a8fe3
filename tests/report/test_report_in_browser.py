"""The report in a browser: nothing fails, the curves and lines are drawn, the table sorts."""

from __future__ import annotations

import json
import shutil

import pytest
from axe import violations
from journals import Journal

from alto.report import write_comparison, write_queue_report
from alto.report.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]

CURVES = "#{} .scatterlayer .trace .js-line"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser):
    """A function that opens an empty page until the test ends: an open page goes on using the CPU."""
    pages = []

    def open_page(*, scheme="light", width=1400):
        pages.append(browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900}))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()


@pytest.fixture
def open_report(new_page, write_run):
    """A function that opens the report of events. A console message, an exception of a script or a request that leaves
    the machine fails the test."""
    complaints = []

    def open_page(events, **options):
        page = new_page(**options)
        page.on("request", lambda request: complaints.append(request.url) if is_outside(request.url) else None)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(write_report(write_run(events)).as_uri())
        return page

    yield open_page
    assert complaints == []


def is_outside(address: str) -> bool:
    return not address.startswith(("file:", "data:", "blob:"))


def column(page, index: int) -> list[str]:
    return page.locator(f"#jobs tbody tr > :nth-child({index})").all_inner_texts()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 800)])
def test_all_figures_are_drawn(sweep, open_report, scheme, width):
    page = open_report(sweep, scheme=scheme, width=width)
    for figure in ("validation", "parallel"):
        assert page.locator(CURVES.format(figure)).count() >= 60
    assert page.locator("#slots .barlayer .point").count() == 60
    assert page.locator("#parallel .annotation").count() > 6
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    red = int(page.evaluate(BACKGROUND).removeprefix("rgb(").split(",")[0])
    assert (red < 60) is (scheme == "dark")


def test_the_table_sorts_with_missing_values_last_and_the_axis_can_be_switched(small_run, open_report):
    page = open_report(small_run)
    heading = page.get_by_role("button", name="best val")
    assert column(page, 4) == ["1.9000", "2.2000", "3.0000", "–"]
    heading.click()
    assert column(page, 4) == ["3.0000", "2.2000", "1.9000", "–"]
    heading.click()
    assert column(page, 4) == ["1.9000", "2.2000", "3.0000", "–"]
    page.locator("#jobs thead").get_by_role("button", name="lr").click()
    assert column(page, 2) == ["1e-5", "2e-4", "2e-4", "0.01"]
    assert page.locator("#jobs th[aria-sort=ascending]").inner_text().startswith("lr")

    axis = "document.getElementById('validation').layout.xaxis.type"
    assert page.evaluate(axis) == "log"
    page.get_by_role("button", name="linear").click()
    assert page.evaluate(axis) == "linear"


def test_an_interruption_is_marked_and_hostile_text_does_nothing(interrupted_run, open_report):
    interrupted_run[0]["task"] = "<img src=x onerror=console.log('ran')>"
    for job in interrupted_run[0]["jobs"]:
        job["config"]["<b onclick=alert(1)>"] = f"</script><script>console.log('ran')</script>{job['job']}"
    page = open_report(interrupted_run)
    assert page.locator("#slots .annotation").text_content() == "interrupted for 1 h 00 min"
    assert page.locator("img").count() == 0
    assert "<b onclick=alert(1)>" in page.locator("#parallel .annotation").all_text_contents()


def apart(box, other) -> bool:
    return (
        box["x"] >= other["x"] + other["width"]
        or other["x"] >= box["x"] + box["width"]
        or box["y"] >= other["y"] + other["height"]
        or other["y"] >= box["y"] + box["height"]
    )


def check_gap_and_title(page, figure):
    """Check that the text over a gap touches neither toolbar nor legend, and that the title of the time axis is
    visible."""
    words = page.locator(f"#{figure} .annotation").bounding_box()
    parts = page.locator(f"#{figure} .modebar-btn, #{figure} .legend .traces").all()
    assert parts
    for part in parts:
        assert apart(words, part.bounding_box())
    title, drawn = (page.locator(f"#{figure} {part}").first.bounding_box() for part in (".xtitle", ".main-svg"))
    assert drawn["x"] <= title["x"]
    assert title["x"] + title["width"] <= drawn["x"] + drawn["width"]
    assert title["y"] + title["height"] <= drawn["y"] + drawn["height"]


@pytest.mark.parametrize("width", [390, 1400])
def test_the_words_over_an_interruption_of_a_run_cover_nothing(interrupted_run, open_report, width):
    check_gap_and_title(open_report(interrupted_run, width=width), "slots")


def test_curves_of_metrics_are_drawn_and_sorted_by(preference_run, open_report):
    page = open_report(preference_run)
    for figure in ("validation", "metric-0", "metric-1", "train"):
        assert page.locator(CURVES.format(figure)).count() == 3
    ticks = page.locator("#metric-0 .ytick text").all_text_contents()
    assert ticks
    assert all(tick.endswith("%") for tick in ticks)
    page.get_by_role("button", name="linear").click()
    assert page.evaluate("document.getElementById('metric-1').layout.xaxis.type") == "linear"
    assert page.locator("#jobs th[aria-sort=descending]").inner_text().startswith("accuracy")
    page.locator("#jobs thead").get_by_role("button", name="margin").click()
    assert column(page, 5) == ["0.3800", "0.4000", "0.6000"]


def test_labels_of_rungs_are_above_the_plot_area_on_their_lines(small_run, open_report):
    page = open_report(small_run)
    for axis in ("log x-axis", "linear"):
        page.get_by_role("button", name=axis).click()
        label = page.locator("#validation .annotation")
        assert label.text_content() == "10 %: 2 kept"
        box, plot = label.bounding_box(), page.locator("#validation .nsewdrag").bounding_box()
        line = page.locator("#validation .shapelayer path").first.bounding_box()
        assert box["y"] + box["height"] <= plot["y"] + 1
        assert abs(box["x"] + box["width"] / 2 - line["x"]) < 2


def test_the_line_of_a_rung_meets_no_gridline(small_run, open_report):
    page = open_report(small_run)
    for axis in ("log x-axis", "linear"):
        page.get_by_role("button", name=axis).click()
        assert page.locator("#validation .xtick").count() > 2
        line = page.locator("#validation .shapelayer path").first.bounding_box()
        beside = [grid.bounding_box()["x"] - line["x"] for grid in page.locator("#validation .xgrid").all()]
        assert not any(abs(distance) < 2 for distance in beside), axis
    assert page.locator("#validation .ygrid").count() > 2


@pytest.mark.parametrize("width", [390, 1400])
def test_labels_of_rungs_neither_touch_nor_leave_the_figure(open_report, width):
    journal = Journal()
    rungs = [[0.01, 0.5], [0.025, 0.5], [0.05, 0.5], [0.1, 0.5], [0.2, 0.5]]
    journal.start({"a": {}, "b": {}}, early_exit={"policy": "alto", "rungs": rungs, "equal_shares": True})
    for job in journal.events[0]["jobs"]:
        job["total_steps"] = 230
        journal.add("eval", job=job["job"], step=3, total_steps=230, train_ema=2.0, validation_loss=2.0)
    page = open_report(journal.events, width=1400)
    page.set_viewport_size({"width": width, "height": 900})
    for axis in ("log x-axis", "linear"):
        page.get_by_role("button", name=axis).click()
        labels = page.locator("#validation .annotation")
        playwright.expect(labels.first).to_have_text(
            "1 % keep 50 %" if width == 390 else "after 1.3 %, rung at 1 % keep 50 %"
        )
        # Plotly draws the figure anew, so its parts have no place for a moment.
        page.wait_for_function("document.querySelector('#validation .main-svg')?.getBoundingClientRect().width > 0")
        boxes = [label.bounding_box() for label in labels.all()]
        assert len(boxes) == 5
        figure = page.locator("#validation .main-svg").first.bounding_box()
        for index, box in enumerate(boxes):
            assert figure["x"] <= box["x"]
            assert box["x"] + box["width"] <= figure["x"] + figure["width"]
            for other in boxes[:index]:
                assert (
                    box["x"] >= other["x"] + other["width"]
                    or other["x"] >= box["x"] + box["width"]
                    or abs(box["y"] - other["y"]) >= 12
                ), (axis, box, other)
        legend = page.locator("#validation .legend").bounding_box()
        assert legend["y"] + legend["height"] <= min(box["y"] for box in boxes) + 4


def test_learning_rates_are_drawn_at_both_moments(small_run, open_report):
    page = open_report(small_run)
    points = "#rates .scatterlayer .point"
    assert page.locator(points).count() == 3
    title = page.locator("#rates .ytitle")
    assert title.text_content() == "validation loss after 10 % of the steps"
    page.get_by_role("button", name="at its best").click()
    assert title.text_content() == "validation loss at its best"
    assert page.locator(points).count() == 3
    assert page.locator("#rates .xtick text").all_text_contents() == ["1e-5", "2e-4", "0.01"]


def test_columns_that_a_narrow_window_hides_are_hinted_at(small_run, open_report):
    wide = open_report(small_run)
    assert wide.locator(".hint:visible").count() == 0
    narrow = open_report(small_run, width=420)
    hints = narrow.locator(".hint:visible").all_text_contents()
    assert "Some columns are hidden: scroll sideways →" in hints
    assert "A part of the figure is hidden: scroll sideways →" in hints
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 420


def test_figures_keep_their_heights_when_the_window_is_resized(small_run, open_report):
    page = open_report(small_run)
    overlaps = """() => [...document.querySelectorAll(".figure")].filter(
      (figure) => figure.clientHeight < figure._fullLayout.height).map((figure) => figure.id)"""
    widths = {
        figure.get_attribute("id"): figure.locator(".main-svg").first.get_attribute("width")
        for figure in page.locator(".figure").all()
    }
    assert page.evaluate(overlaps) == []
    page.set_viewport_size({"width": 420, "height": 900})
    for figure in page.locator(".figure").all():
        drawn = figure.locator(".main-svg").first
        playwright.expect(drawn).not_to_have_attribute("width", widths[figure.get_attribute("id")])
    assert page.evaluate(overlaps) == []


def test_a_button_copies_the_configuration(small_run, open_report):
    page = open_report(small_run)
    button = page.locator("[data-copy=configuration]")
    button.click()
    assert button.inner_text() == "Copied"
    selected = page.evaluate("getSelection().toString()")
    assert selected.startswith("model: alto-tiny\nmethod: sft\nlearning_rate: 0.0002\n")


def test_a_copy_button_covers_no_text(small_run, open_report):
    for width in (1400, 420):
        page = open_report(small_run, width=width)
        for block in page.locator(".copyable").all():
            button, text = block.locator("button").bounding_box(), block.locator("pre").bounding_box()
            assert text["x"] + text["width"] <= button["x"]
            inner = block.locator("pre").evaluate("pre => [pre.scrollWidth, pre.clientWidth]")
            assert inner[0] <= inner[1], "a command that is cut off cannot be read"


def contrast(page, foreground: str, background: str) -> float:
    """Return the contrast of two colours, as WCAG defines it; each has a name on the page or is written as CSS does."""
    script = """names => names.map(name => {
        const paint = document.createElement('canvas').getContext('2d');
        paint.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim() || name;
        paint.fillRect(0, 0, 1, 1);
        const parts = [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3).map(part => part / 255)
            .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    })"""
    low, high = sorted(page.evaluate(script, [foreground, background]))
    return (high + 0.05) / (low + 0.05)


ROLES = (
    *("best", "completed", "training", "parked", "pending", "underperforming", "overfitting", "collapsed", "diverging"),
    *("stopped", "failed", "rung", "first", "second", "not-finite", *(f"fifth-{number}" for number in range(5))),
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_curves_can_be_seen(small_run, open_report, scheme):
    page = open_report(small_run, scheme=scheme)
    assert {role: round(found, 2) for role in ROLES if (found := contrast(page, role, "paper")) < 3} == {}
    assert contrast(page, "soft", "paper") >= 4.5, "texts of figures"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_on_bars_can_be_read(open_report, scheme):
    reasons = ("diverging", "overfitting", "underperforming", "collapsed", "stopped", "failed")
    jobs = dict(zip("abcdef", reasons, strict=True)) | {"g": "completed", "h": "best", "i": "parked", "j": "training"}
    journal = Journal()
    journal.start({job: {} for job in jobs}, max_slots=len(jobs))
    for slot, job in enumerate(jobs):
        journal.add("job_admitted", job=job, slot=slot, step=0)
    for slot, (job, role) in enumerate(jobs.items()):
        best = (100, 1.0 if role == "best" else 2.0)
        if role in reasons:
            journal.end("job_exited", job, 100, best=best, slot=slot, reason=role, evidence={})
        elif role == "parked":
            journal.add("job_parked", job=job, slot=slot, step=10)
        elif role != "training":
            journal.end("job_completed", job, 100, best=best, slot=slot)
    colours = """points => points.map(point => ["text", "path"].map(
        part => getComputedStyle(point.querySelector(part)).fill))"""
    page = open_report(journal.events, scheme=scheme)
    found = page.locator("#slots .barlayer .point").evaluate_all(colours)
    assert len({bar for _, bar in found}) == len(jobs)
    assert {bar: text for text, bar in found if contrast(page, text, bar) < 4.5} == {}


@pytest.fixture
def opened(new_page):
    def open_page(path, **options):
        page = new_page(**options)
        page.goto(path.as_uri())
        return page

    return open_page


def test_both_columns_of_a_comparison_are_in_a_narrow_window(small_run, judged_run, opened, tmp_path):
    names = ("wordproblems-20261123-233035", "smallbatch-20261123-233132")
    for name, events in zip(names, (small_run, judged_run), strict=True):
        (tmp_path / name).mkdir()
        lines = (json.dumps({"seq": seq, **event}) + "\n" for seq, event in enumerate(events))
        (tmp_path / name / "journal.jsonl").write_text("".join(lines))
    facts = {"dataset": ("/data/word_problems/train.jsonl",) * 2, "validation loss": (1.9, 2.2)}
    path = write_comparison(
        tmp_path / "page.html",
        tuple(str(tmp_path / name) for name in names),
        facts,
        {"per_device_train_batch_size": (8, 2)},
        same_data=True,
        same_validation=True,
        same_loss=True,
    )
    page = opened(path, width=420)
    assert page.locator(".hint:visible").count() == 0
    last = page.locator("#facts tbody tr:last-child td:last-child")
    assert last.inner_text() == "2.2000"
    assert last.bounding_box()["x"] + last.bounding_box()["width"] <= 420


def queue_page(folder, name, *, interrupted_s=0.0):
    """Write the page of a queue of two tasks, the first called ``name``, that ran one after the other on one slot. It
    was interrupted before its last event."""
    tasks = (name, "b")
    lines = [
        {
            "event": "queue_started", "time": 0.0, "method": "cp-sat", "devices": "cpu slots",
            "nodes": [{"name": "local", "gpus": [0]}],
            "tasks": [{"task": task, "num_gpus": 1, "duration_s": 20.0} for task in tasks],
        },
        {
            "event": "planned", "time": 0.0, "reason": f"{name} submitted; b submitted", "method": "lpt",
            "status": "optimal", "makespan_s": 40.0, "bound_s": 40.0, "notice": "",
            "placements": [
                {"task": task, "gpus": [["local", 0]], "start_s": 20.0 * index, "duration_s": 20.0}
                for index, task in enumerate(tasks)
            ],
        },
    ]  # fmt: skip
    for index, task in enumerate(tasks):
        begun = {"event": "executor_started", "task": task, "attempt": 1, "gpus": [["local", 0]]}
        lines += [
            {**begun, "time": 20.0 * index},
            {
                "event": "executor_ended", "time": 20.0 * (index + 1), "task": task, "attempt": 1,
                "outcome": "finished", "reason": "",
            },
        ]  # fmt: skip
    lines += [{"event": "queue_resumed", "time": 40.0 + interrupted_s, "done": list(tasks)}] if interrupted_s else []
    lines.append({"event": "queue_completed", "time": 40.0 + interrupted_s})
    journal = "".join(json.dumps({"seq": seq, **line}) + "\n" for seq, line in enumerate(lines))
    (folder / "journal.jsonl").write_text(journal)
    (folder / "queue.yaml").write_text("tasks: []\n")
    return write_queue_report(folder)


@pytest.mark.parametrize("width", [390, 1400])
def test_the_words_over_an_interruption_of_a_queue_cover_nothing(opened, tmp_path, width):
    check_gap_and_title(opened(queue_page(tmp_path, "a", interrupted_s=23.0), width=width), "gantt")


def test_a_long_name_of_a_task_hides_no_column_and_is_cut_to_its_bar(opened, tmp_path):
    name = "a-task-with-a-rather-long-name-for-its-column"
    path = queue_page(tmp_path, name)
    wide = opened(path, width=1400)
    assert wide.locator(".hint:visible").count() == 0
    assert wide.locator("#gantt .barlayer text").all_text_contents() == [name, "b"]
    narrow = opened(path, width=420)
    assert narrow.locator("table.tasks tbody th").first.bounding_box()["width"] < 200
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 420
    shown = narrow.locator("#gantt .barlayer text").first.text_content()
    assert shown.endswith("…")
    assert name.startswith(shown[:-1])
    assert len(shown) > 8


@pytest.mark.parametrize(
    "run", ["small_run", "judged_run", "preference_run", "reward_run", "interrupted_run", "failed_run", "begun_run"]
)
def test_everyone_can_read_the_report_of(run, request, open_report):
    assert violations(open_report(request.getfixturevalue(run))) == []


def test_everyone_can_read_the_report_of_a_queue(opened, tmp_path):
    assert violations(opened(queue_page(tmp_path, "a", interrupted_s=23.0), width=1280)) == []


def test_a_low_contrast_is_found(small_run, open_report):
    page = open_report(small_run)
    page.add_style_tag(content="@media (prefers-color-scheme: dark) { .lede { color: #555; } }")
    found = violations(page)
    assert found
    assert all("dark: color-contrast" in each for each in found)
