"""TLS contexts from PEM files. Each is built in one step; errors name the file.

A context is never changed after it was built: authorities can be added but not removed, and a
certificate whose key does not match would already be loaded.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple


class CertificateError(OSError):
    """Files that cannot be used. The message contains nothing of their content."""


class ClientFiles(NamedTuple):
    """PEM files of a client: the authorities it trusts, and its certificate and key."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def paths(self) -> list[Path]:
        return [path for path in self if path is not None]

    def read(self) -> list[bytes | None]:
        """Return the content of each file. Raises OSError."""
        return [None if path is None else _read(path) for path in self]

    def load(self, password: str | None = None) -> tuple[ssl.SSLContext, list[bytes | None]]:
        """Return a client's context and the content it was built from.

        Raises OSError for files that cannot be used, and for files that change during the call.
        """
        content = self.read()
        context = client_context(self, password)
        if self.read() != content:
            raise CertificateError(f"{', '.join(map(str, self.paths))}: written to at this moment")
        return context, content


def client_context(files: ClientFiles, password: str | None = None) -> ssl.SSLContext:
    """Return a context that checks the server's name. Raises OSError.

    Without `ca` the system's authorities are trusted.
    """
    if files.ca is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, files.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.cert is not None:
        load_pair(context, files.cert, files.key, password)
    return context


def server_context(cert: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    """Return a server's context; with `client_ca`, clients need a certificate. Raises OSError.

    A resumed session shows no certificate, so a client whose authority is no longer trusted could
    reconnect with an old session. Where certificates are required, no session tickets are issued.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_pair(context, cert, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        load_authorities(context, client_ca)
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def load_pair(
    context: ssl.SSLContext, cert: Path, key: Path | None, password: str | None = None
) -> None:
    """Load a certificate with its key; without `key` both are in one file.

    Raises:
        OSError: a file cannot be read.
        CertificateError: a file is no PEM file, or certificate and key do not match.
    """
    of_key = cert if key is None else key
    for path in {cert, of_key}:
        _read(path)

    def given_password() -> str:
        if password is None:  # otherwise OpenSSL asks at the terminal
            raise CertificateError(f"{of_key} is encrypted; give the key without a password")
        return password

    try:
        context.load_cert_chain(cert, key, given_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateError(
                f"{cert} and {of_key} do not belong together: the key is another certificate's"
            ) from None
        raise CertificateError(
            f"{cert} is no certificate in PEM form, or {of_key} is no key, or one of them was cut"
        ) from None


def load_authorities(context: ssl.SSLContext, ca: Path) -> None:
    """Trust the certificates of a file. Raises OSError, CertificateError."""
    _read(ca)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError:
        raise CertificateError(f"{ca} has no certificates in PEM form, or was cut") from None


def _read(path: Path) -> bytes:
    """Read a file first: OpenSSL's own errors do not name it. Raises OSError, which does."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror}") from None
