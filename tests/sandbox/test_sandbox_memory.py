"""A program can read all memory of its process, which contains nothing of earlier programs: no source, input, output,
test or expected value."""

from collections.abc import Iterator

import pytest

from whet.sandbox.sandbox import Checks, ProgramLimits, Sandbox, available_isolation

pytestmark = pytest.mark.skipif(available_isolation()[0] is None, reason="this system can't isolate programs")

OWN, SECRET = 735117, 402653

# Finds the numbers after "zebra-" anywhere in its memory: a write fails for pages that are not mapped.
SEARCH = """
import ctypes, gc, os, re
mark = input()
def search():
    write, seen = ctypes.CDLL(None).pwrite, set()
    write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
    page, file = 4096, os.open("/tmp/page", os.O_RDWR | os.O_CREAT)
    parts = {id(value) >> 20 for value in gc.get_objects() + [mark, search, write]}
    for part in sorted({near for part in parts for near in range(part - 4, part + 5)}):
        data = b""
        for address in range(part << 20, (part + 1) << 20, page):
            data += os.pread(file, page, 0) if write(file, address, page, 0) == page else b" "
        for wide in (data, data[::2], data[1::2], data[::4]):
            seen |= {int(number) for number in re.findall(rb"zebra-([0-9]{6})", wide)}
    return seen
"""
PRINTS = SEARCH + "print(*sorted(search()))"
IN_A_CALL = SEARCH.replace("mark = input()", "mark = 'zebra-' + '7351' + '17'") + "def f(x): return sorted(search())"
LIMITS = ProgramLimits(workers=1, cpu_s=10, deadline_s=40)
ZEBRA = f"zebra-{SECRET}"
ONE_SECOND = "import resource as r; r.setrlimit(r.RLIMIT_CPU, (1, 1))"

VICTIMS: dict[str, tuple[str, str, Checks | None]] = {
    "source": (f"kept = '{ZEBRA}' * 100", "", None),
    "the text of an error": (f"raise ValueError('{ZEBRA}' * 100)", "", None),
    "source that is invalid Python": (f"{ZEBRA} {ZEBRA}", "", None),
    "stdin": ("print(len(input()))", ZEBRA * 100, None),
    "stdout": ("x = input(); print('zebra' + x * 10)", f"-{SECRET} zebra", None),
    "names of files": (f"for i in range(50): open(f'{ZEBRA}-{{i}}', 'w').close()", "", None),
    "source of a function": (f"def f(x): return '{ZEBRA}'", "", Checks("assert f(3) == 4", {"f": "f"})),
    "an expected value": (
        "def f(x): return 7",
        "",
        Checks(f"assert f(3) == '{ZEBRA}', 'expected {ZEBRA}'", {"f": "f"}),
    ),
    "a correct value": (f"def f(x): return '{ZEBRA}'", "", Checks(f"assert f(3) == '{ZEBRA}'", {"f": "f"})),
    "arguments": ("def f(x): return 4", "", Checks(f"assert f('{ZEBRA}') == 4", {"f": "f"})),
    "an error in a call": (f"def f(x): raise ValueError('{ZEBRA}' * 50)", "", Checks("f(1)", {"f": "f"})),
    "a call that never ends": (f"{ONE_SECOND}\nwhile True: '{ZEBRA}'", "", None),
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    opened = Sandbox(LIMITS)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", VICTIMS)
def test_a_program_finds_itself_in_memory_and_nothing_of_earlier_programs(sandbox: Sandbox, name: str) -> None:
    source, stdin, checks = VICTIMS[name]
    for _ in range(3):
        sandbox.submit(source, stdin, checks).result(100)
    ended = sandbox.submit(PRINTS, f"zebra-{OWN}").result(100)
    assert (ended["status"], ended["err"]) == (0, "")
    assert ended["out"].split() == [str(OWN)]


@pytest.mark.slow
def test_a_program_finds_no_expected_value_during_its_tests(sandbox: Sandbox) -> None:
    tests = Checks(f"numbers = f(3)\nassert numbers == [{OWN}], numbers\nkept = '{ZEBRA}'", {"f": "f"})
    for _ in range(2):
        assert sandbox.submit(IN_A_CALL, "zebra-000000", tests).result(100)["err"] == ""
