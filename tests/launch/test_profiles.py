"""Launch profiles in TOML: parents, two files, and mistakes named by file, line, profile and key."""

from pathlib import Path

import pytest

from whet.base.errors import ConfigError
from whet.launch.profiles import Docker, Kubernetes, Local, SkyPilot, Slurm, load_profile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def write(text: str) -> None:
    Path("whet.toml").write_text(text)


def test_each_kind_has_its_settings() -> None:
    write("""
        [profiles]
        a = {kind = "local"}
        b = {kind = "docker", container = "x", gpus = "all", mounts = {"/data" = "/srv/data:ro"}}
        c = {kind = "slurm", account = "me", gpus = 8, time = "1-12:00:00", options = ["--qos=high"]}
        d = {kind = "kubernetes", container = "x", folder = "/shared/runs", mounts = {"/shared" = "claim"}}
        e = {kind = "skypilot", gpus = "H100:8", folder = "/runs", mounts = {"/runs" = "s3://runs"}}
    """)
    assert [type(load_profile(name)) for name in "abcde"] == [Local, Docker, Slurm, Kubernetes, SkyPilot]
    assert load_profile("local") == Local(kind="local"), "built in"


def test_a_profile_extends_another_one_and_tables_merge(folder: Path) -> None:
    (folder / "settings/whet").mkdir(parents=True)
    (folder / "settings/whet/profiles.toml").write_text(
        '[profiles.base]\nkind = "slurm"\naccount = "mine"\nenvironment = {A = "1", B = "1"}\n'
        '[profiles.other]\nkind = "local"\n'
    )
    write(
        '[profiles.big]\nextends = "base"\nnodes = 4\n[profiles.big.environment]\nB = "2"\n'
        '[profiles.other]\nextends = "big"'
    )
    big = load_profile("big")
    assert isinstance(big, Slurm)
    assert (big.account, big.nodes, big.environment) == ("mine", 4, {"A": "1", "B": "2"})
    assert load_profile("other") == big, "a profile of the working folder replaces the user's"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[profiles.p]\nkind = "slurm"\ngpu = 8', "whet.toml:3: profiles.p.gpu: unknown key. Did you mean 'gpus'?"),
        (
            '[profiles.p]\nkind = "slurm"\nnodes = "4"',
            "whet.toml:3: profiles.p.nodes: expected a whole number, got",
        ),
        ('[profiles.p]\nkind = "slurm"\nnodes = 0', "whet.toml:3: profiles.p.nodes: expected greater than 0"),
        ('[profiles.p]\nkind = "slurm"\ntime = "4h"', "whet.toml:3: profiles.p.time: expected minutes, HH:MM:SS"),
        ('[profiles.p]\nkind = "slrum"', "whet.toml:2: profiles.p.kind: expected one of local, docker, slurm"),
        ('[profiles.p]\nkind = ["slurm"]', "whet.toml:2: profiles.p.kind: expected one of local, docker, slurm"),
        ('[profiles.p]\nextends = ["q", "r"]', "whet.toml:2: profiles.p.extends: expected the name of one profile"),
        ("[profiles.p]\nnodes = 1", "whet.toml:1: profiles.p.kind: is missing; expected one of"),
        ('[profiles.p]\nkind = "docker"', "whet.toml:1: profiles.p.container: is missing; expected text (The image"),
        ('[profiles.p]\nextends = "q"', "whet.toml:2: profiles.p.extends: no profile is called 'q'"),
        (
            '[profiles.p]\nextends = "q"\n[profiles.q]\nextends = "p"',
            "whet.toml:4: profiles.q.extends: the parents",
        ),
        ('[profiles.q]\nkind = "local"', "no profile is called 'p' in"),
        ('[profiles.p]\nkind = "slurm"\n[profiles.p.environment]\nA = 1', "profiles.p.environment.A: expected text"),
        ('[profiles.p]\nkind = "slurm"\nengine_gpus = 2', "engine_gpus = 2 is more than gpus = 0 of a node"),
        ('[p]\nkind = "slurm"', "profiles are tables [profiles.NAME]; found p"),
        ("[profiles.p]\nkind = slurm", "not readable as TOML: Invalid value (at line 2"),
        ("[profiles]\np = 3", "profiles.p: expected a table, [profiles.p]"),
    ],
)
def test_a_mistake_is_named_by_file_line_profile_and_key(text: str, message: str) -> None:
    write(text)
    with pytest.raises(ConfigError) as error:
        load_profile("p")
    assert message in str(error.value)


def test_without_a_file_the_error_says_which_one_to_write() -> None:
    with pytest.raises(ConfigError, match=r"in whet.toml, which does not exist.*Profiles: local"):
        load_profile("big")


def test_secrets_must_be_set(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.launch.conftest import whet

    write('[profiles.p]\nkind = "local"\nsecrets = ["MY_TOKEN"]')
    assert whet("train", "quickstart", "--batch", "p") == 2
    assert "profiles.p.secrets: MY_TOKEN is not set in this shell" in capsys.readouterr().err
