"""Configuration of object storage: the bucket, and limits of time and requests."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from kvxfer.configuration import Configuration
from kvxfer.endpoint import split_url
from kvxfer.errors import InvalidArgumentError
from kvxfer.extras import require_extra
from kvxfer.runtime import CLOSE_TIMEOUT_S
from kvxfer.settings import shown
from kvxfer.storage.integrity import Integrity

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

ACCOUNT_VARIABLES = "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"


class ObjectConfig(Configuration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `s3://bucket/prefix`, `gs://bucket/prefix` and `az://container/prefix`.

    Credentials come only from the environment, under the names that the clouds' own tools use.

    Attributes:
        address: The bucket.
        path: Prefix of the names of all objects.
        endpoint: URL of the server, such as `http://127.0.0.1:8333`; that of the cloud by default.
        integrity: `fast` stores an XXH3 checksum with every block, and verifies it before the
            engine gets the block; `off` does neither. `sealed` encrypts blocks.
        secret_file: File with the 32 bytes of the secret of `sealed`, or several, the newest first.
        tenant: Owner of `sealed` blocks; each tenant has a key of its own.
        timeout_s: Deadline of one request, its retries included.
        lookup_timeout_s: Deadline of a lookup; a block that is unknown by then is a miss.
        retry_after_s: Pause before the next attempt, after a server has failed several times.
        list_timeout_s: Deadline for the list of the namespace, which fills the cache of lookups.
        found_ttl_s: How long a block that was found is assumed to be there.
        missing_ttl_s: How long a block that was not there is assumed to be missing.
        max_requests: Maximum requests at a time, of which stores and deletes get three quarters.
        max_requests_per_s: Maximum requests that begin in a second; 0 for no limit.
        close_timeout_s: How long closing waits for deletes whose callers were cancelled, and then
            for threads that verify blocks, or list the bucket.

    Raises:
        InvalidArgumentError: There is no bucket, a number is out of range, or an address has
            credentials in it.
    """

    scheme: ClassVar[str]
    client_class: ClassVar[str]  # of obstore

    address: str = ""
    path: str = ""
    endpoint: str = ""
    integrity: Integrity = Integrity.FAST
    secret_file: str = ""
    tenant: str = ""
    timeout_s: float = 10.0
    lookup_timeout_s: float = 2.0
    retry_after_s: float = 5.0
    list_timeout_s: float = 60.0
    found_ttl_s: float = 300.0
    missing_ttl_s: float = 5.0
    max_requests: int = 32
    max_requests_per_s: float = 0.0
    close_timeout_s: float = CLOSE_TIMEOUT_S

    def __post_init__(self) -> None:
        """Check what can be checked without a request."""
        super().__post_init__()
        if self.integrity is Integrity.KEYED:
            raise InvalidArgumentError("integrity", "keyed", "'off', 'fast' or 'sealed'")
        if not self.address or set(self.address) & set("@/\\ \0"):
            raise InvalidArgumentError("address", shown(self.address), "the name of a bucket")
        is_plain = self.path.isprintable() and "\\" not in self.path  # a slash to SeaweedFS
        if not is_plain or {"", ".", ".."} & {*self.prefix.split("/")[:-1]}:
            wanted = "a prefix of printable characters other than \\, with no part empty, . or .."
            raise InvalidArgumentError("path", self.path, wanted)
        try:
            parts = split_url(self.endpoint)
        except ValueError:
            parts = split_url("")
        if self.endpoint and (parts.scheme not in ("http", "https") or "@" in parts.netloc):
            wanted = "a URL such as http://127.0.0.1:8333, without credentials"
            raise InvalidArgumentError("endpoint", shown(self.endpoint), wanted)
        self._require_positive("max_requests", "timeout_s", "lookup_timeout_s", "list_timeout_s")

    @property
    def prefix(self) -> str:
        """Beginning of every object's name: empty, or with a slash at its end."""
        prefix = self.path.strip("/")
        return f"{prefix}/" if prefix else ""

    @property
    def url(self) -> str:
        """The prefix in the bucket as a URL, without parameters."""
        return f"{self.scheme}://{self.address}/{self.prefix}"

    def _options(self) -> dict[str, Any]:
        """Return the options of the client that only this cloud has."""
        return {}

    def open_store(self) -> "ObjectStore":
        """Open a client whose requests do not outlive ours; it makes none yet, and retries none.

        `Bucket` retries requests, within its own deadline.

        Raises:
            MissingExtraError: obstore is not installed.
            InvalidArgumentError: The cloud needs more than is configured or in the environment.
        """
        require_extra("object", "obstore", what=f"{self.scheme}://")
        from obstore import store

        timeout = timedelta(seconds=self.timeout_s)
        client: ClientConfig = {"timeout": timeout, "connect_timeout": timeout}
        if self.endpoint.lower().startswith("http://"):
            client["allow_http"] = True
        retry: RetryConfig = {"max_retries": 0, "retry_timeout": timeout}
        opened: ObjectStore = getattr(store, self.client_class)(
            self.address, client_options=client, retry_config=retry, **self._options()
        )
        return opened


class S3Config(ObjectConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `s3://bucket/prefix`: S3, and servers that speak its protocol.

    Attributes:
        region: Region of the bucket; by default that of the environment.
        virtual_hosted: Whether the bucket is a part of the host's name, as AWS requires; by
            default only without an endpoint.
    """

    scheme: ClassVar[str] = "s3"
    client_class: ClassVar[str] = "S3Store"

    region: str = ""
    virtual_hosted: bool | None = None

    def _options(self) -> dict[str, Any]:
        is_hosted = not self.endpoint if self.virtual_hosted is None else self.virtual_hosted
        options: dict[str, Any] = {"virtual_hosted_style_request": is_hosted}
        options |= {"endpoint": self.endpoint} if self.endpoint else {}
        return options | ({"region": self.region} if self.region else {})


class GSConfig(ObjectConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `gs://bucket/prefix`: Google Cloud Storage."""

    scheme: ClassVar[str] = "gs"
    client_class: ClassVar[str] = "GCSStore"

    def _options(self) -> dict[str, Any]:
        return {"base_url": self.endpoint} if self.endpoint else {}


class AZConfig(ObjectConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `az://container/prefix`: Azure Blob Storage.

    Attributes:
        account: Storage account; by default that of the environment.
    """

    scheme: ClassVar[str] = "az"
    client_class: ClassVar[str] = "AzureStore"

    account: str = ""

    def _options(self) -> dict[str, Any]:
        if not self.account and not any(os.environ.get(name) for name in ACCOUNT_VARIABLES):
            wanted = f"a storage account, here or in {ACCOUNT_VARIABLES[0]}"
            raise InvalidArgumentError("account", self.account, wanted)
        options: dict[str, Any] = {"endpoint": self.endpoint} if self.endpoint else {}
        return options | ({"account_name": self.account} if self.account else {})
