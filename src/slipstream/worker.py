"""THE LOOP: pull -> collect -> loss -> gradient (clip, NaN guard) -> push.

What a worker computes is a pure function of its seeds and of the snapshots it pulled, in order. Nothing else
may enter: that is what makes a recorded run replayable.
"""

from __future__ import annotations

import math
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch

from slipstream import build, checkpoint
from slipstream.build import Role
from slipstream.config import Given, Run, module
from slipstream.counters import RING, Counter, Phase
from slipstream.errors import RunFailed
from slipstream.nets.policy import flatten
from slipstream.rollout import Rollout
from slipstream.store import Contribution, Snapshot, Store, Word
from slipstream.watch.log import Log

TERMS = {
    "loss": Counter.LOSS,
    "policy_loss": Counter.POLICY_LOSS,
    "value_loss": Counter.VALUE_LOSS,
    "entropy": Counter.ENTROPY,
    "approx_kl": Counter.KL,
    "clip_fraction": Counter.CLIP_FRACTION,
}


class Worker:
    """Acts and computes gradients in one (the joined topology); knows nothing of rules or processes."""

    def __init__(self, run: Run, given: Given, index: int, incarnation: int, row: Any, log: Any, bad: Path) -> None:
        self.run, self.index, self.incarnation, self.row, self.log = run, index, incarnation, row, log
        self.algorithm = module("algos", run.algorithm)
        self.env = build.environment(run, given, run.copies, build.seeds(run, Role.ENVIRONMENT, index, incarnation))
        self.policy = build.policy_for(run, given, self.env)
        weights, self.gradient = flatten(self.policy)
        self.flat_gradient = torch.from_numpy(self.gradient)
        self.normalizer = build.normalizer_for(run, self.env)
        self.snapshot = Snapshot(weights, self.normalizer.size)
        self.collector = build.collector(run, self.env, self.policy, self.normalizer, index, incarnation, row)
        self.compressor = build.compressor(run, index, incarnation, len(weights))
        self.needs_read = run.rule.delay_compensation != "none"
        self.no_moments = np.zeros(self.normalizer.size)
        self.minibatches = hasattr(self.algorithm, "prepare")
        self.data: dict[str, Any] = {}  # the rollout as minibatches are cut from it
        self.left = 0  # minibatches of it not yet learned from
        self.rollouts = 0
        self.last_loss, self.last_norm = 0.0, 0.0  # fingerprints of the last gradient, for the record
        self.bad = bad

    def compute(self, stopped: Any = lambda: False) -> tuple[Contribution, Rollout | None] | None:
        """The next gradient, of the snapshot's weights; with the rollout if that was collected for it.

        An algorithm with minibatches (`prepare`) goes over a rollout in several calls, each with weights of its own.
        None if stopped.
        """
        row, snap, fresh = self.row, self.snapshot, None
        self.normalizer.use(snap.moments)
        row[Counter.PULLED] = snap.version
        self.last_loss = self.last_norm = 0.0
        finite = True
        if not self.left:
            fresh = self._collect(stopped)
            if fresh is None:
                return None
            finite = self._finite(fresh)
        begun = perf_counter()
        row[Counter.PHASE] = Phase.GRADIENT
        if fresh is not None and finite and self.minibatches:
            self.data = self.algorithm.prepare(self.run.algo, self.policy, fresh, self.collector.rng)
            self.left = len(self.data["order"])
        rows = self.rows
        finite = finite and self._learn(rows)
        self.left = max(0, self.left - 1)
        row[Counter.T_GRADIENT] += perf_counter() - begun
        c = Contribution(
            self.gradient, finite, 0 if self.left else self.collector.rollout.samples, snap.tick, snap.version,
            self.index, self.incarnation, self.rollouts - 1, fresh.moments if fresh is not None else self.no_moments,
            self.last_loss, self.last_norm, rows, snap.weights if self.needs_read else None,
        )  # fmt: skip
        if self.compressor is not None and finite:
            c.payload = self.compressor.encode(self.gradient, snap.steps)
        return c, fresh

    def _collect(self, stopped: Any) -> Rollout | None:
        """A rollout with the snapshot's weights; None if stopped."""
        row, version = self.row, self.snapshot.version
        row[Counter.PHASE] = Phase.COLLECT
        begun = perf_counter()
        rollout = self.collector.collect(version, stopped)
        if rollout is None:
            return None
        row[Counter.T_COLLECT] += perf_counter() - begun
        row[Counter.ROLLOUTS] += 1
        self.rollouts += 1
        for failure in rollout.failures:
            row[Counter.ENV_FAILURES] += 1
            self.log("warning", f"environment failed: {failure}", version=version)
        return rollout

    @property
    def rows(self) -> int:
        """Valid rows the next gradient is the mean of."""
        if not self.left:
            return self.collector.rollout.samples
        chosen = self.data["order"][len(self.data["order"]) - self.left]
        return int(self.data["valid"][:, chosen[chosen >= 0]].sum())

    def _loss(self) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss of the rollout, or of its next minibatch."""
        hyper, steps, end = self.run.algo, self.snapshot.steps, self.run.total_steps
        batch: Any = self.collector.rollout
        if self.left:
            batch = self.algorithm.minibatch(self.data, len(self.data["order"]) - self.left)
        found: tuple[torch.Tensor, dict[str, float]] = self.algorithm.loss(hyper, self.policy, batch, steps, end)
        return found

    def _learn(self, rows: int) -> bool:
        """Fill `self.gradient`, clipped to the global norm; False if it is not finite."""
        hyper, row = self.run.algo, self.row
        self.flat_gradient.zero_()
        if not rows:
            return True  # nothing but resets: a gradient of 0
        loss, terms = self._loss()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.linalg.vector_norm(self.flat_gradient))
        self.last_loss, self.last_norm = terms["loss"], norm
        if not (math.isfinite(norm) and math.isfinite(terms["loss"])):
            wrong = [k for k in TERMS if not math.isfinite(terms.get(k, 0.0))] or ["gradient"]
            self._keep(self.collector.rollout, f"{' and '.join(wrong)} not finite (gradient norm {norm})")
            return False
        clipped = norm
        if 0 < hyper.max_gradient_norm < norm:
            self.flat_gradient.mul_(hyper.max_gradient_norm / norm)
            clipped = hyper.max_gradient_norm
            row[Counter.CLIPPED] += 1
        row[Counter.LEARNED] += 1
        for name, counter in TERMS.items():
            row[counter] += terms.get(name, 0.0)
        if math.isfinite(terms["explained_variance"]):
            row[Counter.EXPLAINED_VARIANCE] += terms["explained_variance"]
        row[Counter.GRADIENT_NORM] += norm
        row[Counter.GRADIENT_NORM_CLIPPED] += clipped
        row[Counter.NONFINITE_IN_A_ROW] = 0
        if self.minibatches and self.algorithm.too_far(hyper, terms):
            self.left = 1  # the rest of this rollout is left
        return True

    def _finite(self, rollout: Rollout) -> bool:
        """Whether the environment gave numbers only; copies that did not begin a new episode."""
        c = self.collector  # what it was given, not what normalization and its bounds made of that
        good = np.isfinite(c.raw_reward)
        seen = rollout.obs if c.raw is None else c.raw
        if seen.dtype.kind == "f":
            good = good & np.isfinite(seen[1:]).reshape(*good.shape, -1).all(-1)
        if bool(good.all()):
            return True
        t, b = (int(i[0]) for i in np.nonzero(~good))
        what = "reward" if not np.isfinite(c.raw_reward[t, b]) else "observation"
        self._keep(rollout, f"{what} of environment copy {b} not finite at step {t} of the rollout")
        self.collector.drop(np.flatnonzero(~good.all(0)))
        return False

    def _keep(self, rollout: Rollout, why: str) -> None:
        """Save a rollout that gave NaN or Inf, and give up if there are too many in a row."""
        row, version = self.row, self.snapshot.version
        row[Counter.NONFINITE] += 1
        row[Counter.NONFINITE_IN_A_ROW] += 1
        file = self.bad / f"worker{self.index}-{self.incarnation}-rollout{self.rollouts}.npz"
        arrays: dict[str, Any] = {k: v for k, v in vars(rollout).items() if isinstance(v, np.ndarray)}
        arrays["raw_reward"] = self.collector.raw_reward
        if self.collector.raw is not None:
            arrays["raw_obs"] = self.collector.raw
        try:
            file.parent.mkdir(exist_ok=True)
            if len(list(file.parent.iterdir())) < 100:
                np.savez_compressed(file, weights=self.snapshot.weights, **arrays)
        except OSError as e:
            self.log("warning", f"could not save the rollout: {e}")
        said = f"worker {self.index}, update {version}: {why}; gradient dropped, rollout in {file}"
        self.log("warning", said, version=version)
        if row[Counter.NONFINITE_IN_A_ROW] > self.run.limits.max_nonfinite:
            raise RunFailed(f"{int(row[Counter.NONFINITE_IN_A_ROW])} gradients in a row were not finite. {said}")

    def report(self, rollout: Rollout, store: Store, steps_before: int) -> None:
        """Put finished episodes where the parent reads them: (return, length, global steps, time)."""
        ring, row = store.rings[self.index], self.row
        per_row = rollout.valid.sum(1).cumsum()
        for t, total, length in rollout.episodes:
            head = int(row[Counter.EPISODE_HEAD])
            ring[head % RING] = total, length, steps_before + int(per_row[t]), perf_counter()
            row[Counter.EPISODE_HEAD] = head + 1
            row[Counter.EPISODES] += 1

    def save(self) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Everything this worker would go on from, as (JSON values, arrays)."""
        from slipstream.envs.snapshot import generator_state

        c = self.collector
        arrays = {
            "obs": c.obs, "starts": c.starts, "state": c.state, "returns": c.returns, "lengths": c.lengths,
            "discounted": c.discounted,
        }  # fmt: skip
        if c.mask is not None:
            arrays["mask"] = c.mask
        values = {
            "index": self.index, "incarnation": self.incarnation, "rollouts": self.rollouts,
            "rng": generator_state(c.rng), "env": None,
        }  # fmt: skip
        if self.left:
            values["left"], values["samples"] = self.left, c.rollout.samples
            arrays |= {f"data.{k}": v for k, v in self.data.items()}
        if self.compressor is not None:
            values["compressor"], kept = self.compressor.save()
            arrays |= {f"compressor.{k}": v for k, v in kept.items()}
        env = self.env.save()
        if env is not None:
            values["env"] = env[0]
            arrays |= {f"env.{k}": v for k, v in env[1].items()}
        return values, arrays

    def restore(self, values: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Go on from what `save` gave.

        Raises:
            ValueError: the environment's state could not be saved or does not come back.
        """
        from slipstream.envs.snapshot import generator_from

        if values["env"] is None:
            raise ValueError("the state of this environment cannot be saved")
        c = self.collector
        if arrays["obs"].shape != c.obs.shape:
            raise ValueError("the number of environment copies has changed")
        self.env.restore(values["env"], {k[4:]: v for k, v in arrays.items() if k.startswith("env.")})
        c.obs, c.starts = arrays["obs"].copy(), arrays["starts"].astype(bool)
        c.state, c.returns, c.lengths = (
            arrays["state"].copy(),
            arrays["returns"].copy(),
            arrays["lengths"].copy(),
        )
        c.discounted = arrays["discounted"].copy()
        c.mask = arrays["mask"].astype(bool) if "mask" in arrays else None
        c.rng = generator_from(values["rng"])
        self.left = values.get("left", 0)
        self.data = {k[5:]: v for k, v in arrays.items() if k.startswith("data.")}
        c.rollout.samples = values.get("samples", 0)
        if self.compressor is not None and "compressor" in values:
            kept = {k[11:]: v for k, v in arrays.items() if k.startswith("compressor.")}
            self.compressor.restore(values["compressor"], kept)
        self.rollouts = values["rollouts"]


def loop(worker: Worker, rule: Any, store: Store, directory: Path) -> None:
    """Run a worker until the run's steps are used up or the parent says stop."""
    run, row, control = worker.run, store.row, store.control

    def stopped() -> bool:
        return bool(control[Word.STOP])

    while True:
        begun = perf_counter()
        rule.pull(worker.snapshot)
        row[Counter.T_PULL] += perf_counter() - begun
        row[Counter.BEAT] += 1
        if control[Word.PAUSE] > row[Counter.PAUSED] and worker.snapshot.tick >= control[Word.PAUSE_TICK]:
            pause(worker, store, directory)
            continue  # the newest version again: nobody moved meanwhile
        if worker.snapshot.steps >= run.total_steps:
            write_state(worker, directory)
            break
        if stopped():  # the parent has asked for states by a pause before
            break
        done = worker.compute(stopped)
        if done is None:
            break
        contribution, rollout = done
        if rollout is not None:
            worker.report(rollout, store, worker.snapshot.steps)
        rule.push(contribution)
    rule.leave()
    row[Counter.PHASE] = Phase.LEFT


def pause(worker: Worker, store: Store, directory: Path) -> None:
    """Wait at the boundary of a rollout, with nothing in flight, until the parent has looked."""
    row, control = store.row, store.control
    request = int(control[Word.PAUSE])
    row[Counter.PHASE] = Phase.PAUSED
    if control[Word.PAUSE_STATE]:
        write_state(worker, directory)
    row[Counter.PAUSED] = request
    while control[Word.RESUME] < request and not control[Word.STOP]:
        row[Counter.BEAT] += 1
        sleep(200e-6)


def write_state(worker: Worker, directory: Path) -> None:
    """Write `workers/N.state`, from which a resumed run goes on; a full disk does not end the worker."""
    try:
        checkpoint.write_part(directory / "workers" / f"{worker.index}.state", *worker.save())
    except OSError as e:
        worker.log("warning", f"could not write the worker's state: {e}")


def work(
    run: Run,
    given: Given,
    index: int,
    incarnation: int,
    store_path: str,
    directory: Path,
    resume: Path | None,
) -> None:
    """The life of one worker; what the supervisor starts.

    Args:
        run: what to do.
        given: Python objects that override names in `run`.
        index: which worker.
        incarnation: how often it had been started before.
        store_path: where the parameter store is.
        directory: the run directory.
        resume: a saved worker to go on from; it keeps its own incarnation unless its environment cannot.
    """
    from slipstream.record import Recorder

    recorded = run.record and run.update not in ("hogwild", "server")  # the server keeps the record itself
    recorder = Recorder(directory / "schedule.bin") if recorded else None
    store = Store(store_path, index, recorder)
    row = store.row
    row[Counter.PHASE] = Phase.STARTING
    log = Log(directory, worker=index)
    worker = None
    try:
        worker = _begin(run, given, index, incarnation, row, log, directory, resume)
        row[Counter.INCARNATION] = worker.incarnation
        log("info", "started", incarnation=worker.incarnation)
        loop(worker, build.rule(run, store, worker.env), store, directory)
    finally:
        if worker is not None:
            worker.env.close()
        store.close()
        log.close()
        if recorder is not None:
            recorder.close()


def _begin(
    run: Run, given: Given, index: int, incarnation: int, row: Any, log: Log, directory: Path, resume: Path | None
) -> Worker:  # fmt: skip
    """The worker, where it was saved if it can go on from there."""
    if resume is not None:
        values, arrays = checkpoint.read_part(resume)
        worker = Worker(run, given, index, values["incarnation"], row, log, directory / "bad")
        try:
            worker.restore(values, arrays)
            return worker
        except ValueError as e:
            log("warning", f"open episodes begin anew: {e}")
            worker.env.close()
    return Worker(run, given, index, incarnation, row, log, directory / "bad")
