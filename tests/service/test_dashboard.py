"""The pages of the dashboard as a client without scripts receives them, in every state of a task; error pages too."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import httpx2
import openai
import pytest
from html_pages import HOSTILE, Page
from services import ROWS, Served, served, wait_for
from sqlalchemy.exc import OperationalError

from alto.records import ExitReason
from alto.runs import RunHistory
from alto.runs.job_history import JobHistory, Stage
from alto.service.access import create_key
from alto.service.dashboard.new_task import FormTexts, request_of
from alto.service.dashboard.rendering import local_path
from alto.service.errors import ApiError
from alto.service.openai.jobs import JobRequest
from alto.service.savings import savings_of
from alto.service.store import Store
from alto.service.store.jobs import add_event, lock_job
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster

OTHER = "rival"


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(frozen=True, kw_only=True)
class Browser:
    service: Served
    key: str = ""

    def get(self, path: str, **headers: str) -> Answer:
        return self._send("GET", path, None, headers)

    def head(self, path: str) -> Answer:
        return self._send("HEAD", path, None, {})

    def post(self, path: str, fields: dict[str, str] | None = None, **headers: str) -> Answer:
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        return self._send("POST", path, urlencode(fields or {}).encode(), form | headers)

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection(urlsplit(self.service.url).netloc, timeout=60)
        if self.key:
            headers = {"Cookie": f"alto_key={self.key}", **headers}
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        found = Answer(status=answer.status, headers=answer.headers, body=answer.read())
        connection.close()
        return found


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A service with keys of two tenants and a finished task of the first."""

    service: Served
    secret: str
    rival: str
    task: str

    @property
    def browser(self) -> Browser:
        return Browser(service=self.service, key=self.secret)

    @property
    def journal(self) -> Path:
        return self.service.service.settings.root / "runs" / "default" / self.task / "journal.jsonl"


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    root = tmp_path_factory.mktemp("service")
    models = {"alto-tiny": "alto-tiny", HOSTILE: "alto-tiny"}
    plane = simulated_plane(root, lambda: SimulatedCluster(duration_s=0.2))
    with served(root, open_plane=plane, models=models) as service:
        with service.service.store.writing() as session:
            secret, rival = create_key(session, "default")[1], create_key(session, OTHER)[1]
        client = service.client(secret)
        file = client.files.create(file=(HOSTILE, ROWS), purpose="fine-tune").id
        task = client.fine_tuning.jobs.create(model=HOSTILE, training_file=file, suffix="sums").id
        assert service.finished(client, task).status == "succeeded"
        yield Setup(service=service, secret=secret, rival=rival, task=task)


def pages(task: str) -> list[str]:
    return ["/", "/new", "/cluster", f"/tasks/{task}", "/tasks/none", "/login"]


def live(task: str) -> list[str]:
    return ["/dashboard/tasks", "/dashboard/cluster", f"/dashboard/tasks/{task}"]


def test_head_is_answered_as_get_is_without_the_page(setup: Setup) -> None:
    asset = re.findall(r'/dashboard/assets/[^"]+', setup.browser.get("/").body.decode())[0]
    for path in (*pages(setup.task), asset, "/healthz", "/readyz", "/metrics"):
        shown, head = setup.browser.get(path), setup.browser.head(path)
        assert (head.status, head.body) == (shown.status, b""), path
        assert head.headers["content-type"] == shown.headers["content-type"]
    to_login = Browser(service=setup.service).head("/")
    assert to_login.status == 303


def test_pages_have_scripts_of_this_server_only_and_no_key(setup: Setup) -> None:
    for path in pages(setup.task):
        answer = setup.browser.get(path)
        assert answer.status == (404 if path == "/tasks/none" else 200), path
        assert answer.headers["Cache-Control"] == "no-store"
        policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == policy["form-action"] == "'self'"
        page = Page(answer.text)
        assert page.scripts, path
        assert not "".join(page.scripts).strip(), "scripts are files"
        assert all(address.startswith(("/", "#", "data:,")) for address in page.fetched), path
        assert len(answer.body) < 100_000, "plotly.js is not in the page"
    for path in (*pages(setup.task), *live(setup.task)):
        assert setup.secret not in setup.browser.get(path).text


def test_a_page_does_not_say_what_is_lacking_before_its_data_are_there(setup: Setup) -> None:
    for path in (f"/tasks/{setup.task}", "/cluster"):
        text = Page(setup.browser.get(path).text).text
        assert "Loading…" in text
        for phrase in ("No job has a finite", "Drawn once", "Nothing was planned yet"):
            assert phrase not in text


def test_a_task_has_its_numbers_jobs_and_outputs(setup: Setup) -> None:
    page = setup.browser.get(f"/tasks/{setup.task}").text
    text = Page(page).text
    for shown in ("sums", "succeeded", "1.2500", "job-000", "underperforming", "CPU slot hours", "Time saved"):
        assert shown in text
    assert "The job has successfully completed" in text
    assert f'href="/api/tasks/{setup.task}/report"' in page
    found = re.search(r'href="(/api/models/[^"]+/adapter)"', page)
    assert found is not None
    with zipfile.ZipFile(io.BytesIO(setup.browser.get(found[1]).body)) as archive:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(archive.namelist())
        assert json.loads(archive.read("adapter_config.json"))["r"] == 4
    listed = Page(setup.browser.get("/").text).text
    for shown in ("sums", "succeeded", "1.2500", "100 %", "40 %"):
        assert shown in listed


def test_money_is_shown_where_a_price_is_known(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cost" not in Page(setup.browser.get(f"/tasks/{setup.task}").text).text
    monkeypatch.setenv("ALTO_GPU_HOUR_PRICE", "36000")
    assert "cost" in Page(setup.browser.get(f"/tasks/{setup.task}").text).text
    monkeypatch.setenv("ALTO_GPU_HOUR_PRICE", "a lot")
    answer = setup.browser.get(f"/tasks/{setup.task}")
    assert answer.status == 500
    assert "ALTO_GPU_HOUR_PRICE" in Page(answer.text).text


def test_an_open_page_is_sent_only_what_is_new(setup: Setup) -> None:
    for path in live(setup.task):
        first = setup.browser.get(path)
        assert first.status == 200
        again = setup.browser.get(f"{path}?seen={first.headers['X-Version']}")
        assert (again.status, again.body) == (204, b"")
    path = f"/dashboard/tasks/{setup.task}"
    before = setup.browser.get(path)
    with setup.service.service.store.writing() as session:
        row = lock_job(session, setup.task)
        assert row is not None
        add_event(session, row, "Something new")
    after = setup.browser.get(f"{path}?seen={before.headers['X-Version']}")
    assert after.status == 200
    changed = [
        name
        for name, html in json.loads(after.body)["fragments"].items()
        if html != json.loads(before.body)["fragments"][name]
    ]
    assert changed == ["events"]


def test_figures_are_those_of_the_report(setup: Setup) -> None:
    figures = json.loads(setup.browser.get(f"/dashboard/tasks/{setup.task}").body)["figures"]
    report = Page(setup.browser.get(f"/api/tasks/{setup.task}/report").text)
    assert report.figures == figures
    assert [len(trace["x"]) for trace in figures["validation"]["traces"]] == [4, 4]


def test_notes_of_the_report_have_the_keys_of_requests(setup: Setup) -> None:
    kept = setup.journal.read_text()
    first, *others = kept.splitlines()
    try:
        started = {**json.loads(first), "notes": ["Few rows; name a validation_dataset."]}
        setup.journal.write_text("\n".join([json.dumps(started), *others]) + "\n")
        for path in (f"/tasks/{setup.task}", f"/api/tasks/{setup.task}/report"):
            page = setup.browser.get(path).text
            assert "name a validation_file." in page, path
            assert "validation_dataset" not in page, path
    finally:
        setup.journal.write_text(kept)


def test_folders_of_the_service_are_not_shown(setup: Setup) -> None:
    kept, folder = setup.journal.read_text(), "/srv/service/models/base"
    try:
        setup.journal.write_text(kept.replace('model": "alto-tiny"', f'model": "{folder}"'))
        assert setup.journal.read_text().count(folder) == 2
        for path in (f"/tasks/{setup.task}", f"/api/tasks/{setup.task}/report"):
            page = setup.browser.get(path).text
            assert "alto-tiny" in page, path
            assert "models/base" not in page, path
            assert str(setup.service.service.settings.root) not in page, path
    finally:
        setup.journal.write_text(kept)


def test_scripts_read_pages_with_their_key_in_a_header(setup: Setup) -> None:
    script = Browser(service=setup.service)
    for path in ("/", f"/tasks/{setup.task}"):
        assert script.get(path, Authorization=f"Bearer {setup.secret}").status == 200


def test_hostile_text_is_shown_as_text(setup: Setup) -> None:
    kept = setup.journal.read_text()
    with setup.service.service.store.writing() as session:
        row = lock_job(session, setup.task)
        assert row is not None
        add_event(session, row, f"said {HOSTILE}", level="warn")
    lines = [json.loads(line) for line in kept.replace("job-001", json.dumps(f"job-001{HOSTILE}")[1:-1]).splitlines()]
    lines[0]["notes"] = [f"note {HOSTILE}"]
    for number, job in enumerate(lines[0]["jobs"]):
        job["config"][f"key{HOSTILE}"] = f"{number}{HOSTILE}"
    sample = {"prompt": f"asked {HOSTILE}", "reference": HOSTILE, "base": HOSTILE, "adapters": {HOSTILE: HOSTILE}}
    lines.insert(-1, {**lines[-1], "event": "samples_generated", "samples": [sample], "failure": ""})
    try:
        numbered = [{**line, "seq": lines[0]["seq"] + number} for number, line in enumerate(lines)]
        setup.journal.write_text("".join(json.dumps(line) + "\n" for line in numbered))
        for path in pages(setup.task):
            page = setup.browser.get(path).text
            assert "<script>alert" not in page, path
            assert "<img src=x" not in page, path
        text = Page(setup.browser.get(f"/tasks/{setup.task}").text).text
        for shown in (
            f"said {HOSTILE}",
            f"note {HOSTILE}",
            f"asked {HOSTILE}",
            f"job-001{HOSTILE}",
            f"Rows: {HOSTILE.rpartition('/')[2]}",
        ):
            assert shown in text
        found = json.loads(setup.browser.get(f"/dashboard/tasks/{setup.task}").body)
        for phrase in (json.dumps(found["figures"]), *found["fragments"].values()):
            assert "<script>alert" not in phrase
            assert "<img src=x" not in phrase
    finally:
        setup.journal.write_text(kept)


def test_a_damaged_journal_is_reported_and_hides_no_other_task(setup: Setup) -> None:
    kept = setup.journal.read_text()
    try:
        setup.journal.write_text("no JSON\n" + kept)
        assert setup.browser.get("/").status == 200
        answer = setup.browser.get(f"/tasks/{setup.task}")
        assert answer.status == 200
        assert "journal" in Page(answer.text).text
    finally:
        setup.journal.write_text(kept)


def test_other_tenants_see_nothing(setup: Setup) -> None:
    rival = Browser(service=setup.service, key=setup.rival)
    for path in ("/tasks/{}", "/dashboard/tasks/{}"):
        answer = rival.get(path.format(setup.task))
        missing = rival.get(path.format("ftjob-none"))
        assert answer.status == missing.status == 404
        assert answer.text.replace(setup.task, "ftjob-none") == missing.text
    for path in ("/", "/new", "/cluster", "/dashboard/tasks", "/dashboard/cluster"):
        answer = rival.get(path)
        assert answer.status == 200
        assert setup.task not in answer.text
        assert "sums" not in answer.text
    assert "another tenant" in Page(rival.get("/cluster").text).text


def test_a_key_opens_the_pages_until_it_is_logged_out(setup: Setup) -> None:
    stranger = Browser(service=setup.service)
    answer = stranger.get(f"/tasks/{setup.task}?a=b")
    assert answer.status == 303
    assert answer.headers["Location"] == f"/login?next=%2Ftasks%2F{setup.task}%3Fa%3Db"
    assert stranger.get("/dashboard/tasks").status == 401
    assert f'value="/tasks/{setup.task}?a=b"' in stranger.get(answer.headers["Location"]).text

    wrong = stranger.post("/login", {"key": "alto-wrong-key", "next": "/"})
    assert wrong.status == 401
    assert "Set-Cookie" not in wrong.headers
    assert "alto-wrong-key" not in wrong.text
    right = stranger.post("/login", {"key": f" {setup.secret}\n", "next": f"/tasks/{setup.task}"})
    assert (right.status, right.headers["Location"]) == (303, f"/tasks/{setup.task}")
    assert setup.secret not in right.text
    cookie = right.headers["Set-Cookie"]
    assert cookie.startswith(f"alto_key={setup.secret};")
    for word in ("HttpOnly", "SameSite=strict", "Path=/"):
        assert word in cookie
    assert "Secure" not in cookie
    secure = stranger.post("/login", {"key": setup.secret}, X_Forwarded_Proto="https")
    assert "Secure" in secure.headers["Set-Cookie"]

    out = setup.browser.post("/logout")
    assert (out.status, out.headers["Location"]) == (303, "/login")
    assert out.headers["Set-Cookie"].startswith('alto_key="";')


def test_pages_of_other_sites_can_neither_log_in_nor_out(setup: Setup) -> None:
    foreign = {"Origin": "https://example.com"}
    answer = setup.browser.post("/login", {"key": setup.rival}, **foreign)
    assert answer.status == 403
    assert "Set-Cookie" not in answer.headers
    assert setup.browser.post("/logout", **foreign).status == 403


@pytest.mark.parametrize(
    "path",
    [
        "//example.com",
        "///example.com",
        "https://example.com",
        "/\\example.com",
        "javascript:alert(1)",
        "/a\nb",
        "",
        "\t//example.com",
    ],
)
def test_a_login_leads_to_no_other_site(path: str) -> None:
    assert local_path(path) == "/"
    assert local_path("/tasks/a?b=//c") == "/tasks/a?b=//c"


def test_files_of_the_pages_are_kept_by_their_contents(setup: Setup) -> None:
    addresses = {address for path in pages(setup.task) for address in Page(setup.browser.get(path).text).fetched}
    assets = sorted(address for address in addresses if address.startswith("/dashboard/assets/"))
    assert len(assets) == 7
    stranger = Browser(service=setup.service)  # the login page needs them
    for address in assets:
        plain, packed = stranger.get(address), stranger.get(address, Accept_Encoding="gzip")
        assert "immutable" in plain.headers["Cache-Control"]
        assert gzip.decompress(packed.body) == plain.body
        old = stranger.get(address.replace(address.split("/")[3], "0123456789abcdef"))
        assert (old.status, old.headers["Cache-Control"], old.body) == (200, "no-store", plain.body)
    assert stranger.get("/dashboard/assets/0/templates").status == 404


def test_texts_of_the_form_are_numbers_lists_and_ranges() -> None:
    settings = {"learning_rate": "1e-4, 3e-4", "r": "[8, 16]", "n_epochs": "2", "batch_size": "auto", "beta": ""}
    texts = FormTexts(
        model="alto-tiny",
        training_file="file-1",
        hyperparameters=settings,
        seed="7",
        suffix=" sums ",
        extra='{"lora_dropout": {"min": 0, "max": 0.1, "num": 2}}',
    )
    found = request_of(None, texts)  # type: ignore[arg-type]
    JobRequest(**found)
    assert found == {
        "model": "alto-tiny",
        "training_file": "file-1",
        "suffix": "sums",
        "seed": 7,
        "method": {
            "type": "supervised",
            "supervised": {
                "hyperparameters": {
                    "learning_rate": [1e-4, 3e-4],
                    "r": [8, 16],
                    "n_epochs": 2,
                    "batch_size": "auto",
                    "lora_dropout": {"min": 0, "max": 0.1, "num": 2},
                }
            },
        },
    }


@pytest.mark.parametrize(
    ("text", "grader"),
    [
        ("numeric", {"type": "numeric"}),
        ("{type: numeric, tolerance: 0.5}", {"type": "numeric", "tolerance": 0.5}),
        ('{"type": "json",\n "keys": ["a"]}', {"type": "json", "keys": ["a"]}),
    ],
)
def test_a_grader_of_the_form_is_a_scorer_or_a_mapping(text: str, grader: dict[str, object]) -> None:
    texts = FormTexts(model="alto-tiny", training_file="file-1", method="reinforcement", grader=text)
    found = request_of(None, texts)  # type: ignore[arg-type]
    assert JobRequest(**found).checked_grader() == grader


@pytest.mark.parametrize(
    ("own", "param"),
    [
        ({"hyperparameters": {"r": "[8"}}, "r"),
        ({"seed": "-1"}, "seed"),
        ({"seed": "4294967296"}, "seed"),
        ({"extra": "lora_dropout: ["}, "extra"),
        ({"extra": "just words"}, "extra"),
        ({"extra": "3: 4"}, "extra"),
        ({"hyperparameters": {"r": "8"}, "extra": "r: 16"}, "extra"),
        ({"method": "reinforcement"}, "grader"),
        ({"method": "reinforcement", "grader": "[1, 2"}, "grader"),
        ({"method": "reinforcement", "grader": "7"}, "grader"),
    ],
)
def test_faults_of_the_form_name_their_field(own: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        request_of(None, FormTexts(**{"model": "alto-tiny", "training_file": "file-1", **own}))  # type: ignore[arg-type]
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: expected ")


BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file that runs wait for in their middle."""
    return tmp_path / "go"


@pytest.fixture
def service(tmp_path: Path, gate: Path) -> Iterator[Served]:
    root = tmp_path / "service"
    plane = simulated_plane(root, lambda: SimulatedCluster(duration_s=0.1, waits_for=gate))
    with served(root, open_plane=plane) as found:
        yield found


def running(service: Served, client: openai.OpenAI) -> str:
    """Start a task; return its id in the middle of its run."""
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client)).id
    wait_for(lambda: client.fine_tuning.jobs.retrieve(job).status == "running")
    wait_for(lambda: sum(event.type == "metrics" for event in client.fine_tuning.jobs.list_events(job, limit=100)) >= 4)
    return job


def shown(service: Served, path: str) -> str:
    answer = httpx2.get(f"{service.url}{path}")
    assert answer.status_code == 200
    return answer.text


def test_a_paused_task_is_paused_on_the_cluster_page_and_there_once(service: Served, gate: Path) -> None:
    client = service.client()
    job = running(service, client)
    client.fine_tuning.jobs.pause(job)
    assert service.coordinator is not None
    coordinator = service.coordinator
    wait_for(lambda: job not in coordinator._live)

    def lines() -> list[str]:
        table = re.search(r'<table class="queue">.*?</table>', shown(service, "/cluster"), re.DOTALL)
        assert table is not None
        return re.findall(r"<tr>.*?</tr>", table[0], re.DOTALL)[1:]

    (line,) = lines()
    assert ">paused<" in line
    assert f'href="/tasks/{job}" title="{job}"' in line
    assert f">{job[:14]}…</a>" in line, "ids are short"
    gate.touch()
    client.fine_tuning.jobs.resume(job)
    assert service.finished(client, job).status == "succeeded"
    wait_for(lambda: ">finished<" in lines()[0])
    assert len(lines()) == 1


def test_time_goes_on_for_a_task_that_runs(service: Served) -> None:
    running(service, service.client())
    control = service.service.settings.root / "control"
    (journal,) = control.glob("*/journal.jsonl")
    before = journal.read_bytes()

    def cluster() -> tuple[float, float, str]:
        actual = json.loads(shown(service, "/api/cluster"))["actual"][0]["duration_s"]
        found = json.loads(shown(service, "/dashboard/cluster"))
        (bar,) = (trace["x"][0] for trace in found["gantt"]["traces"] if trace["meta"]["kind"] == "actual")
        return actual, bar, re.findall(r'<td class="number">([^<]*)</td>', found["fragments"]["queue"])[-1]

    first = cluster()
    wait_for(lambda: all(now != then for now, then in zip(cluster(), first, strict=True)))
    assert cluster()[0] > first[0]
    assert journal.read_bytes() == before, "though nothing was written"


def test_a_failed_task_trains_nothing_any_more(service: Served) -> None:
    job = running(service, service.client())
    figures = json.loads(shown(service, f"/dashboard/tasks/{job}"))["figures"]
    assert "training (" in json.dumps(figures["validation"])
    with service.service.store.writing() as session:
        row = lock_job(session, job)
        assert row is not None
        row.status = "failed"
    now = json.loads(shown(service, f"/dashboard/tasks/{job}"))
    assert "training (" not in json.dumps(now["figures"])
    assert "failed (" in json.dumps(now["figures"]["validation"])
    assert 'data-role="diverging"></i>failed' in now["fragments"]["heading"], "the warning colour"
    assert "Time saved" not in now["fragments"]["numbers"]


def test_results_that_were_deleted_have_no_links(service: Served, gate: Path) -> None:
    gate.touch()
    client = service.client()
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client)).id
    done = service.finished(client, job)
    links = (f"/v1/files/{done.result_files[0]}/content", "/adapter")
    page = shown(service, f"/tasks/{job}")
    assert all(link in page for link in links)
    client.files.delete(done.result_files[0])
    client.models.delete(done.fine_tuned_model)
    page = shown(service, f"/tasks/{job}")
    assert not any(link in page for link in links)
    assert f"/api/tasks/{job}/report" in page


def ended(job: str, reason: ExitReason, position: int) -> JobHistory:
    return JobHistory(
        job=job,
        position=position,
        samples_budgeted=100,
        samples_at_end=40,
        stage=Stage.EXITED,
        exit_reason=reason,
    )


def test_only_rules_save() -> None:
    history = RunHistory()
    reasons = (ExitReason.UNDERPERFORMING, ExitReason.STOPPED, ExitReason.FAILED)
    history.jobs = {reason: ended(reason, reason, number) for number, reason in enumerate(reasons)}
    found = savings_of(history, "succeeded")
    assert (found.samples, found.share) == (60, pytest.approx(0.2))
    assert savings_of(history, "failed").samples == 0


def test_unknown_addresses_are_pages_for_browsers(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        for path in ("/nowhere", "/api/nowhere", "/api/tasks/none"):
            answer = httpx2.get(f"{service.url}{path}", headers=BROWSER)
            assert answer.status_code == 404
            assert "There is no such page" in Page(answer.text).text
            assert "Content-Security-Policy" in answer.headers
            assert httpx2.get(f"{service.url}{path}").json()["error"]["type"] == "not_found_error"


def test_a_database_that_is_gone_is_a_page_for_browsers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Store) -> None:
        raise OperationalError("SELECT 1", {}, Exception("gone"))

    with served(tmp_path) as service:
        monkeypatch.setattr(Store, "reading", fail)
        answer = httpx2.get(f"{service.url}/", headers=BROWSER)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
        assert "This page cannot be shown now" in Page(answer.text).text
        assert httpx2.get(f"{service.url}/api/tasks").json()["error"]["code"] == "database_unavailable"
