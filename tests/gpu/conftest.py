"""Devices of these tests: CUDA or Ascend NPUs. The tests have not run on either yet."""

import pytest

from flowrt.transport.devices import Device, choose, cuda_is_here, npu_is_here


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("npu", marks=pytest.mark.npu)])
def accelerator(request: pytest.FixtureRequest) -> Device:
    """The first device of each kind, in use by this thread; without one, the test is skipped."""
    if request.param == "cuda" and not cuda_is_here():
        pytest.skip("there is no CUDA device here")
    if request.param == "npu" and not npu_is_here():
        pytest.skip("there is no Ascend NPU with torch_npu here")
    chosen = choose(request.param)
    chosen.use()
    return chosen
