"""Another thread that keeps a device busy with copies of its own."""

import threading
from contextlib import contextmanager

import torch


@contextmanager
def pinned_copies():
    """A thread that allocates, copies and synchronises on a stream of its own all the while."""
    stop, started, failures = threading.Event(), threading.Event(), []

    def run():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.inference_mode():
            source = torch.ones(1 << 20, dtype=torch.uint8).pin_memory()
            try:
                while not stop.is_set():
                    target = source.to("cuda", non_blocking=True)
                    stream.synchronize()
                    assert target[-1].item() == 1
                    torch.cuda.mem_get_info()
                    started.set()
            except (RuntimeError, AssertionError) as error:
                failures.append(error)
                started.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(30)
    try:
        yield failures
    finally:
        stop.set()
        thread.join()
