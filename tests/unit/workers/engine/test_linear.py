import pytest
import torch
from torch import nn

from tests.fakes.tiny_models import SERVED, make_model
from workers.engine.linear import PackedLinear, pack_head


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


@pytest.fixture(params=["llama", "gpt_neox"])
def model(request):
    return make_model(request.param, SERVED[request.param])


def test_a_packed_head_gives_the_logits_of_the_plain_one(model):
    ids = torch.arange(20).unsqueeze(0)
    with torch.inference_mode():
        before = model(input_ids=ids).logits

        assert pack_head(model)
        assert type(model.get_output_embeddings()) is PackedLinear
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-5)


def test_an_embedding_that_shares_its_weight_with_the_head_stays():
    model = make_model("llama", {**SERVED["llama"], "tie_word_embeddings": True})
    shared = model.get_output_embeddings().weight

    assert pack_head(model)
    assert model.get_input_embeddings().weight is shared


def test_half_precision_is_left_alone(model):
    model = model.bfloat16()

    assert not pack_head(model)
    assert type(model.get_output_embeddings()) is nn.Linear


def test_a_head_whose_packed_product_is_wrong_is_left_alone(model, monkeypatch):
    monkeypatch.setattr(PackedLinear, "forward", lambda self, rows: rows @ self.weight.T * 1.1)

    assert not pack_head(model)
    assert type(model.get_output_embeddings()) is nn.Linear


def test_the_head_is_left_alone_where_torch_cannot_pack(model, monkeypatch):
    def missing(self, linear):
        raise AttributeError("no such operation")

    monkeypatch.setattr(PackedLinear, "__init__", missing)

    assert not pack_head(model)
