import pytest

from cgprof.report.kernel_names import by_short_name, short_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("attention_kernel", "attention_kernel"),
        ("aten::add.Tensor", "aten::add.Tensor"),
        ("nvjet_tst_128x64_64x5_2x1_v_bz_TNT", "nvjet_tst_128x64_64x5_2x1_v_bz_TNT"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, "
            "std::array<char*, 1ul> >(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)",
            "at::native::vectorized_elementwise_kernel",
        ),
        (
            "void at::native::(anonymous namespace)::fill_kernel<(bool)1>(float*)",
            "at::native::fill_kernel",
        ),
        ("(anonymous namespace)::copy(int)", "copy"),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int>(int)",
            "internal::gemvx::kernel",
        ),
        (
            "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_SendRecv",
        ),
        ("", ""),
        ("(odd)", "(odd)"),
    ],
)
def test_short_name_keeps_the_function_alone(name, short):
    assert short_name(name) == short


def test_counts_of_one_short_name_are_added_and_sorted():
    counts = {"void f<int>(int)": 2, "b": 4, "void f<float>(float)": 3, "a": 4}
    assert list(by_short_name(counts).items()) == [("f", 5), ("a", 4), ("b", 4)]
