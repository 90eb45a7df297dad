"""A model on the ranks that a recipe asks for: really cut, on tensors without memory, by what will cut it in the run.
So what torch or ``whet.parallel`` refuse is refused here, and each rank's part is counted and not guessed."""

from collections.abc import Sequence
from dataclasses import dataclass

from whet.learner.config import Precision
from whet.learner.scorer import build_scorer
from whet.models.config import ModelConfig
from whet.parallel.config import ParallelConfig
from whet.parallel.rehearsal import Piece, rehearsal


@dataclass(slots=True, frozen=True)
class Layout:
    """The parameters of a model over the ranks of a learner."""

    config: ParallelConfig
    pieces: Sequence[Piece]

    def weights(self, rank: int = 0) -> int:
        """Bytes of the parameters that ``rank`` holds. The first rank holds the most: what can't be cut evenly is cut
        so that the last ranks have less."""
        return sum(piece.numbers(self.config, rank) * piece.bytes_each for piece in self.pieces)

    def trained(self, rank: int = 0) -> int:
        """Numbers of those that have a gradient."""
        return sum(piece.numbers(self.config, rank) for piece in self.pieces if piece.trains)


def lay_out(
    model: ModelConfig, parallel: ParallelConfig, precision: Precision, *, train: bool, value_head: bool = False
) -> Layout:
    """Cut the model. Its config file is enough. Raises ``WhetError`` where it can't be cut so."""
    with rehearsal(parallel, parallel.ranks - 1) as ranks:
        scorer = build_scorer(model, precision, ranks.device, ranks, train=train, value_head=value_head)
        return Layout(parallel, [Piece.of(name, parameter) for name, parameter in scorer.named_parameters()])
