"""Pictures become a file, `.mp4` or `.gif`, each as soon as it is drawn: a video may be of any length.

The file has another name until it is whole.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError, RunFailed

Array = NDArray[Any]
FASTEST_GIF = 50.0  # frames a second: browsers show shorter delays than 0.02 s as 0.1 s


def check(out: Path) -> None:
    """Refuse what cannot be written, before anything is played.

    Raises:
        ConfigError: another suffix, a missing extra, or a directory.
    """
    if out.suffix.lower() not in KINDS:
        raise ConfigError(f"out: {out} ends in neither {' nor '.join(KINDS)}")
    try:
        importlib.import_module("imageio_ffmpeg")
    except ImportError:
        raise ConfigError("a video needs imageio_ffmpeg: pip install 'slipstream-rl[video]'") from None
    if out.is_dir():
        raise ConfigError(f"out: {out} is a directory")


@contextmanager
def written(out: Path, fps: float) -> Iterator[Film]:
    """What takes the frames of a file, which gets its name at the end; of one that fails nothing is left.

    Raises:
        ConfigError: its directory cannot be made.
        RunFailed: it cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as e:
        raise ConfigError(f"out: cannot make {out.parent}: {e.strerror}") from None
    temporary = out.with_name(f".{out.stem}.{os.getpid()}{out.suffix.lower()}")
    film = Film(temporary, fps)
    try:
        yield film
        if film.frames:
            film.finish()
            os.replace(temporary, out)
    finally:
        film.close()
        temporary.unlink(missing_ok=True)


class Film:
    """Frames on their way through ffmpeg into a file."""

    def __init__(self, path: Path, fps: float) -> None:
        self.path, self.fps, self.frames = path, fps, 0
        self.even = path.suffix == ".mp4"  # H.264 needs it: odd sizes get a row or column more
        self.shape: tuple[int, ...] = ()
        self.process: subprocess.Popen[bytes] | None = None
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe nobody reads would fill)

    def add(self, frame: Array) -> None:
        """Encode one frame, uint8 `[height, width, 3]`."""
        height, width = frame.shape[:2]
        if self.even:
            frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), "edge")
        if self.process is None:
            self.shape, self.process = frame.shape, self._start(*frame.shape[:2])
        if frame.shape != self.shape:
            raise RunFailed(f"the environment's pictures changed their size from {self.shape} to {frame.shape}")
        try:
            cast(BinaryIO, self.process.stdin).write(frame.tobytes())
        except BrokenPipeError:
            raise self._failed() from None
        self.frames += 1

    def _start(self, height: int, width: int) -> subprocess.Popen[bytes]:
        import imageio_ffmpeg

        try:
            program = imageio_ffmpeg.get_ffmpeg_exe()
        except RuntimeError as e:
            raise ConfigError(f"a video needs ffmpeg: {e}") from None
        return subprocess.Popen(
            [program, "-y", "-v", "error", "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}",
             "-r", f"{self.fps:.10g}", "-i", "-", *KINDS[self.path.suffix], str(self.path.resolve())],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self.said,
            start_new_session=True,  # Ctrl-C is for us
        )  # fmt: skip

    def _failed(self) -> RunFailed:
        cast(subprocess.Popen[bytes], self.process).wait()
        self.said.seek(0)
        return RunFailed(f"ffmpeg could not write the video: {self.said.read().decode(errors='replace').strip()}")

    def finish(self) -> None:
        """Write what is still in the encoder."""
        process = cast(subprocess.Popen[bytes], self.process)
        try:
            cast(BinaryIO, process.stdin).close()
        except BrokenPipeError:
            raise self._failed() from None
        if process.wait() != 0:
            raise self._failed()

    def close(self) -> None:
        """Release everything, in whatever state it is."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.said.close()


KINDS = {  # how ffmpeg writes each suffix; every browser plays them
    ".mp4": [
        "-an",
        "-c:v",
        "libx264",
        "-crf",
        "20",
        "-pix_fmt",
        "yuv420p",
        "-movflags",
        "+faststart",
    ],  # every browser plays it
    # 256 colours of its own for each frame: nothing has to wait for the last one
    ".gif": [
        "-vf",
        "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1:dither=none",
        "-gifflags",
        "-transdiff",
        "-loop",
        "0",
    ],
}
