"""A real S3 server on this machine (moto's), with the requests it got."""

from __future__ import annotations

import logging
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

pytest.importorskip("moto.server", reason="the S3 server of the tests is moto's: pip install 'moto[server]' s3fs")
import boto3
import s3fs
from moto.core.authorization import enable_iam_authentication
from moto.server import ThreadedMotoServer

BUCKET = "checkpoints"
_REQUEST = re.compile(r'"(?:\x1b\[[\d;]*m)*([A-Z]+ \S+) HTTP')


@dataclass
class Store:
    """Where the server is, what a process needs to talk to it, and what was asked of it."""

    endpoint: str
    requests: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self):
        """Another way to the same server."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )

    def keys(self, prefix: str = "") -> list[str]:
        answer = self.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"] for item in answer.get("Contents", [])]

    def uploads(self) -> list[str]:
        """Multi-part uploads that were begun and neither completed nor aborted."""
        return [item["Key"] for item in self.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]

    def forget(self) -> None:
        """Everything but the bucket is gone."""
        urllib.request.urlopen(f"{self.endpoint}/moto-api/reset", data=b"").read()
        self.client().create_bucket(Bucket=BUCKET)
        self.requests.clear()
        s3fs.S3FileSystem.clear_instance_cache()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """As long as the ``with`` lasts, do what a real server does with keys that nobody gave out."""
        with enable_iam_authentication():
            yield


class _Listener(logging.Handler):
    def __init__(self, requests: list[str]) -> None:
        super().__init__()
        self.requests = requests

    def emit(self, record: logging.LogRecord) -> None:
        if found := _REQUEST.search(record.getMessage()):
            self.requests.append(found[1])


@contextmanager
def serve() -> Iterator[Store]:
    """Run a server as long as the ``with`` lasts."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    log = logging.getLogger("werkzeug")
    server.start()
    host, port = server.get_host_and_port()
    store = Store(f"http://{host}:{port}")
    listener = _Listener(store.requests)
    before = (log.level, log.propagate)
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(listener)
    try:
        store.forget()
        yield store
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
        log.removeHandler(listener)
        log.setLevel(before[0])
        log.propagate = before[1]
