r"""Formulas compared by math-verify (github.com/huggingface/Math-Verify), in a worker process, as LaTeX only.

What math-verify would compute is no answer yet: sums, integrals, binomials, arithmetic of plain numbers and the like
are refused unless the known answer has them too. Where the question asks for a form, or states the answer in another
one ("Factor x^2 - 1"), the form counts.
"""

import re
from functools import lru_cache
from itertools import accumulate
from typing import Any

from whet.base.extras import extra
from whet.tasks.math.answers import How, same
from whet.tasks.math.notation import same_text, squeezed, tidy
from whet.tasks.math.written_numbers import Number, read_number

_COMMANDS = (
    "sum|prod|int|iint|iiint|oint|lim|limsup|liminf|binom|choose|det|gcd|lcm|max|min|sup|inf|bmod|pmod|mod|lfloor|rfloor"
    "|lceil|rceil|arg|Re|Im|begin|partial|nabla|sinh|cosh|tanh|star|circ"
)
_FUNCTIONS = "sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|log|ln|lg|exp"
_COMMAND = re.compile(rf"\\(?:({_FUNCTIONS})|({_COMMANDS}))(?![A-Za-z])")
_OPERATOR = re.compile(r"\\text\s*\{([^{}]*)|(!|\*\*|\|)")
_LETTER = re.compile(r"\\text\{([A-Za-z])\}")
_POWER = re.compile(r"\^\s*(?:\{\s*[+-]?\s*([0-9]+)|([0-9]))")
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\^|\w\s*\^)")
_FORM = re.compile(
    r"\b(?:simpl|lowest terms|factor(?:ed|ing|ise|ize)?\b|expand|rationali[sz]|partial fraction)", re.IGNORECASE
)
_QUOTIENT = re.compile(r"\\frac\{?((?<=\{)[0-9]+|[0-9])\}?\{?((?<=\{)[0-9]+|[0-9])\}?")
_FORMULA = re.compile(r"\$\$?([^$]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_POINTS = (0.6180339887, 2.2360679775, 5.0990195136)
_MOST_FORMULAS = 8  # of a question that are compared


class Unreadable(ValueError):
    """A known answer that means nothing to math-verify."""


def judge(given: str, known: str, question: str) -> bool:
    """Return whether an answer is the known one. Raises ``Unreadable`` for a known answer that can't be compared."""
    if not same(given, known, formula):
        return False
    return not restates(given, known, question)


def formula(given: str, known: str, how: How) -> bool:
    """Return whether two formulas are equal, in the way that ``how`` says."""
    given, known = (_LETTER.sub(r"\1", text) for text in (given, known))
    finished = how == "finished"
    if (finished and _commands(given) - _commands(known)) or _too_hard(given, known):
        return False
    wanted = parsed(known)
    if wanted is None:
        raise Unreadable(known)
    found = parsed(given)
    if found is None or isinstance(found, str) or isinstance(wanted, str):
        return found == wanted
    try:
        if finished and _left_to_do(found) - _left_to_do(wanted):
            return False
        exact = _values(found, wanted)
        if how == "rounded":
            number = read_number(given)
            return bool(exact and number and abs(exact[0] - exact[1]) * 2 * 10**number.decimals <= 1)
        if exact is not None:
            return _close(*exact, read_number(given))
        if (verdict := _equal_at_points(found, wanted)) is not None:
            return verdict
    except (ArithmeticError, AttributeError, TypeError, ValueError):  # an odd formula, such as one of sets and sums
        return False
    if how != "finished":
        return False  # two sides of an equation are terms
    with extra("tasks", "grading a formula"):
        from math_verify import verify

    return bool(verify(wanted, found, timeout_seconds=None, allow_set_relation_comp=True))


@lru_cache(maxsize=64)
def parsed(text: str) -> Any:
    """Return what math-verify reads, a sympy object that nothing has been computed in; None where it reads nothing."""
    with extra("tasks", "grading a formula"):
        from math_verify import LatexExtractionConfig, parse

    text = re.sub(r"(?<=[0-9})])\s*i(?![A-Za-z])", " i", text)
    found = parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)
    return found[0] if found else None


def _commands(text: str) -> set[str]:
    """The names of what computes something; functions such as sine and logarithm count as one."""
    named = {"function" if match[1] else match[2] for match in _COMMAND.finditer(text)}
    return named | {match[1] or match[2] for match in _OPERATOR.finditer(text)}


def _too_hard(given: str, known: str) -> bool:
    """Whether only a computation without bounds could tell: towers of powers, huge exponents, deep nesting."""
    if len(given) > 4 * len(known) + 300 or _depth(given) > max(8, _depth(known)):
        return True
    if _TOWER.search(given) and not _TOWER.search(known):
        return True
    powers = [[int((match[1] or match[2])[:6]) for match in _POWER.finditer(text)] for text in (given, known)]
    at_once = [int((power or bare)[:6]) for power, bare in re.findall(r"[)}]" + _POWER.pattern, given)]
    product = 1
    for power in at_once:
        product *= max(1, min(power, 10**6))
    most = max([99, *powers[1]])
    return max(powers[0], default=0) > most or product > max(200, most**2) or bool(re.search("[0-9]{80}", given))


def _depth(text: str) -> int:
    return max(accumulate((character in "{(") - (character in "})") for character in text), default=0)


def _left_to_do(expression: Any) -> set[str]:
    """What a formula leaves to compute: sums, products and powers of plain numbers, and where it has no variable
    products of sums."""
    import sympy

    found = set[str]()
    for node in sympy.preorder_traversal(expression):
        if isinstance(node, sympy.Add) and sum(_plain(part) for part in node.args) > 1:
            found.add("sum")
        elif isinstance(node, sympy.Mul):
            numbers = [part for part in node.args if part.is_Rational and part != -1 and part != 1]
            under = [part for part in node.args if part.is_Pow and part.args[0].is_Rational and part.args[1] == -1]
            whole = sum(part.is_Integer for part in numbers)
            if whole > 1 or len(numbers) - whole + len(under) > 1:
                found.add("product")
            if not _variables(node) and sum(_is_sum(part) for part in node.args) > 1:
                found.add("product of sums")
        elif isinstance(node, sympy.Pow) and node.args[1].is_Integer and node.args[1] > 1:
            if node.args[0].is_Rational:
                found.add("power")
            elif not _variables(node) and isinstance(node.args[0], sympy.Add):
                found.add("product of sums")
    return found


def _plain(expression: Any) -> bool:
    """Whether a term is made of integers, by products and quotients alone."""
    import sympy

    return all(
        node.is_Rational or isinstance(node, sympy.Mul) or (isinstance(node, sympy.Pow) and node.args[1].is_Integer)
        for node in sympy.preorder_traversal(expression)
    )


def _is_sum(expression: Any) -> bool:
    import sympy

    base = expression.args[0] if isinstance(expression, sympy.Pow) and expression.args[1] != -1 else expression
    return isinstance(base, sympy.Add)


def _variables(expression: Any) -> bool:
    return any(symbol.name != "i" for symbol in expression.free_symbols)


def _values(found: Any, wanted: Any) -> tuple[Any, Any] | None:
    """The values of two formulas without variables; None for others."""
    import sympy

    values = []
    for expression in (found, wanted):
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


def _equal_at_points(found: Any, wanted: Any) -> bool | None:
    """Whether two formulas with variables have the same value at each of a few points: what doesn't is not equal, and
    no simplification is needed to see it. None where they have no values there."""
    import sympy

    if not all(isinstance(each, sympy.Expr) and not isinstance(each, sympy.MatrixBase) for each in (found, wanted)):
        return None
    names = sorted({symbol.name for symbol in found.free_symbols | wanted.free_symbols})
    for point in _POINTS:
        values = []
        for expression in (found, wanted):
            at = {symbol: point + names.index(symbol.name) / sympy.Integer(7) for symbol in expression.free_symbols}
            values.append(expression.subs(at | {symbol: sympy.I for symbol in at if symbol.name == "i"}).evalf(30))
        if not all(value.is_number and value.is_finite for value in values):
            return None
        error, size = abs(values[0] - values[1]), max(map(abs, values))
        if size and error / size > sympy.Float("1e-15"):
            return False
    return True


def _close(value: Any, wanted: Any, written: Number | None) -> bool:
    """Equal, or a decimal of at least six places and digits, cut or rounded."""
    import sympy

    error, size = abs(value - wanted), max(abs(value), abs(wanted))
    if not size or error / size < sympy.Float("1e-25"):
        return True
    decimal = written is not None and written.form == "decimal" and written.decimals >= 6
    return bool(decimal and written and size * 10**written.decimals >= 10**5 and error * 10**written.decimals < 1)


def restates(given: str, known: str, question: str) -> bool:
    """Return whether a right answer is the question again in its own form, or lacks the form that is asked for."""
    given, known = tidy(given), tidy(known)
    if not question or same_text(given, known):
        return False
    formulas = _formulas(question)
    if _stated(given, formulas, squeezed(tidy(question))):
        return not _same_form(given, known)
    if _FORM.search(question) or any(_equals(part, known) for part in formulas):
        return not _same_form(given, known, stated=False)
    return False


def _stated(given: str, formulas: list[str], asked: str) -> bool:
    """Whether a question has a formula, or a number that starts and ends where the given one does."""
    parts = {squeezed(given), _QUOTIENT.sub(r"\1/\2", squeezed(given))}
    if parts & {_QUOTIENT.sub(r"\1/\2", squeezed(formula)) for formula in formulas}:
        return True
    numbers = [re.escape(part) for part in parts if not part[:1].isalpha()]
    return any(re.search(rf"(?<![0-9.,/]){part}(?![0-9/]|[.,][0-9])", asked) for part in numbers)


def _formulas(question: str) -> list[str]:
    found = [tidy(next(part for part in match.groups() if part)) for match in _FORMULA.finditer(question)]
    parts = [side.strip() for formula in found for side in re.split(r"(?<![<>])=", formula)]
    return [part for part in parts if len(part) > 2][:_MOST_FORMULAS]


def _equals(part: str, known: str) -> bool:
    try:
        return not read_number(known) and same(part, known, _value)
    except Unreadable:
        return False


def _value(given: str, known: str, how: How) -> bool:
    return formula(given, known, "value")


def _same_form(given: str, known: str, stated: bool = True) -> bool:
    """Whether two equal answers are written alike. ``stated``: so much that one isn't the other after a computation."""
    one, other = read_number(given), read_number(known)
    if one and other:
        if not stated:
            return one.reduced or not other.reduced
        return (one.form, one.reduced, one.percent) == (other.form, other.reduced, other.percent)
    import sympy

    found, wanted = parsed(given.rpartition("=")[2]), parsed(known.rpartition("=")[2])
    if not isinstance(found, sympy.Expr) or not isinstance(wanted, sympy.Expr):
        return True
    if stated and found.count_ops() != wanted.count_ops():
        return False
    return _shape(found) == _shape(wanted)


def _shape(expression: Any) -> tuple[int, int, bool, bool]:
    """How many factors that are no numbers stand above and below the line, whether a root under it, and whether a root
    can be simplified."""
    import sympy

    above = below = 0
    for factor in sympy.Mul.make_args(expression):
        base, power = factor.as_base_exp()
        if not base.is_Rational and power.is_Integer:
            above, below = above + max(0, int(power)), below + max(0, -int(power))
    powers = [node for node in sympy.preorder_traversal(expression) if isinstance(node, sympy.Pow)]
    roots = [node for node in powers if not node.args[1].is_Integer]
    under = [node.args[0] for node in powers if node.args[1].is_negative]
    return (
        above,
        below,
        any(node in roots for base in under for node in sympy.preorder_traversal(base)),
        any(root.args[0].is_Rational and root.doit() != root for root in roots),
    )
