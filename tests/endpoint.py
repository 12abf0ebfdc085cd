"""A stand-in for a language model's server, over real HTTP."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Endpoint(ThreadingHTTPServer):
    """Answers with what `reply(number of the request, body)` gives."""

    daemon_threads = True

    def __init__(self, reply):
        self.reply, self.requests, self.headers = reply, [], []
        self.running = self.most = 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.running += 1
            server.most = max(server.most, server.running)
            number = len(server.requests)
            server.requests.append((self.path, body))
            server.headers.append(self.headers.get("Authorization"))
        status, text = server.reply(number, body)
        with server.lock:
            server.running -= 1
        if status is None:
            return  # the connection just ends
        reply = {"choices": [{"message": {"role": "assistant", "content": text}}]}
        written = json.dumps(reply).encode() if text is not None else b"rubbish"
        self.send_response(status)
        self.send_header("Content-Length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(reply):
    """An `Endpoint` on a port of its own, until the end."""
    with Endpoint(reply) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
