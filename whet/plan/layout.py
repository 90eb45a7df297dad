"""A model on the ranks that a recipe asks for: really cut, on tensors without memory, by what will cut it in the run.
So what torch or ``whet.parallel`` refuse is refused here, but for what takes weights to find out, and each rank's
part is counted and not guessed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from whet.learner.config import Precision
from whet.learner.scorer import build_whole
from whet.models.config import ModelConfig
from whet.parallel.config import ParallelConfig
from whet.parallel.parallelize import parallelize
from whet.parallel.rehearsal import Piece, rehearsal
from whet.plan.memory import Held


@dataclass(slots=True, frozen=True)
class Layout:
    """The parameters of a model over the ranks of a learner."""

    config: ParallelConfig
    pieces: Mapping[Piece, int]  # how many parameters are like this

    def held(self, rank: int = 0) -> Held:
        """What ``rank`` holds, where its place in a pipeline is the one that was laid out. The first such rank holds
        the most: of what can't be cut evenly, the last ranks have less."""
        numbers = {piece: piece.numbers(self.config, rank) * count for piece, count in self.pieces.items()}
        return Held(
            sum(own * piece.bytes_each for piece, own in numbers.items()),
            sum(own for piece, own in numbers.items() if piece.trains),
        )


def lay_out(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: Precision,
    *,
    train: bool,
    value_head: bool = False,
    stage: int = 0,
) -> Layout:
    """Cut the model, as a rank at place ``stage`` of a pipeline does. Its config file is enough. Raises ``WhetError``
    where it can't be cut so."""
    with rehearsal(parallel, stage * parallel.tensor) as ranks:
        build = partial(build_whole, model, precision, train, value_head, 0)
        scorer, _ = parallelize(build, ranks, narrow=precision == "bfloat16", trains=train)
        return Layout(parallel, Counter(Piece.of(parameter) for parameter in scorer.parameters()))
