"""Builders of TLS contexts from PEM files. Errors name the file.

If the files change, a new context replaces the old context. A context is never changed after it was
built, for two reasons. Trusted authorities cannot be removed from a context. If loading new files
into a context failed halfway, the context would have a certificate without its private key.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple


class CertificateError(OSError):
    """PEM files cannot be used. The message contains nothing of their contents."""


class ClientFiles(NamedTuple):
    """PEM files of a TLS client.

    `ca` has the certificates of the trusted authorities. `cert` and `key` are the client's
    certificate and private key.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def paths(self) -> list[Path]:
        return [path for path in self if path is not None]

    def read(self) -> list[bytes | None]:
        """Return the contents of each file; None for a file that is not set. Raise OSError."""
        return [None if path is None else _read(path) for path in self]

    def load(self, password: str | None = None) -> tuple[ssl.SSLContext, list[bytes | None]]:
        """Return the client context, and the contents of the files that it was built from.

        Raise OSError for files that cannot be used, or that change during the call.
        """
        content = self.read()
        context = client_context(self, password)
        if self.read() != content:
            raise CertificateError(f"{', '.join(map(str, self.paths))}: written to at this moment")
        return context, content


def client_context(files: ClientFiles, password: str | None = None) -> ssl.SSLContext:
    """Return a client's context, which verifies the server's certificate and name.

    If `ca` is not set, the system's authorities are trusted. Raise OSError if a file cannot be
    used.
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
    """Return a server's context. If `client_ca` is set, clients must present a certificate.

    With `client_ca`, the server issues no session tickets: a client presents no certificate when it
    resumes a session, so it could reconnect after its authority is no longer trusted. Raise OSError
    if a file cannot be used.
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
    """Load a certificate and its key into `context`. If `key` is None, the file `cert` has both.

    Raises:
        OSError: a file cannot be read.
        CertificateError: a file is not a PEM file, or certificate and key do not match.
    """
    of_key = cert if key is None else key
    for path in {cert, of_key}:
        _read(path)

    def given_password() -> str:
        # Raise an error here: otherwise OpenSSL would ask for the password at the terminal.
        if password is None:
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
    """Add the certificates in a file to the trusted authorities.

    Raise CertificateError if the file cannot be used.
    """
    _read(ca)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError:
        raise CertificateError(f"{ca} has no certificates in PEM form, or was cut") from None


def _read(path: Path) -> bytes:
    """Return the contents of a file. Raise CertificateError, which names the file.

    OpenSSL's errors do not name the file, so files are read before they are passed to OpenSSL.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror}") from None
