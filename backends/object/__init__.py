"""Object storage: blocks in the buckets of S3, Google Cloud Storage and Azure."""

from kvxfer.backends.object.backend import AZBackend, GSBackend, ObjectBackend, S3Backend
from kvxfer.backends.object.bucket import Bucket
from kvxfer.backends.object.bucket_store import BucketStore
from kvxfer.backends.object.config import AZConfig, GSConfig, ObjectConfig, S3Config
from kvxfer.backends.object.request_failure import RequestFailedError

__all__ = [
    "AZBackend",
    "AZConfig",
    "Bucket",
    "BucketStore",
    "GSBackend",
    "GSConfig",
    "ObjectBackend",
    "ObjectConfig",
    "RequestFailedError",
    "S3Backend",
    "S3Config",
]
