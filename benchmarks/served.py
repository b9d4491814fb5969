"""Throughput of a server with OpenAI's endpoints, as clients see it: the same calls to ours and to another engine's.

    tlt serve MODEL --port 8000 &   (or another server)
    python -m benchmarks.served http://127.0.0.1:8000 --prompts gsm8k.jsonl --clients 256 --tokens 512

Prints one JSON line: seconds, completions, tokens per second, and latencies. Needs httpx; the server counts the tokens.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from statistics import median

import httpx


async def served(url: str, prompts: list[str], options: argparse.Namespace, seed: int = 0) -> dict[str, float | str]:
    """Every client sends one prompt after the other, until all are completed. `seed`: of the first prompt."""
    waiting = list(enumerate(prompts))
    latencies, tokens = list[float](), list[int]()
    limits = httpx.Limits(max_connections=options.clients, max_keepalive_connections=options.clients)
    headers = {"Authorization": f"Bearer {options.api_key}"}
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, headers=headers) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def client() -> None:
            while waiting:
                number, prompt = waiting.pop()
                body = {"model": model, "temperature": 1.0, "seed": seed + number, "max_tokens": options.tokens}
                chat = {"messages": [{"role": "user", "content": prompt}]}
                path, asked = ("/v1/completions", {"prompt": prompt}) if options.raw else ("/v1/chat/completions", chat)
                started = time.perf_counter()
                response = await http.post(path, json={**body, **asked})
                response.raise_for_status()
                latencies.append(time.perf_counter() - started)
                tokens.append(response.json()["usage"]["completion_tokens"])

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(options.clients)))
        seconds = time.perf_counter() - started
    return {
        "model": model,
        "clients": options.clients,
        "completions": len(tokens),
        "tokens": sum(tokens),
        "seconds": round(seconds, 3),
        "tokens_per_s": round(sum(tokens) / seconds, 1),
        "median_latency_s": round(median(latencies), 3),
        "longest_latency_s": round(max(latencies), 3),
    }


def read_prompts(file: Path) -> list[str]:
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
    return [row.get("prompt") or row["question"] for row in rows]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, required=True, help="a JSONL file with a prompt or question column")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text")
    parser.add_argument("--api-key", default="-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    add_options(parser)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(served(options.url, read_prompts(options.prompts), options))))


if __name__ == "__main__":
    main()
