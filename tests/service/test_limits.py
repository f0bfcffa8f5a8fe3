"""Limits of tenants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from services import ROWS, served, wait_for
from sites import FIXED, Site, refused

from alto.runs.mailbox import MOST_KEPT
from alto.service.access import RateLimiter, create_key, create_tenant
from alto.service.errors import TooManyRequestsError
from alto.service.store.tables import JobRow
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster


def limited(site: Site, tenant: str, **limits: Any) -> str:
    with site.served.service.store.writing() as session:
        create_tenant(session, tenant, limits)
        return create_key(session, tenant)[1]


def test_requests_a_second_are_limited(site: Site) -> None:
    key = limited(site, "hasty", requests_per_s=0.2)
    answers = [site.send("GET", "/v1/models", key) for _ in range(3)]
    assert answers[0].status_code == 200
    refused(answers[-1], 429)
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    key = limited(site, "hasty-too", requests_per_s=1000)
    file = {"files": {"file": ("a", ROWS)}, "data": {"purpose": "fine-tune"}}
    assert site.send("POST", "/v1/files", key, **file).status_code == 200
    with site.served.service.rates._lock:
        left = site.served.service.rates._buckets["hasty-too"][0]
    assert left >= 4998.9, "a request with a body is one request"
    assert site.send("GET", "/v1/models").status_code == 200, "others are not limited"


def test_a_tenant_that_was_quiet_has_five_seconds_of_requests_and_no_more() -> None:
    clock_s = 0.0
    rates = RateLimiter(lambda: clock_s)

    for pause_s, num_answered in ((0, 10), (1, 2), (1000, 10)):
        clock_s += pause_s
        for _ in range(num_answered):
            rates.take("a", 2.0)
        with pytest.raises(TooManyRequestsError, match="try again in 1 s"):
            rates.take("a", 2.0)


def test_open_tasks_are_limited(site: Site) -> None:
    key = limited(site, "busy", max_tasks=1)
    site.keys["busy"] = key
    site.ids["busy"] = {"file_id": site.upload("busy")}
    with site.served.service.store.writing() as session:
        row = session.query(JobRow).filter_by(tenant="tenant-a").first()
        assert row is not None
        session.add(JobRow(**{column.name: getattr(row, column.name) for column in JobRow.__table__.columns
                              if column.name not in ("number", "id", "tenant", "status")},
                           id="ftjob-busy", tenant="busy", status="paused"))  # fmt: skip
    answer = site.job("busy")
    assert refused(answer, 429)["code"] == "too_many_jobs"
    assert int(answer.headers["retry-after"]) <= 60
    assert answer.headers["x-should-retry"] == "false"
    assert site.send("POST", "/v1/fine_tuning/jobs/ftjob-busy/cancel", "busy").status_code == 200
    assert site.job("busy").status_code == 200


def test_bytes_are_limited_those_of_uploads_too(site: Site) -> None:
    site.keys["full"] = limited(site, "full", max_bytes=2 * len(ROWS))
    site.upload("full")
    about = {"bytes": len(ROWS), "filename": "a", "mime_type": "a", "purpose": "fine-tune"}
    upload = site.send("POST", "/v1/uploads", "full", json=about).json()["id"]
    file = {"files": {"file": ("a", ROWS[:100])}, "data": {"purpose": "fine-tune"}}
    for answer in (
        site.send("POST", "/v1/files", "full", **file),
        site.send("POST", "/v1/uploads", "full", json=about),
    ):
        assert refused(answer, 429)["code"] == "storage_quota_exceeded"
    part = site.send("POST", f"/v1/uploads/{upload}/parts", "full", files={"data": ("a", ROWS)}).json()["id"]
    done = site.send("POST", f"/v1/uploads/{upload}/complete", "full", json={"part_ids": [part]})
    assert done.json()["file"]["bytes"] == len(ROWS)
    refused(site.send("POST", "/v1/files", "full", **file), 429)
    site.send("DELETE", f"/v1/files/{done.json()['file']['id']}", "full")
    assert site.send("POST", "/v1/files", "full", **file).status_code == 200


def test_folders_of_runs_count_too(site: Site) -> None:
    site.keys["large"] = limited(site, "large", max_bytes=3 * len(ROWS))
    site.ids["large"] = {"file_id": site.upload("large")}
    run = site.served.service.settings.root / "runs" / "large" / "ftjob-large"
    (run / "jobs" / "job-000" / "last").mkdir(parents=True)
    state = run / "jobs" / "job-000" / "last" / "optimizer.safetensors"
    state.write_bytes(b"x" * len(ROWS))
    assert site.served.service.run_bytes("large") == len(ROWS)
    assert site.job("large").status_code == 200, "all that is allowed, and no more"
    state.write_bytes(b"x" * 3 * len(ROWS))
    file = {"files": {"file": ("a", ROWS)}, "data": {"purpose": "fine-tune"}}
    about = {"bytes": 1, "filename": "a", "mime_type": "a", "purpose": "fine-tune"}
    for answer in (
        site.send("POST", "/v1/files", "large", **file),
        site.send("POST", "/v1/uploads", "large", json=about),
        site.job("large"),
    ):
        error = refused(answer, 429)
        assert error["code"] == "storage_quota_exceeded"
        assert f"found {len(ROWS)} bytes of files, " in error["message"]
        assert "wait until tasks end and their checkpoints are removed" in error["message"]
    assert site.job("a").status_code == 200, "others are not limited"


def test_gpus_are_limited(site: Site) -> None:
    site.keys["small"] = limited(site, "small", max_gpus=2)
    site.ids["small"] = {"file_id": site.upload("small")}
    assert site.job("small", hyperparameters=FIXED | {"num_gpus": 2}).status_code == 200
    assert refused(site.job("small", hyperparameters=FIXED | {"num_gpus": 3}))["code"] == "too_many_gpus"


def test_followers_are_limited_before_their_streams_begin(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from alto.service.api.streams import Followers

    monkeypatch.setattr(Followers, "follow", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr(Followers, "check_room", Followers.check_room)
    # a process without room for any
    with served(site.served.service.settings.root / "other") as other:
        file = httpx2.post(f"{other.url}/v1/files", files={"file": ("a", ROWS)}, data={"purpose": "fine-tune"}).json()
        body = {"model": "alto-tiny", "training_file": file["id"]}
        job = httpx2.post(f"{other.url}/v1/fine_tuning/jobs", json=body).json()["id"]
        monkeypatch.setattr(Followers, "check_room", _no_room)
        refused(httpx2.get(f"{other.url}/api/tasks/{job}/events"), 503)


def _no_room(self: Any) -> None:
    from alto.service.errors import ApiError

    raise ApiError(503, "full", headers={"Retry-After": "10"})


def test_clones_are_limited(tmp_path: Path) -> None:
    plane = simulated_plane(tmp_path, lambda: SimulatedCluster(duration_s=60))
    with served(tmp_path, open_plane=plane, max_jobs=2) as found, httpx2.Client(base_url=found.url, timeout=60) as http:
        file = http.post("/v1/files", files={"file": ("a", ROWS)}, data={"purpose": "fine-tune"}).json()["id"]
        body = {"model": "alto-tiny", "training_file": file, "hyperparameters": FIXED}
        path = f"/api/tasks/{http.post('/v1/fine_tuning/jobs', json=body).json()['id']}"
        wait_for(lambda: bool(http.get(path).json()["jobs"]))
        assert refused(http.post(f"{path}/jobs/job-000/clone", json={}))["code"] == "too_many_configurations"
        assert http.post(f"{path.replace('/api/tasks', '/v1/fine_tuning/jobs')}/pause").status_code == 200
        assert refused(http.post(f"{path}/jobs/job-000/clone", json={}))["code"] == "too_many_configurations"
        error = refused(http.post(f"{path}/jobs/none/stop"), 404)
        assert error["code"] == "job_not_found"
        assert error["message"] == "job: expected a job of this task, found none named 'none'"


def test_clones_that_wait_count_and_the_mailbox_is_bounded(tmp_path: Path) -> None:
    plane = simulated_plane(tmp_path, lambda: SimulatedCluster(duration_s=60))
    with served(tmp_path, open_plane=plane, max_jobs=4) as found, httpx2.Client(base_url=found.url, timeout=60) as http:
        file = http.post("/v1/files", files={"file": ("a", ROWS)}, data={"purpose": "fine-tune"}).json()["id"]
        body = {"model": "alto-tiny", "training_file": file, "hyperparameters": FIXED}
        job = http.post("/v1/fine_tuning/jobs", json=body).json()["id"]
        path = f"/api/tasks/{job}"
        wait_for(lambda: len(http.get(path).json()["jobs"]) == 2)
        assert http.post(f"/v1/fine_tuning/jobs/{job}/pause").json()["status"] == "paused"
        answers = [http.post(f"{path}/jobs/job-000/clone", json={"changes": {"n_epochs": 2}}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 400]
        error = refused(answers[2])
        assert error["code"] == "too_many_configurations"
        assert error["message"].startswith("job: expected a task with fewer than 4 jobs, found 4 jobs")
        commands = [json.loads(each.read_bytes()) for each in tmp_path.glob("runs/*/*/control/*.command.json")]
        assert [command["changes"] for command in commands] == [{"num_train_epochs": 2}] * 2
        for _ in range(MOST_KEPT - 2):
            assert http.post(f"{path}/jobs/job-001/stop").status_code == 200
        assert refused(http.post(f"{path}/jobs/job-001/stop"), 429)["code"] == "too_many_commands"
