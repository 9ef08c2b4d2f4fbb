"""Callbacks of ``shardwise train`` on every rank, and their reports at the end on rank 0."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.diagnosis.diagnose import diagnose
from shardwise.diagnosis.finding import Finding
from shardwise.diagnosis.observe import HostRecorder, gpu_states, observe
from shardwise.diagnosis.observed import DeviceState, HostUse, LossSpike, LostGradient, SaveStall
from shardwise.distributed.process_group import gather_ints
from shardwise.measure.gpu.nvml import GpuSampler
from shardwise.measure.profiler.profile_steps import StepTrace
from shardwise.measure.step_flops import FlopsRecorder
from shardwise.measure.step_time.attribution import Attribution
from shardwise.measure.step_time.timing import Timing
from shardwise.measure.utilisation import Utilisation, utilisation
from shardwise.receipts.changed_types import DtypeRecorder
from shardwise.receipts.drift import DriftRecorder
from shardwise.receipts.effects import EffectsRecorder
from shardwise.receipts.expected_part import axis_of
from shardwise.receipts.fit import FitRecorder
from shardwise.receipts.lines.sample_lines import added_rows_line, isolation_line, packed_line
from shardwise.receipts.lines.training_lines import TrainingLines
from shardwise.receipts.lost_gradients import LostGradients
from shardwise.run.job import Job
from shardwise.train.data.corpus import Corpus
from shardwise.train.metrics import logged_losses, logged_lost_gradients, logged_spikes
from shardwise.train.run_files import RunFile, replace_file
from shardwise.train.run_interface import RunStart
from shardwise.train.session import Session
from shardwise.train.tasks.registry import noun_of, num_outputs, open_data
from shardwise.train.trackers import Trackers, open_trackers
from shardwise.watch.devices import device_uuid


class RunRecorder:
    """Callbacks of one run. ``log`` prints a line; ``console`` takes tables.

    Made before the model.
    """

    def __init__(self, job: Job, session: Session, log: Callable[[str], None], console: Console) -> None:
        ranks = session.ranks
        self.job, self.session, self.log, self.console = job, session, log, console
        data = job.config.data
        corpus = open_data(job.corpus)
        joined = isinstance(corpus, Corpus) and job.config.packing(corpus.kind) == "joined"
        notes = (packed_line(mask_borders=data.mask_borders),) if joined else ()
        self.effects, self.fit, self.work = (
            EffectsRecorder(notes=notes),
            FitRecorder(job.estimate),
            FlopsRecorder(axis_of),
        )
        self.trace = StepTrace(job.config.train, ranks.rank, ranks.world_size)
        self.host = HostRecorder()
        if job.plan.offload_activations and job.plan.dims.pp == 1:
            session.saved_on_host = job.estimate.offloaded_activations or None
        session.observers += [self.effects, self.fit, self.work, self.trace, self.host]
        self.drift = DriftRecorder.attach(session)
        self.lost_gradients = LostGradients.attach(session)
        self.dtypes = DtypeRecorder.attach(session)
        self.attribution = Attribution.attach(session)
        self.attribution.disturbed = self.trace.disturbs
        session.timekeeper = self.attribution
        self.sampler = GpuSampler(uuids=[device_uuid(ranks.device)]) if ranks.device.type == "cuda" else None
        self.trackers: Trackers | None = None
        self.saves: list[SaveStall] = []
        self._logged = False
        self.host_use: HostUse | None = None
        self.gpus: tuple[DeviceState, ...] = ()

    # called by the loop

    def begin(self, session: Session, start: RunStart) -> None:
        """Called before the first step, with the model built and the checkpoint loaded."""
        self.effects.more.append(TrainingLines(self.job.config, start.parts))
        if start.isolation is not None:
            self.effects.notes += (isolation_line(start.isolation),)
        if start.added_rows is not None:
            self.effects.notes += (added_rows_line(start.added_rows),)
        if session.ranks.is_main:
            self.trackers = open_trackers(self.job.config, session.steps_done, self.log)
        if self.sampler is not None:
            self.sampler.start()
        self.host.restart()

    def log_fields(self) -> dict[str, Any]:
        """Return additional values for a logged line, on rank 0."""
        return {**self.attribution.log_fields(), **self.lost_gradients.log_fields()}

    def wrote(self, line: dict[str, Any]) -> None:
        """Handle a written line of metrics, on rank 0; that of a checkpoint is stored."""
        if not self._logged and "loss" in line:  # an earlier part of the run does not count
            self._logged = True
            for name in (RunFile.TIMING, RunFile.FINDINGS):
                with contextlib.suppress(OSError):
                    (Path(self.job.config.train.output) / name).unlink(missing_ok=True)
        if self.trackers is not None:
            self.trackers.log(int(line["step"]), line)
        if "checkpoint_stall_s" in line:
            save = SaveStall(
                step=line["step"],
                stall_s=line["checkpoint_stall_s"],
                write_s=line["checkpoint_write_s"],
                num_bytes=line["checkpoint_bytes"],
                background=self.job.config.checkpoint.async_save,
            )
            self.saves.append(save)

    def between(self, session: Session) -> None:
        """Write a complete trace between two steps."""
        if not self.trace.disturbs(session.steps_done):
            return
        summary = self.trace.write()
        gather_ints([0], session.ranks)  # the others wait here, in a step that is excluded, and not in the next one
        if session.ranks.is_main:
            from shardwise.report.terminal import print_trace

            if summary is not None:
                gpu = None if self.job.cluster is None else self.job.cluster.gpu
                peak = None if gpu is None else gpu.peak_flops.get(self.job.plan.precision)
                speed = None if gpu is None else gpu.memory_bytes_per_s
                print_trace(summary, self.console, peak_flops=peak, bytes_per_s=speed)
            for note in self.trace.notes:
                self.log(note)
        self.trace.notes.clear()

    def finish(self) -> None:
        """Finish after the last step. Collective."""
        self.attribution.finish()
        self.host_use = self.host.finish(self.session.ranks)
        if self.session.device.type == "cuda":
            self.gpus = gpu_states(None if self.sampler is None else self.sampler.stop(), self.session.ranks)

    # results, on rank 0

    def timing(self) -> Timing | None:
        """Return where the time of a step went; labels that are no tokens have no rate of tokens."""
        found = self.attribution.timing()
        if found is None or noun_of(self.job.config) == "tokens":
            return found
        return found.model_copy(update={"tokens_per_s": None})

    def utilisation(self, timing: Timing) -> Utilisation | None:
        """Return the use of devices and links; ``None`` if no step was counted."""
        if self.work.work is None:
            return None
        import torch

        tf32 = self.session.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        plan = self.job.plan
        return utilisation(self.work.work, timing.step_s, plan.dims, plan.precision, self.job.cluster, tf32=tf32)

    def findings(self, timing: Timing, use: Utilisation | None) -> tuple[Finding, ...]:
        """Return what the run loses time to, most expensive first; healthy runs get a finding, too."""
        job, peaks = self.job, self.fit.peaks
        metrics = Path(job.config.train.output) / RunFile.METRICS
        observed = observe(
            self.session,
            timing,
            own_loop=True,
            host=self.host_use,
            saves=self.saves,
            save_every=job.config.checkpoint.every or None,
            traffic=job.traffic,
            cluster=job.cluster,
            measured=job.measured_links,
            peak_bytes=None if peaks is None else max(peaks.allocated.values(), default=None),
            predicted=job.step_time,
            alternatives=job.alternatives,
            gpus=self.gpus,
            mfu=None if use is None else use.mfu,
            losses=logged_losses(metrics),
            spikes=[LossSpike.model_validate(one) for one in logged_spikes(metrics)],
            lost_gradients=[LostGradient.model_validate(one) for one in logged_lost_gradients(metrics)],
            vocab_size=num_outputs(open_data(job.corpus)),
        )
        return diagnose(observed)

    def write(self, timing: Timing | None, findings: tuple[Finding, ...]) -> None:
        """Write ``timing.json`` and ``findings.json`` to the run folder."""
        if timing is not None:
            self.keep(RunFile.TIMING, timing.model_dump_json(indent=1))
            self.keep(RunFile.FINDINGS, json.dumps([finding.model_dump() for finding in findings], indent=1))
        if self.trackers is not None:
            texts = [f"{finding.text} {finding.fix}".strip() for finding in findings]
            self.trackers.text(self.session.steps_done, "findings", texts)

    def keep(self, name: str, text: str) -> None:
        """Write a file to the run folder immediately.

        A failure is reported, as the weights are saved.
        """
        file = Path(self.job.config.train.output) / name
        try:
            replace_file(file, text)
        except OSError as error:
            self.log(f"'{file}' cannot be written: {error.strerror}; the run's checkpoints and metrics are untouched")

    def close(self) -> None:
        """Release trackers and threads, however the run has ended."""
        if self.trackers is not None:
            self.trackers.close()
        if self.sampler is not None:
            self.sampler.stop()
