"""TRL and the bare loop train the same job: same tokens, same masks, same loss, same update."""

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTTrainer

from alto.data import Conversation, DataOrder, Encoding, Message, tokenize
from alto.spec import JobConfig
from benchmarks.baselines import trl_sequential
from benchmarks.baselines.bare_peft import bare_peft_one
from benchmarks.baselines.job import IGNORED, JobSettings, epoch_order, prepare
from benchmarks.baselines.trl_sequential import train_one

# PEFT 0.21 and TRL 1.16 still read names that Transformers 5.23 deprecates.
pytestmark = [
    pytest.mark.slow("benchmarks"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [*"0123456789", "+", "=", "?", "is"]
ROWS = [
    {"question": f"{a} + {b} = ?", "answer": " ".join(f"{a} + {b} = {a + b}" for _ in range(1 + a % 3))}
    for a in range(5)
    for b in range(5)
    if a + b < 10
]
CONFIG = {
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 4,
    "r": 4,
    "lora_alpha": 8,
    "seed": 3,
    "num_train_epochs": 2,
    "lr_scheduler_type": "linear",
    "warmup_steps": 1,
    "weight_decay": 0.1,
    "max_grad_norm": 0.05,
}


def validation_losses(job) -> list[float]:
    return [item.loss for item in job.evaluations]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, *WORDS])}, unk_token="<|unk|>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            vocab_size=len(tokenizer),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prepared(model_dir):
    return prepare(model_dir, ROWS[:12], ROWS[12:], max_length=64)


def test_rows_are_what_trl_makes_of_prompt_and_completion(model_dir, prepared, tmp_path):
    conversations = [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
        }
        for row in ROWS[:12]
    ]
    args = trl_sequential._arguments(JobSettings.of(CONFIG), str(tmp_path), 8)
    args.dataset_kwargs = None
    trainer = SFTTrainer(
        model=LlamaForCausalLM.from_pretrained(model_dir),
        args=args,
        train_dataset=Dataset.from_list(conversations),
        processing_class=prepared.tokenizer,
    )
    theirs = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in trainer.train_dataset]
    assert theirs == list(prepared.train)


def test_the_end_of_turn_is_trained_and_the_prompt_is_not(prepared):
    tokenizer = prepared.tokenizer
    for row, example in zip(ROWS[:12], prepared.train, strict=True):
        trained = [token for token in example["labels"] if token != IGNORED]
        assert tokenizer.decode(trained[:-1]).split() == row["answer"].split()
        assert trained[-1] == tokenizer.eos_token_id


@pytest.fixture(scope="module")
def trl_job(prepared):
    return train_one(prepared, CONFIG, eval_at_steps=[2, 6], eval_batch_size=4)


def test_trl_and_the_bare_loop_agree_over_a_whole_job(prepared, trl_job):
    bare_job = bare_peft_one(prepared, CONFIG, eval_at_steps=[2, 6], eval_batch_size=4)
    assert len(trl_job.train_losses) == 6
    assert trl_job.train_losses == pytest.approx(bare_job.train_losses, rel=1e-5)
    assert [item.step for item in trl_job.evaluations] == [item.step for item in bare_job.evaluations] == [2, 6]
    assert validation_losses(trl_job) == pytest.approx(validation_losses(bare_job), rel=1e-5)
    assert trl_job.samples == bare_job.samples == 24
    for job in (trl_job, bare_job):
        assert job.train_s > 0
        assert job.eval_s > 0
        assert job.train_s + job.eval_s <= job.duration_s


@pytest.mark.parametrize(
    "change",
    [{"lora_alpha": 9}, {"seed": 4}, {"learning_rate": 1.1e-2}, {"max_grad_norm": 0}, {"lr_scheduler_type": "cosine"}],
    ids=lambda change: next(iter(change)),
)
def test_the_agreement_bites(prepared, trl_job, change):
    other = bare_peft_one(prepared, CONFIG | change, eval_at_steps=[2, 6])
    assert validation_losses(trl_job) != pytest.approx(validation_losses(other), rel=1e-5)


@pytest.mark.parametrize("train", [train_one, bare_peft_one])
def test_validation_loss_does_not_depend_on_how_it_is_batched(prepared, train):
    first, second = (
        validation_losses(train(prepared, CONFIG, eval_at_steps=[3], eval_batch_size=size)) for size in (1, 5)
    )
    assert first == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize("train", [train_one, bare_peft_one])
def test_every_epoch_trains_the_rows_in_its_own_order(prepared, train):
    seen = []

    def order(epoch: int) -> list[int]:
        seen.append(epoch)
        return epoch_order(len(prepared.train), 3)(epoch)

    job = train(prepared, CONFIG, eval_at_steps=[], order=order)
    assert sorted(set(seen)) == [0, 1]
    assert (job.samples, len(job.train_losses)) == (24, 6)
    assert order(0) != order(1)
    assert sorted(order(0)) == list(range(12))


def test_jobs_leave_the_base_model_as_it_was(prepared):
    before = {name: value.clone() for name, value in prepared.model.state_dict().items()}
    train_one(prepared, CONFIG, eval_at_steps=[])
    bare_peft_one(prepared, CONFIG, eval_at_steps=[])
    after = prepared.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_trl_is_not_handicapped_by_its_memory_savers(tmp_path):
    args = trl_sequential._arguments(JobSettings.of(CONFIG), str(tmp_path), 8)
    assert (args.gradient_checkpointing, args.bf16, args.fp16, args.torch_compile) == (False, False, False, False)
    assert (args.dataloader_num_workers, args.gradient_accumulation_steps, args.packing) == (0, 1, False)


def test_the_baselines_and_alto_see_the_same_tokens_in_the_same_order(prepared):
    conversations = [
        Conversation([Message(role="user", content=row["question"]), Message(role="assistant", content=row["answer"])])
        for row in ROWS[:12]
    ]
    ours = tokenize(conversations, Encoding(tokenizer=prepared.tokenizer, max_length=64), "training")
    assert [ids.tolist() for ids in ours.input_ids] == [row["input_ids"] for row in prepared.train]
    assert [targets.tolist() for targets in ours.targets] == [[*row["labels"][1:], IGNORED] for row in prepared.train]
    order = DataOrder(12, 5, seed=3)
    theirs = [index for epoch in range(2) for index in epoch_order(12, 3)(epoch)]
    assert [index for step in range(6) for index in order.rows_of_step(step)] == theirs


def test_a_whole_job_config_is_accepted_at_the_defaults_of_the_optimizer_only():
    config = JobConfig(learning_rate=1e-3, max_grad_norm=0).model_dump()
    assert JobSettings.of(config).max_grad_norm is None
    with pytest.raises(ValueError, match=r"adam_beta2=0\.95"):
        JobSettings.of(config | {"adam_beta2": 0.95})


def test_settings_and_steps_that_mean_something_else_are_refused(prepared):
    with pytest.raises(ValueError, match="found optim"):
        JobSettings.of(CONFIG | {"optim": "sgd"})
    for train in (train_one, bare_peft_one):
        with pytest.raises(ValueError, match=r"from 1 to 6.*\[0, 7\]"):
            train(prepared, CONFIG, eval_at_steps=[0, 1, 7])


@pytest.mark.parametrize(("epochs", "batch_size", "steps"), [(1, 4, 3), (2, 5, 6), (0.5, 5, 2), (1, 32, 1), (3, 1, 36)])
def test_total_steps_count_short_batches(epochs, batch_size, steps):
    settings = JobSettings.of(CONFIG | {"num_train_epochs": epochs, "per_device_train_batch_size": batch_size})
    assert settings.total_steps(12) == steps


def test_a_prompt_that_fills_the_window_leaves_nothing_to_train(model_dir):
    with pytest.raises(ValueError, match="found 0 and 0"):
        prepare(model_dir, ROWS[:3], ROWS[3:5], max_length=4)
