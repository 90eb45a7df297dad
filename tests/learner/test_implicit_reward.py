"""A reward model that only ever sees the outcomes of whole answers finds the token that decides them."""

import random
from pathlib import Path

import torch

from tests.groups import group
from tests.learner.parts import VOCABULARY, whole, worker
from whet.algorithms.prime import ProcessRewards
from whet.core.batch import Batch
from whet.learner.optimizer_config import OptimizerConfig
from whet.losses.implicit_reward import ImplicitReward

GOOD = 7  # an answer is right if it holds this token


def answers(seed: int) -> Batch:
    """Thirty-two answers of six tokens, about half of them right."""
    dice = random.Random(seed)
    made = [[dice.choice([t for t in range(VOCABULARY) if t != GOOD]) for _ in range(6)] for _ in range(32)]
    for answer in made:
        if dice.random() < 0.5:
            answer[dice.randrange(6)] = GOOD
    outcomes = [float(GOOD in answer) for answer in made]
    return Batch.from_groups([group(f"g{seed}", [1, 2], made, outcomes)]).weigh("sequence")


def test_process_rewards_are_highest_where_the_outcome_is_decided(llama: Path) -> None:
    learner = worker(llama, precision="float32", optimizer=OptimizerConfig(lr=1e-2), steps=60)
    loss = ImplicitReward(beta=0.5)
    accuracy = []
    for step in range(60):
        batch = answers(step)
        start = learner.score(whole(batch), {"reference_logprobs"})[0]["reference_logprobs"]
        batch.fill("reward_reference_logprobs", start)
        accuracy.append(learner.update(whole(batch), loss).metrics.result()["outcome/accuracy"])
    assert sum(accuracy[-10:]) / 10 > 0.9

    unseen = answers(1000)
    said = learner.score(whole(unseen), {"logprobs", "reference_logprobs"})[0]
    process = said["logprobs"] - said["reference_logprobs"]
    deciding = unseen.trained & (unseen.tokens == GOOD)
    others = unseen.trained & ~deciding
    assert process[deciding].mean() > process[others].mean() + 1.0

    unseen.fill("reward_logprobs", said["logprobs"])
    unseen.fill("reward_reference_logprobs", said["reference_logprobs"])
    advantages = ProcessRewards(beta=0.5)(unseen).advantages
    before, after = torch.zeros_like(unseen.trained), torch.zeros_like(unseen.trained)
    for sequence in range(unseen.sequences):
        tokens = (unseen.trained & (unseen.sequence == sequence)).nonzero().squeeze(1)
        place = [i for i, t in enumerate(tokens) if unseen.tokens[t] == GOOD]
        if place:
            before[tokens[: place[0] + 1]] = True
            after[tokens[place[0] + 1 :]] = True
    assert advantages[before].mean() > advantages[after].mean(), "what led to it is credited, what came after is not"
