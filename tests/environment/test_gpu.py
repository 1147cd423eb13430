"""`make gpu`: what a machine lacks for it is said, with the command that installs it."""

import importlib.util
import re
from types import SimpleNamespace

import pytest
import torch

from tests.environment import gpu


def test_packages_that_are_missing_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    missing = {"aiofiles", "cuda.bindings"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else found(name)
    )
    assert gpu.main(["no_such_module.within"])
    said = capsys.readouterr().err
    assert "-m pip install aiofiles cuda-bindings no_such_module.within;" in said
    assert "make gpu GPU_PYTHON=" in said


@pytest.mark.parametrize(
    ("version", "cuda", "is_available", "said"),
    [
        (
            "2.13.0+cpu",
            None,
            False,
            r"torch 2.13.0\+cpu of .* is a build without CUDA",
        ),
        ("2.13.0", "13.0", False, "torch 2.13.0 finds no GPU, or no driver for CUDA 13.0"),
        ("2.13.0", "13.0", True, "^$"),
    ],
)
def test_a_torch_that_finds_no_gpu_is_told_from_one_without_cuda(
    version: str, cuda: str | None, *, is_available: bool, said: str
) -> None:
    fake = SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: is_available),
    )
    assert re.search(said, gpu.why_not(fake))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 1
    assert "torch" in capsys.readouterr().err
