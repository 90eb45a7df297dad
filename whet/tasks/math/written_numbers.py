r"""Numbers as answers write them: integers, decimals, fractions, mixed numbers, percentages, powers of ten, numbers in
a base, with a currency, degrees or a unit. Read exactly, from text alone; nothing is computed.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from whet.tasks.math.notation import tidy, whole

Form = Literal["integer", "decimal", "fraction", "mixed", "power", "repeating"]

_LONGEST = 400  # characters
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_TEN = r"10\s*\^\s*(?:\{\s*([+-]?\s*[0-9]{1,4})\s*\}|([0-9]))"
_PLAIN = re.compile(rf"({_DECIMAL})(?:[eE]([+-]?[0-9]{{1,4}})|\s*(?:\\times|\\cdot|\*|x)\s*{_TEN})?")
_POWER = re.compile(_TEN)
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|dot)\s*\{([0-9]+)\}|\(([0-9]+)\))")
_OVER = rf"\\frac\{{\s*([+-]?)\s*({_DIGITS})\s*\}}\{{\s*([+-]?)\s*({_DIGITS})\s*\}}"
_SLASH = rf"({_DIGITS})\s*/\s*({_DIGITS})"
_FRACTION = re.compile(rf"{_OVER}|{_SLASH}")
_MIXED = re.compile(r"([0-9]+)(?:\s*\\frac\{\s*([0-9]+)\s*\}\{\s*([0-9]+)\s*\}| ([0-9]+)\s*/\s*([0-9]+))")
_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_BASE = re.compile(
    r"\(?0*([0-9][0-9A-Za-z ]*)\)?\s*"
    r"(?:_\s*(?:\{\s*(?:\\text\{\s*)?(\w+)\s*\}?\s*\}|([0-9]))|(?:\\text\{\s*)?\s?base\s*\}?[ -]*(\w+)\s*\}?)"
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NO_UNIT = frozenset(  # in a text behind a number: it says more than a unit
    "or and not no is isn isnt either maybe if than minus plus times squared cubed over divided mod modulo base "  # noqa: SIM905
    "half halves third thirds quarter quarters dozen pi to e i rad more less out from choose".split()
)
_UNIT = re.compile(r"[A-Za-z][A-Za-z .,'/\-]*(?:\^\s*\{?[23]\}?)?")
_SCALED = re.compile(rf"({_DECIMAL})\s*(\\text\{{)?\s*({'|'.join(_SCALES)})\b(.*)")
_TABLE = {  # unit -> what it measures, and how many of the first one
    "length": "m meter metre=1 km kilometer kilometre=1000 cm centimeter centimetre=1/100 "
    "mm millimeter millimetre=1/1000 in inch=127/5000 ft foot feet=381/1250 yd yard=1143/1250 mi mile=201168/125",
    "mass": "g gram=1 kg kilogram=1000 mg milligram=1/1000 lb pound=45359237/100000 oz ounce=45359237/1600000",
    "time": "s sec second=1 min minute=60 h hr hour=3600 day=86400 week=604800",
    "volume": "l liter litre=1 ml milliliter millilitre=1/1000",
    "money": "dollar=1 cent=1/100",
    "angle": "degree deg=1 radian=0",
    "temperature": "f fahrenheit=1",
    "temperature in C": "c celsius=1",
    "other money": "euro=1",
    "pounds of money": "sterling=1",
}
_DEGREES = {"angle^1", "temperature^1", "temperature in C^1"}
_UNITS = {
    name: (kind, Fraction(size))
    for kind, entries in _TABLE.items()
    for names, size in re.findall(r"([a-zA-Z ]+)=(\S+)", entries)
    for name in names.split()
}


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written."""

    value: Fraction
    form: Form
    reduced: bool = True  # a fraction in lowest terms with a denominator above 1
    decimals: int = 0  # digits behind the point
    percent: bool = False
    unit: str = ""
    base: tuple[str, int] | None = None  # digits and base; the value is that of its digits


def read_number(text: str) -> Number | None:
    """Return the number that a tidy text writes; None for anything else, and for what leaves something to compute."""
    if len(text) > _LONGEST:
        return None
    sign, text = 1, text.strip()
    currency = ""
    for _ in range(8):
        if text.startswith(("-", "+")):
            sign, text = -sign if text[0] == "-" else sign, text[1:].lstrip()
            if text.startswith(("-", "+")):
                return None
        elif text.startswith(("\\$", "€", "\\euro", "£", "\\pounds")):
            currency = {"\\": "dollar", "€": "euro", "£": "sterling"}[text[0]]
            text = text.lstrip("\\$€£").removeprefix("euro").removeprefix("pounds").lstrip()
        elif text.startswith(("(", "{")) and whole(text):
            text = text[1:-1].strip()
        elif (inner := re.fullmatch(r"\\text\{([^{}]*)\}", text)) and re.search("[0-9]", text):
            text = inner[1].strip()
        else:
            break
    if match := _BASE.fullmatch(text):
        return _in_base(match, sign)
    scale = 0
    if match := _SCALED.fullmatch(text):
        scale, rest = _SCALES[match[3]], match[4].strip()
        text = match[1] + (f" {match[2] or ''}{rest}" if rest.rstrip("}") else "")
    text, unit = split_unit(text)
    percent = text.endswith("%")
    text = text.removesuffix("%").rstrip()
    if text.endswith("\\$"):
        text, currency = text[:-2].rstrip(), "dollar"
    number = _unsigned(text)
    if number is None:
        return None
    value, form, reduced, decimals = number
    return Number(
        sign * value * 10**scale, form, reduced, decimals if not scale else 0, percent, unit or currency, None
    )


def _unsigned(text: str) -> tuple[Fraction, Form, bool, int] | None:
    if match := _PLAIN.fullmatch(text):
        plain = match[1].replace(",", "").replace(" ", "").rstrip(".")
        exponent = match[2] or match[3] or match[4]
        value, decimals = Fraction(plain), len(plain.partition(".")[2])
        if exponent is not None:
            power = int(exponent.replace(" ", ""))
            return value * Fraction(10) ** power, "power", True, max(0, decimals - power)
        return value, "integer" if value.denominator == 1 else "decimal", True, decimals
    if match := _POWER.fullmatch(text):
        return Fraction(10) ** int((match[1] or match[2]).replace(" ", "")), "power", True, 0
    if match := _REPEATING.fullmatch(text):
        start, between, over = match[1] or "0", match[2], match[3] or match[4]
        value = Fraction(f"{start}.{between}") if between else Fraction(start)
        value += Fraction(int(over), 10 ** len(between) * (10 ** len(over) - 1))
        return value, "repeating", True, 0
    if match := _MIXED.fullmatch(text):
        whole_part, top, bottom = (int(part) for part in match.groups() if part)
        return (whole_part + Fraction(top, bottom), "mixed", True, 0) if 0 < top < bottom else None
    if match := _FRACTION.fullmatch(text):
        top, bottom = (
            int((part or "").replace(",", "").replace(" ", "")) for part in (match[2] or match[5], match[4] or match[6])
        )
        if not bottom:
            return None
        value = Fraction(top, bottom) * (-1 if (match[1] == "-") != (match[3] == "-") else 1)
        return value, "fraction", value.denominator == bottom and (bottom > 1 or top == 0), 0
    return None


def _integer(digits: str) -> int:
    return int(digits.replace(",", "").replace(" ", ""))


def _in_base(match: re.Match[str], sign: int) -> Number | None:
    name = next(part for part in match.groups()[1:] if part)
    base = _WORDS.index(name.lower()) if name.lower() in _WORDS else int(name) if name.isdecimal() else 0
    digits = match[1].replace(" ", "").upper()
    if not 2 <= base <= 99 or not name.isascii():
        return None
    if base == 10:
        return Number(sign * Fraction(digits), "integer") if digits.isdecimal() else None
    value = Fraction(int(digits)) if digits.isdecimal() else Fraction(0)
    return Number(sign * value, "integer", base=(("-" if sign < 0 else "") + digits, base))


def split_unit(text: str) -> tuple[str, str]:
    r"""Return a tidy answer without the unit at its end, and the unit: degrees, ``\text{}``, or words behind a number.

    >>> split_unit("840 \\text{ square inches}"), split_unit("5 apples"), split_unit("2x")
    (('840', 'square inches'), ('5', 'apples'), ('2x', ''))
    """
    if text.endswith("^\\circ"):
        return text[: -len("^\\circ")].rstrip(), "degree"
    if match := re.fullmatch(r"(.*[^\s])\s*\^\\circ\s*(?:\\text\{\s*)?([CF])\s*\}?", text):
        return match[1], match[2]
    if match := re.fullmatch(r"(.*?[0-9})%a-z.])\s*(\\text\{([^{}]*)\}\s*(?:\^\s*\{?\s*([23])\s*\}?)?)", text):
        unit = match[3].strip() + (f"^{match[4]}" if match[4] else "")
    elif (match := re.fullmatch(r"(.*?[0-9}%]) ([A-Za-z][A-Za-z .\-/]*(?:\^\s*\{?[23]\}?)?)", text)) or (
        match := re.fullmatch(r"(.*?[0-9])(cm|mm|km|kg|mph|ft)(?:\^\s*\{?[23]\}?)?", text)
    ):
        unit = match[2].strip()
        if len(unit.split("^")[0]) < 3 and unit.split("^")[0].casefold() not in _UNITS:
            return text, ""
    else:
        return text, ""
    named = re.findall(r"[a-z]+", unit.casefold())
    if not _UNIT.fullmatch(unit) or len(named) > 5 or set(named) & (_NO_UNIT | _SCALES.keys()):
        return text, ""
    return match[1].rstrip(), unit


def unit_ratio(given: str, known: str) -> Fraction | None:
    """Return how many of the known unit one of the given unit is: 1 where either is missing or counts things. None for
    measures of different things."""
    one, other = _measure(given), _measure(known)
    if given == known or one is None or other is None:
        return Fraction(1)
    kinds = {one[0], other[0]}
    if len(kinds) > 1 and "angle^1" in kinds and kinds <= _DEGREES:
        return Fraction(1)  # "25 degrees"
    return one[1] / other[1] if len(kinds) == 1 and other[1] else None


def _measure(unit: str) -> tuple[str, Fraction] | None:
    """What a unit measures, and how many of the first one of its kind it is; None for one that isn't known."""
    text = re.sub(r"[.{}]", "", unit.casefold()).strip()
    text = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h"}.get(text, text)
    above, per, below = re.sub(r"\s*(?:\bper\b|/)\s*", "/", text).partition("/")
    if per:
        one, other = _measure(above), _measure(below)
        return (f"{one[0]}/{other[0]}", one[1] / other[1]) if one and other and other[1] else None
    power = 1
    for mark, value in (("square ", 2), ("sq ", 2), ("cubic ", 3), ("cu ", 3)):
        if text.startswith(mark):
            power, text = value, text[len(mark) :].strip()
    if match := re.fullmatch(r"(.*?)\s*\^\s*([23])", text):
        text, power = match[1].strip(), int(match[2])
    found = next(
        (_UNITS[name] for name in (text, text.removesuffix("s"), text.removesuffix("es")) if name in _UNITS), None
    )
    return (f"{found[0]}^{power}", found[1] ** power) if found else None


def equal(given: Number, known: Number) -> bool:
    """Return whether a number is the known one: exactly, but for decimals of a fraction that has no end, which count
    from six digits on. A base must be the known one; without one, the digits are meant to be in it. Percentages count
    as hundredths, or where the other is 1 or more as the number of percents; a unit may be left out."""
    if known.base or given.base:
        if known.base and given.base:
            return known.base == given.base
        digits = known.base[0].lstrip("-") if known.base else ""
        return digits.isdecimal() and given.form == "integer" and given.value == known.value
    ratio = unit_ratio(given.unit, known.unit)
    if ratio is None:
        return False
    value = given.value * ratio
    if given.form == "fraction" and not given.reduced and (known.form != "fraction" or known.value.denominator == 1):
        return given.value == known.value and not known.reduced and known.form == "fraction"  # a division left to do
    if given.percent != known.percent:
        hundredths = value / 100 if given.percent else value * 100
        return hundredths == known.value or (value == known.value and (known.percent or abs(value) >= 1))
    return value == known.value or rounds_to(given, value, known)


def rounds_to(given: Number, value: Fraction, known: Number) -> bool:
    """Return whether a decimal of six places or more is a fraction that no decimal equals, cut or rounded."""
    endless = known.form in ("fraction", "mixed", "repeating")
    enough = given.form == "decimal" and given.decimals >= 6 and abs(value) * 10**given.decimals >= 10**5
    return endless and enough and abs(value - known.value) * 10**given.decimals < 1


def as_number(text: str) -> Fraction | None:
    """Return the value of a plain integer, decimal or fraction of two integers; a percent sign is ignored. None for
    anything else, also for overlong numbers and for digits other than 0-9."""
    number = read_number(tidy(text)) if len(text) <= _LONGEST else None
    return number.value if number and not number.base else None
