"""A program can read all the memory of its process. It finds itself there, and nothing of the programs before it: no
source, input, output, test or expected value."""

from collections.abc import Iterator

import pytest

from whet.sandbox.sandbox import Checks, ProgramLimits, Sandbox, offered

pytestmark = pytest.mark.skipif(offered()[0] is None, reason="this system isolates nothing")

OWN, SECRET = 735117, 402653

# Prints the numbers that stand behind "zebra-" anywhere in its memory: a write tells which pages are mapped.
THIEF = """
import ctypes, gc, os, re
own = input()
def found():
    write, seen = ctypes.CDLL(None).pwrite, set()
    write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
    page, file = 4096, os.open("/tmp/page", os.O_RDWR | os.O_CREAT)
    parts = {id(one) >> 20 for one in gc.get_objects() + [own, found, write]}
    for part in sorted({near for one in parts for near in range(one - 4, one + 5)}):
        held = b""
        for address in range(part << 20, (part + 1) << 20, page):
            held += os.pread(file, page, 0) if write(file, address, page, 0) == page else b" "
        for wide in (held, held[::2], held[1::2], held[::4]):
            seen |= {int(number) for number in re.findall(rb"zebra-([0-9]{6})", wide)}
    return seen
"""
PRINTS = THIEF + "print(*sorted(found()))"
IN_A_CALL = THIEF.replace("own = input()", "own = 'zebra-' + '7351' + '17'") + "def f(x): return sorted(found())"
LIMITS = ProgramLimits(workers=1, cpu_s=10, deadline_s=40)
ZEBRA = f"zebra-{SECRET}"
ONE_SECOND = "import resource as r; r.setrlimit(r.RLIMIT_CPU, (1, 1))"

VICTIMS: dict[str, tuple[str, str, Checks | None]] = {
    "source": (f"kept = '{ZEBRA}' * 100", "", None),
    "an error of its own": (f"raise ValueError('{ZEBRA}' * 100)", "", None),
    "source that is no Python": (f"{ZEBRA} {ZEBRA}", "", None),
    "stdin": ("print(len(input()))", ZEBRA * 100, None),
    "stdout": ("x = input(); print('zebra' + x * 10)", f"-{SECRET} zebra", None),
    "names of its files": (f"for i in range(50): open(f'{ZEBRA}-{{i}}', 'w').close()", "", None),
    "source of a function": (f"def f(x): return '{ZEBRA}'", "", Checks("assert f(3) == 4", {"f": "f"})),
    "an expected value": ("def f(x): return 7", "", Checks(f"assert f(3) == '{ZEBRA}', 'wanted {ZEBRA}'", {"f": "f"})),
    "a right value": (f"def f(x): return '{ZEBRA}'", "", Checks(f"assert f(3) == '{ZEBRA}'", {"f": "f"})),
    "arguments": ("def f(x): return 4", "", Checks(f"assert f('{ZEBRA}') == 4", {"f": "f"})),
    "an error in a call": (f"def f(x): raise ValueError('{ZEBRA}' * 50)", "", Checks("f(1)", {"f": "f"})),
    "a call that never ends": (f"{ONE_SECOND}\nwhile True: '{ZEBRA}'", "", None),
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(LIMITS)
    yield made
    made.close()


@pytest.mark.parametrize("name", VICTIMS)
def test_a_thief_finds_itself_and_nothing_of_the_programs_before_it(sandbox: Sandbox, name: str) -> None:
    source, stdin, checks = VICTIMS[name]
    for _ in range(3):
        sandbox.submit(source, stdin, checks).result(100)
    ended = sandbox.submit(PRINTS, f"zebra-{OWN}").result(100)
    assert (ended["status"], ended["err"]) == (0, "")
    assert ended["out"].split() == [str(OWN)]


def test_a_thief_finds_no_expected_value_while_its_own_tests_run(sandbox: Sandbox) -> None:
    tests = Checks(f"found = f(3)\nassert found == [{OWN}], found\nkept = '{ZEBRA}'", {"f": "f"})
    for _ in range(3):
        assert sandbox.submit(IN_A_CALL, "zebra-000000", tests).result(100)["err"] == ""
