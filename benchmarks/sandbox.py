"""The number of short programs a second: in the sandbox's warm workers, and by ``subprocess.run`` without isolation.

    python benchmarks/sandbox.py

The same program, which reads numbers and prints their sum, on as many workers as there are cores.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from machine import describe

from whet.processes.machine import cores
from whet.sandbox.sandbox import Checks, ProgramLimits, Sandbox

PROGRAM, GIVEN, WANTED = "print(sum(map(int, input().split())))", "17 4 21", "42\n"
FUNCTION = Checks("assert add(17, 25) == 42", {"add": "add"})


def rate(work: Callable[[int], bool], count: int, at_once: int) -> float:
    """Programs a second. Each must come out right."""
    with ThreadPoolExecutor(at_once) as threads:
        assert all(threads.map(work, range(2 * at_once)))  # workers start
        begun = time.perf_counter()
        assert all(threads.map(work, range(count)))
        return count / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=600)
    parser.add_argument("--workers", type=int, default=cores())
    chosen = parser.parse_args()
    sandbox = Sandbox(ProgramLimits(workers=chosen.workers))

    def isolated(_: int) -> bool:
        return sandbox.submit(PROGRAM, GIVEN).result()["out"] == WANTED

    def tested(_: int) -> bool:
        return sandbox.submit("def add(a, b): return a + b", checks=FUNCTION).result()["status"] == 0

    def bare(_: int) -> bool:
        return (
            subprocess.run([sys.executable, "-c", PROGRAM], input=GIVEN, capture_output=True, text=True).stdout
            == WANTED
        )

    rates = {
        "sandbox, a program that prints": rate(isolated, chosen.programs, chosen.workers),
        "sandbox, a function and its tests": rate(tested, chosen.programs, chosen.workers),
        "subprocess.run, no isolation": rate(bare, chosen.programs // 4, chosen.workers),
    }
    sandbox.close()
    print(", ".join(f"{name} {fact}" for name, fact in describe().items()))
    for name, value in rates.items():
        print(f"{name:<36} {value:6.0f} a second  {value / rates['subprocess.run, no isolation']:5.1f}x")


if __name__ == "__main__":
    main()
