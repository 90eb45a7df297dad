import io
import json
import unicodedata

import pytest
from rich.console import Console

from tests.forks import whet
from tests.show.runs import record
from whet.base.errors import DataError
from whet.base.escaping import escape_controls
from whet.metrics.rollout_file import RolloutRecord
from whet.show.view import as_json, level, select, view

BIDI_CONTROLS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def shown(run_folder, **options):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    view(run_folder, console=console, page=False, **options)
    return console.file.getvalue()


def test_the_last_step_is_shown_unless_another_is_asked_for(run_folder):
    assert "step 8   5 of 5 rollouts" in shown(run_folder)
    assert "step 2   1 of 5 rollouts" in shown(run_folder, step=2, n=1)


def test_only_and_sort_choose_what_is_shown(run_folder):
    text = shown(run_folder, only="correct", sort="mismatch", n=None)
    assert "2 of 5 rollouts" in text
    assert text.index("#2") < text.index("#0")
    assert "No rollout matches." in shown(run_folder, only="failed")


def test_the_same_rollouts_are_values_of_json(run_folder):
    chosen = json.loads(json.dumps(as_json(run_folder, None, None, "mismatch", "correct")))
    assert [row["sample"] for row in chosen] == [2, 0]
    assert {row["step"] for row in chosen} == {8}
    assert len(chosen[0]["tokens"]) == len(chosen[0]["logprobs"]) > 0
    assert len(as_json(run_folder, 2, 1, "order", None)) == 1


def test_text_of_a_model_can_neither_move_the_cursor_nor_act_as_markup(run_folder):
    text = shown(run_folder, n=None)
    assert "\x1b[2J" not in text
    assert "\u202e" not in text
    assert "\\x1b[2J" in text
    assert "[red]" in text


def test_options_that_the_output_would_ignore_are_refused(run_folder):
    for words, problem in (
        (("--html", "--json"), "--html and --json exclude each other"),
        (("--trace", "t.json", "--step", "1"), "--trace writes the whole run; leave out --step"),
    ):
        done = whet("view", str(run_folder), *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert problem in done.stderr


def test_records_without_the_number_come_last():
    records = [RolloutRecord(step=1, sample=0), record(1, 1, False), record(1, 2, True)]
    assert [r.sample for r in select(records, "reward")] == [2, 1, 0]


def test_a_difference_deepens_the_colour():
    assert [level(d) for d in (None, 0.0, 0.04, -0.05, 0.3, -0.7, 5.0)] == [0, 0, 0, 1, 2, 3, 4]


def test_a_folder_without_rollouts_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no rollouts.*learns from rows.*whet watch"):
        view(tmp_path)


def test_control_characters_are_visible_and_ordinary_text_is_untouched():
    ordinary = "a\nb\tc é 日本 🙂 ❤\ufe0f 한국 हिन्दी\xa0\u3000e\u0301"
    assert escape_controls(ordinary) == ordinary
    assert escape_controls("\x00\x1b\r\x9b\u202e\u2066\ud800") == "\\x00\\x1b\\r\\x9b\\u202e\\u2066\\ud800"


def test_no_character_without_a_shape_is_left_as_it_is():
    for code in range(0x110000):
        character = chr(code)
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") and character not in "\n\t":
            assert escape_controls(character).startswith("\\"), hex(code)
    directions = [c for c in map(chr, range(0x110000)) if unicodedata.bidirectional(c) in BIDI_CONTROLS]
    assert len(directions) >= 9
    blank = "\u200b\u200c\u200d\u2060\u2062\ufeff\u00ad\u180e\u034f\u115f\u3164\uffa0\u2800\ufe00\U000e0041\U000e0100"
    for character in [*directions, *blank]:
        assert escape_controls(f"a{character}b") == f"a{ascii(character)[1:-1]}b"
