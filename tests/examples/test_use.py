"""The operators of examples/operators in use: beside PyTorch's own, and under transforms."""

import pytest
import torch
import torch.nn.functional as F

from examples.operators import (
    adamw,
    dropout,
    gelu,
    grid_sample,
    grouped_linear,
    layer_norm,
    nms,
    sample_top_p,
    selective_scan,
    stencil,
)


@pytest.mark.parametrize("compiles", [False, True])
def test_adamw_is_that_of_torch(compiles, device):
    """Our optimizer and torch's each train a model; the weights stay equal."""
    models = []
    for make in (adamw.AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3, dtype=torch.float64).to(device)
        optimizer = make(model.parameters(), lr=0.05, weight_decay=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            inputs = torch.linspace(-1, 1, 20, dtype=torch.float64, device=device).view(4, 5)
            model(inputs).square().sum().backward()
            optimizer.step()
        models.append(model)
    for ours, theirs in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_adamw_takes_a_closure():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = adamw.AdamW([parameter, torch.nn.Parameter(torch.ones(1))], lr=0.5)

    def closure():
        loss = parameter.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2
    assert (parameter < 0.6).all()


def test_philox_has_the_answers_of_its_authors():
    """Random123's known answers for philox2x32 with ten rounds."""
    words = 0xFFFFFFFF
    assert dropout.philox(0, 0, 0) == 0xFF1DAE59
    assert dropout.philox(words, words, words) == 0x2C3F628B
    assert dropout.philox(0x243F6A88, 0x85A308D3, 0x13198A2E) == 0xDD7CE038


def test_dropout_follows_the_seed(device):
    input = torch.ones(1000, 100, device=device)

    def drawn(seed):
        torch.manual_seed(seed)
        return dropout.dropout(input, p=0.3)

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert set(first.unique().tolist()) == {0.0, first.max().item()}
    torch.testing.assert_close(first.max().cpu(), torch.tensor(1 / 0.7))
    # Five standard deviations of the mean of 100000 draws.
    assert abs((first > 0).float().mean().item() - 0.7) < 5 * (0.3 * 0.7 / 1e5) ** 0.5


def test_dropout_compiles_in_one_graph():
    input = torch.randn(64, 32, requires_grad=True)
    output = torch.compile(lambda x: dropout.dropout(x, p=0.5), fullgraph=True)(input)
    (gradient,) = torch.autograd.grad(output.sum(), input)
    assert torch.equal(gradient, (output != 0) * 2.0)


def test_top_p_draws_what_may_be_drawn(device):
    """The generator and the seed decide, also in one graph; -1 stands for no valid token."""
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(0)).to(device)
    logits[3, 7], logits[4] = torch.nan, -torch.inf
    probabilities = sample_top_p.reference(logits[:3].double().cpu(), 0.5)

    def drawn(function, seed):
        torch.manual_seed(seed)
        return function(logits, 0.5, temperature=1.0)

    compiled = torch.compile(sample_top_p.sample_top_p, fullgraph=True, backend="aot_eager")
    tokens = [drawn(sample_top_p.sample_top_p, seed) for seed in range(20)]
    assert len({tuple(it.tolist()) for it in tokens}) > 10
    for seed, each in enumerate(tokens):
        assert torch.equal(each, drawn(compiled, seed))
        assert (probabilities.gather(1, each[:3, None].cpu()) > 0).all()
        assert each[3:].tolist() == [-1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_linear_is_that_of_torch(dtype):
    input, weight, offsets = grouped_linear.sample(40, 16, 32, [5, 5, 23, 40], dtype).inputs
    ours = grouped_linear.grouped_linear(input, weight, offsets)
    theirs = torch.cat([x @ w for x, w in zip(input.split([5, 0, 18, 17]), weight)])
    torch.testing.assert_close(ours, theirs)


def test_grid_sample_is_that_of_torch():
    """On pixels and edges, and far outside."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(2, 5, 6, 7, dtype=torch.float64, generator=generator)
    grid = torch.randn(2, 4, 9, 2, dtype=torch.float64, generator=generator)
    grid[0, 0], grid[0, 1], grid[0, 2], grid[1, 1] = 1.0, -1.0, torch.nan, 1e300
    grid[1, 0, :, 0] = (2 * torch.arange(9) + 1) / 7 - 1
    torch.testing.assert_close(
        grid_sample.grid_sample(input, grid).nan_to_num(),
        F.grid_sample(input, grid.nan_to_num(5.0), align_corners=False),
    )


def test_the_scan_goes_on_from_nothing_but_its_state():
    """The gradient of the last state reaches all earlier inputs."""
    inputs = [
        it.requires_grad_() for it in selective_scan.sample((2, 5, 3), 4, torch.float64).inputs
    ]
    for ours, theirs in zip(
        torch.autograd.grad(selective_scan.selective_scan(*inputs)[1].sum(), inputs[:4]),
        torch.autograd.grad(selective_scan.reference(*inputs)[1].sum(), inputs[:4]),
    ):
        torch.testing.assert_close(ours, theirs)


def test_nms_of_no_boxes(device):
    none = torch.empty(0, 4, device=device)
    assert nms.nms(none, none[:, 0], iou_threshold=0.5).shape == (0,)


TRANSFORMED = {
    "gelu": (gelu.gelu, F.gelu),
    "layer_norm": (layer_norm.layer_norm, lambda x: F.layer_norm(x, x.shape[-1:])),
    "stencil": (
        lambda x: stencil.stencil(x, rate=0.2),
        lambda x: stencil.reference(x, rate=0.2),
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms(name):
    """Forward mode, per-sample gradients and second derivatives match PyTorch's own."""
    ours, theirs = TRANSFORMED[name]
    x, tangent = torch.randn(2, 3, 4, 5, dtype=torch.float64)

    def transformed(function):
        def loss(x):
            return function(x).square().sum()

        return (
            torch.func.jvp(function, (x,), (tangent,)),
            torch.vmap(torch.func.grad(loss))(x),
            torch.func.hessian(loss)(x[0]),
        )

    torch.testing.assert_close(transformed(ours), transformed(theirs))
