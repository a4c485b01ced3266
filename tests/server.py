"""A model server on loopback that can fail in every way a real one does."""

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image


def png(value: int = 128, side: int = 64) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (value, 100, 200)).save(buffer, "PNG")
    return buffer.getvalue()


class Server:
    """Answers with an image, or a chat with `answer(body)`; `script` replaces answers, one entry per request.

    Entries: a status, ("after", seconds) for 429 with Retry-After, ("chat", fields of the choice), ("json", reply),
    ("raw", status, body, headers), ("padded", bytes) for a good reply with so much white space,
    ("drip", seconds) for a reply byte by byte, "hang", "reset", "text", "half", "garbled", "tiny", "noise", "cut", and
    "die", after which the server no longer listens. A GET is answered with an image.
    """

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.made = 0
        self.busy = self.busiest = 0
        self.delay, self.hang = 0.0, 1.0
        self.url = ""
        self.answer: Callable[[dict[str, Any]], str] = lambda body: "Final Score: 3"
        self.fault: Callable[[dict[str, Any]], Any] = lambda body: None  # an entry as in `script`, or None
        self.repeat = ""  # text that an error message repeats
        self.die: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def next(self, request: dict[str, Any]) -> Any:
        with self._lock:
            self.requests.append(request)
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
            return self.script.pop(0) if self.script else self.fault(request["body"]) or "image"

    def done(self) -> None:
        with self._lock:
            self.busy -= 1


class Handler(BaseHTTPRequestHandler):
    """Serves both interfaces; the path decides which."""

    owner: Server

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """An image at a URL."""
        what = self.owner.next({"path": self.path, "body": None, "headers": dict(self.headers)})
        self._busy = True
        self._send(200, png()) if what == "image" else self._answer(what, {})

    def do_POST(self) -> None:
        """One request for an image."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = {"path": self.path, "body": body, "headers": dict(self.headers)}
        what, self._busy = self.owner.next(request), True
        try:
            self._answer(what, body)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            self._done()

    def _done(self) -> None:
        """Count the request as answered, once, before the caller receives the answer."""
        if self._busy:
            self._busy = False
            self.owner.done()

    def _answer(self, what: Any, body: dict[str, Any]) -> None:
        time.sleep(self.owner.delay)
        if isinstance(what, int):
            message = f"scripted {what}{self.owner.repeat}"
            elsewhere = {"Location": f"{self.owner.url}/elsewhere"} if what // 100 == 3 else None
            return self._send(what, json.dumps({"error": {"message": message}}).encode(), elsewhere)
        if isinstance(what, tuple) and what[0] == "chat":
            return self._send(200, json.dumps({"choices": [what[1]]}).encode())
        if isinstance(what, tuple) and what[0] == "json":
            return self._send(200, json.dumps(what[1]).encode())
        if isinstance(what, tuple) and what[0] == "raw":
            return self._send(*what[1:])
        if isinstance(what, tuple) and what[0] == "drip":
            for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n" + b" " * 40:
                self.wfile.write(bytes([byte]))
                time.sleep(what[1])
            return None
        if isinstance(what, tuple) and what[0] == "after":
            return self._send(429, b"{}", {"Retry-After": str(what[1])})
        if what == "cut":
            self.send_response(500)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"x")
            self.connection.close()
            return None
        if what == "hang":
            time.sleep(self.owner.hang)
            return None
        if what in ("reset", "die"):
            if what == "die":
                self.owner.die()
            self.connection.close()
            return None
        if what == "text":
            return self._send(200, json.dumps(self._reply("sorry, no image", body)).encode())
        if what == "garbled":
            return self._send(200, b'{"choices": [{"message": ' + self.owner.repeat.encode())
        content = {"tiny": png(side=8), "noise": b"not an image"}.get(str(what), png(self.owner.made % 256))
        reply = json.dumps(self._reply(base64.b64encode(content).decode(), body)).encode()
        self.owner.made += 1
        if isinstance(what, tuple) and what[0] == "padded":
            reply += b" " * what[1]
        if what == "half":
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply[: len(reply) // 2])
            self.connection.close()
            return None
        return self._send(200, reply)

    def _reply(self, text: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.path.endswith("/chat/completions"):
            content = text if " " in text else self.owner.answer(body)
            choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
            return {"choices": [choice], "usage": {"prompt_tokens": 1000, "completion_tokens": len(content) // 4}}
        if self.path.endswith(":generateContent"):
            part = {"text": text} if " " in text else {"inlineData": {"mimeType": "image/png", "data": text}}
            return {"candidates": [{"content": {"parts": [{"text": "here you are"}, part]}}]}
        return {"created": 1, "data": [{"url" if " " in text else "b64_json": text}]}

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self._done()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


class _HTTP(ThreadingHTTPServer):
    request_queue_size = 128  # with 5, the sixth concurrent caller waits a second until the kernel retries


@contextmanager
def serve() -> Iterator[Server]:
    """A running server, shut down at the end."""
    owner = Server()
    handler = type("Bound", (Handler,), {"owner": owner})
    http = _HTTP(("127.0.0.1", 0), handler)
    owner.url = f"http://127.0.0.1:{http.server_port}/v1"
    owner.die = http.socket.close
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield owner
    finally:
        http.shutdown()
        thread.join()
