"""Train a small net on several processes, and on a single one."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RANKS = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU())
        self.head = nn.Linear(16, 3)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


def loss_of(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens), targets)


def make_net():
    torch.manual_seed(0)
    net = Net().double()
    # Batch norm's statistics would be those of each process's part of the batch.
    net.layers[1] = nn.Identity()
    return net


def batches(device):
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        tokens = torch.randint(20, (8,), generator=generator)
        yield tokens.to(device), (tokens % 3).to(device)


def my_part(batch):
    return [tensor.chunk(RANKS)[dist.get_rank()] for tensor in batch]


def train(model, parts, optimizer=torch.optim.AdamW):
    optimizer = optimizer(model.parameters(), lr=0.1)
    for batch in parts:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def expected_parameters():
    """Train in one process on the CPU with whole batches, and return the parameters."""
    net = make_net()
    train(net, batches("cpu"))
    return list(net.parameters())


def assert_trained(parameters):
    for actual, expected in zip(parameters, expected_parameters(), strict=True):
        assert actual.device.type == "foo"
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-9, atol=1e-9)
