"""Small products and operations on several threads, as decoding has them, with each waiting policy of OpenMP's threads:
alone, and next to as many busy loops as there are cores. Prints milliseconds of a step.

    python benchmarks/spinning.py [--seconds 3]

A thread that has ended its part spins a while before it sleeps (``GOMP_SPINCOUNT``, see ``whet/__init__.py``).
"""

import argparse
import os
import subprocess
import sys
import time

import torch

import whet
from whet.processes.machine import cores

POLICIES: dict[str, dict[str, str]] = {
    "whet": {"GOMP_SPINCOUNT": whet.SPINS},
    "OpenMP's default": {"GOMP_SPINCOUNT": "300000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "OMP_WAIT_POLICY=ACTIVE": {"OMP_WAIT_POLICY": "ACTIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def measure(seconds: float) -> None:
    """Print the milliseconds of a step in this process: 32 layers of 64 rows."""
    rows, scale = torch.randn(64, 576), torch.randn(64, 1536)
    weights = [torch.randn(576, 1536) for _ in range(4)]

    def step() -> None:
        for weight in weights * 8:
            torch.nn.functional.silu(rows @ weight).mul_(scale)

    for _ in range(3):
        step()
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        step()
        steps += 1
    print(1000 * (time.perf_counter() - started) / steps)


def measured(policy: str, seconds: float) -> float:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, __file__, "--alone", "--seconds", str(seconds)]
    done = subprocess.run(
        command, env=environment | POLICIES[policy], capture_output=True, text=True, check=True, timeout=600
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--alone", action="store_true", help="measure in this process, with its environment")
    chosen = parser.parse_args()
    if chosen.alone:
        measure(chosen.seconds)
        return
    alone = {policy: measured(policy, chosen.seconds) for policy in POLICIES}
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores())]
    try:
        together = {policy: measured(policy, chosen.seconds) for policy in POLICIES}
    finally:
        for loop in loops:
            loop.kill()
    for policy in POLICIES:
        print(f"{policy:26s} alone {alone[policy]:6.1f} ms, next to {len(loops)} busy loops {together[policy]:7.1f} ms")


if __name__ == "__main__":
    main()
