"""`slipstream replay`: execute a recorded asynchronous run again, one worker after another, bit for bit.

The record gives the global order of pulls and applies. A worker's rollout and gradient are a pure function of
its seeds and of what it pulled, so executing each at the version it pulled, and applying each in the recorded
order, must give the same weights. Every loss, gradient norm and checksum on the way is compared.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream import build, checkpoint, config, record
from slipstream.config import Given, Run, module
from slipstream.cores import one_thread
from slipstream.counters import ROW
from slipstream.errors import ConfigError, RunFailed
from slipstream.record import Kind
from slipstream.store import Contribution, Segment, Slot, Store, checksum, initialize
from slipstream.worker import Worker


@dataclass(frozen=True)
class Replay:
    """What a replay did. `checksums` of the weights were compared, and a loss for every contribution."""

    run: str
    identical: bool
    updates: int
    contributions: int
    checksums: int
    workers: int
    final_checksum: int
    compared_with_checkpoint: bool
    steps: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Differs(RunFailed):
    """The replay is not what was recorded; says where it first differed."""


def replay(
    run: str | os.PathLike[str], *, until_update: int | None = None, env: Callable[..., Any] | None = None,
    torso: Callable[..., Any] | None = None,
) -> Replay:  # fmt: skip
    """Execute a recorded run again and verify it.

    Args:
        run: the run directory.
        until_update: stop after this version.
        env: the environment's maker, for a run trained with a callable.
        torso: the torso's maker, likewise.

    Raises:
        ConfigError: the run was not recorded, or under `hogwild`.
        Differs: at the first difference; names worker, rollout and update.
    """
    directory = Path(run)
    if not (directory / "parts.json").exists():
        raise ConfigError(f"{directory}: not a run directory")
    parts = json.loads((directory / "parts.json").read_text())
    for part in parts:
        if part["config"]["update"] == "hogwild":
            raise ConfigError(
                f"{directory}: a run under hogwild cannot be replayed: its workers write the weights at the same "
                "time without a lock, so there is no order to record. The nearest rule that can is lock"
            )
        missing = [n for n in part["callables"] if {"env": env, "torso": torso}[n] is None]
        if missing:
            raise ConfigError(f"{directory}: was trained with a callable {missing[0]}; give it as {missing[0]}=")
    made = 0
    with suppress(ConfigError):  # a run that was killed early has no checkpoint
        made = checkpoint.newest(directory).state["entries"]
    record.read(directory / "schedule.bin", made)  # refuses one that has been cut off
    entries = record.read(directory / "schedule.bin")
    begun = time.perf_counter()
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        done = _Replayer(directory, parts, Given(env, torso), Path(scratch)).execute(entries, until_update)
    return replace(done, seconds=time.perf_counter() - begun)


class _Replayer:
    def __init__(self, directory: Path, parts: list[dict[str, Any]], given: Given, scratch: Path) -> None:
        self.directory, self.parts, self.given, self.scratch = directory, parts, given, scratch
        self.workers: dict[int, Worker] = {}
        self.ready: dict[int, Contribution] = {}  # entry -> contribution computed, not yet applied
        self.checksums = 0

    def execute(self, entries: NDArray[np.void], until: int | None) -> Replay:
        """Everything, in the recorded order."""
        run = config.from_dict(self.parts[0]["config"])
        layout, weights, _ = build.layout(run, self.given)
        segment = Segment.create(layout.regions()[1], [str(self.scratch)], nameless=False)
        initialize(segment.path, layout, weights)
        self.store = Store(segment.path)
        self._use(run)
        pulls: dict[int, list[int]] = defaultdict(list)
        for i, pulled in enumerate(entries["pulled"]):
            pulls[int(pulled)].append(i)
        boundaries = [p["entry"] for p in self.parts[1:]]
        at = 0
        self._compute(entries, pulls[0])
        while at < len(entries):
            while boundaries and boundaries[0] <= at:
                boundaries.pop(0)
                self._next_part(len(self.parts) - len(boundaries) - 1)
                self._compute(entries, [i for i in pulls[self.store.tick] if i not in self.ready and i >= at])
            end = at
            while end < len(entries) and entries["tick"][end] == entries["tick"][at]:
                end += 1
            self._apply(entries, at, end)
            at = end
            if until is not None and self.store.current.version >= until:
                break
            next_part = boundaries[0] if boundaries else len(entries)
            self._compute(entries, [i for i in pulls[self.store.tick] if i < next_part])
        final = checksum(self.store.current.weights)
        compared = self._compare_checkpoint(at, final)
        version, steps = self.store.progress()
        self.store.close()
        segment.close()
        names = len(set(entries["worker"][:at].tolist()))
        return Replay(str(self.directory), True, version, at, self.checksums, names, final, compared, steps, 0.0)

    def _use(self, run: Run) -> None:
        algorithm = module("algos", run.algorithm)
        self.run = run
        self.rate = lambda steps: algorithm.learning_rate(run.algo, steps, run.total_steps)
        env = build.environment(run, self.given, 1, build.seeds(run, build.Role.EVALUATION, 0))
        self.stepper = build.stepper(run, self.store, env)

    def _next_part(self, index: int) -> None:
        """The run was resumed here: workers go on from their saved state under the new configuration."""
        run = config.from_dict(self.parts[index]["config"])
        old, self.workers = self.workers, {}
        self._use(run)
        for number, worker in old.items():
            again = self._worker(number, worker.incarnation)
            try:
                again.restore(*worker.save())
                self.workers[number] = again
            except ValueError:
                continue  # the record shows the incarnation that followed

    def _worker(self, index: int, incarnation: int) -> Worker:
        return Worker(
            self.run,
            self.given,
            index,
            incarnation,
            np.zeros(ROW),
            lambda *a, **k: None,
            self.scratch / "bad",  # type: ignore[arg-type]
        )

    def _compute(self, entries: NDArray[np.void], indices: list[int]) -> None:
        """Have the workers that pulled the present tick compute what they offered later."""
        for i in indices:
            e = entries[i]
            index, incarnation = int(e["worker"]), int(e["incarnation"])
            worker = self.workers.get(index)
            if worker is None or worker.incarnation != incarnation:
                worker = self.workers[index] = self._worker(index, incarnation)
            self.store.read(worker.snapshot)
            done = worker.compute()
            assert done is not None
            c = done[0]
            gradient = c.gradient.copy()
            if c.payload is not None and worker.compressor is not None:
                worker.compressor.decode(c.payload, gradient)  # as the server saw it
            read = None if c.read is None else c.read.copy()
            fields = {**vars(c), "gradient": gradient, "moments": c.moments.copy(), "read": read, "payload": None}
            self.ready[i] = Contribution(**fields)
            self._same(e, self.ready[i])

    def _same(self, e: Any, c: Contribution) -> None:
        where = (
            f"worker {c.worker} (start {c.incarnation}), its rollout {c.rollout}, computed from tick {c.tick} for "
            f"update {int(e['version'])}"
        )
        pairs = [
            ("rollout", int(e["rollout"]), c.rollout),
            ("gradient finite", e["kind"] == Kind.APPLIED, c.finite),
            ("loss", float(e["loss"]), c.loss),
            ("gradient norm", float(e["norm"]), c.norm),
        ]
        for name, was, now in pairs:
            if was != now and not (was != was and now != now):
                raise Differs(
                    f"the replay differs first in {name} of {where}: recorded {was!r}, now {now!r}. Possible causes: "
                    "an environment that is not deterministic given its seed, other versions of torch, NumPy or the "
                    "environment, another kind of CPU, or a damaged record"
                )

    def _apply(self, entries: NDArray[np.void], begin: int, end: int) -> None:
        for i in range(begin, end):
            if i not in self.ready:
                e = entries[i]
                raise Differs(
                    f"the record is damaged: worker {e['worker']} cannot have pulled tick {e['pulled']} for its "
                    f"contribution {i}, which made tick {e['tick']} and update {e['version']}"
                )
        offered = [self.ready.pop(i) for i in range(begin, end)]
        e = entries[end - 1]
        with self.store.transaction() as slot:
            self.stepper.apply(slot, offered, self.rate)
            self._check(e, slot, offered)

    def _check(self, e: Any, slot: Slot, offered: list[Contribution]) -> None:
        who = " and ".join(str(c.worker) for c in offered)
        for name, was, now in [
            ("tick", int(e["tick"]), self.store.tick + 1),
            ("version", int(e["version"]), slot.version),
            ("steps", int(e["steps"]), slot.steps),
        ]:
            if was != now:
                raise Differs(
                    f"the replay differs in {name} at update {int(e['version'])} of worker {who}: recorded {was}, "
                    f"now {now}"
                )
        if e["checksum"]:
            self.checksums += 1
            now = checksum(slot.weights)
            if now != int(e["checksum"]):
                raise Differs(
                    f"the replay differs in the weights at update {slot.version}, applied by worker {who}: checksum "
                    f"recorded {int(e['checksum']):016x}, now {now:016x}; all gradients up to here were the same"
                )

    def _compare_checkpoint(self, at: int, final: int) -> bool:
        """Whether a checkpoint of exactly this moment exists; its weights must be ours."""
        for path in checkpoint.found(self.directory):
            state = checkpoint.Loaded(path).state
            if state["entries"] == at:
                if state["weights_checksum"] != final:
                    raise Differs(f"the weights after {at} contributions are not those of {path}")
                return True
        return False
