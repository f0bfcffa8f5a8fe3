"""The sections about a task file."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from alto.scheduler import AdmitReason, ParkReason
from alto.scheduler.ranks import TOLERANCE
from alto.spec import MAX_JOBS, Budget, EarlyExit, JobConfig, Scoring, Search, SearchSpace, Task
from alto.spec.keys import (
    FIELD_DEFAULTS,
    JOB_ALIASES,
    NOT_NEEDED_KEYS,
    OFF_VALUES,
    TASK_ALIASES,
    UNSUPPORTED_KEYS,
)
from alto.spec.lr_schedules import DOMAINS, KWARGS_OF_SCHEDULES
from alto.spec.method import OWN_METHODS, find_method
from tools.make_reference.keys import default_of, keys_table, kind_of
from tools.make_reference.markdown import as_yaml, capitalised, code, sentence, table

__all__ = [
    "early_exit_section",
    "job_section",
    "memory_section",
    "packing_section",
    "refused_section",
    "scoring_section",
    "search_section",
    "search_space_section",
    "task_section",
]

SPACES = (
    ("a scalar is fixed", "{r: 16, lora_alpha: 32}"),
    ("a list is a grid; every combination is a job", "{learning_rate: [1.0e-4, 1.0e-3], r: [8, 16, 64]}"),
    (
        "`min`, `max`, `num`: drawn uniformly with `data_seed`; with `log`, uniformly in the logarithm",
        "{learning_rate: {min: 1.0e-5, max: 1.0e-3, log: true, num: 8}}",
    ),
    (
        "lists under `paired` vary together; several pairings are a list of mappings",
        "{r: [8, 64], paired: {learning_rate: [1.0e-4, 1.0e-3], per_device_train_batch_size: [4, 16]}}",
    ),
    ("`lora_alpha` may follow the rank", "{r: [8, 64], lora_alpha: [r, 2*r, 32]}"),
    (
        "`mixture_weights`: mappings in the list, or lists in a mapping ([data.md](data.md#mixtures))",
        "{mixture_weights: [{maths: 0.5, chat: 0.5}, {maths: 0.8, chat: 0.2}]}",
    ),
    ("`target_modules`: lists in the list", "{target_modules: [all-linear, [q_proj, v_proj]]}"),
    (
        "`rank_pattern`, `alpha_pattern`, `lr_scheduler_kwargs`, `optim_args`: mappings in the list",
        "{rank_pattern: [{}, {q_proj: 8}]}",
    ),
)
"""Ways to write a search space; the page says how many jobs each makes."""


def task_section() -> str:
    return f"""## Task

Keys at the top of the file. Those of [a job](#configuration-of-a-job) may be here too: then they are fixed for every
job.

{keys_table(Task, TASK_ALIASES)}
"""


def job_section() -> str:
    return f"""## Configuration of a job

At the top level of the task (fixed) or under `search_space` (varied). Steps are optimizer steps; every job is trained
with AdamW.

{keys_table(JobConfig, JOB_ALIASES)}

`lora_alpha` is a number, `r`, or a multiple such as `2*r`. `target_modules` is `all-linear` (every linear layer but the
output head), a module's name, a list of names, or a regular expression over full names; `exclude_modules` is written
in the same way. `peft-default` is PEFT's choice for the model type (of Llama and Qwen `q_proj` and `v_proj`): its
names take its place before training, and a note says which.
The output head and the token embeddings (`lm_head`, `embed_tokens`) are adapted where they are named,
on one GPU and without `use_dora`; where they are one weight, an adapter on one leaves the other as it is.
`modules_to_save` trains one of these two, or both, whole: each job has a copy with a gradient and moments, so that a
head of 150,000 tokens and 1,024 features is 2.5 GB of a slot in 32 bits. Other modules
are refused there.

`max_grad_norm` 0 or null clips nothing. `warmup_steps` and `warmup_ratio` exclude each other and are about the learning
rate; early exit has a `warmup_ratio` of its own. `optim` may also be spelt `adamw` or `adamw_torch_fused` (for
`adamw_torch`) and `adamw_bnb_8bit` (for `adamw_8bit`). The 8-bit ones are bitsandbytes' and need
`pip install "alto-lora[bnb]"`, the paged one also a GPU. They train as bitsandbytes does alone. The bank holds 32-bit
state for all slots or, where no job of the task is trained with `adamw_torch`, for none. `sgd`, `rmsprop` and
`adagrad` are torch's, `adafactor` is transformers' (with `scale_parameter` and `relative_step` off), as transformers'
Trainer makes them; each is made for the row of its job alone. The task's `optim_state_dtype` is about `adamw_torch`.
`optim_args` are a mapping, or text as in `TrainingArguments`: of `sgd` `momentum`, `dampening`, `nesterov`; of
`rmsprop` `alpha`, `eps`, `momentum`, `centered`;
of `adagrad` `eps`, `lr_decay`. `adam_beta1`, `adam_beta2` and `adam_epsilon` have an effect on AdamW only;
`weight_decay` is an L2 penalty with torch's three, decoupled with the others. In a search space, settings go with their
optimizer under `paired`.

`rank_pattern` and `alpha_pattern` map names of modules (full names, their ends from a dot on, or regular expressions)
to their own `r` and `lora_alpha`; the first key that matches counts. A module's output is scaled by its own two
numbers. `layers_to_transform` keeps the adapter to some layers (0 is the first); with a pattern in `target_modules`,
which can name layers itself, it is refused, as in PEFT. vLLM reads one rank and one scale of an adapter: serve adapters
with patterns with PEFT, or merge them.

A step is one optimizer step on `per_device_train_batch_size` × `gradient_accumulation_steps` rows. Its loss is the mean
over all its trained tokens, as in transformers' `Trainer` with `num_items_in_batch`. How many rows are computed at a
time is chosen by the memory and changes nothing, so only the product of the two keys matters (but for the loss of
routers, below). Where rows have labels, it is the mean over micro-steps of their mean losses, which differs where the
last micro-step of an epoch has fewer rows. With methods on pairs, TRL averages over micro-batches instead, and
`gradient_accumulation_steps` above 1 is refused.

`neftune_noise_alpha` adds noise from the uniform distribution over ± alpha / √(length × hidden size) to the token
embeddings in training, with draws of the job's own; 5 is usual, 0 or null is none. The length is that of a row itself:
transformers takes that of the padded batch, so that its noise depends on the rows beside it. It is refused for pairs.

`router_aux_loss_coef` is the weight of the loss that balances the load of experts in a mixture (transformers'
`load_balancing_loss_func`): it reaches adapters through the hidden states, and those on routers (`target_parameters`).
By default it is what TRL 1.16 does: with `sft`, `dpo` and `kto` the value in the configuration of the base model, where
that can return the logits of its routers; with `orpo` and `cpo` only where `output_router_logits` is true there; with
`classification` and `regression` none. A note says so before training. 0 leaves it out. The loss of a job is over its
own tokens, padding never counts, the prompt of a pair counts twice as in TRL, and each micro-step of
`per_device_train_batch_size` rows has a loss of its own, of which a step takes the mean. Where the rows of a micro-step
do not fit into one forward pass, or are on several GPUs, how often each expert is chosen is counted in a forward pass
before. Training losses in journals, and all validation losses, are without it (TRL adds it to both); `train` events
have it as `router_losses`. A base model whose own loss is another is refused.

Learning rates are those of transformers' `get_scheduler` at every step. `lr_scheduler_kwargs` of each schedule:

{_schedules()}

`reduce_lr_on_plateau` and `greedy` are refused: their rates depend on losses.

`init_lora_weights` of PEFT that are refused: `pissa`, `olora`, `corda` and `loftq` change the base model's weights,
which all jobs share; `eva` and `lora_ga` need passes over the training rows before the start; `mica` is a variant of
LoRA.

### Settings of a method

Keys of a job as well, but only for that `method`. Null is the default. A method of a package has settings of its own
 ([objectives.md](objectives.md)).

{_method_settings()}
"""


def _schedules() -> str:
    rows = [
        [code(name), ", ".join(f"`{key}` ({DOMAINS[key][0]})" for key in keys) or "none"]
        for name, keys in KWARGS_OF_SCHEDULES.items()
    ]
    return table(("schedule", "settings"), rows)


def _method_settings() -> str:
    rows = []
    for name in OWN_METHODS:
        settings = find_method(name).entry.settings
        for key, field in settings.model_fields.items():
            others = sorted(alias for alias, canonical in settings.aliases.items() if canonical == key)
            meaning = sentence(capitalised(field.description or ""), others)
            rows.append([code(key), code(name), meaning, kind_of(key, field), default_of(key, field)])
    return table(("key", "method", "meaning", "value", "default"), rows)


def memory_section() -> str:
    rows = [
        ("`load_in_4bit: true`", "7/8 of the base's linear layers in float32, 3/4 in bfloat16", "bitsandbytes"),
        ("`load_in_8bit: true`", "3/4 of them in float32, half in bfloat16", "bitsandbytes"),
        ("`dtype: bfloat16`, `float16`", "half of the base and its activations in float32", ""),
        ("`gradient_checkpointing: true`", "most activations; each layer's forward pass runs twice", ""),
        (
            "`optim: adamw_8bit` for every job",
            "an eighth of a slot: 14 bytes a parameter instead of 16",
            "bitsandbytes",
        ),
        ("`optim: paged_adamw_8bit`", "the same, and its state may be paged out of a full GPU", "bitsandbytes, CUDA"),
        (
            "`optim_state_dtype: bfloat16`",
            "a quarter of a slot: 12 bytes a parameter instead of 16; on a bfloat16 base on CUDA 14 instead of 18",
            "`adamw_torch` for every job",
        ),
        ("`adapter_dtype: bfloat16`", "half of the bank; small updates may be rounded away", ""),
    ]
    return f"""## Memory

{table(("key", "saves about", "needs"), rows)}

bitsandbytes comes with `pip install "alto-lora[bnb]"`; all of it but the paged optimizer works on a CPU too. Output
head and embeddings stay in `dtype`. The packed weights of a quantised base are dequantised for every product;
activations are not rounded. A CPU without instructions for half precision is refused: it would be tens to hundreds of
times slower. `float16` is trained without loss scaling: prefer `bfloat16` where gradients are very small. An adapter
names the base as the task does: load that base with the same quantisation to use it.

Leave `optim_state_dtype` out where memory is no limit: steps are then those of torch's AdamW. With `bfloat16` AdamW's
two moments are rounded up or down at random, by a hash of the job's seed, its step and the place in the adapter: their
means are those of 32 bits, and second moments are a few percent off at a time. All jobs still take their steps in one
launch, and a step reads and writes 8 bytes a parameter less. So it comes before `adamw_8bit`, which takes a launch and
a copy of the weights for every row; choose `adamw_8bit` where a run has to train as bitsandbytes does. On a CPU the
rounding takes time and saves memory alone. `adapter_dtype: bfloat16` without the key has moments of 16 bits too,
rounded to the nearest as in torch: with `adam_beta2: 0.999` second moments do not fall there, since a step takes less
off than half of their last digit; with `optim_state_dtype: bfloat16` or `float32` beside it they do.
"""


def packing_section() -> str:
    reasons, leaving = (", ".join(f"`{reason}`" for reason in kind) for kind in (AdmitReason, ParkReason))
    return f"""## Packing

Which jobs train together. At most `max_slots` jobs are resident, and together they have at most `max_tokens_per_step`
tokens a step: rows of a job's step times the mean length of the training rows. A larger job trains alone.
Without these keys the engine chooses them.

A free slot goes to a job of the batch size that most residents have, else to the largest that fits; one that does not
fit does not block smaller ones. Residents keep their slots; one that waits at a rung is parked when another job can use
its slot. Jobs that are certain to be kept continue past the rung in idle slots. The field `reason` of
`job_admitted` and `job_resumed` is why a job was admitted: {reasons}, or
`from_checkpoint` after `alto resume`; that of `job_parked` why it was parked: {leaving}.

On several ranks (`num_gpus`), slots are numbered consecutively: those of rank 0 first. Jobs are assigned so that all
ranks have about the same number of tokens, and move when exits have left a rank more than {TOLERANCE * 100:g} % above
the mean. Jobs that are fewer than the ranks train data parallel: each on all ranks, a share of its rows on each.

`max_tokens_per_pass` does not affect residents: it splits a step into several micro-batches, with the same losses.
"""


def search_space_section() -> str:
    rows = [[meaning, f"`{space}`", len(SearchSpace.parse(yaml.safe_load(space)))] for meaning, space in SPACES]
    return f"""## Search space

{table(("way of writing", "example under `search_space`", "jobs"), rows)}

Any key of [a job](#configuration-of-a-job) may vary. At most {MAX_JOBS:,} jobs. Two equal jobs are an error. Jobs are
named `job-000`, `job-001`, …, the last key varying fastest; `paired` counts as one key.
"""


def early_exit_section() -> str:
    return f"""## Early exit

Under `early_exit`. `early_exit: false` trains every job to its end; `true` is the defaults.
[early-exit.md](early-exit.md) explains the decisions and which key to change.

{keys_table(EarlyExit, {})}
"""


def search_section() -> str:
    return f"""## Search

Under `search`; the name of an algorithm is short for a mapping with that alone (`search: tpe`).
[search.md](search.md) explains the algorithms.

{keys_table(Search, {})}

### Budget

Under `search.budget`.

{keys_table(Budget, {})}
"""


def scoring_section() -> str:
    return f"""## Scoring

Under `select_by`, where it is a mapping. [evaluation.md](evaluation.md#choosing-the-winner-by-answers) has examples.

{keys_table(Scoring, {})}
"""


def refused_section() -> str:
    return f"""## Keys that are refused

Keys of transformers' `TrainingArguments`, TRL's `SFTConfig`, `DPOConfig` and `KTOConfig`, PEFT's `LoraConfig` and of
LLaMA-Factory, and arguments of TRL's trainers, that tasks do not have are refused by name rather than ignored, all in
one error, so that nobody believes that they have an effect. With null, or with a value in brackets, a key asks for
nothing and is left out silently.
`alto import` turns whole configurations of these tools into tasks: [coming-from-axolotl.md](coming-from-axolotl.md).

They would change what is learned:

{table(("key", "what to do"), _by_reason(UNSUPPORTED_KEYS))}

They are not needed:

{table(("key", "because"), _by_reason(NOT_NEEDED_KEYS))}

Where a task has a field of the same name, these values stand for its default, as they do in `TrainingArguments`:
{", ".join(f"`{key}: {as_yaml(value)}`" for key, values in FIELD_DEFAULTS.items() for value in values)}.
"""


def _by_reason(reasons: Mapping[str, str]) -> list[list[str]]:
    keys: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        keys.setdefault(reason, []).append(key)
    return [
        [", ".join(map(_with_off_values, sorted(named))), capitalised(reason.rstrip("."))]
        for reason, named in keys.items()
    ]


def _with_off_values(key: str) -> str:
    values = OFF_VALUES.get(key, ())
    return code(key) + (f" ({', '.join(f'`{as_yaml(value)}`' for value in values)})" if values else "")
