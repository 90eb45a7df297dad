import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from tests.show.browser import browse, needs_browser
from tests.show.runs import record, run_of_everything
from whet.base.errors import DataError
from whet.lineage.record import Record, Session
from whet.metrics.rollout_file import RolloutRecord, Turn, rollout_path, write_rollouts
from whet.metrics.sinks.jsonl import JSONLSink
from whet.show import rollouts as rollouts_part
from whet.show.report import write_report
from whet.show.result import Result


class Page(HTMLParser):
    """Tags, attributes and the data of a page, as a browser would see them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.names, self.open, self.blocks = [], set(), [], []
        self.feed(html)
        self.close()
        self.run = json.loads(self.blocks[-2])["runs"][0]

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.names |= {name for name, _ in attributes}
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.blocks.append(data)


def report(folder):
    return Page(write_report(folder).read_text()).run


@pytest.fixture
def html(run_folder):
    return write_report(run_folder).read_text()


def test_what_a_model_wrote_stays_text(html):
    page = Page(html)
    assert page.open == []
    assert page.tags.count("script") == 2
    assert not any(name.startswith("on") for name in page.names)
    answers = ["".join(token[0] for token in card["parts"][-1]["tokens"]) for card in page.run["rollouts"]]
    assert any("<script>alert(1)</script>" in answer and "\\x1b[2J" in answer for answer in answers)
    assert "<script>alert" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html


def test_names_from_the_recipe_and_the_folder_stay_text_too(run_folder):
    (run_folder / "recipe.yaml").write_text("name: '<img src=x>'\nmodel: '<b>m</b>'\n# </pre><script>x</script>\n")
    page = Page(write_report(run_folder).read_text())
    assert "img" not in page.tags
    assert page.tags.count("script") == 2
    assert page.run["name"] == "<img src=x>"


def test_the_page_needs_nothing_from_outside_and_its_policy_admits_only_its_own_script(html):
    without_data = re.sub(r'<script type="application/json".*?</script>', "", html, flags=re.DOTALL)
    assert not re.search(r"""(src|href|@import)\s*[=(]""", without_data)
    assert "http" not in without_data.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1)
    assert policy.startswith("default-src 'none'")
    assert "connect-src" not in policy
    for tag in ("style", "script"):
        content = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL).group(1)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "style" not in Page(html).names


def test_the_outcome_and_what_is_odd_are_on_top(run_folder):
    run = report(run_folder)
    assert run["outcome"]["values"] == ["20.0%", "60.0%"]
    assert run["outcome"]["table"][1] == ["before (step 0)", "200", "20.0%", "15.0 to 26.1%"]
    assert run["outcome"]["table"][-1][2] == ["+40.0 points", "up"]
    assert run["warnings"] == [["loss", "at step 5: nan/inf"]]
    rows = dict(run["rows"])
    assert (rows["model"], rows["parameters"], rows["steps"]) == ("Tiny-1M", "1.0M", "8 of 20")


def test_the_report_keeps_what_makes_the_run_again(run_folder):
    with (run_folder / "recipe.yaml").open("a") as file:
        file.write("seed: 7\n")
    sink = JSONLSink().open(run_folder, {}, resume_step=8)
    sink.write(9, {"lr": 1e-6})
    sink.close()
    session = Session(
        began="now", command="whet train 'a b'", versions={"whet": "1", "torch": "2"}, commit="0123456789abcdef+"
    )
    Record(kind="run", folder=str(run_folder), sessions=(session,)).write(run_folder)
    rows = dict(report(run_folder)["rows"])
    assert [rows[name] for name in ("seed", "versions", "commit", "command", "learning rate", "entropy")] == [
        "7", "whet 1, torch 2", "0123456789ab+", "whet train 'a b'", "1.0e-06", "0.5",
    ]  # fmt: skip


def test_a_question_is_whole_and_the_expected_answer_is_there(run_folder):
    one = record(8, 0)
    one.messages[1]["content"] = "long " * 10_000
    one.data = {"answer": "4"}
    write_rollouts(run_folder, 8, [one])
    card = next(card for card in report(run_folder)["rollouts"] if card["step"] == 8)
    question = next(part for part in card["parts"] if part["label"] == "user")
    assert (len(question["text"]), question["cut"]) == (50_000, 0)
    assert card["data"] == [["answer", "4"]]


def test_each_token_carries_both_log_probs(run_folder):
    cards = report(run_folder)["rollouts"]
    tokens = [token for card in cards for part in card["parts"] for token in part.get("tokens", [])]
    assert [" 4", 1, -0.6, -0.57] in tokens


def test_the_sample_is_bounded_and_spread_over_the_run(run_folder):
    for step in range(9, 200):
        write_rollouts(run_folder, step, [record(step, i) for i in range(16)])
    chosen = rollouts_part.sample_rollouts(run_folder, most=40, steps=10)
    steps = sorted({r.step for r in chosen})
    assert len(chosen) == 40
    assert (len(steps), steps[0], steps[-1]) == (10, 1, 199)
    strangest = max(r.mismatch for r in rollouts_part.read_rollouts(run_folder, 199))
    assert any(r.step == 199 and r.mismatch == strangest for r in chosen)


def test_the_branches_of_an_episode_stay_together(run_folder):
    answers = [record(8, i) for i in range(30)]
    answers[3].branch, answers[3].sample = 1, 2
    write_rollouts(run_folder, 8, answers)
    chosen = [r for r in rollouts_part.sample_rollouts(run_folder, most=80) if r.step == 8 and r.sample == 2]
    assert sorted(r.branch for r in chosen) in ([], [0, 1])
    whole = [r for r in rollouts_part.sample_rollouts(run_folder, most=400) if r.step == 8 and r.sample == 2]
    assert sorted(r.branch for r in whole) == [0, 1]


def test_long_answers_and_monstrous_tokens_do_not_make_a_monstrous_page(run_folder):
    monsters = [record(8, i, pieces=["<" * 500] * 1300) for i in range(8)]
    write_rollouts(run_folder, 8, monsters)
    assert sum(len(json.dumps(card)) for card in report(run_folder)["rollouts"]) < rollouts_part.MOST_BYTES + 500_000


def test_metrics_alone_make_a_report(tmp_path):
    write_lines(tmp_path, (1, {"loss": 2.0}, "train"))
    run = report(tmp_path)
    assert run["outcome"] == {"label": "loss, last step", "values": ["2.000"], "table": []}, "one step has no first"
    assert (run["rollouts"], run["samples"]) == ([], False)


def write_lines(folder, *lines):
    sink = JSONLSink().open(folder, {})
    for step, values, kind in lines:
        sink.write(step, values, kind)
    sink.close()


def titles(run):
    """Return the names of the charts."""
    return [chart["label"] for chart in run["charts"]["learning"]]


def test_a_run_that_learns_from_rows_shows_its_held_out_loss(tmp_path):
    held_out = [(step, {"evaluation/loss": 5.0 - step, "evaluation/n": 8.0}, "evaluation") for step in (0, 1, 2)]
    train = [(step, {"loss": 4.5 - step, "gradient_norm": 1.0}, "train") for step in (1, 2)]
    write_lines(tmp_path, held_out[0], train[0], held_out[1], train[1], held_out[2])
    run = report(tmp_path)
    assert run["outcome"]["label"] == "loss on held-out rows"
    assert run["outcome"]["table"][1:] == [["before (step 0)", "8", "5.000"], ["after (step 2)", "8", "3.000"]]
    line = run["charts"]["learning"][0]["lines"][1]
    assert (line["name"], line["x"], line["y"]) == ("evaluation", [0, 1, 2], [5.0, 4.0, 3.0])
    assert titles(run) == ["loss", "gradient norm"]


def test_a_run_on_pairs_shows_how_often_the_chosen_answer_wins(tmp_path):
    held_out = {"evaluation/loss": 0.7, "evaluation/n": 8.0, "evaluation/accuracy": 0.5, "evaluation/margin": 0.0}
    train = {"loss": 0.7, "preference/accuracy": 0.5, "preference/margin": 0.1}
    write_lines(tmp_path, (0, held_out, "evaluation"), (1, train, "train"))
    run = report(tmp_path)
    assert run["outcome"]["label"] == "accuracy on held-out rows"
    assert titles(run) == ["preference accuracy", "loss", "margin"], "held-out and training values share a chart"


def test_charts_in_which_nothing_happens_are_named_and_not_drawn(tmp_path):
    quiet = {"loss": 0.1, "clip/high": 0.0, "clip/low": 0.0, "mismatch/token_mult_prob_error": 1.0}
    quiet["mismatch/max"] = 1e-6
    write_lines(tmp_path, (1, quiet, "train"), (2, quiet | {"clip/low": 0.1}, "train"))
    run = report(tmp_path)
    assert titles(run) == ["loss", "clipped low"]
    assert run["silent"] == ["mismatch 1.000", "clipped high 0.0%", "largest mismatch 1.0e-06"]
    (tmp_path / "metrics.jsonl").unlink()
    write_lines(tmp_path, (1, quiet, "train"), (2, quiet | {"clip/high": float("nan")}, "train"))
    assert "clipped high" in titles(report(tmp_path)), "a number that is not finite is news"


def test_lines_without_known_metrics_make_a_report(tmp_path):
    write_lines(tmp_path, (0, {"mine": 1.0}, "train"), (0, {"evaluation/mine": 1.0}, "evaluation"))
    assert report(tmp_path)["outcome"]["label"] == "Nothing was evaluated."


def test_a_damaged_line_is_named_and_the_rest_is_shown(run_folder):
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], "{torn\n", *lines[4:]]))
    run = report(run_folder)
    assert ["metrics.jsonl", "1 damaged lines of metrics.jsonl were left out: 5"] in run["warnings"]
    assert run["step"] == 8


def test_old_rollouts_without_tokens_show_their_answer(run_folder):
    rollout_path(run_folder, 8).write_text('{"step": 8, "answer": "just <b>text</b>"}\n')
    card = next(card for card in report(run_folder)["rollouts"] if card["step"] == 8)
    assert card["parts"][-1]["text"] == "just <b>text</b>"


def test_named_scores_that_change_are_drawn(tmp_path):
    steps = [(s, {"reward/mean": 0.5, "scores/hints": 4.0 - s, "scores/format": 1.0}, "train") for s in (1, 2, 3)]
    write_lines(tmp_path, *steps)
    assert titles(report(tmp_path)) == ["reward", "hints"]


def test_a_folder_without_metrics_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no metrics"):
        write_report(tmp_path)


@needs_browser
def test_a_browser_draws_the_report_filters_its_rollouts_and_asks_for_nothing_else(tmp_path):
    page = write_report(run_of_everything(tmp_path / "everything")).as_uri()
    result = browse(
        page,
        "document.querySelectorAll('[data-key=accuracy] polyline').length",
        "document.querySelectorAll('rect.p-learn').length",
        "document.querySelectorAll('.card').length",
        "(() => { const s = document.getElementById('by-verdict'); s.value = 'wrong';"
        " s.dispatchEvent(new Event('change')); return true })()",
        "document.getElementById('count').textContent.startsWith('9 ') && document.querySelectorAll('.card').length",
        "document.querySelector('.card summary').click() || true",
        "document.querySelectorAll('.card .answer i').length || null",
        "document.body.textContent.includes('alert(1)') && document.querySelectorAll('img, b script').length === 0",
    )
    assert result["values"] == [2, 14, 17, True, 9, True, result["values"][6], True]
    assert result["messages"] == []
    assert result["asked"] == [page]


@needs_browser
def test_a_drag_zooms_every_chart_and_a_click_shows_all_steps_again(tmp_path):
    drag = """(() => {
      const svg = document.querySelector('[data-key="reward/mean"] svg'), box = svg.getBoundingClientRect();
      const at = (type, x) => svg.dispatchEvent(new PointerEvent(type, { clientX: box.left + x * box.width,
        clientY: box.top + 50, pointerId: 1, bubbles: true }));
      svg.setPointerCapture = () => {};
      at('pointerdown', 0.3); at('pointermove', 0.5); at('pointerup', 0.6);
      return true;
    })()"""
    points = "document.querySelector('[data-key=\"reward/mean\"] .line').getAttribute('points').split(' ').length"
    result = browse(
        write_report(run_of_everything(tmp_path / "everything")).as_uri(),
        points, drag, f"!document.getElementById('unzoom').hidden && {points} < 8 && {points}",
        "document.getElementById('unzoom').click() || true", f"{points} === 14",
    )  # fmt: skip
    assert result["messages"] == []
    assert result["values"][0] == 14


@needs_browser
def test_an_agents_episode_is_a_tree_of_branches_and_turns(run_folder):
    asked = [{"role": "user", "content": "Sort these."}, {"role": "assistant", "content": "tool"}]
    branches = []
    for branch, last in enumerate(("done", "gave up")):
        pieces = ["tool", last]
        messages = [*asked, {"role": "tool", "content": f"result {branch}"}, {"role": "assistant", "content": last}]
        one = RolloutRecord(
            8, "8/0", "agent/1", 0, branch, messages=messages, reward=1.0, answer=last, tokens=[1, 2], texts=pieces,
            logprobs=[-0.1, -3.0], turns=[Turn(1), Turn(1)],
        )  # fmt: skip
        branches.append(one)
    write_rollouts(run_folder, 8, branches)
    result = browse(
        write_report(run_folder).as_uri(),
        "[...document.querySelectorAll('.card')].find((one) => one.textContent.includes('agent/1'))"
        ".querySelector('summary').click() || true",
        "document.querySelectorAll('.tree .fork').length",
        "[...document.querySelectorAll('.tree button')].find((one) => one.textContent.includes('gave up')).click()"
        " || true",
        "document.querySelector('.card[open] .body').textContent.includes('result 1')",
        "document.querySelector('.card[open] .answer i.d3') !== null",
    )
    assert result["messages"] == []
    assert result["values"] == [True, 2, True, True, True]


@needs_browser
def test_a_notebook_shows_the_report_inline(run_folder, tmp_path):
    assert "no report yet" in Result(run_folder)._repr_html_()
    write_report(run_folder)
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html><meta charset=utf-8>{Result(run_folder)._repr_html_()}")
    inside = "document.querySelector('iframe').contentDocument"
    drawn = f"{inside}.querySelectorAll('svg.chart').length > 5"
    result = browse(cell.as_uri(), drawn, f"{inside}.querySelector('h1').textContent")
    assert (result["values"], result["messages"]) == ([True, "tiny"], [])


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_follows_the_system_until_the_button_is_pressed(run_folder, dark):
    colour = "getComputedStyle(document.body).backgroundColor"
    result = browse(
        write_report(run_folder).as_uri(), colour, "document.getElementById('theme').click() || true", colour, dark=dark
    )
    light, night = "rgb(250, 249, 247)", "rgb(19, 21, 25)"
    assert result["values"] == ([night, True, light] if dark else [light, True, night])


@needs_browser
def test_the_page_fits_a_phone(run_folder):
    widths = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    scrolled, width = browse(write_report(run_folder).as_uri(), widths, width=360)["values"][0]
    assert scrolled <= width
