"""Breaks what a step learns from, in small ways, and checks that some test notices each: the losses, their weights, the
advantages, the filters and the rewards.

    python -m tests.mutate                       all mutants of all files
    python -m tests.mutate kl value              the mutants of files whose name contains one of the words
    python -m tests.mutate --sample 6 --seed 12  a few, chosen by the seed
    python -m tests.mutate --killed killed.txt   remembers the killed mutants; an interrupted call continues from there

A mutant is one change of one node of a file's syntax tree: a sign, a comparison, a constant, a dropped mask or
``detach``, minimum for maximum, chosen for rejected ... torch is imported once; each mutant is a fork that imports the
changed module and runs the tests that concern it until one fails. Exit status 1 if any mutant survives that isn't
listed, with a reason, in ``EQUIVALENT``.
"""

import argparse
import gc
import hashlib
import importlib.abc
import importlib.util
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.mutants import ROOT, Mutant, mutants

# A mutant that never ends is killed, too: by its CPU time, whatever else the machine does, or at last by the clock.
CPU_SECONDS, SECONDS = 120, 1800

_ALL = ["tests/losses/test_all_losses.py"]
_POLICY = [
    *_ALL,
    "tests/losses/test_policy.py",
    "-k",
    "test_policy or ppo or gspo or cispo or reinforce or kl or policy or sapo or gmpo",
]
_PAIRS = [
    *_ALL,
    "tests/losses/test_preference.py",
    "-k",
    "test_preference or dpo or po or kto or bradley or score or value",
]
_ADVANTAGES = [f"tests/algorithms/test_{name}.py" for name in ("advantages", "episodes", "own")]
_TEXT = [*_ALL, "tests/losses/test_distillation.py", "-k", "distillation or sft"]
# Files to mutate in addition to the keys of TESTED, by pattern, and their tests.
MUTATED = {"whet/losses/*.py": [*_ALL, "tests/losses"], "whet/distillation/mixture.py": ["tests/distillation"]}
TESTED = {
    "whet/losses/kl.py": _POLICY,
    "whet/losses/policy_gradient.py": _POLICY,
    "whet/losses/trust_region.py": _POLICY,
    "whet/losses/off_policy.py": _POLICY,
    "whet/losses/composite.py": [*_POLICY[:-1], f"{_POLICY[-1]} or zero", "tests/losses/test_zero_gradient.py"],
    "whet/losses/preference.py": _PAIRS,
    "whet/losses/reward_model.py": _PAIRS,
    "whet/losses/value.py": _PAIRS,
    "whet/losses/implicit_reward.py": [*_ALL, "tests/losses/test_implicit_reward.py", "-k", "implicit"],
    "whet/losses/distillation.py": _TEXT,
    "whet/core/weighting.py": ["tests/core/test_batch.py", "-k", "weigh or mean or divisor"],
    "whet/losses/base.py": ["tests/losses/test_policy.py", "-k", "registered"],
    "whet/algorithms/preference.py": ["tests/algorithms/test_kto.py"],
    **{
        f"whet/algorithms/{name}.py": _ADVANTAGES
        for name in ("advantage", "grpo", "reinforce_plus_plus", "gdpo", "ppo", "turns")
    },
    "whet/algorithms/max_rl.py": [*_ADVANTAGES, "tests/algorithms/test_token_selection.py"],
    "whet/algorithms/distillation.py": _ADVANTAGES,
    "whet/algorithms/token_selection.py": [*_ADVANTAGES, "tests/algorithms/test_token_selection.py"],
    "whet/algorithms/prime.py": [*_ADVANTAGES, "tests/algorithms/test_process_rewards.py", "-k", "process or baseline"],
    "whet/distillation/mixture.py": ["tests/distillation/test_retokenize.py", "tests/distillation/test_mixture.py"],
    "whet/distillation/retokenize.py": ["tests/distillation/test_retokenize.py"],
    "whet/rollouts/filters.py": ["tests/rollouts/test_filters.py"],
    "whet/rollouts/rewards.py": ["tests/rollouts/test_rewards.py"],
    "whet/rollouts/sum_tree.py": ["tests/rollouts/test_sum_tree.py"],
}
TESTS = {
    str(file.relative_to(ROOT)): tests for pattern, tests in MUTATED.items() for file in sorted(ROOT.glob(pattern))
} | TESTED

# "file: mutant" -> why no test can tell it from the original.
_ONLY_A_GRAPH = "the number is the same; without it an unused graph is built"
_LONG_STEPS = "the log-probs of the tests are float64; it keeps the sums of long steps in float32 exact"
_DUAL = "over = (advantages < 0) & (value > bound)"
EQUIVALENT: dict[str, str] = {
    f"whet/losses/policy_gradient.py: value > bound -> value >= bound  in  {_DUAL}": (
        "both values are the same at equality, which takes a ratio of exactly dual_clip"
    ),
    f"whet/losses/policy_gradient.py: advantages < 0 -> advantages <= 0  in  {_DUAL}": (
        "an advantage of 0 gives value 0 and bound 0, and 0 > 0 is false"
    ),
    "whet/losses/distillation.py: 0.0 -> 1.0  in  return (p.exp() * torch.where(p > -math.inf, p - q, 0.0)).sum(1)": (
        "any finite number does: it is multiplied by the probability 0"
    ),
    "whet/losses/reward_model.py: 1 -> 2  in  "
    "last = last.scatter_reduce(0, batch.sequence.clamp(min=0), index.where(batch.trained, -1), 'amax')": (
        "the maximum with -1, which was there before"
    ),
    "whet/losses/reward_model.py: 1 -> 2  in  return torch.cat([values, values.new_zeros(1)])[last]": (
        "the last of two zeros is as good as the only one"
    ),
    "whet/algorithms/gdpo.py: torch.zeros_like -> torch.ones_like  in  "
    "total_S = torch.zeros_like(batch.reward, dtype=torch.float64)": "whitening takes a constant away again",
    "whet/algorithms/advantage.py: 1 -> 2  in  steps = max([1, *self.length.tolist()])": (
        "another row of zeros before the first tokens"
    ),
    "whet/algorithms/turns.py: batch.predictor.clamp(min=0) -> batch.predictor  in  "
    "starts_N = batch.trained & ~batch.trained[batch.predictor.clamp(min=0)]": "a first token is never trained",
    "whet/algorithms/turns.py: torch.zeros_like -> torch.ones_like  in  "
    "ended_S = starts_TS[step - 1] if step else torch.zeros_like(running_S)": "it is multiplied by 0",
    "whet/algorithms/turns.py: batch.sequence.clamp(min=0) -> batch.sequence  in  "
    "place_N = batch.group[batch.sequence.clamp(min=0)] * turns + turn_N if len(batch) else turn_N": (
        "shared tokens are not trained"
    ),
    "whet/algorithms/turns.py: 1 -> 2  in  turns = max([1, *turn_N.tolist()]) + 1": "further turns have no reply",
    "whet/algorithms/turns.py: 1 -> 2  in  turns = max([1, *turn_N.tolist()]) + 1  #2": "further turns have no reply",
    "whet/distillation/retokenize.py: False -> True  in  return lambda tokens: tokenizer.decode(list(tokens), "
    "skip_special_tokens=False, clean_up_tokenization_spaces=False)  #2": (
        "transformers ignores it for BPE, which the tokenizers of the tests are"
    ),
    "whet/algorithms/preference.py: 2 -> 3  in  halves.sort(key=lambda half: half[:2])": (
        "no two have the same second part"
    ),
    "whet/algorithms/preference.py: 0 -> 1  in  "
    "room = max((len(prompt) + len(reply) for _, _, prompt, reply in halves), default=0)": (
        "where nothing trains, there is no reply to cut"
    ),
    "whet/algorithms/preference.py: False -> True  in  "
    "return Batch.from_groups(groups, share_prompts=False, distribution=batch.distribution)": (
        "what sequences share is computed once, with the same result"
    ),
    "whet/losses/trust_region.py: 1e-08 -> 2e-08  in  _TINY = 1e-08": (
        "only a probability next to 1 would tell them apart"
    ),
    "whet/losses/trust_region.py: advantages > 0 -> advantages >= 0  in  "
    "tau = torch.full_like(ratio, self.tau_negative).masked_fill(advantages > 0, self.tau_positive)": (
        "an advantage of 0 makes the value 0"
    ),
    "whet/losses/trust_region.py: logprobs.detach() -> logprobs  in  "
    "divergence = self._divergence(logprobs.detach(), sampled)": _ONLY_A_GRAPH,
    "whet/losses/trust_region.py: ratio > 1 -> ratio >= 1  in  "
    "high = (advantages > 0) & (divergence > self.high) & (ratio > 1)": "at a ratio of 1 the divergence is 0",
    "whet/losses/trust_region.py: ratio < 1 -> ratio <= 1  in  "
    "low = (advantages < 0) & (divergence > self.low) & (ratio < 1)": "at a ratio of 1 the divergence is 0",
    "whet/losses/trust_region.py: at_trained(batch, output.logprobs) -> output.logprobs  in  "
    "difference = at_trained(batch, output.logprobs) - old_logprobs(output, batch)": (
        "in one of three uses: the mean over the answer and the metrics take trained tokens only"
    ),
    "whet/losses/trust_region.py: advantages > 0 -> advantages >= 0  in  clipped = torch.where(advantages > 0, "
    "difference.clamp(max=self.clip_high), difference.clamp(min=-self.clip_low))": (
        "the advantages of an answer are equal, and 0 makes its value 0"
    ),
    "whet/algorithms/token_selection.py: True -> False  in  "
    "largest = covariance.argsort(descending=True, stable=True)[:_count(batch, self.share)]  #2": (
        "torch sorts so few equal values in their order in any case"
    ),
    "whet/algorithms/token_selection.py: True -> False  in  squares, order = d[bounded].square().sort(stable=True)": (
        "torch sorts so few equal values in their order in any case"
    ),
    "whet/algorithms/token_selection.py: mismatch(batch.column('old_logprobs'), batch.column('rollout_logprobs'), "
    "batch).double() -> mismatch(batch.column('old_logprobs'), batch.column('rollout_logprobs'), batch)  in  d = "
    "mismatch(batch.column('old_logprobs'), batch.column('rollout_logprobs'), batch).double()": (_LONG_STEPS),
    "whet/algorithms/token_selection.py: at_trained(batch, column).double() -> at_trained(batch, column)  in  "
    "column = at_trained(batch, column).double()": _LONG_STEPS,
    "whet/algorithms/token_selection.py: 'clip_cov' -> 'clip_cov?'  in  "
    "seed = derive_seed('clip_cov', self.seed, *batch.group_uids)": "another name draws others, as much by chance",
    "whet/algorithms/token_selection.py: 6 -> 7  in  "
    "return max(1, int(round(share * batch.trained_tokens.numel(), 6)))": "rounding errors are far below both",
    "whet/rollouts/rewards.py: '' -> '?'  in  matching = sum((unicodedata.name(letter, '')"
    ".startswith(self.script.upper()) for letter in letters))": "no script's name begins with it either",
    "whet/rollouts/sum_tree.py: 1 -> 2  in  self._leaves = 1 << count.bit_length()": "a larger tree gives the same",
    "whet/rollouts/sum_tree.py: 2 -> 3  in  self._sums = [0.0] * (2 * self._leaves)": "further sums are never read",
    "whet/losses/kl.py: logprobs.detach() -> logprobs  in  "
    "return token_metrics(batch, {'kl': KL().estimate(logprobs.detach(), reference)})": _ONLY_A_GRAPH,
}


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant in place of the module."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.module = mutant.path.removesuffix(".py").replace("/", ".")

    def find_spec(self, name: str, path: object, target: object = None) -> object:
        return importlib.util.spec_from_loader(name, self) if name == self.module else None

    def exec_module(self, module: object) -> None:
        exec(compile(self.mutant.tree, str(ROOT / self.mutant.path), "exec"), vars(module))


def survives(mutant: Mutant) -> bool:
    """Run the mutant's tests in a fork of this process."""
    child = os.fork()
    if child == 0:
        _run_child(mutant)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) not in (0, 1, 2):  # neither passed, nor failed, nor unimportable
        raise RuntimeError(f"pytest could not run the tests of {mutant}: exit status {os.WEXITSTATUS(status)}")
    return status == 0


def _run_child(mutant: Mutant) -> None:
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        signal.alarm(SECONDS)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.meta_path.insert(0, _Changed(mutant))
        import pytest

        # No settings, plugins or rewritten asserts: they would cost more than the tests.
        options = ["-x", "-q", "--tb=no", "--assert=plain", "-c", os.devnull, "--rootdir", str(ROOT)]
        for plugin in ("cacheprovider", "unraisableexception", "threadexception", "warnings"):
            options += ["-p", f"no:{plugin}"]
        status = int(pytest.main([*options, *TESTS[mutant.path]]))
    finally:
        os._exit(status)


def run(chosen: list[Mutant], remembered: Path | None = None, report: Callable[..., None] = print) -> list[Mutant]:
    """Try each; returns the survivors that aren't known to be equivalent. What was killed is written to
    ``remembered`` and not tried again while its file stays the same."""
    before = set(remembered.read_text().splitlines()) if remembered and remembered.exists() else set()
    survivors, counts, begun = [], {path: Counter[str]() for path in TESTS}, time.monotonic()
    for mutant in chosen:
        if mutant.name in EQUIVALENT:
            outcome = "equivalent"
        elif _memory(mutant) in before:
            outcome = "killed"
        elif survives(mutant):
            outcome = "survived"
            survivors.append(mutant)
            report(f"SURVIVED {mutant}", flush=True)
        else:
            outcome = "killed"
            if remembered:
                with remembered.open("a") as file:
                    file.write(_memory(mutant) + "\n")
        counts[mutant.path][outcome] += 1
    for path, found in counts.items():
        if found:
            report(f"{path}: {_counted(found)}")
    report(f"{_counted(sum(counts.values(), Counter()))}, {time.monotonic() - begun:.0f} s")
    return survivors


def _memory(mutant: Mutant) -> str:
    return f"{hashlib.sha256((ROOT / mutant.path).read_bytes()).hexdigest()[:12]} {mutant.name}"


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in ("killed", "survived", "equivalent"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only files whose path contains one of these")
    parser.add_argument("--sample", type=int, default=0, help="how many to try; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--killed", type=Path, metavar="FILE", help="where to remember what was killed")
    given = parser.parse_args()

    chosen = [
        mutant
        for path in TESTS
        if not given.words or any(word in path for word in given.words)
        for mutant in mutants(path)
    ]
    if given.sample:
        chosen = random.Random(given.seed).sample(chosen, min(given.sample, len(chosen)))
    if given.list:
        print(*chosen, sep="\n")
        return 0

    os.chdir(ROOT)
    _warm_up()
    for path in dict.fromkeys(mutant.path for mutant in chosen) if not given.sample else ():
        if not survives(Mutant(path, 0, "unchanged", place=None)):
            print(f"the tests of {path} fail without any change")
            return 2
    return 1 if run(chosen, given.killed) else 0


def _warm_up() -> None:
    """Import here what every fork would import, but none of the files that are changed."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest  # noqa: F401
    import torch
    import torch.testing

    import whet.config
    import whet.core.types  # noqa: F401

    torch.set_num_threads(1)
    leaf = torch.zeros(2, requires_grad=True)
    leaf.exp().sum().backward()
    torch.testing.assert_close(leaf.grad, torch.ones(2))
    gc.collect()
    gc.freeze()  # so that a fork's collections neither walk nor copy what the parent imported
    changed = [name for name in sys.modules if name.replace(".", "/") + ".py" in TESTS]
    assert not changed, f"imported too early to be changed: {changed}"


if __name__ == "__main__":
    sys.exit(main())
