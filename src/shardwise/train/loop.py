"""Training loop of ``shardwise train``: data, schedule, evaluation, checkpoints, resume."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoint import messages as exchange
from shardwise.checkpoint.added_rows import open_with_rows
from shardwise.checkpoint.added_tokens import AddedTokens
from shardwise.checkpoint.format import read_manifest, step_folder
from shardwise.checkpoint.load import has_average, load_checkpoint, rng_for
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.storage.local_storage import Folder, folder_of
from shardwise.checkpoint.weights import BaseWeights, load_weights
from shardwise.errors import ConfigError
from shardwise.model.call_module import call
from shardwise.parallel.context_parallel.attention import sequence_share
from shardwise.parallel.data_parallel.ddp import finish_reduction
from shardwise.parallel.lora.adapters import add_adapters
from shardwise.parallel.materialize import build
from shardwise.plan.plan import Plan
from shardwise.train import resume
from shardwise.train.average import WeightAverage
from shardwise.train.config import Config
from shardwise.train.data.isolation import Isolation, measure_isolation, shared_rows
from shardwise.train.data.order import rank_ids
from shardwise.train.data.samples import IsolatedSamples, JoinedSources, NumberedSamples, on_device, step_batches
from shardwise.train.evaluator import Evaluator
from shardwise.train.finite import check_weights
from shardwise.train.loss_spikes import LossSpikes
from shardwise.train.measure_added_rows import AddedRowsMeasurement
from shardwise.train.metrics import MetricsFile
from shardwise.train.model import added_tokens, model_factory, model_facts, pretrained_factory
from shardwise.train.noise import EmbeddingNoise, embedding_name
from shardwise.train.nonfinite.replay_run import naming_the_source
from shardwise.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from shardwise.train.rng import random_states, rank_to_follow, restore_random_states, seed_everything
from shardwise.train.run_files import RunFile
from shardwise.train.run_interface import Outcome, Reporter, RunCallback, RunStart, StepWindow
from shardwise.train.session import Session
from shardwise.train.step import StepResult, check_finite
from shardwise.train.stop import stop_error
from shardwise.train.tasks.own_loss import loss_of
from shardwise.train.tasks.pretrained import is_pretrained
from shardwise.train.tasks.registry import (
    TaskData,
    example_inputs_of,
    noun_of,
    order_facts,
    order_of,
    row_task,
    samples_of,
)
from shardwise.train.training_parts import TrainingLoss, TrainingParts

_LOOKED_AT = 64  # steps whose samples are looked through for some that hold several documents


class TrainingRun:
    """Training run of ``shardwise train`` on this rank: config, plan and prepared corpus."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        corpus: TaskData,
        session: Session,
        reporter: Reporter,
        recorder: RunCallback | None = None,
    ) -> None:
        self.config, self.plan, self.corpus, self.session, self.reporter = config, plan, corpus, session, reporter
        self.recorder = recorder
        self.output = Path(config.train.output)
        self.loss_sum, self.noun = loss_of(config), noun_of(config)
        self.samples = samples_of(corpus, config)
        self.evaluator = Evaluator(config, corpus, session, reporter)
        self.order = order_of(corpus, self.samples, config)
        self.micro_batch = plan.micro_batch or 1
        self.global_batch = plan.global_batch or plan.dims.dp
        self.total = resume.steps_in_all(config, self.order.epoch, self.global_batch)
        self.spikes = LossSpikes(self.order, plan)
        self.position = self.began = 0  # of the next step, and of the one that was run last
        self.tokens = self.labels = 0
        self.last_loss = math.nan
        self.adapter_facts: dict[str, Any] = {}
        self.added_rows: AddedRowsMeasurement | None = None
        self.noise: EmbeddingNoise | None = None
        self.average: WeightAverage | None = None
        self.extends = False  # goes on from the end of a run of fewer steps

    @property
    def heldout(self) -> NumberedSamples | None:
        """Held-out samples, if there are any."""
        return self.evaluator.heldout

    @property
    def loss(self) -> Callable[[Any, Any], torch.Tensor]:
        """Loss of a training step."""
        return self.loss_sum if self.evaluator.by_labels else self.parts.loss

    @property
    def is_main(self) -> bool:
        """True on the rank that reports."""
        return self.session.ranks.is_main

    @property
    def _rng_state(self) -> int:
        """Rank for the random seed, equal in a tensor-parallel group."""
        return self.session.ranks.rank // self.plan.dims.tp

    def train(self) -> Outcome:
        """Build, resume, train, evaluate and save.

        Raises:
            Interrupted: after a stop was requested; the state is saved before.
            Preempted: a scheduler requested it.
        """
        model = self._prepare()
        table = self.config.checkpoint
        with Saver(self.config.checkpoints, keep=table.keep, async_save=table.async_save, guarded=True) as saver:
            return self._run(model, saver)

    def _run(self, model: nn.Module, saver: Saver) -> Outcome:
        self.saver = saver
        self._resume()
        for left in (RunFile.PREEMPTED, RunFile.NONFINITE) if self.is_main else ():
            (self.output / left).unlink(missing_ok=True)
        self._protect()
        rate = learning_rate(self.config.optimizer, self.total)
        self.parts = TrainingParts(rate, TrainingLoss(self.config.train), self.noise, self.average)
        if self.recorder is not None:
            self.recorder.begin(self.session, RunStart(self.parts, self._isolation(), self.added_rows))
        metrics = None
        if self.is_main:
            also = None if self.recorder is None else self.recorder.wrote
            metrics = MetricsFile(self.output / RunFile.METRICS, self.session.steps_done, also)
        if self.is_main:
            self.reporter.begin(self.session.steps_done, self.total)
        if self.extends and self.evaluator.best is not None:  # the last evaluation came after its checkpoint
            self._evaluate(None)
        with naming_the_source(self, model):
            if not self.evaluator.enough():
                self._steps(model, metrics)
            if self.recorder is not None:
                self.recorder.finish()
            path = self._save(metrics)  # before the evaluation, which may take long and must lose nothing
        if self.heldout is not None and not self.session.stop_agreed():
            self._evaluate_last(metrics)
        saver.wait()
        self._log_saves(metrics)
        if self.is_main:
            self.reporter.end()
        if metrics is not None:
            metrics.close()
        if self.session.stopped:
            raise stop_error(self.session, self.output, path, self.total)
        found = self.evaluator
        return Outcome(self.session.steps_done, self.tokens, self.labels, self.last_loss, found.evaluation, found.best)

    def _isolation(self) -> Isolation | None:
        """Measure whether documents of one sample see each other, in a micro batch of this rank."""
        if not isinstance(self.samples, IsolatedSamples | JoinedSources) or not self.samples.isolated:
            return None
        dp, place = self.plan.dims.dp, self.session.place.dp
        row = rank_ids(self.order, self.position, dp, place, self.micro_batch, 1)[0]
        later = self.order.ids(self.position, _LOOKED_AT * self.global_batch)
        return measure_isolation(self.session, self.samples, shared_rows(self.samples, row, later, dp, place))

    def _prepare(self) -> nn.Module:
        config = self.config
        factory = model_factory(config, self.corpus.vocab_size)
        strict = config.model.weights is not None and not is_pretrained(row_task(config), config)
        if self.is_main and config.model.weights is not None and not strict:
            factory = pretrained_factory(config, self.corpus.vocab_size, self.reporter.log)
        model = build(factory, config.train.seed, real=self.is_main and not strict)
        added = added_tokens(config, self.corpus.vocab_size)
        base = self._adapt(model, added)
        weights = None
        if strict and base is None:
            weights = open_with_rows(str(config.model.weights), model, added)
        rows = None if added is None else AddedRowsMeasurement.of(model, added)
        sample = example_inputs_of(self.corpus, config, self.micro_batch)
        optimizer = build_optimizer(model.parameters(), config.optimizer, model)
        alpha = config.train.neftune_alpha
        embedding = embedding_name(model) if alpha else ""
        self.session.routing.terms = config.train.router
        model, _ = self.session.prepare(model, optimizer, sample, base)
        if alpha:
            self.noise = EmbeddingNoise.on(alpha, embedding, self.session.module, self.plan.dims.cp)
        if base is not None:
            base.close()
        elif weights is not None:
            with weights:
                load_weights(self.session.module, weights, verify=config.checkpoint.verify, collective=True)
        if rows is not None:
            self.added_rows = rows.measured(self.session)
        if config.train.ema_decay:
            self.average = WeightAverage(config.train.ema_decay, self.session.module)
            self.session.observers.insert(0, self.average)  # receipts look at it afterwards
        seed_everything(config.train.seed, self._rng_state)
        return model

    def _adapt(self, model: nn.Module, added: AddedTokens | None) -> BaseWeights | None:
        """Add the plan's adapters to ``model``.

        Return the weights of its base if they are read from a file.
        """
        if self.plan.parsed.adapter == "none":
            return None
        weights, seed = self.config.model.weights, self.config.train.seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapters = add_adapters(model, self.plan, real=self.is_main)
        base = None
        if weights is not None:
            source = open_with_rows(weights, model, added)
            base = BaseWeights(model, source, verify=self.config.checkpoint.verify, collective=True)
        if base is None and self.is_main:
            self.reporter.log("model.weights is not given: adapters are trained beside random weights")
        origin = {"weights": weights, "seed": seed} if base is None else {"weights": weights, "digest": base.digest}
        self.adapter_facts = {"adapter": adapters.facts(), "base": origin}
        return base

    def _steps(self, model: nn.Module, metrics: MetricsFile | None) -> None:
        config, session, optimizer = self.config, self.session, self.session.optimizer
        rate = self.parts.rate
        clock = time.perf_counter()
        since, tokens_since, labels_since = session.steps_done, 0, 0
        batches = step_batches(self.samples, self.order, self.plan, session.ranks.rank, self.position)
        for step in session.run_windows(batches, limit=self.total - session.steps_done):
            set_learning_rate(optimizer, rate(step.number), config.optimizer.lr)  # a backward may step, too
            if self.noun == "tokens":
                step.processed = self.samples.num_tokens(self.order.ids(self.position, self.global_batch))
            step.run(model, self.loss)
            result = step.update(optimizer, clip_norm=config.optimizer.clip_norm)
            self.began = self.position
            self.position = min(self.position + self.global_batch, self.order.total or sys.maxsize)
            processed = result.tokens if step.processed is None else step.processed
            self.tokens, self.labels = self.tokens + processed, self.labels + result.tokens
            tokens_since, labels_since = tokens_since + processed, labels_since + result.tokens
            if step.number % config.train.log_every == 0 or step.number == self.total:
                check_finite(result, scaled=session.scaler is not None)
                self.last_loss = result.loss
                seconds = time.perf_counter() - clock
                window = StepWindow(step.number - since, tokens_since, labels_since, seconds)
                self._log(metrics, result, rate(step.number), window)
                clock, since, tokens_since, labels_since = time.perf_counter(), step.number, 0, 0
            paused = time.perf_counter()
            self._between(result, metrics)
            clock += time.perf_counter() - paused  # evaluations and checkpoints are not step time
            if self.evaluator.enough():
                break

    def _between(self, result: StepResult, metrics: MetricsFile | None) -> None:
        """Run evaluation and checkpoint after a step, if they are due."""
        number = result.number
        if self.recorder is not None:
            self.recorder.between(self.session)
        if number == self.total:
            return
        every, better = self.config.train.eval_every, False
        if every and number % every == 0 and self.heldout is not None:
            better = self._evaluate(metrics)
        if better or (self.config.checkpoint.every and number % self.config.checkpoint.every == 0):
            check_finite(result, scaled=self.session.scaler is not None)  # no checkpoint of weights that are NaN
            self._save(metrics)

    def _log(self, metrics: MetricsFile | None, result: StepResult, rate: float, window: StepWindow) -> None:
        if metrics is None:
            return
        of_tokens = self.noun == "tokens"
        per_second = (window.tokens if of_tokens else window.steps * self.global_batch) / window.seconds
        metrics.write(
            step=result.number,
            loss=result.loss if math.isfinite(result.loss) else None,  # no label in this step; JSON has no NaN
            learning_rate=rate,
            grad_norm=result.grad_norm,
            **self.session.routing.log_fields(),
            step_time_s=window.seconds / window.steps,
            **({"tokens": self.tokens} if of_tokens else {}),
            labels=self.labels,
            **{"tokens_per_s" if of_tokens else "samples_per_s": per_second},
            time=time.time(),
            **self.spikes.fields(result.loss, self.began),
            **({} if self.recorder is None else self.recorder.log_fields()),
        )
        share = window.labels / window.tokens if of_tokens and window.tokens else 1.0
        self.reporter.step(result.number, result.loss, per_second, self.noun, share)

    def _evaluate(self, metrics: MetricsFile | None, *, averaged: bool = False) -> bool:
        """Evaluate on the held-out samples; return whether that is the best so far."""
        better = self.evaluator.run(metrics, max(self.micro_batch, 8), averaged=averaged)
        self._protect()
        return better

    def _protect(self) -> None:
        """Keep the best checkpoint, however old it becomes."""
        best = self.evaluator.best
        if best is not None and best.step is not None:
            names = [step_folder(best.step), *self.saver.protected[:1]]
            self.saver.protected = tuple(dict.fromkeys(names))  # the one before, until the new one is saved

    def _evaluate_last(self, metrics: MetricsFile | None) -> None:
        """Evaluate at the end: the averaged weights, where there are some."""
        if self.average is None:
            self._evaluate(metrics)
            return
        self.saver.before_update()
        if self.is_main:
            self.reporter.log(f"the last evaluation is of the averaged weights (decay {self.config.train.ema_decay:g})")
        with self.average.in_place_of_weights():
            self._evaluate(metrics, averaged=True)

    def _save(self, metrics: MetricsFile | None) -> Folder:
        check_weights(self.session)
        state = {
            "position": self.position,
            "tokens": self.tokens,
            "labels": self.labels,
            "loss": self.last_loss if math.isfinite(self.last_loss) else None,
            "order": self._order_facts(),
            "scheduler": {"step": self.session.steps_done, "total": self.total},
            "optimizer": self.config.optimizer.model_dump(mode="json"),
            "scaler": None if self.session.scaler is None else self.session.scaler.state_dict(),
            **({} if self.evaluator.best is None else {"best": self.evaluator.best.state()}),
            "options": self.config.train.training_options,
        }
        self.session.phase = "checkpoint"
        path = self.saver.save(
            self.session.steps_done,
            model=self.session.module,
            optimizer=self.session.optimizer,
            plan=self.plan,
            state=state,
            rng=random_states(self.session.device),
            model_facts={**model_facts(self.config, self.corpus.vocab_size), **self.adapter_facts},
            average=None if self.average is None else self.average.tensors,
        )
        self.session.phase = "other"
        self._log_saves(metrics)
        return path

    def _log_saves(self, metrics: MetricsFile | None) -> None:
        """Log the cost of finished saves; a background save is logged at the next one."""
        for done in self.saver.reports:
            if metrics is not None:
                metrics.write(
                    step=done.step,
                    checkpoint_bytes=done.num_bytes,
                    checkpoint_stall_s=done.stall_s,
                    checkpoint_write_s=done.write_s,
                )
        self.saver.reports.clear()

    def _order_facts(self) -> dict[str, Any]:
        """Return all facts that determine the order of samples, under the user's config keys."""
        data = self.config.data
        return {
            resume.CONTENT: self.corpus.train.content,
            resume.LISTING: self.corpus.fingerprint,
            "train.seed": self.config.train.seed,
            "data.seq_len": data.seq_len,
            "data.pack": self.config.packing(self.corpus.kind),
            "data.mask_borders": data.mask_borders,
            **({"data.sources": [[one.label, one.weight] for one in data.sources]} if data.sources else {}),
            "data.shuffle": data.shuffle,
            **order_facts(self.corpus, self.config),
        }

    def warmup_backward(self) -> None:
        """Run and discard one backward, for DDP: it orders its buckets by the first backward.

        That order decides the order of summation over ranks, so without this a resumed run would differ in the last bit
        from an uninterrupted one, from three ranks on.
        """
        if not isinstance(self.session.applied.outer, DistributedDataParallel):
            return
        self.session.begin_micro(last=True)
        inputs, labels = self.samples.batch(np.arange(self.micro_batch) % len(self.samples))
        if self.plan.dims.cp > 1:
            inputs, labels = sequence_share((inputs, labels), self.plan, self.session.place.cp)
        device = self.session.device
        outputs = call(self.session.applied.outer, on_device(inputs, device))
        (self.loss_sum(outputs, labels.to(device)) * 0.0).backward()
        finish_reduction(self.session.applied.outer)
        self.session.optimizer.zero_grad()

    def _resume(self) -> None:
        """Resume from the newest checkpoint, if any; make all refusals before reading it."""
        config, folder = self.config, folder_of(self.config.checkpoints)
        path, earlier = resume.find(folder)
        if path is None:
            resume.refuse_lost(self.output, folder)
            return
        if not config.checkpoint.resume:
            raise ConfigError(
                f"train.output '{self.output}' contains a run already and checkpoint.resume is false; "
                "choose another train.output, or set checkpoint.resume=true to resume"
            )
        self.restore(path, earlier)

    def restore(self, path: Folder, earlier: Folder | None) -> None:
        """Load a checkpoint: weights, optimizer, generators and position; ``earlier`` is the one before it."""
        config, session = self.config, self.session
        with resume.advice(path, earlier):
            manifest = exchange.together(lambda: read_manifest(path))
        with resume.reading_state(path):
            resume.refuse_other_samples(manifest, path, self._order_facts())
            resume.refuse_other_base(manifest, path, self.adapter_facts)
            resume.refuse_fewer(manifest, config, self.order.epoch)
        made = resume.options_of(session.optimizer)
        if manifest.step:
            self.warmup_backward()
        with resume.advice(path, earlier):
            average = None if self.average is None else self.average.tensors
            module, optimizer, verify = session.module, session.optimizer, config.checkpoint.verify
            load_checkpoint(path, model=module, optimizer=optimizer, verify=verify, average=average)
            if self.average is not None and not has_average(manifest):
                self.average.restart()
            rng_state = rank_to_follow(manifest.plan, self.plan, session.ranks.rank)
            saved = exchange.together(lambda: rng_for(path, rng_state))
        state = manifest.state
        session.steps_done = manifest.step
        with resume.reading_state(path):
            changed = resume.changed_keys(manifest, config.optimizer)
            resume.set_changed(session.optimizer, made, manifest, changed, config.optimizer)
            self.position, self.tokens = int(state["position"]), int(state["tokens"])
            self.labels = int(state.get("labels", self.tokens))
            self.last_loss = math.nan if state["loss"] is None else float(state["loss"])
            if session.scaler is not None and state["scaler"]:
                session.scaler.load_state_dict(state["scaler"])
            if self.evaluator.best is not None:
                self.evaluator.best.restore(state.get("best"))
            steps = resume.steps_in_all(config, self.order.epoch, self.global_batch, manifest.step, self.position)
            self.total, changes = steps, resume.news(manifest, config, self.plan, steps)
            self.extends = state["scheduler"]["total"] == manifest.step < steps
        if saved is not None:
            restore_random_states(saved, session.device)
        else:  # a rank that did not exist: not the random numbers of the first step again
            seed_everything(config.train.seed + manifest.step, self._rng_state)
        if self.is_main:
            self.reporter.log(f"resuming after step {manifest.step} of {self.total} from '{path}'")
            if changes:
                self.reporter.log(f"changed since then: {'; '.join(changes)}")
