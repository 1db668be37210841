"""TensorBoard events: one writer a run, x is always global environment steps.

TensorBoard's own writer hands events to a thread, which keeps them back for two minutes and dies with a
traceback when the disk is full; here each look is written at once, whole or not at all.
"""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.watch.append import Appender

TAGS = {
    "return_interval": "episode/return",
    "return": "episode/return_window",
    "length_interval": "episode/length",
    "loss": "loss/total",
    "policy_loss": "loss/policy",
    "value_loss": "loss/value",
    "entropy": "loss/entropy",
    "explained_variance": "loss/explained_variance",
    "gradient_norm": "gradient/norm",
    "gradient_norm_clipped": "gradient/norm_clipped",
    "clipped_share": "gradient/clipped_share",
    "learning_rate": "schedule/learning_rate",
    "staleness_mean": "asynchrony/staleness_mean",
    "staleness_p99": "asynchrony/staleness_p99",
    "wait_share": "asynchrony/wait_share",
    "reads_overlapped_share": "asynchrony/reads_overlapped_share",
    "steps_per_second": "speed/steps_per_second",
    "updates_per_second": "speed/updates_per_second",
    "bytes_per_second": "speed/bytes_per_second",
    "memory_mib": "machine/memory_mib",
    "cores_busy": "machine/cores_busy",
}


class Events:
    """Writes scalars and histograms; a resumed run continues the curves after its first step."""

    def __init__(self, directory: Path, purge_step: int | None) -> None:
        """Open `directory/tensorboard`. Points at or after `purge_step` of an earlier part are hidden."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.Event, self.Summary, self.Histogram, self.Record = Event, Summary, HistogramProto, RecordWriter
        room = directory / "tensorboard"
        room.mkdir(exist_ok=True)
        # the names sort in the order of the parts of a run
        path = room / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = Appender(path)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def _add(self, event: Any) -> None:
        framed = io.BytesIO()
        self.Record(framed).write(event.SerializeToString())
        self.file.add(framed.getvalue())

    def scalars(self, metrics: dict[str, Any]) -> None:
        """One point of each metric."""
        step = int(metrics["steps"])
        values = {tag: metrics[name] for name, tag in TAGS.items() if name in metrics}
        for w, rate in enumerate(metrics.get("worker_steps_per_second", ())):
            values[f"workers/{w}_steps_per_second"] = rate
        summary = self.Summary(
            value=[self.Summary.Value(tag=tag, simple_value=float(v)) for tag, v in values.items() if np.isfinite(v)]
        )
        self._add(self.Event(wall_time=time.time(), step=step, summary=summary))

    def histogram(self, tag: str, step: int, values: NDArray[Any]) -> None:
        """A histogram of the finite values; how many were not is a scalar of its own."""
        flat = np.asarray(values, np.float64).ravel()
        good = flat[np.isfinite(flat)]
        made = [self.Summary.Value(tag=f"{tag}_not_finite", simple_value=float(len(flat) - len(good)))]
        if len(good):
            counts, edges = np.histogram(good, bins=30)
            histo = self.Histogram(
                min=good.min(), max=good.max(), num=len(good), sum=good.sum(), sum_squares=(good**2).sum(),
                bucket_limit=edges[1:].tolist(), bucket=counts.tolist(),
            )  # fmt: skip
            made.append(self.Summary.Value(tag=tag, histo=histo))
        self._add(self.Event(wall_time=time.time(), step=step, summary=self.Summary(value=made)))

    def counts(self, tag: str, step: int, histogram: NDArray[np.float64]) -> None:
        """A histogram given as counts of 0, 1, 2, … (staleness)."""
        n, bins = histogram.sum(), np.arange(len(histogram))
        if not n:
            return
        top = int(np.flatnonzero(histogram)[-1]) + 1
        histo = self.Histogram(
            min=0, max=top, num=n, sum=(histogram * bins).sum(), sum_squares=(histogram * bins**2).sum(),
            bucket_limit=(bins[:top] + 0.5).tolist(), bucket=histogram[:top].tolist(),
        )  # fmt: skip
        value = self.Summary.Value(tag=tag, histo=histo)
        self._add(self.Event(wall_time=time.time(), step=step, summary=self.Summary(value=[value])))

    def close(self) -> None:
        """Close the file."""
        self.file.close()
