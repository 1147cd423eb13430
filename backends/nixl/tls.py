"""TLS between peers with certificates of one authority."""

import ssl

from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.errors import InvalidArgumentError


def client_context(config: NixlConfig) -> ssl.SSLContext | None:
    """Make the TLS context for connections to peers; None without TLS.

    The certificate of a peer must name the host that is connected to.

    Raises:
        InvalidArgumentError: A file cannot be read, or is not a PEM file of its kind.
    """
    return _context(config, ssl.PROTOCOL_TLS_CLIENT) if config.uses_tls else None


def server_context(config: NixlConfig) -> ssl.SSLContext | None:
    """Make the TLS context for connections of peers; None without TLS.

    Raises: as `client_context`.
    """
    return _context(config, ssl.PROTOCOL_TLS_SERVER) if config.uses_tls else None


def _context(config: NixlConfig, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as exc:  # ssl.SSLError is one
        files = f"{config.tls_cert}, {config.tls_key}"
        wanted = f"a certificate and its private key in PEM: {exc}"
        raise InvalidArgumentError("tls_cert, tls_key", files, wanted) from exc
    try:
        context.load_verify_locations(config.tls_ca)
    except OSError as exc:
        wanted = f"a certificate of an authority in PEM: {exc}"
        raise InvalidArgumentError("tls_ca", config.tls_ca, wanted) from exc
    return context
