"""Pipeline parallelism: the layers of a model are split over ranks, and micro-batches pass through them in order.

The schedules come from torch.distributed.pipelining: 1F1B with one stage per rank (arXiv 2006.09503), the interleaved
schedule with several (arXiv 2104.04473). They need hidden states of one shape, so the micro-batches of a step are
padded to the longest. Batches are on all ranks; only hidden states, the features of images for later layers, and their
gradients are sent. Independent of learner and loss.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from whet.base.errors import WhetError
from whet.models.attention.forest import decoder_of, unwrapped
from whet.models.shards import Tokens
from whet.models.stages import Stage, StageInput, deep_features, stages_of
from whet.parallel.mesh import Ranks
from whet.parallel.parameters import local

T = TypeVar("T")
Work = Callable[[int, StageInput], Tensor]
"""(number of the micro-batch, input of the stage) -> hidden states, or at the last stage a loss, []."""

_CPU = torch.device("cpu")


class Pipeline:
    """The stages of one model, from the view of one rank."""

    def __init__(self, model: nn.Module, tokens: Tokens, ranks: Ranks, narrow: bool = False) -> None:
        """``narrow``: hidden states are bfloat16."""
        config = ranks.config
        self.group, self.device, self.tokens = ranks.pipeline, ranks.device, tokens
        self.stages = stages_of(decoder_of(model), config.stages, deep_features(unwrapped(model)))
        self.local_stages = stages_of_rank(self.stages, ranks)
        outer: Any = unwrapped(model)
        head, embeddings = outer.get_output_embeddings().weight, outer.get_input_embeddings().weight
        tied = self.from_last(head is embeddings)
        self.copy: nn.Parameter | None = head if tied and self._is_last else None
        """The last stage's matrix, if it is tied to the first stage's."""
        self.tied: nn.Parameter | None = embeddings if tied and (self._is_last or self._is_first) else None
        """The matrix of the first and of the last stage, if it is the same one."""
        self._width: int = decoder_of(model).config.hidden_size
        self._cut = config.tensor if config.sequence_parallel else 1
        dtype = self._from(0, embeddings.dtype if self._is_first else torch.float32)
        self._dtype: torch.dtype = torch.bfloat16 if narrow else dtype

    @property
    def _is_first(self) -> bool:
        return self.group.rank() == 0

    @property
    def _is_last(self) -> bool:
        return self.group.rank() == self.group.size() - 1

    def micro_batches(self, needed: int) -> int:
        """Return the number of micro-batches to run for ``needed`` ones: the interleaved schedule has rounds of equal
        size."""
        count = needed
        while len(self.local_stages) > 1 and count % max(1, count // self.group.size()):
            count += 1
        return count

    def run(self, work: Work, lengths: list[int], *, backward: bool) -> None:
        """Do ``work`` on every micro-batch at every stage of this rank, and with ``backward`` the backward pass of the
        last stage's losses. ``lengths`` are the micro-batches' numbers of tokens."""
        self.tokens.least = max(lengths)
        size = sum(len(run) for run in self.tokens.runs(self.tokens.padded(max(lengths))))
        shape = (size // self._cut, self._width)
        stages = [self._stage(work, stage, shape, backward) for stage in self.local_stages]
        schedule = self._schedule(stages, len(lengths))
        numbers = torch.arange(len(lengths))
        try:
            if backward:
                schedule.step(number=numbers, target=numbers, return_outputs=False)
            else:
                schedule.eval(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, WhetError):  # torch wraps it in an error about its schedule
                raise error.__cause__ from None
            raise
        finally:
            self.tokens.least = 0

    def _stage(self, work: Work, stage: Stage, shape: tuple[int, ...], backward: bool) -> PipelineStage:
        received, passed = (
            torch.empty((1 + features, *shape), dtype=self._dtype, device="meta", requires_grad=backward)
            for features in (stage.entering, stage.leaving)
        )
        return PipelineStage(
            _Work(work, stage, passed),
            stage.index,
            len(self.stages),
            self.device,
            input_args=() if stage.first else received,
            output_args=torch.empty((), device="meta") if stage.last else passed,
            group=self.group,
        )

    def _schedule(self, stages: list[PipelineStage], count: int) -> Any:
        def loss(output: Tensor, _: Tensor) -> Tensor:
            return output

        if len(stages) > 1:
            return ScheduleInterleaved1F1B(stages, count, loss, scale_grads=False)  # type: ignore[arg-type]
        # 1F1B with fewer micro-batches than stages is GPipe, and torch requires it by that name.
        kind = Schedule1F1B if count >= len(self.stages) else ScheduleGPipe
        return kind(stages[0], count, loss, scale_grads=False)

    def from_last(self, value: T) -> T:
        """Return the last stage's value on all ranks of the pipeline."""
        return self._from(self.group.size() - 1, value)

    def _from(self, rank: int, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=rank, device=_CPU)
        return values[0]

    def all_gather(self, value: T) -> list[T]:
        """Return the value of each rank of the pipeline, in order."""
        gathered = [value] * self.group.size()
        dist.all_gather_object(gathered, value, self.group)
        return gathered

    def sum(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Sum over the ranks of the pipeline."""
        gathered = self.all_gather(counts)
        return sum(first for first, _ in gathered), sum(second for _, second in gathered)

    def sum_tied(self) -> None:
        """Sum the two gradients of tied embeddings, at the first and the last stage, after the backward passes of a
        step."""
        if self.tied is None or not self.tied.requires_grad:
            return
        if self.tied.grad is None:  # of a critic, whose head is not used
            self.tied.grad = torch.zeros_like(self.tied)
        gradient = local(self.tied.grad)
        mine = gradient.to(self.device).contiguous()
        other, peer = torch.empty_like(mine), self.group.size() - 1 if self._is_first else 0
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, group=self.group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
            ]
        )
        for each in work:
            each.wait()
        gradient.add_(other.to(gradient.device))

    def described(self, local: list[tuple[str, torch.dtype, torch.Size]]) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Return (name, dtype, shape) of the tensors that ``gather`` yields, from each rank's ``local`` ones."""
        tensors: dict[str, tuple[str, torch.dtype, torch.Size]] = {}
        for rank in range(self.group.size()):
            for tensor in self._from(rank, local):
                tensors.setdefault(tensor[0], tensor)
        return list(tensors.values())

    def gather(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the (name, tensor) pairs of all stages on all ranks, each name once. ``weights`` is consumed when this
        rank's turn comes."""
        seen: set[str] = set()
        for rank in range(self.group.size()):
            for name, tensor in self._of(rank, weights):
                if name not in seen:
                    yield name, tensor
                seen.add(name)

    def _of(self, rank: int, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        mine = rank == self.group.rank()
        remaining = iter(weights) if mine else iter(())
        while True:
            pair = next(remaining, None)
            header = self._from(rank, None if pair is None else (pair[0], pair[1].shape, pair[1].dtype))
            if header is None:
                return
            name, shape, dtype = header
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            if pair is not None:
                tensor = pair[1].detach().to(self.device).contiguous()
            dist.broadcast(tensor, group=self.group, group_src=rank)
            yield name, tensor


class _Work(nn.Module):
    """A stage as a module, for torch's schedules. It has no parameters: the modules that it runs manage theirs (sharded
    ones are gathered, and their gradients reduced, in each backward pass)."""

    def __init__(self, work: Work, stage: Stage, passed: Tensor) -> None:
        super().__init__()
        self.work, self.stage, self.passed = work, stage, passed

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        output = self.work(int(number), StageInput(self.stage, *received))
        if not self.stage.last and (output.shape, output.dtype) != (self.passed.shape, self.passed.dtype):
            raise WhetError(
                f"stage {self.stage.index} returned hidden states of {output.dtype} {list(output.shape)}, but the next "
                f"stage expects {self.passed.dtype} {list(self.passed.shape)}; set parallel.pipeline to 1"
            )
        return output


def stages_of_rank(stages: list[Stage], ranks: Ranks) -> list[Stage]:
    """Return the stages of this rank."""
    return stages[ranks.pipeline.rank() :: ranks.pipeline.size()]
