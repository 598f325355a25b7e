"""The number of threads follows what others of the host do, layer by layer."""

import threading

import torch

from workers.engine.attention.core_aware import CoreAwareBackend, SharedThreads


class Recording:
    """A backend that notes with how many threads it is called."""

    def __init__(self):
        self.threads = []

    def prepare(self, meta):
        self.threads.append(torch.get_num_threads())

    def forward(self, layer_index, q, k, v, scoring):
        self.threads.append(torch.get_num_threads())
        return q + layer_index


def test_each_layer_is_computed_with_the_threads_of_that_moment():
    inner, wanted = Recording(), iter([2, 2, 1, 3])
    backend = CoreAwareBackend(inner, SharedThreads(count=lambda: next(wanted)))
    q = torch.zeros(1)

    def step():  # in a thread of its own: others keep their number
        backend.prepare(None)
        for layer in range(3):
            assert backend.forward(layer, q, q, q, None) == layer

    before = torch.get_num_threads()
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert inner.threads == [2, 2, 1, 3]
    torch.set_num_threads(before)
