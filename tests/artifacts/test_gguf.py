"""GGUF files: gguf's own reader finds the tensors, hyperparameters and tokens of the merged model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import save_adapter, save_base
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

import alto
from alto.artifacts.gguf import add_parameters, architecture_of, rope_factors
from alto.artifacts.gguf_vocabulary import _SPLITTERS, _TEXT, add_vocabulary
from alto.backbone import load_tokenizer
from alto.errors import ModelError, UnsupportedError
from alto.records import ExportResult
from alto.spec import BaseModelSpec

gguf = pytest.importorskip("gguf", reason="needs the extra 'gguf'")
quants = pytest.importorskip("gguf.quants")

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(tie_word_embeddings=True, **SIZES),
    "llama-bias": LlamaConfig(attention_bias=True, mlp_bias=True, **SIZES),
    "llama3": LlamaConfig(rope_parameters=LLAMA3, **SIZES),
    "mistral": MistralConfig(head_dim=16, sliding_window=None, **SIZES),
    # transformers adds a token to the tokenizer of a Qwen2
    "qwen2": Qwen2Config(**SIZES | {"vocab_size": 2056}),
    "qwen3": Qwen3Config(head_dim=16, **SIZES),
    "gemma3": Gemma3TextConfig(head_dim=16, query_pre_attn_scalar=16, sliding_window=64, **SIZES | {"pad_token_id": 0}),
}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def save_config(folder: Path, name: str) -> Path:
    tokenizer = load_tokenizer(BaseModelSpec(id="alto-tiny"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def exported(name: str, folder: Path, kind: Any) -> tuple[Any, dict[str, Tensor], PreTrainedConfig, ExportResult]:
    """Export GGUF; return its reader, and from the merged model the expected tensors by transformers' names."""
    adapter = save_adapter(save_config(folder / "base", name), folder / "adapter", target_modules="all-linear")
    alto.Engine().export(adapter, folder / "merged", merged=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    result = alto.Engine().export(adapter, folder / "gguf", gguf=kind)
    (file,) = (folder / "gguf").glob("*.gguf")
    tied = model.config.tie_word_embeddings
    expected = {key: value for key, value in model.state_dict().items() if not (tied and key.startswith("lm_head"))}
    return gguf.GGUFReader(file), expected, model.config, result


def their_name(name: str, arch: str = "llama") -> str:
    module, _, leaf = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{leaf}"
    _, _, layer, place = module.split(".", 3)
    places = LAYER | (GEMMA_NORMS if arch == "gemma3" else {})
    return f"blk.{layer}.{places[place]}.{leaf}"


def permuted(weight: Any, num_heads: int) -> Any:
    """Order the rows of queries and keys as llama.cpp's convert_hf_to_gguf.py does."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_has_the_tensors_of_the_merged_model(name: str, kind: Any, tmp_path: Path) -> None:
    reader, expected, config, _ = exported(name, tmp_path, kind)
    arch = "llama" if name.startswith(("llama", "mistral")) else name
    found = {tensor.name: tensor for tensor in reader.tensors}
    extra = {"rope_freqs.weight"} if name == "llama3" else set()
    assert set(found) == {their_name(key, arch) for key in expected} | extra
    for key, value in expected.items():
        tensor, array = found[their_name(key, arch)], value.numpy()
        if arch == "gemma3" and key.endswith("norm.weight"):
            array = array + 1
        if arch == "llama" and key.endswith(("q_proj.weight", "q_proj.bias")):
            array = permuted(array, config.num_attention_heads)
        if arch == "llama" and key.endswith(("k_proj.weight", "k_proj.bias")):
            array = permuted(array, config.num_key_value_heads)
        wanted = getattr(gguf.GGMLQuantizationType, "F32" if array.ndim == 1 else kind.upper())
        assert tensor.tensor_type == wanted, key
        assert tuple(reversed(tensor.shape.tolist())) == array.shape
        assert np.array_equal(tensor.data, quants.quantize(array, wanted)), key
        if array.ndim == 2 and kind == "q8_0":
            assert np.abs(quants.dequantize(tensor.data, wanted) - array).max() < np.abs(array).max() / 100


def test_rows_that_blocks_do_not_fill_are_float16(tmp_path: Path) -> None:
    adapter = save_adapter(save_base(tmp_path / "base"), tmp_path / "adapter")  # its down projection has rows of 48
    alto.Engine().export(adapter, tmp_path / "gguf", gguf="q8_0")
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"


def test_llama_cpp_rotates_the_permuted_rows_as_transformers_rotates_its_own(tmp_path: Path) -> None:
    """llama.cpp rotates neighbours (2i, 2i+1); transformers rotates i with i + D/2. The attention scores must agree."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config: Any = CONFIGS["llama"]
    dim, num_tokens = 8, 6
    torch.manual_seed(0)
    weights = {"q": torch.randn(4 * dim, 32), "k": torch.randn(4 * dim, 32)}
    hidden = torch.randn(num_tokens, 32)
    cos, sin = LlamaRotaryEmbedding(config)(hidden[None], torch.arange(num_tokens)[None])
    heads = {key: (hidden @ weight.T).view(1, num_tokens, 4, dim).transpose(1, 2) for key, weight in weights.items()}
    q, k = apply_rotary_pos_emb(heads["q"], heads["k"], cos, sin)
    expected = q @ k.transpose(-1, -2)

    def rotated(weight: Tensor) -> Tensor:
        pairs = (hidden @ torch.from_numpy(permuted(weight.numpy(), 4)).T).view(num_tokens, 4, dim // 2, 2)
        frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(num_tokens)[:, None] * frequencies
        turn = torch.polar(torch.ones_like(angles), angles)[:, None, :]
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn).flatten(2)
        return turned.transpose(0, 1)

    found = rotated(weights["q"]) @ rotated(weights["k"]).transpose(-1, -2)
    assert torch.allclose(found, expected[0], atol=1e-4, rtol=1e-4)


def test_the_factors_of_llama_3_are_those_of_the_models_own_frequencies() -> None:
    model = LlamaForCausalLM(CONFIGS["llama3"])
    factors = rope_factors(CONFIGS["llama3"], model.model.rotary_emb.inv_freq)
    assert factors is not None
    # short wavelengths stay, long ones are 8 times as long
    assert factors.tolist() == pytest.approx([1.0, 8.0, 8.0, 8.0], rel=1e-5)
    assert rope_factors(CONFIGS["llama"], model.model.rotary_emb.inv_freq) is None


def test_the_metadata_is_that_of_llama_cpp(tmp_path: Path) -> None:
    adapter = save_adapter(save_config(tmp_path / "base", "llama"), tmp_path / "adapter")
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (adapter / "chat_template.jinja").write_text(template, encoding="utf-8")
    result = alto.Engine().export(adapter, tmp_path / "gguf", gguf="q8_0")
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    assert result.files == ("Modelfile", "README.md", "adapter-Q8_0.gguf")
    assert result.command == f"llama-server --jinja -m {file}"
    found = {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    expected = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "adapter",
        "general.file_type": 7,
        "general.quantization_version": 2,
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 8,
        "llama.attention.value_length": 8,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 8,
        "llama.vocab_size": 2048,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": template,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert "tokenizer.ggml.bos_token_id" not in found
    assert found["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(2048))
    assert found["tokenizer.ggml.token_type"] == [3] * 5 + [1] * 2043  # five control tokens, then normal ones
    texts = [_TEXT, "17 plus 4?", " It is 21. Yes.\n"]
    assert [rebuilt(found).encode(text).ids for text in texts] == [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts
    ]


def rebuilt(found: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer that a file describes, as llama.cpp reads it."""
    vocabulary = {text: index for index, text in enumerate(found["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in found["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = _SPLITTERS[found["tokenizer.ggml.pre"]].build()
    return tokenizer


class Writer:
    def __init__(self) -> None:
        self.added: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.added.__setitem__(name.removeprefix("add_"), value)


def byte_bpe(splitter: Any, **options: Any) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE({**vocabulary, "ab": len(letters)}, [("a", "b")], **options))
    backend.pre_tokenizer, backend.decoder = splitter, decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", _SPLITTERS)
def test_every_way_to_split_is_recognised_and_no_two_are_the_same(name: str) -> None:
    splitter = _SPLITTERS[name]
    tokenizer = byte_bpe(splitter.build(), ignore_merges=bool(splitter.ignores_merges))
    writer = Writer()
    add_vocabulary(writer, tokenizer, 300)
    assert writer.added["tokenizer_pre"] == name
    assert writer.added["token_merges"] == ["a b"]
    assert writer.added["token_list"][259:] == [f"[PAD{index}]" for index in range(259, 300)]
    assert writer.added["token_types"][257:260] == [3, 3, 5]


@pytest.mark.parametrize(
    ("added", "begins", "ends"),
    [("$A", False, False), ("<s> $A", True, False), ("$A </s>", False, True), ("<s> $A </s>", True, True)],
)
def test_tokens_that_are_added_to_every_text_are_marked_and_no_others(added: str, begins: bool, ends: bool) -> None:
    """A tokenizer may have both tokens and add neither, as Qwen's do."""
    writer = Writer()
    add_vocabulary(writer, adding(added), 259)
    assert (writer.added["add_bos_token"], writer.added["add_eos_token"]) == (begins, ends)
    assert (writer.added["bos_token_id"], writer.added["eos_token_id"]) == (257, 258)


def test_other_additions_to_every_text_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="expected a tokenizer that adds only the BOS and EOS tokens"):
        add_vocabulary(Writer(), adding("<s> <s> $A"), 259)


def adding(template: str) -> PreTrainedTokenizerFast:
    backend = byte_bpe(_SPLITTERS["gpt-2"].build()).backend_tokenizer
    tokens = [("<s>", 257), ("</s>", 258)]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "a byte-level BPE tokenizer, found WordLevel"),
        (Tokenizer(models.Unigram([("a", 0.0)])), "a byte-level BPE tokenizer, found Unigram"),
        (
            Tokenizer(models.BPE({"a": 0}, [], byte_fallback=True)),
            "a SentencePiece tokenizer that only replaces spaces, as Gemma's, found other steps",
        ),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(backend: Tokenizer, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{message}.*convert_hf_to_gguf"):
        add_vocabulary(Writer(), PreTrainedTokenizerFast(tokenizer_object=backend), 10)


def sentencepiece(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """Build a tokenizer like Gemma's."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abc", "▁▁"]
    vocabulary = {text: index for index, text in enumerate(dict.fromkeys([*letters, *map("".join, merges)]))}
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<bos>", "<eos>", "<unk>"])
    backend.add_tokens([AddedToken("▁▁", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")


def by_score(text: str, tokens: list[str], scores: list[float]) -> list[str]:
    """Split ``text`` as llama.cpp does for SentencePiece: the pair with the highest score is merged first."""
    known = dict(zip(tokens, scores, strict=True))
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-known[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in known]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_an_added_token_that_the_model_has_no_row_for_is_left_out() -> None:
    tokenizer, writer = sentencepiece([("a", "b")]), Writer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    num_rows = len(tokenizer) - 1
    assert tokenizer.convert_tokens_to_ids("<image_soft_token>") == num_rows
    add_vocabulary(writer, tokenizer, num_rows)
    assert len(writer.added["token_list"]) == num_rows
    assert "<image_soft_token>" not in writer.added["token_list"]


def test_scores_merge_in_the_order_of_a_sentencepiece_tokenizer() -> None:
    merges = [("b", "c"), ("a", "b"), ("▁", "a"), ("a", "bc"), ("ab", "c"), ("▁", "abc"), ("▁a", "bc")]
    tokenizer, writer = sentencepiece(merges), Writer()
    add_vocabulary(writer, tokenizer, 300)
    added = writer.added
    assert (added["tokenizer_model"], added["tokenizer_pre"], added["add_space_prefix"]) == ("llama", "default", False)
    tokens, kinds = added["token_list"], added["token_types"]
    assert tokens[tokenizer.convert_tokens_to_ids("▁▁")] == "  ", "llama.cpp looks for it before it replaces spaces"
    assert {kinds[tokens.index(text)].name for text in ("<0x00>", "<0xFF>")} == {"BYTE"}
    assert {kinds[tokens.index(text)].name for text in ("<unk>", "<bos>", "<eos>")} == {"CONTROL"}
    assert kinds[tokens.index("  ")].name == "USER_DEFINED"
    for text in ("abc", "ab abc bca cab", "aabbcc a", "bcbcab"):
        assert by_score(text, tokens, added["token_scores"]) == tokenizer.tokenize(text)
    for first, second in ((("b", "c"), ("a", "b")), (("a", "b"), ("b", "c"))):
        tokenizer, writer = sentencepiece([first, second]), Writer()
        add_vocabulary(writer, tokenizer, 300)
        parts = by_score("abc", writer.added["token_list"], writer.added["token_scores"])
        assert parts == tokenizer.tokenize("abc") == (["a", "bc"] if first == ("b", "c") else ["ab", "c"])
    with pytest.raises(UnsupportedError, match="to follow each other, found those of 'abc' in two places"):
        add_vocabulary(Writer(), sentencepiece([("b", "c"), ("a", "b"), ("a", "bc"), ("c", "a"), ("ab", "c")]), 300)


def test_a_splitter_that_llama_cpp_does_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"splits texts like one of gpt-2, .*found a different splitter"):
        add_vocabulary(Writer(), byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)), 259)
    with pytest.raises(UnsupportedError, match="at most 200 tokens"):
        add_vocabulary(Writer(), byte_bpe(_SPLITTERS["gpt-2"].build()), 200)


def gemma(**changes: Any) -> Gemma3TextConfig:
    return Gemma3TextConfig(**{"head_dim": 16, "query_pre_attn_scalar": 16, **SIZES, **changes})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(hidden_act="gelu", **SIZES), "expected hidden_act silu, found 'gelu'"),
        (Qwen3Config(attention_bias=True, **SIZES), "expected a Qwen3 model without biases"),
        (
            Qwen2Config(rope_parameters=LLAMA3, **SIZES),
            "expected rope_type default, linear, yarn, found 'llama3'",
        ),
        (gemma(query_pre_attn_scalar=8), "a Gemma 3 with query_pre_attn_scalar 16, found 8"),
        (gemma(layer_types=["full_attention", "sliding_attention"]), r"with layer_types \[False, False\]"),
        (gemma(use_bidirectional_attention=True), "with use_bidirectional_attention False, found True"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        architecture_of(config)


def test_scaled_positions_and_windows_are_in_the_metadata() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
    writer = Writer()
    assert add_parameters(writer, Qwen2Config(rope_parameters=yarn, **SIZES), "qwen2") == ()
    assert writer.added["rope_scaling_type"] == gguf.RopeScalingType.YARN
    assert (writer.added["rope_scaling_factor"], writer.added["rope_scaling_orig_ctx_len"]) == (4.0, 64)
    assert writer.added["rope_freq_base"] == 1e6
    writer = Writer()
    (note,) = add_parameters(writer, MistralConfig(sliding_window=100, **SIZES), "llama")
    assert writer.added["context_length"] == 100
    assert "context length is 100 tokens" in note
    writer = Writer()
    assert add_parameters(writer, gemma(sliding_window=64), "gemma3") == ()
    assert (writer.added["context_length"], writer.added["sliding_window"]) == (256, 64)
    assert writer.added["rope_freq_base"] == 1e6, "of the layers that attend to the whole text"


def test_models_that_are_not_written_are_named_before_weights_are_read(tmp_path: Path) -> None:
    adapter = save_adapter(
        save_base(tmp_path / "base", "gpt2"), tmp_path / "adapter", target_modules=["c_attn"], fan_in_fan_out=True
    )
    (tmp_path / "base" / "model.safetensors").unlink()
    with pytest.raises(
        UnsupportedError, match=r"the kinds llama, mistral, qwen2, qwen3, gemma3_text, found 'gpt2'; .*--merged"
    ):
        alto.Engine().export(adapter, tmp_path / "gguf", gguf="f16")
    assert not (tmp_path / "gguf").exists()


def test_weights_that_float16_cannot_hold_are_an_error(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e5
    model.save_pretrained(base)
    with pytest.raises(ModelError, match=r"which float16 holds, found 100000 in blk\.1\.ffn_up\.weight"):
        alto.Engine().export(adapter, tmp_path / "gguf", gguf="f16")


def test_alto_tiny_itself_is_written(tmp_path: Path) -> None:
    from alto.backbone import resolve_model

    adapter = save_adapter(Path(resolve_model("alto-tiny")), tmp_path / "adapter")
    alto.Engine().export(adapter, tmp_path / "gguf", gguf="q8_0")
    reader = gguf.GGUFReader(tmp_path / "gguf" / "adapter-Q8_0.gguf")
    assert len(reader.tensors) == 2 + 4 * 9
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4


ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 16},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "up_proj": 6},
        "alpha_pattern": {"down_proj": 3, "layers.1.self_attn.k_proj": 5},
    },
    "ends": {"target_modules": ["lm_head", "embed_tokens", "k_proj"]},
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "plain"),
        ("llama3", "rslora"),
        ("mistral", "patterns"),
        ("qwen2", "patterns"),
        ("gemma3", "patterns"),
        ("llama3", "ends"),
    ],
)
def test_an_adapter_is_the_difference_between_the_merged_model_and_its_base(
    name: str, kind: str, tmp_path: Path
) -> None:
    base = save_config(tmp_path / "base", name)
    adapter = save_adapter(base, tmp_path / "adapter", **{"target_modules": "all-linear"} | ADAPTERS[kind])
    alto.Engine().export(adapter, tmp_path / "merged", merged=True)
    merged, frozen = (
        AutoModelForCausalLM.from_pretrained(tmp_path / each, dtype=torch.float32) for each in ("merged", "base")
    )
    result = alto.Engine().export(adapter, tmp_path / "gguf", gguf="adapter")
    assert result.files == ("Modelfile", "README.md", "adapter-lora.gguf")
    assert result.command == f"llama-server --jinja -m base.gguf --lora {tmp_path / 'gguf' / 'adapter-lora.gguf'}"
    reader = gguf.GGUFReader(tmp_path / "gguf" / "adapter-lora.gguf")
    assert [reader.fields[key].contents() for key in ("general.type", "adapter.type", "adapter.lora.alpha")] == [
        "adapter",
        "lora",
        0.0,  # llama.cpp multiplies by alpha / r unless alpha is 0
    ]
    found = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    before, changed = frozen.state_dict(), 0
    for key, weight in merged.state_dict().items():
        difference = (weight - before[key]).numpy()
        if not difference.any() or (key.startswith("lm_head") and merged.config.tie_word_embeddings):
            continue
        changed += 1
        for layer, number in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if layer in key and not name.startswith(("qwen", "gemma")):
                difference = permuted(difference, getattr(merged.config, number))
        a, b = (found.pop(f"{their_name(key)}.lora_{side}") for side in "ab")
        product = a @ b.T if "embed_tokens" in key else b @ a
        np.testing.assert_allclose(product, difference, atol=1e-5)
    assert changed
    assert not found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, r"low-rank matrices alone, found magnitudes \(use_dora\); --gguf f16 writes"),
        ({"modules_to_save": ["lm_head"]}, r"low-rank matrices alone, found whole modules"),
        ({"target_modules": ["lm_head"]}, r"tied to the output head, found lm_head"),
    ],
)
def test_an_adapter_that_llama_cpp_cannot_apply_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    adapter = save_adapter(save_config(tmp_path / "base", "llama"), tmp_path / "adapter", **changes)
    with pytest.raises(UnsupportedError, match=message):
        alto.Engine().export(adapter, tmp_path / "gguf", gguf="adapter")
    assert not (tmp_path / "gguf").exists()
