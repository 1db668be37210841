"""Atari games as rows: what holds for observations, ends, lives, seeds, failures and options of both forms."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from helpers import collector
from slipstream import build, cli, doctor
from slipstream.config import Given, from_dict
from slipstream.envs import atari
from slipstream.envs.atari import Atari, Stack, Wrapped
from slipstream.envs.gym import find
from slipstream.errors import ConfigError, RunFailed

PONG, BREAKOUT = "PongNoFrameskip-v4", "BreakoutNoFrameskip-v4"
FORMS = {"native": {}, "wrappers": {"wrappers": True}}


def rows(game=PONG, copies=2, seed=0, failures=3, **options):
    return atari.make(game, copies, np.random.SeedSequence(seed), options, failures)


def play(env, steps, seed=0, fire=False):
    """The reset's observation and the steps of random actions."""
    rng = np.random.default_rng(seed)
    obs, mask = env.reset()
    assert mask is None
    out = []
    for t in range(steps):
        action = rng.integers(env.head.outputs, size=env.copies)
        out.append(env.step(np.ones_like(action) if fire and t % 4 == 0 else action))
    return obs, out


def check_frames(env, obs, steps, channels=1):
    """Each observation is the one before, one frame on; where an episode starts all its frames are the first."""
    assert env.shape == obs.shape[1:]
    assert env.stack * channels == obs.shape[1]
    before, n = None, 0
    for now, starts in [(obs, np.ones(env.copies, bool)), *((s.obs, s.starts) for s in steps)]:
        assert now.dtype == np.uint8 == env.dtype
        assert now.flags.c_contiguous
        frames = now.reshape(env.copies, env.stack, channels, *now.shape[2:])
        for b in range(env.copies):
            if starts[b]:
                assert (frames[b] == frames[b, :1]).all()
                n += 1
            else:
                np.testing.assert_array_equal(frames[b, :-1], before[b, 1:])
        before = frames.copy()
    return n


@pytest.fixture(autouse=True)
def _closed(monkeypatch):
    made = []
    real = atari.make
    monkeypatch.setattr(atari, "make", lambda *a: made.append(real(*a)) or made[-1])
    yield
    for env in made:
        env.close()


# -- observations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_an_observation_is_the_last_one_and_a_frame(form):
    env = rows(max_frames=80, **FORMS[form])
    assert (env.copies, env.shape, env.stack, env.dtype) == (2, (4, 84, 84), 4, np.uint8)
    assert (env.head.kind, env.head.sizes) == ("categorical", (6,))
    obs, steps = play(env, 60)
    assert check_frames(env, obs, steps) >= 2 * 3
    assert steps[-1].obs.max() > 200


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("options", "shape", "channels"),
    [
        ({"stack": 1}, (1, 84, 84), 1),
        ({"stack": 3, "size": 42, "frame_skip": 2}, (3, 42, 42), 1),
        ({"stack": 2, "grayscale": False}, (6, 84, 84), 3),
    ],
)
def test_other_shapes(form, options, shape, channels):
    env = rows(**options, copies=1, max_frames=40, **FORMS[form])
    assert env.shape == shape
    obs, steps = play(env, 25)
    assert check_frames(env, obs, steps, channels) > 1
    if channels == 3:
        frame = obs[0, :3]
        assert not np.array_equal(frame[0], frame[1])


def test_the_stack_when_rows_start_at_any_time():
    rng = np.random.default_rng(0)
    for frames in (1, 4, 20):
        stack, expected = Stack(3, frames, (2,)), None
        for t in range(100):
            frame = rng.integers(256, size=(3, 2), dtype=np.uint8)
            starts = rng.random(3) < (0.1 if t else 1.1)
            got = stack.push(frame, starts)
            repeated = np.repeat(frame[:, None], frames, 1)
            moved = repeated if expected is None else np.concatenate([expected[:, 1:], frame[:, None]], 1)
            expected = np.where(starts[:, None, None], repeated, moved)
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("form", FORMS)
def test_observations_are_the_callers_own(form):
    plain, spoilt = rows(**FORMS[form]), rows(**FORMS[form])
    plain.reset()
    spoilt.reset()[0][:] = 7
    for _ in range(5):
        a, b = (env.step(np.zeros(2, np.int64)).obs for env in (plain, spoilt))
        np.testing.assert_array_equal(a, b)
        b[:] = 9


def test_both_forms_show_the_same():
    """Without no-ops and sticky actions nothing is random, and all frames are equal."""
    native, wrapped = (rows(noop_max=0, **options) for options in FORMS.values())
    assert isinstance(native, Atari)
    assert isinstance(wrapped, Wrapped)
    np.testing.assert_array_equal(native.reset()[0], wrapped.reset()[0])
    rng = np.random.default_rng(1)
    total = 0.0
    for _ in range(150):
        action = rng.integers(6, size=2)
        a, b = native.step(action), wrapped.step(action)
        np.testing.assert_array_equal(a.obs, b.obs)
        np.testing.assert_array_equal(a.reward, b.reward)
        assert a.reward.dtype == b.reward.dtype == np.float32
        total += a.reward.sum()
    assert total < 0


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_time_limit_is_a_truncation(form):
    env = rows(max_frames=40, noop_max=0, **FORMS[form])
    obs, steps = play(env, 23)
    for t, step in enumerate(steps):
        assert not step.terminated.any()
        assert step.truncated.all() == step.truncated.any() == (t % 11 == 9), t
        assert step.valid.all() == step.valid.any() == (t % 11 != 10), t
        np.testing.assert_array_equal(step.starts, ~step.valid)
        assert step.final is None
    np.testing.assert_array_equal(steps[10].obs, obs)  # the same first frame
    assert not np.array_equal(steps[9].obs, obs)


def test_the_limit_need_not_be_a_multiple_of_the_skip():
    _, steps = play(rows(max_frames=42), 12)
    assert [bool(s.truncated.all()) for s in steps] == [t == 10 for t in range(12)]


@pytest.mark.parametrize("form", FORMS)
def test_a_finished_game_is_a_termination(form):
    env = rows(BREAKOUT, noop_max=0, **FORMS[form])
    obs, steps = play(env, 250, fire=True)
    check_frames(env, obs, steps)
    ends = [(t, int(b)) for t, s in enumerate(steps) for b in np.flatnonzero(s.terminated)]
    assert ends
    assert not any(s.truncated.any() for s in steps)
    for t, b in ends:
        after = steps[t + 1]
        assert not after.valid[b]
        assert after.starts[b]
        assert after.reward[b] == 0


def test_collected_rollouts_count_steps_and_episodes():
    c = collector(rows(max_frames=40), 33)
    rollout = c.collect(0, lambda: False)
    assert rollout.obs.dtype == np.uint8
    assert rollout.samples == 2 * 30
    assert [n for *_, n in rollout.episodes] == [10] * 6
    assert not rollout.has_bootstrap.any()  # the final observation is the next row's


def test_rewards_are_the_score():
    _, steps = play(rows("ALE/MsPacman-v5"), 100)
    rewards = {float(r) for s in steps for r in s.reward}
    assert rewards <= {10.0 * k for k in range(100)}
    assert max(rewards) >= 10


# -- lives -----------------------------------------------------------------------------------------


def test_a_lost_life_is_terminal_while_the_game_goes_on():
    whole, lives = rows(BREAKOUT, seed=3), rows(BREAKOUT, seed=3, episodic_life=True)
    obs, games = play(whole, 300, fire=True)
    again, learned = play(lives, 0), []
    np.testing.assert_array_equal(obs, again[0])
    rng = np.random.default_rng(0)
    lost, counts = [], []
    for t in range(300):
        action = rng.integers(4, size=2)
        learned.append(lives.step(np.ones_like(action) if t % 4 == 0 else action))
        lost.append(learned[-1].lost)
        counts.append(lives.lives)
    check_frames(lives, obs, learned)
    for game, step, gone in zip(games, learned, lost, strict=True):
        np.testing.assert_array_equal(game.obs[:, -1], step.obs[:, -1])  # the same game, frame by frame
        np.testing.assert_array_equal(game.reward, step.reward)
        np.testing.assert_array_equal(game.terminated, step.terminated & ~gone)
        np.testing.assert_array_equal(step.starts, game.starts | gone)
        np.testing.assert_array_equal(step.valid, game.valid)
    ends = np.flatnonzero([s.terminated[0] for s in games])
    gone = np.flatnonzero([g[0] for g in lost])
    assert len(ends)
    assert len(gone[gone < ends[0]]) == 4  # the fifth ball is the end
    assert [int(counts[t][0]) for t in gone[:4]] == [4, 3, 2, 1]


# -- seeds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"threads": 1}, {"threads": 2}, {"threads": 3, "sticky": 0.25}, {"wrappers": True}]
)
def test_a_seed_gives_the_same_games(options):
    def seen(seed, **options):
        obs, steps = play(rows(seed=seed, max_frames=80, **options), 45)
        return np.stack([obs, *(s.obs for s in steps)])

    first = seen(0, **options)
    np.testing.assert_array_equal(first, seen(0, **options))
    if "threads" in options:
        np.testing.assert_array_equal(first, seen(0, **{**options, "threads": 1}))
    assert not np.array_equal(first, seen(1, **options))
    assert not np.array_equal(first[:, 0], first[:, 1])


def test_sticky_actions_are_those_of_the_id():
    assert rows("ALE/Pong-v5").options.sticky == 0.25
    assert rows(PONG).options.sticky == 0.0
    assert rows("ALE/Pong-v5", sticky=0).options.sticky == 0
    obs = [play(rows("ALE/Pong-v5", 1, noop_max=0, **o), 30, seed=1)[1][-1].obs for o in ({}, {"sticky": 0.0})]
    assert not np.array_equal(*obs)


# -- sending and receiving -------------------------------------------------------------------------


def test_sending_and_receiving_is_a_step():
    one, two = rows(max_frames=40), rows(max_frames=40)
    one.reset()
    two.reset()
    rng = np.random.default_rng(0)
    for _ in range(15):
        action = rng.integers(6, size=2)
        two.send(action)
        a, b = one.step(action), two.recv()
        for x, y in zip(a[:6], b[:6], strict=True):
            np.testing.assert_array_equal(x, y)
    with pytest.raises(RuntimeError, match="no action sent"):
        two.recv()


def test_an_action_is_sent_once():
    env = rows()
    env.reset()
    env.send(np.zeros(2, np.int64))
    with pytest.raises(RuntimeError, match="received"):
        env.send(np.zeros(2, np.int64))
    assert env.recv().valid.all()
    env.send(np.zeros(2, np.int64))
    env.reset()  # gives up the step
    assert env.step(np.zeros(2, np.int64)).valid.all()
    env.send(np.array([0, 6]))  # was not begun
    env.reset()
    assert env.step(np.zeros(2, np.int64)).valid.all()
    env.send(np.zeros(2, np.int64))  # closed with a step under way


# -- replacing, failures, state --------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_one_row_begins_anew(form):
    env, other = rows(copies=3, **FORMS[form]), rows(copies=3, **FORMS[form])
    obs, steps = play(env, 30)
    play(other, 30)
    env.replace(1)
    action = np.full(3, 2)
    more = [env.step(action) for _ in range(20)]
    assert more[0].valid.tolist() == [True, False, True]
    assert more[0].starts.tolist() == [False, True, False]
    assert more[0].reward[1] == 0
    assert not (more[0].terminated | more[0].truncated).any()
    assert more[1].valid.all()
    check_frames(env, obs, steps + more)
    for step in more:
        np.testing.assert_array_equal(step.obs[[0, 2]], other.step(action).obs[[0, 2]])


def test_a_replaced_row_that_ends_in_that_step():
    env = rows(max_frames=12)
    obs, steps = play(env, 2)
    env.replace(0)
    steps += [env.step(np.zeros(2, np.int64)) for _ in range(6)]
    check_frames(env, obs, steps)
    assert [s.truncated.tolist() for s in steps[2:6]] == [[False, True], [False, False], [False, False], [True, False]]
    assert [s.valid.tolist() for s in steps[2:5]] == [[False, True], [True, False], [True, True]]


@pytest.mark.parametrize("where", ["an action", "send", "recv"])
def test_all_rows_are_made_anew_where_one_raises(where):
    env = rows(failures=1)
    obs, steps = play(env, 5)

    def fail(*_):
        raise OSError("broken")

    def broken_step():
        if where == "an action":
            return env.step(np.array([0, 6]))
        setattr(env.env, where, fail)
        return env.step(np.zeros(2, np.int64))

    step = broken_step()
    assert len(step.failures) == 1
    assert ("not in 0" if where == "an action" else "broken") in step.failures[0]
    assert not step.valid.any()
    assert step.starts.all()
    more = [step, *(env.step(np.zeros(2, np.int64)) for _ in range(5))]
    assert all(s.valid.all() for s in more[1:])
    check_frames(env, obs, steps + more)
    with pytest.raises(RunFailed, match=r"raised 2 times"):
        broken_step()


def test_wrappers_go_on_from_a_saved_state_and_the_native_form_does_not():
    native = rows()
    native.reset()
    assert native.save() is None
    with pytest.raises(ValueError, match="cannot be restored"):
        native.restore({}, {})
    env = rows(wrappers=True, sticky=0.25)
    play(env, 12)
    saved = env.save()
    other = rows(wrappers=True, sticky=0.25, seed=5)
    other.restore(*saved)
    for t in range(10):
        action = np.array([t % 6, 2])
        np.testing.assert_array_equal(env.step(action).obs, other.step(action).obs)


# -- options and names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"frameskip": 2}, "no option 'frameskip'. Did you mean frame_skip"),
        ({"repeat_action_probability": 0.1}, "Did you mean sticky?"),
        ({"stack_num": 4}, "Did you mean stack?"),
        ({"xyzzy": 1}, "There are: frame_skip, size"),
        ({"frame_skip": 0}, "env_kwargs.frame_skip: 0 is not between 1 and"),
        ({"frame_skip": 2.5}, "env_kwargs.frame_skip: must be a whole number, not 2.5"),
        ({"frame_skip": True}, "must be a whole number"),
        ({"episodic_life": 1}, "env_kwargs.episodic_life: must be true or false, not 1"),
        ({"sticky": 1.5}, "env_kwargs.sticky: 1.5 is not between 0 and 1"),
        ({"sticky": float("nan")}, "env_kwargs.sticky"),
        ({"noop_max": -1}, "env_kwargs.noop_max"),
        ({"threads": 0}, "env_kwargs.threads"),
        ({"mode": 1}, "env_kwargs.mode: works only with wrappers=true"),
        ({"wrappers": True, "episodic_life": True}, "env_kwargs.episodic_life: works only with wrappers=false"),
        ({"wrappers": True, "mode": 77}, "env_kwargs: PongNoFrameskip-v4"),
    ],
)
def test_options_that_make_no_sense(options, said):
    with pytest.raises(ConfigError) as e:
        rows(copies=1, **options)
    assert said in str(e.value)


def test_wrappers_need_opencv(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ConfigError, match="pip install opencv-python-headless"):
        rows(wrappers=True)


def test_what_only_one_form_can_do():
    assert rows(full_action_space=True).head.sizes == rows(full_action_space=True, wrappers=True).head.sizes == (18,)
    plain, fired = (rows(BREAKOUT, 1, noop_max=0, fire_reset=f) for f in (False, True))
    plain.reset()
    fired.reset()
    nothing = np.zeros(1, np.int64)
    assert not np.array_equal(*[[e.step(nothing).obs for _ in range(10)][-1] for e in (plain, fired)])  # a ball
    easy, hard = (rows(PONG, 1, wrappers=True, noop_max=0, difficulty=d) for d in (0, 1))
    assert not np.array_equal(play(easy, 60)[1][-1].obs, play(hard, 60)[1][-1].obs)
    pictured = rows(PONG, 1, **atari.drawn({"threads": 2, "stack": 2}, "rgb_array"))
    pictured.reset()
    assert pictured.shape == (2, 84, 84)
    assert pictured.envs[0].render().shape == (210, 160, 3)


@pytest.mark.parametrize("name", ["ALE/Pong-v5", PONG, "ale_py:ALE/Pong-v5"])
def test_names_that_are_ours(name):
    assert atari.owns(name)
    run = from_dict({"env": name, "env_kwargs": {"noop_max": 2}})
    env = build.environment(run, Given(), 2, np.random.SeedSequence(0))
    assert isinstance(env, Atari)
    assert env.options.noop_max == 2
    env.close()
    env.close()  # no harm


@pytest.mark.parametrize("name", ["CartPole-v1", "Pong-v4", "PongNoFrameskip-v0", "other:ALE/Pong-v5", object])
def test_names_that_are_not(name):
    assert not atari.owns(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("ALE/Pongg-v5", "ALE/Pong-v5"), ("ALE/breakout-v5", "ALE/Breakout-v5"), ("Breakout-v5", "ALE/Breakout-v5"),
        ("BreakoutNoFrameskip", "BreakoutNoFrameskip-v4"), ("KaboomNoFrameskip-v4", "NoFrameskip-v4"),
    ],
)  # fmt: skip
def test_an_unknown_game_names_near_ones(name, near, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", name]) == 2
    said = capsys.readouterr().err
    assert near in said.split("Did you mean")[1]
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["ALE/Pong-v5", PONG, "ale_py:ALE/Pong-v5"])
def test_without_ale_py_one_line_says_what_to_install(name, monkeypatch, capsys, tmp_path):
    import gymnasium

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ale_py", None)
    without = {k: v for k, v in gymnasium.registry.items() if not str(v.entry_point).startswith("ale_py")}
    monkeypatch.setattr(gymnasium.envs.registration, "registry", without)
    monkeypatch.setattr(gymnasium, "registry", without)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream-rl\[atari\]'"):
        find(name)
    assert cli.run(["train", name]) == 2
    said = capsys.readouterr().err
    assert said == f"slipstream: env: {name} needs ale-py. Install it with: pip install 'slipstream-rl[atari]'\n"
    with pytest.raises(ConfigError, match="no environment 'CartPoll-v1'"):
        find("CartPoll-v1")
    monkeypatch.setattr(doctor, "installed", lambda package: package != "ale_py")
    (line,) = [e for e in doctor.environments() if e["id"].startswith("ALE/")]
    assert "slipstream-rl[atari]" in line["needs"]
    (check,) = [c for c in doctor.examine() if c["name"] == "extra atari"]
    assert not check["ok"]
    assert "slipstream-rl[atari]" in check["text"]


def test_games_are_listed():
    found = {e["id"]: e for e in doctor.environments()}
    for name in ("ALE/Pong-v5", PONG):
        assert found[name]["vector"]
        assert not found[name]["needs"]
    assert "PongNoFrameskip-v0" not in found
    assert [c["ok"] for c in doctor.examine() if c["name"] == "extra atari"] == [True]


def test_a_run(tmp_path, capsys):
    arguments = ["ALE/Pong-v5", "--backend", "thread", "--workers", "1", "--copies", "2", "--total-steps", "100"]
    assert cli.run(["train", *arguments, "--run", str(tmp_path / "r"), "--env-kwargs", "{size: 42}"]) == 0
    assert capsys.readouterr().out


def test_returns_are_of_the_game_and_rewards_learned_from_are_clipped():
    """Scores of all lives together are reported, raw; what is learned from is clipped, and ends with each life."""
    from functools import partial

    from slipstream.actions import sample
    from slipstream.counters import ROW
    from slipstream.rollout import Collector, Normalizer

    env = rows(BREAKOUT, 1, episodic_life=True, fire_reset=True, noop_max=0)
    logits = np.zeros((1, env.head.outputs), np.float32)
    zero, none = np.zeros(1, np.float32), np.zeros((1, 0), np.float32)
    c = Collector(
        env, 1500, lambda o, s, b: (logits, none), lambda o, s, b: (zero, none), partial(sample, env.head),
        np.random.Generator(np.random.PCG64(0)), 0, Normalizer(env.shape, False, False, 0.99), np.zeros(ROW),
    )  # fmt: skip
    r = c.collect(0, lambda: False)
    assert r is not None
    lives, games = int(r.terminated.sum()), len(r.episodes)
    assert games >= 1
    assert lives >= 5 * games  # Breakout has five lives
    first = r.episodes[0][0]
    assert r.episodes[0][1] == c.raw_reward[: first + 1].sum()
    assert set(np.unique(r.reward)) <= {-1.0, 0.0, 1.0}
    env.close()
