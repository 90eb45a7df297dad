"""The restrictions that a process sets irreversibly before it runs untrusted code: limits of memory, time and files;
no other processes, no network, little of the file system (Landlock), and no system calls that legitimate programs don't
need (seccomp). Linux; landlock(7), seccomp(2)."""

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import socket
import struct
from collections.abc import Sequence

from whet.sandbox.namespaces import NO_NEW_PRIVILEGES, PROGRAM_USER, SECCOMP, call

HIGH_FILE = 64  # first file descriptor that is used by no program

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_O_PATH = 0o10000000
_EXECUTE, _LIST, _READ = 0b1, 0b1000, 0b1100  # execute; list folders; list folders and read files
_ALL = (1 << 13) - 1  # all rights of Landlock's first version
_FILE_RIGHTS = 0b111 | 1 << 14  # the rights that apply to files: execute, write, read, truncate
_SINCE = {
    2: 1 << 13,
    3: 1 << 14,
    5: 1 << 15,
}  # version -> rights: link and rename across folders, truncate, device ioctl

# System calls with their numbers on x86_64 and aarch64. Calls from 424 on, the same on both, fail as on an old kernel,
# but for close_range.
_DENIED = """
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, fork 57 -, vfork 58 -,
    execve 59 221, execveat 322 281, unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41,
    chroot 161 51, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, keyctl 250 219, add_key 248 217,
    request_key 249 218, kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273,
    delete_module 176 106, reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89, quotactl 179 60,
    syslog 103 116, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171,
    sethostname 170 161, setdomainname 171 162, personality 135 92, name_to_handle_at 303 264, vhangup 153 58,
    open_by_handle_at 304 265, fanotify_init 300 262, memfd_create 319 279, shmget 29 194, shmat 30 196,
    msgget 68 186, semget 64 190, mq_open 240 180, setpriority 141 140, ioprio_set 251 30, sched_setparam 142 118,
    sched_setscheduler 144 119, sched_setaffinity 203 122, sched_setattr 314 274, migrate_pages 256 238,
    move_pages 279 239, mbind 237 235, set_mempolicy 238 237, seccomp 317 277, iopl 172 -, ioperm 173 -,
    modify_ldt 154 -, uselib 134 -, lookup_dcookie 212 18, flock 73 32, inotify_init 253 -, inotify_init1 294 26,
    setsockopt 54 208
"""
# These fail as on a file system without extended attributes, so that `sed -i` and `cp -a` do without them.
_UNSUPPORTED = "setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7"
_NEW, _CLOSE_RANGE = 424, 436  # some Pythons' os.closerange kills a process that may call neither it nor read /proc
# The column above and the architecture; the numbers of clone, socket and prlimit.
_MACHINES = {"x86_64": (0, 0xC000003E, 56, 41, 302), "aarch64": (1, 0xC00000B7, 220, 198, 261)}
_THREAD, _NEW_NAMESPACES = 0x10000, 0x7E020000  # flags of clone
_STARTS = ("fork", "vfork", "execve", "execveat")  # system calls that start processes and programs
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # operations of the filter, in classic BPF
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x50000
_EPERM, _ENOSYS, _EOPNOTSUPP = 1, 38, 95


class Confinement:
    """Landlock rules and a seccomp filter: created once, applied by each process that runs a program."""

    def __init__(
        self,
        readable: Sequence[str],
        writable: Sequence[str],
        change_user: bool,
        processes: bool = False,
        loopback: bool = False,
    ) -> None:
        """``change_user``: ``apply`` switches to ``PROGRAM_USER``. ``processes``: processes and programs may be
        started, also the programs in these folders, and all folders can be listed. ``loopback``: TCP and UDP may be
        used, in a network namespace that has nothing else. Raises ``OSError`` if the kernel lacks Landlock."""
        rights = [(readable, _READ | _EXECUTE * processes), (["/"] * processes, _LIST)]
        self._ruleset = _ruleset(rights, writable, loopback)
        self._filter, self._change_user = _filter(processes, loopback), change_user

    def apply(self) -> None:
        """Confine this process. Raises ``OSError`` if the kernel refuses any part: then no program may run."""
        if self._change_user:
            os.setgroups([])
            os.setresgid(PROGRAM_USER, PROGRAM_USER, PROGRAM_USER)
            os.setresuid(PROGRAM_USER, PROGRAM_USER, PROGRAM_USER)
        call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
        call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        call("syscall", _RESTRICT_SELF, self._ruleset, 0)
        os.close(self._ruleset)
        program = ctypes.create_string_buffer(self._filter, len(self._filter))
        call("prctl", SECCOMP, 2, struct.pack("HxxxxxxP", len(self._filter) // 8, ctypes.addressof(program)), 0, 0)


def limit(**limits: int) -> None:
    """Lower limits, by their names in ``resource``: ``limit(cpu=5)``."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name.upper()}")
        with contextlib.suppress(ValueError):  # it already is lower
            resource.setrlimit(kind, (value, value + (name == "cpu")))


def _ruleset(granted_rights: Sequence[tuple[Sequence[str], int]], writable: Sequence[str], loopback: bool) -> int:
    version = call("syscall", _CREATE_RULESET, None, 0, 1)
    everything = _ALL | sum(right for since, right in _SINCE.items() if version >= since)
    network, scoped = 0b11 * (version >= 4 and not loopback), 0b11 * (version >= 6)  # TCP; abstract sockets and signals
    handled = struct.pack("QQQ", everything, network, scoped)
    ruleset = call("syscall", _CREATE_RULESET, handled, 24 if version >= 6 else 16 if version >= 4 else 8, 0)
    for paths, rights in (*granted_rights, (writable, everything)):
        for path in paths:
            opened = os.open(path, _O_PATH)
            granted = rights if os.path.isdir(path) else rights & _FILE_RIGHTS
            call("syscall", _ADD_RULE, ruleset, 1, struct.pack("=Qi", granted, opened), 0)
            os.close(opened)
    high = fcntl.fcntl(ruleset, fcntl.F_DUPFD, HIGH_FILE)
    os.close(ruleset)
    return high


def _filter(processes: bool, loopback: bool) -> bytes:
    """Return the seccomp filter. ``processes``: they may be started, but not in new namespaces. ``loopback``: sockets
    of TCP and UDP (IPv4) may be made and set up. Raises ``OSError`` on
    architectures whose system calls are not listed above."""
    if (machine := platform.machine()) not in _MACHINES:
        raise OSError(f"the sandbox does not support the system calls of {machine}, only x86_64 and aarch64")
    column, architecture, clone, socket_, prlimit = _MACHINES[machine]
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    code += [(_EQUAL, 0, 1, _CLOSE_RANGE), (_RETURN, 0, 0, _ALLOW)]
    code += [(_AT_LEAST, 0, 1, _NEW), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
    for calls, error in ((_DENIED, _EPERM), (_UNSUPPORTED, _EOPNOTSUPP)):
        for name, *numbers in map(str.split, calls.split(",")):
            allowed = (processes and name in _STARTS) or (loopback and name == "setsockopt")
            if (number := numbers[column]) != "-" and not allowed:
                code += [(_EQUAL, 0, 1, int(number)), (_RETURN, 0, 0, _ERROR | error)]
    denied = _ERROR | _EPERM
    if loopback:  # allow IPv4 with a protocol up to UDP; what is not allowed here meets the rule for sockets below
        code += [(_EQUAL, 0, 6, socket_), (_LOAD, 0, 0, 16), (_EQUAL, 0, 3, socket.AF_INET)]  # its first argument
        code += [(_LOAD, 0, 0, 32), (_AT_LEAST, 1, 0, socket.IPPROTO_UDP + 1), (_RETURN, 0, 0, _ALLOW)]  # its third
        code += [(_LOAD, 0, 0, 0)]
    cloning = (_NEW_NAMESPACES, denied, _ALLOW) if processes else (_THREAD, _ALLOW, denied)
    family, process = (socket.AF_UNIX, _ALLOW, denied), (0, _ALLOW, denied)
    for special, test, (value, then, otherwise) in (
        (clone, _ANY_BIT, cloning),
        (socket_, _EQUAL, family),
        (prlimit, _EQUAL, process),
    ):
        code += [(_EQUAL, 0, 4, special), (_LOAD, 0, 0, 16), (test, 1, 0, value)]  # its first argument
        code += [(_RETURN, 0, 0, otherwise), (_RETURN, 0, 0, then)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*code, (_RETURN, 0, 0, _ALLOW)])
