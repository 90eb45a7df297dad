"""Fills the columns of a batch that the algorithm needs, by forward passes of the learners and by the advantage
estimator, and lets the algorithm complete it. What nobody needs is not computed."""

from collections.abc import Mapping

from whet.algorithms.base import Algorithm
from whet.batch import Batch
from whet.learner.base import Learner

_FROM_LEARNERS = {"old_logprobs": "policy", "reference_logprobs": "policy", "values": "critic"}
_COLUMN_OF = {"old_logprobs": "logprobs"}  # the learner's word for it, where that differs


async def annotate(batch: Batch, algorithm: Algorithm, learners: Mapping[str, Learner]) -> Batch:
    """Fill ``batch`` in place; return what the algorithm makes of it."""
    wanted: dict[str, set[str]] = {}
    for column in sorted(algorithm.needs & _FROM_LEARNERS.keys()):
        if getattr(batch, column) is None:
            wanted.setdefault(_FROM_LEARNERS[column], set()).add(column)
    for role, columns in wanted.items():
        scored = await learners[role].score(batch, {_COLUMN_OF.get(column, column) for column in columns})
        for column in columns:
            setattr(batch, column, scored[_COLUMN_OF.get(column, column)])
    if algorithm.estimator is not None:
        credit = algorithm.estimator(batch)
        batch.advantages, batch.returns = credit.advantages, credit.returns
    return await algorithm.complete(batch, learners)
