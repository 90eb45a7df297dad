"""A world of its own for a process: new user, mount, process, network, IPC and host-name namespaces, in which there is
no network, no other process, and nothing to read but the folders that it is given (Linux; user_namespaces(7)).

A process that root started is root there, too, but for what it gives up; programs run as another user, so that the
kernel's limit on processes binds them. Where only bubblewrap may make namespaces, its ``command`` does the same.
"""

import os
import shutil
import struct
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from whet.processes.child import kill_on_parent_exit, mark_as_server
from whet.sandbox.linux import call

STRANGER = 1  # the user that programs run as, where there are two
_NOBODY = 65534
_NAMESPACES = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000  # user, mount, pid, net, ipc, uts
_BIND, _PRIVATE, _DETACH = 0x1000 | 0x4000, 0x40000 | 0x4000, 2  # of this folder and those mounted below
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXECUTION = 1, 2, 4, 8
_MOUNT_SETATTR, _HERE, _RECURSIVE = 442, -100, 0x8000
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_INODES = 2000


def needed_by_python() -> list[str]:
    """What a running Python reads: its standard library, shared libraries, and the world's time zones."""
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    return [path for path in (f"{sys.base_prefix}/lib", *_standard_library(), *system) if Path(path).exists()]


def installed() -> list[str]:
    """The folders inside these with what was installed beside the standard library."""
    places = [f"{path}/{name}" for path in _standard_library() for name in ("site-packages", "dist-packages")]
    return [path for path in (*places, "/usr/lib/python3/dist-packages") if Path(path).is_dir()]


def _standard_library() -> list[str]:
    return [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})]


def enter(readable: Sequence[str], hidden: Sequence[str], disk: int) -> bool:
    """Go on in a new world, as its process 1: ``readable`` is all that can be read, but for what is ``hidden`` in it,
    and ``/tmp``, of ``disk`` bytes, all that can be written. Return whether ``STRANGER`` is a user there. Raises
    ``OSError`` where it can't be."""
    two_users = os.geteuid() == 0 and all(map(_has_nobody, ("uid", "gid")))
    _unshare(two_users)
    call("mount", None, b"/", None, _PRIVATE, None)
    root = "/proc"  # a folder that is always there, and that nothing needed lies in
    call("mount", b"world", root.encode(), b"tmpfs", _NO_SUID | _NO_DEVICES, b"size=1m,mode=755")
    for path in [*readable, *_DEVICES]:
        _show(path, root + path)
    for path in filter(os.path.isdir, (root + path for path in hidden)):
        call("mount", b"hidden", path.encode(), b"tmpfs", _READ_ONLY | _NO_SUID | _NO_DEVICES, b"size=4k,nr_inodes=1")
    os.mkdir(f"{root}/tmp")
    limits = f"size={disk},nr_inodes={_INODES},mode=1777".encode()
    call("mount", b"tmp", f"{root}/tmp".encode(), b"tmpfs", _NO_SUID | _NO_DEVICES | _NO_EXECUTION, limits)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", _DETACH)
    _set(b"/", _READ_ONLY, 0)
    call("sethostname", b"sandbox", 7)
    os.chdir("/")
    before = os.getpid()
    if first := os.fork():
        os.closerange(3, 4096)  # the owner's socket among them
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    kill_on_parent_exit(before)
    mark_as_server()
    return two_users


def _has_nobody(kind: str) -> bool:
    """Whether there is such a user here; a root whose own namespace has one user alone can't name a second."""
    lines = [list(map(int, line.split())) for line in Path(f"/proc/self/{kind}_map").read_text().splitlines()]
    return any(first <= _NOBODY < first + count for first, _, count in lines)


def bubblewrap(readable: Sequence[str], disk: int) -> list[str]:
    """The command that starts another in such a world; empty where bubblewrap is not installed."""
    if (program := shutil.which("bwrap")) is None:
        return []
    command = [program, "--unshare-all", "--die-with-parent", "--as-pid-1", "--dev", "/dev", "--hostname", "sandbox"]
    for path in [*readable, sys.prefix, sys.base_prefix, *(path for path in sys.path if Path(path).exists())]:
        command += ["--ro-bind", os.path.abspath(path), os.path.abspath(path)]
    return [*command, "--size", str(disk), "--tmpfs", "/tmp", "--chdir", "/"]


def _unshare(two_users: bool) -> None:
    """Leave the namespaces. Only a process that stays in them may say who is who in the new one."""
    own, (ready, tell) = os.getpid(), os.pipe()
    if not (helper := os.fork()):
        os.close(tell)
        if os.read(ready, 1):
            for kind, outside in (("uid", os.geteuid()), ("gid", os.getegid())):
                if kind == "gid" and not two_users:
                    Path(f"/proc/{own}/setgroups").write_text("deny")
                lines = [f"0 {outside} 1"] + [f"{STRANGER} {_NOBODY} 1"] * two_users
                Path(f"/proc/{own}/{kind}_map").write_text("\n".join(lines) + "\n")
        os._exit(0)
    os.close(ready)
    try:
        call("unshare", _NAMESPACES)
        os.write(tell, b"x")
    finally:
        os.close(tell)
        _, status = os.waitpid(helper, 0)
    if status:
        raise PermissionError("users of the new namespace could not be named")


def _show(path: str, target: str) -> None:
    """Bind what is at ``path``, read-only; links stay links."""
    if os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        Path(target).touch()
    call("mount", path.encode(), target.encode(), None, _BIND, None)
    if path not in _DEVICES:
        _set(target.encode(), _READ_ONLY | _NO_SUID | _NO_DEVICES, _RECURSIVE)


def _set(path: bytes, attributes: int, recursive: int) -> None:
    call(
        "syscall",
        _MOUNT_SETATTR,
        _HERE,
        path,
        recursive,
        struct.pack("QQQQ", attributes, 0, 0, 0),
        32,
    )
