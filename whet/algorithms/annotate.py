"""Fills the columns of a batch that the algorithm needs, by forward passes of the learners and by the advantage
estimator. What nobody needs is not computed."""

from collections.abc import Mapping, Sequence

from whet.algorithms.base import Algorithm
from whet.batch import Batch
from whet.learner.base import Scorer
from whet.processes.compute import compute
from whet.types import Group


async def annotate(
    batch: Batch, algorithm: Algorithm, learners: Mapping[str, Scorer], groups: Sequence[Group]
) -> Batch:
    """Fill ``batch``, made from ``groups``, in place and return it."""
    wanted: dict[str, dict[str, str]] = {}
    for column in sorted(algorithm.needs & algorithm.filled_by.keys()):
        if column not in batch.filled:
            role, said = algorithm.filled_by[column]
            wanted.setdefault(role, {})[column] = said
    for role, columns in wanted.items():
        scored = await learners[role].score(batch, set(columns.values()))
        for column, said in columns.items():
            batch.fill(column, scored[said])
    await algorithm.consult(batch, groups, learners)
    if algorithm.estimator is not None:
        credit = await compute(algorithm.estimator, batch)
        batch.advantages, batch.returns = credit.advantages, credit.returns
    return batch
