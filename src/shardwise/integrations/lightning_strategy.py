"""`ShardwiseStrategy`: Shardwise's strategies inside Lightning's Trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn

from shardwise.errors import UserError
from shardwise.parallel.precision import DTYPES
from shardwise.plan.strategy import parse_strategy
from shardwise.run.start import start
from shardwise.train.session import Session
from shardwise.train.step import Step

_TENSOR, _ITEMS = "__tensor__", "__items__"  # of what JSON does not have


class ShardwiseStrategy(DDPStrategy):  # type: ignore[misc]
    """Strategy that trains a `LightningModule` as `shardwise.start` does, with checkpoints in Shardwise's format.

    The loss of ``training_step`` stays Lightning's: the mean of one micro batch, averaged over micro batches and ranks.
    ``+tp`` traces the module's ``forward`` on its ``example_input_array``. Automatic optimization with one optimizer.

    Args:
        strategy: ``ddp``, ``zero1``, ``zero2``, ``fsdp`` or ``hsdp``, with ``+tp2`` and ``+offload``.
        options: those of `shardwise.start`: ``precision``, ``recompute``, ``options``, ``receipts``, ``output``.

    Raises:
        UserError: the strategy runs all micro batches together, or needs an engine.
        PlanError: it is not in the grammar.
    """

    strategy_name = "shardwise"
    optimizers: list[Any]

    def __init__(self, strategy: str = "fsdp", **options: Any) -> None:
        super().__init__()
        parsed = parse_strategy(strategy)
        if parsed.pp > 1 or parsed.cp > 1 or parsed.engine == "deepspeed" or parsed.adapter != "none":
            raise UserError(
                f"ShardwiseStrategy('{strategy}'): pp, cp, lora and DeepSpeed do not run in Lightning's loop, which "
                "gives one micro batch at a time; use ddp, zero1, zero2, fsdp or hsdp, with +tp, or shardwise.start"
            )
        self.shardwise_plan, self._options = strategy, options
        self._session: Session | None = None
        self._windows: Iterator[Step] | None = None
        self._step: Step | None = None
        self._micros: Iterator[Any] = iter(())
        self._given: Any = None

    @property
    def session(self) -> Session:
        """Session that trains the module; known when a fit has begun.

        Raises:
            UserError: no fit has begun.
        """
        if self._session is None:
            raise UserError("ShardwiseStrategy.session is known when trainer.fit has begun")
        return self._session

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: shards are read into a model that is sharded."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Ranks of one tensor-parallel group have the same samples."""
        if self._session is None:
            return dict(super().distributed_sampler_kwargs)
        dims = self.session.plan.dims
        return {"num_replicas": dims.dp, "rank": self.session.place.dp}

    def setup(self, trainer: Any) -> None:
        """Shard the module and its optimizer."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        self._check(trainer)
        self.setup_optimizers(trainer)
        self._check_optimizers()
        module, optimizer = self.lightning_module, self.optimizers[0]
        for group in optimizer.param_groups:
            group.pop("initial_lr", None)  # of schedulers, which go on with the optimizer that is returned
        self._session = start(
            self.shardwise_plan,
            grad_accum=trainer.accumulate_grad_batches,
            device=self.root_device.type,
            **self._options,
        )
        sample = getattr(module, "example_input_array", None)
        self.model, prepared = self._session.prepare(module, optimizer, sample)
        for config in self.lr_scheduler_configs:
            config.scheduler.optimizer = prepared
        for group in prepared.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.optimizers = [prepared]
        self._windows = self._session.run_windows(self._window_sizes(trainer), count=len)
        self.setup_precision_plugin()

    def _check(self, trainer: Any) -> None:
        """Refuse what Lightning's settings and the session would both do, or neither."""
        precision, module = str(self.precision_plugin.precision), self.lightning_module
        problems = []
        if precision not in ("32-true", "32", "64-true"):
            problems.append(
                f"Trainer(precision='{precision}'): use ShardwiseStrategy('{self.shardwise_plan}', precision='bf16')"
            )
        if not module.automatic_optimization:
            problems.append("automatic_optimization = False: the session steps the optimizer itself; leave it True")
        if str(trainer.gradient_clip_algorithm or "norm").endswith("value"):
            problems.append("gradient_clip_algorithm = 'value': use 'norm'")
        if problems:
            raise UserError("ShardwiseStrategy: " + "; ".join(problems))

    def _check_optimizers(self) -> None:
        if len(self.optimizers) != 1:
            raise UserError(
                f"ShardwiseStrategy: configure_optimizers returned {len(self.optimizers)} optimizers; a session has one"
            )

    def _window_sizes(self, trainer: Any) -> Iterator[list[Any]]:
        """Yield a window for each optimizer step: the batch that begins it, and marks in place of those to come."""
        number = 0
        while True:
            number += 1
            left, accum = trainer.num_training_batches, trainer.accumulate_grad_batches
            left -= trainer.fit_loop.epoch_loop.batch_idx
            if math.isinf(left) and accum > 1:
                raise UserError(
                    f"ShardwiseStrategy: accumulate_grad_batches = {accum}, and the loader has no length, so its last "
                    "step cannot be told; set limit_train_batches"
                )
            size = int(min(accum, left))
            later = [torch.tensor([number, micro, self.session.place.dp]) for micro in range(1, size)]
            yield [(inputs, [0]) for inputs in (self._given, *later)]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a micro batch, and compute its loss."""
        if self._step is None:
            self._given = args[0] if args else kwargs
            assert self._windows is not None
            self._step = next(self._windows)
            self._micros = iter(self._step)
        micro, step = next(self._micros), self._step
        given = args[0] if args else kwargs
        step.micros[step.micro - 1] = dataclasses.replace(micro, inputs=given)  # for the receipt of samples
        return self._redirected("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate through the wrapper, which gathers weights."""
        return self._redirected("validation_step", *args, **kwargs)

    def _redirected(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a step by the model's own ``__call__``, whose hooks shard it."""
        if self._session is None:
            return getattr(super(), name)(*args, **kwargs)
        if self.session.plan.dims.tp > 1 and self.model is self.lightning_module:
            return getattr(self.lightning_module, name)(*args, **kwargs)  # its own forward is what tp has traced
        plan = self.session.plan
        # the loss is within the model's call here: with losses in fp32, and weights cast where they are not sharded
        with torch.autocast(plan.device, dtype=DTYPES[plan.precision], enabled=plan.precision != "fp32"):
            return self._forward_redirection(self.model, self.lightning_module, name, *args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the session's backward, which reduces gradients in the window's last one."""
        step = self._step
        assert step is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        # Lightning's loss is weighted already; the session's own weight is undone
        step.backward(closure_loss * (1.0 / step.weight(step.micros[step.micro - 1])))
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the last micro batch, clip, and update.

        Raises:
            UserError: ``training_step`` returned no loss.
        """
        result, step = closure(), self._step
        if step is None or result is None:
            raise UserError("ShardwiseStrategy: training_step returned None; ranks cannot skip a micro batch")
        trainer = self.lightning_module.trainer
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        step.update(optimizer, clip_norm=trainer.gradient_clip_val or None)
        self._step = None
        return result

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do nothing: the session decides which backward reduces."""
        yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing while a session trains: it writes the weights itself."""
        return {} if self._session is not None else dict(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: the session writes the optimizer's state itself."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the session's checkpoint, with Lightning's own state beside it as JSON. Collective."""
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        self.session.save(str(filepath), state={"lightning": _as_json(rest)}, keep=1)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read shards into the live model and optimizer, whatever strategy wrote them; return Lightning's own state.

        Raises:
            UserError: there is no checkpoint, or not one that this strategy wrote.
        """
        state = self.session.load(str(checkpoint_path))
        if state is None or "lightning" not in state:
            raise UserError(f"ShardwiseStrategy: '{checkpoint_path}' has no checkpoint that this strategy wrote")
        return {**_revived(state["lightning"]), "state_dict": {}, "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has read the weights."""

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Do nothing: `load_checkpoint` has read the state."""

    def teardown(self) -> None:
        """Close the session, and return the module as it was given."""
        if self._session is not None:
            if self._windows is not None:
                self._windows.close()  # type: ignore[attr-defined]
            self._session.close()
            self._session, self._windows, self._step = None, None, None
            self.model = self.lightning_module
        super().teardown()


def _as_json(value: Any) -> Any:
    """Return ``value`` as JSON has it, with tensors and other keys than texts marked."""
    if isinstance(value, torch.Tensor):
        return {_TENSOR: value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _as_json(one) for key, one in value.items()}
        return {_ITEMS: [[_as_json(key), _as_json(one)] for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_as_json(one) for one in value]
    try:
        json.dumps(value)
    except TypeError:
        return str(value)  # of paths and enums
    return value


def _revived(value: Any) -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            return torch.tensor(value[_TENSOR], dtype=getattr(torch, value["dtype"]))
        if _ITEMS in value:
            return {_revived(key): _revived(one) for key, one in value[_ITEMS]}
        return {key: _revived(one) for key, one in value.items()}
    return [_revived(one) for one in value] if isinstance(value, list) else value
