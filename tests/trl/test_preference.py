"""DPO and its relatives, KTO, SimPO, ORPO and reward models against TRL's trainers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from tests.losses.batches import pair_groups, unpaired_groups
from tests.trl.scene import Scene, same, scene, trainer
from whet.core.batch import ModelOutput
from whet.losses.dpo_forms import IPO, Hinge, Robust, Sigmoid
from whet.losses.preference import DPOLoss, KTOLoss, ORPOLoss, SimPOLoss
from whet.losses.reward_model import BradleyTerry

pytestmark = pytest.mark.trl
SEEDS = (0, 1, 2)


def pairs(seed: int, count: int = 4, all_trained: bool = False) -> Scene:
    """Pairs; one rejected answer trains nothing unless ``all_trained``."""
    groups = pair_groups(seed, count)
    if all_trained:
        groups = [group for group in groups if all(t.trained_tokens for t in group.episodes)]
    return scene(groups, seed).weigh("group")


def chosen_first(s: Scene) -> Tensor:
    """The sequences in TRL's order: all chosen ones, then all rejected ones."""
    reward = s.batch.reward.view(-1, 2)
    base = torch.arange(0, s.batch.sequences, 2)
    return torch.cat([base + reward.argmax(1), base + reward.argmin(1)])


def ours(s: Scene, loss: Any) -> Tensor:
    return loss(s.output, s.batch)[0]


def dpo(
    s: Scene, *forms: str, weights: tuple[float, ...] = (1.0,), beta: float = 0.1, smoothing: float = 0.0
) -> Tensor:
    order = chosen_first(s)
    its = trainer(
        DPOTrainer,
        s.table,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=list(forms),
        loss_weights=list(weights),
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
    )
    reference = s.padded(s.batch.reference_logprobs).sum(1)[order].chunk(2)
    inputs = {
        "input_ids": s.with_prompt(s.ids, s.padding)[order],
        "attention_mask": s.with_prompt(s.real, 1)[order],
        "completion_mask": s.with_prompt(s.trained, 0)[order],
        "ref_chosen_logps": reference[0],
        "ref_rejected_logps": reference[1],
    }
    return its._compute_loss(s.table, inputs, return_outputs=False)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("loss", "form", "beta", "smoothing"),
    [
        (DPOLoss(beta=0.3), "sigmoid", 0.3, 0.0),
        (DPOLoss(form=Hinge(), beta=1.5), "hinge", 1.5, 0.0),
        (DPOLoss(form=IPO(), beta=0.3), "ipo", 0.3, 0.0),
        (DPOLoss(form=Robust(label_smoothing=0.2), beta=0.5), "robust", 0.5, 0.2),
        (DPOLoss(beta=0.7, length_average=True), "sigmoid_norm", 0.7, 0.0),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_forms_of_dpo(loss: DPOLoss, form: str, beta: float, smoothing: float, seed: int) -> None:
    s = pairs(seed)
    same(ours(s, loss), dpo(s, form, beta=beta, smoothing=smoothing), s.table)


@pytest.mark.parametrize("seed", SEEDS)
def test_label_smoothing_is_conservative_dpo(seed: int) -> None:
    """TRL's DPO sigmoid form ignores label smoothing; TRL's CPO, fed with the gains over the reference, has it."""
    s = pairs(seed)
    gain = (s.padded(s.table.logprobs()) - s.padded(s.batch.reference_logprobs)).sum(1)[chosen_first(s)].chunk(2)
    its = trainer(CPOTrainer, s.table, alpha=0.0, loss_type="sigmoid", beta=0.3, label_smoothing=0.2)
    same(ours(s, DPOLoss(form=Sigmoid(label_smoothing=0.2), beta=0.3)), its.cpo_loss(*gain)[0].mean(), s.table)


@pytest.mark.parametrize("seed", SEEDS)
def test_sft_term_of_one_pair(seed: int) -> None:
    s = pairs(seed, count=1)
    same(ours(s, DPOLoss(sft_weight=0.7)), dpo(s, "sigmoid", "sft", weights=(1.0, 0.7)), s.table)


def test_our_sft_term_is_a_mean_over_pairs_and_theirs_over_tokens() -> None:
    """As RPO has it, a pair's term doesn't depend on how long the other pairs' answers are."""
    s = pairs(0, all_trained=True)
    chosen = chosen_first(s)[: s.batch.sequences // 2]
    nll, length = -s.padded(s.table.logprobs())[chosen].sum(1), s.trained[chosen].sum(1)
    assert len(set(length.tolist())) > 1
    difference = nll.sum() / length.sum() - (nll / length).mean()
    same(ours(s, DPOLoss(sft_weight=0.7)) + 0.7 * difference, dpo(s, "sigmoid", "sft", weights=(1.0, 0.7)), s.table)


def concatenated(s: Scene) -> dict[str, Tensor]:
    ids, real = s.with_prompt(s.ids, s.padding), s.with_prompt(s.real, 1)
    labels = torch.where(s.with_prompt(s.trained, 0).bool(), ids, -100)
    halves = {}
    for name, rows in zip(("chosen", "rejected"), chosen_first(s).chunk(2), strict=True):
        halves |= {f"{name}_input_ids": ids[rows], f"{name}_attention_mask": real[rows], f"{name}_labels": labels[rows]}
    return halves


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("beta", "gamma"), [(2.0, 0.5), (1.0, 0.0)])
def test_simpo(beta: float, gamma: float, seed: int) -> None:
    s = pairs(seed, all_trained=True)
    its = trainer(
        CPOTrainer,
        s.table,
        alpha=0.0,
        cpo_alpha=0.0,
        loss_type="simpo",
        beta=beta,
        simpo_gamma=gamma,
        label_smoothing=0.0,
        pad_token_id=s.padding,
    )
    same(ours(s, SimPOLoss(beta=beta, gamma=gamma)), its.get_batch_loss_metrics(s.table, concatenated(s))[0], s.table)


@pytest.mark.parametrize("seed", SEEDS)
def test_orpo_up_to_what_its_supervised_term_covers(seed: int) -> None:
    """Theirs learns the prompt too, as a mean over all tokens; ours the answer, as a mean over pairs, as in the paper.
    The odds are in float32 there."""
    s = pairs(seed, all_trained=True)
    its = trainer(ORPOTrainer, s.table, beta=0.5, padding_value=s.padding)
    rows = chosen_first(s)[: s.batch.sequences // 2]
    everything = torch.where(s.real[rows].bool(), -s.table.logprobs()[s.ids[rows]], 0.0)
    answers = -s.padded(s.table.logprobs())[rows].sum(1) / s.trained[rows].sum(1)
    difference = everything.sum() / s.real[rows].sum() - answers.mean()
    loss = its.get_batch_loss_metrics(s.table, concatenated(s))[0]
    same(ours(s, ORPOLoss(weight=0.5)) + difference, loss, s.table, tolerance=1e-6)


KL_ROWS = 6


def kto(s: Scene, form: str, beta: float, weights: tuple[float, float], reference_kl: Tensor) -> Tensor:
    its = trainer(
        KTOTrainer,
        s.table,
        calculate_KL=form == "kto",
        precompute_ref_logps=True,
        loss_type=form,
        beta=beta,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
    )
    others = s.padding + 1 + torch.arange(2 * KL_ROWS).view(KL_ROWS, 2)
    inputs = {
        "input_ids": s.with_prompt(s.ids, s.padding),
        "attention_mask": s.with_prompt(s.real, 1),
        "completion_mask": s.with_prompt(s.trained, 0),
        "label": s.batch.reward.bool(),
        "ref_logps": s.padded(s.batch.reference_logprobs).sum(1),
        "KL_input_ids": s.with_prompt(others, s.padding),
        "KL_attention_mask": torch.ones(KL_ROWS, 3, dtype=torch.long),
        "KL_completion_mask": s.with_prompt(torch.ones_like(others), 0),
        "ref_KL_logps": reference_kl,
    }
    return its._compute_loss(s.table, inputs, return_outputs=False)


def rows(seed: int, only_trained: bool = True) -> Scene:
    groups = [g for g in unpaired_groups(seed, 8) if g.trajectories[0].trained_tokens or not only_trained]
    return scene(groups, seed, names=2 * KL_ROWS).weigh("sequence")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shift", [-1.0, 1.0], ids=["below the reference", "above the reference"])
def test_kto_with_its_reference_point(shift: float, seed: int) -> None:
    """The point is the mean of lp - lp_ref over answers to other prompts, at least 0. Ours is given it as a score."""
    s = rows(seed)
    others = s.table.logprobs()[s.padding + 1 :].detach().view(KL_ROWS, 2).sum(1)
    reference = others - shift + 0.1 * torch.randn(KL_ROWS, dtype=torch.float64)
    point = (others - reference).mean().clamp(min=0)
    assert (point > 0) == (shift > 0)
    s.batch.fill("reference_point", torch.full_like(s.batch.reward, point.item()), axis="sequence")
    our = KTOLoss(beta=0.5, desirable_weight=1.5, undesirable_weight=0.5)(s.output, s.batch)[0]
    same(our, kto(s, "kto", 0.5, (1.5, 0.5), reference), s.table)


@pytest.mark.parametrize("seed", SEEDS)
def test_kto_without_a_reference_point_is_apo_zero(seed: int) -> None:
    s = rows(seed)
    s.batch.fill("reference_point", torch.zeros_like(s.batch.reward), axis="sequence")
    same(ours(s, KTOLoss(beta=0.3)), kto(s, "apo_zero_unpaired", 0.3, (1.0, 1.0), torch.zeros(KL_ROWS)), s.table)


def test_rows_that_train_nothing_count_in_their_kto_and_not_in_ours() -> None:
    s = rows(0, only_trained=False)
    s.batch.fill("reference_point", torch.zeros_like(s.batch.reward), axis="sequence")
    idle = int((s.trained.sum(1) == 0).sum())
    assert idle
    count = len(s.ids)
    our = ours(s, KTOLoss(beta=0.3)) * (count - idle) / count + idle * 0.5 / count  # sigmoid(0) each
    same(our, kto(s, "apo_zero_unpaired", 0.3, (1.0, 1.0), torch.zeros(KL_ROWS)), s.table)


class Scores(nn.Module):
    """A reward model that is a list of scores."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.scores[input_ids[:, 0]].unsqueeze(1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("margin", [None, "correct"])
@pytest.mark.parametrize("centre", [0.0, 0.3])
def test_reward_model_with_margin_and_centring(centre: float, margin: str | None, seed: int) -> None:
    s = pairs(seed, all_trained=True)
    order = chosen_first(s)
    torch.manual_seed(seed)
    model = Scores(torch.randn(s.batch.sequences, dtype=torch.float64))
    inputs = {"input_ids": order[:, None], "attention_mask": torch.ones_like(order[:, None])}
    if margin:
        better, worse = s.batch.scores[margin][order].chunk(2)
        inputs["margin"] = better - worse
    its = trainer(RewardTrainer, model, args=SimpleNamespace(center_rewards_coefficient=centre or None))

    last = {}
    for token in s.batch.trained.nonzero().squeeze(1).tolist():
        last[int(s.batch.sequence[token])] = token
    values = torch.randn(len(s.batch), dtype=torch.float64)
    values = values.index_put((torch.tensor([last[i] for i in range(s.batch.sequences)]),), model.scores)
    loss, _ = BradleyTerry(margin=margin, centre_coefficient=centre)(ModelOutput(values, values=values), s.batch)
    same(loss, its.compute_loss(model, inputs), model)
