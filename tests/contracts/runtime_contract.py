"""Tests that every runtime of shells passes, so that a task need not know which it has. A class of tests inherits
``RuntimeContract`` and gives the fixture ``kind``, with ``LIMITS``."""

from collections.abc import Iterator

import pytest

from whet.shells.runtime import Ended, FileProblem, Runtime, RuntimeFailure, RuntimeKind, ShellLimits
from whet.tasks.shell.base import archive_of

LIMITS = ShellLimits(deadline_s=60, memory_mib=256, disk_mib=4, processes=20, output_bytes=200)

HONEST = {
    "pwd; echo $HOME": "/work\n/work\n",
    "cat <(echo a) /dev/stdin < /dev/null; echo b > /dev/stderr": "a\nb\n",
    "printf '#!/bin/sh\\necho script' > s; chmod +x s; ./s": "script\n",
    "mkdir d && touch d/x && mv d/x y && ls": "d\ny\n",
    "echo 2 > n; sort n - <<< 1; awk '{print $1 + 1}' n": "1\n2\n3\n",
    "echo file > /tmp/t && cat /tmp/t": "file\n",
    "echo old > e && sed -i s/old/new/ e && cp -a e f && cat f": "new\n",
    "false || exit 3": "",
}
SECRETS = {
    "files of the machine": "cat /etc/shadow | wc -l",
    "variables": "env | grep -c WHET_TEST_SECRET",
    "variables of process 1": "cat /proc/1/environ | wc -c",
    "other processes": "ls -d /proc/[0-9]* | awk 'END {print (NR > 8)}'",
    "the network": "(echo > /dev/tcp/127.0.0.1/22) && echo 1 || echo 0",
    "process 1": "kill -9 1; echo x > /proc/1/fd/0; echo 0",
}


def text(ended: Ended) -> str:
    assert ended.ending == "exit", ended
    return ended.output.decode()


class RuntimeContract:
    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, kind: RuntimeKind) -> Iterator[Runtime]:
        opened = kind.open()
        yield opened
        opened.close()

    @pytest.fixture
    def runtime(self, shared: Runtime) -> Runtime:
        shared.run("chmod -R u+rwx . ; rm -rf ..?* .[!.]* *")
        return shared

    def test_the_machine_can_open_it(self, kind: RuntimeKind) -> None:
        kind.check()

    @pytest.mark.parametrize("command", HONEST)
    def test_honest_commands_work(self, runtime: Runtime, command: str) -> None:
        ended = runtime.run(command)
        assert text(ended) == HONEST[command]
        assert ended.status == (3 if "exit 3" in command else 0)

    def test_files_stay_and_nothing_else(self, runtime: Runtime) -> None:
        looping = "(while true; do date > late; done) & echo $!"
        runtime.run(f"export A=1; echo kept > file; {looping}; cd /tmp")
        runtime.run("rm -f late")
        assert text(runtime.run("pwd; echo $A; cat file; ls; ps ax | grep -c '[d]ate'")) == "/work\n\nkept\nfile\n0\n"

    def test_a_command_starts_in_the_folder_that_is_named(self, runtime: Runtime) -> None:
        assert text(runtime.run("pwd; echo $HOME", folder="/tests")) == "/tests\n/work\n"

    def test_files_are_written_read_and_carried_to_another_runtime(self, kind: RuntimeKind, runtime: Runtime) -> None:
        runtime.write("a/b.txt", b"\x00text\xff")
        runtime.run("ln -s a link; ln -s /etc up; chmod +x a/b.txt; mkfifo pipe; ln a/b.txt same; chmod 0 same")
        runtime.run("chmod 500 same")
        assert runtime.read("link/b.txt") == b"\x00text\xff"
        assert runtime.read("a/b.txt", 3) == b"\x00te"
        other = kind.open("/app")
        try:
            other.restore(runtime.snapshot())
            listed = text(other.run("pwd; ls; readlink link; test -x a/b.txt && echo executable"))
            assert listed == "/app\na\nlink\nsame\na\nexecutable\n"
            assert other.read("a/b.txt") == other.read("same") == b"\x00text\xff"
        finally:
            other.close()

    @pytest.mark.parametrize("path", ["absent", ".", "/etc/shadow", "/dev/zero", "/proc/1/environ", "pipe", "a\0b"])
    def test_what_is_not_a_readable_file_is_named(self, runtime: Runtime, path: str) -> None:
        runtime.run("mkfifo pipe")
        with pytest.raises(FileProblem):
            runtime.read(path)
        assert text(runtime.run("echo alive")) == "alive\n"

    @pytest.mark.parametrize("path", ["/usr/file", "/absent/file", ".", "/proc/1/mem"])
    def test_only_the_folders_of_the_runtime_can_be_written(self, runtime: Runtime, path: str) -> None:
        with pytest.raises(FileProblem):
            runtime.write(path, b"x")

    def test_an_archive_writes_only_in_the_work_folder(self, runtime: Runtime) -> None:
        with pytest.raises(FileProblem):
            runtime.restore(archive_of({"../logs/reward.txt": "1"}))
        assert text(runtime.run("ls /logs")) == ""

    def test_what_is_not_an_archive_is_named(self, runtime: Runtime) -> None:
        with pytest.raises(FileProblem):
            runtime.restore(b"no archive")

    def test_long_output_is_cut_in_its_middle(self, runtime: Runtime) -> None:
        output = text(runtime.run("echo first; head -c 100000 /dev/zero | tr '\\0' x; echo last"))
        assert output.startswith("first\n")
        assert output.endswith("last\n")
        assert "[99811 bytes are left out]" in output

    @pytest.mark.parametrize("what", SECRETS)
    def test_nothing_of_the_run_can_be_read(self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        monkeypatch.setenv("WHET_TEST_SECRET", "secret")
        assert text(runtime.run(f"({SECRETS[what]}) 2>/dev/null")) == "0\n"

    def test_a_command_that_never_ends_is_killed_with_its_processes(self, runtime: Runtime) -> None:
        ended = runtime.run("setsid sleep 99 & trap '' TERM INT; echo started; while true; do sleep 1; done", seconds=5)
        assert (ended.ending, ended.output) == ("time", b"started\n")
        assert text(runtime.run("ps ax | grep -c '[s]leep'")) == "0\n"

    def test_a_flood_of_output_is_bounded(self, runtime: Runtime) -> None:
        ended = runtime.run("yes", seconds=1)
        assert ended.ending == "time"
        assert len(ended.output) < 300

    def test_the_disk_is_bounded(self, runtime: Runtime) -> None:
        ended = runtime.run("for i in 1 2 3; do head -c 3000000 /dev/zero > big$i; done")
        assert b"No space left" in ended.output
        assert text(runtime.run("find . -type f -delete; echo alive > file; cat file")) == "alive\n"

    def test_large_empty_files_are_not_a_snapshot(self, runtime: Runtime) -> None:
        runtime.run("for i in 1 2 3; do truncate -s 4000000 sparse$i; done")
        with pytest.raises(FileProblem, match="larger than 4 MiB"):
            runtime.snapshot()

    @pytest.mark.parametrize(
        "command", ["kill -9 -1", "kill -9 1", "kill -STOP 1; kill -STOP $$ & wait", "rm -rf /* /work"]
    )
    def test_a_command_that_kills_or_deletes_everything_harms_only_itself(self, runtime: Runtime, command: str) -> None:
        runtime.run(f"({command}) 2>/dev/null", seconds=2)
        assert text(runtime.run("echo alive > file; cat file; test -d /usr/bin && echo whole")) == "alive\nwhole\n"

    def test_a_command_killed_by_a_signal_says_which(self, runtime: Runtime) -> None:
        assert runtime.run("kill -9 $$").status == -9

    def test_a_closed_runtime_is_a_failure_and_never_an_output(self, kind: RuntimeKind) -> None:
        opened = kind.open()
        opened.close()
        opened.close()
        with pytest.raises(RuntimeFailure):
            opened.run("echo alive")
