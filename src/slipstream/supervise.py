"""Processes or threads: start, heartbeats, restarts, clean stop.

Two pools do the same for processes (through the launcher) and for threads of this process; the supervisor
above them decides. It polls; it has no thread of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.counters import Counter, Phase
from slipstream.errors import ConfigError, RunFailed
from slipstream.launch import Launcher, leave_error
from slipstream.store import Store, Word
from slipstream.watch.log import Log


@dataclass
class Ended:
    """How a job ended: `code` 0 is well; negative is the signal that killed it."""

    index: int
    code: int


class ProcessPool:
    """Jobs as processes, forked by a launcher (or one interpreter each where forking is not safe)."""

    def __init__(self, directory: Path, launcher: Launcher | None, solo: bool = sys.platform != "linux") -> None:
        self.room, self.solo = directory / "workers", solo
        self.room.mkdir(exist_ok=True)
        self.launchers = [] if solo else [launcher or Launcher()]
        self.jobs: dict[int, tuple[int, Launcher]] = {}  # job -> (worker index, launcher)
        self.next = 0

    def start(self, index: int, function: Callable[..., None], *args: Any) -> None:
        """Start `function(*args)` as worker `index`."""
        import cloudpickle

        launcher = Launcher(solo=True) if self.solo else self.launchers[-1]
        if self.solo:
            self.launchers.append(launcher)
        elif launcher.process.poll() is not None:
            launcher = Launcher()
            self.launchers.append(launcher)
        self.error(index).unlink(missing_ok=True)
        job = {
            "id": self.next, "call": cloudpickle.dumps((function, args)), "path": sys.path,
            "output": str(self.room / f"{index}.txt"), "error": str(self.error(index)),
        }  # fmt: skip
        launcher.send(job)
        self.jobs[self.next] = (index, launcher)
        self.next += 1

    def error(self, index: int) -> Path:
        """Where worker `index` leaves its exception."""
        return self.room / f"{index}.error"

    def ended(self) -> list[Ended]:
        """Jobs that ended since the last look."""
        found = []
        for launcher in list(self.launchers):
            for m in launcher.messages():
                if "ended" in m and m["ended"] in self.jobs:
                    index, _ = self.jobs.pop(m["ended"])
                    found.append(Ended(index, os.waitstatus_to_exitcode(m["status"])))
            code = launcher.process.poll()
            if code is not None:  # it takes its workers along
                for job, (index, owner) in list(self.jobs.items()):
                    if owner is launcher:
                        del self.jobs[job]
                        found.append(Ended(index, code if self.solo else -signal.SIGKILL))
                if self.solo or len(self.launchers) > 1:
                    self.launchers.remove(launcher)
                    launcher.close()
        return found

    def pid(self, index: int) -> int | None:
        """Process of worker `index`, once it has one."""
        for job, (i, launcher) in self.jobs.items():
            if i == index:
                launcher.messages() if job not in launcher.started and self.solo else None
                return launcher.started.get(job)
        return None

    def begun(self, index: int) -> bool:
        """Whether worker `index` has been started (the launcher may still be importing)."""
        return self.pid(index) is not None

    def pids(self) -> list[int]:
        """Every process of the pool, launchers included."""
        workers = [self.pid(i) for i, _ in self.jobs.values()]
        return [p for p in [*workers, *(la.process.pid for la in self.launchers)] if p is not None]

    def stopped(self, index: int) -> bool:
        """Whether a signal has stopped a worker (SIGSTOP), as far as the system tells."""
        with suppress(OSError, IndexError):
            stat = Path(f"/proc/{self.pid(index)}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"
        return False

    def dump(self, index: int) -> None:
        """Have a worker write the stack of each of its threads to its output."""
        pid = self.pid(index)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def kill(self, index: int) -> None:
        """Kill a worker at once."""
        pid = self.pid(index)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End every process of the pool."""
        for launcher in self.launchers:
            launcher.close()


class ThreadPool:
    """Jobs as threads of this process, through the same code."""

    def __init__(self, directory: Path) -> None:
        self.room = directory / "workers"
        self.room.mkdir(exist_ok=True)
        self.jobs: dict[int, threading.Thread] = {}
        self.codes: dict[int, int] = {}

    def start(self, index: int, function: Callable[..., None], *args: Any) -> None:
        """Start `function(*args)` as worker `index`."""

        def body() -> None:
            try:
                function(*args)
                self.codes[index] = 0
            except BaseException as e:
                leave_error(str(self.error(index)), e)
                self.codes[index] = 1

        self.error(index).unlink(missing_ok=True)
        self.jobs[index] = threading.Thread(target=body, name=f"slipstream-{index}", daemon=True)
        self.jobs[index].start()

    def error(self, index: int) -> Path:
        """Where worker `index` leaves its exception."""
        return self.room / f"{index}.error"

    def ended(self) -> list[Ended]:
        """Jobs that ended since the last look."""
        done = [i for i, t in self.jobs.items() if not t.is_alive()]
        for i in done:
            del self.jobs[i]
        return [Ended(i, self.codes.pop(i, 1)) for i in done]

    def begun(self, index: int) -> bool:
        """A thread starts at once."""
        return True

    def pids(self) -> list[int]:
        """No processes beside this one."""
        return []

    def stopped(self, index: int) -> bool:
        """A signal stops all threads or none."""
        return False

    def dump(self, index: int) -> None:
        """Write all stacks to the worker's output."""
        import faulthandler

        with open(self.room / f"{index}.txt", "a") as out:
            faulthandler.dump_traceback(out, all_threads=True)

    def kill(self, index: int) -> None:
        """Raise: a thread cannot be killed."""
        raise RunFailed(f"worker {index} hangs, and a thread cannot be replaced; use backend: process")

    def close(self) -> None:
        """Wait a moment for threads that have been told to stop."""
        for t in self.jobs.values():
            t.join(2.0)


@dataclass
class Seat:
    """What the supervisor knows of one worker."""

    incarnation: int = 0
    restarts: int = 0
    running: bool = False
    beat: float = -1.0
    tick: int = 0
    changed: float = field(default_factory=time.monotonic)
    held: float = 0.0  # since when it has been seen holding the lock with the same heartbeat
    held_beat: float = -1.0
    died: float | None = None  # when the incarnation before this one died
    killed: str = ""  # why the supervisor killed it


class Supervisor:
    """Keeps the workers of a run alive, a bounded number of times."""

    def __init__(
        self, workers: int, pool: ProcessPool | ThreadPool, store: Store, log: Log, limits: Any,
        start: Callable[[int, int], None], server: int | None = None,
    ) -> None:  # fmt: skip
        """`start(index, incarnation)` starts a worker through the pool; `server` is the seat of rule `server`'s."""
        self.server = server
        self.pool, self.store, self.log, self.limits, self.begin = pool, store, log, limits, start
        self.seats = [Seat() for _ in range(workers + (server is not None))]
        self.dead: list[Ended] = []  # ended badly, not yet dealt with
        self.looked = time.monotonic()
        self.read: dict[int, int] = {}  # bytes of each worker's output already in the log

    def start(self, incarnations: dict[int, int]) -> None:
        """Start every worker; `incarnations` gives the first number where it is not 0."""
        for index, seat in enumerate(self.seats):
            seat.incarnation = incarnations.get(index, 0)
            self._start(index)

    def _start(self, index: int) -> None:
        seat = self.seats[index]
        self.store.rows[index, Counter.PHASE] = Phase.STARTING
        seat.running, seat.beat, seat.changed, seat.held, seat.killed = True, -1.0, time.monotonic(), 0.0, ""
        self.begin(index, seat.incarnation)

    @property
    def running(self) -> list[int]:
        """Workers that have not ended."""
        return [i for i, s in enumerate(self.seats) if s.running]

    @property
    def busy(self) -> bool:
        """Whether any worker runs or is to be replaced (a server alone has nothing to do)."""
        return any(i != self.server for i in self.running) or bool(self.dead)

    def tick(self, replace: bool = True) -> None:
        """Look after every worker once; with `replace=False` the dead are dealt with at a later tick.

        Raises:
            ConfigError, RunFailed: what a worker ended with, if it is no use to start it again.
        """
        for ended in self.pool.ended():
            self.output(ended.index)
            seat, row = self.seats[ended.index], self.store.rows[ended.index]
            seat.running = False
            row[Counter.ACTIVE] = 0  # no round waits for it any more
            if ended.code != 0 or row[Counter.PHASE] != Phase.LEFT:  # a library may call exit(0)
                row[Counter.PHASE] = Phase.LEFT
                (self.pool.room / f"{ended.index}.state").unlink(missing_ok=True)
                self.dead.append(ended)
        gap, self.looked = time.monotonic() - self.looked, time.monotonic()
        if gap > 0.5:  # this process was stopped or busy itself (Ctrl-Z, a slow disk): the gap is nobody's fault
            for seat in self.seats:
                seat.changed += gap
                seat.held += gap if seat.held else 0.0
        if replace:
            while self.dead:
                self._replace(self.dead.pop(0))
        for index in self.running:
            self._look(index)

    def _replace(self, ended: Ended) -> None:
        """Start a dead worker again, or raise if that is no use."""
        index, seat, row = ended.index, self.seats[ended.index], self.store.rows[ended.index]
        kind, message, trace = self._why(ended)
        who = self.name(index)
        self.log("error", f"{who} ended: {message}", subject=index, traceback=trace)
        if kind == "config":
            raise ConfigError(message)
        if kind == "failed":
            raise RunFailed(f"{who}: {message}")
        seat.restarts += 1
        if seat.restarts > self.limits.max_restarts:
            raise RunFailed(
                f"{who} ended {seat.restarts} times (limits.max_restarts {self.limits.max_restarts}); "
                f"last: {message}\n{trace}"
            )
        # the record knows the incarnation that really ran (a resumed worker keeps its own)
        seat.incarnation = max(seat.incarnation, int(row[Counter.INCARNATION])) + 1
        seat.died = time.monotonic()
        self.log(
            "warning",
            f"{who} replaced ({seat.restarts} of {self.limits.max_restarts})",
            subject=index,
        )
        self._start(index)

    def name(self, index: int) -> str:
        """What messages call the process of a seat."""
        return "the server" if index == self.server else f"worker {index}"

    def _why(self, ended: Ended) -> tuple[str, str, str]:
        """(kind, sentence, traceback) of an end."""
        with suppress(OSError, ValueError, KeyError):
            error = json.loads(self.pool.error(ended.index).read_text())
            return error["kind"], error["message"] or error["traceback"].splitlines()[-1], error["traceback"]
        if ended.code < 0:
            name = signal.Signals(-ended.code).name if -ended.code in list(signal.Signals) else str(-ended.code)
            why = self.seats[ended.index].killed
            return "died", f"killed by {name}" + (f" because it {why}" if why else ""), self._tail(ended.index)
        return "died", f"exit code {ended.code} without an exception", self._tail(ended.index)

    def _tail(self, index: int) -> str:
        with suppress(OSError):
            return (self.pool.room / f"{index}.txt").read_text(errors="replace")[-2000:]
        return ""

    def _look(self, index: int) -> None:
        """Kill a worker that hangs; one that waits for another does not hang."""
        seat, row, now = self.seats[index], self.store.rows[index], time.monotonic()
        beat, phase = float(row[Counter.BEAT]), row[Counter.PHASE]
        # blocked at the lock while nobody else gets on either; in `sync` a worker that waits has a heartbeat
        waits = phase == Phase.WAIT and self.store.tick == seat.tick and not self.pool.stopped(index)
        waits = waits and index != self.server
        if beat != seat.beat or waits:
            seat.beat, seat.tick, seat.changed = beat, self.store.tick, now
        holds = self.store.control[Word.HOLDER] == index + 1 and phase == Phase.APPLY
        if not holds or seat.held == 0.0 or beat != seat.held_beat:
            seat.held, seat.held_beat = (now if holds else 0.0), beat
        elif now - seat.held > self.limits.lock_seconds:
            self._kill(index, f"held the lock for {now - seat.held:.1f} s")
            return
        serving = index == self.server and phase != Phase.STARTING  # all wait for it, so it must look at its rings
        if now - seat.changed > (self.limits.lock_seconds if serving else self.limits.hang_seconds):
            self._kill(index, f"gave no heartbeat for {now - seat.changed:.1f} s")

    def _kill(self, index: int, why: str) -> None:
        self.pool.dump(index)
        time.sleep(0.1)  # for the dump
        self.output(index)
        self.seats[index].killed = why
        self.log("error", f"{self.name(index)} {why}; killed", subject=index)
        self.pool.kill(index)
        self.seats[index].changed, self.seats[index].held = time.monotonic(), 0.0

    def output(self, index: int | None = None) -> None:
        """Bring what workers printed into the log."""
        for i in range(len(self.seats)) if index is None else [index]:
            file = self.pool.room / f"{i}.txt"
            with suppress(OSError):
                if file.stat().st_size <= self.read.get(i, 0):
                    continue
                with file.open("rb") as f:
                    f.seek(self.read.get(i, 0))
                    data = f.read(1 << 20)
                self.read[i] = self.read.get(i, 0) + len(data)
                for line in data.decode(errors="replace").splitlines():
                    if line.strip():
                        self.log("info", line, subject=i, printed=True)

    def deactivate(self) -> None:
        """Kill what is still running."""
        for index in self.running:
            with suppress(RunFailed):
                self.pool.kill(index)
