"""The loss scale's sequence, against an independent model of the documented rule and against torch's GradScaler."""
import itertools
import random

import pytest
import torch

from shardsmith import _core
from shardsmith.errors import Error


class Model:
    """The rule as DeepSpeed and Megatron document it, counted in iterations."""

    def __init__(self, init_scale, scale_factor, scale_window, min_scale, delayed_shift, consecutive_hysteresis):
        self.scale, self.factor, self.window, self.min = init_scale, scale_factor, scale_window, min_scale
        self.shift, self.consecutive = delayed_shift, consecutive_hysteresis
        self.iteration, self.last_overflow, self.left = 0, -1, delayed_shift

    def update(self, overflow):
        if overflow:
            if self.shift == 1 or self.left == 1:
                self.scale = max(self.scale / self.factor, self.min)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive:
                self.left = self.shift
            if (self.iteration - self.last_overflow) % self.window == 0:
                if not self.consecutive:
                    self.left = self.shift
                self.scale *= self.factor
        self.iteration += 1


ARGUMENTS = list(itertools.product((2.0**32, 1024.0), (2.0, 3.0), (1, 3, 7), (1.0, 100.0), (1, 2, 4), (False, True)))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_equals_the_documented_rule_for_all_arguments(share):
    draw = random.Random(int(share * 10))
    names = ("init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")
    for values in ARGUMENTS:
        arguments = dict(zip(names, values))
        ours, expected = _core.LossScaler(**arguments), Model(**arguments)
        for step in range(120):
            assert ours.loss_scale == expected.scale, (arguments, step)
            overflow = draw.random() < share
            ours.update(overflow)
            expected.update(overflow)


def test_equals_grad_scaler_where_they_coincide():
    draw = random.Random(4)
    for window, factor in ((1, 2.0), (5, 2.0), (3, 4.0)):
        ours = _core.LossScaler(init_scale=2.0**40, scale_factor=factor, scale_window=window)
        theirs = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_factor=factor, backoff_factor=1 / factor,
                                      growth_interval=window)
        param = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([param], lr=0.1)
        for step in range(60):
            overflow = draw.random() < 0.3
            theirs.scale(torch.ones(()))  # makes its scale
            param.grad = torch.full((2,), float("inf") if overflow else 1.0)
            theirs.step(optimizer)
            theirs.update()
            ours.update(overflow)
            assert ours.loss_scale == theirs.get_scale(), step


def test_goes_on_from_its_saved_counters():
    draw = random.Random(9)
    pattern = [draw.random() < 0.3 for _ in range(200)]
    for values in ARGUMENTS[::5]:
        make = lambda: _core.LossScaler(init_scale=values[0], scale_factor=values[1], scale_window=values[2],  # noqa: E731
                                        min_scale=values[3], delayed_shift=values[4], consecutive_hysteresis=values[5])
        whole, half = make(), make()
        for overflow in pattern[:77]:
            whole.update(overflow)
            half.update(overflow)
        rest = make()
        rest.restore(*half.state())
        for overflow in pattern[77:]:
            whole.update(overflow)
            rest.update(overflow)
            assert rest.state() == whole.state()


def test_a_fixed_scale_stays():
    scaler = _core.LossScaler.fixed(128.0)
    for overflow in (True, False, True):
        scaler.update(overflow)
    assert scaler.loss_scale == 128.0 and not scaler.dynamic


def test_never_grows_to_infinity():
    scaler = _core.LossScaler(init_scale=2.0**1020, scale_window=1)
    for _ in range(20):
        scaler.update(False)
    assert scaler.loss_scale == 2.0**1023
    scaler.update(True)
    assert scaler.loss_scale == 2.0**1022


@pytest.mark.parametrize("arguments, word", [
    ({"init_scale": float("inf")}, "init_scale"), ({"init_scale": 0.0}, "init_scale"), ({"scale_factor": 1.0}, "scale_factor"),
    ({"scale_window": 0}, "scale_window"), ({"min_scale": -1.0}, "min_scale"), ({"delayed_shift": 0}, "delayed_shift")])
def test_refuses_arguments_that_make_no_sense(arguments, word):
    with pytest.raises(Error, match=word) as caught:
        _core.LossScaler(**arguments)
    assert caught.value.kind == "invalid_argument"


def test_refuses_a_state_that_no_scaler_has():
    for state in ((float("nan"), 0, 1), (0.0, 0, 1), (1.0, -1, 1), (1.0, 0, 0)):
        with pytest.raises(Error) as caught:
            _core.LossScaler().restore(*state)
        assert caught.value.kind == "corrupt"
