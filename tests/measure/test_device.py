import pytest

from cgprof.errors import DeviceError
from cgprof.measure.device import read_device
from tests.support.fake_nvml import GIB, FakeGpu, FakeNvml, cuda_view, unsupported


def read(gpu, *known):
    return read_device(cuda_view(gpu, 0), lambda: FakeNvml(known or [gpu]))


def test_device_without_memory_in_nvml_has_cudas_and_keeps_the_other_fields():
    record, nvml, doubt = read(FakeGpu(0, total=unsupported()))
    assert record.total_bytes == 79 * GIB
    assert "total memory is CUDA's" in record.note
    assert (record.power_milliwatts, record.sm_clock_mhz) == (123_000, 1_980)
    assert nvml is not None
    assert doubt is None


def test_field_that_is_not_supported_is_none_with_a_reason_and_alone():
    record, _, _ = read(FakeGpu(0, power=unsupported()))
    assert record.power_milliwatts is None
    assert record.note == "power not available from NVML: Not Supported"
    assert (record.sm_clock_mhz, record.total_bytes) == (1_980, 80 * GIB)


@pytest.mark.parametrize("field", ["total", "power", "clock", "driver"])
def test_lost_gpu_is_an_error_and_never_a_fallback(field):
    lost = DeviceError("NVML: GPU is lost")
    with pytest.raises(DeviceError, match="GPU is lost"):
        read(FakeGpu(0, **{field: lost}))


def test_device_that_nvml_does_not_know_is_as_cuda_sees_it_with_the_reason():
    record, nvml, doubt = read(FakeGpu(0), FakeGpu(1))
    assert (record.name, record.total_bytes, record.driver) == ("cuda a GPU", 79 * GIB, None)
    assert nvml is None
    assert record.note == doubt
    assert doubt.startswith("NVML was not read: NVML knows no device with the UUID")


def test_device_without_nvml_is_as_cuda_sees_it_with_the_reason():
    def refuse():
        raise DeviceError("NVML: no driver")

    record, nvml, doubt = read_device(cuda_view(FakeGpu(0), 0), refuse)
    assert (record.total_bytes, nvml, doubt) == (
        79 * GIB,
        None,
        "NVML was not read: NVML: no driver",
    )
