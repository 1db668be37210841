"""Starts runs, looks into them while they live, and finds what they left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import slipstream as ss
from slipstream.cores import usable_cores
from slipstream.counters import Counter, Phase
from slipstream.launch import Launcher
from slipstream.store import Store, Word

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "slipstream"]


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: it finds `bad_envs` and has no colours or widths of this terminal."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **more}


# -- the command line ------------------------------------------------------------------------------


@dataclass
class Done:
    """What a command did."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> Any:
        """The one object on standard output; strict: no NaN, nothing else."""
        assert self.out.count("\n") == 1, self.out

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


def command(*arguments: object, cwd: Path | None = None, timeout: float = 90, **more: Any) -> Done:
    """Carry out `slipstream ...` and wait for it."""
    begun = time.monotonic()
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=timeout,
        env=environment(), check=False, **more,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - begun)


def start(*arguments: object, cwd: Path | None = None, program: list[str] | None = None) -> subprocess.Popen[str]:
    """Start `slipstream ...` in a process group of its own."""
    return subprocess.Popen(
        [*(COMMAND if program is None else program), *map(str, arguments)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment(), start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], timeout: float = 60) -> Done:
    """Wait for a started command."""
    begun = time.monotonic()
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"did not end within {timeout} s\n{out}\n{err}") from None
    return Done(process.returncode, out, err, time.monotonic() - begun)


def until(look: Callable[[], Any], seconds: float = 30.0, every: float = 0.01, what: str = "") -> Any:
    """What `look` gives once that is true.

    Raises:
        AssertionError: it has not become true in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError, ss.ConfigError):
            found = look()
            if found:
                return found
        time.sleep(every)
    raise AssertionError(f"not within {seconds} s: {what or look}")


def slack() -> float:
    """By what factor this machine is too busy for times to mean anything: 1 where it is not."""
    return max(1.0, os.getloadavg()[0] / usable_cores())


# -- processes -------------------------------------------------------------------------------------


def _words(pid: int | str) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    return []


def family(parent: int) -> list[int]:
    """Launchers that `parent` started and their workers, also after the parent has gone."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and "slipstream.launch" in (words := _words(entry.name)):
            with suppress(OSError):
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if words[-1] == str(parent) and state not in "ZX":
                    found.append(int(entry.name))
    return found


def segments(parent: int) -> list[str]:
    """Named shared memory that `parent` has made."""
    return [n for n in os.listdir("/dev/shm") if n.startswith(f"slipstream-{parent}-")]


def assert_nothing_left(parent: int, seconds: float = 0.5) -> None:
    """No process and no shared memory of a run is left."""
    until(lambda: not family(parent), seconds, what=f"processes left: {family(parent)}")
    assert not segments(parent)


def descriptors(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def status(pid: int, name: str) -> int:
    """A number from /proc/PID/status, such as `VmRSS` (KiB) or `Threads`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(name)


# -- a run that lives ------------------------------------------------------------------------------


def stores(pid: int) -> dict[int, str]:
    """Parameter stores that a process has open: inode -> path."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        with suppress(OSError):
            target = os.readlink(path)
            if f"/slipstream-{pid}-" in target and target.endswith("(deleted)"):
                found[os.stat(path).st_ino] = path
    return found


class Live:
    """A look into a run that process `pid` does in `directory`."""

    def __init__(self, pid: int, directory: Path, before: dict[int, str] | None = None) -> None:
        """`before`: stores the process had open before the run."""
        self.pid, self.directory, self.before = pid, directory, before or {}
        self.store: Store = until(self._open, 60, what="a store")
        self.store.close()  # only its lock: a look needs none

    def _open(self) -> Store | None:
        new = [path for inode, path in stores(self.pid).items() if inode not in self.before]
        return Store(new[0]) if new else None

    @property
    def steps(self) -> int:
        """Global environment steps."""
        return self.store.progress()[1]

    def counter(self, worker: int, counter: Counter) -> float:
        """One number of a worker's row."""
        return float(self.store.rows[worker, counter])

    def steps_reach(self, steps: int, seconds: float = 60.0) -> None:
        """Wait until so many steps are done."""
        until(lambda: self.steps >= steps, seconds, what=f"{steps} steps")

    def worker(self, index: int, but: int | None = None) -> int:
        """The process of a worker that has begun to work; `but` is the process it must not be.

        Told by its standard output, `workers/N.txt`.
        """
        file = str(self.directory.resolve() / "workers" / f"{index}.txt")

        def look() -> int | None:
            if self.counter(index, Counter.PHASE) in (Phase.STARTING, Phase.LEFT):
                return None
            for pid in family(self.pid):
                with suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/1") == file and pid != but:
                        return pid
            return None

        return int(until(look, 30, what=f"worker {index}"))

    def rate(self, seconds: float = 1.0) -> float:
        """Steps a second, now."""
        first, begun = self.steps, time.monotonic()
        time.sleep(seconds)
        return (self.steps - first) / (time.monotonic() - begun)

    def holder(self) -> int:
        """Worker + 1 that says it holds the lock."""
        return int(self.store.control[Word.HOLDER])


@dataclass
class Outcome:
    """What came of a run."""

    directory: Path
    result: ss.Result | None = None
    error: BaseException | None = None
    summary: dict[str, Any] = field(default_factory=dict)

    def log(self, words: str = "") -> list[dict[str, Any]]:
        """Lines of the log whose message contains `words`."""
        lines = [json.loads(t) for t in (self.directory / "log.jsonl").read_text().splitlines()]
        return [line for line in lines if words in line["message"]]

    @property
    def state(self) -> dict[str, Any]:
        """`state.json` of the newest checkpoint."""
        newest = sorted((self.directory / "checkpoints").glob("[0-9]*"))[-1]
        return json.loads((newest / "state.json").read_text())  # type: ignore[no-any-return]


class Launchers:
    """Launchers started ahead, so that a test need not wait for their imports."""

    def __init__(self) -> None:
        self.ready = Launcher()

    def take(self) -> Launcher:
        """One that is (nearly) ready; the next one begins."""
        taken, self.ready = self.ready, Launcher()
        return taken

    def settle(self) -> None:
        """Wait until the next one has finished its imports."""
        until(lambda: self.ready.threads or (self.ready.messages() and self.ready.threads), 60)

    def close(self) -> None:
        """End the last one."""
        self.ready.close()


def train(
    directory: Path, launcher: Launcher | None = None, script: Callable[[Live], Any] | None = None,
    call: Callable[..., ss.Result] = ss.train, env: Any = "CartPole-v1", **settings: Any,
) -> Outcome:  # fmt: skip
    """A run in this process, on its main thread; `script` acts on it from another thread.

    The run is interrupted when the script returns True or fails. What the script raises is raised here.
    """
    outcome, failed, before = Outcome(directory), [], stores(os.getpid())

    def act() -> None:
        stop = True
        try:
            assert script is not None
            stop = script(Live(os.getpid(), directory, before)) is True
        except BaseException as e:
            failed.append(e)
        if stop:
            os.kill(os.getpid(), signal.SIGINT)

    actor = threading.Thread(target=act) if script is not None else None
    handler = signal.signal(signal.SIGINT, lambda *_: None)  # one that comes too late
    try:
        if actor is not None:
            actor.start()
        settings = {"show": "none", "launcher": launcher, **settings}
        outcome.result = call(env, run=directory, **settings) if call is ss.train else call(directory, **settings)
    except Exception as e:
        outcome.error = e
    finally:
        if actor is not None:
            actor.join(90)
        signal.signal(signal.SIGINT, handler)
    if failed:
        raise failed[0] from outcome.error
    with suppress(OSError):
        outcome.summary = json.loads((directory / "summary.json").read_text())
    return outcome


def resume(directory: Path, launcher: Launcher | None = None, **settings: Any) -> Outcome:
    """A resumed run in this process."""
    return train(directory, launcher, call=ss.resume, **settings)


def at_once(do: Callable[..., Any], cases: list[Any]) -> None:
    """`do(*case)` for every case, two at a time; raises what one of them raised."""
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(do, *case) for case in cases]:
            done.result()
