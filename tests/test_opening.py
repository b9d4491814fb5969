"""Opening a policy: where there is no such device, or no such precision on it, that is said before anything is read."""

import pytest
import torch

from tlt.config import ModelSettings
from tlt.errors import ConfigError
from tlt.policy import open_policy


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.device is 'cuda' but torch sees no GPU here; use cpu or auto"):
        open_policy(ModelSettings(path="tiny", device="cuda"))


def test_a_gpu_beyond_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"model\.device is 'cuda:2' but torch sees 2 GPUs here, from cuda:0"):
        open_policy(ModelSettings(path="tiny", device="cuda:2"))


def test_double_precision_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_policy(ModelSettings(path="tiny", device="cpu", dtype="float64")).model.embed.dtype == torch.float64
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="where attention has no kernel for it; use float32 or cpu"):
        open_policy(ModelSettings(path="tiny", device="cuda", dtype="float64"))
