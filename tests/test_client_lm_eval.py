"""lm-eval's `local-completions` against the server gives what its `hf` model gives on the same policy. Left out where
lm-eval is not installed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
lm_eval = pytest.importorskip("lm_eval")

from tests.serving import Serving, config_of, serving  # noqa: E402
from tlt.policy import TINY_POLICY  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(config_of(TINY_POLICY), name="tiny") as found:
        yield found


def tasks(directory: Path) -> list[dict[str, Any]]:
    """One that generates, and one that chooses by log-likelihood."""
    rows = [{"q": f"{a}+{b}*{c}=", "a": str((a + b * c) % 10)} for a in (1, 4) for b in (2, 5) for c in (3, 7)]
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "target_delimiter": "",
    }
    generate = {
        "task": "calc_generate",
        "output_type": "generate_until",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["+"], "max_gen_toks": 16, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    }
    choose = {
        "task": "calc_choose",
        "output_type": "multiple_choice",
        "doc_to_choice": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"],
        "doc_to_target": "{{a | int}}",
        "metric_list": [{"metric": "acc"}],
    }
    rolling = {
        "task": "calc_perplexity",
        "output_type": "loglikelihood",
        "doc_to_target": "{{a}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }
    return [common | generate, common | choose, common | rolling]


def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **model: Any) -> tuple[dict[str, Any], list[list[Any]]]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = lm_eval.simple_evaluate(**model, tasks=tasks(tmp_path), batch_size=4, bootstrap_iters=0)
    answers = [sample["resps"] for each in found["samples"].values() for sample in each]
    return found["results"], answers


def test_generation_and_log_likelihood_are_those_of_transformers(
    server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"model": "tiny", "base_url": server.url + "/v1/completions", "tokenizer": str(TINY_POLICY)}
    limits = {"num_concurrent": 4, "max_length": 512, "tokenized_requests": True, "add_bos_token": True}
    ours, answers = evaluated(tmp_path, monkeypatch, model="local-completions", model_args={**args, **limits})
    hf = {"pretrained": str(TINY_POLICY), "dtype": "float32", "device": "cpu", "max_length": 512, "add_bos_token": True}
    theirs, expected = evaluated(tmp_path, monkeypatch, model="hf", model_args=hf)
    assert len(answers) == len(expected) == 24
    for found, wanted in zip(answers, expected, strict=True):
        for (mine,), (other,) in zip(found, wanted, strict=True):
            if isinstance(other, str):
                assert mine == other
            else:
                assert mine[0] == pytest.approx(other[0], abs=1e-3)
                assert bool(mine[1]) == bool(other[1])
    for task, numbers in theirs.items():
        for name, value in numbers.items():
            if isinstance(value, float):
                assert ours[task][name] == pytest.approx(value, rel=1e-3), (task, name)
