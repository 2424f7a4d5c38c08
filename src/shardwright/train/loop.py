"""The run: what every rank does from the first step to the last checkpoint, and what the starting process shows.

``prepare_run`` (`train.start`) and then ``train`` are what the command line and `make demo` call: check and tokenise, then
start the ranks, draw what they report, and return the summary. ``run_rank`` is one rank's whole life.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import tomli_w
import torch

from shardwright.comm.flight import clear_flight
from shardwright.comm.mesh import Mesh
from shardwright.core.ledger import Ledger
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError, NonFiniteError
from shardwright.launch import RankEnv, device_for, init_process_group, launch
from shardwright.plan.collectives import predict_step
from shardwright.train.blame import blame
from shardwright.train.checkpoints import RunCheckpoints
from shardwright.train.data import EvalSampler, MicroBatch, Prefetcher, TrainSampler
from shardwright.train.display import TrainDisplay
from shardwright.train.experts import ExpertHistory, balance_record
from shardwright.train.flight import flight_record, flight_report
from shardwright.train.metrics import MetricsWriter, bits_per_byte, peak_memory_bytes
from shardwright.train.peak import peak_flops
from shardwright.train.placement import check_placement
from shardwright.train.prepare import PreparedData
from shardwright.train.start import RunOptions, check_same_config, open_split
from shardwright.train.step import StepResult, Trainer
from shardwright.train.timeline import RankClock, pipeline_report, write_trace

MOST_TIMES_BACK = 3
"""How often a run goes back before it gives up."""


def train(
    config: RunConfig,
    data: PreparedData,
    options: RunOptions | None = None,
    display: TrainDisplay | None = None,
) -> dict[str, Any]:
    """Train to the end (or until asked to stop) and return rank 0's summary. Raises every error of `errors`.

    ``data`` comes from :func:`prepare_run`.
    """
    options = options or RunOptions()
    with display or nullcontext():

        def on_message(rank: int, message: Mapping[str, Any]) -> None:
            if display is not None:
                _show(display, message)

        with flight_report(Path(config.train.run_dir) / "flight", config.layout.world_size):
            results = launch(
                run_rank,
                config.layout.world_size,
                (config, data, options),
                layout=str(config.layout),
                threads_per_rank=config.train.threads,
                timeout_s=config.train.timeout_s,
                stop_limit_s=config.train.stop_grace_s,
                on_message=on_message,
            )
    summary: dict[str, Any] = results[0]
    return summary


def _show(display: TrainDisplay, message: Mapping[str, Any]) -> None:
    if "record" in message:
        display.update(message["record"])
    else:
        display.message(str(message["text"]))


# -- one rank ----------------------------------------------------------------------------------------------


def run_rank(env: RankEnv, config: RunConfig, data: PreparedData, options: RunOptions) -> dict[str, Any]:
    """One rank from rendezvous to the last checkpoint."""
    device = device_for(env, config.train.device)
    if env.world_size > 1:
        init_process_group(env, "cuda" if device.type == "cuda" else "cpu")
        mesh = Mesh.distributed(config.layout, env.rank, config.train.timeout_s)
    else:
        mesh = Mesh.solo()
        mesh.layout = config.layout
    folder = Path(config.train.run_dir) / "flight"
    if env.world_size > 1:
        with suppress(OSError):
            clear_flight(folder, env.rank)  # so that after the next line none of an earlier run is left
    check_same_config(config, mesh.world)
    if env.world_size == 1:
        return Run(env, config, data, options, mesh, device).go()
    with flight_record(folder, mesh):
        return Run(env, config, data, options, mesh, device).go()


class Run:
    """One rank's run: data, trainer, checkpoints and metrics, with the step loop in :meth:`go`."""

    def __init__(
        self,
        env: RankEnv,
        config: RunConfig,
        data: PreparedData,
        options: RunOptions,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self.env, self.config, self.data, self.options, self.mesh = env, config, data, options, mesh
        self.run_dir = Path(config.train.run_dir)
        self.is_main = mesh.rank == 0
        self.trainer = Trainer(config, mesh, device)
        self.trainer.executor.note = self._at
        place = mesh.coordinates
        self.clock = RankClock(mesh.rank, place["pp"], ", ".join(f"{axis} {place[axis]}" for axis in ("pp", "dp", "cp", "tp")))
        self.step, self.samples, self._times_back = 0, 0, 0
        self.checkpoints = RunCheckpoints(config, self.trainer, data.tokenizer_folder, self._say)
        restored = self.checkpoints.restore(options.resume)
        if restored is not None:
            self.step, self.samples = restored.step, restored.samples
        self.trainer.buckets.check_replicas()
        self.mesh.recorder.take()  # what setting up has sent is no part of the first step
        self.peak_flops = peak_flops(config, device)
        self.last_ledger = Ledger()
        self.valid_loss: float | None = None
        balancer = self.trainer.balancer
        self.experts = None if balancer is None else ExpertHistory(balancer.layers)

    # -- the loop ------------------------------------------------------------------------------------------

    def go(self) -> dict[str, Any]:
        """Steps until the last one, or until a signal asked any rank to stop; then evaluate and save."""
        config = self.config
        writer = self._open_files() if self.is_main else None
        self._listen_to_signals()
        stopped, losses = False, list[float]()
        with self.checkpoints, self._profiler() as profiler:
            while self.step < config.train.steps and not stopped:
                try:
                    stopped = self._steps(writer, losses, profiler)
                except NonFiniteError as error:
                    if config.train.on_nonfinite != "back" or self._times_back == MOST_TIMES_BACK:
                        raise
                    self._go_back(error)
                    if writer is not None:
                        writer.close()
                        writer = self._open_files(again=True)
        if writer is not None:
            writer.close()
            if self.experts is not None:
                self.experts.write(self.run_dir)
        return self._summary(losses, stopped) | self._pipeline()

    def _steps(self, writer: MetricsWriter | None, losses: list[float], profiler: Any) -> bool:
        """Steps from where the run is; whether it was asked to stop. Raises `NonFiniteError` on all ranks after one step."""
        config, sampler, stopped = self.config, self._sampler(), False
        with Prefetcher(sampler.batches, self.step, config.data.prefetch, config.data.workers, self._pinned) as prefetch:
            while self.step < config.train.steps and not stopped:
                start = time.perf_counter()
                self.checkpoints.poll(self.step)
                self._at(f"step {self.step}, the next batch")
                batches, waited = prefetch.next()
                self._at(f"step {self.step}")
                result = self._step(batches)
                if self.options.check_replicas:
                    check_placement(self.trainer, batches, self.step)
                seconds = time.perf_counter() - start
                executor = self.trainer.executor
                self.clock.add(executor.spans, executor.most_in_flight, executor.waits, trace=self.options.profile)
                self.step += 1
                self.samples = sampler.first_sample(self.step)
                self.last_ledger, stopped = result.ledger, result.stop
                losses.append(result.loss)
                last = stopped or self.step == config.train.steps
                evaluated = self._maybe_evaluate(last)
                if writer is not None:
                    record = self._record(result, seconds, waited, evaluated)
                    writer.write(record)
                    self.env.send({"record": record})
                self._maybe_save(last)
                if profiler is not None:
                    profiler.step()
        return stopped

    def _step(self, batches: Sequence[MicroBatch]) -> StepResult:
        """One step; of one that was not applied, who is to blame."""
        try:
            result = self.trainer.step(batches, self.step)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error} ({blame(self.trainer, batches, self.step)})") from None
        if result.skipped:
            self._say(f"step {self.step} is left out, gradient norm {result.grad_norm:.4g}: "
                      f"{blame(self.trainer, batches, self.step)}")  # fmt: skip
        return result

    def _go_back(self, error: NonFiniteError) -> None:
        """To the last checkpoint, but past the samples of the step that went wrong; every rank does the same."""
        self._times_back += 1
        self.checkpoints.finish()
        self.trainer.settle()
        samples = self.samples + self.config.layout.global_batch
        restored = self.checkpoints.restore("auto")
        if restored is None:
            raise NonFiniteError(f"{error}; there is no checkpoint to go back to, set train.save_every") from error
        self._say(f"{error}; back to step {restored.step}, samples {restored.samples} to {samples - 1} are passed over")
        self.step, self.samples = restored.step, samples

    def _record(self, result: StepResult, seconds: float, waited: float, evaluated: bool) -> dict[str, Any]:
        config = self.config
        rate = result.tokens / seconds
        flops = config.model.flops_per_token(config.data.seq_len)
        mfu = rate * flops / (self.peak_flops * config.layout.world_size) if self.peak_flops else None
        record: dict[str, Any] = {
            "step": result.step + 1,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "tokens_per_second": rate,
            "mfu": mfu,
            "step_seconds": seconds,
            "data_seconds": waited,
            "exposed_communication_seconds": result.ledger.exposed_seconds,
            "exposed_tail_seconds": result.exposed_tail,
            "rank_skew_seconds": result.rank_skew,
            "slowest_rank": result.slowest_rank,
            "peak_memory_bytes": peak_memory_bytes(self._cuda_peak()),
            "skipped": result.skipped,
        }
        if result.balance is not None and self.experts is not None:
            balance, ep = result.balance, config.layout.ep
            record |= {"aux_loss": balance.aux_loss, "busiest_rank_seconds": max(result.busy_seconds)}
            record |= balance_record(balance.counts, balance.dropped, balance.rerouted, ep)
            if ep > 1:
                record["expert_bytes"] = sum(e.bytes for e in result.ledger.entries.values() if e.axis == "ep")
            self.experts.add(balance.counts)
        if result.token_splits:
            record["attention_balance"] = result.attention_balance
            record["token_splits"] = list(result.token_splits)
        if evaluated and self.valid_loss is not None:
            record["valid_loss"] = self.valid_loss
            record["bits_per_byte"] = self._bits_per_byte()
        return record

    def _summary(self, losses: list[float], stopped: bool) -> dict[str, Any]:
        memory = self.trainer.memory()
        summary = {
            "run_dir": str(self.run_dir),
            "steps": self.step,
            "stopped": stopped,
            "loss": losses[-1] if losses else None,
            "valid_loss": self.valid_loss,
            "bits_per_byte": self._bits_per_byte(),
            "checkpoint": None if self.checkpoints.last is None else str(self.checkpoints.last),
            "memory": memory,
            "peak_memory_bytes": peak_memory_bytes(self._cuda_peak()),
        }
        if self.is_main and losses:
            predicted = predict_step(
                self.config.model,
                self.config.layout,
                self.config.data.seq_len,
                self.config.train.freeze,
                router=self.config.router,
                dispatches=self.last_ledger.dispatches or None,
            )
            summary["ledger"] = {"predicted": predicted, "measured": self.last_ledger}
            table = {
                "step": self.step,
                "predicted": predicted.to_json(),
                "measured": self.last_ledger.to_json(),
                "differences": predicted.differences(self.last_ledger),
            }
            (self.run_dir / "ledger.json").write_text(json.dumps(table, indent=2), encoding="utf-8")
        return summary

    def _pipeline(self) -> dict[str, Any]:
        """``pipeline``: rank 0's pipeline, measured and simulated; and the lanes of all ranks in the trace, if asked for."""
        if self.config.layout.pp == 1:
            return {}
        if self.options.profile:
            everybody = self.mesh.world.gather_objects(self.clock)
            if self.is_main:
                write_trace(self.run_dir / "trace.json", everybody)
        self.clock.traced.clear()
        report = pipeline_report(self.trainer.executor.schedule, self.mesh.pp.gather_objects(self.clock))
        return {} if report is None else {"pipeline": report.to_json()}

    # -- data and evaluation -------------------------------------------------------------------------------

    def _sampler(self) -> TrainSampler:
        layout = self.config.layout
        blend = open_split(self.config, self.data, "train")
        rank = self.mesh.coordinates["dp"]
        return TrainSampler(blend, layout.micro_batch, layout.microbatches, layout.dp, rank, self.step, self.samples)

    def _maybe_evaluate(self, last: bool) -> bool:
        every = self.config.train.eval_every
        if not self.data.valid or not (last or (every and self.step % every == 0)):
            return False
        self.trainer.settle()
        layout = self.config.layout
        batches = self.config.train.eval_batches * layout.micro_batch * layout.dp
        datasets = open_split(self.config, self.data, "valid").datasets
        sampler = EvalSampler(datasets, layout.micro_batch, layout.dp, self.mesh.coordinates["dp"], batches or None)
        self.valid_loss, _ = self.trainer.evaluate(sampler)
        self.mesh.recorder.take()
        return True

    def _bits_per_byte(self) -> float | None:
        """None without evaluation, or where the size of some held-out text is not known."""
        if self.valid_loss is None or len(self.data.infos) < len(self.data.valid):
            return None
        tokens = sum(info.valid_tokens for info in self.data.infos)
        size = sum(info.valid_bytes for info in self.data.infos)
        return bits_per_byte(self.valid_loss, tokens, size)

    # -- checkpoints ---------------------------------------------------------------------------------------

    def _maybe_save(self, last: bool) -> None:
        every = self.config.train.save_every
        if last or (every and self.step % every == 0):
            self.checkpoints.save(self.step, self.samples, last=last)

    # -- surroundings --------------------------------------------------------------------------------------

    def _open_files(self, again: bool = False) -> MetricsWriter:
        """``again``: the run has gone back to an earlier step."""
        resumed = self.step if again or self.options.resume != "none" else None
        try:
            writer = MetricsWriter(self.run_dir, resumed, say=self._say)
            (self.run_dir / "config.toml").write_text(tomli_w.dumps(self.config.to_table()), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"train.run_dir={self.run_dir} cannot be written: {error.strerror}; give another") from error
        return writer

    def _at(self, place: str) -> None:
        """Leave what this rank is at where others find it: in memory, and in the flight record."""
        self.env.note(place)
        if self.mesh.recorder.flight is not None:
            self.mesh.recorder.flight.at(place)

    def _say(self, text: str) -> None:
        """A line for the user, from one rank only."""
        if self.is_main:
            self.env.send({"text": text})

    def _listen_to_signals(self) -> None:
        def stop(signum: int, frame: FrameType | None) -> None:
            self.trainer.stop_requested = True

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)

    @property
    def _pinned(self) -> bool:
        return self.trainer.device.type == "cuda"

    def _cuda_peak(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.trainer.device) if self._pinned else None

    def _profiler(self) -> AbstractContextManager[Any]:
        """A Perfetto trace of steps 3 to 5 of rank 0 as ``trace.json``, when asked for."""
        if not (self.options.profile and self.is_main):
            return nullcontext(None)
        from torch.profiler import profile, schedule

        path = str(self.run_dir / "trace.json")
        return profile(
            schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
        )
