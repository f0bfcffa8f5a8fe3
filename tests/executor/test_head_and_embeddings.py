"""A task whose jobs train different parts of the output head and the embeddings, from its file to PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny import load_tiny, load_tokenizer, make_task, random_llama, read_journal, run_task

from alto.evaluation import PeftCheck
from alto.runs import RunDir

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def test_a_search_over_them_trains_to_its_end_and_peft_has_the_same_losses(tmp_path: Path) -> None:
    space = {
        "paired": {
            "target_modules": ["all-linear", ["lm_head", "q_proj"], ["embed_tokens", "v_proj"], ["q_proj"]],
            "modules_to_save": [None, None, ["lm_head"], ["embed_tokens", "lm_head"]],
        },
        "lr": [0.01],
    }
    task = make_task(tmp_path, search_space=space, num_train_epochs=2, max_slots=3, early_exit={"enabled": False})
    run_dir = RunDir.create(tmp_path / "runs", task)
    result = run_task(task, run_dir)
    assert [job.exit_reason for job in result.jobs] == [None] * 4
    started = read_journal(run_dir.root)[0]
    assert sum("are one weight" in note for note in started["notes"]) == 1
    backbone, data = load_tiny(task)
    for job in result.jobs:
        folder = run_dir.job(job.job, "best")
        model = PeftModel.from_pretrained(random_llama(len(load_tokenizer())), folder).eval()
        with torch.no_grad():
            losses = [
                model(input_ids=ids[None], labels=torch.cat([ids.new_full((1,), -100), targets[:-1]])[None]).loss
                * int((targets >= 0).sum())
                for ids, targets in zip(data.validation.input_ids, data.validation.targets, strict=True)
            ]
        found = float(sum(losses)) / data.validation.num_trained_tokens
        assert found == pytest.approx(job.best_validation_loss, rel=1e-4)
        check = PeftCheck(backbone)(folder)
        assert (check.status, check.why) == ("equal", "")
