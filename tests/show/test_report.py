import base64
import hashlib
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.show.runs import record, run_of_everything
from whet.base.errors import DataError
from whet.metrics.rollout_file import rollout_path, write_rollouts
from whet.metrics.sinks.jsonl import JSONLSink
from whet.show import rollouts as rollouts_part
from whet.show.report import write_report


class Page(HTMLParser):
    """Tags, attributes and text of a page, as a browser would see them; ``events`` lists everything, line by line."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.names, self.text, self.open, self.events = [], set(), [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.names |= {name for name, _ in attributes}
        self.events.append(" ".join([f"<{tag}", *(f"{name}={value!r}" for name, value in sorted(attributes))]))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.events.append(f"</{tag}")

    def handle_data(self, data):
        self.text.append(data)
        if data.strip() and self.open[-1] not in ("style", "script"):
            self.events.append(repr(data if "pre" in self.open or "details" in self.open else data.strip()))


GOLDEN = Path(__file__).with_name("report_of_everything.txt")


def test_the_page_is_unchanged(tmp_path, monkeypatch):
    """Except style and script. After an intended change run WHET_GOLDEN=1 pytest and review the difference."""
    monkeypatch.setattr(rollouts_part, "MOST_TOKENS", 12)
    monkeypatch.setattr(rollouts_part, "MOST_CHARACTERS", 200)
    page = Page(write_report(run_of_everything(tmp_path / "everything")).read_text())
    now = [event for event in page.events if "Content-Security-Policy" not in event]
    if os.environ.get("WHET_GOLDEN"):
        GOLDEN.write_text("\n".join(now) + "\n")
    assert now == GOLDEN.read_text().splitlines()


@pytest.fixture
def html(run_folder):
    return write_report(run_folder).read_text()


def test_what_a_model_wrote_stays_text(html):
    page = Page(html)
    assert page.open == []
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert not any(name.startswith("on") for name in page.names)
    assert "<script>alert(1)</script>" in "".join(page.text)
    assert "\x1b" not in html
    assert "\u202e" not in html


def test_names_from_the_recipe_and_the_folder_stay_text_too(run_folder):
    (run_folder / "recipe.yaml").write_text("name: '<img src=x>'\nmodel: '<b>m</b>'\n# </pre><script>x</script>\n")
    page = Page(write_report(run_folder).read_text())
    assert "img" not in page.tags
    assert page.tags.count("script") == 1


def test_the_page_needs_nothing_from_outside_and_its_policy_admits_only_its_own_script(html):
    assert not re.search(r"""(src|href|url|@import)\s*[=(]""", html.replace("src=x", ""))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1)
    assert policy.startswith("default-src 'none'")
    for tag in ("style", "script"):
        content = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL).group(1)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "style" not in Page(html).names


def test_the_outcome_and_what_is_odd_are_on_top(html):
    text = " ".join(Page(html).text)
    for words in ("20.0%", "60.0%", "+40.0 points", "15.0 to 26.1%", "Tiny-1M", "1.0M", "8 of 20", "not finite"):
        assert words in text


def test_each_token_carries_both_log_probs(html):
    assert 'data-t="1|-0.6|-0.57"' in html
    assert re.search(r'<i class="u1" data-t="2\|-0.7\|-0.64"> legs</i>', html)


def test_the_sample_is_bounded_and_spread_over_the_run(run_folder):
    for step in range(9, 200):
        write_rollouts(run_folder, step, [record(step, i) for i in range(16)])
    chosen = rollouts_part.sample_rollouts(run_folder, most=40, steps=10)
    steps = sorted({r.step for r in chosen})
    assert len(chosen) == 40
    assert (len(steps), steps[0], steps[-1]) == (10, 1, 199)
    strangest = max(r.mismatch for r in rollouts_part.read_rollouts(run_folder, 199))
    assert any(r.step == 199 and r.mismatch == strangest for r in chosen)


def test_long_answers_and_monstrous_tokens_do_not_make_a_monstrous_page(run_folder):
    monsters = [record(8, i, pieces=["<" * 500] * 1300) for i in range(8)]
    write_rollouts(run_folder, 8, monsters)
    size = write_report(run_folder).stat().st_size
    assert size < rollouts_part.MOST_BYTES + 1_500_000


def test_metrics_alone_make_a_report(tmp_path):
    sink = JSONLSink().open(tmp_path, {})
    sink.write(1, {"loss": 2.0})
    sink.close()
    text = write_report(tmp_path).read_text()
    assert "Nothing was evaluated" not in text
    assert "loss, last step" in text, "one step has no first and last"
    assert "<h2>Rollouts" not in text, "such a run samples none"


def write_lines(folder, *lines):
    sink = JSONLSink().open(folder, {})
    for step, values, kind in lines:
        sink.write(step, values, kind)
    sink.close()


def titles(html):
    """Return the names of the charts."""
    return re.findall(r"<h3>([^<]*)<", html)


def test_a_run_that_learns_from_rows_shows_its_held_out_loss(tmp_path):
    held_out = [(step, {"evaluation/loss": 5.0 - step, "evaluation/n": 8.0}, "evaluation") for step in (0, 1, 2)]
    train = [(step, {"loss": 4.5 - step, "gradient_norm": 1.0}, "train") for step in (1, 2)]
    write_lines(tmp_path, held_out[0], train[0], held_out[1], train[1], held_out[2])
    html = write_report(tmp_path).read_text()
    text = " ".join(Page(html).text)
    for words in ("loss on held-out rows", "before (step 0)", "5.000", "after (step 2)", "3.000"):
        assert words in text
    assert 'data-name="evaluation" data-colour="c2" data-x="0,1,2" data-y="5.000|4.000|3.000"' in html
    assert titles(html) == ["loss", "gradient norm"]


def test_a_run_on_pairs_shows_how_often_the_chosen_answer_wins(tmp_path):
    held_out = {"evaluation/loss": 0.7, "evaluation/n": 8.0, "evaluation/accuracy": 0.5, "evaluation/margin": 0.0}
    train = {"loss": 0.7, "preference/accuracy": 0.5, "preference/margin": 0.1}
    write_lines(tmp_path, (0, held_out, "evaluation"), (1, train, "train"))
    html = write_report(tmp_path).read_text()
    assert "accuracy on held-out rows" in html
    assert titles(html) == ["preference accuracy", "loss", "margin"], "held-out and training values share a chart"


def test_charts_in_which_nothing_happens_are_named_and_not_drawn(tmp_path):
    quiet = {
        "loss": 0.1,
        "clip/high": 0.0,
        "clip/low": 0.0,
        "mismatch/token_mult_prob_error": 1.0,
        "mismatch/max": 1e-6,
    }
    write_lines(tmp_path, (1, quiet, "train"), (2, quiet | {"clip/low": 0.1}, "train"))
    html = write_report(tmp_path).read_text()
    assert titles(html) == ["loss", "clipped low"]
    assert "nothing happens there: mismatch 1.000, clipped high 0.0%, largest mismatch 1.0e-06." in html
    (tmp_path / "metrics.jsonl").unlink()
    write_lines(tmp_path, (1, quiet, "train"), (2, quiet | {"clip/high": float("nan")}, "train"))
    assert "clipped high" in titles(write_report(tmp_path).read_text()), "a number that is not finite is news"


def test_the_times_on_an_axis_are_distinguishable(tmp_path):
    write_lines(tmp_path, *((step, {"time/step": 0.12, "time/learn": 0.1}, "train") for step in (1, 2)))
    marks = re.findall(r'<text class="tick"[^>]*>([^<]* s)<', write_report(tmp_path).read_text())
    assert len(marks) == len(set(marks)) > 2


def test_lines_without_known_metrics_make_a_report(tmp_path):
    sink = JSONLSink().open(tmp_path, {})
    sink.write(0, {"mine": 1.0})
    sink.write(0, {"evaluation/mine": 1.0}, "evaluation")
    sink.close()
    assert "Nothing was evaluated" in write_report(tmp_path).read_text()


def test_old_rollouts_without_tokens_show_their_answer(run_folder):
    rollout_path(run_folder, 8).write_text('{"step": 8, "answer": "just <b>text</b>"}\n')
    assert "just &lt;b&gt;text&lt;/b&gt;" in write_report(run_folder).read_text()


def test_named_scores_that_change_are_drawn(tmp_path):
    sink = JSONLSink().open(tmp_path, {})
    for step in (1, 2, 3):
        sink.write(step, {"reward/mean": 0.5, "scores/hints": 4.0 - step, "scores/format": 1.0})
    sink.close()
    page = write_report(tmp_path).read_text()
    assert "<h3>hints" in page
    assert "<h3>format" not in page


def test_a_folder_without_metrics_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no metrics"):
        write_report(tmp_path)
