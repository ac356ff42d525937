"""How far a float32 run may be from exact numbers: twice as far as transformers' own float32 runs are.

Distances of tensors are L2 norms. Float32 noise is luck for a single number, so
there is a floor under what is allowed: a few roundings of the largest value around.
"""
from __future__ import annotations

from typing import Any

import torch

FACTOR = 2.0
FLOOR = 4 * 2.0**-24  # of the largest gradient's norm, of a weight's own norm
LOSS_FLOOR = 8 * 2.0**-24  # of a loss, one number of many sums
ZERO = 1e-9  # of the largest gradient: what is below is zero in exact arithmetic
ZERO_BOUND = 1e-6  # of the largest gradient: what a zero may come out as


def parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """What GPT-2 keeps in one tensor is judged apart: its key bias has no gradient, its neighbours do."""
    if ".c_attn." not in name:
        return [(name, tensor)]
    return [(f"{name}[{part}]", piece) for part, piece in zip(("query", "key", "value"), tensor.chunk(3, dim=-1))]


def judge_losses(what: str, found: list[float], exact: list[float], noise: list[list[float]]) -> list[str]:
    """By step; noise grows with the steps, so what is allowed is twice the largest so far."""
    assert len(found) == len(exact)
    wrong, so_far = [], 0.0
    for step, (loss, right, *runs) in enumerate(zip(found, exact, *noise)):
        so_far = max(so_far, *runs)
        allowed = FACTOR * so_far + LOSS_FLOOR * abs(right)
        if not abs(loss - right) <= allowed:
            wrong.append(f"{what}: loss {step} is {abs(loss - right):.2e} away, {allowed:.2e} is allowed")
    return wrong


def judge_tensors(what: str, found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor],
                  noise: list[dict[str, float]], gradients: bool) -> list[str]:
    """One line for each tensor that is too far away."""
    assert found.keys() == exact.keys(), f"{what}: other names: {sorted(found.keys() ^ exact.keys())}"
    wide = {part: piece for name, tensor in exact.items() for part, piece in parts(name, tensor)}
    largest = max(tensor.norm().item() for tensor in wide.values())
    wrong = []
    for name, tensor in found.items():
        if tensor.shape != exact[name].shape:
            wrong.append(f"{what}: {name} is {list(tensor.shape)}, not {list(exact[name].shape)}")
            continue
        for part, piece in parts(name, tensor):
            size, distance = wide[part].norm().item(), (piece.double() - wide[part]).norm().item()
            if gradients and size <= ZERO * largest:
                allowed = ZERO_BOUND * largest
            else:
                allowed = FACTOR * max(run[part] for run in noise) + FLOOR * (largest if gradients else size)
            if not distance <= allowed:
                wrong.append(f"{what}: {part} is {distance:.2e} away, {allowed:.2e} is allowed (its norm is {size:.2e})")
    return wrong


def zeros(gradients: dict[str, torch.Tensor]) -> set[str]:
    """The parts whose gradient is zero in exact arithmetic."""
    sizes: dict[str, Any] = {part: piece.norm().item() for name, tensor in gradients.items()
                             for part, piece in parts(name, tensor)}
    return {part for part, size in sizes.items() if size <= ZERO * max(sizes.values())}


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Of all tensors together."""
    assert some.keys() == others.keys(), f"other names: {sorted(some.keys() ^ others.keys())}"
    return sum((some[name].double() - others[name]).square().sum().item() for name in others) ** 0.5
