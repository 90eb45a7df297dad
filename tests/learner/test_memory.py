"""A learner without memory says what it computed and what takes less. The errors are the allocator's own."""

import pickle

import pytest
import torch

from tests.learner.parts import ADAMW, PolicyGradient, some_batch, whole, worker
from whet.base.errors import OutOfMemoryError
from whet.base.memory import lack_of_memory, naming_memory

ABSURD = 2**50  # numbers, which no process has addresses for


class Greedy(PolicyGradient):
    """A loss that wants more memory than there is."""

    def __call__(self, output, batch):
        torch.empty(ABSURD)
        return super().__call__(output, batch)


def test_an_update_says_what_was_computed_and_what_takes_less(llama):
    batch = some_batch().weigh("token")
    learner = worker(llama, optimizer=ADAMW)
    wanted = (
        f"out of memory while learning from micro-batches of up to {len(batch)} tokens "
        r"\(tried to allocate \d+ bytes\): lower learner.max_tokens or .*`whet plan`"
    )
    with pytest.raises(OutOfMemoryError, match=wanted) as raised:
        learner.update(whole(batch), Greedy())
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)  # as it comes from another process
    assert learner.update(whole(batch), PolicyGradient()).gradient_norm > 0  # the worker can still be used


def test_scoring_says_the_same(llama):
    learner = worker(llama)
    learner.model.get_input_embeddings().register_forward_pre_hook(lambda *_: torch.empty(ABSURD))
    with pytest.raises(OutOfMemoryError, match=r"while scoring micro-batches of up to .* lower learner.max_tokens"):
        learner.score(whole(some_batch()), frozenset({"logprobs"}))


@pytest.mark.parametrize(
    ("error", "amounts"),
    [
        (MemoryError(), ""),
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.75 "
                "GiB is free. Including non-PyTorch memory, this process has 77.35 GiB memory in use. Of the allocated "
                "memory 70.12 GiB is allocated by PyTorch, and 5.31 GiB is reserved by PyTorch but unallocated. If ..."
            ),
            " (tried to allocate 2.00 GiB; GPU 0 has a total capacity of 79.11 GiB of which 1.75 GiB is free; 5.31 GiB "
            "is reserved by PyTorch but unallocated)",
        ),
        (RuntimeError("CUDA error: out of memory"), ""),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), ""),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("out of memory"), None),
    ],
)
def test_allocators_are_told_from_other_errors(error, amounts):
    assert lack_of_memory(error) == amounts
    kind = OutOfMemoryError if amounts is not None else type(error)
    with pytest.raises(kind), naming_memory("testing", "test less"):
        raise error
