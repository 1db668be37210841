"""The errors a user can cause, and the sentences that explain them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SlipstreamError(Exception):
    """Base of every error whose message is meant for the user; the CLI prints it and exits."""

    exit_code = 1


class ConfigError(SlipstreamError):
    """The request cannot be carried out as given. Exit code 2, nothing was started."""

    exit_code = 2


class RunFailed(SlipstreamError):
    """A run that had started had to end. What was trained is in its last checkpoint."""


class Interrupted(SlipstreamError):
    """The user stopped the run (Ctrl-C or SIGTERM); it was checkpointed first."""

    exit_code = 130


def nearest(name: str, valid: Iterable[str], count: int = 3, cutoff: float = 0.5) -> list[str]:
    """The valid names closest to `name`, nearest first; case is ignored. `cutoff` 0 always finds some."""
    by_lower = {v.lower(): v for v in valid}
    close = difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=cutoff)
    return [by_lower[c] for c in close]


def unknown(what: str, name: str, valid: Iterable[str]) -> ConfigError:
    """An error that names the field, the value and the nearest valid names."""
    names = sorted(valid)
    near = nearest(name, names)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    shown = ", ".join(names) if len(names) <= 12 else ""
    allowed = f" Valid: {shown}." if shown else ""
    return ConfigError(f"{what}: no such value {name!r}.{hint}{allowed}")
