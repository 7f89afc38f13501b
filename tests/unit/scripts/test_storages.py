"""The count of what tensors take, against sizes that can be told by hand."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from scripts.bench.storages import Kind, Storages

NUMBERS = 1000
SIZE = 4 * NUMBERS


def weight() -> torch.Tensor:
    return torch.ones(NUMBERS, requires_grad=True)


def test_what_is_freed_counts_no_more_and_has_been_in_the_peak() -> None:
    with Storages({}) as storages:
        one = torch.ones(NUMBERS)
        two = one + 1
        assert storages.now()[Kind.forward] == 2 * SIZE
        del one
        assert storages.now()[Kind.forward] == SIZE
        del two
    assert sum(storages.now().values()) == 0
    assert storages.peak[Kind.forward] == storages.most[Kind.forward] == 2 * SIZE


def test_a_view_has_no_memory_of_its_own() -> None:
    with Storages({}) as storages:
        one = torch.ones(NUMBERS)
        parts = one.view(10, -1).T[:3]
    assert storages.now()[Kind.forward] == SIZE and len(parts) == 3


def test_what_was_there_before_is_what_it_was_said_to_be() -> None:
    """Also where autograd keeps it for the backward pass."""
    known = weight()
    with Storages({Kind.parameters: [known]}) as storages:
        (known * known).sum()
    assert storages.most[Kind.parameters] == SIZE
    assert storages.most[Kind.activations] == 0


def test_activations_are_what_autograd_keeps() -> None:
    """exp keeps its result and the product its two factors; the sum keeps nothing."""
    known = weight()
    with Storages({Kind.parameters: [known]}) as storages:
        loss = (known.exp() * known.cos()).sum()
        assert storages.now()[Kind.activations] == 2 * SIZE
        loss.backward()
        assert storages.now()[Kind.activations] == 0
    assert storages.most[Kind.activations] == 2 * SIZE


def test_gradients_are_what_is_left_of_a_backward_pass() -> None:
    known = weight()
    with Storages({Kind.parameters: [known]}) as storages:
        known.exp().cos().sum().backward()
        torch.zeros(1)
    assert storages.most[Kind.backward] == SIZE
    assert storages.peak[Kind.backward] > 0


def test_what_is_computed_again_is_an_activation() -> None:
    known = weight()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return x.exp().cos()

    with Storages({Kind.parameters: [known]}) as storages:
        made = known * 2
        loss = checkpoint(layer, made, use_reentrant=False).sum()
        assert storages.now()[Kind.activations] == SIZE  # the layer's input
        loss.backward()
    assert storages.most[Kind.activations] >= 2 * SIZE


def test_a_storage_that_was_emptied_counts_as_empty() -> None:
    """As FSDP does with gathered parameters."""
    with Storages({}) as storages:
        one = torch.ones(NUMBERS)
        one.untyped_storage().resize_(0)
        assert storages.now()[Kind.forward] == 0
