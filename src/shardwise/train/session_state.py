"""Session state in a checkpoint, for `Session.save` and `Session.load`."""

from __future__ import annotations

from typing import Any

from shardwise.checkpoint import messages as exchange
from shardwise.checkpoint.format import read_manifest
from shardwise.checkpoint.load import load_checkpoint, newest_of_all, rng_for
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.storage.local_storage import Folder, folder_of
from shardwise.errors import UserError
from shardwise.parallel.lora.adapters import adapters_of
from shardwise.train.data.position import DataPosition
from shardwise.train.finite import check_weights
from shardwise.train.resume import reading_state, refuse_other_base
from shardwise.train.rng import random_states, rank_to_follow
from shardwise.train.session_interface import TrainingSession

_START = "start."  # prefix of generator names, for their states when the pass over the data began


def save_session(session: TrainingSession, saver: Saver, state: dict[str, Any] | None) -> Folder:
    """Save the session between two steps. Collective.

    Raises:
        UserError: called in the middle of a step.
        TrainingError: weights are not finite.
    """
    if session.in_step:
        raise UserError("session.save in the middle of a step; call it after step.update(optimizer)")
    check_weights(session)
    rng = random_states(session.device)
    if session.pass_ended():  # what the end of the loader drew is drawn
        rng = random_states(session.device) | session.stream.generator_states()
        session.stream.ended = True
    place = session.stream.place()
    rng |= {f"{_START}{name}": states for name, states in session.stream.at_start.items()}
    facts = {
        "steps": session.steps_done,
        "passes": place.passes,
        "batches": place.batches,
        "ranks": place.ranks,
        "pass_steps": place.steps,
        "pass_ended": place.ended,
        "scaler": None if session.scaler is None else session.scaler.state_dict(),
    }
    return saver.save(
        session.steps_done,
        model=session.module,
        optimizer=session.optimizer,
        plan=session.plan,
        state={"session": facts, "user": state or {}},
        rng=rng,
        model_facts=_adapter_facts(session) or None,
    )


def _adapter_facts(session: TrainingSession) -> dict[str, Any]:
    """Return adapters and a digest of their base, from rank 0; empty without adapters.

    Collective.
    """
    adapters = adapters_of(session.module)
    if adapters is None:
        return {}
    return {"adapter": adapters.facts(), "base": exchange.broadcast_json({"weights": None, "digest": adapters.base})}


def load_session(session: TrainingSession, folder: str | Folder, verify: bool) -> dict[str, Any] | None:
    """Resume from the newest checkpoint in ``folder``, if there is one. Collective.

    Raises:
        UserError: the checkpoint is not from `save_session`, or its adapters or their base differ.
    """
    path = newest_of_all(folder_of(folder))
    if path is None:
        return None
    manifest = exchange.together(lambda: read_manifest(path))
    refuse_other_base(manifest, path, _adapter_facts(session), "save to another folder")
    manifest = load_checkpoint(path, model=session.module, optimizer=session.optimizer, verify=verify)
    facts = manifest.state.get("session")
    if facts is None:
        raise UserError(
            f"'{path}' was not saved by session.save (shardwise train and convert do not save a custom loop's "
            "position); load its weights with shardwise.checkpoint.weights.load_weights(model, path)"
        )
    saved = rng_for(path, rank_to_follow(manifest.plan, session.plan, session.ranks.rank)) or {}
    at_start = {name.removeprefix(_START): state for name, state in saved.items() if name.startswith(_START)}
    now = {name: state for name, state in saved.items() if not name.startswith(_START)}
    with reading_state(path):
        session.steps_done = session.first_step = int(facts["steps"])
        if session.scaler is not None and facts["scaler"]:
            session.scaler.load_state_dict(facts["scaler"])
        place = DataPosition(
            int(facts["passes"]),
            int(facts["batches"]),
            int(facts["ranks"]),
            int(facts.get("pass_steps", 0)),  # absent in checkpoints before 2026-11-23
            bool(facts.get("pass_ended", False)),
        )
        user: dict[str, Any] = manifest.state["user"]
    session.stream.go_on(place, at_start, now)
    return user
