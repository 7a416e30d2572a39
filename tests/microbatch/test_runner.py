"""The runner: overlap order, failures in every place, and the same work captured on a GPU."""

import contextlib
import signal
import threading

import pytest
import torch

from cgprof.batch.context import PlainHandoff
from cgprof.errors import CgprofError, ConfigError, MicrobatchError
from cgprof.graphs.nodes import read_nodes
from cgprof.graphs.tape import TapeRecorder
from cgprof.graphs.topology import contents
from cgprof.microbatch.runner import MicrobatchRunner, StreamHandoff


def no_context(_index):
    return contextlib.nullcontext()


def microbatch_threads():
    return [t for t in threading.enumerate() if t.name.startswith("microbatch-") and t.is_alive()]


@contextlib.contextmanager
def runner_of(count, timeout_s=10.0):
    before = len(microbatch_threads())
    runner = MicrobatchRunner(count, compute_stream=None, comm_stream=None, timeout_s=timeout_s)
    assert len(microbatch_threads()) == before + count
    yield runner
    runner.close()
    assert len(microbatch_threads()) == before


def run_step(runner, works, enter=no_context):
    runner.park(works, enter)
    runner.release()


def assert_runs(runner, count):
    """A step of this runner runs each work once, with two handovers."""
    ran = []

    def work(index):
        def run():
            for _ in range(2):
                runner.handoff(index).communicate(lambda: None)
            ran.append(index)

        return run

    run_step(runner, [work(index) for index in range(count)])
    assert ran == list(range(count))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_microbatches_enter_and_exit_in_turn(count):
    log = []

    def work(index):
        def run():
            log.append(f"enter{index}")
            runner.handoff(index).communicate(
                lambda: log.append(f"op{index}"), lambda: log.append(f"meanwhile{index}")
            )
            log.append(f"exit{index}")

        return run

    with runner_of(count) as runner:
        run_step(runner, [work(index) for index in range(count)])
    wanted = [f"{what}{i}" for i in range(count) for what in ("enter", "op", "meanwhile")]
    assert log == wanted + [f"exit{i}" for i in range(count)]


def test_microbatches_that_transfer_nothing_take_turns_all_the_same():
    log = []

    def work(index):
        def run():
            for layer in range(2):
                log.append((layer, index))
                runner.handoff(index).communicate(
                    None, lambda layer=layer: log.append((layer, index, "more"))
                )

        return run

    with runner_of(2) as runner:
        run_step(runner, [work(index) for index in range(2)])
    wanted = [[(layer, i), (layer, i, "more")] for layer in range(2) for i in range(2)]
    assert log == [entry for turn in wanted for entry in turn]


def test_steps_reuse_the_same_threads_inside_their_context():
    log = []

    @contextlib.contextmanager
    def enter(index):
        log.append((f"in{index}", threading.current_thread().name))
        yield
        log.append((f"out{index}", threading.current_thread().name))

    with runner_of(2) as runner:
        for _ in range(2):
            log.clear()
            run_step(runner, [lambda: None, lambda: None], enter)
            assert log == [
                (f"{what}{index}", f"microbatch-{index}")
                for index in (0, 1)
                for what in ("in", "out")
            ]


def test_works_run_in_inference_mode_and_start_only_when_released():
    seen = []
    with runner_of(2) as runner:
        runner.park([lambda: seen.append(torch.is_inference_mode_enabled())] * 2, no_context)
        assert seen == []
        runner.release()
        assert seen == [True, True]


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("handovers", [0, 1, 2])
def test_raise_names_its_microbatch_and_the_next_step_runs(count, handovers):
    with runner_of(count) as runner:
        for failing in sorted({0, 1, count - 1}):
            finished, entered, left = [], [], []

            @contextlib.contextmanager
            def enter(index, entered=entered, left=left):
                entered.append(index)
                try:
                    yield
                finally:
                    left.append(index)

            def work(index, failing=failing, finished=finished):
                def run():
                    for turn in range(3):
                        if index == failing and turn == handovers:
                            raise ZeroDivisionError(f"turn {turn}")
                        runner.handoff(index).communicate(lambda: None)
                    finished.append(index)

                return run

            with pytest.raises(MicrobatchError, match=f"turn {handovers}") as raised:
                run_step(runner, [work(index) for index in range(count)], enter)
            assert raised.value.index == failing
            assert isinstance(raised.value.__cause__, ZeroDivisionError)
            assert finished == []
            assert sorted(entered) == sorted(left)
            # With no handover, those after the failing one never had a turn.
            assert sorted(entered) == list(range(failing + 1 if handovers == 0 else count))
            assert_runs(runner, count)


def test_first_error_wins_when_all_raise():
    def work(index):
        def run():
            try:
                runner.handoff(index).communicate(lambda: None)
            finally:
                raise ValueError(f"from {index}")

        return run

    with runner_of(3) as runner:
        with pytest.raises(MicrobatchError, match="microbatch 0: ValueError: from 0"):
            run_step(runner, [work(index) for index in range(3)])
        assert_runs(runner, 3)


def test_error_of_the_package_is_kept_as_the_cause():
    def refuse():
        raise ConfigError("limits", "too small")

    with runner_of(2) as runner:
        with pytest.raises(MicrobatchError, match="limits: too small") as raised:
            run_step(runner, [lambda: None, refuse])
        assert raised.value.index == 1
        assert isinstance(raised.value.__cause__, CgprofError)


def test_raise_in_the_context_is_reported_like_one_in_the_work():
    @contextlib.contextmanager
    def enter(index):
        if index == 1:
            raise RuntimeError("no recording")
        yield

    with runner_of(2) as runner:
        with pytest.raises(MicrobatchError, match="microbatch 1: RuntimeError: no recording"):
            run_step(runner, [lambda: None] * 2, enter)
        assert_runs(runner, 2)


@pytest.mark.parametrize("handovers", [(0, 4, 2), (4, 0, 1), (1, 1, 5), (0, 0, 3)])
def test_microbatch_that_ends_early_leaves_the_others_running(handovers):
    done = []

    def work(index):
        def run():
            for _ in range(handovers[index]):
                runner.handoff(index).communicate(lambda: None)
            done.append(index)

        return run

    with runner_of(3) as runner:
        run_step(runner, [work(index) for index in range(3)])
        assert sorted(done) == [0, 1, 2]


@pytest.mark.parametrize("stuck", [0, 1])
def test_work_that_hangs_ends_in_a_named_error_and_the_runner_refuses_more(stuck):
    wake = threading.Event()

    def work(index):
        def run():
            runner.handoff(index).communicate(lambda: None)
            if index == stuck:
                wake.wait(30)

        return run

    with contextlib.ExitStack() as teardown:
        runner = teardown.enter_context(runner_of(2, timeout_s=0.5))
        teardown.callback(lambda: [t.join(10) for t in microbatch_threads()])
        teardown.callback(runner.close)
        teardown.callback(wake.set)
        with pytest.raises(MicrobatchError, match="kept its turn") as raised:
            run_step(runner, [work(0), work(1)])
        assert raised.value.index == stuck
        with pytest.raises(MicrobatchError, match="hung in an earlier step") as raised:
            runner.park([lambda: None] * 2, no_context)
        assert raised.value.index == stuck
        runner.abort()


def test_aborted_step_never_runs_and_abort_may_be_repeated():
    ran = []
    with runner_of(2) as runner:
        runner.abort()
        runner.park([lambda: ran.append(0)] * 2, no_context)
        runner.abort()
        runner.abort()
        with pytest.raises(MicrobatchError, match="nothing is parked"):
            runner.release()
        assert_runs(runner, 2)
        assert ran == []


def test_interrupted_release_is_unwound_by_abort():
    main = threading.main_thread().ident

    def work(index):
        def run():
            signal.pthread_kill(main, signal.SIGINT)
            while True:
                runner.handoff(index).communicate(lambda: None)

        return run

    with runner_of(2) as runner:
        with pytest.raises(KeyboardInterrupt):
            run_step(runner, [work(0), work(1)])
        runner.abort()
        assert_runs(runner, 2)


def test_park_refuses_what_it_cannot_run():
    with runner_of(2) as runner:
        with pytest.raises(MicrobatchError, match="3 works for 2"):
            runner.park([lambda: None] * 3, no_context)
        runner.park([lambda: None] * 2, no_context)
        with pytest.raises(MicrobatchError, match="parked already"):
            runner.park([lambda: None] * 2, no_context)
        runner.release()
        assert_runs(runner, 2)
    with pytest.raises(MicrobatchError, match="closed"):
        runner.park([lambda: None] * 2, no_context)
    runner.close()


class Toy:
    """Three layers over 12 tokens on the CPU, whole or in three microbatches."""

    def __init__(self):
        self.weight = torch.randn(8, 8)
        self.x, self.out = torch.randn(12, 8), torch.empty(12, 8)
        self.fault = None

    def forward(self, rows, handoff, index=None):
        hidden = self.x[rows]
        for layer in range(3):
            hidden = torch.relu(hidden @ self.weight)
            received = torch.empty_like(hidden)
            handoff.communicate(lambda h=hidden, r=received: r.copy_(h))
            hidden = received
            if index is not None and self.fault == (index, layer):
                raise ZeroDivisionError(f"layer {layer}")
        self.out[rows] = hidden

    def park(self, runner, enter=no_context):
        def work(i):
            return lambda: self.forward(slice(4 * i, 4 * i + 4), runner.handoff(i), i)

        runner.park([work(i) for i in range(3)], enter)

    def unsplit(self):
        """Each microbatch's rows in turn: the same matmul shapes, so the same bits."""
        for i in range(3):
            self.forward(slice(4 * i, 4 * i + 4), PlainHandoff())
        return self.out.clone()


def test_split_work_equals_the_unsplit_and_warming_needs_no_gpu():
    toy = Toy()
    wanted = toy.unsplit()
    with runner_of(3) as runner:
        runner.warm_threads(torch.float32)
        toy.out.fill_(float("nan"))
        toy.park(runner)
        runner.release()
    assert torch.equal(toy.out, wanted)


def test_step_on_a_tape_replays_without_the_threads():
    toy, recorder = Toy(), TapeRecorder(poison_dead=True)
    with runner_of(3) as runner:
        toy.park(runner, recorder.enter)
        recording = recorder.record(runner.release)
    recording.instantiate()
    toy.x.normal_()
    wanted = toy.unsplit()
    toy.out.fill_(float("nan"))
    recording.replay()
    assert torch.equal(toy.out, wanted)


@pytest.mark.parametrize("fault", [(0, 0), (1, 2), (2, 1)])
def test_raise_on_a_tape_leaves_the_next_recording_working(fault):
    toy, recorder = Toy(), TapeRecorder()
    with runner_of(3) as runner:
        toy.fault = fault
        toy.park(runner, recorder.enter)
        with pytest.raises(MicrobatchError, match=f"microbatch {fault[0]}: .*layer {fault[1]}"):
            recorder.record(runner.release)
        toy.fault = None
        toy.park(runner, recorder.enter)
        recording = recorder.record(runner.release)
    recording.instantiate()
    wanted = toy.unsplit()
    toy.out.fill_(float("nan"))
    recording.replay()
    assert torch.equal(toy.out, wanted)


class Overlapped:
    """A matmul chain over the two streams: whole, or split over a runner's microbatches."""

    def __init__(self, count):
        self.compute, self.comm = torch.cuda.Stream(), torch.cuda.Stream()
        self.runner = MicrobatchRunner(
            count, compute_stream=self.compute, comm_stream=self.comm, timeout_s=30
        )
        self.plain = StreamHandoff(self.compute, self.comm)
        self.rows = 32
        self.weight = torch.randn(64, 64, device="cuda") / 8
        self.x = torch.randn(self.rows * count, 64, device="cuda")
        self.out = torch.zeros_like(self.x)
        self.faults, self.transfers = {}, True
        torch.cuda.synchronize()
        self.runner.warm_threads(torch.float32)

    def forward(self, rows, handoff, index=0):
        hidden = self.x[rows]
        for layer in range(4):
            hidden = torch.relu(hidden @ self.weight)
            if self.transfers:
                received = torch.empty_like(hidden)
                handoff.communicate(lambda h=hidden, r=received: r.copy_(h))
                hidden = received
            else:
                handoff.communicate(None)
            if self.faults.get(index) == layer:
                raise ZeroDivisionError(f"layer {layer}")
        self.out[rows].copy_(hidden)

    def park(self):
        count = self.x.shape[0] // self.rows

        def work(i):
            rows = slice(i * self.rows, (i + 1) * self.rows)
            return lambda: self.forward(rows, self.runner.handoff(i), i)

        self.runner.park([work(i) for i in range(count)], lambda _: torch.cuda.stream(self.compute))

    def capture(self, work, keep=False):
        graph = torch.cuda.CUDAGraph(keep_graph=keep)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self.compute, capture_error_mode="thread_local"):
            work()
        if keep:
            graph.instantiate()
        return graph

    def run(self, work):
        """Runs on the compute stream and returns the output."""
        self.out.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(self.compute):
            work()
        torch.cuda.synchronize()
        return self.out.clone()

    def unsplit(self):
        """Each microbatch's rows in turn through the plain handoff: the same matmul shapes."""
        for start in range(0, self.x.shape[0], self.rows):
            self.forward(slice(start, start + self.rows), self.plain, index=-1)


@pytest.fixture
def overlapped(request):
    toy = Overlapped(request.param)
    yield toy
    toy.runner.close()


@pytest.mark.gpu
@pytest.mark.parametrize("overlapped", [2, 3], indirect=True)
def test_captured_microbatches_replay_as_the_unsplit_step(overlapped):
    wanted = overlapped.run(overlapped.unsplit)
    overlapped.park()
    assert torch.equal(overlapped.run(overlapped.runner.release), wanted)
    overlapped.park()
    graph = overlapped.capture(overlapped.runner.release)
    for _ in range(3):
        overlapped.x.normal_()
        wanted = overlapped.run(overlapped.unsplit)
        assert torch.equal(overlapped.run(graph.replay), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("overlapped", [2], indirect=True)
def test_stream_handoff_is_captured_with_its_transfers(overlapped):
    wanted = overlapped.run(overlapped.unsplit)
    graph = overlapped.capture(overlapped.unsplit)
    assert torch.equal(overlapped.run(graph.replay), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("overlapped", [3], indirect=True)
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("layer", [0, 3])
def test_raise_inside_a_capture_leaves_the_next_capture_working(overlapped, failing, layer):
    wanted = overlapped.run(overlapped.unsplit)
    overlapped.faults = {failing: layer}
    overlapped.park()
    with pytest.raises(MicrobatchError, match=f"layer {layer}") as raised:
        overlapped.capture(overlapped.runner.release)
    assert raised.value.index == failing
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    overlapped.faults = {}
    overlapped.park()
    graph = overlapped.capture(overlapped.runner.release)
    assert torch.equal(overlapped.run(graph.replay), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("overlapped", [2], indirect=True)
def test_raise_in_an_eager_step_leaves_the_next_step_right(overlapped):
    wanted = overlapped.run(overlapped.unsplit)
    overlapped.faults = {1: 1}
    overlapped.park()
    with pytest.raises(MicrobatchError, match="layer 1"):
        overlapped.run(overlapped.runner.release)
    overlapped.faults = {}
    overlapped.park()
    assert torch.equal(overlapped.run(overlapped.runner.release), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("overlapped", [2], indirect=True)
@pytest.mark.parametrize("transfers", [True, False])
def test_graph_of_microbatches_branches_only_where_something_travels(overlapped, transfers):
    overlapped.transfers = transfers
    wanted = overlapped.run(overlapped.unsplit)
    overlapped.park()
    overlapped.run(overlapped.runner.release)
    overlapped.park()
    graph = overlapped.capture(overlapped.runner.release, keep=True)
    found = contents(read_nodes(graph.raw_cuda_graph()))
    assert (found.forks > 0) is transfers
    assert torch.equal(overlapped.run(graph.replay), wanted)
