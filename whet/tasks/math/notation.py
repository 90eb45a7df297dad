r"""The notation of mathematical answers: boxes, spellings of the same LaTeX, and the parts of an answer.

These functions rewrite and cut text, in linear time; they compute no values.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

_BOX = re.compile(
    r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:(\{)|([+-]?(?:[0-9][0-9.,/]*|[A-Z]\b)|\\d?frac\{[0-9]+\}\{[0-9]+\}))"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPEN, _CLOSE = frozenset(("(", "[", "{", "\\{", "\\begin")), frozenset((")", "]", "}", "\\}", "\\end"))

_WRAPPED = re.compile(r"(?:\\(?:mathbf|boldsymbol|mathit|bm))?\s*\{")  # a whole answer in braces or in bold
_OPEN_END = re.compile(r"(?:\\|(?:\.{3}|\\l?dots|…)\W*)$")  # an escaped character, or an unfinished list
_PLAIN = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_FRACTION, _RAISED = re.compile("[¼-¾⅐-⅞]"), re.compile("[²³¹⁰⁴-⁹⁺⁻ⁿ]+")  # of one character each
_FULL_WIDTH = re.compile("[\uff01-\uff5e]")
_MONTH = "(?:Jan|Febr)uary|March|April|May|June|July|August|(?:Septem|Octo|Novem|Decem)ber"
_REWRITES = [
    (re.compile(pattern), by)
    for pattern, by in (
        (
            r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|mathrm\{\s*\}|text\{\s*\})(?![A-Za-z])|\\!",
            "",
        ),
        (r"(?<!\\)\\\\\[[0-9. a-z]*\]", r"\\\\"),  # space after a row of a matrix
        (r"\\text(?:rm)?\{\s*(?:US)?\\\$\s*\}|(?:\bUS)?\\\$|\\(?:textdollar|mathdollar)(?![A-Za-z])", r"\\$"),
        (r"(?<!\\)(?:\\[()\[\]]|\$)", ""),  # maths mode
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (
            r"\\(?:mathrm|textrm|textsf|mathsf|texttt|textit|textbf|textnormal|emph|underline|mbox|operatorname\*?)\s*(?=\{)",
            r"\\text",
        ),
        (r"\\text\s+(?=\{)", r"\\text"),
        (r"\\(?:text)?color\s*\{[A-Za-z]+\}", ""),
        (r"\\text\{\s*(?i:(?:the )?(?:final )?answer(?: is)?) ?:?\s*\}|^\s*\*\*|\*\*\s*$", ""),
        (r"\\text\{(sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|log|ln)\}", r"\\\1 "),
        (r"(?<![\\A-Za-z])(sin|cos|tan|log|ln)(?=\s*[0-9({\\])", r"\\\1 "),
        (r"\\log\s*_\s*(?:e|(?:\\text)?\{\s*e\s*\}|\{\s*\\text\{e\}\s*\})", r"\\ln "),
        (r"\\(?:mathbf|boldsymbol|mathit|bm|textbf)\s*\{([A-Za-z]|[^{}A-Za-z]*)\}", r"\1"),
        (r"\\leq?(?![A-Za-z])|≤", r"\\le "),
        (r"\\geq?(?![A-Za-z])|≥", r"\\ge "),
        (r"\\[lr]vert(?![A-Za-z])", "|"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"^(?:\\text\{\s*)?(?i:the )?(?i:set of )?(?i:all real numbers)\s*\}?\.?$", r"(-\\infty ,\\infty )"),
        (r"\\mathbb\s*(?:\{R\}|R)(?=\W*$)|ℝ(?=\W*$)", r"(-\\infty ,\\infty )"),
        (r"\\varnothing(?![A-Za-z])|∅|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\neq(?![A-Za-z])|≠", r"\\ne "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\%|\\text\{\s*(?:\\?%|per ?cent)\s*\}|\bper ?cent\b", "%"),
        (r"(\\text\{[^{}]*[A-Za-z])\^\{(-?[1-3])\}", r"\1^\2"),  # a unit: m/s^{2}
        (r"\{\s*([,:])\s*\}", r"\1"),
        (r"(?<!\\)\\[,;: ]|\\(?:quad|qquad|thinspace)(?![A-Za-z])|~|\s", " "),
        (r"[\u2010-\u2013\u2212\ufe63]", "-"),
        (r"×", r"\\times "),
        (r"·|⋅", r"\\cdot "),
        (r"π", r"\\pi "),
        (r"∞", r"\\infty "),
        (r"≈|\\simeq(?![A-Za-z])", r"\\approx "),
        (r"±", r"\\pm "),
        (r"√\s*([0-9]+)", r"\\sqrt{\1}"),
        (r"(?:√|(?<![\\A-Za-z])sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"√", r"\\sqrt "),
        (r"∪", r"\\cup "),
        (
            r"(?:\{\})?\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|°|\\(?:text)?degree(?![A-Za-z])|\\text\{\s*degrees?\s*\}"
            r"|(?<=[0-9])\^(?:o\b|\{o\})",
            r"^\\circ ",
        ),
        (r"\\begin\{(?:[pb]?(?:small)?matrix|array\}\{[clr| ]*)\}", r"\\begin{matrix}"),
        (r"(?:\\\\\s*)?\\end\{(?:[pb]?(?:small)?matrix|array)\}", r"\\end{matrix}"),
        (r"[(\[]\s*(\\begin\{matrix\}(?:(?!\\end).)*\\end\{matrix\})\s*[)\]]", r"\1"),
        (r"\{([^{}]+)\\over(?![A-Za-z])([^{}]+)\}", r"\\frac{\1}{\2}"),
        (r"(?<![\w)}])\(([+-]?[0-9]+)\)/\(([0-9]+)\)", r"\\frac{\1}{\2}"),
        (r"\\text\{([0-9]+)\}", r"\1"),
        (r"((?<![.0-9])[0-9]+) ?(?:\\text\{ ?and (?:a|one) half ?\}|and (?:a|one) half(?![A-Za-z]))", r"\1 1/2"),
        (r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}"),  # \frac12
        (r"\\frac\s*([0-9A-Za-z])\s*(?=\{)", r"\\frac{\1}"),
        (r"\\frac\s*(\{[^{}]*\})\s*([0-9A-Za-z])", r"\\frac\1{\2}"),
        (r"\\frac\s+(?=\{)", r"\\frac"),
        (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
        (r"(?<=[(\[, ])\+(?=\s*\\infty)", ""),
        (r"\\(overline|bar|dot) ?([0-9])", r"\\\1{\2}"),
        # a decimal whose last digits are there three times
        (r"(\.[0-9]{0,12}?)([0-9]{1,6}?)\2\2+ ?(?:\\ldots|\\dots|…|\.{3})$", r"\1\\overline{\2}"),
        (r"(?<=\.[0-9])([0-9]+) ?(?:\\ldots|\\dots|…|\.{3})$", r"\1"),
        (rf"\b({_MONTH}) ([0-9]{{1,2}})(?:st|nd|rd|th)\b", r"\1 \2"),
        (rf"^(\\text\{{)?([0-9]{{1,2}})(?:st|nd|rd|th)?(?: of)? ({_MONTH})(?=\}}?$)", r"\1\3 \2"),
        (r"^ *= *", ""),
        (r" {2,}", " "),
    )
]


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last ``\boxed{}``; None without a box or if the box isn't closed.

    >>> last_boxed(r"so \boxed{1}, no, \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    at = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    box = _BOX.match(text, at) if at >= 0 else None
    if box is None:
        return None
    return _braced(text, box.end()) if box[1] else box[2].rstrip(".,/")


def _braced(text: str, start: int) -> str | None:
    """Return the text up to the brace that closes the one before ``start``; None if none does."""
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # an escaped brace is a brace of the answer
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:position]
        position += 1
    return None


@lru_cache(maxsize=4096)
def tidy(text: str) -> str:
    r"""Return the answer in one spelling: without maths mode, sizes of brackets, thin spaces and full stop.

    >>> tidy(r"$\left( \dfrac12, 1{,}234 \right)$.")
    '( \\frac{1}{2}, 1,234 )'
    """
    if _PLAIN.fullmatch(text):
        return text
    if not text.isascii():
        text = _in_ascii(text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    while True:
        text = text.strip() if _OPEN_END.search(text) else text.strip().rstrip(".;:, ")
        if (wrapped := _WRAPPED.match(text)) is None or not whole(text[wrapped.end() - 1 :]):
            return text
        text = text[wrapped.end() : -1]


def _in_ascii(text: str) -> str:
    """Return the text with fractions and exponents that are single characters (2½, x²) in LaTeX, and the full-width
    characters of Chinese and Japanese texts in ASCII."""
    text = _FULL_WIDTH.sub(lambda mark: chr(ord(mark[0]) - 0xFEE0), text).replace("\u3001", ",").replace("\u3002", ".")
    text = _FRACTION.sub(lambda mark: "\\frac{{{}}}{{{}}}".format(*_plain(mark[0]).split("⁄")), text)
    return _RAISED.sub(lambda mark: f"^{{{_plain(mark[0])}}}", text).replace("⁄", "/")


def _plain(marks: str) -> str:
    return unicodedata.normalize("NFKC", marks)


def squeezed(text: str) -> str:
    """Return a tidy text without spaces, except between digits, and without braces around single characters."""
    return re.sub(r"\{([A-Za-z0-9])\}", r"\1", re.sub(r"(?<![0-9]) | (?![0-9])", "", text))


def same_text(text: str, other: str) -> bool:
    """Return whether two tidy texts differ at most in spaces, braces, and the case of letters within ``\\text{}``."""
    text, other = squeezed(text), squeezed(other)
    if text == other:
        return True
    wordy = "\\text" in text + other
    return wordy and _TEXT.sub(r"\1", text).casefold() == _TEXT.sub(r"\1", other).casefold()


def words(text: str) -> str | None:
    r"""Return a tidy text of words in lower case, without ``\text{}``; None for a text with more than words.

    >>> words(r"\text{(B)}"), words(r"\text{Saturday}"), words("x^2")
    ('b', 'saturday', None)
    """
    plain = _TEXT.sub(r"\1", text)
    plain = " ".join(plain.replace(",", " , ").casefold().split()).strip("\"'`.")
    if match := re.fullmatch(r"\((\w)\)", plain):
        plain = match[1]
    return plain if re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ ,.'\-])*", plain) else None


def whole(text: str) -> bool:
    """Return whether the first bracket of a text is closed by its last character."""
    depth = 0
    for start, token in tokens(text):
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth <= 0:
            return start + len(token) == len(text) and token in _CLOSE
    return False


def tokens(text: str) -> Iterator[tuple[int, str]]:
    """Yield (position, token) of the commands and single characters of LaTeX."""
    for match in _TOKEN.finditer(text):
        yield match.start(), match[0]


def split(text: str, at: re.Pattern[str]) -> list[str]:
    """Return the parts of a text between the matches of ``at`` outside brackets.

    >>> split("(1, 2), 3", re.compile(","))
    ['(1, 2)', ' 3']
    """
    parts, begin, after, depth = list[str](), 0, 0, 0
    for start, token in tokens(text):
        if start < after:
            continue
        if depth == 0 and (match := at.match(text, start)) and match.end() > start:
            parts.append(text[begin:start])
            begin = after = match.end()
            continue
        depth = max(0, depth + (token in _OPEN) - (token in _CLOSE))
    return [*parts, text[begin:]]
