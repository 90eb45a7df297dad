"""A reward model of images: scores and gradients equal, in any layout, the ones of transformers' sequence classifier of
the architecture, which its parts make where it has none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.grids import taking_turns
from tests.models.test_images import BLUE, CPU, RED, ROUNDED, TALL, answered, processed, renderer_of
from tests.tiny_vision import FAMILIES, Family, asked, saved_families
from whet.core.batch import Batch
from whet.core.types import Group
from whet.data.rows import judged
from whet.learner.model import LearnerModel, build_whole
from whet.losses.reward_model import BradleyTerry, sequence_scores
from whet.models.config import LoraSettings, ModelConfig
from whet.models.image_processor import load_processor
from whet.models.loading import load_model_config
from whet.models.sequence_classifier import classifier_class, in_transformers

ALL: tuple[Family, ...] = (*FAMILIES, "qwen3_vl_moe")
DIFFERENT: tuple[Family, ...] = ("idefics3", "qwen2_5_vl", "qwen3_vl_moe", "gemma3", "gemma4", "qwen3_5")
VALUES = frozenset({"values"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    return saved_families(tmp_path_factory, ALL)


def pairs(path: Path) -> list[Group]:
    """Return pairs whose first answer is the chosen one, with no image, one, and several."""
    renderer = renderer_of(path)
    groups = [
        answered(renderer, [asked(RED)], "red", "red and white"),
        answered(renderer, [asked(RED, TALL, RED, text="Which differs?")], "the second", "none"),
        answered(renderer, [asked(RED), {"role": "assistant", "content": "red"}, asked(BLUE)], "blue", "red"),
        answered(renderer, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "Hello", "Go"),
    ]
    for group in groups:
        group.episodes[1].reward = 0.0
    return [judged(group, renderer) for group in groups]


def learner(path: Path, **settings: Any) -> LearnerModel:
    config = ModelConfig(path=str(path), vision="trained", **settings)
    return build_whole(config, "float64", True, True, 0, CPU).eval()


def classifier(path: Path, ours: LearnerModel) -> Any:
    """Return transformers' classifier with the learner's weights, in float64."""
    config = load_model_config(ModelConfig(path=str(path)))
    config.num_labels = 1
    made: Any = classifier_class(config)._from_config(config, dtype=torch.float64)
    weights: dict[str, Any] = {
        name: value for name, value in ours.model.state_dict().items() if name.startswith("model.")
    }
    assert ours.value_head is not None
    made.load_state_dict(weights | {"score.weight": ours.value_head.linear.weight})
    if hasattr(config.get_text_config(), "num_experts"):
        made.set_experts_implementation("eager")  # grouped products don't take float64
    return made.eval()


def scores_of_transformers(path: Path, model: Any, group: Group) -> list[torch.Tensor]:
    """Return the score of each conversation of a group, each computed alone."""
    processor: Any = load_processor(path, load_model_config(ModelConfig(path=str(path))))
    return [model(**processed(processor, branch)).logits[0, 0] for branch in group.trajectories]


@pytest.mark.parametrize("share", taking_turns([True, False], [True]))
@pytest.mark.parametrize("family", taking_turns(ALL, DIFFERENT))
def test_scores_and_gradients_of_a_pair_are_those_of_transformers(
    folders: dict[Family, Path], family: Family, share: bool
) -> None:
    path = folders[family]
    ours = learner(path)
    theirs = classifier(path, ours)
    assert in_transformers(theirs.config) == (family in ("gemma3", "qwen3_5"))
    far = ROUNDED.get(family, 1e-9 if not family.startswith("gemma") else 1e-6)  # norms of Gemma round to float32
    groups = pairs(path)
    for group in groups[:3]:
        wanted = scores_of_transformers(path, theirs, group)
        theirs.zero_grad()
        (-logsigmoid(wanted[0] - wanted[1])).backward()
        oracle = {name: parameter.grad for name, parameter in theirs.named_parameters()}
        ours.zero_grad()
        batch = Batch.from_groups([group], share_prompts=share)
        batch = batch.weigh("group")
        output = ours(batch, VALUES)
        loss, _ = BradleyTerry()(output, batch)
        loss.backward()
        torch.testing.assert_close(
            sequence_scores(output, batch).detach(), torch.stack(wanted).detach(), rtol=far, atol=far
        )
        found = {name.removeprefix("model.model."): p.grad for name, p in ours.named_parameters() if p.grad is not None}
        assert any("vis" in name and "patch_embed" in name for name in found)
        head = found.pop("value_head.linear.weight")
        torch.testing.assert_close(head, oracle.pop("score.weight"), rtol=10 * far, atol=far)
        for name, gradient in found.items():
            wish = oracle[f"model.{name}"]
            torch.testing.assert_close(
                gradient,
                torch.zeros_like(gradient) if wish is None else wish,
                msg=lambda text, name=name: f"{name}: {text}",
                rtol=1e-4,
                atol=max(10 * far, 1e-7),
            )


@pytest.mark.parametrize("family", taking_turns(ALL, DIFFERENT))
def test_scores_are_the_same_in_any_crowd(folders: dict[Family, Path], family: Family) -> None:
    path = folders[family]
    ours, groups = learner(path), pairs(path)
    far = ROUNDED.get(family, 1e-9)
    with torch.no_grad():
        alone = [sequence_scores(ours(batch, VALUES), batch) for g in groups for batch in [Batch.from_groups([g])]]
        for share in (True, False):
            whole = Batch.from_groups(groups, share_prompts=share)
            together = sequence_scores(ours(whole, VALUES), whole)
            torch.testing.assert_close(together, torch.cat(alone), rtol=far, atol=far)
    assert together.std() > 1e-4
    assert together.unique().numel() == len(together)


def test_adapters_score_as_the_model_at_first_and_only_they_and_the_head_learn(folders: dict[Family, Path]) -> None:
    path = folders["qwen3_vl"]
    plain, adapted = learner(path), learner(path, lora=LoraSettings(rank=2))
    batch = Batch.from_groups(pairs(path))
    batch = batch.weigh("group")
    output = adapted(batch, VALUES)
    torch.testing.assert_close(output.values, plain(batch, VALUES).values)
    BradleyTerry()(output, batch)[0].backward()
    trained = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert "value_head.linear.weight" in trained
    assert all("lora_" in name and "language_model" in name for name in trained - {"value_head.linear.weight"})
