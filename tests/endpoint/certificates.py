"""Certificates for tests of TLS, made by openssl."""

import subprocess
from pathlib import Path


def certificate(folder: Path) -> tuple[Path, Path]:
    """Return the files of a certificate for localhost and 127.0.0.1, signed by itself, and of its key."""
    made, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True)
    return made, key
