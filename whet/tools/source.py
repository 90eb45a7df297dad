"""Sources of tools. A source is a config in a recipe; ``open`` returns its server, which all episodes share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pydantic import Field

from whet.base.errors import ConfigError
from whet.config import Config
from whet.config.component import ComponentError, import_path
from whet.tools.tool import Tool, tools_of

TOOL_SOURCES = {
    "functions": "whet.tools.source:Functions",
    "mcp": "whet.tools.mcp_server:MCPServer",
}
"""The built-in sources of tools: their names in a recipe, and their classes."""


class ToolServer(ABC):
    """An opened source, with its processes."""

    @abstractmethod
    async def tools(self) -> Sequence[Tool]:
        """Return the tools, after starting their processes, or restarting dead ones."""

    async def close(self) -> None:
        """End the processes. By default nothing."""
        return


class ToolSource(Config, ABC):
    """Base of the entries of ``data.tools``."""

    @abstractmethod
    def open(self) -> ToolServer:
        """Return a new server."""


class Functions(ToolSource):
    """A typed Python function, or a list of functions, by its dotted path."""

    path: str = Field(min_length=1)
    """The path of the function or list, as in ``my_tools:lookup``."""

    def open(self) -> "FunctionServer":
        try:
            if not (tools := tools_of(import_path(self.path))):
                raise ConfigError(f"data.tools: {self.path} has no tool: name a function, a list of them or an object")
            return FunctionServer(tools)
        except ComponentError as problem:
            raise ConfigError(f"data.tools: {problem}") from None


class FunctionServer(ToolServer):
    """Functions in this process."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools

    async def tools(self) -> Sequence[Tool]:
        return self._tools
