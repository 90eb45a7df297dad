"""The Dockerfile and the versions that it installs: as far as that can be checked without building it."""

import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = {"cuda": "constraints-cuda.txt", "cpu": "constraints.txt"}


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions and their arguments, by stage."""
    lines = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {}
    for line in filter(str.strip, lines.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = found[rest.split(" AS ")[1]] = []
        stage.append((word, rest))
    return found


def installed(stage: str) -> set[str]:
    """The extras of whet that a stage installs."""
    words = [word for name, rest in stages()[stage] if name == "RUN" for word in shlex.split(rest)]
    (extras,) = [word[2:-1] for word in words if word.startswith(".[")]
    return set(extras.split(","))


def pinned(name: str) -> dict[str, Version]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    assert len({canonicalize_name(package) for package, _ in pairs}) == len(pairs), "each once"
    return {canonicalize_name(package): Version(version) for package, version in pairs}


def needed(extras: set[str]) -> list[Requirement]:
    optional = PROJECT["optional-dependencies"]
    return [Requirement(text) for text in [*PROJECT["dependencies"], *(t for extra in extras for t in optional[extra])]]


def test_the_image_has_two_targets_on_a_python_that_whet_takes() -> None:
    assert set(stages()) == {"base", *TARGETS}
    assert [stages()[name][0] for name in TARGETS] == [("FROM", f"base AS {name}") for name in TARGETS]
    python = re.match(r"python:([\d.]+)-", stages()["base"][0][1])
    assert python
    assert Version(python[1]) >= Version(PROJECT["requires-python"].removeprefix(">="))


def test_the_instructions_are_dockers_own() -> None:
    known = {"FROM", "RUN", "COPY", "ENV", "ARG", "WORKDIR", "CMD"}
    assert {word for stage in stages().values() for word, _ in stage} <= known


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_built_from_files_that_are_there_and_not_ignored(target: str) -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("#", "")]
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert ignored[0] == "*"
    for word, rest in stages()["base"] + stages()[target]:
        for source in rest.split()[:-1] if word == "COPY" else ():
            assert (ROOT / source).exists()
            assert any(fnmatch(source, pattern) for pattern in kept)


@pytest.mark.parametrize("target", TARGETS)
def test_versions_of_an_image_satisfy_the_project(target: str) -> None:
    versions = pinned(TARGETS[target])
    assert any(f"--constraint {TARGETS[target]}" in rest for _, rest in stages()[target])
    for requirement in needed(installed(target)):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_versions_for_gpus_are_those_that_the_tests_ran_with() -> None:
    tested, ours = pinned("constraints.txt"), pinned("constraints-cuda.txt")
    assert {name for name in tested.keys() & ours.keys() if tested[name] != ours[name]} == {"numpy"}
    assert {"vllm", "ray"} <= installed("cuda")
    assert "vllm" not in installed("cpu")


def test_nothing_for_gpus_is_for_another_cuda() -> None:
    ours = pinned("constraints-cuda.txt")
    assert ours["cuda-toolkit"].major == 13
    assert {name[-4:] for name in ours if re.search(r"nvidia-(cudnn|nccl|nvshmem|cusparselt)-cu", name)} == {"cu13"}
