"""As much of the Hugging Face Hub's HTTP API as reading one dataset, org/name, takes."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator

COMMIT = "a" * 40


@contextlib.contextmanager
def serve_dataset(files: dict[str, bytes]) -> Iterator[str]:
    """Serve the files as the only commit of org/name, its main; gives HF_ENDPOINT."""
    handler = type("Handler", (_Handler,), {"files": files})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/datasets/org/name(?:/revision/(.+))?", path):
            if match[1] not in (None, "main", COMMIT):
                self._refuse("RevisionNotFound")
            else:
                names = [{"rfilename": name} for name in self.files]
                self._answer_json({"id": "org/name", "sha": COMMIT, "siblings": names})
        elif match := re.fullmatch(rf"/api/datasets/org/name/tree/{COMMIT}(?:/.+)?", path):
            self._answer_json([self._describe(name) for name in self.files] if path.endswith(COMMIT) else [])
        elif match := re.fullmatch(rf"/datasets/org/name/resolve/{COMMIT}/(.+)", path):
            if match[1] in self.files:
                self._answer_file(self.files[match[1]])
            else:
                self._refuse("EntryNotFound")
        else:
            self._refuse("RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _describe(self, name: str) -> dict:
        content = self.files[name]
        return {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": hashlib.sha256(content).hexdigest(),
        }

    def _answer_file(self, content: bytes) -> None:
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
        self._answer(206 if asked else 200, content, headers)

    def _answer_json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, code: str) -> None:
        self._answer(404, b"{}", {"Content-Type": "application/json", "X-Error-Code": code})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing is written where the tests are reported."""
