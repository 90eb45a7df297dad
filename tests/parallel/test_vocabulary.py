"""A vocabulary that is split over ranks, in parts of unequal size, gives the same results as the whole one."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.cases import CPU
from tests.parallel.ranks import info_of, on_ranks
from whet.core.types import Distribution
from whet.models.head import Head
from whet.models.shards import Vocabulary
from whet.parallel.config import ParallelConfig
from whet.parallel.mesh import join
from whet.parallel.tensor import SpreadVocabulary

WORDS, WIDTH, PLACES = 31, 5, 9
DISTRIBUTIONS = [
    Distribution(),
    Distribution(temperature=0.6, top_k=7),
    Distribution(temperature=1.3, top_p=0.8),
    Distribution(min_p=0.05),
]


def outputs(vocabulary: Vocabulary, here: slice) -> list[dict[str, Tensor]]:
    """Return log-probs, entropies and their gradients (of the weight: the rows ``here``), by distribution."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    hidden, weight, bias = draw(PLACES, WIDTH), draw(WORDS, WIDTH), draw(WORDS)
    ids = torch.randint(0, WORDS, (PLACES, 3), generator=random)
    results = []
    for distribution in DISTRIBUTIONS:
        inputs = [x.detach().clone().requires_grad_() for x in (hidden, weight[here], bias[here])]
        states, head = inputs[0], Head(*inputs[1:], scale=1.5, softcap=4.0, vocabulary=vocabulary)
        logprobs, entropy = head.token_logprobs(states, ids[:, 0], distribution, with_entropy=True, chunk=4)
        chosen = head.ids_logprobs(states, ids, distribution, chunk=4)
        assert entropy is not None
        (logprobs.sin().sum() + entropy.square().sum() + chosen.cos().sum()).backward()
        best, best_logprobs = head.topk_logprobs(states, 4, distribution, chunk=4)
        tensors = {"logprobs": logprobs, "entropy": entropy, "chosen": chosen, "best": best, "of best": best_logprobs}
        tensors |= {name: x.grad for name, x in zip(("d hidden", "d weight", "d bias"), inputs, strict=True)}
        results.append({name: tensor.detach() for name, tensor in tensors.items()})
    return results


def spread(rendezvous: str, rank: int, ranks: int) -> list[dict[str, Tensor]]:
    join(ParallelConfig(tensor=ranks), info_of(rendezvous, rank, ranks, ranks), CPU, 60.0)
    vocabulary = SpreadVocabulary(init_device_mesh("cpu", (ranks,)), WORDS)
    return outputs(vocabulary, slice(vocabulary.start, vocabulary.start + vocabulary.piece))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_split_vocabulary_gives_the_same_results_as_a_whole_one(ranks):
    whole = outputs(Vocabulary(), slice(0, WORDS))
    parts = on_ranks(ranks, spread, ranks)
    for index, expected in enumerate(whole):
        for name, tensor in expected.items():
            actual = [part[index][name] for part in parts]
            if name in ("d weight", "d bias"):
                actual = [torch.cat(actual)]
            for copy in actual:
                torch.testing.assert_close(copy, tensor, atol=1e-12, rtol=1e-12, msg=f"{DISTRIBUTIONS[index]} {name}")
