"""Preference algorithms: training on judged replies, given as rows (DPO, KTO, reward models) or sampled (online DPO).

The policy's log-probs are measured against a frozen reference model, the model that the run started from. On rows, its
log-probs are computed in each step or once before the first. SimPO and ORPO, losses of DPO, need no reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from whet.algorithms.base import POLICY, Algorithm, OnlineAlgorithm, Role
from whet.algorithms.registry import AnyFilter, AnyLoss
from whet.base.seeds import derive_seed
from whet.core.batch import Batch
from whet.core.content import only_images
from whet.core.types import Episode, Group, Span, Task, Trajectory, Weighting
from whet.data.base import Data
from whet.data.rows import LabelledRows, PreferenceRows, ScoredRows
from whet.losses.base import Unit
from whet.losses.preference import DPOLoss, KTOLoss
from whet.losses.reward_model import BradleyTerry
from whet.metrics import Metrics
from whet.rollouts.filters import BestAndWorst, Filter

if TYPE_CHECKING:
    from whet.learner.base import Scorer


class PreferenceAlgorithm(Algorithm):
    """Base of the algorithms on judged rows: a policy and, if the loss reads its log-probs, a reference model."""

    loss: AnyLoss
    """The loss of the policy."""
    reference: Literal["live", "cached"] = "live"
    """``live``: the reference model stays in memory and scores each step. ``cached``: it scores the run's rows before
    the first step, into ``reference.safetensors`` in the run folder, and is then freed."""

    @model_validator(mode="after")
    def _reads_what_it_caches(self) -> PreferenceAlgorithm:
        if self.reference == "cached" and "reference_logprobs" not in self.reads:
            raise ValueError("reference = cached, but algorithm.loss uses no reference model; leave it out")
        return self

    @property
    def roles(self) -> dict[str, Role]:
        return {"policy": Role(loss=self.loss, fills=POLICY, caches_reference=self.reference == "cached")}


class DPO(PreferenceAlgorithm):
    """Direct preference optimisation (arXiv 2305.18290): the chosen answer of each pair becomes more likely than the
    rejected one, relative to the reference model. Its relatives are settings of its loss: IPO, hinge and robust DPO
    (``loss.form``), an SFT term (``loss.sft_weight``), SimPO and ORPO (``loss.type``)."""

    takes: ClassVar[tuple[type[Data], ...]] = (PreferenceRows,)
    units: ClassVar[tuple[Unit, ...]] = ("group",)

    loss: AnyLoss = DPOLoss()
    """``dpo``, ``simpo`` or ``orpo``, with their settings."""
    weighting: Weighting = "group"
    """A token's share of a step."""


class OnlineDPO(OnlineAlgorithm):
    """Online DPO (arXiv 2402.04792): the policy answers each task several times, and its best and its worst answer by
    reward become a pair for DPO. A task whose answers all have the same reward is dropped, and another is drawn."""

    units: ClassVar[tuple[Unit, ...]] = ("group",)

    group_size: int = Field(8, gt=1)
    """Answers per task, of which two are trained on."""
    loss: AnyLoss = DPOLoss()
    """``dpo``, ``simpo`` or ``orpo``, with their settings."""
    filters: tuple[AnyFilter, ...] = ()
    """Filters that are applied to groups before the pair is chosen."""
    weighting: Weighting = "group"
    """A token's share of a step."""

    @property
    def roles(self) -> dict[str, Role]:
        return {"policy": Role(loss=self.loss, fills=POLICY)}

    @property
    def pairing(self) -> tuple[Filter, ...]:
        return (BestAndWorst(),)


class KTO(PreferenceAlgorithm):
    """KTO (arXiv 2402.01306), for single replies marked good or bad. A good reply becomes more likely than under the
    reference model and a bad one less likely, with a smaller gradient the further it is from the reference point. The
    reference point is KL(policy || reference), estimated over each whole step on mismatched replies."""

    takes: ClassVar[tuple[type[Data], ...]] = (LabelledRows,)
    units: ClassVar[tuple[Unit, ...]] = ("sequence",)

    loss: AnyLoss = KTOLoss()
    """``kto``, whose weights balance good and bad rows: ``desirable_weight``, ``undesirable_weight``."""
    weighting: Weighting = "sequence"
    """A token's share of a step."""

    @property
    def fills(self) -> frozenset[str]:
        return frozenset({"reference_point"}) & self.loss.reads

    async def prepare(self, batch: Batch, groups: Sequence[Group], learners: Mapping[str, Scorer]) -> Metrics:
        """Also fill the reference point, which all rows share: max(0, mean of lp - lp_ref), 0 for a single row."""
        metrics = await super().prepare(batch, groups, learners)
        if not self.fills:
            return metrics
        pairs, point = mismatched(batch), batch.reward.new_zeros(())
        if pairs.sequences:
            scores = await learners["policy"].score(pairs, {"logprobs", "reference_logprobs"})
            gains = pairs.per_sequence(scores["logprobs"] - scores["reference_logprobs"])
            point = gains.double().mean().clamp(min=0)
        batch.fill("reference_point", point.expand(batch.sequences), axis="sequence")
        return metrics.mean("preference/reference_point", point.item())


class RewardModel(Algorithm):
    """A reward model, without a policy: a scalar head at the last token of an answer learns to rank pairs (Bradley and
    Terry 1952; as a reward model, arXiv 2203.02155) or, with ``loss: score_regression``, to predict the scores of
    scored rows."""

    takes: ClassVar[tuple[type[Data], ...]] = (PreferenceRows, ScoredRows)

    loss: AnyLoss = BradleyTerry()
    """``bradley_terry`` for pairs, ``score_regression`` for scored rows."""
    weighting: Weighting = "group"
    """A token's share of a step."""

    @property
    def roles(self) -> dict[str, Role]:
        return {"reward_model": Role(loss=self.loss, head="value")}


def mismatched(batch: Batch) -> Batch:
    """Return a batch of prompts with the replies to other prompts, on which KTO estimates its reference point.

    Each sequence of ``batch`` with trained tokens keeps its prompt and gets the reply of the next one, the last one
    that of the first. They are ordered by a hash of their groups' names, so that the order depends on the step alone
    and not on its layout. A single sequence gives an empty batch. Replies are cut so that no sequence is longer than
    the longest one of ``batch``, and so fits into the same memory.
    """
    halves = []
    for sequence, path in enumerate(batch.paths()):
        trained = batch.trained[path]
        if bool(trained.any()):
            start = int(trained.int().argmax())
            name = derive_seed("mismatched", batch.group_uids[int(batch.group[sequence])])
            tokens = batch.tokens[path].tolist()
            reply = list(zip(tokens[start:], trained[start:].tolist(), strict=True))
            halves.append((name, sequence, tokens[:start], reply))
    halves.sort(key=lambda half: half[:2])
    room = max((len(prompt) + len(reply) for _, _, prompt, reply in halves), default=0)
    images = only_images(batch.images)
    groups = []
    for index, (_, _, prompt, _) in enumerate(halves if len(halves) > 1 else []):
        reply = halves[(index + 1) % len(halves)][3][: room - len(prompt)]
        spans = [Span([token for token, _ in run], trains) for trains, run in groupby(reply, key=lambda pair: pair[1])]
        uid = f"mismatched {index}"
        row = Trajectory([Span(prompt, False), *spans], images)
        groups.append(Group(uid, Task(uid, []), [Episode([row])]))
    return Batch.from_groups(groups, share_prompts=False, distribution=batch.distribution)
