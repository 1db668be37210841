"""A model of what cannot be run here: steps/s, waiting and staleness of each update rule for 1 to 1,024 workers.

    python benchmarks/simulate_scaling.py                     measure, validate, predict: about 5 minutes
    python benchmarks/simulate_scaling.py --quick             one short repeat: does everything run?
    python benchmarks/simulate_scaling.py --times times.json  service times from there, or kept there
    python benchmarks/simulate_scaling.py --out page.md       the tables as a page (.json: everything as JSON)

A discrete-event simulation (simpy) of workers, cores, lock and server. Every service time is measured first
(scaling_times.py): means in real runs of ONE worker of each rule; the spread of rollouts, and what a run of one worker
cannot tell (a further gradient in a mean, a look at a further ring, a lock that others want, all cores busy at
once), with the same classes by themselves. Then the model is asked for 2, 4 and 8 workers on this machine and held
against real runs, which take turns with those of one worker. Target: within 20 % of the measured steps/s. The rows of
one worker show how well the fit gives back what it was made from; they predict nothing.

Left out: memory bandwidth beyond the slow-down measured with all cores of this machine busy (it is taken to depend on
the share of cores that are busy), caches that grow colder, what the supervising process does more for more workers,
restarts, workers of unequal speed. So what is said about hundreds of workers is an upper bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scaling_model import LIMIT, SCHEMES, Costs, Machine, Scheme, simulate, stops_at

TARGET = 0.20


# -- validation and prediction ---------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Service times, and real runs of more workers to hold the model against."""
    import scaling_times as st

    from slipstream.config import Rule
    from slipstream.cores import usable_cores
    from slipstream.tune import Kept

    run = st.run_of(options.env)
    parts = st.parts(run, options.parameters, 0.3 if options.quick else 1.5)
    runs: dict[tuple[Scheme, int], list[st.Measured]] = {}
    launcher = Kept()
    try:
        for _, n in itertools.product(range(options.repeats), [1, *options.validate]):
            for scheme in SCHEMES:
                if scheme.network or (n == 1 and scheme.half):
                    continue
                asked = {"workers": n, "update": scheme.update, "compress": scheme.compress}
                asked["rule"] = Rule(quorum=scheme.quorum(n))
                runs.setdefault((scheme, n), []).append(st.real(run, options.seconds, launcher, **asked))
    finally:
        launcher.end()
    middle = {at: st.median_of(found) for at, found in runs.items()}
    costs: dict[str, dict[str, float]] = {}
    for scheme in SCHEMES:
        one = next(m for (s, n), m in middle.items() if n == 1 and scheme_key(s) == scheme_key(scheme))
        key = f"{'lock' if scheme.update == 'hogwild' else scheme.update} {scheme.compress}"
        costs[scheme.name] = st.fit(one, scheme.update, parts[key] | {"handover": parts["handover"]}, parts["stretch"])
    costs["sync"]["wake"] = costs["server"]["wake"]  # who waits is woken in the same way
    big = {scheme.name: big_of(scheme, costs[scheme.name], parts) for scheme in SCHEMES}
    keep = "steps_per_second", "wait_share", "staleness"
    return {
        "env": options.env, "cores": usable_cores(), **{k: parts[k] for k in ("stretch", "slice", "spread")},
        "parent": float(np.median([m.parent for m in middle.values()])),
        "others": float(np.median([m.others for m in middle.values()])),
        "costs": costs, "big": big, "parameters": options.parameters, "seconds": options.seconds,
        "measured": [
            {"scheme": s.name, "workers": n, "repeats": [r.trial.steps_per_second for r in runs[s, n]],
             **{k: getattr(m.trial, k) for k in keep}, "others": m.others}
            for (s, n), m in middle.items()
        ],
    }  # fmt: skip


def big_of(scheme: Scheme, small: dict[str, float], parts: dict[str, Any]) -> dict[str, float]:
    """Costs with the big network: what grows with it was measured by itself, the rest is as with the small one."""
    part = parts[f"big {scheme.update if scheme.update == 'server' else 'lock'} {scheme.compress}"]
    grown = {k: part[k] for k in ("apply", "pull", "contribution", "bytes_up", "bytes_down")}
    grown["apply"] = part["step"] if scheme.update == "hogwild" else part["apply"] + part["decode"]
    turn: dict[str, float] = parts["big"]
    return small | turn | grown | {"other": small["other"] + part["encode"]}


def scheme_key(scheme: Scheme) -> tuple[str, str]:
    """Schemes of the same key have the same run of one worker."""
    return scheme.update, scheme.compress


def costs_of(times: dict[str, Any], which: str, scheme: Scheme) -> Costs:
    """The service times of a scheme, `which` is `costs` or `big`."""
    return Costs(**times[which][scheme.name], spread=tuple(times["spread"]))


def validate(times: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """The model against the real runs: a table, and its rows."""
    lines = ["| rule | workers | steps/s, model | measured (least to most) | error | waiting | staleness |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    rows = []
    for m in times["measured"]:
        scheme = next(s for s in SCHEMES if s.name == m["scheme"])
        here = Machine(times["cores"], times["parent"] + m["others"], times["slice"], times["stretch"])
        o = simulate(costs_of(times, "costs", scheme), scheme, m["workers"], here)
        error = o.steps_per_second / m["steps_per_second"] - 1
        rows.append({**m, "model": asdict(o), "error": error})
        seen = f"{m['steps_per_second']:,.0f} ({min(m['repeats']):,.0f} to {max(m['repeats']):,.0f})"
        fitted = "(fit) " if m["workers"] == 1 else ""
        lines.append(
            f"| {scheme.name} | {m['workers']} | {o.steps_per_second:,.0f} | {seen} | {fitted}{100 * error:+.1f} % | "
            f"{100 * o.wait_share:.1f} %, measured {100 * m['wait_share']:.1f} % | "
            f"{o.staleness:.2f}, measured {m['staleness']:.2f} |"
        )
    asked = [abs(r["error"]) for r in rows if r["workers"] > 1]
    if asked:
        met, half, most = sum(e <= TARGET for e in asked), 100 * float(np.median(asked)), 100 * max(asked)
        target = f"within {TARGET:.0%} (the target): {met} of {len(asked)}"
        lines += ["", f"Error of the predictions: median {half:.1f} %, largest {most:.1f} %; {target}."]
    if times["others"] > 0.1:
        lines += [
            "",
            f"Disturbed: others had {times['others']:.1f} cores meanwhile (the model knows). Measure again.",
        ]
    return lines, rows


def predict(
    times: dict[str, Any], which: str, options: argparse.Namespace, cores: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """All schemes for all numbers of workers on a machine with so many cores: a table, and its rows."""
    machine = Machine(
        cores, times["parent"], times["slice"], times["stretch"], options.bandwidth * 1e9 / 8, options.latency * 1e-6
    )
    counts = [n for n in options.workers if n <= 8 * cores]
    rows = []
    lines = ["| rule | " + " | ".join(f"{n:,}" for n in counts) + " |", "| --- |" + " ---: |" * len(counts)]
    for scheme in SCHEMES:
        found = [simulate(costs_of(times, which, scheme), scheme, n, machine) for n in counts]
        cells = [f"{o.steps_per_second / 1000:,.1f} k, {o.wait_share:.0%}, {o.staleness:.1f}" for o in found]
        lines.append(f"| {scheme.name} | " + " | ".join(cells) + " |")
        rows += [{"scheme": scheme.name, "workers": n, **asdict(o)} for n, o in zip(counts, found, strict=True)]
    return lines, rows


def statement(times: dict[str, Any], which: str, options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Where each rule stops scaling if every worker (and the server) has a core."""
    link = options.bandwidth * 1e9 / 8, options.latency * 1e-6
    lines, found = [], {}
    for scheme in SCHEMES:
        c = costs_of(times, which, scheme)
        at = stops_at(c, scheme, lambda n: Machine(n + 2, times["parent"], times["slice"], times["stretch"], *link))
        n = min(at or LIMIT, LIMIT)
        o = simulate(c, scheme, n, Machine(n + 2, times["parent"], times["slice"], times["stretch"], *link))
        where = f"from about {at} workers on" if at else f"not up to {LIMIT:,} workers"
        held = {"lock": "lock held", "server": "server busy", "sync": "one worker applying"}.get(scheme.update, "")
        why = f"; {held} {o.busy:.0%} of the time" if held else ""
        lines.append(f"- {scheme.name}: {where} ({o.steps_per_second:,.0f} steps/s there{why})")
        found[scheme.name] = at
    return lines, found


def report(times: dict[str, Any], options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """All tables, as lines and as values."""
    cores, spent = times["cores"], {k: f"{1e3 * v:.2f}" for k, v in times["costs"]["lock"].items() if v < 1}
    page = [f"# Scaling on {times['env']}: a model, and how well it holds", ""]
    page += [f"{cores} cores; all busy, everything takes {times['stretch']:.2f} times as long. The supervising process "
             f"keeps {times['parent']:.2f} cores busy. A time slice is {1e3 * times['slice']:.1f} ms.",
             f"Rule lock, one worker, ms: collect {spent['collect']}, gradient {spent['gradient']}, apply "
             f"{spent['apply']}, pull {spent['pull']}, other {spent['other']}."]  # fmt: skip
    values: dict[str, Any] = {"times": times, "predicted": {}, "stops_at": {}}
    if times["measured"]:
        lines, values["validation"] = validate(times)
        page += ["", f"## Against real runs of {times['seconds']} s on this machine", "", *lines]
    link = f"network: {options.bandwidth} Gbit/s each way at the server, {options.latency} us"
    for which, title in (("costs", "this network"), ("big", f"{times['parameters']:,} parameters")):
        for n in sorted({cores, *options.cores}):
            lines, values["predicted"][f"{which} {n}"] = predict(times, which, options, n)
            page += ["", f"## {title}, {n:,} cores: steps/s, share of time waiting, staleness; by workers", ""]
            page += [link, "", *lines]
        lines, values["stops_at"][which] = statement(times, which, options)
        page += [
            "",
            f"## {title}: a worker does less than half of what one alone does, each with a core of its own,",
            "",
        ]
        page += lines
    return page, values


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--env", default="CartPole-v1", help="environment, with its preset")
    add("--seconds", type=float, default=1.5, help="of each real run")
    add("--repeats", type=int, default=3, help="of each real run; medians are used")
    add("--validate", type=int, nargs="*", default=[2, 4, 8], help="workers of the real runs (none: no validation)")
    add("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 32, 128, 1024], help="workers predicted")
    add("--cores", type=int, nargs="*", default=[8, 64, 1024], help="cores predicted, besides those here")
    add("--bandwidth", type=float, default=10.0, help="Gbit/s of a server that is elsewhere")
    add("--latency", type=float, default=50.0, help="microseconds to and from it")
    add("--parameters", type=int, default=1_700_000, help="of the big network that is predicted too")
    add("--times", type=Path, help="JSON of service times: read if it is there, else written")
    add("--out", type=Path, help="write the tables there (.json: all values)")
    add("--quick", action="store_true", help="one short repeat of fewer runs")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.repeats, options.validate, options.cores = 0.6, 1, [2], [8]
    return options


def main() -> None:
    """Measure, validate, predict, print."""
    options, begun = arguments(), time.monotonic()
    if options.times and options.times.exists():
        times = json.loads(options.times.read_text())
    else:
        times = measure(options)
        if options.times:
            options.times.write_text(json.dumps(times, indent=1))
    page, values = report(times, options)
    print("\n".join(page))
    print(f"\n{time.monotonic() - begun:.0f} s")
    if options.out:
        as_json = options.out.suffix == ".json"
        options.out.write_text(json.dumps(values, indent=1) if as_json else "\n".join(page) + "\n")


if __name__ == "__main__":
    main()
