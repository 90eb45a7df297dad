"""The wheel and the sdist: what is in them, and that the package trains from where the wheel was unpacked."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.toy import toy_recipe, write_recipe

ROOT = Path(__file__).parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools replaces sys.argv
print(build_meta.build_wheel(out), build_meta.build_sdist(out))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist, built from a copy of the files that git tracks or would track."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, sdist = done.stdout.split()[-2:]
    return out / wheel, out / sdist


def data_files() -> set[str]:
    files = (path for path in (ROOT / "whet").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc"))
    return {path.relative_to(ROOT).as_posix() for path in files}


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_whole_package(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = data_files() | {path.relative_to(ROOT).as_posix() for path in (ROOT / "whet").rglob("*.py")}
    assert {"whet/py.typed", "whet/recipes/quickstart.yaml", "whet/show/assets/page.html"} <= wanted
    assert not wanted - names
    assert not [name for name in names if not name.startswith(("whet/", f"whet-{VERSION}.dist-info/"))]
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert not (wanted | {"pyproject.toml", "README.md", "LICENSE"}) - packed


@pytest.mark.slow
def test_the_wheel_trains_from_where_it_is_installed(
    built: tuple[Path, Path], tmp_path: Path, tiny_model: Path
) -> None:
    target = tmp_path / "installed"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(built[0])]
    subprocess.run([sys.executable, *install], check=True, timeout=300)
    settings = toy_recipe(tiny_model, steps=2, data="arithmetic", sinks=["console", "jsonl"])
    write_recipe(tmp_path / "toy.yaml", settings)

    def run(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert Path(run("-c", "import whet; print(whet.__file__)").strip()).is_relative_to(target)
    assert run("-m", "whet", "--version").strip() == f"whet {VERSION}"
    assert "2 steps" in run("-m", "whet", "train", "toy.yaml", "--folder", "run")
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")


def test_the_version_is_written_once_more_in_the_package() -> None:
    import whet

    assert whet.__version__ == VERSION
