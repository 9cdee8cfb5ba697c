"""The switch: names, what is missing, and that a contract runs what was chosen."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from moe_kernels import implementation
from moe_kernels.implementation import ImplementationUnavailable, UnknownImplementation

OPERATIONS = {
    "linear": ["linear"],
    "grouped_gemm": ["expert_mlp"],
    "activation": ["gated"],
    "norm_rope": ["rms_norm", "rope"],
    "permute": ["sort_by_slot"],
    "memory": ["attention_bytes", "product_bytes", "process_bytes"],
}


@pytest.fixture(autouse=True)
def _chosen_before() -> Iterator[None]:
    with implementation.using("reference"):
        yield


def test_the_tested_sources_are_those_of_this_checkout() -> None:
    root = Path(__file__).resolve().parents[3]
    assert Path(implementation.__file__).is_relative_to(root)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownImplementation, match=r"'fast'.*auto, reference, cpu, gpu"):
        implementation.select("fast")


def test_what_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(implementation._NEEDS, "cpu", "a_package_of_no_one")
    with pytest.raises(ImplementationUnavailable, match=r"a_package_of_no_one.*reference"):
        implementation.select("cpu")
    assert "cpu" not in implementation.available()


def test_the_variable_decides_where_nobody_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_chosen", None)
    monkeypatch.delenv("MOE_KERNELS", raising=False)
    assert implementation.chosen() == "reference"
    monkeypatch.setattr(implementation, "_chosen", None)
    monkeypatch.setenv("MOE_KERNELS", "cpu")
    assert implementation.chosen() == "cpu"


def test_auto_takes_the_fastest_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert implementation.select("auto") == implementation.available()[-1]
    assert f"kernels: {implementation.chosen()}" in caplog.text


def test_auto_for_a_device_takes_what_computes_on_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert implementation.select("auto", "cpu") == implementation.available()[-1]
    hindered = {"cpu": "numba is broken", "gpu": "there is no GPU", "reference": None}
    monkeypatch.setattr(implementation, "_hindrance", hindered.__getitem__)
    assert implementation.select("auto", "cpu") == "reference"
    assert "kernels cpu are not used: numba is broken" in caplog.text
    assert implementation.select("auto", "cuda") == "reference"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_contract_runs_the_chosen_one(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = import_module(f"moe_kernels.{operation}")
    for name in ("reference", "cpu"):
        module = import_module(f"moe_kernels.{name}.{operation}")
        for function in OPERATIONS[operation]:
            expected = inspect.signature(getattr(contract, function))
            assert inspect.signature(getattr(module, function)) == expected
            assert name == "reference" or implementation.has_own("cpu", operation, function)


def test_an_operation_without_kernels_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_own", lambda *names: None)

    @implementation.implemented
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with implementation.using("cpu"):
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]


def test_the_reference_never_imports_numba() -> None:
    code = "\n".join(
        [
            "import sys, torch",
            "sys.modules['numba'] = None",
            "from moe_kernels.linear import linear",
            "print(linear(torch.ones(1, 4), torch.ones(2, 4)).tolist())",
        ]
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root / "kernels"
    )
    assert done.stdout.strip() == "[[4.0, 4.0]]", done.stderr
