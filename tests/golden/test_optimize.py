"""Optimizer steps on slots against the classes of torch.optim, whoever makes them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import helpers
from slipstream.moments import of_batch, size
from slipstream.optimize import Stepper, state_layout
from slipstream.store import Contribution, Header, Layout, Snapshot

N = 40
EPSILON, DECAY = 1e-5, 0.97
CLASSES = {
    "adam": lambda p, lr, **more: torch.optim.Adam([p], lr=lr, eps=EPSILON, **more),
    "rmsprop": lambda p, lr, **more: torch.optim.RMSprop([p], lr=lr, eps=EPSILON, alpha=DECAY, **more),
    "sgd": lambda p, lr, **more: torch.optim.SGD([p], lr=lr, **more),
}


@contextlib.contextmanager
def steppers(folder, kind, weights, handles=1, moments=(), epsilon=EPSILON):
    """[(handle on one store, its optimizer)]."""
    layout = Layout(len(weights), state_layout(kind, len(weights)), sum(moments), workers=handles)
    with helpers.open_store(folder, layout, weights, handles) as opened:
        opened = opened if handles > 1 else [opened]
        yield [(s, Stepper(s, kind, epsilon, DECAY, moments)) for s in opened]


def contribution(gradient, samples=1, finite=True, moments=None, worker=0):
    gradient = np.asarray(gradient, np.float32)
    moments = np.zeros(0) if moments is None else moments
    return Contribution(gradient, finite, samples, 0, 0, worker, 0, 0, moments)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("handles", [1, 3])
@pytest.mark.parametrize("kind", CLASSES)
def test_steps_equal_the_class_of_torch(tmp_path, kind, handles, foreach):
    """50 random gradients; each step by another worker's handle and in another slot, with a new rate."""
    rng = np.random.default_rng(0)
    begin = rng.normal(size=N).astype(np.float32)
    reference = torch.nn.Parameter(torch.from_numpy(begin.copy()))
    optimizer = CLASSES[kind](reference, 0.01, foreach=foreach)
    used = set()
    with steppers(tmp_path, kind, begin, handles) as workers:
        for i in range(50):
            gradient = (rng.normal(size=N) * 10 ** rng.uniform(-4, 1)).astype(np.float32)
            rate = 0.01 * (1 - i / 60)
            reference.grad = torch.from_numpy(gradient.copy())
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            store, stepper = workers[i % handles]
            with store.update() as slot:
                assert stepper.apply(slot, [contribution(gradient)], lambda steps, rate=rate: rate)
            used.add(store.tick % store.layout.slots)
            np.testing.assert_allclose(store.current.weights, reference.detach(), atol=1e-6, rtol=1e-6)
        assert used == set(range(4))
        assert store.current.optimizer["step"][0] == 50
        assert store.current.version == 50
        for name, pieces in store.current.optimizer.items():
            if name != "step":
                state = optimizer.state[reference][name].numpy()
                np.testing.assert_allclose(pieces, state, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("workers", "each"), [(1, 4), (4, 1), (2, 1), (2, 50)])
def test_the_step_count_of_adam_belongs_to_the_version(tmp_path, workers, each):
    """Gradient 1, rate 0.1: Adam moves by -0.1 a step, whoever makes it (-0.2344 after 2 with own counts)."""
    with steppers(tmp_path, "adam", np.zeros(N, np.float32), workers, epsilon=1e-8) as opened:
        for _ in range(each):
            for store, stepper in opened:
                with store.update() as slot:
                    stepper.apply(slot, [contribution(np.ones(N))], lambda steps: 0.1)
        np.testing.assert_allclose(store.current.weights, -0.1 * workers * each, rtol=1e-4)


def test_every_gradient_is_applied_once(tmp_path):
    """SGD, rate 1, gradient 1, four workers of 500 updates each."""
    with steppers(tmp_path, "sgd", np.zeros(1, np.float32), 4) as opened:
        one = contribution([1])
        for _ in range(500):
            for store, stepper in opened:
                with store.update() as slot:
                    stepper.apply(slot, [one], lambda steps: 1.0)
        assert store.current.weights[0] == -2000
        assert store.progress() == (2000, 2000)


@pytest.mark.parametrize(
    ("gradients", "samples", "mean"),
    [([2, 2, 2, 2], [5, 5, 5, 5], 2), ([1, 5], [10, 30], 4), ([1, 5], [0, 30], 5), ([3], [7], 3)],
)
def test_several_gradients_make_one_step_with_their_weighted_mean(tmp_path, gradients, samples, mean):
    with steppers(tmp_path, "sgd", np.zeros(N, np.float32)) as [(store, stepper)]:
        offered = [contribution(np.full(N, g), n) for g, n in zip(gradients, samples, strict=True)]
        with store.update() as slot:
            assert stepper.apply(slot, offered, lambda steps: 1.0)
        np.testing.assert_allclose(store.current.weights, -mean, rtol=1e-6)
        assert store.progress() == (1, sum(samples))
        assert [c.gradient[0] for c in offered] == gradients


@pytest.mark.parametrize("kind", CLASSES)
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_steps(tmp_path, kind):
    with steppers(tmp_path, kind, np.ones(N, np.float32), moments=(size(1),)) as [(store, stepper)]:
        bad = contribution(np.full(N, np.nan), 8, finite=False, moments=of_batch(np.array([[9.0]])))
        with store.update() as slot:
            assert not stepper.apply(slot, [bad], lambda steps: 0.1)
        slot = store.current
        assert (slot.weights == 1).all()
        assert not any(piece.any() for piece in slot.optimizer.values())
        assert not slot.moments.any()
        assert (store.tick, slot.version, slot.steps) == (1, 0, 8)
        good = contribution(np.full(N, 2), 4, moments=of_batch(np.array([[3.0]])))
        with store.update() as slot:
            assert stepper.apply(slot, [bad, good], lambda steps: 0.1)
        slot = store.current
        assert np.isfinite(slot.weights).all()
        assert (slot.weights < 1).all()
        assert slot.moments.tolist() == [1, 3, 0]
        assert (slot.version, slot.steps) == (1, 20)


def test_all_rows_without_samples_is_a_step_that_moves_nothing(tmp_path):
    """Every row of every rollout was a reset: 0 samples must not divide by 0."""
    with steppers(tmp_path, "sgd", np.ones(N, np.float32)) as [(store, stepper)]:
        with store.update() as slot:
            stepper.apply(slot, [contribution(np.zeros(N), 0), contribution(np.zeros(N), 0)], lambda steps: 1.0)
        assert (store.current.weights == 1).all()


def test_the_rate_is_that_of_the_steps_before_the_update(tmp_path):
    seen = []
    with steppers(tmp_path, "sgd", np.zeros(N, np.float32)) as [(store, stepper)]:
        for _ in range(3):
            with store.update() as slot:
                stepper.apply(slot, [contribution(np.ones(N), 10)], lambda steps: seen.append(steps) or 0.0)
    assert seen == [0, 10, 20]


def test_moments_of_each_part_are_merged_by_themselves(tmp_path):
    parts = (size(2), size(1))
    x, y = np.array([[1.0, 2], [3, 4]]), np.array([[5.0, 6]])
    with steppers(tmp_path, "sgd", np.zeros(N, np.float32), moments=parts) as [(store, stepper)]:
        for rows, r in ((x, [[1.0]]), (y, [[3.0], [8.0]])):
            more = np.concatenate([of_batch(rows), of_batch(np.array(r))])
            with store.update() as slot:
                stepper.apply(slot, [contribution(np.ones(N), moments=more)], lambda steps: 0.1)
        got = store.current.moments
        np.testing.assert_allclose(got[: size(2)], of_batch(np.concatenate([x, y])))
        np.testing.assert_allclose(got[size(2) :], of_batch(np.array([[1.0], [3], [8]])))


@pytest.mark.parametrize("kind", CLASSES)
def test_readers_see_the_state_before_and_after_never_between(tmp_path, kind):
    """An update that raises is not published; the next begins from the published version."""
    with steppers(tmp_path, kind, np.zeros(N, np.float32), 2) as [(writer, stepper), (reader, other)]:
        seen = Snapshot(np.zeros(N, np.float32), 0)

        def half_done():
            with writer.update() as slot:
                stepper.apply(slot, [contribution(np.ones(N))], lambda steps: 0.1)
                assert reader.read(seen) == 0
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            half_done()
        assert reader.read(seen) == 0
        assert not seen.weights.any()
        with reader.update() as slot:
            assert not any(piece.any() for piece in slot.optimizer.values())
            other.apply(slot, [contribution(np.ones(N))], lambda steps: 0.1)
        assert writer.read(seen) == 1
        assert seen.weights.any()
        assert writer.current.header[Header.VERSION] == 1
