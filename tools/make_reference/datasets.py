"""The section about datasets."""

from __future__ import annotations

from alto.data.files import FILE_ENDINGS
from alto.data.formats import _OPTIONAL, _PROMPTS, _REQUIRED
from alto.data.source import PRESETS
from tools.make_reference.markdown import code, codes, table

__all__ = ["datasets_section"]


def datasets_section() -> str:
    forms = [
        [code(form), " and ".join(code(column) for _, column in columns), codes(_OPTIONAL[form])]
        for form, columns in _REQUIRED
    ]
    presets = [
        [
            codes(preset.names),
            code(preset.hub_id) + (f" ({preset.config})" if preset.config else ""),
            code(preset.form),
            _preset_rows(preset.row_counts, preset.train_split, preset.test_split),
        ]
        for preset in PRESETS
    ]
    roles = dict.fromkeys(role for form, required in _REQUIRED for role in (*dict(required), *_OPTIONAL[form]))
    prompts = [" with ".join(code(column) for column in way.values()) for way in _PROMPTS]
    return f"""## Datasets

`dataset` and `validation_dataset` name a file that exists, a preset, or a dataset of the hub (`owner/name`); the
first of these that exists is used. A list under `dataset` is a mixture of several: [data.md](data.md#mixtures).

**Files** end in {", ".join(map(code, FILE_ENDINGS))}; all but `.parquet` also with `.gz`. Parquet and the hub need
`pip install "alto-lora[data]"`.

**Forms** are recognised by the columns; `dataset_format` names one where several fit.

{table(("form", "columns", "optional columns"), forms)}

Messages are `{{role, content}}` (`sharegpt`: `{{from, value}}`). The replies of the assistant are trained, with the
token that ends them; of `text`, everything. A message with `weight: 0` is shown and not trained. `train_on` trains all
tokens or the last reply only; `raw_prompt_completion` and, of pairs, `raw_preference` are only named, never recognised:
[data.md](data.md#prompts-and-completions-without-a-chat).

A message of the assistant may have `tool_calls` (OpenAI's form, flat, or the older `function_call`; arguments as an
object or as JSON text) beside its content or instead of it; `tool` messages hold results and are shown, not trained.
`tools` are JSON schemas, or JSON text of them (`functions`: the older form); `chat_template_kwargs` goes to the chat
template unchanged, and so does every other key of a message (`reasoning_content`, `name`, …). Content in parts is
joined where all are text; images and audio are refused. Parts that the template does not show, and unread columns, are
listed with counts before training. Which tokens are trained under well-known templates:
[chat-templates.md](chat-templates.md).

**Pairs** (`preference`, `raw_preference`, `openai_preference`) are for `method: dpo`, `orpo` and `cpo`,
**labelled replies** (`unpaired_preference`; a `label` is true where the reply, which may be the last message, is
desirable) for `kto`, which also makes two of each pair;
**texts with labels** (`text_classification`) for `classification` and `regression`
([data.md](data.md#texts-with-labels)); the others are for `sft`; where a dataset has columns of several, the method
takes its own. A reply is a text, a message or a list of messages.
The prompt of `preference` is in the first of {", ".join(prompts)} that the dataset
has (an `input` is added after its instruction); or `chosen` and `rejected` both begin with it, as in TRL. `input` of
`openai_preference` is `{{messages: […], tools: […]}}`. Prompts are not trained: the two conversations first differ in a
reply of the assistant. A pair is left out, and counted, where `max_length` leaves no part in which they differ.

**Bad rows**, which cannot be used, end the task before training, all of them listed; `on_bad_row: skip` leaves them
out: [data.md](data.md#bad-rows).

**Columns** with other names: `columns` maps a role to its column. Roles are
{codes(roles)}.

```yaml
columns: {{prompt: request, completion: reply}}
```

**Presets**:

{table(("name", "on the hub", "form", "rows"), presets)}
"""


def _preset_rows(counts: tuple[int, int, int] | None, train: str, test: str | None) -> str:
    if counts is not None:
        return "{:,} to train, {:,} to validate, {:,} held out, drawn with `data_seed`".format(*counts)
    return f"split `{train}`" + (f"; `{test}` held out for `alto eval`" if test else "")
