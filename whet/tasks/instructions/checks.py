"""The checks of IFEval and IFBench, by the package if-verifiable, without its downloads and random choices.

Zhou et al., arXiv 2311.07911; Pyatkin et al., arXiv 2507.02833.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from whet.base.extras import extra
from whet.config.issues import did_you_mean

NEEDS_MODELS = ("ratio:stop_words", "words:start_verb")  # checks that would download models of nltk
_WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")
_TEXT = re.compile(r"\w+(?:[-'’]\w+)*")


@cache
def registry() -> dict[str, Any]:
    """Return the class that checks each kind of instruction. Raises ``ConfigError`` if the package is missing."""
    with extra("tasks", "data.type=instruction_following"):
        import nltk

        download, nltk.download = nltk.download, lambda *_, **__: False  # the import of the package would download
        try:
            from if_verifiable.ifbench import instructions_registry as ifbench
            from if_verifiable.ifbench import instructions_util as ifbench_texts
            from if_verifiable.ifeval import instructions, instructions_util
            from if_verifiable.ifeval import instructions_registry as ifeval
        finally:
            nltk.download = download
    words = SimpleNamespace(tokenize=nltk.tokenize, word_tokenize=_WORD.findall)
    instructions_util.nltk = ifbench_texts.nltk = words
    instructions_util.count_sentences = lambda text: len(instructions_util.split_into_sentences(text))
    instructions.langdetect = SimpleNamespace(detect=_language, LangDetectException=())
    return {**ifbench.INSTRUCTION_DICT, **ifeval.INSTRUCTION_DICT}


def _language(text: str) -> str:
    """Return the code of the text's language, the same in every run; an empty text for a text without letters."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0
    try:
        return str(detect(text))
    except LangDetectException:
        return ""


def check_instruction(name: str, arguments: Mapping[str, object]) -> None:
    """Raise ``ValueError`` for an unknown instruction, or one without all of its arguments: the package would choose
    them at random."""
    if name in NEEDS_MODELS or name not in registry():
        names = sorted(registry().keys() - set(NEEDS_MODELS))
        raise ValueError(f"the instruction {name!r} can't be checked.{did_you_mean(name, names)}")
    expected = set(registry()[name](name).get_instruction_args_keys())
    if expected != arguments.keys():
        raise ValueError(f"the instruction {name!r} takes {sorted(expected) or 'nothing'}, not {sorted(arguments)}")
    try:
        _built(name, arguments).check_following("This answer is there to see whether it can be checked.")
    except Exception as error:  # the checks raise many kinds of errors on the arguments of a row
        raise ValueError(f"the instruction {name!r} can't be checked: {type(error).__name__}: {error}") from None


def follow_in_worker(answer: str, instructions: Sequence[tuple[str, Mapping[str, object]]]) -> dict[str, float]:
    """Return 1 or 0 for each instruction, by its index: whether the answer follows it. An empty answer follows none."""
    return {str(index): _follows(answer, *instruction) for index, instruction in enumerate(instructions)}


def _follows(answer: str, name: str, arguments: Mapping[str, object]) -> float:
    checker = _built(name, arguments)
    check = _NEWER.get(name)
    try:
        return float(
            bool(answer.strip()) and bool(check(checker, answer) if check else checker.check_following(answer))
        )
    except Exception:  # the check was tried when the row was read, so the fault is the answer's
        return 0.0


def _keyword_at_its_place(checker: Any, answer: str) -> bool:
    sentences = sys.modules[type(checker).__module__].instructions_util.split_into_sentences(answer)
    words = _TEXT.findall(" ".join(sentences[checker._n - 1 : checker._n]))
    return len(words) >= checker._m and words[checker._m - 1].lower() == checker._keyword.lower()


def _second_and_second_to_last(checker: Any, answer: str) -> bool:
    words = _WORD.findall(answer)
    words = words if _TEXT.fullmatch(words[-1]) else words[:-1]
    return len(words) > 1 and words[1].lower() == words[-2].lower() == checker._keyword.lower()


def _title_case(_: object, answer: str) -> bool:
    words = [word for word in _WORD.findall(answer) if word[0].isalpha()]
    return not any(word[0].islower() and (word[1:].islower() or word[1:].isupper() or len(word) == 1) for word in words)


# IFBench's current checks; the package has the first versions, which depend on letter case and punctuation.
_NEWER = {
    "words:keywords_specific_position": _keyword_at_its_place,
    "words:words_position": _second_and_second_to_last,
    "format:title_case": _title_case,
}


def _built(name: str, arguments: Mapping[str, Any]) -> Any:
    checker = registry()[name](name)
    checker.build_description(**arguments)
    return checker
