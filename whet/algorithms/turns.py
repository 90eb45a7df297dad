"""Credit for each turn of an episode: the return from a reply on is compared with the returns from the same turn in the
group's other episodes (turn-level advantages, arXiv 2505.11821). Rewards earned before the reply don't count.

    G_k = sum over j >= k of gamma^(j - k) r_j         r_j: the reward of reply j; the last one also gets the rest
    A_k = (G_k - mean of the group's G_k) / (std of the group's G_k + eps)
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from whet.algorithms.advantage import Advantage, Credit, Std, Steps, divided, finite_rewards
from whet.base.lazy import torch
from whet.core.batch import Batch


class TurnAdvantage(Advantage):
    """A_k at all tokens of reply k. A branch counts its replies from the replies that it inherits as context. If no
    other episode of the group has a k-th reply, the advantage is 0. An episode without trained tokens counts as one
    reply, with the episode's reward. With one reply per episode this is ``GroupAdvantage``. If thinking was cut at a
    budget, the text after it counts as a further reply, because the tokens that end the thinking are not sampled."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of the rewards of later turns."""
    divide_by_std: bool = True
    std: Std = "sample"
    eps: float = Field(1e-6, ge=0)

    @property
    def compares(self) -> bool:
        return True

    def idle(self) -> Iterator[tuple[str, str]]:
        if not self.divide_by_std:
            yield from self._unused("std eps", "divide_by_std = true")

    def estimate(self, batch: Batch) -> Credit:
        """Raises DataError for a reward that isn't finite."""
        steps = Steps(batch)
        rewards_TS = steps.rewards(finite_rewards(batch, batch.reward), None)
        starts_N = batch.trained & ~batch.trained[batch.predictor.clamp(min=0)]
        starts_TS = steps.of(starts_N.double())
        to_go_TS, running_S = torch.empty_like(rewards_TS), torch.zeros_like(batch.reward)
        for step, rewards_S in enumerate(rewards_TS):  # backwards in time
            ended_S = starts_TS[step - 1] if step else torch.zeros_like(running_S)
            running_S = rewards_S + (1 - (1 - self.gamma) * ended_S) * running_S
            to_go_TS[step] = running_S
        turn_TS = starts_TS.flip(0).cumsum(0).flip(0)  # 1 for the first reply
        if batch.replies_before is not None:
            turn_TS = turn_TS + batch.replies_before

        to_go_N, turn_N = steps.tokens(to_go_TS), steps.tokens(turn_TS).long()
        turns = max([1, *turn_N.tolist()]) + 1
        place_N = batch.group[batch.sequence.clamp(min=0)] * turns + turn_N if len(batch) else turn_N
        silent_S = (batch.per_episode(batch.trained_per_sequence) == 0) & batch.first_branch
        first_G = torch.cat([to_go_N[starts_N], batch.reward[silent_S]])  # return of each reply
        at_G = torch.cat([place_N[starts_N], batch.group[silent_S] * turns + 1])  # index of the reply's group and turn
        zeros = to_go_N.new_zeros(len(batch.group_uids) * turns)
        count = zeros.index_add(0, at_G, torch.ones_like(first_G))
        mean = zeros.index_add(0, at_G, first_G) / count
        high = zeros.scatter_reduce(0, at_G, first_G, "amax", include_self=False)
        low = zeros.scatter_reduce(0, at_G, first_G, "amin", include_self=False)
        squares = zeros.index_add(0, at_G, (first_G - mean[at_G]).square())
        spread = (squares / (count - int(self.std == "sample"))).sqrt()
        # Where all are equal, and at untrained tokens, whose turn 0 has no reply, the advantage is exactly 0.
        centred_N = (to_go_N - mean[place_N]).masked_fill((high == low)[place_N], 0.0)
        return Credit(divided(centred_N, spread[place_N] + self.eps) if self.divide_by_std else centred_N)
