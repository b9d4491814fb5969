"""`tlt serve` as a command: a process of its own that says where it listens, takes load, and ends when told to."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

ROOT = Path(__file__).parents[1]
CALL = {"prompt": "1+2*3=", "seed": 6, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}


@contextmanager
def child(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL."""
    command = [sys.executable, "-m", "tlt", "serve", "tiny", "--port", "0", "--engine.kv_gib=0.2", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("tlt serve: tiny on http://127.0.0.1:"), line + process.stderr.read()
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_the_command_serves_until_it_is_told_to_stop() -> None:
    """Calls under way then end, and the process with them."""
    with child("--drafter", "new", "--name", "calc") as (process, url):
        found = [httpx.post(url + "/v1/completions", json={**CALL, "model": "calc"}, timeout=60).json() for _ in (0, 1)]
        assert found[0]["choices"][0]["token_ids"] == found[1]["choices"][0]["token_ids"]
        body = {**CALL, "max_tokens": 2000, "stream": True, "n": 16}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert process.wait(timeout=60) == 143
        ends = [choice["finish_reason"] for event in rest for choice in event["choices"] if choice["finish_reason"]]
        assert len(ends) == 16
        assert set(ends) <= {"abort", "length"}
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_port_in_use_and_strange_options_are_told_before_the_policy_loads() -> None:
    from tlt.cli import main

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "tiny", "--port", str(taken.getsockname()[1])]) == 2
    assert main(["serve", "tiny", "--logprobs", "some"]) == 2
    assert main(["serve", "tiny", "--port", "many"]) == 2


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
def test_five_hundred_streams_twenty_times_each() -> None:
    """None is lost, all are answered by their seed, and memory does not grow. `-s` shows the figures."""
    import asyncio
    import time

    async def one(client: "httpx.AsyncClient", number: int, turn: int) -> tuple[int, int, list[int]]:
        body = {"prompt": "1+2*3=", "seed": number % 10, "max_tokens": 16, "stream": True, "return_token_ids": True}
        tokens: list[int] = []
        reasons = 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    tokens += choice["token_ids"]
                    reasons += choice["finish_reason"] is not None
        assert reasons == 1
        return number % 10, turn, tokens

    async def run(url: str, turns: int) -> list[tuple[int, int, list[int]]]:
        limits = httpx.Limits(max_connections=500, max_keepalive_connections=500)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

            async def client_of(number: int) -> list[tuple[int, int, list[int]]]:
                return [await one(client, number, turn) for turn in range(turns)]

            each = await asyncio.gather(*(client_of(number) for number in range(500)))
            return [answer for answers in each for answer in answers]

    with child("--queue", "4096") as (process, url):
        asyncio.run(run(url, 2))
        before, started = resident_mib(process.pid), time.perf_counter()
        found = asyncio.run(run(url, 20))
        seconds, after = time.perf_counter() - started, resident_mib(process.pid)
        metrics = httpx.get(url + "/metrics", timeout=60).text
    assert len(found) == 10_000
    by_seed: dict[int, list[int]] = {}
    for seed, _, tokens in found:
        assert by_seed.setdefault(seed, tokens) == tokens
    print(f"10,000 streams in {seconds:.0f} s; resident {before:.0f} MiB before, {after:.0f} MiB after")
    for line in ('vllm:num_requests_running{model_name="tiny"} 0', 'vllm:kv_cache_usage_perc{model_name="tiny"} 0'):
        assert line in metrics
    assert after < before + 64
    assert threading.active_count() == 1
