r"""Formulas compared by math-verify (github.com/huggingface/Math-Verify), in a worker process, as LaTeX only.

An expression that still has to be computed is not an answer: sums, integrals, binomials, arithmetic of plain numbers
and the like are wrong unless the gold answer has them too.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from typing import Any

from whet.base.extras import extra
from whet.tasks.math.answers import How
from whet.tasks.math.written_numbers import Number, read_number

_COMMANDS = (
    "sum|prod|int|iint|iiint|oint|lim|limsup|liminf|binom|choose|det|gcd|lcm|max|min|sup|inf|bmod|pmod|mod|lfloor|rfloor"
    "|lceil|rceil|arg|Re|Im|begin|partial|nabla|sinh|cosh|tanh|star|circ"
)
_FUNCTIONS = "sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|log|ln|lg"
_COMMAND = re.compile(rf"\\(?:({_FUNCTIONS})|({_COMMANDS}))(?![A-Za-z])")
_OPERATOR = re.compile(r"\\text\s*\{([^{}]*)|(!|\*\*|\||%)")
_LETTER = re.compile(r"\\text\{([A-Za-z])\}")
_POWER = re.compile(r"\^\s*(?:\{\s*[+-]?\s*([0-9]+)|([0-9]))")
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\^|\w\s*\^)")
_INDEX = re.compile(r"[0-9)}]\s*_")
_POINTS = (0.6180339887, 2.2360679775, 5.0990195136)


class Unreadable(ValueError):
    """A gold answer that math-verify can't read."""


def formula(given: str, gold: str, how: How) -> bool:
    """Return whether two formulas are equal in the sense of ``how``."""
    given, gold = (_LETTER.sub(r"\1", text) for text in (given, gold))
    finished = how == "finished"
    if (finished and (_commands(given) - _commands(gold) or _relations(given) - _relations(gold))) or _too_hard(
        given, gold
    ):
        return False
    if _INDEX.search(given) and not _INDEX.search(gold):  # math-verify drops the base of a number
        return False
    gold_term = parsed(gold)
    if gold_term is None:
        raise Unreadable(gold)
    term = parsed(given)
    if term is None or isinstance(term, str) or isinstance(gold_term, str):
        return term == gold_term
    try:
        if finished and _open_operations(term) - _open_operations(gold_term):
            return False
        exact = _values(term, gold_term)
        if how == "rounded":
            number = read_number(given)
            return bool(exact and number and abs(exact[0] - exact[1]) * 2 * 10**number.decimals <= 1)
        if exact is not None:
            return _close(*exact, read_number(given))
        if (verdict := _equal_at_points(term, gold_term)) is not None:
            return verdict
    except (
        ArithmeticError,
        AttributeError,
        RecursionError,
        TypeError,
        ValueError,
    ):  # an unusual formula, such as a sum of sets
        return False
    if how != "finished":
        return False  # sides of an equation are terms, which were compared above
    with extra("tasks", "grading a formula"):
        from math_verify import verify

    return bool(verify(gold_term, term, timeout_seconds=None, allow_set_relation_comp=True))


@lru_cache(maxsize=64)
def parsed(text: str) -> object:
    """Return the unevaluated sympy object that math-verify parses from the text; None where it can't parse it."""
    with extra("tasks", "grading a formula"):
        from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
        from math_verify import LatexExtractionConfig, parse

    # its units would turn the variable of "2t" into tonnes, and drop it; ours were taken off before
    reading = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    text = re.sub(r"(?<=[0-9})])\s*i(?![A-Za-z])", " i", text)
    parses = parse(
        f"\\boxed{{{text}}}",
        [LatexExtractionConfig(boxed_match_priority=0, normalization_config=reading)],
        parsing_timeout=None,
    )
    return parses[0] if parses else None


def _commands(text: str) -> set[str]:
    """Return the names of the operations in a text. Functions such as sine and logarithm share one name."""
    named = {"function" if match[1] else match[2] for match in _COMMAND.finditer(text)}
    return named | {match[1] or match[2] for match in _OPERATOR.finditer(text)}


def _relations(text: str) -> set[str]:
    """Return the relations in a text that make it a statement about a value, as in "2(x = 3)"."""
    return set(re.findall(r"=|\\approx(?![A-Za-z])", text))


def _too_hard(given: str, gold: str) -> bool:
    """Return whether comparing could take unbounded time: towers of powers, huge exponents, deep nesting."""
    if len(given) > 4 * len(gold) + 300 or _depth(given) > max(8, _depth(gold)):
        return True
    if _TOWER.search(given) and not _TOWER.search(gold):
        return True
    powers = [[int((match[1] or match[2])[:6]) for match in _POWER.finditer(text)] for text in (given, gold)]
    at_once = [int((power or bare)[:6]) for power, bare in re.findall(r"[)}]" + _POWER.pattern, given)]
    product = 1
    for power in at_once:
        product *= max(1, min(power, 10**6))
    most = max([99, *powers[1]])
    return max(powers[0], default=0) > most or product > max(200, most**2) or bool(re.search("[0-9]{80}", given))


def _depth(text: str) -> int:
    return max(accumulate((character in "{(") - (character in "})") for character in text), default=0)


def _open_operations(expression: object) -> set[str]:
    """Return the kinds of operations that a formula leaves to compute: sums, products and powers of plain numbers, sums
    of like terms, products of powers of one base, derivatives and, in a formula without variables, products of sums."""
    import sympy

    kinds = set[str]()
    for node in sympy.preorder_traversal(expression):
        if isinstance(node, sympy.Add) and sum(_plain(part) for part in node.args) > 1:
            kinds.add("sum")
        elif isinstance(node, sympy.Derivative):
            kinds.add("derivative")
        if isinstance(node, sympy.Add) and _repeats(sympy.Mul(*_factors(part)) for part in node.args):
            kinds.add("like terms")
        elif isinstance(node, sympy.Mul):
            powers = [part.as_base_exp() for part in node.args]
            open_powers = (  # not the denominator of a root: "\\sqrt{3}/3"
                base
                for base, power in powers
                if power.is_Rational and (base.is_Symbol or not (power == 1 or (base.is_Rational and power == -1)))
            )
            if _repeats(open_powers):
                kinds.add("powers")
            numbers = [part for part in node.args if part.is_Rational and part != -1 and part != 1]
            under = [part for part in node.args if part.is_Pow and part.args[0].is_Rational and part.args[1] == -1]
            whole = sum(part.is_Integer for part in numbers)
            if whole > 1 or len(numbers) - whole + len(under) > 1:
                kinds.add("product")
            if not _variables(node) and sum(_is_sum(part) for part in node.args) > 1:
                kinds.add("product of sums")
        elif isinstance(node, sympy.Pow) and node.args[1].is_Integer and node.args[1] > 1:
            if node.args[0].is_Rational:
                kinds.add("power")
            elif not _variables(node) and isinstance(node.args[0], sympy.Add):
                kinds.add("product of sums")
    return kinds


def _factors(term: Any) -> list[Any]:
    """Return the factors of a term that are not rational numbers."""
    import sympy

    return [factor for factor in sympy.Mul.make_args(term) if not _plain(factor)]


def _repeats(parts: Iterable[object]) -> bool:
    """Return whether two parts are equal, other than numbers."""
    listed = [part for part in parts if part != 1]
    return len(set(listed)) < len(listed)


def _plain(expression: Any) -> bool:
    """Return whether a term consists of rational numbers, products, quotients and whole powers alone."""
    import sympy

    return all(
        node.is_Rational or isinstance(node, sympy.Mul) or (isinstance(node, sympy.Pow) and node.args[1].is_Integer)
        for node in sympy.preorder_traversal(expression)
    )


def _is_sum(expression: object) -> bool:
    import sympy

    base = expression.args[0] if isinstance(expression, sympy.Pow) and expression.args[1] != -1 else expression
    return isinstance(base, sympy.Add)


def _variables(expression: Any) -> bool:
    return any(symbol.name != "i" for symbol in expression.free_symbols)


def _values(term: object, gold_term: Any) -> tuple[Any, Any] | None:
    """Return the values of two formulas without variables; None for formulas with variables or without values."""
    import sympy

    values = []
    for expression in (term, gold_term):
        if not isinstance(expression, sympy.Expr) or isinstance(expression, sympy.MatrixBase) or _variables(expression):
            return None
        value = expression.subs(dict.fromkeys(expression.free_symbols, sympy.I)).evalf(40)
        if (
            not value.is_number
            or not value.is_finite
            or not all(part.is_Float or part.is_Rational for part in value.as_real_imag())
        ):
            return None
        values.append(value)
    return values[0], values[1]


def _equal_at_points(term: Any, gold_term: Any) -> bool | None:
    """Return whether two formulas with variables have the same values at a few points, which takes no simplification.
    None where they have no values there."""
    import sympy

    if not all(
        isinstance(each, sympy.Expr) and not isinstance(each, sympy.MatrixBase | sympy.MatrixExpr)
        for each in (term, gold_term)
    ):
        return None
    names = sorted({symbol.name for symbol in term.free_symbols | gold_term.free_symbols})
    absolute = gold_term.has(sympy.Abs) or term.has(sympy.Abs)
    for point in (*_POINTS, -_POINTS[0]) if absolute else _POINTS:
        values = []
        for expression in (term, gold_term):
            begin = sympy.Float(point, 40)  # a float of Python has too few digits where terms cancel
            at = {symbol: begin + names.index(symbol.name) / sympy.Integer(7) for symbol in expression.free_symbols}
            values.append(expression.subs(at | {symbol: sympy.I for symbol in at if symbol.name == "i"}).evalf(30))
        if not all(value.is_number and value.is_finite for value in values):
            return None
        error, size = abs(values[0] - values[1]), max(map(abs, values))
        if size and error / size > sympy.Float("1e-15"):
            return False
    return True


def _close(value: Any, gold_value: Any, written: Number | None) -> bool:
    """Return whether two values are equal, or one is a decimal of at least six places and digits, cut or rounded."""
    import sympy

    error, size = abs(value - gold_value), max(abs(value), abs(gold_value))
    if not size or error / size < sympy.Float("1e-25"):
        return True
    decimal = written is not None and written.form == "decimal" and written.decimals >= 6
    return bool(decimal and written and size * 10**written.decimals >= 10**5 and error * 10**written.decimals < 1)
