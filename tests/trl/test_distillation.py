"""Distillation against TRL's generalised Jensen-Shannon divergence, and on-policy distillation against IW-OPD."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gold import GOLDTrainer
from trl.experimental.iw_opd import IWOPDTrainer

from tests.trl.scene import Scene, Table, same, sampled, scene, trainer
from whet.core.batch import ModelOutput
from whet.losses.distillation import JSD, DistillationLoss, Forward, OnPolicyDistillationLoss, Reverse

pytestmark = pytest.mark.trl
SEEDS = (0, 1, 2)
THEIRS = [GKDTrainer.generalized_jsd_loss, GOLDTrainer.generalized_jsd_loss, IWOPDTrainer.generalized_jsd_loss]


def lesson(seed: int) -> tuple[Scene, Tensor, Tensor]:
    """A scene, the teacher's logits [N, V], and labels for TRL: -100 where untrained."""
    s = scene(sampled(seed), seed).weigh("token")
    teacher = Table(s.padding + 1, seed + 100).rows.detach()[: s.padding]
    return s, teacher, torch.where(s.batch.trained, torch.arange(s.padding), -100)


def ours(s: Scene, teacher: Tensor, k: int, **settings: Any) -> Tensor:
    """Over the teacher's top k."""
    best = teacher.log_softmax(-1).topk(k)
    batch = replace(s.batch)
    batch.fill("topk_ids", best.indices)
    batch.fill("teacher_logprobs", best.values)
    topk = s.table.rows[: s.padding].log_softmax(-1).gather(1, best.indices)
    return DistillationLoss(**settings)(ModelOutput(s.output.logprobs, topk=topk), batch)[0]


def theirs(jsd: Any, s: Scene, teacher: Tensor, labels: Tensor, beta: float, **settings: Any) -> Tensor:
    return jsd(s.table.rows[None, : s.padding], teacher[None], labels[None], beta=beta, **settings)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("jsd", THEIRS, ids=["GKD", "GOLD", "IW-OPD"])
@pytest.mark.parametrize(
    ("settings", "beta"),
    [
        ({"divergence": Forward()}, 0.0),
        ({"divergence": Reverse()}, 1.0),
        ({"divergence": JSD(mix=0.5)}, 0.5),
        ({"divergence": JSD(mix=0.2)}, 0.2),
    ],
    ids=["forward", "reverse", "jsd", "jsd 0.2"],
)
def test_divergences_over_the_whole_vocabulary(settings: dict[str, Any], beta: float, jsd: Any, seed: int) -> None:
    s, teacher, labels = lesson(seed)
    same(ours(s, teacher, teacher.shape[1], **settings), theirs(jsd, s, teacher, labels, beta), s.table)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tail", ["renormalise", "bucket"])
@pytest.mark.parametrize("k", [1, 5])
def test_forward_kl_over_the_teachers_top_k(k: int, tail: str, seed: int) -> None:
    s, teacher, labels = lesson(seed)
    its = theirs(IWOPDTrainer.generalized_jsd_loss, s, teacher, labels, 0.0, top_k=k, add_tail=tail == "bucket")
    our = ours(s, teacher, k, tail=tail)
    if (k, tail) == (1, "renormalise"):  # one outcome of probability 1: nothing to learn
        assert our == its == 0
    else:
        same(our, its, s.table)


def test_the_reverse_kl_is_over_the_teachers_top_k_here_and_over_the_students_there() -> None:
    """A stored top k can only be the teacher's. Where both choose the same tokens, the numbers are the same."""
    s, teacher, labels = lesson(0)
    reverse = {"divergence": Reverse(), "tail": "bucket"}
    jsd = IWOPDTrainer.generalized_jsd_loss
    assert not torch.allclose(ours(s, teacher, 5, **reverse), theirs(jsd, s, teacher, labels, 1.0, top_k=5))
    alike = s.table.rows.detach()[: s.padding] * 1.5
    same(ours(s, alike, 5, **reverse), theirs(jsd, s, alike, labels, 1.0, top_k=5), s.table)


@pytest.mark.parametrize("seed", SEEDS)
def test_on_policy_distillation_is_iw_opd_without_its_position_weights(seed: int) -> None:
    s, teacher, labels = lesson(seed)
    names = torch.arange(s.padding)
    of_teacher = teacher.log_softmax(-1)[names, names]
    its = trainer(IWOPDTrainer, s.table, temperature=1.0, iw_opd_gamma=0.0, iw_opd_epsilon=1e-8)
    loss = its._compute_iw_opd_loss(s.table.rows[None, : s.padding], names[None], labels[None], of_teacher[None])
    batch = replace(s.batch)
    batch.fill("teacher_token_logprobs", of_teacher)
    same(OnPolicyDistillationLoss(clamp=100)(s.output, batch)[0], loss, s.table)
