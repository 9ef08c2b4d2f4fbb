"""What the entries of a saved nested dict are taken for."""

from __future__ import annotations

import pytest

from shardwise.checkpoint.readers.inert import InertRecord
from shardwise.checkpoint.readers.state_names import clean_names, sort_out
from shardwise.errors import CheckpointError

T = "a tensor"
OPTIONS = {"lr": 0.5, "betas": (0.5, 0.75), "amsgrad": False, "decoupled_weight_decay": True}


def flat(value, where=()):
    """A nested dict as torch flattens it: dicts by text, lists of dicts by number."""
    if isinstance(value, dict):
        return {p: leaf for key, inner in value.items() for p, leaf in flat(inner, (*where, str(key))).items()}
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        return {p: leaf for key, inner in enumerate(value) for p, leaf in flat(inner, (*where, key)).items()}
    return {where: value}


def sorted_out(saved, full=False):
    """``full``: nobody knows where the keys were joined."""
    leaves = {".".join(map(str, path)): (path, leaf) for path, leaf in flat(saved).items()}
    paths = {key: (key,) if full else path for key, (path, _) in leaves.items()}
    return sort_out(paths, [key for key, (_, leaf) in leaves.items() if leaf is T], lambda key: leaves[key][1])


def optimizer(*names, **more):
    state = {name: {"exp_avg": T, "step": T} for name in names}
    return {"state": state, "param_groups": [{**OPTIONS, "params": list(names), **more}]}


def joined(*names):
    state = {f"state.{name}.exp_avg": T for name in names} | {f"state.{name}.step": T for name in names}
    return state | {f"param_groups.{name}.{key}": value for name in names for key, value in OPTIONS.items()}


A, B = "blocks.0.weight", "blocks.1.weight"
SD = {A: T, B: T}
NAMES = {f"model/{A}", f"model/{B}"} | {f"optimizer/{name}/{key}" for name in (A, B) for key in ("exp_avg", "step")}
ENTRY = {"name": "AdamW", "groups": ({"params": (A, B), "options": {**OPTIONS, "betas": [0.5, 0.75]}},), "state": {}}


@pytest.mark.parametrize(
    "saved",
    [
        {"model": SD, "optim": optimizer(A, B)},
        {"model": SD, "optim": joined(A, B)},
        {"app": {"model": SD, "optim": optimizer(A, B)}, "loss": T, "step": 3},
        {**SD, "optimizer": joined(A, B), "train_state": {"step": T}, "teacher": {"model": SD}},
        {"state_dict": SD, "optimizer_0": optimizer(A, B), "rng": {"cpu": T}},
        {"net": SD, "opt": optimizer(A, B), "lr_scheduler": {"best": T}},
        {"model": {f"module._orig_mod.{name}": T for name in SD}, "optim": optimizer(A, B)},
        {
            "model": {f"module.{name}": T for name in SD},
            "optim": optimizer(*(f"module.{name}" for name in SD)),
        },
        {"model": SD, "optim": {**optimizer(), **optimizer(0, 1, param_names=[A, B])}},
        {"model": SD, "optim_a": optimizer(A), "optim_b": optimizer(B)},
    ],
)
def test_weights_and_named_state_are_found(saved):
    found = sorted_out(saved)
    assert set(found.tensors) == NAMES
    assert not any("teacher" in key for key in found.tensors.values())
    assert sorted(name for group in found.optimizer["groups"] for name in group["params"]) == [A, B]
    if len(found.optimizer["groups"]) == 1:
        assert found.optimizer == ENTRY


def test_keys_that_nobody_split():
    found = sorted_out({**SD, "optimizer": joined(A, B)}, full=True)
    assert set(found.tensors) == NAMES and found.optimizer == ENTRY
    found = sorted_out({**joined(A, B)}, full=True)
    assert set(found.tensors) == {name for name in NAMES if name.startswith("optimizer")} and found.optimizer == ENTRY


def test_a_list_of_groups_that_is_one_value():
    paths = {"m": ("model", A), "g": ("optim", "param_groups"), "s": ("optim", "state", A, "step")}
    found = sort_out(paths, ["m"], {"g": [{**OPTIONS, "params": [A]}], "s": 4}.__getitem__)
    assert found.optimizer == {
        **ENTRY,
        "groups": ({"params": (A,), "options": ENTRY["groups"][0]["options"]},),
        "state": {A: {"step": 4}},
    }
    with pytest.raises(CheckpointError, match=r"'g' is not a list of parameter groups"):
        sort_out(paths, ["m"], {"g": "text", "s": 4}.__getitem__)


def test_state_by_number_is_said_and_left_out():
    found = sorted_out({"model": SD, "optimizer": optimizer(0, 1)})
    assert set(found.tensors) == {f"model/{A}", f"model/{B}"} and found.optimizer is None
    assert len(found.notes) == 1 and "'optimizer' keeps the state of 2 parameters by number" in found.notes[0]


def test_parameters_with_options_of_their_own_make_groups():
    saved = {**joined("a.weight", "a.weight.more", "b"), "param_groups.b.lr": 0.25}
    found = sorted_out({"model": {"a.weight": T, "a.weight.more": T, "b": T}, "optim": saved})
    groups = [(group["params"], group["options"]["lr"]) for group in found.optimizer["groups"]]
    assert groups == [(("a.weight", "a.weight.more"), 0.5), (("b",), 0.25)]
    assert {"optimizer/a.weight/step", "optimizer/a.weight.more/step"} <= set(found.tensors)


def test_options_in_another_order_are_the_same_group():
    of_a = {"param_groups.a.lr": 0.5, "param_groups.a.eps": 1e-8}
    of_b = {"param_groups.b.eps": 1e-8, "param_groups.b.lr": 0.5}
    found = sorted_out({"model": {"a": T, "b": T}, "optim": {"state.a.step": T, "state.b.step": T, **of_a, **of_b}})
    assert [group["params"] for group in found.optimizer["groups"]] == [("a", "b")]


def test_joined_state_belongs_to_the_longest_parameter():
    saved = {**joined("a", "a.b"), "state.a.b.inner.0": T, "state.a.inner.0": T, "state.c.d.step": T}
    found = sorted_out({"optim": saved})
    states = {name for name in found.tensors if not name.endswith(("/step", "/exp_avg"))}
    assert states == {"optimizer/a.b/inner.0", "optimizer/a/inner.0"}
    assert "optimizer/c.d/step" in found.tensors, "of a parameter in no group"


def test_state_in_deeper_dicts_and_what_json_cannot_hold():
    state = {"state": {A: {"inner": {"0": T}, "odd": InertRecord("a.Thing"), "count": 3, "a/b": T}}}
    groups = {"param_groups": [{**OPTIONS, "hook": InertRecord("b.Hook"), "params": [A]}]}
    found = sorted_out({"model": SD, "optim": {**state, **groups}})
    assert found.tensors[f"optimizer/{A}/inner.0"] == f"optim.state.{A}.inner.0"
    assert found.optimizer["state"] == {A: {"count": 3}}
    assert found.notes == [
        "optim, option hook is a b.Hook and is not carried over",
        f"optimizer/{A}/odd is a a.Thing and is not carried over",
        f"'optim.state.{A}.a/b' has a slash in the name of the state and is not carried over",
    ]


def test_what_is_neither_is_said():
    saved = {"model": {**SD, "blocks.0._extra_state": T}, "ema": SD, "epoch": 4, "sched": {"a": 1, "b": {"c": 2}}}
    found = sorted_out({**saved, "global_step": 7, "step": 9})
    assert found.step_key == "global_step"
    assert found.notes == [
        "not carried over, for it means something to its module alone: 'model.blocks.0._extra_state'",
        "not carried over, for it is neither weights nor optimizer state: 'ema' (2 entries), 'epoch', "
        "'sched' (2 entries), 'step'",
    ]


def test_weights_under_several_keys_keep_them():
    found = sorted_out({"encoder": SD, "decoder": SD, "scheduler": {"x": T}})
    assert set(found.tensors) == {f"model/{part}.{name}" for part in ("encoder", "decoder") for name in SD}
    assert "the weights are under decoder, encoder; their names keep that in front" in found.notes


def test_names_that_are_the_same_when_they_are_clean():
    with pytest.raises(CheckpointError, match=r"model/a is there twice, as 'model._orig_mod.a' and as 'model.a'"):
        sorted_out({"model": {"_orig_mod.a": T, "a": T}})


def test_clean_names():
    assert clean_names(["module.module.a", "module.module.b"]) == ["a", "b"]
    assert clean_names(["module.a", "head"]) == ["module.a", "head"], "a module that is called so"
    assert clean_names(["module._orig_mod.a._checkpoint_wrapped_module.b"]) == ["a.b"]
    assert clean_names(["_fsdp_wrapped_module.a._fsdp_wrapped_module.b"]) == ["a.b"]
    assert clean_names([]) == []


@pytest.mark.parametrize(
    ("options", "kind", "doubt"),
    [
        ({"betas": 1, "amsgrad": 0, "decoupled_weight_decay": False}, "Adam", ""),
        ({"betas": 1, "amsgrad": 0, "decoupled_weight_decay": True}, "AdamW", ""),
        ({"betas": 1, "amsgrad": 0, "weight_decay": 0.0}, "AdamW", ""),
        ({"betas": 1, "amsgrad": 0, "weight_decay": 0.1}, "AdamW", "Adam or AdamW"),
        ({"betas": 1, "momentum_decay": 1, "decoupled_weight_decay": False}, "NAdam", ""),
        ({"momentum": 1, "dampening": 1, "nesterov": False}, "SGD", ""),
        ({"beta": 1}, "", "its options do not identify it"),
    ],
)
def test_the_class_as_far_as_the_options_tell(options, kind, doubt):
    found = sorted_out({"model": SD, "optim": {"state": {}, "param_groups": [{**options, "params": [A, B]}]}})
    assert found.optimizer["name"] == kind
    assert (doubt in "".join(found.notes)) and bool(found.notes) == bool(doubt)
