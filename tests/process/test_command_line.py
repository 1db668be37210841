"""The `slipstream` command: answers, refusals, and what it prints where."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Outcome, command, environment

import slipstream as ss
from slipstream import cli, config

TINY = ("--workers", "1", "--copies", "2", "--algo.rollout-steps", "5", "--backend", "thread", "--show", "none")


def do(*arguments: object) -> int:
    """Carry out a command in this process."""
    try:
        return cli.run([str(a) for a in arguments])
    except SystemExit as e:
        return int(e.code or 0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_json_of_every_command(tmp_path: Path) -> None:
    """One object on standard output and nothing else there."""
    run = tmp_path / "r"
    done = command("train", "CartPole-v1", "--workers", 1, "--total-steps", 3000, "--run", run, "--json")
    assert done.code == 0, done
    assert done.json["steps"] >= 3000
    assert done.json["run"] == str(run)
    done = command("resume", run, "--total-steps", 4000, "--json")
    assert done.code == 0, done
    assert done.json["steps"] >= 4000
    done = command("eval", run, "--episodes", 3, "--json")
    assert done.code == 0, done
    assert done.json["episodes"] == 3
    assert len(done.json["returns"]) == 3
    done = command("replay", run, "--json")
    assert done.json["identical"] is True


def strict(text: str) -> Any:
    assert text.count("\n") == 1

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("steps", [0, 1])
def test_json_of_a_run_without_an_episode(steps: int, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A budget of nothing, or smaller than a rollout: no NaN, and the overshoot is told."""
    assert do("train", "Acrobot-v1", *TINY, "--total-steps", steps, "--run", "r", "--json") == 0
    summary = strict(capsys.readouterr().out)
    assert summary["steps"] == (0 if steps == 0 else 10)
    assert summary["steps_asked"] == steps
    assert summary["mean_return"] is None
    assert do("replay", "r", "--json") == 0
    assert strict(capsys.readouterr().out)["steps"] == summary["steps"]
    assert do("train", "Acrobot-v1", *TINY, "--total-steps", steps, "--run", "plain") == 0
    text = capsys.readouterr().out
    assert "no episode has ended yet" in text
    assert ("over the budget" in text) == (steps == 1)


def test_json_of_the_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert do("envs", "cartpole", "--json") == 0
    assert "CartPole-v1" in [e["id"] for e in strict(capsys.readouterr().out)["environments"]]
    assert do("algos", "--json") == 0
    found = strict(capsys.readouterr().out)
    assert set(found["rules"]) >= {"lock", "hogwild", "sync"}
    assert "a3c" in found["algorithms"]
    assert do("doctor", "--json") == 0
    assert strict(capsys.readouterr().out)["ok"] is True
    for name in ("envs", "algos", "doctor"):
        assert do(name) == 0
        assert capsys.readouterr().out


# -- refusals: exit code 2, a sentence that names the right thing, nothing started ---------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "CartPole-v1", "--algo.learning-rte", "1"], ["learning-rate"]),
        (["train", "NoSuchEnv-v1"], ["NoSuchEnv-v1"]),
        (["train", "CartPole-v1", "--update", "lok"], ["lok", "lock"]),
        (["eval", "nowhere"], ["nowhere"]),
    ],
)
def test_refusal(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    done = command(*arguments, cwd=tmp_path)
    assert done.code == 2
    assert done.out == ""
    assert "Traceback" not in done.err
    assert "\x1b" not in done.err
    for word in words:
        assert word in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian", "CartPole-v1"], ["'train'"]),
        (["train"], ["which environment"]),
        (["train", "CartPol-v1"], ["CartPole-v1"]),
        (["train", "CartPole-v7"], ["CartPole"]),
        (["train", "no_such_module:Thing-v0"], ["no_such_module"]),
        (["train", "CartPole-v1", "--update", "hogwyld"], ["hogwild"]),
        (["train", "CartPole-v1", "--algorithm", "a3d"], ["a3c"]),
        (["train", "CartPole-v1", "--algo", "a3d"], ["a3c"]),
        (["train", "CartPole-v1", "--backend", "threads"], ["thread"]),
        (["train", "CartPole-v1", "--workers", "-1"], ["workers"]),
        (["train", "CartPole-v1", "--workers", "many"], ["many"]),
        (["train", "CartPole-v1", "--workers", "2000"], ["1024"]),
        (["train", "CartPole-v1", "--total-steps", "-5"], ["total_steps"]),
        (["train", "CartPole-v1", "--copies", "0"], ["copies"]),
        (["train", "CartPole-v1", "--algo.gamma", "1.5"], ["algo.gamma"]),
        (["train", "CartPole-v1", "--algo.rollout-steps", "0"], ["algo.rollout_steps"]),
        (["train", "CartPole-v1", "--limits.hang-seconds", "-1"], ["hang_seconds"]),
        (["train", "CartPole-v1", "--check-reads", "--update", "hogwild"], ["check_reads", "hogwild"]),
        (["train", "CartPole-v1", "--record", "maybe"], ["maybe"]),
        (["train", "CartPole-v1", "--record=perhaps"], ["record", "perhaps"]),
        (["train", "CartPole-v1", "--config", "nowhere.yaml"], ["nowhere.yaml"]),
        (["train", "--config", "typo.yaml"], ["algo.learning_rte", "algo.learning_rate"]),
        (["train", "--config", "list.yaml"], ["list.yaml"]),
        (["train", "--config", "broken.yaml"], ["broken.yaml", "YAML"]),
        (["train", "CartPole-v1", "--run", "used"], ["used", "slipstream resume used"]),
        (["train", "CartPole-v1", "--run", "typo.yaml"], ["typo.yaml"]),
        (["resume"], ["which run"]),
        (["resume", "used"], ["used"]),
        (["replay", "used"], ["used"]),
        (["eval", "used"], ["used"]),
        (["eval", "used", "--episodes", "0"], ["episodes"]),
        (["replay", "used", "--until", "3"], ["until-update"]),
    ],
)
def test_refused(arguments: list[str], words: list[str], here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "typo.yaml").write_text("env: CartPole-v1\nalgo: {learning_rte: 1}\n")
    (here / "list.yaml").write_text("- env\n")
    (here / "broken.yaml").write_text("env: [\n")
    (here / "used").mkdir()
    (here / "used" / "something").write_text("")
    before = sorted(p.name for p in here.rglob("*"))
    assert do(*arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    for word in words:
        assert word in err
    assert sorted(p.name for p in here.rglob("*")) == before


# -- options ------------------------------------------------------------------------------------------

FLAGS = (
    "record", "check-reads", "rule.staleness-scaling", "normalize-observations", "normalize-rewards",
    "watch.tensorboard", "algo.normalize-advantages",
)  # fmt: skip


def test_every_flag_is_tried_here() -> None:
    def flags(value: Any, where: str = "") -> set[str]:
        found = set()
        for f in dataclasses.fields(value):
            inner = getattr(value, f.name)
            if isinstance(inner, bool):
                found.add(f"{where}{f.name}".replace("_", "-"))
            elif dataclasses.is_dataclass(inner):
                found |= flags(inner, f"{where}{f.name}.")
        return found

    assert flags(config.from_dict({})) == set(FLAGS)


@pytest.mark.parametrize("word", ["false", "False", "no", "0", "true", "True", "yes", "1"])
def test_flags_with_a_word(word: str, here: Path) -> None:
    """`--flag False` means false."""
    given = [part for name in FLAGS for part in (f"--{name}", word)]
    assert do("train", "CartPole-v1", *TINY, "--total-steps", 0, "--run", "r", *given) == 0
    joined = [f"--{name}={word}" for name in FLAGS]
    assert do("train", "CartPole-v1", *TINY, "--total-steps", 0, "--run", "joined", *joined) == 0
    for place in ("r", "joined"):
        found = yaml.safe_load((here / place / "config.yaml").read_text())
        for name in FLAGS:
            value: Any = found
            for key in name.replace("-", "_").split("."):
                value = value[key]
            assert value is (word.lower() in ("true", "yes", "1")), name


@pytest.mark.parametrize("name", FLAGS)
def test_flag_with_nonsense(name: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert do("train", "CartPole-v1", *TINY, "--total-steps", 0, f"--{name}", "maybe") == 2
    assert "maybe" in capfd.readouterr().err
    assert not list(here.iterdir())


def test_configuration_runs_again(here: Path) -> None:
    """The file in the run directory makes the same run; options go over it."""
    options = (
        "--total-steps",
        2000,
        "--seed",
        5,
        "--algo.learning-rate",
        2e-3,
        "--normalize-rewards",
        "--net.hidden",
        8,
        4,
    )
    assert do("train", "CartPole-v1", *TINY, *options, "--run", "first") == 0
    assert do("train", "--config", "first/config.yaml", "--run", "second", "--show", "none") == 0
    assert (here / "first" / "config.yaml").read_text() == (here / "second" / "config.yaml").read_text()
    first, second = Outcome(here / "first").state, Outcome(here / "second").state
    assert first["weights_checksum"] == second["weights_checksum"]
    assert first["steps"] == second["steps"] >= 2000
    assert do("train", "--config", "first/config.yaml", "--run", "third", "--show", "none", "--seed", 6) == 0
    third = Outcome(here / "third").state
    assert third["config"] == {**first["config"], "seed": 6}
    assert third["weights_checksum"] != first["weights_checksum"]


# -- output -------------------------------------------------------------------------------------------


def test_plain_lines_in_a_pipe(tmp_path: Path) -> None:
    """No control characters, however large a terminal the environment promises."""
    done = command("train", "CartPole-v1", "--workers", 2, "--total-steps", 5000, cwd=tmp_path, timeout=60)
    assert done.code == 0, done
    assert done.err == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.out)
    lines = done.out.splitlines()
    assert lines[0].startswith("run runs/CartPole-v1-a3c-")
    assert any(line.startswith("steps ") for line in lines)
    assert any(line.strip().startswith("slipstream eval runs/") for line in lines)
    (run,) = (tmp_path / "runs").iterdir()
    assert f"run: runs/{run.name}" in lines
    assert {"config.yaml", "metrics.jsonl", "log.jsonl", "schedule.bin", "checkpoints"} <= set(os.listdir(run))


def test_reader_that_goes_away(tmp_path: Path) -> None:
    """`slipstream envs | head -1` is no error."""
    import subprocess
    import sys

    script = f'set -o pipefail; "{sys.executable}" -m slipstream envs | head -1'
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment(), check=False, cwd=tmp_path
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_runs_of_one_second_have_their_own_directories(here: Path) -> None:
    results: list[ss.Result] = []
    start = threading.Barrier(4)

    def one() -> None:
        start.wait()
        settings: dict[str, Any] = {"workers": 1, "copies": 1, "backend": "thread", "show": "none", "record": False}
        results.append(ss.train("CartPole-v1", total_steps=0, **settings))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({r.directory for r in results}) == 4
    assert len(list((here / "runs").iterdir())) == 4
