"""Make a small base model: ``alto-tiny``, which ships inside the package, or the larger ``alto-small`` for recordings.

The model is a Llama-architecture causal LM of about one (or ten) million parameters, with a byte-level BPE tokenizer
and a chat template, trained from scratch on public-domain books and short reasoning chains. The model card has the
recipe and the held-out losses, so that the folder documents its own origin.

    python -m tools.train_base --data ../shared/data --output src/alto/assets/alto-tiny
    python -m tools.train_base --size small --data ../shared/data --output build/alto-small

It takes about half an hour (an hour) on two CPU cores. GSM8K is never read, because adapters are tuned and judged on
it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '<|assistant|>' }}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{%- else -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

VOCAB_SIZE = 2048
SEQUENCE_LENGTH = 512
SEQUENCES_PER_STEP = 16
HELD_OUT_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Shape and training of a model."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    key_value_heads: int
    steps: int
    peak_learning_rate: float


SIZES = {
    "tiny": Size(hidden=128, mlp=384, layers=4, heads=4, key_value_heads=2, steps=2600, peak_learning_rate=4e-3),
    "small": Size(hidden=384, mlp=1024, layers=6, heads=6, key_value_heads=3, steps=240, peak_learning_rate=2e-3),
}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a gzipped JSONL file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of ``VOCAB_SIZE`` entries; digits stay separate, so that arithmetic can be learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=2048)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def chain_text(row: dict[str, Any]) -> str:
    """Return a reasoning chain in the chat form that tuning will use."""
    return f"{USER}{row['prompt']}{END}{ASSISTANT}{row['response']}{END}"


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str], ending: str) -> torch.Tensor:
    """Return all texts end to end as one vector of token ids."""
    encoded = tokenizer([text + ending for text in texts], add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in ids], dtype=torch.long)


def split_held_out(texts: list[str], rng: random.Random) -> tuple[list[str], list[str]]:
    """Shuffle, then cut off ``HELD_OUT_SHARE`` (at least two texts)."""
    texts = texts[:]
    rng.shuffle(texts)
    cut = max(2, int(len(texts) * HELD_OUT_SHARE))
    return texts[cut:], texts[:cut]


def batches(streams: list[torch.Tensor], seed: int) -> Iterator[torch.Tensor]:
    """Yield endless batches ``[SEQUENCES_PER_STEP, SEQUENCE_LENGTH]``; every stream contributes an equal part of
    each."""
    generator = torch.Generator().manual_seed(seed)
    per_stream = SEQUENCES_PER_STEP // len(streams)
    while True:
        rows = []
        for stream in streams:
            starts = torch.randint(0, stream.numel() - SEQUENCE_LENGTH, (per_stream,), generator=generator)
            rows += [stream[start : start + SEQUENCE_LENGTH] for start in starts.tolist()]
        yield torch.stack(rows)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: torch.Tensor, max_windows: int = 64) -> float:
    """Return the mean next-token loss, in nats, over non-overlapping windows of a held-out stream."""
    model.eval()
    windows = stream[: stream.numel() // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)[:max_windows]
    losses = [model(input_ids=window, labels=window).loss.item() for window in windows.split(16)]
    model.train()
    return sum(losses) / len(losses)


def learning_rate_at(step: int, num_steps: int, peak: float) -> float:
    """Return the learning rate: a linear warmup over the first 3 %, then a cosine to a twentieth of the peak."""
    warmup = max(1, int(0.03 * num_steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def model_card(name: str, size: Size, figures: dict[str, Any]) -> str:
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A Llama-architecture causal language model of {figures["num_parameters"]:,} parameters, made to be tuned: small enough
that a sweep of LoRA jobs trains on a CPU in minutes, real enough (tokenizer, chat template, grouped-query attention)
that everything works as on a large model. It is not useful for anything else.

| | |
|---|---|
| architecture | Llama: hidden {size.hidden}, {size.layers} layers, {size.heads} heads ({size.key_value_heads} key/value), MLP {size.mlp}, tied embeddings, float32 |
| tokenizer | byte-level BPE, {figures["vocab_size"]} entries, single digits |
| chat form | `<|user|>…<|end|><|assistant|>…<|end|>`; EOS is `<|end|>` |
| data | public-domain books (`text_books`), short reasoning chains (`cot_flan`: aqua, ecqa, creak, strategyqa, qasc, sensemaking; Apache-2.0), half and half; no GSM8K |
| training | {figures["num_steps"]} steps of {SEQUENCES_PER_STEP} × {SEQUENCE_LENGTH} tokens ({figures["num_tokens"] / 1e6:.1f} M), AdamW, peak learning rate {size.peak_learning_rate}, cosine, seed {figures["seed"]} |
| held-out loss | books {figures["held_out_books"]:.3f}, reasoning chains {figures["held_out_chains"]:.3f} nats per token (untrained: {math.log(figures["vocab_size"]):.2f}) |
| made by | `tools/train_base.py` |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with text_books/ and cot_flan/")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, help="other than the size's own")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    num_steps = arguments.steps or size.steps

    rng = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    books = [row["text"] for row in read_rows(arguments.data / "text_books" / "books.jsonl.gz")]
    chains = [chain_text(row) for row in read_rows(arguments.data / "cot_flan" / "train.jsonl.gz")]
    books, books_held_out = split_held_out(books, rng)
    chains, chains_held_out = split_held_out(chains, rng)

    tokenizer = train_tokenizer([book[:100_000] for book in books] + chains)
    tokenizer.save_pretrained(arguments.output)
    streams = [token_stream(tokenizer, books, END), token_stream(tokenizer, chains, "")]
    held_out = [token_stream(tokenizer, books_held_out, END), token_stream(tokenizer, chains_held_out, "")]

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    start = time.perf_counter()
    stream = batches(streams, arguments.seed)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, num_steps, size.peak_learning_rate)
        tokens = next(stream)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)

    figures = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocab_size": len(tokenizer),
        "num_steps": num_steps,
        "num_tokens": num_steps * SEQUENCES_PER_STEP * SEQUENCE_LENGTH,
        "seed": arguments.seed,
        "held_out_books": held_out_loss(model, held_out[0]),
        "held_out_chains": held_out_loss(model, held_out[1]),
    }
    model.save_pretrained(arguments.output)
    (arguments.output / "README.md").write_text(model_card(f"alto-{arguments.size}", size, figures), encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
