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
        "lists under `paired` vary together; a list of mappings makes several such groups",
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
"""Ways to write a search space; the page shows the number of jobs of each."""


def task_section() -> str:
    return f"""## Task

These keys are at the top of the file. The keys of [a job](#configuration-of-a-job) may be there too; they are then the
same for every job.

{keys_table(Task, TASK_ALIASES)}
"""


def job_section() -> str:
    return f"""## Configuration of a job

These keys may be at the top level of the task, where they are the same for all jobs, or under `search_space`, where
they vary. Steps are optimizer steps. The optimizer is AdamW unless `optim` names another one.

{keys_table(JobConfig, JOB_ALIASES)}

**Modules.** `lora_alpha` is a number, `r`, or a multiple such as `2*r`. `target_modules` is `all-linear` (every linear
layer except the output head), the name of a module, a list of names, or a regular expression for full names.
`exclude_modules` is written in the same way. `peft-default` means the modules that PEFT chooses for the model type (for
Llama and Qwen `q_proj` and `v_proj`); before training their names replace it, and a note lists them. The output head
and the token embeddings (`lm_head`, `embed_tokens`) get an adapter only if they are named, on one GPU and without
`use_dora`. If both are one weight, an adapter on one of them does not change the other. `modules_to_save` trains one of
these two, or both, in full. Each job then has its own copy, with gradient and moments: for a head of 150,000 tokens and
1,024 features this is 2.5 GB per slot in 32 bits. Other modules are refused in this key.

**Patterns.** `rank_pattern` and `alpha_pattern` map names of modules to their own `r` and `lora_alpha`. A name is a
full name, the end of a full name after a dot, or a regular expression; the first key that matches is used. The output
of a module is scaled by its own two numbers. `layers_to_transform` restricts the adapter to some layers (0 is the
first). As in PEFT, it is refused if `target_modules` is a pattern, because a pattern can name layers itself. vLLM
serves adapters with patterns too (tried: 0.32).

**Optimizers.** `optim` may also be spelt `adamw` or `adamw_torch_fused` (for `adamw_torch`) and `adamw_bnb_8bit` (for
`adamw_8bit`). The 8-bit optimizers come from bitsandbytes and give the same results as bitsandbytes alone. They need
`pip install "alto-lora[bnb]"`, and the paged one needs a GPU. The bank holds 32-bit state for all slots, or for none if
no job of the task uses `adamw_torch`. `sgd`, `rmsprop` and `adagrad` are torch's optimizers, and `adafactor` is
transformers' (with `scale_parameter` and `relative_step` off). They are made as in transformers' Trainer, one for the
row of each job. The task's `optim_state_dtype` applies only to `adamw_torch`.

`optim_args` is a mapping, or a text as in `TrainingArguments`. `sgd` takes `momentum`, `dampening` and `nesterov`;
`rmsprop` takes `alpha`, `eps`, `momentum` and `centered`; `adagrad` takes `eps` and `lr_decay`. `adam_beta1`,
`adam_beta2` and `adam_epsilon` have an effect only on AdamW. `weight_decay` is an L2 penalty with `sgd`, `rmsprop` and
`adagrad`, and decoupled with the others. In a search space, put an optimizer and its settings under `paired`.
`max_grad_norm: 0` or null means no clipping. `warmup_steps` and `warmup_ratio` exclude each other; they are about the
learning rate, and early exit has a `warmup_ratio` of its own.

**Steps.** A step is one optimizer step on `per_device_train_batch_size` × `gradient_accumulation_steps` rows. Its loss
is the mean over all trained tokens of these rows, as in transformers' `Trainer` with `num_items_in_batch`. The
available memory determines how many rows are computed at a time, which does not change the loss. So only the product of
the two keys matters, except for the loss of routers (below) and for rows with labels. With labels, the loss of a step
is the mean of the mean losses of its micro-steps, which is different if the last micro-step of an epoch has fewer rows.
For methods on pairs, `gradient_accumulation_steps` above 1 is refused, because TRL averages over micro-batches there.

**Noise.** `neftune_noise_alpha` adds noise to the token embeddings in training. The noise is uniform over
± alpha / √(length × hidden size), and each job draws its own. 5 is usual; 0 or null means no noise. The length is that
of the row itself. In transformers it is the length of the padded batch, so the noise there depends on the other rows.
The key is refused for pairs.

**Routers.** `router_aux_loss_coef` is the weight of the loss that balances the load of experts in a mixture
(transformers' `load_balancing_loss_func`). It trains adapters through the hidden states, and adapters on the routers
(`target_parameters`).

- The default is the same as in TRL 1.16, and a note reports it before training. With `sft`, `dpo` and `kto` it is the
  value in the configuration of the base model, if the model can return the logits of its routers. With `orpo` and `cpo`
  it is the same, but only if `output_router_logits` is true in that configuration. With `classification` and
  `regression` there is none. 0 turns the loss off.
- The loss of a job covers only its own tokens. Padding never counts, and the prompt of a pair counts twice as in TRL.
- Each micro-step of `per_device_train_batch_size` rows has a loss of its own, and a step takes their mean. If the rows
  of a micro-step do not fit into one forward pass, or are on several GPUs, an earlier forward pass counts how often
  each expert is chosen.
- Training losses in journals and all validation losses do not contain it (TRL adds it to both). `train` events have it
  in `router_losses`.
- A base model that computes another loss for this is refused.

**Schedules.** At every step, the learning rate equals the result of transformers' `get_scheduler`. The schedules take
these `lr_scheduler_kwargs`:

{_schedules()}

`reduce_lr_on_plateau` and `greedy` are refused, because their rates depend on losses.

**Initial weights.** These values of PEFT's `init_lora_weights` are refused: `pissa`, `olora`, `corda` and `loftq`,
because they change the weights of the base model, which all jobs share; `eva` and `lora_ga`, because they need passes
over the training rows before the start; and `mica`, because it is a variant of LoRA.

### Settings of a method

These are keys of a job, too, but only with that `method`. null means the default. A method of a package has settings of
its own ([objectives.md](objectives.md)).

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
        ("`load_in_8bit: true`", "3/4 of these layers in float32, half in bfloat16", "bitsandbytes"),
        ("`dtype: bfloat16`, `float16`", "half of the base and its activations, compared with float32", ""),
        ("`gradient_checkpointing: true`", "most activations; each layer's forward pass runs twice", ""),
        (
            "`optim: adamw_8bit` for every job",
            "an eighth of a slot: 14 bytes per parameter instead of 16",
            "bitsandbytes",
        ),
        ("`optim: paged_adamw_8bit`", "the same, and its state may be paged out of a full GPU", "bitsandbytes, CUDA"),
        (
            "`optim_state_dtype: bfloat16`",
            "a quarter of a slot: 12 bytes per parameter instead of 16; on a bfloat16 base on CUDA 14 instead of 18",
            "`adamw_torch` for every job",
        ),
        ("`adapter_dtype: bfloat16`", "half of the bank; small updates may be rounded away", ""),
    ]
    return f"""## Memory

{table(("key", "saves about", "needs"), rows)}

`pip install "alto-lora[bnb]"` installs bitsandbytes. All of its features work on a CPU too, except the paged optimizer.
The output head and the embeddings stay in `dtype`. The packed weights of a quantised base are dequantised for every
product; activations are not rounded. Half precision is refused on a CPU without instructions for it, because it would
be tens to hundreds of times slower. `float16` is trained without loss scaling, so prefer `bfloat16` if gradients are
very small. An adapter names its base model as the task does; load this base with the same quantisation to use the
adapter.

Leave out `optim_state_dtype` if there is enough memory: the steps then equal the steps of torch's AdamW. With
`bfloat16` the two moments of AdamW are rounded up or down at random, by a hash of the job's seed, its step and the
position in the adapter. Their means are those in 32 bits, and a second moment is off by a few percent at a time. All
jobs still take their steps in one launch, and a step reads and writes 8 bytes less per parameter. So try it before
`adamw_8bit`, which takes a launch and a copy of the weights for every row. Choose `adamw_8bit` if a run has to train as
bitsandbytes does. On a CPU the rounding takes time and saves only memory.

With `adapter_dtype: bfloat16` and without `optim_state_dtype` the moments have 16 bits too, but are rounded to the
nearest, as in torch. With `adam_beta2: 0.999` second moments then do not fall, because a step subtracts less than half
of their last digit. With `optim_state_dtype: bfloat16` or `float32` they do.
"""


def packing_section() -> str:
    reasons, leaving = (", ".join(f"`{reason}`" for reason in kind) for kind in (AdmitReason, ParkReason))
    return f"""## Packing

Two keys limit which jobs train together. At most `max_slots` jobs are resident, and together they have at most
`max_tokens_per_step` tokens per step. The tokens of a job are the rows of its step times the mean length of the
training rows. A job with more tokens trains alone. Without these keys the engine chooses the limits.

A free slot goes to a job with the batch size that most residents have, or else to the largest job that fits. A job that
does not fit does not block smaller ones. Residents keep their slots; a resident that waits at a rung is parked when
another job can use its slot. Jobs that are certain to be kept continue past the rung in idle slots. The field `reason`
of `job_admitted` and `job_resumed` says why a job was admitted: {reasons}, or `from_checkpoint` after `alto resume`.
The field `reason` of `job_parked` says why a job was parked: {leaving}.

On several ranks (`num_gpus`), slots are numbered consecutively, beginning with rank 0. Jobs are assigned so that all
ranks have about the same number of tokens, and they move if exits leave a rank more than {TOLERANCE * 100:g} % above
the mean. If there are fewer jobs than ranks, they train data parallel: each job is on all ranks, with a share of its
rows on each.

`max_tokens_per_pass` does not change which jobs are resident. It splits a step into several micro-batches, with the
same losses.
"""


def search_space_section() -> str:
    rows = [[meaning, f"`{space}`", len(SearchSpace.parse(yaml.safe_load(space)))] for meaning, space in SPACES]
    return f"""## Search space

{table(("way of writing", "example under `search_space`", "jobs"), rows)}

Any key of [a job](#configuration-of-a-job) may vary. There may be at most {MAX_JOBS:,} jobs, and two equal jobs are an
error. Jobs are named `job-000`, `job-001`, …; the last key varies fastest, and `paired` counts as one key.
"""


def early_exit_section() -> str:
    return f"""## Early exit

These keys are under `early_exit`. `early_exit: false` trains every job to its end; `true` means all defaults.
[early-exit.md](early-exit.md) explains the decisions and which key to change.

{keys_table(EarlyExit, {})}
"""


def search_section() -> str:
    return f"""## Search

These keys are under `search`. The name of an algorithm is short for a mapping with only that key (`search: tpe`).
[search.md](search.md) explains the algorithms.

{keys_table(Search, {})}

### Budget

These keys are under `search.budget`.

{keys_table(Budget, {})}
"""


def scoring_section() -> str:
    return f"""## Scoring

These keys are under `select_by`, if it is a mapping. [evaluation.md](evaluation.md#choosing-the-winner-by-answers) has
examples.

{keys_table(Scoring, {})}
"""


def refused_section() -> str:
    return f"""## Keys that are refused

Tasks do not have some keys of transformers' `TrainingArguments`, TRL's `SFTConfig`, `DPOConfig` and `KTOConfig`, PEFT's
`LoraConfig` and LLaMA-Factory, and some arguments of TRL's trainers. ALTO does not ignore such keys, so that nobody
believes that they have an effect: one error names all of them. A key with null, or with one of the values in brackets
below, has no effect in its tool either, and is left out silently. `alto import` turns whole configurations of these
tools into tasks: [coming-from-axolotl.md](coming-from-axolotl.md).

These keys would change what is learned:

{table(("key", "what to do"), _by_reason(UNSUPPORTED_KEYS))}

These keys are not needed:

{table(("key", "because"), _by_reason(NOT_NEEDED_KEYS))}

If a task has a field of the same name, these values mean its default, as in `TrainingArguments`:
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
