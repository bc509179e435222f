"""Checkpoints in S3-compatible storage: ``step-000000100/manifest.json`` makes a checkpoint, ``latest`` names the last.

The objects of each save have names of their own, which the manifest lists, so a save never overwrites another one of
the same step. ``.writer`` names the owner, who alone completes checkpoints.

The client is obstore, which flk's images have: a wheel of 18 MB without further packages that is imported in
0.06 s (boto3: 38 MB, 0.3 s; minio: 23 MB, 0.5 s; s3fs: 54 MB, 1.8 s), with retries, timeouts and multipart uploads, and
whose transfers do not hold Python's lock. It reads credentials as AWS's own tools do: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, and the roles of pods and machines.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from flk_runtime.checkpoint.storage.manifest import (
    LATEST,
    MANIFEST,
    METADATA,
    STEP,
    StoredFile,
    measure,
    pointer_text,
    step_name,
)
from flk_runtime.errors import MismatchError, storage_access

_RETRIES = 6  # of a request: for about 6 seconds; a save that fails is tried again at the next one
_RETRY_TIME = timedelta(minutes=1)  # after which a request that fails is an error
_TIMEOUT = timedelta(seconds=60)  # of a request
_CONNECT_TIMEOUT = timedelta(seconds=10)
_PART = 16 << 20  # bytes of a part of an upload
_OWN_FILE = re.compile(r"__\d+_\d+(\.[0-9a-f]+-\d+)?\.distcp|\.metadata(\.[0-9a-f]+-\d+)?")
_PROBE = ".probe"
_WRITER = ".writer"  # names the owner
_SERVER_ERROR = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
_STATUS = re.compile(r"status code: (\d+ [\w ]+)")


class S3Destination:
    """A prefix in a bucket. Methods raise OSError where the storage cannot be used, `prepare` CheckpointError."""

    folder = None
    passing_errors = True  # a network or a server that fails may recover

    def __init__(self, address: str) -> None:
        """``address``: ``s3://BUCKET/PREFIX``. Raises CheckpointError if obstore is missing or the address is wrong."""
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError:
            raise MismatchError(
                f"checkpoints in {address} need the package obstore: add `pip install obstore` to the image"
            ) from None
        parts = urlsplit(address)
        if not parts.netloc:
            raise MismatchError(f"{address} names no bucket: expected s3://BUCKET/PREFIX")
        self.place = address.rstrip("/")
        self.token = ""
        self.damaged: set[int] = set()
        """Steps of checkpoints that were found damaged: not among those that stay when others are saved."""
        self._suffix = ""  # of the names of the latest save's objects
        self._client = obstore
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        self._store = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options={
                "timeout": _TIMEOUT,
                "connect_timeout": _CONNECT_TIMEOUT,
                "allow_http": endpoint.startswith("http://"),
            },
            retry_config={"max_retries": _RETRIES, "retry_timeout": _RETRY_TIME},
        )

    def prepare(self) -> None:
        """Write a probe. Only rank 0 calls this."""
        with storage_access(f"write checkpoints to {self.place}"):
            self._put(_PROBE, b"flk")
            with _errors():
                self._client.delete(self._store, _PROBE)

    def claim(self) -> None:
        """Become the owner, and remove objects that killed uploads have left. Only rank 0 calls this."""
        self._put(_WRITER, self.token.encode())
        for step, files in self._names().items():
            if MANIFEST not in files and all(_OWN_FILE.fullmatch(file) for file in files):
                self._delete(step, files)

    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, from the oldest."""
        return sorted(step for step, files in self._names().items() if MANIFEST in files)

    def latest(self) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self._get(LATEST)
        return None

    def locate(self, step: int) -> str:
        return f"{self.place}/{step_name(step)}"

    def new_name(self, file: str, save: int) -> str:
        """The name of an object of a checkpoint that is being written, the ``save``-th of this writer."""
        self._suffix = f".{self.token}-{save}"
        return f"{file}{self._suffix}" if file == METADATA else self._suffix.join(os.path.splitext(file))

    @contextlib.contextmanager
    def create(self, step: int, file: str) -> Iterator[BinaryIO]:
        """A new object, uploaded in parts. An exception in the block leaves no object."""
        with _errors(), self._client.open_writer(self._store, _key(step, file), buffer_size=_PART) as stream:
            yield cast(BinaryIO, _Copying(stream))

    def measure_new(self, step: int, file: str) -> StoredFile:
        return self.measure(step, file)

    def measure(self, step: int, file: str) -> StoredFile:
        """Size and checksum of an object, which is read in parts."""
        with _errors():
            return measure(self._client.get(self._store, _key(step, file)))

    def open(self, step: int, file: str, begin: int = 0, length: int = -1) -> BinaryIO:
        if length < 0:
            return io.BytesIO(self._get(_key(step, file)))
        with _errors():
            found = self._client.get_range(self._store, _key(step, file), start=begin, length=length)
        return io.BytesIO(found.to_bytes())

    def commit(self, step: int, manifest: bytes) -> None:
        """Write the manifest, which makes the checkpoint visible, and move the pointer. Only rank 0 calls this.

        A checkpoint of this step that is there already is replaced.
        """
        try:
            owner = self._get(_WRITER).decode()
        except FileNotFoundError:  # somebody has emptied the place: without an owner all later saves would fail
            owner = self.token
            self._put(_WRITER, owner.encode())
        if owner != self.token:
            raise MismatchError(f"another run saves in {self.place} since then")
        self._put(_key(step, MANIFEST), manifest)
        self._put(LATEST, pointer_text(step).encode())
        with contextlib.suppress(OSError), _errors():
            # For torch's own reader.
            self._client.copy(self._store, _key(step, METADATA + self._suffix), _key(step, METADATA))
            named = [file for file in self._names()[step] if file != METADATA and _OWN_FILE.fullmatch(file)]
            self._delete(step, [file for file in named if self._suffix not in file])

    def discard(self, step: int) -> None:
        """Remove the objects of the latest save, unless it is complete. Only rank 0 calls this."""
        with contextlib.suppress(OSError):
            new = [file for file in self._names().get(step, ()) if self._suffix in file]
            with contextlib.suppress(FileNotFoundError):
                if self._suffix.encode() in self._get(_key(step, MANIFEST)):
                    return
            self._delete(step, new)

    def remove(self, step: int) -> None:
        self._delete(step, self._names().get(step, []))

    def _names(self) -> dict[int, list[str]]:
        """The files of each step."""
        found: dict[int, list[str]] = {}
        with _errors():
            for batch in self._client.list(self._store):
                for each in batch:
                    folder, _, file = str(each["path"]).partition("/")
                    if match := STEP.fullmatch(folder):
                        found.setdefault(int(match[1]), []).append(file)
        return found

    def _delete(self, step: int, files: list[str]) -> None:
        """Delete the files of a step, the manifest first, so that no part of a checkpoint looks whole."""
        with _errors():
            for file in sorted(files, key=lambda file: file != MANIFEST):
                self._client.delete(self._store, _key(step, file))

    def _get(self, key: str) -> bytes:
        with _errors():
            return bytes(self._client.get(self._store, key).bytes())

    def _put(self, key: str, content: bytes) -> None:
        with _errors():
            self._client.put(self._store, key, content)


class _Copying:
    """A stream that writes copies to another stream, which keeps its buffers until they are sent."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _PART):
            self._stream.write(bytes(view[begin : begin + _PART]))
        return len(view)


def _key(step: int, file: str) -> str:
    return f"{step_name(step)}/{file}"


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise obstore's errors as OSError, with the server's own words in one line."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except FileNotFoundError as error:
        if "<Code>" in str(error) and "NoSuchKey" not in str(error):  # of the bucket, or of the user
            raise PermissionError(_words(error)) from error
        raise
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise PermissionError(_words(error)) from error
    except (BaseError, OSError) as error:
        raise OSError(_words(error)) from error


def _words(error: BaseException) -> str:
    text = str(error)
    if match := _SERVER_ERROR.search(text):
        return f"{match[1]}: {match[2]}"
    if match := _STATUS.search(text):
        return f"the server answered {match[1].strip()}"
    return text.splitlines()[0]
