"""Export of adapters from a run: to folders, and to a private repository on the hub."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
import torch
import yaml
from exported import adapter_logits, apart, save_adapter, save_base
from huggingface_hub import HfApi, RepoUrl
from huggingface_hub.errors import HfHubHTTPError
from moe_models import build_mixture, random_adapter
from tiny import load_tokenizer
from transformers import AutoTokenizer

import alto
from alto.artifacts import winner
from alto.errors import HubError, RunNotFoundError, SpecError
from alto.lora import HEAD, AdapterWeights, read_saved_adapter, vllm_classifier_obstacle, vllm_obstacle, vllm_rank
from alto.spec import unserved_by_vllm
from alto.spec.data_keys import TOOLS_TEMPLATE, chat_template_text

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path / "base")


def header_of(folder: Path) -> dict[str, Any]:
    header: dict[str, Any] = yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    return header


def test_an_adapter_is_copied_with_the_tokenizer_and_template_it_was_trained_with(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "mine", r=12, lora_alpha=6, use_rslora=True)
    (adapter / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (adapter / "optimizer.pt").touch()
    result = alto.Engine().export(adapter, tmp_path / "out" / "served")
    folder = tmp_path / "out" / "served"
    assert result.files == (
        *("README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"),
        *("tokenizer.json", "tokenizer_config.json"),
    )
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (folder / name).read_bytes() == (adapter / name).read_bytes()
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    assert apart(adapter_logits(base, folder), adapter_logits(base, adapter)) == 0
    assert shlex.split(result.command) == [
        *("vllm", "serve", str(base), "--enable-lora", "--max-lora-rank", "16"),
        *("--chat-template", str(folder / "chat_template.jinja"), "--lora-modules", f"mine={folder}"),
    ]
    assert result.notes == ()


def test_an_adapter_of_the_shipped_tool_template_is_served_with_the_parser_of_its_calls(
    base: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(base, tmp_path / "mine")
    (adapter / "chat_template.jinja").write_text(chat_template_text(TOOLS_TEMPLATE), encoding="utf-8")
    parser = "--enable-auto-tool-choice --tool-call-parser hermes"
    served = alto.Engine().export(adapter, tmp_path / "served").command
    assert f" --chat-template {tmp_path}/served/chat_template.jinja {parser} --lora-modules " in served
    merged = alto.Engine().export(adapter, tmp_path / "merged", merged=True).command
    assert merged == f"vllm serve {tmp_path}/merged {parser}"


def test_the_rank_of_the_command_is_one_that_vllm_allows() -> None:
    assert [vllm_rank(rank) for rank in (1, 8, 9, 64, 65, 257, 321, 512)] == [8, 8, 16, 64, 128, 320, 512, 512]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"use_dora": True},
            "an adapter of low-rank matrices alone, which is what vLLM reads, found magnitudes (use_dora) in ",
        ),
        ({"modules_to_save": ["lm_head"]}, "found whole modules (modules_to_save) in "),
    ],
)
def test_what_vllm_cannot_serve_is_reported_instead_of_a_command(
    settings: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    result = alto.Engine().export(save_adapter(base, tmp_path / "mine", **settings), tmp_path / "out")
    assert result.command == ""
    (note,) = result.notes
    assert message in note
    assert note.endswith("--merged writes a model that vLLM serves.")


def test_vllm_serves_ranks_and_scales_that_differ_between_modules(base: Path, tmp_path: Path) -> None:
    settings = {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 12}, "alpha_pattern": {"k_proj": 2}}
    result = alto.Engine().export(save_adapter(base, tmp_path / "mine", **settings), tmp_path / "out")
    assert "--max-lora-rank 16" in result.command


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"r": 8, "rank_pattern": {"q_proj": 512}, "alpha_pattern": {"q_proj": 2}, "bias": "none"}, []),
        ({"r": 8, "use_dora": True, "bias": "all"}, ["use_dora", "bias"]),
        ({"r": 1024}, ["a rank above 512"]),
        (
            {"r": 8, "rank_pattern": (("q_proj", 600),), "modules_to_save": ["lm_head"]},
            ["modules_to_save", "a rank above 512"],
        ),
        ({}, []),
    ],
)
def test_settings_say_beforehand_what_vllm_cannot_serve(settings: dict[str, Any], names: list[str]) -> None:
    assert unserved_by_vllm(settings) == names


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_vllm_serves_adapters_on_the_vocabulary_of_some_models_only(module: str, base: Path, tmp_path: Path) -> None:
    adapter = read_saved_adapter(save_adapter(base, tmp_path / "mine"))
    weights = AdapterWeights({**adapter.weights, f"model.{module}": (torch.zeros(8, 4), torch.zeros(4, 8))})
    assert vllm_obstacle(replace(adapter, weights=weights), "llama") is None
    assert vllm_obstacle(adapter, "gemma3_text") is None
    found = vllm_obstacle(replace(adapter, weights=weights), "gemma3_text")
    assert found is not None
    assert found[1] == f"one that also has {module} of a gemma3_text"
    assert vllm_classifier_obstacle("llama") is None
    assert vllm_classifier_obstacle("gemma3_text") is not None


def test_every_kind_of_tensor_is_named_as_what_vllm_cannot_serve(base: Path, tmp_path: Path) -> None:
    adapter = read_saved_adapter(save_adapter(base, tmp_path / "mine"))
    extras = {HEAD: torch.zeros(2, 8), "model.layers.0.self_attn.q_proj.bias": torch.zeros(8)}
    with_head = replace(adapter, weights=AdapterWeights(adapter.weights, extras))
    assert vllm_obstacle(with_head, "llama") == (
        "an adapter of low-rank matrices alone, which is what vLLM reads",
        f"a classification head and biases (bias) in {adapter.folder}",
    )


def test_experts_that_vllm_reads_one_by_one_are_reported(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "mixtral")
    adapter = random_adapter(build_mixture("mixtral", vocab_size=len(load_tokenizer())), tmp_path / "mine")
    engine = alto.Engine()
    result = engine.export(adapter, tmp_path / "out", base=str(base))
    assert result.command == ""
    assert "--per-expert writes the adapter in that form" in result.notes[0]
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"


def test_the_card_of_a_folder_says_what_it_is_and_names_a_hub_model_alone(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "mine")
    (adapter / "README.md").unlink()  # PEFT wrote it
    alto.Engine().export(adapter, tmp_path / "out")
    assert header_of(tmp_path / "out") == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["alto", "lora", "transformers"],
    }
    assert f"LoRA adapter for `{base}`, rank 4" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_the_header_for_a_hub_model_is_that_of_peft(base: Path, tmp_path: Path) -> None:
    """PEFT's own card has the same keys and tags, in another order."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from alto.artifacts.card import adapter_tags, card_header, without_header

    adapter = save_adapter(base, tmp_path / "mine")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    model.save_pretrained(tmp_path / "by-peft")
    theirs = header_of(tmp_path / "by-peft")
    (tmp_path / "by-alto").mkdir()
    header = card_header(str(base), library="peft", pipeline="text-generation", tags=adapter_tags(str(base)))
    (tmp_path / "by-alto" / "README.md").write_text(f"{header}\ntext\n", encoding="utf-8")
    ours = header_of(tmp_path / "by-alto")
    assert {*ours.pop("tags")} == {*theirs.pop("tags"), "alto"}
    assert ours == theirs
    assert without_header(f"{header}\ntext\n") == "text\n"
    assert without_header("text\n") == "text\n"


def test_a_job_is_of_a_run_and_an_adapter_names_a_base(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "mine")
    with pytest.raises(RunNotFoundError, match=r"to look for the job job-001 in, found no task\.yaml"):
        alto.Engine().export(adapter, tmp_path / "out", job="job-001")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(SpecError, match="to name the base model, found that it does not; name it with --base"):
        alto.Engine().export(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_adapter(save_base(tmp_path / "base"), tmp_path / "mine")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the hub with the signatures of the real one, logged in as ``ann``."""
    found = create_autospec(HfApi, instance=True)
    found.create_repo.return_value = RepoUrl("https://huggingface.co/ann/mine")
    monkeypatch.setattr(winner, "HfApi", lambda: found)
    monkeypatch.setattr(winner, "get_token", lambda: "hf_token")
    return found


def test_the_finished_folder_is_uploaded_to_a_private_repository(adapter: Path, api: Any, tmp_path: Path) -> None:
    uploaded: list[list[str]] = []

    def upload(**given: Any) -> None:
        uploaded.append(sorted(map(str, Path(given["folder_path"]).iterdir())))

    api.upload_folder.side_effect = upload
    result = alto.Engine().export(adapter, tmp_path / "out", push_to_hub="ann/mine")
    assert result.url == "https://huggingface.co/ann/mine"
    assert uploaded == [[str(tmp_path / "out" / name) for name in result.files]]
    api.create_repo.assert_called_once_with("ann/mine", private=True, exist_ok=True)
    assert api.upload_folder.call_args.kwargs["repo_id"] == "ann/mine"


def test_without_a_token_nothing_is_written(
    adapter: Path, api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winner, "get_token", lambda: None)
    with pytest.raises(HubError, match="a token of the Hugging Face hub, found none; log in with: hf auth login"):
        alto.Engine().export(adapter, tmp_path / "out", push_to_hub="ann/mine")
    assert not (tmp_path / "out").exists()
    assert not api.method_calls


def test_a_token_that_the_hub_does_not_accept_is_found_before_anything_is_written(
    adapter: Path, api: Any, tmp_path: Path
) -> None:
    api.whoami.side_effect = HfHubHTTPError("401 Unauthorized", response=Mock(status_code=401))
    with pytest.raises(HubError, match="Hub rejected the token: 401 Unauthorized; log in with a token"):
        alto.Engine().export(adapter, tmp_path / "out", push_to_hub="ann/mine")
    api.whoami.side_effect = OSError("connection lost")
    with pytest.raises(HubError, match="Hub could not check the token: connection lost; check the connection"):
        alto.Engine().export(adapter, tmp_path / "out", push_to_hub="ann/mine")
    assert not (tmp_path / "out").exists()
    with pytest.raises(SpecError, match="expected a repository such as name or owner/name, found 'a/b/c'"):
        alto.Engine().export(adapter, tmp_path / "out", push_to_hub="a/b/c")


def test_a_folder_that_cannot_be_uploaded_stays(adapter: Path, api: Any, tmp_path: Path) -> None:
    api.upload_folder.side_effect = OSError("connection lost")
    with pytest.raises(
        HubError, match=r"failed: connection lost; the exported folder is complete; .*hf upload ann/mine"
    ):
        alto.Engine().export(adapter, tmp_path / "out", push_to_hub="ann/mine")
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
