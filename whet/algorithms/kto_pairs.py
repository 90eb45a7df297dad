"""Prompts with the replies to other prompts: what KTO estimates its reference point on (arXiv 2402.01306).

Each trained sequence of a step keeps its prompt and gets the reply of the next one, the last one that of the first.
Their order is that of a hash of their groups' names, so that it depends on the step alone, not on its layout.
"""

from itertools import groupby

from whet.base.seeds import derive_seed
from whet.core.batch import Batch
from whet.core.types import Episode, Group, Span, Task, Trajectory


def mismatched(batch: Batch) -> Batch:
    """One sequence for each one of ``batch`` that trains, in the same distribution; none where only one does. Replies
    are cut so that no sequence is longer than the longest one of ``batch``, and so fits where that one did."""
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
    groups = []
    for index, (_, _, prompt, _) in enumerate(halves if len(halves) > 1 else []):
        reply = halves[(index + 1) % len(halves)][3][: room - len(prompt)]
        spans = [Span([token for token, _ in run], trains) for trains, run in groupby(reply, key=lambda pair: pair[1])]
        uid = f"mismatched {index}"
        groups.append(Group(uid, Task(uid, []), [Episode([Trajectory([Span(prompt, False), *spans])])]))
    return Batch.from_groups(groups, share_prompts=False, distribution=batch.distribution)
