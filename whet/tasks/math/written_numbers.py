r"""Written numbers: integers, decimals, fractions, mixed numbers, percentages, powers of ten, numbers in a base, with a
currency, degrees or a unit. They are read exactly; expressions are not computed.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from string import ascii_lowercase
from typing import Literal

from whet.tasks.math.notation import split, tidy, whole

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
_WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip
_AND_A_HALF = re.compile(rf"({'|'.join(_WORDS)}) and (?:a|one) half", re.IGNORECASE)
_BASE = re.compile(
    r"\(?0*([0-9][0-9A-Za-z ]*)\)?\s*"
    r"(?:_\s*(?:\{\s*(?:\\text\{\s*)?(\w+)\s*\}?\s*\}|([0-9]))"
    r"|(?:\\text\{\s*)?\(?(?:in )?\s?base\s*\}?[ -]*(\w+)\)?\s*\}?)"
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NOT_UNITS = frozenset(  # words that change the meaning of the number before them
    "or and not no is isn isnt either maybe if than minus plus times squared cubed over divided mod modulo base "  # noqa: SIM905
    "half halves third thirds quarter quarters dozen pi to e i rad more less out from choose "
    "fifth fifths sixth sixths eighth eighths tenth tenths hundredth hundredths thousandth thousandths tens hundreds "
    "thousands mille permille score gross lakh crore squares cubes factorial double doubled twice thrice triple "
    "tripled below above under negative fewer wrong false".split()
)
_SIGN = re.compile(r"[+-]")
_UNIT = re.compile(r"[A-Za-z](?:[A-Za-z .,'/\-]|\^[23])*")
_UNIT_PART = r"\\text\{[^{}]*\}\s*(?:\^\s*(?:\{\s*-?[1-3]\s*\}|[1-3])\s*)?"
_UNIT_PRODUCT = rf"{_UNIT_PART}(?:(?:\\cdot|/)?\s*{_UNIT_PART})*"
_UNITS_BEHIND = re.compile(
    rf"(.*?[0-9}})%a-z.])\s*(?:\\frac\{{\s*({_UNIT_PRODUCT})\}}\{{\s*({_UNIT_PRODUCT})\}}|({_UNIT_PRODUCT}))"
)
_INVERSE = re.compile(r"(?:^| )([A-Za-z]+)\^-([12])(?![0-9])")
_SCALED = re.compile(rf"({_DECIMAL})\s*(\\text\{{)?\s*({'|'.join(_SCALES)})\b(.*)")
_CURRENCIES = {
    currency: name
    for name, marks in (
        ("dollar", r"\$ USD"),
        ("euro", r"€ \euro EUR"),
        ("sterling", r"£ \pounds GBP"),
        ("yen", "¥"),
        ("rupee", "₹ Rs Rs."),
    )
    for currency in marks.split()
}
_MARK = "|".join(map(re.escape, sorted(_CURRENCIES, reverse=True)))
_CURRENCY = re.compile(rf"(?:\\text\{{\s*({_MARK})\s*\}}|({_MARK}))\s*(?=[0-9.(+\-\\])")
_CURRENCY_BEHIND = re.compile(rf"\s*({_MARK})$")
_TABLE = {  # quantity -> its units, each with its size in the first unit
    "length": "m meter metre=1 km kilometer kilometre=1000 cm centimeter centimetre=1/100 "
    "mm millimeter millimetre=1/1000 in inch=127/5000 ft foot feet=381/1250 yd yard=1143/1250 mi mile=201168/125",
    "mass": "g gram=1 kg kilogram=1000 mg milligram=1/1000 lb pound=45359237/100000 oz ounce=45359237/1600000",
    "time": "s sec second=1 min minute=60 h hr hour=3600 day=86400 week=604800",
    "volume": "l liter litre=1 ml milliliter millilitre=1/1000",
    "money": "dollar usd=1 cent=1/100",
    "angle": "degree deg=1 radian=0",
    "morning": "am=1",
    "afternoon": "pm=1",
    "temperature": "f fahrenheit=1",
    "temperature in C": "c celsius=1",
    "other money": "euro eur=1",
    "pounds of money": "sterling gbp=1",
    "yen": "yen=1",
    "rupees": "rupee=1",
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
    """A written number: its value and its notation."""

    value: Fraction
    form: Form
    reduced: bool = True  # a fraction in lowest terms with a denominator above 1
    decimals: int = 0  # digits after the point
    percent: bool = False
    unit: str = ""
    base: tuple[str, int] | None = None  # signed digits and a base other than ten; ``value`` reads them as decimal


def read_number(text: str) -> Number | None:
    """Return the number that a tidy text is; None for anything else, also for an expression to be computed."""
    if len(text) > _LONGEST:
        return None
    sign, signs, text = 1, 0, text.strip()
    currency = ""
    for _ in range(8):
        if text.startswith(("-", "+")):
            sign, signs, text = -1 if text[0] == "-" else 1, signs + 1, text[1:].lstrip()
            if signs > 1:
                return None  # "-(-5)" is to be computed
        elif match := _CURRENCY.match(text):
            currency, text = _CURRENCIES[match[1] or match[2]], text[match.end() :]
        elif (text.startswith("{") or (text.startswith("(") and "," not in text)) and whole(text):
            text = text[1:-1].strip()
        elif (inner := re.fullmatch(r"\\text\{([^{}]*)\}", text)) and (
            re.search("[0-9]", text) or inner[1].strip().casefold() in _WORDS or _AND_A_HALF.fullmatch(inner[1].strip())
        ):
            text = inner[1].strip()
        else:
            break
    if match := _BASE.fullmatch(text):
        return _in_base(match, sign)
    if (word := text.casefold()) in _WORDS and not signs:
        return Number(Fraction(_WORDS.index(word)), "integer", unit=currency)
    if (match := _AND_A_HALF.fullmatch(text)) and not signs:
        return Number(_WORDS.index(match[1].casefold()) + Fraction(1, 2), "mixed", unit=currency)
    scale = 0
    if match := _SCALED.fullmatch(text):
        scale, rest = _SCALES[match[3]], match[4].strip()
        text = match[1] + (f" {match[2] or ''}{rest}" if rest.rstrip("}") else "")
    text, unit = split_unit(text)
    percent = text.endswith("%")
    text = text.removesuffix("%").rstrip()
    if match := _CURRENCY_BEHIND.search(text):
        text, currency = text[: match.start()], _CURRENCIES[match[1]]
    number = _unsigned(text)
    if number is None:
        return None
    value, form, reduced, decimals = number
    return Number(
        sign * value * 10**scale, form, reduced, decimals if not scale else 0, percent, unit or currency, None
    )


def _unsigned(text: str) -> tuple[Fraction, Form, bool, int] | None:
    """Return value, form, whether reduced, and decimals of a number without sign and unit."""
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


def _in_base(match: re.Match[str], sign: int) -> Number | None:
    """Return the number that a match of ``_BASE`` writes; None for a base that isn't from 2 to 99."""
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
    r"""Return a tidy answer without the unit at its end, and the unit: degrees, ``\text{}``, or words after a number.

    >>> split_unit("840 \\text{ square inches}"), split_unit("5 apples"), split_unit("2x")
    (('840', 'square inches'), ('5', 'apples'), ('2x', ''))
    """
    if text.endswith("^\\circ"):
        return text[: -len("^\\circ")].rstrip(), "degree"
    if match := re.fullmatch(r"(.*[^\s])\s*\^\\circ\s*(?:\\text\{\s*)?([CF])\s*\}?", text):
        return match[1], match[2]
    if match := _UNITS_BEHIND.fullmatch(text):
        unit = f"{_unit(match[2])}/{_unit(match[3])}" if match[2] else _unit(match[4])
    elif (match := re.fullmatch(r"(.*?[0-9}%]) ([A-Za-z][A-Za-z .\-/]*(?:\^\s*\{?[23]\}?)?)", text)) or (
        match := re.fullmatch(r"(.*?[0-9])(cm|mm|km|kg|mph|ft)(?:\^\s*\{?[23]\}?)?", text)
    ):
        unit = re.sub(r"[\s{}]*(\^)[\s{}]*|[{}]", r"\1", match[2]).strip()
        if _are_variables(unit, match[1]):
            return text, ""
    else:
        return text, ""
    named = re.findall(r"[a-z]+", unit.casefold())
    if not _UNIT.fullmatch(unit) or len(named) > 5 or set(named) & (_NOT_UNITS | _SCALES.keys()):
        return text, ""
    return match[1].rstrip(), unit


def _are_variables(letters: str, before: str) -> bool:
    """Return whether letters behind a number or a formula are variables and not a unit: letters in the order of the
    alphabet that are not in the table, several single letters or one with a power, a difference, or a single letter
    behind a sum.

    >>> [_are_variables(letters, "3") for letters in ("m", "kg m/s", "x y", "abc", "x - y")]
    [False, False, True, True, True]
    >>> _are_variables("m", "3 + 6")
    True
    """
    names = re.findall("[a-z]+", letters.casefold().replace(".", ""))
    single = all(len(name) == 1 for name in names)
    return (
        " - " in letters
        or any(name in ascii_lowercase and name not in _UNITS and name != "a" for name in names)
        or not any(len(name) > 2 or name in _UNITS for name in names)
        or (single and "/" not in letters and (len(names) > 1 or ("^" in letters and names != ["m"])))
        or letters in ("c", "f")  # degrees are C and F
        or (single and len(list(filter(str.strip, split(before, _SIGN)))) > 1)
    )


def _unit(latex: str) -> str:
    r"""Return a unit of LaTeX in plain characters.

    >>> _unit(r"\text{kg} \cdot \text{m}/\text{s}^{2}"), _unit(r"\text{m s}^{-1}")
    ('kg m/s^2', 'm/s')
    """
    plain = re.sub(r"\\text\{|\\cdot(?![A-Za-z])|\}", " ", re.sub(r"\^\s*\{\s*(-?[1-3])\s*\}", r"^\1", latex))
    plain = re.sub(r"\s*([/^])\s*", r"\1", " ".join(plain.split()))
    return _INVERSE.sub(lambda match: f"/{match[1]}" + "^2" * (match[2] == "2"), plain)


def unit_ratio(given: str, gold: str) -> Fraction | None:
    """Return the size of the answer's unit in the gold answer's unit. 1 where either is missing or isn't a unit of the
    table, such as "apples"; None for units of different quantities."""
    measure, gold_measure = _measure(given), _measure(gold)
    if given == gold or measure is None or gold_measure is None:
        return Fraction(1)
    kinds = {measure[0], gold_measure[0]}
    if len(kinds) > 1 and "angle^1" in kinds and kinds <= _DEGREES:
        return Fraction(1)  # "25 degrees"
    return measure[1] / gold_measure[1] if len(kinds) == 1 and gold_measure[1] else None


def _measure(unit: str) -> tuple[str, Fraction] | None:
    """Return the quantity that a unit measures, and its size in the quantity's first unit; None if it isn't in the
    table."""
    text = re.sub(r"[.{}]", "", unit.casefold()).strip()
    text = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h"}.get(text, text)
    above, per, below = re.sub(r"\s*(?:\bper\b|/)\s*", "/", text).partition("/")
    if per:
        top, bottom = _measure(above), _measure(below)
        return (f"{top[0]}/{bottom[0]}", top[1] / bottom[1]) if top and bottom and bottom[1] else None
    power = 1
    for mark, value in (("square ", 2), ("sq ", 2), ("cubic ", 3), ("cu ", 3)):
        if text.startswith(mark):
            power, text = value, text[len(mark) :].strip()
    if match := re.fullmatch(r"(.*?)\s*\^\s*([23])", text):
        text, power = match[1].strip(), int(match[2])
    names = (text, text.removesuffix("s"), text.removesuffix("es"))
    unit_entry = next((_UNITS[name] for name in names if name in _UNITS), None)
    return (f"{unit_entry[0]}^{power}", unit_entry[1] ** power) if unit_entry else None


def equal(given: Number, gold: Number) -> bool:
    """Return whether a number equals the gold answer. Equality is exact, except that an endless decimal may be cut
    after six digits. The bases must be the same; a number without one is read in the gold answer's base. A percentage
    equals its hundredths or, from 1 up, its number of percents. A unit may be left out."""
    if gold.base or given.base:
        if gold.base and given.base:
            return gold.base == given.base
        digits = gold.base[0].lstrip("-") if gold.base else ""
        return digits.isdecimal() and given.form == "integer" and given.value == gold.value
    ratio = unit_ratio(given.unit, gold.unit)
    if ratio is None or (given.percent and gold.unit) or (given.unit and gold.percent):
        return False
    value = given.value * ratio
    if is_open_division(given, gold):
        return False
    if given.percent != gold.percent:
        hundredths = value / 100 if given.percent else value * 100
        return hundredths == gold.value or (value == gold.value and (gold.percent or abs(value) >= 1))
    return value == gold.value or rounds_to(given, value, gold)


def is_open_division(given: Number, gold: Number) -> bool:
    """Return whether a fraction is a division that is left to compute, as 84/2 is where the gold answer is 42. If the
    gold answer is such a division itself, it isn't."""
    is_unreduced = given.form == "fraction" and not given.reduced
    return is_unreduced and (gold.form != "fraction" or (gold.reduced and gold.value.denominator == 1))


def rounds_to(given: Number, value: Fraction, gold: Number) -> bool:
    """Return whether a decimal of six places or more is an endless decimal, cut or rounded."""
    endless = gold.form in ("fraction", "mixed", "repeating")
    enough = given.form == "decimal" and given.decimals >= 6 and abs(value) * 10**given.decimals >= 10**5
    return endless and enough and abs(value - gold.value) * 10**given.decimals < 1


def as_number(text: str) -> Fraction | None:
    """Return the value of a written number, without regard to its unit or percent sign. None for anything else, for
    texts that are too long, and for digits other than 0-9."""
    number = read_number(tidy(text)) if len(text) <= _LONGEST else None
    return number.value if number and not number.base else None
