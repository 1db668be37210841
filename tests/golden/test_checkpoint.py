"""Checkpoints: whole or not there, verified, and never code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import helpers
from slipstream import checkpoint
from slipstream.checkpoint import Loaded, found, newest, read_part, save_checkpoint, write_file, write_part
from slipstream.errors import ConfigError
from slipstream.optimize import state_layout
from slipstream.store import Header, Layout

N = 20
STATE = {"config": {"env": "Ünïcode-v0", "hidden": (64, 64)}, "incarnations": {"0": 2}, "returns": [1.5, float("inf")]}


@pytest.fixture
def slot(tmp_path):
    layout = Layout(N, state_layout("adam", N), 3, workers=1)
    with helpers.open_store(tmp_path, layout, np.arange(N, dtype=np.float32)) as store:
        slot = store.slots[0]
        for i, piece in enumerate(slot.optimizer.values()):
            piece[:] = i + 0.5
        slot.moments[:] = [2, 1e-300, np.pi]
        slot.header[: Header.CHECKSUM] = 11, 7, 1234, 9
        yield slot


@pytest.fixture
def run(tmp_path, slot):
    """A run directory with checkpoints at steps 1234 and 2000; the second is of changed weights."""
    directory = tmp_path / "run"
    directory.mkdir()
    save_checkpoint(directory, slot, STATE, [], 3)
    slot.weights += 1
    slot.header[Header.STEPS] = 2000
    worker = directory / "3.state"
    write_part(worker, {"rollouts": 5}, {"obs": np.ones(2)})
    save_checkpoint(directory, slot, STATE, [worker], 3)
    assert not worker.exists()
    return directory


def test_everything_comes_back(run, slot):
    loaded = newest(run)
    assert loaded.path.name == "000000002000"
    expected = {
        "tick": 11, "version": 7, "steps": 2000, "entries": 9, "config": {"env": "Ünïcode-v0", "hidden": [64, 64]}
    }  # fmt: skip
    assert expected.items() <= loaded.state.items()
    assert loaded.state["returns"] == [1.5, float("inf")]
    assert read_part(loaded.workers[3])[0] == {"rollouts": 5}
    before = slot.bytes.copy()
    slot.bytes[:] = 0
    loaded.fill(slot)
    np.testing.assert_array_equal(slot.bytes, before)


def test_saving_what_was_loaded_gives_the_same_bytes(run, slot, tmp_path):
    loaded = newest(run)
    slot.bytes[:] = 0
    loaded.fill(slot)
    again = tmp_path / "again"
    again.mkdir()
    state = {k: v for k, v in loaded.state.items() if k not in ("format", "files")}
    path = save_checkpoint(again, slot, state, [], 1)
    a, b = ((p / "store.safetensors").read_bytes() for p in (loaded.path, path))
    assert a == b
    assert Loaded(path).state | {"files": 0} == loaded.state | {"files": 0}


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(tmp_path, slot, keep):
    for steps in (5, 50, 500, 5000):
        slot.header[Header.STEPS] = steps
        save_checkpoint(tmp_path, slot, STATE, [], keep)
    assert [int(p.name) for p in found(tmp_path)] == [5, 50, 500, 5000][-keep:]
    assert newest(tmp_path).state["steps"] == 5000


@pytest.mark.parametrize("keep", [1, 3])
def test_the_same_step_may_be_saved_again_and_again(run, slot, keep):
    """A run that is resumed with nothing left to do; the last save counts, in order beyond ten."""
    for i in range(15):
        slot.weights[:] = i
        save_checkpoint(run, slot, STATE, [], keep)
        assert (newest(run).arrays["weights"] == i).all()
        assert len(found(run)) <= keep
    assert {p.name.partition(".")[0] for p in found(run)} == {"000000002000"}
    slot.header[Header.STEPS] = 2001
    save_checkpoint(run, slot, STATE, [], keep)
    assert newest(run).state["steps"] == 2001


def test_other_things_in_the_folder_are_left_alone(run, slot):
    for name in ("1.backup", "2 copy"):
        shutil.copytree(found(run)[0], run / "checkpoints" / name)
    save_checkpoint(run, slot, STATE, [], 1)
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"1.backup", "2 copy", "000000002000.1"}


# -- damage ----------------------------------------------------------------------------------------


def assert_passed_over(run, said):
    """The damaged newest checkpoint is refused by name, and the one before it is used."""
    damaged = found(run)[-1]
    with pytest.raises(ConfigError, match=said):
        Loaded(damaged)
    assert newest(run).state["steps"] == 1234
    assert newest(run).arrays["weights"][1] == 1
    shutil.rmtree(found(run)[0])
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        newest(run)


@pytest.mark.parametrize("name", ["store.safetensors", "state.json", "3.state"])
@pytest.mark.parametrize("left", [0, 7, 0.5, -1])
def test_a_torn_file_is_passed_over(run, name, left):
    file = found(run)[-1] / name
    data = file.read_bytes()
    file.write_bytes(data[: int(left * len(data)) if isinstance(left, float) else left])
    assert_passed_over(run, name)


@pytest.mark.parametrize("name", ["store.safetensors", "state.json", "3.state"])
def test_a_missing_file_is_passed_over(run, name):
    (found(run)[-1] / name).unlink()
    assert_passed_over(run, name)


@settings(max_examples=150)
@given(name=st.sampled_from(["store.safetensors", "state.json", "3.state"]), at=st.floats(0, 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_wherever_it_is(run, name, at, bit):
    file = found(run)[-1] / name
    whole = file.read_bytes()
    data = bytearray(whole)
    data[int(at * (len(data) - 1))] ^= 1 << bit
    file.write_bytes(data)
    try:
        same = name == "state.json" and _reads_the_same(bytes(data), whole)
        if not same:  # such as a space for another space
            assert newest(run).state["steps"] == 1234
    finally:
        file.write_bytes(whole)


def _reads_the_same(a, b):
    try:
        return json.loads(a) == json.loads(b)
    except ValueError:
        return False


def test_json_that_is_no_state_is_passed_over(run):
    for text in ("[]", "3", "null", '{"format": 1}', '{"format": 1, "files": 3}'):
        (found(run)[-1] / "state.json").write_text(text)
        assert newest(run).state["steps"] == 1234


def test_another_format_is_named(run):
    file = found(run)[-1] / "state.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ConfigError, match="format 99, this version reads 1"):
        Loaded(file.parent)
    assert newest(run).state["steps"] == 1234


def test_another_network_or_optimizer_is_refused(run, tmp_path):
    loaded = newest(run)
    for kind, size, moments in (("adam", N + 16, 3), ("rmsprop", N, 3), ("adam", N, 5)):
        layout = Layout(size, state_layout(kind, size), moments, workers=1)
        with (
            helpers.open_store(tmp_path, layout, np.zeros(size, np.float32)) as store,
            pytest.raises(ConfigError, match="must be those it was trained with"),
        ):
            loaded.fill(store.slots[0])


def test_nothing_there(tmp_path):
    with pytest.raises(ConfigError, match="no such run directory"):
        newest(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        newest(tmp_path)


# -- writing ---------------------------------------------------------------------------------------


def test_what_a_kill_left_is_swept_and_never_loaded(run, slot):
    stale = run / "checkpoints" / ".000000009999.123.tmp"
    shutil.copytree(found(run)[-1], stale)
    assert newest(run).state["steps"] == 2000
    slot.header[Header.STEPS] = 3000
    save_checkpoint(run, slot, STATE, [], 3)
    assert not stale.exists()


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_disk_that_fails_leaves_the_previous_checkpoint(run, slot, monkeypatch, failing):
    """Whichever call runs out of space: an OSError, nothing half-written, the old ones whole."""
    real, calls = getattr(os, failing), []

    def fail(*args):
        calls.append(args)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(*args)

    slot.header[Header.STEPS] = 3000
    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(run, slot, STATE, [], 1)
    monkeypatch.undo()
    assert [int(p.name) for p in found(run)] == [1234, 2000]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["000000001234", "000000002000"]
    assert newest(run).state["steps"] == 2000


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    file = tmp_path / "a"
    write_file(file, b"old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space")))
    with pytest.raises(OSError, match="No space"):
        write_file(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


ARRAYS = {
    "f4": np.array([[1.5, np.nan], [np.inf, -0.0]], np.float32), "f8": np.array([np.pi]), "i8": np.array([-(2**62)]),
    "u1": np.arange(6, dtype=np.uint8).reshape(1, 2, 3), "flags": np.array([True, False]), "scalar": np.array(3.25),
    "none": np.zeros((2, 0), np.float32), "turned": np.arange(6).reshape(2, 3).T, "every second": np.arange(8)[::2],
}  # fmt: skip


def test_values_and_arrays_of_every_kind_come_back(tmp_path):
    values = {"big": 2**127 + 1, "text": "ä\n", "nothing": None, "nested": {"list": [1, 2.5, True]}}
    for arrays in (ARRAYS, {}):
        write_part(tmp_path / "part", values, arrays)
        got_values, got = read_part(tmp_path / "part")
        assert got_values == values
        assert got.keys() == arrays.keys()
        for name, array in arrays.items():
            assert got[name].dtype == array.dtype
            assert got[name].shape == array.shape
            np.testing.assert_array_equal(got[name], array)


# -- hostile files ---------------------------------------------------------------------------------


class Hostile:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (open, (self.marker, "w"))


@pytest.mark.parametrize("write", ["pickle", "torch", "numpy"])
def test_a_file_that_would_run_code_is_refused(run, tmp_path, write):
    marker, file = tmp_path / "marker", found(run)[-1] / "store.safetensors"
    if write == "pickle":
        file.write_bytes(pickle.dumps({"weights": Hostile(marker)}))
    elif write == "torch":
        torch.save({"weights": Hostile(marker)}, file)
    else:
        with open(file, "wb") as opened:
            np.save(opened, np.array([Hostile(marker)], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match=r"store\.safetensors"):
        Loaded(file.parent)
    with pytest.raises(ConfigError, match="cannot be read"):  # even where its checksum is right
        read_part(file)
    assert newest(run).state["steps"] == 1234
    assert not marker.exists()


def test_nothing_that_loads_files_imports_pickle():
    """The checkpoint's own code; libraries may have it loaded."""
    source = Path(checkpoint.__file__).read_text()
    for word in ("import pickle", "torch.load", "allow_pickle", "cloudpickle"):
        assert word not in source
