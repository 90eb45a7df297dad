"""Open questions about GPUs, answered in three parts on one of them: are the facts and results right (A), how fast
does the learner train (B), and what do the other phases of a step cost (C)?

    PYTHONPATH=. python benchmarks/gpu.py A --out gpu.json
    PYTHONPATH=. python benchmarks/gpu.py B --only B1 --rungs "as it was,flex" --profile

Each check runs by itself, prints a line ``check | what | got | expected``, and its results are in the file before the
next one begins, so that neither an error nor the end of the machine's time loses any. ``docs/gpu.md`` has what is
expected and room for what was found. ``--small`` runs all of it on a CPU, with tiny sizes: that the script works.
"""

import argparse
import importlib
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch


@dataclass(slots=True)
class Row:
    """One number or fact, and whether it is as expected; None: a fact without an expectation."""

    what: str
    got: str | float
    expected: str = ""
    ok: bool | None = None


@dataclass(slots=True)
class Setting:
    """The options of the checks."""

    small: bool = False
    rungs: tuple[str, ...] = ()  # of B's ladder; none: all
    profile: bool = False
    folder: Path = field(default_factory=Path.cwd)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.small else torch.device("cuda", 0)

    def pick(self, large: int, small: int) -> int:
        return small if self.small else large


Check = Callable[[Setting], Iterator[Row]]
CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    """Register a check under a part's letter and a number."""

    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


def seconds(work: Callable[[], object], setting: Setting, repeats: int = 10, warm: int = 3) -> float:
    """The median time of some work, on a GPU that of the device."""
    taken = []
    for number in range(1 if setting.small else warm + repeats):
        if setting.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            lap = begin.elapsed_time(end) / 1e3
        else:
            started = time.perf_counter()
            work()
            lap = time.perf_counter() - started
        if setting.small or number >= warm:
            taken.append(lap)
    return statistics.median(taken)


def wait(setting: Setting) -> None:
    if setting.device.type == "cuda":
        torch.cuda.synchronize()


def within(what: str, got: float, least: float, most: float, setting: Setting) -> Row:
    """A number that should lie in a range on a GPU."""
    ok = None if setting.small else least <= got <= most
    return Row(what, float(f"{got:.4g}"), f"{least:g} to {most:g}", ok)


def run(names: list[str], setting: Setting, out: Path | None, until: float | None = None) -> dict[str, list[Row]]:
    """Run checks one after the other, if they begin within ``until`` seconds; write the results after each."""
    results: dict[str, list[Row]] = {}
    started = time.perf_counter()
    for name in names:
        rows = results[name] = []
        begun = time.perf_counter()
        try:
            if until is not None and begun - started > until:
                rows.append(Row("not begun", "no time was left", ok=False))
                continue
            for row in CHECKS[name](setting):
                rows.append(row)
                mark = {None: " ", True: "+", False: "-"}[row.ok]
                print(f"{mark} {name} | {row.what} | {row.got} | {row.expected}", flush=True)
        except Exception:
            rows.append(Row("failed", traceback.format_exc(), ok=False))
            print(f"- {name} | failed\n{rows[-1].got}", flush=True)
        finally:
            rows.append(Row("seconds", round(time.perf_counter() - begun, 2)))
            if setting.device.type == "cuda":
                torch.cuda.empty_cache()
            if out is not None:
                out.write_text(
                    json.dumps({check: [asdict(row) for row in rows] for check, rows in results.items()}, indent=1)
                )
    return results


def names_of(parts: list[str]) -> list[str]:
    """Return the checks of these parts, or of these names."""
    for module in ("gpu_correctness", "gpu_learning", "gpu_step"):  # they register themselves
        importlib.import_module(module)
    return [name for name in CHECKS if name in parts or name[0] in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["A"], help="A, B, C, or single checks (A3)")
    parser.add_argument("--small", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--out", type=Path, help="where results go, as JSON")
    parser.add_argument("--until", type=float, help="begin no check after this number of seconds")
    parser.add_argument("--rungs", default="", help="of B's ladder, by name, with commas; all unless given")
    parser.add_argument("--profile", action="store_true", help="B: the kernels that take longest, by rung")
    chosen = parser.parse_args()
    if chosen.small:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    names = names_of(chosen.parts)
    rungs = tuple(filter(None, chosen.rungs.split(",")))
    results = run(names, Setting(chosen.small, rungs, chosen.profile), chosen.out, chosen.until)
    wrong = [name for name, rows in results.items() if any(row.ok is False for row in rows)]
    raise SystemExit(f"not as expected: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    import sys

    sys.modules["gpu"] = sys.modules["__main__"]  # the parts register there
    main()
