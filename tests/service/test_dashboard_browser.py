"""The dashboard in a browser: tasks are sent, followed and changed without reloading a page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe import violations
from services import ROWS, Served, local_plane, served, wait_for

from alto.service.access import create_key
from alto.service.api import tasks
from alto.service.store.jobs import find_job, lock_job
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]

HOSTILE = "<img src=x onerror=console.log('ran')>"
POINTS = "document.querySelectorAll('#validation .scatterlayer .point').length"
WAIT_MS = 120_000
"""A limit far beyond what a busy machine needs."""

Opened = Callable[..., "playwright.Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser) -> Iterator[Opened]:
    """A function that opens a page; a console message or an exception of a script fails the test."""
    complaints: list[str] = []
    contexts = []

    def opened(address: str, *, scheme: str = "light", width: int = 1300, motion: str = "no-preference"):
        context = browser.new_context(
            color_scheme=scheme, reduced_motion=motion, viewport={"width": width, "height": 900}
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: complaints.append(message.text) if message.type != "verbose" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    # The browser itself reports a request that a test lets fail.
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []


def until(page, condition: str) -> None:
    """Wait until an expression holds. Playwright's own wait evaluates it in the page, where no text may be run."""
    wait_for(lambda: page.evaluate(condition))


def service_of(root: Path, duration_s: float):
    return served(root, open_plane=simulated_plane(root, lambda: SimulatedCluster(duration_s=duration_s)))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service whose tasks take seconds."""
    with service_of(tmp_path_factory.mktemp("quick"), 8.0) as service:
        yield service


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service whose tasks run until they are cancelled."""
    with service_of(tmp_path_factory.mktemp("patient"), 3600.0) as service:
        yield service


def running_task(service: Served) -> str:
    client = service.client()
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client))
    wait_for(lambda: bool(service.service.run_of(row_of(service, job.id)).joinpath("journal.jsonl").exists()))
    wait_for(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "running")
    return job.id


def row_of(service: Served, task: str):
    with service.service.store.reading() as session:
        return find_job(session, "default", task)


def test_a_task_is_sent_by_the_form_and_its_curves_move(quick: Served, open_page: Opened, tmp_path: Path) -> None:
    rows = tmp_path / "sums.jsonl"
    hostile = {"messages": [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "no"}]}
    rows.write_text((json.dumps(hostile) + "\n") * 40)
    page = open_page(f"{quick.url}/new")
    page.get_by_role("button", name="Start the task").click()
    assert page.locator("#training_file-fault").inner_text() == "Choose a file of training rows, or upload one."
    assert page.evaluate("document.activeElement.id") == "training_file"

    page.locator('[data-upload="training_file"]').set_input_files(rows)
    page.locator("#preview").wait_for()
    page.get_by_label("Learning rate").fill("fast")
    fault = page.locator("#learning_rate-fault")
    until(page, "document.getElementById('learning_rate-fault').textContent !== ''")
    assert "found 'fast'" in fault.inner_text()
    assert page.locator("#learning_rate").get_attribute("aria-invalid") == "true"
    page.get_by_label("Further settings").fill("lora_dropout: [0, 0.1]")
    page.get_by_label("Learning rate").fill("1e-4, 3e-4")
    until(page, "document.getElementById('preview-jobs').textContent === '4'")
    assert page.locator("#preview-varying").inner_text() == "varying learning_rate, lora_dropout"
    assert HOSTILE in page.locator("#preview-examples .text").first.inner_text()
    assert page.locator("#preview-examples mark").first.inner_text().startswith("no")
    assert page.locator("img").count() == 0

    page.get_by_label("Name").fill("sums")
    page.get_by_role("button", name="Start the task").click()
    page.wait_for_url("**/tasks/ftjob-*")
    page.evaluate("window.isSamePage = true")
    until(page, f"{POINTS} >= 2")
    page.locator("#jobs thead").get_by_role("button", name="job").click()
    page.locator("#jobs thead").get_by_role("button", name="job").click()
    assert page.locator("#jobs tbody th").all_inner_texts()[0] == "job-001"
    page.get_by_role("link", name="Report").focus()
    until(page, f"{POINTS} >= 6")
    assert page.locator("#jobs th[aria-sort=descending]").inner_text().startswith("job"), "the order is kept"
    assert page.locator("#jobs tbody th").all_inner_texts()[0] == "job-001"
    until(page, "document.getElementById('status').textContent.trim() === 'succeeded'")
    until(page, f"{POINTS} === 8")
    assert page.evaluate("document.activeElement.dataset.keep") == "report", "the focus is kept"
    assert page.locator("#said").inner_text() == "Task succeeded"
    assert page.locator("#jobs").get_by_role("button", name="Stop").count() == 0
    assert page.evaluate("window.isSamePage")
    assert page.locator("#parallel .scatterlayer .trace").count() == 2
    page.get_by_role("link", name="Report").click()
    page.wait_for_url("**/report")
    assert page.locator(".kicker").inner_text() == "ALTO report"


def test_a_task_that_learns_from_grades_is_sent_by_the_form(quick: Served, open_page: Opened, tmp_path: Path) -> None:
    rows = tmp_path / "sums.jsonl"
    turns = [{"role": "user", "content": "2 plus 2?"}, {"role": "assistant", "content": "4"}]
    rows.write_text((json.dumps({"messages": turns}) + "\n") * 40)
    page = open_page(f"{quick.url}/new")
    grader, beta = page.get_by_label("Grader"), page.get_by_label("Beta")
    assert not grader.is_visible()
    page.get_by_label("Method").select_option("dpo")
    assert beta.is_visible()
    page.get_by_label("Method").select_option("reinforcement")
    assert grader.is_visible()
    assert not beta.is_visible()
    page.locator('[data-upload="training_file"]').set_input_files(rows)
    until(page, "document.getElementById('grader-fault').textContent.includes('expected the name of a scorer')")
    grader.fill("numerical")
    until(page, "document.getElementById('grader-fault').textContent.includes(\"found 'numerical'\")")
    grader.fill("{type: numeric, tolerance: 0.5}")
    page.get_by_label("Learning rate").fill("1e-4, 3e-4")
    page.get_by_label("Epochs").fill("1")
    page.get_by_label("Further settings").fill("max_completion_length: 16")
    until(page, "document.getElementById('preview-jobs').textContent === '2'")
    assert page.locator("#grader-fault").inner_text() == ""
    page.get_by_role("button", name="Start the task").click()
    page.wait_for_url("**/tasks/ftjob-*")
    task = row_of(quick, page.url.rpartition("/")[2]).task
    assert (task["method"], task["reward_funcs"]) == ("grpo", [{"scorer": "numeric", "tolerance": 0.5}])
    until(page, "document.getElementById('status').textContent.trim() === 'succeeded'")


def test_commands_that_no_executor_has_answered_are_shown_as_asked(
    patient: Served, open_page: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_ANSWER_S", 0.1)
    task = running_task(patient)
    page = open_page(f"{patient.url}/tasks/{task}")
    page.get_by_role("button", name="Stop job-001").click()
    until(page, "document.getElementById('answer').textContent.includes('carries out')")
    assert page.locator('[data-job="job-001"] .asked').inner_text() == "stop requested"

    page.get_by_role("button", name="Clone job-000").click()
    dialog = page.get_by_role("dialog")
    assert dialog.get_by_role("heading").inner_text() == "Clone job-000"
    assert dialog.get_by_label("learning_rate").input_value() == "0.001"
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    page.get_by_role("button", name="Clone job-000").click()
    dialog.get_by_label("learning_rate").fill("5e-3")
    dialog.get_by_label("warm").check()
    dialog.get_by_role("button", name="Clone", exact=True).click()
    until(page, "document.querySelector('[data-job=\"job-000\"] .asked').textContent === 'clone requested'")
    folder = patient.service.run_of(row_of(patient, task)) / "control"
    wait_for(lambda: len(list(folder.glob("*.command.json"))) == 2)
    sent = [json.loads(path.read_text()) for path in sorted(folder.glob("*.command.json"))]
    assert [(found["action"], found["job"], found["changes"], found["warm"]) for found in sent] == [
        ("stop", "job-001", {}, False),
        ("clone", "job-000", {"learning_rate": 0.005}, True),
    ]


def test_a_task_is_paused_resumed_and_cancelled(patient: Served, open_page: Opened) -> None:
    page = open_page(f"{patient.url}/tasks/{running_task(patient)}")
    status = "document.getElementById('status').textContent.trim() === '{}'"
    page.get_by_role("button", name="Pause").click()
    until(page, status.format("paused"))
    page.get_by_role("button", name="Resume", exact=True).click()
    until(page, f"{status.format('running')} || {status.format('queued')}")
    page.get_by_role("button", name="Cancel").first.click()
    page.get_by_role("button", name="No", exact=True).click()
    assert page.get_by_role("button", name="Cancel").first.is_visible()
    page.get_by_role("button", name="Cancel").first.click()
    page.get_by_role("button", name="Yes", exact=True).click()
    until(page, status.format("cancelled"))
    page.get_by_role("button", name="Pause").wait_for(state="detached")


def test_a_page_goes_on_when_the_server_answers_again(patient: Served, open_page: Opened) -> None:
    task = running_task(patient)
    page = open_page(f"{patient.url}/")
    page.route("**/dashboard/tasks*", lambda route: route.abort())
    page.locator("#connection").wait_for()
    patient.client().fine_tuning.jobs.cancel(task)
    page.unroute("**/dashboard/tasks*")
    page.locator("#connection").wait_for(state="hidden")
    page.locator("tr", has=page.get_by_title(task)).get_by_text("cancelled").wait_for()


@pytest.fixture(scope="module")
def finished(quick: Served) -> str:
    """A finished task with a long name, on a file with a long name."""
    client = quick.client()
    file = client.files.create(file=(f"{'r' * 249}.jsonl", ROWS), purpose="fine-tune").id
    task = client.fine_tuning.jobs.create(model="alto-tiny", training_file=file, suffix="s" * 60).id
    assert quick.finished(client, task).status == "succeeded"
    return task


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1300)])
def test_pages_fit_phones_and_both_schemes(
    quick: Served, finished: str, open_page: Opened, scheme: str, width: int
) -> None:
    for path in ("/", "/new", "/cluster", f"/tasks/{finished}", "/tasks/none"):
        page = open_page(quick.url + path, scheme=scheme, width=width, motion="reduce")
        if path == f"/tasks/{finished}":
            until(page, f"{POINTS} === 8")
        if path == "/cluster":
            page.locator("#gantt .barlayer .point").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        red = int(page.evaluate("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(").split(",")[0])
        assert (red < 60) is (scheme == "dark")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_missing_parts_of_a_page_are_explained_once_its_data_arrive(patient: Served, open_page: Opened) -> None:
    page = open_page(f"{patient.url}/tasks/{running_task(patient)}")
    note = page.locator('[data-lacks="parallel"]')
    page.route("**/dashboard/tasks/*", lambda route: route.abort())
    page.reload()
    page.locator("#connection").wait_for()
    assert note.inner_text() == "Loading…"
    page.unroute("**/dashboard/tasks/*")
    until(page, "document.querySelector('[data-lacks=\"parallel\"]').textContent.startsWith('Drawn once')")


def test_every_field_and_button_has_a_name(quick: Served, open_page: Opened) -> None:
    for path in ("/new", "/"):
        page = open_page(quick.url + path)
        named = page.evaluate(
            "[...document.querySelectorAll('input, select, textarea, button, a')]"
            ".filter((e) => !(e.labels && e.labels.length) && !e.textContent.trim() && !e.ariaLabel && !e.hidden)"
            ".map((e) => e.outerHTML)"
        )
        assert named == []


def test_a_key_is_asked_for_and_no_script_can_read_it(tmp_path: Path, open_page: Opened) -> None:
    with served(tmp_path) as service:
        with service.service.store.writing() as session:
            secret = create_key(session, "team")[1]
        page = open_page(f"{service.url}/new")
        page.wait_for_url("**/login?next=%2Fnew")
        page.get_by_label("Key").fill("alto-another")
        page.get_by_role("button", name="Log in").click()
        page.get_by_text("unknown, expired or revoked").wait_for()
        page.get_by_label("Key").fill(secret)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/new")
        assert page.get_by_text("team").is_visible()
        assert page.evaluate("document.cookie") == ""
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url("**/login")
        page.goto(f"{service.url}/")
        page.wait_for_url("**/login?next=%2F")


def test_an_executor_stops_and_clones_jobs(tmp_path: Path, open_page: Opened) -> None:
    with served(tmp_path, open_plane=local_plane(tmp_path)) as service:
        client = service.client()
        settings = {"n_epochs": 400, "learning_rate": [1e-3, 2e-3], "batch_size": 4, "early_exit": {"enabled": False}}
        method = {"type": "supervised", "supervised": {"hyperparameters": settings}}
        file = client.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune").id
        task = client.fine_tuning.jobs.create(model="alto-tiny", training_file=file, method=method).id
        page = open_page(f"{service.url}/tasks/{task}")
        page.get_by_role("button", name="Stop job-001").click()
        page.locator('[data-job="job-001"][data-outcome="stopped"]').wait_for()
        page.get_by_role("button", name="Clone job-000").click()
        page.get_by_role("dialog").get_by_label("learning_rate").fill("5e-4")
        page.get_by_role("dialog").get_by_role("button", name="Clone", exact=True).click()
        page.get_by_text("clone of job-000").first.wait_for()
        assert "5e-4" in page.locator("tr", has_text="clone of job-000").inner_text()
        page.get_by_role("button", name="Cancel").first.click()
        page.get_by_role("button", name="Yes", exact=True).click()
        until(page, "document.getElementById('status').textContent.trim() === 'cancelled'")


def test_a_report_is_shared_as_a_file_that_needs_no_network(
    quick: Served, finished: str, open_page: Opened, tmp_path: Path
) -> None:
    page = open_page(f"{quick.url}/tasks/{finished}")
    with page.expect_download() as download:
        page.get_by_role("link", name="Share as a file").click()
    assert download.value.suggested_filename == f"{'s' * 60}-report.html"
    download.value.save_as(tmp_path / "shared.html")
    page.context.set_offline(True)
    shared, asked = page.context.new_page(), []
    shared.on("request", lambda request: asked.append(request.url))
    shared.goto((tmp_path / "shared.html").as_uri())
    assert shared.evaluate(POINTS) == 8
    assert shared.locator("#jobs tbody tr").count() == 2
    assert asked == [shared.url]


def test_everyone_can_read_the_pages(quick: Served, finished: str, open_page: Opened) -> None:
    for path in ("/", "/new", "/cluster", f"/tasks/{finished}", "/tasks/none"):
        page = open_page(quick.url + path)
        if path == f"/tasks/{finished}":
            until(page, f"{POINTS} === 8")
        assert violations(page) == [], path


def test_everyone_can_read_the_form_with_a_preview_and_with_faults(
    quick: Served, open_page: Opened, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(ROWS)
    page = open_page(f"{quick.url}/new")
    page.locator('[data-upload="training_file"]').set_input_files(rows)
    page.locator("#preview").wait_for()
    assert violations(page) == []
    page.get_by_label("Learning rate").fill("fast")
    until(page, "document.getElementById('learning_rate-fault').textContent !== ''")
    assert violations(page) == []


def test_everyone_can_read_the_pages_before_the_first_task(tmp_path: Path, open_page: Opened) -> None:
    with served(tmp_path) as service:
        for path in ("/", "/new", "/cluster"):
            assert violations(open_page(service.url + path)) == [], path
        with service.service.store.writing() as session:
            create_key(session, "team")
        page = open_page(f"{service.url}/login")
        assert violations(page) == []
        page.get_by_label("Key").fill("alto-another")
        page.get_by_role("button", name="Log in").click()
        page.get_by_text("unknown, expired or revoked").wait_for()
        assert violations(page) == []


def test_everyone_can_read_a_task_in_every_state(patient: Served, open_page: Opened) -> None:
    task = running_task(patient)
    page = open_page(f"{patient.url}/tasks/{task}")
    status = "document.getElementById('status').textContent.trim() === '{}'"
    for button in ("Clone job-000", "Cancel"):
        page.get_by_role("button", name=button).first.click()
        page.get_by_role("dialog").wait_for()
        assert violations(page) == [], button
        page.keyboard.press("Escape")
    for button, state in (("Pause", "paused"), ("Cancel", "cancelled")):
        assert violations(page) == [], state
        page.get_by_role("button", name=button).first.click()
        if button == "Cancel":
            page.get_by_role("button", name="Yes", exact=True).click()
        until(page, status.format(state))
    assert violations(page) == []
    with patient.service.store.writing() as session:
        row = lock_job(session, task)
        assert row is not None
        row.status, row.error = "failed", {"message": "CUDA is out of memory"}
    page.get_by_text("CUDA is out of memory").wait_for()
    page.route("**/dashboard/tasks/*", lambda route: route.abort())
    page.locator("#connection").wait_for()
    assert violations(page) == []
