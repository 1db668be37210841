"""The properties of the house that must not change: who imports whom, how deep, how long, which five files."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream import build, config
from slipstream.config import Given
from slipstream.counters import Counter
from slipstream.store import Segment, Store, Word, initialize
from slipstream.worker import Worker, loop

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "slipstream"
FILES = sorted(PACKAGE.rglob("*.py"))

MOST_LINES = 450
LONG_FILES = {
    "store.py": (590, "segment, lock, slots and the handle are one protocol, which is read and changed as a whole"),
    "session.py": (520, "the life of a run from start to end, in the order in which it happens"),
}
MOST_FUNCTION_LINES = 60
LONG_FUNCTIONS: dict[str, tuple[int, str]] = {}  # "file.py:Class.function": (lines, reason)


@cache
def trees() -> list[tuple[str, ast.Module]]:
    return [(str(file.relative_to(PACKAGE)), ast.parse(file.read_text())) for file in FILES]


def modules() -> Iterator[Any]:
    """Every module of the package (`__main__` and `launch` are safe to import)."""
    for file in FILES:
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        yield importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


# -- imports -----------------------------------------------------------------------------------------


def test_imports_flow_down() -> None:
    """The contracts of pyproject.toml, as `lint-imports` checks them."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Contracts: [2-9] kept, 0 broken", done.stdout), done.stdout


def test_every_module_is_in_the_layers() -> None:
    """A new file at the top of the package must be given its place, or nothing would be checked of it."""
    import tomllib

    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in linter["contracts"] if c["type"] == "layers")
    placed = {name.strip().removeprefix("slipstream.") for line in layers for name in line.split("|")}
    here = {f.relative_to(PACKAGE).parts[0].removesuffix(".py") for f in FILES} - {"__init__", "__main__"}
    assert here == placed


def test_rooms_do_not_know_each_other() -> None:
    """The algorithms, rules and environments, whatever files they get."""
    for name, tree in trees():
        room = name.split("/")[0]
        if room in ("algos", "rules", "envs"):
            for other in {"algos", "rules", "envs"} - {room}:
                imported = [m for m in imports(tree) if m.startswith(f"slipstream.{other}")]
                assert not imported, f"{name} imports {imported}"


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


def test_training_never_imports_torch_in_the_parent(tmp_path: Path) -> None:
    """It would cost seconds and 150 MB, and a process with torch's threads must not be forked."""
    code = (
        "import sys, slipstream as ss\n"
        "run = ss.train('CartPole-v1', workers=1, total_steps=600, run=sys.argv[1], show='none')\n"
        "assert run.updates > 0\n"
        "print('torch' in sys.modules, any(m.startswith('torch.') for m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["False", "False"], done.stdout + done.stderr


# -- size and shape ----------------------------------------------------------------------------------


def test_files_are_short() -> None:
    for file in FILES:
        name, lines = str(file.relative_to(PACKAGE)), len(file.read_text().splitlines())
        most = LONG_FILES.get(name, (MOST_LINES, ""))[0]
        assert lines <= most, f"{name} has {lines} lines, the most is {most}"


def test_functions_are_short() -> None:
    for name, tree in trees():
        for path, node in functions(tree):
            lines = (node.end_lineno or 0) - node.lineno + 1
            most = LONG_FUNCTIONS.get(f"{name}:{path}", (MOST_FUNCTION_LINES, ""))[0]
            assert lines <= most, f"{name}:{path} has {lines} lines, the most is {most}"


def test_exceptions_are_still_needed() -> None:
    for name in LONG_FILES:
        assert len((PACKAGE / name).read_text().splitlines()) > MOST_LINES, f"{name} is short now: strike it off"
    lengths = {
        f"{name}:{path}": (node.end_lineno or 0) - node.lineno + 1
        for name, tree in trees()
        for path, node in functions(tree)
    }
    for name in LONG_FUNCTIONS:
        assert lengths[name] > MOST_FUNCTION_LINES, f"{name} is short now: strike it off"


def functions(tree: ast.AST, where: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{where}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{where}{node.name}", node
            yield from functions(node, f"{where}{node.name}.")


def test_classes_are_shallow() -> None:
    """A class of ours has at most one class of ours above it: axes are arguments, not a tree of classes."""
    seen = 0
    for module in modules():
        for name, cls in list(vars(module).items()):
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                seen += 1
                above = [c.__name__ for c in cls.__mro__[1:] if c.__module__.startswith("slipstream")]
                # an error may name its kind of its kind: it inherits no behaviour
                most = 2 if issubclass(cls, slipstream.SlipstreamError) else 1
                assert len(above) <= most, f"{name} is under {above}"
    assert seen > 40


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_importing_a_submodule_does_not_hide_the_function_of_its_name(name: str) -> None:
    module = importlib.import_module(f"slipstream.{name}")
    setattr(slipstream, name, module)  # what the first import of a submodule does
    assert getattr(slipstream, name) is getattr(module, name)


def test_public_names_are_documented() -> None:
    assert slipstream.__all__ == sorted(slipstream.__all__)
    for name in slipstream.__all__:
        value = getattr(slipstream, name)
        assert inspect.getdoc(value), name
        assert value.__doc__.strip(), name
        assert not value.__doc__.startswith(f"{name}("), f"{name} has only the signature that dataclass writes"


def test_public_functions_and_classes_in_modules_are_documented() -> None:
    for name, tree in trees():
        assert ast.get_docstring(tree) is not None, f"{name} does not say what it is for"
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{name}:{node.name}"


# -- options -----------------------------------------------------------------------------------------

# class -> (its file, names under which an object of it is known where it is read)
OPTIONS = {
    "Run": ("config.py", {"run", "options", "old", "new", "ready", "base", "o"}),
    "Net": ("config.py", {"net"}),
    "Limits": ("config.py", {"limits"}),
    "Watch": ("config.py", {"watch", "options", "w"}),
    "Hyperparameters": ("algos/a3c.py", {"hyper", "algo", "a"}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_help(name: str) -> None:
    file, _ = OPTIONS[name]
    cls = next(n for n in ast.walk(ast.parse((PACKAGE / file).read_text())) if is_class(n, name))
    for field, following in zip(cls.body, [*cls.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            text = following.value if isinstance(following, ast.Expr) else None
            assert isinstance(text, ast.Constant), f"{name}.{field.target.id} has no help text"
            assert len(text.value) > 8, f"{name}.{field.target.id} has no help text"


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_read(name: str) -> None:
    """None is parsed, checked and then ignored."""
    file, known_as = OPTIONS[name]
    cls = next(n for n in ast.walk(ast.parse((PACKAGE / file).read_text())) if is_class(n, name))
    fields = {f.target.id for f in cls.body if isinstance(f, ast.AnnAssign)}
    assert fields
    read = {field for _, tree in trees() for owner, field in reads(tree) if owner in known_as}
    assert fields <= read, f"{name}: {sorted(fields - read)} change nothing"


def is_class(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.ClassDef) and node.name == name


def reads(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(owner, attribute) of every `owner.attribute` that is read, functions named `check` left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            yield (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")), node.attr
        yield from reads(node)


def test_options_reach_the_command_line() -> None:
    """Each field of a run is an option with its help."""
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "train", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "400", "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stderr
    for name, (file, _) in OPTIONS.items():
        group = {"Run": "", "Hyperparameters": "algo."}.get(name, f"{name.lower()}.")
        cls = next(n for n in ast.walk(ast.parse((PACKAGE / file).read_text())) if is_class(n, name))
        for field, text in zip(cls.body, cls.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and field.target.id not in ("env", "net", "algo", "limits", "watch"):
                flag = f"--{group}{field.target.id}".replace("_", "-")
                assert re.search(rf"{re.escape(flag)}\b", done.stdout), flag
                assert text.value.value.split(";")[0].split(" `")[0] in done.stdout, f"the help of {flag}"


# -- the path of one transition ----------------------------------------------------------------------

# what the five stops call on: arrays, numbers, memory; not part of the path
BESIDE = {
    "store.py", "optimize.py", "schedule.py", "moments.py", "counters.py", "record.py", "actions.py",
    "nets/heads.py", "nets/torsos.py", "nets/cores.py", "nets/policy.py", "envs/spaces.py",
}  # fmt: skip


def path_in(page: Path) -> list[set[str]]:
    """The stops that a page names, as `a.py` -> `b.py` and `c.py` -> ...; a set where the order is free."""
    found = re.findall(r"((?:`[\w/]+\.py`(?:\s+(?:->|and)\s+)?)+)", page.read_text())
    chains = [c for c in found if c.count("->") >= 3]
    assert len(chains) == 1, f"{page.name} must name the path once, as `worker.py` -> `rollout.py` -> ..."
    return [set(re.findall(r"`([\w/]+\.py)`", stop)) for stop in chains[0].split("->")]


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_one_transition_passes_through_the_files_named(page: str, entered: list[str]) -> None:
    stops = path_in(ROOT / page)
    assert len(stops) == 5
    named = set().union(*stops)
    assert all((PACKAGE / name).is_file() for name in named)
    stray = [name for name in entered if name not in named | BESIDE]
    assert not stray, f"{page} does not name {stray}; a transition entered {entered}"
    passed = [name for name in entered if name in named]
    position = 0
    for stop in stops:
        assert set(passed[position : position + len(stop)]) == stop, f"{page} says {stops}, it was {passed}"
        position += len(stop)
    assert position == len(passed)


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of ours that one iteration of the real loop enters, from the collection of a rollout to its push.

    In order of first entry.
    """
    place = tmp_path_factory.mktemp("path")
    base = config.from_dict({"env": "CartPole-v1", **config.preset("CartPole-v1")})
    run = config.check(config.from_dict({"workers": 1, "total_steps": 10_000}, base))
    layout, weights, _ = build.layout(run, Given())
    segment = Segment.create(layout.regions()[1], [str(place)])
    initialize(segment.path, layout, weights)
    store = Store(segment.path, 0)
    worker = Worker(run, Given(), 0, 0, store.row, lambda *a, **k: None, place / "bad")
    rule = build.rule(run, store, worker.env)
    files: list[str] = []
    pushes = 0

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal pushes
        name = os.path.relpath(frame.f_code.co_filename, PACKAGE)
        if event == "call" and frame.f_code is Worker.compute.__code__ and pushes == 1:
            files.append(name)  # the second iteration: nothing is imported or built any more
        elif event == "call" and files and pushes == 1 and not name.startswith("..") and name not in files:
            files.append(name)
        elif event == "return" and frame.f_code is type(rule).push.__code__:
            pushes += 1
            if pushes == 2:
                store.control[Word.STOP] = 1

    sys.setprofile(watch)
    try:
        loop(worker, rule, store, place)
    finally:
        sys.setprofile(None)
    assert pushes == 2
    assert store.row[Counter.UPDATES] == 2
    store.close()
    segment.close()
    return files
