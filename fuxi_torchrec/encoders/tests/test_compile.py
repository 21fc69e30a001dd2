"""torch.compile takes a query, and what surrounds a block's channels, as one graph, and once for all sizes."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder
from fuxi_torchrec.ops import backends

BACKENDS = [name for name in ("torch", "native", "triton") if name in backends.available()]
pytestmark = pytest.mark.timeout(300)


def compiled(function):
    """As one graph, and how often it was compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), counter


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_is_one_graph_for_any_number_of_users(backend):
    encoder, counts = make_encoder(torch.float32), []
    with backends.use(backend):
        query, counter = compiled(encoder.query)
        for lengths in ([3, 8, 1, 1, 4], [9] * 6, [2, 30, 7], [4] * 11):
            batch = make_batch(lengths, dtype=torch.float32)
            state = encoder.append(encoder.init_state(len(lengths)), batch.x, batch.offsets, batch.timestamps)
            wanted = encoder.query(state, batch.request)
            torch.testing.assert_close(query(state, batch.request), wanted, rtol=0, atol=1e-5)
            counts.append(counter.frame_count)
    assert counts[0] > 0 and len(set(counts)) == 1, counts


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "native"])
def test_what_surrounds_the_channels_is_one_graph_for_any_number_of_events(backend):
    block, counts = make_encoder(torch.float32).layers[0], []

    def around(x):
        if backend == "triton":
            return block._triton_mix(x, block._triton_projection(x)[:, : 3 * x.shape[1]])
        u, columns = block.project(x)
        return block.merge(x, u, [columns[0][:, : x.shape[1]]] * 3)

    with backends.use(backend):
        once, counter = compiled(around)
        for events in (40, 7, 100, 33):
            x = torch.randn(events, block.in_proj.shape[0])
            results = []
            for run in (around, once):
                rows = x.clone().requires_grad_()
                y = run(rows)
                results.append([y, *torch.autograd.grad(y.square().sum(), [rows, block.in_proj, block.ffn_out])])
            for found, wanted in zip(results[1], results[0], strict=True):
                scale = max(1.0, float(wanted.detach().abs().max()))
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * scale)
            counts.append(counter.frame_count)
    assert counts[0] > 0 and len(set(counts)) == 1, counts
