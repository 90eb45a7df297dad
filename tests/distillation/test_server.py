"""Teachers behind servers, against the same teachers as models of the run; and servers that are refused."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.distillation.test_ask import LOSS, launched, some_groups
from tests.e2e.test_distillation import on_policy
from tests.e2e.test_learning import lines
from tests.engines.server_double import Running, doubles
from tests.other_tokenizers import bpe_tokenizer, save_with
from tests.rows import rows_recipe, texts, write_rows
from tests.tiny import tiny_llama, tiny_tokenizer
from whet.algorithms.distillation import OnPolicyDistillation, TeacherAlgorithm
from whet.base.errors import ConfigError, DataError, GeneratorError
from whet.core.batch import Batch
from whet.core.types import Distribution
from whet.distillation.server import ServerTeacher
from whet.engines.server.client import Scored
from whet.engines.server.sglang_api import SglangApi
from whet.learner.learner import WorkerLearner
from whet.models.config import ModelConfig
from whet.run import run

PROTOCOLS = pytest.mark.parametrize("protocol", ["vllm", "sglang"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A student, a teacher of its family with a longer output matrix, and one that has other tokens."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("student", "blue", "stranger")}
    for name, seed, rows in (("student", 0, 264), ("blue", 2, 272)):
        tiny_llama(rows, seed=seed, initializer_range=0.3).save_pretrained(made[name])
        tiny_tokenizer().save_pretrained(made[name])
    save_with(made["stranger"], bpe_tokenizer())
    return made


@pytest.fixture(scope="module")
def learners(folders: dict[str, Path]) -> dict[str, WorkerLearner]:
    return {name: launched(folder, trained=name == "student") for name, folder in folders.items()}


@pytest.fixture(scope="module")
def servers(folders: dict[str, Path]) -> Iterator[dict[tuple[str, str], Running]]:
    """By protocol and model."""
    with (
        doubles("vllm", folders["blue"]) as (vllm,),
        doubles("sglang", folders["blue"]) as (sglang,),
        doubles("vllm", folders["stranger"]) as (stranger,),
    ):
        yield {("vllm", "blue"): vllm, ("sglang", "blue"): sglang, ("vllm", "stranger"): stranger}


def taught(path: Path, server: dict[str, Any] | None, **settings: Any) -> OnPolicyDistillation:
    return OnPolicyDistillation.model_validate(
        {"teachers": {"tutor": {"path": str(path), "server": server}}, **settings}
    )


def asked(
    algorithm: TeacherAlgorithm, student: WorkerLearner, teacher: WorkerLearner | None, share: bool = True
) -> Batch:
    groups = some_groups()
    batch = Batch.from_groups(groups, share_prompts=share, distribution=Distribution())
    teachers = {} if teacher is None else {"teacher/tutor": teacher}
    asyncio.run(algorithm.prepare(batch, groups, {"policy": student, **teachers}))
    return batch


@PROTOCOLS
@pytest.mark.parametrize("share", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("settings", [{"k": 5}, {"k": 56}, LOSS], ids=["few", "many", "sampled"])
def test_a_teacher_behind_a_server_says_what_the_same_teacher_says_as_a_model_of_the_run(
    protocol: str,
    share: bool,
    settings: dict[str, Any],
    folders: dict[str, Path],
    learners: dict[str, WorkerLearner],
    servers: dict[tuple[str, str], Running],
) -> None:
    address = {"url": servers[protocol, "blue"].url, "protocol": protocol}
    far = asked(taught(folders["blue"], address, **settings), learners["student"], None, share)
    near = asked(taught(folders["blue"], None, **settings), learners["student"], learners["blue"], share)
    assert far.filled == near.filled
    if "k" in settings:
        assert torch.equal(far.column("topk_ids"), near.column("topk_ids"))
    name = "teacher_logprobs" if "k" in settings else "teacher_token_logprobs"
    torch.testing.assert_close(far.column(name).double(), near.column(name).double(), atol=1e-4, rtol=0)
    assert not far.column(name)[~far.trained].any()


def test_a_teacher_with_other_tokens_may_be_behind_a_server(
    folders: dict[str, Path], learners: dict[str, WorkerLearner], servers: dict[tuple[str, str], Running]
) -> None:
    address = {"url": servers["vllm", "stranger"].url}
    far = asked(taught(folders["stranger"], address, **LOSS), learners["student"], None)
    near = asked(taught(folders["stranger"], None, **LOSS), learners["student"], learners["stranger"])
    name = "teacher_token_logprobs"
    torch.testing.assert_close(far.column(name).double(), near.column(name).double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("protocol", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_runs_learn_from_a_server_what_they_learn_from_the_same_model(
    protocol: str, folders: dict[str, Path], tmp_path: Path, servers: dict[tuple[str, str], Running]
) -> None:
    teachers = {
        "near": {"path": str(folders["blue"])},
        "far": {"path": str(folders["blue"]), "server": {"url": servers[protocol, "blue"].url, "protocol": protocol}},
    }
    rows = write_rows(tmp_path / "rows.jsonl", texts(20))
    seen: dict[str, list[float]] = {}
    for name, teacher in teachers.items():
        algorithm = {"k": 8, "teachers": {"tutor": teacher}}
        sampled = run.start(on_policy(folders["student"], folders["blue"], 3, algorithm), tmp_path / f"{name}-sampled")
        given = rows_recipe(
            folders["student"],
            "supervised",
            rows,
            {"type": "distillation", **algorithm},
            steps=2,
            checkpoints={"every": 0},
        )
        read = run.start(given, tmp_path / f"{name}-rows")
        seen[name] = [line["distillation/forward_kl"] for line in lines(sampled, "train")[1:]]
        seen[name] += [line["evaluation/loss"] for line in lines(read, "evaluation")]
    assert len(seen["far"]) == 5
    first, *later = seen["far"][:3]
    # Later steps sample from weights that differ by rounding, which turns a token into another one now and then.
    assert later == pytest.approx(seen["near"][1:3], rel=2e-2)
    assert [first, *seen["far"][3:]] == pytest.approx([seen["near"][0], *seen["near"][3:]], rel=1e-3)


# Servers and recipes that are refused


def checked(folders: dict[str, Path], path: Path, server: dict[str, Any], longest: int = 100, **settings: Any) -> None:
    algorithm = taught(path, server, **settings)
    asyncio.run(algorithm.check_servers(ModelConfig(path=str(folders["student"])), longest))


@PROTOCOLS
def test_a_server_that_does_not_fit_is_refused_before_the_first_step(
    protocol: str, folders: dict[str, Path], tmp_path: Path, servers: dict[tuple[str, str], Running]
) -> None:
    server = {"url": servers[protocol, "blue"].url, "protocol": protocol}
    checked(folders, folders["blue"], server, k=5)
    checked(folders, folders["blue"], server, **LOSS)
    with pytest.raises(ConfigError, match=r"algorithm.teachers.tutor.server: .* has another tokenizer than"):
        checked(folders, folders["stranger"], server, **LOSS)
    longer = tmp_path / "longer"
    tiny_llama(280).save_pretrained(longer)
    tiny_tokenizer().save_pretrained(longer)
    with pytest.raises(ConfigError, match="gives no log-probs of a prompt with the last of the 280 tokens"):
        checked(folders, longer, server, **LOSS)
    with pytest.raises(ConfigError, match=r"takes at most 512 tokens .* fewer than sampling.max_prompt_tokens"):
        checked(folders, folders["blue"], server, longest=512, k=5)
    with pytest.raises(ConfigError, match=r"not algorithm.teachers.tutor.server.model = other|set .*server.model"):
        checked(folders, folders["blue"], {**server, "model": "other"}, k=5)
    with pytest.raises(ConfigError, match=r"teachers.tutor.server.api_key_env: the environment variable NO_SUCH_KEY"):
        checked(folders, folders["blue"], {**server, "api_key_env": "NO_SUCH_KEY"}, k=5)


def test_vllms_limits_of_likely_tokens_and_of_the_vocabulary_are_found(
    folders: dict[str, Path], servers: dict[tuple[str, str], Running]
) -> None:
    server = {"url": servers["vllm", "blue"].url}
    with pytest.raises(ConfigError, match="vllm serve MODEL --max-logprobs 65"):  # 57 and the 8 that the student lacks
        checked(folders, folders["blue"], server, k=57)
    with pytest.raises(ConfigError, match=r"serves a model with more tokens than .*, which has 264"):
        checked(folders, folders["student"], server, k=5)


def test_a_server_that_is_not_there_is_named_before_anything_starts(folders: dict[str, Path], tmp_path: Path) -> None:
    algorithm = {"teachers": {"tutor": {"path": str(folders["blue"]), "server": "http://127.0.0.1:9"}}}
    with pytest.raises(ConfigError, match=r"algorithm.teachers.tutor.server: .*127.0.0.1:9 .*start the server first"):
        run.start(on_policy(folders["student"], folders["blue"], 1, algorithm), tmp_path / "run")


def test_a_server_that_dies_ends_the_run_with_its_address(
    folders: dict[str, Path], learners: dict[str, WorkerLearner]
) -> None:
    with doubles("vllm", folders["blue"]) as (server,):
        algorithm = taught(folders["blue"], {"url": server.url}, k=5)
        server.kill()
        with pytest.raises(GeneratorError, match=f"the server {server.url} gives no answer"):
            asked(algorithm, learners["student"], None)


def test_log_probs_at_another_temperature_are_refused(
    folders: dict[str, Path], learners: dict[str, WorkerLearner], servers: dict[tuple[str, str], Running]
) -> None:
    server = {"url": servers["vllm", "blue"].url}
    algorithm: dict[str, Any] = {"teachers": {"tutor": {"path": str(folders["blue"]), "server": server}}}
    for sampling in ({"temperature": 0.7}, {"top_p": 0.9}):
        with pytest.raises(ConfigError, match=r"algorithm.teachers.tutor.server: .* set sampling.temperature=1"):
            on_policy(folders["student"], folders["blue"], 1, algorithm | LOSS, sampling=sampling)
    groups = some_groups()
    batch = Batch.from_groups(groups, distribution=Distribution(temperature=0.7))
    with pytest.raises(DataError, match="at temperature 1 only"):
        asyncio.run(taught(folders["blue"], server, k=5).prepare(batch, groups, {"policy": learners["student"]}))


@pytest.mark.parametrize(
    "wrong", [Scored(math.nan, []), Scored(-math.inf, []), Scored(2.5, []), Scored(-1.0, [(3, math.nan)])]
)
def test_numbers_that_are_no_log_probs_are_refused(
    wrong: Scored, folders: dict[str, Path], servers: dict[tuple[str, str], Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = taught(folders["blue"], {"url": servers["vllm", "blue"].url}).teachers["tutor"]

    async def score(*_: object) -> list[Scored]:
        return [Scored(-1.0, [(3, -math.inf)]), wrong]

    async def body() -> None:
        assert settings.server is not None
        async with ServerTeacher.open("tutor", settings, settings.server) as teacher:
            monkeypatch.setattr(teacher._api, "score", score)
            with pytest.raises(
                GeneratorError, match=r"teachers.tutor.server: http.* gave the log-probs \[.*\] of a token"
            ):
                await teacher._scores([5, 6, 7], [1, 2], 0)

    asyncio.run(body())


def test_log_probs_of_other_tokens_are_refused(folders: dict[str, Path]) -> None:
    class Other:
        url = "http://sglang"

        async def sample(self, path: str, body: object) -> object:
            return {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-1.0, 8, None]]}}

    with pytest.raises(GeneratorError, match=r"they are of the tokens \[6, 8\], not \[6, 7\]"):
        asyncio.run(SglangApi(Other(), None).score([5, 6, 7], 1, 0))  # type: ignore[arg-type]


def test_a_mixture_of_likely_tokens_needs_models_of_the_run(folders: dict[str, Path]) -> None:
    blue = str(folders["blue"])
    teachers = {"one": {"path": blue}, "two": {"path": blue, "server": {"url": "http://127.0.0.1:9"}}}
    with pytest.raises(ValidationError, match=r"teachers.two.server: a mixture asks .* set route_by"):
        OnPolicyDistillation.model_validate({"teachers": teachers})
    OnPolicyDistillation.model_validate({"teachers": teachers, **LOSS})
    OnPolicyDistillation.model_validate({"teachers": teachers, "route_by": "subject"})
