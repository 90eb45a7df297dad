"""Random batches for tests of losses and advantages. At untrained tokens every column is nan or infinite, so a loss
that reads them fails."""

import random
from dataclasses import replace

import torch
from torch import Tensor

from tests.groups import episode
from whet.core.batch import Axis, Batch, ModelOutput
from whet.core.types import Episode, Group, Span, Status, Task

K = 4


def random_groups(seed: int, sizes: tuple[int, ...] = (3, 1, 4, 2)) -> list[Group]:
    """Return ragged answers to shared prompts: some of two turns, one untrained, one that consists of the prompt
    alone."""
    dice = random.Random(seed)
    groups = []
    for index, size in enumerate(sizes):
        prompt = [dice.randrange(9) for _ in range(dice.randint(1, 3))]
        rows = [_row(dice, prompt, kind=(index + row + seed) % 6) for row in range(size)]
        groups.append(Group(f"task-{index}", Task(f"task-{index}", []), rows))
    return groups


def _row(dice: random.Random, prompt: list[int], kind: int) -> Episode:
    def answer(trained: bool) -> Span:
        tokens = [dice.randrange(9) for _ in range(dice.randint(1, 4))]
        return Span(tokens, trained, [-1.0] * len(tokens))

    spans = {
        4: [answer(True), answer(False), answer(True)],
        3: [answer(False)],
        5: [] if dice.random() < 0.5 else [answer(True)],
    }.get(kind, [answer(True)])
    scores = {"correct": float(dice.randint(0, 2)), "format": dice.random(), "constant": 0.3}
    status = Status.TRUNCATED if dice.random() < 0.4 else Status.COMPLETED
    return episode([Span(prompt, False), *spans], float(dice.randint(0, 3)) - 1.0, scores, status)


def pair_groups(seed: int, pairs: int = 4) -> list[Group]:
    """Return preference pairs, the chosen answer first or second; one pair's rejected answer trains nothing."""
    dice = random.Random(seed)
    groups = []
    for index in range(pairs):
        prompt = [dice.randrange(9) for _ in range(2)]
        rows = [_row(dice, prompt, kind=dice.choice([0, 4])) for _ in range(2)]
        chosen = dice.randrange(2)
        if index == 1:
            rows[1 - chosen] = _row(dice, prompt, kind=3)
        for i, row in enumerate(rows):
            row.reward = float(i == chosen)
        groups.append(Group(f"pair-{index}", Task(f"pair-{index}", []), rows))
    return groups


def unpaired_groups(seed: int, rows: int = 6) -> list[Group]:
    dice = random.Random(seed)
    groups = []
    for index in range(rows):
        row = _row(dice, [1, 2], kind=dice.choice([0, 4, 3]))
        row.reward = float(index % 2)
        groups.append(Group(f"row-{index}", Task(f"row-{index}", []), [row]))
    return groups


def fill(groups: list[Group], seed: int, weighting: str = "token", noise: float = 0.4) -> tuple[Batch, ModelOutput]:
    """Return the batch with all columns filled, and a model's output for it, in float64 and with gradients."""
    batch = Batch.from_groups(groups).weigh(weighting, 7)
    generator = torch.Generator().manual_seed(seed)
    garbage = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=torch.float64)

    def column(mean: float, std: float, width: int | None = None) -> Tensor:
        shape = (len(batch),) if width is None else (len(batch), width)
        values = mean + std * torch.randn(shape, generator=generator, dtype=torch.float64)
        values[~batch.trained] = garbage[torch.arange(int((~batch.trained).sum())) % 3].reshape(
            -1, *[1] * (width is not None)
        )
        return values

    old = column(-1.5, 0.5)
    topk = [torch.log_softmax(column(0.0, 1.0, K + 2), 1)[:, :K] for _ in range(2)]
    filled = replace(
        batch,
        old_logprobs=old,
        rollout_logprobs=old + column(0.0, noise / 4),
        reference_logprobs=old + column(0.0, noise),
        values=column(0.0, 1.0),
        token_advantages=column(0.0, 1.0),
        returns=column(0.0, 1.0),
    )
    marks = torch.zeros(len(batch), dtype=torch.float64)
    marks[::2] = 1.0
    filled.fill("high_covariance", marks)
    filled.fill("topk_ids", torch.arange(K).expand(len(batch), K).clone())
    filled.fill("teacher_logprobs", topk[0])
    filled.fill("reference_point", torch.full((batch.sequences,), 0.3, dtype=torch.float64), axis="sequence")
    output = ModelOutput(
        logprobs=(old + column(0.0, noise)).clamp(max=-0.01).requires_grad_(),
        entropy=column(1.0, 0.3).requires_grad_(),
        values=column(0.0, 1.0).requires_grad_(),
        topk=topk[1].clone().requires_grad_(),
    )
    for name in ("teacher_token_logprobs", "reward_logprobs", "reward_reference_logprobs"):
        filled.fill(name, old + column(0.0, noise))
    return filled, output


def refilled(batch: Batch, axis: Axis = "token", **columns: Tensor) -> Batch:
    """Return the batch with other values in some columns."""
    changed = replace(batch)
    for name, values in columns.items():
        changed.fill(name, values, axis)
    return changed


def without(batch: Batch, *names: str) -> Batch:
    """Return the batch without some columns."""
    open_columns = {name: column for name, column in batch.columns.items() if name not in names}
    stored = {"token_advantages" if name == "advantages" else name for name in names}
    return replace(batch, **dict.fromkeys(stored - batch.columns.keys()), columns=open_columns)


def part(output: ModelOutput, tokens: Tensor) -> ModelOutput:
    """Return the model's output for the tokens of a ``select``-ed batch."""
    columns = (output.logprobs, output.entropy, output.values, output.topk)
    return ModelOutput(*(None if column is None else column[tokens] for column in columns))
