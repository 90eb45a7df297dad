r"""Comparison of a mathematical answer with the gold answer. Both are cut into the parts that they list, and each part
is compared by its kind: a written number, words, or a formula.

An answer counts for what it states, not for what could be computed from it: if the gold answer is a number, only a
finished number is right. Formulas are compared by the callback ``formula``.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal

from whet.tasks.math.notation import same_text, split, squeezed, tidy, whole, words
from whet.tasks.math.written_numbers import equal, read_number, split_unit, unit_ratio

How = Literal["finished", "value", "rounded"]  # equal and leaves nothing to compute; equal in value; equal if rounded
Formula = Callable[[str, str, How], bool]  # answer, gold answer

_LIST = re.compile(r",|;|\\text\{\s*,?\s*(?:or|and)\s*\}|\\(?:lor|vee|land|wedge)(?![A-Za-z])|\b(?:or|and)\b")
_EQUALS = re.compile(r"=|\\(?:equiv|in)(?![A-Za-z])")
_ABOUT = re.compile(r"\\approx(?![A-Za-z])")
_BOTH = re.compile(r"\band\b|\\(?:land|wedge)(?![A-Za-z])")
_CLOCK = re.compile(r"0?([0-9]{1,2}) ?: ?([0-5][0-9])(?: ?: ?([0-5][0-9]))?")
_UNION = re.compile(r"\\cup(?![A-Za-z])")
_MATRIX = re.compile(r"\\begin\{matrix\}(.*)\\end\{matrix\}")
_SET, _TUPLE = re.compile(r"\\\{(.*)\\\}"), re.compile(r"([(\[])(.*)([)\]])")
_EMPTY = re.compile(r"\s*\\(?:emptyset|varnothing)\s*")  # a set that holds it isn't empty
_NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|text|vec|hat)\s*)?\{?\s*(?:[A-Za-z]+'*|\\[a-zA-Z]+)\s*\}?(?:_\s*\{?\w+\}?)?"
    r"(?:\s*\([^()]*\))?"
)
_WORD, _COMMAND = re.compile(r"[A-Za-z]{3,}"), re.compile(r"\\[A-Za-z]+(?:\{[a-z]*matrix\})?")
_LETTERS = re.compile(r"[^\W\d_]{3,}")  # a word: "p - q" is a formula
_JOINED = re.compile(r"\b(?:and|or)\b")
_MOST_WORDS = 8  # in a gold answer made of words
_LESS = re.compile(r"\\(?:le|ge)(?![A-Za-z])|[<>]")
_STRUCTURE = re.compile(r"\\(?:pi|infty|frac|cdot|times|div|sqrt|text\{[^{}]*\})(?![A-Za-z])")
_LETTER_RUN = re.compile(r"\\?[A-Za-z]+")
_UNKNOWN = re.compile(r"[A-Za-z]|\\(?:alpha|beta|gamma|theta|phi|lambda|omega)")
_MARK = re.compile(  # negations, arrows, and what strikes out or annotates: the answer states more than its value
    r"\\(?:ne|not|notin|to|(?:long)?(?:right|left)arrow|implies|iff|mapsto|[bx]?cancel|sout|h?phantom|stackrel"
    r"|(?:over|under)(?:set|brace)|substack|footnote)(?![A-Za-z])|[→⇒]|\b(?:not|isn't|minus|negative)\b"
)
_CHOICE = re.compile(  # the letter of a choice, and its value
    r"(?:\\(?:text|mathbf|boldsymbol|bm)\{ *\(([A-J])\) *\}|\(([A-J])\) )(.+)"
)
_OR = re.compile(r"\bor\b|\\(?:lor|vee)(?![A-Za-z])|;")
_COORDINATES = ("xy", "xyz", "ab", "abc")
_MOST_PARTS = 40  # longest list that is compared


def is_prose(gold: str) -> bool:
    """Return whether a gold answer is prose: formulas between words, or many words.

    >>> is_prose("max at $x = 1$ and min at $x = 2$"), is_prose("7\\\\text{ distinct integers}")
    (True, False)
    """
    outside = re.split(r"(?<!\\)\$[^$]*\$", gold)
    if len(outside) > 2 and any(_WORD.search(_JOINED.sub("", part)) for part in outside):
        return True
    bare = re.sub(r"\\(?:text|mbox|mathrm|textbf)\s*\{([^{}]*)\}", r" \1 ", gold)
    words_used = [word for word in _WORD.findall(_COMMAND.sub(" ", bare)) if word not in ("and", "or")]
    has_formula = bool(re.search(r"[0-9=^_$]", gold))
    return "\n\n" in gold.strip() or len(words_used) > (_MOST_WORDS // 2 if has_formula else _MOST_WORDS)


def same(given: str, gold: str, formula: Formula) -> bool:
    """Return whether an answer means the same as the gold answer."""
    given, gold = tidy(given), tidy(gold)
    if same_text(given, gold):
        return True
    if (choice := _CHOICE.fullmatch(given)) and not _CHOICE.match(gold):
        letter, value = choice[1] or choice[2], choice[3].strip()
        if _CHOICE.match(value) or len(words(value) or "") == 1:  # another letter
            return False
        return same(value, gold, formula) or (words(gold) == letter.lower() and read_number(value) is not None)
    if set(_MARK.findall(given.casefold())) - set(_MARK.findall(gold.casefold())):
        return False
    if re.search(r"\\[pm]{2}(?![A-Za-z])", given + gold):
        given, gold = _both_signs(given), _both_signs(gold)
    if (number := read_number(gold)) and (other := read_number(given)):
        return equal(other, number)
    parts, gold_parts = _listed(given), _listed(gold)
    if len(gold_parts) == 1 and all(map(_is_range, parts)) and not _BOTH.search(given):  # "x < 1 or x > 2"
        gold_parts = [part.strip() for part in split(gold, _UNION)]
    elif len(parts) == 1 and all(map(_is_range, gold_parts)) and not _BOTH.search(gold):
        parts = [part.strip() for part in split(given, _UNION)]
    if len(gold_parts) > 1 or len(parts) > 1:
        if _names_coordinates(given, parts, gold):
            return True
        return _unordered(parts, gold_parts, formula)
    given, gold = parts[0], gold_parts[0]
    sides = [side.strip() for side in split(gold, _EQUALS)]
    if len(sides) > 1 and all(map(read_number, sides)):  # "0.56 = 56%"
        return any(_same_part(given, side, formula) for side in sides)
    values = [part.strip() for part in split(gold, _ABOUT) if part.strip()]
    if len(values) > 1:  # "2/3, about 0.67"
        return any(_same_part(given, part, formula) for part in (gold, *values))
    gold = values[0] if values else gold
    return _same_part(given, gold, formula)


def _same_part(given: str, gold: str, formula: Formula) -> bool:
    """Return ``same`` of two answers that are not lists."""
    if same_text(given, gold):
        return True
    (name, value), (gold_name, gold_value) = labelled(given), labelled(gold)
    if name and gold_name and name != gold_name:
        return False
    equation = len(split(gold, _EQUALS)) > 1 and not (gold_name and read_number(gold_value))  # "x = 5" is a number
    if equation and (gold_name is None or (name is None and "=" in given)):
        whole_equation = "=" not in given or len(split(given, _EQUALS)) > 1  # not "2(y = 3)"
        return whole_equation and not _ABOUT.search(given) and formula(given, gold, "finished")
    gold = gold_value
    if name is None and (verdict := _chain(given, gold, formula)) is not None:
        return verdict
    if name is not None and len(about := split(value, _ABOUT)) > 1:
        return _rounding([part.strip() for part in about if part.strip()], gold, formula)
    given = value
    if number := read_number(gold):
        other = read_number(given)
        return other is not None and equal(other, number)
    if (_LESS.search(given) or _is_range(gold)) and not (_is_range(given) or _TUPLE.fullmatch(given)):
        return bool(_LESS.search(gold)) and not _is_range(gold) and formula(given, gold, "finished")
    for cut in (_matrix, _tuple, _union):
        if (verdict := cut(given, gold, formula)) is not None:
            return verdict
    if (text := words(gold)) is not None and ("\\text" in gold or _LETTERS.search(text)):
        return words(given) == text
    if (time := _CLOCK.fullmatch(given)) and (gold_time := _CLOCK.fullmatch(gold)):
        return time.groups() == gold_time.groups()
    (bare, unit), (gold_bare, gold_unit) = split_unit(given), split_unit(gold)
    if unit or gold_unit:
        return unit_ratio(unit, gold_unit) == 1 and _same_part(bare, gold_bare, formula)
    return formula(given, gold, "finished")


def _chain(given: str, gold: str, formula: Formula) -> bool | None:
    r"""Return the verdict on a chain such as ``40 - 86 = -46`` or ``2/3 \approx 0.67``: its last part is the answer and
    the other parts must agree with it. None if the answer is not a chain."""
    about = [part.strip() for part in split(given, _ABOUT) if part.strip()]
    if about and about[0] != given:
        return _rounding(about, gold, formula)
    *sides, last = (side.strip() for side in split(given, _EQUALS))
    if not sides:
        return None
    return _same_part(last, gold, formula) and all(_agrees(side, last, formula) for side in sides)


def _agrees(side: str, last: str, formula: Formula) -> bool:
    """Return whether a side of an equation equals the last side. A side with variables is not compared, but it may not
    be a term of one unknown: "2x = 16" and "x - 1 = 5" leave x to compute."""
    if names := set(_LETTER_RUN.findall(_STRUCTURE.sub("", side))):
        name = names.pop()
        indexed = "_" in side or f"{name}(" in side  # terms of a sequence, values of a function
        return bool(names or indexed or not _UNKNOWN.fullmatch(name) or _NAME.fullmatch(side))
    before, after = read_number(side), read_number(last)
    if not before or not after:
        return formula(side, last, "value")
    return equal(before, after) or (before.form == "fraction" and before.value == after.value)  # 10/2 = 5


def _rounding(about: list[str], gold: str, formula: Formula) -> bool:
    r"""Return the verdict on a value and its roundings, the parts of a text between ``\approx``."""
    exact, *rounded = about
    named, value = labelled(exact)
    number = read_number(value)
    if not rounded or _NAME.fullmatch(exact):
        return _same_part(about[-1], gold, formula)
    if number is None:  # a root, or such
        return all(formula(part, value, "rounded") for part in rounded) and (
            _same_part(exact, gold, formula) or any(_same_part(part, gold, formula) for part in rounded)
        )
    others = [read_number(part) for part in rounded]
    if not all(other and abs(number.value - other.value) * 10**other.decimals * 2 <= 1 for other in others):
        return False
    return any(_same_part(part, gold, formula) for part in (exact if named else value, *rounded))


def labelled(text: str) -> tuple[str | None, str]:
    r"""Return the name and the value of ``x = 5``, ``5 = x`` or ``x \in [0, 1]``; without a name, None and the text."""
    sides = [side.strip() for side in split(text, _EQUALS)]
    if len(sides) == 2 and _NAME.fullmatch(sides[0]):
        return squeezed(sides[0]), sides[1]
    if len(sides) == 2 and "=" in text and _NAME.fullmatch(sides[1]):
        return squeezed(sides[1]), sides[0]
    return None, text


def _listed(text: str) -> list[str]:
    """Return the answers that a text lists, with or without the braces of a set. Words are only a list if all of them
    are single letters, such as "A, B"."""
    _, value = labelled(text)
    if (inner := _SET.fullmatch(value)) and whole(value) and not _EMPTY.fullmatch(inner[1]):
        text = inner[1]
    if (plain := words(text)) is not None:
        if any(len(word) > 1 for word in re.findall(r"\w+", plain) if word not in ("and", "or")):
            return [text]
        text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return [part for each in split(text, _LIST) if (part := each.strip().removesuffix("."))] or [text]


def _both_signs(text: str) -> str:
    r"""Return the text with each part that has ``\pm`` or ``\mp`` written out as two."""
    parts = []
    for part in _listed(text):
        plus = part.replace("\\pm", "+").replace("\\mp", "-")
        minus = part.replace("\\pm", "-").replace("\\mp", "+")
        parts += [re.sub(r"(^|=)\s*\+\s*", r"\1", plus), minus] if plus != minus else [part]
    return ", ".join(parts)


def _names_coordinates(given: str, parts: Sequence[str], gold: str) -> bool:
    """Return whether the parts, such as ``x = 5`` and ``y = 3``, name the numbers of the point that the gold answer
    is."""
    match = _TUPLE.fullmatch(gold)
    if not match or match[1] + match[3] != "()" or not whole(gold) or _OR.search(given):
        return False
    names, values = zip(*sorted(map(labelled, parts), key=lambda part: part[0] or ""), strict=True)
    if None in names or "".join(names) not in _COORDINATES:
        return False
    gold_numbers, numbers = [read_number(part) for part in split(match[2], _LIST)], [read_number(v) for v in values]
    return len(numbers) == len(gold_numbers) and all(
        number and other and equal(other, number) for number, other in zip(gold_numbers, numbers, strict=True)
    )


def _unordered(given: Sequence[str], gold: Sequence[str], formula: Formula) -> bool:
    """Return whether the parts of two lists are equal, in any order."""
    if len(given) != len(gold) or len(gold) > _MOST_PARTS:
        return False
    rest = list(given)
    for part in gold:
        match = next((other for other in rest if same(other, part, formula)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _matrix(given: str, gold: str, formula: Formula) -> bool | None:
    """Return the verdict on matrices, cell by cell; None if the gold answer is not a matrix."""
    gold_match, match = _MATRIX.fullmatch(gold), _MATRIX.fullmatch(given)
    if not gold_match or not match:
        return False if gold_match else None
    rows, gold_rows = _cells(match[1]), _cells(gold_match[1])
    if [len(row) for row in rows] != [len(row) for row in gold_rows]:
        return False
    return all(
        _same_part(a, b, formula) for pair in zip(rows, gold_rows, strict=True) for a, b in zip(*pair, strict=True)
    )


def _cells(matrix: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.split("&")] for row in re.split(r"\\\\", matrix) if row.strip()]


def _tuple(given: str, gold: str, formula: Formula) -> bool | None:
    """Return the verdict on points and intervals; None if the gold answer is neither."""
    gold_match, match = _TUPLE.fullmatch(gold), _TUPLE.fullmatch(given)
    if not gold_match or not whole(gold) or len(gold_parts := split(gold_match[2], _LIST)) < 2:
        return None
    if not match or not whole(given):
        return _is_range(given) and formula(given, gold, "finished")
    parts = split(match[2], _LIST)
    if len(parts) != len(gold_parts) or (match[1], match[3]) != (gold_match[1], gold_match[3]):
        return False
    return all(_same_part(a.strip(), b.strip(), formula) for a, b in zip(parts, gold_parts, strict=True))


def _is_range(text: str) -> bool:
    r"""Return whether a text is a range such as ``1 \le x < 2``: one name between bounds without names."""
    sides = [side.strip() for side in _LESS.split(text)]
    bounds = [side for side in sides if re.search("[A-Za-z]", _STRUCTURE.sub("", side))]
    return len(sides) > 1 and "," not in text and len(bounds) == 1 and bool(_NAME.fullmatch(bounds[0]))


def _union(given: str, gold: str, formula: Formula) -> bool | None:
    """Return the verdict on unions of sets; None if the answers are not unions of equally many sets."""
    parts, gold_parts = split(given, _UNION), split(gold, _UNION)
    if len(gold_parts) < 2 or len(parts) != len(gold_parts):
        return None
    return _unordered([part.strip() for part in parts], [part.strip() for part in gold_parts], formula)
