"""The story of a user of OpenAI's client, from the upload of a file to the fine-tuned model, with simulated
executors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from services import ROWS, Served, served, wait_for

from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("service")
    with served(root, open_plane=simulated_plane(root, lambda: SimulatedCluster(duration_s=0.5))) as found:
        yield found


@pytest.fixture
def client(service: Served) -> openai.OpenAI:
    return service.client()


def test_a_job_is_trained_and_returns_a_model(service: Served, client: openai.OpenAI) -> None:
    file = client.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune")
    assert client.files.wait_for_processing(file.id).status == "processed"
    hyperparameters = {"n_epochs": 1, "batch_size": "auto", "learning_rate": [1e-4, 3e-4], "r": [8, 64]}
    job = client.fine_tuning.jobs.create(
        model="alto-tiny",
        training_file=file.id,
        suffix="sums",
        metadata={"team": "a"},
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},  # type: ignore[typeddict-item]
    )
    assert job.status == "validating_files"
    found = service.finished(client, job.id)
    assert found.status == "succeeded", found.error
    assert found.fine_tuned_model == f"ft:alto-tiny:default:sums:{job.id.rpartition('-')[2][:12]}"
    assert found.trained_tokens == 2000
    assert client.models.retrieve(found.fine_tuned_model).owned_by == "default"
    checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert [point.step_number for point in checkpoints] == [100, 100, 75, 75, 50, 50, 25, 25]
    messages = [event.message for event in client.fine_tuning.jobs.list_events(job.id, limit=100)]
    assert messages[0] == "The job has successfully completed"
    assert messages[-1] == f"Created fine-tuning job: {job.id}"
    assert messages.count("Training 2 configurations") == 1
    curves = client.files.content(found.result_files[0]).text
    assert curves.startswith("job,step,progress,train_loss,valid_loss,test_loss")


def test_a_paused_job_continues_where_it_was(tmp_path: Path) -> None:
    gate = tmp_path / "go"
    plane = simulated_plane(tmp_path, lambda: SimulatedCluster(duration_s=0.1, waits_for=gate))
    with served(tmp_path, open_plane=plane) as service:
        client = service.client()
        job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client))
        wait_for(lambda: len(steps_of(client, job.id)) == 4)
        assert client.fine_tuning.jobs.pause(job.id).status == "paused"
        wait_for(lambda: job.id not in service.coordinator._live)  # type: ignore[union-attr]
        assert client.fine_tuning.jobs.retrieve(job.id).status == "paused"
        gate.touch()
        assert client.fine_tuning.jobs.resume(job.id).status in ("queued", "running")
        assert service.finished(client, job.id).status == "succeeded"
        steps = steps_of(client, job.id)
        assert len(steps) == len(set(steps)) == 8, "a step was reported twice"


def steps_of(client: openai.OpenAI, job: str) -> list[tuple[str, int]]:
    return [
        (event.data["job"], event.data["step"])  # type: ignore[index]
        for event in client.fine_tuning.jobs.list_events(job, limit=100)
        if event.type == "metrics"
    ]


def test_a_cancelled_job_ends(service: Served, client: openai.OpenAI) -> None:
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client))
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled", "a repeated request changes nothing"
    with pytest.raises(openai.BadRequestError, match=r"found ftjob-.* cancelled"):
        client.fine_tuning.jobs.resume(job.id)


def test_bad_rows_fail_a_job_before_it_is_queued(service: Served, client: openai.OpenAI) -> None:
    bad = ROWS + b'{"messages": "hello"}\n{"prompt": 3}\n'
    job = client.fine_tuning.jobs.create(model="alto-tiny", training_file=service.upload(client, bad))
    found = service.finished(client, job.id)
    assert found.status == "failed"
    assert found.error.code == "invalid_training_file"
    assert "41" in found.error.message
    assert "42" in found.error.message
    assert str(service.service.settings.root) not in found.error.message
    messages = [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
    assert not any("queued" in message for message in messages)
