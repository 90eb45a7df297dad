"""``whet eval`` on several sets, of models and endpoints, and the comparison of two."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.toy import Lowercase, toy_recipe, write_recipe
from whet.base.digests import digest
from whet.base.errors import ConfigError
from whet.cli.main import main
from whet.core.types import Episode, Span, Task, Trajectory
from whet.fetch.artifacts import register
from whet.fetch.images import open_image
from whet.rollouts.blend import Blend, Part
from whet.rollouts.sampling import Limits, Sampling
from whet.run.evaluation import EvaluationSet
from whet.run.remote_model import check_for_endpoint
from whet.run.scores import Report, counts
from whet.show.evaluation import print_reports
from whet.tasks.math.arithmetic import Arithmetic

Answer = tuple[int, Any]


def evaluated(*words: str) -> int:
    """Run ``whet eval`` and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["eval", *map(str, words)])
    return int(ended.value.code or 0)


@pytest.fixture
def benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    sums = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(6)]
    stem = [{"question": f"Which is {n}?", "options": [str(n), "x"], "answer": "A"} for n in range(4)]
    for name, rows in (("gsm8k", sums), ("mmlu-stem", stem)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("WHET_BENCHMARKS", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return folder


class OnlyTrain(Lowercase):
    """The split test has no tasks."""

    def tasks(self, split: str) -> Sequence[Task]:
        return super().tasks(split) if split == "train" else []


class Endpoint:
    """A stand-in for an OpenAI-compatible server. ``answers`` gives the status and body for a request."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models = ["tiny"]
        self.answers: Callable[[dict[str, Any]], Answer] = lambda body: says("\\boxed{A}")


def says(text: str, reason: str = "stop") -> Answer:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return 200, {"choices": [choice], "usage": {"completion_tokens": 7}}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    there = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": name} for name in there.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            there.requests.append(body)
            there.keys.append(self.headers["Authorization"])
            self._send(*there.answers(body))

        def _send(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    there.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield there
    server.shutdown()
    server.server_close()


def right(body: dict[str, Any]) -> Answer:
    """Answer the sums rightly and the questions of multiple choice by B, which is wrong."""
    question = body["messages"][-1]["content"]
    if question.startswith("What is"):
        return says(f"\\boxed{{{int(question.split()[2]) + 1}}}")
    return says("\\boxed{B}")


def test_an_endpoint_is_scored_on_several_benchmarks(
    benchmarks: Path, endpoint: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.answers = right
    monkeypatch.setenv("MY_KEY", "secret")
    assert evaluated(endpoint.url, "--on", "gsm8k,mmlu-stem", "--key-env", "MY_KEY", "--json") == 0
    sets = json.loads(capsys.readouterr().out)["sets"]
    assert {name: (values["accuracy"], values["n"]) for name, values in sets.items()} == {
        "gsm8k": (1.0, 6),
        "mmlu-stem": (0.0, 4),
    }
    assert sets["gsm8k"]["length_mean"] == 7
    assert len(endpoint.requests) == 10
    assert set(endpoint.keys) == {"Bearer secret"}
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in endpoint.requests} == {
        ("tiny", 0.0, 2048)
    }


def test_votes_are_counted_and_printed(benchmarks: Path, endpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Three of four answers are right, in different notations: a majority with three quarters of the votes."""

    def answer(body: dict[str, Any]) -> Answer:
        n = int(body["messages"][-1]["content"].split()[2]) + 1
        return says(("\\boxed{%d}", "\\boxed{%d.0}", "\\boxed{0%d0}", "so \\boxed{ %d }")[body["seed"] % 4] % n)

    seeds: dict[str, int] = {}
    one_at_a_time = threading.Lock()

    def in_turn(body: dict[str, Any]) -> Answer:
        question = body["messages"][-1]["content"]
        with one_at_a_time:
            seeds[question] = seeds.get(question, -1) + 1
            return answer(body | {"seed": seeds[question]})

    endpoint.answers = in_turn
    words = (endpoint.url, "--on", "gsm8k", "--samples", "4", "--temperature", "1")
    assert evaluated(*words, "--json") == 0
    values = json.loads(capsys.readouterr().out)["sets"]["gsm8k"]
    assert (values["accuracy"], values["avg_at_4"], values["pass_at_4"]) == (0.75, 0.75, 1.0)
    assert (values["maj_at_4"], values["cons_at_4"]) == (1.0, 1.0)
    seeds.clear()
    assert evaluated(*words, "evaluation.consensus=0.8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["sets"]["gsm8k"]["cons_at_4"] == 0.0
    seeds.clear()
    assert evaluated(*words) == 0
    printed = capsys.readouterr().out
    for part in ("avg@4", "pass@4", "maj@4", "75.0%", "100.0%"):
        assert part in printed


def test_a_model_is_compared_with_an_endpoint_on_each_set_and_on_all(
    benchmarks: Path, endpoint: Any, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.answers = right
    small = ("sampling.max_new_tokens=4", "sampling.max_prompt_tokens=512", "generator.dtype=float32")
    words = (tiny_model, "--on", "gsm8k", "--on", "mmlu-stem", "--against", f"{endpoint.url}#tiny", *small)
    assert evaluated(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    gsm8k = found["sets"]["gsm8k"]
    assert gsm8k["against/accuracy"] == 1.0
    assert gsm8k["difference"] == pytest.approx(gsm8k["accuracy"] - 1.0)
    assert gsm8k["difference_low"] <= gsm8k["difference"] <= gsm8k["difference_high"]
    assert found["all"]["difference"] == pytest.approx(
        sum(values["n"] * values["difference"] for values in found["sets"].values()) / 10
    )
    assert evaluated(*words) == 0
    printed = capsys.readouterr().out
    assert f"gsm8k, against {endpoint.url}#tiny: " in printed
    assert "all tasks, against" in printed
    assert "mean over sets: " in printed


def test_an_artifact_is_a_model(
    benchmarks: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    register("policy", tiny_model, {path.name: digest(path) for path in tiny_model.iterdir()})
    small = ("sampling.max_new_tokens=4", "sampling.max_prompt_tokens=512", "generator.dtype=float32")
    words = ("artifact:policy:latest", "--on", "gsm8k", "--against", "artifact:policy:v1", *small)
    assert evaluated(*words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["sets"]["gsm8k"]["difference"] == 0
    assert evaluated("artifact:other:latest", "--on", "gsm8k") == 2
    assert "has no artifact 'other'" in capsys.readouterr().err


def test_a_recipe_is_compared_with_an_endpoint_on_its_own_tasks(
    endpoint: Any, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = {"more": {"data": {"type": "tests.toy:Lowercase", "size": 3}}}
    recipe = write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, evaluation={"limit": 5, "sets": sets}))
    endpoint.answers = lambda body: says("lowercase")
    assert evaluated(recipe, "--against", endpoint.url, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["n"], found["against/n"], found["against/accuracy"]) == (5, 5, 1.0)
    assert (found["more/n"], found["against/more/n"], found["against/more/accuracy"]) == (3, 3, 1.0)
    assert evaluated(recipe, "data.size=0", "--against", endpoint.url, "--json") == 0
    (name,), (alone,) = zip(*json.loads(capsys.readouterr().out)["sets"].items(), strict=True)
    assert (name, alone["n"], alone["against/accuracy"]) == ("more", 3, 1.0)


def test_an_answer_that_fails_is_asked_for_again(
    benchmarks: Path, endpoint: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.fetch.http.pause", lambda *_: 0.0)
    failures = [(429, {"error": "slow down"}), (500, {}), (200, {"choices": []})]
    one_at_a_time = threading.Lock()

    def answer(body: dict[str, Any]) -> Answer:
        with one_at_a_time:
            return failures.pop() if failures else right(body)

    endpoint.answers = answer
    assert evaluated(endpoint.url, "--on", "gsm8k", "--json") == 0
    assert json.loads(capsys.readouterr().out)["sets"]["gsm8k"]["accuracy"] == 1.0
    assert len(endpoint.requests) == 6 + 3


UNCHANGED = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize("unknown", [set(), {"top_k"}, {"top_k", "min_p", "repetition_penalty"}], ids=len)
def test_a_request_says_how_to_sample_as_far_as_the_endpoint_lets_it(
    benchmarks: Path, endpoint: Endpoint, unknown: set[str]
) -> None:
    """Servers of vLLM read the defaults of a request from the model's ``generation_config.json``."""

    def answer(body: dict[str, Any]) -> Answer:
        wrong = sorted(unknown & body.keys())
        return (400, {"error": {"message": f"Unrecognized request argument: {wrong[0]}"}}) if wrong else right(body)

    endpoint.answers = answer
    assert evaluated(endpoint.url, "--on", "gsm8k", "evaluation.concurrency=1", "--json") == 0
    answered = [body for body in endpoint.requests if not unknown & body.keys()]
    assert len(answered) == 6
    assert len(endpoint.requests) == 6 + len(unknown), "a setting is refused once"
    said = {name: value for name, value in UNCHANGED.items() if name not in unknown}
    assert all({name: body.get(name) for name in UNCHANGED if name in body} == said for body in answered)


def test_settings_that_an_evaluation_of_an_endpoint_does_not_read_are_told(
    benchmarks: Path, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.answers = right
    unread = ("tools_as_text=true", "sampling.top_p=0.9", "sampling={temperature: 0.5}", "sampling.max_new_tokens=20")
    assert evaluated(endpoint.url, "--on", "gsm8k", *unread) == 0
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "tools_as_text=true has no effect: this command does not read tools_as_text",
        "sampling.temperature and sampling.top_p have no effect on an evaluation, which samples from all tokens at "
        "evaluation.temperature (--temperature)",
    ]


def test_a_cut_answer_and_a_context_that_later_turns_fill_are_truncated(
    benchmarks: Path, endpoint: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.answers = lambda body: says("so", "length")
    assert evaluated(endpoint.url, "--on", "gsm8k", "--json") == 0
    assert json.loads(capsys.readouterr().out)["sets"]["gsm8k"]["truncated"] == 1.0
    full = (400, {"error": "max_tokens is too large: the maximum context length is 2048 tokens"})
    call = {"id": "1", "function": {"name": "guess", "arguments": '{"number": 1}'}}
    guess = (200, {"choices": [{"message": {"content": None, "tool_calls": [call]}}]})
    endpoint.answers = lambda body: full if body["messages"][-1]["role"] == "tool" else guess
    turns = ("sampling.max_turns=4", "generator.max_context=20000")
    assert evaluated(endpoint.url, "--on", "guessing", "--limit", "2", *turns, "--json") == 0
    assert json.loads(capsys.readouterr().out)["sets"]["guessing"]["truncated"] == 1.0


def test_answers_of_an_endpoint_that_counts_no_tokens_have_no_length(
    benchmarks: Path, endpoint: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.answers = lambda body: (200, {"choices": right(body)[1]["choices"]})
    assert evaluated(endpoint.url, "--on", "gsm8k", "--json") == 0
    found = json.loads(capsys.readouterr().out)["sets"]["gsm8k"]
    assert (found["length_mean"], found["accuracy"]) == (0, 1)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, {"error": "wrong key"}, "refuses the request with HTTP 401"),
        (404, {"error": "no such model"}, "HTTP 404"),
        (503, {}, "gave no reply in 6 attempts: HTTP 503"),
        (400, {"error": "longer than the context of 512"}, "lower sampling.max_new_tokens"),
        (200, {"error": "out of credits"}, "KeyError: 'choices', in the answer '{\"error\": \"out of credits\"}'"),
        (200, {**says("8")[1], "usage": {"completion_tokens": 10**12}}, "ValueError: 1000000000000 completion_tokens"),
        (200, {"choices": [{"message": {"content": 8}}]}, "ValueError: must be a text or a list of parts of text"),
    ],
)
def test_an_endpoint_that_gives_no_answer_is_an_error(
    benchmarks: Path, endpoint: Any, status: int, body: Any, message: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("whet.fetch.http.pause", lambda *_: 0.0)
    endpoint.answers = lambda _: (status, body)
    assert evaluated(endpoint.url, "--on", "gsm8k") in (1, 2)
    assert message in capsys.readouterr().err


def test_what_was_finished_is_told_if_a_later_set_or_model_fails(
    benchmarks: Path, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """The results of hours were lost with an error in the last set."""
    endpoint.answers = lambda body: says("\\boxed{1}") if "+" in str(body["messages"]) else (401, {"error": "no"})
    assert evaluated(endpoint.url, "--on", "gsm8k,mmlu-stem") != 0
    assert "finished before the evaluation ended: gsm8k, accuracy 16.7% of 6 tasks (95%: " in caplog.text
    caplog.clear()
    endpoint.answers = lambda body: says("\\boxed{1}") if body["model"] == "a" else (401, {"error": "no"})
    assert evaluated(f"{endpoint.url}#a", "--on", "gsm8k", "--against", f"{endpoint.url}#b") != 0
    assert f"{endpoint.url}#a gsm8k, accuracy 16.7% of 6 tasks" in caplog.text


def test_a_second_model_that_is_not_there_is_refused_before_the_first_is_scored(
    benchmarks: Path, endpoint: Endpoint, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    endpoint.answers = right
    for other, message in (
        ("nowhere", "model 'nowhere': there is no such folder"),
        (str(tmp_path), "has no config.json"),
        ("http://h:99999/v1#b", "not the address of a serv"),
    ):
        assert evaluated(f"{endpoint.url}#a", "--on", "gsm8k", "--against", other) == 2
        assert message in capsys.readouterr().err
    assert endpoint.requests == []


def test_sets_with_different_numbers_of_answers_share_no_measure_of_one_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shares = {"one": 1, "four": 4}
    reports = {
        name: Report(10, samples, 0.5, 0.2, 0.8, 0.5, 7.0, 0.0, pass_at={samples: 0.6 + samples / 10})
        for name, samples in shares.items()
    }
    print_reports("model", reports, None, None)
    shown = capsys.readouterr().out
    assert "avg@k" in shown
    assert "pass@k" in shown
    assert "@4" not in shown
    row = next(line for line in shown.splitlines() if "four" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")][:4] == ["four", "10", "4", "50.0%"]
    assert "100.0%" in row


def test_thinking_of_an_environment_of_a_blend_is_refused_for_an_endpoint() -> None:
    part = Part(taskset=Arithmetic(), sampling=Limits(thinking="off"))
    blend = EvaluationSet(data=Blend(of={"plain": Part(taskset=Arithmetic()), "sums": part}))
    with pytest.raises(ConfigError, match=r"^data.of.sums.sampling.thinking and .* which an endpoint doesn't allow"):
        check_for_endpoint(Sampling(), {"": blend})


def test_wrong_words_are_refused(
    benchmarks: Path, endpoint: Any, capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    endpoint.models = ["a", "b"]
    for words, message in (
        ((endpoint.url, "--on", "gsm8k"), f"serves a, b; name one: {endpoint.url}#MODEL"),
        (("http://127.0.0.1:9/v1", "--on", "gsm8k"), "can't be read"),
        (("http://[::1/v1", "--on", "gsm8k"), "is not the address of a server"),
        (("http://127.0.0.1:9/v1#a", "--on", "gsm8k", "--key-env", "NO_KEY"), "variable NO_KEY is not set"),
        ((tiny_model, "--on", "gsm8k", "--key-env", "MY_KEY"), "names the key of an endpoint, and no model is one"),
        ((f"{endpoint.url}#a", "--on", "gsm8k", "sampling.thinking=off"), "which an endpoint doesn't allow"),
        ((tiny_model,), "is a model, and a model has no tasks: name sets, as in --on gsm8k"),
        (("acme/model",), "acme/model is not a folder here, so it names a model of the Hub, and a model has no tasks"),
        ((tiny_model, "--on", "gms8k"), "Did you mean 'gsm8k'?"),
        ((tiny_model, "--on", "aime24"), "its rows must lie in"),
        ((tiny_model, "--on", "gsm8k", "--samples", "4"), "evaluation.samples = 4 at temperature 0 gives 4 times the"),
        ((tiny_model, "--on", ","), "--on names no set"),
        ((tiny_model, "--on", "gsm8k", "model=other"), "is the model already; name the other one in its place"),
        ((endpoint.url, "--on", "gsm8k", "model=other"), f"{endpoint.url} is the model already"),
        ((tiny_model, "--on", "gsm8k", "steps=x"), "error: override 1 (steps=x): steps: "),
        ((tiny_model, "--on", "gsm8k", "--split", "test"), "gsm8k is a benchmark, which has no splits"),
    ):
        assert evaluated(*words) == 2
        assert message in capsys.readouterr().err


def test_a_task_set_and_a_set_of_the_recipe_are_sets_too(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = {"more": {"data": {"type": "tests.toy:Lowercase", "size": 3}}}
    recipe = write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, evaluation={"sets": sets}))
    assert evaluated(recipe, "--on", "more,tests.toy:Lowercase", "--limit", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)["sets"]
    assert {name: values["n"] for name, values in found.items()} == {"more": 2, "tests.toy:Lowercase": 2}


def test_the_folder_of_a_model_may_have_any_name(
    benchmarks: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("null", "#1 {x}: \u00fc"):
        Path(name).symlink_to(tiny_model)
        assert (
            evaluated(name, "--on", "gsm8k", "--limit", "1", "sampling.max_new_tokens=4", "generator.dtype=float32")
            == 0
        )


def test_the_folder_of_an_adapter_is_a_model(
    benchmarks: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(r=2, task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    words = ("--on", "gsm8k", "--limit", "1", "sampling.max_new_tokens=4", "generator.dtype=float32")
    assert evaluated("adapter", *words) == 0


def test_the_split_of_the_command_is_that_of_each_named_set(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = {"more": {"data": {"type": "tests.run.test_evaluate_on:OnlyTrain"}}}
    recipe = write_recipe(tmp_path / "toy.yaml", toy_recipe(tiny_model, evaluation={"sets": sets}))
    assert evaluated(recipe, "--on", "more, tests.run.test_evaluate_on:OnlyTrain", "--split", "train", "--json") == 0
    assert [values["n"] for values in json.loads(capsys.readouterr().out)["sets"].values()] == [12, 4]


def test_a_recipe_that_learns_from_rows_is_scored_on_tasks(
    benchmarks: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1 + 1?", "completion": "2"}) + "\n")
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(f"extends: sft\nmodel: {tiny_model}\ndata: {{path: {rows}, test_path: null}}\n")
    small = ("sampling.max_new_tokens=4", "sampling.max_prompt_tokens=512", "generator.dtype=float32")
    assert evaluated(recipe, "--on", "gsm8k", "--limit", "3", "--json", *small) == 0
    assert json.loads(capsys.readouterr().out)["sets"]["gsm8k"]["n"] == 3
    for override, message in (
        ("model.path=nowhere", "model 'nowhere': there is no such folder"),
        ("chat_template=nowhere.jinja", "the chat template nowhere.jinja can't be read"),
    ):
        assert evaluated(recipe, "--on", "gsm8k", "--limit", "3", *small, override) == 2
        assert message in capsys.readouterr().err


def episode(text: str, correct: bool) -> tuple[Task, Episode]:
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    branch = Trajectory([Span([1], True)], talk)  # type: ignore[arg-type]
    return Task("t", []), Episode([branch], reward=float(correct), scores={"correct": float(correct)})


def test_majorities_need_answers_that_can_be_equal() -> None:
    answers = [episode("a", True), episode("a", True), episode("b", False), episode("", False)]
    report = Report.of(answers, 4, lambda task, text: text or None)
    assert (report.majority_at[4], report.consensus_at[4]) == (1.0, 1.0)
    assert Report.of(answers, 4, lambda task, text: text or None, share=0.6).consensus_at[4] == 0.0
    assert set(report.majority_at) == {2, 4}
    assert 0.5 < report.majority_at[2] < 1
    assert Report.of(answers, 4).majority_at == {}
    assert counts(6) == [1, 2, 4, 6]


def test_an_endpoint_is_asked_about_pictures(endpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint.answers = lambda body: says("3")
    assert evaluated(endpoint.url, "--on", "pictures", "--limit", "30", "--json") == 0
    accuracy = json.loads(capsys.readouterr().out)["sets"]["pictures"]["accuracy"]
    assert 0 < accuracy < 0.5, "a constant is right by chance"
    assert len(endpoint.requests) == 30
    for body in endpoint.requests:
        image, text = body["messages"][-1]["content"]
        assert open_image(image["image_url"]["url"]).size == (48, 48)
        assert text["type"] == "text"
