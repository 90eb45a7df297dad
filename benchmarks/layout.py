"""The work of the controller and a worker's host on a step before the device computes: the groups' tokens are laid out,
cut into micro-batches, and of each micro-batch the attention is laid out, all on one core.

    OMP_NUM_THREADS=1 python benchmarks/layout.py [--prompts 128] [--answers 16] [--tokens 4096] [--max-tokens 32768]

Prompts are 256 to 1,024 tokens long, answers half of ``--tokens`` to one and a half of it. Prints seconds by stage, of
a first step and the best of later ones (which have the first one's memory), and of a plain copy of the same columns.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

import numpy as np
import torch
from machine import seconds
from torch import Tensor

from whet.algorithms.grpo import GroupAdvantage
from whet.chat.renderer import Renderer
from whet.cluster.message import packed
from whet.core.batch import Batch
from whet.core.packing import Shard, pack
from whet.core.types import Episode, Group, Span, Task, Trajectory
from whet.learner.learner import computed
from whet.losses.off_policy import mismatch_metrics
from whet.losses.policy_gradient import PPOClip
from whet.models.attention.forest import layout_of
from whet.models.attention.varlen import VarlenLayout
from whet.models.config import AttentionKernel
from whet.models.shards import Tokens
from whet.processes.machine import keep_freed_memory
from whet.rollouts.recorder import records

T = TypeVar("T")
CPU = torch.device("cpu")
KERNELS: tuple[AttentionKernel, ...] = ("blocks", "flex", "varlen")


def sampled_groups(prompts: int, answers: int, length: int) -> list[Group]:
    random = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return random.integers(150_000, size=count).tolist()

    groups = []
    for index in range(prompts):
        prompt = tokens(int(random.integers(256, 1025)))
        episodes = []
        for count in random.integers(length // 2, length + length // 2 + 1, size=answers):
            answer = Span(tokens(count), True, (-random.random(count)).tolist(), (0, 0))
            episodes.append(Episode([Trajectory([Span(list(prompt), False), answer])], reward=float(random.random())))
        groups.append(Group(str(index), Task(str(index), []), episodes))
    return groups


def _packed(batch: Batch, ranks: int, max_tokens: int) -> list[Shard]:
    return pack(batch, ranks, max_tokens, sequences=computed(batch))


def columns(batch: Batch) -> list[Tensor]:
    return [value for field in fields(batch) if isinstance(value := getattr(batch, field.name), Tensor)]


def lay_out(groups: list[Group], max_tokens: int) -> tuple[Batch, dict[str, float]]:
    """Lay out one step; return its batch, and the seconds of each stage."""
    taken: dict[str, float] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        started = time.process_time()
        result = work()
        taken[name] = time.process_time() - started
        return result

    batch = timed("groups to a batch", lambda: Batch.from_groups(groups))
    batch = timed("advantages, weights", lambda: GroupAdvantage()(batch).weigh("token"))
    (micros,) = timed("micro-batches", lambda: [list(shard) for shard in _packed(batch, 1, max_tokens)])

    def attention(kernel: AttentionKernel) -> None:
        for micro in micros:
            layout = layout_of(micro.batch, CPU, Tokens(), kernel)
            if isinstance(layout, VarlenLayout):
                layout._cascade()

    for kernel in KERNELS:
        timed(f"attention: {kernel}", partial(attention, kernel))
    return batch, taken


def show_memory(prompts: int, answers: int, length: int, max_tokens: int) -> None:
    """Print what this process holds after each stage, and its peak so far, up to the messages of two workers, which
    are made and sent one after the other (Linux)."""

    def show(stage: str) -> None:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        now, peak = (int(status[name].split()[0]) / 2**20 for name in ("VmRSS", "VmHWM"))
        print(f"{stage:28s} {now:.2f} GiB, peak {peak:.2f}", flush=True)

    show("before")
    groups = sampled_groups(prompts, answers, length)
    show("groups")
    batch = Batch.from_groups(groups)
    show("batch")
    batch = GroupAdvantage()(batch).weigh("token")
    zero = torch.cat([PPOClip().zero_gradient(part) for part in batch.parts()])
    show("advantages, weights")
    shards = pack(batch, 2, max_tokens, sequences=computed(batch, without=zero))
    show("packed")
    for shard in shards:
        message = packed(("update", (shard,)))
        show(f"a message of {sum(map(len, message)) / 2**30:.2f} GiB")
        del message
    batch.old_logprobs = torch.zeros(len(batch))
    mismatch_metrics(batch)
    show("the learner's log-probs")
    without_text = SimpleNamespace(decode=lambda tokens: "", text_of=lambda token: "")
    for _ in records(1, groups, batch, cast(Renderer, without_text)):
        pass
    show("recorded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096, help="of an answer, on average")
    parser.add_argument("--max-tokens", type=int, default=32768, help="of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="print memory by stage instead")
    chosen = parser.parse_args()

    torch.set_num_threads(1)
    keep_freed_memory()  # as runs do
    if chosen.memory:
        show_memory(chosen.prompts, chosen.answers, chosen.tokens, chosen.max_tokens)
        return
    groups = sampled_groups(chosen.prompts, chosen.answers, chosen.tokens)
    batch, first = lay_out(groups, chosen.max_tokens)
    later = [lay_out(groups, chosen.max_tokens)[1] for _ in range(chosen.repeats)]
    best = min(later, key=lambda taken: sum(taken.values()))
    copies = [torch.empty_like(column) for column in columns(batch)]
    copied = seconds(lambda: [to.copy_(column) for to, column in zip(copies, columns(batch), strict=True)], 3)
    print(f"{len(batch):,} tokens, {batch.sequences:,} answers; a copy of their columns takes {copied:.2f} s")
    for name, value in best.items():
        print(f"{name:28s} {value:5.2f} s, {value / copied:4.1f} times the copy; the first time {first[name]:.2f} s")
    others = sum(value for name, value in best.items() if not name.startswith("attention"))
    print("a step: " + ", ".join(f"{others + best[f'attention: {kernel}']:.2f} s with {kernel}" for kernel in KERNELS))


if __name__ == "__main__":
    main()
