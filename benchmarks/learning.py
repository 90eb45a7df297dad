"""The speed of the learner: forward and backward of SmolLM2-135M on rows as GRPO makes them, against the machine.

    OMP_NUM_THREADS=1 python benchmarks/learning.py

8 prompts of 60 tokens with 8 answers of 48 to 80 tokens each, prompts shared, in the precision that a run would choose
here or in --precision (bfloat16: autocast over float32 weights).
Prints the achieved GFLOP/s (matrix products that the mathematics needs, recomputation not counted), and the share of
what plain matrix products reach in the same minute: large square ones, and ones of the model's own shapes.
"""

import argparse
import time

import torch
from machine import add_precision, chosen_dtype, product_rate, seconds
from torch import Tensor
from transformers import PreTrainedModel

from whet.core.batch import Batch
from whet.core.types import Distribution, Episode, Group, Span, Task, Trajectory
from whet.models.attention.forest import forest_hidden
from whet.models.compiled import compile_layers
from whet.models.head import head_of
from whet.models.loading import LoraSettings, ModelConfig, load_model
from whet.models.rates import fastest_matmul_precision
from whet.models.saved_activations import save_fewer_activations
from whet.processes.machine import keep_freed_memory


def grpo_batch(prompts: int, answers: int, share: bool) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(10, 40000, (count,), generator=generator).tolist()

    groups = []
    for index in range(prompts):
        prompt = tokens(60)
        lengths = torch.randint(48, 81, (answers,), generator=generator).tolist()
        rows = [Episode([Trajectory([Span(prompt, False), Span(tokens(length), True)])]) for length in lengths]
        groups.append(Group(str(index), Task(str(index), []), rows))
    return Batch.from_groups(groups, share_prompts=share)


def counted_flops(model: PreTrainedModel, batch: Batch) -> float:
    """Return the products of one forward and backward pass: 6 per weight and token (4 where it is frozen), and 12 per
    query-key pair, head and feature."""
    config = model.config
    embedding = config.vocab_size * config.hidden_size
    body = sum(p.numel() * (6 if p.requires_grad else 4) for p in model.get_decoder().parameters())
    each = 6 if model.get_input_embeddings().weight.requires_grad else 4
    pairs = float((batch.position + 1).sum())
    attention = 12 * pairs * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return float(body - each * embedding) * len(batch) + each * embedding * int(batch.trained.sum()) + attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_precision(parser)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--unshared", action="store_true", help="compute the prompt once per answer")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--compile", action="store_true", help="layers compiled, but for attention")
    parser.add_argument("--plain", action="store_true", help="with all activations that transformers' layers save")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, by operator")
    chosen = parser.parse_args()

    keep_freed_memory()  # as runs do
    dtype = chosen_dtype(chosen.precision)
    if dtype == torch.float32:
        torch.set_float32_matmul_precision(fastest_matmul_precision())  # as learners do
    model = load_model(ModelConfig(lora=LoraSettings() if chosen.lora else None), dtype=torch.float32)
    if chosen.compile:
        compile_layers(model, torch.device("cpu"))
    elif not chosen.plain:
        save_fewer_activations(model)  # as learners do
    batch = grpo_batch(chosen.prompts, chosen.answers, not chosen.unshared)
    head = head_of(model)
    picked = batch.trained.nonzero().squeeze(1)
    laps: dict[str, float] = {}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def step() -> Tensor:
        begin = clock()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = forest_hidden(model, batch)
            body = clock()
            logprobs, _ = head.token_logprobs(hidden[batch.predictor[picked]], batch.tokens[picked], Distribution())
        ahead = clock()
        (-logprobs.mean()).backward()
        laps.update(body=body - begin, head=ahead - body, backward=clock() - ahead)
        model.zero_grad()
        return logprobs

    taken = seconds(step, chosen.repeats)
    flops = counted_flops(model.get_base_model() if chosen.lora else model, batch)
    config = model.config
    shapes = [
        (config.hidden_size, config.intermediate_size),
        (config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.hidden_size),
    ]
    rates = [product_rate(len(batch), k, n, dtype) for k, n in shapes]
    square = product_rate(2048, 2048, 2048, dtype)
    rate = flops * 1e-9 / taken
    print(
        f"{dtype}, {torch.get_num_threads()} thread(s), {len(batch)} tokens, {len(picked)} trained, "
        f"{flops * 1e-12:.2f} TFLOP"
    )
    print("last step: " + ", ".join(f"{name} {value:.2f} s" for name, value in laps.items()))
    print(f"products: square {square:.0f} GFLOP/s, the model's shapes {min(rates):.0f} to {max(rates):.0f}")
    print(f"step {taken:.2f} s, {len(picked) / taken:.0f} trained tokens/s, {rate:.0f} GFLOP/s = {rate / square:.0%}")
    if chosen.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60))


if __name__ == "__main__":
    main()
