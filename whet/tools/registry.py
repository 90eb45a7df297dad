"""The built-in sources of tools: the name in a recipe, and the class it stands for."""

TOOL_SOURCES = {
    "functions": "whet.tools.source:Functions",
    "mcp": "whet.tools.mcp_server:MCPServer",
}
