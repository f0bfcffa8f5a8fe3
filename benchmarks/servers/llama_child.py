"""Loads a GGUF file with llama.cpp and scores answers: ``python llama_child.py FILE [LORA] < answers > scores``.

It runs in an environment that has ``llama-cpp-python`` and nothing of ALTO.
"""

import json
import sys

import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_chat_format import Jinja2ChatFormatter


def main(file: str, lora: "str | None" = None) -> None:
    answers = json.load(sys.stdin)
    model = Llama(file, lora_path=lora, n_ctx=512, n_threads=2, logits_all=True, verbose=False)
    template = model.metadata.get("tokenizer.chat_template")
    found = []
    for answer in answers:
        prompt = prompt_tokens(model, template, answer["question"])
        model.reset()
        model.eval(prompt + answer["token_ids"])
        first = len(prompt) - 1
        logits = np.array(model.scores[first : first + len(answer["token_ids"])], dtype=np.float64)
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        found.append(
            {
                "question": answer["question"],
                "prompt_ids": prompt,
                "token_ids": [int(token) for token in logprobs.argmax(-1)],
                "logprobs": [float(row[token]) for row, token in zip(logprobs, answer["token_ids"], strict=True)],
            }
        )
    json.dump(found, sys.stdout)


def prompt_tokens(model: Llama, template: "str | None", question: str) -> "list[int]":
    if template is None:
        return model.tokenize(question.encode(), add_bos=True, special=True)
    bos, eos = (
        model.detokenize([token], special=True).decode() if token >= 0 else ""
        for token in (model.token_bos(), model.token_eos())
    )
    form = Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)
    text = form(messages=[{"role": "user", "content": question}]).prompt
    return model.tokenize(text.encode(), add_bos=False, special=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
