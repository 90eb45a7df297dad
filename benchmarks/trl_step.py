"""GRPO steps by TRL's ``GRPOTrainer``, one whenever asked: the rival in ``grpo_step.py``, which starts this file with
the interpreter of another virtual environment.

    python -m venv trl-venv
    trl-venv/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0
    python benchmarks/grpo_step.py --model FOLDER --trl-python trl-venv/bin/python

(A CPU build of torch will do.) Needs nothing of whet. Each line
on its standard input is a number of new tokens; it then makes one step (generate, learn) and answers with a line of
JSON: ``seconds`` of the step, and of its parts ``generate`` and ``optimizer``. Everything else it says goes to standard
error.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from typing import Any


def reward(text: str) -> float:
    """The share of lower-case letters: quick to compute, and never the same for a whole group."""
    return sum("a" <= letter <= "z" for letter in text) / max(len(text), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="JSON file with a list of conversations")
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON, for GRPOConfig")
    args = parser.parse_args()

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not disturb the answers

    from datasets import Dataset
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    spent: dict[str, float] = {}

    class OneByOne(TrainerCallback):
        """Begins a step when a line comes, and ends training with the last one."""

        def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            line = sys.stdin.readline()
            if not line.strip():
                sys.exit(0)
            config = trainer.generation_config
            config.max_new_tokens = config.min_new_tokens = int(line)
            spent.clear()
            spent["begun"] = time.perf_counter()

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            spent["seconds"] = time.perf_counter() - spent.pop("begun")
            print(json.dumps(spent), file=answers, flush=True)

    def rewards(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [reward(completion[0]["content"]) for completion in completions]

    with open(args.prompts) as file:
        prompts = json.load(file)
    rows = len(prompts) * args.samples
    settings: dict[str, Any] = {
        "use_cpu": True,
        "num_generations": args.samples,
        "gradient_accumulation_steps": rows // args.settings.get("per_device_train_batch_size", 8),
        "max_steps": 1_000_000,
        "learning_rate": 1e-6,
        "output_dir": tempfile.mkdtemp(),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=rewards,
        args=GRPOConfig(**settings | args.settings),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[OneByOne()],
    )
    generate = trainer.model.generate

    def timed_generate(*given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        result = generate(*given, **named)
        spent["generate"] = time.perf_counter() - started
        spent["new_tokens"] = result.shape[1] - named["input_ids"].shape[1]
        spent["sequences"] = len(result)
        return result

    trainer.model.generate = timed_generate
    register_optimizer_step_pre_hook(lambda *_: spent.update(optimizer=-time.perf_counter()))
    register_optimizer_step_post_hook(lambda *_: spent.update(optimizer=spent["optimizer"] + time.perf_counter()))
    trainer.train()


if __name__ == "__main__":
    main()
