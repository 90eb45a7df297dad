"""Breaks the losses and advantages in small ways and checks that some test notices each.

    python tests/mutate.py                       all mutants of all files
    python tests/mutate.py kl value              those of files whose name contains one of the words
    python tests/mutate.py --sample 6 --seed 12  a few, chosen by the seed

A mutant is one change of one node of a file's syntax tree: a sign, a comparison, a constant, a dropped mask or
``detach``, minimum for maximum, chosen for rejected ... torch is imported once; each mutant is a fork that imports the
changed module and runs the tests that concern it until one fails. Exit status 1 if any mutant survives that isn't
listed, with a reason, in ``EQUIVALENT``.
"""

import argparse
import ast
import copy
import gc
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS_PER_MUTANT = 120

_ALL = ["tests/losses/test_all_losses.py"]
_POLICY = [
    *_ALL,
    "tests/losses/test_policy.py",
    "-k",
    "test_policy or ppo or gspo or cispo or reinforce or kl or policy",
]
_PAIRS = [
    *_ALL,
    "tests/losses/test_preference.py",
    "-k",
    "test_preference or dpo or po or kto or bradley or score or value",
]
_TEXT = [*_ALL, "tests/losses/test_distillation.py", "-k", "distillation or sft"]
TESTS = {
    "whet/losses/weighted.py": [*_ALL, "tests/losses"],
    "whet/losses/kl.py": _POLICY,
    "whet/losses/policy_gradient.py": _POLICY,
    "whet/losses/off_policy.py": _POLICY,
    "whet/losses/composite.py": _POLICY,
    "whet/losses/preference.py": _PAIRS,
    "whet/losses/reward_model.py": _PAIRS,
    "whet/losses/value.py": _PAIRS,
    "whet/losses/implicit_reward.py": [*_ALL, "tests/losses/test_implicit_reward.py", "-k", "implicit"],
    "whet/losses/supervised.py": _TEXT,
    "whet/losses/distillation.py": _TEXT,
    "whet/losses/registry.py": ["tests/losses/test_policy.py", "-k", "registered"],
    "whet/algorithms/advantages.py": ["tests/algorithms/test_advantages.py"],
    "whet/algorithms/teacher_advantage.py": ["tests/algorithms/test_advantages.py"],
    "whet/algorithms/mixture.py": ["tests/algorithms/test_alignment.py", "tests/algorithms/test_mixture.py"],
    "whet/algorithms/alignment.py": ["tests/algorithms/test_alignment.py"],
    "whet/algorithms/process_rewards.py": [
        "tests/algorithms/test_advantages.py",
        "tests/algorithms/test_process_rewards.py",
        "-k",
        "process",
    ],
    "whet/algorithms/advantage_registry.py": ["tests/algorithms/test_advantages.py", "-k", "registered"],
}

# "file: mutant" -> why no test can tell it from the original.
_ONLY_A_GRAPH = "the number is the same; without it a graph is built that nobody uses"
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
    "whet/losses/reward_model.py: 1 -> 2  in  return torch.cat([values, values.new_zeros(1)])[last]": (
        "the last of two zeros is as good as the only one"
    ),
    "whet/algorithms/advantages.py: torch.zeros_like -> torch.ones_like  in  "
    "total = torch.zeros_like(batch.reward, dtype=torch.float64)": "whitening takes a constant away again",
    "whet/algorithms/advantages.py: 1 -> 2  in  steps = max([1, *self.length.tolist()])": (
        "another row of zeros before the first tokens"
    ),
    "whet/losses/kl.py: logprobs.detach() -> logprobs  in  "
    "return token_metrics(batch, {'kl': KL().estimate(logprobs.detach(), reference)})": _ONLY_A_GRAPH,
    "whet/losses/weighted.py: column.detach() -> column  in  "
    "found += [at_trained(batch, column.detach().double()).sum() for column in means.values()]": _ONLY_A_GRAPH,
    "whet/losses/weighted.py: column.detach() -> column  in  "
    "found += [column.detach().masked_fill(~trained, math.inf).amin()]": _ONLY_A_GRAPH,
    "whet/losses/weighted.py: column.detach() -> column  in  "
    "found += [column.detach().masked_fill(~trained, -math.inf).amax()]": _ONLY_A_GRAPH,
}

SWAPPED_NAMES = {
    "minimum": "maximum",
    "maximum": "minimum",
    "amin": "amax",
    "amax": "amin",
    "min": "max",
    "max": "min",
    "chosen": "rejected",
    "rejected": "chosen",
    "high": "low",
    "low": "high",
    "clip_high": "clip_low",
    "clip_low": "clip_high",
    "teacher": "student",
    "student": "teacher",
    "forward": "reverse",
    "reverse": "forward",
    "better": "worse",
    "worse": "better",
    "ones_like": "zeros_like",
    "zeros_like": "ones_like",
    "exp": "expm1",
    "expm1": "exp",
}
SWAPPED_OPERATORS: dict[type, list[type]] = {
    ast.Add: [ast.Sub],
    ast.Sub: [ast.Add],
    ast.Mult: [ast.Div],
    ast.Div: [ast.Mult],
    ast.BitAnd: [ast.BitOr],
    ast.BitOr: [ast.BitAnd],
    ast.And: [ast.Or],
    ast.Or: [ast.And],
    ast.Lt: [ast.LtE, ast.Gt],
    ast.LtE: [ast.Lt, ast.GtE],
    ast.Gt: [ast.GtE, ast.Lt],
    ast.GtE: [ast.Gt, ast.LtE],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
DROPPED_METHODS = {"detach", "clamp", "double", "masked_fill", "abs", "sqrt", "square", "cumsum"}
DROPPED_FUNCTIONS = {"at_trained": 1, "bounded_exp": 0, "relu": 0, "log1mexp": 0, "reversed": 0}


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    change: str  # "before -> after", in source
    tree: ast.Module

    @property
    def name(self) -> str:
        return f"{self.path}: {self.change}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.change}"


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """What a node can be replaced by."""
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED_OPERATORS:
        for operator in SWAPPED_OPERATORS[type(node.op)]:
            yield _with(node, op=operator())
    if isinstance(node, ast.Compare):
        for operator in SWAPPED_OPERATORS.get(type(node.ops[0]), []):
            yield _with(node, ops=[operator(), *node.ops[1:]])
    if isinstance(node, ast.UnaryOp):
        yield node.operand
    if isinstance(node, ast.Constant):
        yield from (_with(node, value=value) for value in _other_values(node.value))
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in DROPPED_METHODS:
            yield function.value
        if isinstance(function, ast.Name) and function.id in DROPPED_FUNCTIONS:
            yield node.args[DROPPED_FUNCTIONS[function.id]]
        if isinstance(function, ast.Name) and function.id == "mean_per_sequence":
            yield ast.Call(ast.Attribute(node.args[0], "per_sequence", ast.Load()), node.args[1:], [])
        if isinstance(function, ast.Attribute) and function.attr == "where" and len(node.args) == 3:
            yield _with(node, args=[node.args[0], node.args[2], node.args[1]])
    if isinstance(node, ast.Attribute) and node.attr in SWAPPED_NAMES:
        yield _with(node, attr=SWAPPED_NAMES[node.attr])
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in SWAPPED_NAMES:
        yield _with(node, id=SWAPPED_NAMES[node.id])
    if isinstance(node, ast.If | ast.IfExp):
        yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    if isinstance(node, ast.AugAssign):
        yield ast.Pass()


def _other_values(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 2 if value else 1.0]
    return [value + "?"] if isinstance(value, str) else []


def _with(node: ast.AST, **changes: object) -> ast.AST:
    changed = copy.deepcopy(node)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def mutants(path: str) -> list[Mutant]:
    """All mutants of a file. Docstrings, annotations and the texts of errors stay as they are."""
    source = (ROOT / path).read_text()
    found = []
    for index, node in enumerate(_mutable(ast.parse(source))):
        for number, _ in enumerate(variants(node)):
            tree = ast.parse(source)
            target = _mutable(tree)[index]
            changed = list(variants(target))[number]
            before, after = ast.unparse(_statement(tree, target)), ""
            _Replace(target, changed).visit(tree)
            ast.fix_missing_locations(tree)
            after = f"{_short(target)} -> {_short(changed)}"
            change = f"{after}  in  {before.splitlines()[0]}"
            found.append(Mutant(path, getattr(target, "lineno", 0), change, tree))
    return _numbered(found)


def _numbered(found: list[Mutant]) -> list[Mutant]:
    """The same change may be possible twice in one statement: the later ones are told apart by a number."""
    seen: dict[str, int] = {}
    result = []
    for mutant in found:
        seen[mutant.change] = seen.get(mutant.change, 0) + 1
        suffix = f"  #{seen[mutant.change]}" if seen[mutant.change] > 1 else ""
        result.append(Mutant(mutant.path, mutant.line, mutant.change + suffix, mutant.tree))
    return result


def _short(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]


def _mutable(tree: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: a check, not a result
            return
        found.append(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            if isinstance(node, ast.Assign) and _is_type(node):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child)

    visit(tree)
    return found


def _is_type(node: ast.Assign) -> bool:
    """An alias such as ``Std = Literal["sample", "population"]``."""
    return isinstance(node.value, ast.Subscript) and ast.unparse(node.value.value) == "Literal"


def _statement(tree: ast.AST, target: ast.AST) -> ast.AST:
    """The innermost statement around a node."""
    best: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and any(child is target for child in ast.walk(node)):
            best = node
    return best


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


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
        signal.alarm(SECONDS_PER_MUTANT)
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


def run(chosen: list[Mutant], report: Callable[..., None] = print) -> list[Mutant]:
    """Try each; returns the survivors that aren't known to be equivalent."""
    survivors, killed, equivalent, begun = [], 0, 0, time.monotonic()
    for mutant in chosen:
        if mutant.name in EQUIVALENT:
            equivalent += 1
        elif survives(mutant):
            survivors.append(mutant)
            report(f"SURVIVED {mutant}", flush=True)
        else:
            killed += 1
    seconds = time.monotonic() - begun
    report(f"{killed} killed, {len(survivors)} survived, {equivalent} equivalent, {seconds:.0f} s")
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only files whose path contains one of these")
    parser.add_argument("--sample", type=int, default=0, help="how many to try; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th mutant from the i-th on, to share the work")
    given = parser.parse_args()

    chosen = [
        mutant
        for path in TESTS
        if not given.words or any(word in path for word in given.words)
        for mutant in mutants(path)
    ]
    if given.sample:
        chosen = random.Random(given.seed).sample(chosen, min(given.sample, len(chosen)))
    index, parts = map(int, given.part.split("/"))
    chosen = chosen[index::parts]
    if given.list:
        print(*chosen, sep="\n")
        return 0

    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    _warm_up()
    for path in dict.fromkeys(mutant.path for mutant in chosen) if not given.sample else ():
        if not survives(Mutant(path, 0, "unchanged", ast.parse((ROOT / path).read_text()))):
            print(f"the tests of {path} fail without any change")
            return 2
    return 1 if run(chosen) else 0


def _warm_up() -> None:
    """Import here what every fork would import, but none of the files that are changed."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest  # noqa: F401
    import torch
    import torch.testing

    import whet.batch
    import whet.config
    import whet.types  # noqa: F401

    torch.set_num_threads(1)
    leaf = torch.zeros(2, requires_grad=True)
    leaf.exp().sum().backward()
    torch.testing.assert_close(leaf.grad, torch.ones(2))
    gc.collect()
    gc.freeze()  # so that a fork's collections neither walk nor copy what the parent imported
    changed = [name for name in sys.modules if name.startswith(("whet.losses", "whet.algorithms"))]
    assert not changed, f"imported too early to be changed: {changed}"


if __name__ == "__main__":
    sys.exit(main())
