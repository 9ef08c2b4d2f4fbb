"""Training options on real ranks: gradients are those of one process, and each option has a line that can be false."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.train.average as average
import shardwise.train.noise as noise
import shardwise.train.training_parts as training_parts
from shardwise.errors import Interrupted
from shardwise.model.read import clean_name
from shardwise.parallel.ownership import ownership_of
from shardwise.receipts.effects import EffectsRecorder
from shardwise.receipts.lines.training_lines import TrainingLines
from shardwise.run.job import Job, prepare_job
from shardwise.run.start import start
from shardwise.train.config import OptimizerTable, read_config
from shardwise.train.loss import token_loss_sum
from shardwise.train.optimizer import build_optimizer
from shardwise.train.run_interface import RunStart
from shardwise.train.training_options import TrainingOptions
from shardwise.train.training_parts import TrainingLoss, TrainingParts
from tests.cli import configs
from tests.contract import CLIP, LIMIT, Case, Gradients, Still, Watch, full, gradients_here, ragged, worst
from tests.families import family
from tests.kept import kept
from tests.worlds import run_each

TERMS = {"label_smoothing": 0.15, "z_loss": 0.02}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
CASES = [
    Case(2, "ddp", "llama"),
    Case(2, "fsdp", "llama"),
    Case(2, "ddp+tp2", "llama", options={"loss_parallel": True}),
    Case(2, "fsdp+tp2", "qwen3", options={"loss_parallel": False}),
    Case(2, "ddp+pp2", "llama"),
    Case(2, "fsdp", "qwen3", options={"loss_chunks": 3}),
    Case(2, "ddp", "gpt2", options={"loss_chunks": 7}),
]


def by_formula(model: nn.Module, batches: list[Any]) -> tuple[Gradients, float]:
    """One process over the global batch; the loss of a label is written out."""
    total: Any = 0.0
    for inputs, labels in batches:
        logits = model(inputs).logits
        probabilities = logits.softmax(-1)
        smooth = torch.full_like(logits, TERMS["label_smoothing"] / logits.shape[-1])
        own = nn.functional.one_hot(labels.clamp_min(0), logits.shape[-1]).to(logits) * (1 - TERMS["label_smoothing"])
        one = -((smooth + own) * probabilities.log()).sum(-1) + TERMS["z_loss"] * logits.exp().sum(-1).log() ** 2
        total = total + one[labels != -100].sum()
    loss = total / sum(int((labels != -100).sum()) for _, labels in batches)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients, float(loss.detach())


def terms(case: Case) -> float:
    """The worst error of gradients and losses of two windows."""
    per_window = case.plan.dims.dp * case.accum
    batches = ragged(2 * per_window)
    session = start(case.plan, receipts=False)
    session.observers.append(watch := Watch(gradients_here))
    model = family(case.model, layers=2)
    model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0), batches[0][0])
    errors = []
    for index, step in enumerate(session.steps(batches)):
        step.run(model, functools.partial(token_loss_sum, **TERMS))
        result = step.update(optimizer, clip_norm=CLIP)
        window = batches[index * per_window : (index + 1) * per_window]
        gradients, loss = kept(
            ("terms", case.model, len(batches), index),
            lambda window=window: by_formula(family(case.model, layers=2), window),
        )
        errors += [worst(watch.raw, gradients)[0], abs(result.loss - loss) / abs(loss)]
    session.close()
    return max(errors)


def test_the_gradient_of_smoothed_labels_and_z_loss_is_that_of_the_formula() -> None:
    found = run_each(terms, 2, [(case,) for case in CASES])
    wrong = {str(case): max(errors) for case, errors in zip(CASES, found, strict=True) if not max(errors) <= LIMIT}
    assert not wrong


class Silent:
    """Reporter that keeps lines."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, text: str) -> None:
        self.said.append(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class Listener:
    """Callbacks of a run: keeps the receipt of its second step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.effects = EffectsRecorder(strict=False)

    def begin(self, session: Any, start: RunStart) -> None:
        self.effects.more.append(TrainingLines(self.job.config, start.parts))

    def log_fields(self) -> dict[str, Any]:
        return {}

    def wrote(self, line: dict[str, Any]) -> None: ...

    def between(self, session: Any) -> None: ...

    def finish(self) -> None: ...


def train_here(text: str, sabotage: str = "") -> dict[str, tuple[str, str, bool | None]]:
    """The loop of `shardwise train` on this rank: name → planned, found and ok of each line."""
    from shardwise.distributed.process_group import join
    from shardwise.train.data.corpus import open_corpus
    from shardwise.train.loop import TrainingRun
    from shardwise.train.session import Session

    job = Job.model_validate_json(text)
    session = Session(ranks=join(job.plan.device), planner=lambda *_: job.plan)
    listener = Listener(job)
    session.observers.append(listener.effects)
    with broken(sabotage):
        TrainingRun(job.config, job.plan, open_corpus(job.corpus), session, Silent(), listener).train()
    session.close()
    receipt = listener.effects.receipt
    assert receipt is not None
    return {line.name: (line.planned, line.found, line.ok) for line in receipt.lines}


def broken(how: str) -> Any:
    """Undo one option where it takes effect."""
    patch = pytest.MonkeyPatch()
    if how == "no terms":
        patch.setattr(
            training_parts, "token_loss_sum", lambda outputs, labels, **terms: token_loss_sum(outputs, labels)
        )
    if how == "half the noise":
        honest = noise.EmbeddingNoise.__init__
        patch.setattr(noise.EmbeddingNoise, "__init__", lambda self, alpha, *more: honest(self, alpha / 2, *more))
    if how == "an average that stays":
        patch.setattr(average.WeightAverage, "on_step_end", lambda *_: None)
    if how == "an average of half the weights":
        whole = average.WeightAverage.__init__

        def half(self: Any, decay: float, module: nn.Module) -> None:
            whole(self, decay, module)
            self.weights = self.weights[::2]

        patch.setattr(average.WeightAverage, "__init__", half)
    return _Undo(patch)


class _Undo:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()


def job_of(folder: Path, strategy: str, **tables: dict[str, Any]) -> str:
    """A prepared run of four steps under a strategy."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    changes: dict[str, dict[str, Any]] = {
        "model": {"factory": None, "config": str(folder)},
        "train": {"steps": 4, "eval_samples": 4},
        "parallel": {"strategy": strategy},
        "checkpoint": {"every": 0},
    }
    for table, keys in tables.items():
        changes[table] = {**changes.get(table, {}), **keys}
    return prepare_job(read_config(configs.write_config(folder, **changes)), lambda text: None).job.to_json()


def receipts(tmp_path: Path, runs: dict[str, tuple[str, str, dict[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """Strategy, sabotage and tables of each run: its lines, all in one world."""
    calls = [
        (job_of(tmp_path / str(number), strategy, **tables), sabotage)
        for number, (strategy, sabotage, tables) in enumerate(runs.values())
    ]
    yield from ((name, ranks[0]) for name, ranks in zip(runs, run_each(train_here, 2, calls), strict=True))


def test_lines_of_the_average(tmp_path: Path) -> None:
    train = {"ema_decay": 0.9}
    name = "average of the weights (ema_decay 0.9)"
    runs = {
        "zero1": ("zero1", "", {"train": train}),
        "stays": ("fsdp", "an average that stays", {"train": train}),
        "half": ("ddp", "an average of half the weights", {"train": train}),
    }
    for run, lines in receipts(tmp_path, runs):
        planned, found, ok = lines.pop(name)
        assert ok is (run == "zero1"), (run, planned, found)
        assert not [line for line in lines.items() if line[1][2] is False], run


class Follower:
    """Observer that averages whole weights as the formula says; ``stop_after`` asks for the end, as Ctrl-C does."""

    def __init__(self, decay: float, stop_after: int | None) -> None:
        self.decay, self.stop_after = decay, stop_after
        self.average: Gradients = {}
        self.begins: Gradients = {}
        self.run: Any = None

    def on_step_start(self, session: Any, step: Any) -> None:
        self.begins = self.begins or self.kept(session)
        self.average = self.average or self.weights(session)

    def on_step_end(self, session: Any, step: Any) -> None:
        now = self.weights(session)
        self.average = {name: self.decay * old + (1 - self.decay) * now[name] for name, old in self.average.items()}
        if step.number == self.stop_after:
            session.stop()

    def kept(self, session: Any) -> Gradients:
        home, kept = ownership_of(session.module), self.run.average
        if kept is None:
            return {}
        named = ((clean_name(name), kept.tensors[id(p)]) for name, p in session.module.named_parameters())
        return {name if home is None else home.canonical(name): full(tensor).clone() for name, tensor in named}

    def weights(self, session: Any) -> Gradients:
        return {name: full(p).detach().double() for name, p in session.module.named_parameters()}

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def followed(text: str, stop_after: int | None) -> dict[str, Any]:
    """A run with an average: its error against the formula, and the last evaluation done again."""
    from shardwise.distributed.process_group import join
    from shardwise.train.data.corpus import open_corpus
    from shardwise.train.evaluate import evaluate
    from shardwise.train.loop import TrainingRun
    from shardwise.train.session import Session

    job = Job.model_validate_json(text)
    session = Session(ranks=join(job.plan.device), planner=lambda *_: job.plan)
    session.observers.append(follower := Follower(job.config.train.ema_decay, stop_after))
    run = TrainingRun(job.config, job.plan, open_corpus(job.corpus), session, reporter := Silent())
    follower.run = run
    try:
        run.train()
    except Interrupted:
        ends = follower.kept(session)
        session.close()
        return {"said": reporter.said, "ends": ends}
    names = {id(p): name for name, p in session.module.named_parameters()}
    kept = {names[key]: full(tensor).double() for key, tensor in run.average.tensors.items()}
    error = max(float((kept[name] - value).abs().max()) for name, value in follower.average.items())
    weights = follower.weights(session)
    moved = max(float((weights[name] - value).abs().max()) for name, value in kept.items())
    bits = [evaluate(session, run.heldout, 4, 8).bits_per_byte]
    with run.average.in_place_of_weights():
        bits.append(evaluate(session, run.heldout, 4, 8).bits_per_byte)
    session.close()
    begins = follower.begins
    return {
        "begins": begins,
        "error": error,
        "moved": moved,
        "bits": bits,
        "last": run.evaluator.evaluation.bits_per_byte,
        "said": reporter.said,
    }


@pytest.mark.turns(3)
def test_an_average_is_saved_resumed_and_evaluated(tmp_path: Path) -> None:
    """Stopped and resumed it is the same to the bit, and what is evaluated last; under each layout of weights."""
    strategies = ("ddp", "fsdp", "ddp+pp2", "fsdp+tp2")
    calls: list[tuple[str, int | None]] = []
    for strategy in strategies:
        for folder, stops in (("whole", (None,)), ("stopped", (2, None))):
            table = {"train": {"ema_decay": 0.75}, "checkpoint": {"async_save": strategy == "fsdp"}}
            text = job_of(tmp_path / strategy / folder, strategy, **table)
            calls += [(text, stop) for stop in stops]
    results = [ranks[0] for ranks in run_each(followed, 2, calls)]
    for number, strategy in enumerate(strategies):
        whole, _, resumed = results[3 * number : 3 * number + 3]
        assert whole["error"] < 1e-6 < 1e-3 < whole["moved"], strategy
        assert whole["last"] == whole["bits"][1] != whole["bits"][0], strategy
        assert whole["last"] == resumed["last"], strategy
        assert "the last evaluation is of the averaged weights (decay 0.75)" in whole["said"]
        kept, again = (
            configs.hashes(tmp_path / strategy / folder / "run" / "checkpoints" / "step-00000004")
            for folder in ("whole", "stopped")
        )
        assert kept == again, strategy
        assert sum(name.startswith("ema/") for name in kept) == sum(name.startswith("model/") for name in kept), (
            strategy
        )


def test_an_average_may_begin_later_and_end(tmp_path: Path) -> None:
    legs = (("fsdp", {}, 1), ("fsdp", {"ema_decay": 0.5}, 2), ("ddp", {"ema_decay": 0.5}, None))
    texts = [
        (job_of(tmp_path / str(number), strategy, train={"output": str(tmp_path / "run"), **changes}), stop)
        for number, (strategy, changes, stop) in enumerate(legs)
    ]
    results = [ranks[0] for ranks in run_each(followed, 2, texts)]
    said = ["\n".join(result["said"]) for result in results]
    ends, begins = results[1]["ends"], results[2]["begins"]
    assert ends and ends.keys() == begins.keys()
    assert all(torch.equal(ends[name], begins[name]) for name in ends), "another strategy has the same average"
    assert "train.ema_decay 0 → 0.5; the average of the weights begins here" in said[1]
    assert "begins here" not in said[2]
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    assert manifest["state"]["options"]["ema_decay"] == 0.5


def test_lines_of_the_noise(tmp_path: Path) -> None:
    """Each strategy's line; evaluation is without noise, so that it is the same whatever is drawn."""
    train = {"neftune_alpha": 5.0}
    name = "embedding noise (neftune_alpha 5)"
    runs = {
        "ddp": ("ddp", "", {"train": {**train, "loss_chunks": 3}}),
        "fsdp": ("fsdp", "", {"train": train, "parallel": {"recompute": "full"}}),
        "cp": ("fsdp+cp2", "", {"train": train}),
        "pp": ("ddp+pp2", "", {"train": train}),
        "broken": ("fsdp", "half the noise", {"train": train}),
    }
    for run, lines in receipts(tmp_path, runs):
        assert lines[name][0] == "uniform, up to 0.221, 0.11 on average", run
        assert lines.pop(name)[2] is (run != "broken"), run
        assert not [line for line in lines.items() if line[1][2] is False], run


def test_lines_of_the_schedule_and_of_the_loss(tmp_path: Path) -> None:
    wsd = {"schedule": "wsd", "decay_fraction": 0.5, "warmup_steps": 0}
    runs = {
        "ddp": ("ddp", "", {"train": TERMS, "optimizer": wsd}),
        "fsdp": ("fsdp", "", {"train": {**TERMS, "loss_chunks": 3}}),
        "tp": ("ddp+tp2", "", {"train": {"z_loss": 1e-4}, "parallel": {"loss_parallel": True}}),
        "pp": ("ddp+pp2", "", {"train": {"label_smoothing": 0.1}}),
        "broken": ("ddp", "no terms", {"train": TERMS}),
        "neither": ("ddp", "", {}),
    }
    for name, lines in receipts(tmp_path, runs):
        planned, found, ok = lines.pop("loss terms", ("", "", None))
        assert ok is {"broken": False, "neither": None}.get(name, True), (name, planned, found)
        assert not [line for line in lines.items() if line[1][2] is False], name
        if name == "ddp":
            assert "(label_smoothing 0.15, z_loss 0.02; cross-entropy " in planned
            assert lines["learning rate (wsd)"] == ("0.01 at step 2", "0.01 at step 2", True)


class Pair:
    """PyTorch's own Muon and AdamW over the whole model, in one process."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.matrices = sorted(n for n, p in named.items() if p.ndim == 2 and ("layers." in n or ".h." in n))
        rest = [p for n, p in named.items() if n not in self.matrices]
        self.muon = torch.optim.Muon(
            [named[n] for n in self.matrices], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

    def step(self) -> None:
        for one in (self.muon, self.adamw):
            one.step()
            one.zero_grad()


def muon_alone(name: str, per_window: int, batches: list[Any]) -> Gradients:
    """Weights after a step for each window, in one process."""
    model = family(name, layers=2)
    pair = Pair(model)
    for begin in range(0, len(batches), per_window):
        window = batches[begin : begin + per_window]
        count = sum(int((labels != -100).sum()) for _, labels in window)
        (sum(token_loss_sum(model(inputs), labels) for inputs, labels in window) / count).backward()
        pair.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def muon(strategy: str, name: str) -> tuple[float, tuple[str, str, bool | None]]:
    """The worst error of a weight after three steps, and the line of the receipt."""
    case = Case(2, strategy, name)
    per_window = case.plan.dims.dp * case.accum
    batches = ragged(3 * per_window)
    table = OptimizerTable(name="muon", lr=1e-2)
    config: Any = SimpleNamespace(optimizer=table, train=TrainingOptions())
    session = start(case.plan, receipts=False)
    session.observers.append(effects := EffectsRecorder(strict=False))
    effects.more.append(TrainingLines(config, TrainingParts(lambda step: 1e-2, TrainingLoss(config.train))))
    model = family(name, layers=2)
    model, optimizer = session.prepare(model, build_optimizer(model.parameters(), table, model), batches[0][0])
    for step in session.steps(batches):
        step.run(model, token_loss_sum)
        step.update(optimizer)
    expected = kept(("muon", name, per_window), lambda: muon_alone(name, per_window, batches))
    home = ownership_of(session.module)
    named = {clean_name(n): full(p).detach() for n, p in session.module.named_parameters()}
    found = named if home is None else {home.canonical(n): value for n, value in named.items()}
    error = max(float((value - expected[n]).abs().max()) for n, value in found.items())
    lines = {line.name: (line.planned, line.found, line.ok) for line in effects.receipt.lines}
    assert not [line for line in lines.items() if line[1][2] is False]
    session.close()
    return error, lines["stepped by muon"]


def test_muon_steps_as_pytorchs_own_in_one_process() -> None:
    cases = [(strategy, name) for strategy in ("ddp", "zero1", "ddp+pp2") for name in ("llama", "gpt2")]
    for case, ranks in zip(cases, run_each(muon, 2, cases), strict=True):
        for error, line in ranks:
            assert error <= LIMIT, (case, error)
            assert line[2] is True, (case, line)


def test_a_run_with_muon_says_what_it_holds(tmp_path: Path) -> None:
    """All lines of the receipt, and the checkpoint: the state of each kind of parameter."""
    optimizer = {"name": "muon", "lr": 1e-2, "schedule": "wsd"}
    runs = {name: (name, "", {"optimizer": optimizer}) for name in ("ddp", "zero1")}
    for run, lines in receipts(tmp_path, runs):
        assert not [line for line in lines.items() if line[1][2] is False], run
        assert lines["optimizer state held"][2] is True
    folder = tmp_path / "0" / "run" / "checkpoints" / "step-00000004"
    state = {name.rsplit("/", 1)[1] for name in configs.hashes(folder) if name.startswith("optimizer/")}
    assert state == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
