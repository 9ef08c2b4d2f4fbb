"""Verb ``shardwise init``: a commented config for fine-tuning, from a model, data and this machine."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console

from shardwise.environment import visible_devices
from shardwise.errors import DataError, ModelError, UserError
from shardwise.hardware.cluster import ClusterSpec, detect
from shardwise.train.causal import causal_configuration
from shardwise.train.config import read_config
from shardwise.train.config_data import DataTable, Part
from shardwise.train.data.documents import Columns
from shardwise.train.data.encode import Encoded, Encoder
from shardwise.train.data.sources import BadRows, find_source
from shardwise.train.data.tokenizer import load_tokenizer
from shardwise.train.run_files import RunFile
from shardwise.units import bytes_text, count_text

_LOOKED_AT = 512  # documents whose lengths are counted
_LONGEST = 8192
_FULL_BYTES = 18  # a parameter in mixed precision with AdamW: 2 weight, 2 gradient, 4 master, 8 state, and some buffers
_FROZEN_BYTES = 2.2  # bf16 weights of a frozen base, and its adapters


@dataclass(frozen=True)
class _Found:
    """Model as a config names it, its tokenizer, and where its weights are."""

    config: str
    weights: str
    tokenizer: str
    parameters: int
    longest: int


def run_init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face folder, name in its cache, or a run.")],
    data: Annotated[str, typer.Option("--data", help="File or folder with conversations, prompts or text.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Config file to write.")] = Path("config.toml"),
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="Another tokenizer than the model's: bytes, a file or a folder."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option("--column", metavar="PART=NAME", help="Column of a part, such as messages=chat; may be repeated."),
    ] = None,
) -> None:
    """Run ``shardwise init``.

    Nothing is downloaded.

    Raises:
        UserError: model or data cannot be used, or the file exists.
    """
    console = Console(highlight=False, soft_wrap=True)
    if output.exists():
        raise UserError(f"--output '{output}' exists; give another name, or remove it")
    named = _columns(column or [])
    found = _model(model)
    if tokenizer is not None:
        found = replace(found, tokenizer=tokenizer)
    cluster = detect("auto", None, visible=visible_devices())
    console.print(f"model: {found.config}, {count_text(found.parameters)} parameters, up to {found.longest} tokens")
    table, columns = _table(found, data, named)
    lengths, template, share = _lengths(found, table, columns)
    seq_len = _seq_len(lengths, found.longest)
    batch, evaluate = _steps(lengths, share, seq_len, cluster.world_size)
    longer = sum(length > seq_len for length in lengths) / max(1, len(lengths))
    console.print(
        f"data: {columns}; the first {len(lengths)} have up to {max(lengths, default=0)} tokens, "
        f"{longer:.0%} more than seq_len {seq_len}",
        markup=False,
    )
    if template is not None:
        console.print(
            f"chat template: the tokenizer '{found.tokenizer}' has none, so data.chat_template is "
            f'"{template}"; give a file where the model knows another',
            markup=False,
        )
    strategy, why = _strategy(found.parameters, cluster)
    console.print(f"machine: {cluster.world_size} × {cluster.device_name}; {why}", markup=False)
    text = _text(found, table, template, seq_len, (strategy, why), columns, (batch, evaluate))
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        read_config(Path(file.name))  # what is written can be read
    try:
        output.write_text(text)
    except OSError as error:
        raise UserError(f"--output '{output}' cannot be written: {error.strerror}; give another path") from None
    console.print(f"wrote {output}; next:", markup=False)
    for verb in ("data preview", "train --dry-run", "train"):
        console.print(f"  shardwise {verb} {output}", markup=False)


def _model(text: str) -> _Found:
    """Find a model's configuration, weights and tokenizer."""
    folder = Path(text).expanduser()
    if (folder / RunFile.JOB).is_file():
        return _of_run(folder)
    if not folder.exists():
        folder = _cached(text)
    facts = causal_configuration(folder)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"'{folder}' has no *.safetensors; give a folder with weights, or convert them first")
    return _Found(str(folder), str(folder), str(folder), _parameters(facts), _longest(facts))


def _of_run(folder: Path) -> _Found:
    """Take model and tokenizer from the job of an earlier run."""
    job = json.loads((folder / RunFile.JOB).read_text())["config"]
    config = job["model"].get("config")
    if config is None:
        raise ModelError(f"'{folder}' trained model.factory '{job['model'].get('factory')}'; write its config by hand")
    facts = causal_configuration(Path(config))
    return _Found(config, str(folder), job["data"].get("tokenizer", "bytes"), _parameters(facts), _longest(facts))


def _cached(name: str) -> Path:
    """Return the folder of a repository in the local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except HFValidationError:
        raise ModelError(f"'{name}' does not exist; give a folder, or a name such as Qwen/Qwen3-0.6B") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"'{name}' is neither a folder nor in the local cache, and nothing is downloaded here; download it with: "
            f"hf download {name}"
        ) from None


def _parameters(facts: Any) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    from shardwise.model.undrawn import undrawn

    with torch.device("meta"), undrawn():
        return sum(one.numel() for one in AutoModelForCausalLM.from_config(facts).parameters())


def _longest(facts: Any) -> int:
    return int(getattr(facts, "max_position_embeddings", None) or _LONGEST)


def _columns(given: list[str]) -> dict[Part, str]:
    """Return what ``--column`` names, as ``data.columns`` has it."""
    pairs, parts = [one.partition("=") for one in given], get_args(Part)
    if wrong := [
        f"--column '{part}{equals}{name}' is not PART=NAME; parts are {', '.join(parts)}"
        for part, equals, name in pairs
        if part not in parts or not name
    ]:
        raise UserError(*wrong)
    return {cast(Part, part): name for part, _, name in pairs}


def _table(found: _Found, data: str, columns: dict[Part, str]) -> tuple[DataTable, Columns]:
    table = DataTable(path=data, tokenizer=found.tokenizer, seq_len=1, bad_rows="skip", columns=columns)
    source = find_source(data, "--data", table, Path())
    return table, source.columns(table) or Columns("text", {"text": "text"})


def _lengths(found: _Found, table: DataTable, columns: Columns) -> tuple[list[int], str | None, float]:
    """Count the tokens of the first documents.

    Return also the template that they need beside the tokenizer's, and their share of the data.
    """
    template, source = None, find_source(str(table.path), "--data", table, Path())
    if source.is_rendered(columns):
        try:
            load_tokenizer(found.tokenizer).template(None)
        except UserError:
            template = "chatml"
    encoder = Encoder(found.tokenizer, columns.kind, template, "auto")
    bad = BadRows(skip=True)
    batches = list(islice(source.batches(columns, bad), -(-_LOOKED_AT // 128)))
    coded = [one for batch in batches for one in encoder.encode(batch.documents)]
    if not any(isinstance(one, Encoded) for one in coded):
        wrong = [*bad.problems, *(one for one in coded if isinstance(one, str))]
        why = f": {wrong[0]}" if wrong else "; give a file with some"
        raise DataError(f"--data '{table.path}' has no row to train on{why}")
    share = batches[-1].read / max(1, source.num_bytes) if batches else 1.0
    return [len(one.ids) for one in coded if isinstance(one, Encoded)], template, share


def _steps(lengths: list[int], share: float, seq_len: int, ranks: int) -> tuple[int, int]:
    """Return the global batch, 16 where an epoch has 30 steps of that, and the steps of a quarter of an epoch."""
    samples = sum(min(length, seq_len) for length in lengths) / share / seq_len
    batch = next((size for size in (16, 8, 4, 2) if samples / size >= 30), 2)
    batch = -(-max(batch, ranks) // ranks) * ranks
    return batch, max(1, int(samples / batch / 4))


def _seq_len(lengths: list[int], longest: int) -> int:
    """Return the power of two that holds 19 of 20 documents, and two of the usual ones in a row."""
    if not lengths:
        return min(longest, 1024)
    ordered = sorted(lengths)
    wanted = max(ordered[int(0.95 * (len(ordered) - 1))], 2 * ordered[len(ordered) // 2])
    return max(1, min(longest, _LONGEST, 1 << (wanted - 1).bit_length()))


def _strategy(parameters: int, cluster: ClusterSpec) -> tuple[str, str]:
    """Return the strategy by what a rule of thumb says of memory; ``train --dry-run`` computes it."""
    memory = cluster.device_memory_bytes
    if cluster.device == "cpu" or memory is None:
        return "auto", "all weights are trained"
    everything = memory * cluster.world_size
    if parameters * _FULL_BYTES < 0.7 * everything:
        return "auto", "all weights are trained"
    why = f"training all weights takes about {bytes_text(parameters * _FULL_BYTES)} of {bytes_text(everything)}"
    kind = "lora" if parameters * _FROZEN_BYTES < 0.7 * everything else "qlora"
    base = "ddp" if cluster.world_size == 1 else "fsdp"
    return f"{base}+{kind}", f"{why}: adapters are trained instead"


def _text(
    found: _Found,
    table: DataTable,
    template: str | None,
    seq_len: int,
    chosen: tuple[str, str],
    columns: Columns,
    steps: tuple[int, int],
) -> str:
    """Return the config file; ``chosen`` is the strategy and its reason, ``steps`` the batch and ``eval_every``."""
    (strategy, why), (batch, evaluate) = chosen, steps
    adapters = strategy.endswith("lora")
    small = found.parameters < 5e7
    rate = "1e-3" if small else "2e-4" if adapters else "2e-5"
    loss = (
        "what the assistant wrote" if columns.kind in ("messages", "instruction") else "completions; all of plain text"
    )
    lora = "\n[lora]\nrank = 16\nalpha = 32.0                          # adapters are scaled by alpha / rank\n"
    return f"""\
# Fine-tuning, written by shardwise init. Every key: docs/config.md. Look first, then train:
#   shardwise data preview FILE     documents with their loss mask
#   shardwise train FILE --dry-run  plan, memory and time

[model]
config = {_quoted(found.config)}
weights = {_quoted(found.weights)}

[data]
path = {_quoted(str(table.path)):<30} # {columns}
tokenizer = {_quoted(found.tokenizer)}
{_rows(table, template)}seq_len = {seq_len}
pack = "isolated"                     # several documents in a sample; none sees another
loss_on = "auto"                      # {loss}
bad_rows = "refuse"                   # or "skip"
heldout_fraction = 0.05
{lora if adapters else ""}
[optimizer]
lr = {rate}
schedule = "cosine"
warmup_steps = 10
clip_norm = 1.0

[train]
epochs = 3
global_batch = {batch:<22} # samples of seq_len tokens
output = "runs/{Path(found.weights).name or "finetune"}-tuned"
eval_every = {evaluate}
best_metric = "heldout_loss"          # its checkpoint is kept and exported
export = "hf"                         # runs/.../model, for transformers and servers

[parallel]
strategy = {_quoted(strategy):<26} # {why}

[checkpoint]
every = {4 * evaluate:<29} # steps; the best one is saved when it is found
"""


def _rows(table: DataTable, template: str | None) -> str:
    """Return the lines that say how rows are read, where the usual way does not do."""
    lines = (
        [] if template is None else [f'chat_template = "{template}"              # the tokenizer has none of its own']
    )
    if table.columns:
        named = ", ".join(f"{part} = {_quoted(name)}" for part, name in table.columns.items())
        lines.append(f"columns = {{{named}}}")
    return "".join(f"{line}\n" for line in lines)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
