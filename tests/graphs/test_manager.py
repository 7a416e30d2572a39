import dataclasses
import threading

import pytest
import torch

from cgprof.errors import CaptureError, MicrobatchError, RecordingError, ReplayError
from cgprof.graphs.manager import GraphManager
from cgprof.graphs.tape import TapeRecorder
from tests.support.graphs import decode, decode_key, input_buffers, prefill


class Step:
    """A small engine: token ids times a table, for any number of microbatches."""

    def __init__(self, **options):
        self.buffers = input_buffers()
        self.output = torch.zeros(64, 8)
        self.table = torch.linspace(-1, 1, 80).view(10, 8)
        self.recorder = TapeRecorder(poison_dead=True)
        self.prepared = 0
        self.aborts = 0
        self.graphs = GraphManager(
            self.recorder, self.buffers, self.output, on_failure=self.abort, **options
        )

    def abort(self):
        self.aborts += 1

    def fill(self, value):
        self.buffers.device_fields.input_ids.fill_(value)

    def forward(self, rows):
        ids = self.buffers.device_fields.input_ids[rows].long()
        hidden = self.table.index_select(0, ids)
        for _ in range(3):
            hidden = torch.tanh(hidden) + 0.5
        self.output[rows] = hidden

    def make(self, key, fault=lambda rows: None):
        width = key.num_tokens // key.num_microbatches
        parts = [slice(i * width, (i + 1) * width) for i in range(key.num_microbatches)]

        def make_forward():
            self.prepared += 1
            self.fill(0)

            def forward():
                for rows in parts:
                    fault(rows)
                    self.forward(rows)

            return forward

        return make_forward

    def capture(self, *keys):
        for key in keys:
            self.graphs.capture(key, self.make(key))

    def eager(self, count):
        self.output.fill_(-1)
        self.forward(slice(0, count))
        return self.output[:count].clone()


PLAIN, TWIN = decode_key(8), decode_key(8, num_microbatches=2)


def test_replay_returns_the_rows_of_its_key_as_eager_computes_them():
    step = Step()
    step.capture(PLAIN, decode_key(4), TWIN)
    for key in (PLAIN, TWIN, decode_key(4), TWIN):
        for value in (1, 7):
            step.fill(value)
            out = step.graphs.replay(step.graphs.ready(key, decode(3))).clone()
            assert out.shape == (key.num_tokens, 8)
            assert torch.equal(out, step.eager(key.num_tokens))
    assert [graph.replays for graph in step.graphs.captured.values()] == [2, 2, 4]


def test_capture_prepares_twice_and_marks_its_phases():
    step, phases = Step(), []
    graph = step.graphs.capture(PLAIN, step.make(PLAIN), mark=phases.append)
    assert phases == ["warmed", "recorded", "instantiated"]
    assert step.prepared == 2
    assert graph.capture_ns > 0
    assert graph.instantiate_ns > 0
    assert graph.recording.num_nodes > 0
    assert graph.outputs.data_ptr() == step.output.data_ptr()
    assert step.graphs.keys == (PLAIN,)
    assert step.aborts == 0


def test_keys_keep_the_order_of_capture():
    step = Step()
    keys = [decode_key(8), decode_key(2), decode_key(4), TWIN]
    step.capture(*keys)
    assert list(step.graphs.keys) == keys


def test_poison_fills_the_rows_of_its_key_only():
    step = Step()
    step.capture(PLAIN)
    step.graphs.poison(PLAIN)
    assert torch.isnan(step.output[:8]).all()
    assert not torch.isnan(step.output[8:]).any()
    assert torch.isfinite(step.graphs.replay(step.graphs.ready(PLAIN, decode(8)))).all()


@pytest.mark.parametrize("poisoned_before", [False, True])
def test_the_first_replay_poisons_unless_that_was_done_before(poisoned_before):
    step = Step()
    step.graphs.capture(PLAIN, lambda: lambda: step.forward(slice(0, 7)))
    if poisoned_before:
        step.graphs.poison(PLAIN)
    step.output.fill_(1)
    for _ in range(2):
        out = step.graphs.replay(step.graphs.ready(PLAIN, decode(8)))
        assert torch.isfinite(out[:7]).all()
        # The graph does not write row 7: what stands there shows whether it was poisoned.
        assert torch.isnan(out[7]).all().item() is not poisoned_before


def test_replay_refuses_a_key_that_was_not_captured():
    step = Step()
    step.capture(PLAIN)
    for refused in (TWIN, decode_key(4)):
        with pytest.raises(ReplayError, match="not among the 1 captured keys") as caught:
            step.graphs.replay(step.graphs.ready(refused, decode(2)))
        assert caught.value.key == str(refused)
    with pytest.raises(ReplayError, match="not among"):
        step.graphs.poison(TWIN)


@pytest.mark.parametrize("shape", [decode(9), prefill(4), decode(3, 2)])
def test_replay_refuses_a_batch_outside_the_key(shape):
    step = Step()
    step.capture(PLAIN)
    with pytest.raises(ReplayError, match="outside the key"):
        step.graphs.replay(step.graphs.ready(PLAIN, shape))
    assert step.graphs.captured[PLAIN].replays == 0


def test_replay_refuses_inputs_that_moved_and_names_them():
    step = Step()
    step.capture(PLAIN)
    fields = step.buffers.device_fields
    step.buffers.device_fields = dataclasses.replace(
        fields, positions=fields.positions.clone(), seq_lens=fields.seq_lens.clone()
    )
    with pytest.raises(ReplayError, match=r"seq_lens moved from .*, positions moved"):
        step.graphs.replay(step.graphs.ready(PLAIN, decode(8)))
    step.buffers.device_fields = fields
    assert torch.isfinite(step.graphs.replay(step.graphs.ready(PLAIN, decode(8)))).all()


def test_replay_refuses_extra_addresses_that_moved():
    cache = [torch.zeros(4)]
    step = Step(extra_addresses={"kv_cache": lambda: cache[0].data_ptr()})
    step.capture(PLAIN)
    step.graphs.replay(step.graphs.ready(PLAIN, decode(8)))
    cache.append(cache[0])
    cache[0] = torch.zeros(4)
    with pytest.raises(ReplayError, match="kv_cache moved"):
        step.graphs.replay(step.graphs.ready(PLAIN, decode(8)))


def test_capture_refuses_a_key_twice_and_one_beyond_the_output():
    step = Step()
    step.capture(PLAIN)
    with pytest.raises(CaptureError, match="FULL-8x8q1 failed: it is captured already"):
        step.capture(PLAIN)
    with pytest.raises(CaptureError, match="only 64 token rows"):
        step.capture(decode_key(65))
    assert step.aborts == 0


def raises(rows):
    raise ValueError("planted")


def syncs(rows):
    torch.zeros(1).item()


@pytest.mark.parametrize(
    ("fault", "cause", "said"),
    [
        (raises, ValueError, "ValueError: planted"),
        (syncs, RecordingError, "is not permitted while recording"),
        (
            lambda rows: (_ for _ in ()).throw(MicrobatchError(1, "planted")),
            MicrobatchError,
            "failed: microbatch 1: planted",
        ),
    ],
)
def test_a_fault_in_the_third_of_eight_captures_names_its_key_and_spares_the_rest(
    fault, cause, said
):
    step = Step()
    keys = [decode_key(count) for count in (64, 32, 16, 8, 4, 2, 1)]
    keys.insert(4, TWIN)
    for index, key in enumerate(keys):
        if index == 2:
            with pytest.raises(CaptureError, match=f"capture of {key} failed") as caught:
                step.graphs.capture(key, step.make(key, fault))
            assert said in str(caught.value)
            assert isinstance(caught.value.__cause__, cause)
            assert step.aborts == 1
        else:
            step.capture(key)
    assert step.aborts == 1
    assert list(step.graphs.keys) == keys[:2] + keys[3:]
    step.fill(5)
    for key in step.graphs.keys:
        out = step.graphs.replay(step.graphs.ready(key, decode(1))).clone()
        assert torch.equal(out, step.eager(key.num_tokens))
    step.capture(keys[2])


def test_a_fault_of_the_preparation_is_a_capture_error_too():
    step = Step()
    with pytest.raises(CaptureError, match="KeyError") as caught:
        step.graphs.capture(PLAIN, lambda: {}["absent"])
    assert isinstance(caught.value.__cause__, KeyError)
    assert step.aborts == 1


class KeepingRecorder(TapeRecorder):
    """Remembers what it recorded."""

    def __init__(self):
        super().__init__()
        self.made = []

    def record(self, work):
        self.made.append(super().record(work))
        return self.made[-1]


def test_a_fault_after_the_recording_frees_it():
    step = Step()
    recorder = KeepingRecorder()
    graphs = GraphManager(recorder, step.buffers, step.output)

    def mark(phase):
        if phase == "instantiated":
            recorder.made[0].replay()
            raise ValueError("planted")

    with pytest.raises(CaptureError, match="planted"):
        graphs.capture(PLAIN, step.make(PLAIN), mark=mark)
    with pytest.raises(RecordingError, match="freed"):
        recorder.made[0].replay()
    assert graphs.keys == ()


def test_an_interrupt_frees_what_is_parked_and_passes_through():
    step = Step()

    def interrupt(rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step.graphs.capture(PLAIN, step.make(PLAIN, interrupt))
    assert step.aborts == 1
    step.capture(PLAIN)


def on_a_thread(work, enter):
    def run():
        with enter(0):
            work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_capture_refuses_a_graph_whose_work_ran_where_nothing_records():
    step = Step()

    def forward():
        step.forward(slice(0, 8))

    def stray():
        on_a_thread(forward, lambda index: torch.inference_mode())

    with pytest.raises(CaptureError, match="invalid: empty, no kernel") as caught:
        step.graphs.capture(PLAIN, lambda: stray)
    assert caught.value.__cause__ is None
    assert step.graphs.keys == ()
    assert step.aborts == 1
    step.graphs.capture(PLAIN, lambda: lambda: on_a_thread(forward, step.recorder.enter))
    assert torch.equal(
        step.graphs.replay(step.graphs.ready(PLAIN, decode(8))).clone(), step.eager(8)
    )


def test_capture_refuses_a_twin_that_lost_a_microbatch():
    step = Step()
    step.capture(PLAIN)

    def half():
        step.forward(slice(0, 4))
        on_a_thread(lambda: step.forward(slice(4, 8)), lambda index: torch.inference_mode())

    with pytest.raises(CaptureError, match=r"FULL-8x8q1-mb2 failed.*2 x \d+ of FULL-8x8q1"):
        step.graphs.capture(TWIN, lambda: half)
    assert step.graphs.keys == (PLAIN,)


def test_drop_frees_one_key_and_free_frees_all():
    step = Step()
    step.capture(PLAIN, decode_key(4), TWIN)
    recording = step.graphs.captured[PLAIN].recording
    step.graphs.drop(PLAIN)
    assert step.graphs.keys == (decode_key(4), TWIN)
    with pytest.raises(RecordingError, match="freed"):
        recording.replay()
    with pytest.raises(ReplayError, match="not among"):
        step.graphs.drop(PLAIN)
    step.capture(PLAIN)
    step.graphs.free()
    assert step.graphs.keys == ()
