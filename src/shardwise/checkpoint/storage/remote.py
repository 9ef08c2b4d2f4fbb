"""Remote stores: a strict file system, uploads in parallel parts, and readable errors."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.errors import CheckpointError, ShardwiseError, UserError

if TYPE_CHECKING:
    from upath import UPath

MIB = 1 << 20
PART = 32 * MIB  # bytes per part of an upload; larger where a file would have too many
MOST_PARTS = 9000  # S3 takes 10,000
UPLOADS = 4  # concurrent parts of one file
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
_KNOWN = "give a path, or a URL that fsspec supports (s3://bucket/folder, gs://bucket/folder, abfs://container/folder)"
_BAD_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "InvalidClientTokenId"}
_UNREACHABLE = ("Connection", "Connect", "Timeout", "gaierror", "ServerDisconnected", "ClientOSError", "ClientPayload")
_NUMBERS = {FileExistsError: errno.EEXIST, IsADirectoryError: errno.EISDIR, NotADirectoryError: errno.ENOTDIR}
_CLIENTS = {"botocore", "aiobotocore", "aiohttp", "google", "gcsfs", "azure", "requests", "urllib3", "huggingface_hub"}


def open_url(place: str) -> UPath:
    """Return the path behind a URL, with a `StrictFiles` under it; sends no request.

    Raises:
        UserError: the protocol is unknown, its package is not installed, or the bucket is missing.
    """
    from upath import UPath

    protocol = place.split("://", 1)[0]
    try:
        remote = UPath(place)
        _ = remote.fs  # imports the protocol's package
    except ImportError as error:
        package = _PACKAGES.get(protocol, "")
        fix = f"pip install {package}" if package else str(error)
        raise UserError(f"'{place}': '{protocol}://' needs a package that is not installed; {fix}") from None
    except ValueError as error:
        raise UserError(f"'{place}': {error}; {_KNOWN}") from None
    except Exception as error:
        raise plain_error(error, place) from None
    if protocol in _PACKAGES and not remote.path.split("/")[0]:
        raise UserError(f"'{place}' names no bucket; {_KNOWN}")
    return strict(remote)


def strict(remote: UPath) -> UPath:
    """Return the same path over a `StrictFiles`; derived paths (``remote / "name"``) use it too."""
    if not isinstance(remote.fs, StrictFiles):
        remote._fs_cached = StrictFiles(remote.fs, remote.protocol)
    return remote


class StrictFiles:
    """Fsspec file system with three differences.

    It raises when it cannot find out whether a file exists: without credentials or network fsspec's ``isfile`` returns
    False, and a run with checkpoints would start from scratch. It caches no listings, which hide files of other
    processes. Its errors are an `OSError` with number and path, or a `ShardwiseError`.
    """

    def __init__(self, files: Any, protocol: str) -> None:
        self.files = files
        self.scheme = protocol

    def __getattr__(self, name: str) -> Any:
        if name in ("files", "scheme"):  # not initialized yet: copying and unpickling ask
            raise AttributeError(name)
        value = getattr(self.files, name)
        return self._guarded(value) if callable(value) else value

    def isfile(self, path: str) -> bool:
        """Return whether it is a file."""
        return self._kind(path) == "file"

    def isdir(self, path: str) -> bool:
        """Return whether there is something below it."""
        return bool(self._guarded(self.files.isdir)(path)) or self._kind(path) == "directory"  # a True can be trusted

    def exists(self, path: str, **options: Any) -> bool:
        """Return whether it is a file, or there is something below it."""
        return self._kind(path) is not None

    def mkdir(self, path: str, **options: Any) -> None:
        """Create a folder.

        A no-op for object stores, which have no folders: this never creates a bucket of a wrong name.
        """
        if self.scheme not in _PACKAGES:
            self._guarded(self.files.mkdir)(path, **options)
            return
        bucket = path.strip("/").split("/")[0]
        try:
            self._guarded(self.files.info)(bucket)
        except FileNotFoundError:
            raise plain_error(_NoBucket(), f"{self.scheme}://{bucket}") from None
        except UserError:
            pass  # credentials that may write objects, but not inspect the bucket

    def _kind(self, path: str) -> str | None:
        try:
            return str(self._guarded(self.files.info)(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **options: Any) -> Any:
            try:
                self.files.invalidate_cache()
                return call(*args, **options)
            except Exception as error:
                path = args[0] if args and isinstance(args[0], str) else ""
                raise plain_error(error, f"{self.scheme}://{path}") from None

        return guarded


class Upload(Protocol):
    """Sequential remote upload, visible once it is closed."""

    def write(self, view: memoryview) -> None:
        """Append bytes."""

    def close(self) -> None:
        """Finish the upload; all bytes are stored when this returns."""

    def discard(self) -> None:
        """Abort the upload; no file is left."""


def start_upload(path: UPath, size: int | None) -> Upload:
    """Start an upload to ``path``; ``size`` is the maximum size, where known."""
    files = path.fs
    part = max(PART, -(-(size or 0) // MOST_PARTS // MIB) * MIB) if size else 2 * PART
    if hasattr(files, "call_s3"):
        return _Parts(path, part)
    return _Stream(path, part)


class _Parts:
    """Upload to S3: one put if small, else concurrent parts of one size."""

    def __init__(self, path: UPath, part: int) -> None:
        self.path = path
        self.part = part
        files: Any = path.fs
        bucket, key, _ = files.split_path(path.path)
        self._target = {"Bucket": bucket, "Key": key}
        self._buffer = io.BytesIO()
        self._upload: str | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._parts: list[Future[str]] = []

    def write(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += self._buffer.write(view[done : done + self.part - self._buffer.tell()])
            if self._buffer.tell() == self.part:
                self._send()

    def close(self) -> None:
        if self._upload is None:
            self._call("put_object", Body=_from_start(self._buffer))
            return
        if self._buffer.tell():
            self._send()
        tags = [{"PartNumber": number + 1, "ETag": part.result()} for number, part in enumerate(self._parts)]
        self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": tags})
        self._stop()

    def discard(self) -> None:
        self._stop()
        self._buffer = io.BytesIO()
        if self._upload is not None:
            self._call("abort_multipart_upload", UploadId=self._upload)

    def _send(self) -> None:
        if self._pool is None:
            self._upload = str(self._call("create_multipart_upload")["UploadId"])
            self._pool = ThreadPoolExecutor(UPLOADS, "upload")
        if len(self._parts) >= UPLOADS:
            self._parts[-UPLOADS].result()  # bounds the parts in memory; the first error ends the upload
        body, self._buffer = _from_start(self._buffer), io.BytesIO()
        self._parts.append(self._pool.submit(self._put, len(self._parts) + 1, body))

    def _put(self, number: int, body: io.BytesIO) -> str:
        return str(self._call("upload_part", UploadId=self._upload, PartNumber=number, Body=body)["ETag"])

    def _call(self, what: str, **options: Any) -> Any:
        files: Any = self.path.fs
        try:
            return files.files.call_s3(what, **self._target, **options)
        except Exception as error:
            raise plain_error(error, str(self.path)) from None

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _from_start(stream: io.BytesIO) -> io.BytesIO:
    stream.seek(0)
    return stream


class _Stream:
    """Upload through fsspec's generic stream: one part after the other."""

    def __init__(self, path: UPath, part: int) -> None:
        self.path = path
        self.part = part
        self._stream: Any = path.fs.open(path.path, "wb", block_size=part)

    def write(self, view: memoryview) -> None:
        for begin in range(0, len(view), self.part):  # the stream copies its input, and sends it as one part
            self._try(self._stream.write, view[begin : begin + self.part])

    def close(self) -> None:
        self._try(self._stream.close)

    def discard(self) -> None:
        discard = getattr(self._stream, "discard", None)
        if discard is not None:
            discard()
        try:
            self._stream.closed = True  # otherwise buffered bytes are written when it is garbage collected
        except AttributeError:
            self._stream.close()
        if self.path.protocol not in _PACKAGES:  # in an object store nothing is visible before close
            self.path.unlink(missing_ok=True)

    def _try(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            raise plain_error(error, str(self.path)) from None


class _NoBucket(Exception):
    response = {"Error": {"Code": "NoSuchBucket"}}  # noqa: RUF012


def plain_error(error: Exception, where: str) -> Exception:
    """Convert a store client's error to one that names ``where`` and the fix.

    `UserError` for what the user has to fix (bucket, credentials, permissions), `CheckpointError` for a server that
    does not answer, an `OSError` with number and path for what has one. A program defect is returned unchanged.
    """
    if isinstance(error, ShardwiseError):
        return error
    kind, code = type(error).__name__, _code_of(error)
    text = str(error).strip() or kind
    if code == "NoSuchBucket":
        return UserError(f"'{where}': there is no such bucket; make it first, or correct the URL")
    if code in _BAD_KEYS or "Credential" in kind or "ProfileNotFound" in kind:
        return UserError(
            f"'{where}': no valid credentials ({text}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, "
            "or whatever the store's own command line tool takes them from"
        )
    if isinstance(error, PermissionError):
        return UserError(
            f"'{where}': access denied ({text}); the credentials must be allowed to list, read, write and delete there "
            "(without the permission to list, a store also reports this for missing objects)"
        )
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
    if isinstance(error, ConnectionError | TimeoutError) or any(part in kind for part in _UNREACHABLE):
        return CheckpointError(
            f"'{where}': the server does not answer ({text}); check the network and the endpoint (AWS_ENDPOINT_URL)"
        )
    if kind == "ParamValidationError":
        return UserError(f"'{where}': {text}; correct the URL")
    if isinstance(error, OSError):
        number = next((number for cls, number in _NUMBERS.items() if isinstance(error, cls)), errno.EIO)
        return OSError(error.errno or number, error.strerror or text, where)
    if type(error).__module__.split(".")[0] in _CLIENTS:
        return CheckpointError(f"'{where}': {kind}: {text}")
    return error


def _code_of(error: BaseException | None) -> str:
    """Return the error code in a store's answer, such as ``NoSuchBucket``; empty if none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""
