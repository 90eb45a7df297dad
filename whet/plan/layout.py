"""A model on the ranks that a recipe asks for: really cut, on tensors without memory, by what will cut it in the run.
So what torch or ``whet.parallel`` refuse is refused here, and each rank's part is counted and not guessed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from whet.learner.config import Precision
from whet.learner.scorer import build_scorer
from whet.models.config import ModelConfig
from whet.parallel.config import ParallelConfig
from whet.parallel.rehearsal import Piece, rehearsal
from whet.plan.memory import Held


@dataclass(slots=True, frozen=True)
class Layout:
    """The parameters of a model over the ranks of a learner."""

    config: ParallelConfig
    pieces: Mapping[Piece, int]  # how many parameters are like this

    def held(self, rank: int = 0) -> Held:
        """What ``rank`` holds. The first rank holds the most: of what can't be cut evenly, the last ranks have less."""
        numbers = {piece: piece.numbers(self.config, rank) * count for piece, count in self.pieces.items()}
        return Held(
            sum(own * piece.bytes_each for piece, own in numbers.items()),
            sum(own for piece, own in numbers.items() if piece.trains),
        )


def lay_out(
    model: ModelConfig, parallel: ParallelConfig, precision: Precision, *, train: bool, value_head: bool = False
) -> Layout:
    """Cut the model. Its config file is enough. Raises ``WhetError`` where it can't be cut so."""
    with rehearsal(parallel, parallel.ranks - 1) as ranks:
        scorer = build_scorer(model, precision, ranks.device, ranks, train=train, value_head=value_head)
        return Layout(parallel, Counter(Piece.of(parameter) for parameter in scorer.parameters()))
