#!/usr/bin/env -S ${STUB_PYTHON} -IS
"""A container engine for tests, with the arguments of Docker's command line and namespaces in place of images: every
image is this machine's programs. Its containers outlive its commands, as Docker's do. STUB_ENGINE names its folder,
STUB_PYTHON its interpreter.

It takes the options that a runtime uses, as in https://docs.docker.com/reference/cli/docker/; any other is refused.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["STUB_ENGINE"])
NAMESPACES = ("--mount", "--pid", "--net", "--ipc")
SETUP = r"""
set -e
for moment in $(seq 1000); do  # without this file there is no container for other commands
  if [ -e $PLACE/pid ]; then break; fi; sleep 0.01
done
mount --make-rprivate / && mount -t tmpfs stub /mnt && cd /mnt
for name in bin sbin lib lib64 usr; do
  if [ -L /$name ]; then cp -a /$name $name; elif [ -d /$name ]; then mkdir $name; mount --rbind /$name $name; fi
done
mkdir -p dev proc etc/alternatives old; mount --rbind /etc/alternatives etc/alternatives
for name in null zero urandom; do touch dev/$name; mount --bind /dev/$name dev/$name; done
ln -s /proc/self/fd dev/fd; ln -s /proc/self/fd/0 dev/stdin; ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mount -t proc proc proc
for folder in $IMAGE/*/; do
  if [ -d "$folder" ]; then mkdir -p ./$(basename $folder); mount --rbind $folder ./$(basename $folder); fi
done
for volume in $VOLUMES; do
  place=.${volume#*:}; place=${place%:ro}; mkdir -p $place; mount --bind ${volume%%:*} $place
done
python3 -c 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 1))'
for folder in $FOLDERS; do mkdir -p .$folder; mount -t tmpfs -o mode=1777,size=$SIZE tmpfs .$folder; done
mount -o remount,ro,bind usr; mount -o remount,ro stub .
pivot_root . old && umount -l old
exec bash "$@"
"""


def run(given: argparse.Namespace, command: list[str]) -> int:
    folders = [value.split(":")[0] for value in given.tmpfs]
    size = next(part for part in given.tmpfs[0].split(",") if part.startswith("size=")).removeprefix("size=")
    users = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    place = STATE / given.name
    place.mkdir(parents=True)
    labels = dict(label.split("=", 1) for label in given.label)
    (place / "labels").write_text(json.dumps(labels))
    process = subprocess.Popen(
        ["unshare", *users, *NAMESPACES, "--fork", "--kill-child", "bash", "-c", SETUP, "stub", *command],
        env={
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "PLACE": str(place),
            "FOLDERS": " ".join(folders),
            "SIZE": size,
            "VOLUMES": " ".join(given.volume),
            "IMAGE": str(STATE / "images" / given.rest[0]),  # what was built; nothing for this machine's programs
        },
        start_new_session=True,
    )
    (place / "new").write_text(str(process.pid))
    (place / "new").rename(place / "pid")
    status = process.wait()
    shutil.rmtree(place, ignore_errors=True)
    return status


def build(name: str, context: Path) -> int:
    """Follow WORKDIR, COPY . . and RUN of a Dockerfile; a command runs on this machine, in the work folder."""
    place, work = STATE / "images" / name, "/"
    for line in (context / "Dockerfile").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "WORKDIR":
            work = rest
            (place / work[1:]).mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            shutil.copytree(context, place / work[1:], dirs_exist_ok=True)
        elif word == "RUN" and subprocess.run(["bash", "-c", rest], cwd=place / work[1:]).returncode:
            print(f"Error: building at STEP {line!r}", file=sys.stderr)
            shutil.rmtree(place)
            return 1
    with (STATE / "images/built").open("a") as log:
        log.write(f"{name}\n")
    return 0


def inner(name: str) -> str | None:
    """Return the process that is number 1 of a container; None without such a container."""
    try:
        outer = (STATE / name / "pid").read_text()
        return Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0]
    except (OSError, IndexError):
        return None


def execute(given: argparse.Namespace, command: list[str]) -> int:
    process = inner(command[0])
    if process is None:
        print(f"Error response from daemon: No such container: {command[0]}", file=sys.stderr)
        return 1
    user, _, group = given.user.partition(":")
    drop = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--bounding-set=-all"]
    if os.getuid() == 0:
        os.fchown(1, int(user), int(group))  # as engines do, for commands that open /dev/stdout
    enter = ["nsenter", "--target", process, "--mount", "--pid", "--net", "--root"]
    enter += ["--user"] if os.getuid() else []
    variables = ["env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", *given.env]
    there = ["env", "-C", given.workdir, *command[1:]]
    return subprocess.run([*enter, *variables, *([] if os.getuid() else drop), *there]).returncode


def end(name: str) -> int:
    process = inner(name)
    if process is not None:
        os.kill(int(process), signal.SIGKILL)
        while Path(f"/proc/{process}").exists():
            time.sleep(0.01)
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(dest="name_of_command", required=True)
    started = commands.add_parser("run", allow_abbrev=False)
    for flag in ("--interactive", "--rm", "--read-only"):
        started.add_argument(flag, action="store_true", required=True)
    for option in ("--pull", "--name", "--network", "--user", "--memory", "--memory-swap", "--pids-limit"):
        started.add_argument(option, required=True)
    for option in (
        "--tmpfs",
        "--label",
        "--cap-drop",
        "--cap-add",
        "--security-opt",
        "--ulimit",
        "--entrypoint",
        "--volume",
    ):
        started.add_argument(option, action="append", default=[])
    executed = commands.add_parser("exec", allow_abbrev=False)
    executed.add_argument("--interactive", action="store_true")
    executed.add_argument("--env", action="append", default=[])
    executed.add_argument("--user")
    executed.add_argument("--workdir")
    listed = commands.add_parser("ps", allow_abbrev=False)
    listed.add_argument("--all", action="store_true")
    listed.add_argument("--quiet", action="store_true")
    listed.add_argument("--filter")
    shown = commands.add_parser("inspect", allow_abbrev=False)
    image = commands.add_parser("image", allow_abbrev=False).add_subparsers().add_parser("inspect", allow_abbrev=False)
    for inspecting in (shown, image):
        inspecting.add_argument("--format")
    commands.add_parser("kill", allow_abbrev=False)
    building = commands.add_parser("build", allow_abbrev=False)
    building.add_argument("--quiet", action="store_true")
    building.add_argument("--tag", required=True)
    building.add_argument("context", type=Path)
    removed = commands.add_parser("rm", allow_abbrev=False)
    removed.add_argument("--force", action="store_true")
    removed.add_argument("--volumes", action="store_true")
    for command in (started, executed, shown, image, commands.choices["kill"], removed):
        command.add_argument("rest", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    match given.name_of_command:
        case "run":
            return run(given, given.rest[1:])
        case "exec":
            return execute(given, given.rest)
        case "ps":
            print(*(place.name for place in STATE.glob("*/labels") for place in (place.parent,)), sep="\n")
        case "inspect":
            print(json.loads((STATE / given.rest[0] / "labels").read_text())[given.format.split('"')[1]])
        case "image":
            if given.rest != ["programs"] and not (STATE / "images" / given.rest[0]).is_dir():
                print(f"Error response from daemon: No such image: {given.rest[0]}", file=sys.stderr)
                return 1
        case "build":
            return build(given.tag, given.context)
        case _:
            return end(given.rest[0])
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.exit(128 - status if status < 0 else status)
