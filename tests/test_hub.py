"""A policy by its name on the Hugging Face hub, found in the cache of downloads."""

import re
from pathlib import Path

import pytest

from tlt.config import ModelSettings
from tlt.errors import ModelError
from tlt.model.hub import cache_directory, find_policy
from tlt.policy import TINY_POLICY, open_policy

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def downloaded(cache: Path, name: str = "models--some--policy") -> Path:
    """As huggingface_hub leaves it: files are links to blobs, and a branch is a file that holds a commit."""
    snapshot = cache / name / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in TINY_POLICY.iterdir():
        (snapshot / file.name).symlink_to(file)
    (cache / name / "refs").mkdir()
    (cache / name / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_downloaded_policy_opens_by_its_name(cache: Path) -> None:
    snapshot = downloaded(cache)
    policy = open_policy(ModelSettings(path="some/policy", device="cpu"))
    assert policy.source == snapshot
    assert policy.tokenizer.encode_prompt("1+2=") == open_policy(ModelSettings()).tokenizer.encode_prompt("1+2=")


def test_a_revision_is_a_branch_or_a_commit(cache: Path) -> None:
    snapshot = downloaded(cache)
    assert find_policy("some/policy@main") == find_policy(f"some/policy@{COMMIT}") == snapshot
    with pytest.raises(ModelError, match=r"hf download some/policy --revision v2$"):
        find_policy("some/policy@v2")


@pytest.mark.parametrize("path", ["tiny2", "/abs/there", "a/b/c", "../policy", "./policy", "some/pol icy", ""])
def test_what_is_no_name_is_a_path(cache: Path, path: str) -> None:
    assert find_policy(path) == Path(path)


def test_a_directory_comes_first(cache: Path, tmp_path: Path) -> None:
    downloaded(cache)
    (tmp_path / "some" / "policy").mkdir(parents=True)
    assert find_policy("some/policy") == Path("some/policy")


def test_the_error_says_how_to_download(cache: Path) -> None:
    expected = f"no model at some/policy: .* Hugging Face cache {re.escape(str(cache))}; .*: hf download some/policy$"
    with pytest.raises(ModelError, match=expected):
        find_policy("some/policy")


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_an_unfinished_download_is_told(cache: Path, lost: str) -> None:
    (downloaded(cache) / lost).unlink()
    with pytest.raises(ModelError, match=r"the download of some/policy is incomplete: .*; go on with hf download some"):
        find_policy("some/policy")


def test_a_reference_leads_nowhere_else(cache: Path) -> None:
    downloaded(cache)
    (cache / "models--some--policy" / "refs" / "main").write_text("../../../elsewhere")
    with pytest.raises(ModelError, match="no model at some/policy"):
        find_policy("some/policy")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "a", "HF_HOME": "b"}, "a"),
        ({"HUGGINGFACE_HUB_CACHE": "a", "HF_HOME": "b"}, "a"),
        ({"HF_HOME": "b", "XDG_CACHE_HOME": "c"}, "b/hub"),
        ({"XDG_CACHE_HOME": "c"}, "c/huggingface/hub"),
        ({"HOME": "/home/me"}, "/home/me/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_huggingface_hub_keeps_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(expected)
