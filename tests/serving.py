"""A real server in this process: uvicorn in a thread, on a port of its own, with an HTTP client."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import uvicorn

from tlt.config import RunConfig
from tlt.policy import TINY_POLICY
from tlt.recipe import load_config
from tlt.serve.app import build_app
from tlt.serve.options import ServeOptions
from tlt.serve.served_policy import ServedPolicy
from tlt.serve.server import listen

_TIMEOUT_S = 60.0
CHAT = (
    "{% for m in messages %}({{ m.content }}){% endfor %}{% if tools %}{{ tools | length }}{% endif %}"
    "{% if not add_generation_prompt %}={% endif %}"
)


@dataclass
class Serving:
    url: str
    http: httpx.Client
    served: ServedPolicy
    died: list[str] = field(default_factory=list)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def refused(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        response = self.http.post(path, json=body)
        error: dict[str, Any] = response.json()["error"]
        assert {"message", "type", "param", "code"} == error.keys()
        return response.status_code, error

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]", lines
        return [json.loads(line) for line in lines[:-1]]

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    def wait_until(self, name: str, value: float) -> None:
        """Asks until the metric has that value; the server's own time-outs end it otherwise."""
        ends = time.monotonic() + _TIMEOUT_S
        while self.metric(name) != value:
            assert time.monotonic() < ends, f"{name} stays {self.metric(name)}"


def chatty_policy(directory: Path) -> Path:
    """The tiny policy with a chat template."""
    path = directory / "chatty"
    copytree(TINY_POLICY, path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": CHAT}))
    return path


def config_of(path: Path | str = "tiny", **knobs: object) -> RunConfig:
    usual = {"model.path": str(path), "spec.drafter": "suffix", "engine.admission": "fifo", "engine.kv_gib": 0.05}
    return load_config(overrides={**usual, "engine.rows": 16, "model.device": "cpu", **knobs})


@contextmanager
def serving(config: RunConfig, **options: Any) -> Iterator[Serving]:
    chosen, served, died = ServeOptions(port=0, **options), ServedPolicy(config), list[str]()
    listening = listen(chosen)
    url = "http://{}:{}".format(*listening.getsockname()[:2])
    app = build_app(served, chosen, died.append)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, timeout_keep_alive=120)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    headers = {"Authorization": f"Bearer {chosen.api_key}"} if chosen.api_key else {}
    try:
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S, headers=headers) as http:
            yield Serving(url, http, served, died)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
