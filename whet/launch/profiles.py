"""Launch profiles: where and with what a job runs. They are read from ``whet.toml`` in the working folder and from
``profiles.toml`` in the user's folder of settings; a profile of the working folder replaces the user's of that name."""

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from whet.base.errors import ConfigError
from whet.config import Config, ConfigIssue
from whet.config.issues import did_you_mean
from whet.config.tree import Node, from_plain
from whet.config.validation import issues_of

Size = Annotated[str, Field(pattern=r"^\d+(\.\d+)?([KMGT]i?)?B?$")]
Count = Annotated[int, Field(gt=0)]
_HEADER = re.compile(r"\s*\[\s*([^\]]+?)\s*\]")


class Profile(Config):
    """The settings that every kind of place has."""

    sees_folder: ClassVar[bool] = True  # the job writes into this machine's run folder

    setup: str = ""
    """Lines of bash before the command: modules to load, an environment to activate."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = Field(default={})
    """Variables of the job. They are kept with the run: name variables with secrets in ``secrets``."""
    secrets: list[str] = Field(default=[])
    """Names of variables that are passed on and never written; on Kubernetes, names of Secret objects."""

    def path_there(self, run: Path) -> str:
        """Return the path of a new run folder where the job runs."""
        return str(run.absolute())


class Local(Profile):
    """A process on this machine that outlives the terminal."""

    kind: Literal["local"]


class Docker(Profile):
    """A container on this machine."""

    kind: Literal["docker"]
    container: str
    """The image; whet is installed in it."""
    mounts: dict[str, str] = Field(default={})
    """Path in the container -> folder of this machine, ``:ro`` after it where it is only read. The working folder is
    always mounted."""
    gpus: Count | Literal["all"] | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory: Size | None = None


class Slurm(Profile):
    """A Slurm job. The working folder and the run folder are on a file system that all nodes share."""

    kind: Literal["slurm"]
    account: str | None = None
    partition: str | None = None
    nodes: Count = 1
    """More than one: Ray starts on all nodes, and the command gets ``cluster.type=ray``."""
    gpus: int = Field(0, ge=0)
    """GPUs of each node."""
    engine_gpus: int = Field(0, ge=0)
    """The last GPUs of the first node that are kept from Ray, for ``generator.devices``."""
    cpus: Count | None = None
    """Cores of each node."""
    memory: Size | None = None
    """Memory of each node; 0: all of it."""
    time: str | None = None
    """Time limit as Slurm writes it: minutes, ``HH:MM:SS`` or ``D-HH:MM:SS``."""
    save_before: Annotated[str, Field(pattern=r"^\d+(\.\d+)?[smh]$")] = "10m"
    """With a time limit, training saves and ends that long before it, and is queued again
    (``checkpoints.before``)."""
    requeues: int = Field(20, ge=0)
    """Number of times that a job is queued again after the end of its time."""
    container: str | None = None
    """An image for ``srun --container-image`` (pyxis)."""
    mounts: dict[str, str] = Field(default={})
    """Path in the container -> folder of the nodes, ``:ro`` after it where it is only read."""
    options: list[Annotated[str, Field(pattern=r"^-")]] = Field(default=[])
    """Further options of ``sbatch``, as ``--qos=high``."""

    @field_validator("time")
    @classmethod
    def _as_slurm_writes_it(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}", value):
            raise ValueError(f"expected minutes, HH:MM:SS or D-HH:MM:SS, got {value!r}")
        return value

    @model_validator(mode="after")
    def _engines_have_gpus(self) -> Self:
        if self.engine_gpus > self.gpus:
            raise ValueError(f"engine_gpus = {self.engine_gpus} is more than gpus = {self.gpus} of a node")
        return self


class Kubernetes(Profile):
    """A RayJob of KubeRay 1.5.1 or newer, which starts a Ray cluster and removes it afterwards."""

    sees_folder: ClassVar[bool] = False

    kind: Literal["kubernetes"]
    container: str
    """The image; whet is installed in it."""
    namespace: str | None = None
    context: str | None = None
    """The context of ``kubectl``."""
    nodes: Count = 1
    """More than one: that number of workers joins a head without GPUs, and the command gets ``cluster.type=ray``."""
    gpus: int = Field(0, ge=0)
    """GPUs of each node."""
    cpus: Count = 8
    memory: Size = "64Gi"
    shared_memory: Size = "16Gi"
    """``/dev/shm``, for Ray's store and NCCL; part of ``memory``."""
    mounts: dict[str, str] = Field(default={})
    """Path in the pods -> claim of a persistent volume, ``:ro`` after it where it is only read."""
    folder: str
    """Folder in the pods for run folders; below a mount that all pods share."""
    node_selector: dict[str, str] = Field(default={})
    image_pull_secrets: list[str] = Field(default=[])
    ray_version: str = "2.60.0"
    """The Ray of the image."""
    retries: int = Field(0, ge=0)
    """Number of times that a failed job is started again; a run that had begun is resumed."""

    def path_there(self, run: Path) -> str:
        return f"{self.folder}/{run.name}"


class SkyPilot(Profile):
    """A managed job of SkyPilot on one machine, which SkyPilot starts again elsewhere after a preemption."""

    sees_folder: ClassVar[bool] = False

    kind: Literal["skypilot"]
    infra: str | None = None
    """Cloud, region or cluster, as ``aws/us-east-1``."""
    gpus: str | None = None
    """Kind and number, as ``H100:8``."""
    cpus: str | None = None
    """Cores, as ``16`` or ``16+``."""
    memory: str | None = None
    """GB, as ``128+``."""
    spot: bool = False
    """Use machines that can be taken away, and are cheaper."""
    container: str | None = None
    """An image, of which the job runs in a container."""
    mounts: dict[str, str] = Field(default={})
    """Path in the machine -> bucket, as ``s3://my-runs``."""
    folder: str
    """Folder in the machine for run folders; below a mounted bucket, so that the run survives the machine."""

    def path_there(self, run: Path) -> str:
        return f"{self.folder}/{run.name}"


KINDS: dict[str, type[Profile]] = {
    "local": Local, "docker": Docker, "slurm": Slurm, "kubernetes": Kubernetes, "skypilot": SkyPilot,
}  # fmt: skip


def files(folder: Path) -> list[Path]:
    """Return the files of profiles that exist, the working folder's first."""
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
    return [path for path in (folder / "whet.toml", settings / "whet" / "profiles.toml") if path.is_file()]


def load_profile(name: str) -> Profile:
    """Return the profile, its parents merged. Raises ``ConfigError`` with file, line, profile and key."""
    trees: dict[str, Node] = {"local": from_plain({"kind": "local"}, "built in")}
    read = files(Path.cwd())
    for path in reversed(read):
        trees |= _read(path)
    if name not in trees:
        where = " and ".join(map(str, read)) or "whet.toml, which does not exist"
        raise ConfigError(
            f"no profile is called {name!r} in {where}.{did_you_mean(name, trees)} Profiles: {', '.join(sorted(trees))}"
        )
    tree = _merged(name, trees, [])
    kind = tree.children().get("kind")
    if kind is None:
        raise _wrong(name, tree.where, "kind", f"is missing; expected one of {', '.join(KINDS)}")
    root = KINDS.get(kind.value) if isinstance(kind.value, str) else None
    if root is None:
        hint = did_you_mean(str(kind.plain()), KINDS)
        raise _wrong(name, kind.where, "kind", f"expected one of {', '.join(KINDS)}, got {kind.plain()!r}.{hint}")
    try:
        return root.model_validate(tree.plain())
    except ValidationError as error:
        issues = [_prefixed(issue, name) for issue in issues_of(error, root, tree)]
        raise ConfigError("\n  ".join(map(str, issues))) from None


def _read(path: Path) -> dict[str, Node]:
    """Return the profiles of a file. Each value knows its line."""
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {error}") from None
    profiles = values.pop("profiles", {})
    if values or not isinstance(profiles, dict):
        raise ConfigError(f"{path}: profiles are tables [profiles.NAME]; found {', '.join(values) or 'another value'}")
    trees = {}
    for name, settings in profiles.items():
        if not isinstance(settings, dict):
            raise ConfigError(f"{path}: profiles.{name}: expected a table, [profiles.{name}]")
        lines = _lines(text, name)
        header = f"{path}:{lines.get('', 1)}"
        nodes = {key: from_plain(value, f"{path}:{lines.get(key, 1)}") for key, value in settings.items()}
        trees[name] = Node(nodes, header)
    return trees


def _lines(text: str, profile: str) -> dict[str, int]:
    """Return the line of each key of a profile, and of its header under the empty key."""
    lines: dict[str, int] = {}
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if match := _HEADER.match(line):
            parts = [part.strip().strip("\"'") for part in match[1].split(".")]
            inside = parts[:2] == ["profiles", profile]
            if inside:
                lines.setdefault(parts[2] if len(parts) > 2 else "", number)
        elif inside and (key := re.match(r"\s*[\"']?([\w-]+)[\"']?\s*[.=]", line)):
            lines.setdefault(key[1], number)
    return lines


def _merged(name: str, trees: dict[str, Node], below: list[str]) -> Node:
    """Return a profile over its parents. Tables such as ``environment`` merge key by key, everything else replaces."""
    tree = trees[name]
    settings = dict(tree.children())
    parent = settings.pop("extends", None)
    if parent is None:
        return tree
    if not isinstance(parent.value, str):
        raise _wrong(name, parent.where, "extends", f"expected the name of one profile, got {parent.plain()!r}")
    chain = [*below, name]
    if parent.value not in trees or parent.value in chain:
        names = ", ".join(sorted(set(trees) - set(chain)))
        cycle = f"the parents form a cycle: {' -> '.join([*chain, str(parent.value)])}"
        missing = f"no profile is called {parent.value!r}.{did_you_mean(str(parent.value), trees)} Profiles: {names}"
        raise _wrong(name, parent.where, "extends", cycle if parent.value in chain else missing)
    merged = dict(_merged(parent.value, trees, chain).children())
    for key, node in settings.items():
        both = isinstance(node.value, dict) and key in merged and isinstance(merged[key].value, dict)
        merged[key] = Node({**merged[key].value, **node.value}, node.where) if both else node
    return Node(merged, tree.where)


def _wrong(profile: str, where: str, key: str, message: str) -> ConfigError:
    return ConfigError(str(_prefixed(ConfigIssue(key, where, message), profile)))


def _prefixed(issue: ConfigIssue, profile: str) -> ConfigIssue:
    return ConfigIssue(
        f"profiles.{profile}.{issue.key}" if issue.key else f"profiles.{profile}", issue.where, issue.message
    )
