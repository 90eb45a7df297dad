"""KTO's reference point: a step's estimate of KL(policy || reference), on prompts with replies to other prompts."""

import asyncio
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.algorithms.test_objectives import TwoWorkers, labelled_groups
from tests.groups import group
from tests.learner.parts import SMALL, VOCABULARY, cut, whole
from tests.rows import rows_recipe
from tests.tiny import tiny_llama
from whet.algorithms.preference import DPO, KTO, OnlineDPO, mismatched
from whet.base.seeds import derive_seed
from whet.core.batch import Batch
from whet.core.content import only_images
from whet.core.images import placeholders
from whet.core.types import Group, Span
from whet.losses.preference import KTOLoss

PLAIN = {
    "language": tiny_llama(VOCABULARY, **SMALL).double(),
    "other": tiny_llama(VOCABULARY, seed=1, **SMALL).double(),
}


def completed(groups: list[Group], learner: Any, share_prompts: bool = True) -> Batch:
    batch = Batch.from_groups(groups, share_prompts=share_prompts)
    metrics = asyncio.run(KTO().prepare(batch, groups, {"policy": learner}))
    assert metrics.result() == {"preference/reference_point": pytest.approx(point(batch))}
    return batch


def weighed(batch: Batch) -> Batch:
    return batch.weigh(KTO().weighting)


def point(batch: Batch) -> float:
    (value,) = set(batch.column("reference_point").tolist())
    return value


def ring(groups: list[Group]) -> list[tuple[list[int], list[int]]]:
    """Prompt and foreign reply, by hand."""
    rows = sorted(groups, key=lambda one: derive_seed("mismatched", one.uid))
    rows = [row for row in rows if row.trajectories[0].trained_tokens]
    spans = [row.trajectories[0].spans for row in rows]
    longest = max(len(prompt.tokens) + len(reply.tokens) for prompt, reply in spans)
    return [
        (list(mine[0].tokens), list(other[1].tokens[: longest - len(mine[0].tokens)]))
        for mine, other in zip(spans, spans[1:] + spans[:1], strict=True)
    ]


def total(model: Any, prompt: list[int], reply: list[int]) -> float:
    """Log-prob of a reply after a prompt by the unchanged model, token by token."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + reply])).logits[0].double().log_softmax(-1)
    return sum(float(logits[len(prompt) + i - 1, token]) for i, token in enumerate(reply))


@pytest.mark.parametrize("seed", range(6))
def test_the_reference_point_is_the_mean_gain_of_foreign_replies_and_never_below_zero(
    workers: dict[str, Any], seed: int
) -> None:
    groups = labelled_groups(seed)
    gains = [total(PLAIN["language"], *pair) - total(PLAIN["other"], *pair) for pair in ring(groups)]
    assert len(gains) == 4, "the row that trains nothing is left out"
    mean, learner = sum(gains) / 4, TwoWorkers(workers)
    assert point(completed(groups, learner)) == pytest.approx(max(0.0, mean), abs=1e-5)
    learner.says = {"logprobs": workers["other"], "reference_logprobs": workers["language"]}
    batch = completed(groups, learner)
    assert point(batch) == pytest.approx(max(0.0, -mean), abs=1e-5)
    assert abs(mean) > 1e-4


def test_each_reply_stands_after_another_prompt_and_only_it_trains() -> None:
    groups = labelled_groups(1)
    batch = mismatched(Batch.from_groups(groups))
    found = []
    for path in batch.paths():
        trained = batch.trained[path]
        found.append((batch.tokens[path][~trained].tolist(), batch.tokens[path][trained].tolist()))
    assert found == ring(groups)
    own = {tuple(g.trajectories[0].spans[0].tokens): list(g.trajectories[0].spans[1].tokens) for g in groups}
    assert all(own[tuple(prompt)][: len(reply)] != reply for prompt, reply in found)


def test_what_stands_between_the_trained_parts_of_a_reply_comes_along_untrained() -> None:
    groups = [group("a", [1, 2], [[3, 4]], [1.0]), group("b", [5, 6], [[7]], [0.0])]
    groups[0].trajectories[0].spans += [Span([8, 9], False), Span([10], True)]
    batch = mismatched(Batch.from_groups(groups))
    rows = [(batch.tokens[path].tolist(), batch.trained[path].tolist()) for path in batch.paths()]
    assert sorted(rows) == [
        ([1, 2, 7], [False, False, True]),
        ([5, 6, 3, 4, 8, 9, 10], [False, False, True, True, False, False, True]),
    ]


def test_the_images_of_the_prompts_come_along() -> None:
    url = "data:image/png;base64,AA=="
    groups = [group("a", placeholders(url, 2), [[3, 4]], [1.0]), group("b", [5, 6], [[7]], [0.0])]
    groups[0].trajectories[0].messages = only_images([url])
    assert mismatched(Batch.from_groups(groups)).images == Batch.from_groups(groups).images == (url,)


def test_no_foreign_reply_makes_a_sequence_longer_than_the_longest_row() -> None:
    groups = [group("a", [1] * 20, [[2]], [1.0]), group("b", [3], [[4] * 15], [0.0])]
    batch = mismatched(Batch.from_groups(groups))
    assert sorted(len(path) for path in batch.paths()) == [2, 21]


def test_the_reference_point_does_not_depend_on_layout_or_order(workers: dict[str, Any]) -> None:
    learner = TwoWorkers(workers)
    groups = [*labelled_groups(0), group("h", [1, 2, 3], [[4, 5]], [1.0])]
    if point(completed(groups, learner)) == 0:
        learner.says = dict(zip(learner.says, reversed(learner.says.values()), strict=True))
    expected = point(completed(groups, learner))
    assert expected > 0
    shuffled = random.Random(5).sample(groups, len(groups))
    assert point(completed(shuffled, learner)) == pytest.approx(expected, abs=1e-6)
    assert point(completed(groups, learner, share_prompts=False)) == pytest.approx(expected, abs=1e-6)
    batch = completed(groups, learner)
    parts = cut(weighed(batch), 24, "sequence")
    assert len(parts) > 1
    assert {value for part in parts for value in part.batch.column("reference_point").tolist()} == {expected}


def test_it_is_float64_as_all_scores_are_also_of_a_float32_model(workers: dict[str, Any]) -> None:
    class Single(TwoWorkers):
        async def score(self, batch: Batch, columns: set[str]) -> dict[str, torch.Tensor]:
            return {name: column.float() for name, column in (await super().score(batch, columns)).items()}

    for groups in (labelled_groups(0), labelled_groups(0)[:1]):
        assert completed(groups, Single(workers)).column("reference_point").dtype == torch.float64


def test_a_row_without_a_partner_has_reference_point_zero(workers: dict[str, Any]) -> None:
    assert point(completed(labelled_groups(0)[:1], TwoWorkers(workers))) == 0
    assert len(mismatched(Batch.from_groups(labelled_groups(0)[:1]))) == 0


def test_no_gradient_flows_through_the_reference_point(workers: dict[str, Any]) -> None:
    batch = weighed(completed(labelled_groups(0), TwoWorkers(workers)))
    assert not batch.column("reference_point").requires_grad
    batch.reference_logprobs = torch.zeros(len(batch))
    learner = workers["language"]
    learner.accumulate(whole(batch), KTO().loss)
    assert any(bool(p.grad.any()) for p in learner.module.parameters() if p.grad is not None)


class WithoutReferencePoint(KTOLoss):
    reads: ClassVar = frozenset({"reference_logprobs"})


def test_pairs_are_trained_on_in_groups_and_a_reference_point_is_filled_where_the_loss_reads_it() -> None:
    for algorithm in (DPO(), OnlineDPO()):
        assert (algorithm.units, algorithm.weighting) == (("group",), "group")
    assert KTO().fills == {"reference_point"}
    assert KTO(loss=WithoutReferencePoint()).fills == set()


def test_its_own_loss_fits_its_rows(tmp_path: Path) -> None:
    made = rows_recipe(tmp_path, "labelled", tmp_path / "rows.jsonl", {"type": "kto", "loss": "kto"})
    assert made.algorithm.losses["policy"].unit in made.algorithm.units
