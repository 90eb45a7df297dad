"""Where tools come from that a recipe names. A source is a setting; opened, it is a server, which several episodes
share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pydantic import Field

from whet.base.errors import ConfigError
from whet.config import Config
from whet.config.component import ComponentError, import_path
from whet.tools.tool import Tool, tools_of


class ToolServer(ABC):
    """The live side of a source."""

    @abstractmethod
    async def tools(self) -> Sequence[Tool]:
        """Return its tools, after starting the processes that they need, or restarting dead ones."""

    async def close(self) -> None:
        """Release what is held. By default nothing."""
        return


class ToolSource(Config, ABC):
    """Base of the entries of ``data.tools``."""

    @abstractmethod
    def open(self) -> ToolServer:
        """Build the server."""


class Functions(ToolSource):
    """A typed Python function, or a list of functions, by its dotted path."""

    path: str = Field(min_length=1)
    """As in ``my_tools:lookup``."""

    def open(self) -> "FunctionServer":
        try:
            return FunctionServer(tools_of(import_path(self.path)))
        except ComponentError as problem:
            raise ConfigError(f"data.tools: {problem}") from None


class FunctionServer(ToolServer):
    """Functions in this process."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools

    async def tools(self) -> Sequence[Tool]:
        return self._tools
