"""Part A of ``gpu.py``: facts about the machine, and whether a GPU's results agree with a CPU's in float64."""

import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu import Row, Setting, check, seconds, wait, within
from torch import Tensor

from tests.learner.parts import PolicyGradient, some_batch, whole, worker
from tests.tiny import tiny_deepseek, tiny_gemma, tiny_llama, tiny_qwen3, tiny_qwen3_5, tiny_qwen3_moe
from whet.core.types import Distribution
from whet.models.attention.dense import AttentionSettings
from whet.models.attention.flex import FlexLayout
from whet.models.attention.forest import forest_attention
from whet.models.attention.layout import ForestLayout
from whet.models.attention.varlen import VarlenLayout
from whet.models.config import LoraSettings
from whet.models.device import choose_device
from whet.models.head import Head
from whet.models.shards import Tokens

KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


@check("A0")
def facts(s: Setting) -> Iterator[Row]:
    """Versions, and the kernel that torch chooses for what forests ask of it."""
    yield Row("torch", torch.__version__)
    yield Row("cudnn", str(torch.backends.cudnn.version()))
    if not s.small:
        yield Row("gpu", torch.cuda.get_device_name(0))
    for cudnn, expected in ((True, (3, 3, None)), (False, (1, 2, None))):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        cases = (("causal, shared keys", torch.bfloat16, False), ("masked", torch.bfloat16, True))
        for (what, dtype, masked), kernel in zip((*cases, ("float32", torch.float32, False)), expected, strict=True):
            q = torch.randn(1, 16, 256, 128, device=s.device, dtype=dtype)
            k = q if masked else q[:, :8]
            mask = torch.zeros(256, 256, device=s.device, dtype=dtype) if masked else None
            choice: int = torch._fused_sdp_choice(q, k, k, mask, is_causal=not masked, enable_gqa=k is not q)
            ok = None if kernel is None or s.small else choice == kernel
            yield Row(
                f"kernel: {what}, cudnn {cudnn}",
                KERNELS.get(choice, str(choice)),
                "" if kernel is None else KERNELS[kernel],
                ok,
            )
    if not s.small:
        choose_device()


@check("A1")
def rates(s: Setting) -> Iterator[Row]:
    """Products and copies."""
    n = s.pick(8192, 64)
    sizes = (
        ("square", n, n, n, 700, 900),
        ("0.6B", n, n // 8, n // 8 * 3, 450, 700),
        ("8B", n, n // 2, n // 2 * 3, 650, 850),
    )
    for name, m, k, width, least, most in sizes:
        a, b = (torch.randn(*shape, device=s.device, dtype=torch.bfloat16) for shape in ((m, k), (k, width)))
        taken = seconds(partial(torch.matmul, a, b), s)
        yield within(f"TFLOP/s, {name}", 2e-12 * m * k * width / taken, least, most, s)
    size = s.pick(1 << 30, 1 << 16)
    source = torch.empty(size, dtype=torch.uint8, device=s.device)
    yield within("GB/s on the device", 2e-9 * size / seconds(lambda: source.clone(), s), 3500, 4800, s)
    for name, pinned, least, most in (("pageable", False, 2, 15), ("pinned", True, 40, 60)):
        host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned and not s.small)
        taken = seconds(partial(source.copy_, host, non_blocking=True), s)
        yield within(f"GB/s to the device, {name}", 1e-9 * size / taken, least, most, s)
        taken = seconds(partial(host.copy_, source, non_blocking=True), s)
        yield within(f"GB/s from the device, {name}", 1e-9 * size / taken, least, most, s)


@check("A2")
def plans(s: Setting) -> Iterator[Row]:
    """The cost of the first call of attention with a new shape, forward and backward."""
    for cudnn, least, most in ((True, 5, 1000), (False, 0, 5)):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        taken = []
        for number in range(s.pick(20, 2)):
            length = 200 + 17 * number + 8 * cudnn
            q = torch.randn(4, 16, length, 128 if not s.small else 8, device=s.device, dtype=torch.bfloat16)
            q.requires_grad_()
            wait(s)
            begun = time.perf_counter()
            F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
            wait(s)
            taken.append(time.perf_counter() - begun)
        yield within(f"ms for a new shape, cudnn {cudnn}", 1e3 * sorted(taken)[len(taken) // 2], least, most, s)
    if not s.small:
        choose_device()


PARENTS, LENGTHS = [-1, 0, 1, 1, 0, -1, 5, 5, 5, -1], [300, 90, 1, 140, 77, 128, 128, 64, 1, 33]


@check("A3")
def attention(s: Setting) -> Iterator[Row]:
    """Forest attention, forward and backward, against all pairs in float64 on the CPU."""
    lengths = LENGTHS if not s.small else [max(1, n // 10) for n in LENGTHS]
    starts, size = [sum(lengths[:i]) for i in range(len(lengths))], sum(lengths)
    oracle = FlexLayout.of(starts, PARENTS, size, torch.device("cpu"))
    assert oracle is not None
    for window in (None, 50):
        random = torch.Generator().manual_seed(0)
        exact = [torch.randn(1, h, size, 64, generator=random, dtype=torch.float64).requires_grad_() for h in (8, 2, 2)]
        pull = torch.randn(1, size, 8, 64, generator=random, dtype=torch.float64)
        at = torch.arange(size)
        first = torch.tensor(0)  # of the batch, and of the heads: the mask is the same for all
        sees = oracle.mask(window).mask_mod(first, first, at[:, None], at)
        k, v = (x.repeat_interleave(4, 1) for x in exact[1:])
        out = F.scaled_dot_product_attention(exact[0], k, v, sees).transpose(1, 2)
        right = [out, *torch.autograd.grad((out * pull).sum(), exact)]
        for kind, dtype, most in (
            ("blocks", torch.float32, 1e-5),
            ("blocks", torch.bfloat16, 1e-2),
            ("flex", torch.float32, 1e-5),
            ("flex", torch.bfloat16, 1e-2),
            ("cascade", torch.float32, 1e-5),
            ("cascade", torch.bfloat16, 1e-2),
            ("gathered rows", torch.bfloat16, 1e-2),
        ):
            if (kind, s.small) == ("flex", True) or (kind, dtype, s.small) == ("cascade", torch.float32, False):
                continue  # no backward pass on CPUs; no kernel on GPUs
            layout: Any = ForestLayout._of(starts, PARENTS, size, s.device, Tokens())
            if kind == "flex":
                layout = FlexLayout.of(starts, PARENTS, size, s.device)
            elif kind != "blocks":
                layout = VarlenLayout.of(starts, PARENTS, size, s.device, Tokens())
            if kind == "gathered rows":
                layout.calls[window] = [layout._gathering(window)]
            mine = [x.detach().to(s.device, dtype).requires_grad_() for x in exact]
            module: Any = None
            query, key, value = mine
            got, _ = forest_attention(module, query, key, value, None, sliding_window=window, whet_forest=layout)
            grads = torch.autograd.grad((got * pull.to(got)).sum(), mine)
            yield close(f"{kind}, {dtype}, window {window}", [got, *grads], right, most)


def close(what: str, got: list[Tensor], right: list[Tensor], most: float) -> Row:
    """The largest relative error of several tensors."""
    pairs = [(a.detach().cpu().double(), b.detach().cpu().double()) for a, b in zip(got, right, strict=True)]
    off = max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)
    finite = all(bool(a.isfinite().all()) for a, _ in pairs)
    return Row(what, float(f"{off:.3g}"), f"below {most:g}", finite and off < most)


@check("A4")
def head(s: Setting) -> Iterator[Row]:
    """Log-probs and entropies of the head in tiles, and their gradients."""
    vocabulary, tokens, width = s.pick(151_936, 500), s.pick(512, 20), s.pick(1024, 16)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=random, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=random, dtype=torch.float64) / width**0.5
    targets = torch.randint(0, vocabulary, (tokens,), generator=random)
    for name, distribution in (("plain", Distribution()), ("top-p", Distribution(temperature=0.8, top_p=0.9))):
        right = _head(hidden, weight, targets, distribution)
        for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
            moved = (hidden.to(s.device, dtype), weight.to(s.device, dtype), targets.to(s.device))
            yield close(f"{name}, {dtype}", _head(*moved, distribution), right, most)


def _head(hidden: Tensor, weight: Tensor, targets: Tensor, distribution: Distribution) -> list[Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    logprobs, entropy = Head(weight).token_logprobs(hidden, targets, distribution, with_entropy=True)
    assert entropy is not None
    return [logprobs, *torch.autograd.grad(logprobs.sum() + 0.1 * entropy.sum(), [hidden, weight])]


@check("A5")
def learner(s: Setting) -> Iterator[Row]:
    """A learner on the GPU against one on the CPU: log-probs and gradients."""
    batch = some_batch()
    for name, model, settings in (
        ("llama", tiny_llama, {}),
        ("qwen3", tiny_qwen3, {}),
        ("gemma3, windows", tiny_gemma, {}),
        ("experts", tiny_qwen3_moe, {}),
        ("latent attention", tiny_deepseek, {}),
        ("recurrent", tiny_qwen3_5, {}),
        ("lora", tiny_qwen3, {"lora": LoraSettings(rank=4)}),
        ("dora", tiny_qwen3, {"lora": LoraSettings(rank=4, dora=True)}),
        ("recomputation", tiny_qwen3, {"learner": {"activation_checkpointing": True}}),
    ):
        with tempfile.TemporaryDirectory() as folder:
            model().save_pretrained(folder)
            right = _step(Path(folder), "float32", "cpu", batch, settings)
            for precision, most in (("float32", 1e-3), ("bfloat16", 0.1)):
                got = _step(Path(folder), precision, s.device.type, batch, settings)
                yield close(f"{name}, {precision}", got, right, most)


@check("A13")
def megatron(s: Setting) -> Iterator[Row]:
    """A learner of Megatron Core's layers on the GPU against torch's on the CPU."""
    if find_spec("megatron") is None:
        yield Row("skipped", "megatron-core is not installed")
        return
    batch = some_batch()
    for name, model in (
        ("llama", tiny_llama),
        ("qwen3", tiny_qwen3),
        ("experts", tiny_qwen3_moe),
        ("latent attention", tiny_deepseek),
    ):
        with tempfile.TemporaryDirectory() as folder:
            model().save_pretrained(folder)
            scores, norms = _step(Path(folder), "float32", "cpu", batch, {})
            for precision, most in (("float32", 1e-3), ("bfloat16", 0.1))[: s.pick(2, 1)]:  # no bfloat16 on CPUs
                got = _step(Path(folder), precision, s.device.type, batch, {"learner": {"type": "megatron"}})
                # its parameters are others, so that only the norm of all gradients is the same
                yield close(f"{name}, {precision}", [got[0], got[1].norm()], [scores, norms.norm()], most)


def _step(folder: Path, precision: str, device: str, batch: Any, settings: dict[str, Any]) -> list[Tensor]:
    more = {"device": device} | settings.get("learner", {})
    made = worker(folder, precision=precision, **{**settings, "learner": more})
    scored = made.score(whole(batch), {"logprobs"})[0]["logprobs"]
    made.accumulate(whole(batch), PolicyGradient())
    norms = [p.grad.detach().double().norm().cpu() for p in made.module.parameters() if p.grad is not None]
    return [scored, torch.stack(norms)]


@check("A6")
def state(s: Setting) -> Iterator[Row]:
    """The same step twice, a checkpoint between two, and sleep."""
    batch = some_batch()
    for deterministic in (False, True) if not s.small else (False,):
        with tempfile.TemporaryDirectory() as folder:
            tiny_qwen3().save_pretrained(folder)
            chosen = {"device": s.device.type, "deterministic": deterministic}
            made = [worker(Path(folder), precision="float32", learner=chosen) for _ in range(2)]
            for learner in made:
                learner.update(whole(batch), PolicyGradient())
            same = _same(made[0], made[1])
            yield Row(
                f"the same bits twice, deterministic={deterministic}", same, "yes", same == "yes" or not deterministic
            )
            saved = Path(folder) / "saved"
            saved.mkdir()
            made[0].state.save(saved)
            made[0].sleep()
            made[0].wake()
            made[1].state.load(saved)
            for learner in made:
                learner.update(whole(batch), PolicyGradient())
            same = _same(made[0], made[1])
            yield Row(
                f"after a checkpoint and sleep, deterministic={deterministic}",
                same,
                "yes",
                same == "yes" or not deterministic,
            )
        torch.use_deterministic_algorithms(False)


def _same(a: Any, b: Any) -> str:
    pairs = zip(a.module.parameters(), b.module.parameters(), strict=True)
    return "yes" if all(torch.equal(x, y) for x, y in pairs) else "no"


@check("A7")
def digests(s: Setting) -> Iterator[Row]:
    """A tensor's digest is the same on both devices."""
    from whet.weights.digest import tensor_digest

    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for shape in ((7,), (33, 129), (1000, 1001)):
            tensor = torch.randn(*shape).to(dtype)
            same = tensor_digest(tensor) == tensor_digest(tensor.to(s.device))
            yield Row(f"{dtype} {shape}", "equal" if same else "different", "equal", same)
    large = torch.randn(s.pick(1 << 28, 1 << 10), device=s.device)
    yield within("GB/s", 1e-9 * large.nbytes / seconds(lambda: tensor_digest(large), s), 200, 5000, s)


@check("A8")
def generator(s: Setting) -> Iterator[Row]:
    """The built-in generator's log-probs, token by token."""
    from whet.engines.torch.engine_model import EngineModel

    prompt, tokens = list(range(1, 40)), list(range(50, 66))
    for name, model in (
        ("llama", tiny_llama),
        ("gemma3, windows", tiny_gemma),
        ("experts", tiny_qwen3_moe),
        ("latent attention", tiny_deepseek),
    ):
        with torch.no_grad():
            right = torch.tensor(EngineModel(model()).score_decode(prompt, tokens))
            got = torch.tensor(EngineModel(model().to(s.device)).score_decode(prompt, tokens))
        off = float((got - right).abs().max())
        yield Row(f"{name}: largest difference of log-probs, float32", off, "below 1e-3", off < 1e-3)


@check("A9")
def shared(s: Setting) -> Iterator[Row]:
    """Memory of the GPU that another process opens (CUDA IPC; on a CPU by a file without a name)."""
    import torch.multiprocessing as mp

    from whet.weights.digest import tensor_digest
    from whet.weights.shared_memory import settle, share

    memory, handle = share(s.pick(1 << 29, 1 << 12), s.device)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    settle(s.device)
    context = mp.get_context("spawn")
    answers: Any = context.Queue()
    child = context.Process(target=_open, args=(handle, memory.numel(), str(s.device), answers))
    child.start()
    try:
        taken, got = answers.get(timeout=120)
    finally:
        child.join(20)
    same = got == tensor_digest(memory)
    yield Row("bytes in another process", "equal" if same else "different", "equal", same)
    yield within("seconds to open them", taken, 0, 1, s)


def _open(handle: bytes, size: int, device: str, answers: Any) -> None:
    from whet.weights.digest import tensor_digest
    from whet.weights.shared_memory import open_shared

    torch.zeros(1, device=device)  # starts CUDA
    begun = time.perf_counter()
    opened = open_shared(handle, size, torch.device(device))
    answers.put((time.perf_counter() - begun, tensor_digest(opened)))
    del opened


@check("A10")
def one_rank(s: Setting) -> Iterator[Row]:
    """The broadcast of weights with one rank: NCCL starts, and ends."""
    import torch.distributed as dist

    from whet.weights.collective import Broadcast

    store = dist.HashStore()
    wire = Broadcast(store, "127.0.0.1", 0, 1, "gloo" if s.small else "nccl", s.device, 30.0)
    tensor = torch.arange(10.0, device=s.device)
    wire.finish(wire.start(tensor))
    wire.close()
    yield Row("a broadcast without receivers", float(tensor.sum()), "45", bool(tensor.sum() == 45))


@check("A11")
def compiler(s: Setting) -> Iterator[Row]:
    """The time of FlexAttention's compiler, and how often it starts again for new sizes."""
    if s.small:
        yield Row("skipped", "FlexAttention is not compiled on CPUs")
        return
    from torch._dynamo.utils import counters

    settings = AttentionSettings(0.1)
    for number in range(11):
        lengths = [200 + 53 * number, 90 + 7 * number, 61]
        layout = FlexLayout.of([0, lengths[0], lengths[0] + lengths[1]], [-1, 0, 0], sum(lengths), s.device)
        assert layout is not None
        q = torch.randn(1, 16, sum(lengths), 128, device=s.device, dtype=torch.bfloat16, requires_grad=True)
        begun = time.perf_counter()
        layout.attend(q, q[:, :8], q[:, 8:], settings).sum().backward()
        wait(s)
        if number == 0:
            yield within("seconds, first call", time.perf_counter() - begun, 1, 90, s)
    graphs = counters["stats"]["unique_graphs"]
    yield Row("graphs for 11 sizes", graphs, "at most 3", graphs <= 3)


@check("A12")
def waits(s: Setting) -> Iterator[Row]:
    """The number of times that the host waits for the GPU in a step of several micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_qwen3().save_pretrained(folder)
        made = worker(Path(folder), precision="bfloat16", learner={"device": s.device.type})
        micro = whole(some_batch()) * 4
        made.accumulate(micro, PolicyGradient())
        if s.small:
            yield Row("skipped", "there is nothing to wait for")
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            made.accumulate(micro, PolicyGradient())
            torch.cuda.set_sync_debug_mode("default")
        where = sorted({f"{Path(warning.filename).name}:{warning.lineno}" for warning in caught})
        yield Row("waits in 4 micro-batches", len(caught), "2 each, of the loss's metrics", len(caught) <= 16)
        yield Row("where", ", ".join(where))
