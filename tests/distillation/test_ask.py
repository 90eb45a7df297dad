"""The teachers' columns of a batch, against plain forward passes of the models; the choice of teachers for each group;
and the refusal of invalid ones."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.groups import episode
from tests.other_tokenizers import bpe_tokenizer, save_with
from tests.reference import alignment, mixture
from tests.tiny import tiny_llama, tiny_tokenizer
from whet.algorithms.distillation import Distillation, OnPolicyDistillation, TeacherAlgorithm
from whet.base.errors import ConfigError, DataError
from whet.chat.renderer import Renderer
from whet.cluster.local import LocalCluster
from whet.core.batch import Batch
from whet.core.types import Distribution, Group, Span, Task, Trajectory
from whet.distillation.retokenize import retokenize
from whet.learner.config import LearnerConfig, WorkerConfig
from whet.learner.learner import WorkerLearner
from whet.learner.optimizer_config import OptimizerConfig
from whet.models.config import ModelConfig

TEMPERATE = Distribution(temperature=0.8)
LOSS = {"loss": "on_policy_distillation"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A student, two teachers of its family (one with a longer output matrix), and one that has other tokens."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("student", "red", "blue", "stranger")}
    for name, seed, rows in (("student", 0, 264), ("red", 1, 264), ("blue", 2, 272)):
        tiny_llama(rows, seed=seed).save_pretrained(made[name])
        tiny_tokenizer().save_pretrained(made[name])
    save_with(made["stranger"], bpe_tokenizer())
    return made


def launched(folder: Path, trained: bool = False, max_tokens: int = 400) -> WorkerLearner:
    config = WorkerConfig(
        model=ModelConfig(path=str(folder)),
        learner=LearnerConfig(precision="float64", matmul_precision="highest", max_tokens=max_tokens),
        optimizer=OptimizerConfig() if trained else None,
    )
    return asyncio.run(WorkerLearner.launch(LocalCluster(), config))


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, WorkerLearner]:
    return {name: launched(folder, trained=name == "student") for name, folder in folders.items()}


def some_groups() -> list[Group]:
    """Three tasks with two answers each, of which one is empty, one is cut off and one trains nothing."""
    tokenizer = tiny_tokenizer()
    renderer = Renderer(tokenizer)
    answers = [["more words", "and 👍🏽 letters"], ["", "é"], ["never trained", "naïve café"]]
    groups = []
    for index, two in enumerate(answers):
        asked: Any = [{"role": "user", "content": f"write {index}"}]
        rows = []
        for number, text in enumerate(two):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            end = [] if text in ("", "é") else [renderer.end_of_turn]
            prompt = Span(renderer.render_prompt(asked), False)
            said: Any = {"role": "assistant", "content": text}
            trained = text != "never trained"
            rows.append(episode([prompt, Span(tokens + end, trained)], float(number), messages=[*asked, said]))
        groups.append(Group(f"g{index}", Task(f"t{index}", asked, {"judge": ["red", "blue", "red"][index]}), rows))
    return groups


def asked(
    algorithm: TeacherAlgorithm, models: dict[str, WorkerLearner], groups: list[Group], share: bool = True
) -> Batch:
    learners = {"policy": models["student"]} | {f"teacher/{name}": models[name] for name in algorithm.teachers}
    batch = Batch.from_groups(groups, share_prompts=share, distribution=TEMPERATE)
    asyncio.run(algorithm.prepare(batch, groups, learners))
    return batch


def taught(kind: type[TeacherAlgorithm], folders: dict[str, Path], *names: str, **settings: Any) -> Any:
    teachers = {name: {"path": str(folders[name]), "weight": 1.0 + 2 * (name == "blue")} for name in names}
    return kind.model_validate({"teachers": teachers, **settings})


def whole_distribution(model: WorkerLearner, folder: Path, batch: Batch, token: int) -> list[float]:
    """Log-probs of the whole vocabulary where ``token`` stands, by transformers alone."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    before, here = [], int(batch.predictor[token])
    while here >= 0:
        before.append(int(batch.tokens[here]))
        here = int(batch.predictor[here])
    with torch.no_grad():
        logits = plain(torch.tensor([before[::-1]])).logits[0, -1] / TEMPERATE.temperature
    found: list[float] = logits.log_softmax(-1).tolist()
    return found


def some_trained(batch: Batch) -> list[int]:
    trained = batch.trained.nonzero().squeeze(1).tolist()
    return [trained[0], trained[len(trained) // 2], trained[-1]]


def test_a_teacher_names_its_likeliest_tokens_at_the_batchs_temperature(
    models: dict[str, WorkerLearner], folders: dict[str, Path]
) -> None:
    batch = asked(taught(OnPolicyDistillation, folders, "red", k=5), models, some_groups())
    assert (batch.column("topk_ids").shape, batch.column("topk_ids").dtype) == ((len(batch), 5), torch.int64)
    for token in some_trained(batch):
        table = whole_distribution(models["red"], folders["red"], batch, token)
        best = sorted(range(len(table)), key=lambda word: -table[word])[:5]
        assert batch.column("topk_ids")[token].tolist() == best
        assert batch.column("teacher_logprobs")[token].tolist() == pytest.approx(
            [table[word] for word in best], abs=1e-6
        )
    assert not batch.column("teacher_logprobs")[~batch.trained].any()
    assert "teacher_token_logprobs" not in batch.filled
    assert batch.old_logprobs is None, "no loss reads it"


def test_several_teachers_are_mixed_exactly(models: dict[str, WorkerLearner], folders: dict[str, Path]) -> None:
    algorithm = taught(OnPolicyDistillation, folders, "red", "blue", k=4)
    batch = asked(algorithm, models, some_groups())
    by_token = asked(taught(OnPolicyDistillation, folders, "red", "blue", **LOSS), models, some_groups())
    for token in some_trained(batch):
        tables = [whole_distribution(models[n], folders[n], batch, token) for n in ("red", "blue")]
        # the longer matrix of blue has rows that the student lacks: they share its mass and are never named
        named = [table[:264] for table in tables]
        expected = mixture.top_of_union(named, [1.0, 3.0], 4)
        assert batch.column("topk_ids")[token].tolist() == [word for word, _ in expected]
        assert batch.column("teacher_logprobs")[token].tolist() == pytest.approx([lp for _, lp in expected], abs=1e-6)
        own = mixture.mixture([table[int(batch.tokens[token])] for table in tables], [1.0, 3.0])
        assert by_token.column("teacher_token_logprobs")[token].item() == pytest.approx(own, abs=1e-6)
    assert not batch.column("topk_ids")[~batch.trained].any()
    assert not batch.column("teacher_logprobs")[~batch.trained].any()


@pytest.mark.parametrize("settings", [{"k": 4}, LOSS], ids=["likeliest", "sampled"])
def test_each_task_is_judged_by_the_teacher_that_it_names(
    models: dict[str, WorkerLearner], folders: dict[str, Path], settings: dict[str, Any]
) -> None:
    groups = some_groups()
    routed = asked(taught(OnPolicyDistillation, folders, "red", "blue", route_by="judge", **settings), models, groups)
    alone = {n: asked(taught(OnPolicyDistillation, folders, n, **settings), models, groups) for n in ("red", "blue")}
    for name in ("topk_ids", "teacher_logprobs", "teacher_token_logprobs"):
        column = routed.column(name) if name in routed.filled else None
        for token in routed.trained.nonzero().squeeze(1).tolist():
            judge = groups[int(routed.group[routed.sequence[token]])].task.data["judge"]
            if column is not None:
                torch.testing.assert_close(column[token], alone[judge].column(name)[token], atol=1e-6, rtol=0)
    assert not torch.equal(
        *(one.column("teacher_logprobs" if "k" in settings else "teacher_token_logprobs") for one in alone.values())
    )


def test_a_task_that_names_no_teacher_is_refused(models: dict[str, WorkerLearner], folders: dict[str, Path]) -> None:
    groups = some_groups()
    groups[1].task.data["judge"] = "green"
    algorithm = taught(OnPolicyDistillation, folders, "red", "blue", route_by="judge")
    with pytest.raises(DataError, match=r"task 't1': its field 'judge' .* not 'green'; teachers: red, blue"):
        asked(algorithm, models, groups)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("max_tokens", [60, 400])
def test_a_teacher_with_other_tokens_is_compared_by_spans_of_text(
    models: dict[str, WorkerLearner], folders: dict[str, Path], share: bool, max_tokens: int
) -> None:
    groups = some_groups()
    stranger = launched(folders["stranger"], max_tokens=max_tokens)
    batch = asked(
        taught(OnPolicyDistillation, folders, "stranger", **LOSS), models | {"stranger": stranger}, groups, share
    )
    assert batch.old_logprobs is not None
    rows = [row for group in groups for row in group.episodes]
    for index, row in enumerate(rows):
        own = (batch.trained & (batch.sequence == index)).nonzero().squeeze(1)
        made = retokenize(row, tiny_tokenizer(), Renderer(bpe_tokenizer()), "g")
        theirs = logprobs_of(folders["stranger"], made.trajectory)
        ours = batch.old_logprobs[own].tolist()
        expected = alignment.shares(ours, made.ours, theirs, made.theirs)
        gap = (batch.column("teacher_token_logprobs") - batch.old_logprobs)[own].tolist()
        assert gap == pytest.approx(expected, abs=1e-5)
        assert sum(gap) == pytest.approx(sum(theirs) - sum(ours), abs=1e-4), "the text's, and nothing else"


def logprobs_of(folder: Path, trajectory: Trajectory) -> list[float]:
    """Of a trajectory's trained tokens, by transformers alone."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    tokens = trajectory.tokens
    trained = [span.trained for span in trajectory.spans for _ in span.tokens]
    with torch.no_grad():
        table = (plain(torch.tensor([tokens])).logits[0] / TEMPERATE.temperature).log_softmax(-1)
    return [table[at - 1, token].item() for at, token in enumerate(tokens) if trained[at]]


def test_a_student_that_is_its_own_teacher_has_nothing_to_learn(
    models: dict[str, WorkerLearner], folders: dict[str, Path]
) -> None:
    algorithm = taught(OnPolicyDistillation, folders, "student", advantage="teacher", loss="policy")
    batch = asked(algorithm, models, some_groups())
    batch.old_logprobs = asyncio.run(models["student"].score(batch, {"logprobs"}))["logprobs"]
    learners = {"policy": models["student"], "teacher/student": models["student"]}
    metrics = asyncio.run(algorithm.prepare(batch, some_groups(), learners))
    assert batch.column("advantages").abs().max() < 1e-12
    assert metrics.result()["distillation/reverse_kl"] == pytest.approx(0.0, abs=1e-12)


def test_more_tokens_than_there_are_means_all_of_them(
    models: dict[str, WorkerLearner], folders: dict[str, Path]
) -> None:
    batch = asked(taught(OnPolicyDistillation, folders, "red", k=100_000), models, some_groups())
    assert batch.column("teacher_logprobs").shape == (len(batch), 264)
    assert batch.column("teacher_logprobs")[batch.trained].exp().sum(1).tolist() == pytest.approx(
        [1.0] * int(batch.trained.sum())
    )


@pytest.mark.parametrize("names", [("red",), ("red", "blue"), ("stranger",)])
def test_a_step_in_which_nothing_is_trained_asks_nobody(
    models: dict[str, WorkerLearner], folders: dict[str, Path], names: tuple[str, ...]
) -> None:
    groups = [replace(group, episodes=[episode(group.trajectories[0].spans[:1])]) for group in some_groups()]
    batch = asked(taught(OnPolicyDistillation, folders, *names, **LOSS), models, groups)
    assert not batch.column("teacher_token_logprobs").any()


# Which teachers are refused


def test_other_tokens_are_refused_for_likeliest_tokens_and_said_aloud_otherwise(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    student = ModelConfig(path=str(folders["student"]))
    for kind in (Distillation, OnPolicyDistillation):
        with pytest.raises(ConfigError, match="has other tokens than the student") as caught:
            taught(kind, folders, "red", "stranger").check_models(student)
        assert str(folders["stranger"]) in str(caught.value)
        assert str(folders["student"]) in str(caught.value)
    taught(OnPolicyDistillation, folders, "red", "blue").check_models(student)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        taught(OnPolicyDistillation, folders, "stranger", **LOSS).check_models(student)
    assert "'stranger'" in caplog.text


def test_one_id_that_differs_makes_other_tokens(folders: dict[str, Path], tmp_path: Path) -> None:
    student = ModelConfig(path=str(folders["student"]))
    more = tiny_tokenizer()
    more.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    save_with(tmp_path / "more", more)
    settings = {"teachers": {"other": {"path": str(tmp_path / "more")}}}
    Distillation.model_validate(settings).check_models(student)  # it knows all that the student writes, and more
    with pytest.raises(ConfigError, match="other tokens"):
        taught(Distillation, folders, "red").check_models(ModelConfig(path=str(tmp_path / "more")))


def test_a_teacher_that_is_not_there_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    student = ModelConfig(path=str(folders["student"]))
    (tmp_path / "recipe.yaml").write_text("steps: 1\n")
    for path, why in (
        ("no/where/at-all", "there is no such folder"),
        (str(tmp_path), "this is a run folder, so export its model first"),
    ):
        algorithm = Distillation.model_validate({"teachers": {"tutor": {"path": path}}})
        with pytest.raises(ConfigError, match=f"(?s)algorithm.teachers.tutor: .*{why}"):
            algorithm.check_models(student)


def test_a_folder_is_found_from_another_working_folder_too(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders["red"].parent)
    algorithm = Distillation.model_validate({"teachers": {"tutor": {"path": folders["red"].name}}})
    assert algorithm.teachers["tutor"].path == str(folders["red"])


def test_a_teacher_with_other_tokens_needs_a_chat_template(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = None
    save_with(tmp_path / "plain", tokenizer)
    student, teacher = ModelConfig(path=str(folders["student"])), {"path": str(tmp_path / "plain")}
    with pytest.raises(ConfigError, match=r"algorithm.teachers.tutor: the tokenizer has no chat template"):
        OnPolicyDistillation.model_validate({"teachers": {"tutor": teacher}, **LOSS}).check_models(student)
    teacher["chat_template"] = "plain"
    OnPolicyDistillation.model_validate({"teachers": {"tutor": teacher}, **LOSS}).check_models(student)


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        (Distillation, {"teachers": {}}, "at least 1"),
        (Distillation, {"teachers": {"a": {}}}, "path"),
        (Distillation, {"teachers": {"a": {"path": "x", "weight": 0.0}}}, "greater than 0"),
        (Distillation, {"teachers": {"a": {"path": "x", "lora": {"rank": 2}}}}, "None"),
        (Distillation, {"k": 0}, "greater than 0"),
        (
            Distillation,
            {"loss": "sft"},
            r"which no part of this algorithm reads; choose .*loss=distillation or .*advantage=teacher",
        ),
        (
            OnPolicyDistillation,
            {"loss": "policy", "advantage": "group", "group_size": 2},
            "fills teacher_.*, which no part of this algorithm reads",
        ),
        (OnPolicyDistillation, {"group_size": 0}, "greater than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    kind: type[TeacherAlgorithm], settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValidationError, match=why):
        kind.model_validate({"teachers": {"a": {"path": "x"}}, **settings})


def test_frozen_models_are_the_teachers_under_roles_of_their_own() -> None:
    algorithm = Distillation.model_validate({"teachers": {"policy": {"path": "x"}, "b": {"path": "y"}}})
    frozen = {name: role.model for name, role in algorithm.roles.items() if role.loss is None}
    assert {name: model and model.path for name, model in frozen.items()} == {"teacher/policy": "x", "teacher/b": "y"}
    assert algorithm.losses.keys() == {"policy"}
