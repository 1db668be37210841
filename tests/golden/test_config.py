"""A run as data: YAML there and back, and errors that name the option, its value and the nearest valid one."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import slipstream.envs.hidden  # noqa: F401  (registers our environments)
from slipstream import config
from slipstream.config import Run, check, differences, from_dict, nested, to_dict
from slipstream.errors import ConfigError, SlipstreamError, nearest, unknown


def other(hint: Any, value: Any) -> Any:
    """A valid value of the same type that is not `value`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return next(a for a in args if a != value)
    if origin in (typing.Union, types.UnionType):
        return other(next(a for a in args if a is not type(None)), value)
    if origin is tuple:
        return (*value, 32)
    if origin is dict:
        return {"size": 3, "inner": {"a": [1, 2.5], "b": None}, "name": "x"}
    return {bool: lambda: not value, int: lambda: (value or 0) + 1, str: lambda: "other"}.get(
        hint, lambda: 0.125 + (value or 0.0) / 2
    )()


def fields(base: Any, where: str = "") -> list[tuple[str, Any]]:
    """Every option of a run, as (dotted name, another valid value)."""
    hints, found = typing.get_type_hints(type(base)), []
    for f in dataclasses.fields(base):
        value = getattr(base, f.name)
        if dataclasses.is_dataclass(value):
            found += fields(value, f"{where}{f.name}.")
        elif f.name != "algorithm":
            found.append((where + f.name, other(hints[f.name], value)))
    return found


FIELDS = fields(from_dict({}))


def get(run: Any, name: str) -> Any:
    for part in name.split("."):
        run = getattr(run, part)
    return run


@pytest.mark.parametrize(("name", "value"), FIELDS, ids=[n for n, _ in FIELDS])
def test_every_option_survives_yaml(tmp_path, name, value):
    run = from_dict(nested({name: value}))
    assert get(run, name) == value
    assert type(get(run, name)) is type(value)
    assert get(from_dict({}), name) != value
    config.save(run, tmp_path / "run.yaml")
    assert config.load(tmp_path / "run.yaml") == run
    assert [line.split(":")[0] for line in differences(from_dict({}), run)] == [name]


def test_all_options_at_once_survive_yaml(tmp_path):
    assert len(FIELDS) > 40
    run = from_dict(nested(dict(FIELDS)))
    config.save(run, tmp_path / "run.yaml")
    assert config.load(tmp_path / "run.yaml") == run
    assert len(differences(from_dict({}), run)) == len(FIELDS)
    assert differences(run, run) == []
    assert from_dict(to_dict(run)) == run


def test_every_option_has_a_line_of_documentation():
    for kind in (Run, config.Net, config.Limits, config.Watch, config.hyperparameters("a3c")):
        source = Path(inspect.getfile(kind)).read_text()
        for f in dataclasses.fields(kind):
            after = source.split(f"    {f.name}:", 1)[1].splitlines()[1]
            assert after.strip().startswith('"""'), f"{kind.__name__}.{f.name}"


def test_a_part_of_a_file_is_laid_over_the_base():
    base = from_dict({"seed": 5, "algo": {"gamma": 0.5}})
    run = from_dict({"algo": {"entropy": 0.25}}, base)
    assert (run.seed, run.algo.gamma, run.algo.entropy) == (5, 0.5, 0.25)
    assert differences(base, run) == ["algo.entropy: 0.01 -> 0.25"]
    assert base.algo.entropy == 0.01


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"totl_steps": 5}, "total_steps"),
        ({"algo": {"learning_rte": 1}}, "algo.learning_rate"),
        ({"algo": {"learning-rte": 1}}, "algo.learning_rate"),
        ({"net": {"hiden": [3]}}, "net.hidden"),
        ({"limits": {"max_restart": 5}}, "limits.max_restarts"),
        ({"watch": {"tensorbord": True}}, "watch.tensorboard"),
        ({"algorithm": "a4c"}, "a3c"),
        ({"net": {"core": "lstn"}}, "lstm"),
        ({"algo": {"optimizer": "adan"}}, "adam"),
        ({"backend": "threads"}, "thread"),
        ({"workers": "atuo"}, "auto"),
        ({7: 1}, "7"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(values, said):
    with pytest.raises(ConfigError) as e:
        from_dict(values)
    assert said in str(e.value)
    assert e.value.exit_code == 2


@pytest.mark.parametrize("name", [n for n, _ in FIELDS if n != "env_kwargs"])
def test_a_value_of_the_wrong_type_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        from_dict(nested({name: ["x", {}]}))
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        from_dict(nested({name: {"a": 1}}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1.5), ("seed", True), ("seed", "1"), ("seed", None), ("total_steps", float("inf")),
        ("total_steps", float("nan")), ("record", 1), ("record", "false"), ("record", None), ("algo.gamma", "x"),
        ("algo.gamma", True), ("algo.gamma", None), ("env", 3), ("env", None), ("env_kwargs", [1]),
        ("env_kwargs", "a"), ("net", "mlp"), ("algo", None), ("net.hidden", 64), ("net.hidden", "64"),
        ("net.hidden", [1.5]), ("target_return", "high"), ("algorithm", 3), ("algorithm", ["a3c"]), ("workers", True),
    ],
)  # fmt: skip
def test_nothing_is_converted_by_accident(name, value):
    with pytest.raises(ConfigError, match=name.split(".")[-1]):
        from_dict(nested({name: value}))


@pytest.mark.parametrize(
    ("name", "given_", "got"),
    [
        ("seed", 3.0, 3),
        ("algo.learning_rate", "1e-3", 1e-3),  # YAML reads it as text
        ("algo.learning_rate", 1, 1.0),
        ("target_return", None, None),
        ("target_return", 475, 475.0),
        ("workers", "auto", "auto"),
        ("net.hidden", [], ()),
        ("net.hidden", [8, 8.0], (8, 8)),
    ],
)
def test_what_yaml_writes_otherwise_is_understood(name, given_, got):
    value = get(from_dict(nested({name: given_})), name)
    assert value == got
    assert type(value) is type(got)


def test_dashes_are_underscores():
    assert from_dict({"total-steps": 9, "algo": {"learning-rate": 0.5}}).total_steps == 9


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"update": "hogwild", "check_reads": True}, ["check_reads", "hogwild", "lock"]),
        ({"update": "lok"}, ["update", "lok", "'lock'"]),
        ({"net.core": "lstm", "net.critic": "separate"}, ["net.critic", "separate", "shared"]),
        ({"net.torso": "my.Torso", "net.critic": "separate"}, ["net.critic"]),
        ({"net.hidden": [4, 0]}, ["net.hidden"]),
        ({"net.core_size": 0}, ["net.core_size", "0"]),
        ({"copies": 0}, ["copies", "0", "1"]),
        ({"workers": -1}, ["workers", "-1"]),
        ({"workers": 100_000}, ["workers", "1024"]),
        ({"total_steps": -1}, ["total_steps"]),
        ({"target_window": 0}, ["target_window"]),
        ({"seed": -1}, ["seed"]),
        ({"limits.hang_seconds": -1}, ["hang_seconds"]),
        ({"limits.hang_seconds": float("nan")}, ["hang_seconds"]),
        ({"watch.every": -0.5}, ["every"]),
        ({"algo.gamma": 1.5}, ["algo.gamma", "1.5"]),
        ({"algo.gamma": float("nan")}, ["algo.gamma"]),
        ({"algo.gae_lambda": -0.1}, ["algo.gae_lambda"]),
        ({"algo.rmsprop_decay": 2}, ["algo.rmsprop_decay"]),
        ({"algo.learning_rate": -1e-3}, ["algo.learning_rate", "-0.001"]),
        ({"algo.learning_rate": float("nan")}, ["algo.learning_rate"]),
        ({"algo.rollout_steps": 0}, ["algo.rollout_steps"]),
        ({"algo.max_gradient_norm": -1}, ["algo.max_gradient_norm"]),
        ({"algo.schedule_steps": -1}, ["algo.schedule_steps"]),
    ],
)
def test_contradictions_and_ranges_are_checked_in_one_place(values, said):
    with pytest.raises(ConfigError) as e:
        check(from_dict(nested(values)))
    for word in said:
        assert word in str(e.value)


def test_a_checked_run_knows_its_number_of_workers(monkeypatch):
    monkeypatch.setattr(config, "usable_cores", lambda: 3)
    assert check(from_dict({})).workers == 3
    assert check(from_dict({"workers": 5})).workers == 5
    assert check(from_dict({"workers": "auto"})).workers == "auto"
    assert check(from_dict({"total_steps": 0})).total_steps == 0


def test_dotted_names_become_nested():
    assert nested({"a": 1, "algo.gamma": 0.9, "algo.entropy": 0.1}) == {
        "a": 1,
        "algo": {"gamma": 0.9, "entropy": 0.1},
    }
    assert nested({"algo": {"gamma": 0.9}, "algo.entropy": 0.1}) == {"algo": {"gamma": 0.9, "entropy": 0.1}}
    assert nested({"algo.entropy": 0.1, "algo": {"gamma": 0.9}}) == {"algo": {"gamma": 0.9, "entropy": 0.1}}
    assert nested({"env_kwargs": {"a.b": 1}}) == {"env_kwargs": {"a.b": 1}}  # the environment's own names
    assert nested({"env_kwargs.map": "4x4"}) == {"env_kwargs": {"map": "4x4"}}


def presets() -> list[str]:
    files = (config.HERE / "presets").glob("*.yaml")
    return [i for f in files for ids in yaml.safe_load(f.read_text()) for i in str(ids).split()]


@pytest.mark.parametrize("env", presets())
def test_presets_load_check_and_name_environments_that_exist(env):
    run = check(from_dict({"env": env, **config.preset(env)}))
    assert run.env == env
    assert differences(from_dict({"env": env}), run)
    gym.spec(env)
    assert config.preset(f"module:{env}") == config.preset(env)


def test_no_preset_is_no_options():
    assert len(presets()) == len(set(presets())) > 0
    assert config.preset("NoSuchEnv-v1") == {}


@pytest.mark.parametrize(
    ("text", "said"), [("[1, 2]", "no options"), ("", "no options"), ("a: [", "not YAML"), ("seed: x", "seed")]
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, text, said):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        config.load(file)
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        config.load(tmp_path / "gone.yaml")


def test_yaml_cannot_run_code(tmp_path):
    marker = tmp_path / "marker"
    (tmp_path / "run.yaml").write_text(f"!!python/object/apply:os.system ['touch {marker}']")
    with pytest.raises(ConfigError):
        config.load(tmp_path / "run.yaml")
    assert not marker.exists()


def test_the_command_line_type_has_the_fields_of_the_algorithm():
    made = config.run_type("a3c")
    assert issubclass(made, Run)
    assert made().algo == config.hyperparameters("a3c")()
    assert dataclasses.replace(made(), algo=None) == made(**{**vars(made()), "algo": None})


def test_rooms_list_their_files():
    assert {"lock", "hogwild", "sync"} <= set(config.names("rules"))
    assert "a3c" in config.names("algos")
    with pytest.raises(ConfigError, match="'lock'"):
        config.module("rules", "locked")


# -- errors ----------------------------------------------------------------------------------------


def test_the_nearest_name_comes_first_whatever_its_case():
    assert nearest("cartpole-v1", ["Acrobot-v1", "CartPole-v0", "CartPole-v1"])[0] == "CartPole-v1"
    assert nearest("zzz", ["lock", "sync"]) == []
    assert len(nearest("zzz", ["lock", "sync", "hogwild", "server"], cutoff=0.0)) == 3
    assert nearest("a", []) == []


def test_an_unknown_name_says_what_is_valid_unless_that_is_too_much():
    few, many = unknown("update", "lok", ["lock", "sync"]), unknown("env", "e1x", [f"e{i}" for i in range(50)])
    assert "Did you mean 'lock'?" in str(few)
    assert "lock, sync" in str(few)
    assert "Valid" not in str(many)
    assert isinstance(few, SlipstreamError)


WORDS = st.text("abcXYZ_-.0é\n", max_size=12)


@given(WORDS, st.lists(WORDS.filter(bool), max_size=20))
def test_any_name_gets_an_answer(name, valid):
    assert set(nearest(name, valid)) <= set(valid)
    assert repr(name) in str(unknown("x", name, valid))


def test_a_group_given_as_a_value_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"algo\.gamma: algo is given as 3 too"):
        config.nested({"algo": 3, "algo.gamma": 1})


@pytest.mark.parametrize("algorithm", [None, *config.names("algos")])
def test_every_preset_is_valid_for_every_algorithm(algorithm):
    files = sorted((config.HERE / "presets").glob("*.yaml"))
    environments = [e for file in files for ids in yaml.safe_load(file.read_text()) for e in ids.split()]
    assert "LunarLander-v3" in environments
    for env in environments:
        made = config.from_dict({"env": env, **config.preset(env, algorithm)})
        config.check(made)
        assert algorithm in (None, made.algorithm)


def test_a_preset_says_what_is_different_for_an_algorithm():
    a3c, ppo = (config.from_dict({"env": "CartPole-v1", **config.preset("CartPole-v1", a)}) for a in (None, "ppo"))
    assert (a3c.algorithm, a3c.algo.rollout_steps, a3c.copies) == ("a3c", 16, 8)
    assert (ppo.algorithm, ppo.algo.rollout_steps, ppo.copies, ppo.update) == ("ppo", 32, 4, "sync")
    assert ppo.target_return == a3c.target_return  # what is not different is the same
    other = config.from_dict({"env": "LunarLander-v3", **config.preset("LunarLander-v3", "a3c")})
    assert (other.algorithm, other.update, other.normalize_rewards) == ("a3c", "lock", True)
    assert config.preset("NoSuchEnv-v1", "ppo") == {"algorithm": "ppo"}
