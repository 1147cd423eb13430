"""Two ends of a connection over real sockets, and certificates for them."""

import datetime as dt
import inspect
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvxfer import Namespace
from kvxfer.backends.nixl import NixlConfig, identify_host
from kvxfer.backends.nixl.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION, Extents, Hello

HOST = "127.0.0.1"
SECRET = bytes(range(32))
NAMESPACE = Namespace(model="example/model", parallel={"tp_size": 2})


def hello(name: bytes, namespace: Namespace | None = NAMESPACE, **fields: Any) -> Hello:
    fields = {"version": PROTOCOL_VERSION, "oldest_version": OLDEST_VERSION} | fields
    return Hello(incarnation=name, namespace=namespace, **fields)


def local_hello(name: bytes, namespace: Namespace | None, **fields: Any) -> Hello:
    boot_id, pid, pid_namespace = identify_host()
    host = {"boot_id": boot_id, "pid": pid, "pid_namespace": pid_namespace}
    return hello(name, namespace, **host | fields)


def extents(
    *offsets: int,
    length: int | Sequence[int] = 4096,
    regions: int | Sequence[int] = 0,
    ends: Sequence[int] | None = None,
) -> Extents:
    """Make extents, each a block of its own unless `ends` are the block offsets."""
    ends = range(len(offsets) + 1) if ends is None else ends
    return Extents(
        regions=np.full(len(offsets), regions, "<u4").tobytes(),
        offsets=np.array(offsets, "<u8").tobytes(),
        lengths=np.full(len(offsets), length, "<u8").tobytes(),
        block_offsets=np.array(ends, "<i8").tobytes(),
    )


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate authority for this machine, with files as `NixlConfig` wants them."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        own, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        for name, content in (
            ("ca", _certificate("authority", own.public_key(), own)),
            ("cert", _certificate("peer", key.public_key(), own)),
            ("key", private),
        ):
            (self.folder / f"{name}.pem").write_bytes(content)

    def files(self, *names: str) -> dict[str, Any]:
        """List files of this authority, of TLS between peers by default, by their parameters."""
        chosen = names or ("tls_cert", "tls_key", "tls_ca")
        return {name: f"{self.folder / name.partition('_')[2]}.pem" for name in chosen}

    def config(self, **others: str) -> NixlConfig:
        return NixlConfig(address=f"{HOST}:1", **self.files() | others)


def _certificate(
    subject: str, public_key: ec.EllipticCurvePublicKey, issuer_key: ec.EllipticCurvePrivateKey
) -> bytes:
    """Sign a certificate of a peer, or that of the authority itself, in PEM."""
    now, is_ca = dt.datetime.now(dt.UTC), public_key == issuer_key.public_key()
    uses = dict.fromkeys(inspect.signature(x509.KeyUsage).parameters, False)
    uses |= {"digital_signature": True, "key_cert_sign": is_ca, "crl_sign": is_ca}
    issuer = issuer_key.public_key()
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), False),
        (x509.BasicConstraints(ca=is_ca, path_length=None), True),
        # OpenSSL is strict about these from Python 3.13 on.
        (x509.SubjectKeyIdentifier.from_public_key(public_key), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), False),
        (x509.KeyUsage(**uses), True),
    ]
    builder = x509.CertificateBuilder(
        *(_name("authority"), _name(subject), public_key, x509.random_serial_number()),
        *(now - dt.timedelta(days=1), now + dt.timedelta(days=1)),
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    signed = builder.sign(issuer_key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
