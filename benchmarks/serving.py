"""Servers side by side with the same client, and TRL's GRPO with and without tlt, one after the other: one command.

    python -m benchmarks.serving MODEL --prompts gsm8k/test.jsonl --json serving.json

Server parts: plain, suffix, new (a drafter that learned from the warm-up pass), drafter (of --drafter DIR), vllm.
GRPO parts: trl (TRL's own generation), trl-vllm (vLLM colocated), trl-tlt. What cannot start is recorded
with the end of its output. Every pass has prompts or seeds of its own, so that no drafter has seen its completions.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx
import torch

from benchmarks.served import add_options, read_prompts, served
from tlt.bench.record import new_record, write_record

SERVERS = ("plain", "suffix", "new", "drafter", "vllm")
RUNS = ("trl", "trl-vllm", "trl-tlt")
_START_S, _LEARN_S, _END_S = 1200.0, 120.0, 60.0
_POLL_S = 0.5
_METRICS = ("tlt:accept_length", "tlt:saved_seconds", "tlt:drafter_version", "vllm:generation_tokens_total")


def command_of(part: str, options: argparse.Namespace, port: int) -> list[str]:
    """The command that starts a server."""
    if part == "vllm":
        limits = ["--max-num-seqs", str(options.clients), "--disable-log-requests"]
        return ["vllm", "serve", options.model, "--port", str(port), *limits]
    drafter = {"plain": "none", "drafter": str(options.drafter)}.get(part, part)
    ours = [sys.executable, "-m", "tlt", "serve", options.model, "--port", str(port), "--drafter", drafter]
    return [*ours, f"--engine.rows={options.clients}", *options.knobs]


class CannotStart(Exception):
    """With the end of the server's output."""


@contextmanager
def started(command: Sequence[str]) -> Iterator[str]:
    """The URL of a server, which is ended afterwards."""
    with TemporaryFile() as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        except OSError as error:
            raise CannotStart(str(error)) from None
        url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
        try:
            ends = time.monotonic() + _START_S
            while not healthy(url):
                if process.poll() is not None or time.monotonic() > ends:
                    output.seek(0)
                    raise CannotStart(output.read()[-2000:].decode("utf-8", "replace"))
                time.sleep(_POLL_S)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(url + "/metrics").text.splitlines()
    return {name: float(line.split()[-1]) for line in lines for name in _METRICS if line.startswith(name + "{")}


def measured(part: str, options: argparse.Namespace, prompts: list[str]) -> dict[str, Any]:
    """A warm-up pass over other prompts than the measured passes have."""
    warm_up, rest = prompts[: options.warm_up], prompts[options.warm_up :]
    with started(command_of(part, options, free_port())) as url:
        asyncio.run(served(url, warm_up, options, seed=10**6))
        ends = time.monotonic() + _LEARN_S
        while part == "new" and metrics(url).get("tlt:drafter_version", 0) < 1 and time.monotonic() < ends:
            time.sleep(_POLL_S)
        passes = [asyncio.run(served(url, rest, options, seed=index * 10**7)) for index in range(options.passes)]
        return {"passes": passes, "metrics": metrics(url)}


def grpo(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own."""
    rollouts = part.partition("-")[2] or "trl"
    command = [sys.executable, "-m", "benchmarks.trl_steps", options.model, "--rollouts", rollouts]
    command += ["--prompts", str(options.prompts), "--steps", str(options.steps), "--tokens", str(options.tokens)]
    command += ["--group", str(options.group), "--batch", str(options.batch)]
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise CannotStart((done.stdout + done.stderr)[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face directory of the policy")
    add_options(parser)
    parser.add_argument("--parts", default=",".join((*SERVERS, *RUNS)))
    parser.add_argument("--most", type=int, default=1280, help="prompts of the file, warm-up included")
    parser.add_argument("--warm-up", type=int, default=256, help="prompts of the warm-up pass")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--drafter", type=Path, help="directory of a drafter that `tlt draft train` saved")
    parser.add_argument("--steps", type=int, default=8, help="of each GRPO run")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt, in GRPO")
    parser.add_argument("--batch", type=int, default=64, help="completions of a step, in GRPO")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="what to record as the commit")
    options, options.knobs = parser.parse_known_args()
    prompts = read_prompts(options.prompts)[: options.most]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = new_record(device, options.commit, model=options.model, clients=options.clients, tokens=options.tokens)
    record["parts"] = {}
    for part in options.parts.split(","):
        if part not in (*SERVERS, *RUNS):
            parser.error(f"--parts has {part!r}; expected some of {', '.join((*SERVERS, *RUNS))}")
        if part == "drafter" and options.drafter is None:
            continue
        try:
            found = grpo(part, options) if part in RUNS else measured(part, options, prompts)
        except CannotStart as error:
            found = {"failed": str(error)}
        record["parts"][part] = found
        print(part, json.dumps(found), flush=True)
        if options.json:
            write_record(options.json, record)


if __name__ == "__main__":
    main()
