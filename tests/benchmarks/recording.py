"""What timing a step costs against a bare loop of replays, and whether p50 repeats.

    python -m tests.benchmarks.recording --model qwen3-30b-a3b --sizes 1,64 --processes 5

Both loops run in one process and take turns, a few steps each, so that a host whose pace changes
slows both; medians over all steps are compared, the first step of each turn left out. Each process
also prints the p50 of its replay launches: one that moves by more than the bound is inconclusive.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import numpy as np
import torch

from cgprof.config.load import load_run
from cgprof.engine.worker import Engine
from cgprof.graphs.cuda import gc_paused
from cgprof.graphs.plan_record import resolve_plan
from cgprof.measure.clock import clock_for
from cgprof.measure.launch import sample_steps
from cgprof.measure.stopping import CountRule
from cgprof.stats.ratio import ratio_of_medians

TURNS, STEPS = 48, 11
MOST_OVERHEAD, MOST_SPREAD = 0.01, 0.03


def measure(model_name: str, sizes: str) -> list[dict[str, object]]:
    settings = {
        "capture": {"policy": "full-decode-only", "sizes": [int(size) for size in sizes.split(",")]}
    }
    run, model = load_run(None, model_name, settings)
    _, plan = resolve_plan(run, model)
    engine = Engine(run, model, plan)
    try:
        with torch.inference_mode(), engine.active():
            for key in plan.keys:
                engine.capture(key, lambda _: None)
            return [measure_key(engine, key) for key in engine.graphs.keys]
    finally:
        engine.close()


def measure_key(engine: Engine, key) -> dict[str, object]:
    runner, clock = engine.runner, clock_for(engine.device)
    step, decision = engine.live_step(key), engine.decision_for(key)

    launches: list[int] = []

    def bare() -> list[int]:
        ends = []
        clock.synchronize()
        for _ in range(STEPS):
            runner.decide(step, runner.share(step))
            prepared = runner.prepare(step, decision)
            runner.finish(prepared, runner.launch(prepared)).wait()
            ends.append(time.perf_counter_ns())
        return ends

    def recorded() -> list[int]:
        rule = Ends(STEPS)
        samples = sample_steps(runner, step, clock, rule, decision=decision)
        launches.extend(samples.launch_ns[1:].tolist())
        return rule.ends

    loops = {"bare": bare, "recorded": recorded}
    times: dict[str, list[int]] = {name: [] for name in loops}
    for index in range(TURNS + 1):
        for name in loops if index % 2 else reversed(loops):
            with gc_paused():
                steps = np.diff(loops[name]())
            if index:
                times[name].extend(steps.tolist())
    ratio = ratio_of_medians(np.array(times["recorded"]), np.array(times["bare"]), seed=0)
    return {
        "key": str(key),
        "step_ns": int(np.median(times["bare"])),
        "recorded_over_bare": ratio,
        "launch_p50_ns": int(np.median(launches[STEPS - 1 :])),
    }


class Ends(CountRule):
    """A rule that notes when each step ended."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.ends: list[int] = []

    def add(self, sample_ns: int, elapsed_s: float) -> bool:
        self.ends.append(time.perf_counter_ns())
        return super().add(sample_ns, elapsed_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-moe")
    parser.add_argument("--sizes", default="1,8")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--one", action="store_true", help="this process alone, as JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.model, given.sizes)))
        return 0
    command = [sys.executable, "-m", "tests.benchmarks.recording", "--one"]
    command += ["--model", given.model, "--sizes", given.sizes]
    runs = []
    for _ in range(given.processes):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    for rows in zip(*runs, strict=True):
        report(rows)
    return 0


def report(rows) -> None:
    launches = [row["launch_p50_ns"] for row in rows]
    spread = max(launches) / min(launches) - 1
    repeats = "repeats" if spread <= MOST_SPREAD else "inconclusive"
    ratios = ", ".join("{:.4f} [{:.4f}, {:.4f}]".format(*row["recorded_over_bare"]) for row in rows)
    bound = 1 + MOST_OVERHEAD
    lows, highs = zip(*(row["recorded_over_bare"][1:] for row in rows), strict=True)
    told = "within" if max(highs) <= bound else "above" if min(lows) > bound else "inconclusive at"
    print(f"{rows[0]['key']}: step {rows[0]['step_ns'] / 1e6:.2f} ms")
    print(f"  recorded over bare, a process each: {ratios}: {told} {MOST_OVERHEAD:.0%}")
    print(f"  launch p50 {launches} ns: spread {spread:.1%}, {repeats} (bound {MOST_SPREAD:.0%})")


if __name__ == "__main__":
    sys.exit(main())
