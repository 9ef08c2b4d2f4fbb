"""``shardwise plan CONFIG.toml``: the model and the options that a config file of ``shardwise train`` names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.model.load_model import load_profile
from shardwise.model.packed_mask import with_packed_mask
from shardwise.model.profile import ModelProfile
from shardwise.plan.tensor_types import TYPE_FIELDS
from shardwise.search.plan_request import is_config

if TYPE_CHECKING:
    from shardwise.train.config import Config


def profile_of_model(model: str, *, seq_len: int | None, compiled: bool) -> ModelProfile:
    """Return the profile of a MODEL argument: of a config file, that of its table ``[model]``.

    Raises:
        UserError: the config is wrong, or its model cannot be built.
    """
    if not is_config(model):
        return load_profile(model, seq_len=seq_len, compiled=compiled)
    from shardwise.train.config import read_config
    from shardwise.train.config_tasks import refuse_other_tasks

    config = read_config(Path(model))
    refuse_other_tasks(config, "plan")
    return profile_of_config(config, seq_len=seq_len, compiled=compiled)


def profile_of_config(config: Config, *, seq_len: int | None, compiled: bool) -> ModelProfile:
    """Return the profile of a config's table ``[model]``.

    Raises:
        UserError: the model cannot be built.
    """
    vocab_size, of_config = _with_added_tokens(config), config.model.config
    if of_config is not None and not config.model.freeze and not vocab_size:
        profile = load_profile(of_config, seq_len=seq_len, compiled=compiled)
    else:
        from shardwise.model.trace import trace_module
        from shardwise.train.model import model_factory

        factory = model_factory(config, vocab_size)
        profile = trace_module(factory, seq_len=seq_len, name=config.model.factory or of_config)
    return with_packed_mask(profile) if of_config is not None and config.data.pack == "isolated" else profile


def _with_added_tokens(config: Config) -> int:
    """Return the size of a vocabulary that training resizes; 0 where it does not, or no tokenizer is here."""
    folder = Path(config.data.tokenizer).expanduser()
    if config.model.config is None or config.model.weights is None or not folder.exists():
        return 0
    from shardwise.train.data.tokenizer import load_tokenizer
    from shardwise.train.model import added_tokens

    added = added_tokens(config, load_tokenizer(config.data.tokenizer).vocab_size)
    return 0 if added is None else added.new


def with_config(words: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fill options that were left out from the config file, and say what it could not tell.

    The options ``grad_accum``, ``device``, ``nproc``, ``steps``, ``average``, the degrees of data parallel, the options
    of ``[parallel]`` that the file names and those of the adapters have no option: they are of the config alone.

    Raises:
        ConfigError: the config is wrong.
    """
    from shardwise.train.config import read_config

    config = read_config(Path(words["model"]))
    from shardwise.run.job import given_options  # it imports torch: after what is wrong with the file

    parallel, train, lora = config.parallel, config.train, config.lora
    has_adapters = "lora" in parallel.strategy
    found = {
        "seq_len": config.data.seq_len,
        "global_batch": train.global_batch,
        "micro_batch": train.micro_batch,
        "strategy": None if parallel.strategy == "auto" else parallel.strategy,
        "recompute": parallel.recompute,
        "precision": None if parallel.precision == "auto" else parallel.precision,
        "lora_rank": lora.rank if has_adapters else None,
        "lora_targets": ",".join(lora.targets) if has_adapters and lora.targets != ["all-linear"] else None,
    }
    found |= {name: getattr(parallel, name) for name in TYPE_FIELDS if name in parallel.model_fields_set}
    filled = dict(words) | {key: value for key, value in found.items() if words[key] is None}
    usual = {"optimizer": ("adamw", config.optimizer.name), "compiled": (False, parallel.compile)}
    usual |= {"loss_chunks": (None, train.loss_chunks if train.loss_chunks > 1 else None)}
    usual |= {"optimizer_in_backward": (False, config.optimizer.in_backward)}
    filled |= {key: value for key, (default, value) in usual.items() if words[key] == default}
    filled |= {"grad_accum": train.grad_accum, "device": parallel.device, "nproc": parallel.nproc, "steps": train.steps}
    filled["threads"] = parallel.threads
    filled["average"] = train.ema_decay > 0
    options = given_options(config)
    filled |= {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard}
    filled |= {"adapter": options.pop("adapter", None)}
    filled |= {"options": {key: value for key, value in options.items() if key not in ("compile", *usual)}}
    notes = []
    if config.optimizer.factory is not None:
        notes.append(f"optimizer.factory '{config.optimizer.factory}' is planned as {filled['optimizer']}")
    if train.steps is None and words["tokens"] is None:
        notes.append("how long train.epochs are is known once the data is read; give --tokens for hours and cost")
    return filled, notes
