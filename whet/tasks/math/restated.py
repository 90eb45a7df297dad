"""Right answers that earn nothing, because they only repeat the question: its own formula, quantity or equation where
another form of it was asked for ("Factor x^2 - 1", "How many minutes are 2 hours?")."""

import re
from math import gcd
from typing import Any

from whet.tasks.math.answers import How, labelled, same
from whet.tasks.math.formulas import Unreadable, formula, parsed
from whet.tasks.math.notation import same_text, squeezed, tidy
from whet.tasks.math.written_numbers import as_number, read_number, unit_ratio

_FORM = re.compile(
    r"\b(?:simpl|lowest terms|factor(?:ed|ing|ise|ize)?\b|expand|rationali[sz]|partial fraction)", re.IGNORECASE
)
_QUOTIENT = re.compile(r"\\frac\{?((?<=\{)[0-9]+|[0-9])\}?\{?((?<=\{)[0-9]+|[0-9])\}?")
_FORMULA = re.compile(r"\$\$?([^$]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_SOLVE = re.compile(r"\b(?:solve for|slope-intercept|in the form|in terms of)\b", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]+(?:[.,][0-9]+)*(?:/[0-9]+)?")
_RATIO = re.compile("[0-9]+(?::[0-9]+)+")
_MOST_FORMULAS = 8  # of a question, compared with the answer


def judge(given: str, gold: str, question: str) -> bool:
    """Return whether an answer is right. Raises ``Unreadable`` for a gold answer that can't be compared."""
    if not same(given, gold, formula):
        return False
    return not restates(given, gold, question)


def restates(given: str, gold: str, question: str) -> bool:
    """Return whether a right answer only repeats a formula of the question, or lacks the form that it asks for."""
    given, gold = tidy(given), tidy(gold)
    if not question or same_text(given, gold):
        return False
    if _converted(given, gold, question) or _solved(given, gold, question) is False or _unsolved(given, gold, question):
        return True
    sides = _sides(question)
    if _stated(given, sides, squeezed(tidy(question))):
        return not _same_form(given, gold)
    if _FORM.search(question) or any(_equals(part, gold) for part in sides):
        return not _same_form(given, gold, stated=False)
    return False


def _stated(given: str, formulas: list[str], asked: str) -> bool:
    """Return whether the answer is one of the question's formulas, or a whole number in its text ``asked``."""
    parts = {squeezed(given), _QUOTIENT.sub(r"\1/\2", squeezed(given))}
    if parts & {_QUOTIENT.sub(r"\1/\2", squeezed(formula)) for formula in formulas}:
        return True
    numbers = [re.escape(part) for part in parts if re.search("[0-9]", part) and not part[:1].isalpha()]
    return any(re.search(rf"(?<![0-9.,/]){part}(?![0-9/]|[.,][0-9])", asked) for part in numbers)


def _converted(given: str, gold: str, question: str) -> bool:
    """Return whether the answer is a quantity of the question in a unit other than the gold answer's."""
    number, gold_number = read_number(given), read_number(gold)
    if not number or not gold_number or unit_ratio(number.unit, gold_number.unit) == 1:
        return False
    return any(number.value == as_number(each) for each in _NUMBER.findall(question))


def _solved(given: str, gold: str, question: str) -> bool | None:
    """Return whether an equation is solved for the same name as the gold answer, if the question asks for that form or
    states the equation; else None."""
    if "=" not in given or (name := labelled(gold)[0]) is None or read_number(labelled(gold)[1]):
        return None
    equations = [formula for formula in _formulas(question) if formula.count("=") == 1][:_MOST_FORMULAS]
    if _SOLVE.search(question) or any(_equal_equations(equation, gold) for equation in equations):
        return labelled(given)[0] == name
    return None


def _unsolved(given: str, gold: str, question: str) -> bool:
    """Return whether the answer is an equation of the question whose solution is the gold answer, a number."""
    if "=" not in given or labelled(given)[0] or not read_number(labelled(gold)[1]):
        return False
    equation = re.escape(squeezed(given))
    return re.search(rf"(?<![0-9.+*/^-]){equation}(?![0-9+*/^-]|\.[0-9])", squeezed(tidy(question))) is not None


def _equal_equations(equation: str, gold: str) -> bool:
    try:
        return formula(equation, gold, "finished")
    except Unreadable:
        return False


def _formulas(question: str) -> list[str]:
    return [tidy(next(part for part in match.groups() if part)) for match in _FORMULA.finditer(question)]


def _sides(question: str) -> list[str]:
    """Return the sides of the formulas of a question, the first ones."""
    parts = [side.strip() for formula in _formulas(question) for side in re.split(r"(?<![<>])=", formula)]
    return [part for part in parts if len(part) > 2][:_MOST_FORMULAS]


def _equals(part: str, gold: str) -> bool:
    try:
        return not read_number(gold) and same(part, gold, _value)
    except Unreadable:
        return False


def _value(given: str, gold: str, how: How) -> bool:
    return formula(given, gold, "value")


def _same_form(given: str, gold: str, stated: bool = True) -> bool:
    """Return whether two equal answers have the same form. ``stated``: the question states the answer, so that also the
    number of operations must be the same."""
    number, gold_number = read_number(given), read_number(gold)
    if number and gold_number:
        if not stated:
            return number.reduced or not gold_number.reduced
        form = (number.form, number.reduced, number.percent)
        return form == (gold_number.form, gold_number.reduced, gold_number.percent)
    ratio, gold_ratio = squeezed(given), squeezed(gold)
    if _RATIO.fullmatch(ratio) and _RATIO.fullmatch(gold_ratio):
        return ratio == gold_ratio or (not stated and gcd(*map(int, ratio.split(":"))) == 1)
    import sympy

    term, gold_term = (parsed(labelled(text)[1].rpartition("=")[2]) for text in (given, gold))
    if not isinstance(term, sympy.Expr) or not isinstance(gold_term, sympy.Expr):
        return True
    if stated and (term.count_ops() != gold_term.count_ops() or type(term) is not type(gold_term)):
        return False
    return _shape(term) == _shape(gold_term)


def _shape(expression: object) -> tuple[int, int, int, bool, bool]:
    """Return the number of factors other than numbers in the numerator and in the denominator, the number of sums with
    variables, whether the denominator has a root, and whether a root can be simplified."""
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
        _sums(expression),
        any(node in roots for base in under for node in sympy.preorder_traversal(base)),
        any(root.args[0].is_Rational and root.doit() != root for root in roots),
    )


def _sums(expression: Any) -> int:
    """Return the number of sums with variables in a formula; a sum to the power n counts n times."""
    import sympy

    if isinstance(expression, sympy.Pow) and expression.args[1].is_Integer:
        return _sums(expression.args[0]) * abs(int(expression.args[1]))
    is_sum = isinstance(expression, sympy.Add) and bool(expression.free_symbols)
    return is_sum + sum(_sums(part) for part in expression.args)
