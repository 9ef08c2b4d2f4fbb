"""Engine state laid out as FSDP2 would: rows of each parameter and state, during a save.

An engine keeps flat shards that are not boxes of a tensor. `Shadow` is a model and an optimizer with the same names, of
which each rank has the rows that FSDP2 would give it (the first dimension split into equal parts), in fp32. `Saver` and
`load_checkpoint` work on that as on any other model, so a checkpoint does not depend on the engine that it came from.

Tensors pass one at a time: a rank needs memory for one full tensor more than its rows. The rows themselves are a copy
of the rank's share (12 bytes a parameter, divided by the ranks, for AdamW), which is freed after the save.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from shardwise.checkpoint import messages as exchange
from shardwise.checkpoint.layout import inner_model
from shardwise.model.read import clean_name
from shardwise.parallel.engines.engine import Engine, engine_around


class Shadow:
    """Rows of an engine's model and optimizer; all its methods are collective.

    ``filled``: copy the engine's current values. Otherwise only allocate, to be filled by a load.
    """

    def __init__(self, module: nn.Module, engine: Engine, *, filled: bool, states: bool = True) -> None:
        self.engine = engine
        self._module = module
        kind = "cpu" if not torch.cuda.is_available() else next(iter(engine.local_tensors().masters)).device.type
        self._mesh: DeviceMesh | None = None
        if exchange.world_size() > 1:
            self._mesh = init_device_mesh(kind, (exchange.world_size(),))
        self._rows: dict[str, nn.Parameter] = {}
        live = {clean_name(name): p for name, p in module.named_parameters()}
        wholes: Iterator[tuple[str, torch.Tensor | None]]
        wholes = engine.weights() if filled else ((name, None) for name in live)
        for name, full in wholes:
            shape = self.engine.shape(name)
            rows = torch.empty(shape) if full is None and self._mesh is None else self._rows_of(full, shape, kind)
            self._rows[name] = nn.Parameter(rows, requires_grad=live[name].requires_grad)
        self.model = _skeleton(module, {id(live[name]): row for name, row in self._rows.items()})
        self.optimizer = _bare(self.engine.base, self._groups())
        for name, row in self._rows.items() if filled and states else ():
            found = {k: self._like(v, name) for k, v in self.engine.states(name).items()}
            if found:
                self.optimizer.state[row] = found

    def _kept(self) -> dict[str, dict[str, Any]]:
        return {name: self.optimizer.state[row] for name, row in self._rows.items() if self.optimizer.state.get(row)}

    def put_back(self, *, states: bool) -> None:
        """Write the rows back to the engine: weights, and with ``states`` the optimizer's."""
        self.engine.set_weights(lambda name: self._full(self._rows[name]))
        if not states:
            return
        for number, group in enumerate(self.optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            self.engine.base.param_groups[number].update(options)
        kept = self._kept()
        self.engine.make_states(*self._scalars(kept))
        for name, state in kept.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    self.engine.set_state(name, key, self._full(value))

    def _scalars(
        self, kept: dict[str, dict[str, Any]]
    ) -> tuple[list[dict[str, torch.Tensor | None]], dict[str, dict[str, torch.Tensor] | None]]:
        """Return the scalar state of each group and of parameters that differ from it.

        For each group the keys of its state: the value if it is a scalar shared by all, ``None`` for a tensor. Then the
        scalars of the parameters whose values differ, as they missed updates; ``None`` for those without state.
        """
        groups: list[dict[str, torch.Tensor | None]] = []
        apart: dict[str, dict[str, torch.Tensor] | None] = {}
        for names in self.engine.groups:
            here = {name: _numbers(kept[name]) for name in names if name in kept}
            most = max(here.values(), key=lambda one: [float(value) for value in one.values()], default={})
            first = next((kept[name] for name in here), {})
            tensors = [key for key in first if key not in most]  # sorted: set order differs between ranks
            groups.append({**dict.fromkeys(tensors), **most})
            apart |= {name: here.get(name) for name in names if here and here.get(name) != most}
        return groups, apart

    def _groups(self) -> list[dict[str, Any]]:
        given = zip(self.engine.base.param_groups, self.engine.groups, strict=True)
        return [{**group, "params": [self._rows[name] for name in names]} for group, names in given]

    def _like(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """Return a state as rows, where it has the parameter's shape."""
        shape = self.engine.shape(name)
        same = value.dim() and value.shape == shape
        return self._rows_of(value, shape, value.device.type) if same else value

    def _rows_of(self, full: torch.Tensor | None, shape: torch.Size, kind: str) -> torch.Tensor:
        """Copy this rank's rows of a full tensor; allocate only if it is ``None``."""
        if self._mesh is None or not len(shape):
            return torch.empty(shape, device=kind) if full is None else full.clone()
        each = -(-shape[0] // exchange.world_size())
        begin = min(shape[0], each * exchange.rank())
        end = min(shape[0], begin + each)
        local = torch.empty((end - begin, *shape[1:]), device=kind) if full is None else full[begin:end].clone()
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def _full(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.full_tensor().detach() if isinstance(rows, DTensor) else rows.detach()


def _numbers(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the scalar entries of a parameter's state, such as AdamW's ``step``."""
    named = ((key, torch.as_tensor(value)) for key, value in state.items())
    return {key: value for key, value in named if not value.dim()}


def shadow_of(model: nn.Module, *, filled: bool, states: bool = True) -> Shadow | None:
    """Build the rows of an engine's model; ``None`` for plain PyTorch. Collective."""
    module = inner_model(model)
    engine = engine_around(module)
    return None if engine is None else Shadow(module, engine, filled=filled, states=states)


def _skeleton(module: nn.Module, rows: dict[int, nn.Parameter]) -> nn.Module:
    """Build a tree of empty modules with the same names.

    Rows replace the parameters; buffers are shared.
    """
    made: dict[int, nn.Module] = {}

    def copy(of: nn.Module) -> nn.Module:
        if id(of) not in made:
            kind: type[nn.Module] = nn.Module
            if type(of).get_extra_state is not nn.Module.get_extra_state:
                kind = type("Keeping", (nn.Module,), {"get_extra_state": type(of).get_extra_state})
            made[id(of)] = copied = kind()
            copied._non_persistent_buffers_set = set(of._non_persistent_buffers_set)
            for name, parameter in of._parameters.items():
                copied._parameters[name] = None if parameter is None else rows[id(parameter)]
            copied._buffers = dict(of._buffers)
            for name, child in of._modules.items():
                copied._modules[name] = None if child is None else copy(child)
        return made[id(of)]

    return copy(module)


def _bare(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Build an optimizer of the same class over other parameters, without state."""
    made: Optimizer = object.__new__(type(optimizer))
    Optimizer.__init__(made, groups, dict(optimizer.defaults))
    return made
