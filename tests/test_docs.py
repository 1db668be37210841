"""The pages tell the truth: their code and commands run, and what they name exists.

What is run: every ```python block, and every line `$ slipstream ...` of a ```console block, each page in an empty
directory of its own with few steps. A python block that begins with a comment naming a file is that file. Blocks tagged
`text` are not run. At hand are the run OLD and the module mypackage, which pages use as examples.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipstream as ss
from slipstream import cli, config
from slipstream.counters import RING, Counter
from slipstream.store import Layout, Segment, Store, initialize
from slipstream.watch.metrics import Meter
from slipstream.watch.tensorboard import TAGS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "slipstream"
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
STEPS = 1500
OLD = "runs/CartPole-v1-a3c-20261201-120000"
MYPACKAGE = """
import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from torch import nn

gym.register("MyEnv-v0", entry_point=CartPoleEnv, max_episode_steps=100)

class Torso(nn.Linear):
    def __init__(self, shape):
        super().__init__(shape[0], 16)
"""


def blocks(page: str, tag: str) -> list[str]:
    return re.findall(rf"^```{tag}\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def commands(page: str) -> list[str]:
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    return [line.removeprefix("$ ").split("  #")[0].strip() for line in lines if line.startswith("$ slipstream ")]


def prose(page: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)


def named(page: str) -> Iterator[str]:
    """What stands between single backticks outside blocks."""
    yield from re.findall(r"`([^`\n]+)`", prose(page))


def short(command: str, backend: str) -> list[str]:
    """The arguments of a command, with few steps and episodes."""
    arguments = shlex.split(command)[1:]
    for i, a in enumerate(arguments[:-1]):
        if a == "--episodes":
            arguments[i + 1] = str(min(5, int(arguments[i + 1])))
        if a == "--seeds":
            arguments[i + 1] = "1"
    if arguments[0] == "compare":
        arguments += ["--total-steps", str(STEPS)]
    if arguments[0] == "tune-workers":
        arguments += ["--max-workers", "1", "--copies", "4", "--seconds", "0.5"]
    if arguments[0] in ("train", "resume"):
        if "--total-steps" in arguments:
            at = arguments.index("--total-steps")
            del arguments[at : at + 2]
        arguments += ["--total-steps", str(STEPS if arguments[0] == "train" else 2 * STEPS), "--backend", backend]
    return arguments


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run made by the command itself."""
    place = tmp_path_factory.mktemp("old")
    command = ["train", "CartPole-v1", "--workers", "2", "--total-steps", str(STEPS), "--run", OLD]
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", *command], cwd=place, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"slipstream replay {OLD}" in done.stdout
    return place / OLD


@pytest.fixture
def desk(tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with what pages take for granted."""
    shutil.copytree(old, tmp_path / OLD)
    (tmp_path / "mypackage.py").write_text(MYPACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- what runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p) and not p.endswith("algorithm.md")])
def test_commands_run(page: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(page):
        assert cli.run(short(command, "thread")) == 0, f"{command}\n{capsys.readouterr().err}"
        assert capsys.readouterr().out.strip(), f"{command} said nothing"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python") and not p.endswith("algorithm.md")])
def test_python_runs(page: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ss.train

    def train(*args: Any, **settings: Any) -> Any:
        settings["total_steps"] = min(STEPS, settings.get("total_steps", STEPS))
        return real(*args, backend="thread", show="none", **settings)

    monkeypatch.setattr(ss, "train", train)
    space: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), space)


def test_the_algorithm_of_the_worked_example(tmp_path: Path) -> None:
    page = "docs/adding-an-algorithm.md"
    shutil.copytree(PACKAGE, tmp_path / "slipstream", ignore=shutil.ignore_patterns("__pycache__"))
    (file,) = blocks(page, "python")
    name = re.match(r"# src/(slipstream/algos/\w+\.py)\n", file)[1]
    (tmp_path / name).write_text(file.partition("\n")[2])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*command: str, cwd: Path = tmp_path) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    driver = "import json, sys; from slipstream import cli; [cli.run(c) for c in json.loads(sys.argv[1])]"
    said = run("-c", driver, json.dumps([short(c, "thread") for c in commands(page)]))
    assert re.search(r"^  reinforce +the policy gradient of whole returns", said, re.M)
    assert re.search(r"^identical: ", said, re.M)
    made = config.read_yaml(tmp_path / "runs/reinforce/config.yaml")
    assert made["algorithm"] == "reinforce"
    assert made["algo"]["learning_rate"] == 3e-3  # its own, not the preset's
    assert json.loads((tmp_path / "runs/reinforce/summary.json").read_text())["updates"] > 0
    tests = ("-m", "pytest", "-p", "no:cacheprovider", "tests/contract/test_algos.py", "-k", "reinforce")
    assert " passed" in run(*tests, cwd=ROOT)
    # what the page says must be offered is what the example offers
    offered = {n.name for n in ast.walk(ast.parse(file)) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    asked = re.findall(r"^\| `(?:Hyperparameters\.)?(\w+)(?:\(.*?\))?` \|", prose(page).split("## A worked")[0], re.M)
    more = {"prepare", "minibatch", "too_far"}  # of algorithms with minibatches, which the example is not
    assert {"Hyperparameters", "check", "loss", "learning_rate"} == set(asked) - more == offered
    assert more <= set(asked)
    assert all(hasattr(config.module("algos", "ppo"), name) for name in more)


def test_fields_that_every_algorithm_needs_are_those_read_elsewhere() -> None:
    """Taking a field away from the example breaks a run only if the page names it."""
    text = (ROOT / "docs/adding-an-algorithm.md").read_text()
    paragraph = text[text.index("Six fields are read outside") :].split("All others")[0]
    said = set(re.findall(r"`(\w+)`", paragraph))
    found = set()
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name != "algos":
            found |= set(re.findall(r"\b(?:run\.algo|hyper|algo|a)\.(\w+)", file.read_text()))
    fields_of_a3c = {f.name for f in fields(config.hyperparameters("a3c"))}
    assert said == found & fields_of_a3c


# -- what is named -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_files_named_exist(page: str, old: Path) -> None:
    places = (ROOT, PACKAGE, ROOT / "docs", old)
    for name in named(page):
        if re.fullmatch(r"\.?[\w-][\w./-]*(\.(py|md|yaml|toml|jsonl?|bin|txt|png)|/)", name) and "bad/" not in name:
            there = any((place / name).exists() for place in places) or any(old.rglob(name.rstrip("/")))
            assert there or name == ".venv", f"{page}: {name}"


@pytest.mark.parametrize("page", PAGES)
def test_options_named_exist(page: str) -> None:
    from slipstream.options import flags

    every = set(flags(config.Run)) | {f"--{name.replace('_', '-')}" for name in options()}
    every |= {f"--{n}" for n in ("config", "run", "show", "json", "help", "episodes", "sample", "until-update")}
    every |= {f"--no-{f[2:]}" for f in flags(config.Run)} | {"--shm-size", "--logdir"}
    for option in re.findall(r"--[a-z][\w.-]*", " ".join(named(page))):
        assert option in every, f"{page}: {option}"
    for name in named(page):
        if re.fullmatch(r"(limits|watch|net|algo|rule)\.[a-z_]+", name):
            assert name in options(), f"{page}: {name}"


def options() -> set[str]:
    """Every option of a run, as `limits.max_restarts`."""
    groups = [("net", config.Net), ("limits", config.Limits), ("watch", config.Watch), ("rule", config.Rule)]
    groups += [("algo", config.hyperparameters(name)) for name in config.names("algos")]
    return {f.name for f in fields(config.Run)} | {f"{g}.{f.name}" for g, cls in groups for f in fields(cls)}


@pytest.mark.parametrize("page", PAGES)
def test_names_of_code_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for name in set(re.findall(r"\bss\.(\w+)", text)):
        assert hasattr(ss, name), f"{page}: ss.{name}"
    classes: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(n.name for n in node.body if isinstance(n, ast.FunctionDef))
    for name in named(page):
        m = re.fullmatch(r"([A-Z]\w+)\.(\w+)(?:\(.*\))?", name)
        if m:
            assert m[2] in classes.get(m[1], ()), f"{page}: {name}"


def table(page: str, heading: str) -> list[list[str]]:
    """Rows of the first table under a heading, without the head; cells without backticks."""
    section = (ROOT / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in row.strip().removeprefix("|").split("|")] for row in rows]


def test_metrics_are_those_of_the_code(tmp_path: Path, old: Path) -> None:
    rows = table("docs/runs.md", "Metrics")
    described = [row[0] for row in rows]
    assert len(described) == len(set(described))

    layout = Layout(16, (("step", 1),), 0, 1, in_place=True)
    segment = Segment.create(layout.regions()[1], [str(tmp_path)])
    initialize(segment.path, layout, np.zeros(16, np.float32))
    store = Store(segment.path, 0)
    meter = Meter(store, 100)
    store.rows[0, [Counter.LEARNED, Counter.READS, Counter.EPISODE_HEAD]] = 1
    assert RING > 1
    meter.episodes.look(store, None)
    written = set(meter.look()) | set(re.findall(r'\bm\["(\w+)"\]', (PACKAGE / "session.py").read_text()))
    store.close()
    segment.close()
    assert set(described) == written

    lines = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    assert lines
    for line in lines:
        assert set(line) <= set(described)

    tags = {row[0]: row[1] for row in rows if row[1]}
    assert tags.pop("steps") == "the x-axis"
    assert tags.pop("worker_steps_per_second") == "workers/N_steps_per_second"
    assert tags == TAGS


def test_the_run_directory_is_as_described(old: Path) -> None:
    described = [row[0] for row in table("docs/runs.md", "The run directory")]
    there = {p.name + ("/" if p.is_dir() else "") for p in old.iterdir() if not p.name.startswith(".")}
    assert set(described) - {"bad/"} == there


def test_limits_are_those_of_the_code() -> None:
    rows = table("docs/runs.md", "Limits")
    said = {row[0]: 0.0 if row[1] == "none" else float(row[1]) for row in rows}
    assert said == {f"limits.{k}": float(v) for k, v in vars(config.Limits()).items()}


def test_seeds_are_those_of_the_code() -> None:
    from slipstream.build import Role

    rows = table("docs/architecture.md", "Seeds")
    assert [int(re.match(r"\((\d)", row[1])[1]) for row in rows] == [int(r) for r in Role]


def test_rooms_are_those_of_the_package() -> None:
    cells = " ".join(row[0] for row in table("docs/architecture.md", "Rooms"))
    described = re.findall(r"[\w/]+\.py|\w+/", cells)
    there = {f.name for f in PACKAGE.glob("*.py")} | {f"{d.name}/" for d in PACKAGE.iterdir() if d.is_dir()}
    assert sorted(described) == sorted(there - {"__init__.py", "presets/", "__pycache__/"})
