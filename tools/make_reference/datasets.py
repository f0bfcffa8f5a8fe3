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

`dataset` and `validation_dataset` name an existing file, a preset, or a hub dataset (`owner/name`). If a name could be
several of these, the first one in this order is used. A list under `dataset` is a mixture of several datasets:
[data.md](data.md#mixtures).

**Files** end in {", ".join(map(code, FILE_ENDINGS))}; all except `.parquet` may also end in `.gz`. Parquet and the hub
need `pip install "alto-lora[data]"`.

**Forms** are recognised by their columns. If the columns fit several forms, name one with `dataset_format`.

{table(("form", "columns", "optional columns"), forms)}

**Messages** are `{{role, content}}` (`sharegpt`: `{{from, value}}`). The replies of the assistant are trained, with the
token that ends each of them; of a `text`, everything is trained. A message with `weight: 0` is shown to the model but
not trained. `train_on` trains all tokens, or only the last reply. `raw_prompt_completion` and `raw_preference` (for
pairs) are never recognised, so name them: [data.md](data.md#prompts-and-completions-without-a-chat).

A message of the assistant may have `tool_calls` beside its content or instead of it: in OpenAI's form, flat, or as the
older `function_call`, with arguments as an object or as JSON text. `tool` messages hold results; they are shown, but
not trained. `tools` are JSON schemas, or a JSON text of them (`functions` is the older form). `chat_template_kwargs`
and every other key of a message (`reasoning_content`, `name`, …) go to the chat template unchanged. Content in parts is
joined if all parts are text; images and audio are refused. Before training, ALTO lists parts that the template does not
show and columns that nothing reads, with counts. [chat-templates.md](chat-templates.md) shows which tokens are trained
under well-known templates.

**Methods** read different forms:

- **Pairs** (`preference`, `raw_preference`, `openai_preference`) are for `method: dpo`, `orpo` and `cpo`.
- **Labelled replies** (`unpaired_preference`) are for `kto`, which also makes two labelled replies of each pair. The
  `label` is true if the reply is desirable. The reply may be the last message.
- **Texts with labels** (`text_classification`) are for `classification` and `regression`
  ([data.md](data.md#texts-with-labels)).
- All other forms are for `sft`.

If a dataset has columns for several methods, the method reads its own columns. A reply is a text, a message or a list
of messages. The prompt of `preference` is in the first of these columns that the dataset has: {", ".join(prompts)} (an
`input` is added after its instruction). Otherwise `chosen` and `rejected` both begin with the prompt, as in TRL.
`input` of `openai_preference` is `{{messages: […], tools: […]}}`. Prompts are not trained: the two conversations first
differ in a reply of the assistant. A pair is left out and counted if `max_length` leaves no part in which its
conversations differ.

**Bad rows** cannot be used. They end the task before training, and the error lists all of them. `on_bad_row: skip`
leaves them out: [data.md](data.md#bad-rows).

**Columns** may have other names: `columns` maps a role to its column. The roles are
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
