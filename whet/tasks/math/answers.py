r"""Whether a mathematical answer is the known one: both are cut into what they list, and each part is compared as what
it is: a written number, words, or a formula.

A part earns what it says, not what it could be computed to: beside a number, only a finished number is right.
Formulas are left to the ``formula`` that is given here.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal

from whet.tasks.math.notation import same_text, split, squeezed, tidy, whole, words
from whet.tasks.math.written_numbers import equal, read_number, split_unit, unit_ratio

How = Literal["finished", "value", "rounded"]  # leaves nothing to compute; has the value; is it, rounded
Formula = Callable[[str, str, How], bool]  # given, known

_LIST = re.compile(r",|;|\\text\{\s*,?\s*(?:or|and)\s*\}|\\(?:lor|vee|land|wedge)(?![A-Za-z])|\b(?:or|and)\b")
_EQUALS = re.compile(r"=|\\(?:equiv|in)(?![A-Za-z])")
_ABOUT = re.compile(r"\\approx(?![A-Za-z])")
_UNION = re.compile(r"\\cup(?![A-Za-z])")
_MATRIX = re.compile(r"\\begin\{matrix\}(.*)\\end\{matrix\}")
_SET, _TUPLE = re.compile(r"\\\{(.*)\\\}"), re.compile(r"([(\[])(.*)([)\]])")
_NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|text|vec|hat)\s*)?\{?\s*(?:[A-Za-z]+'*|\\[a-zA-Z]+)\s*\}?(?:_\s*\{?\w+\}?)?"
    r"(?:\s*\([^()]*\))?"
)
_WORD, _COMMAND = re.compile(r"[A-Za-z]{3,}"), re.compile(r"\\[A-Za-z]+(?:\{[a-z]*matrix\})?")
_JOINED = re.compile(r"\b(?:and|or)\b")
_MOST_WORDS = 8  # of a known answer that is words
_LESS = re.compile(r"\\(?:le|ge)(?![A-Za-z])|[<>]")
_STRUCTURE = re.compile(r"\\(?:pi|infty|frac|cdot|times|div|sqrt|text\{[^{}]*\})(?![A-Za-z])")
_MULTIPLE = re.compile(r"[+-]?\s*[0-9.]*\s*(?:[a-zA-Z]|\\[a-zA-Z]+)\s*(?:\^.*)?")  # "2x" is 16: not x
_MOST = 40  # parts of a list that are compared


def is_prose(known: str) -> bool:
    """Return whether a known answer is told rather than written: formulas between words, or many words.

    >>> is_prose("max at $x = 1$ and min at $x = 2$"), is_prose("7\\\\text{ distinct integers}")
    (True, False)
    """
    outside = re.split(r"(?<!\\)\$[^$]*\$", known)
    if len(outside) > 2 and any(_WORD.search(_JOINED.sub("", part)) for part in outside):
        return True
    bare = re.sub(r"\\(?:text|mbox|mathrm|textbf)\s*\{([^{}]*)\}", r" \1 ", known)
    said = [word for word in _WORD.findall(_COMMAND.sub(" ", bare)) if word not in ("and", "or")]
    formula = bool(re.search(r"[0-9=^_$]", known))
    return "\n\n" in known.strip() or len(said) > (_MOST_WORDS // 2 if formula else _MOST_WORDS)


def same(given: str, known: str, formula: Formula) -> bool:
    """Return whether two answers say the same."""
    given, known = tidy(given), tidy(known)
    if same_text(given, known):
        return True
    if re.search(r"\\[pm]{2}(?![A-Za-z])", given + known):
        given, known = _both_signs(given), _both_signs(known)
    if (number := read_number(known)) and (other := read_number(given)):
        return equal(other, number)
    several, wanted = _listed(given), _listed(known)
    if len(wanted) > 1 or len(several) > 1:
        return _unordered(several, wanted, formula)
    given, known = several[0], wanted[0]
    values = [part.strip() for part in split(known, _ABOUT) if part.strip()]
    if len(values) > 1:  # "2/3, about 0.67"
        return any(_one(given, part, formula) for part in (known, *values))
    return _one(given, known, formula)


def _one(given: str, known: str, formula: Formula) -> bool:
    """``same`` for what lists nothing."""
    if same_text(given, known):
        return True
    (name, value), (known_name, known_value) = _labelled(given), _labelled(known)
    if name and known_name and name != known_name:
        return False
    equation = len(split(known, _EQUALS)) > 1
    if equation and (known_name is None or (name is None and "=" in given)):
        return not _ABOUT.search(given) and formula(given, known, "finished")
    known = known_value
    if name is None and (verdict := _chain(given, known, formula)) is not None:
        return verdict
    if name is not None and len(about := split(value, _ABOUT)) > 1:
        return _rounding([part.strip() for part in about if part.strip()], known, formula)
    given = value
    if number := read_number(known):
        other = read_number(given)
        return other is not None and equal(other, number)
    for cut in (_matrix, _tuple, _union):
        if (verdict := cut(given, known, formula)) is not None:
            return verdict
    if (text := words(known)) is not None and ("\\text" in known or len(text) > 2):
        return words(given) == text
    (bare, unit), (known_bare, known_unit) = split_unit(given), split_unit(known)
    if unit or known_unit:
        return unit_ratio(unit, known_unit) == 1 and _one(bare, known_bare, formula)
    return formula(given, known, "finished")


def _chain(given: str, known: str, formula: Formula) -> bool | None:
    r"""The verdict on a chain such as ``40 - 86 = -46`` or ``2/3 \approx 0.67``, whose last part answers and whose
    other parts must not say otherwise; None for what is none."""
    about = [part.strip() for part in split(given, _ABOUT) if part.strip()]
    if about and about[0] != given:
        return _rounding(about, known, formula)
    *sides, last = (side.strip() for side in split(given, _EQUALS))
    if not sides:
        return None
    return _one(last, known, formula) and all(_agrees(side, last, formula) for side in sides)


def _agrees(side: str, last: str, formula: Formula) -> bool:
    """Whether one side of an equation is the last one, so far as it is made of numbers alone."""
    if re.search(r"[A-Za-z]", _STRUCTURE.sub("", side)):
        return not _MULTIPLE.fullmatch(side)
    before, after = read_number(side), read_number(last)
    return equal(before, after) if before and after else formula(side, last, "value")


def _rounding(about: list[str], known: str, formula: Formula) -> bool:
    exact, *rounded = about
    named, value = _labelled(exact)
    number = read_number(value)
    if not rounded or _NAME.fullmatch(exact):
        return _one(about[-1], known, formula)
    if number is None:  # a root, or such
        return all(formula(part, value, "rounded") for part in rounded) and (
            _one(exact, known, formula) or any(_one(part, known, formula) for part in rounded)
        )
    others = [read_number(part) for part in rounded]
    if not all(other and abs(number.value - other.value) * 10**other.decimals * 2 <= 1 for other in others):
        return False
    return any(_one(part, known, formula) for part in (exact if named else value, *rounded))


def _labelled(text: str) -> tuple[str | None, str]:
    r"""The name and value of ``x = 5`` and ``x \in [0, 1]``; without a name the text itself."""
    sides = split(text, _EQUALS)
    if len(sides) == 2 and _NAME.fullmatch(sides[0].strip()):
        return squeezed(sides[0]), sides[1].strip()
    return None, text


def _listed(text: str) -> list[str]:
    """The answers that a text lists, as a set or not; of words only letters such as "A, B"."""
    _, value = _labelled(text)
    if (inner := _SET.fullmatch(value)) and whole(value):
        text = inner[1]
    if (said := words(text)) is not None:
        if any(len(word) > 1 for word in re.findall(r"\w+", said) if word not in ("and", "or")):
            return [text]
        text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return [part for each in split(text, _LIST) if (part := each.strip())] or [text]


def _both_signs(text: str) -> str:
    parts = []
    for part in _listed(text):
        plus = part.replace("\\pm", "+").replace("\\mp", "-")
        minus = part.replace("\\pm", "-").replace("\\mp", "+")
        parts += [re.sub(r"(^|=)\s*\+\s*", r"\1", plus), minus] if plus != minus else [part]
    return ", ".join(parts)


def _unordered(given: Sequence[str], known: Sequence[str], formula: Formula) -> bool:
    if len(given) != len(known) or len(known) > _MOST:
        return False
    left = list(given)
    for part in known:
        found = next((other for other in left if same(other, part, formula)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _matrix(given: str, known: str, formula: Formula) -> bool | None:
    wanted, found = _MATRIX.fullmatch(known), _MATRIX.fullmatch(given)
    if not wanted or not found:
        return False if wanted else None
    rows, other = _cells(found[1]), _cells(wanted[1])
    if [len(row) for row in rows] != [len(row) for row in other]:
        return False
    return all(_one(a, b, formula) for pair in zip(rows, other, strict=True) for a, b in zip(*pair, strict=True))


def _cells(matrix: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.split("&")] for row in re.split(r"\\\\", matrix) if row.strip()]


def _tuple(given: str, known: str, formula: Formula) -> bool | None:
    """The verdict on points and intervals."""
    wanted, found = _TUPLE.fullmatch(known), _TUPLE.fullmatch(given)
    if not wanted or not whole(known) or len(parts := split(wanted[2], _LIST)) < 2:
        return None
    if not found or not whole(given):
        return _is_range(given) and formula(given, known, "finished")
    others = split(found[2], _LIST)
    if len(others) != len(parts) or (found[1], found[3]) != (wanted[1], wanted[3]):
        return False
    return all(_one(a.strip(), b.strip(), formula) for a, b in zip(others, parts, strict=True))


def _is_range(text: str) -> bool:
    r"""Whether a text is ``1 \le x < 2``: one name, and bounds without any."""
    sides = [side.strip() for side in _LESS.split(text)]
    bounds = [side for side in sides if re.search("[A-Za-z]", _STRUCTURE.sub("", side))]
    return len(sides) > 1 and len(bounds) == 1 and bool(_NAME.fullmatch(bounds[0]))


def _union(given: str, known: str, formula: Formula) -> bool | None:
    several, wanted = split(given, _UNION), split(known, _UNION)
    if len(wanted) < 2 or len(several) != len(wanted):
        return None
    return _unordered([part.strip() for part in several], [part.strip() for part in wanted], formula)
