"""The settings of an endpoint, in a separate module, so that recipes are read without an HTTP server."""

from collections.abc import Iterator

from pydantic import Field

from whet.base.listening import reach
from whet.config import Config


class EndpointConfig(Config):
    """The address at which the programs of agents reach the policy. They run on this machine by default."""

    host: str = Field("127.0.0.1", min_length=1)
    """The address to listen on; beyond loopback, programs in containers and on other nodes reach it, encrypted."""
    port: int = Field(0, ge=0, le=65535)
    """The port to listen on; 0: a free one."""
    advertised: str | None = None
    """The name or address of this machine in the URL that programs get; None: ``host``."""
    certificate: str | None = None
    """A file with the certificate for TLS, and its chain, as PEM."""
    key: str | None = None
    """A file with the private key of the certificate, as PEM."""
    calls: int | None = Field(256, gt=0)
    """The most calls of one episode at the same time; more are refused with 429. None: any number."""

    @property
    def url(self) -> str:
        """The URL without its port."""
        host = self.advertised or self.host
        return f"{'https' if self.certificate else 'http'}://{f'[{host}]' if ':' in host else host}"

    def problems(self) -> Iterator[str]:
        """Yield the reasons why programs can't reach it safely."""
        local, anywhere = reach(self.host)
        if (self.certificate is None) != (self.key is None):
            yield "endpoint.certificate and endpoint.key belong together: set both, or none"
        elif not local and self.certificate is None:
            yield (
                f"endpoint.host = {self.host} is reached from other machines, which would send tokens and texts "
                "unencrypted; set endpoint.certificate and endpoint.key, files of a TLS certificate"
            )
        if anywhere and self.advertised is None:
            yield (
                f"endpoint.host = {self.host} means every address of this machine; set endpoint.advertised to the name "
                "by which programs reach it"
            )
