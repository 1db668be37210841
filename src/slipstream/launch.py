"""The launcher: one small process that has imported everything and forks workers in milliseconds.

Importing torch takes seconds and 150 MB. The launcher does it once, while the parent still reads its
options, and never runs a tensor operation, so it has a single thread and forking it is safe (forking
after torch's threads have started is not). It ignores Ctrl-C and SIGTERM, dies with the parent, and its
workers die with it. Run as `python -m slipstream.launch FD fork|solo`; `solo` runs one job in the process
itself, for systems where forking is not safe.

This file imports the standard library alone: the parent starts a launcher before anything slow is loaded.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.cores import SINGLE_THREADED

PR_SET_PDEATHSIG = 1
STOPPING = {signal.SIGINT, signal.SIGTERM}


class Launcher:
    """A launcher process and the channel to it; see launch.py."""

    def __init__(self, solo: bool = False) -> None:
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        command = [sys.executable, "-m", "slipstream.launch", str(theirs.fileno())]
        path = os.pathsep.join(p for p in sys.path if p)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until the child can ignore them
        try:
            self.process = subprocess.Popen(
                [*command, "solo" if solo else "fork", str(os.getpid())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                env={**os.environ, **SINGLE_THREADED, "PYTHONPATH": path},
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.channel, self.solo, self.data = ours, solo, bytearray()
        self.channel.setblocking(False)
        self.started: dict[int, int] = {}  # job -> pid
        self.threads = 0
        self.closed = False

    def send(self, job: dict[str, Any]) -> None:
        """Ask for a job; it starts as soon as the launcher has imported everything."""
        data = pickle.dumps(job)
        self.channel.setblocking(True)
        self.channel.sendall(struct.pack("<Q", len(data)) + data)
        self.channel.setblocking(False)
        if self.solo:
            self.started[job["id"]] = self.process.pid

    def messages(self) -> list[dict[str, Any]]:
        """What the launcher has said since the last look."""
        with suppress(BlockingIOError, ConnectionError):
            while part := self.channel.recv(65536):
                self.data += part
        found = []
        while len(self.data) >= 8:
            size = struct.unpack("<Q", self.data[:8])[0]
            if len(self.data) < 8 + size:
                break
            found.append(json.loads(self.data[8 : 8 + size]))
            del self.data[: 8 + size]
        for m in found:
            if "ready" in m:
                self.threads = m["threads"]
            elif "started" in m:
                self.started[m["started"]] = m["pid"]
        return found

    def close(self) -> None:
        """End the launcher and all its workers."""
        if not self.closed:
            self.closed = True
            self.process.kill()
            self.process.wait()
            self.channel.close()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def ignore_signals() -> None:
    """Leave stopping to the parent: a terminal's Ctrl-C and a scheduler's SIGTERM reach every process.

    Not SIG_IGN, which programs that an environment starts would inherit: they could not be terminated.
    """
    for number in STOPPING:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def main() -> None:
    """Import, say ready, then start what is asked for and report what ended."""
    fd, mode, parent = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    die_with_parent(parent)
    ignore_signals()
    channel = socket.socket(fileno=fd)
    if mode == "solo":
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()

    import slipstream.build
    import slipstream.worker

    slipstream.build.single_threaded()
    _say(channel, {"ready": os.getpid(), "threads": threads()})
    if mode == "solo":
        _run(pickle.loads(_receive(channel)))
        return
    gc.collect()
    gc.freeze()  # keep the shared pages shared
    _serve(channel)


def _serve(channel: socket.socket) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    jobs: dict[int, int] = {}
    while True:
        waiting: list[Any] = [channel, wake_read]
        ready, _, _ = select.select(waiting, [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
        while jobs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            _say(channel, {"ended": jobs.pop(pid), "status": status})
        if channel in ready:
            data = _receive(channel)
            if not data:
                return
            job = pickle.loads(data)
            launcher = os.getpid()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(wake_read)
                os.close(wake_write)
                channel.close()
                die_with_parent(launcher)
                _run(job)
            jobs[pid] = job["id"]
            _say(channel, {"started": job["id"], "pid": pid})


def _run(job: dict[str, Any]) -> None:
    """Do one job in this process and end it; an error is left in a file for the parent."""
    code = 1
    try:
        out = os.open(job["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        sys.path[:] = job["path"]
        import cloudpickle

        function, args = cloudpickle.loads(job["call"])
        function(*args)
        code = 0
    except BaseException as e:
        leave_error(job["error"], e)
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # no clean-up of what the launcher had opened


def leave_error(file: str, e: BaseException) -> None:
    """Write an exception where `supervise` finds it."""
    from slipstream.errors import ConfigError, RunFailed

    kind = "config" if isinstance(e, ConfigError) else "failed" if isinstance(e, RunFailed) else "raised"
    text = "".join(traceback.format_exception(e))
    with suppress(OSError):
        Path(file).write_text(json.dumps({"kind": kind, "message": str(e), "traceback": text}))


def threads() -> int:
    """Threads of this process, as the kernel counts them."""
    with suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()


def _watch(parent: int) -> None:
    """End with the parent on systems whose kernel does not do it."""
    import time

    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _say(channel: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    try:
        channel.sendall(struct.pack("<Q", len(data)) + data)
    except ConnectionError:  # nobody wants to know any more
        os._exit(1)


def _receive(channel: socket.socket) -> bytes:
    head = _exactly(channel, 8)
    return _exactly(channel, struct.unpack("<Q", head)[0]) if head else b""


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
