"""The string below a field, in whichever class the field is declared."""

from tests.config.settings import Optimizer
from whet.config import Config
from whet.config.documented import documentation


class Faster(Optimizer):
    beta: float = 0.5
    warmup: int = 1
    """Steps, but
    fewer."""


def test_a_field_is_documented_where_it_is_declared_last() -> None:
    assert documentation(Faster, "lr") == documentation(Optimizer, "lr") == "Learning rate."
    assert documentation(Faster, "warmup") == "Steps, but fewer."
    assert documentation(Optimizer, "warmup") == "Steps until the full rate."
    assert documentation(Faster, "beta") == ""


def test_a_class_in_a_function_is_documented_and_one_without_source_is_not() -> None:
    class Local(Config):
        size: int = 1
        """Of the hat."""

    names: dict[str, type[Config]] = {}
    typed = "class Typed(Config):\n    size: int = 1\n    '''Of the hat.'''"
    exec(typed, {"Config": Config, "__name__": "typed"}, names)
    assert documentation(Local, "size") == "Of the hat."
    assert documentation(names["Typed"], "size") == ""
