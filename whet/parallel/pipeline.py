"""Pipeline parallelism: the layers of a model, spread over ranks; micro-batches pass through them one after the other.

The schedules are those of torch.distributed.pipelining: with one stage on each rank 1F1B (arXiv 2006.09503), with
several the interleaved one (arXiv 2104.04473). They need hidden states of one shape, so the micro-batches of one run
are padded to the longest. Batches are on all ranks; only hidden states and their gradients travel. Knows no learner and
no loss.
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
from whet.models.stages import Stage, StageInput, stages_of
from whet.parallel.mesh import Ranks
from whet.parallel.parameters import local

T = TypeVar("T")
Work = Callable[[int, StageInput], Tensor]
"""(number of the micro-batch, input of the stage) -> hidden states, or at the last stage a loss, []."""

_CPU = torch.device("cpu")


class Pipeline:
    """The stages of one model, as one of their ranks sees them."""

    def __init__(self, model: nn.Module, tokens: Tokens, ranks: Ranks, narrow: bool = False) -> None:
        """``narrow``: hidden states are bfloat16."""
        config = ranks.config
        self.group, self.device, self.tokens = ranks.pipeline, ranks.device, tokens
        self.stages = stages_of(decoder_of(model), config.stages)
        self.own = own_stages(self.stages, ranks)
        outer: Any = unwrapped(model)
        head, embeddings = outer.get_output_embeddings().weight, outer.get_input_embeddings().weight
        tied = self.from_last(head is embeddings)
        self.copy: nn.Parameter | None = head if tied and self._is_last else None
        """The last stage's matrix where it is the same one as the first stage's."""
        self._tied: nn.Parameter | None = embeddings if tied and (self._is_last or self._is_first) else None
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

    def micro_batches(self, wanted: int) -> int:
        """Return how many must run so that ``wanted`` of them can: the interleaved schedule goes in rounds of equal
        size."""
        count = wanted
        while len(self.own) > 1 and count % max(1, count // self.group.size()):
            count += 1
        return count

    def run(self, work: Work, lengths: list[int], *, backward: bool) -> None:
        """Do ``work`` on every micro-batch at every stage that is here, and with ``backward`` the backward pass of the
        last stage's losses. ``lengths`` are the micro-batches' tokens."""
        self.tokens.least = max(lengths)
        size = sum(len(run) for run in self.tokens.runs(self.tokens.padded(max(lengths))))
        shape = (1, size // self._cut, self._width)
        stages = [self._stage(work, stage, shape, backward) for stage in self.own]
        schedule = self._schedule(stages, len(lengths))
        numbers = torch.arange(len(lengths))
        try:
            if backward:
                schedule.step(number=numbers, target=numbers, return_outputs=False)
            else:
                schedule.eval(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, WhetError):  # torch wraps it in a text about its schedule
                raise error.__cause__ from None
            raise
        finally:
            self.tokens.least = 0

    def _stage(self, work: Work, stage: Stage, shape: tuple[int, ...], backward: bool) -> PipelineStage:
        hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=backward)
        return PipelineStage(
            _Work(work, stage, hidden),
            stage.index,
            len(self.stages),
            self.device,
            input_args=() if stage.first else hidden,
            output_args=torch.empty((), device="meta") if stage.last else hidden,
            group=self.group,
        )

    def _schedule(self, stages: list[PipelineStage], count: int) -> Any:
        def loss(output: Tensor, _: Tensor) -> Tensor:
            return output

        if len(stages) > 1:
            return ScheduleInterleaved1F1B(stages, count, loss, scale_grads=False)  # type: ignore[arg-type]
        # 1F1B with fewer micro-batches than stages is GPipe, and torch asks to be told so.
        kind = Schedule1F1B if count >= len(self.stages) else ScheduleGPipe
        return kind(stages[0], count, loss, scale_grads=False)

    def from_last(self, value: T) -> T:
        """Return the value that the last stage's rank gives, on all ranks of the pipeline."""
        return self._from(self.group.size() - 1, value)

    def _from(self, rank: int, value: T) -> T:
        held = [value]
        dist.broadcast_object_list(held, group=self.group, group_src=rank, device=_CPU)
        return held[0]

    def sum(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Sum over the ranks of the pipeline."""
        gathered = [counts] * self.group.size()
        dist.all_gather_object(gathered, counts, self.group)
        return sum(one for one, _ in gathered), sum(other for _, other in gathered)

    def sum_tied(self) -> None:
        """Sum, after the backward passes of a step, the two gradients of tied embeddings: one is at the first stage,
        one at the last."""
        if self._tied is None or not self._tied.requires_grad:
            return
        if self._tied.grad is None:  # a critic's, whose head is not used
            self._tied.grad = torch.zeros_like(self._tied)
        own = local(self._tied.grad)
        mine = own.to(self.device).contiguous()
        other, peer = torch.empty_like(mine), self.group.size() - 1 if self._is_first else 0
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, group=self.group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
            ]
        )
        for each in work:
            each.wait()
        own.add_(other.to(own.device))

    def described(self, own: list[tuple[str, torch.dtype, torch.Size]]) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Return what ``gather`` would give, as (name, type, shape), from what each rank has of it."""
        found: dict[str, tuple[str, torch.dtype, torch.Size]] = {}
        for rank in range(self.group.size()):
            for one in self._from(rank, own):
                found.setdefault(one[0], one)
        return list(found.values())

    def gather(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the (name, tensor) pairs of all stages, on all ranks, each name once. Those of one stage are asked for
        when its turn comes."""
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
            found = next(remaining, None)
            header = self._from(rank, None if found is None else (found[0], found[1].shape, found[1].dtype))
            if header is None:
                return
            name, shape, dtype = header
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            if found is not None:
                tensor = found[1].detach().to(self.device).contiguous()
            dist.broadcast(tensor, group=self.group, group_src=rank)
            yield name, tensor


class _Work(nn.Module):
    """A stage as torch's schedules want it, a module. It has no parameters, because what it runs looks after its own
    (sharded ones are gathered and summed in each backward pass)."""

    def __init__(self, work: Work, stage: Stage, hidden: Tensor) -> None:
        super().__init__()
        self.work, self.stage, self.hidden = work, stage, hidden

    def forward(self, *hidden: Tensor, number: Tensor) -> Tensor:
        output = self.work(int(number), StageInput(self.stage, *hidden))
        if not self.stage.last and (output.shape, output.dtype) != (self.hidden.shape, self.hidden.dtype):
            raise WhetError(
                f"stage {self.stage.index} made hidden states of {output.dtype} {list(output.shape)}, and the next one "
                f"takes {self.hidden.dtype} {list(self.hidden.shape)}; set parallel.pipeline to 1"
            )
        return output


def own_stages(stages: list[Stage], ranks: Ranks) -> list[Stage]:
    """Return the stages of this rank."""
    return stages[ranks.pipeline.rank() :: ranks.pipeline.size()]
