"""The servers of NeMo Gym that play and grade rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML

from whet.base.errors import ConfigError, DataError
from whet.fetch.http import get_json
from whet.tasks.gym.served_row import ServedRow

_HEAD_DEADLINE = 30.0  # seconds for an answer of a head server
SIMPLE = "simple_agent"  # the agent of Gym that whet plays itself


@dataclass(frozen=True)
class Route:
    """The server of a row."""

    url: str
    by_agent: bool  # an agent server of Gym plays the episode; otherwise whet plays it with a resources server


@dataclass(frozen=True)
class Servers:
    """URLs of resources servers, by their names and the names of their simple agents, and of agents, by their names."""

    resources: Mapping[str, str]
    agents: Mapping[str, str]

    def route(self, row: ServedRow) -> Route:
        """Return the server of a row. Raises ``DataError`` naming the row if its agent is not known: another agent's
        row is never played as a simple agent's."""
        name = row.player
        if name in self.agents:
            return Route(self.agents[name], by_agent=True)
        server = self.resources.get(name) or self.resources.get(name.removesuffix(f"_{SIMPLE}"))
        if server is None and name in ("", SIMPLE) and len(set(self.resources.values())) == 1:
            server = next(iter(self.resources.values()))
        if server is None:
            what = (
                f"the taskset {name!r}"
                if row.materialized
                else f"the agent {name!r}"
                if name
                else "a row without agent_ref"
            )
            raise DataError(
                f"{row.where}: no server for {what}; data.servers has: {_names(self.resources)}, and data.agents: "
                f"{_names(self.agents)}. Name the agent's server in data.agents; whet itself plays only NAME_{SIMPLE}, "
                "the simple agent of a server NAME in data.servers"
            )
        return Route(server, by_agent=False)


def servers_of(head: str) -> Servers:
    """Return the servers that a head server lists. Raises ``ConfigError`` if the list can't be read."""
    url = f"{head.rstrip('/')}/global_config_dict_yaml"
    resources, agents, simple = dict[str, str](), dict[str, str](), dict[str, str]()
    try:
        settings = YAML(typ="safe").load(get_json(url, _HEAD_DEADLINE))
        for name, kind, implementation, values in _instances(settings):
            address = f"http://{values['host']}:{values['port']}" if "port" in values else None
            if kind == "resources_servers" and address:
                resources[name] = address
            elif kind == "responses_api_agents" and implementation == SIMPLE and values.get("resources_server"):
                simple[name] = values["resources_server"]["name"]
            elif kind == "responses_api_agents" and address:
                agents[name] = address
    except Exception as problem:
        raise ConfigError(f"data.head: {url} doesn't list Gym's servers: {type(problem).__name__}: {problem}") from None
    behind = {agent: resources[server] for agent, server in simple.items() if server in resources}
    return Servers(resources | behind, agents)


def _instances(settings: Mapping[str, object]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Yield the name, kind, implementation and settings of each server in Gym's settings."""
    for name, kinds in settings.items():
        for kind, implementations in kinds.items() if isinstance(kinds, dict) else ():
            for implementation, values in implementations.items() if isinstance(implementations, dict) else ():
                if isinstance(values, dict):
                    yield name, kind, implementation, values


def _names(servers: Mapping[str, str]) -> str:
    return ", ".join(servers) or "none"
