"""Requests and completions in vLLM's terms and ours."""

from typing import TYPE_CHECKING

from whet.base.errors import GeneratorError
from whet.base.strict_json import JsonObject
from whet.engines.base import Completion, SamplingParams

if TYPE_CHECKING:
    import vllm

_TOKENS_PER_OUTPUT = 16  # tokens per report of the engine, often enough to see that it is alive


def vllm_params(params: SamplingParams, limit: int) -> "vllm.SamplingParams":
    """Return the parameters as vLLM's. A completion ends only at the conditions in ``params``. The likeliest tokens are
    reported under the distribution of the request, so their log-probs are right at temperature 1 without filters."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    d = params.distribution
    filters: JsonObject = {} if params.greedy else {"top_k": d.top_k, "top_p": d.top_p, "min_p": d.min_p}
    return vllm.SamplingParams(
        temperature=0.0 if params.greedy else d.temperature,
        seed=params.seed % 2**63,
        max_tokens=limit,
        stop_token_ids=list(params.stop_token_ids),
        stop=list(params.stop),
        include_stop_str_in_output=True,
        ignore_eos=True,
        detokenize=bool(params.stop),
        skip_special_tokens=False,
        logprobs=len(params.among) or params.likeliest,  # in addition to the sampled token
        logprob_token_ids=list(params.among) or None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.CUMULATIVE,
        stream_interval=_TOKENS_PER_OUTPUT,
        **filters,
    )


def completion_of(last: "vllm.RequestOutput", version: int, engine: str) -> Completion:
    """Return the completion in the last output of a request. ``version``: of the weights, if the output has none.
    Raises ``GeneratorError``, with the name of the engine, if the request was given up."""
    out = last.outputs[0]
    if out.finish_reason not in ("stop", "length", "abort"):
        raise GeneratorError(f"{engine} gave up on a request: {out.finish_reason}")
    tokens = list(out.token_ids)
    spans = [int(span.version) for span in out.weight_versions or ()] or [version]
    logprobs, likeliest = list[float](), list[dict[int, float]]()
    if (flat := out.logprobs) is not None:
        starts, ends = flat.start_indices[: len(tokens)], flat.end_indices[: len(tokens)]
        logprobs = [min(flat.logprobs[start], 0.0) for start in starts]  # the sampled token comes first
        if len(flat.logprobs) > len(flat):
            parts = [slice(start + 1, end) for start, end in zip(starts, ends, strict=True)]
            likeliest = [dict(zip(flat.token_ids[part], flat.logprobs[part], strict=True)) for part in parts]
    return Completion(
        tokens,
        logprobs,
        (spans[0], spans[-1]),
        "aborted" if out.finish_reason == "abort" else out.finish_reason,
        cached=last.num_cached_tokens or 0,
        likeliest=likeliest,
    )
