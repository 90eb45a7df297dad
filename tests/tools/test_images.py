"""Tools and servers that return images: the model sees them as parts; what can't be read is an error for it."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from whet.core.types import Message, Task, ToolCall
from whet.fetch.images import open_image
from whet.tasks.tools.base import ToolTasks
from whet.tools.mcp_server import MCPServer
from whet.tools.tool import Tool, tool
from whet.tools.toolbox import Toolbox, ToolLimits

SERVER = '''
import base64, io
from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent, TextContent
from PIL import Image

server = MCPServer("pictures")

@server.tool()
def look(damaged: bool) -> list[TextContent | ImageContent]:
    """Look."""
    file = io.BytesIO()
    Image.new("RGB", (7, 5), "red").save(file, "PNG")
    content = b"no image" if damaged else file.getvalue()
    data = base64.b64encode(content).decode()
    return [TextContent(type="text", text="Here:"), ImageContent(type="image", data=data, mime_type="image/png")]

server.run()
'''


def call(name: str, **arguments: Any) -> ToolCall:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def screen(words: bool) -> Any:
    """Show the screen."""
    picture = Image.new("CMYK", (4, 3))
    return ["The screen: " + "x" * 200, picture] if words else picture


async def screen_later() -> Image.Image:
    """Show the screen."""
    return Image.new("RGB", (4, 3))


def result(made: Tool, **arguments: Any) -> Any:
    box = Toolbox([made], ToolLimits(max_result_chars=100))
    return asyncio.run(box.answer([call(made.name, **arguments)]))[0]["content"]


def test_a_function_returns_an_image_or_texts_and_images() -> None:
    (part,) = result(tool(screen), words=False)
    assert open_image(part["url"]).size == (4, 3)
    text, part = result(tool(screen), words=True)
    assert text == {"type": "text", "text": f"The screen: {'x' * 88}\n[the rest is left out]"}
    assert open_image(part["url"]).mode == "RGB"
    (part,) = result(tool(screen_later))
    assert part["type"] == "image"


def listed() -> list[str]:
    """List."""
    return ["a", "b"]


def test_a_list_without_an_image_is_json_as_before() -> None:
    assert result(tool(listed)) == '["a", "b"]'


class Looking(ToolTasks):
    """Look, then answer."""

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"look/{split}", [{"role": "user", "content": "Look."}])]

    def state(self, task: Task) -> Any:
        return []

    def score(self, task: Task, state: Any, answer: str) -> float:
        return float(answer == "red")


@pytest.mark.parametrize("damaged", [False, True])
def test_an_episode_gets_the_images_of_a_server(tmp_path: Path, damaged: bool) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    tasks = Looking(tools=(MCPServer(command=(sys.executable, str(tmp_path / "server.py"))),))

    async def play() -> tuple[Message, float]:
        environments = tasks.open()
        try:
            episode = environments.make(tasks.tasks("train")[0])
            await episode.start()
            seen = await episode.step(
                {"role": "assistant", "content": "", "tool_calls": [call("look", damaged=damaged)]}
            )
            last = await episode.step({"role": "assistant", "content": "red"})
            return seen.messages[0], last.reward
        finally:
            await environments.close()

    message, reward = asyncio.run(play())
    assert reward == 1.0
    if damaged:
        assert message["content"] == "Error: not an image in one of the formats PNG, JPEG, WEBP, GIF, BMP"
        return
    text, image = message["content"]
    assert text == {"type": "text", "text": "Here:"}
    assert isinstance(image, dict)
    assert image["type"] == "image"
    assert open_image(image["url"]).size == (7, 5)
