import pytest
import torch
from torch import nn

from workers.engine.linear import PackedLinear, pack_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 17), (2, 0), (1, 300)])
def test_a_packed_layer_computes_what_the_plain_one_does(bias, shape):
    linear = nn.Linear(48, 33, bias=bias)
    rows = torch.randn(*shape, 48)

    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(rows), linear(rows), rtol=1e-4, atol=1e-5)


def test_a_packed_layer_shows_its_weight():
    linear = nn.Linear(48, 33)

    assert torch.equal(PackedLinear(linear).weight, linear.weight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.body(self.embedding(ids)))


def test_every_linear_layer_is_packed_and_a_tied_embedding_stays():
    model = Tied()
    ids = torch.arange(20)
    with torch.inference_mode():
        before = model(ids)

        assert pack_linears(model) == 3
        assert not any(type(module) is nn.Linear for module in model.modules())
        torch.testing.assert_close(model(ids), before, rtol=1e-4, atol=1e-5)


def test_half_precision_is_left_alone():
    model = Tied().bfloat16()

    assert pack_linears(model) == 0
    assert type(model.head) is nn.Linear


def test_a_layer_whose_packed_product_is_wrong_is_left_alone(monkeypatch):
    model = Tied()
    monkeypatch.setattr(PackedLinear, "forward", lambda self, rows: rows @ self.weight.T * 1.1)

    assert pack_linears(model) == 0


def test_layers_are_left_alone_where_torch_cannot_pack(monkeypatch):
    def missing(self, linear):
        raise AttributeError("no such operation")

    model = Tied()
    monkeypatch.setattr(PackedLinear, "__init__", missing)

    assert pack_linears(model) == 0
