"""Writes what a run measures: `metrics.jsonl` and TensorBoard, the same numbers in both."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config import Watch
from slipstream.counters import Counter
from slipstream.store import Snapshot, Store, Word
from slipstream.watch.append import Appender


class Writer:
    """One a run. A full disk loses points, not the run."""

    def __init__(self, directory: Path, options: Watch, pieces: list[Any], first_step: int | None) -> None:
        """`pieces`: name, shape and offset of each parameter; `first_step`: where a resumed run goes on."""
        self.directory, self.options, self.pieces, self.first_step = directory, options, pieces, first_step
        self.events: Any = None
        if first_step is not None:
            _cut(directory / "metrics.jsonl", first_step)
        self.metrics = Appender(directory / "metrics.jsonl")
        self.next_histograms = 0.0
        self.last = -1 if first_step is None else first_step - 1

    def write(self, metrics: dict[str, Any], store: Store) -> None:
        """One look: a line, a point of each curve, and histograms when they are due."""
        if metrics["steps"] <= self.last:  # x is global steps and only grows
            return
        self.last = metrics["steps"]
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        with suppress(OSError):
            self.metrics.add((json.dumps(clean) + "\n").encode())
        if not self.options.tensorboard:
            return
        with suppress(OSError):
            if self.events is None:
                from slipstream.watch.tensorboard import Events

                self.events = Events(self.directory, self.first_step)
            self.events.scalars(metrics)
            every = self.options.histograms_every
            if every and time.monotonic() >= self.next_histograms:
                self.next_histograms = time.monotonic() + every
                self._histograms(metrics["steps"], store)

    def _histograms(self, steps: int, store: Store) -> None:
        snapshot = Snapshot(np.zeros(store.layout.weights, np.float32), store.layout.moments)
        store.read(snapshot)
        # the gradient asked for at the last look, if a worker has left one
        gradient = store.gradients[-1] if not store.control[Word.SAMPLE_WANTED] and store.gradients[-1].any() else None
        for name, shape, offset in self.pieces:
            span = slice(offset, offset + int(np.prod(shape)))
            self.events.histogram(f"weights/{name}", steps, snapshot.weights[span])
            if gradient is not None:
                self.events.histogram(f"gradients/{name}", steps, gradient[span])
        store.control[Word.SAMPLE_WANTED] = 1
        self.events.counts("asynchrony/staleness", steps, store.rows[:, Counter.HISTOGRAM :].sum(0))

    def close(self) -> None:
        """Close the files."""
        self.metrics.close()
        if self.events is not None:
            with suppress(OSError):
                self.events.close()


def _cut(file: Path, first_step: int) -> None:
    """Forget the lines after a checkpoint that a resumed run goes on from: it will do those steps again."""
    with suppress(OSError):
        raw, kept = file.read_bytes(), 0
        for line in raw.splitlines(keepends=True):
            try:
                if json.loads(line)["steps"] >= first_step:
                    break
            except ValueError:  # cut off by a kill
                break
            kept += len(line)
        os.truncate(file, kept)
