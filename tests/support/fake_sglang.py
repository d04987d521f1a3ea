"""A server that speaks SGLang's protocol without a model, with as many faults as a test asks for.

Usage: python fake_sglang.py --port 0 --ready-file FILE [--faults JSON] [--latency-s S] ...
Answers depend on the prompt alone, so a test can say what each must be. Standard library only.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict, deque
from pathlib import Path

# A child, its child, and one in a session of its own; each adds its process id to a file.
FAMILY = """
import os, sys, time
if os.fork() == 0 and os.fork() == 0:
    os.setsid()
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""
VOCAB_SIZE = 1024
STOP_ID = 2
NOT_A_ROUTERS = ("/ready", "/model_info", "/server_info", "/v1/loads", "/abort_request")  # 404 in smg 1.13


def prompt_key(input_ids):
    """Names a prompt in `FakeServer.answered` and `FakeServer.faulty`."""
    return hashlib.sha256(json.dumps(input_ids).encode()).hexdigest()


def expected_answer(input_ids, max_new_tokens, mean_tokens):
    """The ids and finish reason that the fake gives to a prompt."""
    seed = hashlib.sha256(json.dumps(input_ids).encode()).digest()
    rng = random.Random(seed)
    length = max(2, round(rng.lognormvariate(0, 0.6) * mean_tokens / 1.2))
    ids = [rng.randrange(100, 1000) for _ in range(length - 1)] + [STOP_ID]
    if length > max_new_tokens:
        return ids[:max_new_tokens], {"type": "length", "length": max_new_tokens}
    return ids, {"type": "stop", "matched": STOP_ID}


def answer_text(output_ids):
    """The text that comes with these ids: other ids, another text."""
    return f"answer {output_ids[0]} {len(output_ids)}"


async def wait_until(condition, timeout_s=60.0):
    """Poll until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  any condition, not only an event of ours
            await asyncio.sleep(0.002)


class FakeServer:
    """Answers at once or at a given speed, and badly as often as told.

    `faults` maps a fault's name to its probability per request: status_500, status_503, reset, torn, hang,
    half, abort, empty, wrong_count, foreign_id, away (a router's 503); `script` names the faults of the next
    requests (None is a good answer). A prompt with the id `poison` gets a 400, one with the id `mute` an
    empty answer, each time; one with the id `killer` kills the server for `down_s`. With an `api_key`,
    /generate and the pages about the server want it. While `gate` is closed it is frozen (/freeze closes it):
    it takes requests and answers none, and its /v1/loads stands still. `served_model_name`, `context_length`
    and `max_total_num_tokens` are what it says of itself, after `info_failures` 500s. With a `tokenizer` (a
    folder) it takes text too, and has a text for ids (/detokenize). `vocab_size` is its model's: an id at or
    above it kills it, and it names the size when it refuses a bias, unless `tells_vocab` is False. Its
    answers begin with `lead`, and with a `think_id` before; with `no_ids` they have no ids.
    `ready` is what /ready says. The pages in `missing` are 404; it has those of a router besides. `answered`
    counts a prompt's good answers, `faulty` the others by fault.
    """

    def __init__(
        self,
        *,
        latency_s=0.0,
        tokens_per_s=0.0,
        mean_tokens=40,
        faults=None,
        script=(),
        poison=None,
        killer=None,
        down_s=0.1,
        mute=None,
        api_key=None,
        served_model_name="fake",
        context_length=2048,
        max_total_num_tokens=100000,
        tokenizer=None,
        vocab_size=VOCAB_SIZE,
        tells_vocab=True,
        lead=(),
        no_ids=False,
        think_id=None,
        missing=(),
        info_failures=0,
        seed=0,
    ):
        self.latency_s = latency_s
        self.tokens_per_s = tokens_per_s
        self.mean_tokens = mean_tokens
        self.faults = dict(faults or {})
        self.script = deque(script)
        self.poison = poison
        self.killer = killer
        self.down_s = down_s
        self.deaths = 0
        self.mute = mute
        self.api_key = api_key
        self.ready = True
        self.rng = random.Random(seed)
        self.counts = Counter()
        self.paths = Counter()
        self.in_flight = 0
        self.hanging = 0
        self.running = 0
        self.steps = 0
        self.shows_load = True
        self.most_in_flight = 0
        self.answered = Counter()
        self.faulty = defaultdict(Counter)
        self.seen = []
        self.served_model_name = served_model_name
        self.context_length = context_length
        self.max_total_num_tokens = max_total_num_tokens
        self.tokenizer = None
        if tokenizer is not None:
            from tokenizers import Tokenizer  # only where it is asked for

            self.tokenizer = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
        self.vocab_size = vocab_size
        self.tells_vocab = tells_vocab
        self.lead = list(lead)
        self.no_ids = no_ids
        self.think_id = think_id
        self.missing = frozenset(missing)
        self.info_failures = info_failures
        self._server = None
        self._connections = {}

    async def start(self, port=0):
        """Listen on loopback; returns the base URL."""
        self.gate = asyncio.Event()
        self.gate.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{self.port}"

    async def stop(self):
        """Stop as a killed process would: no goodbye to anybody."""
        self._server.close()
        self.break_connections()
        if self._connections:
            await asyncio.wait(list(self._connections.values()), timeout=5)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._server.wait_closed(), 5)

    def break_connections(self):
        """Break every connection, with whatever is in flight on it, and go on listening."""
        for writer, serving in list(self._connections.items()):
            writer.transport.abort()
            serving.cancel()

    async def _serve(self, reader, writer):
        self._connections[writer] = asyncio.current_task()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode().split("\r\n")
                _, path, _ = lines[0].split(" ")
                fields = [line.split(": ", 1) for line in lines[1:] if ": " in line]
                headers = {name.lower(): value for name, value in fields}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(path, headers, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.CancelledError:
            pass  # swallowed: Python 3.11 logs an error for a connection whose task ends cancelled
        finally:
            self._connections.pop(writer, None)
            writer.close()

    async def _answer(self, path, headers, body, writer):
        self.paths[path] += 1
        may_come_in = not self.api_key or headers.get("authorization") == f"Bearer {self.api_key}"
        if path in self.missing:
            await self._send(writer, 404, {"error": {"message": f"Invalid URL (GET {path})"}})
        elif path in ("/generate", "/model_info", "/server_info") and not may_come_in:
            await self._send(writer, 401, {"error": "Unauthorized"})
        elif path in ("/ready", "/readiness") and not self.ready:
            await self._send(writer, 503, {})
        elif path == "/v1/loads" and self.shows_load:
            await self._send(writer, 200, {"loads": [self._load()]})
        elif path == "/detokenize" and self.tokenizer is not None:
            text = self.tokenizer.decode(json.loads(body)["tokens"], skip_special_tokens=False)
            await self._send(writer, 200, {"text": text})
        elif path == "/freeze":
            self._load()
            self.gate.clear()
            await self._send(writer, 200, {})
        elif path == "/generate":
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                await self._generate(json.loads(body), writer)
            finally:
                self.in_flight -= 1
        else:
            await self._show(path, writer)

    def _load(self):
        """As SGLang: a frozen server's last figures, an idle server's zeros."""
        if self.gate.is_set():
            self.running = self.in_flight - self.hanging
            self.steps += self.running > 0
        return {
            "num_running_reqs": self.running,
            "num_waiting_reqs": 0,
            "max_running_requests": 64,
            "token_usage": 0.1,
            "num_used_tokens": self.running * 100,
            "total_prefill_uncached_tokens": 0,
            "decode_moments": [self.steps],
        }

    def _info(self):
        """With the key in clear, at both levels and in the command line, as SGLang 0.5.23 has it."""
        info = {
            "context_length": self.context_length,
            "max_total_num_tokens": self.max_total_num_tokens,
            "skip_tokenizer_init": self.tokenizer is None,
            "api_key": self.api_key,
            "launch_command": f"--model-path {self.served_model_name} --api-key {self.api_key}",
        }
        return {**info, "internal_states": [info]}

    async def _die(self):
        """Kill the server under everybody; it is back after a while."""
        self.deaths += 1
        self._server.close()
        self.break_connections()
        await asyncio.sleep(self.down_s)
        await self.start(self.port)

    async def _show(self, path, writer):
        model_info = {
            "model_path": self.served_model_name,
            "served_model_name": self.served_model_name,
            "tokenizer_path": self.served_model_name,
            "weight_version": "default",
        }
        pages = {
            "/ready": {},
            "/readiness": {},
            "/model_info": model_info,
            "/get_model_info": model_info,
            "/server_info": self._info(),
            "/get_server_info": self._info(),
            "/abort_request": {},
            "/stats": {
                "answered": self.answered,
                "faulty": self.faulty,
                "most_in_flight": self.most_in_flight,
            },
        }
        if path.endswith("_info") and self.info_failures > 0:  # as a router whose servers are still coming
            self.info_failures -= 1
            error = {"type": "server_error", "code": "call_upstream_connection_failed", "message": "refused"}
            await self._send(writer, 500, {"error": error})
        elif path in pages:
            await self._send(writer, 200, pages[path])
        else:
            await self._send(writer, 404, {"detail": "Not Found"})

    async def _generate(self, request, writer):
        params = request["sampling_params"]
        if "regex" in params:  # in the tokenizer's process, before anything else sees it
            message = f"logit_bias must has keys in [0, {self.vocab_size - 1}], got 2147483647."
            if not self.tells_vocab:
                message = "Only one of json_schema, regex, ebnf, or structural_tag can be set."
            await self._send(writer, 400, {"error": {"message": message}})
            return
        ids = request["input_ids"] if "input_ids" in request else self.tokenizer.encode(request["text"]).ids
        self.seen.append(request)
        fault = self._draw_for(ids)
        self.counts[fault or "good"] += 1
        if fault:
            self.faulty[prompt_key(ids)][fault] += 1
        if not ids or min(ids) < 0 or max(ids) >= self.vocab_size:
            os._exit(1)  # as the real one does
        if fault == "poison":
            await self._send(writer, 400, {"error": {"message": "poison"}})
            return
        if self.killer is not None and self.killer in ids:
            self._dying = asyncio.create_task(self._die())
            await asyncio.sleep(3600)
        await self.gate.wait()
        output, finish = expected_answer(ids, params.get("max_new_tokens", 128), self.mean_tokens)
        output = [one % self.vocab_size for one in output]
        seconds = self.latency_s + (len(output) / self.tokens_per_s if self.tokens_per_s else 0.0)
        if seconds:
            await asyncio.sleep(seconds)
        if fault == "reset":
            writer.transport.abort()
            return
        if fault == "hang":
            self.hanging += 1
            try:
                await asyncio.sleep(3600)
            finally:
                self.hanging -= 1
        if fault and fault.startswith("status_"):
            full = {"object": "error", "message": "The request queue is full.", "type": "503", "code": 503}
            error = full if fault == "status_503" else {"error": {"message": fault}}
            await self._send(writer, int(fault[7:]), error)
            return
        if fault == "away":
            error = {"type": "server_error", "code": "no_available_workers", "message": "all are unavailable"}
            await self._send(writer, 503, {"error": error})
            return
        if fault == "abort":
            output, finish = output[:1], {"type": "abort", "message": "Aborted"}
        if fault == "empty":
            output, finish = [STOP_ID], {"type": "stop", "matched": STOP_ID}
        count = len(output) + (fault == "wrong_count")
        if fault == "foreign_id":
            output = [*output[:-1], self.vocab_size]
        meta = {
            "id": request["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(ids),
            "completion_tokens": count,
            "cached_tokens": 0,
        }
        lead = [*([] if self.think_id is None else [self.think_id]), *self.lead]
        output = [*lead, *output[len(lead) :]]
        reply = {"text": answer_text(output), "output_ids": output, "meta_info": meta}
        if self.no_ids:
            del reply["output_ids"]
        if request.get("return_prompt_token_ids"):
            reply["prompt_token_ids"] = ids
        if fault is None:
            self.answered[prompt_key(ids)] += 1
        await self._send(writer, 200, reply, cut=fault == "half", torn=fault == "torn")

    def _draw_for(self, ids):
        drawn = self._draw()
        if self.poison in ids:
            return "poison"
        return "empty" if self.mute in ids else drawn

    def _draw(self):
        if self.script:
            return self.script.popleft()
        for name, chance in self.faults.items():
            if self.rng.random() < chance:
                return name
        return None

    async def _send(self, writer, status, value, *, cut=False, torn=False):
        body = json.dumps(value).encode()
        if cut:
            body = body[: len(body) // 2]
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + (body[:-1] if torn else body))
        await writer.drain()
        if torn:
            writer.close()


async def _main(options):
    server = FakeServer(
        latency_s=options.latency_s,
        tokens_per_s=options.tokens_per_s,
        mean_tokens=options.mean_tokens,
        faults=json.loads(options.faults),
        poison=options.poison,
        mute=options.mute,
        api_key=options.api_key,
        served_model_name=options.served_model_name,
        context_length=options.context_length,
        max_total_num_tokens=options.max_total_num_tokens,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        tells_vocab=options.tells_vocab == "true",
        lead=json.loads(options.lead),
        no_ids=options.no_ids == "true",
        think_id=options.think_id,
        missing=json.loads(options.missing),
        info_failures=options.info_failures,
        seed=options.seed,
    )
    if options.die_with is not None:
        await asyncio.sleep(options.die_after_s)
        os._exit(options.die_with)
    url = await server.start(options.port)
    if options.ready_file:
        _announce(Path(options.ready_file), url)
    await asyncio.Event().wait()


def _misbehave(options):
    """Print lines, have descendants and ignore SIGTERM, as told."""
    if options.log:
        sys.stdout.write(Path(options.log).read_text())
        sys.stdout.flush()
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the descendants inherit it
    if options.family:
        subprocess.Popen([sys.executable, "-c", FAMILY, options.family])


def _announce(path, url):
    temp = path.with_suffix(".tmp")
    temp.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    temp.replace(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ready-file")
    parser.add_argument("--log", help="a file whose lines are printed before it listens")
    parser.add_argument("--die-with", type=int, help="end with this status instead of listening")
    parser.add_argument("--die-after-s", type=float, default=0.0)
    parser.add_argument("--family", help="have descendants, who write their process ids to this file")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--api-key")
    parser.add_argument("--faults", default="{}")
    parser.add_argument("--poison", type=int)
    parser.add_argument("--mute", type=int)
    parser.add_argument("--served-model-name", default="fake")
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--max-total-num-tokens", type=int, default=100000)
    parser.add_argument("--tokenizer")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--tells-vocab", default="true")
    parser.add_argument("--lead", default="[]", help="the ids that each answer begins with, as JSON")
    parser.add_argument("--no-ids", default="false")
    parser.add_argument("--think-id", type=int)
    parser.add_argument("--missing", default="[]", help="pages that are 404, as JSON")
    parser.add_argument("--info-failures", type=int, default=0)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--tokens-per-s", type=float, default=0.0)
    parser.add_argument("--mean-tokens", type=float, default=40)
    parser.add_argument("--seed", type=int, default=0)
    _misbehave(parser.parse_args())
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args()))
    sys.exit(0)
