"""The built-in sources of tools: their names in a recipe, and their classes."""

TOOL_SOURCES = {
    "functions": "whet.tools.source:Functions",
    "mcp": "whet.tools.mcp_server:MCPServer",
}
