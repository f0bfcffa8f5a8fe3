"""Tune a model in a running service with OpenAI's client, and ask the winner a question.

    python examples/recipes/service/tune_and_ask.py examples/recipes/domain/ferry.jsonl --base FOLDER_OR_HUB_ID

The service answers questions if it has a vLLM server. If it has none, the script downloads the adapter, and PEFT
answers here. Needs ``pip install openai peft``.
"""

from __future__ import annotations

import argparse
import io
import time
import urllib.request
import zipfile
from pathlib import Path

import openai

QUESTION = "How long does the ferry from Askvik to Bruhamn take?"


def tune(client: openai.OpenAI, rows: Path, model: str, max_steps: int) -> str:
    """Return the name of the tuned model, when it is ready; prints the events of the job."""
    file = client.files.create(file=rows, purpose="fine-tune")
    hyperparameters = {"learning_rate": [3e-4, 1e-3], "r": 16, "max_steps": max_steps}  # two configurations
    job = client.fine_tuning.jobs.create(
        model=model,
        training_file=file.id,
        suffix="ferry",
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
    )
    shown = set[str]()
    while True:
        job = client.fine_tuning.jobs.retrieve(job.id)
        for event in reversed(list(client.fine_tuning.jobs.list_events(job.id))):
            if event.id not in shown and event.type == "message":
                print(event.message)
            shown.add(event.id)
        if job.status == "succeeded":
            return job.fine_tuned_model
        if job.status in ("failed", "cancelled"):
            raise SystemExit(f"{job.status}: {job.error.message if job.error else ''}")
        time.sleep(1)


def download(url: str, key: str, model: str, folder: Path) -> None:
    """Write the adapter of ``model`` into ``folder``."""
    request = urllib.request.Request(f"{url}/api/models/{model}/adapter", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as response:
        zipfile.ZipFile(io.BytesIO(response.read())).extractall(folder)


def ask_here(folder: Path, base: str, question: str) -> str:
    """Return the answer of the adapter on its base model, without a server."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    turns = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    return str(tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="file of training rows")
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="address of the service")
    parser.add_argument("--key", default="none", help="key of the service, if it needs one")
    parser.add_argument("--model", default="smollm2", help="name that the service gives to the base model")
    parser.add_argument("--base", required=True, help="the base model itself: a hub id or a folder")
    parser.add_argument("--max-steps", type=int, default=60, help="steps of every configuration")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--output", type=Path, default=Path("ferry-adapter"), help="folder for the adapter")
    options = parser.parse_args()
    with openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.key) as client:
        model = tune(client, options.rows, options.model, options.max_steps)
        print(f"tuned: {model}")
        turns = [{"role": "user", "content": options.question}]
        try:
            answer = client.chat.completions.create(model=model, messages=turns).choices[0].message.content
        except openai.BadRequestError as error:
            if error.code != "no_serving":
                raise
            download(options.url, options.key, model, options.output)
            answer = ask_here(options.output, options.base, options.question)
    print(f"{options.question}\n{answer}")


if __name__ == "__main__":
    main()
