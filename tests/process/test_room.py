"""/dev/shm too small, and a disk that fills up while a run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from harness import COMMAND, Live, Outcome, environment, family, finish, resume, start, until

import slipstream as ss
from slipstream.store import Word

UNSHARE = ["unshare", "-m", "--propagation", "private"]


def may_mount() -> bool:
    try:
        done = subprocess.run(
            [*UNSHARE, "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /mnt"], capture_output=True, check=False
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


pytestmark = pytest.mark.skipif(not may_mount(), reason="needs mount namespaces and the right to mount")


def test_small_shared_memory(tmp_path: Path) -> None:
    """64 KiB, as in a container with --shm-size: a file elsewhere is used, and the log says so."""
    script = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    arguments = ["train", "CartPole-v1", "--workers", "1", "--total-steps", "2000", "--run", str(tmp_path / "r")]
    process = start("sh", "-c", script, "sh", *COMMAND, *arguments, "--json", program=UNSHARE)
    done = finish(process)
    assert done.code == 0, done
    assert done.json["steps"] >= 2000
    (line,) = Outcome(tmp_path / "r").log("/dev/shm is too small")
    assert line["level"] == "warning"
    assert str(os.environ.get("TMPDIR", "/tmp")) in line["message"]


class SmallDisk:
    """A process that holds a tmpfs of 3 MiB in a mount namespace of its own."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        script = f"mount -t tmpfs -o size=3m tmpfs {place} && echo ready && exec sleep 600"
        self.process = subprocess.Popen([*UNSHARE, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.inside = ["nsenter", "-m", "-t", str(self.process.pid)]
        self.seen = Path(f"/proc/{self.process.pid}/root{place}")  # the same place, from outside

    def fill(self) -> None:
        """Use up every byte."""
        with (self.seen / "filler").open("ab", buffering=0) as file:
            for size in (65536, 4096, 1):
                try:
                    while file.write(b"x" * size) == size:
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        """Make room again."""
        (self.seen / "filler").unlink()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def disk(tmp_path: Path) -> SmallDisk:  # type: ignore[misc]
    made = SmallDisk(tmp_path / "disk")
    yield made
    made.close()


def test_disk_full(disk: SmallDisk, tmp_path: Path) -> None:
    place = tmp_path / "disk" / "r"
    seen, slow = disk.seen / "r", tmp_path / "slow"
    slow.touch()  # few updates to replay
    train = [
        *COMMAND, "train", "bad_envs:Bad-v0", "--env-kwargs", f"{{slow: {slow}}}", "--copies", "2",
        "--algo.rollout-steps", "5", "--workers", "2", "--total-steps", "1_000_000_000",
        "--run", str(place), "--watch.checkpoint-every", "0.5", "--watch.every", "0.2", "--show", "plain",
    ]  # fmt: skip
    process = start(*train, program=disk.inside, cwd=tmp_path)
    live = Live(process.pid, place)
    saved = lambda: sorted(p.name for p in (seen / "checkpoints").glob("[0-9]*"))  # noqa: E731
    until(saved, what="a checkpoint")

    disk.fill()
    until(lambda: live.store.control[Word.DISK_FULL], what="a worker that waits for room")
    before = live.steps
    assert live.rate(1.0) == 0
    kept = saved()
    disk.free()
    live.steps_reach(before + 500)  # training goes on by itself
    until(lambda: saved()[-1] > kept[-1], what="a later checkpoint")

    disk.fill()
    until(lambda: live.store.control[Word.DISK_FULL])
    kept = saved()
    os.kill(process.pid, signal.SIGINT)
    done = finish(process, 10)
    assert done.code == 130
    assert "is full: training waits until there is room" in done.out
    assert "checkpoint not written (No space left on device); the previous one is kept" in done.out
    assert "could not be saved" in done.err
    assert "Traceback" not in done.out + done.err
    assert not family(process.pid)
    assert saved() == kept
    assert not list((seen / "checkpoints").glob(".*"))  # no half one

    disk.free()
    slow.unlink()
    assert [json.loads(text) for text in (seen / "metrics.jsonl").read_text().splitlines()]
    again = resume(seen, backend="thread", total_steps=int(kept[-1]) + 200)
    assert again.error is None
    assert again.log(f"resuming at step {int(kept[-1])}")
    assert ss.replay(seen).identical


def test_no_room_at_all(disk: SmallDisk, tmp_path: Path) -> None:
    """The disk is full from the start: one sentence."""
    disk.fill()
    done = subprocess.run(
        [*disk.inside, *COMMAND, "train", "CartPole-v1", "--run", str(tmp_path / "disk" / "r")],
        capture_output=True, text=True, env=environment(), check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr
