"""Private namespaces for a process: user, mount, process, network, IPC and host name. Inside there is no network and no
other process, and only the given folders can be read (Linux; user_namespaces(7)).

A process of root is root inside as well, until it is confined; programs run as another user, because the kernel's limit
on processes does not apply to root. If only bubblewrap may create namespaces, ``bubblewrap_command`` is used instead.
"""

import ctypes
import os
import shutil
import struct
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from whet.processes.child import kill_on_parent_exit, mark_as_server

PROGRAM_USER = 1  # the user id of programs, if the namespace has two users
_NOBODY = 65534
_NAMESPACES = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000  # user, mount, pid, net, ipc, uts
_BIND, _PRIVATE, _DETACH = 0x1000 | 0x4000, 0x40000 | 0x4000, 2  # of a folder and the mounts below it
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXECUTION = 1, 2, 4, 8
_MOUNT_SETATTR, _CURRENT_FOLDER, _RECURSIVE = 442, -100, 0x8000
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_STREAMS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}  # names in /dev -> places in /proc/self/fd
_INODES, _SHELL_INODES = 2000, 20000


def python_paths() -> list[str]:
    """Return the paths that a running Python reads: its standard library, shared libraries and time zones."""
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    return [path for path in (f"{sys.base_prefix}/lib", *_standard_library(), *system) if Path(path).exists()]


def package_folders() -> list[str]:
    """Return the folders inside ``python_paths`` with installed packages."""
    places = [f"{path}/{name}" for path in _standard_library() for name in ("site-packages", "dist-packages")]
    return [path for path in (*places, "/usr/lib/python3/dist-packages") if Path(path).is_dir()]


def _standard_library() -> list[str]:
    return [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})]


def system_paths() -> list[str]:
    """Return the paths that the programs of a shell need: all that are installed in the system."""
    names = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
    return [path for path in names if os.path.lexists(path)]


def enter_namespaces(
    readable: Sequence[str], hidden: Sequence[str], disk: int, writable: Sequence[str] = ("/tmp",), shell: bool = False
) -> bool:
    """Continue in new namespaces, as process 1: only ``readable`` can be read, without the folders ``hidden`` in it,
    and only the empty folders ``writable``, of ``disk`` bytes each, can be written. ``shell``: programs in them can be
    executed, and ``/proc`` shows the processes inside. Return whether ``PROGRAM_USER`` exists inside. Raises
    ``OSError`` if the system does not allow it."""
    two_users = os.geteuid() == 0 and all(map(_can_map_nobody, ("uid", "gid")))
    _unshare(two_users)
    _become_first()
    call("mount", None, b"/", None, _PRIVATE, None)
    root = "/proc"  # a folder that always exists, and of which nothing is needed
    call("mount", b"root", root.encode(), b"tmpfs", _NO_SUID | _NO_DEVICES, b"size=1m,mode=755")
    for path in [*readable, *_DEVICES]:
        _bind_mount(path, root + path)
    for path in filter(os.path.isdir, (root + path for path in hidden)):
        call("mount", b"hidden", path.encode(), b"tmpfs", _READ_ONLY | _NO_SUID | _NO_DEVICES, b"size=4k,nr_inodes=1")
    if shell:
        _mount_proc(root)
    for path in writable:
        os.mkdir(root + path)
        limits = f"size={disk},nr_inodes={_SHELL_INODES if shell else _INODES},mode=1777".encode()
        flags = _NO_SUID | _NO_DEVICES | (0 if shell else _NO_EXECUTION)
        call("mount", b"tmp", (root + path).encode(), b"tmpfs", flags, limits)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", _DETACH)
    _set_mount_attributes(b"/", _READ_ONLY, 0)
    call("sethostname", b"sandbox", 7)
    os.chdir("/")
    return two_users


def _become_first() -> None:
    """Continue in a fork, which is process 1 of the new namespace; this process waits for its end."""
    before = os.getpid()
    if first := os.fork():
        os.closerange(3, 4096)  # among them the socket to the owner
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    kill_on_parent_exit(before)
    mark_as_server()


def _mount_proc(root: str) -> None:
    """Mount ``/proc`` and the names of a process's own files. Raises ``OSError`` where parts of it are hidden, as in a
    container with its default settings."""
    os.mkdir(f"{root}/proc")
    call("mount", b"proc", f"{root}/proc".encode(), b"proc", _NO_SUID | _NO_DEVICES | _NO_EXECUTION, None)
    for name, place in _STREAMS.items():
        os.symlink(f"/proc/self/fd{place}", f"{root}/dev/{name}")


def _can_map_nobody(kind: str) -> bool:
    """Return whether this namespace has the user or group 65534; if it has only root, a new one can't have a second."""
    lines = [list(map(int, line.split())) for line in Path(f"/proc/self/{kind}_map").read_text().splitlines()]
    return any(first <= _NOBODY < first + count for first, _, count in lines)


def bubblewrap_command(readable: Sequence[str], disk: int) -> list[str]:
    """Return the command that starts another command in such namespaces; empty if bubblewrap is not installed."""
    if (program := shutil.which("bwrap")) is None:
        return []
    command = [program, "--unshare-all", "--die-with-parent", "--as-pid-1", "--dev", "/dev", "--hostname", "sandbox"]
    for path in [*readable, sys.prefix, sys.base_prefix, *(path for path in sys.path if Path(path).exists())]:
        command += ["--ro-bind", os.path.abspath(path), os.path.abspath(path)]
    return [*command, "--size", str(disk), "--tmpfs", "/tmp", "--chdir", "/"]


def _unshare(two_users: bool) -> None:
    """Move this process to new namespaces. Only a process that stays in the old ones may map users to the new one."""
    process, (reader, writer) = os.getpid(), os.pipe()
    if not (helper := os.fork()):
        os.close(writer)
        if os.read(reader, 1):
            for kind, outside in (("uid", os.geteuid()), ("gid", os.getegid())):
                if kind == "gid" and not two_users:
                    Path(f"/proc/{process}/setgroups").write_text("deny")
                lines = [f"0 {outside} 1"] + [f"{PROGRAM_USER} {_NOBODY} 1"] * two_users
                Path(f"/proc/{process}/{kind}_map").write_text("\n".join(lines) + "\n")
        os._exit(0)
    os.close(reader)
    try:
        call("unshare", _NAMESPACES)
        os.write(writer, b"x")
    finally:
        os.close(writer)
        _, status = os.waitpid(helper, 0)
    if status:
        raise PermissionError("the users of the new namespace could not be mapped")


def _bind_mount(path: str, target: str) -> None:
    """Mount ``path`` at ``target``, read-only; symbolic links are copied."""
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
        _set_mount_attributes(target.encode(), _READ_ONLY | _NO_SUID | _NO_DEVICES, _RECURSIVE)


def _set_mount_attributes(path: bytes, attributes: int, recursive: int) -> None:
    call(
        "syscall",
        _MOUNT_SETATTR,
        _CURRENT_FOLDER,
        path,
        recursive,
        struct.pack("QQQQ", attributes, 0, 0, 0),
        32,
    )


_libc = ctypes.CDLL(None, use_errno=True)

NO_NEW_PRIVILEGES, SECCOMP = 38, 22  # options of prctl


def call(name: str, *arguments: int | bytes | None) -> int:
    """Call a C function; return its result. Raises ``OSError`` with its name if it fails."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(getattr(_libc, name)(*wide))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
