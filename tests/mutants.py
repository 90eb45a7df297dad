"""The mutants of a file: every change of one node of its syntax tree that ``tests/mutate.py`` tries."""

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

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
CHOOSING = {"Algorithm", "OnlineAlgorithm", "TeacherAlgorithm", "ModelConfig"}
"""Classes derived from these compute nothing; runs test what they choose."""
DROPPED_METHODS = {"detach", "clamp", "double", "masked_fill", "abs", "sqrt", "square", "cumsum"}
DROPPED_FUNCTIONS = {"at_trained": 1, "bounded_exp": 0, "relu": 0, "log1mexp": 0, "reversed": 0}


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    change: str  # "before -> after", in source
    place: tuple[int, int] | None  # the index of the node, and of its replacement; None: nothing is changed

    @property
    def name(self) -> str:
        return f"{self.path}: {self.change}"

    @property
    def tree(self) -> ast.Module:
        """The syntax tree of the whole file with the change."""
        tree = ast.parse((ROOT / self.path).read_text())
        if self.place:
            index, number = self.place
            target, _ = _mutable(tree)[index]
            _Replace(target, list(variants(target))[number]).visit(tree)
            ast.fix_missing_locations(tree)
        return tree

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.change}"


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the replacements of a node."""
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
    found = []
    seen = Counter[str]()
    first_line = cache(_short)
    for index, (node, statement) in enumerate(_mutable(ast.parse((ROOT / path).read_text()))):
        for number, changed in enumerate(variants(node)):
            change = f"{_short(node)} -> {_short(changed)}  in  {first_line(statement)}"
            seen[change] += 1  # the same change may be possible twice in one statement: a number marks the later ones
            again = f"  #{seen[change]}" if seen[change] > 1 else ""
            found.append(Mutant(path, getattr(node, "lineno", 0), change + again, (index, number)))
    return found


def _short(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]


def _mutable(tree: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """The nodes that may change, each with the innermost statement around it."""
    found: list[tuple[ast.AST, ast.AST]] = []

    def visit(node: ast.AST, statement: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.ClassDef) and CHOOSING & {ast.unparse(base) for base in node.bases}:
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: a check, not a result
            return
        found.append((node, statement))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            if isinstance(node, ast.Assign) and _is_type(node):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, statement)

    visit(tree, tree)
    return found


def _is_type(node: ast.Assign) -> bool:
    """An alias such as ``Std = Literal["sample", "population"]``."""
    return isinstance(node.value, ast.Subscript) and ast.unparse(node.value.value) == "Literal"


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)
