"""What every kind of environment must do behind the interface of rows, in every autoreset mode.

The same tests run on copies stepped by us and on vector forms with the modes NEXT_STEP, SAME_STEP and DISABLED.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import helpers
from helpers import KINDS, CounterEnv, NoiseEnv, collector, each, rows, transitions
from slipstream import build, checkpoint
from slipstream.actions import mode as best
from slipstream.config import Given, from_dict
from slipstream.counters import ROW
from slipstream.envs.gym import Copies, Native, make
from slipstream.envs.spaces import actions, observations
from slipstream.errors import ConfigError, RunFailed
from slipstream.rollout import gae

ENDS = ("terminated", "truncated", "both")


def never() -> bool:
    return False


def collect(c, rollouts=1):
    """Rollouts one after another (in the same memory), each with the final observations {(t, b): obs} of its steps."""
    step, finals, t = c.env.step, {}, 0

    def spy(action):
        nonlocal t
        result = step(action)
        if result.final is not None:
            finals.update({(t, int(b)): np.array(obs) for b, obs in zip(*result.final, strict=True)})
        t += 1
        return result

    for _ in range(rollouts):
        finals, t = {}, 0
        c.env.step = spy
        rollout = c.collect(0, never)
        del c.env.step
        yield rollout, finals


# -- exactly the real transitions ------------------------------------------------------------------


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_real_transitions_are_valid(kind, ends):
    """Observations 0, 1, 2, 3 and again: (0, 1), (1, 2), (2, 3) are learned from, (3, 0) never is."""
    c = collector(rows(kind, lambda: CounterEnv(3, ends), 2), 7)
    flags = {"terminated": (True, False), "truncated": (False, True), "both": (True, True)}[ends]
    expected = [(0, 1, False, False), (1, 2, False, False), (2, 3, *flags)]
    streams: list[list] = [[], []]
    samples = 0
    for rollout, finals in collect(c, 4):
        samples += rollout.samples
        for stream, more in zip(streams, transitions(rollout, finals), strict=True):
            stream += more
    for stream in streams:
        assert stream == (expected * 10)[: len(stream)]
    assert sum(map(len, streams)) == samples
    real = 28 if kind in ("same_step", "disabled") else 21  # a row in four is a reset
    assert samples == 2 * real


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_returns_and_lengths_are_the_same_in_every_mode(kind, ends):
    """Rewards 1, 2, 3: return 6, length 3, whatever the mode and however the episode ends."""
    c = collector(rows(kind, lambda: CounterEnv(3, ends), 2), 5)
    episodes = [e for rollout, _ in collect(c, 6) for e in rollout.episodes]
    assert len(episodes) >= 2 * (30 // 4)
    assert {(r, n) for _, r, n in episodes} == {(6.0, 3)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_return_does_not_leak_over_a_time_limit(kind):
    c = collector(rows(kind, lambda: CounterEnv(10, "truncated", reward=1.0), 1), 8)
    episodes = [e[1:] for rollout, _ in collect(c, 6) for e in rollout.episodes]
    assert episodes == [(10.0, 10)] * len(episodes)
    assert len(episodes) >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_of_one_step(kind):
    c = collector(rows(kind, lambda: CounterEnv(1), 1), 6)
    rollout, finals = next(collect(c))
    n = 6 if finals else 3
    assert transitions(rollout, finals) == [[(0, 1, True, False)] * n]
    assert [e[1:] for e in rollout.episodes] == [(1.0, 1)] * n
    assert rollout.starts[:-1][rollout.valid].all()


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_final_observation_is_never_the_reset_one(kind, ends):
    env = rows(kind, lambda: CounterEnv(3, ends), 2)
    obs, mask = env.reset()
    assert obs.tolist() == [[0], [0]]
    assert mask is None
    action = np.zeros(2, np.int64)
    for _ in range(2):
        step = env.step(action)
        assert not (step.terminated | step.truncated | step.starts).any()
    step = env.step(action)
    assert (step.terminated | step.truncated).all()
    assert step.valid.all()
    if kind in ("same_step", "disabled"):
        ids, final = step.final
        assert ids.tolist() == [0, 1]
        assert final.tolist() == [[3], [3]]
        assert step.starts.all()
    else:
        assert step.final is None
        assert step.obs.tolist() == [[3], [3]]
        assert not step.starts.any()
        step = env.step(action)  # the row of the reset
        assert not step.valid.any()
        assert not (step.terminated | step.truncated).any()
        assert step.starts.all()
        assert not np.asarray(step.reward).any()
    assert step.obs.tolist() == [[0], [0]]
    step = env.step(action)
    assert step.valid.all()
    assert step.obs.tolist() == [[1], [1]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ends", "target"), [("truncated", 10), ("terminated", 6.5132), ("both", 6.5132)])
def test_a_time_limit_bootstraps_and_an_end_does_not(kind, ends, target):
    """Reward 1, limit 10, discount 0.9, value 10 everywhere: targets stay 10 unless the environment ended."""
    ten = lambda obs, state, starts: (np.full(len(obs), 10, np.float32), state)  # noqa: E731
    c = collector(rows(kind, lambda: CounterEnv(10, ends, reward=1.0), 2), 25, value=ten)
    r, _ = next(collect(c))
    value = np.full((26, 2), 10, np.float32)
    advantage = gae(r.reward, value, r.terminated, r.truncated, r.valid, r.bootstrap, r.has_bootstrap, 0.9, 1.0)
    begins = r.starts[:-1] & r.valid
    begins[15:] = False  # these end within the rollout
    assert begins.sum() == 4
    np.testing.assert_allclose((advantage + value[:-1])[begins], target, atol=1e-4)
    np.testing.assert_allclose(advantage[~r.valid], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_value_of_a_final_observation_is_that_of_the_final_one(kind):
    """The value is the observation: 3 follows the last step, not 0. Targets are the same in every mode."""
    c = collector(rows(kind, lambda: CounterEnv(3, "truncated", reward=0.0), 1), 8)
    r, _ = next(collect(c))
    value = r.obs[..., 0]
    advantage = gae(r.reward, value, r.terminated, r.truncated, r.valid, r.bootstrap, r.has_bootstrap, 1.0, 1.0)
    assert set((advantage + value[:-1])[:4][r.valid[:4]].tolist()) == {3.0}


@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_forgets_exactly_where_an_episode_begins(kind):
    """`starts` is True in rows whose observation is the first of an episode, in acting and in the rollout."""
    seen = []

    def act(obs, state, starts):
        state = np.where(starts[:, None], 0, state) + 1  # steps since the start
        seen.append((obs[:, 0].copy(), state[:, 0].copy()))
        return np.zeros((len(obs), 2), np.float32), state.astype(np.float32)

    c = collector(rows(kind, each(lambda: CounterEnv(3), lambda: CounterEnv(4), lambda: CounterEnv(1)), 3), 6, act,
                  state_size=1)  # fmt: skip
    for rollout, _ in collect(c, 5):
        assert rollout.starts[:-1].any()
        np.testing.assert_array_equal(rollout.starts, rollout.obs[..., 0] == 0)
    for obs, steps in seen:
        np.testing.assert_array_equal(obs + 1, steps)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_at_the_start_of_a_rollout_is_the_one_acted_with(kind):
    def act(obs, state, starts):
        return np.zeros((len(obs), 2), np.float32), np.where(starts[:, None], 0, state).astype(np.float32) + 1

    c = collector(rows(kind, lambda: CounterEnv(100), 1), 4, act, state_size=1)
    states = []
    for rollout, _ in collect(c, 3):
        states.append(rollout.state[0, 0])
        rollout.state[:] = -99  # a copy: what a learner does to it is its own affair
    assert states == [0, 4, 8]


@pytest.mark.parametrize("kind", KINDS)
def test_learning_replays_what_acting_saw_over_1000_steps(kind):
    """Same weights, LSTM, random ends, rollouts in mid-episode: the same outputs to 1e-5."""
    import torch

    from slipstream.nets.acting import forward_for

    env = rows(kind, NoiseEnv, 3)
    policy, _, _ = helpers.network(env.head, env.shape, core="lstm")
    act, value = forward_for(policy)
    acted = []

    def spy(obs, state, starts):
        params, after = act(obs, state, starts)
        acted.append(params)
        return params, after

    c = collector(env, 20, spy, value, state_size=policy.state_size)
    ended = 0
    for rollout, finals in collect(c, 50):
        with torch.no_grad():
            (params, _), _ = policy(*map(torch.from_numpy, (rollout.obs, rollout.state, rollout.starts)))
        np.testing.assert_allclose(params[:-1], np.stack(acted), atol=1e-5)
        acted.clear()
        for (t, b), final in finals.items():
            assert rollout.has_bootstrap[t, b]
            if t % 4:
                continue
            # the value that the network, unrolled over this episode, gives the final observation
            begin = max(k for k in range(t + 1) if k == 0 or rollout.starts[k, b])
            obs = np.concatenate([rollout.obs[begin : t + 1, b], final[None]])[:, None]
            state = (
                rollout.state[b : b + 1] if begin == 0 and not rollout.starts[0, b] else 0 * rollout.state[b : b + 1]
            )
            with torch.no_grad():
                (_, v), _ = policy(torch.from_numpy(obs), torch.from_numpy(state), torch.zeros(len(obs), 1, dtype=bool))
            assert rollout.bootstrap[t, b] == pytest.approx(v[-1, 0].item(), abs=1e-5)
        ended += int((rollout.terminated | rollout.truncated).sum())
        assert rollout.has_bootstrap.sum() == len(finals)
    assert ended > 200


def test_a_rollout_that_is_stopped_is_none():
    c = collector(rows("copies", CounterEnv, 1), 40)
    assert c.collect(0, lambda: True) is None


# -- rows keep apart -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_different_lengths_do_not_mix(kind):
    """Copy i counts from 100 i and ends after i + 1 steps."""
    makers = [lambda i=i: CounterEnv(i + 1, ENDS[i % 3], base=100.0 * i) for i in range(5)]
    c = collector(rows(kind, each(*makers), 5), 9)
    for rollout, finals in collect(c, 6):
        np.testing.assert_array_equal(rollout.obs[..., 0] // 100, np.broadcast_to(np.arange(5), (10, 5)))
        for (_, b), final in finals.items():
            assert final[0] == 100 * b + b + 1
        for i, stream in enumerate(transitions(rollout, finals)):
            assert all(after - before == 1 for before, after, *_ in stream)
            assert all((after == 100 * i + i + 1) == (a or b) for _, after, a, b in stream)
        for t, total, length in rollout.episodes:
            assert total == length * (length + 1) / 2
            assert rollout.terminated[t, length - 1] or rollout.truncated[t, length - 1]


class Reusing(CounterEnv):
    """Returns the same array each time, with new contents."""

    def __init__(self, form: str):
        super().__init__(50)
        box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.form, self.array = form, np.zeros(1, np.float32)
        self.observation_space = {
            "flat": box, "dict": spaces.Dict({"a": box}), "tuple in dict": spaces.Dict({"a": spaces.Tuple((box,))}),
        }[form]  # fmt: skip

    def seen(self):
        self.array[:] = self.n
        return {"flat": self.array, "dict": {"a": self.array}, "tuple in dict": {"a": (self.array,)}}[self.form]


@pytest.mark.parametrize("form", ["flat", "dict", "tuple in dict"])
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_the_environment_reuses_are_copied(kind, form):
    c = collector(rows(kind, lambda: Reusing(form), 2), 5)
    first, _ = next(collect(c))
    assert first.obs[..., 0].T.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    env = rows(kind, lambda: Reusing(form), 1)
    kept = env.reset()[0]
    step = env.step(np.zeros(1, np.int64))
    env.step(np.zeros(1, np.int64))
    assert kept[0, 0] == 0
    assert step.obs[0, 0] == 1


class ReusingVector(gym.vector.VectorEnv):
    """A vector form that returns its own arrays, changed in place by the next step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = CounterEnv().observation_space, spaces.Discrete(2)
        self.obs = np.zeros((num_envs, 1), np.float32)
        self.reward, self.terminated, self.truncated = np.zeros(num_envs), *np.zeros((2, num_envs), bool)

    def reset(self, *, seed=None, options=None):
        self.obs[:] = self.reward[:] = self.terminated[:] = 0
        return self.obs, {}

    def step(self, action):
        again = self.terminated.copy()
        self.obs[:] = np.where(again[:, None], 0, self.obs + 1)
        self.terminated[:] = self.obs[:, 0] == 3
        self.reward[:] = self.obs[:, 0]
        return self.obs, self.reward, self.terminated, self.truncated, {}


def test_a_vector_form_that_reuses_its_arrays():
    c = collector(Native(lambda: ReusingVector(2), 2, np.random.SeedSequence(0), 1), 8)
    rollout, _ = next(collect(c))
    assert rollout.obs[:, 1, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert rollout.terminated[:, 0].tolist() == [False, False, True, False] * 2
    assert rollout.valid[:, 0].tolist() == [True, True, True, False] * 2
    assert rollout.reward[:, 0].tolist() == [1, 2, 3, 0] * 2


# -- seeds -----------------------------------------------------------------------------------------


def experience(run, worker, incarnation=0):
    """First observations and actions of a worker's collector."""
    given = Given(env=NoiseEnv)
    env = build.environment(run, given, 8, build.seeds(run, build.Role.ENVIRONMENT, worker, incarnation))
    policy = build.policy_for(run, given, env)
    c = build.collector(run, env, policy, build.normalizer_for(run, env), worker, incarnation, np.zeros(ROW))
    r = c.collect(0, never)
    return r.obs.copy(), r.action.copy()


def test_all_copies_of_all_workers_differ_and_come_again():
    run, other = (from_dict({"seed": s, "algo": {"rollout_steps": 20}}) for s in (0, 1))
    workers = [experience(run, 0), experience(run, 1), experience(run, 0, incarnation=1), experience(other, 0)]
    firsts = np.concatenate([obs[0] for obs, _ in workers])
    assert len(np.unique(firsts, axis=0)) == 32
    acted = np.concatenate([action.T for _, action in workers])
    assert len(np.unique(acted, axis=0)) == 32
    for worker in (0, 1):
        for a, b in zip(experience(run, worker), workers[worker], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_experience_and_episodes_differ(kind):
    def obs(seed):
        return next(collect(collector(rows(kind, NoiseEnv, 3, seed), 60)))[0].obs.copy()

    a = obs(0)
    np.testing.assert_array_equal(a, obs(0))
    assert not np.array_equal(a, obs(1))
    assert len(np.unique(a.reshape(-1, 2), axis=0)) == 61 * 3


# -- spaces ----------------------------------------------------------------------------------------

BOX, F = spaces.Box, np.float32
INF = np.inf
OBSERVED = {
    "float32": (BOX(-1, 1, (2,), F), np.array([0.5, -1], F), [0.5, -1]),
    "float64": (BOX(-1, 1, (2,), np.float64), np.array([0.1, -1]), [0.1, -1]),
    "no bounds": (BOX(-INF, INF, (2,), F), np.array([1e30, -7], F), [1e30, -7]),
    "0-d": (BOX(-1, 1, (), F), np.array(0.25, F), [0.25]),
    "integers": (BOX(-5, 300, (2,), np.int32), np.array([-5, 300], np.int32), [-5, 300]),
    "8 bits that are no image": (BOX(0, 9, (2,), np.uint8), np.array([0, 9], np.uint8), [0, 9]),
    "matrix": (BOX(-9, 9, (2, 2), F), np.array([[1, 2], [3, 4]], F), [[1, 2], [3, 4]]),
    "discrete": (spaces.Discrete(3), 2, [0, 0, 1]),
    "discrete from -1": (spaces.Discrete(3, start=-1), -1, [1, 0, 0]),
    "multi-discrete": (spaces.MultiDiscrete([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0]),
    "multi-discrete of rank 2": (
        spaces.MultiDiscrete([[2, 2], [3, 2]], start=[[0, 1], [5, 0]]), np.array([[1, 1], [7, 0]]),
        [0, 1, 1, 0, 0, 0, 1, 1, 0],
    ),
    "multi-binary": (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), [1, 0, 1]),
    "multi-binary of rank 2": (spaces.MultiBinary([2, 2]), np.array([[1, 0], [0, 1]], np.int8), [1, 0, 0, 1]),
    "dict": (
        spaces.Dict({"b": BOX(-9, 9, (2,), F), "a": spaces.Discrete(2)}), {"b": np.array([5, 6], F), "a": 1},
        [0, 1, 5, 6],
    ),
    "tuple": (spaces.Tuple((spaces.Discrete(2), BOX(-9, 9, (), F))), (1, np.array(7, F)), [0, 1, 7]),
    "nested": (
        spaces.Dict({"z": spaces.Tuple((BOX(-9, 9, (1, 2), F), spaces.Dict({"q": spaces.MultiBinary(2)}))),
                     "c": spaces.MultiDiscrete([2])}),
        {"c": np.array([0]), "z": (np.array([[3, 4]], F), {"q": np.array([0, 1], np.int8)})},
        [1, 0, 3, 4, 0, 1],
    ),
    "image in a dict": (
        spaces.Dict({"image": BOX(0, 255, (1, 2), np.uint8), "x": BOX(0, 255, (1,), F)}),
        {"image": np.array([[0, 255]], np.uint8), "x": np.array([255], F)}, [0, 1, 255],
    ),
}  # fmt: skip


class Shows(gym.Env):
    """Always observes the same; remembers the actions it was given."""

    def __init__(self, observation_space=None, obs=None, action_space=None):
        self.observation_space = observation_space or BOX(-1, 1, (1,), F)
        self.action_space = action_space or spaces.Discrete(2)
        self.obs = np.zeros(1, F) if obs is None else obs
        self.got, self.n = [], 0

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return self.obs, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.got.append(action)
        self.n += 1
        return self.obs, 0.0, self.n == 2, False, {}


@pytest.mark.parametrize("case", OBSERVED.values(), ids=OBSERVED)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_observation(kind, case):
    space, obs, expected = case
    assert space.contains(obs)
    env = rows(kind, lambda: Shows(space, obs), 2)
    assert env.dtype == np.float32
    assert env.shape == np.shape(expected)
    expected = np.array([expected, expected], F)
    np.testing.assert_array_equal(env.reset()[0], expected)
    for _ in range(3):
        step = env.step(np.zeros(2, np.int64))
        assert step.obs.dtype == np.float32
        np.testing.assert_array_equal(step.obs, expected)
        if step.final is not None:
            np.testing.assert_array_equal(step.final[1], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_images_stay_8_bit_up_to_the_network(kind):
    image = np.arange(12, dtype=np.uint8).reshape(3, 2, 2) * 20
    env = rows(kind, lambda: Shows(BOX(0, 255, (3, 2, 2), np.uint8), image), 2)
    assert (env.shape, env.dtype) == ((3, 2, 2), np.uint8)
    c = collector(env, 5)
    rollout, _ = next(collect(c))
    assert rollout.obs.dtype == np.uint8
    assert rollout.obs.nbytes == 6 * 2 * 12
    np.testing.assert_array_equal(rollout.obs, np.broadcast_to(image, (6, 2, 3, 2, 2)))


def test_float_images_are_not_divided():
    encoder = observations(BOX(0, 1, (2, 2), F))
    assert encoder.dtype == np.float32
    np.testing.assert_array_equal(encoder.encode(np.full((2, 2), 0.5, F)), np.full((2, 2), 0.5, F))
    partial = BOX(np.array([0, 1], np.uint8), np.array([255, 255], np.uint8), dtype=np.uint8)
    assert observations(partial).dtype == np.float32


def test_the_order_of_parts_is_the_spaces_not_the_observations():
    space = spaces.Dict({"b": BOX(-9, 9, (2,), F), "a": BOX(-9, 9, (1,), F)})

    class Turning(CounterEnv):
        def __init__(self):
            super().__init__(4)
            self.observation_space = space

        def seen(self):
            parts = {"a": np.array([1], F), "b": np.array([2, 3], F)}
            return dict(sorted(parts.items(), reverse=bool(self.n % 2)))

    for kind in KINDS:
        rollout, _ = next(collect(collector(rows(kind, Turning, 2), 9)))
        np.testing.assert_array_equal(rollout.obs, np.broadcast_to(np.array([1, 2, 3], F), (10, 2, 3)))


ACTED = {
    "discrete": (spaces.Discrete(3), [2, 0], [2, 0]),
    "discrete from 5": (spaces.Discrete(3, start=5), [2, 0], [7, 5]),
    "multi-discrete": (spaces.MultiDiscrete([2, 3]), [[1, 2], [0, 1]], [[1, 2], [0, 1]]),
    "multi-discrete of rank 2": (
        spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[0, 10], [0, -1]]), [[1, 2, 3, 0], [0, 0, 0, 1]],
        [[[1, 12], [3, -1]], [[0, 10], [0, 0]]],
    ),
    "box": (BOX(-2, 2, (1,), F), [[0], [0.5]], [[0], [1]]),
    "box, far outside": (BOX(-2, 2, (1,), F), [[50], [-50]], [[2], [-2]]),
    "asymmetric": (BOX(np.array([0, -3], F), np.array([90, 1], F)), [[0, 0], [9, -9]], [[45, -1], [90, -3]]),
    "float64": (BOX(-2, 2, (1,), np.float64), [[0.5], [7]], [[1], [2]]),
    "no bounds": (BOX(-INF, INF, (2,), F), [[3, -40], [0, 0.5]], [[3, -40], [0, 0.5]]),
    "bounded on one side": (
        BOX(np.array([0, -INF], F), np.array([INF, 1], F)), [[-3, -40], [7, 9]], [[0, -40], [7, 1]],
    ),
    "0-d": (BOX(-2, 2, (), F), [[0.5], [-9]], [1, -2]),
    "matrix": (BOX(-2, 2, (2, 1), F), [[0.5, 0], [1, -1]], [[[1], [0]], [[2], [-2]]]),
}  # fmt: skip


@pytest.mark.parametrize("case", ACTED.values(), ids=ACTED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_right_action_reaches_the_environment(kind, case):
    space, raw, expected = case
    env = rows(kind, lambda: Shows(action_space=space), 2)
    env.reset()
    raw = np.array(raw, env.head.action_dtype)
    assert raw.shape[1:] == env.head.action_shape
    before = raw.copy()
    env.step(raw)
    np.testing.assert_array_equal(raw, before)  # the raw sample is what is learned from
    for one, want in zip(env.envs if kind == "copies" else env.env.envs, expected, strict=True):
        [got] = one.got
        np.testing.assert_allclose(got, want)
        assert space.contains(got)


@pytest.mark.parametrize("kind", KINDS)
def test_the_raw_sample_is_stored_and_the_clipped_one_reaches_the_environment(kind):
    """Mean 5 in bounds [-2, 2]: stored as drawn, so that its log-probability is its own."""
    mean = lambda obs, state, starts: (np.tile(np.array([[5, 0]], F), (len(obs), 1)), state)  # noqa: E731
    env = rows(kind, lambda: Shows(action_space=BOX(-2, 2, (1,), F)), 2)
    rollout, _ = next(collect(collector(env, 40, mean)))
    assert rollout.action.mean() == pytest.approx(5, abs=0.5)
    assert rollout.action.std() > 0.5
    got = np.array([a for one in (env.envs if kind == "copies" else env.env.envs) for a in one.got])
    assert got.max() == 2
    assert (np.abs(got) <= 2).all()


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (spaces.Text(5), "Text"),
        (spaces.Sequence(spaces.Discrete(2)), "Sequence"),
        (spaces.Graph(BOX(0, 1, (1,), F), None), "Graph"),
        (spaces.Dict({"a": spaces.Tuple((spaces.Text(3), spaces.Discrete(2)))}), "Text"),
    ],
)
def test_an_observation_space_that_is_not_supported_is_named(space, said):
    with pytest.raises(ConfigError, match=rf"observation space .*{said}.* not supported"):
        Copies(lambda: Shows(space, "x"), 1, np.random.SeedSequence(0), 1)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (BOX(0, 9, (2,), np.int32), "MultiDiscrete"),
        (spaces.MultiBinary(3), "MultiBinary"),
        (spaces.Dict({"a": spaces.Discrete(2)}), "Dict"),
        (spaces.Tuple((spaces.Discrete(2),)), "Tuple"),
    ],
)
def test_an_action_space_that_is_not_supported_is_named(space, said):
    with pytest.raises(ConfigError, match=r"action space .*not supported") as e:
        Copies(lambda: Shows(action_space=space), 1, np.random.SeedSequence(0), 1)
    assert said in str(e.value)
    assert actions(spaces.Discrete(2)).head.kind == "categorical"


# -- action masks ----------------------------------------------------------------------------------


class Masked(CounterEnv):
    """Allows action n % 3 and its follower after n steps; raises when given another. Nothing in the final state.

    `tells` says when the mask is in the info: always, not in reset, or not in step.
    """

    action_space = spaces.Discrete(3)

    def __init__(self, tells="always", length=4, dtype=np.int8):
        super().__init__(length)
        self.tells, self.dtype = tells, dtype

    def info(self, when):
        over = self.n == self.length
        mask = np.array([not over and a in (self.n % 3, (self.n + 1) % 3) for a in range(3)], self.dtype)
        return {} if self.tells == f"not in {when}" else {"action_mask": mask}

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed)
        return obs, self.info("reset")

    def step(self, action):
        told = self.tells == "always" or self.tells != f"not in {'step' if self.n else 'reset'}"
        assert not told or action in (self.n % 3, (self.n + 1) % 3), f"{action} after {self.n}"
        return *super().step(action)[:4], self.info("step")


@pytest.mark.parametrize("tells", ["always", "not in reset", "not in step"])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_obeyed_and_stored_where_they_applied(kind, tells):
    env = rows(kind, each(lambda: Masked(tells), lambda: Masked(tells, 3), lambda: Masked(tells)), 3, failures=0)
    c = collector(env, 7)
    chosen = set()
    for rollout, _ in collect(c, 12):
        n = rollout.obs[:-1, :, 0].astype(int)
        expected = (np.arange(3) == n[..., None] % 3) | (np.arange(3) == (n[..., None] + 1) % 3)
        expected[(n == 0) & (tells == "not in reset")] = True
        expected[(n != 0) & (tells == "not in step")] = True
        np.testing.assert_array_equal(rollout.mask[rollout.valid], expected[rollout.valid])
        assert rollout.mask[~rollout.valid].all()
        assert np.take_along_axis(rollout.mask, rollout.action[..., None], -1).all()
        chosen |= set(zip(n[rollout.valid], rollout.action[rollout.valid], strict=True))
    assert len(chosen) == {"always": 8, "not in reset": 9, "not in step": 11}[tells]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_that_allows_nothing_is_an_error_with_the_copy(kind):
    class Stuck(Masked):
        def info(self, when):
            return {"action_mask": np.zeros(3, np.int8) if self.base and self.n == 2 else np.ones(3, np.int8)}

        def step(self, action):
            return *CounterEnv.step(self, action)[:4], self.info("step")

    def stuck():
        env = Stuck()
        env.base = 1.0
        return env

    env = rows(kind, each(Stuck, stuck), 2)
    env.reset()
    env.step(np.zeros(2, np.int64))
    with pytest.raises(RunFailed, match=r"copy 1.*allows no action"):
        env.step(np.zeros(2, np.int64))


def test_environments_without_masks_have_none():
    for kind in KINDS:
        env = rows(kind, CounterEnv, 2)
        rollout, _ = next(collect(collector(env, 5)))
        assert rollout.mask is None


# -- environments that misbehave -------------------------------------------------------------------


class Old(CounterEnv):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs if self.how == "reset" else (obs, info)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return (obs, reward, terminated, info) if self.how == "step" else (obs, reward, terminated, truncated, info)


class Older(Old):
    def reset(self):
        return np.zeros(1, np.float32)


class Alien:
    observation_space, action_space = CounterEnv().observation_space, spaces.Discrete(2)

    def reset(self):
        return np.zeros(1, np.float32)


for name, maker in {
    "OldStep": lambda: Old("step"), "OldReset": lambda: Old("reset"), "Older": lambda: Older("reset"), "Alien": Alien,
}.items():  # fmt: skip
    gym.register(f"tests/{name}-v0", entry_point=maker, max_episode_steps=9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("name", ["OldStep", "OldReset", "Older", "Alien"])
def test_an_environment_of_the_old_gym_api_is_told_what_wraps_it(name, direct):
    """Also where a wrapper or Python itself meets it first; it is not replaced again and again."""

    def run():
        env = make(gym.spec(f"tests/{name}-v0").entry_point if direct else f"tests/{name}-v0", 2,
                   np.random.SeedSequence(0), {}, 3)  # fmt: skip
        env.reset()
        env.step(np.zeros(2, np.int64))

    with pytest.raises(ConfigError, match=r"old Gym API.*GymV21Compatibility"):
        run()


class Failing(CounterEnv):
    """Raises at the steps and resets of the whole process's life that `plan` names."""

    def __init__(self, plan):
        super().__init__(4)
        self.plan = plan

    def reset(self, *, seed=None, options=None):
        self.plan["resets"] = self.plan.get("resets", 0) + 1
        if self.plan["resets"] in self.plan.get("in reset", ()):
            raise ValueError("reset boom")
        return super().reset(seed=seed)

    def step(self, action):
        self.plan["steps"] = self.plan.get("steps", 0) + 1
        if self.plan["steps"] in self.plan.get("in step", ()):
            raise ValueError("step boom")
        return super().step(action)


@pytest.mark.parametrize("kind", KINDS)
def test_an_environment_that_raises_in_step_is_replaced_and_its_row_not_trained_on(kind):
    plan = {"in step": {6}}
    env = rows(kind, lambda: Failing(plan), 1)
    c = collector(env, 8)
    rollout, finals = next(collect(c))
    assert len(rollout.failures) == env.restarts == 1
    assert "step boom" in rollout.failures[0]
    assert "ValueError" in rollout.failures[0]
    assert "step 2" in rollout.failures[0] or kind != "copies"
    # (2, ?) of the second episode is unknown; the row after it begins anew and goes on
    at = int(np.flatnonzero(~rollout.valid[:, 0] & ~np.roll(rollout.terminated[:, 0], 1))[0])
    assert rollout.obs[at - 1 : at + 2, 0, 0].tolist() == [0, 1, 0]
    assert rollout.starts[at + 1, 0]
    assert not rollout.terminated[at, 0]
    assert not rollout.truncated[at, 0]
    assert rollout.reward[at, 0] == 0
    assert all(after - before == 1 for stream in transitions(rollout, finals) for before, after, *_ in stream)
    assert {e[1:] for e in rollout.episodes} == {(10.0, 4)}  # the lost episode is not counted


@pytest.mark.parametrize("again", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_environment_that_raises_in_reset_is_replaced(kind, again):
    """Once, or when it is made anew as well."""
    plan = {"in reset": set(range(2, 2 + again))}
    env = rows(kind, lambda: Failing(plan), 1)
    c = collector(env, 12)
    rollout, finals = next(collect(c))
    assert env.restarts == again
    assert rollout.failures
    assert "reset boom" in rollout.failures[0]
    streams = transitions(rollout, finals)
    assert streams[0][:3] == [(0, 1, False, False), (1, 2, False, False), (2, 3, False, False)]
    assert all(after - before == 1 for before, after, *_ in streams[0])
    assert rollout.episodes


def test_the_very_first_reset_may_fail_too():
    plan = {"in reset": {1, 2}}
    env = rows("copies", lambda: Failing(plan), 2)
    rollout, _ = next(collect(collector(env, 3)))
    assert rollout.obs[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert len(rollout.failures) == env.restarts == 2


@pytest.mark.parametrize("where", ["in step", "in reset"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_gives_up_after_the_bound(kind, where):
    """Bound 3: the fourth failure ends it, with the environment's own traceback."""
    plan = {where: set(range(2, 1000))}
    env = rows(kind, lambda: Failing(plan), 1, failures=3)
    c = collector(env, 50)
    with pytest.raises(RunFailed, match="4 times") as e:
        c.collect(0, never)
    assert "boom" in str(e.value)
    assert "in step" in str(e.value) or "in reset" in str(e.value)  # a line of the traceback


def test_only_the_copy_that_failed_is_replaced():
    plans = [{}, {"in step": {2}}, {}]
    makers = [lambda p=p: Failing(p) for p in plans]
    built = []

    def build_one():
        built.append(len(built))
        return makers[built[-1] if built[-1] < 3 else 1]()

    env = Copies(build_one, 3, np.random.SeedSequence(0), 5)
    rollout, _ = next(collect(collector(env, 4)))
    assert len(built) == 4
    assert rollout.obs[:, 0, 0].tolist() == rollout.obs[:, 2, 0].tolist() == [0, 1, 2, 3, 4]
    assert rollout.obs[:, 1, 0].tolist() == [0, 1, 0, 1, 2]
    assert rollout.valid[:, 1].tolist() == [True, False, True, True]
    assert "copy 1" in rollout.failures[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_gave_nan_begins_anew_and_leaves_nothing_behind(kind):
    class Sick(CounterEnv):
        def seen(self):
            return np.array([np.nan if self.base and self.n == 2 else self.n], np.float32)

    env = rows(kind, each(lambda: Sick(9), lambda: Sick(9, base=1.0)), 2)
    memory = lambda obs, state, starts: (np.zeros((2, 2), F), np.where(starts[:, None], 0, state) + obs)  # noqa: E731
    c = collector(env, 2, memory, state_size=1)
    first, _ = next(collect(c))
    assert np.isnan(first.obs[2, 1, 0])
    c.drop(np.array([1]))
    rollout, _ = next(collect(c))
    assert not rollout.valid[0, 1]
    assert rollout.starts[1, 1]
    assert rollout.obs[1, 1, 0] == 0
    assert np.isfinite(rollout.obs[:2]).all()
    assert np.isfinite(rollout.state).all()
    assert rollout.valid[:, 0].all() == (kind == "copies")  # a vector form begins anew as a whole


def test_an_unknown_environment_or_argument_is_a_sentence():
    one = lambda env, **kwargs: make(env, 1, np.random.SeedSequence(0), kwargs, 1)  # noqa: E731
    with pytest.raises(ConfigError, match="CartPole-v1"):
        one("CartPol-v1")
    with pytest.raises(ConfigError, match="nowhere"):
        one("nowhere.at.all:X-v0")
    with pytest.raises(ConfigError, match=r"env_kwargs.*gravitas"):
        one("CartPole-v1", gravitas=1)
    with pytest.raises(ConfigError, match=r"env_kwargs.*gravitas"):
        one("Pendulum-v1", gravitas=1)
    assert isinstance(one("helpers:tests/Counter-v0", length=5), Copies)


# -- environments of Gymnasium and ours ------------------------------------------------------------


@pytest.mark.parametrize("limit", [500, 10])
@pytest.mark.parametrize("name", ["CartPole-v1", "slipstream/CartPoleHidden-v1"])
def test_the_vector_form_equals_the_plain_environment(name, limit):
    """Same start state, same actions, five episodes of each of two copies: same observations, rewards, flags."""
    env = make(name, 2, np.random.SeedSequence(0), {"max_episode_steps": limit}, 1)
    assert isinstance(env, Native)
    plain = [gym.make(name, max_episode_steps=limit) for _ in range(2)]
    inner = lambda b: getattr(plain[b].unwrapped, "env", plain[b].unwrapped).unwrapped  # noqa: E731

    def begin(b):
        plain[b].reset()
        inner(b).state = env.env.unwrapped.state[:, b].copy()

    env.reset()
    for b in range(2):
        begin(b)
    rng, episodes, lengths = np.random.default_rng(0), [0, 0], [0, 0]
    while min(episodes) < 5:
        action = rng.integers(0, 2, 2)
        step = env.step(action)
        for b in range(2):
            if not step.valid[b]:
                begin(b)
                lengths[b] = 0
                continue
            expected, reward, terminated, truncated, _ = plain[b].step(int(action[b]))
            np.testing.assert_allclose(step.obs[b], expected, atol=1e-6)
            got = float(step.reward[b]), bool(step.terminated[b]), bool(step.truncated[b])
            assert got == (reward, terminated, truncated)
            lengths[b] += 1
            episodes[b] += terminated or truncated
            assert lengths[b] <= limit


def test_hidden_cartpole_shows_positions_only():
    """The same seed and actions as CartPole: the same positions, in the plain and in the vector form."""
    full, hidden = gym.make("CartPole-v1"), gym.make("slipstream/CartPoleHidden-v1")
    assert hidden.observation_space.shape == (2,)
    a, b = full.reset(seed=3)[0], hidden.reset(seed=3)[0]
    assert hidden.observation_space.contains(b)
    for action in (0, 1, 1, 0):
        np.testing.assert_array_equal(a[[0, 2]], b)
        a, b = full.step(action)[0], hidden.step(action)[0]
    assert hidden.spec.max_episode_steps == 500
    many = [gym.make_vec(n, num_envs=3) for n in ("CartPole-v1", "slipstream/CartPoleHidden-v1")]
    assert many[1].observation_space.shape == (3, 2)
    assert many[1].single_observation_space == hidden.observation_space
    x, y = (m.reset(seed=3)[0] for m in many)
    for _ in range(30):
        np.testing.assert_array_equal(x[:, [0, 2]], y)
        x, y = (m.step(np.ones(3, np.int64))[0] for m in many)
    env = make("slipstream/CartPoleHidden-v1", 3, np.random.SeedSequence(0), {}, 1)
    assert isinstance(env, Native)
    assert env.reset()[0].shape == (3, 2)


TAXI = max(name for name in gym.registry if name.startswith("Taxi-"))  # tells an action mask


@pytest.mark.parametrize(
    ("name", "kind"), [("CartPole-v1", Native), ("Pendulum-v1", Copies), ("Acrobot-v1", Copies), (TAXI, Copies)]
)
def test_environments_of_gymnasium_are_understood(name, kind):
    env = make(name, 2, np.random.SeedSequence(0), {}, 1)
    assert isinstance(env, kind)
    rollout, _ = next(collect(collector(env, 60)))
    assert np.isfinite(rollout.obs).all()
    assert rollout.samples > 100
    assert (rollout.mask is None) == (name != TAXI)


# -- saving and restoring --------------------------------------------------------------------------


def through_disk(saved, folder):
    """What `save` gave, written and read as a checkpoint does it."""
    checkpoint.write_part(folder / "env", *saved)
    return checkpoint.read_part(folder / "env")


def follow(env, obs, mask, steps, rng):
    """Everything an environment gives over `steps` random steps, one tuple of arrays a step."""
    out = []
    for _ in range(steps):
        scores = rng.normal(size=(env.copies, env.head.outputs * (2 if env.head.kind == "gaussian" else 1)))
        step = env.step(best(env.head, scores.astype(F), mask))
        mask = step.mask
        some = np.zeros(0) if mask is None else mask
        ended = step.terminated | step.truncated
        out.append(tuple(map(np.array, (step.obs, step.reward, ended, step.valid, step.starts, some))))
    return out, step.obs, mask


SAVED = {
    "vector form": lambda: make("CartPole-v1", 3, np.random.SeedSequence(5), {}, 1),
    "vector form, hidden": lambda: make("slipstream/CartPoleHidden-v1", 3, np.random.SeedSequence(5), {}, 1),
    "copies": lambda: Copies(lambda: gym.make("CartPole-v1"), 3, np.random.SeedSequence(5), 1),
    "gaussian": lambda: Copies(lambda: gym.make("Pendulum-v1", max_episode_steps=30), 2, np.random.SeedSequence(5), 1),
    "masks": lambda: Copies(Masked, 2, np.random.SeedSequence(5), 1),
    "multi-discrete": lambda: Copies(
        lambda: Shows(action_space=spaces.MultiDiscrete([[2, 3], [2, 2]])), 2, np.random.SeedSequence(5), 1
    ),
    "noise": lambda: Copies(NoiseEnv, 3, np.random.SeedSequence(5), 1),
}


@pytest.mark.parametrize("make_env", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("after", [0, 1, 37])
def test_a_restored_environment_goes_on_bit_for_bit(tmp_path, make_env, after):
    env, rng = make_env(), np.random.default_rng(0)
    obs, mask = env.reset()
    if after:
        _, obs, mask = follow(env, obs, mask, after, rng)
    values, arrays = through_disk(env.save(), tmp_path)
    obs, mask, state = obs.copy(), None if mask is None else mask.copy(), rng.bit_generator.state
    expected, _, _ = follow(env, obs, mask, 120, rng)
    again = make_env()
    again.reset()
    again.step(np.zeros((again.copies, *again.head.action_shape), again.head.action_dtype))
    again.restore(values, arrays)
    rng.bit_generator.state = state
    got, _, _ = follow(again, obs, mask, 120, rng)
    assert sum(ended.sum() for _, _, ended, *_ in expected) >= 4
    for a, b in zip(expected, got, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", ["copies", "vector form"])
def test_a_row_asked_to_begin_anew_still_does_after_restoring(tmp_path, kind):
    env = SAVED[kind]()
    obs, _ = env.reset()
    follow(env, obs, None, 5, np.random.default_rng(0))
    env.replace(1)
    again = SAVED[kind]()
    again.reset()
    again.restore(*through_disk(env.save(), tmp_path))
    for e in (env, again):
        step = e.step(np.zeros(3, np.int64))
        assert not step.valid[1]
        assert step.starts[1]


def test_a_vector_form_whose_state_cannot_be_read_is_not_saved():
    """Rather than saved wrongly: its copies are objects."""
    env = Native(lambda: SyncVectorEnv([NoiseEnv] * 2), 2, np.random.SeedSequence(0), 1)
    env.reset()
    assert env.save() is None


def test_an_environment_that_is_not_deterministic_cannot_be_restored(tmp_path):
    class Erratic(CounterEnv):
        def seen(self):
            return np.random.default_rng().normal(size=1).astype(F)

    env = Copies(Erratic, 2, np.random.SeedSequence(0), 1)
    env.reset()
    env.step(np.zeros(2, np.int64))
    saved = through_disk(env.save(), tmp_path)
    with pytest.raises(ValueError, match="not deterministic"):
        Copies(Erratic, 2, np.random.SeedSequence(0), 1).restore(*saved)


def test_an_environment_that_raises_when_executed_again_cannot_be_restored(tmp_path):
    plan: dict = {}
    env = Copies(lambda: Failing(plan), 1, np.random.SeedSequence(0), 1)
    env.reset()
    for _ in range(2):
        env.step(np.zeros(1, np.int64))
    saved = through_disk(env.save(), tmp_path)
    plan["in step"] = {plan["steps"] + 2}
    with pytest.raises(ValueError, match="step boom"):
        Copies(lambda: Failing(plan), 1, np.random.SeedSequence(0), 1).restore(*saved)
