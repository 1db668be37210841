"""The life of a run: build the parts, start workers, watch, checkpoint, stop."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

from slipstream import checkpoint, config, record, store
from slipstream.config import Run, module
from slipstream.cores import one_thread
from slipstream.counters import Counter
from slipstream.errors import ConfigError, Interrupted, RunFailed, SlipstreamError
from slipstream.launch import Launcher
from slipstream.store import Header, Segment, Store, Word
from slipstream.supervise import ProcessPool, Supervisor, ThreadPool
from slipstream.watch import terminal
from slipstream.watch.log import Log
from slipstream.watch.metrics import Meter
from slipstream.watch.usage import Usage
from slipstream.watch.writer import Writer

POLL = 0.02  # seconds between looks of the parent


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a run; `slipstream.load` and `slipstream.evaluate` take it as they take its directory."""

    directory: Path
    steps: int
    updates: int
    episodes: int
    mean_return: float
    solved_at: int | None
    seconds: float
    steps_per_second: float
    interrupted: str | None
    summary: dict[str, Any]

    def __fspath__(self) -> str:
        return str(self.directory)


class Session:
    """One stretch of a run, from its start or resumption to its end."""

    def __init__(self, run: Run, given: Any, directory: Path, show: str, launcher: Launcher | None) -> None:
        self.options, self.given, self.directory = run, given, directory
        self.show_mode, self.launcher = show, launcher
        self.loaded: checkpoint.Loaded | None = None
        self.changes: list[str] = []
        self.claim = _claim(directory)
        self.log = Log(directory)
        self.usage = Usage()
        self.asked: str | None = None  # why to stop: the name of a signal
        self.hurry = False  # asked twice: wait for nobody
        self.requests = 0
        self.begun = time.perf_counter()
        self.next = dict.fromkeys(("metrics", "memory"), 0.0)
        self.saved = time.monotonic()
        self.disk_full = False
        self.bad_reads = 0

    # -- start -----------------------------------------------------------------------------------

    def run(self) -> Result:
        """Do everything; whatever happens, no process and no shared memory is left."""
        threads = self.options.backend == "thread"
        pool: ProcessPool | ThreadPool = (
            ThreadPool(self.directory) if threads else ProcessPool(self.directory, self.launcher)
        )
        self.pool = pool
        segment = None
        try:
            with self._signals(), one_thread() if threads else nullcontext():
                segment = self._build()
                self._start(segment.path)
                return self._live()
        except BaseException as e:
            if not isinstance(e, Interrupted):
                self.log("error", str(e), kind=type(e).__name__)
            raise
        finally:
            if hasattr(self, "store"):
                self.store.control[Word.STOP] = 1
            pool.close()
            if hasattr(self, "view"):
                self.view.close()
            if hasattr(self, "writer"):
                self.writer.close()
            if hasattr(self, "store"):
                self.store.close()
            if segment is not None:
                segment.close()
            self.log.close()
            fcntl.flock(self.claim, fcntl.LOCK_UN)
            os.close(self.claim)

    def _build(self) -> Segment:
        """Have a worker process make environment and network once, and lay out the store for them."""
        file = self.directory / "workers" / "layout.part"
        self.pool.start(0, _describe, self.options, self.given, file)
        begun = None
        while not (ended := self.pool.ended()):
            time.sleep(POLL / 4)
            if self.asked:
                raise Interrupted(f"stopped by {self.asked} before training began")
            if begun is None and self.pool.begun(0):
                begun = time.monotonic()
            if begun is not None and time.monotonic() - begun > self.options.limits.hang_seconds:
                self.pool.dump(0)
                time.sleep(0.1)  # for the dump
                raise RunFailed(
                    f"environment and network were not made in {self.options.limits.hang_seconds} s "
                    f"(limits.hang_seconds); where it hangs:\n{self._printed()}"
                )
        if ended[0].code != 0:
            raise self._start_error(ended[0].code)
        values, arrays = checkpoint.read_part(file)
        file.unlink()
        layout = store.layout_from(values["layout"])
        self.parts = values["parts"]
        store.sweep()
        places = ["/dev/shm", os.environ.get("TMPDIR", "/tmp"), str(self.directory)]
        segment = Segment.create(layout.regions()[1], [p for p in places if os.path.isdir(p)])
        if segment.place != "/dev/shm" and os.path.isdir("/dev/shm"):
            self.log("warning", f"/dev/shm is too small; the parameter store is a file in {segment.place}")
        store.initialize(segment.path, layout, arrays["weights"])
        self.store = Store(segment.path)
        if self.loaded is not None:
            self.loaded.fill(self.store.slots[0])
            tick = int(self.store.slots[0].header[Header.TICK])
            if not layout.in_place:
                self.store.slots[tick % layout.slots].bytes[:] = self.store.slots[0].bytes
                if layout.checksums:
                    slot = self.store.slots[tick % layout.slots]
                    slot.header[Header.CHECKSUM] = store.checksum(slot.weights)
                self.store.control[Word.TICK] = tick
        self._record()
        return segment

    def _start_error(self, code: int) -> SlipstreamError:
        with suppress(OSError, ValueError):
            error = json.loads(self.pool.error(0).read_text())
            if error["kind"] == "config":
                return ConfigError(error["message"])
            return RunFailed(f"the run could not be set up: {error['message']}\n{error['traceback']}")
        return RunFailed(f"the run could not be set up (exit code {code})\n{self._printed()}")

    def _printed(self) -> str:
        """The end of what worker 0 has printed."""
        output = self.directory / "workers" / "0.txt"
        return output.read_text(errors="replace")[-2000:] if output.exists() else ""

    def _record(self) -> None:
        """Begin the record, or cut it back to the checkpoint; each part of a run has its configuration."""
        file = self.directory / "parts.json"
        entries = int(self.store.current.header[Header.ENTRIES])
        parts = json.loads(file.read_text()) if self.loaded is not None and file.exists() else []
        parts = [p for p in parts if p["entry"] <= entries]
        parts.append({
            "entry": entries, "config": config.to_dict(self.options), "parts": self.parts,
            "callables": [n for n in ("env", "torso") if getattr(self.given, n) is not None],
        })  # fmt: skip
        checkpoint.write_file(file, json.dumps(parts, indent=1).encode())
        if self.options.record and self.options.update != "hogwild":
            recorder = record.Recorder(self.directory / "schedule.bin")
            recorder.truncate(entries)
            recorder.close()

    def _start(self, store_path: str) -> None:
        run, given, directory = self.options, self.given, self.directory
        states = self.loaded.workers if self.loaded is not None else {}
        last = self.loaded.state["incarnations"] if self.loaded is not None else {}

        def begin(index: int, incarnation: int) -> None:
            first = self.supervisor.seats[index].restarts == 0
            if index == run.worker_count:
                sizes = self.parts["observation_moments"], self.store.layout.moments - self.parts["observation_moments"]
                self.pool.start(
                    index, _serve, run, index, incarnation, store_path, directory, tuple(s for s in sizes if s)
                )
                return
            state = states.get(index) if first else None
            self.pool.start(index, _work, run, given, index, incarnation, store_path, directory, state)

        for stale in (directory / "workers").glob("*.state"):
            stale.unlink()
        server = run.worker_count if run.update == "server" else None
        self.supervisor = Supervisor(run.worker_count, self.pool, self.store, self.log, run.limits, begin, server)
        self.meter = Meter(self.store, run.target_window)
        self.target = run.target_return
        if self.loaded is not None:
            self._go_on(self.loaded.state)
        first = self.loaded.state["steps"] + 1 if self.loaded is not None else None
        self.writer = Writer(directory, run.watch, self.parts["pieces"], first)
        title = f"{run.env}  {run.algorithm}, {run.update}, {run.workers} workers x {run.copies} copies"
        self.view = terminal.view(self.show_mode, title, run.total_steps)
        self.view.say(f"run {directory}")
        for change in self.changes:
            self.view.say(f"changed: {change}")
            self.log("info", f"changed: {change}")
        for path, why in self.loaded.passed_over if self.loaded is not None else []:
            self.view.say(f"passed over a damaged checkpoint: {why}")
            self.log("warning", f"passed over a damaged checkpoint: {why}")
            path.rename(path.with_name(f"damaged-{path.name}"))  # else it would count as the newest again
        if self.loaded is not None:
            self.view.say(f"resuming at step {self.loaded.state['steps']:,} from {self.loaded.path}")
            self.log("info", f"resuming at step {self.loaded.state['steps']}", checkpoint=str(self.loaded.path))
        if run.update == "hogwild":
            self.view.say(
                "hogwild: lock-free in-place updates; reads may mix versions by design (the rate is measured) "
                "and the run cannot be replayed"
            )
        # after a resume, numbers of incarnations that ran before are not used again
        self.supervisor.start({i: int(last.get(str(i), -1)) + 1 for i in range(self.store.layout.workers)})

    def _go_on(self, state: dict[str, Any]) -> None:
        """Take over the episodes of the stretch before; a target reached then does not stop this one."""
        e = self.meter.episodes
        e.count, e.solved_at = state["episodes"], state["solved_at"]
        e.returns.extend(state["returns"][-e.window :])
        e.lengths.extend(state["lengths"][-e.window :])
        if e.solved_at is not None:
            self.target = None

    # -- watch -----------------------------------------------------------------------------------

    def _live(self) -> Result:
        """Look after the workers until they have finished or must stop."""
        supervisor, episodes = self.supervisor, self.meter.episodes
        failure: RunFailed | ConfigError | None = None
        try:
            while supervisor.busy:
                time.sleep(POLL)
                supervisor.tick()
                episodes.look(self.store, self.target)
                self._watch()
                solved = self.target is not None and episodes.solved_at is not None
                if self.asked or solved or self._time_is_up():
                    break
        except (RunFailed, ConfigError) as e:
            failure = e
        self._halt()
        episodes.look(self.store, self.target)
        self._watch(last=True)
        saved = self._save(patience=1.0 if self.asked else 3.0 if failure else 60.0)
        supervisor.output()
        if failure is not None:
            kept = f"{failure}\nTrained weights are kept in {saved}." if saved else str(failure)
            raise type(failure)(kept) from failure
        result = self._result()
        if self.asked:
            self.log("info", f"stopped by {self.asked}")
            lost = "" if saved else ", which could not be saved (see above)"
            raise Interrupted(
                f"stopped by {self.asked} at step {result.steps:,}{lost}; `slipstream resume {self.directory}` "
                f"goes on{'' if saved else ' from the checkpoint before it'}"
            )
        if saved is None:
            raise RunFailed(f"the final checkpoint could not be written (disk full?) in {self.directory}")
        return result

    def _time_is_up(self) -> bool:
        limit = self.options.limits.max_seconds
        return bool(limit and time.perf_counter() - self.meter.started >= limit)

    def _watch(self, last: bool = False) -> None:
        """Metrics, TensorBoard, checkpoints: what is due."""
        now, run, w = time.monotonic(), self.options, self.options.watch
        if now >= self.next["memory"] or last:
            self.next["memory"] = now + (0.5 if now - self.saved < 5 else 5.0)
            self.usage.memory(self.pool.pids())
        if now >= self.next["metrics"] or last:
            self.next["metrics"] = now + w.every
            m = self.meter.look()
            m["learning_rate"] = module("algos", run.algorithm).learning_rate(run.algo, m["steps"], run.total_steps)
            m["memory_mib"], m["cores_busy"] = (
                self.usage.now or float("nan"),
                self.usage.cores(self.pool.pids()),
            )
            m["restarts"] = sum(s.restarts for s in self.supervisor.seats)
            if m["cores_busy"] is None:
                del m["cores_busy"]
            self.view.show(m, last)
            self.writer.write(m, self.store)
            self.supervisor.output()
            self._alarms()
        if w.checkpoint_every and now - self.saved >= w.checkpoint_every and not last:
            self._checkpoint()

    def _alarms(self) -> None:
        full = bool(self.store.control[Word.DISK_FULL])
        if full and not self.disk_full:
            text = f"the disk of {self.directory} is full: training waits until there is room for its record"
            self.view.say(text)
            self.log("error", text)
        self.disk_full = full
        bad = int(self.store.rows[:, Counter.READS_BAD].sum())
        if bad > self.bad_reads:
            self.bad_reads = bad
            self.log("error", f"{bad} reads were torn: this must not happen under rule {self.options.update}")

    # -- checkpoint and stop ---------------------------------------------------------------------

    def _pause(self, patience: float, stopping: bool) -> bool:
        """Bring every worker to the boundary of a rollout, its state written; False if one did not come.

        `stopping`: the run is to end, so the wish to end it is no reason to wait no longer.
        """
        control, rows = self.store.control, self.store.rows
        self.requests += 1
        version, _ = self.store.progress()
        control[Word.PAUSE_STATE] = 1
        control[Word.PAUSE_TICK] = (version if self.store.layout.in_place else self.store.tick) + 1
        control[Word.PAUSE] = self.requests
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            waiting = [i for i in self.supervisor.running if rows[i, Counter.PAUSED] < self.requests]
            if not waiting:
                return True
            if self.hurry or (self.asked and not stopping) or (control[Word.DISK_FULL] and stopping):
                return False
            time.sleep(0.002)
            self.supervisor.tick(replace=False)
        return False

    def _checkpoint(self) -> None:
        """A checkpoint in the middle of training: nothing in flight, nobody moves, then on."""
        whole = self._pause(patience=30.0, stopping=False)
        if not (whole or self.asked):
            self.log("warning", "a worker did not come to the checkpoint in 30 s; its open episodes are not saved")
        if not self.asked:
            self._save(patience=0.0)
        self.store.control[Word.RESUME] = self.requests
        self.saved = time.monotonic()

    def _halt(self) -> None:
        """Stop the workers at the boundary of their rollouts; kill what does not come in time."""
        limit = self.options.limits.stop_seconds
        if self.supervisor.running and not self._pause(limit, stopping=True):
            late = [i for i in self.supervisor.running if self.store.rows[i, Counter.PAUSED] < self.requests]
            self.log("warning", f"workers {late} did not finish their rollouts in {limit} s")
        self.store.control[Word.STOP] = 1
        deadline = time.monotonic() + 1.0  # who has paused leaves at once
        while self.supervisor.running and time.monotonic() < deadline and not self.hurry:
            time.sleep(0.005)
            self.supervisor.tick(replace=False)
        self.supervisor.deactivate()

    def _save(self, patience: float) -> Path | None:
        """Write a checkpoint of the current slot; tries again for `patience` seconds where the disk is full."""
        slot = self.store.slots[0] if self.store.layout.in_place else self.store.current
        version, steps = self.store.progress()
        header = slot.header.copy()
        if self.store.layout.in_place:  # the counts are in the workers' rows
            slot.header[: Header.ENTRIES] = version, version, steps
        states = sorted((self.directory / "workers").glob("*.state"))
        rows = self.store.rows
        before = self.loaded.state["incarnations"] if self.loaded is not None else {}
        state = {
            "config": config.to_dict(self.options), "parts": self.parts,
            "incarnations": {
                **before, **{str(i): int(rows[i, Counter.INCARNATION]) for i in range(len(rows))},
            },
            "weights_checksum": store.checksum(slot.weights),
            "episodes": self.meter.episodes.count,
            "returns": list(self.meter.episodes.returns),
            "lengths": list(self.meter.episodes.lengths),
            "solved_at": self.meter.episodes.solved_at,
        }  # fmt: skip
        deadline = time.monotonic() + patience
        try:
            while True:
                try:
                    path = checkpoint.save_checkpoint(
                        self.directory, slot, state, states, self.options.watch.keep_checkpoints or 1
                    )
                    self.log("info", f"checkpoint {path.name}", version=version)
                    return path
                except OSError as e:
                    text = f"checkpoint not written ({e.strerror}); the previous one is kept"
                    self.log("error", text)
                    self.view.say(text)
                    if time.monotonic() >= deadline:
                        return None
                    time.sleep(0.5)
        finally:
            slot.header[:] = header

    def _result(self) -> Result:
        version, steps = self.store.progress()
        e, seconds = self.meter.episodes, time.perf_counter() - self.meter.started
        first = self.loaded.state["steps"] if self.loaded is not None else 0
        totals = self.meter.totals()
        summary = {
            "run": str(self.directory), "env": self.options.env, "algorithm": self.options.algorithm,
            "update": self.options.update, "workers": self.options.workers, "seed": self.options.seed,
            "steps": steps, "steps_asked": self.options.total_steps, "updates": version,
            "episodes": e.count, "mean_return": e.mean if e.returns else None, "episodes_in_mean": len(e.returns),
            "solved_at": e.solved_at,
            "seconds_to_solved": None if e.solved_after is None else e.solved_after - self.begun,
            "seconds": seconds, "steps_per_second": (steps - first) / seconds,
            "peak_memory_mib": round(self.usage.peak, 1), "parameters": self.parts["parameters"],
            "restarts": sum(s.restarts for s in self.supervisor.seats), **totals,
        }  # fmt: skip
        with suppress(OSError):
            checkpoint.write_file(self.directory / "summary.json", json.dumps(summary, indent=1).encode())
        return Result(
            self.directory, steps, version, e.count, e.mean, e.solved_at, seconds,
            cast(float, summary["steps_per_second"]), self.asked, summary,
        )  # fmt: skip

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask for a clean stop; the second time nobody is waited for; the third ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handler(number: int, frame: Any) -> None:
            if self.hurry:
                self.pool.close()
                raise KeyboardInterrupt(signal.Signals(number).name)
            self.hurry = self.asked is not None
            self.asked = self.asked or signal.Signals(number).name

        old = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, h in old.items():
                signal.signal(s, h)


def _claim(directory: Path) -> int:
    """Hold a run directory until the descriptor returned is unlocked: two processes in one would spoil it.

    Raises:
        ConfigError: another process holds it.
    """
    fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(fd, 32).decode().strip()
        os.close(fd)
        raise ConfigError(f"{directory}: process {owner} trains in it; stop that first") from None
    with suppress(OSError):  # a full disk
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _describe(run: Run, given: Any, file: Path) -> None:
    """In a worker process: what the store must hold, and the first weights."""
    from slipstream import build

    layout, weights, parts = build.layout(run, given)
    checkpoint.write_part(file, {"layout": dataclasses.asdict(layout), "parts": parts}, {"weights": weights})


def _serve(*args: Any) -> None:
    """In a process of its own: the server of rule `server`."""
    from slipstream.serve import serve

    serve(*args)


def _work(*args: Any) -> None:
    """In a worker process: its life (torch is imported there, not in the parent)."""
    from slipstream.worker import work

    work(*args)
