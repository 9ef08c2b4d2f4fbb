"""Keys of a data set in axolotl's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.interop.deepspeed.optimizer_section import FileKey
from shardwise.interop.files.data_keys import add_source
from shardwise.interop.files.key_table import Reading, Rule, group, idle, left_out, part_of, read_keys, refused


def datasets_rule(reading: Reading, key: str, value: Any) -> None:
    """Take the list of data sets, key by key."""
    for index, one in enumerate(value if isinstance(value, list) else [value]):
        where = f"{key}[{index}]"
        if not isinstance(one, Mapping):
            reading.refuse(where, one, "must be a table")
            continue
        read_keys(reading, one, _DATASET, f"{where}.")
        files = one.get("data_files")
        path = (
            files
            if isinstance(files, str)
            else files[0]
            if isinstance(files, list) and len(files) == 1
            else one.get("path")
        )
        if isinstance(files, list) and len(files) > 1:
            reading.refuse(f"{where}.data_files", files, "give each file a dataset of its own")
        add_source(
            reading, f"{where}.path", {"path": str(path), "name": f"{index}-{Path(str(path)).stem}", **_columns(one)}
        )


def _columns(one: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "messages": "field_messages",
        "instruction": "field_instruction",
        "input": "field_input",
        "output": "field_output",
    }
    columns = {part: one[name] for part, name in names.items() if one.get(name)}
    found: dict[str, Any] = {"columns": columns} if columns else {}
    if dataset_kind(one) == "completion":
        found["text_field"] = one.get("field") or "text"
    return found


def dataset_kind(one: Mapping[str, Any]) -> str:
    """Return the type of a data set without what follows a point or a colon."""
    kind = one.get("type")
    return kind.split(".")[0].split(":")[0] if isinstance(kind, str) else "custom"


def _dataset_type(reading: Reading, key: str, value: Any) -> None:
    kind = dataset_kind({"type": value})
    if kind in ("chat_template", "completion"):
        reading.taken.append(FileKey(key, value, "rows of messages" if kind == "chat_template" else "rows of text"))
    elif kind == "alpaca":
        reading.taken.append(FileKey(key, value, "rows with instruction, input and output"))
        reading.means.append(
            f"{key} {value}: instructions are rendered by the chat template, not by Alpaca's own prompt"
        )
    else:
        reading.refuse(key, value, "rows are of the types chat_template, completion and alpaca; convert them")


_DATASET: dict[str, Rule] = {
    "path": part_of("data.path"),
    "data_files": part_of("data.path"),
    "type": _dataset_type,
    "split": idle("a file has one split"),
    "ds_type": idle("the format is found from the file"),
    "name": left_out("subsets are of hub data sets; give the file"),
    "field": part_of("data.text_field"),
    **dict.fromkeys(("field_messages", "field_instruction", "field_input", "field_output"), part_of("data.columns")),
    "chat_template": left_out("one template is for all data; set data.chat_template"),
    "roles_to_train": refused(
        "labels are those of the assistant; remove it", ["assistant"], ["gpt"], ["assistant", "gpt"]
    ),
    "train_on_eos": refused("the end of each trained turn is a label, as with 'turn'", "turn"),
    "train_on_eot": refused("the end of each trained turn is a label, as with 'turn'", "turn"),
    "message_property_mappings": refused(
        "messages have role and content, or from and value",
        {"role": "role", "content": "content"},
        {"role": "from", "content": "value"},
    ),
    "message_field_role": refused("messages have role and content, or from and value", "role", "from"),
    "message_field_content": refused("messages have role and content, or from and value", "content", "value"),
    "roles": left_out("user, assistant, system, tool, and ShareGPT's human and gpt are known"),
    "trust_remote_code": refused("code of a data set is never run"),
    "revision": left_out("subsets and revisions are of hub data sets; give the file"),
    **group(
        refused,
        {
            "changes which rows or tokens are trained on": "shards shards_idx preprocess_shards conversation "
            "chat_template_jinja input_format input_transform field_human field_model field_tools field_thinking "
            "template_thinking_key message_field_training message_field_training_detail split_thinking logprobs_field "
            "temperature drop_system_message format no_input_format system_prompt system_format field_system"
        },
    ),
}
