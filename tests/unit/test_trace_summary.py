"""A trace in words, from traces written by hand in Chrome's format: a GPU that waits, a CPU that waits for a link."""

from __future__ import annotations

import gzip
import json

import pytest

from shardwise.measure.profiler.events import (
    kind_of,
    parse_events,
    product_size,
    read_events,
    self_seconds,
    union,
)
from shardwise.measure.profiler.summary import bound_of, short_name, summarise
from shardwise.measure.profiler.trace_text import words

GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)"
ELEMENTS = "void at::native::vectorized_elementwise_kernel<4, add>(int)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"


def event(name, category, start_us, length_us, tid=1, **args):
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": 1e9 + start_us,
        "dur": length_us,
        "pid": 7,
        "tid": tid,
        "args": args,
    }


def mm(start, length, link, shapes=((512, 1024), (1024, 256)), dtype="c10::BFloat16"):
    dims = {"Input Dims": [list(shape) for shape in shapes], "Input type": [dtype, dtype]}
    return event("aten::mm", "cpu_op", start, length, **{"External id": link}, **dims)


def gpu():
    """100 µs of product, a gap of 300 µs in which the host reads a value, 50 µs of adding, 50 µs of all-reduce that
    begins 20 µs before the adding ends; 30 µs of nothing at the end.
    """
    return [
        event("shardwise: forward", "user_annotation", 0, 460),
        event("shardwise: backward", "user_annotation", 460, 50),
        mm(0, 8, 11),
        event("aten::item", "cpu_op", 20, 370),
        event("cudaStreamSynchronize", "cuda_runtime", 25, 360),
        event("aten::add", "cpu_op", 392, 5, **{"External id": 12}),
        event(GEMM, "kernel", 10, 100, tid=70, **{"External id": 11}),
        event(ELEMENTS, "kernel", 410, 50, tid=70, **{"External id": 12}),
        event(NCCL, "kernel", 440, 40, tid=71, **{"External id": 13}),
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
        {"ph": "s", "id": 1, "cat": "fwdbwd", "name": "fwdbwd", "ts": 1e9, "pid": 7, "tid": 1},
    ]


class TestGpu:
    def test_busy_and_idle_time_of_the_device(self):
        found = summarise(parse_events(gpu()))
        assert found.device == "cuda" and found.launches == 3
        assert found.window_s == pytest.approx(510e-6)
        assert found.busy_s == pytest.approx(170e-6)
        assert found.waiting_s == pytest.approx(20e-6), "of the all-reduce nothing covered 20 µs"
        assert found.gaps == 3 and found.gap_s == pytest.approx(340e-6)

    def test_the_longest_gap_has_its_surroundings(self):
        gap = summarise(parse_events(gpu())).longest[0]
        assert gap.seconds == pytest.approx(300e-6) and gap.phase == "forward"
        assert gap.before == "cutlass::Kernel2" and gap.after == "at::native::vectorized_elementwise_kernel"
        assert gap.meanwhile == "cudaStreamSynchronize"

    def test_kernels_have_the_operator_that_launched_them_and_its_rate(self):
        found = summarise(parse_events(gpu()))
        first = found.operations[0]
        assert (first.operator, first.kind, first.calls) == ("aten::mm", "product", 1)
        assert first.flops_per_s == pytest.approx(2 * 512 * 1024 * 256 / 100e-6)
        operand_bytes = 2 * (512 * 1024 + 1024 * 256 + 512 * 256)
        assert first.intensity == pytest.approx(2 * 512 * 1024 * 256 / operand_bytes)
        assert found.kinds == pytest.approx({"product": 100 / 190, "memory": 50 / 190, "communication": 40 / 190})
        assert found.phases_s == pytest.approx({"forward": 460e-6, "backward": 50e-6})

    def test_a_kernel_without_a_telling_name_is_what_its_operator_is(self):
        rows = gpu()
        rows[6]["name"] = "some_vendors_kernel_MT64x16"
        first = summarise(parse_events(rows)).operations[0]
        assert (first.kind, first.operator) == ("product", "aten::mm") and first.flops_per_s

    def test_a_product_in_two_kernels_counts_once(self):
        rows = [*gpu(), event("splitKreduce_kernel", "kernel", 112, 20, tid=70, **{"External id": 11})]
        found = {one.name: one for one in summarise(parse_events(rows)).operations}
        assert found["splitKreduce_kernel"].flops_per_s is None
        assert found["cutlass::Kernel2"].flops_per_s == pytest.approx(2 * 512 * 1024 * 256 / 100e-6)

    def test_in_words(self):
        text = "\n".join(words(summarise(parse_events(gpu())), 312e12, 2.0e12))
        assert "the GPU was busy 33% of 510 µs" in text
        assert "3 gaps, 340 µs together (67%), 113 µs each" in text
        assert "a value was read in the loop" in text
        assert "cutlass::Kernel2: 146 FLOPs a byte make it memory bound; it reached 0.9% of the peak" in text

    def test_short_kernels_and_a_busy_host_are_bound_by_launches(self):
        rows = [event("shardwise: forward", "user_annotation", 0, 1000)]
        for index in range(20):
            rows.append(event("aten::add", "cpu_op", 50 * index, 45, **{"External id": index}))
            rows.append(event(ELEMENTS, "kernel", 50 * index + 40, 4, tid=70, **{"External id": index}))
        text = "\n".join(words(summarise(parse_events(rows))))
        assert "the host cannot launch them as fast as they run" in text
        assert "a value was read" not in text


class TestCpu:
    def rows(self):
        return [
            event("shardwise: forward", "user_annotation", 0, 100),
            event("shardwise: backward", "user_annotation", 100, 400),
            event("aten::linear", "cpu_op", 0, 90),
            mm(10, 70, 1, dtype="float"),
            event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 100, 390),
            event("MmBackward0", "cpu_op", 101, 388),
            mm(110, 80, 2, dtype="float"),
            event("gloo:all_reduce", "user_annotation", 150, 300, tid=9),
            event("aten::add_", "cpu_op", 470, 30),
        ]

    def test_waiting_inside_of_an_autograd_node_is_a_gap(self):
        found = summarise(parse_events(self.rows()))
        assert found.device == "cpu" and found.launches == 6 and found.median_launch_s is None
        assert found.busy_s == pytest.approx((90 + 80 + 30) * 1e-6)
        assert found.longest[0].seconds == pytest.approx(280e-6)
        assert found.longest[0].meanwhile == "gloo:all_reduce" and found.longest[0].phase == "backward"
        assert found.waiting_s == pytest.approx(260e-6)

    def test_self_time_is_without_what_is_inside(self):
        found = {one.name: one for one in summarise(parse_events(self.rows())).operations}
        assert found["aten::linear"].self_s == pytest.approx(20e-6)
        assert found["aten::mm"].self_s == pytest.approx(150e-6) and found["aten::mm"].calls == 2
        assert sum(one.share for one in found.values()) == pytest.approx(1.0)

    def test_in_words(self):
        text = "\n".join(words(summarise(parse_events(self.rows()))))
        assert "operators ran 40% of 500 µs" in text
        assert "For 52% of the time no operator ran while a collective was under way" in text
        assert "aten::mm 75% in 2 calls at 3.58 TFLOP/s" in text


def test_a_file_is_read_packed_or_not(tmp_path):
    document = json.dumps({"traceEvents": gpu()})
    (tmp_path / "a.json").write_text(document)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(document.encode()))
    assert read_events(tmp_path / "a.json") == read_events(tmp_path / "a.json.gz") == parse_events(gpu())


def test_an_empty_trace_is_refused():
    assert parse_events([]) == []
    with pytest.raises(ValueError, match="no operators"):
        summarise([])


def test_self_time_counts_each_thread_alone():
    events = parse_events([event("a::b", "cpu_op", 0, 100), event("a::c", "cpu_op", 10, 50, tid=2)])
    assert self_seconds(events) == pytest.approx([100e-6, 50e-6])


def test_spans_that_touch_are_one():
    assert union([(3.0, 4.0), (0.0, 1.0), (1.0, 2.0), (0.5, 0.7)]) == [(0.0, 2.0), (3.0, 4.0)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "product"), ("sm90_xmma_gemm_bf16bf16", "product"), ("nvjet_hsh_128x256", "product"),
        ("ampere_bf16_s1688gemm", "product"), ("aten::_scaled_dot_product_flash_attention", "attention"),
        ("flash_fwd_kernel", "attention"), ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("gloo:all_reduce", "communication"), ("c10d::allreduce_", "communication"), ("aten::copy_", "memory"),
        ("aten::native_layer_norm", "memory"), ("triton_poi_fused_add_0", "memory"), ("Memcpy HtoD", "memory"),
        ("multi_tensor_apply_kernel", "optimizer"), ("aten::_fused_adamw_", "optimizer"),
        ("aten::convolution_backward", "convolution"), ("cudnn::ops::nchwToNhwcKernel", "memory"),
        ("Cijk_Alik_Bljk_SB_Bias", "product"), ("cudnn::bn_bw_1C11_kernel_new", "memory"),
        ("aten::_softmax", "memory"), ("_scaled_dot_product_cudnn_attention_backward", "attention"),
        ("sm80_xmma_fprop_implicit_gemm_nhwc", "convolution"), ("aten::empty", "other"), ("aten::view", "other"),
    ],
)  # fmt: skip
def test_kinds_of_work(name, kind):
    assert kind_of(name) == kind


def test_sizes_of_products():
    rows = [mm(0, 1, 1), mm(1, 1, 2, ((8, 2, 3), (8, 3, 4))), mm(2, 1, 3, ((2, 3), (4, 5))), mm(3, 1, 4, dtype="Foo")]
    rows[1]["name"] = "aten::bmm"
    sizes = [product_size(one) for one in parse_events(rows)]
    assert sizes[0][0] == 2 * 512 * 1024 * 256
    assert sizes[1] == (2 * 8 * 2 * 3 * 4, 2 * 8 * (6 + 12 + 8))
    assert sizes[2:] == [None, None], "shapes that do not fit, a type that is not known"
    bias = mm(0, 1, 1, ((256,), (512, 1024), (1024, 256)))
    bias["name"] = "aten::addmm"
    assert product_size(parse_events([bias])[0])[0] == sizes[0][0]


def test_the_roofline_needs_both_figures():
    assert bound_of(100.0, 312e12, 2e12) == "memory" and bound_of(200.0, 312e12, 2e12) == "compute"
    assert bound_of(None, 1.0, 1.0) == bound_of(1.0, None, 1.0) == bound_of(1.0, 1.0, None) == ""


def test_short_names():
    assert short_name(GEMM) == "cutlass::Kernel2" and short_name(NCCL) == "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    assert short_name("void at::native::(anonymous namespace)::Cat<int>(int)") == "at::native::Cat"
    assert short_name("aten::mm") == "aten::mm" and len(short_name("x" * 200)) == 60
