"""Untrusted programs: legitimate ones run as in an ordinary interpreter; malicious ones reach nothing, pass no tests
and leave nothing behind. Each attack is of bounded size, and runs in a sandbox with small limits."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.cluster.workers import alive
from tests.contracts.fault_contract import eventually
from whet.base.errors import ConfigError, WhetError
from whet.sandbox import sandbox as module
from whet.sandbox.sandbox import (
    ISOLATIONS,
    Checks,
    ProgramLimits,
    ProgramResult,
    Sandbox,
    available_isolation,
    require_isolation,
)

pytestmark = pytest.mark.skipif(available_isolation()[0] is None, reason="this system can't isolate programs")

LIMITS = ProgramLimits(
    workers=1, cpu_s=1, deadline_s=30.0, memory_mib=256, disk_mib=4, output_kib=64, threads=8, files=32
)
SECRET = "a secret key"
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    os.environ["WHET_TEST_SECRET"] = SECRET
    opened = Sandbox(LIMITS)
    yield opened
    opened.close()
    del os.environ["WHET_TEST_SECRET"]


@pytest.fixture(scope="module")
def hasty() -> Iterator[Sandbox]:
    """A sandbox for programs that wait until their deadline."""
    opened = Sandbox(LIMITS.model_copy(update={"deadline_s": 5.0}))
    yield opened
    opened.close()


def run(sandbox: Sandbox, source: str, stdin: str = "", checks: Checks | None = None) -> ProgramResult:
    return sandbox.submit(textwrap.dedent(source), stdin, checks).result(300)


def call(sandbox: Sandbox, source: str, tests: str = "assert f(3) == 4, 'not five'") -> ProgramResult:
    return run(sandbox, source, checks=Checks(textwrap.dedent(tests), {"f": "f"}))


LEGITIMATE = {
    "input": "print(input() + input())",
    "a file": "import sys; print(''.join(line.strip() for line in sys.stdin))",
    "fast bytes": "import sys; r = sys.stdin.buffer.readline; print((r().strip() + r().strip()).decode())",
    "number 0": "print(''.join(open(0).read().split()))",
    "a name": "print(''.join(open('/dev/stdin').read().split()))",
    "a name of bytes": "print(b''.join(open('/dev/stdin', 'rb').read().split()).decode())",
    "a path": "from pathlib import Path; print(''.join(Path('/dev/stdin').read_text().split()))",
    "lines by name": "import fileinput; print(''.join(map(str.strip, fileinput.input(['/dev/fd/0']))))",
    "a descriptor": "import os; print(''.join(os.read(os.open('/proc/self/fd/0', os.O_RDONLY), 9).decode().split()))",
    "output by name": "print(input() + input(), file=open('/dev/stdout', 'w'))",
    "at exit": "import atexit; atexit.register(print, input() + input())",
    "a buffer": """
        import atexit, io, sys
        sys.stdout = io.StringIO()
        atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))
        print(input() + input())
    """,
    "closing files": "import ctypes; ctypes.CDLL(None).closefrom(3); print(42)",
    "a closed stream": "import sys; print(input() + input()); sys.stdout.close()",
    "the name of its file": "import os; os.path.abspath(__file__); print(input() + input())",
    "a thread": "from threading import Thread; Thread(target=lambda: print(input() + input())).start()",
    "exit 0": "print(input() + input()); exit()",
    "main": "if __name__ == '__main__': print(input() + input())",
    "deep": """
        import sys, threading
        sys.setrecursionlimit(10**5); threading.stack_size(2**26)
        def depth(n): return n and 1 + depth(n - 1)
        def main(): depth(20_000); print(input() + input())
        threading.Thread(target=main).start()
    """,
    "a private file": "open('x', 'w').write(input() + input()); print(open('/tmp/x').read())",
    "a dataclass": "from dataclasses import dataclass\n@dataclass\nclass A: b: str\nprint(A(input() + input()).b)",
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_a_legitimate_program_runs_as_in_an_ordinary_interpreter(sandbox: Sandbox, name: str) -> None:
    assert run(sandbox, LEGITIMATE[name], "4\n2\n") == {
        "status": 0,
        "late": False,
        "cut": False,
        "out": "42\n",
        "err": "",
    }


# Forbidden actions: each raises.
FORBIDDEN = {
    "a socket": "import socket; socket.create_connection(('127.0.0.1', 80))",
    "a raw socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "an abstract socket": "import socket; socket.socket(socket.AF_UNIX).connect('\\0/tmp/dbus')",
    "fork": "import os; os.fork() or os._exit(0)",
    "a process": "import subprocess; subprocess.run(['/bin/true'])",
    "a shell": "import os\nif os.system('true') != 0: raise OSError",
    "another program": "import os; os.execv('/lib64/ld-linux-x86-64.so.2', ['ld'])",
    "multiprocessing": "from multiprocessing import get_context; get_context('fork').Process(target=print).start()",
    "ptrace": "import ctypes; c = ctypes.CDLL(None)\nif c.ptrace(16, 1, 0, 0): raise OSError",
    "memory of other processes": "open('/proc/1/mem')",
    "a namespace": "import ctypes; c = ctypes.CDLL(None)\nif c.unshare(0x10000000): raise OSError",
    "a mount": "import ctypes; c = ctypes.CDLL(None)\nif c.mount(b'x', b'/tmp', b'tmpfs', 0, None): raise OSError",
    "the home folder": f"import os; os.listdir({str(Path.home())!r})",
    "the checkout": f"open({str(CHECKOUT / 'pyproject.toml')!r})",
    "passwords": "open('/etc/passwd')",
    "a link out": "import os; os.symlink('/etc/passwd', 'x'); open('x')",
    "a hard link out": "import os, sysconfig; os.link(os.__file__, 'x')",
    "the parent folder": "open('../../etc/passwd')",
    "the standard library": "import os; open(os.__file__, 'a')",
    "the root": "open('/x', 'w')",
    "listing the root": "import os; os.listdir('/')",
    "a device": "import os; os.mknod('x', 0o60666, 0)",
    "root": "import os; os.setuid(0)",
    "more memory": "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))",
    "limits of other processes": "import resource as r; r.prlimit(1, r.RLIMIT_CPU, (1, 1))",
    "priority": "import os; os.setpriority(os.PRIO_PROCESS, 0, -5)",
    "memory outside the limits": "import os; os.memfd_create('x')",
    "shared memory": "from multiprocessing.shared_memory import SharedMemory; SharedMemory(create=True, size=10)",
    "locks that other processes see": "import fcntl, os; fcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_SH)",
    "watching files of others": "import ctypes; c = ctypes.CDLL(None)\nif c.inotify_init1(0) < 0: raise OSError",
    "buffers outside the limits": "import socket as s; s.socketpair()[0].setsockopt(s.SOL_SOCKET, s.SO_SNDBUF, 9)",
    "the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_forbidden_action_raises(sandbox: Sandbox, name: str) -> None:
    attempt = textwrap.indent(FORBIDDEN[name], "    ")
    ended = run(sandbox, f"try:\n{attempt}\n    print('allowed')\nexcept (OSError, ValueError):\n    print('refused')")
    assert (ended["out"], ended["status"]) == ("refused\n", 0), ended


# Programs that exceed a limit or crash. None may count as correct, which is 42 and status 0.
LIMITED = {
    "an endless loop": "while True: pass",
    "an endless loop that ignores signals": "import signal; signal.signal(24, print)\nwhile True: pass",
    "sleep": "import time; time.sleep(3600)",
    "an endless thread": "import threading as t, time; t.Thread(target=time.sleep, args=[3600]).start(); print(42)",
    "memory": "x = bytearray(2 << 30); print(42)",
    "memory, bit by bit": "x = []\nwhile len(x) < 4096: x.append(bytearray(1 << 20))\nprint(42)",
    "disk": "for i in range(64): open(str(i), 'wb').write(bytes(1 << 20))\nprint(42)",
    "one big file": "open('x', 'wb').write(bytes(5 << 20)); print(42)",
    "many files": "for i in range(5000): open(str(i), 'w').close()\nprint(42)",
    "open files": "x = [open('/dev/null') for _ in range(100)]; print(42)",
    "threads": """
        import threading, time
        for _ in range(200): threading.Thread(target=time.sleep, args=[1], daemon=True).start()
        print(42)
    """,
    "an output flood": "import sys\nfor _ in range(64): sys.stdout.write('x' * (1 << 20))\n",
    "a fork bomb": "import os, time\nfor _ in range(200): os.fork() or time.sleep(5)\nprint(42)",
    "a huge power": "print(len(str(9 ** 9 ** 9)))",
    "a regex bomb": "import re; re.match('(a+)+$', 'a' * 40 + 'b'); print(42)",
    "recursion": "def f(): return f()\nf(); print(42)",
    "recursion without a limit": "import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf(); print(42)",
    "a crash": "import ctypes; ctypes.string_at(0)",
    "suicide by signal": "import os; os.kill(os.getpid(), 9)",
    "a deep syntax": "eval('(' * 5000)",
    "abort": "import os; os.abort()",
}


LATE = ("an endless loop", "sleep", "an endless thread", "a huge power", "a regex bomb")


@pytest.mark.parametrize("name", LIMITED)
def test_a_program_ends_within_its_limits(sandbox: Sandbox, hasty: Sandbox, name: str) -> None:
    ended = run(hasty if name in ("sleep", "an endless thread") else sandbox, LIMITED[name])
    assert ended["status"] != 0
    assert len(ended["out"]) <= LIMITS.output_kib << 10
    assert ended["late"] or name not in LATE
    assert run(sandbox, "print(42)")["out"] == "42\n"


def test_tests_run_in_another_process(sandbox: Sandbox) -> None:
    assert call(sandbox, "def f(x): return x + 1")["status"] == 0
    assert "AssertionError" in call(sandbox, "def f(x): return x + 2")["err"]
    assert "ZeroDivisionError" in call(sandbox, "def f(x): return x / 0")["err"]
    assert call(sandbox, "class Solution:\n    def f(self, x): return x + 1")["status"] == 0


VALUES = [
    "(1, 2)",
    "{1, 2}",
    "{'a': (1, [2.5])}",
    "{(1, 2): None}",
    "b'ab'",
    "1j",
    "frozenset({1})",
    "'\\ud83d'",
    "True",
    "bytearray(b'ab')",
    "range(3)",
    "__import__('collections').deque([1, [2]])",
    "__import__('collections').Counter('aab')",
    "__import__('collections').OrderedDict(a=1)",
    "__import__('collections').defaultdict(list, a=[1])",
    "__import__('fractions').Fraction(10 ** 5000, 3)",
    "__import__('decimal').Decimal('0.10')",
    "__import__('datetime').date(2024, 2, 29)",
    "__import__('datetime').datetime(2024, 2, 29, 1, 2, 3, 4)",
    "__import__('datetime').timedelta(1, 2, 3)",
    "{'a': 1}.keys()",
    "{'a': 1}.items()",
    "{(1, frozenset({2})): {3: [4]}}",
    "10 ** 5000",
    "-(2 ** 63)",
    "float('inf')",
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_returned_with_its_type(sandbox: Sandbox, value: str) -> None:
    tests = f"got = f({value})\nassert got == {value} and type(got) is type({value})"
    assert call(sandbox, "def f(x): return x", tests) == {
        "status": 0,
        "late": False,
        "cut": False,
        "out": "",
        "err": "",
    }


def test_objects_of_the_program_are_used_in_its_process(sandbox: Sandbox) -> None:
    source = """
        class Node:
            def __init__(self, value): self.value, self.next = value, None
        def f(node): return [node.value] + (f(node.next) if node.next else [])
    """
    tests = Checks(
        "node = Node(1)\nnode.next = Node(2)\nassert f(node) == [1, node.next.value]", {"f": "f", "Node": "Node"}
    )
    assert run(sandbox, source, checks=tests)["status"] == 0


# Wrong functions, f(3) != 4, that try to pass as correct.
CHEATS = {
    "equal to everything": """
        class Equal:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
        def f(x): return Equal()
    """,
    "a number equal to everything": """
        class Equal(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
        def f(x): return Equal(7)
    """,
    "other builtins": """
        import builtins
        builtins.AssertionError = builtins.BaseException = type('Nothing', (Exception,), {})
        builtins.exec = builtins.compile = lambda *a, **k: None
        def f(x): return 7
    """,
    "exit while loading": "import sys; sys.exit(0)",
    "exit when called": "def f(x): raise SystemExit(0)",
    "end at once": "import os; os._exit(0)",
    "end when called": "import os\ndef f(x): os._exit(0)",
    "frames": """
        import sys, gc
        def f(x):
            seen, frame = repr(gc.get_objects()), sys._getframe()
            while frame:
                seen += repr(frame.f_locals) + repr(frame.f_globals)
                frame = frame.f_back
            return 4 if ''.join(reversed('evif ton')) in seen else 7
    """,
    "its open files": """
        import os
        def f(x):
            seen = b''
            for number in range(64):
                try: seen += os.pread(number, 1 << 16, 0)
                except OSError: pass
            return 4 if b'not five' in seen else 7
    """,
    "answers in advance": """
        import os
        for number in range(3, 10):
            try: os.write(number, b'{"value": {"object": 0}}\\n' + b'{"value": true}\\n' * 100)
            except OSError: pass
        def f(x): return 7
    """,
    "invalid JSON": "import os; os.write(3, b'[' * 100_000 + b'\\n')\ndef f(x): return 7",
    "a closed connection": "import os; os.close(3)\ndef f(x): return 7",
    "signals to all processes": """
        import os
        def f(x):
            for number in (-1, 1, 2, 3, 4, 5, os.getppid()):
                try: os.kill(number, 9)
                except OSError: pass
            return 7
    """,
    "its own signal handlers": "import signal; signal.signal(14, exit); signal.setitimer(0, 0.01)\nwhile True: pass",
    "a trace": """
        import sys, threading
        def trace(frame, event, argument): frame.f_locals['x'] = 4; return trace
        sys.settrace(trace); threading.settrace(trace); sys.setprofile(trace)
        def f(x): return 7
    """,
    "another json": 'import json; json.dumps = lambda *a: \'{"value": {"object": 0}}\'\ndef f(x): return 7',
    "itself": "def f(x):\n    y = []; y.append(y); return y",
    "a number of many digits": "def f(x): return 10 ** 5000",
    "an endless list": "def f(x):\n    while True: yield x",
    "an exception whose text raises": """
        class Loud(BaseException):
            def __str__(self): raise SystemExit(0)
        def f(x): raise Loud
    """,
    "at exit": "import atexit, os; atexit.register(os._exit, 0)\ndef f(x): return 7",
    "nothing": "",
    "invalid Python": "4 is the answer",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_wrong_function_fails_its_tests_with_any_trick(sandbox: Sandbox, name: str) -> None:
    assert call(sandbox, CHEATS[name])["status"] == 1
    assert call(sandbox, "def f(x): return x + 1")["status"] == 0


LEGITIMATE_TESTS = {
    "a result of many digits": ("def f(x): return 10 ** 5000 + x", "assert f(3) == 10 ** 5000 + 3"),
    "an argument of many digits": ("def f(x): return x % 7", "assert f(10 ** 5000) == 10 ** 5000 % 7"),
    "an error that is expected": (
        "def f(x): raise ValueError('bad', x)",
        "try:\n    f(3)\n    assert False\nexcept ValueError as error:\n    assert error.args == ('bad', 3)",
    ),
    "an error of the program's class": (
        "class Bad(KeyError): pass\ndef f(x): raise Bad(x)",
        "try:\n    f(3)\n    assert False\nexcept KeyError as error:\n    assert error.args == (3,)",
    ),
    "a changed argument": (
        "def f(xs, d): xs.sort(); d['n'] = [xs[0]]",
        "xs, d = [3, 1, 2], {'n': 0}\nassert f(xs, d) is None\nassert (xs, d) == ([1, 2, 3], {'n': [1]})",
    ),
    "a deep result": (
        "def f(n):\n    made = None\n    for _ in range(n): made = [made]\n    return made",
        "got, depth = f(50_000), 0\nwhile got is not None: got, depth = got[0], depth + 1\nassert depth == 50_000",
    ),
    "a list that contains itself": (
        "def f(x): x.append(x); return x",
        "got = f([1])\nassert got[0] == 1 and got[1] is got",
    ),
    "a callback": ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x * 2, [1, 2]) == [2, 4]"),
    "a function of the library": (
        "def f(g, xs): return g(xs)",
        "import math\nassert f(sum, [1]) == 1\nassert f(math.prod, [2, 3]) == 6",
    ),
    "objects of a class that both sides define": (
        "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
        "def f(node): return Node(node.value + 1, f(node.next)) if node else None",
        "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
        "got = f(Node(1, Node(2)))\nassert isinstance(got, Node) and "
        "(got.value, got.next.value, got.next.next) == (2, 3, None)",
    ),
    "a ring": (
        "class Node:\n    pass\ndef f(node): return node.next.next is node",
        "class Node:\n    pass\na, b = Node(), Node()\na.next, b.next = b, a\nassert f(a) is True",
    ),
    "len, text, items and a loop": (
        "class Bag:\n    def __init__(self, xs): self.xs = xs\n    def __len__(self): return len(self.xs)\n"
        "    def __str__(self): return f'Bag{self.xs}'\n    def __getitem__(self, i): return self.xs[i]\n"
        "    def __iter__(self): return iter(self.xs)\n    def __add__(self, other): return Bag(self.xs + other.xs)\n"
        "def f(xs): return Bag(xs)",
        "bag = f([1, 2]) + f([3])\nassert (len(bag), str(bag), bag[1], list(bag)) == (3, 'Bag[1, 2, 3]', 2, [1, 2, 3])",
    ),
    "a coroutine": ("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(3)) == 4"),
    "a generator": ("def f(n): yield from range(n)", "got = f(3)\nassert next(got) == 0 and list(got) == [1, 2]"),
}


@pytest.mark.parametrize("name", LEGITIMATE_TESTS)
def test_legitimate_tests_work(sandbox: Sandbox, name: str) -> None:
    ended = call(sandbox, *LEGITIMATE_TESTS[name])
    assert (ended["status"], ended["err"]) == (0, "")


# Wrong functions, with tests that an object, an error or a change by the program could make pass.
FOOLABLE = {
    "a difference of nothing": (
        "class Near:\n    __sub__ = __rsub__ = __abs__ = lambda *a: 0.0\n    __lt__ = lambda *a: True\n"
        "def f(x): return Near()",
        "assert abs(f(3) - 3.5) < 1e-6",
    ),
    "less than everything": (
        "class Less:\n    __lt__ = __le__ = lambda *a: True\ndef f(x): return Less()",
        "assert f(3) < 4",
    ),
    "the end of a loop": (
        "def f(x): raise StopIteration",
        "for got, expected in zip(map(f, [1, 2]), [1, 2]): assert got == expected",
    ),
    "the end of a loop, as a subclass": (
        "class Other(StopIteration, ValueError): pass\ndef f(x): raise Other",
        "for got in map(f, [1, 2]): assert got == 1",
    ),
    "an emptied argument": (
        "def f(xs): xs.clear(); return []",
        "xs = [3, 1]\nassert f(xs) == sorted(xs)",
    ),
    "an exit where an error is expected": (
        "import os\ndef f(x): os._exit(0)",
        "try: f(3)\nexcept BaseException: pass",
    ),
    "a member of everything": (
        "class All:\n    def __contains__(self, x): return True\ndef f(x): return All()",
        "assert 3 in f(3)",
    ),
    "a method that replaces the tests' method": (
        "class Node: pass\ndef f(x):\n    made = Node(); made.same = lambda other: True; return made",
        "class Node:\n    def same(self, other): return False\nassert f(3).same(4)",
    ),
    "an object of the tests' class, equal to all": (
        "class Node:\n    __eq__ = lambda *a: True\ndef f(x): return Node()",
        "class Node:\n    def __init__(self, x): self.x = x\n    def __eq__(self, other): return self.x == other.x\n"
        "assert f(3) == Node(3)",
    ),
    "not a number": ("def f(x): return float('nan')", "assert not f(3) < 1 and f(3) == f(3)"),
    "globals of the tests' function": (
        "def f(g): return g.__globals__['expected']",
        "expected = 42\nassert f(lambda x: x) == 42",
    ),
}


@pytest.mark.parametrize("name", FOOLABLE)
def test_a_program_cannot_make_its_tests_pass(sandbox: Sandbox, name: str) -> None:
    assert call(sandbox, *FOOLABLE[name])["status"] == 1


def test_no_program_sees_changes_of_another(sandbox: Sandbox) -> None:
    run(sandbox, "import builtins, sys; builtins.print = None; sys.modules['json'] = None; open('x', 'w').close()")
    assert run(sandbox, "import json, os; print(json.dumps(os.listdir('/tmp')))")["out"] == "[]\n"
    deep = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\nos.chmod('/tmp/d', 0)"
    assert run(sandbox, deep)["status"] == 0
    assert (
        run(sandbox, "import os; print(os.listdir('/tmp'))")["out"] == "[]\n"
    )  # in a new worker if the folder could not be emptied


def test_a_program_gets_no_facts_about_the_machine_or_the_run(sandbox: Sandbox) -> None:
    output = run(sandbox, "import os, sys, gc, platform; print(os.environ, sys.argv, platform.node(), os.getpid())")[
        "out"
    ]
    assert SECRET not in output
    assert "sandbox" in output


def test_no_process_is_left_after_close() -> None:
    before = processes()
    opened = Sandbox(LIMITS)
    try:
        assert opened.submit("print(42)").result(300)["out"] == "42\n"
        assert processes() - before
        endless = opened.submit("import time; time.sleep(3600)")
        assert eventually(endless.running)
        of_this = processes() - before
    finally:
        opened.close()
    assert eventually(lambda: not any(map(alive, of_this)))
    assert not processes() - before
    with pytest.raises(WhetError, match="closed"):
        endless.result(300)


def processes() -> set[int]:
    """Return the ids of the processes that this one started with the environment of a sandbox."""
    ids = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if child.environ().get("PYTHONHASHSEED") == "0":
                ids.add(child.pid)
    return ids


def test_without_isolation_programs_run_only_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_isolation", lambda: (None, ["namespaces: unshare: Operation not permitted"]))
    with pytest.raises(ConfigError, match=r"unshare: Operation not permitted.*data.sandbox=none"):
        Sandbox(LIMITS)
    with pytest.raises(ConfigError):
        require_isolation()
    unprotected = Sandbox(LIMITS, "none")
    assert unprotected.submit("print(42)").result(300)["out"] == "42\n"
    unprotected.close()


SCRIPT = """
import sysconfig
from whet.sandbox.sandbox import Checks, ProgramLimits, Sandbox
sandbox = Sandbox(ProgramLimits(workers=1, cpu_s=2, deadline_s=10))
program = "import glob, os, sys; print(os.getpid() > 0, [p for p in sys.path if 'packages' in p], glob.glob({files!r}))"
print(sandbox.submit(program.format(files=sysconfig.get_path("stdlib") + "/*-packages/*")).result(300)["out"])
print(sandbox.submit("import os; os.fork()").result(300)["status"])
print(sandbox.submit("def f(x): return x", checks=Checks("assert f(3) == 3", {"f": "f"})).result(300)["status"])
sandbox.close()
"""


def run_script(command: list[str]) -> str:
    paths = os.pathsep.join([str(CHECKOUT), *(path for path in sys.path if path.endswith("site-packages"))])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([*command, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(available_isolation()[0] != "namespaces", reason="bubblewrap shows the whole installation")
def test_installed_packages_are_hidden_even_without_a_virtual_environment() -> None:
    base = str(Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}"))
    assert run_script([base]).split("\n")[:3] == ["True [] []", "", "1"]


@pytest.mark.skipif(available_isolation()[0] != "namespaces", reason="needs user namespaces")
def test_a_root_whose_namespace_has_one_user_can_isolate() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    assert run_script(["unshare", "-Ur", sys.executable]).split()[-2:] == ["1", "0"]


def test_modules_in_readable_folders_can_be_imported() -> None:
    with TemporaryDirectory(dir="/var/tmp") as folder:  # /tmp is empty for programs
        (Path(folder) / "functions.py").write_text("def echo(value):\n    return value\n")
        Path(folder).chmod(0o755)
        opened = Sandbox(ProgramLimits(workers=1, readable=(folder,)))
        try:
            assert opened.submit("import functions; print(functions.echo(42))").result(300)["out"] == "42\n"
        finally:
            opened.close()


@pytest.mark.parametrize(("folder", "problem"), [("/tmp/x", "is in /tmp"), ("/no/such", "does not exist")])
def test_unusable_readable_folders_are_refused(folder: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"limits\.readable: {folder} {problem}"):
        Sandbox(ProgramLimits(readable=(folder,)))


def test_a_leaking_isolation_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ISOLATIONS", ("none",))
    kind, problems = module.available_isolation.__wrapped__()
    assert kind is None
    assert "use the network" in problems[0]
    assert ISOLATIONS == ("namespaces", "bubblewrap")
