"""Stand-in for an inference server that streams like vLLM and llama.cpp, with the standard library only."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Engine(ThreadingHTTPServer):
    """Server that answers a question by repeating it, with `kept` tokens in each step after the first.

    It counts three draft tokens per step, like vLLM. `reads` counts the tokens of a question. `faults` maps a question
    to the failures of its first requests.
    """

    reads: Callable[[str], int] = staticmethod(len)
    prefix = "vllm"
    """Prefix of the counter names."""

    def __init__(self, kept: int, name: str = "m", says: str = "", metrics: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.kept, self.name, self.says, self.metrics = kept, name, says, metrics
        self.faults: dict[str, list[str]] = {}
        self.asked: list[dict[str, Any]] = []
        self.counted: Counter[str] = Counter()
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *_: object) -> None:
        return

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self._send(200, "application/json", json.dumps({"data": [{"id": self.server.name}]}).encode())
        if self.path == "/metrics" and self.server.metrics:
            lines = ["# HELP vllm:spec_decode_num_drafts_total drafts", "python_info 1.0"]
            for name, count in self.server.counted.items():
                position = name.partition(" ")[2]
                label = f'engine="0",model_name="m"{f",position={json.dumps(position)}" if position else ""}'
                kind = f"{self.server.prefix}:spec_decode_num_{name.split()[0]}_total"
                lines.append(f"{kind}{{{label}}} {float(count)}")
            return self._send(200, "text/plain", "\n".join(lines).encode())
        return self._send(404, "text/plain", b"")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = request["messages"][-1]["content"]
        with self.server.guard:
            self.server.asked.append(request)
            fault = self.server.faults.get(question, []) and self.server.faults[question].pop(0)
        if fault in ("429", "500", "400"):
            return self._send(int(fault), "application/json", b'{"error": {"message": "not now, sk-secret"}}')
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        words = (question.split() * 20)[: min(request["max_tokens"], 13)]
        steps, at = [words[:1]], 1
        while at < len(words):
            steps.append(words[at : at + self.server.kept])
            at += self.server.kept
        for number, step in enumerate(steps):
            if fault == "half" and number == 2:
                return None
            self._chunk({"choices": [{"index": 0, "delta": {"content": self.server.says + " ".join(step) + " "}}]})
        with self.server.guard:
            if self.server.kept > 1:
                for step in steps[1:]:
                    self.server.counted.update({"drafts": 1, "draft_tokens": 3, "accepted_tokens": len(step) - 1})
                    self.server.counted.update(f"accepted_tokens_per_pos {i}" for i in range(len(step) - 1))
        self._chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        read = self.server.reads(question)
        usage = {"completion_tokens": len(words), "prompt_tokens": read, "total_tokens": read + len(words)}
        drafts = {"timings": {"draft_n": 30, "draft_n_accepted": 8}} if not self.server.metrics else {}
        self._chunk({"choices": [], "usage": usage} | drafts)
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _chunk(self, values: dict[str, Any]) -> None:
        about = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        self.wfile.write(f"data: {json.dumps(about | values)}\n\n".encode())
        self.wfile.flush()
