"""An export is uploaded to the Hub: here to a server in this process that answers as the Hub does."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from whet.base.errors import WhetError
from whet.cli.main import main
from whet.fetch.push import check_push, push

TOKEN = "hf_right"


class Hub(ThreadingHTTPServer):
    """The endpoints that an upload uses. Repositories are dicts of files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}  # by SHA-256
        self.created: list[dict[str, Any]] = []
        self.exists = self.private = self.forbidden = False
        self.messages: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def allowed(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.answer({"error": "Invalid username or password."}, 401)
        return False

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2":
            if self.allowed():
                self.answer({"type": "user", "name": "someone", "auth": {"accessToken": {"role": "write"}}})
        elif self.path.startswith("/api/models/someone/mine") and not self.server.forbidden:
            self.answer({"id": "someone/mine", "private": self.server.private, "sha": "0" * 40, "siblings": []})
        else:
            self.answer({"error": "not found"}, 404)

    def do_PUT(self) -> None:
        content = self.body()
        self.server.large[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    def do_POST(self) -> None:
        content = self.body()
        if self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
            return
        if not self.allowed():
            return
        if self.path == "/api/repos/create":
            asked = json.loads(content)
            self.server.created.append(asked)
            if self.server.forbidden:
                self.answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
            elif self.server.exists:
                self.answer({"error": "You already created this model repo", "url": "someone/mine"}, 409)
            else:
                self.server.private = asked.get("visibility") == "private"
                self.answer({"url": f"{self.server.url}/someone/mine", "id": "someone/mine"})
        elif "/preupload/" in self.path:
            files = json.loads(content)["files"]
            modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
            self.answer({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(content)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.server.url}/storage/{each['oid']}"}}
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            for line in map(json.loads, content.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    self.server.messages.append(value["summary"])
                elif line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.large[value["oid"]]
            url = f"{self.server.url}/someone/mine/commit/{'1' * 40}"
            self.answer({"success": True, "commitOid": "1" * 40, "commitUrl": url})
        else:
            self.answer({"error": "not found"}, 404)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # xet talks to other servers
    monkeypatch.setattr("huggingface_hub.hf_api.is_xet_available", lambda: False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "export"
    made.mkdir()
    for name in ("config.json", "README.md", "model.safetensors", "lineage.json"):
        (made / name).write_bytes(f"{{}} of {name}".encode())
    (made / "README.md").write_text("---\nlibrary_name: transformers\n---\n")
    return made


def test_all_files_but_the_lineage_arrive(hub: Hub, folder: Path) -> None:
    check_push("someone/mine")
    assert push(folder, "someone/mine", "the first").endswith("/someone/mine")
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lineage.json"}
    assert hub.messages == ["the first"]
    assert [(each["organization"], each["name"], each.get("visibility")) for each in hub.created] == [
        ("someone", "mine", None)
    ]


def test_a_private_repository_is_made_and_never_mistaken_for_a_public_one(hub: Hub, folder: Path) -> None:
    push(folder, "someone/mine", "first", private=True)
    assert hub.private
    hub.exists = True
    push(folder, "someone/mine", "second", private=True)
    hub.private = False
    with pytest.raises(WhetError, match="exists and is public, so --private can't be kept"):
        push(folder, "someone/mine", "third", private=True)
    assert hub.messages == ["first", "second"]


def test_errors_are_one_line(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WhetError, match="expected USER/NAME"):
        check_push("mine")
    hub.forbidden = True
    with pytest.raises(WhetError, match="answered with 403: the token may not write there"):
        push(folder, "someone/mine", "first")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(WhetError, match="answered with 401: the token is not valid"):
        check_push("someone/mine")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(WhetError, match="no Hugging Face token; run `hf auth login`"):
        check_push("someone/mine")
    monkeypatch.undo()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(WhetError, match="the Hub can't be reached") as raised:
        check_push("someone/mine")
    assert "\n" not in str(raised.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(WhetError, match="HF_HUB_OFFLINE forbids"):
        check_push("someone/mine")


def test_the_command_pushes_what_it_has_written(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.checkpoint.test_export import make_run
    from tests.tiny import tiny_llama

    run, _ = make_run(tmp_path, tiny_llama())
    words = ["export", str(run), "--out", str(tmp_path / "out"), "--push", "someone/mine", "--private"]
    with pytest.raises(SystemExit, match="0"):
        main(words)
    assert capsys.readouterr().out.endswith(f"pushed: {hub.url}/someone/mine\n")
    assert hub.files.keys() == {path.name for path in (tmp_path / "out").iterdir()} - {"lineage.json"}
    assert hub.files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert hub.messages == ["run, step 3, by whet export"]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--force", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"step": 3, "written": str(tmp_path / "out"), "pushed": f"{hub.url}/someone/mine"}
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(SystemExit, match="1"):
        main([*words, "--force"])
    assert "the token is not valid" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(run), "--out", str(tmp_path / "other"), "--private"])
    assert "--private is about --push" in capsys.readouterr().err
