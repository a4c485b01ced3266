"""HTTP requests with one deadline and one size limit per reply, and without redirects."""

from __future__ import annotations

import functools
import http.client
import io
import socket
import time
import urllib.request
from typing import Any

__all__ = ["LARGEST", "TooLargeError", "opener", "read"]

LARGEST = 64 * 2**20
"""Bytes of the largest reply that is read: more than any image or text that a model is asked for."""


class TooLargeError(ValueError):
    """A reply is longer than `LARGEST`."""


def opener() -> urllib.request.OpenerDirector:
    """An opener whose `timeout` is the time for a whole reply, and which follows no redirect."""
    return urllib.request.build_opener(_NoRedirect, _HTTP, _HTTPS)


def read(response: Any, most: int | None = None) -> bytes:
    """The body of a reply; TooLargeError if it has more than `most` bytes, by default `LARGEST`."""
    most = LARGEST if most is None else most
    content: bytes = response.read(most + 1)
    if len(content) > most:
        raise TooLargeError(f"the reply has more than {most / 2**20:g} MiB")
    if getattr(response, "length", None):  # a read with a limit does not complain about an end that comes too early
        raise http.client.IncompleteRead(content, response.length)
    return content


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error, since it would send the key to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow no redirect."""


class _Timed(io.RawIOBase):
    """A socket's bytes until a deadline; a socket's own time limit holds for each read, so a slow drip extends it."""

    def __init__(self, raw: Any, sock: socket.socket, deadline: float) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the reply took longer than the time limit")
        self._sock.settimeout(left)
        found: int | None = self._raw.readinto(buffer)
        return found

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, deadline: float, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, deadline))


class _Deadline:
    """What a connection of either kind needs to give its replies one deadline."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        deadline = time.monotonic() + float(options["timeout"])
        self.response_class: Any = functools.partial(_Response, deadline=deadline)


class _Plain(_Deadline, http.client.HTTPConnection):
    pass


class _Secure(_Deadline, http.client.HTTPSConnection):
    pass


class _HTTP(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Plain, req)


class _HTTPS(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Secure, req)
